"""A result against its acceptance interval: whether it is right, and if not, where and in what way.

:func:`compare` decides and, on a mismatch, locates: which elements are bad (a tail, a tile, every 16th column),
and what was computed instead (products of some k missing, no bias, the answer of an earlier call).  The first is a fact
about the set of bad elements; the second is a hypothesis, printed only if it reproduces the bad values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from pytest_gemm.numerics.epilogue import evaluate
from pytest_gemm.numerics.reference import as_added, as_multiplied
from pytest_gemm.numerics.rounding import round_to, ulp_distance, ulp_of
from pytest_gemm.numerics.span import Interval
from pytest_gemm.operands.decoders import decode_k, decode_source, tile_map_period
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.ops import OWN_BIAS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

__all__ = [
    "Comparison",
    "EagerComparison",
    "Mismatch",
    "against_eager",
    "beside_eager",
    "comparable",
    "compare",
    "complaint_of",
    "pattern_of",
    "rejected",
]

# Share of the bad elements that an explanation must cover: one stray element in a hundred may have another cause.
_COVER: Final = 0.99
# Share of a region that must be bad for the region to be the explanation.  Far below one: on small integers a wrong
# sum is right by chance for a good part of the elements.
_DENSE: Final = 0.25
# Elements on which hypotheses about values are tried.
_SAMPLE: Final = 64
# Elements below which a hypothesis is not tried: anything can be made to fit.
_FEW: Final = 4
# Elements that are judged at once: their intermediates fit in a core's cache.
_CHUNK: Final = 1 << 15
_EDGES: Final = (128, 64, 48, 32, 16, 8, 4)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A wrong result, described.

    Attributes:
        code: stable, for machines: ``wrong-type``, ``wrong-layout``, ``wrong-shape``, ``wrong-dtype``,
            ``wrong-device``, ``nan``, ``missing-nan``, ``infinite``, ``outside-bound`` or ``zero-sign``.
        count, total: bad elements, all elements.
        index: of the worst element; ``()`` if the result could not be compared by element.
        actual, expected: its value, and the correctly rounded reference.
        bound: how far from ``expected`` it might have been; 0 where the result must be exact.
        ratio: its error over that bound, infinity where the bound is 0.
        tier: of the oracle, as in ``oracle.Interval``.
        pattern: one sentence: where the bad elements are.
        cause: one sentence: what seems to have been computed instead; "" if nothing fits.
        scope: what ``total`` counts.
    """

    code: str
    count: int
    total: int
    index: tuple[int, ...] = ()
    actual: float = math.nan
    expected: float = math.nan
    bound: float = 0.0
    ratio: float = math.inf
    tier: str = ""
    pattern: str = ""
    cause: str = ""
    scope: str = "elements"

    def summary(self) -> str:
        """The first line: what, in one sentence."""
        if not self.index and self.code.startswith("wrong-"):
            return self.pattern
        what = {
            "nan": "are NaN",
            "missing-nan": "are numbers where NaN is expected",
            "infinite": "are infinite where a number is expected",
            "zero-sign": "are zeros of the wrong sign",
        }.get(self.code, "differ from the exact result" if self.tier == "exact" else "outside the bound")
        return f"{self.count} of {self.total} {self.scope} {what}"

    def text(self) -> str:
        """All lines: what, where and how far, and the likely cause."""
        if not self.index:
            return self.summary()
        at = self.index[0] if len(self.index) == 1 else self.index
        error = abs(self.actual - self.expected)
        if math.isnan(error) or math.isinf(error) or self.code == "zero-sign":
            worst = f"first at {at}: got {self.actual:.9g}, expected {self.expected:.9g}"
        elif self.bound > 0:
            worst = f"worst {error:.3g} at {at}, bound {self.bound:.3g} ({_times(self.ratio)}): " + self._values()
        elif self.tier == "exact":
            worst = f"worst {error:.3g} at {at}, where the result is exact: " + self._values()
        else:
            worst = f"worst {error:.3g} at {at}, where only one rounded value is right: " + self._values()
        lines = [self.summary(), f"  {worst}", f"  {self.pattern}"]
        if self.cause:
            lines.append(f"  {self.cause}")
        return "\n".join(lines)

    def _values(self) -> str:
        return f"got {self.actual:.9g}, expected {self.expected:.9g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x" if ratio < 1e4 else f"{ratio:.1e}x"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The verdict on one result.

    Attributes:
        ratio: the worst error over what is allowed.  Both are measured from the correctly rounded reference
            towards the side on which the element lies, so a ratio is 0 for that very value, at most 1 iff the element
            is accepted, and infinite for any other value where the interval is a single number.
        correctly_rounded: share of the elements equal to the correctly rounded reference; 1 for an empty output.
        mismatch: what is wrong; ``None`` for a right result.
    """

    ratio: float
    correctly_rounded: float
    mismatch: Mismatch | None = None

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.mismatch is None

    @property
    def is_comparable(self) -> bool:
        """Whether the result has elements to be set beside others: it has the right type, device and shape."""
        return self.mismatch is None or not self.mismatch.code.startswith("wrong-")


def compare(
    actual: object,
    interval: Interval,
    problem: Problem,
    operands: Operands,
    *,
    tile: tuple[int, int] | None = None,
    others: Mapping[str, torch.Tensor] | None = None,
    whole: bool = True,
) -> Comparison:
    """Judge a result.

    The sign of a zero is judged where every order of summation gives the same (docs/oracle.md, "The sign of zero"), of
    a result that is right but for that.

    Args:
        actual: what the backend returned, whatever that is.
        interval: what is right.
        problem: what was computed.
        operands: from what.
        tile: the kernel's tile (rows, columns) if known; tried first when bad elements are located.
        others: results of earlier calls by name, to recognise a stale one.
        whole: ``False`` for lines of a larger result: then nothing is said of where elements lie, which only somebody
            knows who knows the lines.
    """
    complaint = complaint_of(actual, problem, operands)
    if complaint is not None:
        total = interval.expected.numel()
        return Comparison(math.inf, 0.0, Mismatch(complaint[0], total, total, pattern=complaint[1]))
    assert isinstance(actual, torch.Tensor)
    x = actual.detach().to(device="cpu", dtype=torch.float64)
    if x.numel() == 0:
        return Comparison(0.0, 1.0)
    score = _score(x, interval)
    share = score.equal / x.numel()
    bad = rejected(x, interval) if score.bad else interval.wrong_zeros(x)
    if not bool(bad.any()):
        return Comparison(score.ratio, share)
    return _reject(actual, x, bad, share, interval, problem, operands, tile, others or {}, whole)


def rejected(x: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Which elements are outside, or zeros of the wrong sign where none is; float64, of the interval's shape."""
    lo, hi = interval.lo, interval.hi
    good = (x >= lo) & (x <= hi)
    good |= x.isnan() & (lo.isnan() | ((lo == -math.inf) & (hi == math.inf)))
    return interval.wrong_zeros(x) if bool(good.all()) else ~good


