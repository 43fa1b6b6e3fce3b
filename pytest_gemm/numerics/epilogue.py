"""Epilogue steps on values and on pairs of bounds."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
import torch.nn.functional as F

from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.numerics.span import F32_SMALLEST_NORMAL, Arithmetic, Span, keep_infinite, union
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Domain, Step, StepKind


def requantised(problem: Problem, span: Span) -> tuple[Span, Span]:
    """Codes of 8 bits for the values of ``span``, and what they are before they are rounded.

    ``y = x / scale`` is a product with the reciprocal in f32 in Inductor, two roundings, and a division or such a
    product in oneDNN: ``3 u |y|``, nothing for a power of two.  The zero point is added to the rounded y, or to y: that
    sum is one more rounding and whose ties may go to the other neighbour where it is odd.  Rounding and saturation are
    monotone, so an end that lies a bound's width from a half decides alone and one that straddles it admits both
    neighbours.
    """
    step, out = problem.step("requant"), problem.dtypes.out
    assert step is not None
    scale, zero = step.numbers
    low, high = (0.0 if out.name == "u8" else -128.0), out.max_finite
    f32 = DTYPES["f32"]
    y = span.map(lambda x: x / scale)
    if math.frexp(scale)[0] != 0.5 or not span.thin:
        size = torch.maximum(y.lo.abs(), y.hi.abs())
        y = y.widen(size * ((3 if math.frexp(scale)[0] != 0.5 else 0) * f32.unit_roundoff))
    after = y.map(lambda x: torch.round(x) + zero)
    shifted = y.map(lambda x: torch.round(round_to(x + zero, f32)))
    codes = union(after, shifted).map(lambda x: x.clamp(low, high))
    return codes, y.map(lambda x: (x + zero).clamp(low, high))


def around(value: torch.Tensor, error: torch.Tensor) -> Span:
    """value +- error; infinities and NaN stay what they are."""
    span = Span(value - error, value + error)
    if bool(torch.isfinite(value.sum())):
        return span  # no element is NaN or Inf (a finite sum that overflows only costs time)
    finite = value.isfinite()
    return Span(torch.where(finite, span.lo, value), torch.where(finite, span.hi, value))


def as_f32(x: float) -> float:
    """Rounded to f32."""
    return float(torch.tensor(x, dtype=torch.float64).to(torch.float32))


# -- epilogue ------------------------------------------------------------------------------------

# Bound before any backend's code is there, which could replace a name in the module.
_F: Final = types.SimpleNamespace(**vars(F))


def apply(step: Step, x: torch.Tensor, r: torch.Tensor | None) -> torch.Tensor:
    """One pass in float64, without rounding except for a cast."""
    if step.kind is StepKind.CAST:
        return round_to(x, step.dtype)
    function = step.spec.function
    assert function is not None, step
    made: torch.Tensor = function(_F, x, *([] if r is None else [r]), *step.numbers)
    return made


def evaluate(problem: Problem, x: torch.Tensor, steps: Iterable[tuple[Step, torch.Tensor | None]]) -> torch.Tensor:
    """Steps of an epilogue on chosen elements, in float64: for hypotheses about a wrong result.

    Args:
        problem: whose epilogue it is.
        x: values before any pass, any shape.
        steps: the passes to apply, ``problem.passes`` or a variation of them, each with its residual if it has one.
    """
    for step, residual in steps:
        x = apply(step, x, residual)
    if problem.step("requant") is not None:
        return requantised(problem, Span(x, x))[0].lo
    return round_to(x, problem.result_dtype)


def undefined_at(step: Step, span: Span, r: torch.Tensor | None) -> torch.Tensor | None:
    """Elements about which nothing can be said: implementations of one function differ there.

    gelu, silu and hardswish of -Inf are -Inf * 0 = NaN or the limit 0, depending on how they are written; a quotient
    by 0 jumps between the infinities where the numerator's sign is open.
    """
    curve = step.spec.curve
    if curve is not None and curve.undefined_at:
        infinite = span.lo == -math.inf
        if math.inf in curve.undefined_at:
            infinite = infinite | (span.hi == math.inf)
        return infinite if bool(infinite.any()) else None
    if step.name == "div" and r is not None and not span.thin:
        jump = (r == 0.0) & (span.lo <= 0.0) & (span.hi >= 0.0)
        return jump if bool(jump.any()) else None
    return None


def times(span: Span, r: torch.Tensor) -> Span:
    """span * r for an exact r of any sign."""
    lo = span.lo * r
    if span.thin:
        return Span(lo, lo)
    hi = span.hi * r
    return Span(torch.minimum(lo, hi), torch.maximum(lo, hi))


def step_span(step: Step, span: Span, r: torch.Tensor | None, arithmetic: Arithmetic, dtype: DType) -> Span:
    """The enclosure after one pass, with that pass's own error in the working precision.

    Exact steps (relu, clamp, sums and products that are representable) leave an enclosure without width
    as it is: the exact tier stays exact through them.
    """
    if step.name in _WITH_RESIDUAL:
        assert r is not None
        return _WITH_RESIDUAL[step.name](step, span, r, arithmetic)
    if step.name in _WITH_NUMBERS:
        return _WITH_NUMBERS[step.name](step, span, arithmetic, dtype)
    return _curve_span(step, span, arithmetic)


def _sum_span(step: Step, span: Span, r: torch.Tensor, arithmetic: Arithmetic) -> Span:
    term = _accumulated(step, r, arithmetic)
    lo = span.lo + term.lo
    return arithmetic.basic(Span(lo, lo if span.thin and term.thin else span.hi + term.hi))


def _div_span(_: Step, span: Span, r: torch.Tensor, arithmetic: Arithmetic) -> Span:
    lo = span.lo / r
    hi = lo if span.thin else span.hi / r
    quotient = Span(torch.minimum(lo, hi), torch.maximum(lo, hi))
    # Triton divides f32 with div.full, which is good to 2 ulp (PTX ISA), that is 4 u.
    return keep_infinite(quotient, quotient.widen(4 * arithmetic.u * torch.maximum(lo.abs(), hi.abs())))


def _leaky_relu_span(step: Step, span: Span, arithmetic: Arithmetic, _: DType) -> Span:
    """x > 0 ? x : slope * x.  For a span across 0 both branches count, and so does the value 0 itself."""
    slope = step.numbers[0]
    steep = arithmetic.basic(_either_factor(span, slope, arithmetic))
    if slope >= 0.0:
        lo = torch.where(span.lo > 0, span.lo, steep.lo)
        if span.thin and steep.thin:
            return Span(lo, lo)
        # The upper end of a factor's hull on negative numbers is the smaller magnitude: right for hi.
        return Span(lo, torch.where(span.hi > 0, span.hi, steep.hi))
    # The ends of slope * [lo, hi] are in order already.
    lo = torch.where(span.lo > 0, span.lo, torch.where(span.hi > 0, 0.0, steep.lo))
    hi = torch.where(span.lo > 0, span.hi, torch.maximum(steep.hi, torch.where(span.hi > 0, span.hi, -math.inf)))
    return Span(lo, hi)


def _accumulated(step: Step, r: torch.Tensor, arithmetic: Arithmetic) -> Span:
    """What ``sum`` adds of its residual, ``(r - zero) scale``; r itself where it has none.

    The scale is rounded to the working precision; in ``s r - s z`` both products and the difference are rounded, each
    by at most u: in all 4 u s (|r| + |z|).  Small integers times a power of two are exact.
    """
    scale, zero = step.numbers
    value = (r - zero) * scale
    if math.frexp(scale)[0] == 0.5:
        return Span(value, value)
    return around(value, (r.abs() + abs(zero)) * (4 * arithmetic.u * scale))


def _either_factor(span: Span, factor: float, arithmetic: Arithmetic) -> Span:
    """span times a constant that the kernel holds in the working precision, or in float64 as Python wrote it."""
    product = times(span, torch.tensor(factor, dtype=torch.float64))
    if arithmetic.working.name == "f64" or as_f32(factor) == factor:
        return product
    other = times(span, torch.tensor(as_f32(factor), dtype=torch.float64))
    return Span(torch.minimum(product.lo, other.lo), torch.maximum(product.hi, other.hi))


def _clamp(step: Step, span: Span, dtype: DType) -> Span:
    """Clamp; its limits may be held in float64, in f32 or in the tensor's dtype."""

    def variants(limit: float) -> tuple[float, float]:
        exact = torch.tensor(limit, dtype=torch.float64)
        found = [limit, as_f32(limit), float(round_to(exact, dtype))]
        return min(found), max(found)

    (low_min, low_max), (high_min, high_max) = variants(step.numbers[0]), variants(step.numbers[1])
    if low_min == low_max and high_min == high_max:
        return span.map(lambda x: torch.clamp(x, low_min, high_min))
    return Span(torch.clamp(span.lo, low_min, high_min), torch.clamp(span.hi, low_max, high_max))


