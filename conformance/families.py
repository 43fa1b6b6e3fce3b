"""PyTorch's own tests of the C++ templates beside this suite's: ``pytest-gemm families``.

The table is data, ``pytorch_families.toml``: each test function of ``test_cpu_select_algorithm.py`` with the lines that
ask the same here.  The command prints it as a page; ``tests/conformance/test_families.py`` holds the lines against the
matrix, so that the table cannot say what the suite no longer does.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import Key, TableFile, is_count, is_text, is_texts
from pytest_gemm.storage.errors import FileError
from pytest_gemm.text import show

_FILE = Path(__file__).with_name("pytorch_families.toml")
_TEXT, _COUNT, _LINES = "write a text between quotes", "write a number of tests", "write a list of problem lines"
_KEYS = {
    "test": Key(is_text, _TEXT, "name the test function"),
    "asks": Key(is_text, _TEXT, "say what the test varies and asserts"),
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
        asks: what it varies and asserts, in words.
        cases: how many tests its parameters make.
        dynamic: how many more its twin for any size makes.
        lines: problems of the matrix that ask the same.
        awaiting: the same, of ops and flags that the suite does not have yet.
        options: how they are run, beside ``--gemm-backends=cpp``.
        note: what differs.
    """

    test: str
    asks: str
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
            raise file.fail(f"{family.test} stands twice", "test names are unique", "test")
        found[family.test] = family
    return tuple(found.values())


def complaints(families: Iterable[Family]) -> list[str]:
    """What is wrong with the table, a sentence each; empty when every line is a problem of the suite."""
    found, levels = [], matrix.levels()
    for family in families:
        if not (family.lines or family.awaiting):
            found.append(f"{family.test}: no line covers it")
        for line in family.lines:
            try:
                known = str(Problem.parse(line)) in levels
            except ProblemError as error:
                found.append(f"{family.test}: {error}")
                continue
            if not known:
                found.append(f"{family.test}: {line} is in no level of the matrix")
            elif str(Problem.parse(line)) != line:
                found.append(f"{family.test}: {line} is spelled {Problem.parse(line)}")
        found += [f"{family.test}: {line} has come: move it to lines" for line in family.awaiting if line in levels]
    return found


def page(families: Iterable[Family]) -> str:
    """The table as Markdown."""
    families, levels = tuple(families), matrix.levels()
    total = sum(family.cases + family.dynamic for family in families)
    lines = [
        "# PyTorch's test_cpu_select_algorithm.py, family by family",
        "",
        "Each test function of PyTorch's own tests of the C++ templates, and the problems of this suite that ask the",
        "same. Made by `pytest-gemm families` of `conformance/pytorch_families.toml`, whose",
        "lines a test holds against the matrix.",
        "",
        f"{len(families)} functions make {total} tests. A line is an example of its kind: the axes around it are the",
        "matrix's. Each is run by `pytest --gemm-backends=cpp --gemm-problem=LINE` with the options beside it. Where",
        "PyTorch asserts a counter, here the proof names the kernel that ran, and somebody else's kernel is a failure.",
        "[How many of them a minute](cases-a-minute.md).",
        "",
        "| function | tests | asks | lines here (level) | options, and what differs |",
        "|---|---|---|---|---|",
    ]
    for family in families:
        tests = f"{family.cases} + {family.dynamic}" if family.dynamic else str(family.cases)
        known = [f"`{line}` ({levels.get(line, 'none')})" for line in family.lines]
        known += [f"`{line}` (awaited)" for line in family.awaiting]
        options = f"`{family.options.strip()}`" if family.options else ""
        beside = ". ".join(filter(None, (options, family.note)))
        lines.append(f"| `{family.test}` | {tests} | {family.asks} | {'<br>'.join(known)} | {beside} |")
    return "\n".join(lines) + "\n"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """``pytest-gemm families`` has no arguments."""


def run(_given: argparse.Namespace) -> int:
    """Print the page; returns 1 where a line is no problem of the suite."""
    families = load()
    wrong = complaints(families)
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    show(page(families))
    return int(bool(wrong))
