"""The distributions: what values the operands hold, and what each of them would tell.

:data:`DISTRIBUTIONS` is the catalogue, :func:`distributions_for` what of it fits a problem.  The distributions and
their limits are tiers 2 and 3 of the project's oracle (docs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.operands.integers import digit_plan, int_1, int_2, is_large, k_cover, one_hot, tile_map
from pytest_gemm.operands.magnitudes import Drawn, Headroom, headroom_of, narrowest, saturating_steps
from pytest_gemm.operands.reals import POSITIVE, UNIFORM, rand_large, rand_small, rand_wide, random, specials
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A way to choose values.

    Attributes:
        help: one sentence: what it holds and what it finds.
        build: draws the values of a problem.
        applies: whether it can be made for a problem and would tell anything.
        exact: whether products lie on a grid (:attr:`Operands.quantum` > 0).
        zero_mean: whether entries are independent with zero mean, where the result is finite.
    """

    help: str
    build: Callable[[Headroom], Drawn] = dataclasses.field(repr=False)
    applies: Callable[[Problem], bool]
    exact: bool = False
    zero_mean: bool = False


def _has_float(p: Problem) -> bool:
    return p.dtypes.a.is_float or p.dtypes.b.is_float


def _sums_fit(p: Problem, terms: int) -> bool:
    """Whether partial sums of ``terms`` ones are exact where a half type may have to hold them."""
    return not p.has("math.half_partials") or terms <= headroom_of(p).budget


def _gated_by_a(p: Problem) -> bool:
    """The result is multiplied by A: zeros and tiny numbers leave nothing of it."""
    return p.has("r0.alias") and next(s.name for s in p.passes if s.kind is StepKind.BINARY) == "mul"


def _keeps_integers(p: Problem) -> bool:
    """Integers come through as they are: not from a saturating step, a table, or 8 bits of a scale of their own."""
    is_coded = p.step("requant") is not None or p.step("nf4") is not None or p.a_rule != ""
    return not (p.b_is_a or saturating_steps(p) or is_coded)


def _keeps_rows(p: Problem) -> bool:
    """A row of A with a single 1 gives a row of B."""
    return not (p.b_is_a or p.a_rule != "" or _gated_by_a(p))


def _reaches_groups(p: Problem) -> bool:
    """A row of A with one or two elements that are not 0: of many groups of K most would have a result of zeros."""
    return p.op.ragged != "k" or (p.shape.batch or 1) <= 8


def _only_floats(p: Problem) -> bool:
    """No step on the way is an integer or an 8-bit float, whose range extremes would leave."""
    return _has_float(p) and all(d.is_float and d.bits > 8 for d in narrowest(p))


def _varies_if_positive(p: Problem) -> bool:
    """A saturating step would see one value: a sum of positive numbers hardly varies.

    Of fp8 in the bits of a tensor core a long one is no evidence: the hard bound grows with K, and it drifts, so no
    other holds.
    """
    drifts = p.has("math.fast_accumulate") and p.terms > 4096
    return (_has_float(p) or _long_integers(p)) and not saturating_steps(p) and not drifts


def _may_be_special(p: Problem) -> bool:
    """Nothing is asked about NaN in what is quantised or packed, or where one line stands for all."""
    has_none = p.a_rule != "" or p.dtypes.a.is_packed or p.has("a.expanded") or p.has("b.expanded")
    return _only_floats(p) and not has_none and p.terms >= 1 and p.shape.m * p.shape.n >= 2


def _may_be_large(p: Problem) -> bool:
    """Partial sums that may be stored in f16 may overflow there."""
    half_partials = p.has("math.half_partials") and p.dtypes.out.name == "f16"
    return _only_floats(p) and not saturating_steps(p) and not half_partials and p.a_rule != "q8_0"


def _may_be_small(p: Problem) -> bool:
    """The scales of Q8_0 are f16, and would be 0, as those of large numbers would be infinite."""
    vanishes = _gated_by_a(p) or p.step("squares") is not None
    return _only_floats(p) and not saturating_steps(p) and not vanishes and p.a_rule != "q8_0"


