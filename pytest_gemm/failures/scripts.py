"""Which script of a known defect is kept: that of the smallest case; without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_gemm.problem.problem import Problem


def problem_of(script: Path) -> Problem | None:
    """The problem that a script begins with."""
    found = re.match(r'"""(\S+) on ', script.read_text(encoding="utf-8"))
    return Problem.parse(found[1]) if found else None


def size(problem: Problem) -> int:
    """Elements of the operands and the result."""
    shape = problem.shape
    return (shape.batch or 1) * (shape.m * shape.n + shape.n * shape.k + shape.m * shape.k)


def smallest(scripts: Iterable[Path], order: Mapping[str, int]) -> Path:
    """Of several scripts of one ledger entry the one that a single run would keep.

    Args:
        scripts: as ``artifacts.save_defect`` writes them.
        order: in which a single run meets the problems, by their lines.
    """

    def key(script: Path) -> tuple[float, int]:
        problem = problem_of(script)
        return (size(problem), order.get(problem.line, len(order))) if problem else (math.inf, 0)

    return min(scripts, key=key)
