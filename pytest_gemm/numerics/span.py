"""Pairs of bounds, and what rounding does to them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Final, Literal

import torch

from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DType

Tier = Literal["exact", "hard", "statistical"]

F32_SMALLEST_NORMAL: Final = 2.0**-126


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
class Interval:
    """What a correct result may be, element by element.  All tensors float64, of the problem's result shape.

    Where ``lo`` and ``hi`` are NaN the result must be NaN, where they are the same infinity it must be that
    infinity.  ``lo = -Inf`` with ``hi = Inf`` accepts everything: there a partial sum may or may not overflow
    depending on the order, so NaN is right as well.

    Attributes:
        lo: smallest accepted value, representable in the result's dtype.
        hi: largest accepted value, representable too.
        expected: the reference after an exact epilogue, rounded to the result's dtype once.
        value: the same before that rounding.
        product: the reference before any pass: with alpha, the op's own bias and scale.
        tier: what decided: ``exact`` (no error before the epilogue is possible), ``hard`` (a violation proves a
            bug under the contract) or ``statistical`` (zero-mean data; false alarm 1e-9 a result).
        before: the enclosure before the last rounding.
        signs: computes where the sign bit of a result may be set, and where it may not be; ``None`` where the sign of a
            zero is not judged.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    expected: torch.Tensor
    value: torch.Tensor
    product: torch.Tensor
    tier: Tier
    before: Span
    signs: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None

    @functools.cached_property
    def signed(self) -> torch.Tensor:
        """Where a zero must have the sign of ``expected``; bool.  Costs as much as the interval."""
        negative = self.expected.signbit()
        if self.signs is None:
            return torch.zeros_like(negative)
        minus, plus = self.signs()
        found = torch.where(negative, minus & ~plus, plus & ~minus)
        return found & ~((self.lo == -math.inf) & (self.hi == math.inf))

    def wrong_zeros(self, x: torch.Tensor) -> torch.Tensor:
        """Which elements are zeros of the wrong sign; of a result in float64, of the interval's shape."""
        found = (x == 0.0) & (x.signbit() != self.expected.signbit())
        return found & self.signed if bool(found.any()) else found

    @functools.cached_property
    def bound(self) -> torch.Tensor:
        """Half the interval's width before the last rounding: D after the epilogue, for error/bound ratios."""
        lo, hi = self.before.lo, self.before.hi
        return torch.zeros_like(hi) if self.before.thin else (hi - lo).mul_(0.5)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a contract computes the epilogue.

    Attributes:
        working: the dtype of one operation: f64 on f64 tensors, f32 on all others.
        mode: the contract's ``epilogue``.
    """

    working: DType
    mode: Literal["fused", "eager", "either"]

    @property
    def u(self) -> float:
        """Unit roundoff of the working type."""
        return self.working.unit_roundoff

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


def powers_of_two(*scales: torch.Tensor) -> bool:
    """Whether multiplying by these costs no rounding."""
    return all(bool((torch.frexp(scale)[0].abs() == 0.5).all()) for scale in scales)


def wrap_int32(c: torch.Tensor) -> torch.Tensor:
    """Two's complement wrap of exact integers, which is what torch's int32 accumulation does."""
    if c.numel() == 0 or float(c.abs().amax()) < 2.0**31:
        return c
    return torch.remainder(c + 2.0**31, 2.0**32) - 2.0**31
