"""The truth about a problem: a reference in wider arithmetic, and what a correct kernel may return.

Two steps, because one is expensive and shared while the other depends on who is judged:

* :func:`reference` computes the product and its gauge in float64, once for a problem and its operands;
* :func:`interval` turns it into the elementwise acceptance interval of one ``backend.Contract``:
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
from typing import TYPE_CHECKING, Final, Literal

import torch
import torch.nn.functional as F

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.outcome import Reason
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.ops import OWN_BIAS, PROGRAMS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind
from pytest_gemm.rounding import round_to

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

__all__ = [
    "Interval",
    "Reference",
    "Tier",
    "as_added",
    "evaluate",
    "as_multiplied",
    "insensitive",
    "interval",
    "intervals",
    "reference",
    "spread_of",
    "statistical_theta",
    "statistics_apply",
]

# Bound before any backend's code is there, which could replace the name in the module.
_matmul: Final = torch._C._VariableFunctions.matmul

Tier = Literal["exact", "hard", "statistical"]

# Probability with which a correct kernel may leave the statistical interval, over a whole output.
_FALSE_ALARM: Final = 1e-9

# Below this K the hard bound is used alone.  The statistical one leans on partial sums that are averages over
# many terms, and it is hardly tighter there: sqrt(K) g >= G (Cauchy-Schwarz), so lambda sqrt(K) g undercuts K G
# only from K of about lambda^2 on, and lambda is about 8.
_STATISTICAL_K: Final = 64

_F32_SMALLEST_NORMAL: Final = 2.0**-126


# -- the reference -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reference:
    """The product of a problem's operands in wider arithmetic, before alpha, bias, scales and epilogue.

    Attributes:
        c: A @ B, float64, of the problem's result shape; integers exactly.  NaN and Inf as IEEE arithmetic gives
            them in any order of summation.  Of a grouped product: each group's rows of A times its own B.  Of
            ``linears``: (G, M, N), one product after the other.
        own_theta: factor of G that bounds the error of ``c`` itself.
        slack: a further absolute bound of it, float64, of c's shape; ``None`` for none.
    """

    c: torch.Tensor
    own_theta: float
    slack: torch.Tensor | None
    _a: torch.Tensor
    _b: torch.Tensor
    _groups: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def big(self) -> torch.Tensor:
        """G = |A| @ |B|, the hard gauge, float64, of c's shape."""
        return _multiply(_wide(self._a).abs_(), _wide(self._b).abs_(), self._groups)

    @functools.cached_property
    def opposed(self) -> torch.Tensor:
        """Where each product has a negative sign, that of a zero included; bool, of c's shape."""
        a, b = (x.signbit().to(torch.float64) for x in (_wide(self._a), _wide(self._b)))
        return (_multiply(a, b, self._groups) + _multiply(1.0 - a, 1.0 - b, self._groups)) == 0.0

    @functools.cached_property
    def small(self) -> torch.Tensor:
        """g = sqrt((A*A) @ (B*B)), the statistical gauge, float64, of c's shape; computed on first use."""
        return _multiply(_wide(self._a).square_(), _wide(self._b).square_(), self._groups).sqrt_()

    def fits(self, bits: int) -> bool:
        """Whether no element of A and B needs more than ``bits`` significand bits."""

        def narrow(x: torch.Tensor) -> bool:
            significand = torch.frexp(_wide(x))[0] * 2.0**bits
            return torch.equal(significand, significand.round())

        return narrow(self._a) and narrow(self._b)

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite G: what every partial sum in any order stays below.  0 for an empty output."""
        if self.big.numel() == 0:
            return 0.0
        largest = float(self.big.amax())
        if math.isfinite(largest):
            return largest
        finite = self.big[self.big.isfinite()]
        return float(finite.amax()) if finite.numel() else 0.0


def _wide(x: torch.Tensor) -> torch.Tensor:
    """A float64 copy on the CPU that may be written to.  The one place that knows where references are computed."""
    return x.detach().to(device="cpu", dtype=torch.float64, copy=True)


def _multiply(a: torch.Tensor, b: torch.Tensor, groups: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """a @ b, or with groups the rows of each times its own matrix of b."""
    if not groups:
        return _matmul(a, b)
    return torch.cat([_matmul(a[first:last], b[index]) for index, (first, last) in enumerate(groups)])


def as_multiplied(problem: Problem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as the product multiplies them.

    Under autocast on the CPU, rounded once to the half type; A without its zero point, and B's codes of 4 bits with
    their scales and zeros, both exact in float64.  Otherwise they are the operands themselves.
    """
    if operands.affine is not None:
        return operands.a, operands.weight
    if operands.zero:
        return _wide(operands.a) - operands.zero, operands.b
    if not problem.autocast:
        return operands.a, operands.b
    half = problem.input_dtype
    dtype = torch_dtype(half)
    # Rounded already: the conversion to the half type changes nothing.
    return round_to(_wide(operands.a), half).to(dtype), round_to(_wide(operands.b), half).to(dtype)


def as_added(problem: Problem, operands: Operands) -> torch.Tensor | None:
    """The bias operand in float64, under autocast rounded to the half type; ``None`` where there is none."""
    if operands.bias is None:
        return None
    wide = _wide(operands.bias)
    return round_to(wide, problem.input_dtype) if problem.autocast else wide


def reference(problem: Problem, operands: Operands) -> Reference:
    """The product in arithmetic wide enough that its own error cannot decide a verdict.

    Products of two f32 (24 bits) or narrower numbers are exact in float64, so plain float64 leaves
    ``(K - 1) 2^-53 G``; integer operands give integers below 2^53, hence no error.  For f64 problems see
    :func:`_beyond_float64`.

    Raises:
        ValueError: for an op whose arithmetic is not described here.
    """
    if problem.op.name not in PROGRAMS:
        raise ValueError(f"the oracle has no reference for {problem.op.name}; it knows {' '.join(sorted(PROGRAMS))}")
    given = as_multiplied(problem, operands)
    a, b = _wide(given[0]), _wide(given[1])
    groups = operands.groups
    if problem.dtypes.out.name == "f64":
        if groups:
            parts = [_beyond_float64(a[first:last], b[index]) for index, (first, last) in enumerate(groups)]
            c, slack = torch.cat([c for c, _ in parts]), torch.cat([slack for _, slack in parts])
        else:
            c, slack = _beyond_float64(a, b)
        return Reference(c, 0.0, slack, *given, groups)
    integers = not (problem.dtypes.a.is_float or problem.dtypes.b.is_float)
    if operands.affine is not None:
        return Reference(_multiply(a, b, groups), (problem.shape.k - 1) * 2.0**-53, _dequantised(a, operands), *given)
    own_theta = 0.0 if integers else max(0, problem.shape.k - 1) * 2.0**-53
    return Reference(_multiply(a, b, groups), own_theta, None, *given, groups)


def _dequantised(a: torch.Tensor, operands: Operands) -> torch.Tensor:
    """What the products lose where ``w = (code - 8) scale + zero`` is computed in f32: ``u |A| @ (|w - zero| + |w|)``.

    The difference is exact and the product costs one rounding, which only f32 scales need, the sum another; with an FMA
    it is one of both.
    """
    assert operands.affine is not None
    zeros = _wide(operands.affine)[..., 1].repeat_interleave(operands.problem.group_size, 0)
    w = operands.weight
    return _matmul(a.abs(), (w - zeros).abs() + w.abs()) * 2.0**-24


