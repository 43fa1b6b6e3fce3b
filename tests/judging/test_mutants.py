"""The harness is tested by mutants: each planted bug is caught, and no correct backend is accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mutants
import pytest
import torch
from mutants import CONTROLS, KS, MUTANTS, Control, Mutant, Planted, product, right, split_k_slice_dropped, whole
from studies import mutant_study

from pytest_gemm.conformance import matrix
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import DISTRIBUTIONS
from pytest_gemm.problem.problem import Problem


def small(line: str) -> bool:
    """Whether a problem's matrices are made and judged in a second."""
    s = Problem.parse(line).shape
    return s.m * s.k + s.k * s.n + s.m * s.n <= 1 << 23


# Where bugs begin at a size: what is judged here, and what is large.
SIZES = (mutants.TALL, mutants.WIDE, mutants.LONG, mutants.NARROW, mutants.LONG_INT8, mutants.MANY, mutants.DEEP)
LARGEST = (mutants.TALLEST, mutants.LONGER_INT8, mutants.LONGEST_INT8)
SIZED = {line for lines in SIZES for line in lines.values()}
# Every mutant once, on the first of its lines that is quick to judge, or one at whose size its bug begins; as a study
# at the smallest K in every dtype, with the plain products of f32 and int8 at the longer K too.  All of it is
# studies/mutant_study.py's, with a page in docs/results.
FIRST: dict[str, str] = {}
CASES: dict[str, list[str]] = {}
for _name, _mutant in MUTANTS.items():
    _lines = [
        _line
        for _dtype, _k, _line in _mutant.problems()
        if _k == KS[0]
        or ("{k}" not in _mutant.lines[_dtype] and small(_line))
        or _line.startswith(("mm:f32:nn:20", "int_mm:i8-i8-i32:nn"))
    ]
    for _line in _lines:
        CASES.setdefault(_line, []).append(_name)
        if _name not in FIRST or (small(_line) and _line in SIZED):
            FIRST[_name] = _line
# One on each line of such a size by sample: which row, column, matrix or part of K is wrong decides whether it shows.
BEGINNING = {line: name for name, line in FIRST.items() if line in SIZED}
ONCE: dict[str, list[str]] = {}
for _name, _line in FIRST.items():
    if BEGINNING.get(_line) != _name:
        ONCE.setdefault(_line, []).append(_name)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def judge() -> Judge:
    return mutant_study.judge()


def assert_named(catch: mutant_study.Catch, name: str) -> None:
    reason = catch.outcome.reason
    assert catch.tier, name
    assert reason is not None, name
    assert MUTANTS[name].code in {"", reason.code}, (name, reason)
    assert catch.tier != "exception" or MUTANTS[name].code, (name, reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "names"),
    [
        *(pytest.param(line, names, id=f"{line}-once") for line, names in ONCE.items()),
        *(pytest.param(line, names, id=line, marks=pytest.mark.study) for line, names in CASES.items()),
    ],
)
def test_every_mutant_is_caught_by_a_named_tier(judge: Judge, line: str, names: list[str]) -> None:
    if any(line not in MUTANTS[name].lines.values() for name in names):
        mutant_study.prepare(judge, line)
    planted = {name: Planted(name, MUTANTS[name]) for name in names}
    own = {name for name in names if line in MUTANTS[name].lines.values()}  # not after the reference has been made
    alike = [name for name in names if name not in own and not MUTANTS[name].code]  # they compute, and do nothing else
    (found,) = mutant_study.apart([lambda: [mutant_study.caught(judge, planted[name], line) for name in alike]])
    caught = dict(zip(alike, found, strict=True))
    for name in planted.keys() - caught:
        caught[name] = mutant_study.caught_apart(None if name in own else judge, planted[name], line)
    assert not {name: catch for name, catch in caught.items() if not isinstance(catch, mutant_study.Catch)}
    for name, catch in caught.items():
        assert_named(catch, name)


@pytest.mark.usefixtures("unexplained")
@pytest.mark.slow
@pytest.mark.parametrize(("line", "name"), BEGINNING.items())
def test_a_bug_that_begins_at_a_size_is_caught_by_sample(line: str, name: str) -> None:
    catch = mutant_study.caught(Judge(reference="sampled"), Planted(name, MUTANTS[name]), line)
    assert catch is not None
    assert_named(catch, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_a_correct_backend_passes(judge: Judge, name: str) -> None:
    backend = Planted(name, CONTROLS[name])
    for dtype, k, line in CONTROLS[name].problems():
        # The tensor core's model takes its time.
        if k == KS[0] or "{k}" not in CONTROLS[name].lines[dtype] or (dtype == "f32" and "tensor" not in name):
            found = list(mutant_study.outcomes(judge, backend, line))
            assert {o.status for o in found} == {Status.PASSED}, found
            assert len(found) >= (5 if "inside" in line else 6)


def test_no_mutant_is_only_excused() -> None:
    # A bug that shows nowhere would be no mutant.
    assert not [name for name, mutant in MUTANTS.items() if not list(mutant.problems())]


def test_sizes_at_which_a_bug_begins_are_problems_of_the_matrix() -> None:
    sizes = SIZED | {line for lines in LARGEST for line in lines.values()}
    assert sizes <= set(map(str, matrix.products("full")))
    assert all(any(line in mutant.lines.values() for mutant in MUTANTS.values()) for line in sizes)


# -- what a mutant does to the process -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [("exits", "exit status 0"), ("crashes", "SIGSEGV"), ("aborts", "SIGABRT")])
def test_a_process_that_dies_is_a_catch(judge: Judge, name: str, how: str) -> None:
    catch = mutant_study.caught_apart(judge, Planted(name, MUTANTS[name]), "mm:f32:nn:20x40x256")
    assert isinstance(catch, mutant_study.Catch)
    assert (catch.tier, catch.outcome.status) == ("dead process", Status.CRASHED)
    assert how in str(catch.outcome.reason)


def test_a_job_may_have_jobs_and_an_exception_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant_study, "_LIMIT", 60.0)

    def fails() -> None:
        raise KeyError("planted")

    ended = mutant_study.Ended("KeyError escaped", has_raised=True)
    assert mutant_study.apart([lambda: mutant_study.apart([lambda: 1, fails], 2), fails], 2) == [[1, ended], ended]


