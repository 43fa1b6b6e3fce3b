"""Large results: judged by sample they get the verdict that the whole reference gives, for less."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import CONTROLS, MUTANTS, Entry, Planted, exact, store
from oracle import judged
from studies import mutant_study

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import findings
from pytest_gemm.judging import lines as lines_module
from pytest_gemm.judging import sampled
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics import freivalds
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.interval import interval
from pytest_gemm.numerics.reference import reference
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build, gathered

EAGER = Contract(epilogue="eager")
SHAPE = "300x260x1000"
# Of few elements more than the everyday distribution: that all of them are seen depends on the output's type.
DISTRIBUTIONS = {"f32": ("int-2", "rand"), "bf16": ("int-1", "int-2", "rand"), "f16": ("int-1", "int-2", "rand")}


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that a test can afford take the way of large ones."""
    monkeypatch.setattr("pytest_gemm.operands.integers.LARGE", 0)


pytestmark = pytest.mark.usefixtures("one_thread")


Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of(matmul: Matmul, line: str, distributions: tuple[str, ...], mode: str = "auto") -> list[Outcome]:
    names = frozenset({"f64", "f32", "bf16", "f16", "i8", "i32"})
    return outcomes_of(CallableBackend("some", matmul, names, True, None, True), line, distributions, mode)


def outcomes_of(backend: Backend, line: str, distributions: tuple[str, ...] = (), mode: str = "auto") -> list[Outcome]:
    return judged(backend, line, *distributions, judge=Judge(lambda *_: "not here", reference=mode), seed=3)


def in_turn(entries: Mapping[str, Entry]) -> list[tuple[str, str]]:
    """One line of each, whose dtypes take turns."""
    found = []
    for turn, (name, entry) in enumerate(entries.items()):
        lines = [line for _, _, line in entry.problems((1000,))]
        found.append((name, lines[turn % len(lines)]))
    return found


def spoiling(spoil: Callable[[torch.Tensor], None]) -> Matmul:
    """A right product with something done to it."""

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = store(exact(a, b), a)
        spoil(c)
        return c

    return matmul


@pytest.mark.parametrize(("mode", "shape", "by_sample"), [
    ("quick", "1500x1450x2", True), ("quick", "1400x1450x2", False), ("auto", "1500x1450x2", False),
])  # fmt: skip
def test_quick_judges_a_long_result_by_sample_and_misses_no_tile(
    mode: str, shape: str, by_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gemm.operands.integers.LARGE", 1 << 33)
    for spoil, status in ((lambda c: c, Status.PASSED), (lambda c: c[640:704, 832:896].neg_(), Status.INCORRECT)):
        (found,) = of(spoiling(spoil), f"mm:f32:nn:{shape}", ("rand",), mode)
        assert found.status is status
        assert ("by sample" in found.sampled) is by_sample


# -- the arithmetic --------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 7, 4096, 5000])),
    bits=st.sampled_from([1, 8, 16, 24, 31]),
    unit=st.sampled_from([1.0, 2.0, 2.0**-7, 2.0**30]),
    turned=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_modulo_the_prime_are_exact(
    shape: tuple[int, int, int], bits: int, unit: float, turned: bool, shared: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**bits), 2**bits + 1, shape, generator=generator)
    count, _, terms = shape
    some = torch.randint(freivalds.PRIME - 5, freivalds.PRIME, (1 if shared else count, terms), generator=generator)
    x = integers.to(torch.float64) * unit
    found = freivalds.times(x.mT.contiguous().mT if turned else x, unit, bits, some[0] if shared else some)
    assert found is not None
    vectors = some.expand(count, -1).tolist()
    expected = [
        [sum(a * b for a, b in zip(row, v, strict=True)) % freivalds.PRIME for row in rows]
        for rows, v in zip(integers.tolist(), vectors, strict=True)
    ]
    assert found.tolist() == expected


