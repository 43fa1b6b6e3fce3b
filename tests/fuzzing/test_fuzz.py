"""Fuzzing: what is drawn can be judged, what is planted is found and shrunk, and what is known is no find."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings

from pytest_gemm.api.registry import Registry
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.fuzzing import strategies
from pytest_gemm.fuzzing.check import Trials
from pytest_gemm.fuzzing.fuzzer import Defect, Findings, Fuzzer, failure, summary
from pytest_gemm.fuzzing.strategies import Trial
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.plugin import selection
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem

SHIPPED = Path(__file__).parents[2] / "conformance" / "known_failures.toml"


pytestmark = pytest.mark.usefixtures("one_thread")


# -- what is drawn -----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=150, database=None)
@given(strategies.trials())
def test_whatever_is_drawn_has_a_line_and_operands(trial: Trial) -> None:
    assert trial.distributions
    for problem in trial.problems:
        assert Problem.parse(problem.line) == problem
        assert set(trial.distributions) <= set(distributions_for(problem))
    first = trial.problems[0]
    assert len(trial.problems) == 1 or first.dynamic
    sizes = {size: getattr(first.shape, size) for size in first.dynamic}
    assert all(problem.resized(sizes) == first for problem in trial.problems)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_every_op_can_be_drawn(op: str) -> None:
    @settings(max_examples=20, derandomize=True)
    @given(strategies.problems(ops=[op]))
    def drawn(problem: Problem) -> None:
        assert problem.op.name == op
        assert Problem.parse(problem.line) == problem

    drawn()


@settings(max_examples=60, database=None)
@given(strategies.problems(CppBackend()))
def test_with_a_backend_only_what_it_claims_is_drawn(problem: Problem) -> None:
    assert CppBackend().supports(problem) is None


def test_every_op_that_can_be_judged_can_be_drawn() -> None:
    assert {form.op.name for form in strategies.forms()} == set(OPS)
    assert [form.op.name for form in strategies.forms(ops=["bmm"])] == ["bmm"] * 8
    assert {form.op.name for form in strategies.forms(CppBackend())} < set(OPS)


def test_a_strategy_can_be_shown() -> None:
    assert len(repr(strategies.trials(CppBackend()))) < 1000  # Hypothesis warns of long ones, and does so in every draw


def test_without_hypothesis_the_strategies_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pytest_gemm.fuzzing.strategies")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ModuleNotFoundError, match="pip install hypothesis"):
        importlib.import_module("pytest_gemm.fuzzing.strategies")


# -- what is found -----------------------------------------------------------------------------------


class Clock:
    """Every look at it is a second; after ``defects`` of them it says that the time is up.  Nothing here is timed."""

    def __init__(self, defects: int = 1) -> None:
        self._seconds = itertools.count()
        self._left = defects
        self.trials = 0

    def __call__(self) -> float:
        return next(self._seconds) + (1e9 if self._left <= 0 else 0)

    def tell(self, _: Findings, defect: Defect | None) -> None:
        self.trials += defect is None
        self._left -= defect is not None


def trials_of(ledger: Path = SHIPPED) -> Trials:
    asked = SimpleNamespace(
        ledger=Ledger.load(ledger), reference="auto", wanted_candidates="", device_of=lambda _: "cpu"
    )
    return Trials(cast("GemmConfig", asked), None)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return torch.matmul(a.to(wide), b.to(wide)).to(a.dtype)


def columns_beyond_sixteen(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = product(a, b)
    if a.shape[-1] >= 3:
        c[..., 16:] = 0
    return c


def transposed_b_of_several_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wrong = b.stride(-2) == 1 and b.stride(-1) > 1 and b.shape[-2] > 1
    return product(a, b) + int(wrong)


BACKENDS = Registry()
for name, matmul in (("right", product), ("columns", columns_beyond_sixteen), ("rows", transposed_b_of_several_rows)):
    BACKENDS.add_callable(name, matmul, dtypes=("f32", "bf16", "f16"))


def fuzz(
    clock: Clock,
    judge: Callable[[Trial], list[Outcome]] | None = None,
    name: str = "right",
    seconds: float = 5000,
    **options: Any,
) -> Findings:
    judge = judge or functools.partial(trials_of().judge, BACKENDS[name])
    return Fuzzer(BACKENDS[name], "cpu", judge, tell=clock.tell, clock=clock, **options).run(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), [("columns", "mm:f32:nn:1x17x3"), ("rows", "mm:f32:nt:1x1x2")])
def test_a_planted_bug_is_found_and_shrunk_to_its_smallest_line(name: str, line: str) -> None:
    (defect,) = fuzz(Clock(), name=name, ops=("mm", "linear")).defects
    assert defect.outcome.problem == line
    assert [problem.line for problem in defect.trial.problems] == [line]
    assert len(defect.trial.distributions) == 1
    assert defect.trial.seed == 0
    assert defect.complete
    assert defect.outcome.code == "outside-bound"


@pytest.mark.slow
def test_a_correct_backend_has_no_defect() -> None:
    found = fuzz(Clock(), seconds=12)
    assert not found.defects, summary(found)
    assert found.cases[Status.PASSED] > 25


# -- what is not found again: outcomes by rule, nothing is computed ------------------------------------


def by_rule(rule: Callable[[Problem], str]) -> Callable[[Trial], list[Outcome]]:
    """A judge of problems for which ``rule`` gives the code of what is wrong, "" for nothing."""

    def judge(trial: Trial) -> list[Outcome]:
        outcomes = []
        for problem in trial.problems:
            code = rule(problem)
            status = Status.INCORRECT if code else Status.PASSED
            reason = Reason(code, code) if code else None
            outcomes.append(Outcome(CaseId("x", problem.line), trial.distributions[0], trial.seed, status, reason))
        return outcomes

    return judge


def large(problem: Problem) -> str:
    if str(problem.dtypes) != "f32":
        return ""
    if problem.op.name == "bmm":
        return "long" if problem.shape.k > 30 else ""
    return "wide" if problem.shape.n > 40 else ""


@pytest.mark.slow
def test_two_defects_are_two_and_the_same_one_is_counted() -> None:
    clock = Clock(defects=99)
    found = fuzz(clock, by_rule(large), seconds=250, ops=("mm", "bmm"))
    # 47 is the next size that there is.
    assert {d.outcome.problem for d in found.defects} == {"mm:f32:nn:1x47x1", "bmm:f32:nn:1x1x1x31"}
    assert len(found.defects) == 2
    assert sum(defect.again for defect in found.defects) > 5
    assert found.trials == clock.trials


@pytest.mark.slow
def test_a_bug_that_takes_two_distributions_keeps_both() -> None:
    def stale(trial: Trial) -> list[Outcome]:
        return by_rule(lambda _: "stale" if {"int-2", "rand"} <= set(trial.distributions) else "")(trial)

    (defect,) = fuzz(Clock(), stale).defects
    assert set(defect.trial.distributions) == {"int-2", "rand"}
    told = failure(defect, "this").splitlines()
    assert told[-1] == "  rerun: this"
    assert "made smaller in" in told[-2]


@pytest.fixture
def own_profile() -> Iterator[None]:
    """A profile of Hypothesis as projects load it: every setting that could change a search is set."""
    before = settings.get_current_profile_name()
    settings.register_profile("own", derandomize=True, max_examples=7, deadline=1, phases=[], report_multiple_bugs=True)
    settings.load_profile("own")
    yield
    settings.load_profile(before)


@pytest.mark.slow
@pytest.mark.study
def test_the_same_seed_draws_the_same_and_another_one_does_not(request: pytest.FixtureRequest) -> None:
    def drawn(seed: int) -> list[str]:
        lines: list[str] = []

        def judge(trial: Trial) -> list[Outcome]:
            lines.append(repr(trial))
            return by_rule(large)(trial)

        fuzz(Clock(defects=99), judge, seconds=40, seed=seed)
        return lines

    first = drawn(7)
    assert first == drawn(7)
    assert len(set(first) & set(drawn(8))) < len(first) / 2
    request.getfixturevalue("own_profile")
    assert first == drawn(7)
    assert len(set(first) & set(drawn(8))) < len(first) / 2


def test_a_known_failure_is_counted_and_no_find(tmp_path: Path) -> None:
    ledger = tmp_path / "known.toml"
    ledger.write_text(
        '[[known-failure]]\nid = "wide"\nbackend = "columns"\nreason = "r"\nstatus = ["incorrect"]\n'
        '[[known-failure]]\nid = "never"\nbackend = "columns"\nreason = "r"\ncrashes = true\nwhere = { op = "mm" }\n',
        encoding="utf-8",
    )
    outcomes: list[Outcome] = []
    for line in ("linear:f32:nt:1x17x3", "mm:f32:nn:1x17x3"):
        outcomes += trials_of(ledger).judge(BACKENDS["columns"], Trial((Problem.parse(line),), ("int-2",)))
    assert [(o.status, o.known_failure) for o in outcomes] == [
        (Status.KNOWN_FAILURE, "wide"),
        (Status.KNOWN_FAILURE, "never"),
    ]
    found = fuzz(Clock(), lambda _: outcomes, seconds=6)
    assert not found.defects
    assert any("known failure wide" in line for line in summary(found))


def test_a_defect_of_the_harness_is_a_find_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the oracle")

    monkeypatch.setattr(Judge, "judge", broken)
    (outcome,) = trials_of().judge(BACKENDS["right"], Trial((Problem.parse("mm:f32:nn:1x1x1"),), ("rand",)))
    assert (outcome.status, outcome.code) == (Status.CRASHED, "harness-ZeroDivisionError")


def test_a_rerun_judges_the_distributions_that_it_names_where_they_apply() -> None:
    asked = SimpleNamespace(
        registry=BACKENDS,
        level="quick",
        seed=3,
        device_of=lambda _: "cpu",
        machine_of=lambda _: None,
        wanted_candidates="",
        distributions=("specials", "rand"),
    )
    for line, names in (("mm:f32:nn:4x4x4", ("specials", "rand")), ("mm:f32:nn:4x4x0", ("rand",))):
        case = selection.case_of(selection.Parameter(CaseId("right", line)), cast("GemmConfig", asked))
        assert case.distributions == names


# -- the option --------------------------------------------------------------------------------------

USER = """
    import ctypes

    def deadly(a, b):
        ctypes.string_at(0)

    def doubled(a, b):
        return 2 * a @ b

    def pytest_gemm_register_backends(registry):
        registry.add_callable("deadly", deadly, dtypes=("f32",))
        registry.add_callable("doubled", doubled, dtypes=("f32",))
