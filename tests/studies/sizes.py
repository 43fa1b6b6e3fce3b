"""Which sizes the drawn sets of the suite hold: ``python tests/studies/sizes.py > docs/results/sizes.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines

from pytest_gemm.conformance import matrix
from pytest_gemm.core.text import show
from pytest_gemm.problem import shapes
from pytest_gemm.problem.draw import MODULUS, is_prime, size_range
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import document

AXES = ("batch", "m", "n", "k")


class Column(NamedTuple):
    """The sizes that the lines of a set have in one dimension, and those of its range."""

    axis: str
    text: str
    possible: range
    met: tuple[int, ...]

    def residues(self, modulus: int) -> tuple[int, int]:
        """How many residues are met, and how many there are, in units of the range's step."""
        met, possible = ({size // self.possible.step % modulus for size in of} for of in (self.met, self.possible))
        return len(met), len(possible)

    @property
    def modulus(self) -> int:
        """The largest modulus of which every residue is met."""
        moduli = [1 << power for power in range(MODULUS.bit_length())]
        return max(one for one in moduli if len(set(self.residues(one))) == 1)

    @property
    def octaves(self) -> tuple[int, int]:
        """How many octaves are met, and how many there are."""
        met, possible = ({size.bit_length() for size in of} for of in (self.met, self.possible))
        return len(met), len(possible)

    @property
    def primes(self) -> int:
        """How many of its sizes are primes."""
        return sum(map(is_prime, self.met))


class Drawn(NamedTuple):
    """A set whose sizes are drawn."""

    family: str
    name: str
    level: str
    problems: tuple[Problem, ...]
    columns: tuple[Column, ...]


def drawn(folder: Path, level: str) -> Iterator[Drawn]:
    """The drawn sets of a level, of the files of a folder."""
    for path in sorted(folder.glob("*.toml")):
        tables = {one["name"]: one for one in document(path).get("set", ()) if "draw" in one}
        for one in shapes.read(path, level) if tables else ():
            if table := tables.get(one.name):
                texts = {axis: table["draw"][axis] for axis in AXES if axis in table["draw"]}
                met = {axis: tuple(int(getattr(p.shape, axis)) for p in one.problems) for axis in texts}
                columns = tuple(Column(axis, text, size_range(text), met[axis]) for axis, text in texts.items())
                yield Drawn(path.stem, one.name, one.level, one.problems, columns)


def page() -> str:
    """The table as Markdown."""
    return lines.page("sizes.md.jinja", sets=list(drawn(matrix.CASES, "exhaustive")))


if __name__ == "__main__":
    show(page())
