"""Pairs of bounds, what rounding does to them, and the steps of an epilogue on values and on such pairs."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

import torch
import torch.nn.functional as F

from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Domain, Step, StepKind

# Bound before any backend's code is there, which could replace a name in the module.
_F: Final = types.SimpleNamespace(**vars(F))
_F32: Final = DTYPES["f32"]
_F32_SMALLEST_NORMAL: Final = 2.0**-126


# -- pairs of bounds -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Span:
    """An enclosure on its way through the epilogue.  ``lo is hi`` as long as it has no width: that halves the work."""

    lo: torch.Tensor
    hi: torch.Tensor

    @classmethod
    def of(cls, value: torch.Tensor, error: torch.Tensor | None = None) -> Span:
        """value +- error, or the value alone; infinities and NaN stay what they are."""
        if error is None:
            return cls(value, value)
        span = cls(value - error, value + error)
        if bool(torch.isfinite(value.sum())):
            return span  # no element is NaN or Inf (a finite sum that overflows only costs time)
        finite = value.isfinite()
        return cls(torch.where(finite, span.lo, value), torch.where(finite, span.hi, value))

    @property
    def thin(self) -> bool:
        """Whether the enclosure is one value."""
        return self.lo is self.hi

    @property
    def size(self) -> torch.Tensor:
        """The largest magnitude of each element."""
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Span:
        """Both ends through a function that does not decrease."""
        lo = f(self.lo)
        return Span(lo, lo if self.thin else f(self.hi))

    def turned(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Span:
        """Both ends through a function that rises for some elements and falls for others."""
        ends = self.map(f)
        return ends if ends.thin else Span(torch.minimum(ends.lo, ends.hi), torch.maximum(ends.lo, ends.hi))

    def times(self, factor: float) -> Span:
        """The product with a number of either sign."""
        return self.turned(lambda x: x * factor)

    def plus(self, other: Span) -> Span:
        """The sum with an independent value."""
        lo = self.lo + other.lo
        return Span(lo, lo if self.thin and other.thin else self.hi + other.hi)

    def may_be_nan_times(self, other: Span) -> torch.Tensor:
        """Where it depends on roundings whether the product with an independent value is 0 * Inf, which is NaN."""
        pairs = (self, other), (other, self)
        meets = [(x.lo <= 0.0) & (x.hi >= 0.0) & (y.lo.isinf() | y.hi.isinf()) for x, y in pairs]
        return (meets[0] | meets[1]) & ((self.lo < self.hi) | (other.lo < other.hi))

    def cover(self, other: Span) -> Span:
        """The smallest span that contains both."""
        return Span(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi))

    def union(self, other: Span) -> Span:
        """The smallest span that contains both; thin if both are the same number everywhere."""
        return self if self.thin and other.thin and torch.equal(self.lo, other.lo) else self.cover(other)

    def widen(self, by: torch.Tensor) -> Span:
        """Outwards by ``by >= 0``."""
        return Span(self.lo - by, self.hi + by)

    def widen_finite(self, by: torch.Tensor | float) -> Span:
        """The same where the ends are finite: Inf - Inf would be NaN."""
        lo, hi = self.lo - by, self.hi + by
        return Span(torch.where(lo.isnan(), self.lo, lo), torch.where(hi.isnan(), self.hi, hi))

    def round(self, dtype: DType) -> Span:
        """Rounded for certain."""
        return self.map(lambda x: round_to(x, dtype))

    def hull(self, dtype: DType) -> Span:
        """Contains both the unrounded and the rounded: for a rounding that a kernel may or may not make."""
        return self.union(self.round(dtype))


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a contract computes the epilogue.

    Attributes:
        working: the dtype of one operation: f64 on f64 tensors, f32 on all others.
        mode: the contract's ``epilogue``.
    """

    working: DType
    mode: Literal["fused", "eager", "either"]

    def basic(self, span: Span) -> Span:
        """After a correctly rounded operation (+ - * /) whose exact result ``span`` encloses.

        Rounding is monotone, so rounded ends enclose the rounded result, and exact results stay exact.  A
        compiler may contract a product and a sum into one FMA that skips the rounding between: the hull
        contains both.
        """
        if self.working.name != "f64":
            return span.hull(self.working)
        # The ends were themselves computed in float64: an ulp of the unrounded result is not visible here.
        return span if span.thin else span.widen_finite(2.0**-52 * span.size)

    def stored(self, span: Span, dtype: DType) -> Span:
        """After an operation whose result becomes a tensor of ``dtype`` in eager PyTorch.

        ``either`` contains the rounded and the unrounded at each such place, hence also programs that are
        fused in part.
        """
        if self.mode == "fused" or not dtype.is_float:
            return span
        return span.hull(dtype) if self.mode == "either" else span.round(dtype)

    def apart(self, span: Span, dtype: DType) -> Span:
        """After a scaled product that a program adds its bias to before it stores anything: ``either`` alone may."""
        return span.hull(dtype) if self.mode == "either" and dtype.is_float else span