"""


@pytest.mark.slow
def test_a_run_survives_the_kernels_that_it_finds_and_keeps_what_they_left(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(USER)
    fuzzing = ("--pyargs", "pytest_gemm.conformance", "--gemm-fuzz=1", "--gemm-ops=mm", "--gemm-threads=1")
    options = ("--gemm-backends=deadly,doubled", "--gemm-output=left")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *fuzzing, *options)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(failed=2)
    out = done.stdout.str()
    left = {path.name.split("-")[0]: path for path in (pytester.path / "left" / "failures").iterdir()}
    assert sorted(left) == ["deadly", "doubled"]
    for name, ending in (("deadly", "died in run: SIGSEGV"), ("doubled", "incorrect")):
        said = (left[name] / "report.txt").read_text()
        assert ending in said
        assert next(line for line in out.splitlines() if f"--gemm-backends={name} " in line).strip() in said
    # Of one cause, the first distribution has all files.
    assert any((pytester.path / "left" / "failures").glob("doubled-*/tensors.pt"))
    assert "on deadly: the kernel's process died in run: SIGSEGV" in out
    assert re.search(
        r"rerun: pytest --pyargs pytest_gemm.conformance.test_products::test_product --gemm-backends=deadly "
        r"--gemm-problem=mm:f32:\S+ --gemm-seed=\d+ -p no:cacheprovider --gemm-threads=1 "
        r"--gemm-distributions=[\w,-]+\n",
        out,
    )
    assert "1 defects" in out
    assert re.search(r"fuzzing deadly: 1 trials, \d+ cases, \d+ defects; (\d+ s of 0.5 s left|its time is up)", out)
