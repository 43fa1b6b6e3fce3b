"""What the commands that print a table of problem lines share: the check of the lines, and the page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import HUGE
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import show


def complaints(who: str, lines: Iterable[str], level: str | None = None) -> Iterator[str]:
    """What is wrong with problem lines, a sentence each.

    Args:
        who: what has them.
        lines: that have to be in the suite, in their canonical spelling.
        level: at which they have to be; by default at any but ``huge``.
    """
    levels = matrix.levels()
    if level is not None:
        levels = {**levels, **dict.fromkeys((problem.line for problem in matrix.products(HUGE)), HUGE)}
    for line in lines:
        try:
            canonical = Problem.parse(line).line
        except ProblemError as error:
            yield f"{who}: {error}"
            continue
        if canonical not in levels:
            yield f"{who}: {line} is in no level of the matrix"
        elif canonical != line:
            yield f"{who}: {line} is spelled {canonical}"
        elif level is not None and levels[line] != level:
            yield f"{who}: {line} is at level {levels[line]}, not {level or 'none'}"


def page(template: str, **values: object) -> str:
    """The text of a template of this folder, as Markdown."""
    import jinja2

    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    made: str = jinja2.Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(values)
    return made


def printed(text: str, wrong: Sequence[str]) -> int:
    """Print a page, and what is wrong with its table on stderr; returns the exit status, 1 for a wrong table."""
    sys.stderr.write("".join(f"{line}\n" for line in wrong))
    show(text)
    return int(bool(wrong))