def _curve_span(step: Step, span: Span, arithmetic: Arithmetic) -> Span:
    """The range of an activation over the span, widened by the error that its table entry allows."""
    curve = step.spec.curve
    assert curve is not None, step
    ends = span.map(lambda x: apply(step, x, None))
    if curve.error is None:
        return ends
    lo, hi = ends.lo, ends.hi
    if curve.minimum is not None:
        at, least = curve.minimum
        lo, hi = torch.minimum(lo, hi), torch.maximum(lo, hi)
        if not span.thin:
            lo = torch.where((span.lo < at) & (span.hi > at), least, lo)
    domain = Domain(
        x=torch.maximum(span.lo.abs(), span.hi.abs()),
        y=torch.maximum(lo.abs(), hi.abs()),
        below=(-span.lo).clamp(0.0, 800.0),
        u=arithmetic.u,
        flush=F32_SMALLEST_NORMAL if arithmetic.working.name != "f64" else 2.0**-1022,
    )
    error = curve.error(domain)
    result = keep_infinite(Span(lo, hi), Span(lo - error, hi + error))
    # Saturated ends are exact in every implementation, and no implementation leaves a function's range there.
    zero = span.hi <= curve.zero_below
    if math.isfinite(curve.zero_below):
        result = Span(torch.where(zero, 0.0, result.lo), torch.where(zero, 0.0, result.hi))
    low, high = curve.range
    return Span(result.lo.clamp(low, high), result.hi.clamp(low, high))


