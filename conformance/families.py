"""PyTorch's own tests of the C++ templates beside this suite's: ``pytest-gemm families``.

The table is data, ``pytorch_families.toml``: each test function of ``test_cpu_select_algorithm.py`` with the problems
that check the same here.  The command prints it as a page.  ``tests/conformance/test_families.py`` checks that each
problem is in the suite.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from pytest_gemm.conformance import matrix, tables
from pytest_gemm.storage.datafile import Key, TableFile, is_count, is_text, is_texts
from pytest_gemm.storage.errors import FileError

_FILE = Path(__file__).with_name("pytorch_families.toml")
_TEXT, _COUNT, _LINES = "write a text between quotes", "write a number of tests", "write a list of problem lines"
_KEYS = {
    "test": Key(is_text, _TEXT, "name the test function"),
    "checks": Key(is_text, _TEXT, "say what the test varies and asserts"),
    "cases": Key(is_count, _COUNT, "say how many tests its parameters make"),
    "dynamic": Key(is_count, _COUNT),
    "lines": Key(is_texts, _LINES, read=tuple),
    "awaiting": Key(is_texts, _LINES, read=tuple),
    "options": Key(is_text, _TEXT),
    "note": Key(is_text, _TEXT),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One test function of PyTorch's.

    Attributes:
        test: its name.
        checks: what it varies and asserts, in words.
        cases: how many tests its parameters make.
        dynamic: how many more its variant for dynamic shapes makes.
        lines: problems of the matrix that check the same.
        awaiting: the same, of ops and flags that the suite does not have yet.
        options: how they are run, beside ``--gemm-backends=cpp``.
        note: what differs.
    """

    test: str
    checks: str
    cases: int
    dynamic: int = 0
    lines: tuple[str, ...] = ()
    awaiting: tuple[str, ...] = ()
    options: str = ""
    note: str = ""


def load(path: Path = _FILE) -> tuple[Family, ...]:
    """The families, in the order of PyTorch's file.

    Raises:
        FileError: for a file that is not TOML, an unknown key, a wrong value, or a function that stands twice.
    """
    file = TableFile(path, "family", FileError)
    found: dict[str, Family] = {}
    for table in file.tables():
        family = Family(**file.read(table, _KEYS))
        if family.test in found:
            raise file.fail(f"two functions are called {family.test}", "test names are unique", "test")
        found[family.test] = family
    return tuple(found.values())


def complaints(families: Iterable[Family]) -> list[str]:
    """What is wrong with the table, a sentence each; empty when every line is a problem of the suite."""
    found, levels = [], matrix.levels()
    for family in families:
        if not (family.lines or family.awaiting):
            found.append(f"{family.test}: no line covers it")
        found += tables.complaints(family.test, family.lines)
        found += [f"{family.test}: {line} has come: move it to lines" for line in family.awaiting if line in levels]
    return found


def page(families: Iterable[Family]) -> str:
    """The table as Markdown."""
    return tables.page("families.md.jinja", families=tuple(families), levels=matrix.levels())


def run(_given: argparse.Namespace) -> int:
    """Print the page; returns 1 where a line is no problem of the suite."""
    families = load()
    return tables.printed(page(families), complaints(families))
