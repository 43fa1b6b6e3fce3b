"""The oracle: right results are accepted, planted errors are not, and the reference itself is checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath  # type: ignore[import-untyped]  # it has no stubs
import oracle
import pytest
import torch
from tf32 import three_products, to_tf32

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import epilogue as epilogue_module
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.operands import dtypes
from pytest_gemm.operands import tensors as ops
from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


def contract_for(problem: Problem, **claims: object) -> Contract:
    accumulate = "i32" if problem.op.name == "int_mm" else "f64" if problem.dtypes.out.name == "f64" else "f32"
    return Contract(**{"accumulate": accumulate, "epilogue": "either", **claims})  # type: ignore[arg-type]  # fields by name


def judged(
    line: str, distribution: str, matmul: Matmul = oracle.exact, **claims: object
) -> tuple[int, interval_module.Interval]:
    """How many elements of the program's result (with ``matmul`` in it) are outside, and the interval."""
    given = oracle.make(line, distribution, 11)
    span = span_of(given, **claims)
    return rejected(oracle.computed(given, matmul), span), span


def span_of(given: ops.Operands, **claims: object) -> interval_module.Interval:
    return oracle.interval(given, contract_for(given.problem, **claims))


def rejected(result: torch.Tensor, span: interval_module.Interval) -> int:
    x = result.double()
    anything = (span.lo == -math.inf) & (span.hi == math.inf)
    good = ((x >= span.lo) & (x <= span.hi)) | (x.isnan() & (span.lo.isnan() | anything))
    return int((~good).sum())


SHAPES = ["1x64x1000", "33x65x127", "4x48x8200", "1x1x1", "24x24x0"]
PRODUCTS = [
    "mm:{d}:nn:{s}", "addmm:{d}:nt:{s}:bias+alpha-0.5+beta-2", "addmm:{d}:nn:{s}:bias-mn+alpha-0.3+beta-1.7",
    "addmm:{d}:nn:{s}:bias+beta-0", "linear:{d}:nt:{s}:bias+relu", "bmm:{d}:tn:3x{s}", "baddbmm:{d}:nn:2x{s}:bias-mn",
]  # fmt: skip
STEPS = [
    "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "hardswish", "hardsigmoid", "leaky_relu",
    "leaky_relu-0.1", "leaky_relu--0.3", "clamp-0_6", "clamp--0.1_0.1", "scale-0.3", "add", "sub", "mul", "div",
    "add+mul+relu", "mul+sub+gelu", "cast-f32+gelu",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_products_are_right(dtype: str, shape: str) -> None:
    for line in PRODUCTS[:2] if shape.endswith("x8200") else PRODUCTS:
        problem = Problem.parse(line.format(d=dtype, s=shape))
        for distribution in distributions_for(problem):
            assert judged(problem.line, distribution)[0] == 0, (problem.line, distribution)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "steps"),
    # In f32, and in one of the others in turn.  A cast to the dtype that the value has already is refused.
    [
        (dtype, steps)
        for turn, steps in enumerate(STEPS)
        for dtype in ("f32", ("bf16", "f16", "f64")[turn % 3])
        if steps != f"cast-{dtype}+gelu"
    ],
)
def test_epilogues_of_exact_products_are_right(dtype: str, steps: str) -> None:
    for line in (f"mm:{dtype}:nn:33x65x127:{steps}", f"linear:{dtype}:nt:17x33x1000:bias+{steps}"):
        for distribution in distributions_for(Problem.parse(line)):
            for epilogue in ("either", "eager"):
                assert judged(line, distribution, epilogue=epilogue)[0] == 0, (line, distribution, epilogue)


@pytest.mark.parametrize("line", [
    "mixed_mm:bf16-i8-bf16:nn:33x64x127", "woq_int8:bf16-i8-bf16:nt:32x64x256:relu", "woq_int8:f32-i8-f32:nt:3x64x1000",
    "int_mm:i8-i8-i32:nn:33x64x128", "int_mm:i8-i8-i32:nt:32x64x1000:cast-f32+relu",
    "int_mm:i8-i8-i32:nt:32x64x1000:cast-bf16",
])  # fmt: skip
def test_exact_products_of_integer_operands_are_right(line: str) -> None:
    for distribution in distributions_for(Problem.parse(line)):
        assert judged(line, distribution)[0] == 0, distribution


# Planted errors.
def last_k_dropped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[..., :-1] @ b[..., :-1, :]


def through_bf16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).to(torch.bfloat16).to(a.dtype)


def tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


def truncated_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return tf32(a) @ tf32(b)


def slices_in_half(count: int) -> Matmul:
    """Sums of ``count`` slices of K that are stored, and added up, in the type of the operands."""

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = zip(a.float().chunk(count, -1), b.float().chunk(count, -2), strict=True)
        return sum(((x @ y).to(a.dtype) for x, y in parts), torch.zeros((), dtype=a.dtype))

    return matmul


