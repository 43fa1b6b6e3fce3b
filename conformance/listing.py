"""What a level of the suite holds: ``pytest-gemm list``.

A problem has four facets beside its op: dtypes, layout, flags (state of the operands, math, program) and steps.
Coverage counts pairs of values of two facets, for each op.  A pair that no problem of a level covers is reported with a
problem that would cover it; a pair that no problem line can have is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tabulate import tabulate

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import HUGE, LEVELS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import did_you_mean, show

FACETS = ("dtypes", "layout", "flags", "steps")
# The words for no flag and for no step.
_PLAIN, _NONE = "plain", "none"
# So many problems of one value are tried as places for another.
_TRIED = 8

# A facet and one of its values.
Fact = tuple[str, str]


def facts(problem: Problem) -> tuple[Fact, ...]:
    """The facets of a problem with their values."""
    return (
        ("dtypes", str(problem.dtypes)),
        ("layout", str(problem.layout)),
        *(("flags", flag) for flag in problem.flags or (_PLAIN,)),
        *(("steps", name) for name in dict.fromkeys(step.name for step in problem.steps) or (_NONE,)),
    )


def _pairs(problem: Problem) -> Iterator[frozenset[Fact]]:
    return (frozenset(pair) for pair in itertools.combinations(facts(problem), 2) if pair[0][0] != pair[1][0])


def uncovered(problems: Sequence[Problem], every: Sequence[Problem]) -> dict[frozenset[Fact], Problem]:
    """Pairs of facts that no problem covers, each with a problem that would cover it.

    Args:
        problems: of one op, at the level that is looked at.
        every: of the same op, at all levels: what values there are.
    """
    covered = {pair for problem in problems for pair in _pairs(problem)}
    holders: dict[Fact, list[Problem]] = defaultdict(list)
    for problem in sorted(every, key=lambda one: len(one.line)):
        for fact in facts(problem):
            if len(holders[fact]) < _TRIED and 0 not in {problem.shape.m, problem.shape.n, problem.shape.k}:
                holders[fact].append(problem)
    found = {}
    for first, second in itertools.combinations(holders, 2):
        pair = frozenset((first, second))
        if pair not in covered and first[0] != second[0] and (made := _both(first, second, holders)):
            found[pair] = made
    return found


def _both(first: Fact, second: Fact, holders: Mapping[Fact, list[Problem]]) -> Problem | None:
    """A problem with both facts, ``None`` where the problem line has none."""
    for fact, other in ((first, second), (second, first)):
        for place, model in itertools.product(holders[fact], holders[other]):
            try:
                made = _with(place, other, model)
            except ProblemError:
                continue
            if {first, second} <= set(facts(made)):
                return made
    return None


def _with(problem: Problem, fact: Fact, model: Problem) -> Problem:
    """A problem with one more fact, taken from a model that has it.

    Raises:
        ProblemError: when the parts contradict each other.
    """
    facet, value = fact
    if facet in {"dtypes", "layout"}:
        return dataclasses.replace(problem, **{facet: getattr(model, facet)})
    if facet == "flags":
        return dataclasses.replace(problem, flags=() if value == _PLAIN else (*problem.flags, value))
    if value == _NONE:
        return dataclasses.replace(problem, epilogue=(), quant=())
    step = next(step for step in model.steps if step.name == value)
    if step in model.quant:
        return dataclasses.replace(problem, quant=(*problem.quant, step))
    return dataclasses.replace(problem, epilogue=(*problem.epilogue, step))


# -- text ------------------------------------------------------------------------------------------------------


def _counts(op: str, problems: Iterable[Problem]) -> str:
    """The facets of an op's problems with the number of problems that have each value."""
    problems = list(problems)
    lines = [f"{op}: {len(problems)}"]
    for facet in FACETS:
        counted = Counter(value for problem in problems for name, value in facts(problem) if name == facet)
        text = ", ".join(f"{value} {count}" for value, count in counted.most_common())
        lines.append(textwrap.fill(f"  {facet:<10}{text}", 120, subsequent_indent=12 * " ", break_on_hyphens=False))
    return "\n".join(lines)


def _combinations(problems: Iterable[Problem]) -> str:
    """Every combination of facets that occurs, with its number of problems."""
    rows = Counter(
        (one.op.name, str(one.dtypes), str(one.layout), "+".join(one.flags) or _PLAIN, _steps(one)) for one in problems
    )
    table = [(*row, count) for row, count in sorted(rows.items())]
    return tabulate(table, headers=("op", *FACETS, "problems"), tablefmt="plain", disable_numparse=True)


def _steps(problem: Problem) -> str:
    return "+".join(step.name for step in problem.steps) or _NONE


def _uncovered(op: str, problems: Sequence[Problem], every: Sequence[Problem]) -> str:
    """The pairs of an op that no problem covers."""
    missing = uncovered(problems, every)
    covered = len({pair for problem in problems for pair in _pairs(problem)})
    lines = [f"{op}: {covered} pairs covered, {len(missing)} not covered"]
    for pair, problem in sorted(missing.items(), key=lambda item: sorted(item[0])):
        names = " with ".join(f"{facet} {value}" for facet, value in sorted(pair))
        lines.append(f"  {names}: {problem.line}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``pytest-gemm list``."""
    parser.add_argument("--level", choices=(*LEVELS, HUGE), default=LEVELS[0], help="the level (default: quick)")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op; may be repeated")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--lines", action="store_true", help="print the problem lines")
    form.add_argument("--combinations", action="store_true", help="count each combination of dtypes, layout, ...")
    form.add_argument("--pairs", action="store_true", help="print the pairs that no problem of the level covers")


def run(given: argparse.Namespace) -> int:
    """Print what a level holds.

    Raises:
        ValueError: for an op that does not exist.
    """
    for op in given.op:
        if op not in OPS:
            raise ValueError(f"--op={op}: no such op{did_you_mean(op, OPS)}; ops: {', '.join(OPS)}")
    by_op: dict[str, list[Problem]] = defaultdict(list)
    for problem in matrix.products(given.level):
        if not given.op or problem.op.name in given.op:
            by_op[problem.op.name].append(problem)
    problems = [problem for found in by_op.values() for problem in found]
    if given.lines:
        text = "\n".join(problem.line for problem in problems)
    elif given.combinations:
        text = _combinations(problems)
    elif given.pairs:
        every = matrix.products(LEVELS[-1])
        text = "\n\n".join(
            _uncovered(op, found, [one for one in every if one.op.name == op]) for op, found in by_op.items()
        )
    else:
        counted = "\n\n".join(_counts(op, found) for op, found in by_op.items())
        text = f"{given.level}: {len(problems)} problems of test_product\n\n{counted}"
    show(f"{text}\n")
    return 0
