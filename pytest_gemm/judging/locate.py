"""Where a result is wrong: rows, columns, tiles, periods."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from pytest_gemm.numerics.interval import Interval
from pytest_gemm.numerics.reference import as_multiplied
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


# Share of the bad elements that an explanation must cover: one stray element in a hundred may have another cause.
COVER: Final = 0.99
# Share of a region that must be bad for the region to be the explanation.  Far below one: on small integers a wrong
# sum is right by chance for a good part of the elements.
_DENSE: Final = 0.25
# Elements below which a hypothesis is not tried: anything can be made to fit.
FEW: Final = 4
EDGES: Final = (128, 64, 48, 32, 16, 8, 4)


def mostly(mask: torch.Tensor) -> bool:
    """Whether a mask covers as much as an explanation must."""
    return int(mask.sum()) >= COVER * mask.numel()


def inside(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """Which elements lie in an interval; bool."""
    return (x >= lo) & (x <= hi)


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong result on its way through the explanations.

    Attributes:
        x: the result in float64, of the interval's shape.
        bad: which elements are wrong; bool.
        interval: what the result may be.
        problem, operands: what was computed, and from what.
        others: results of earlier calls by name.
    """

    x: torch.Tensor
    bad: torch.Tensor
    interval: Interval
    problem: Problem
    operands: Operands
    others: Mapping[str, torch.Tensor]

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The wrong elements, (C,)."""
        return self.x[self.bad]

    @functools.cached_property
    def expected(self) -> torch.Tensor:
        """What the wrong elements should be: the correctly rounded reference, (C,)."""
        return self.interval.expected[self.bad]

    @functools.cached_property
    def multiplied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B as they were multiplied."""
        return as_multiplied(self.operands.problem, self.operands)

    @functools.cached_property
    def specials(self) -> dict[str, torch.Tensor]:
        """Which wrong elements are NaN, numbers in place of NaN, or infinite; (C,) by the mismatch's code."""
        nan, lacking = self.values.isnan(), self.expected.isnan()
        infinite = self.values.isinf() & self.expected.isfinite()
        return {"nan": nan & ~lacking, "missing-nan": lacking & ~nan, "infinite": infinite}


# -- where: facts about the set of bad elements ----------------------------------------------------


def described_pattern(wrong: Wrong) -> str:
    """One sentence on where the bad elements are, the most specific that covers 99 % of them."""
    bad = wrong.bad
    if len(wrong.values) == 1:
        return f"it is the only bad element of {bad.numel()}" if bad.numel() > 1 else "it is the only element"
    if wrong.operands.problem.op.ragged == "m" and (text := _grouped(bad, wrong.operands.groups)):
        return text
    prefix, bad = _batches(bad) if bad.dim() == 3 else ("", bad)
    found = _plane(bad)
    if not prefix:
        return found
    if bool(bad.all()):
        return f"{prefix}: all of it"
    return f"{prefix}; there {found}"


# Words of a pattern, and the short name of the place.
_PLACES: Final = {
    "the tails of M and N": "M and N tail",
    "where the tails": "M and N tail",
    "M-tail": "M tail",
    "N-tail": "N tail",
    "the last of M": "last row",
    "the last of N": "last column",
    "rows of period": "rows of a period",
    "columns of period": "columns of a period",
    " tile at row": "one tile",
    " tiles of ": "some tiles",
    "batches are bad": "some batches",
    "only batch": "one batch",
    "in the last row of its group": "last row of a group",
    "in the first row of its group": "first row of a group",
    "only group": "one group",
}


# Places at the end of M or N.
TAILS: Final = frozenset({"M tail", "N tail", "M and N tail", "last row", "last column"})


def place_of(pattern: str) -> str:
    """The short stable name of where the bad elements are; "" for nowhere in particular."""
    return next((name for words, name in _PLACES.items() if words in pattern), "")


def _grouped(bad: torch.Tensor, groups: tuple[tuple[int, int], ...]) -> str:
    """What a grouped product got wrong in terms of its groups; "" where they explain nothing."""
    filled = [(g, first, last) for g, (first, last) in enumerate(groups) if last > first]
    rows = bad.any(1)
    if not bool(rows[: groups[-1][1]].any()):
        return "every bad element is in a row that no group owns"
    which = [(g, first, last) for g, first, last in filled if bool(rows[first:last].any())]
    if not which:
        return ""
    if len(filled) > 1 and any(last - first > 1 for _, first, last in which):
        for edges, name in (({f for _, f, _ in filled}, "first"), ({e - 1 for _, _, e in filled}, "last")):
            if set(rows.nonzero().flatten().tolist()) <= edges:
                return f"every bad element is in the {name} row of its group"
    if len(which) == len(filled):
        return ""
    if len(which) > 1:
        return f"{len(which)} of {len(groups)} groups are bad ({few([g for g, _, _ in which])})"
    g, first, last = which[0]
    inside = bad[first:last]
    there = "all of it" if bool(inside.all()) else f"there {_plane(inside)}"
    return f"only group {g} of {len(groups)}, rows {first} to {last - 1}, is bad: {there}"