@pytest.mark.parametrize("line", ["mm:f32:nn:33x65x127", "baddbmm:f32:nn:3x32x16x24:bias-mn+alpha-0.5+beta-2"])
def test_low_bits_of_subnormal_operands_are_lost_where_that_is_claimed(line: str) -> None:
    claims = {"input_error": 3 * 2.0**-20}
    assert judged(line, "rand", three_products, **claims)[0] == 0
    assert judged(line, "specials", three_products, **claims)[0] > 0
    assert judged(line, "specials", three_products, input_smallest=2.0**-136, **claims)[0] == 0
    assert judged(line, "rand", through_bf16, input_smallest=2.0**-136, **claims)[0] > 0


# -- modes: TF32, partial sums in half, autocast ------------------------------------------------------

TF32: dict[str, Any] = {"input_error": 2.0**-9, "input_bits": 11}


def rounded_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return to_tf32(a) @ to_tf32(b)


def bf16_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


@pytest.mark.parametrize("matmul", [truncated_inputs, rounded_inputs, torch.matmul])
@pytest.mark.parametrize("shape", ["17x65x127", "24x32x4096", "33x97x1"])
def test_tf32_and_f32_alike_are_right_where_a_flag_allows_it(matmul: Matmul, shape: str) -> None:
    for line in (f"mm:f32:nn:{shape}:math.tf32", f"addmm:f32:nn:{shape}:bias+alpha-0.5+beta-2+relu:math.tf32"):
        for distribution in distributions_for(Problem.parse(line)):
            assert judged(line, distribution, matmul, **TF32)[0] == 0, (line, distribution)


def test_exact_data_for_tf32_fit_it_and_stay_exact() -> None:
    line = "mm:f32:nn:32x64x1000:math.tf32"
    problem = Problem.parse(line)
    for distribution in ("int-1", "int-2", "k-cover", "tile-map", "one-hot"):
        given = ops.make(problem, distribution, 11, "cpu")
        assert torch.equal(tf32(given.a), given.a), distribution
        assert torch.equal(tf32(given.b), given.b), distribution
        assert judged(line, distribution, **TF32)[1].tier == "exact", distribution
    # Without the flag they are as wide as f32, and a kernel that claims TF32 is not held to exact sums of them.
    assert judged("mm:f32:nn:32x64x1000", "int-2", **TF32)[1].tier != "exact"


@pytest.mark.parametrize(
    ("matmul", "distribution"), [(bf16_inputs, "int-2"), (last_k_dropped, "int-2"), (last_k_dropped, "rand")]
)
def test_tf32_excuses_nothing_else(matmul: Matmul, distribution: str) -> None:
    assert judged("mm:f32:nn:32x64x256:math.tf32", distribution, matmul, **TF32)[0] > 0


def test_a_bias_is_not_rounded_to_tf32() -> None:
    def rough(bias: torch.Tensor) -> torch.Tensor:
        return tf32(bias)

    # 0 * 1: nothing but the bias.
    given = oracle.make("addmm:f32:nn:32x64x1:bias:math.tf32", "rand", 11)
    given = dataclasses.replace(given, a=torch.zeros(32, 1), b=torch.ones(1, 64))
    assert given.bias is not None
    span = span_of(given, **TF32)
    assert rejected(given.bias.expand(32, 64), span) == 0
    assert rejected(rough(given.bias).expand(32, 64), span) > 0


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("k", [48, 250, 1000, 8200])
def test_partial_sums_in_half_are_right_where_a_flag_allows_it(dtype: str, k: int) -> None:
    line = f"mm:{dtype}:nn:24x40x{k}:math.half_partials"
    for distribution in distributions_for(Problem.parse(line)):
        wrong, span = judged(line, distribution, slices_in_half(8), slices=8, partials="out")
        assert wrong == 0, distribution
        assert (span.tier == "exact") == DISTRIBUTIONS[distribution].exact, distribution


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_partial_sums_in_half_are_wrong_without_the_flag_and_beyond_the_claim(dtype: str) -> None:
    for line in (f"mm:{dtype}:nn:24x40x1000", f"mm:{dtype}:nn:24x40x1000:math.half_partials"):
        assert judged(line, "rand", slices_in_half(8), slices=8)[0] > 0
    # Of all data every one of 1000 slices is more than 4 slices are allowed.
    line = f"mm:{dtype}:nn:24x40x1000:math.half_partials"
    assert judged(line, "rand-positive", slices_in_half(1000), slices=4, partials="out")[0] > 0


