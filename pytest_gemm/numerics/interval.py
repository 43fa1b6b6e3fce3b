"""The truth about a problem: a reference in wider arithmetic, and what a correct kernel may return.

Two steps, because one is expensive and shared while the other depends on who is judged:

* :func:`reference` computes the product and its gauge in float64, once for a problem and its operands;
* :func:`interval` turns it into the elementwise acceptance interval of one :class:`Contract`:
  with a pre-rounding error of at most D, a result is right iff ``RNE_T(c - D) <= actual <= RNE_T(c + D)``.

Rounding is monotone, so this is tighter than adding ``u_T |c|`` and needs no tolerance.  Written so throughout:
``c`` is the product A @ B, ``G = |A| @ |B|`` and ``g = sqrt((A*A) @ (B*B))`` its gauges, ``u`` a unit roundoff,
``T`` a dtype to which something is rounded, K the number of products in a sum.

Literature: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. (2002), sections 3.1 and 4.2; Jeannerod
and Rump, SIAM J. Matrix Anal. Appl. 34 (2013), for ``K u G`` without higher-order terms in any order; Higham and
Mary, SIAM J. Sci. Comput. 41 (2019), for the ``sqrt(K)`` of zero-mean data; Fasi, Higham, Mikaitis and Pranesh,
PeerJ Comput. Sci. 7 (2021), for tensor cores.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import torch

from pytest_gemm.core.outcome import Reason
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.epilogue import Arithmetic, Span, apply, cast, reduced, requantised, step_span, undefined_at
from pytest_gemm.numerics.product import Bounding, Product, Tier, either, product_of
from pytest_gemm.numerics.reference import Reference, as_added, as_multiplied, underflowed, widened
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


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
        signs: computes where the sign bit of a result may be set, and where it may not be; ``None`` where the sign of a
            zero is not judged.
    """

    lo: torch.Tensor
    hi: torch.Tensor
    expected: torch.Tensor
    value: torch.Tensor
    product: torch.Tensor
    tier: Tier
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