def powers_of_two(*scales: torch.Tensor) -> bool:
    """Whether multiplying by these costs no rounding."""
    return all(bool((torch.frexp(scale)[0].abs() == 0.5).all()) for scale in scales)


def wrap_int32(c: torch.Tensor) -> torch.Tensor:
    """Two's complement wrap of exact integers, which is what torch's int32 accumulation does."""
    if c.numel() == 0 or float(c.abs().amax()) < 2.0**31:
        return c
    return torch.remainder(c + 2.0**31, 2.0**32) - 2.0**31


# -- steps -----------------------------------------------------------------------------------------------


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
    y = span.map(lambda x: x / scale)
    if not _is_power_of_two(scale):
        y = y.widen(y.size * (3 * _F32.unit_roundoff))
    after = y.map(lambda x: torch.round(x) + zero)
    shifted = y.map(lambda x: torch.round(round_to(x + zero, _F32)))
    codes = after.union(shifted).map(lambda x: x.clamp(low, high))
    return codes, y.map(lambda x: (x + zero).clamp(low, high))


def _is_power_of_two(x: float) -> bool:
    return math.frexp(x)[0] == 0.5


def in_dtype(x: float, dtype: DType = _F32) -> float:
    """A number of the program as a kernel may hold it: rounded, by default to f32."""
    return float(round_to(torch.tensor(x, dtype=torch.float64), dtype))


