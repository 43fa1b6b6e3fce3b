"""The problems that a kernel is judged by, in an order of which any beginning is fair.

Most are *pairs*: each two levels of the factors below (few rows and a long K, a tail in N and padded rows of A, ...)
meet in one of them, and those levels come next that were met least.  Between them stand the *extremes*, which need more
than two levels at once, and batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
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
# more tiles than are grouped.  Sums of K over 1024 codes of int8 leave what f32 holds.
_LINES: Final[Mapping[str, Sequence[int]]] = {
    "whole": (32, 128, 64, 256),
    "tail": (33, 65, 17, 130, 250),
    "one": (1,),
    "few": (3, 8, 5, 2, 7),
    "narrow": (16, 12, 9, 24),
    "long": (1152, 1030, 520, 771),
}
_DEPTHS: Final[Mapping[str, Sequence[int]]] = {
    "whole": (64, 128, 32),
    "tail": (65, 17, 127, 33, 250),
    "between": (96, 160, 48, 224),
    "long": (512, 1152, 544, 2048),
    "long tail": (1004, 514, 2056, 1000, 4104),
    "few": (8, 1, 7, 3),
}
_BATCHES: Final[Mapping[str, Sequence[int]]] = {"few": (3, 2, 5), "many": (17, 33)}
_PLACES: Final = ("", "a.padded", "b.padded", "a.offset", "b.offset", "a.padded+offset:b.padded+offset")
# What a batch needs few of: its kernels are those of matrices, called with other strides.
_OF_BATCHES: Final = {
    "m": ("whole", "one", "few", "tail"),
    "n": ("whole", "tail", "few"),
    "k": ("whole", "tail", "few"),
}
_IN_BATCHES: Final = ("", "b.broadcast", "a.broadcast", "a.padded", "b.padded", "a.offset")
# M x N x K, layout and place.  Square, empty, many tiles that no 8 divides, a long K under few lines, A against itself,
# whole tiles in rectangles, every dimension above 512, more lines than 16 bits count.
_EXTREMES: Final = (
    *("48x48x48", "24x16x0", "1152x264x72", "8x40x4104", "300x300x96 nt b.alias_t", "1x1032x2056", "128x256x512"),
    *(
        "1032x1x2056",
        "0x16x8",
        "1x1x1",
        "16x0x8",
        "256x128x384",
        "16x24x8200",
        "1030x1040x16",
        "272x272x160 tn b.alias_t",
    ),
    *("520x528x776", "384x512x128", "144x144x144 nn b.alias", "12x2056x520", "2056x12x520", "65552x3x16"),
    *(
        "3x65552x16",
        "640x384x256",
        "1030x24x1048",
        "24x1030x1048",
        "257x300x544",
        "1x33x48x65",
        "256x512x1000",
        "512x512x512",
    ),
)
# Only where a GPU computes: more tiles than it has processors, more matrices than a dimension of a grid.
_OF_GPUS: Final = ("1672x1416x72", "65552x2x3x8")
# Multiplications of a problem; where whole tiles alone are taken, of one of these.
_MOST: Final = 1 << 26
_MOST_OF_TILES: Final = 1 << 28
# Distributions of each problem; of the others one, which takes turns.
_DISTRIBUTIONS: Final = 4


@dataclasses.dataclass
class Design:
    """The problems of a kernel; iterating goes on where it has ended.

    Attributes:
        found: what it takes.
        form: its arguments.
        said: what its user says of it.
        refused: lines that it has refused, entered while the problems are taken: what it refuses alike is left out.
    """

    found: Judgement
    form: Form
    said: Said
    refused: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Start with the simplest problem."""
        layouts = self.form.layouts
        dtypes = tuple(range(len(self.found.dtypes)))
        common = {"layout": layouts, "dtype": dtypes}
        self._plain = {"layout": layouts[0], "place": ""}
        batches = dict.fromkeys(("m", "n"), _LINES) | {"k": _DEPTHS, "batch": _BATCHES}
        self._values: dict[str, Mapping[str, Sequence[int]]] = batches
        self._levels: dict[str, tuple[Any, ...]] = {"m": (*_LINES,), "n": (*_LINES,), "k": (*_DEPTHS,), **common}
        self._of_batches = {"batch": (*_BATCHES,), **_OF_BATCHES, **common, "place": _IN_BATCHES}
        self._levels["place"] = _PLACES
        self._banned: set[tuple[str, Any]] = set()
        self._seen: set[str] = set()
        self._problems = self._in_order()

    def __iter__(self) -> Iterator[Problem]:
        return self._problems

    def _in_order(self) -> Iterator[Problem]:
        """Two pairs, an extreme and a batch in turn, each without what was refused."""
        is_batch = self.found.op == "bmm"
        pairs = self._pairs({"batch": ("few",)} | self._levels if is_batch else self._levels)
        extremes = self._extremes(_EXTREMES + _OF_GPUS * (self.found.device == "cuda"))
        batches = self._pairs(self._of_batches) if self.found.batched else iter(())
        sources: list[Iterator[_Row]] = [pairs, pairs, extremes, batches]
        for row in itertools.chain.from_iterable(itertools.zip_longest(*sources)):
            if row is not None:
                yield from self._accepted(row)

    def _accepted(self, row: _Row) -> Iterator[Problem]:
        """The problem of a row; of one that is refused the same without its place, and then without its layout."""
        refused: _Row = {}
        for plainer in (row, row | {"place": ""}, row | self._plain):
            if plainer == refused or (problem := self._problem(plainer)) is None:
                continue
            if problem.line not in self._seen:
                self._seen.add(problem.line)
                yield problem
            if problem.line not in self.refused:
                self._banned |= {
                    (name, refused[name]) for name in self._plain if refused and plainer[name] != refused[name]
                }
                return
            refused = plainer

    def _problem(self, row: _Row) -> Problem | None:
        """The problem of a row, or ``None`` where no line says it or something in it is refused."""
        if self._banned & row.items():
            return None
        dtype = self.found.dtypes[row["dtype"]]
        batch = f"{row['batch']}x" if row.get("batch") else ""
        op = "bmm" if batch else "int_mm" if dtype[0] == "i" else self.form.op
        size = "x".join(map(str, row["size"]))
        fields = [op, dtype, row["layout"], f"{batch}{size}", self.form.epilogue, row["place"]]
        with contextlib.suppress(ProblemError):  # an op has its own rules, as int_mm of a transposed A
            return Problem.parse(":".join(filter(None, fields)))
        return None

    def _fitted(self, size: Sequence[int]) -> tuple[int, ...]:
        """M, N and K as the kernel takes them: multiples, or all equal."""
        if self.said.square:
            size = (sorted(size)[1] if min(size) else 0,) * 3
        return tuple(-(-length // step) * step for length, step in zip(size, self.said.multiple_of, strict=True))

    def _extremes(self, texts: Sequence[str]) -> Iterator[_Row]:
        sizes = [(*map(int, text.partition(" ")[0].split("x")),) for text in texts]
        if self.said.sizes:
            texts, sizes = [""] * len(self.said.sizes), [*self.said.sizes]
        dtypes = itertools.cycle(range(len(self.found.dtypes)))
        for text, (*batch, m, n, k) in zip(texts, sizes, strict=True):
            layout, place = (*text.split()[1:], "", "")[:2]
            given = {"batch": batch[0]} if batch else {"batch": 3} if self.found.op == "bmm" else {}
            if batch and not self.found.batched:
                continue
            size = (m, n, k) if self.said.sizes else self._fitted((m, n, k))
            yield {
                "size": size,
                "layout": layout or self._plain["layout"],
                "place": place,
                "dtype": next(dtypes),
                **given,
            }

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
                row[name] = max(fitting, key=lambda one: (new[one], -used[name, one]))  # used at once
            done = set(map(frozenset, itertools.combinations(row.items(), 2)))
            open_pairs = {pair: None for pair in open_pairs if pair not in done and not pair & self._banned}
            if len(row) < len(factors) or self._banned & row.items():
                continue
            found = {name: self._value(name, row[name], used) for name in self._values if name in row}
            used.update(row.items())
            size = next(sizes) if self.said.sizes else self._fitted([found.pop(name) for name in "mnk"])
            yield {**row, **found, "size": size}

    def _value(self, name: str, level: str, used: Mapping[tuple[str, Any], int]) -> int:
        values = self._values[name][level]
        return values[used[name, level] % len(values)]

    def _is_small(self, row: _Row, used: Mapping[tuple[str, Any], int]) -> bool:
        """Whether the sizes of a row, as far as they are known, can be multiplied often."""
        sizes = [self._value(name, row[name], used) if name in row else 1 for name in ("m", "n", "k", "batch")]
        most = _MOST if self.said.multiple_of == (1, 1, 1) else _MOST_OF_TILES
        return math.prod(self._fitted(sizes[:3])) * sizes[3] <= most


def distributions(problem: Problem, number: int) -> tuple[str, ...]:
    """Names of the distributions of a problem: those that find most, and one of the others, which takes turns."""
    first, others = distributions_for(problem)[:_DISTRIBUTIONS], distributions_for(problem)[_DISTRIBUTIONS:]
    return (*first, others[number % len(others)]) if others else first