def test_sums_that_a_half_type_cannot_hold_are_not_exact() -> None:
    given = oracle.make("mm:f16:nn:8x8x4096", "int-1", 1)
    given = dataclasses.replace(given, a=torch.ones(8, 4096).half(), b=torch.ones(4096, 8).half(), quantum=1.0)
    assert oracle.interval(given, Contract(slices=8)).tier == "exact"
    for narrow in (Contract(slices=8, partials="out"), Contract(accumulate="f16")):
        assert oracle.interval(given, narrow).tier == "hard"
    assert judged("mm:f16:nn:8x8x16", "int-1", accumulate="f16")[1].tier == "exact"
    assert "int-1" not in distributions_for(Problem.parse("mm:f16:nn:8x8x4096:math.half_partials"))


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("line", [
    "mm:f32-f32-{}:nn:33x65x127", "mm:f32-f32-{}:tt:33x65x127:bias+relu",
    "addmm:f32-f32-{}:nn:17x40x1000:bias-mn+alpha-0.3+beta-1.7", "linear:f32-f32-{}:nt:17x40x1000:bias+gelu",
    "bmm:f32-f32-{}:nt:3x17x33x65",
])  # fmt: skip
def test_eager_under_autocast_is_right(line: str, half: str) -> None:
    problem = Problem.parse(line.format(half))
    for distribution in distributions_for(problem):
        for epilogue in ("either", "eager"):
            assert judged(problem.line, distribution, epilogue=epilogue)[0] == 0, (distribution, epilogue)


@pytest.mark.parametrize(
    ("line", "distribution", "seed", "place"),
    [
        ("mm:f64:nn:20x2x1", "specials", 0, (9, 0)),  # a product that underflows in float64
        # Terms cancel.
        ("scaled_mm:f8e5m2-f8e5m2-f16:nt:11x40x2:div:quant.rowwise:a.offset", "rand-wide", 682691, (1, 16)),
    ],
)
def test_a_sum_that_is_only_nearly_zero_may_have_either_sign(
    line: str, distribution: str, seed: int, place: tuple[int, ...]
) -> None:
    given = oracle.make(line, distribution, seed)
    span = span_of(given, epilogue="eager")
    right = oracle.computed(given)
    for zero in (0.0, -0.0):
        right[place] = zero
        assert verdict.compare(right, span, given.problem, given).mismatch is None


def test_fused_code_may_skip_a_cast_between_two_steps_and_eager_code_may_not() -> None:
    line = "mm:f32:nn:32x64x65:cast-bf16+add"
    given = oracle.make(line, "rand", 11)
    product = given.a @ given.b
    skipped = (product + given.residuals[0].float()).bfloat16()
    rounded = product.bfloat16() + given.residuals[0]
    assert not torch.equal(skipped, rounded)
    for epilogue, right in (("either", True), ("fused", True), ("eager", False)):
        span = span_of(given, epilogue=epilogue)
        assert rejected(rounded, span) == 0
        assert (rejected(skipped, span) == 0) == right, epilogue
    # The last conversion makes the result, and nobody may skip it: bf16 or not is seen by its type alone.
    last = Problem.parse("mm:f32:nn:32x64x65:add+cast-bf16")
    span = judged(last.line, "rand", epilogue="either")[1]
    assert torch.equal(round_to(span.lo, DTYPES["bf16"]), span.lo)


@pytest.mark.parametrize("line", ["linear:f32-f32-bf16:nt:32x16x8:bias", "mm:f32-f32-bf16:nt:32x16x8:bias"])
def test_fused_code_may_skip_the_rounding_of_a_bias_under_autocast_and_eager_code_may_not(line: str) -> None:
    given = oracle.make(line, "rand", 11)
    assert given.bias is not None
    product = given.a.bfloat16().float() @ given.b.bfloat16().float()
    skipped = (product + given.bias).bfloat16()
    rounded = (product + given.bias.bfloat16().float()).bfloat16()
    assert not torch.equal(skipped, rounded)
    for epilogue, right in (("either", True), ("fused", True), ("eager", False)):
        span = span_of(given, epilogue=epilogue)
        assert (rejected(skipped, span) == 0) == right, epilogue
        if epilogue == "fused" or given.problem.op.name == "linear":
            assert rejected(rounded, span) == 0, epilogue


def test_both_results_of_a_multi_output_program_have_their_interval() -> None:
    given = oracle.make("mm:f16:nn:33x64x64:relu+add+gelu:r0.alias:program.multi_output", "rand", 11)
    contract = contract_for(given.problem)
    spans = interval_module.intervals(given.problem, given, reference.reference(given.problem, given), contract)
    first, result = oracle.computed(given)
    assert len(spans) == 2
    assert rejected(first, spans[0]) == 0
    assert rejected(result, spans[1]) == 0
    assert rejected(result, spans[0]) > 0
    assert rejected(first, spans[1]) > 0


