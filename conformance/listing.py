"""What a level of the suite holds: ``pytest-gemm list``.

A problem has four facets beside its op: dtypes, layout, flags (state of the operands, math, program) and steps.
"""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import show

# A facet and one of its values.
Fact = tuple[str, str]


def facts(problem: Problem) -> tuple[Fact, ...]:
    """The facets of a problem with their values."""
    return (
        ("dtypes", str(problem.dtypes)),
        ("layout", str(problem.layout)),
        *(("flags", flag) for flag in problem.flags or ("plain",)),
        *(("steps", name) for name in dict.fromkeys(step.name for step in problem.steps) or ("none",)),
    )


def _counts(op: str, problems: Sequence[Problem]) -> str:
    """The facets of an op's problems with the number of problems that have each value."""
    lines = [f"{op}: {len(problems)}"]
    for facet in ("dtypes", "layout", "flags", "steps"):
        counted = Counter(value for problem in problems for name, value in facts(problem) if name == facet)
        text = ", ".join(f"{value} {count}" for value, count in counted.most_common())
        lines.append(textwrap.fill(f"  {facet:<10}{text}", 120, subsequent_indent=12 * " ", break_on_hyphens=False))
    return "\n".join(lines)


def run(given: argparse.Namespace) -> int:
    """Print what a level holds."""
    by_op: dict[str, list[Problem]] = defaultdict(list)
    for problem in matrix.products(given.level):
        if not given.op or problem.op.name in given.op:
            by_op[problem.op.name].append(problem)
    if given.lines:
        text = "\n".join(problem.line for found in by_op.values() for problem in found)
    else:
        head = f"{given.level}: {sum(map(len, by_op.values()))} problems of test_product"
        text = "\n\n".join([head, *(_counts(op, found) for op, found in by_op.items())])
    show(f"{text}\n")
    return 0