def _beyond_float64(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A @ B for float64 operands with an error far below that of any float64 kernel, and a bound of that error.

    Each operand is cut once, as in the scheme of Ozaki, Ogita, Oishi and Rump (Numer. Algorithms 59, 2012):
    A = A1 + R with A1 the multiples of ``s_i 2^-w`` nearest to row i, B = B1 + S likewise by columns, and
    ``2 w + log2 K <= 52``.  Every sum of A1 @ B1 is then exact in float64.  The rest, A1 @ S + R @ B, is some
    2^-w smaller, and so is the rounding error ``K 2^-53`` of its plain float64 product.  At K = 8192 that is
    about 2^-18 of the kernel's bound ``K 2^-53 G``; the last additions cost 2 roundings.  Operands with an
    enormous range within a row make the returned bound larger, never wrong.
    """
    k = a.shape[-1]
    if k == 0 or 0 in a.shape or 0 in b.shape:
        c = _matmul(a, b)
        return c, torch.zeros_like(c)
    width = (52 - math.ceil(math.log2(k))) // 2
    a1, a_scale = _cut(a, -1, width)
    b1, b_scale = _cut(b, -2, width)
    rest_a, rest_b = a - a1, b - b1
    c = _matmul(a1, b1) + (_matmul(a1, rest_b) + _matmul(rest_a, b))
    # |R| <= s_i 2^-w / 2 and |S| likewise; sums of K terms, each with K roundings, twice.
    unit = 2.0 ** (-width - 1) * k * 2.0**-53
    slack = unit * (a_scale * b.abs().sum(-2, keepdim=True) + a.abs().sum(-1, keepdim=True) * b_scale)
    slack = slack + 2.0**-52 * c.abs() + k * 2.0**-1073
    # Inf and NaN cannot be cut: what plain float64 says of such elements is what IEEE arithmetic says in any order.
    finite = a.isfinite().all(-1, keepdim=True) & b.isfinite().all(-2, keepdim=True)
    finite = finite & c.isfinite()
    if not bool(finite.all()):
        c = torch.where(finite, c, _matmul(a, b))
        slack = torch.where(finite, slack, 0.0)
    return c, slack


def _cut(x: torch.Tensor, dim: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x to the nearest multiple of ``s 2^-width``, and s: the power of two above the largest along ``dim``."""
    largest = torch.where(x.isfinite(), x, 0.0).abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.frexp(largest)[1].to(torch.float64))
    # Adding 1.5 * 2^52 quanta makes the addition round to a multiple of the quantum.
    shift = scale * (1.5 * 2.0 ** (52 - width))
    return (x + shift) - shift, scale


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
    _signs: Callable[[], _Signs] | None = None

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
class _Span:
    """An enclosure on its way through the epilogue.  ``lo is hi`` as long as it has no width: that halves the work."""

    lo: torch.Tensor
    hi: torch.Tensor

    @property
    def thin(self) -> bool:
        return self.lo is self.hi

    def map(self, f: Callable[[torch.Tensor], torch.Tensor]) -> _Span:
        """Both ends through a function that does not decrease."""
        lo = f(self.lo)
        return _Span(lo, lo if self.thin else f(self.hi))

    def widen(self, by: torch.Tensor) -> _Span:
        """Outwards by ``by >= 0``."""
        return _Span(self.lo - by, self.hi + by)

    def hull(self, dtype: DType) -> _Span:
        """Contains both the unrounded and the rounded: for a rounding that a kernel may or may not make."""
        lo = round_to(self.lo, dtype)
        if self.thin:
            if torch.equal(lo, self.lo):
                return self
            return _Span(torch.minimum(lo, self.lo), torch.maximum(lo, self.lo))
        return _Span(torch.minimum(lo, self.lo), torch.maximum(round_to(self.hi, dtype), self.hi))

    def round(self, dtype: DType) -> _Span:
        """Rounded for certain."""
        return self.map(lambda x: round_to(x, dtype))


@dataclasses.dataclass(frozen=True)
class _Arithmetic:
    """How a contract computes the epilogue.

    Attributes:
        working: the dtype of one operation: f64 on f64 tensors, f32 on all others.
        mode: the contract's ``epilogue``.
    """

    working: DType
    mode: Literal["fused", "eager", "either"]

    @property
    def u(self) -> float:
        return self.working.unit_roundoff

    def basic(self, span: _Span) -> _Span:
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
        return _keep_infinite(span, span.widen(2.0**-52 * torch.maximum(span.lo.abs(), span.hi.abs())))

    def stored(self, span: _Span, dtype: DType) -> _Span:
        """After an operation whose result becomes a tensor of ``dtype`` in eager PyTorch.

        ``either`` contains the rounded and the unrounded at each such place, hence also programs that are
        fused in part.
        """
        if self.mode == "fused" or not dtype.is_float:
            return span
        if self.mode == "either":
            return span.hull(dtype)
        return span.round(dtype)