def fixed(line: str, a: list[list[float]], b: list[list[float]], bias: list[float] | None = None) -> ops.Operands:
    """Operands with chosen values."""
    made = oracle.make(line)
    a_, b_, bias_ = (None if x is None else torch.tensor(x, dtype=torch.float64).to(made.a.dtype) for x in (a, b, bias))
    return dataclasses.replace(made, a=a_, b=b_, bias=bias_, quantum=0.0, zero_mean=False)  # type: ignore[arg-type]


def test_a_float64_reference_is_better_than_float64() -> None:
    given = oracle.make("mm:f64:nn:5x6x300", "rand", 3)
    found = reference.reference(given.problem, given)
    for i in range(5):
        for j in range(6):
            pairs = zip(given.a[i].tolist(), given.b[:, j].tolist(), strict=True)
            exact = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0))
            error = abs(Fraction(float(found.c[i, j])) - exact)
            assert found.slack is not None
            assert error <= Fraction(float(found.slack[i, j]))
            # The bound of the reference is far below the bound that a kernel is held to.
            assert float(found.slack[i, j]) < 0.02 * 300 * 2.0**-53 * float(found.big[i, j])


def test_a_wide_range_makes_the_float64_reference_humble_not_wrong() -> None:
    line = "mm:f64:nn:1x1x3"
    given = fixed(line, [[1e200, 1.0, 1e-30]], [[0.0], [1.0 / 3.0], [1.0]])
    found = reference.reference(Problem.parse(line), given)
    assert found.slack is not None
    exact = Fraction(1.0 / 3.0) + Fraction(1e-30)
    assert abs(Fraction(float(found.c[0, 0])) - exact) <= Fraction(float(found.slack[0, 0]))


def test_nan_and_infinity_stay_in_their_row_and_column() -> None:
    line = "mm:f32:nn:3x2x2"
    inf, nan = math.inf, math.nan
    given = fixed(line, [[1.0, 2.0], [inf, 1.0], [nan, 1.0]], [[1.0, 0.0], [1.0, 1.0]])
    span = span_of(given)
    assert span.expected[0].tolist() == [3.0, 2.0]
    assert span.expected[1, 0] == inf
    assert span.lo[1, 0] == span.hi[1, 0] == inf
    assert span.lo[1, 1].isnan()  # inf * 0
    assert span.lo[2].isnan().all()
    assert span.lo[0].isfinite().all()
    assert rejected(torch.tensor([[3.0, 2.0], [inf, nan], [nan, nan]]), span) == 0
    assert rejected(torch.tensor([[3.0, 2.0], [inf, inf], [nan, 1.0]]), span) == 2


def test_a_bias_times_a_factor_that_f32_does_not_hold_is_not_exact() -> None:
    line = "addmm:f32:nn:1x31x14:bias-0+alpha-0+beta-0.3"
    given = dataclasses.replace(oracle.make(line, "int-1"), bias=torch.tensor(180.0))
    assert oracle.is_right(given, oracle.computed(given))
    assert not oracle.is_right(given, oracle.computed(given) * 1.00001)


def test_alpha_zero_may_ignore_a_nan_or_let_it_through() -> None:
    line = "addmm:f32:nn:1x2x1:bias+alpha-0"
    span = span_of(fixed(line, [[2.0]], [[math.nan, 4.0]], [5.0, 6.0]))
    for first in (5.0, math.nan):
        assert rejected(torch.tensor([[first, 6.0]]), span) == 0
    assert rejected(torch.tensor([[5.0, 7.0]]), span) == 1


def test_eager_code_rounds_a_product_with_alpha_to_f32_before_a_half_type() -> None:
    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() @ b.float()).to(a.dtype)

    # 5.81e-5 in f16 times 0.3 lies next to a tie, onto which f32 rounds it.
    line = "addmm:f16:nn:1x1x1:bias+alpha-0.3"
    given = fixed(line, [[1.0]], [[975 * 2.0**-24]], [-0.0006561279296875])
    result = oracle.computed(given, rounded)
    assert rejected(result, span_of(given, epilogue="eager")) == 0


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_eager_code_may_scale_a_product_that_it_has_rounded_where_no_bias_is_added(dtype: str) -> None:
    line = f"addmm:{dtype}:nn:16x8x112:bias+alpha-0.3+beta-0"
    assert judged(line, "rand", epilogue="eager")[0] == 0
    assert judged(line, "rand", lambda a, b: oracle.exact(a, b) / 0.3, epilogue="eager")[0] > 0


def test_k_zero_gives_beta_times_bias() -> None:
    given = oracle.make("addmm:f32:nn:2x3x0:bias+beta-2", "rand", 1)
    assert given.bias is not None
    span = span_of(given)
    assert torch.equal(span.lo, span.hi)
    assert torch.equal(span.lo, (2 * given.bias.double()).expand(2, 3))