def test_elements_off_the_grid_are_faults_of_their_rows_only() -> None:
    x = torch.ones(2, 3, 300)
    x[0, 1, 7], x[0, 2, 0], x[1, 0, 299], x[1, 1, 5] = 0.5, float("nan"), float("inf"), 2.0**20
    faults = torch.zeros(2, 3, dtype=torch.bool)
    found = freivalds.times(x, 1.0, 16, torch.ones(300, dtype=torch.int64), faults)
    assert faults.tolist() == [[False, True, True], [True, True, False]]
    assert found is not None
    assert (int(found[0, 0]), int(found[1, 2])) == (300, 300)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 300, 4097, 65536])
def test_the_lines_are_spread_over_all_of_them_and_hold_both_ends(size: int) -> None:
    lines = lines_module.lines_of(size, "some").tolist()
    assert lines == sorted(set(lines))
    assert lines[0] == 0
    assert lines[-1] == size - 1
    gaps = [b - a for a, b in itertools.pairwise(lines)]
    # Two thirds of an M-th of 64, one in each stretch: neighbours are less than two stretches apart.
    assert not gaps or max(gaps) < max(2 * 64 * 1.5, 2 * size / 10)
    assert size < 4096 or {127, 128} <= set(lines)


# -- right results ---------------------------------------------------------------------------------------

ALL = [
    "mm:f32:nn:300x260x701", "mm:f64:tt:200x260x300", "bmm:bf16:nt:3x100x130x64",
    "linear:f16:nt:2x100x130x256:bias+relu", "int_mm:i8-i8-i32:nt:300x260x512", "mixed_mm:bf16-i8-bf16:nt:300x260x512",
    "addmm:f32:nn:300x260x200:bias-m1+add", "mm:f32-f32-bf16:nt:200x260x300:bias",
    "mm:f32:nt:256x256x200:bias+sub:b.alias_t", "linear:bf16:nt:300x260x512:bias+gelu+mul:program.multi_output",
]  # fmt: skip


@pytest.mark.parametrize("line", ALL)
def test_a_correct_product_passes_with_every_distribution(line: str) -> None:
    problem = Problem.parse(line)
    distributions = tuple(f for f in distributions_for(problem) if f not in {"rand-large", "rand-small"})

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.int8:
            return torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int32)
        return store(exact(a, b), a)

    outcomes = of(product, line, distributions)
    assert [(o.distribution, o.status) for o in outcomes] == [(f, Status.PASSED) for f in distributions]
    assert all(o.sampled.startswith("judged by sample: ") for o in outcomes)
    # The whole reference says the same, and of the same tier.
    full = of(product, line, distributions[:2], "full")
    assert [(o.status, o.tier, o.sampled) for o in full] == [(o.status, o.tier, "") for o in outcomes[:2]]


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("line", ["mm:{}:nn:200x136x513", "addmm:{}:nt:200x136x100:bias-1n+sub"])
@pytest.mark.parametrize("contract", [EAGER, Contract(epilogue="eager", slices=8, partials="out")])
def test_rounding_raises_no_suspicion(dtype: str, line: str, contract: Contract) -> None:
    problem = Problem.parse(line.format(dtype))
    for distribution in distributions_for(problem):
        made = tensors.make(problem, distribution, 1)
        if distribution == "rand":
            made.b[0] = 0.0  # the smallest row of B bounds nothing
        c = build(problem)(**args(problem, made))
        suspects, how = sampled.Sample(made)._suspects(problem, c, contract, "exact" if made.quantum else "hard")
        assert (suspects is None) == (distribution == "specials"), how
        assert suspects is None or not suspects.any(), (distribution, how)


FORMS = [
    "da8w4:f32-i4-f32:nt:300x260x256:bias+relu:quant.group-32", "linears:bf16:nt:3x300x260x512:bias",
    "linears:bf16:nt:2x300x260x512:gated-silu", "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:300x260x520:bias:quant.blocks",
    "scaled_mm:f8e4m3fn-f8e4m3fn-f32:nt:300x260x520:quant.blocks-128_1",
    "woq:bf16-i4-bf16:nt:300x260x500:quant.group-32+zeros",
    "woq:f32-i8-f32:nt:300x260x512:bias:quant.group-32+inside-q8_0",
]  # fmt: skip


