"""The order in which a kernel adds, from the results of small products."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from pytest_gemm.tools.probes import Array, Bench, Scale, power

# -- widths and roundings ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Width:
    """How many bits below its leading one a sum keeps, and what becomes of the rest.

    Attributes:
        bits: fractional bits; -1 where nothing was kept, so the probe was not understood.
        mode: ``RN`` to nearest, ``RZ`` cut, ``RA`` ties away from zero, ``RU``, ``RD``; "" unknown.
        capped: the probe could not see more bits than these.
    """

    bits: int
    mode: str
    capped: bool = False

    def error(self) -> float:
        """Relative error of one sum at most: half a last bit where it rounds to nearest, a whole one elsewhere."""
        return 2.0 ** -(self.bits + (self.mode in {"RN", "RA"}))

    def __str__(self) -> str:
        """Significand bits, the hidden one included, and the rounding: ``24 RN``."""
        if self.bits < 0:
            return "?"
        return f">={self.bits + 1}" if self.capped else f"{self.bits + 1} {self.mode}".strip()


UNREAD: Final = Width(-1, "")


def width_of(bench: Bench, places: Sequence[int], scale: Scale) -> Width:
    """The width of the sum that meets a big product, a small one and the big one's negative.

    Fasi et al. (2021): ``1 + 2^-t - 1`` is 2^-t as long as t bits are kept.  Then ``1 + 1.5 * 2^-(w+1) - 1`` is 2^-w to
    nearest and 0 cut; the negative of it tells the directed roundings, and the tie ``2^-(w+1)`` where ties go.
    """
    big, small, other = places

    def sums(cases: Iterable[tuple[float, float, int]]) -> Array:
        top = scale.top
        terms = [
            (power(big, sign, top), power(small, sign * factor, top - t), power(other, -sign, top))
            for sign, factor, t in cases
        ]
        return bench.sums(terms) / 2.0**top

    most = min(scale.span, 62)
    first = max(1, scale.top - bench.out.emax)  # the result must hold what is left
    found = sums((1.0, 1.0, t) for t in range(first, most + 1))
    kept = itertools.takewhile(lambda t: found[t - first] == 2.0**-t, range(first, most + 1))
    bits = max(kept, default=-1)
    if bits < 1 or bits + 2 > most:
        return Width(bits, "", capped=bits > 0)
    up, down, tie = sums([(1.0, 1.5, bits + 1), (-1.0, 1.5, bits + 1), (1.0, 1.0, bits + 1)]) * 2.0**bits
    mode = {(1.0, -1.0): "RN", (0.0, 0.0): "RZ", (1.0, 0.0): "RU", (0.0, -1.0): "RD"}.get((up, down), "")
    return Width(bits, "RA" if mode == "RN" and tie == 1.0 else mode)


# -- order of the sum --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Order:
    """How the products of a sum are grouped, as far as it shows.

    Attributes:
        name: ``in order``, ``reversed``, ``chunks``, ``pairwise``, ``N lanes``, ``exact`` (nothing is lost), ``other``,
            ``unread``.
        chunk: products that one addition takes together; 1 for ordinary additions.
        block: products that are summed by themselves before their sum is added to the others'; 0: there are no blocks.
        places: three indices whose products meet first, for the width inside.
        apart: three indices of successive chunks of one block, for the width between them; () where there are none.
        grain: products among which nothing shows: there is one addition of a sum for so many, at least.
    """

    name: str
    chunk: int = 1
    block: int = 0
    places: tuple[int, int, int] = (0, 1, 2)
    apart: tuple[int, ...] = ()
    grain: int = 1


def met_together(from_first: Mapping[int, int]) -> list[list[int]]:
    """The terms that meet term 0 at the same time, the first ones first."""
    return [sorted(j for j, size in from_first.items() if size == s) for s in sorted(set(from_first.values()))]


def infer_order(from_first: Mapping[int, int], inside: Sequence[int], total: int) -> Order:
    """The order of a sum of ``total`` terms from the sizes of subtrees.

    Args:
        from_first: for a term j, how many terms are summed by the time that term 0 and term j have met.
        inside: the same sizes for a term in the middle and its neighbours; all alike in one addition of many terms.
        total: number of terms.
    """
    sizes = sorted(set(from_first.values()))
    groups = met_together(from_first)
    members = [j for group in groups for j in group]
    places = (0, members[0], members[1])
    if sizes[-1] <= 2:
        return Order("exact", places=places)
    at_once = len(set(inside)) == 1
    if len(sizes) == 1:
        if at_once:
            return Order("chunks", total, places=places)
        return Order("reversed" if sizes[0] == total else "other", places=places)
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    if len(sizes) > 3 and all(after == 2 * before for before, after in itertools.pairwise(sizes[:-1])):
        return Order("pairwise", places=places)
    grain = steps[0]
    is_chunked = grain > 2 and sizes[0] == grain and at_once
    if members != sorted(members) and not is_chunked:  # the members of a chunk may lie anywhere
        lane = members[0]
        if lane > 1 and all(j % lane == 0 for j in members[: (total - 1) // lane]):
            return Order(f"{lane} lanes", places=places)
        return Order("other", places=places)
    larger = next((m for m, step in enumerate(steps) if step > grain), None)
    if any(step != grain for step in steps[: -1 if larger is None else larger]):
        return Order("other", places=places)
    if not is_chunked and (grain, sizes[0]) != (1, 2):
        return Order("other", places=places)
    block = 0
    if larger is not None:
        block = sizes[larger]
        rest = steps[larger:]
        if any(step != block for step in rest[:-1]) or rest[-1] > block:
            return Order("other", places=places)
    if not is_chunked:
        return Order("in order", 1, block, places)
    alone = groups[: 1 + (len(steps) if larger is None else larger)]
    apart = (0, alone[1][0], alone[2][0]) if len(alone) > 2 else ()
    return Order("chunks", grain, block, places, apart)


def order_of(bench: Bench, scale: Scale, inner: Width) -> Order:
    """The order of the sum; ``unread`` where no unit can be read."""
    # Sums of units must be lost beside a big product as a whole, and the result must count them.
    counted = 2 ** min(bench.out.precision, 11)
    room = scale.span - (inner.bits + 2 if inner.bits > 0 and not inner.capped else 24)
    most = min(counted, 2 ** max(room, 4))
    grain = 1 if bench.k <= most else bench.k // min(128, most)
    # Units that stand for ``grain`` terms each.
    first, count = grain // 2, len(range(grain // 2, bench.k, grain))
    if bench.sums([[power(slice(first + 2 * grain, None, grain), 1.0, scale.low)]])[0] != (count - 2) * 2.0**scale.low:
        return Order("unread")
    units = power(slice(first, None, grain), 1.0, scale.low)

    def sizes(i: int, others: Sequence[int]) -> dict[int, int]:
        """For each j of ``others``: how many terms are summed when i and j have met, in steps of the grain.

        Two big products of opposite sign are planted (Xie et al., FPRev, 2024).  While that of one of them is in the
        sum, units that are added are lost; those that come after the two have met count.
        """
        big = power(i, 1.0, scale.top)
        survivors = bench.sums([(units, big, power(j, -1.0, scale.top)) for j in others]) / 2.0**scale.low
        if not np.all(np.isfinite(survivors)):
            return {}
        return {j: (count - round(float(s))) * grain for j, s in zip(others, survivors, strict=True)}

    seen = sizes(0, range(max(grain - 1, 1), bench.k, grain))
    if not seen:
        return Order("unread")
    if grain == 1:
        # Terms of what may be one addition: do they all meet at once?
        groups = met_together(seen)
        group = groups[len(groups) // 2]
        middle = group[len(group) // 2]
        inside = tuple(sizes(middle, [j for j in group if j != middle]).values()) if len(group) > 2 else (0, 1)
        return infer_order(seen, inside, bench.k)
    order = coarse_order(seen, grain)
    if order.name != "other":
        return order
    # Lanes are powers of two apart: the first of these that meets term 0 gives the width of a sum.
    near = sizes(0, [2**t for t in range(bench.k.bit_length() - 1)])
    nearest = sorted(near, key=lambda j: (near[j], j))
    return dataclasses.replace(order, places=(0, nearest[0], nearest[1]))


def coarse_order(seen: Mapping[int, int], grain: int) -> Order:
    """The blocks of a long sum, to within ``grain`` terms; what happens inside them does not show."""
    sizes = [seen[j] for j in sorted(seen)]
    if max(sizes) == 0:
        return Order("exact")
    if sizes != sorted(sizes) or len(set(sizes)) == 1:
        return Order("other")
    steps = np.diff(sizes)
    # Chunks that the grain is no multiple of let a step be up to two grains long.
    jumps = steps > 2 * grain
    block = sizes[int(np.argmax(jumps))] if np.any(jumps) else 0
    # Far enough apart to be in different chunks of a tensor core.
    places = (0, grain, 2 * grain) if not 0 < block < 3 * grain else (0, 1, 2)
    return Order("in order", 1, block, places, grain=grain)