def converted(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Values after a cast, in float64: rounded to a float type, cut toward zero to an integer, as in C and PyTorch."""
    return round_to(x, dtype) if dtype.is_float else torch.trunc(x) + 0.0  # integers have one zero


def apply(step: Step, x: torch.Tensor, r: torch.Tensor | None) -> torch.Tensor:
    """One pass in float64, without rounding except for a cast."""
    if step.kind is StepKind.CAST:
        return converted(x, step.dtype)
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
    """Elements where everything is accepted: implementations of one function differ there.

    gelu, silu and hardswish of -Inf are -Inf * 0 = NaN or the limit 0, depending on how they are written; a product
    may be 0 * Inf, and a quotient by 0 jumps between the infinities, where it is open on which side of 0 a value lies.
    """
    curve = step.spec.curve
    if curve is not None and curve.undefined_at:
        infinite = span.lo == -math.inf
        if math.inf in curve.undefined_at:
            infinite = infinite | (span.hi == math.inf)
        return infinite if bool(infinite.any()) else None
    if step.name in {"mul", "div"} and r is not None and not span.thin:
        unsure = span.may_be_nan_times(Span.of(r if step.name == "mul" else 1.0 / r))
        return unsure if bool(unsure.any()) else None
    return None


@dataclasses.dataclass(frozen=True)
class _Pass:
    """One step of the epilogue.

    Attributes:
        step: of the epilogue.
        span: the enclosure of the value that it is applied to.
        operand: the bias or residual that it meets, float64; empty for none.
        arithmetic: how the step is computed.
        dtype: of the tensor that eager PyTorch makes.
    """

    step: Step
    span: Span
    operand: torch.Tensor
    arithmetic: Arithmetic
    dtype: DType


def reduced(step: Step, span: Span) -> tuple[Span, torch.Tensor]:
    """The enclosure after a sum or a mean of squares in f32, and where anything is right: it may overflow on the way.

    A sum of n numbers in any order loses at most n u times the sum of their magnitudes (Higham, 2002, section 4.2).
    A square and the quotient of a mean are one more rounding each, and a square may underflow.
    """
    is_mean, count = step.name == "squares", span.lo.shape[step.dim]
    if is_mean:
        squares = span.turned(torch.square)
        span = Span(torch.where((span.lo < 0.0) & (span.hi > 0.0), 0.0, squares.lo), squares.hi)
    gauge = torch.where(span.size.isfinite(), span.size, 0.0).sum(step.dim, keepdim=True)
    error = gauge * ((count + 2) * _F32.unit_roundoff) + count * 2.0**-149
    found = span.map(lambda x: x.sum(step.dim, keepdim=True)).widen_finite(error)
    unsure = (found.lo != found.hi) & ~found.size.isfinite() & ~(found.lo.isnan() & found.hi.isnan())
    unsure |= gauge > _F32.max_finite * 0.99
    return found.map(lambda x: x / count) if is_mean else found, unsure


def step_span(step: Step, span: Span, r: torch.Tensor | None, arithmetic: Arithmetic, dtype: DType) -> Span:
    """The enclosure after one pass, with that pass's own error in the working precision.

    Exact steps (relu, clamp, sums and products that are representable) leave an enclosure without width
    as it is: the exact tier stays exact through them.
    """
    one = _Pass(step, span, torch.empty(0) if r is None else r, arithmetic, dtype)
    if step.name in _ROUNDED:
        return arithmetic.basic(_ROUNDED[step.name](one))
    return _OTHERS.get(step.name, _curve)(one)


def _div(p: _Pass) -> Span:
    quotient = p.span.turned(lambda x: x / p.operand)
    # Triton divides f32 with div.full, which is good to 2 ulp (PTX ISA), that is 4 u.
    return quotient.widen_finite(4 * p.arithmetic.working.unit_roundoff * quotient.size)


def _leaky_relu(p: _Pass) -> Span:
    """x > 0 ? x : slope * x.  For a span across 0 both branches count, and so does the value 0 itself."""
    span, slope = p.span, p.step.numbers[0]
    steep = p.arithmetic.basic(_either_factor(p))
    if slope >= 0.0:
        lo = torch.where(span.lo > 0, span.lo, steep.lo)
        # The upper end of a factor's hull on negative numbers is the smaller magnitude: right for hi.
        return Span(lo, lo if span.thin and steep.thin else torch.where(span.hi > 0, span.hi, steep.hi))
    # The ends of slope * [lo, hi] are in order already.
    lo = torch.where(span.lo > 0, span.lo, torch.where(span.hi > 0, 0.0, steep.lo))
    hi = torch.where(span.lo > 0, span.hi, torch.maximum(steep.hi, torch.where(span.hi > 0, span.hi, -math.inf)))
    return Span(lo, hi)


def accumulated(step: Step, r: torch.Tensor, arithmetic: Arithmetic) -> Span:
    """What ``sum`` adds of its residual, ``(r - zero) scale``; r itself where it has none.

    The scale is rounded to the working precision; in ``s r - s z`` both products and the difference are rounded, each
    by at most u: in all 4 u s (|r| + |z|).  Small integers times a power of two are exact.
    """
    scale, zero = step.numbers
    error = None if _is_power_of_two(scale) else (r.abs() + abs(zero)) * (4 * arithmetic.working.unit_roundoff * scale)
    return Span.of((r - zero) * scale, error)


def _either_factor(p: _Pass) -> Span:
    """The span times a constant that the kernel holds in the working precision, or in float64 as Python wrote it."""
    factor = p.step.numbers[0]
    product, held = p.span.times(factor), in_dtype(factor)
    return product if p.arithmetic.working.name == "f64" or held == factor else product.cover(p.span.times(held))


def _shift(p: _Pass) -> Span:
    """The sum with a constant, which PyTorch gives the dtype of the value first where it adds eagerly."""
    term = p.step.numbers[0]
    forms = {term} if p.arithmetic.working.name == "f64" else {term, in_dtype(term), in_dtype(term, p.dtype)}
    lo, hi = p.span.lo + min(forms), p.span.hi + max(forms)
    return Span(lo, lo if p.span.thin and len(forms) == 1 else hi)


def _clamp(p: _Pass) -> Span:
    """Clamp; its limits may be held in float64, in f32 or in the tensor's dtype."""
    limits = [(x, in_dtype(x), in_dtype(x, p.dtype)) for x in p.step.numbers]
    lowest, highest = ([end(variants) for variants in limits] for end in (min, max))
    lo = p.span.lo.clamp(*lowest)
    return Span(lo, lo if p.span.thin and lowest == highest else p.span.hi.clamp(*highest))


def _curve(p: _Pass) -> Span:
    """The range of an activation over the span, widened by the error that its table entry allows."""
    span, curve = p.span, p.step.spec.curve
    assert curve is not None, p.step
    ends = span.map(lambda x: apply(p.step, x, None))
    if curve.error is None:
        return ends
    if curve.minimum is not None:
        at, least = curve.minimum
        ends = Span(torch.minimum(ends.lo, ends.hi), torch.maximum(ends.lo, ends.hi))
        if not span.thin:
            ends.lo = torch.where((span.lo < at) & (span.hi > at), least, ends.lo)
    working, below = p.arithmetic.working, (-span.lo).clamp(0.0, 800.0)
    flush = 2.0**-1022 if working.name == "f64" else _F32_SMALLEST_NORMAL
    domain = Domain(x=span.size, y=ends.size, below=below, u=working.unit_roundoff, flush=flush)
    result = ends.widen_finite(curve.error(domain))
    # Saturated ends are exact in every implementation, and no implementation leaves a function's range there.
    if math.isfinite(curve.zero_below):
        zero = span.hi <= curve.zero_below
        result = Span(torch.where(zero, 0.0, result.lo), torch.where(zero, 0.0, result.hi))
    return Span(result.lo.clamp(*curve.range), result.hi.clamp(*curve.range))


# Enclosures of the exact result of a step that is rounded once, and of the other steps that are no plain activation.
_ROUNDED: Final[Mapping[str, Callable[[_Pass], Span]]] = {
    **dict.fromkeys(("bias", "add"), lambda p: p.span.map(lambda x: x + p.operand)),
    "sub": lambda p: p.span.map(lambda x: x - p.operand),
    "mul": lambda p: p.span.turned(lambda x: x * p.operand),
    "sum": lambda p: p.span.plus(accumulated(p.step, p.operand, p.arithmetic)),
    "scale": _either_factor,
    "shift": _shift,
}
_OTHERS: Final[Mapping[str, Callable[[_Pass], Span]]] = {"div": _div, "clamp": _clamp, "leaky_relu": _leaky_relu}


def cast(span: Span, source: DType, target: DType, passing: bool) -> Span:
    """After a cast, see :func:`converted`.  int32 and f64 go to a 16-bit float through f32 in torch: both are accepted.

    Args:
        span: before it.
        source: the dtype that the value has.
        target: the dtype that it gets.
        passing: the value goes on in fused code, which may keep it in f32: between two steps of one kernel Inductor
            drops a conversion to a narrower type (its option ``emulate_precision_casts``).
    """
    found = span.map(lambda x: converted(x, target))
    if target.precision >= _F32.precision or not target.is_float:
        return found
    if not source.is_float or source.precision > _F32.precision:
        through = span.round(_F32)
        found = found.union(through.round(target))
        span = span if source.is_float else through
    return found.union(span) if passing else found
