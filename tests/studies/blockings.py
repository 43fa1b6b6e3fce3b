"""Pairs of micro-kernel, blocking, op and tails that runs of the C++ templates met: ``blockings.py RUN...``.

    pytest --pyargs pytest_gemm.conformance --gemm-backends=cpp --gemm-output=out
    python tests/studies/blockings.py out

A run is a record, or the folder of a run's ``--gemm-output``.  M, N and K have one cache block or several; the tail is
that of the last one, or of a single register block.  Pairs that were never met are those of values that were, without
op and micro-kernel, which the types decide; of a blocking and an op only where the op's template takes that blocking.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import show
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record import reader

Fact = tuple[str, str]
# A product function of an outcome's configuration.
_PRODUCT = re.compile(r"(?P<kernel>\w+)-(?P<step>[\dx]+):[^:]*:(?P<sizes>[M\dx]+),.*?(?:cache=(?P<cache>[\d.]+)|$)")


def facts(outcome: Outcome) -> Iterator[tuple[Fact, ...]]:
    """The facts of each product of an outcome."""
    asked = micro_kernels.split(next(iter(outcome.candidates), ""))
    blocking = str(asked[1])[1:] if asked else ""
    for product in filter(None, map(_PRODUCT.match, outcome.configuration)):
        step, sizes = product["step"].split("x"), product["sizes"].split("x")
        blocks = product["cache"].split(".") if product["cache"] else []  # none: the code computes them
        dims = ((name, _blocks(*map(int, each))) for name, *each in zip("MNK", sizes, step, blocks, strict=False))
        yield ("micro-kernel", product["kernel"]), ("blocking", blocking or "own"), ("op", outcome.op), *dims


def _blocks(size: int, step: int, cache: int) -> str:
    count, last = ("one block", step) if size <= step * cache else ("blocks", step * cache)
    return f"{count} with a tail" if size % last else count


def page(outcomes: Sequence[Outcome]) -> str:
    """How often each micro-kernel met each blocking, and the pairs that never were met."""
    met, values = Counter[frozenset[Fact]](), set[Fact]()
    for _, found in {(outcome.case, each) for outcome in outcomes for each in facts(outcome)}:
        values.update(found)
        met.update(map(frozenset, itertools.combinations(found, 2)))
    backend, possible = CppBackend(), set[frozenset[Fact]]()
    for line in {outcome.problem for outcome in outcomes}:
        problem = Problem.parse(line)
        names = ["own", *(str(axes)[1:] for axes in backend._blockings(problem, 0))]
        possible |= {frozenset((("op", problem.op.name), ("blocking", name))) for name in names}
    pairs = [frozenset(pair) for pair in itertools.combinations(sorted(values), 2) if pair[0][0] != pair[1][0]]
    facets = {pair: {facet for facet, _ in pair} for pair in pairs}
    left = [pair for pair in pairs if facets[pair] != {"op", "blocking"} or pair in possible]
    never = defaultdict[Fact, list[str]](list)
    for first, second in (sorted(pair) for pair in left if not met[pair] and facets[pair] != {"op", "micro-kernel"}):
        never[first].append(" ".join(second))
    named = [f"  {' '.join(fact)}: {', '.join(others)}" for fact, others in never.items()]
    counts = [tuple(sorted(pair)) for pair in met if facets[pair] == {"blocking", "micro-kernel"}]
    counted = [
        f"  {kernel}, {blocking}: {met[frozenset(pair)]}" for pair in counts for (_, blocking), (_, kernel) in [pair]
    ]
    title = f"pairs never met: {sum(map(len, never.values()))} of {len(left)}"
    return "\n".join(["micro-kernel, blocking: products", *sorted(counted), title, *named, ""])


def main() -> None:
    """Print what the runs met."""
    runs = [reader.read(Path(path)) for path in sys.argv[1:]]
    show(page([one for run in runs for one in run.outcomes if one.backend == "cpp" and one.was_judged]))


if __name__ == "__main__":
    main()
