"""Kernels that were compiled together: what is said of them, and what becomes of one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.record.reader import read
from pytest_gemm.report import html, review, terminal

LINES = [f"mm:f32:nn:{m}x16x16" for m in (3, 4, 5, 6)]  # two batches of two
# Multiplies wrongly, ends its process or never ends as the case may be; `built` has a line for each compile.
CONFTEST = """
    import os
    import time
    from pathlib import Path
    from pytest_gemm.api.proof import Proof
    from pytest_gemm.numerics.contract import Contract

    class Prepared:
        contract = Contract("f32")

        def __init__(self, how, others):
            self.how, self.others = how, others

        def run(self, given):
            if self.how == "ends":
                os._exit(3)
            if self.how == "hangs":
                time.sleep(60)
            return given.a @ given.b + (self.how == "wrong")

        def proof(self):
            return Proof(executed=("kernel",), provable=False, compiled_with=self.others)

    class Mine:
        name = "mine"
        devices = ("cpu",)
        waiting = {}

        def availability(self, device):
            from pytest_gemm.api.protocols import Availability
            return Availability()

        def supports(self, problem, request):
            return None

        def compile_together(self, jobs):
            lines = [problem.line for problem, _, _ in jobs]
            self.waiting.update(dict.fromkeys(lines, len(lines) - 1))

        def prepare(self, problem, operands, request):
            others = 0 if request.alone else self.waiting.get(problem.line, 0)
            batched, alone, phase = HOW if problem.shape.m == 4 else ("", "", "run")
            how = batched if others else alone
            with Path("built").open("a") as file:
                print(problem.line, others, file=file)
            prepared = Prepared(how, others)
            if phase == "prepare":
                prepared.run(operands)
            return prepared

    def pytest_gemm_register_backends(registry):
        registry.add(Mine())
"""


@pytest.fixture
def records(pytester: pytest.Pytester) -> Any:
    """What a run of these problems says of the second one, and of how often each was compiled."""

    def judged(how: tuple[str, str, str], *options: str) -> tuple[dict[str, Any], list[str], str]:
        pytester.makeconftest(CONFTEST.replace("HOW", str(how)))
        pytester.makepyfile(f"""
            import pytest

            @pytest.mark.gemm(problems={LINES}, distributions=["int-2"])
            def test_it(gemm_case, gemm_check):
                gemm_check(gemm_case)
        """)
        shown = pytester.runpytest_subprocess("--gemm-backends=mine", "--gemm-output=out", *options).stdout.str()
        lines = map(json.loads, Path("out/run.jsonl").read_text().splitlines())
        outcomes = {line["problem"]: line for line in lines if "problem" in line}
        return outcomes[LINES[1]], Path("built").read_text().splitlines(), shown

    return judged


def test_an_outcome_says_what_its_kernel_was_compiled_with_and_a_setting_turns_that_off(records: Any) -> None:
    outcome, built, shown = records(("", "", "run"))
    assert (outcome["status"], outcome["compiled_with"]) == ("passed", 1)
    assert built == [f"{line} 1" for line in LINES], "what passes is compiled once"
    run = read(Path("out/run.jsonl"))
    said = "4 cases of kernels that were compiled with others"
    assert said in shown
    assert said in "\n".join(terminal.summary(run))
    assert said in review.markdown([run], "a run")
    assert records(("", "", "run"), "--gemm-set=run.together=no")[0]["compiled_with"] == 0


@pytest.mark.parametrize(("how", "phase"), [("wrong", "run"), ("ends", "prepare"), ("hangs", "run")])
@pytest.mark.parametrize("alone", [True, False])
def test_a_failure_of_a_batch_is_judged_again_alone(records: Any, how: str, phase: str, alone: bool) -> None:
    outcome, built, shown = records((how, how * alone, phase), "--gemm-timeout=2,2")
    status = {"wrong": "incorrect", "ends": "crashed", "hangs": "timed-out"}[how]
    assert built[1:3] == [f"{LINES[1]} 1", f"{LINES[1]} 0"]
    if alone:
        assert (outcome["status"], outcome["compiled_with"]) == (status, 0)
        assert "compiled with 1 other kernel it failed; compiled alone, as a user has it, it fails, too" in shown
    else:
        assert (outcome["status"], outcome["reason"]["code"]) == ("mistrusted", "compiled-together")
        assert f"compiled with 1 other kernel it is {status}: " in shown
        assert "compiled alone, as a user has it, it does not fail" in shown
        assert "compiled with 1 other kernel" in html.page([read(Path("out/run.jsonl"))], "a run")
