"""The product with what the op itself does to it: its value, what a correct kernel may return, and what bounds that."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch

from pytest_gemm.numerics.contract import Contract, smallest_of
from pytest_gemm.numerics.epilogue import Arithmetic, Span, cast, in_dtype, powers_of_two, wrap_int32
from pytest_gemm.numerics.reference import Reference, addend_of, as_added, grid, largest_of, widened, with_addend
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

Tier = Literal["exact", "hard", "statistical"]

_F32: Final = DTYPES["f32"]

# Probability with which a correct kernel may leave the statistical interval, over a whole output.
_FALSE_ALARM: Final = 1e-9

# Below this K the hard bound is used alone.  The statistical one leans on partial sums that are averages over
# many terms, and it is hardly tighter there: sqrt(K) g >= G (Cauchy-Schwarz), so lambda sqrt(K) g undercuts K G
# only from K of about lambda^2 on, and lambda is about 8.
_STATISTICAL_K: Final = 64


@dataclasses.dataclass(frozen=True)
class Bounding:
    """What bounds the results of a kernel: a problem, its operands, the reference of both, and a contract."""

    problem: Problem
    operands: Operands
    reference: Reference
    contract: Contract

    @functools.cached_property
    def addend(self) -> torch.Tensor | None:
        """What the op itself adds, see :func:`addend_of`."""
        return addend_of(self.problem, self.operands)

    @functools.cached_property
    def scale(self) -> torch.Tensor | None:
        """What multiplies the product, see :attr:`Operands.scale`."""
        return self.operands.scale

    @property
    def value(self) -> torch.Tensor:
        """The product with its own bias and scale, without any error."""
        return with_addend(self.problem, self.reference.c, self.scale, self.addend)


class Product(NamedTuple):
    """The product with its own bias and scale, before any pass.

    Attributes:
        value: without any error, float64.
        span: its enclosure.
        tier: what bounds it.
        free: elements where everything is accepted; ``None`` for none.
    """

    value: torch.Tensor
    span: Span
    tier: Tier
    free: torch.Tensor | None = None


def product_of(given: Bounding) -> Product:
    """The product of a problem under a contract."""
    op = given.problem.op
    if op.fused_steps:
        return _qlinear(given)
    if op.int8:
        return _da8w8(given)
    if given.problem.a_rule:
        return _of_codes(given)
    if given.problem.dtypes.out.name == "i32":
        value = wrap_int32(given.reference.c)
        return Product(value, Span.of(value), "exact")
    return _float_product(given)


def _float_product(given: Bounding) -> Product:
    problem, contract, addend, value = given.problem, given.contract, given.addend, given.value
    out = problem.dtypes.out
    arithmetic = Arithmetic(DTYPES["f64"] if out.name == "f64" else _F32, contract.epilogue)
    error, tier = _error_of(given, value, addend, given.scale, problem.alpha)
    span = Span.of(value, error)
    # Autocast's rounding of the bias is a cast on the way, too, and fused code may leave it out.
    unrounded = None
    if problem.autocast and contract.epilogue != "eager":
        unrounded = addend_of(problem, given.operands, stored=True)
    if unrounded is not None:
        as_it_is = with_addend(problem, given.reference.c, given.scale, unrounded)
        span = span.union(Span.of(as_it_is, _error_of(given, as_it_is, unrounded, given.scale, problem.alpha)[0]))
    plain = addend is None and given.scale is None and problem.alpha == 1.0
    # Without any further step the last rounding is the only one in every contract.
    if contract.epilogue != "fused" and not (plain and not problem.passes):
        if not (plain or problem.op.rounds_once):
            span = span.cover(_in_parts(given, unrounded, arithmetic))
            span = Span.of(span.lo) if torch.equal(span.lo, span.hi) else span
        elif addend is not None:  # of an op that rounds once
            scaled = with_addend(problem, given.reference.c, given.scale, None)
            parts = arithmetic.apart(Span.of(scaled, _error_of(given, scaled, None, given.scale, 1.0)[0]), out)
            span = span.union(arithmetic.basic(parts.map(lambda x: x + addend)))
        span = arithmetic.stored(span, out)
    return Product(value, span, tier, undecided(given))


def _in_parts(given: Bounding, unrounded: torch.Tensor | None, arithmetic: Arithmetic) -> Span:
    """The product as eager code may compute it: rounded to the output's dtype before it is scaled or added to.

    A plain callable does so, and so do some paths of ATen and oneDNN; others do it all in the accumulator.
    """
    problem, out = given.problem, given.problem.dtypes.out
    bare = given.reference.c
    parts = Span.of(bare, _error_of(given, bare, None, None, 1.0)[0]).hull(out)
    if given.scale is not None:
        scale = given.scale
        parts = parts.turned(lambda x: x * scale).hull(out)
    # A product with a factor is rounded to f32 before it is rounded to a half type: near a tie that makes a difference.
    if problem.alpha != 1.0:
        alpha = problem.alpha if out.name == "f64" else in_dtype(problem.alpha)
        parts = arithmetic.basic(parts.times(alpha)).hull(out)
    addend = given.addend
    if addend is None:
        return parts
    term = Span.of(addend)
    if unrounded is not None:
        term = term.union(Span.of(unrounded))
    term = (term if problem.beta == 1.0 else arithmetic.basic(term)).hull(out)
    if problem.terms == 0:
        # ATen scales the bias alone there, by a beta that it rounds to the tensor's dtype first.
        x = addend * (in_dtype(problem.beta, out) / problem.beta)
        term = term.cover(Span.of(x).widen(x.abs() * 2.0**-51).hull(out))
    return parts.plus(term)


def _qlinear(given: Bounding) -> Product:
    """``onednn::qlinear_pointwise``: one kernel, in f32 from the int32 sum on, with one rounding at its end.

    The sum s of what is stored, ``s = (A + z) @ B``, is exact in int32 up to K = 65793.  The zero point z is taken off
    as an integer, ``c = s - z t`` with B's column sums t, or as Inductor does it, in f32:
    ``fl(fl(s) x) - fl(t x z)``, where x is the product of A's and B's scales.  The first term has three roundings (of
    the sum, the scales' product, the product), the second no more than three (t is exact below 2^24), the difference
    one: with ``(1 + u)^3 - 1 < 4 u`` an error of ``4 u x (|s| + |z t|)`` before the last.  An integer compensation has
    less, since ``|c| <= |s| + |z t|``.  Nothing is lost where the scales are powers of two and s, z t and c stay within
    2^24.  A bias b of codes is added as an integer, ``(c + b) x``, or in f32 as ``fl(fl(b) x)``: ``4 u x |b|`` more.

    ``program.pt2e`` may be computed as it is written: each factor is rounded where it is dequantised, in a half type
    once more, and the sum of products may begin at the bias, ``(K + 8) u (x G + |b|)`` more.
    """
    operands, c, scale, out = given.operands, given.reference.c, given.scale, given.problem.dtypes.out
    is_written = given.problem.has("program.pt2e")
    arithmetic = Arithmetic(_F32, "either" if is_written else given.contract.epilogue)
    static, bias = given.problem.step("static"), given.addend
    own = operands.scale_a if static is None else torch.tensor(static.numbers[0])
    assert scale is not None
    assert own is not None
    assert operands.scale_b is not None
    correction, codes = operands.zero * widened(operands.b).sum(-2), torch.zeros(())
    if operands.bias is not None and given.problem.step("bias_codes"):
        codes = widened(operands.bias)
    value = c * scale
    exact = max(map(largest_of, (c + correction, correction, c, codes, c + codes))) <= 2.0**24
    exact = exact and powers_of_two(widened(operands.scale_b), widened(own))
    exact = exact and not (is_written and (bias is not None or given.reference.largest > 2.0**24))
    span = Span.of(value)
    if not exact:
        size = ((c + correction).abs() + correction.abs() + codes.abs()) * scale.abs()
        error = size * (4 * _F32.unit_roundoff)
        if is_written:
            u = (given.problem.terms + 8) * _F32.unit_roundoff + (2.1 * out.unit_roundoff if out.is_float else 0.0)
            error = error + u * (given.reference.big * scale.abs() + (0.0 if bias is None else bias.abs()))
        span = arithmetic.basic(Span.of(value, error))
    span = arithmetic.apart(span, out)
    if bias is not None:
        value, span = value + bias, arithmetic.apart(arithmetic.basic(span.map(lambda x: x + bias)), out)
    return Product(value, span, "exact" if exact else "hard")


def _da8w8(given: Bounding) -> Product:
    """An int32 product that is converted and multiplied by A's and by B's scales, with the bias.

    The integers are exact.  Each step of the program is rounded to its type (bf16 where out is, else f32; the last one
    to f16 where out is): *eager* does so for certain and in the program's order, other contracts may at each of them,
    and Inductor's pattern multiplies by B's scales first, behind oneDNN's or the template's product.

    With largest magnitudes there are three factors of f32 behind the integer, in any order: three roundings, and a
    constant that is off by 2 u at most, since it may be written with seven digits: less than 6 u.
    """
    operands, out, mode = given.operands, given.problem.dtypes.out, given.contract.epilogue
    is_absmax = given.problem.step("absmax") is not None
    own = out if out.name == "bf16" and not is_absmax else _F32
    arithmetic = Arithmetic(_F32, mode)
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    a, b = widened(operands.scale_a), widened(operands.scale_b)
    first = cast(Span.of(wrap_int32(given.reference.c)), DTYPES["i32"], own, mode != "eager")

    def scaled(span: Span, scale: torch.Tensor) -> Span:
        return arithmetic.basic(span.turned(lambda x: x * scale))

    def one_by_one(*scales: torch.Tensor) -> Span:
        span = first
        for scale in scales:
            span = arithmetic.stored(scaled(span, scale), own)
        return span

    span = one_by_one(a, b)
    if is_absmax:
        span = first.turned(lambda x: x * (a * b * given.problem.result_factor("")))
        span = span.widen(span.size * (6 * _F32.unit_roundoff))
    elif mode != "eager":
        # The program's factors as one are rounded once.
        span = span.union(one_by_one(b, a)).union(scaled(first, round_to(a * b, _F32)))
    if operands.bias is not None:
        bias, span = widened(operands.bias), arithmetic.apart(span, out)
        span = arithmetic.stored(arithmetic.basic(span.map(lambda x: x + bias)), own)
    if own != out:
        span = arithmetic.stored(span, out)
    return Product(given.value, span, "exact" if span.thin else "hard")


def _of_codes(given: Bounding) -> Product:
    """A sum of integers for each group of K, scaled and added up in f32, and scaled by the step of A's row.

    The integers are exact in f32: ``255 * 8 * 256 < 2^24``.  Each is multiplied by its group's scale, S of them are
    added up, and the sum is multiplied by a step that has an error of 3 u itself: ``(S + 6) u |A| @ |B|``, and what A's
    codes leave open.  The bias is one more rounding.

    Of ``woq`` a kernel may keep the sums of the 16 lanes of a vector register apart up to the end, which are 15
    additions more, and where A has steps for its blocks they are the groups' own.  In a group of more than 1024, sums
    of codes of 8 bits are beyond 2^24, and their conversion is one more rounding.
    """
    problem, reference, added = given.problem, given.reference, given.addend
    arithmetic, value, u = Arithmetic(_F32, given.contract.epilogue), given.reference.c, _F32.unit_roundoff
    slack = reference.slack
    assert slack is not None
    exact = problem.terms == 0 or (not bool(slack.any()) and _is_exact(given, None, 1.0))
    span = Span.of(value)
    if not exact:
        lanes = 16 if problem.op.coded else 0
        theta = (-(-problem.terms // problem.group_size) + 6 + lanes) * u
        span = Span.of(value, reference.big * theta + slack + _underflow(given, 1.0))
    if added is not None:
        value, span = (
            value + added,
            arithmetic.basic(arithmetic.apart(span, problem.dtypes.out).map(lambda x: x + added)),
        )
    return Product(value, arithmetic.stored(span, problem.dtypes.out), "exact" if exact else "hard")


def _error_of(
    given: Bounding, value: torch.Tensor, addend: torch.Tensor | None, scale: torch.Tensor | None, alpha: float
) -> tuple[torch.Tensor | None, Tier]:
    """D, the error of ``value`` before any rounding to the output's dtype, and its tier; ``None`` for D = 0."""
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    k, u = problem.terms, contract.sums.u
    if alpha == 0.0 or k == 0:
        # Nothing is summed.  beta * bias is one rounding in the working precision, none if beta is 1.
        if addend is None or problem.beta == 1.0:
            return None, "exact"
        is_held = in_dtype(problem.beta) == problem.beta
        if is_held and problem.dtypes.out.name != "f64" and torch.equal(round_to(value, _F32), value):
            return None, "exact"
        return value.abs() * (2 * u) + 2.0**-149, "hard"
    if _is_exact(given, addend, alpha):
        return None, "exact"

    # Roundings of the op's own arithmetic beyond the sum: scale or alpha, beta, the addition.  Two scales are two, in
    # any order: (c sa) sb, c (sa sb), or of the operands before they are multiplied, each product by both.
    of_blocks = 2 if problem.scale_blocks or problem.micro_block else 0
    scales = of_blocks + (0 if scale is None else 1 if operands.scale_a is None else 2)
    scales += problem.op.coded  # of each element of the weight, or of the sum of its group
    extra = scales + (alpha != 1.0) * 2 + (addend is not None) * (1 if problem.beta == 1.0 else 3)
    factor = abs(alpha)

    def gauge(x: torch.Tensor) -> torch.Tensor:
        x = x if factor == 1.0 else x * factor
        return x if scale is None else x * scale.abs()

    theta = contract.theta(k, extra, out=problem.dtypes.out)
    error = gauge(reference.big) * (theta + reference.own_theta)
    if addend is not None:
        # It may be where the sum begins, unless the sum is scaled first.
        error += addend.abs() * (extra * u if scales else theta - contract.input_error)
    tier: Tier = "hard"
    if statistics_apply(problem, operands):
        error = torch.minimum(error, _statistical(given, addend, gauge, value, extra))
        tier = "statistical"
    # What rounding leaves out: underflow, and the reference's own error.
    error += _underflow(given, factor * (1.0 if scale is None or not scale.numel() else float(scale.abs().amax())))
    if contract.input_smallest:
        error += gauge(reference.sides) * contract.input_smallest
    if reference.slack is not None:
        error += gauge(reference.slack)
    if addend is not None or factor != 1.0 or scale is not None:
        error += value.abs() * 2.0**-51  # alpha * c * scale + beta * bias was itself computed in float64
    elif problem.op.outside:
        error = torch.where(reference.big == 0.0, 0.0, error)  # nothing is summed in what its program leaves out
    return error, tier


def _is_exact(given: Bounding, addend: torch.Tensor | None, alpha: float) -> bool:
    """Whether every partial sum in any order is representable in the accumulator.

    All products are integer multiples of ``quantum``, so are their sums, and none exceeds the gauge: up to
    2^p quanta fit a significand of p bits, or an alignment to f = p bits.  alpha and beta are multiples of powers of
    two that shrink the quantum accordingly.  Partial sums that may be stored in the output's type must fit that too,
    and inputs that may be cut to some bits must have no others.

    The quantum is that of a scaled product, and of the bare one it is the same ratio: scales are powers of two.
    """
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    quantum = operands.quantum
    if quantum <= 0.0 or (contract.input_error and not reference.fits(contract.input_bits)):
        return False
    _, precision, smallest, _ = contract.sums
    highest = math.inf
    if contract.narrow_partials:
        out = problem.dtypes.out
        precision, smallest, highest = min(precision, out.precision), max(smallest, smallest_of(out)), out.max_finite
    smallest_grid = min(grid(alpha), grid(problem.beta) if addend is not None else 1.0, 1.0)
    most = abs(alpha) * reference.largest
    # Terms cut at f bits below the largest lose nothing while that is at most 2^f times their grid.  The terms are the
    # products, before any scale.
    aligned = 2.0 ** min(precision, contract.alignment_bits) * operands.base_quantum * grid(alpha)
    raw = most
    if contract.alignment_bits and problem.scale_blocks:
        raw = largest_of(widened(operands.a).abs_() @ widened(operands.b).abs_())
    if contract.alignment_bits and raw > aligned:
        return False
    if given.scale is not None:
        if not powers_of_two(given.scale):
            return False
        most = abs(alpha) * largest_of(reference.big * given.scale.abs())
    if addend is None and operands.bias is not None:
        # A bias that comes as a pass may still be fused into the sum.
        addend = as_added(problem, operands)
    if addend is not None:
        most += largest_of(addend)
    limit = 2.0**precision * quantum * smallest_grid
    return most <= min(limit, highest) and quantum * smallest_grid >= smallest


def statistics_apply(problem: Problem, operands: Operands) -> bool:
    """Whether the statistical bound may be used: zero-mean data and sums that are long enough."""
    return operands.zero_mean and problem.terms >= _STATISTICAL_K


def _statistical(
    given: Bounding,
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
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    spread, steps = spread_of(problem), statistical_theta(problem, contract, extra)
    small = gauge(reference.small)
    # A bias that comes after a scale is not where the sum starts.
    start = None if operands.scale_b is not None else addend
    root = small if start is None else torch.hypot(small, start.expand_as(small))
    error = root * steps
    u = 2.0**-24 if contract.alignment_bits else contract.sums.u
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
    spread, run = spread_of(problem), contract.run(problem.terms)
    steps = spread * math.sqrt(run + contract.slices - 1 + extra)
    if not contract.alignment_bits:
        return steps * contract.sums.u
    steps = (steps + run / 8.0) * 2.0 ** (24 - min(24, contract.alignment_bits))
    return (steps + spread * math.sqrt(contract.promotions(problem.terms))) * 2.0**-24


def _underflow(given: Bounding, factor: float) -> float:
    """What products, sums and the op's scalings may lose below the smallest subnormal: half a quantum an operation.

    Where the contract flushes, all that is below the smallest normal number.
    """
    problem, contract = given.problem, given.contract
    lost = problem.terms * contract.lost * max(1.0, factor) + 4 * contract.lost
    if contract.narrow_partials:
        lost += contract.slices * smallest_of(problem.dtypes.out) * max(1.0, factor)
    return lost


def undecided(given: Bounding) -> torch.Tensor | None:
    """Elements of the product where everything is accepted; ``None`` if there are none."""
    free = _may_overflow(given)
    if given.problem.alpha == 0.0:
        # In BLAS alpha = 0 means that A and B are not read; generated code multiplies their NaN by 0.
        free = either(free, ~given.reference.c.isfinite())
    if given.problem.is_partial and given.operands.idle is not None:
        free = either(free, given.operands.idle[:, None])
    return free


def either(free: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Elements of either kind; ``None`` for none."""
    if free is None or more is None:
        return more if free is None else free
    return free | more


def _may_overflow(given: Bounding) -> torch.Tensor | None:
    """Elements where some order of summation overflows and another does not; ``None`` if there are none.

    That takes partial sums beyond the accumulator's range and terms of both signs: with one sign ``|c| = G`` and the
    sum overflows in every order or in none.  An op from outside may add an infinity to what overflows the other way.
    """
    reference, contract, addend = given.reference, given.contract, given.addend
    limit = contract.sums.largest
    if contract.narrow_partials:
        limit = min(limit, given.problem.dtypes.out.max_finite)
    # Half of it: room for alpha, bias and rounding.
    factor = max(1.0, abs(given.problem.alpha))
    most = factor * reference.largest + (float(addend.abs().amax()) if addend is not None and addend.numel() else 0.0)
    beside = None
    if given.problem.op.outside and not given.operands.finite:
        beside = reference.c.isinf() & (reference.big_of_finite * factor > limit / 2)
    if most <= limit / 2:
        return beside
    gauge = reference.big * factor
    if addend is not None:
        gauge = gauge + addend.abs()
    mixed = reference.c.abs() < reference.big * (1.0 - 2.0**-10)
    return either((gauge > limit / 2) & mixed & reference.c.isfinite(), beside)