def test_products_below_the_smallest_subnormal_may_vanish() -> None:
    line = "mm:f32:nn:1x1x64"
    # Each product is 0.75 * 2^-149 / 2 and rounds to 0 in f32; their exact sum does not.
    given = fixed(line, [[0.75 * 2.0**-75] * 64], [[2.0**-75]] * 64)
    span = span_of(given)
    assert span.expected.item() > 0
    assert rejected(torch.zeros(1, 1), span) == 0
    assert rejected(torch.tensor([[2.0**-140]]), span) == 1


# -- the sign of zero ----------------------------------------------------------------------------------


def zeros_accepted(line: str, a: list[float], b: list[float], bias: float | None = None, **facts: Any) -> str:
    """Which zeros are right for one element, the product of a row and a column: ``+``, ``-``, both or none."""
    given = fixed(line, [a], [[x] for x in b], None if bias is None else [bias])
    problem, residuals = given.problem, tuple(torch.full_like(r, facts.pop("r")) for r in given.residuals)
    quantum = 1.0 if all(x == int(x) for x in a + b) else 0.0
    given = dataclasses.replace(given, b=given.b.reshape(-1, 1), residuals=residuals, quantum=quantum)
    span = span_of(given, **facts)
    dtype = dtypes.torch_dtype(problem.result_dtype)
    signs = {"+": torch.zeros(1, 1, dtype=dtype), "-": -torch.zeros(1, 1, dtype=dtype)}
    return "".join(s for s, zero in signs.items() if verdict.compare(zero, span, problem, given).ok)


ONE = "mm:f32:nn:1x1x1"
TWO = "mm:f32:nn:1x1x2"
TINY = [-(2.0**-20)], [2.0**-10]


@pytest.mark.parametrize(("signs", "line", "a", "b", "more"), [
    # What cancels is +0 in any order, and so is a sum of zeros that are not all -0.
    ("+", TWO, [3.0, -3.0], [1.0, 1.0], {}), ("+", TWO, [0.0, 0.0], [1.0, -1.0], {}),
    ("+", TWO, [-0.0, -0.0], [1.0, -1.0], {}), ("+", "mm:f32:nn:1x1x0", [], [], {}),
    # Where each product is -0 a sum that begins at +0 is +0, and one that begins with the first product is -0.
    ("+-", TWO, [0.0, -0.0], [-1.0, 2.0], {}), ("+-", ONE, [-0.0], [1.0], {}),
    # A result that underflows when it is stored keeps its sign.  One that underflows in the sum may not: a product
    # is rounded to -0 and +0 is added, or a fused multiply-add rounds once.
    ("-", "mm:f16:nn:1x1x1", *TINY, {}), ("-", "mm:f16:nn:1x1x1:scale-0.5", *TINY, {}),
    ("+", "mm:f16:nn:1x1x1:scale--2", *TINY, {}), ("+-", ONE, [-(2.0**-100)], [2.0**-100], {}),
    # A factor and a residual turn the sign; what is added to a zero decides with it.
    ("-", f"{TWO}:mul", [3.0, -3.0], [1.0, 1.0], {"r": -2.0}), ("+", f"{TWO}:div", [3.0, -3.0], [1.0, 1.0], {"r": 2.0}),
    ("-", f"{TWO}:scale--2", [3.0, -3.0], [1.0, 1.0], {}),
    ("+", f"{TWO}:scale--2+add", [3.0, -3.0], [1.0, 1.0], {"r": 0.0}),
    ("-", f"{TWO}:scale--2+add", [3.0, -3.0], [1.0, 1.0], {"r": -0.0}),
    ("-", f"{TWO}:scale--2+sub", [3.0, -3.0], [1.0, 1.0], {"r": 0.0}),
    ("+", f"{TWO}:add", [3.0, -1.0], [1.0, 1.0], {"r": -2.0}),
    ("+", "linear:f32:nt:1x1x1:bias", [2.0], [1.0], {"bias": -2.0}),
    # alpha < 0 may multiply A, B or their product.
    ("+-", "addmm:f32:nn:1x1x2:bias+alpha--1+beta-0", [3.0, -3.0], [1.0, 1.0], {"bias": 1.0}),
    ("+", "addmm:f32:nn:1x1x2:bias+alpha--1", [3.0, -3.0], [1.0, 1.0], {"bias": 0.0}),
    ("+-", "addmm:f32:nn:1x1x0:bias", [], [], {"bias": -0.0}),
    # relu of a negative number is +0; of -0 PyTorch gives either.
    ("+", f"{ONE}:relu", [-2.0], [1.0], {}), ("+", f"{TWO}:relu", [3.0, -3.0], [1.0, 1.0], {}),
    ("+-", f"{TWO}:scale--2+relu", [3.0, -3.0], [1.0, 1.0], {}), ("-", f"{ONE}:relu+scale--2", [-2.0], [1.0], {}),
    # Other functions promise nothing.
    ("+-", f"{TWO}:gelu", [3.0, -3.0], [1.0, 1.0], {}), ("+-", f"{ONE}:clamp-0_6", [-2.0], [1.0], {}),
    ("+-", f"{ONE}:leaky_relu-0", [-2.0], [1.0], {}),
    # An integer has one zero.
    ("+", "int_mm:i8-i8-i32:nn:1x1x1:cast-f32", [0.0], [-1.0], {}),
    ("-", "int_mm:i8-i8-i32:nn:1x1x1:cast-f32+scale--2", [0.0], [-1.0], {}),
    # And where a number is right a zero is not.
    ("", ONE, [2.0], [1.0], {}),
])  # fmt: skip
@pytest.mark.parametrize("epilogue", ["fused", "eager", "either"])
def test_the_sign_of_zero(
    signs: str, line: str, a: list[float], b: list[float], more: dict[str, float], epilogue: str
) -> None:
    assert zeros_accepted(line, a, b, epilogue=epilogue, **more) == signs


