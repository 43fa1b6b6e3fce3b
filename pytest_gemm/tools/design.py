"""The problems that a kernel is judged by, in an order of which any beginning is fair.

Most are *pairs*: each two levels of the factors below (few rows and a long K, a tail in N and padded rows of A, ...)
meet in one of them, and those levels come next that were met least.  Between them stand the *extremes*, which need more
than two levels at once, and batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.tools.first_calls import Said
    from pytest_gemm.tools.judgement import Judgement
    from pytest_gemm.tools.kernel import Form

_Row = dict[str, Any]

# Levels of M, N and K, with the sizes that take turns: whole tiles, tails, a single line, few ones, less than a tile,
# more tiles than are grouped; K between the multiples of 64, of several slices, and of more than a slice may hold.
_ROWS: Final[Mapping[str, Sequence[int]]] = {
    "whole": (64, 32, 128, 256),
    "tail": (33, 65, 17, 130, 250, 90, 51, 79),
    "one": (1,),
    "few": (3, 8, 5, 2, 7, 4),
    "narrow": (16, 12, 24, 9),
    "long": (520, 1152, 771, 1030),
}
_COLUMNS: Final[Mapping[str, Sequence[int]]] = {
    "whole": (128, 64, 32, 256),
    "tail": (35, 49, 98, 143, 26, 251, 77, 118),
    "one": (1,),
    "few": (4, 2, 8, 6, 3, 5),
    "narrow": (24, 16, 10, 40),
    "long": (1032, 520, 771, 1160),
}
_DEPTHS: Final[Mapping[str, Sequence[int]]] = {
    "whole": (192, 64, 128, 32, 256),
    "tail": (65, 17, 127, 33, 250, 90, 75),
    "between": (96, 160, 48, 224),
    "long": (512, 1152, 544, 2048, 640),
    "long tail": (1004, 514, 2056, 1000, 771),
    "deep": (3000, 4104, 2568, 3592),
    "few": (8, 1, 7, 3, 5),
}
_BATCHES: Final[Mapping[str, Sequence[int]]] = {"few": (3, 2, 5), "many": (17, 9)}
# How an operand lies.
_PLACES: Final = ("padded", "offset", "expanded", "strided")
# What a batch needs few of: its kernels are those of matrices, called with other strides.
_OF_BATCHES: Final = {
    "m": ("whole", "one", "few", "tail"),
    "n": ("whole", "tail", "one", "few"),
    "k": ("whole", "tail", "few", "long", "long tail"),
}
_IN_BATCHES: Final = ("broadcast", "padded", "offset", "batch_middle")
# M x N x K, layout and place: one tail alone, which makes the plainest failures; equal sizes, by which a kernel might
# tell a layout; empty ones; many tiles in groups that do not divide them; a long K under few lines; whole tiles in
# rectangles; A against itself; a single line of many lengths; all sizes above 512; long rows in memory; more lines than
# 16 bits count.
_EXTREMES: Final = (
    *("32x48x65", "24x16x0", "32x35x64", "1x64x1152", "33x48x64"),
    *("48x48x48", "1152x264x72", "8x40x4104", "300x300x96 nt b.alias_t", "128x256x512"),
    *("33x64x64 nt", "0x16x8", "1x1032x2056", "1032x1x2056", "64x35x64 tn", "1x1x1", "16x0x8", "520x24x48 tn"),
    *("256x128x384", "16x24x8200", "4x1x1152", "1x8x6152", "771x1x250", "1x200x1 nt", "520x520x24", "65x65x65 tt"),
    *("272x272x160 tn b.alias_t", "384x512x128", "144x144x144 nn b.alias", "1x12x3000", "33x1x4104", "1x771x514"),
    *(
        "12x2056x520",
        "2056x12x520",
        "4x4104x136",
        "4104x4x136",
        "3x16x24x0",
        "5x1x40x96 nn b.broadcast",
        "5x33x1x300 nn a.broadcast",
        "640x384x256",
        "1030x24x1048",
    ),
    *("24x1030x1048", "257x300x544", "1x33x48x65", "16x32x16392 nt", "8x4x32776 nt", "4x8x32776", "1416x136x40"),
    *("8x12296x24", "12296x8x24", "264x776x520", "65552x1x2x1", "65552x3x16", "3x65552x16", "1800x264x24"),
    *(
        "136x264x4104",
        "1x12x130",
        "5x4x1 nn a.strided",
        "524304x1x2",
        "520x528x776",
        "1672x1416x24",
        "256x512x1000",
        "512x512x512",
    ),
)
# Multiplications of a problem, where whole tiles alone are taken of one of these, and elements of its matrices, and of
# those of a batch.
_MOST: Final = 1 << 26
_MOST_OF_TILES: Final = 1 << 28
_ELEMENTS: Final = 5 << 20
_OF_A_BATCH: Final = 1 << 19
# Distributions of each problem, and of one with many elements; of the others one, which takes turns.
_DISTRIBUTIONS: Final = 4
_OF_MANY: Final = 2
_MANY: Final = 1 << 16
# Elements of an extreme up to which it is one for each data type, and sizes from which on it is.
_FEW: Final = 1 << 14
_LONG: Final = 1 << 13


@dataclasses.dataclass
class Design:
    """The problems of a kernel; iterating goes on where it has ended.

    Attributes:
        judgement: what it takes.
        form: its arguments.
        said: what its user says of it.
        refused: lines that it has refused, entered while the problems are taken: what it refuses alike is left out.
        deadly: M, N and K that have ended its process; no further problem has them.
    """

    judgement: Judgement
    form: Form
    said: Said
    refused: set[str] = dataclasses.field(default_factory=set)
    deadly: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Start with the simplest problem."""
        layouts = self.form.layouts
        dtypes = tuple(range(len(self.judgement.dtypes)))
        takes_out = "out" in self.form.roles and self.form.c == "nan"
        common = {"layout": layouts, "dtype": dtypes, "out": ("", "out.given", "out.given+padded")[: 1 + 2 * takes_out]}
        self._plain = {"layout": layouts[0], "a": "", "b": "", "out": ""}

        def places(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
            return {side: ("", *(f"{side}.{word}" for word in words)) for side in "ab"}

        self._values = {"m": _ROWS, "n": _COLUMNS, "k": _DEPTHS, "batch": _BATCHES}
        sizes: dict[str, tuple[Any, ...]] = {name: (*self._values[name],) for name in "mnk"}
        self._levels = {**sizes, **common, **places(_PLACES)}
        self._of_batches = {"batch": (*_BATCHES,), **_OF_BATCHES, **common, **places(_IN_BATCHES)}
        self._banned: set[tuple[str, Any]] = set()
        self._seen: set[str] = set()
        self._problems = self._in_order()

    def __iter__(self) -> Iterator[Problem]:
        return self._problems

    def _in_order(self) -> Iterator[Problem]:
        """Two pairs, an extreme and a batch in turn, each without what was refused."""
        is_batch = self.judgement.op == "bmm"
        pairs = self._pairs({"batch": ("few",)} | self._levels if is_batch else self._levels)
        extremes = self._extremes(_EXTREMES)
        batches = self._pairs(self._of_batches) if self.judgement.batched else iter(())
        simplest = next(pairs)
        for dtype in self._levels["dtype"]:
            yield from self._accepted(simplest | {"dtype": dtype})
        sources: list[Iterator[_Row]] = [pairs, pairs, extremes, batches]
        for row in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
            if row is not None:
                yield from self._accepted(row)

    def _accepted(self, row: _Row) -> Iterator[Problem]:
        """The problem of a row; of one that is refused the same with plainer operands, and then in the plain layout."""
        places = self._plain | {"layout": row["layout"]}
        before: _Row = {}
        for plainer in (row, row | {"b": ""}, row | {"a": ""}, row | places, row | self._plain):
            if plainer == before or row["size"] in self.deadly or (problem := self._problem(plainer)) is None:
                continue
            if problem.line not in self._seen:
                self._seen.add(problem.line)
                yield problem
            if problem.line not in self.refused:
                self._banned |= {(name, row[name]) for name in self._plain if before and plainer[name] != row[name]}
                return
            before = plainer

    def _problem(self, row: _Row) -> Problem | None:
        """The problem of a row, or ``None`` where no line says it or something in it is refused."""
        if self._banned & row.items():
            return None
        dtype = self.judgement.dtypes[row["dtype"]]
        batch = f"{row['batch']}x" if row.get("batch") else ""
        op = "bmm" if batch else "int_mm" if dtype[0] == "i" else self.form.op
        size = "x".join(map(str, row["size"]))
        fields = [op, dtype, row["layout"], f"{batch}{size}", self.form.epilogue, row["a"], row["b"], row["out"]]
        with contextlib.suppress(ProblemError):  # an op has its own rules, as int_mm of a transposed A
            return Problem.parse(":".join(filter(None, fields)))
        return None

    def _extremes(self, texts: Sequence[str]) -> Iterator[_Row]:
        sizes = [(*map(int, text.partition(" ")[0].split("x")),) for text in texts]
        if self.said.sizes:
            texts, sizes = [""] * len(self.said.sizes), [*self.said.sizes]
        dtypes = itertools.cycle(range(len(self.judgement.dtypes)))
        for text, (*batch, m, n, k) in zip(texts, sizes, strict=True):
            layout, place = (*text.split()[1:], "", "")[:2]
            if batch and not self.judgement.batched:
                continue
            size = (m, n, k) if self.said.sizes else self.said.fitted((m, n, k))
            if size[0] * size[1] * size[2] > _MOST_OF_TILES:
                continue
            row: _Row = self._plain | {"size": size, f"{place or 'a'}"[0]: place}
            row |= {"layout": layout} if layout else {}
            row |= {"batch": (*batch, 3)[0]} if batch or self.judgement.op == "bmm" else {}
            # Each data type may have a path of its own.
            is_cheap = m * n + m * k + k * n <= _FEW or place or max(m, n, k, *batch) >= _LONG
            yield from (row | {"dtype": dtype} for dtype in (self._levels["dtype"] if is_cheap else (next(dtypes),)))

    def _pairs(self, factors: Mapping[str, Sequence[Any]]) -> Iterator[_Row]:
        """Rows in which each two levels of the factors meet; the first has the first level of each."""
        used: Counter[tuple[str, Any]] = Counter()
        sizes = itertools.cycle(self.said.sizes)
        apart = [[(name, level) for level in levels] for name, levels in factors.items()]
        pairs = [pair for some, others in itertools.combinations(apart, 2) for pair in itertools.product(some, others)]
        open_pairs = dict.fromkeys(map(frozenset, pairs))
        row: _Row = {}
        while open_pairs:
            # min keeps the order of the factors where several were used alike.
            row = dict(min(open_pairs, key=lambda pair: sum(used[level] for level in pair))) if row else {}
            for name, levels in factors.items():
                if name in row:
                    continue
                fitting = [one for one in levels if self._is_small(row | {name: one}, used)]
                if not fitting:
                    break
                new = {
                    one: sum(frozenset({(name, one), other}) in open_pairs for other in row.items()) for one in fitting
                }
                row[name] = max(fitting, key=lambda one: (new[one], -used[name, one]))
            done = set(map(frozenset, itertools.combinations(row.items(), 2)))
            open_pairs = {pair: None for pair in open_pairs if pair not in done and not pair & self._banned}
            if len(row) < len(factors) or self._banned & row.items():
                continue
            lengths = {name: self._value(name, row[name], used) for name in self._values if name in row}
            used.update(row.items())
            size = next(sizes) if self.said.sizes else self.said.fitted([lengths.pop(name) for name in "mnk"])
            yield {**row, **lengths, "size": size}

    def _value(self, name: str, level: str, used: Mapping[tuple[str, Any], int]) -> int:
        values = self._values[name][level]
        return values[used[name, level] % len(values)]

    def _is_small(self, row: _Row, used: Mapping[tuple[str, Any], int]) -> bool:
        """Whether the sizes of a row, as far as they are known, can be multiplied often."""
        *size, batch = [self._value(name, row[name], used) if name in row else 1 for name in ("m", "n", "k", "batch")]
        m, n, k = self.said.fitted(size)
        most = _MOST if self.said.multiple_of == (1, 1, 1) else _MOST_OF_TILES
        elements = _ELEMENTS if batch == 1 else _OF_A_BATCH
        return m * n * k * batch <= most and (m * n + m * k + k * n) * batch <= elements


def distributions(problem: Problem, number: int) -> tuple[str, ...]:
    """Names of the distributions of a problem: those that find most, and one of the others, which takes turns."""
    shape, names = problem.shape, distributions_for(problem)
    elements = (shape.m * shape.n + shape.m * shape.k + shape.k * shape.n) * (shape.batch or 1)
    count = _OF_MANY if elements > _MANY else _DISTRIBUTIONS
    first, others = names[:count], names[count:]
    return (*first, others[number % len(others)]) if others else first