@pytest.mark.parametrize("late", [True, False])
def test_atomics_excuse_other_bits_and_no_wrong_ones(judge: Judge, late: bool) -> None:
    calls: list[int] = []

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        again = len(calls) > len(DISTRIBUTIONS)  # the run after all of them
        order = torch.randperm(a.shape[-1], generator=mutants.DICE)
        return split_k_slice_dropped(a, b) if again and late else right(a[..., order], b[order])

    backend = Planted("atomics", Control("", product(run), contract=Contract(deterministic=False)))
    catch = mutant_study.caught(judge, backend, "mm:f32:nn:20x40x256")
    if not late:
        assert catch is None
        return
    assert catch is not None
    assert "the second time" in str(catch.outcome.reason)


@pytest.mark.parametrize(
    ("second", "words"),
    [(lambda _: None, "a NoneType, not a tensor"), (lambda c: c[:1], "it is of another type or shape")],
    ids=["none", "one-row"],
)
def test_a_second_result_of_another_kind_is_no_exception_of_ours(
    judge: Judge, second: Callable[[torch.Tensor], torch.Tensor | None], words: str
) -> None:
    calls: list[int] = []

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        calls.append(1)
        return right(a, b) if len(calls) <= len(DISTRIBUTIONS) else second(right(a, b))

    catch = mutant_study.caught(judge, Planted("forgetful", Mutant("", product(run))), "mm:f32:nn:20x40x256")
    assert catch is not None
    assert words in str(catch.outcome.reason)


def test_a_result_of_one_element_may_have_any_stride(judge: Judge) -> None:
    backend = Planted("strided", Control("", whole(lambda t, _: right(t["a"], t["b"]).as_strided((1, 1), (0, 0)))))
    assert not mutant_study.caught(judge, backend, "mm:bf16:nn:1x1x9")


# -- what is said about a catch ------------------------------------------------------------------------

SHORT = "mm:f32:nn:20x40x250"
BIAS = "linear:f32:nt:20x40x250:bias"
ROWWISE = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:20x40x250:quant.rowwise"
SQUARE = ROWWISE.replace("20x40", "40x40")
GROUPED = "grouped_mm:bf16:nt:4x20x40x248"


@pytest.mark.parametrize(("name", "line", "words"), [
    ("k-tail-dropped", SHORT, "the products with k in [240, 250) of K = 250 are missing"),
    ("k-off-by-one", SHORT, "the products with k = 249 of K = 250 are missing"),
    ("k-doubled", SHORT, "k = 125 of K = 250"), ("split-k-slice-dropped", "mm:f32:nn:20x40x256", "slice 3 of 4 of K"),
    ("tile-swap", SHORT, "the 16x16 tile at (0, 0) holds the answer of the tile at (0, 16)"),
    ("tf32-truncated", SHORT, "A and B were truncated to TF32"), ("bf16-detour", SHORT, "a detour through bf16"),
    ("cached-result", SHORT, "distribution int-2, seed 0"),
    ("tail-unwritten", SHORT, "every bad element has column >= 32"),
    ("padded-stride-ignored", f"{SHORT}:a.padded", "row >= 1"),
    ("bias-missing-on-last-tile", BIAS, "every bad element has column >= 32"),
    ("bias-missing-on-last-tile", BIAS, "the bias is missing"),
    ("bias-shifted", BIAS, "the bias is shifted: column j has that of column j - 1"),
    ("reciprocal-scale", ROWWISE, "the reciprocal of the scale of B was applied"),
    ("scale-of-a-forgotten", ROWWISE, "the scale of A was not applied"),
    ("scales-exchanged", SQUARE, "the scales of A's rows and B's columns are exchanged"),
    ("scale-transposed", SQUARE, "the scales of A run along the columns of the result"),
    ("group-edge-off-by-one", GROUPED, "every bad element is in the last row of its group"),
    ("group-edge-off-by-one", GROUPED, "these rows were multiplied by the B of the group after"),
    ("group-stride-zero", GROUPED, "these rows were multiplied by the B of group 0"),
])  # fmt: skip
def test_a_mismatch_is_located(judge: Judge, name: str, line: str, words: str) -> None:
    texts = [o.details for o in mutant_study.outcomes(judge, Planted(name, MUTANTS[name]), line)]
    assert any(words in text for text in texts), "\n".join(texts)


# -- the study ------------------------------------------------------------------------------------------


def test_a_flood_of_correct_products_accuses_nobody(tmp_path: Path) -> None:
    found = mutant_study.flooded(0, 30, journal=tmp_path)
    assert not found.alarms
    assert found.ends["passed"] >= 20