# Enclosures of the steps that meet a residual, and of those that have numbers.
_WITH_RESIDUAL: Final[Mapping[str, Callable[[Step, Span, torch.Tensor, Arithmetic], Span]]] = {
    **dict.fromkeys(("bias", "add"), lambda _, span, r, a: a.basic(span.map(lambda x: x + r))),
    "sub": lambda _, span, r, a: a.basic(span.map(lambda x: x - r)),
    "mul": lambda _, span, r, a: a.basic(times(span, r)),
    "div": _div_span,
    "sum": _sum_span,
}
_WITH_NUMBERS: Final[Mapping[str, Callable[[Step, Span, Arithmetic, DType], Span]]] = {
    "clamp": lambda step, span, _, dtype: _clamp(step, span, dtype),
    "scale": lambda step, span, a, _: a.basic(_either_factor(span, step.numbers[0], a)),
    "leaky_relu": _leaky_relu_span,
}


def cast(span: Span, source: DType, target: DType, passing: bool) -> Span:
    """After a cast.  int32 and f64 go to a 16-bit float through f32 in torch: both are accepted.

    Args:
        span: before it.
        source: the dtype that the value has.
        target: the dtype that it gets.
        passing: the value goes on in fused code, which may keep it in f32: between two steps of one kernel Inductor
            drops a conversion to a narrower type (its option ``emulate_precision_casts`` says so).
    """
    found = span.round(target)
    if target.precision >= DTYPES["f32"].precision or not target.is_float:
        return found
    if not source.is_float or source.precision > DTYPES["f32"].precision:
        through = span.round(DTYPES["f32"])
        found = union(found, through.round(target))
        span = span if source.is_float else through
    return union(found, span) if passing else found