def intervals(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> tuple[Interval, ...]:
    """:func:`interval` for each of :attr:`Problem.outputs`; of ``again`` for the first alone."""
    outputs = problem.outputs[:1] if problem.has("program.chained") else problem.outputs
    return tuple(interval(output, operands, reference, contract) for output in outputs)


def interval(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> Interval:
    """What a kernel under ``contract`` may return as its only result.

    Args:
        problem: what was computed.
        operands: its operands; ``quantum`` opens the exact tier, ``zero_mean`` the statistical one.
        reference: of the same problem and operands.
        contract: the arithmetic that the backend declares.
    """
    given = Bounding(problem, operands, reference, contract)
    if problem.has("steps.first") or problem.has("steps.last"):
        return _of_one(given)
    found = passed(given, product_of(given))
    return (
        found
        if problem.op.int8 or problem.a_rule != "" or problem.prologues("ab") or problem.reduction is not None
        else dataclasses.replace(found, signs=lambda: _signs_of(given))
    )


def passed(given: Bounding, product: Product) -> Interval:
    """What passes make of a product; of its enclosure they take no account of how it came about."""
    return _Passage(given, product).result()


def _signs_of(given: Bounding) -> tuple[torch.Tensor, torch.Tensor]:
    """The signs that results may have: the interval is computed once more, and they are followed through it."""
    product = product_of(given)
    signs = Signs(given, product.span, product.value)
    _Passage(given, product, signs).result()
    return signs.minus, signs.plus


class Signs:
    """Which signs a value may have on its way through the epilogue, also where it is zero.

    Rules of IEEE 754-2019, 6.3, for rounding to nearest: a sum of zeros is -0 only if each of them is; ``x - x`` is +0;
    a product and a quotient have the exclusive or of both signs; a value that underflows keeps its own.  So a sum of
    products in any order, from the first product or from +0, is +0 if it is exactly zero and one product is not -0.
    Where all of them are -0, or only nearly zero in the accumulator, the sign depends on where the sum begins, and
    where alpha is negative on what it is applied to.  Of the functions only relu fixes a sign: it is +0 of a negative
    number.

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
            unsure |= silent & underflowed(problem, given.operands).to(silent.device)
        if problem.terms or addend is not None:
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


class _Passage:
    """A value on its way from the product to the result, through every pass.

    Args:
        given: whose result it is.
        product: where it begins.
        signs: follows every pass; ``None`` where the signs of zeros are not wanted.
    """

    def __init__(self, given: Bounding, product: Product, signs: Signs | None = None) -> None:
        problem = given.problem
        self._given, self._product, self._signs = given, product, signs
        self._value, self._span, self._free = product.value, product.span, product.free
        # The steps of a kernel that computes them itself are f32, but of one that may store each.
        is_one = problem.op.fused_steps and not (given.contract.epilogue == "either" and problem.dtypes.out.is_float)
        is_written = problem.has("program.pt2e") and problem.op.fused_steps
        self._dtype = DTYPES["f32"] if is_one and not is_written else problem.value_dtype
        self._mode = "either" if is_written else "fused" if is_one else given.contract.epilogue

    @property
    def _arithmetic(self) -> Arithmetic:
        return Arithmetic(DTYPES["f64" if self._dtype.name == "f64" else "f32"], self._mode)

    def result(self) -> Interval:
        """The interval behind the last pass."""
        passes, residuals = self._given.problem.passes, iter(self._given.operands.residuals)
        for index, step in enumerate(passes):
            if index == self._given.contract.rounds_at:
                self._span = self._span.round(self._given.problem.dtypes.out)
            before, r = self._span, self._met(step, residuals)
            if step.kind is StepKind.JOIN:
                self._join(step)
            elif step.kind is StepKind.REDUCE:
                self._reduce(step)
            else:
                self._free = either(self._free, undefined_at(step, before, r))
                self._value = apply(step, self._value, r)
                if step.kind is StepKind.CAST:
                    passing = self._mode != "eager" and index < len(passes) - 1
                    self._span, self._dtype = cast(before, self._dtype, step.dtype, passing), step.dtype
                else:
                    after, self._dtype = self._after(step, r, index), step.makes(self._dtype)
                    self._span = self._arithmetic.stored(after, self._dtype)
            if self._signs is not None:
                self._signs.follow(step, before, self._span, r)
        return self._rounded()

    def _met(self, step: Step, residuals: Iterator[torch.Tensor]) -> torch.Tensor | None:
        """The operand that a step meets, in float64: the bias or the next residual; ``None`` where it meets none."""
        if step.kind is StepKind.BIAS:
            return as_added(self._given.problem, self._given.operands)
        return widened(next(residuals)) if step.kind is StepKind.BINARY else None

    def _after(self, step: Step, r: torch.Tensor | None, index: int) -> Span:
        """The enclosure behind a pass that computes, before it is stored."""
        problem, operands, contract = self._given.problem, self._given.operands, self._given.contract
        span, arithmetic, dtype = self._span, self._arithmetic, self._dtype
        fused_bias = step.kind is StepKind.BIAS and contract.epilogue != "eager"
        may_sum = (fused_bias or step.name == "shift") and index == 0 and contract.rounds_at != 0
        if may_sum and problem.dtypes.out.name != "i32" and self._product.tier != "exact":
            # A compiler may make one addmm of product and bias, whose partial sums start at the bias.
            theta = contract.theta(problem.terms, 1, out=problem.dtypes.out) - contract.input_error
            span = span.widen_finite(abs(step.numbers[0]) * theta if r is None else r.abs() * theta)
        found = step_span(step, span, r, arithmetic, dtype)
        if fused_bias and problem.autocast:
            assert operands.bias is not None
            # As with a cast on the way: fused code may add the bias as it is.
            found = found.union(step_span(step, span, widened(operands.bias), arithmetic, dtype))
        return found

    def _join(self, step: Step) -> None:
        """The activation of the first product times the second.

        The two ranges are independent, so the product's ends are among the four products of their ends.
        """
        gate, span, arithmetic, dtype = Step(step.text), self._span, self._arithmetic, self._dtype
        first, second = (span.map(lambda x: x[0]), span.map(lambda x: x[1]))
        undefined = undefined_at(gate, first, None)
        first = arithmetic.stored(step_span(gate, first, None, arithmetic, dtype), dtype)
        self._value = apply(gate, self._value[0], None) * self._value[1]
        if first.thin and second.thin:
            product = Span.of(first.lo * second.lo)
        else:
            ends = torch.stack([a * b for a in (first.lo, first.hi) for b in (second.lo, second.hi)])
            product = Span(ends.amin(0), ends.amax(0))
            undefined = either(first.may_be_nan_times(second), undefined)
        self._free = either(undefined, None if self._free is None else self._free[0] | self._free[1])
        self._span = arithmetic.stored(arithmetic.basic(product), dtype)

    def _reduce(self, step: Step) -> None:
        """A sum of what is stored or, in fused code, of what the kernel still holds; or of A."""
        value, free = self._value, self._free
        span = self._span.round(self._dtype) if self._mode == "eager" else self._span.hull(self._dtype)
        if step.text == "k":
            value, free = widened(as_multiplied(self._given.problem, self._given.operands)[0]), None
            span = Span.of(value)
        self._value = apply(step, value, None)
        self._span, unsure = reduced(step, span)
        self._free = either(unsure, None if free is None else free.any(step.dim, keepdim=True))
        self._dtype = DTYPES["f32"]

    def _rounded(self) -> Interval:
        problem, value, before = self._given.problem, self._value, self._span
        target, tier = problem.result_dtype, self._product.tier
        if problem.step("requant") is not None:
            last = requantised(problem, before)[0]
            expected, value = (span.lo for span in requantised(problem, Span.of(value)))
        else:
            last = before.round(target)
            # Where nothing widened the value its rounding is already there.
            expected = last.lo if before.lo is value else round_to(value, target)
        lo, hi = last.lo, last.hi
        if self._free is not None:
            lo, hi = torch.where(self._free, -math.inf, lo), torch.where(self._free, math.inf, hi)
        return Interval(lo, hi, expected, value, self._product.value, tier)


def _of_one(given: Bounding) -> Interval:
    """Results of ``linears`` of which one has gone through the steps, and the others have not."""
    problem = given.problem
    flags = tuple(f for f in problem.flags if f not in {"steps.first", "steps.last"})
    own = tuple(step for step in problem.epilogue if step not in problem.passes)
    alike = [dataclasses.replace(problem, epilogue=epilogue, flags=flags) for epilogue in (own, problem.epilogue)]
    bare, done = (interval(one, given.operands, given.reference, given.contract) for one in alike)
    one = torch.tensor([problem.is_one_of("steps", i) for i in range(problem.several)]).reshape(-1, 1, 1)
    tier: Tier = next(t for t in ("statistical", "hard", "exact") if t in {bare.tier, done.tier})

    fields = ("lo", "hi", "expected", "value")
    lo, hi, expected, value = (torch.where(one, getattr(done, name), getattr(bare, name)) for name in fields)
    return Interval(lo, hi, expected, value, bare.product, tier)


# -- whether a case can tell a right result from a wrong one ---------------------------------------------

# Fewer elements than this are no evidence for or against a distribution: a 1 x 1 output of int-1 data is 0
# one time in three or so.  Other distributions of the same problem stand in.
_ENOUGH_ELEMENTS: Final = 32

# Share of one value above which an output carries no information.  relu leaves half zeros, relu of a product with
# a sparse residual more; at 32 fair coins 15/16 heads has a chance of 8e-9.
_DOMINANT_SHARE: Final = 15 / 16

# Share of elements where 0 would be accepted as well, above which a kernel that computes nothing might pass.  gelu and
# silu of large integers leave half of them; at 32 elements chance makes 3/4 of that one time in 400.
_BLIND_SHARE: Final = 3 / 4

# Elements that are looked at; evenly spread over the output.
_SAMPLE: Final = 4096


def _dominant(x: torch.Tensor) -> tuple[float, float]:
    """The most frequent value, NaN counted as infinity, and its share."""
    values, counts = x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).unique(return_counts=True)
    top = int(counts.argmax())
    return float(values[top]), int(counts[top]) / x.numel()


def insensitive(problem: Problem, interval: Interval) -> Reason | None:
    """Why this case could not tell a right result from a wrong one; ``None`` when it could.

    Judged by what is expected, not by how the operands were made: an output dominated by one value, or
    intervals so wide that zero would be accepted for most elements.  K = 0 and alpha = 0 are exempt:
    there a constant is the point of the case; and so are sums of rows or columns, of which one NaN reaches all.
    """
    count = interval.expected.numel()
    if count < _ENOUGH_ELEMENTS or problem.terms == 0 or problem.alpha == 0.0 or problem.reduction is not None:
        return None
    # An odd stride, so that the sample does not run down one column of a power-of-two output.
    stride = max(1, count // _SAMPLE) | 1
    expected = interval.expected.flatten()[::stride]
    lo, hi = interval.lo.flatten()[::stride], interval.hi.flatten()[::stride]
    constant, share = _dominant(expected)
    if share > _DOMINANT_SHARE and constant == 0.0:
        text = f"{share:.0%} of the expected elements are 0: a kernel that computes nothing could pass"
        return Reason("mostly-zero", text, "choose a distribution with more non-zero products")
    # A constant that the products already have is made on purpose (k-cover); one that comes after them is not.
    if share > _DOMINANT_SHARE and _dominant(interval.product.flatten()[::stride])[1] <= _DOMINANT_SHARE:
        text = f"the epilogue turns {share:.0%} of the elements into {constant:g} whatever the product is"
        return Reason("saturated", text, "choose a distribution of smaller magnitude or of both signs")
    # Elements that must be exactly what they are (the zeros of a relu) are not blind.
    blind = int(((lo != hi) & (lo <= 0.0) & (hi >= 0.0)).sum()) / expected.numel()
    if blind > _BLIND_SHARE:
        text = f"the bound admits 0 for {blind:.0%} of the elements"
        return Reason("bound-too-wide", text, "choose an exact distribution, or a contract with a wider accumulator")
    return None