# The ones that find the most bugs alone come first.
DISTRIBUTIONS: Final[Mapping[str, Distribution]] = MappingProxyType({
    "int-2": Distribution(
        "wide against narrow integers, exact sums: indexing, reduced precision, split-K partials, bad stores",
        int_2, lambda _: True, exact=True,
    ),
    "rand": Distribution(
        "uniform in [-1, 1] with full significands (integers: full range): the everyday case",
        lambda headroom: random(headroom, UNIFORM), lambda _: True, zero_mean=True,
    ),
    "k-cover": Distribution(
        "A = 1 and powers of 4 along K in B, exact: names the k that was dropped or doubled",
        k_cover, lambda p: p.terms >= 1 and _keeps_integers(p) and _sums_fit(p, digit_plan(p)[1]), exact=True,
    ),
    "specials": Distribution(
        "rand with NaN, infinities, -0.0, a subnormal and results at both ends of the range, and huge against tiny",
        specials, _may_be_special, zero_mean=True,
    ),
    "tile-map": Distribution(
        "C[i, j] encodes i and j, exact: tells where a misplaced element came from",
        tile_map, lambda p: p.terms >= 2 and _keeps_integers(p) and not _gated_by_a(p) and _reaches_groups(p),
        exact=True,
    ),
    "int-1": Distribution(
        "-1, 0 and 1, exact at any K: indexing, masks, strides",
        int_1, lambda p: _sums_fit(p, p.terms), exact=True,
    ),
    "one-hot": Distribution(
        "one 1 in each row of A and full significands in B: rows of B come out bit for bit",
        one_hot, lambda p: p.terms >= 1 and _keeps_rows(p) and _reaches_groups(p), exact=True,
    ),
    "rand-positive": Distribution(
        "uniform in [0, 1], of int8 in [0, 127]: rounding that drifts, the largest sums; no signs, no relu",
        lambda headroom: random(headroom, POSITIVE), _varies_if_positive,
    ),
    "rand-wide": Distribution(
        "magnitudes log-uniform over many binades: absolute tolerances and fixed-point tricks fail",
        rand_wide, lambda p: _has_float(p) and not p.dtypes.a.is_packed, zero_mean=True,
    ),
    "rand-large": Distribution(
        "magnitudes near the upper end: overflow in a narrower intermediate",
        rand_large, _may_be_large, zero_mean=True,
    ),
    "rand-small": Distribution(
        "magnitudes near the lower end: underflow in a narrower intermediate",
        rand_small, _may_be_small, zero_mean=True,
    ),
})  # fmt: skip


def distributions_for(problem: Problem) -> tuple[str, ...]:
    """Names of all distributions that apply, those that find the most first; none where operands cannot be built."""
    try:
        headroom_of(problem)
    except Unsupported:
        return ()
    found = [name for name, distribution in DISTRIBUTIONS.items() if distribution.applies(problem)]

    def move(name: str, place: int) -> None:
        if name in found:
            found.remove(name)
            found.insert(place, name)

    if _must_promote(problem) or _long_integers(problem):
        move("rand-positive", found.index("rand") + 1)
    if str(problem.layout) == "tt" and "rand-small" in found:
        # So that a level with few distributions has tiny numbers too; the other layouts have what they displace.
        move("rand-small", 2)
        move("k-cover", 4)
    if is_large(problem) and problem.dtypes.out.precision < DTYPES["f32"].precision:
        # The one whose sums a half type holds: each element of such a result can be checked.
        move("int-1", 0)
    return tuple(found)


# Products of fp8 from which on a tensor core that is never promoted leaves the bound of one that is: on positive data
# it loses 3 % of a sum of 2048 (a model of Hopper's), where promoted every 128 it may lose 1.6 % and loses 0.05 %.
_LONG_FP8: Final = 2048


def _must_promote(problem: Problem) -> bool:
    """Whether a kernel that adds fp8 in few bits although it must not shows, and it does so on positive data."""
    return problem.op.rounds_once and not problem.has("math.fast_accumulate") and problem.terms >= _LONG_FP8


# Products of int8 from which on the sums of positive ones, 4032 on average, pass 2^27.
_LONG_INT8: Final = 1 << 15


def _long_integers(problem: Problem) -> bool:
    """Whether positive integers tell more than random signs: sums of those stay far from the limits of int32."""
    return problem.dtypes.out.name == "i32" and not problem.epilogue and problem.terms > _LONG_INT8
