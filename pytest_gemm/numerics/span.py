"""Pairs of bounds, and what rounding does to them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import torch

from pytest_gemm.numerics.error import Tier
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DType

if TYPE_CHECKING:
    from pytest_gemm.numerics.signs import Signs


F32_SMALLEST_NORMAL: Final = 2.0**-126


# -- the interval --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Interval:
    """What a correct result may be, element by element.  All tensors float64, of the problem's result shape.

    Where ``lo`` and ``hi`` are NaN the result must be NaN, where they are the same infinity it must be that
    infinity.  ``lo = -Inf`` with ``hi = Inf`` says nothing: there a partial sum may or may not overflow
    depending on the order, so NaN is right as well.

    Attributes:
        lo: smallest accepted value, representable in the result's dtype.
        hi: largest accepted value, representable too.
        expected: the reference after an exact epilogue, rounded to the result's dtype once.
        value: the same before that rounding.
        product: the reference before any pass: with alpha, the op's own bias and scale.
        tier: what decided: ``exact`` (no error before the epilogue is possible), ``hard`` (a violation proves a
            bug under the contract) or ``statistical`` (zero-mean data; false alarm 1e-9 a result).
        _signs: makes the signs that results may have; ``None`` where the sign of a zero is not judged.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    expected: torch.Tensor
    value: torch.Tensor
    product: torch.Tensor
    tier: Tier
    _before: tuple[torch.Tensor, torch.Tensor]
    _signs: Callable[[], Signs] | None = None

    @functools.cached_property
    def signed(self) -> torch.Tensor:
        """Where a zero must have the sign of ``expected``; bool.  Costs as much as the interval."""
        negative = self.expected.signbit()
        if self._signs is None:
            return torch.zeros_like(negative)
        signs = self._signs()
        found = torch.where(negative, signs.minus & ~signs.plus, signs.plus & ~signs.minus)
        return found & ~((self.lo == -math.inf) & (self.hi == math.inf))

    def wrong_zeros(self, x: torch.Tensor) -> torch.Tensor:
        """Which elements are zeros of the wrong sign; of a result in float64, of the interval's shape."""
        found = (x == 0.0) & (x.signbit() != self.expected.signbit())
        return found & self.signed if bool(found.any()) else found

    @functools.cached_property
    def bound(self) -> torch.Tensor:
        """Half the interval's width before the last rounding: D after the epilogue, for error/bound ratios."""
        lo, hi = self._before
        return torch.zeros_like(hi) if lo is hi else (hi - lo).mul_(0.5)


@dataclasses.dataclass
class Span:
    """An enclosure on its way through the epilogue.  ``lo is hi`` as long as it has no width: that halves the work."""

    lo: torch.Tensor
    hi: torch.Tensor

    @property
    def thin(self) -> bool:
        """Whether the enclosure is one value."""
        return self.lo is self.hi

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Span:
        """Both ends through a function that does not decrease."""
        lo = f(self.lo)
        return Span(lo, lo if self.thin else f(self.hi))

    def widen(self, by: torch.Tensor) -> Span:
        """Outwards by ``by >= 0``."""
        return Span(self.lo - by, self.hi + by)

    def hull(self, dtype: DType) -> Span:
        """Contains both the unrounded and the rounded: for a rounding that a kernel may or may not make."""
        lo = round_to(self.lo, dtype)
        if self.thin:
            if torch.equal(lo, self.lo):
                return self
            return Span(torch.minimum(lo, self.lo), torch.maximum(lo, self.lo))
        return Span(torch.minimum(lo, self.lo), torch.maximum(round_to(self.hi, dtype), self.hi))

    def round(self, dtype: DType) -> Span:
        """Rounded for certain."""
        return self.map(lambda x: round_to(x, dtype))


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
        if span.thin:
            return span
        return keep_infinite(span, span.widen(2.0**-52 * torch.maximum(span.lo.abs(), span.hi.abs())))

    def stored(self, span: Span, dtype: DType) -> Span:
        """After an operation whose result becomes a tensor of ``dtype`` in eager PyTorch.

        ``either`` contains the rounded and the unrounded at each such place, hence also programs that are
        fused in part.
        """
        if self.mode == "fused" or not dtype.is_float:
            return span
        if self.mode == "either":
            return span.hull(dtype)
        return span.round(dtype)


# -- integers with scales ------------------------------------------------------------------------


def powers_of_two(*scales: torch.Tensor) -> bool:
    """Whether multiplying by these costs no rounding."""
    return all(bool((torch.frexp(scale)[0].abs() == 0.5).all()) for scale in scales)


def wrap_int32(c: torch.Tensor) -> torch.Tensor:
    """Two's complement wrap of exact integers, which is what torch's int32 accumulation does."""
    if c.numel() == 0 or float(c.abs().amax()) < 2.0**31:
        return c
    return torch.remainder(c + 2.0**31, 2.0**32) - 2.0**31


def keep_infinite(before: Span, after: Span) -> Span:
    """Widening an infinity gives Inf - Inf = NaN; put the infinity back."""
    lo = torch.where(after.lo.isnan(), before.lo, after.lo)
    hi = torch.where(after.hi.isnan(), before.hi, after.hi)
    return Span(lo, hi)


def union(a: Span, b: Span) -> Span:
    """The smallest span that contains both; thin if both are the same number everywhere."""
    if a.thin and b.thin and torch.equal(a.lo, b.lo):
        return a
    return Span(torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi))