@pytest.mark.parametrize("line", FORMS)
@pytest.mark.parametrize("distribution", ["int-2", "rand"])
def test_lines_of_quantised_and_several_products_may_be_what_those_of_the_whole_may_be(
    line: str, distribution: str
) -> None:
    problem = Problem.parse(line)
    assert sampled.applies(problem, "sampled")
    given = tensors.make(problem, distribution, 1)
    whole = interval(problem, given, reference(problem, given), EAGER)
    for lines in lines_module.chosen(given, "some"):
        cut = lines.interval(problem, EAGER)
        assert cut.tier == whole.tier
        torch.testing.assert_close(cut.value, lines.of(whole.value), rtol=1e-12, atol=1e-12)
        # Of fewer elements fewer lie far out: a statistical bound is narrower.
        assert bool((cut.lo >= lines.of(whole.lo) - 1e-12).all() and (cut.hi <= lines.of(whole.hi) + 1e-12).all())
    right = whole.expected.to(torch_dtype(problem.result_dtype))  # no CPU multiplies by scales of blocks
    if problem.scale_blocks is None:
        made = build(problem)(**args(problem, given))
        (right,) = gathered(problem, made if isinstance(made, tuple) else (made,))
    assert sampled.Sample(given).judge(problem, right, EAGER).comparison.mismatch is None
    wrong = right.clone()
    wrong[..., 299, :] = 2.0 * wrong[..., 299, :] + 1.0
    mismatch = sampled.Sample(given).judge(problem, wrong, EAGER).comparison.mismatch
    assert mismatch is not None
    assert mismatch.index[-2] == 299


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), in_turn(CONTROLS))
def test_a_correct_product_is_not_accused(name: str, line: str) -> None:
    outcomes = outcomes_of(Planted(name, CONTROLS[name]), line)
    assert {o.status for o in outcomes} == {Status.PASSED}, outcomes


# -- wrong results ---------------------------------------------------------------------------------------

# One of each kind: the loop over K, the precision of its sums, the store, tiles and single elements.
CAUGHT = (
    "k-tail-dropped", "k-doubled", "split-k-slice-dropped", "tf32-rounded", "f16-accumulation", "truncating-store",
    "bf16-detour", "tile-swap", "last-tile-zero", "tail-unwritten", "lane-shifted", "last-row-repeats",
)  # fmt: skip


@pytest.mark.usefixtures("unexplained")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), in_turn({name: MUTANTS[name] for name in CAUGHT}))
def test_a_mutant_is_caught(name: str, line: str) -> None:
    assert mutant_study.caught(Judge(lambda *_: "not here"), Planted(name, MUTANTS[name]), line, seed=3)


@pytest.mark.parametrize(
    "line", ["mm:f32:nn:300x260x700", "linear:bf16:nt:3x100x260x700:bias", "bmm:f16:nn:3x100x260x64"]
)
def test_one_wrong_element_among_all_is_found_and_named(line: str) -> None:
    problem = Problem.parse(line)
    at = tuple(size - 61 for size in problem.result_shape[-2:])
    at = (1, *at) if len(problem.result_shape) == 3 else at

    def one(c: torch.Tensor) -> None:
        # linear reaches a plain function as one matrix
        c.view(problem.result_shape)[at] += 1.0

    (outcome, *_) = of(spoiling(one), line, ("int-1",))
    assert outcome.status is Status.INCORRECT
    total = problem.result_shape[0] * 100 * 260 if len(at) == 3 else 300 * 260
    assert f"1 of {total} elements differ" in str(outcome.reason), outcome
    assert f"worst 1 at {at}" in outcome.details
    assert f"row {at[-2]}, column {at[-1]}" in outcome.details
    assert findings.text(findings.Finding([outcome]), "t").count("Freivalds") == 1


@pytest.mark.parametrize("epilogue", ["", ":relu"])
def test_a_wrong_tile_is_located(epilogue: str) -> None:
    def tile(c: torch.Tensor) -> None:
        c[128:192, 64:128] += 40.0

    (outcome, *_) = of(spoiling(tile), f"mm:f32:nn:{SHAPE}{epilogue}", ("int-1",))
    assert "the 64x64 tile at row 128, column 64" in outcome.details
    assert ("unseen: relu is not linear" in outcome.sampled) == bool(epilogue)