def test_a_wrong_sign_of_zero_is_described() -> None:
    given = oracle.make("mm:f32:nn:20x40x64", "int-1", 11)
    right = given.a @ given.b
    span = span_of(given)
    assert verdict.compare(right, span, given.problem, given).ok
    found = verdict.compare(torch.where(right == 0, -right, right), span, given.problem, given)
    assert found.mismatch is not None
    assert found.mismatch.code == "zero-sign"
    assert found.mismatch.count == int((right == 0).sum())
    assert "are zeros of the wrong sign\n  first at (" in found.mismatch.text()
    assert "got -0, expected 0" in found.mismatch.text()
    assert found.ratio == math.inf


def test_int32_wraps() -> None:
    c = torch.tensor([2.0**31, 2.0**31 - 1, -(2.0**31) - 1, 5.0], dtype=torch.float64)
    assert epilogue_module.wrap_int32(c).tolist() == [-(2.0**31), 2.0**31 - 1, 2.0**31 - 1, 5.0]


@pytest.mark.parametrize(("line", "a", "claims"), [
    ("mm:f32:nn:1x1x3", 3e38, {}), ("addmm:f32:nn:1x1x3:bias+alpha-4", 8e37, {}),
    ("mm:f16:nn:1x1x3:math.half_partials", 6e4, {"slices": 3, "partials": "out"}),
])  # fmt: skip
def test_an_overflow_that_depends_on_the_order_is_not_judged(line: str, a: float, claims: dict[str, Any]) -> None:
    given = fixed(line, [[a, a, -a]], [[1.0]] * 3, [0.0] if "bias" in line else None)
    for result in (math.inf, a * given.problem.alpha):
        assert rejected(torch.tensor([[result]]), span_of(given, **claims)) == 0


def test_a_join_of_a_sum_that_may_overflow_is_not_judged() -> None:
    made = oracle.make("linears:f32:nt:2x1x1x3:gated-silu")
    b = torch.tensor([1.0, 2.0**-130]).reshape(2, 1, 1).expand(2, 3, 1)
    given = dataclasses.replace(made, a=torch.tensor([[3e38, 3e38, -3e38]]), b=b, quantum=0.0, zero_mean=False)
    for result in (math.inf, 3e38 * 3e38 * 2.0**-130):
        assert rejected(torch.tensor([[result]]), span_of(given)) == 0


def test_an_overflow_in_any_order_is_judged() -> None:
    same_sign = fixed("mm:f32:nn:1x1x3", [[3e38, 3e38, 3e38]], [[1.0], [1.0], [1.0]])
    assert rejected(torch.tensor([[3e38]]), span_of(same_sign)) == 1
    assert rejected(torch.tensor([[math.inf]]), span_of(same_sign)) == 0


def test_exact_data_has_one_right_answer_and_random_data_of_each_tier_has_more() -> None:
    line = "mm:f32:nn:16x16x256"
    tiers = {"int-1": "exact", "int-2": "exact", "rand": "statistical", "rand-positive": "hard"}
    for distribution, tier in tiers.items():
        span = judged(line, distribution)[1]
        assert span.tier == tier
        assert torch.equal(span.lo, span.hi) == (tier == "exact")
    assert [judged(f"mm:f32:nn:16x16x{k}", "rand")[1].tier for k in (63, 64)] == ["hard", "statistical"]


