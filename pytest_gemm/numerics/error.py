"""How far a correct sum of products may lie from the exact one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from pytest_gemm.numerics.contract import Contract, smallest_of
from pytest_gemm.numerics.reference import Reference, addend_of, as_added, grid, largest_of, with_addend
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.numerics.span import Span, Tier, powers_of_two
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

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


def enclosed(given: Bounding, value: torch.Tensor, addend: torch.Tensor | None) -> tuple[Span, Tier]:
    """The enclosure of ``value``, the product with scale and ``addend``, before any rounding; and its tier."""
    error, tier = _error_of(given, value, addend, given.scale, given.problem.alpha)
    return Span.of(value, error), tier


def enclosed_product(given: Bounding) -> Span:
    """The enclosure of the bare product."""
    return Span.of(given.reference.c, _error_of(given, given.reference.c, None, None, 1.0)[0])


def _error_of(
    given: Bounding, value: torch.Tensor, addend: torch.Tensor | None, scale: torch.Tensor | None, alpha: float
) -> tuple[torch.Tensor | None, Tier]:
    """D, the error of ``value`` before any rounding to the output's dtype, and its tier; ``None`` for D = 0."""
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    k, u = problem.shape.k, contract.sums.u
    if alpha == 0.0 or k == 0:
        # Nothing is summed.  beta * bias is one rounding in the working precision, none if beta is 1.
        if addend is None or problem.beta == 1.0:
            return None, "exact"
        if problem.dtypes.out.name != "f64" and torch.equal(round_to(value, DTYPES["f32"]), value):
            return None, "exact"
        return value.abs() * (2 * u) + 2.0**-149, "hard"
    if _is_exact(given, addend, alpha):
        return None, "exact"

    # Roundings of the op's own arithmetic beyond the sum: scale or alpha, beta, the addition.  Two scales are two, in
    # any order: (c sa) sb, c (sa sb), or of the operands before they are multiplied, each product by both.
    scales = 0 if scale is None else 1 if operands.scale_a is None else 2
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
    if reference.slack is not None:
        error += gauge(reference.slack)
    if addend is not None or factor != 1.0 or scale is not None:
        error += value.abs() * 2.0**-51  # alpha * c * scale + beta * bias was itself computed in float64
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
    if contract.alignment_bits and most > aligned:
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
    return operands.zero_mean and problem.shape.k >= _STATISTICAL_K


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
    spread, run = spread_of(problem), contract.run(problem.shape.k)
    steps = spread * math.sqrt(run + contract.slices - 1 + extra)
    if not contract.alignment_bits:
        return steps * contract.sums.u
    steps = (steps + run / 8.0) * 2.0 ** (24 - min(24, contract.alignment_bits))
    return (steps + spread * math.sqrt(contract.promotions(problem.shape.k))) * 2.0**-24


def _underflow(given: Bounding, factor: float) -> float:
    """What products, sums and the op's scalings may lose below the smallest subnormal: half a quantum an operation.

    Flushing of subnormals is not allowed for.
    """
    problem, contract = given.problem, given.contract
    lost = problem.shape.k * contract.sums.smallest * max(1.0, factor) + 4 * contract.sums.smallest
    if contract.narrow_partials:
        lost += contract.slices * smallest_of(problem.dtypes.out) * max(1.0, factor)
    return lost


def undecided(given: Bounding) -> torch.Tensor | None:
    """Elements of the product about which nothing can be said; ``None`` if there are none."""
    free = _may_overflow(given)
    if given.problem.alpha == 0.0:
        # In BLAS alpha = 0 means that A and B are not read; generated code multiplies their NaN by 0.
        free = either(free, ~given.reference.c.isfinite())
    return free


def either(free: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Elements of either kind; ``None`` for none."""
    if free is None or more is None:
        return more if free is None else free
    return free | more


def _may_overflow(given: Bounding) -> torch.Tensor | None:
    """Elements where some order of summation overflows and another does not; ``None`` if there are none.

    That takes partial sums beyond the accumulator's range and terms of both signs: with one sign ``|c| = G`` and the
    sum overflows in every order or in none.
    """
    reference, contract, addend = given.reference, given.contract, given.addend
    limit = contract.sums.largest
    if contract.narrow_partials:
        limit = min(limit, given.problem.dtypes.out.max_finite)
    # Half of it: room for alpha, bias and rounding.
    factor = max(1.0, abs(given.problem.alpha))
    most = factor * reference.largest + (float(addend.abs().amax()) if addend is not None and addend.numel() else 0.0)
    if most <= limit / 2:
        return None
    gauge = reference.big * factor
    if addend is not None:
        gauge = gauge + addend.abs()
    mixed = reference.c.abs() < reference.big * (1.0 - 2.0**-10)
    return (gauge > limit / 2) & mixed & reference.c.isfinite()
