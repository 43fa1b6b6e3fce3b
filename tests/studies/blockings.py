"""Pairs of micro-kernel, blocking, op and tails that runs of the C++ templates met: ``blockings.py RUN...``.

    pytest --pyargs pytest_gemm.conformance --gemm-backends=cpp --gemm-output=out
    python tests/studies/blockings.py out > PAGE

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

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.text import show
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record import reader
from pytest_gemm.record.reader import Run

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


def page(runs: Sequence[Run]) -> str:
    """What each micro-kernel met by blocking, and the pairs that never were met."""
    outcomes = [one for run in runs for one in run.outcomes if one.backend == "cpp"]
    met, values = Counter[frozenset[Fact]](), set[Fact]()
    for _, found in {(one.case, each) for one in outcomes if one.was_judged for each in facts(one)}:
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
    return lines.page("blockings.md.jinja", runs=runs, rows=table(runs), never=never, pairs=len(left))


def table(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, Counter[str]]]:
    """By instruction set and micro-kernel, then by blocking: the problems that were right, wrong and refused."""
    found: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    seen = set[tuple[object, ...]]()
    for one in (one for run in runs for one in run.outcomes if one.backend == "cpp"):
        name = next(iter(one.candidates), one.candidate)
        asked = micro_kernels.split(name)
        refused = one.status is Status.UNSUPPORTED and one.reason is not None and one.reason.code == "blocking-unmet"
        if asked is None or not name.startswith("CppMicro") or not (refused or one.was_judged):
            continue
        wrong = one.status.is_failure or one.status is Status.KNOWN_FAILURE
        result = "refused" if refused else "wrong" if wrong else "right"
        if (key := (one.case, name, result)) not in seen:
            seen.add(key)
            where = one.case.isa or "native", micro_kernels.kernel_of(name).partition("-")[0]
            found[where][str(asked[1])[1:] or "own"][result] += 1
    return dict(sorted(found.items()))


def main() -> None:
    """Print what the runs met."""
    runs = [reader.read(Path(path)) for path in sys.argv[1:]]
    show(page(runs))


if __name__ == "__main__":
    main()
