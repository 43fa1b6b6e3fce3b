"""The distributions: what values the operands hold, and what each of them would tell.

:data:`DISTRIBUTIONS` is the catalogue, :func:`distributions_for` what of it fits a problem.  The distributions and
their limits are tiers 2 and 3 of the project's oracle (docs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pytest_gemm.operands.decoders import digit_plan, k_cover, one_hot, tile_map
from pytest_gemm.operands.integers import Build, int_1, int_2, is_large
from pytest_gemm.operands.magnitudes import budget_of, headroom_of, narrowest, saturating_steps
from pytest_gemm.operands.reals import rand, rand_large, rand_positive, rand_small, rand_wide
from pytest_gemm.operands.specials import specials
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

# -- the catalogue ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A way to choose values.

    Attributes:
        name: what a case and the command line call it.
        help: one sentence: what it holds and what it finds.
        exact: whether products lie on a grid (:attr:`Operands.quantum` > 0).
        zero_mean: whether entries are independent with zero mean, where the result is finite.
        applies: whether it can be made for a problem and would tell anything.
    """

    name: str
    help: str
    exact: bool
    zero_mean: bool
    applies: Callable[[Problem], bool]
    _build: Build = dataclasses.field(repr=False)


def _has_float(p: Problem) -> bool:
    return p.dtypes.a.is_float or p.dtypes.b.is_float


def _always(_: Problem) -> bool:
    return True


def _sums_fit(p: Problem, terms: int) -> bool:
    """Whether partial sums of ``terms`` ones are exact where a half type may have to hold them."""
    return not p.has("math.half_partials") or terms <= budget_of(headroom_of(p))


def _gated_by_a(p: Problem) -> bool:
    """The result is multiplied by A: zeros and tiny numbers leave nothing of it."""
    return p.has("r0.alias") and next(s.name for s in p.passes if s.kind is StepKind.BINARY) == "mul"


def _requantised(p: Problem) -> bool:
    """The result has 8 bits of its own scale: no integer comes through as it is."""
    return p.step("requant") is not None


def _only_floats(p: Problem) -> bool:
    """No step on the way is an integer or an 8-bit float, whose range extremes would leave."""
    return _has_float(p) and all(d.is_float and d.bits > 8 for d in narrowest(p))


# In the order of how much one of them tells alone.
DISTRIBUTIONS: Final[Mapping[str, Distribution]] = MappingProxyType(
    {
        f.name: f
        for f in (
            Distribution(
                "int-2",
                "wide against narrow integers, exact sums: indexing, reduced precision, split-K partials, bad stores",
                True,
                False,
                _always,
                int_2,
            ),
            Distribution(
                "rand",
                "uniform in [-1, 1] with full significands (integers: full range): the everyday case",
                False,
                True,
                _always,
                rand,
            ),
            Distribution(
                "k-cover",
                "A = 1 and powers of 4 along K in B, exact: names the k that was dropped or doubled",
                True,
                False,
                lambda p: (
                    p.shape.k >= 1
                    and not (p.b_is_a or saturating_steps(p) or _requantised(p))
                    and _sums_fit(p, digit_plan(p)[1])
                ),
                k_cover,
            ),
            Distribution(
                "specials",
                "rand with NaN, infinities, -0.0 and a subnormal in single rows and columns, and huge against tiny",
                False,
                True,  # where the result is finite
                lambda p: _only_floats(p) and p.shape.k >= 1 and p.shape.m * p.shape.n >= 2,
                specials,
            ),
            Distribution(
                "tile-map",
                "C[i, j] encodes i and j, exact: tells where a misplaced element came from",
                True,
                False,
                lambda p: (
                    p.shape.k >= 2 and not (p.b_is_a or saturating_steps(p) or _requantised(p)) and not _gated_by_a(p)
                ),
                tile_map,
            ),
            Distribution(
                "int-1",
                "-1, 0 and 1, exact at any K: indexing, masks, strides",
                True,
                False,
                lambda p: _sums_fit(p, p.shape.k),
                int_1,
            ),
            Distribution(
                "one-hot",
                "one 1 in each row of A and full significands in B: rows of B come out bit for bit",
                True,
                False,
                lambda p: p.shape.k >= 1 and not p.b_is_a and not _gated_by_a(p),
                one_hot,
            ),
            Distribution(
                "rand-positive",
                "uniform in [0, 1], of int8 in [0, 127]: rounding that drifts, the largest sums; no signs, no relu",
                False,
                False,
                # A saturating step would see one value: a sum of positive numbers hardly varies.  Of fp8 in the bits of
                # a tensor core a long one says nothing: the hard bound grows with K, and it drifts, so no other holds.
                lambda p: (
                    (_has_float(p) or _long_integers(p))
                    and not saturating_steps(p)
                    and not (p.has("math.fast_accumulate") and p.shape.k > 4096)
                ),
                rand_positive,
            ),
            Distribution(
                "rand-wide",
                "magnitudes log-uniform over many binades: absolute tolerances and fixed-point tricks fail",
                False,
                True,
                _has_float,
                rand_wide,
            ),
            Distribution(
                "rand-large",
                "magnitudes near the upper end: overflow in a narrower intermediate",
                False,
                True,
                # Partial sums that may be stored in f16 may overflow there.
                lambda p: (
                    _only_floats(p)
                    and not saturating_steps(p)
                    and not (p.has("math.half_partials") and p.dtypes.out.name == "f16")
                ),
                rand_large,
            ),
            Distribution(
                "rand-small",
                "magnitudes near the lower end: underflow in a narrower intermediate",
                False,
                True,
                lambda p: _only_floats(p) and not saturating_steps(p) and not _gated_by_a(p),
                rand_small,
            ),
        )
    }
)


def distributions_for(problem: Problem) -> tuple[str, ...]:
    """Names of all distributions that apply, the most telling first; none where operands cannot be built."""
    try:
        headroom_of(problem)
    except Unsupported:
        return ()
    found = [name for name, distribution in DISTRIBUTIONS.items() if distribution.applies(problem)]
    if (_must_promote(problem) or _long_integers(problem)) and "rand-positive" in found:
        found.remove("rand-positive")
        found.insert(found.index("rand") + 1, "rand-positive")
    if is_large(problem) and problem.dtypes.out.precision < DTYPES["f32"].precision and "int-1" in found:
        # The one whose sums a half type holds: each element of such a result can be checked.
        found.remove("int-1")
        found.insert(0, "int-1")
    return tuple(found)


# Products of fp8 from which on a tensor core that is never promoted leaves the bound of one that is: on positive data
# it loses 3 % of a sum of 2048 (a model of Hopper's), where promoted every 128 it may lose 1.6 % and loses 0.05 %.
_LONG_FP8: Final = 2048


def _must_promote(problem: Problem) -> bool:
    """Whether a kernel that adds fp8 in few bits although it must not shows, and it does so on positive data."""
    return problem.op.rounds_once and not problem.has("math.fast_accumulate") and problem.shape.k >= _LONG_FP8


# Products of int8 from which on the sums of positive ones, 4032 on average, pass 2^27.
_LONG_INT8: Final = 1 << 15


def _long_integers(problem: Problem) -> bool:
    """Whether positive integers tell more than random signs: sums of those stay far from the limits of int32."""
    return problem.dtypes.out.name == "i32" and not problem.epilogue and problem.shape.k > _LONG_INT8