def ratios(x: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Error over bound of each element, as :attr:`Comparison.ratio` has it of the worst one.

    Args:
        x: a result in float64, of the interval's shape.
        interval: what is right.

    Returns:
        At most 1 iff the element is accepted; infinity for a NaN or an infinity that is not.
    """
    bad = rejected(x, interval)
    found = _ratio(x, interval.lo, interval.hi, interval.expected)
    found = torch.where(bad, found.clamp(min=math.nextafter(1.0, 2.0)), found.clamp(max=1.0))
    return torch.where(bad & ~(x.isfinite() & interval.expected.isfinite()), math.inf, found)


@dataclasses.dataclass
class _Score:
    """Counts over a result: elements equal to the rounded reference, elements outside, and the worst ratio."""

    equal: int = 0
    bad: int = 0
    ratio: float = 0.0


def _score(x: torch.Tensor, interval: Interval) -> _Score:
    """One walk over a result, in pieces whose intermediates stay in a core's cache."""
    score = _Score()
    flat = [t.reshape(-1) for t in (x, interval.lo, interval.hi, interval.expected)]
    for first in range(0, x.numel(), _CHUNK):
        _score_chunk(score, *(t[first : first + _CHUNK] for t in flat))
    return score


def _score_chunk(score: _Score, x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> None:
    count = x.numel()
    equal = int((x == expected).sum())
    good = (x >= lo) & (x <= hi)
    accepted = int(good.sum())
    if equal == accepted == count:
        score.equal += count
        return
    if accepted < count:
        # NaN where it belongs, and where nothing can be said.
        nan = x.isnan()
        good |= nan & (lo.isnan() | ((lo == -math.inf) & (hi == math.inf)))
        equal += int((nan & expected.isnan()).sum())
        accepted = int(good.sum())
    score.equal += equal
    score.bad += count - accepted
    worst = float(_ratio(x, lo, hi, expected).amax())
    if accepted == count:
        worst = min(worst, 1.0)
    elif not bool(x[~good].isfinite().all()):
        worst = math.inf  # a NaN or an infinity has no distance
    else:
        worst = max(worst, math.nextafter(1.0, 2.0))
    score.ratio = max(score.ratio, worst)


def _ratio(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error over allowance, from the middle value: expected, or the nearest accepted one under ``eager`` rounding."""
    middle = torch.minimum(torch.maximum(expected, lo), hi)
    error = x - middle
    ratio = error / torch.where(error > 0, hi, lo).sub_(middle)
    # Numerator and denominator have one sign, but a zero denominator may be -0.  Zero over zero is the very
    # value; differences of infinities or NaN are for the pattern checks.
    return ratio.abs_().nan_to_num_(nan=0.0, posinf=math.inf)


def complaint_of(actual: object, problem: Problem, operands: Operands) -> tuple[str, str] | None:
    """Why the result cannot even be compared: (code, sentence)."""
    if not isinstance(actual, torch.Tensor):
        return "wrong-type", f"the result is a {type(actual).__name__}, not a tensor"
    if actual.layout != torch.strided:
        return "wrong-layout", f"the result is a {str(actual.layout).removeprefix('torch.')} tensor, not a strided one"
    if tuple(actual.shape) != problem.result_shape:
        return "wrong-shape", f"the result has shape {tuple(actual.shape)}, expected {problem.result_shape}"
    wanted = torch_dtype(problem.result_dtype)
    if actual.dtype != wanted:
        got = str(actual.dtype).removeprefix("torch.")
        return "wrong-dtype", f"the result is {got}, expected {problem.result_dtype.torch_name}"
    if actual.device.type != torch.device(operands.device).type:
        return "wrong-device", f"the result is on {actual.device}, the operands on {operands.device}"
    return None


def _reject(
    actual: torch.Tensor,
    x: torch.Tensor,
    bad: torch.Tensor,
    share: float,
    interval: Interval,
    problem: Problem,
    operands: Operands,
    tile: tuple[int, int] | None,
    others: Mapping[str, torch.Tensor],
    whole: bool,
) -> Comparison:
    """Describe a wrong result."""
    where = bad.nonzero()
    values, wanted = x[bad], interval.expected[bad]
    lo, hi = interval.lo[bad], interval.hi[bad]
    count = values.numel()
    nan, lacking = values.isnan(), wanted.isnan()
    infinite = values.isinf() & wanted.isfinite()
    zeros = (values >= lo) & (values <= hi)  # of the wrong sign
    ratio = _ratio(values, lo, hi, wanted)
    ratio = torch.where(nan | lacking | infinite | zeros, math.inf, ratio)
    # Infinite ratios (a bound of 0) are told apart by the error itself.
    error = (values - wanted).abs()
    order = torch.where(ratio.isinf(), error.nan_to_num(nan=math.inf), -1.0) if bool(ratio.isinf().any()) else ratio
    worst = int(order.argmax())
    # The limit of a float's excess is 1: a rejected element never counts as "1x" or less.
    worst_ratio = max(float(ratio[worst]), math.nextafter(1.0, 2.0))
    middle = min(max(float(wanted[worst]), float(lo[worst])), float(hi[worst]))
    upwards = float(values[worst]) > middle
    bound = float(hi[worst]) - middle if upwards else middle - float(lo[worst])
    if int(nan.sum()) >= _COVER * count:
        code = "nan"
    elif int(lacking.sum()) >= _COVER * count:
        code = "missing-nan"
    elif int(infinite.sum()) >= _COVER * count:
        code = "infinite"
    elif bool(zeros.any()):
        code = "zero-sign"
    else:
        code = "outside-bound"
    view = _Wrong(x, bad, interval, problem, operands, tile, others)
    mismatch = Mismatch(
        code=code,
        count=count,
        total=x.numel(),
        index=tuple(where[worst].tolist()),
        actual=float(values[worst]),
        expected=float(wanted[worst]),
        bound=bound if math.isfinite(bound) else 0.0,
        ratio=worst_ratio,
        tier=interval.tier,
        pattern=_pattern(view) if whole else "",
        cause="" if code == "zero-sign" else _cause(view, actual, whole),
    )
    return Comparison(worst_ratio, share, mismatch)


@dataclasses.dataclass(frozen=True)
class _Wrong:
    """A wrong result on its way through the explanations."""

    x: torch.Tensor
    bad: torch.Tensor
    interval: Interval
    problem: Problem
    operands: Operands
    tile: tuple[int, int] | None
    others: Mapping[str, torch.Tensor]

    @property
    def count(self) -> int:
        return int(self.bad.sum())


# -- where: facts about the set of bad elements ----------------------------------------------------


def _pattern(wrong: _Wrong) -> str:
    """One sentence on where the bad elements are, the most specific that covers 99 % of them."""
    bad = wrong.bad
    if wrong.count == 1:
        return f"it is the only bad element of {bad.numel()}" if bad.numel() > 1 else "it is the only element"
    if text := _grouped(bad, wrong.operands.groups, wrong.tile):
        return text
    prefix = ""
    if bad.dim() == 3:
        batches = bad.flatten(1).any(1)
        which = batches.nonzero().flatten().tolist()
        if len(which) < len(batches):
            prefix = _batches(which, len(batches))
        # One matrix stands for all: what is bad in any of them.
        bad = bad[batches].any(0)
    found = _plane(bad, wrong.tile)
    if not prefix:
        return found
    if bool(bad.all()):
        return f"{prefix}: all of it"
    return f"{prefix}; there {found}"


def _grouped(bad: torch.Tensor, groups: tuple[tuple[int, int], ...], tile: tuple[int, int] | None) -> str:
    """What a grouped product got wrong in terms of its groups; "" where they explain nothing."""
    filled = [(g, first, last) for g, (first, last) in enumerate(groups) if last > first]
    rows = bad.any(1)
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
        return f"{len(which)} of {len(groups)} groups are bad ({_few([g for g, _, _ in which])})"
    g, first, last = which[0]
    inside = bad[first:last]
    there = "all of it" if bool(inside.all()) else f"there {_plane(inside, tile)}"
    return f"only group {g} of {len(groups)}, rows {first} to {last - 1}, is bad: {there}"


def pattern_of(rows: torch.Tensor, columns: torch.Tensor) -> str:
    """One sentence on bad elements of which only the rows and the columns are known.

    Args:
        rows: which rows have any, bool, (M,) or (B, M).
        columns: which columns have any, bool, (N,).
    """
    prefix = ""
    if rows.dim() == 2:
        batches = rows.any(1)
        which = batches.nonzero().flatten().tolist()
        if len(which) < len(batches):
            prefix = _batches(which, len(batches)) + "; there "
        rows = rows[batches].any(0)
    m, n = len(rows), len(columns)
    if bool(rows.all()) and bool(columns.all()):
        return f"{prefix}every row and every column has bad elements"
    high, wide = rows.nonzero().flatten(), columns.nonzero().flatten()
    box = int(high[0]), int(high[-1]) + 1, int(wide[0]), int(wide[-1]) + 1
    if box[1] - box[0] == 1 and box[3] - box[2] == 1:
        return f"{prefix}every bad element is at row {box[0]}, column {box[2]}"
    if len(high) == box[1] - box[0] and len(wide) == box[3] - box[2]:
        if len(high) == 1 < m:
            return f"{prefix}every bad element is in row {box[0]}{_along('columns', box[2], box[3], n, columns)}"
        if len(wide) == 1 < n:
            return f"{prefix}every bad element is in column {box[2]}{_along('rows', box[0], box[1], m, rows)}"
        return prefix + _rectangle(_Subject("every bad element", True), box, (m, n), None)
    texts = [
        f"{name} are bad: {_plane(line, None).replace('the bad elements are', 'they are')}"
        for name, line in (("rows", rows[:, None]), ("columns", columns[None, :]))
        if not bool(line.all())
    ]
    return prefix + "; ".join(texts)


def _batches(which: list[int], total: int) -> str:
    if len(which) == 1:
        return f"only batch {which[0]} of {total} is bad"
    if which == list(range(which[0], which[-1] + 1)):
        if which[-1] == total - 1:
            return f"every bad element has batch >= {which[0]} of {total}"
        return f"only batches {which[0]} to {which[-1]} of {total} are bad"
    return f"{len(which)} of {total} batches are bad ({_few(which)})"


def _few(numbers: list[int], most: int = 6) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown}, ..." if len(numbers) > most else shown


def _plane(bad: torch.Tensor, tile: tuple[int, int] | None) -> str:
    """The pattern within one matrix."""
    m, n = bad.shape
    count = int(bad.sum())
    if count == m * n:
        return "every element is bad"
    box = _box(bad, 0)
    trimmed = _box(bad, count // 400)  # at each of four sides a quarter of one percent
    if 2 * _area(trimmed) <= _area(box):
        box = trimmed
    r0, r1, c0, c1 = box
    inside = int(bad[r0:r1, c0:c1].sum())
    every = inside == count
    covered = _Subject("every bad element" if every else f"{inside} of {count} bad elements", every)
    density = inside / _area(box)
    if r1 - r0 == 1 and c1 - c0 == 1:
        return f"{covered.be} at row {r0}, column {c0}"
    if r1 - r0 == 1 and m > 1:
        return f"{covered.be} in row {r0}{_rest(r0, r1, m, 'M')}{_along('columns', c0, c1, n, bad[r0])}"
    if c1 - c0 == 1 and n > 1:
        return f"{covered.be} in column {c0}{_rest(c0, c1, n, 'N')}{_along('rows', r0, r1, m, bad[:, c0])}"
    # A box that leaves little of the output out says something only if it is full: otherwise the edges are chance.
    telling = _area(box) <= 0.75 * m * n or (_area(box) < m * n and density >= 0.9)
    dense = inside >= 2 and density >= _DENSE
    tiled, tiles = _tiles(bad, tile)
    if dense and telling and not (tiles and 2 * tiled <= _area(box)):
        return _rectangle(covered, box, (m, n), tile)
    for text in (_period(bad, 1, "N"), _period(bad, 0, "M"), _elbow(bad), tiles, _triangle(bad)):
        if text:
            return text
    rows, columns = int(bad.any(1).sum()), int(bad.any(0).sum())
    if dense or count >= _DENSE * m * n:
        return f"the bad elements are all over the output ({count / (m * n):.0%} of it)"
    listed = ", ".join(str(tuple(p)) for p in bad.nonzero()[:4].tolist())
    more = ", ..." if count > 4 else ""
    return f"the bad elements are scattered over {rows} of {m} rows and {columns} of {n} columns: {listed}{more}"


@dataclasses.dataclass(frozen=True)
class _Subject:
    """The subject of a sentence and its verbs."""

    text: str
    singular: bool

    @property
    def be(self) -> str:
        return f"{self.text} {'is' if self.singular else 'are'}"

    @property
    def have(self) -> str:
        return f"{self.text} {'has' if self.singular else 'have'}"


def _area(box: tuple[int, int, int, int]) -> int:
    return (box[1] - box[0]) * (box[3] - box[2])


def _box(bad: torch.Tensor, stray: int) -> tuple[int, int, int, int]:
    """Rows [r0, r1) and columns [c0, c1) that hold the bad elements but for ``stray`` ones beyond each side."""

    def ends(counts: torch.Tensor) -> tuple[int, int]:
        first = int((counts.cumsum(0) > stray).to(torch.int8).argmax())
        last = len(counts) - int((counts.flip(0).cumsum(0) > stray).to(torch.int8).argmax())
        return first, last

    return *ends(bad.sum(1)), *ends(bad.sum(0))


def _rest(first: int, last: int, size: int, axis: str) -> str:
    """Whether an interval is the tail or the head of an axis."""
    if last == size and first > 0:
        return f": the last of {axis}"
    if first == 0 and last < size:
        return f": the first of {axis}"
    return ""


def _along(name: str, first: int, last: int, size: int, line: torch.Tensor) -> str:
    if bool(line.all()):
        return f", all {size} {name}"
    if last - first < size:
        return f", {name} {first} to {last - 1}"
    return ""


def _rectangle(
    covered: _Subject, box: tuple[int, int, int, int], shape: tuple[int, int], tile: tuple[int, int] | None
) -> str:
    """A densely bad rectangle that is not the whole output."""
    r0, r1, c0, c1 = box
    m, n = shape
    if c1 - c0 == n:
        return f"{covered.have} {_range('row', r0, r1, m, 'M', tile[0] if tile else None)}"
    if r1 - r0 == m:
        return f"{covered.have} {_range('column', c0, c1, n, 'N', tile[1] if tile else None)}"
    edges = _aligned(box, shape, tile)
    if edges:
        return f"{covered.be} in the {edges[0]}x{edges[1]} tile at row {r0}, column {c0}"
    if r1 == m and c1 == n:
        return f"{covered.have} row >= {r0} and column >= {c0}: the corner where the tails of M and N meet"
    return f"{covered.be} in the rectangle of rows {r0} to {r1 - 1}, columns {c0} to {c1 - 1}"


def _range(name: str, first: int, last: int, size: int, axis: str, edge: int | None) -> str:
    """An interval of rows or columns, with what it is in terms of tiles."""
    if last == size:
        edges = (edge,) if edge else _EDGES
        fits = next((e for e in edges if size % e and size - size % e == first), None)
        why = f" ({axis} mod {fits} = {size % fits})" if fits else ""
        if 4 * first < size and not why:
            return f"{name} >= {first}"
        return f"{name} >= {first}: an {axis}-tail{why}"
    if first == 0:
        return f"{name} < {last}: the head of {axis}"
    edges = (edge,) if edge else _EDGES
    fits = next((e for e in edges if first % e == 0 and last - first == e), None)
    return f"{name}s {first} to {last - 1}{f': the block {first // fits} of {fits}' if fits else ''}"


def _aligned(
    box: tuple[int, int, int, int], shape: tuple[int, int], tile: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The tile that a rectangle is, if its edges lie on a tile grid; tiles at the end may be cut off."""
    r0, r1, c0, c1 = box

    def edge(first: int, last: int, size: int, edges: tuple[int, ...]) -> int | None:
        return next((e for e in edges if first % e == 0 and last == min(first + e, size) and e <= size), None)

    if tile:
        found = edge(r0, r1, shape[0], tile[:1]), edge(c0, c1, shape[1], tile[1:])
        if found[0] and found[1]:
            return found[0], found[1]
    row, column = edge(r0, r1, shape[0], _EDGES), edge(c0, c1, shape[1], _EDGES)
    return (row, column) if row and column else None


def _period(bad: torch.Tensor, axis: int, name: str) -> str:
    """Bad elements in every p-th row or column only."""
    counts = bad.sum(0) if axis == 1 else bad.sum(1)
    size, across = len(counts), bad.shape[1 - axis]
    total = int(counts.sum())
    # A handful of bad elements has some period by accident.
    for period in (2, 4, 8, 16, 32, 64, 128):
        if size < 3 * period or total < 6:
            continue
        index = torch.arange(size) % period
        by_residue = torch.zeros(period, dtype=torch.int64).index_add_(0, index, counts)
        strong = by_residue >= by_residue.amax() / 4
        residues = strong.nonzero().flatten()
        if len(residues) > period // 2 or int(by_residue[strong].sum()) < _COVER * total:
            continue
        members = strong[index]
        # Every member must be hit, or it is not the period that decides.
        if int((counts[members] > 0).sum()) < 0.9 * int(members.sum()):
            continue
        if total < _DENSE * int(members.sum()) * across and across > 4:
            continue
        word = "columns" if axis == 1 else "rows"
        which = residues.tolist()
        if which == list(range(which[0], which[-1] + 1)) and len(which) > 1:
            return f"the bad elements are {word} of period {period} in {name}, residues {which[0]} to {which[-1]}"
        residue = "residue" if len(which) == 1 else "residues"
        return f"the bad elements are {word} of period {period} in {name}, {residue} {_few(which)}"
    return ""


def _elbow(bad: torch.Tensor) -> str:
    """An M-tail and an N-tail together."""
    m, n = bad.shape
    rows, columns = bad.sum(1), bad.sum(0)
    heavy_rows, heavy_columns = (rows >= n / 2).nonzero().flatten(), (columns >= m / 2).nonzero().flatten()
    if not len(heavy_rows) or not len(heavy_columns):
        return ""
    r0, c0 = int(heavy_rows[0]), int(heavy_columns[0])
    if r0 == 0 or c0 == 0 or len(heavy_rows) != m - r0 or len(heavy_columns) != n - c0:
        return ""
    if int(bad[:r0, :c0].sum()) > (1 - _COVER) * int(bad.sum()):
        return ""
    return f"the bad elements have row >= {r0} or column >= {c0}: the tails of M and N"


def _tiles(bad: torch.Tensor, tile: tuple[int, int] | None) -> tuple[int, str]:
    """Some tiles of a grid are bad and all others are untouched: the area of the bad ones, and a sentence or ""."""
    m, n = bad.shape
    total = int(bad.sum())
    grids = [tile] if tile else []
    grids += [(e, f) for e in _EDGES for f in _EDGES]
    # The tightest cover wins, and of equal ones that of larger tiles.
    best = (m * n, 0, "")
    for rows, columns in grids:
        if rows > m or columns > n or (rows >= m and columns >= n):
            continue
        high, wide = math.ceil(m / rows), math.ceil(n / columns)
        padded = torch.zeros(high * rows, wide * columns, dtype=torch.float32)
        padded[:m, :n] = bad
        sums = padded.view(high, rows, wide, columns).sum((1, 3))
        there = torch.zeros_like(padded)
        there[:m, :n] = 1
        sizes = there.view(high, rows, wide, columns).sum((1, 3))
        hit = sums >= 2 * _DENSE * sizes
        tiles = int(hit.sum())
        if not tiles or tiles > hit.numel() // 2 or float(sums[hit].sum()) < _COVER * total:
            continue
        area = int(sizes[hit].sum())
        if total < 8 or (area, -rows * columns) >= best[:2]:
            continue
        corners = [f"({i * rows}, {j * columns})" for i, j in hit.nonzero()[:4].tolist()]
        more = ", ..." if tiles > 4 else ""
        which = f"{tiles} of {hit.numel()} tiles of {rows}x{columns}"
        best = area, -rows * columns, f"the bad elements fill {which}, at {', '.join(corners)}{more}"
        if (rows, columns) == tile:
            break
    return best[0], best[2]


def _triangle(bad: torch.Tensor) -> str:
    m, n = bad.shape
    total = int(bad.sum())
    if m != n or m < 8 or total < m:
        return ""
    if int(bad.diagonal().sum()) >= _COVER * total:
        return "the bad elements are on the diagonal"
    for name, part in (("above", bad.triu(1)), ("below", bad.tril(-1))):
        # Also dense: half of a matrix is too much to hold a few elements by accident.
        if int(part.sum()) >= _COVER * total and total >= _DENSE * m * m / 2:
            return f"the bad elements are {name} the diagonal"
    return ""


# -- what: hypotheses, printed only if they reproduce the bad values -------------------------------------


def _cause(wrong: _Wrong, actual: torch.Tensor, whole: bool) -> str:
    """One sentence on what was computed instead; "" if nothing reproduces the bad values."""
    for look in (_nan_cause, _stale, _elsewhere) if whole else (_nan_cause, _stale):
        text = look(wrong)
        if text:
            return text
    sample = _Sample.of(wrong) if _comparable(wrong) else None
    text = (_coded_cause(sample) if sample is not None and whole else "") or _constant(wrong)
    if text:
        return text
    if not _comparable(wrong):
        return ""
    if sample is not None:
        for probe in (_group_cause, _arithmetic_cause, _k_cause, _input_cause):
            text = probe(sample)
            if text:
                return text
    return _precision_cause(wrong, actual) or (_factor_cause(sample) if sample is not None else "")


def _comparable(wrong: _Wrong) -> bool:
    """Whether most of the bad values are finite numbers where finite ones are expected."""
    usable = wrong.x[wrong.bad].isfinite() & wrong.interval.value[wrong.bad].isfinite()
    return int(usable.sum()) >= _COVER * usable.numel()


def _nan_cause(wrong: _Wrong) -> str:
    values, wanted = wrong.x[wrong.bad], wrong.interval.expected[wrong.bad]
    count = values.numel()
    nan = int((values.isnan() & ~wanted.isnan()).sum())
    if nan >= _COVER * count:
        if not wrong.operands.finite:
            return "NaN reached elements whose operands are finite, or memory was left unwritten"
        return "NaN where a number belongs: memory that was never written, or a read outside of an operand"
    lost = int((wanted.isnan() & ~values.isnan()).sum())
    if lost >= _COVER * count:
        return "a NaN was swallowed: an operand's NaN or Inf must reach the result"
    infinite = int((values.isinf() & wanted.isfinite()).sum())
    if infinite >= _COVER * count:
        return "an overflow: some partial sum or intermediate result left its type's range"
    kinds = ((nan, "unexpected NaN"), (lost, "missing NaN"), (infinite, "unexpected infinities"))
    told = [f"{number} {kind}" for number, kind in kinds if number]
    return f"among them {' and '.join(told)}" if told else ""


def _stale(wrong: _Wrong) -> str:
    """The answer of an earlier call."""
    for name, other in wrong.others.items():
        if other.shape != wrong.x.shape:
            continue
        theirs = other.detach().to(device="cpu", dtype=torch.float64)[wrong.bad]
        ours = wrong.x[wrong.bad]
        if int((theirs == ours).sum()) >= _COVER * ours.numel() and (ours.numel() > 3 or wrong.bad.numel() <= 3):
            if int(ours.unique().numel()) == 1 and ours.numel() > 3:
                continue  # a constant proves nothing
            return f"the bad elements are the answer for {name}: stale data"
    return ""


def _accepts(wrong: _Wrong, x: torch.Tensor, where: torch.Tensor | None = None) -> bool:
    """Whether ``x`` would be right (at ``where``)."""
    good = (x >= wrong.interval.lo) & (x <= wrong.interval.hi)
    if where is not None:
        good = good[where]
    return int(good.sum()) >= _COVER * good.numel()


def _elsewhere(wrong: _Wrong) -> str:
    """Right values at the wrong place: transposed, another batch, shifted rows or columns, swapped tiles."""
    x, interval, bad = wrong.x, wrong.interval, wrong.bad
    m, n = x.shape[-2:]
    if wrong.count < 4 or int(interval.expected.flatten()[: 1 << 16].unique().numel()) < 4:
        return ""
    if min(m, n) > 1:
        turned = x.mT if m == n else x.reshape(*x.shape[:-2], n, m).mT
        if _accepts(wrong, turned):
            return "the result is transposed" if m == n else "the result is laid out as its own transpose"
    if x.dim() == 3:
        for batch in bad.flatten(1).any(1).nonzero().flatten().tolist()[:4]:
            good = ((x[batch] >= interval.lo) & (x[batch] <= interval.hi)).flatten(1)
            fits = good.sum(1) >= _COVER * good.shape[1]
            fits[batch] = False
            if bool(fits.any()):
                return f"batch {batch} holds the answer of batch {int(fits.nonzero()[0])}"
        first = int(bad.flatten(1).any(1).nonzero()[0])
        x, bad = x[first], bad[first]
        lo, hi = interval.lo[first], interval.hi[first]
    else:
        lo, hi = interval.lo, interval.hi
    by_line = _moved(x, bad, lo, hi, "row") or _moved(x.mT, bad.mT, lo.mT, hi.mT, "column")
    return by_line or _swapped(x, bad, lo, hi, wrong.tile)


def _moved(x: torch.Tensor, bad: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, name: str) -> str:
    """Whole lines that are right for another line."""
    lines = bad.any(1).nonzero().flatten()
    if x.shape[1] < 4 or x.shape[0] < 2:
        return ""
    picked = lines[:: max(1, len(lines) // 4)][:4].tolist()
    found: list[tuple[int, int]] = []
    for line in picked:
        # A line that is all one value fits anywhere.
        if int(x[line].unique().numel()) < 4:
            continue
        matches = ((x[line] >= lo) & (x[line] <= hi)).to(torch.float32).mean(1)
        other = int(matches.argmax())
        if float(matches[other]) >= _COVER and other != line:
            found.append((line, other))
    if not found or len(found) < len(picked):
        return ""
    line, other = found[0]
    size = len(x)
    steps = {(o - i + size // 2) % size - size // 2 for i, o in found}
    if len(found) > 1 and len(steps) == 1:
        step = steps.pop()
        return f"the {name}s are shifted: {name} {line} holds the answer of {name} {other} ({step:+d})"
    if len(found) > 1 and len({o for _, o in found}) == 1:
        return f"every bad {name} holds the answer of {name} {other}"
    return f"{name} {line} holds the answer of {name} {other}"


def _swapped(
    x: torch.Tensor, bad: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, tile: tuple[int, int] | None
) -> str:
    """One tile that holds the answer of another tile of the same grid."""
    m, n = x.shape
    r0, _, c0, _ = _box(bad, 0)
    for rows, columns in ([tile] if tile else []) + [(e, f) for e in _EDGES for f in _EDGES if e * f >= 64]:
        i, j = r0 // rows * rows, c0 // columns * columns
        if i + rows > m or j + columns > n or (rows == m and columns == n):
            continue
        part = x[i : i + rows, j : j + columns]
        if int(part.unique().numel()) < 4:
            continue
        for p in range(0, m - rows + 1, rows):
            for q in range(0, n - columns + 1, columns):
                if (p, q) == (i, j):
                    continue
                # One element first: most candidates fall here.
                if not bool(lo[p, q] <= part[0, 0] <= hi[p, q]):
                    continue
                fits = (part >= lo[p : p + rows, q : q + columns]) & (part <= hi[p : p + rows, q : q + columns])
                if int(fits.sum()) >= _COVER * fits.numel():
                    return f"the {rows}x{columns} tile at ({i}, {j}) holds the answer of the tile at ({p}, {q})"
    return ""


def _constant(wrong: _Wrong) -> str:
    values = wrong.x[wrong.bad]
    if values.numel() > 3 and bool((values == values[0]).all()) and bool(values[0].isfinite()):
        if float(values[0]) == 0.0:
            return "every bad element is 0: never computed?"
        return f"every bad element is {float(values[0]):g}"
    return ""


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Some bad elements with everything that went into them, to recompute them in other ways.

    Attributes:
        wrong: the whole result.
        at: where the elements are, one index tensor for each dimension.
        x, value: actual and unrounded expected, (S,).
        tolerance: how near a hypothesis must come: the accepted interval, a few ulp, and the rounding errors of
            a sum of K such products (an interval after a relu has forgotten them).
        a, b: rows of A and columns of B, (S, K), float64; b is not scaled.
        bias, scale: beta * bias and scale as the op applies them, (S,), or ``None``.
        residuals: of BIAS and BINARY passes, each (S,).
    """

    wrong: _Wrong
    at: tuple[torch.Tensor, ...]
    x: torch.Tensor
    value: torch.Tensor
    tolerance: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    residuals: list[torch.Tensor]

    @classmethod
    def of(cls, wrong: _Wrong) -> _Sample | None:
        """Up to 64 bad finite elements, spread over all of them; ``None`` if fewer than one remains."""
        problem, operands, interval = wrong.problem, wrong.operands, wrong.interval
        usable = wrong.bad & wrong.x.isfinite() & interval.value.isfinite() & (interval.hi - interval.lo).isfinite()
        index = usable.nonzero()
        if not len(index) or problem.step("gated") or problem.has("steps-first") or problem.has("steps-last"):
            return None  # no single product went into an element, or another epilogue into each
        index = index[torch.linspace(0, len(index) - 1, min(_SAMPLE, len(index))).round().long()]
        at = tuple(index.unbind(1))
        rows, columns = _lines(*as_multiplied(operands.problem, operands), at, operands.groups)
        shape = problem.result_shape

        def pick(t: torch.Tensor) -> torch.Tensor:
            return t.detach().cpu().expand(shape)[at].to(torch.float64)

        residuals = []
        addend = as_added(operands.problem, operands)
        left = iter(operands.residuals)
        for step in problem.passes:
            if step.kind is StepKind.BIAS and addend is not None:
                residuals.append(pick(addend))
            elif step.kind is StepKind.BINARY:
                residuals.append(pick(next(left)))
        own = problem.op.addend or problem.op.name in OWN_BIAS
        term = pick(addend) if own and addend is not None else None
        factor = operands.scale
        scale = pick(factor) if factor is not None else None
        x, value = wrong.x[at], interval.value[at]
        lo, hi = interval.lo[at], interval.hi[at]
        u = DTYPES["f64" if problem.dtypes.out.name == "f64" else "f32"].unit_roundoff
        gauge = (rows * columns).abs().sum(1) * abs(problem.alpha)
        gauge = (gauge if scale is None else gauge * scale.abs()) + x.abs()
        tolerance = (hi - lo) + 2 * ulp_of(torch.maximum(x.abs(), value.abs()), problem.result_dtype)
        if operands.quantum == 0.0:
            tolerance += gauge * (problem.shape.k * u)
        return cls(wrong, at, x, value, tolerance, rows, columns, term, scale, residuals)

    def part(self, which: slice) -> _Sample:
        """The same for some of the elements."""
        return dataclasses.replace(
            self,
            at=tuple(i[which] for i in self.at),
            x=self.x[which],
            value=self.value[which],
            tolerance=self.tolerance[which],
            a=self.a[which],
            b=self.b[which],
            bias=None if self.bias is None else self.bias[which],
            scale=None if self.scale is None else self.scale[which],
            residuals=[r[which] for r in self.residuals],
        )

    @property
    def c(self) -> torch.Tensor:
        """The products' sums, (S,)."""
        return (self.a * self.b).sum(1)

    def finish(
        self,
        c: torch.Tensor,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What sums ``c`` (..., S) become, with other factors or another bias than the problem's."""
        problem = self.wrong.problem
        y = c * (problem.alpha if alpha is None else alpha)
        if self.scale is not None:
            y = y * self.scale
        addend = self.bias if bias is None else bias
        factor = problem.beta if beta is None else beta
        if addend is not None and factor != 0.0:
            y = y + addend * factor
        return evaluate(problem, y, self.residuals, problem.passes)

    def explains(self, hypothesis: torch.Tensor) -> bool:
        """Whether values (S,) computed in another way are the bad ones.

        They must come within the tolerance, and explain three quarters of each error: a hypothesis that
        changes nothing is within the tolerance of a small error too.
        """
        return bool(self.explain(hypothesis.unsqueeze(0))[0])

    def explain(self, hypotheses: torch.Tensor) -> torch.Tensor:
        """The same for many, (H, S) -> (H,)."""
        rest = (self.x - hypotheses).abs()
        fits = (rest <= self.tolerance) & (rest <= 0.25 * (self.x - self.value).abs())
        return fits.sum(1) >= _COVER * fits.shape[1]


def _lines(
    a: torch.Tensor, b: torch.Tensor, at: tuple[torch.Tensor, ...], groups: tuple[tuple[int, int], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of A and the columns of B that meet in the elements ``at``, each (S, K), float64."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dim() == 2 and b.dim() == 3 and not groups:  # linears: one A for all
        return a[at[1]].to(torch.float64), b.mT[(at[0], at[2])].to(torch.float64)
    rows = a[at[:-1]].to(torch.float64)
    if groups:
        return rows, b.mT[(_group_of(at[0], groups), at[1])].to(torch.float64)
    return rows, (b.mT[(at[0], at[2])] if b.dim() == 3 else b.mT[at[-1]]).to(torch.float64)


def _group_of(rows: torch.Tensor, groups: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The group that each row belongs to: the first whose end lies behind it."""
    return torch.searchsorted(torch.tensor([last for _, last in groups]), rows.contiguous(), right=True)


def _group_cause(s: _Sample) -> str:
    """Rows of a grouped product that met the B of another group."""
    groups = s.wrong.operands.groups
    if len(groups) < 2 or len(s.x) < _FEW:
        return ""
    row, column = s.at
    mine = _group_of(row, groups)
    filled = torch.tensor([g for g, (first, last) in enumerate(groups) if last > first])
    at = torch.searchsorted(filled, mine.contiguous())
    b = s.wrong.operands.b.detach().cpu().mT
    others = [(f"the group {'after' if step > 0 else 'before'}", mine + step) for step in (1, -1)]
    others += [("the next group that has rows", filled[(at + 1).clamp(max=len(filled) - 1)])]
    others += [("the last group before that has rows", filled[(at - 1).clamp(min=0)])]
    others += [(f"group {g}", torch.full_like(mine, g)) for g in range(min(len(groups), 8))]
    for name, other in others:
        columns = b[(other.clamp(0, len(groups) - 1), column)].to(torch.float64)
        if s.explains(s.finish((s.a * columns).sum(1))):
            return f"these rows were multiplied by the B of {name}"
    return ""


def _arithmetic_cause(s: _Sample) -> str:
    """The op's own parameters and its epilogue, each left out, doubled or out of order."""
    if len(s.x) < _FEW:
        return ""
    for text, values in _variations(s):
        if s.explains(values()):
            return text
    return ""


def _variations(s: _Sample) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    problem, c = s.wrong.problem, s.c
    alpha, beta = problem.alpha, problem.beta
    if s.bias is not None:
        yield "the bias is missing", lambda: s.finish(c, beta=0.0) if beta else s.value
        yield "the bias was added twice", lambda: s.finish(c, beta=2 * beta)
        yield "the bias was subtracted", lambda: s.finish(c, beta=-beta)
        if beta == 0.0:
            yield "beta = 0 was ignored: the bias was added", lambda: s.finish(c, beta=1.0)
        elif beta != 1.0:
            yield "beta was not applied", lambda: s.finish(c, beta=1.0)
        if alpha != 1.0:
            yield "alpha was applied to the bias as well", lambda: s.finish(c, beta=alpha * beta)
            if beta != 1.0:
                yield "alpha and beta were exchanged", lambda: s.finish(c, alpha=beta, beta=alpha)
        yield from _bias_shifts(s)
    if alpha not in {0.0, 1.0}:
        yield "alpha was not applied", lambda: s.finish(c, alpha=1.0)
        yield "alpha was applied twice", lambda: s.finish(c, alpha=alpha * alpha)
    if s.scale is not None:
        scale = s.scale
        yield "the scale was not applied", lambda: s.finish(c / scale)
        yield "the scale was applied twice", lambda: s.finish(c * scale)
        yield "the scale's reciprocal was applied", lambda: s.finish(c / (scale * scale))
        yield from _scale_variations(s, scale)
    passes = problem.passes
    if not passes:
        return
    base = c * alpha if s.scale is None else c * alpha * s.scale
    if s.bias is not None and beta:
        base = base + s.bias * beta
    for skip, step in enumerate(passes):
        if step.kind is StepKind.CAST:
            continue
        kept = passes[:skip] + passes[skip + 1 :]
        before = sum(p.kind in (StepKind.BIAS, StepKind.BINARY) for p in passes[:skip])
        own = step.kind in (StepKind.BIAS, StepKind.BINARY)
        residuals = s.residuals[:before] + s.residuals[before + own :]
        name = "the bias" if step.kind is StepKind.BIAS else f"step {step}"
        yield (
            f"{name} is missing",
            lambda kept=kept, residuals=residuals: evaluate(problem, base, residuals, kept),  # type: ignore[misc]  # bound early on purpose
        )
        if skip:
            order = (*passes[: skip - 1], step, passes[skip - 1], *passes[skip + 1 :])
            swapped = list(s.residuals)
            if own and passes[skip - 1].kind in (StepKind.BIAS, StepKind.BINARY):
                swapped[before - 1], swapped[before] = swapped[before], swapped[before - 1]
            yield (
                f"step {step} came before {passes[skip - 1]}",
                lambda order=order, swapped=swapped: evaluate(problem, base, swapped, order),  # type: ignore[misc]  # as above
            )
        elif s.bias is not None and beta and step.kind is StepKind.UNARY:
            early = evaluate(problem, base - s.bias * beta, [], (step,)) + s.bias * beta
            yield (
                f"step {step} came before the bias",
                lambda early=early: evaluate(problem, early, s.residuals, passes[1:]),  # type: ignore[misc]  # as above
            )


def _scale_variations(s: _Sample, scale: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The scales of A and of B each on its own, and those of rowwise scaling along the other dimension."""
    operands, c = s.wrong.operands, s.c
    if operands.scale_a is None or operands.scale_b is None:
        return
    a, b = (x.detach().cpu().to(torch.float64) for x in (operands.scale_a, operands.scale_b))
    own = {"A": a.expand(s.wrong.x.shape)[s.at], "B": b.expand(s.wrong.x.shape)[s.at]}
    for name, part in own.items():
        yield f"the scale of {name} was not applied", lambda part=part: s.finish(c / part)  # type: ignore[misc]  # bound early on purpose
        yield (
            f"the reciprocal of the scale of {name} was applied",
            lambda part=part: s.finish(c / (part * part)),  # type: ignore[misc]  # as above
        )
    row, column = s.at
    if a.numel() <= 1 or b.numel() <= 1 or int(column.max()) >= a.numel() or int(row.max()) >= b.numel():
        return
    along = {"A": a.flatten()[column], "B": b.flatten()[row]}
    yield (
        "the scales of A's rows and B's columns are exchanged",
        lambda: s.finish(c / scale * b.flatten()[row] * a.flatten()[column]),
    )
    for name, other in along.items():
        line = "columns" if name == "A" else "rows"
        yield (
            f"the scales of {name} run along the {line} of the result",
            lambda name=name, other=other: s.finish(c / own[name] * other),  # type: ignore[misc]  # as above
        )


def _bias_shifts(s: _Sample) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The bias of a neighbouring column."""
    operands, problem = s.wrong.operands, s.wrong.problem
    if operands.bias is None or operands.bias.shape[-1] != problem.shape.n or problem.shape.n < 3:
        return
    wide = as_added(operands.problem, operands)
    assert wide is not None
    for shift in (1, -1):
        other = wide.roll(-shift, -1).expand(problem.result_shape)[s.at]
        yield (
            f"the bias is shifted: column j has that of column j {'+' if shift > 0 else '-'} 1",
            lambda other=other: s.finish(s.c, bias=other),  # type: ignore[misc]  # as above
        )


def _coded_cause(s: _Sample) -> str:
    """What the fillings that encode positions in their values say: which k, or which element."""
    operands, problem = s.wrong.operands, s.wrong.problem
    if problem.passes:
        return ""
    filled = operands.problem  # with more steps, where the result is a tapped value: they decide the digits
    if operands.filling == "k-cover":
        found: list[tuple[int, str]] = []
        for n in range(min(4, len(s.x))):
            found += decode_k(filled, int(s.at[-1][n]), 0.0, float(s.x[n] - s.value[n]) / (problem.alpha or 1.0))
        told = [f"k = {k} {what}" for k, what in sorted(set(found))]
        return f"of K = {problem.shape.k}: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}" if told else ""
    if operands.filling == "tile-map" and s.bias is None and problem.alpha == 1.0:
        source, period = decode_source(filled, float(s.x[0])), tile_map_period(filled)
        here = tuple(int(i[0]) for i in s.at[-2:])
        if source is not None and source != (here[0] % period[0], here[1] % period[1]):
            whole = period == (problem.shape.m, problem.shape.n)
            return f"the value at {here} is that of {source}" + ("" if whole else f" modulo {period}")
    return ""


def _k_cause(s: _Sample) -> str:
    """Products of a contiguous block of k left out or added twice: the smallest such block."""
    k = s.wrong.problem.shape.k
    # Among some 2 K blocks one fits a few elements by chance, sooner where all products are small integers.
    if k < 1 or len(s.x) < (4 * _FEW if s.wrong.operands.quantum else _FEW):
        return ""
    sums = torch.cat([torch.zeros(len(s.x), 1, dtype=torch.float64), (s.a * s.b).cumsum(1)], 1)
    total = sums[:, -1]
    few = slice(0, 8)  # most blocks fail on a few elements already
    narrow = s.part(few)
    for size, starts, kind in _blocks(k):
        first = torch.tensor(starts)
        last = (first + size).clamp_(max=k)
        block = sums[:, last] - sums[:, first]
        for verb, sign in (("missing", -1.0), ("counted twice", 1.0)):
            if size >= k > 1 and sign > 0:
                continue  # everything twice is a factor
            changed = narrow.finish((total[few, None] + sign * block[few]).T)
            for candidate in narrow.explain(changed).nonzero().flatten().tolist():
                if s.explains(s.finish(total + sign * block[:, candidate])):
                    return _k_sentence(int(first[candidate]), int(last[candidate]), k, verb, kind)
    return ""


def _blocks(k: int) -> Iterator[tuple[int, list[int], str]]:
    """Blocks of k to try: (size, starts, what they are), from the smallest to the largest."""
    tails: set[int] = set()
    size = 1
    while size <= k:
        yield size, list(range(0, k, size)), ""
        if size > 1 and k % size and (k % size) not in tails:
            # What is left of K after whole blocks: the usual tail.
            tails.add(k % size)
            yield k % size, [k - k % size], ""
        size *= 2
    for slices in (2, 3, 4, 5, 6, 7, 8, 12, 16):
        size = math.ceil(k / slices)
        if size * (slices - 1) < k and size & (size - 1):
            yield size, list(range(0, k, size)), f": slice {{}} of {slices} of K"


def _k_sentence(first: int, last: int, k: int, verb: str, kind: str) -> str:
    if first == 0 and last == k:
        return f"all {k} products are {verb}"
    which = f"k = {first}" if last - first == 1 else f"k in [{first}, {last})"
    size = last - first
    note = kind.format(first // size + 1) if kind else ""
    if last == k:
        note = ": the K-tail" if size < k / 2 else note
    elif not note and size > 1 and k % size == 0 and k // size <= 16:
        note = f": slice {first // size + 1} of {k // size} of K"
    return f"the products with {which} of K = {k} are {verb}{note}"


def _input_cause(s: _Sample) -> str:
    """Inputs that lost bits before they were multiplied, or that did not lose those that they should have."""
    problem, operands = s.wrong.problem, s.wrong.operands
    dtypes = problem.dtypes
    if problem.autocast:
        rows, columns = _lines(operands.a, operands.b, s.at, operands.groups)
        if s.explains(s.finish((rows * columns).sum(1))):
            return f"A and B were not converted to {problem.input_dtype.name} before the product"
    precision = problem.input_dtype.precision if problem.autocast else max(dtypes.a.precision, dtypes.b.precision)
    for dtype, name in ((DTYPES["f32"], "f32"), (TF32, "TF32"), (DTYPES["f16"], "f16"), (DTYPES["bf16"], "bf16")):
        if dtype.precision >= precision:
            continue
        rounded = (round_to(s.a, dtype) * round_to(s.b, dtype)).sum(1)
        if s.explains(s.finish(rounded)):
            return f"A and B were rounded to {name} before the product"
        if dtype.name == "bf16":
            continue
        cut = (_toward_zero(s.a, dtype) * _toward_zero(s.b, dtype)).sum(1)
        if s.explains(s.finish(cut)):
            return f"A and B were truncated to {name} before the product"
    return ""


def _toward_zero(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    step = ulp_of(x, dtype)
    return torch.trunc(x / step) * step


def _precision_cause(wrong: _Wrong, actual: torch.Tensor) -> str:
    """Traces of a narrower type or of another rounding in the result as a whole."""
    x, interval, target = wrong.x, wrong.interval, wrong.problem.result_dtype
    finite = x.isfinite() & interval.value.isfinite()
    x, value, expected = x[finite], interval.value[finite], interval.expected[finite]
    if x.numel() < 8 or not target.is_float:
        return ""
    for name in ("bf16", "f16", "f32"):
        dtype = DTYPES[name]
        if dtype.precision >= target.precision:
            continue
        # Of the correct values few fit the narrower type; here all do.
        if torch.equal(round_to(x, dtype), x) and int((round_to(expected, dtype) != expected).sum()) > x.numel() // 4:
            return f"every element of the result is representable in {name}: a detour through {name}"
    off = x != expected
    for name in ("f16", "bf16", "f32"):
        twice = round_to(round_to(value, DTYPES[name]), target)
        blurred = twice != expected
        explained = int((off & (x == twice)).sum()) >= _COVER * int(off.sum())
        if int(off.sum()) >= 8 and explained and int(blurred.sum()) >= 8:
            return f"the result is rounded twice, through {name}"
    step = ulp_of(value, target)
    cut = torch.trunc(value / step) * step
    # Each element is either the truncated reference or, where errors of the sum blur it, next to it.
    as_cut, right = int((x == cut).sum()), int((expected == cut).sum())
    if int(off.sum()) >= 8 and as_cut >= _COVER * x.numel() and right < 0.9 * x.numel():
        return f"the result is rounded toward zero: a truncating store of {actual.dtype}".replace("torch.", "")
    return ""


def _factor_cause(s: _Sample) -> str:
    """All bad elements off by one factor, or by one summand."""
    usable = s.value.abs() > 4 * s.tolerance
    if int(usable.sum()) < 4:
        return ""
    ratios = s.x[usable] / s.value[usable]
    factor = float(ratios.median())
    if factor != 0.0 and s.explains(s.value * factor):
        return f"the bad elements are {factor:.6g} times what is expected"
    offset = float((s.x - s.value).median())
    if s.explains(s.value + offset):
        return f"the bad elements are too {'large' if offset > 0 else 'small'} by {abs(offset):.6g}"
    return ""


# -- beside eager PyTorch ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EagerComparison:
    """A result beside eager's: different is not worse.

    Attributes:
        bit_equal: the same bits everywhere, whatever NaN it is.
        max_ulps: largest distance in units of the last place; ``None`` if the results cannot be compared.
        differing, total: elements that differ (a zero's sign does not count), all elements.
        eager_ratio: eager's own worst error over the bound: above 1 eager itself is outside.
        note: why they cannot be compared, or "".
    """

    bit_equal: bool
    max_ulps: int | None
    differing: int
    total: int
    eager_ratio: float
    note: str = ""

    def text(self) -> str:
        """In words, for a report."""
        if self.note:
            return self.note
        if self.bit_equal:
            return "bit-equal"
        if not self.differing:
            return "equal but for the sign of zeros"
        one_nan = self.max_ulps == torch.iinfo(torch.int64).max
        far = "NaN on one side" if one_nan else f"at most {self.max_ulps} ulp apart"
        words = f"{far} in {self.differing} of {self.total} elements"
        if self.eager_ratio > 1.0:
            return f"{words}; eager itself is outside the bound ({_times(self.eager_ratio)})"
        return f"{words}; eager is at {self.eager_ratio:.2g} of the bound"

    def __str__(self) -> str:
        return self.text()


def beside_eager(
    actual: Sequence[object],
    eager: Sequence[torch.Tensor],
    intervals: Sequence[Interval],
    names: Sequence[str] = ("the tapped value", "the result"),
) -> str:
    """:func:`against_eager` for each of a program's results, in words; ``names`` are those of several."""
    texts = [against_eager(*one).text() for one in zip(actual, eager, intervals, strict=True)]
    if len(texts) == 1:
        return texts[0]
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def comparable(actual: object, other: torch.Tensor) -> bool:
    """Whether the elements of ``actual``, which a backend returned, can be set beside those of ``other``."""
    if not isinstance(actual, torch.Tensor) or actual.layout != torch.strided:
        return False
    return actual.shape == other.shape and actual.dtype == other.dtype


def against_eager(actual: object, eager: torch.Tensor, interval: Interval) -> EagerComparison:
    """Set a result beside eager's, and eager beside the truth.

    Args:
        actual: what the backend returned, whatever that is.
        eager: what eager PyTorch returned for the same operands.
        interval: the truth, as it judged ``actual``.
    """
    if not comparable(actual, eager):
        return EagerComparison(False, None, eager.numel(), eager.numel(), math.nan, "not comparable with eager")
    assert isinstance(actual, torch.Tensor)
    if eager.numel() == 0:
        return EagerComparison(True, 0, 0, 0, 0.0)
    ours, theirs = actual.detach().cpu(), eager.detach().cpu()
    score = _Score(ratio=math.nan)
    if theirs.shape == interval.expected.shape:
        score = _score(theirs.to(torch.float64), interval)
    most = differing = 0
    first_flat, second_flat = ours.reshape(-1), theirs.reshape(-1)
    signs = True
    for first in range(0, ours.numel(), _CHUNK):
        a, b = first_flat[first : first + _CHUNK], second_flat[first : first + _CHUNK]
        distance = ulp_distance(a, b)
        most = max(most, int(distance.amax()))
        differing += int((distance != 0).sum())
        signs = signs and (not a.dtype.is_floating_point or torch.equal(torch.signbit(a), torch.signbit(b)))
    return EagerComparison(differing == 0 and signs, most, differing, eager.numel(), score.ratio)