def intervals(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> tuple[Interval, ...]:
    """:func:`interval` for each of :attr:`Problem.outputs`; of ``again`` for the first alone."""
    outputs = problem.outputs[:1] if problem.has("again") else problem.outputs
    return tuple(interval(output, operands, reference, contract) for output in outputs)


def interval(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> Interval:
    """What a kernel under ``contract`` may return as its only result.

    Args:
        problem: what was computed.
        operands: its operands; ``quantum`` opens the exact tier, ``zero_mean`` the statistical one.
        reference: of the same problem and operands.
        contract: the arithmetic that the backend claims.
    """
    if problem.has("steps-first") or problem.has("steps-last"):
        return _of_one(problem, operands, reference, contract)
    if problem.op.name == "qlinear":
        return _qlinear(problem, operands, reference)
    if problem.op.name == "da8w8":
        value = _with_addend(problem, operands, reference.c, _addend(problem, operands))
        return _through(problem, operands, contract, *_da8w8(problem, operands, reference, contract), value)
    found = _interval(problem, operands, reference, contract)
    return dataclasses.replace(found, _signs=lambda: _signs_of(problem, operands, reference, contract))


def _interval(
    problem: Problem, operands: Operands, reference: Reference, contract: Contract, signs: _Signs | None = None
) -> Interval:
    """:func:`interval` of all other products; ``signs`` follows every pass, ``None`` for none."""
    tier: Tier
    integers = problem.dtypes.out.name == "i32"
    free = None
    if integers:
        value = _wrap_int32(reference.c)
        tier = "exact"
        span = _Span(value, value)
    else:
        value = _with_addend(problem, operands, reference.c, _addend(problem, operands))
        span, tier = _product_span(problem, operands, reference, contract, value)
        free = _undecided(problem, operands, reference, contract)
    if signs is not None:
        signs.begin(problem, operands, reference, span, value)
    return _through(problem, operands, contract, span, tier, value, free, signs)


def _through(
    problem: Problem,
    operands: Operands,
    contract: Contract,
    span: _Span,
    tier: Tier,
    start: torch.Tensor,
    free: torch.Tensor | None = None,
    signs: _Signs | None = None,
) -> Interval:
    """From the product to the result, through every pass.

    Args:
        problem: whose result it is.
        operands: its operands.
        contract: the arithmetic that the backend claims.
        span: the enclosure of the product with what the op itself does to it.
        tier: what bounds it.
        start: the same without any error.
        free: elements about which nothing can be said; ``None`` for none.
        signs: follows every pass; ``None`` where the signs of zeros are not asked for.
    """
    integers = problem.dtypes.out.name == "i32"
    value = start
    dtype = problem.dtypes.out
    residuals = iter(operands.residuals)
    for index, step in enumerate(problem.passes):
        if step.kind is StepKind.JOIN:
            value, span, unsaid = _joined(step, value, span, _Arithmetic(_working(dtype), contract.epilogue), dtype)
            free = unsaid if free is None else unsaid | free[0] | free[1]
            if signs is not None:
                signs.follow(step, span, span, None)
            continue
        r = _met(step, problem, operands, residuals)
        undefined = _undefined(step, span, r)
        if undefined is not None:
            free = undefined if free is None else free | undefined
        value = _apply(step, value, r)
        if step.kind is StepKind.CAST:
            passing = contract.epilogue != "eager" and index < len(problem.passes) - 1
            span = _cast(span, dtype, step.dtype, passing)
            dtype = step.dtype
            if signs is not None:
                signs.follow(step, span, span, None)
            continue
        absorbed = index == 0 and step.kind is StepKind.BIAS and contract.epilogue != "eager" and not integers
        if absorbed and tier != "exact":
            assert r is not None
            # A compiler may turn product-plus-bias into one addmm whose partial sums start at the bias.
            theta = contract.theta(problem.shape.k, 1, out=problem.dtypes.out) - contract.input_error
            span = span.widen(r.abs() * theta)
        arithmetic = _Arithmetic(_working(dtype), contract.epilogue)
        before = span
        span = _step_span(step, before, r, arithmetic, dtype)
        if step.kind is StepKind.BIAS and problem.autocast and contract.epilogue != "eager":
            assert operands.bias is not None
            # As with a cast on the way: fused code may add the bias as it is.
            span = _union(span, _step_span(step, before, _wide(operands.bias), arithmetic, dtype))
        span = arithmetic.stored(span, dtype)
        if signs is not None:
            signs.follow(step, before, span, r)

    target = problem.result_dtype
    last = span.round(target)
    lo, hi = last.lo, last.hi
    if free is not None:
        lo = torch.where(free, -math.inf, lo)
        hi = torch.where(free, math.inf, hi)
    # Where nothing widened the value its rounding is already there; ``lo`` may have been opened since.
    expected = last.lo if span.lo is value else round_to(value, target)
    return Interval(lo, hi, expected, value, start, tier, (span.lo, span.hi))


def _signs_of(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> _Signs:
    """The signs that results may have: the interval is computed once more, and they are followed through it."""
    signs = _Signs()
    _interval(problem, operands, reference, contract, signs)
    return signs


def _underflowed(problem: Problem, operands: Operands) -> torch.Tensor:
    """Where a product of two numbers other than zero may be one in float64: the reference does not know its sign."""
    a, b = as_multiplied(problem, operands)
    found: torch.Tensor = _multiply((a != 0.0).double(), (b != 0.0).double(), operands.groups) > 0.0
    return found


@dataclasses.dataclass
class _Signs:
    """Which signs a value may have on its way through the epilogue, also where it is zero.

    Rules of IEEE 754-2019, 6.3, for rounding to nearest: a sum of zeros is -0 only if each of them is; ``x - x`` is +0;
    a product and a quotient have the exclusive or of both signs; a value that underflows keeps its own.  So a sum of
    products in any order, from the first product or from +0, is +0 if it is exactly zero and one product is not -0.
    Where all of them are -0, or only nearly zero in the accumulator, the sign depends on where the sum begins, and
    where alpha is negative on what it is applied to.  Of functions only relu says more: of a negative number it is +0.

    Attributes:
        minus, plus: where the sign bit may be set, and where it may not be; bool, of the result's shape.
    """

    minus: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    plus: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))

    def begin(
        self, problem: Problem, operands: Operands, reference: Reference, span: _Span, value: torch.Tensor
    ) -> None:
        """The signs of the product with its own bias and scale, ``value``, which is enclosed in ``span``."""
        if not problem.dtypes.out.is_float:
            self.minus, self.plus = span.lo < 0.0, ~(span.hi < 0.0)
            return
        self.minus, self.plus = span.lo.signbit(), ~span.hi.signbit()
        addend = _addend(problem, operands)
        silent = reference.big == 0.0
        # Ends of -0 and +0 are numbers on both sides of zero that were rounded: the sum is only nearly zero.
        thin = (span.lo == 0.0) & (span.hi == 0.0) & (span.lo.signbit() == span.hi.signbit())
        zero = (value == 0.0) & (silent | thin)
        unsure = torch.full_like(zero, problem.alpha <= 0.0)
        if problem.dtypes.out.name == "f64":
            unsure |= silent & _underflowed(problem, operands)
        if problem.shape.k or addend is not None:
            unsure |= silent & reference.opposed
        if addend is not None:
            unsure &= (addend == 0.0) & addend.signbit()
        self.minus, self.plus = torch.where(zero, unsure, self.minus), self.plus | zero

    def follow(self, step: Step, before: _Span, after: _Span, r: torch.Tensor | None) -> None:
        """The signs after a pass that met ``r``."""
        minus, plus = self.minus, self.plus
        if step.name in {"mul", "div", "scale"}:
            turned = torch.tensor(math.copysign(1.0, step.numbers[0]) < 0.0) if r is None else r.signbit()
            self.minus, self.plus = torch.where(turned, plus, minus), torch.where(turned, minus, plus)
        elif step.name in {"bias", "add", "sub"}:
            assert r is not None
            term = -r if step.name == "sub" else r
            zero = (before.lo == -term) & (before.hi == -term)
            self.minus = torch.where(zero, minus & (term == 0.0) & term.signbit(), after.lo.signbit())
            self.plus = torch.where(zero, plus | (term != 0.0) | ~term.signbit(), ~after.hi.signbit())
        elif step.name == "relu":
            self.minus, self.plus = minus & ~(before.hi < 0.0), torch.ones_like(plus)
        elif step.kind is not StepKind.CAST:
            self.minus, self.plus = ~(after.lo > 0.0), ~(after.hi < 0.0)
        elif not step.dtype.is_float:
            self.minus, self.plus = after.lo < 0.0, ~(after.hi < 0.0)


def _met(step: Step, problem: Problem, operands: Operands, residuals: Iterator[torch.Tensor]) -> torch.Tensor | None:
    """The operand that a step meets, in float64: the bias or the next residual; ``None`` where it meets none."""
    if step.kind is StepKind.BIAS:
        return as_added(problem, operands)
    return _wide(next(residuals)) if step.kind is StepKind.BINARY else None


def _working(dtype: DType) -> DType:
    """The type of one operation of an epilogue on values of ``dtype``."""
    return DTYPES["f64" if dtype.name == "f64" else "f32"]


def _of_one(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> Interval:
    """Results of ``linears`` of which one has gone through the steps, and the others have not."""
    flags = tuple(f for f in problem.flags if f not in {"steps-first", "steps-last"})
    plain = dataclasses.replace(problem, epilogue=_own_steps(problem), flags=flags)
    bare = interval(plain, operands, reference, contract)
    done = interval(dataclasses.replace(problem, flags=flags), operands, reference, contract)
    one = torch.tensor([problem.is_one_of("steps", i) for i in range(problem.several)]).reshape(-1, 1, 1)

    def pick(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(one, a, b)

    tier: Tier = next(t for t in ("statistical", "hard", "exact") if t in {bare.tier, done.tier})
    (done_lo, done_hi), (bare_lo, bare_hi) = done._before, bare._before
    return Interval(
        pick(done.lo, bare.lo),
        pick(done.hi, bare.hi),
        pick(done.expected, bare.expected),
        pick(done.value, bare.value),
        bare.product,
        tier,
        (pick(done_lo, bare_lo), pick(done_hi, bare_hi)),
    )


def _own_steps(problem: Problem) -> tuple[Step, ...]:
    """The epilogue without its passes."""
    return tuple(step for step in problem.epilogue if step not in problem.passes)


def _joined(
    step: Step, value: torch.Tensor, span: _Span, arithmetic: _Arithmetic, dtype: DType
) -> tuple[torch.Tensor, _Span, torch.Tensor]:
    """The activation of the first product times the second: its value, its enclosure, and where nothing can be said.

    The two ranges are independent, so the product's ends are among the four products of their ends.  Where some of
    these are NaN (0 * Inf) and others not, it depends on roundings whether the result is one.
    """
    gate = Step(step.text)

    def of(x: _Span, index: int) -> _Span:
        lo = x.lo[index]
        return _Span(lo, lo if x.thin else x.hi[index])

    first, second = of(span, 0), of(span, 1)
    undefined = _undefined(gate, first, None)
    first = arithmetic.stored(_step_span(gate, first, None, arithmetic, dtype), dtype)
    value = _apply(gate, value[0], None) * value[1]
    if first.thin and second.thin:
        lo = first.lo * second.lo
        product = _Span(lo, lo)
        free = torch.zeros_like(lo, dtype=torch.bool)
    else:
        ends = torch.stack([a * b for a in (first.lo, first.hi) for b in (second.lo, second.hi)])
        product = _Span(ends.amin(0), ends.amax(0))
        free = ends.isnan().any(0) & ~ends.isnan().all(0)
    if undefined is not None:
        free = free | undefined
    return value, arithmetic.stored(arithmetic.basic(product), dtype), free


def _product_span(
    problem: Problem, operands: Operands, reference: Reference, contract: Contract, value: torch.Tensor
) -> tuple[_Span, Tier]:
    """The product with its own bias and scale, before any pass, and the tier that bounds it."""
    out = problem.dtypes.out
    addend = _addend(problem, operands)
    scale = _scale(operands)
    span, tier = _sum_span(problem, operands, reference, contract, addend, value)
    # Autocast's rounding of the bias is a cast on the way, too, and fused code may leave it out.
    unrounded = None
    if problem.autocast and contract.epilogue != "eager":
        unrounded = _addend(problem, operands, stored=True)
    if unrounded is not None:
        as_it_is = _with_addend(problem, operands, reference.c, unrounded)
        span = _union(span, _sum_span(problem, operands, reference, contract, unrounded, as_it_is)[0])
    plain = addend is None and scale is None and problem.alpha == 1.0
    if contract.epilogue == "fused" or (plain and not problem.passes):
        return span, tier  # without any further step the last rounding is the only one in every contract
    if plain or problem.op.name == "scaled_mm":
        # Nobody rounds a sum of fp8 before it is scaled: the op is one kernel, in f32 up to its store.
        return _Arithmetic(out, contract.epilogue).stored(span, out), tier
    # Eager kernels are free to round the product to a tensor of the output's dtype before they scale it or add to it
    # (a plain callable does, and so do some paths of ATen and oneDNN), or to do it all in the accumulator.
    alone, _ = _error(problem, operands, reference, contract, None, None, reference.c)
    parts = (_Span(reference.c, reference.c) if alone is None else _around(reference.c, alone)).hull(out)
    # A product with a factor is rounded to f32 before it is rounded to a half type: near a tie that makes a difference.
    basic = _Arithmetic(DTYPES["f64" if out.name == "f64" else "f32"], contract.epilogue).basic
    if scale is not None:
        parts = _times(parts, scale).hull(out)
    if problem.alpha != 1.0:
        alpha = problem.alpha if out.name == "f64" else _f32(problem.alpha)
        parts = basic(_times(parts, torch.tensor(alpha, dtype=torch.float64))).hull(out)
    if addend is not None:
        term = _Span(addend, addend)
        if unrounded is not None:
            term = _union(term, _Span(unrounded, unrounded))
        term = (term if problem.beta == 1.0 else basic(term)).hull(out)
        if problem.shape.k == 0:
            # ATen scales the bias alone there, by a beta that it rounds to the tensor's dtype first.
            beta = float(round_to(torch.tensor(problem.beta, dtype=torch.float64), out))
            other = _Span(x := addend * (beta / problem.beta), x).widen(x.abs() * 2.0**-51).hull(out)
            term = _Span(torch.minimum(term.lo, other.lo), torch.maximum(term.hi, other.hi))
        parts = _Span(parts.lo + term.lo, parts.hi + term.hi)
    merged = _Span(torch.minimum(span.lo, parts.lo), torch.maximum(span.hi, parts.hi))
    if torch.equal(merged.lo, merged.hi):
        merged = _Span(merged.lo, merged.lo)
    return _Arithmetic(out, contract.epilogue).stored(merged, out), tier


def _sum_span(
    problem: Problem,
    operands: Operands,
    reference: Reference,
    contract: Contract,
    addend: torch.Tensor | None,
    value: torch.Tensor,
) -> tuple[_Span, Tier]:
    """``value``, the product with ``addend`` and scale, and what its sum may be off; the tier that says so."""
    error, tier = _error(problem, operands, reference, contract, addend, _scale(operands), value)
    return (_Span(value, value) if error is None else _around(value, error)), tier


# -- integers with scales ------------------------------------------------------------------------


def _powers_of_two(*scales: torch.Tensor) -> bool:
    """Whether multiplying by these costs no rounding."""
    return all(bool((torch.frexp(scale)[0].abs() == 0.5).all()) for scale in scales)


def _qlinear(problem: Problem, operands: Operands, reference: Reference) -> Interval:
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
    f32 = DTYPES["f32"]
    arithmetic = _Arithmetic(f32, "fused")
    scale = _scale(operands)
    assert scale is not None
    correction = operands.zero * _wide(operands.b).sum(-2)
    value = reference.c * scale
    static = problem.step("static")
    own = operands.scale_a if static is None else torch.tensor(static.numbers[0])
    assert own is not None
    assert operands.scale_b is not None
    most = max(_largest(t) for t in (reference.c + correction, correction, reference.c))
    tier: Tier = "exact"
    if most <= 2.0**24 and _powers_of_two(_wide(operands.scale_b), _wide(own)):
        span = _Span(value, value)
    else:
        size = ((reference.c + correction).abs() + correction.abs()) * scale.abs()
        span, tier = arithmetic.basic(_around(value, size * (4 * f32.unit_roundoff))), "hard"
    start = value
    if operands.bias is not None:
        bias = _wide(operands.bias)
        start = value = value + bias
        span = arithmetic.basic(span.map(lambda x: x + bias))
    residuals = iter(operands.residuals)
    for step in problem.passes:
        r = _wide(next(residuals)) if step.kind is StepKind.BINARY else None
        value = _apply(step, value, r)
        span = _step_span(step, span, r, arithmetic, f32)
    target = problem.dtypes.out
    if target.is_float:
        last = span.round(target)
        return Interval(last.lo, last.hi, round_to(value, target), value, start, tier, (span.lo, span.hi))
    last, before = _requantised(problem, span)
    expected, code = _requantised(problem, _Span(value, value))
    return Interval(last.lo, last.hi, expected.lo, code.lo, start, tier, (before.lo, before.hi))


def _requantised(problem: Problem, span: _Span) -> tuple[_Span, _Span]:
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
    codes = _union(after, shifted).map(lambda x: x.clamp(low, high))
    return codes, y.map(lambda x: (x + zero).clamp(low, high))


def _da8w8(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> tuple[_Span, Tier]:
    """An int32 product that is converted and multiplied by A's and by B's scales, with the bias.

    The integers are exact.  Each step of the program is rounded to its type (bf16 where out is, else f32; the last one
    to f16 where out is): *eager* does so for certain and in the program's order, other contracts may at each of them,
    and Inductor's pattern multiplies by B's scales first, behind oneDNN's or the template's product.
    """
    own = problem.dtypes.out if problem.dtypes.out.name == "bf16" else DTYPES["f32"]
    arithmetic = _Arithmetic(DTYPES["f32"], contract.epilogue)
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    a, b = _wide(operands.scale_a), _wide(operands.scale_b)
    c = _wrap_int32(reference.c)
    first = _cast(_Span(c, c), DTYPES["i32"], own, contract.epilogue != "eager")

    def scaled(*scales: torch.Tensor) -> _Span:
        span = first
        for scale in scales:
            span = arithmetic.stored(arithmetic.basic(_times(span, scale.expand_as(c))), own)
        return span

    span = scaled(a, b)
    if contract.epilogue != "eager":
        span = _union(span, scaled(b, a))
        both = a * b  # the program's factors as one, rounded once
        span = _union(span, arithmetic.basic(_times(first, round_to(both.expand_as(c), DTYPES["f32"]))))
    if operands.bias is not None:
        bias = _wide(operands.bias)
        span = arithmetic.stored(arithmetic.basic(span.map(lambda x: x + bias)), own)
    if own != problem.dtypes.out:
        span = arithmetic.stored(span, problem.dtypes.out)
    return span, "exact" if span.thin else "hard"


def _around(value: torch.Tensor, error: torch.Tensor) -> _Span:
    """value +- error; infinities and NaN stay what they are."""
    span = _Span(value - error, value + error)
    if bool(torch.isfinite(value.sum())):
        return span  # no element is NaN or Inf (a finite sum that overflows only costs time)
    finite = value.isfinite()
    return _Span(torch.where(finite, span.lo, value), torch.where(finite, span.hi, value))


def _f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).to(torch.float32))


def _addend(problem: Problem, operands: Operands, *, stored: bool = False) -> torch.Tensor | None:
    """beta * bias where the op itself adds it, float64 and broadcastable; beta = 0 ignores it, NaN included.

    ``stored``: the bias as it is stored, without the rounding of autocast.
    """
    own = problem.op.addend or problem.op.name in OWN_BIAS
    if not own or operands.bias is None or problem.beta == 0.0:
        return None
    found = _wide(operands.bias) if stored else as_added(problem, operands)
    assert found is not None
    return found.mul_(problem.beta)


def _scale(operands: Operands) -> torch.Tensor | None:
    """What multiplies the product, float64: the scales of B's columns, (N,), or those of A and B, (M, N) or ()."""
    return operands.scale


def _with_addend(problem: Problem, operands: Operands, c: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    """alpha * c * scale + addend in float64."""
    scale = _scale(operands)
    value = c if problem.alpha == 1.0 else c * problem.alpha
    if scale is not None:
        value = value * scale
    if addend is not None:
        value = value + addend
    return value


def _grid(x: float) -> float:
    """The largest power of two of which x is a multiple; 1 for 0."""
    if x == 0.0:
        return 1.0
    numerator, denominator = abs(x).as_integer_ratio()
    return (numerator & -numerator) / denominator


def _error(
    problem: Problem,
    operands: Operands,
    reference: Reference,
    contract: Contract,
    addend: torch.Tensor | None,
    scale: torch.Tensor | None,
    value: torch.Tensor,
) -> tuple[torch.Tensor | None, Tier]:
    """D, the error of ``value`` before any rounding to the output's dtype, and its tier; ``None`` for D = 0.

    With ``addend`` and ``scale`` for the op's full value, without them for the bare product.
    """
    k = problem.shape.k
    full = addend is not None or scale is not None or value is not reference.c
    alpha = problem.alpha if full else 1.0
    if alpha == 0.0 or k == 0:
        # Nothing is summed.  beta * bias is one rounding in the working precision, none if beta is 1.
        if addend is None or problem.beta == 1.0:
            return None, "exact"
        if problem.dtypes.out.name != "f64" and torch.equal(round_to(value, DTYPES["f32"]), value):
            return None, "exact"
        return value.abs() * (2 * contract.unit_roundoff) + 2.0**-149, "hard"
    if _is_exact(problem, operands, reference, contract, addend, scale, alpha):
        return None, "exact"

    # Roundings of the op's own arithmetic beyond the sum: scale or alpha, beta, the addition.  Two scales are two, in
    # any order: (c sa) sb, c (sa sb), or of the operands before they are multiplied, each product by both.
    scales = 0 if scale is None else 1 if operands.scale_a is None else 2
    extra = scales + (alpha != 1.0) * 2 + (addend is not None) * (1 if problem.beta == 1.0 else 3)
    factor = abs(alpha)

    def gauge(x: torch.Tensor) -> torch.Tensor:
        x = x if factor == 1.0 else x * factor
        return x if scale is None else x * scale.abs()

    big = gauge(reference.big)
    theta = contract.theta(k, extra, out=problem.dtypes.out)
    hard = big * (theta + reference.own_theta)
    if addend is not None:
        # It may be where the sum begins, unless the sum is scaled first.
        hard += addend.abs() * (extra * contract.unit_roundoff if scales else theta - contract.input_error)
    error = hard
    tier: Tier = "hard"
    if statistics_apply(problem, operands):
        statistical = _statistical(problem, operands, reference, contract, addend, gauge, value, extra)
        error = torch.minimum(hard, statistical)
        tier = "statistical"
    # What rounding leaves out: underflow, and the reference's own error.
    largest = 1.0 if scale is None or not scale.numel() else float(scale.abs().amax())
    error += _underflow(problem, contract, factor * largest)
    if reference.slack is not None:
        error += gauge(reference.slack)
    if addend is not None or factor != 1.0 or scale is not None:
        error += value.abs() * 2.0**-51  # alpha * c * scale + beta * bias was itself computed in float64
    return error, tier


def _is_exact(
    problem: Problem,
    operands: Operands,
    reference: Reference,
    contract: Contract,
    addend: torch.Tensor | None,
    scale: torch.Tensor | None,
    alpha: float,
) -> bool:
    """Whether every partial sum in any order is representable in the accumulator.

    All products are integer multiples of ``quantum``, so are their sums, and none exceeds the gauge: up to
    2^p quanta fit a significand of p bits, or an alignment to f = p bits.  alpha and beta are multiples of powers of
    two that shrink the quantum accordingly.  Partial sums that may be stored in the output's type must fit that too,
    and inputs that may be cut to some bits must have no others.
    """
    quantum = operands.quantum
    if quantum <= 0.0 or (contract.input_error and not reference.fits(contract.input_bits)):
        return False
    precision = {"f64": 53, "f32": 24, "f16": 11, "i32": 53}[contract.accumulate]
    smallest = {"f64": 2.0**-1074, "f32": 2.0**-149, "f16": 2.0**-24, "i32": 0.0}[contract.accumulate]
    highest = math.inf
    if contract.narrow_partials:
        out = problem.dtypes.out
        precision = min(precision, out.precision)
        smallest = max(smallest, 2.0 ** (out.emin - out.precision + 1))
        highest = out.max_finite
    smallest_grid = min(_grid(alpha), _grid(problem.beta) if addend is not None else 1.0, 1.0)
    limit = 2.0**precision * quantum * smallest_grid
    most = abs(alpha) * reference.largest
    if contract.alignment_bits:
        # Terms cut at f bits below the largest lose nothing while that is at most 2^f times their grid.  The terms are
        # the products, before any scale.
        limit_aligned = 2.0 ** min(precision, contract.alignment_bits) * operands.grain * _grid(alpha)
        if most > limit_aligned:
            return False
    if scale is not None:
        # quantum speaks of a * b * scale.  Only powers of two make the unscaled products as exact.
        if not bool((torch.frexp(scale)[0].abs() == 0.5).all()):
            return False
        scaled = reference.big * scale.abs()
        most = abs(alpha) * _largest(scaled)
    elif operands.scale_b is not None:
        # The bare product of a scaled one: its own quantum is that of the scaled product over the scale, and the
        # ratio is the same since scales are powers of two.
        own = _scale(operands)
        assert own is not None
        return _is_exact(problem, operands, reference, contract, addend, own, alpha)
    if addend is None and operands.bias is not None:
        # A bias that comes as a pass may still be fused into the sum.
        addend = as_added(problem, operands)
    if addend is not None and addend.numel():
        finite = addend[addend.isfinite()]
        most += float(finite.abs().amax()) if finite.numel() else 0.0
    return most <= min(limit, highest) and quantum * smallest_grid >= smallest


def _largest(x: torch.Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    finite = x[x.isfinite()]
    return float(finite.abs().amax()) if finite.numel() else 0.0


def statistics_apply(problem: Problem, operands: Operands) -> bool:
    """Whether the statistical bound may be used: zero-mean data and sums that are long enough."""
    return operands.zero_mean and problem.shape.k >= _STATISTICAL_K


def _statistical(
    problem: Problem,
    operands: Operands,
    reference: Reference,
    contract: Contract,
    addend: torch.Tensor | None,
    gauge: Callable[[torch.Tensor], torch.Tensor],
    value: torch.Tensor,
    extra: int,
) -> torch.Tensor:
    """D on zero-mean data: lambda sqrt(K) u g, with every further error of the contract at its own size.

    lambda = sqrt(2 ln(2 MN / 1e-9)) makes it hold for all elements at once if roundings are independent,
    bounded by u and of mean zero (Hoeffding).  Partial sums grow like ``g sqrt(i / K)``, so the bound
    exceeds the standard deviation by much more than lambda; that is the reserve for correlated roundings.
    A bias may be where the sum starts, so it takes part in all K roundings.  Truncating alignment drifts
    instead: K / 8 units, measured.

    The unit of a tensor core that keeps f < 24 bits is 2^-f.  One that is promoted every P products errs by that much
    of partial sums of about g sqrt(P / K) only, K / P times and independently: K becomes P, and the sums in f32 are
    K / P further terms.  On a model of Hopper's fp8 (L = 32, f = 13) the worst of 4096 elements stays below a sixth of
    it.
    """
    spread, steps = spread_of(problem), statistical_theta(problem, contract, extra)
    small = gauge(reference.small)
    # A bias that comes after a scale is not where the sum starts.
    start = None if operands.scale_b is not None else addend
    root = small if start is None else torch.hypot(small, start.expand_as(small))
    error = root * steps
    u = 2.0**-24 if contract.alignment_bits else contract.unit_roundoff
    if extra:
        error += value.abs() * (extra * u)
        if addend is not None:
            error += addend.abs() * (extra * u)
    if contract.narrow_partials:
        # The S partial sums are about g sqrt(1 / S), sums of s of them g sqrt(s / S): squares that add up to S g^2.
        error += root * (spread * math.sqrt(contract.slices) * problem.dtypes.out.unit_roundoff)
    if contract.input_error:
        # Rounded inputs: independent errors of the products.  Truncated ones shrink the whole sum besides.
        error += (small * spread + gauge(reference.c.abs())) * contract.input_error
    return error


def spread_of(problem: Problem) -> float:
    """lambda: how many standard deviations the statistical bound takes, so that it holds for a whole result."""
    shape = problem.shape
    count = max(1, shape.m * shape.n * (shape.batch or 1))
    return math.sqrt(2.0 * math.log(2.0 * count / _FALSE_ALARM))


def statistical_theta(problem: Problem, contract: Contract, extra: int) -> float:
    """Factor of g in the statistical bound: what ``contract.theta`` is to G in the hard one, without input errors."""
    spread, run = spread_of(problem), contract.run(problem.shape.k)
    steps = spread * math.sqrt(run + contract.slices - 1 + extra)
    if not contract.alignment_bits:
        return steps * contract.unit_roundoff
    steps = (steps + run / 8.0) * 2.0 ** (24 - min(24, contract.alignment_bits))
    return (steps + spread * math.sqrt(contract.promotions(problem.shape.k))) * 2.0**-24


def _underflow(problem: Problem, contract: Contract, factor: float) -> float:
    """What products, sums and the op's scalings may lose below the smallest subnormal: half a quantum an operation.

    Flushing of subnormals is not allowed for.
    """
    quantum = {"f64": 2.0**-1074, "f32": 2.0**-149, "f16": 2.0**-24, "i32": 0.0}[contract.accumulate]
    lost = problem.shape.k * quantum * max(1.0, factor) + 4 * quantum
    if contract.narrow_partials:
        out = problem.dtypes.out
        lost += contract.slices * 2.0 ** (out.emin - out.precision + 1) * max(1.0, factor)
    return lost


def _undecided(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> torch.Tensor | None:
    """Elements of the product about which nothing can be said; ``None`` if there are none."""
    free = _may_overflow(problem, operands, reference, contract)
    if problem.alpha == 0.0 and not bool(reference.c.isfinite().all()):
        # In BLAS alpha = 0 means that A and B are not read; generated code multiplies their NaN by 0.
        unread = ~reference.c.isfinite()
        free = unread if free is None else free | unread
    return free


def _may_overflow(
    problem: Problem, operands: Operands, reference: Reference, contract: Contract
) -> torch.Tensor | None:
    """Elements where some order of summation overflows and another does not; ``None`` if there are none.

    That takes partial sums beyond the accumulator's range and terms of both signs: with one sign ``|c| = G`` and the
    sum overflows in every order or in none.
    """
    limit = {"f64": 1.7976931348623157e308, "f32": 3.4028234663852886e38, "f16": 65504.0, "i32": math.inf}[
        contract.accumulate
    ]
    if contract.narrow_partials:
        limit = min(limit, problem.dtypes.out.max_finite)
    # Half of it: room for alpha, bias and rounding.
    factor = max(1.0, abs(problem.alpha))
    addend = _addend(problem, operands)
    most = factor * reference.largest + (float(addend.abs().amax()) if addend is not None and addend.numel() else 0.0)
    if most <= limit / 2:
        return None
    gauge = reference.big * factor
    if addend is not None:
        gauge = gauge + addend.abs()
    mixed = reference.c.abs() < reference.big * (1.0 - 2.0**-10)
    return (gauge > limit / 2) & mixed & reference.c.isfinite()


def _wrap_int32(c: torch.Tensor) -> torch.Tensor:
    """Two's complement wrap of exact integers, which is what torch's int32 accumulation does."""
    if c.numel() == 0 or float(c.abs().amax()) < 2.0**31:
        return c
    return torch.remainder(c + 2.0**31, 2.0**32) - 2.0**31


# -- epilogue ------------------------------------------------------------------------------------

_UNARY: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "hardswish": lambda x: x * torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
    "hardsigmoid": lambda x: torch.clamp(x + 3.0, 0.0, 6.0) / 6.0,
}

_BINARY: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "add": lambda x, r: x + r,
    "bias": lambda x, r: x + r,
    "sum": lambda x, r: x + r,
    "sub": lambda x, r: x - r,
    "mul": lambda x, r: x * r,
    "div": lambda x, r: x / r,
}

# Where the functions that first fall and then rise have their minimum: (argument, value a hair below it).
_MINIMA: Final = {
    "gelu": (-0.7517915249894, -0.16997120747),
    "gelu_tanh": (-0.7524614115719, -0.17004075058),
    "silu": (-1.2784645427610, -0.27846454277),
    "hardswish": (-1.5, -0.375),
}


def _apply(step: Step, x: torch.Tensor, r: torch.Tensor | None) -> torch.Tensor:
    """One pass in float64, without rounding; a cast rounds, since that is what it is for."""
    if step.kind is StepKind.CAST:
        return round_to(x, step.dtype)
    if step.name in _UNARY:
        return _UNARY[step.name](x)
    if step.name == "leaky_relu":
        return torch.where(x > 0, x, x * step.numbers[0])
    if step.name == "clamp":
        return torch.clamp(x, step.numbers[0], step.numbers[1])
    if step.name == "scale":
        return x * step.numbers[0]
    assert r is not None, step
    return _BINARY[step.name](x, (r - step.numbers[1]) * step.numbers[0] if step.name == "sum" else r)


def evaluate(
    problem: Problem, product: torch.Tensor, residuals: list[torch.Tensor], passes: tuple[Step, ...]
) -> torch.Tensor:
    """The passes of an epilogue on chosen elements, in float64: for hypotheses about a wrong result.

    Args:
        problem: whose epilogue it is.
        product: values before any pass, any shape.
        residuals: one tensor for each BIAS and BINARY step of ``passes``, broadcastable to ``product``.
        passes: the steps to apply, ``problem.passes`` or a variation of them.
    """
    left = iter(residuals)
    x = product
    for step in passes:
        x = _apply(step, x, next(left) if step.kind in (StepKind.BIAS, StepKind.BINARY) else None)
    if problem.step("requant") is not None:
        return _requantised(problem, _Span(x, x))[0].lo
    return round_to(x, problem.result_dtype)


def _undefined(step: Step, span: _Span, r: torch.Tensor | None) -> torch.Tensor | None:
    """Elements about which nothing can be said: implementations of one function differ there.

    gelu, silu and hardswish of -Inf are -Inf * 0 = NaN or the limit 0, depending on how they are written, and
    a vectorised erf makes gelu(Inf) NaN (eager PyTorch on a CPU with AVX-512, bf16); a quotient by 0 jumps between the
    infinities where the numerator's sign is open.
    """
    if step.name in _MINIMA:
        infinite = span.lo == -math.inf
        if step.name == "gelu":
            infinite = infinite | (span.hi == math.inf)
        return infinite if bool(infinite.any()) else None
    if step.name == "div" and r is not None and not span.thin:
        jump = (r == 0.0) & (span.lo <= 0.0) & (span.hi >= 0.0)
        return jump if bool(jump.any()) else None
    return None


def _times(span: _Span, r: torch.Tensor) -> _Span:
    """span * r for an exact r of any sign."""
    lo = span.lo * r
    if span.thin:
        return _Span(lo, lo)
    hi = span.hi * r
    return _Span(torch.minimum(lo, hi), torch.maximum(lo, hi))


def _step_span(step: Step, span: _Span, r: torch.Tensor | None, arithmetic: _Arithmetic, dtype: DType) -> _Span:
    """The enclosure after one pass, with that pass's own error in the working precision.

    Exact steps (relu, clamp, sums and products that are representable) leave an enclosure without width
    as it is: the exact tier stays exact through them.
    """
    name = step.name
    if name == "relu":
        return span.map(F.relu)
    if name == "clamp":
        return _clamp(step, span, dtype)
    if name == "scale":
        return arithmetic.basic(_either_factor(span, step.numbers[0], arithmetic))
    if name == "leaky_relu":
        slope = step.numbers[0]
        steep = arithmetic.basic(_either_factor(span, slope, arithmetic))
        # x > 0 ? x : slope * x.  For a span across 0 both branches count, and so does the value 0 itself.
        if slope >= 0.0:
            lo = torch.where(span.lo > 0, span.lo, steep.lo)
            if span.thin and steep.thin:
                return _Span(lo, lo)
            # The upper end of a factor's hull on negative numbers is the smaller magnitude: right for hi.
            return _Span(lo, torch.where(span.hi > 0, span.hi, steep.hi))
        negative_lo, negative_hi = steep.lo, steep.hi  # of slope * [lo, hi], already in order
        lo = torch.where(span.lo > 0, span.lo, torch.where(span.hi > 0, 0.0, negative_lo))
        hi = torch.where(span.lo > 0, span.hi, torch.maximum(negative_hi, torch.where(span.hi > 0, span.hi, -math.inf)))
        return _Span(lo, hi)
    if name == "sum":
        assert r is not None
        term = _accumulated(step, r, arithmetic)
        return arithmetic.basic(_Span(lo := span.lo + term.lo, lo if span.thin and term.thin else span.hi + term.hi))
    if name in {"add", "sub", "bias"}:
        assert r is not None
        shift = -r if name == "sub" else r
        return arithmetic.basic(span.map(lambda x: x + shift))
    if name == "mul":
        assert r is not None
        return arithmetic.basic(_times(span, r))
    if name == "div":
        assert r is not None
        lo = span.lo / r
        hi = lo if span.thin else span.hi / r
        quotient = _Span(torch.minimum(lo, hi), torch.maximum(lo, hi))
        # Triton divides f32 with div.full, which is good to 2 ulp (PTX ISA), that is 4 u.
        return _keep_infinite(quotient, quotient.widen(4 * arithmetic.u * torch.maximum(lo.abs(), hi.abs())))
    return _function_span(name, span, arithmetic)


def _accumulated(step: Step, r: torch.Tensor, arithmetic: _Arithmetic) -> _Span:
    """What ``sum`` adds of its residual, ``(r - zero) scale``; r itself where it has none.

    The scale is rounded to the working precision; in ``s r - s z`` both products and the difference are rounded, each
    by at most u: in all 4 u s (|r| + |z|).  Small integers times a power of two are exact.
    """
    scale, zero = step.numbers
    value = (r - zero) * scale
    if math.frexp(scale)[0] == 0.5:
        return _Span(value, value)
    return _around(value, (r.abs() + abs(zero)) * (4 * arithmetic.u * scale))


def _keep_infinite(before: _Span, after: _Span) -> _Span:
    """Widening an infinity gives Inf - Inf = NaN; put the infinity back."""
    lo = torch.where(after.lo.isnan(), before.lo, after.lo)
    hi = torch.where(after.hi.isnan(), before.hi, after.hi)
    return _Span(lo, hi)


def _either_factor(span: _Span, factor: float, arithmetic: _Arithmetic) -> _Span:
    """span times a constant that the kernel holds in the working precision, or in float64 as Python wrote it."""
    product = _times(span, torch.tensor(factor, dtype=torch.float64))
    if arithmetic.working.name == "f64" or _f32(factor) == factor:
        return product
    other = _times(span, torch.tensor(_f32(factor), dtype=torch.float64))
    return _Span(torch.minimum(product.lo, other.lo), torch.maximum(product.hi, other.hi))


def _clamp(step: Step, span: _Span, dtype: DType) -> _Span:
    """Clamp; its limits may be held in float64, in f32 or in the tensor's dtype."""

    def variants(limit: float) -> tuple[float, float]:
        exact = torch.tensor(limit, dtype=torch.float64)
        found = [limit, _f32(limit), float(round_to(exact, dtype))]
        return min(found), max(found)

    (low_min, low_max), (high_min, high_max) = variants(step.numbers[0]), variants(step.numbers[1])
    if low_min == low_max and high_min == high_max:
        return span.map(lambda x: torch.clamp(x, low_min, high_min))
    return _Span(torch.clamp(span.lo, low_min, high_min), torch.clamp(span.hi, low_max, high_max))


def _function_span(name: str, span: _Span, arithmetic: _Arithmetic) -> _Span:
    """Functions that no kernel rounds correctly: their range over the span, widened by an allowance.

    Allowances in units of u (an ulp is at most 2 u), for libm, sleef and CUDA's libdevice, none of which
    exceeds 4 ulp, plus what the usual formula around them loses.  ``exp`` is often exp2(x log2 e), whose
    rounded argument costs |x| u relative; ``sigmoid`` and ``silu`` inherit it where x < 0.
    gelu computes 1 + erf(x / sqrt 2), which cancels: an absolute term 8 u |x|.
    Results below the smallest normal number may be flushed by exp's range reduction.
    """
    f = _UNARY[name]
    u = arithmetic.u
    flush = _F32_SMALLEST_NORMAL if arithmetic.working.name != "f64" else 2.0**-1022
    x_lo, x_hi = span.lo, span.hi
    y_lo = f(x_lo)
    y_hi = y_lo if span.thin else f(x_hi)
    if name in _MINIMA:
        at, least = _MINIMA[name]
        lo, hi = torch.minimum(y_lo, y_hi), torch.maximum(y_lo, y_hi)
        if not span.thin:
            lo = torch.where((x_lo < at) & (x_hi > at), least, lo)
    else:
        lo, hi = y_lo, y_hi
    size = torch.maximum(lo.abs(), hi.abs())
    if name == "tanh":
        allowance = size * (8 * u)
    elif name == "exp":
        allowance = size * ((8 + torch.maximum(x_lo.abs(), x_hi.abs()).clamp_(max=800)) * (2 * u)) + flush
    elif name in {"sigmoid", "silu"}:
        below = (-x_lo).clamp_(0.0, 800.0)
        allowance = size * ((8 + below) * (2 * u)) + flush
        if name == "silu":
            allowance += flush * below
    elif name == "hardsigmoid":
        allowance = torch.full_like(lo, 4 * u)
    else:  # gelu, gelu_tanh, hardswish
        allowance = torch.maximum(x_lo.abs(), x_hi.abs()) * (8 * u if name != "hardswish" else 4 * u)
    result = _keep_infinite(_Span(lo, hi), _Span(lo - allowance, hi + allowance))
    # Saturated ends are exact in every implementation, and no implementation leaves a function's range there.
    if name in {"hardsigmoid", "hardswish"}:
        zero = x_hi <= -3.0
        result = _Span(torch.where(zero, 0.0, result.lo), torch.where(zero, 0.0, result.hi))
    if name in {"sigmoid", "hardsigmoid"}:
        result = _Span(result.lo.clamp(0.0, 1.0), result.hi.clamp(0.0, 1.0))
    if name == "tanh":
        result = _Span(result.lo.clamp(-1.0, 1.0), result.hi.clamp(-1.0, 1.0))
    if name == "exp":
        result = _Span(result.lo.clamp(min=0.0), result.hi)
    return result


def _cast(span: _Span, source: DType, target: DType, passing: bool) -> _Span:
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
        found = _union(found, through.round(target))
        span = span if source.is_float else through
    return _union(found, span) if passing else found


def _union(a: _Span, b: _Span) -> _Span:
    """The smallest span that contains both; thin if both are the same number everywhere."""
    if a.thin and b.thin and torch.equal(a.lo, b.lo):
        return a
    return _Span(torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi))


# -- can this data tell right from wrong? --------------------------------------------------------

# A verdict on fewer elements than this says little about a distribution: a 1 x 1 output of int-1 data is 0
# one time in three or so.  Other fillings of the same problem stand in.
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


def insensitive(problem: Problem, operands: Operands, interval: Interval) -> Reason | None:
    """Why this case could not tell a right result from a wrong one; ``None`` when it could.

    Judged by what is expected, not by how the operands were made: an output dominated by one value, or
    intervals so wide that zero would be accepted for most elements.  K = 0, alpha = 0 and operands that are
    zero throughout are exempt: there a constant is the point of the case.
    """
    count = interval.expected.numel()
    if count < _ENOUGH_ELEMENTS or problem.shape.k == 0 or problem.alpha == 0.0 or operands.filling == "zeros":
        return None
    # An odd stride, so that the sample does not run down one column of a power-of-two output.
    stride = max(1, count // _SAMPLE) | 1
    expected = interval.expected.flatten()[::stride]
    lo, hi = interval.lo.flatten()[::stride], interval.hi.flatten()[::stride]
    constant, share = _dominant(expected)
    if share > _DOMINANT_SHARE:
        if constant == 0.0:
            return Reason(
                "mostly-zero",
                f"{share:.0%} of the expected elements are 0: a kernel that computes nothing could pass",
                "choose a filling with more non-zero products",
            )
        # A constant that the products already have is made on purpose (k-cover); one that comes after them is not.
        if _dominant(interval.product.flatten()[::stride])[1] <= _DOMINANT_SHARE:
            return Reason(
                "saturated",
                f"the epilogue turns {share:.0%} of the elements into {constant:g} whatever the product is",
                "choose a filling of smaller magnitude or of both signs",
            )
    # Elements that must be exactly what they are (the zeros of a relu) are not blind.
    open_ = lo != hi
    blind = (open_ & (lo <= 0.0) & (hi >= 0.0)).sum()
    if int(blind) > _BLIND_SHARE * expected.numel():
        return Reason(
            "bound-too-wide",
            f"the bound admits 0 for {int(blind) / expected.numel():.0%} of the elements",
            "choose an exact filling, or a contract with a wider accumulator",
        )
    return None