def test_a_sum_of_random_data_may_begin_at_a_large_bias() -> None:
    given = oracle.make("addmm:f32:nn:16x16x1000:bias", "rand", 11)
    assert given.bias is not None
    bias = given.bias * 2.0**12
    given, total = dataclasses.replace(given, bias=bias), bias.expand(16, 16)
    for a, b in zip(given.a.unbind(1), given.b.unbind(0), strict=True):
        total = total + a[:, None] * b
    span = span_of(given, epilogue="fused")
    assert (span.tier, rejected(total, span)) == ("statistical", 0)


def test_a_quotient_of_a_sum_near_zero_is_anything_by_zero_alone() -> None:
    given = fixed("mm:f32:nn:1x2x2:div", [[0.1, -0.1]], [[1.0, 1.0]] * 2)
    span = span_of(dataclasses.replace(given, residuals=(torch.tensor([[0.0, 1.0]]),)))
    assert rejected(torch.tensor([[math.inf, 0.0]]), span) == 0
    assert rejected(torch.tensor([[-math.inf, 5.0]]), span) == 1


def test_zero_times_infinity_may_be_nan_behind_a_relu_too_where_rounding_makes_the_zero() -> None:
    given = fixed("mm:f32:nn:1x3x2:mul+relu", [[0.1, -0.1]], [[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    span = span_of(dataclasses.replace(given, residuals=(torch.tensor([[math.inf, 1.0, math.inf]]),)))
    for result in (math.nan, 0.0, math.inf):
        assert rejected(torch.tensor([[result, 0.0, math.inf]]), span) == 0
    assert rejected(torch.tensor([[0.0, math.nan, math.nan]]), span) == 2


def test_a_gate_that_underflows_times_infinity_may_be_nan_behind_a_relu_too() -> None:
    made = oracle.make("linears:f32:nt:2x2x1x1:gated-gelu_tanh+relu")
    a, b = torch.tensor([[-5.2], [5.2]]), torch.tensor([1.0, math.inf]).reshape(2, 1, 1)
    span = span_of(dataclasses.replace(made, a=a, b=b, quantum=0.0, zero_mean=False))
    for result in (math.nan, 0.0, math.inf):
        assert rejected(torch.tensor([[result], [math.inf]]), span) == 0
    assert rejected(torch.tensor([[0.0], [math.nan]]), span) == 1


def test_an_integer_is_exact_in_f64() -> None:
    span = span_of(fixed("int_mm:i8-i8-i32:nn:1x1x1041:cast-f64", [[127.0] * 1041], [[127.0]] * 1041))
    assert float(span.lo) == float(span.hi) == 2.0**24 + 13073


@pytest.mark.parametrize("steps", ["relu", "clamp--8_8", "scale", "leaky_relu-0.5", "leaky_relu--2", "relu+scale-3"])
def test_exact_epilogues_keep_the_exact_tier_exact(steps: str) -> None:
    span = judged(f"mm:f32:nn:16x16x64:{steps}", "int-1", epilogue="fused")[1]
    assert torch.equal(span.lo, span.hi)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "exp", "hardswish", "hardsigmoid"])
def test_functions_enclose_the_truth_and_little_more(name: str) -> None:
    """Against mpmath on a grid, for points and for spans that contain a minimum."""
    f = {
        "gelu": lambda x: x * (1 + mpmath.erf(x / mpmath.sqrt(2))) / 2,
        "gelu_tanh": lambda x: (
            x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))) / 2
        ),
        "silu": lambda x: x / (1 + mpmath.exp(-x)),
        "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
        "tanh": mpmath.tanh,
        "exp": mpmath.exp,
        "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
        "hardsigmoid": lambda x: min(max(x + 3, 0), 6) / mpmath.mpf(6),
    }[name]
    step = Problem.parse(f"mm:f32:nn:1x1x1:{name}").passes[0]
    arithmetic = epilogue_module.Arithmetic(DTYPES["f32"], "fused")
    x = torch.linspace(-12, 12, 481, dtype=torch.float64)
    for width in (0.0, 1e-6, 0.3, 3.0):
        hi = x if width == 0.0 else x + width
        span = epilogue_module.step_span(step, epilogue_module.Span(x, hi), None, arithmetic, DTYPES["f32"])
        for i in range(0, len(x), 7):
            points = [mpmath.mpf(float(x[i])) + mpmath.mpf(float(hi[i] - x[i])) * n / 8 for n in range(9)]
            values = [float(f(p)) for p in points]
            assert float(span.lo[i]) <= min(values)
            assert float(span.hi[i]) >= max(values)
            slope = max(1.2, float(f(mpmath.mpf(float(hi[i])))) if name == "exp" else 0.0)
            room = 2e-5 * max(1.0, *map(abs, values)) + slope * width / 8
            assert float(span.hi[i] - span.lo[i]) <= max(values) - min(values) + room


# -- insensitive -------------------------------------------------------------------------------------


