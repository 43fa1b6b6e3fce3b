"""Defects of GEMM stacks and the lines that meet them: ``python tests/studies/history.py > docs/results/history.md``.

The table is ``history.toml``.  ``tests/conformance/test_history.py`` checks that each line is in the suite, and that
what imitates a defect is caught on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines

from pytest_gemm.problem.axes import APART, LEVELS

_LEVELS: Final = (*LEVELS, *APART)


class Bug(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A defect upstream; ``history.toml`` describes the fields."""

    id: str
    links: tuple[str, ...]
    wrong: str
    releases: str
    hardware: str
    lines: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    options: str = ""
    imitation: str = ""
    ledger: tuple[str, ...] = ()
    missing: str = ""
    calls: int = 1

    @property
    def level(self) -> str:
        """The least level that has one of its lines, "" where there is none."""
        at = {lines.levels().get(line) for line in self.lines}
        return next((level for level in _LEVELS if level in at), "")

    @property
    def imitated(self) -> tuple[str, ...]:
        """The problems on which its imitation runs; none where there is none."""
        return (self.small or self.lines) if self.imitation else ()


BUGS = lines.read("history.toml", Bug)


def complaints(bugs: Iterable[Bug]) -> list[str]:
    """What is wrong with the table, a sentence each; empty when every line is a problem of the suite."""
    found: list[str] = []
    for bug in bugs:
        if bool(bug.lines) == bool(bug.missing):
            found.append(f"{bug.id}: it needs lines, or the reason why none is there")
        if bug.lines and not (bug.imitation or bug.ledger):
            found.append(f"{bug.id}: nothing shows that its lines catch it")
        found += lines.complaints(bug.id, bug.lines, *_LEVELS)
    return found


def page() -> str:
    """The table as Markdown."""
    return lines.page("history.md.jinja", bugs=BUGS)


if __name__ == "__main__":
    raise SystemExit(lines.printed(page(), complaints(BUGS)))
