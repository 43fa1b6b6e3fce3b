"""Kernels that were compiled together: what is said of them, and what becomes of one that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.core.outcome import Status
from pytest_gemm.record.reader import read
from pytest_gemm.report import html, review

LINES = [f"mm:f32:nn:{m}x16x16" for m in (3, 4, 5, 6)]  # two batches of two
# `HOW` the second one goes wrong in a batch, and alone; the file `built` has a line for each compile.
CONFTEST = """
    import os
    import time
    from pathlib import Path
    from types import SimpleNamespace
    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.numerics.contract import Contract

    class Mine:
        name, devices, others = "mine", ("cpu",), {}
        availability, supports = lambda *_: Availability(), lambda *_: None

        def compile_together(self, jobs):
            lines = [problem.line for problem, *_ in jobs]
            self.others.update(dict.fromkeys(lines, len(lines) - 1))

        def prepare(self, problem, operands, request):
            others = 0 if request.alone else self.others.get(problem.line, 0)
            how = HOW[not others] if problem.shape.m == 4 else ""
            with Path("built").open("a") as file:
                print(problem.line, others, file=file)
            if how == "crashed":
                os._exit(3)
            hang = lambda: time.sleep(60 * (how == "timed-out"))
            run = lambda given: hang() or given.a @ given.b + (how == "incorrect")
            proof = lambda: Proof(executed=("kernel",), provable=False, compiled_with=others)
            return SimpleNamespace(contract=Contract("f32"), run=run, proof=proof)

    def pytest_gemm_register_backends(registry):
        registry.add(Mine())
"""


@pytest.fixture
def judged(pytester: pytest.Pytester) -> Any:
    """Runs four problems; what the record says of the second one, all of it, and the screen."""

    def run(how: tuple[str, str], *options: str) -> Any:
        pytester.makeconftest(CONFTEST.replace("HOW", str(how)))
        marker = f"@pytest.mark.gemm(problems={LINES}, distributions=['int-2'])"
        pytester.makepyfile(f"import pytest\n{marker}\ndef test_it(gemm_case, gemm_check): gemm_check(gemm_case)")
        screen = pytester.runpytest_subprocess("--gemm-backends=mine", "--gemm-output=out", *options).stdout.str()
        record = read(Path("out/run.jsonl"))
        return next(one for one in record.outcomes if one.problem == LINES[1]), record, screen

    return run


def test_an_outcome_says_what_its_kernel_was_compiled_with_and_a_setting_turns_that_off(judged: Any) -> None:
    outcome, record, screen = judged(("", ""))
    assert (outcome.status, outcome.compiled_with) == (Status.PASSED, 1)
    assert Path("built").read_text().splitlines() == [f"{line} 1" for line in LINES], "once, where all is well"
    for text in (screen, review.markdown([record], "a run")):
        assert "4 cases of kernels that were compiled with others" in text
    assert judged(("", ""), "--gemm-set=run.together=no")[0].compiled_with == 0


@pytest.mark.parametrize("how", ["incorrect", "crashed", "timed-out"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_failure_of_a_batch_is_judged_again_alone(judged: Any, how: str, alone: bool) -> None:
    outcome, record, screen = judged((how, how * alone), "--gemm-timeout=5")
    assert Path("built").read_text().splitlines()[1:3] == [f"{LINES[1]} 1", f"{LINES[1]} 0"]
    if alone:
        assert (outcome.status, outcome.compiled_with) == (Status(how), 0)
        assert "compiled with 1 other kernel it failed; compiled alone, as a user has it, it fails, too" in screen
    else:
        assert (outcome.status, outcome.code) == (Status.MISTRUSTED, "compiled-together")
        for text in (screen, html.page([record], "a run")):
            assert f"compiled with 1 other kernel it is {how}: " in text
            assert "compiled alone, as a user has it, it does not fail" in text
