"""Verdicts, and the stories told about wrong results: each planted bug is located and named, and few others are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import oracle
import pytest
import torch

from pytest_gemm.judging import verdict as verdict_module
from pytest_gemm.numerics import interval, reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as ops
from pytest_gemm.operands.integers import digit_plan
from pytest_gemm.problem.problem import Problem

Change = Callable[[torch.Tensor, ops.Operands], torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Given:
    problem: Problem
    operands: ops.Operands
    span: interval.Interval
    result: torch.Tensor


def given(line: str, distribution: str = "rand", seed: int = 11, epilogue: str = "either") -> Given:
    made = oracle.make(line, distribution, seed)
    problem = made.problem
    accumulate = "i32" if problem.op.name == "int_mm" else "f64" if problem.dtypes.out.name == "f64" else "f32"
    contract = Contract(accumulate, epilogue)  # type: ignore[arg-type]  # the literals' values
    return Given(problem, made, oracle.interval(made, contract), oracle.computed(made))


def verdict(case: Given, result: object, **more: object) -> verdict_module.Comparison:
    return verdict_module.compare(result, case.span, case.problem, case.operands, **more)  # type: ignore[arg-type]  # others


def mismatch(found: verdict_module.Comparison) -> verdict_module.Mismatch:
    assert found.mismatch is not None
    return found.mismatch


def story(line: str, change: Change, distribution: str = "rand", **more: object) -> verdict_module.Mismatch:
    """The mismatch after a change of the right result."""
    case = given(line, distribution)
    assert verdict(case, case.result).ok
    found = verdict(case, change(case.result.clone(), case.operands), **more)
    assert found.ratio > 1
    return mismatch(found)


def at(*where: int | slice, add: float = 1.0, times: float = 1.0) -> Change:
    def change(x: torch.Tensor, _: ops.Operands) -> torch.Tensor:
        x[where] = x[where] * times + add
        return x

    return change


# -- verdicts -----------------------------------------------------------------------------------------


def test_the_expected_result_has_ratio_zero() -> None:
    case = given("mm:bf16:nn:33x65x127")
    found = verdict(case, case.span.expected.to(torch.bfloat16))
    assert found == verdict_module.Comparison(0.0, 1.0)


def test_the_ends_of_the_interval_are_accepted_with_ratio_one_and_the_next_numbers_are_not() -> None:
    case = given("mm:f32:nn:33x65x127", "rand-positive")
    for end, away in ((case.span.hi, math.inf), (case.span.lo, -math.inf)):
        edge = end.float()
        found = verdict(case, edge)
        assert (found.ok, found.ratio) == (True, 1.0)
        beyond = edge.clone()
        beyond[3, 4] = torch.nextafter(edge[3, 4], torch.tensor(away))
        found = verdict(case, beyond)
        assert (mismatch(found).index, mismatch(found).count) == ((3, 4), 1)
        assert found.ratio > 1


def test_any_difference_on_exact_data_is_infinitely_wrong() -> None:
    case = given("mm:f32:nn:33x65x127", "int-1")
    assert verdict(case, case.result).ratio == 0
    wrong = case.result.clone()
    wrong[0, 0] = torch.nextafter(wrong[0, 0], torch.tensor(math.inf))
    found = verdict(case, wrong)
    assert found.ratio == math.inf
    assert "at (0, 0), where the result is exact: got " in mismatch(found).text()


def test_the_share_of_correctly_rounded_elements() -> None:
    case = given("mm:bf16:nn:10x10x0")
    assert verdict(case, case.result).correctly_rounded == 1.0
    wrong = case.result.clone()
    wrong[:, 0] = 1
    assert verdict(case, wrong).correctly_rounded == 0.9


def test_empty_results_are_right() -> None:
    case = given("mm:f32:nn:0x5x3")
    assert verdict(case, case.result) == verdict_module.Comparison(0.0, 1.0)


@pytest.mark.parametrize(("result", "code", "words"), [
    (None, "wrong-type", "a NoneType, not a tensor"), ([[1.0]], "wrong-type", "a list"),
    (torch.zeros(4, 6).to_sparse(), "wrong-layout", "sparse_coo"),
    (torch.zeros(6, 4), "wrong-shape", r"(6, 4), expected (4, 6)"),
    (torch.zeros(4, 6, dtype=torch.float64), "wrong-dtype", "float64, expected float32"),
    (torch.zeros(4, 6, device="meta"), "wrong-device", "on meta"),
])  # fmt: skip
def test_what_is_no_result_at_all(result: object, code: str, words: str) -> None:
    found = verdict(given("mm:f32:nn:4x6x8"), result)
    assert mismatch(found).code == code
    assert words in mismatch(found).text()
    assert words in mismatch(found).summary()
    assert found.ratio == math.inf


def test_a_swallowed_nan_and_an_invented_one() -> None:
    case = given("mm:f32:nn:16x16x16", "specials")
    assert verdict(case, case.result).ok
    found = mismatch(verdict(case, torch.where(case.result.isnan(), 0.0, case.result)))
    assert found.code == "missing-nan"
    assert "swallowed" in found.cause
    assert story("mm:f32:nn:16x16x16", at(slice(0, 2), add=math.nan)).code == "nan"
    assert story("mm:f32:nn:16x16x16", at(2, add=math.inf)).code == "infinite"


def test_the_text_answers_what_where_and_how_far() -> None:
    found = story("mm:f32:nn:8x256x2664", at(slice(4, None), add=0.75))
    lines = found.text().splitlines()
    assert lines[0] == "1024 of 2048 elements outside the bound"
    assert lines[1].startswith("  worst 0.75 at (")
    assert "bound " in lines[1]
    assert (lines[2], found.name) == ("  every bad element has row >= 4: an M-tail", "M tail")


# -- where --------------------------------------------------------------------------------------------


def both(*changes: Change) -> Change:
    def change(x: torch.Tensor, o: ops.Operands) -> torch.Tensor:
        for one in changes:
            x = one(x, o)
        return x

    return change


PLACES: list[tuple[str, Change, str]] = [
    ("mm:f32:nn:40x72x64", at(3, 5), "the only bad element"),
    ("mm:f32:nn:40x72x64", at(slice(None)), "every element is bad"),
    ("mm:f32:nn:40x72x64", at(slice(32, None)), "row >= 32: an M-tail (M mod 32 = 8)"),
    ("mm:f32:nn:40x72x64", at(slice(None), slice(64, None)), "column >= 64: an N-tail (N mod 64 = 8)"),
    ("mm:f32:nn:40x72x64", at(slice(0, 4)), "row < 4: the head of M"),
    ("mm:f32:nn:40x72x64", at(7), "in row 7, all 72 columns"),
    ("mm:f32:nn:40x72x64", at(7, slice(5, 33)), "in row 7, columns 5 to 32"),
    ("mm:f32:nn:40x72x64", at(slice(None), 71), "in column 71: the last of N, all 40 rows"),
    ("mm:f32:nn:40x72x64", at(slice(8, 16)), "rows 8 to 15: the block 1 of 8"),
    ("mm:f32:nn:64x64x64", at(slice(16, 32), slice(32, 64)), "the 16x32 tile at row 16, column 32"),
    ("mm:f32:nn:40x72x64", at(slice(37, None), slice(65, None)), "the tails of M and N meet"),
    ("mm:f32:nn:40x72x64", at(slice(3, 20), slice(5, 33)), "rectangle of rows 3 to 19, columns 5 to 32"),
    ("mm:f32:nn:40x96x64", at(slice(None), slice(15, None, 16)), "period 16 in N, residue 15"),
    ("mm:f32:nn:64x32x64", at(slice(1, None, 4)), "rows of period 4 in M, residue 1"),
    ("mm:f32:nn:40x72x64", at(slice(None), slice(0, None, 2)), "period 2 in N, residue 0"),
    (
        "mm:f32:nn:8x128x64",
        both(at(slice(None), slice(0, 16)), at(slice(None), slice(48, 64))),
        "2 of 8 tiles of 8x16, at (0, 0), (0, 48)",
    ),
    ("mm:f32:nn:40x72x64", both(at(slice(32, None)), at(slice(32), slice(64, None))), "row >= 32 or column >= 64"),
    (
        "mm:f32:nn:64x128x64",
        both(at(slice(16), slice(32, 48)), at(slice(48, 64), slice(16, 32))),
        "2 of 32 tiles of 16x16, at (0, 32), (48, 16)",
    ),
    (
        "mm:f32:nn:64x128x64",
        both(at(slice(56, None)), at(2, 3)),
        "1024 of 1025 bad elements have row >= 56: an M-tail",
    ),
    ("bmm:f32:nn:4x16x16x64", at(2), "only batch 2 of 4 is bad: all of it"),
    ("bmm:f32:nn:4x16x16x64", at(slice(1, None)), "3 of 4 batches are bad (1, 2, 3): all of it"),
    (
        "bmm:f32:nn:4x16x16x64",
        both(at(1, 3), at(2, 4)),
        "2 of 4 batches are bad (1, 2); there every bad element has rows 3",
    ),
    ("bmm:f32:nn:4x16x16x64", at(3, slice(12, None)), "batch 3 of 4 is bad; there every bad element has row >= 12"),
    ("bmm:f32:nn:4x16x16x64", at(slice(None), slice(12, None)), "every bad element has row >= 12: an M-tail"),
]


@pytest.mark.parametrize(("line", "change", "words"), PLACES, ids=[w for _, _, w in PLACES])
@pytest.mark.parametrize("distribution", ["rand", "int-1"])
def test_bad_elements_are_located(line: str, change: Change, words: str, distribution: str) -> None:
    assert words in story(line, change, distribution).pattern


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 3, 8, 40, 400, 2000])
def test_scattered_elements_make_no_story(seed: int, count: int) -> None:
    def change(x: torch.Tensor, _: ops.Operands) -> torch.Tensor:
        where = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:count]
        noise = torch.randn(count, generator=torch.Generator().manual_seed(seed))
        x.view(-1)[where] += 0.1 + noise.abs() * noise.sign()
        return x

    found = story("mm:f32:nn:64x64x200", change)
    assert any(w in found.pattern for w in ("scattered", "all over")), found.pattern
    assert found.cause == ""


@pytest.mark.parametrize("seed", range(20))
def test_a_single_element_gets_no_cause(seed: int) -> None:
    # Two thousand blocks of k are enough to fit any one number.
    case = given("mm:f32:nn:16x16x1000", "rand", seed)
    assert mismatch(verdict(case, at(3, 5, add=0.0, times=1.01)(case.result.clone(), case.operands))).cause == ""


def test_one_element_that_happens_to_lack_its_bias_gets_no_cause() -> None:
    def change(x: torch.Tensor, o: ops.Operands) -> torch.Tensor:
        return at(3, 5, add=-float(bias(o)[5]))(x, o)

    assert story("linear:f32:nt:16x16x64:bias", change, "int-1").cause == ""


# -- what ---------------------------------------------------------------------------------------------


def product(o: ops.Operands, ks: slice = slice(None)) -> torch.Tensor:
    """A @ B over some k, in float64."""
    return o.a.double()[..., ks] @ o.b.double()[..., ks, :]


def f32(x: torch.Tensor) -> torch.Tensor:
    return x.float()


def bias(o: ops.Operands) -> torch.Tensor:
    assert o.bias is not None
    return o.bias


CAUSES: list[tuple[str, Change, str]] = [
    (f"mm:f32:nn:24x40x{k}", change, words)
    for k, change, words in [
        (1000, lambda _, o: f32(product(o, slice(0, 999))), "k = 999 of K = 1000 are missing: the K-"),
        (1000, lambda _, o: f32(product(o, slice(0, 992))), "k in [992, 1000) of K = 1000 are missing"),
        (1000, lambda _, o: f32(product(o, slice(0, 960))), "k in [960, 1000) of K = 1000 are missing"),
        (1000, lambda x, o: f32(x - product(o, slice(250, 500))), "[250, 500) of K = 1000 are missing: slice 2 of 4"),
        (256, lambda x, o: f32(x + product(o, slice(64, 128))), "[64, 128) of K = 256 are counted twice: slice 2 of 4"),
        ("64:relu+add", lambda _, o: f32((product(o) + o.residuals[0]).relu()), "step add came before relu"),
        ("64:gelu+add", lambda x, o: x - o.residuals[0], "step add is missing"),
        (64, lambda x, _: x.t().reshape(24, 40), "laid out as its own transpose"),
        (64, lambda x, _: x.roll(1, 0), "the rows are shifted"),
        (64, lambda x, _: x.roll(-2, 1), "the columns are shifted"),
        (64, lambda x, _: 2 * x, "2 times what is expected"),
        (64, lambda x, _: 0 * x, "every bad element is 0"),
        (64, lambda _, o: f32(o.a.t().reshape(o.a.shape).double() @ o.b.double()), "A was read as its transpose"),
        (64, lambda _, o: f32(o.a.double() @ o.b.reshape(40, 64).t().double()), "B was read as its transpose"),
    ]
]
CAUSES += [
    (f"addmm:f32:nn:24x40x64:bias+{factors}", change, words)
    for factors, change, words in [
        ("alpha-0.5+beta-2", lambda _, o: f32(0.5 * product(o)), "the bias is missing"),
        ("alpha-0.5+beta-4", lambda _, o: f32(0.5 * product(o) + 2 * bias(o)), "alpha was applied to the bias"),
        ("beta-0", lambda x, o: x + bias(o), "beta = 0 was not applied"),
        ("alpha-0.5", lambda _, o: f32(product(o) + bias(o)), "alpha = 0.5 was not applied"),
        ("beta-0", lambda x, o: 0 * x + bias(o), "alpha and beta were exchanged"),
        ("beta-2", lambda _, o: f32(2 * product(o) + bias(o)), "alpha and beta were exchanged"),
    ]
]
CAUSES += [
    ("linear:f32:nt:24x40x64:bias", lambda _, o: f32(product(o) + bias(o).roll(1)), "the bias is shifted"),
    ("linear:f32:nt:24x40x64:bias+relu", lambda _, o: f32(product(o) + bias(o)), "step relu is missing"),
    (
        "linear:f32:nt:24x40x64:bias+relu",
        lambda _, o: f32(bias(o).relu().expand(24, 40)),
        "all 64 products are missing",
    ),
    ("linear:f32:nt:24x40x64:bias+relu", lambda _, o: f32(product(o).relu() + bias(o)), "relu came before the bias"),
    ("mm:f32:nn:40x40x64", lambda x, _: x.t(), "the result is transposed"),
    ("bmm:f32:nn:4x24x40x64", lambda x, _: x[:1].expand_as(x).clone(), "batch 1 holds the answer of batch 0"),
]


@pytest.mark.parametrize(("line", "change", "words"), CAUSES, ids=[f"{w} {c}" for c, (_, _, w) in enumerate(CAUSES)])
@pytest.mark.parametrize("distribution", ["rand", "int-1"])
def test_what_was_computed_instead(line: str, change: Change, words: str, distribution: str) -> None:
    found = story(line, change, distribution)
    assert words in found.cause, found.text()


def bits(x: torch.Tensor, name: torch.dtype) -> torch.Tensor:
    return x.to(name).to(x.dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_small_integers_of_another_computation_are_no_detour(dtype: str) -> None:
    integers = (torch.arange(960) * 7919 % 101).reshape(24, 40)
    found = story(f"mm:{dtype}:nn:24x40x1000", lambda x, _: integers.to(x.dtype))
    assert "detour" not in found.cause, found.text()


def cut(x: torch.Tensor, mask: int) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & mask).view(torch.float32)


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        ("mm:f32:nn:24x40x1000", lambda x, _: bits(x, torch.bfloat16), "a detour through bf16"),
        ("mm:f16:nn:24x40x1000", lambda x, _: bits(x, torch.bfloat16), "a detour through bf16"),
        ("mm:f64:nn:24x40x100", lambda x, _: bits(x, torch.float32), "a detour through f32"),
        ("mm:f32:nn:24x40x1000", lambda _, o: cut(o.a, -(1 << 13)) @ cut(o.b, -(1 << 13)), "were truncated to TF32"),
        ("mm:f32:nn:24x40x1000", lambda _, o: bits(o.a, torch.bfloat16) @ bits(o.b, torch.bfloat16), "rounded to bf16"),
        ("mm:bf16:nn:24x40x1000", lambda _, o: cut(o.a.float() @ o.b.float(), -(1 << 16)).bfloat16(), "toward zero"),
        ("mm:bf16:nn:48x80x1000", lambda _, o: f32(product(o)).half().bfloat16(), "a detour through f16"),
    ],
)
def test_lost_precision_is_named(line: str, change: Change, words: str) -> None:
    assert words in story(line, change).cause


def test_a_tile_with_the_answer_of_another() -> None:
    def change(x: torch.Tensor, _: ops.Operands) -> torch.Tensor:
        x[48:, 96:] = x[32:48, 64:96].clone()
        return x

    found = story("mm:f32:nn:64x128x64", change)
    assert "tile at row 48, column 96" in found.pattern
    assert found.cause == "the 16x32 tile at (48, 96) holds the answer of the tile at (32, 64)"


def test_unwritten_memory() -> None:
    found = story("mm:f32:nn:64x128x64", at(slice(60, None), add=math.nan))
    assert "row >= 60" in found.pattern
    assert "never written" in found.cause


def test_a_stale_result() -> None:
    old = given("mm:f32:nn:24x40x64", "int-1").result
    found = story("mm:f32:nn:24x40x64", lambda _x, _o: old.clone(), others={"rand-wide": old + 1, "int-1": old})
    assert found.cause == "the bad elements are the answer for int-1: stale data"
    found = story("mm:f32:nn:24x40x64", lambda x, _: x + old, others={"rand": old - 1, "int-1": old})
    assert found.cause == "the answer for int-1 was added to the bad elements"
    assert story("mm:f32:nn:2x2x64", at(1, 1, add=7.0, times=0.0), others={"x": torch.full((2, 2), 7.0)}).cause == ""


def test_coded_distributions_are_decoded() -> None:
    found = story("mm:f32:nn:24x200x1000", lambda _, o: f32(product(o, slice(0, 999))), "k-cover")
    assert (found.name, found.cause) == ("K tail", "the products with k = 999 of K = 1000 are missing: the K-tail")

    def change(x: torch.Tensor, _: ops.Operands) -> torch.Tensor:
        x[5, 7:12] = x[9, 11:16]
        return x

    assert "the value at (5, 7) is that of (9, 11)" in story("mm:f32:nn:24x40x64", change, "tile-map").cause


# -- beside eager -------------------------------------------------------------------------------------


def test_an_intermediate_value_is_decoded_with_the_digits_of_its_distribution() -> None:
    """They depend on the whole epilogue: a result in bf16 leaves room for fewer than the product alone has."""
    problem = Problem.parse("mm:f32:nn:24x40x100:add+cast-bf16:program.multi_output")
    first = problem.outputs[0]
    made = ops.make(problem, "k-cover", 11)
    assert digit_plan(problem)[0] != digit_plan(Problem.parse("mm:f32:nn:24x40x100"))[0]
    contract = Contract("f32", "either")
    bare = dataclasses.replace(first, epilogue=())
    span = interval.interval(bare, made, reference.reference(bare, made), contract)
    result = made.a[:, :-1] @ made.b[:-1]
    found = verdict_module.compare(result, span, bare, made)
    assert "k = 99 of K = 100 are missing" in mismatch(found).cause


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "f8e5m2"])
def test_a_result_in_fp8_stands_beside_eagers(dtype: str) -> None:
    case = given(f"mm:f32:nn:9x9x40:cast-{dtype}", "int-1")
    assert beside(case, case.result, case.result) == "bit-equal"
    other = (case.result.float() * 2.0).to(case.result.dtype)
    assert " ulp apart in " in beside(case, case.result, other)
    negative = case.result.float().abs().zero_().neg().to(case.result.dtype)
    assert beside(case, negative.float().abs().to(negative.dtype), negative) == "equal but for the sign of zeros"


def test_two_results_stand_beside_eagers_two() -> None:
    made = oracle.make("mm:f32:nn:8x8x8:relu:program.multi_output", "rand", 11)
    spans = interval.intervals(made.problem, made, reference.reference(made.problem, made), Contract())
    first, result = oracle.computed(made)
    assert verdict_module.beside_eager((first, result), (first, result), spans) == (
        "the intermediate value bit-equal; the result bit-equal"
    )
    words = verdict_module.beside_eager((torch.nextafter(first, first + 1), result), (first, result), spans)
    assert words.startswith("the intermediate value at most 1 ulp apart in 64 of 64 elements")
    assert verdict_module.beside_eager((result,), (result,), spans[1:]) == "bit-equal"


def beside(case: Given, actual: torch.Tensor, eager: torch.Tensor) -> str:
    return verdict_module.beside_eager((actual,), (eager,), (case.span,))


def test_bit_equal_and_nearly_so() -> None:
    case = given("mm:f32:nn:33x65x127")
    assert beside(case, case.result, case.result.clone()) == "bit-equal"
    near = case.result.clone()
    near[0, :3] = torch.nextafter(near[0, :3], torch.tensor(math.inf))
    words = "at most 1 ulp apart in 3 of 2145 elements; eager is at 0 "
    assert beside(case, near, case.result).startswith(words)
    assert "eager itself is outside the bound" in beside(case, case.result, case.result + 1)
    assert beside(case, case.result, case.span.hi.float()).endswith("; eager is at 1 of the bound")


def test_signs_of_zeros_and_strange_dtypes() -> None:
    case = given("mm:f32:nn:4x4x0")
    assert beside(case, -case.result, case.result) == "equal but for the sign of zeros"
    assert beside(case, case.result.double(), case.result) == "not comparable with eager"
    empty = given("mm:f32:nn:0x4x4")
    assert beside(empty, empty.result, empty.result) == "bit-equal"
    integers = given("int_mm:i8-i8-i32:nn:33x64x128", "int-1")
    assert beside(integers, integers.result, integers.result) == "bit-equal"