def doubt(line: str, distribution: str = "rand", **changes: object) -> str | None:
    given = dataclasses.replace(oracle.make(line, distribution, 5), **changes)  # type: ignore[arg-type]  # fields by name
    reason = interval_module.insensitive(given.problem, span_of(given))
    return None if reason is None else reason.code


@pytest.mark.parametrize(("line", "a", "b", "code"), [
    ("mm:f32:nn:16x16x8", torch.zeros(16, 8), torch.rand(8, 16) + 1, "mostly-zero"),
    ("mm:f32:nn:16x16x8:sigmoid", 1000 * torch.ones(16, 8), torch.rand(8, 16) + 1, "saturated"),
], ids=["zeros", "saturated"])  # fmt: skip
def test_what_shows_nothing_is_mistrusted(line: str, a: torch.Tensor, b: torch.Tensor, code: str) -> None:
    assert doubt(line, a=a, b=b) == code


def test_a_bound_that_admits_zero_is_mistrusted() -> None:
    problem = Problem.parse("mm:f16:nn:16x16x4000")
    given = dataclasses.replace(ops.make(problem, "rand", 5, "cpu"), zero_mean=False)
    span = oracle.interval(given, Contract(accumulate="f16"))
    reason = interval_module.insensitive(problem, span)
    assert reason is not None
    assert reason.code == "bound-too-wide"


@pytest.mark.parametrize("line", ["mm:f32:nn:16x16x0", "mm:f32:nn:0x16x8", "mm:f32:nn:1x1x8", "mm:bf16:nn:64x64x8200"])
def test_legitimate_cases_are_trusted(line: str) -> None:
    for distribution in distributions_for(Problem.parse(line)):
        assert doubt(line, distribution) is None, distribution


def test_relu_is_trusted_whatever_the_seed() -> None:
    for seed in range(30):
        given = oracle.make("mm:f32:nn:8x8x64:relu", "int-1", seed)
        assert interval_module.insensitive(given.problem, span_of(given)) is None


def test_expected_is_rounded_once() -> None:
    line = "mm:f16:nn:1x1x2"
    # 1 + 2^-11 + 2^-22: above the midpoint of two float16, and exact in the accumulator.
    given = fixed(line, [[1.0, 2.0**-11]], [[1.0], [1.0 + 2.0**-10]])
    span = span_of(dataclasses.replace(given, quantum=2.0**-21))
    assert span.expected.item() == 1.0009765625
    assert round_to(span.value, DTYPES["f16"]).item() == 1.0009765625


def test_eager_refuses_a_weight_with_gaps_before_it_is_asked() -> None:
    refusal = AtenBackend().unsupported(Problem.parse("woq_int8:f32-i8-f32:nt:7x7x51:b.padded"), "cpu")
    assert refusal is not None
    assert refusal.reason.code == "b-strided"


@pytest.mark.parametrize(("to", "bits"), [("f16", 11), ("bf16", 8)])
def test_a_cast_from_f64_may_go_through_f32(to: str, bits: int) -> None:
    # Just above a tie: to nearest it goes up, and through f32 it is a tie and goes down to even.
    o = fixed(f"mm:f64:nn:1x1x1:cast-{to}", [[1.0 + 2.0**-bits + 2.0**-40]], [[1.0]])
    interval = oracle.interval(o, Contract("f64", "eager"))
    assert (float(interval.lo), float(interval.hi)) == (1.0, 1.0 + 2.0 ** (1 - bits))


@pytest.mark.parametrize(
    "line", ["mm:f32:nn:33x17x65:cast-i32", "mm:bf16:nn:9x9x40:relu+cast-i32", "mm:f64:nn:9x9x40:cast-i32"]
)
def test_a_cast_to_an_integer_cuts_toward_zero(line: str) -> None:
    # As torch does: rounded to nearest, half of the elements would be others.
    for distribution in distributions_for(Problem.parse(line)):
        bad, span = judged(line, distribution)
        assert bad == 0, distribution
        assert interval_module.insensitive(Problem.parse(line), span) is None, distribution
        if distribution == "rand":
            assert rejected(span.product.round(), span) > span.lo.numel() // 4


def test_the_reference_of_a_cast_to_an_integer_has_one_zero() -> None:
    o = fixed("mm:f32:nn:1x1x1:cast-i32", [[-0.75]], [[1.0]])
    interval = oracle.interval(o, Contract())
    assert math.copysign(1.0, float(interval.expected)) == 1.0
    assert float(interval.lo) == float(interval.hi) == 0.0


def test_each_distribution_tells_results_of_many_groups_of_k_from_zeros() -> None:
    line = "grouped_mm_k:bf16:nt:32x17x64x48"
    for distribution in distributions_for(Problem.parse(line)):
        bad, span = judged(line, distribution)
        assert bad == 0, distribution
        assert interval_module.insensitive(Problem.parse(line), span) is None, distribution