def pattern_of(rows: torch.Tensor, columns: torch.Tensor) -> str:
    """One sentence on bad elements of which only the rows and the columns are known.

    Args:
        rows: which rows have any, bool, (M,) or (B, M).
        columns: which columns have any, bool, (N,).
    """
    prefix, rows = _batches(rows) if rows.dim() == 2 else ("", rows)
    prefix = prefix and f"{prefix}; there "
    if bool(rows.all()) and bool(columns.all()):
        return f"{prefix}every row and every column has bad elements"
    lines = rows[:, None] & columns
    if int(lines.sum()) == _area(bounding_box(lines, 0)):
        return prefix + _plane(lines, ends=False)
    texts = [
        f"{name} are bad: {_plane(line).replace('the bad elements are', 'they are')}"
        for name, line in (("rows", rows[:, None]), ("columns", columns[None, :]))
        if not bool(line.all())
    ]
    return prefix + "; ".join(texts)


def _batches(bad: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Which of a batch are bad, "" for all of them; and one that stands for all: what is bad in any of them."""
    some = bad.flatten(1).any(1)
    which, total, merged = some.nonzero().flatten().tolist(), len(some), bad[some].any(0)
    if len(which) == total:
        return "", merged
    if len(which) == 1:
        return f"only batch {which[0]} of {total} is bad", merged
    return f"{len(which)} of {total} batches are bad ({few(which)})", merged


def few(things: Sequence[object], most: int = 6) -> str:
    """The first of some things, as a list."""
    shown = ", ".join(map(str, things[:most]))
    return f"{shown}, ..." if len(things) > most else shown


def _plane(bad: torch.Tensor, *, ends: bool = True) -> str:
    """The pattern within one matrix; ``ends``: with the place of a single row or column."""
    m, n = bad.shape
    count = int(bad.sum())
    if count == m * n:
        return "every element is bad"
    box = bounding_box(bad, 0)
    trimmed = bounding_box(bad, count // 400)  # at each of four sides a quarter of one percent
    if 2 * _area(trimmed) <= _area(box):
        box = trimmed
    r0, r1, c0, c1 = box
    covered = int(bad[r0:r1, c0:c1].sum())
    are, have = (
        (f"every bad element {verb}" for verb in ("is", "has"))
        if covered == count
        else (f"{covered} of {count} bad elements {verb}" for verb in ("are", "have"))
    )
    density = covered / _area(box)
    if r1 - r0 == 1 and c1 - c0 == 1:
        return f"{are} at row {r0}, column {c0}"
    if r1 - r0 == 1 and m > 1:
        end = _end(r0, m, "M") if ends else ""
        return f"{are} in row {r0}{end}{_along('columns', c0, c1, bad[r0])}"
    if c1 - c0 == 1 and n > 1:
        end = _end(c0, n, "N") if ends else ""
        return f"{are} in column {c0}{end}{_along('rows', r0, r1, bad[:, c0])}"
    # A box that leaves little of the output out means something only if it is full: otherwise the edges are chance.
    telling = _area(box) <= 0.75 * m * n or (_area(box) < m * n and density >= 0.9)
    dense = covered >= 2 and density >= _DENSE
    tiled, tiles = _tiles(bad)
    if dense and telling and not (tiles and 2 * tiled <= _area(box)):
        return _rectangle(are, have, box, (m, n))
    if text := _period(bad, 1, "N") or _period(bad, 0, "M") or _elbow(bad) or tiles:
        return text
    rows, columns = int(bad.any(1).sum()), int(bad.any(0).sum())
    if dense or count >= _DENSE * m * n:
        return f"the bad elements are all over the output ({count / (m * n):.0%} of it)"
    listed = few([tuple(place) for place in bad.nonzero()[:5].tolist()], 4)
    return f"the bad elements are scattered over {rows} of {m} rows and {columns} of {n} columns: {listed}"


def _area(box: tuple[int, int, int, int]) -> int:
    return (box[1] - box[0]) * (box[3] - box[2])


def bounding_box(bad: torch.Tensor, stray: int) -> tuple[int, int, int, int]:
    """Rows [r0, r1) and columns [c0, c1) that hold the bad elements, except for ``stray`` ones beyond each side."""

    def ends(counts: torch.Tensor) -> tuple[int, int]:
        first = int((counts.cumsum(0) > stray).to(torch.int8).argmax())
        last = len(counts) - int((counts.flip(0).cumsum(0) > stray).to(torch.int8).argmax())
        return first, last

    return *ends(bad.sum(1)), *ends(bad.sum(0))


def _end(line: int, size: int, axis: str) -> str:
    """Whether a single line is the last or the first of an axis."""
    return f": the last of {axis}" if line == size - 1 else f": the first of {axis}" if line == 0 else ""


def _along(name: str, first: int, last: int, line: torch.Tensor) -> str:
    if bool(line.all()):
        return f", all {len(line)} {name}"
    return f", {name} {first} to {last - 1}" if last - first < len(line) else ""


def _rectangle(are: str, have: str, box: tuple[int, int, int, int], shape: tuple[int, int]) -> str:
    """A densely bad rectangle that is not the whole output."""
    (r0, r1, c0, c1), (m, n) = box, shape
    if c1 - c0 == n:
        return f"{have} {_range('row', r0, r1, m, 'M')}"
    if r1 - r0 == m:
        return f"{have} {_range('column', c0, c1, n, 'N')}"
    rows, columns = _edge(r0, r1, m), _edge(c0, c1, n)
    if rows and columns:
        return f"{are} in the {rows}x{columns} tile at row {r0}, column {c0}"
    if r1 == m and c1 == n:
        return f"{have} row >= {r0} and column >= {c0}: the corner where the tails of M and N meet"
    return f"{are} in the rectangle of rows {r0} to {r1 - 1}, columns {c0} to {c1 - 1}"


def _edge(first: int, last: int, size: int) -> int | None:
    """The edge of the tiles of which an interval is one; the one at the end may be cut off."""
    return next((e for e in EDGES if first % e == 0 and last == min(first + e, size) and e <= size), None)


def _range(name: str, first: int, last: int, size: int, axis: str) -> str:
    """An interval of rows or columns, with what it is in terms of tiles."""
    if last == size:
        edge = next((e for e in EDGES if size % e and size - size % e == first), None)
        if 4 * first < size and not edge:
            return f"{name} >= {first}"
        return f"{name} >= {first}: an {axis}-tail" + (f" ({axis} mod {edge} = {size % edge})" if edge else "")
    if first == 0:
        return f"{name} < {last}: the head of {axis}"
    edge = next((e for e in EDGES if first % e == 0 and last - first == e), None)
    return f"{name}s {first} to {last - 1}" + (f": the block {first // edge} of {edge}" if edge else "")


def _period(bad: torch.Tensor, axis: int, name: str) -> str:
    """Bad elements in every p-th row or column only."""
    counts = bad.sum(0) if axis == 1 else bad.sum(1)
    size, across = len(counts), bad.shape[1 - axis]
    total = int(counts.sum())
    # A handful of bad elements has some period by accident.
    for period in (2, 4, 8, 16, 32, 64, 128):
        if size < 3 * period or total < 6:
            continue
        by_residue = F.pad(counts, (0, -size % period)).view(-1, period).sum(0)
        strong = by_residue >= by_residue.amax() / 4
        residues = strong.nonzero().flatten()
        if len(residues) > period // 2 or int(by_residue[strong].sum()) < COVER * total:
            continue
        members = strong[torch.arange(size) % period]
        # Every member must be hit, or it is not the period that decides.
        if int((counts[members] > 0).sum()) < 0.9 * int(members.sum()):
            continue
        if total < _DENSE * int(members.sum()) * across and across > 4:
            continue
        word = "columns" if axis == 1 else "rows"
        which = residues.tolist()
        found = f"residue{'s' if len(which) > 1 else ''} {few(which)}"
        return f"the bad elements are {word} of period {period} in {name}, {found}"
    return ""


def _elbow(bad: torch.Tensor) -> str:
    """An M-tail and an N-tail together."""
    m, n = bad.shape
    rows, columns = bad.sum(1) >= n / 2, bad.sum(0) >= m / 2
    r0, c0 = m - int(rows.sum()), n - int(columns.sum())
    tails = 0 < r0 < m and 0 < c0 < n and bool(rows[r0:].all()) and bool(columns[c0:].all())
    if not tails or int(bad[:r0, :c0].sum()) > (1 - COVER) * int(bad.sum()):
        return ""
    return f"the bad elements have row >= {r0} or column >= {c0}: the tails of M and N"


def _tiles(bad: torch.Tensor) -> tuple[int, str]:
    """Some tiles of a grid are bad and all others are untouched: the area of the bad ones, and a sentence or ""."""
    m, n = bad.shape
    total = int(bad.sum())
    planes = bad[None].float(), torch.ones(1, m, n)
    # The tightest cover wins, and of equal ones that of larger tiles.
    best = (m * n, 0, "")
    for rows, columns in itertools.product(EDGES, EDGES):
        if rows > m or columns > n or (rows >= m and columns >= n):
            continue
        sums, sizes = (F.avg_pool2d(x, (rows, columns), ceil_mode=True, divisor_override=1)[0] for x in planes)
        hit = sums >= 2 * _DENSE * sizes
        tiles = int(hit.sum())
        if not tiles or tiles > hit.numel() // 2 or float(sums[hit].sum()) < COVER * total:
            continue
        area = int(sizes[hit].sum())
        if total < 8 or (area, -rows * columns) >= best[:2]:
            continue
        corners = few([(i * rows, j * columns) for i, j in hit.nonzero()[:5].tolist()], 4)
        which = f"{tiles} of {hit.numel()} tiles of {rows}x{columns}"
        best = area, -rows * columns, f"the bad elements fill {which}, at {corners}"
    return best[0], best[2]
