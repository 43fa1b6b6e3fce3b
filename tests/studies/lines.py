"""What the studies that print a table of problem lines share: reading it, checking its lines, and the page."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import msgspec

from pytest_gemm.conformance import matrix
from pytest_gemm.core.text import show
from pytest_gemm.problem.axes import APART, LEVELS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import document

_FOLDER = Path(__file__).parent
_Row = TypeVar("_Row")


def read(name: str, row: type[_Row]) -> list[_Row]:
    """The tables of a TOML file of this folder, which has them under one name."""
    (rows,) = document(_FOLDER / name).values()
    return msgspec.convert(rows, list[row])  # type: ignore[valid-type]  # a type at run time


@functools.cache
def levels() -> dict[str, str]:
    """The least level of every problem from ``quick`` on, by its line."""
    return {
        problem.line: level
        for level in (*APART, *reversed(LEVELS[1:]))
        for problem in (*matrix.products(level), *matrix.races(level))
    }


def complaints(who: str, lines: Iterable[str], *at: str) -> Iterator[str]:
    """What is wrong with problem lines, a sentence each: they have to be in the suite, at one of these levels."""
    for line in lines:
        if (canonical := Problem.parse(line).line) != line:
            yield f"{who}: {line} is spelled {canonical}"
        elif levels().get(line) not in at:
            yield f"{who}: {line} is at level {levels().get(line)}, not {' or '.join(at)}"


def page(template: str, **values: Any) -> str:
    """The Markdown of a template of this folder."""
    text = (_FOLDER / template).read_text(encoding="utf-8")
    made = jinja2.Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return str(made.render(**values, levels=levels))


def printed(text: str, wrong: Sequence[str]) -> int:
    """Print a page, and what is wrong with its table on stderr; returns the exit status, 1 for a wrong table."""
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    show(text)
    return int(bool(wrong))
