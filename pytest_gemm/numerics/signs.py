"""The sign of a zero, where IEEE 754 decides it."""

from __future__ import annotations

import math

import torch

from pytest_gemm.numerics.error import Bounding
from pytest_gemm.numerics.reference import underflowed
from pytest_gemm.numerics.span import Span
from pytest_gemm.problem.steps import Step, StepKind


class Signs:
    """Which signs a value may have on its way through the epilogue, also where it is zero.

    Rules of IEEE 754-2019, 6.3, for rounding to nearest: a sum of zeros is -0 only if each of them is; ``x - x`` is +0;
    a product and a quotient have the exclusive or of both signs; a value that underflows keeps its own.  So a sum of
    products in any order, from the first product or from +0, is +0 if it is exactly zero and one product is not -0.
    Where all of them are -0, or only nearly zero in the accumulator, the sign depends on where the sum begins, and
    where alpha is negative on what it is applied to.  Of functions only relu says more: of a negative number it is +0.

    Args:
        given: whose results they are.
        span: the enclosure of the product with its own bias and scale.
        value: the same without any error.

    Attributes:
        minus, plus: where the sign bit may be set, and where it may not be; bool, of the result's shape.
    """

    minus: torch.Tensor
    plus: torch.Tensor

    def __init__(self, given: Bounding, span: Span, value: torch.Tensor) -> None:
        problem, reference, addend = given.problem, given.reference, given.addend
        self._from(span, problem.dtypes.out.is_float)
        if not problem.dtypes.out.is_float:
            return
        silent = reference.big == 0.0
        # Ends of -0 and +0 are numbers on both sides of zero that were rounded: the sum is only nearly zero.
        thin = (span.lo == 0.0) & (span.hi == 0.0) & (span.lo.signbit() == span.hi.signbit())
        zero = (value == 0.0) & (silent | thin)
        unsure = torch.full_like(zero, problem.alpha <= 0.0)
        if problem.dtypes.out.name == "f64":
            unsure |= silent & underflowed(problem, given.operands)
        if problem.shape.k or addend is not None:
            unsure |= silent & reference.opposed
        if addend is not None:
            unsure &= (addend == 0.0) & addend.signbit()
        self.minus, self.plus = torch.where(zero, unsure, self.minus), self.plus | zero

    def _from(self, span: Span, has_zeros: bool) -> None:
        """The signs of the ends; integers have no negative zero."""
        if has_zeros:
            self.minus, self.plus = span.lo.signbit(), ~span.hi.signbit()
        else:
            self.minus, self.plus = span.lo < 0.0, ~(span.hi < 0.0)

    def follow(self, step: Step, before: Span, after: Span, r: torch.Tensor | None) -> None:
        """The signs after a pass that met ``r``."""
        minus, plus = self.minus, self.plus
        if step.name in {"mul", "div", "scale"}:
            turned = torch.tensor(math.copysign(1.0, step.numbers[0]) < 0.0) if r is None else r.signbit()
            self.minus, self.plus = torch.where(turned, plus, minus), torch.where(turned, minus, plus)
        elif step.name in {"bias", "add", "sub"}:
            assert r is not None
            term = -r if step.name == "sub" else r
            zero = (before.lo == -term) & (before.hi == -term)
            self._from(after, True)
            self.minus = torch.where(zero, minus & (term == 0.0) & term.signbit(), self.minus)
            self.plus = torch.where(zero, plus | (term != 0.0) | ~term.signbit(), self.plus)
        elif step.name == "relu":
            self.minus, self.plus = minus & ~(before.hi < 0.0), torch.ones_like(plus)
        elif step.kind is not StepKind.CAST:
            self.minus, self.plus = ~(after.lo > 0.0), ~(after.hi < 0.0)
        elif not step.dtype.is_float:
            self._from(after, False)