def test_bad_batches_and_tails_are_located() -> None:
    def tail(c: torch.Tensor) -> None:
        c[1, 96:] = 0.0

    (outcome, *_) = of(spoiling(tail), "bmm:f32:nn:3x100x260x64", ("rand",))
    assert "only batch 1 of 3 is bad; there every bad element has row >= 96: an M-tail" in outcome.details


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_an_element_of_random_data_that_no_line_meets_is_found_by_a_projection(dtype: str) -> None:
    problem = Problem.parse(f"mm:{dtype}:nn:{SHAPE}")
    made = tensors.make(problem, "rand", 3)
    c = store(exact(made.a, made.b), made.a)
    rows, columns = (lines_module.lines_of(n, f"{problem.line} rand 3 {d}") for n, d in ((300, -2), (260, -1)))
    unseen = c.clone()
    unseen[rows] = 0.0
    unseen[:, columns] = 0.0
    at = divmod(int(unseen.abs().argmax()), 260)
    c[at] = 0.0
    mismatch = sampled.Sample(made).judge(problem, c, EAGER).comparison.mismatch
    assert mismatch is not None
    assert (mismatch.index, mismatch.actual) == (at, 0.0)
    assert mismatch.summary() == "1 of 260 elements of 1 row that was judged in full outside the bound"


def test_of_exact_data_every_bad_row_is_named_though_few_are_judged() -> None:
    def column(c: torch.Tensor) -> None:
        c[100:, 37] += 1.0

    (outcome, *_) = of(spoiling(column), f"mm:f32:nn:{SHAPE}", ("int-1",))
    assert "every bad element is in column 37, rows 100 to 299" in outcome.details


def test_what_is_missing_from_a_single_row_is_said() -> None:
    problem = Problem.parse(f"mm:f32:nn:{SHAPE}")
    made = tensors.make(problem, "rand", 3)
    c = exact(made.a, made.b)
    c[77] = exact(made.a[77:78, :992], made.b[:992])[0]
    mismatch = sampled.Sample(made).judge(problem, c, EAGER).comparison.mismatch
    assert mismatch is not None
    assert "row 77" in mismatch.pattern
    tail = "the products with k in [992, 1000) of K = 1000 are missing: the K-tail"
    assert mismatch.cause == f"{tail}, in these elements alone"


def test_what_cannot_be_compared_is_said_as_ever() -> None:
    (outcome, *_) = of(lambda a, b: store(exact(a, b), a)[:-1], f"mm:f32:nn:{SHAPE}", ("rand",))
    assert outcome.code == "wrong-shape"


@pytest.mark.parametrize(("line", "mode", "large", "expected"), [
    ("mm:f32:nn:2048x2048x2048", "auto", 2**33, False), ("mm:f32:nn:2048x2048x2049", "auto", 2**33, True),
    ("bmm:f32:nn:9x1024x1024x1024", "auto", 2**33, True), ("mm:f32:nn:2048x2048x2049", "full", 2**33, False),
    ("mm:f32:nn:9530399x4x4", "auto", 2**33, True), ("mm:f32:nn:8x14336x4096", "auto", 2**33, False),
    ("mm:f32:nn:2x4200008x64", "auto", 2**33, True), ("mm:f32:nn:64x64x64", "sampled", 2**33, True),
    ("mm:f32:nn:64x0x64", "sampled", 2**33, False), ("grouped_mm:bf16:nt:4x2048x2048x2048", "auto", 2**33, True),
    ("grouped_mm_k:bf16:tn:4x2048x2048x2048", "auto", 2**33, False),
    ("scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:128x128x128:quant.mx", "sampled", 2**33, False),
    ("scaled_mm:f8e4m3fn:nt:128x128x128:quant.tensorwise+result-4", "sampled", 2**33, False),
])  # fmt: skip
def test_only_large_problems_are_judged_by_sample(
    monkeypatch: pytest.MonkeyPatch, line: str, mode: str, large: int, expected: bool
) -> None:
    monkeypatch.setattr("pytest_gemm.operands.integers.LARGE", large)
    assert sampled.applies(Problem.parse(line), mode) is expected
