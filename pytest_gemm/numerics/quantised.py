"""Intervals of quantised products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pytest_gemm.numerics.epilogue import apply, around, cast, requantised, step_span, times
from pytest_gemm.numerics.error import Bounding, Tier, largest_of
from pytest_gemm.numerics.reference import scale_of, widened
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.numerics.span import Arithmetic, Interval, Span, powers_of_two, union, wrap_int32
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.steps import StepKind

if TYPE_CHECKING:
    pass


def qlinear(given: Bounding) -> Interval:
    """``onednn::qlinear_pointwise``: one kernel, in f32 from the int32 sum on, with one rounding at its end.

    The sum s of what is stored, ``s = (A + z) @ B``, is exact in int32 up to K = 65793.  The zero point z is taken off
    as an integer, ``c = s - z t`` with B's column sums t, or as Inductor does it, in f32:
    ``fl(fl(s) x) - fl(t x z)``, where x is the product of A's and B's scales.  The first term has three roundings (of
    the sum, the scales' product, the product), the second no more than three (t is exact below 2^24), the difference
    one: with ``(1 + u)^3 - 1 < 4 u`` an error of ``4 u x (|s| + |z t|)`` before the last.  An integer compensation has
    less, since ``|c| <= |s| + |z t|``.  Nothing is lost where the scales are powers of two and s, z t and c stay within
    2^24.

    The steps are f32.  An 8-bit result is ``RNE(y / scale) + zero``, saturated, in f32 too: see :func:`_requantised`.
    """
    problem, operands, reference = given.problem, given.operands, given.reference
    f32 = DTYPES["f32"]
    arithmetic = Arithmetic(f32, "fused")
    scale = scale_of(operands)
    assert scale is not None
    correction = operands.zero * widened(operands.b).sum(-2)
    value = reference.c * scale
    static = problem.step("static")
    own = operands.scale_a if static is None else torch.tensor(static.numbers[0])
    assert own is not None
    assert operands.scale_b is not None
    most = max(largest_of(t) for t in (reference.c + correction, correction, reference.c))
    tier: Tier = "exact"
    if most <= 2.0**24 and powers_of_two(widened(operands.scale_b), widened(own)):
        span = Span(value, value)
    else:
        size = ((reference.c + correction).abs() + correction.abs()) * scale.abs()
        span, tier = arithmetic.basic(around(value, size * (4 * f32.unit_roundoff))), "hard"
    start = value
    if operands.bias is not None:
        bias = widened(operands.bias)
        start = value = value + bias
        span = arithmetic.basic(span.map(lambda x: x + bias))
    residuals = iter(operands.residuals)
    for step in problem.passes:
        r = widened(next(residuals)) if step.kind is StepKind.BINARY else None
        value = apply(step, value, r)
        span = step_span(step, span, r, arithmetic, f32)
    target = problem.dtypes.out
    if target.is_float:
        last = span.round(target)
        return Interval(last.lo, last.hi, round_to(value, target), value, start, tier, (span.lo, span.hi))
    last, before = requantised(problem, span)
    expected, code = requantised(problem, Span(value, value))
    return Interval(last.lo, last.hi, expected.lo, code.lo, start, tier, (before.lo, before.hi))


def da8w8(given: Bounding) -> tuple[Span, Tier]:
    """An int32 product that is converted and multiplied by A's and by B's scales, with the bias.

    The integers are exact.  Each step of the program is rounded to its type (bf16 where out is, else f32; the last one
    to f16 where out is): *eager* does so for certain and in the program's order, other contracts may at each of them,
    and Inductor's pattern multiplies by B's scales first, behind oneDNN's or the template's product.
    """
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    own = problem.dtypes.out if problem.dtypes.out.name == "bf16" else DTYPES["f32"]
    arithmetic = Arithmetic(DTYPES["f32"], contract.epilogue)
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    a, b = widened(operands.scale_a), widened(operands.scale_b)
    c = wrap_int32(reference.c)
    first = cast(Span(c, c), DTYPES["i32"], own, contract.epilogue != "eager")

    def scaled(*scales: torch.Tensor) -> Span:
        span = first
        for scale in scales:
            span = arithmetic.stored(arithmetic.basic(times(span, scale.expand_as(c))), own)
        return span

    span = scaled(a, b)
    if contract.epilogue != "eager":
        span = union(span, scaled(b, a))
        both = a * b  # the program's factors as one, rounded once
        span = union(span, arithmetic.basic(times(first, round_to(both.expand_as(c), DTYPES["f32"]))))
    if operands.bias is not None:
        bias = widened(operands.bias)
        span = arithmetic.stored(arithmetic.basic(span.map(lambda x: x + bias)), own)
    if own != problem.dtypes.out:
        span = arithmetic.stored(span, problem.dtypes.out)
    return span, "exact" if span.thin else "hard"
