"""Which micro-kernels of the C++ templates were judged, and with which tails: a matrix from outcomes or run records.

A run with ``--gemm-output=DIR`` writes it as ``DIR/coverage.md``, ``pytest-gemm coverage RECORD...`` makes
it of run records.  A row is a micro-kernel with its register blocking and its types, a column a part of the template's
code.
It counts what the generated code says (``Outcome.configuration``), not what was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.micro_kernels import Product, Registered
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import record as record_module
from pytest_gemm.run.terminal import template
from pytest_gemm.storage.datafile import document
from pytest_gemm.text import show

_DATA: Final = document(Path(__file__).with_name("coverage.toml"))
COLUMNS: Final[Mapping[str, str]] = _DATA["columns"]
# Instruction sets whose micro-kernels Inductor takes on a machine of a level, see machine.isa.isa_level().
_TAKEN: Final[Mapping[str, Sequence[str]]] = _DATA["taken"]


@dataclasses.dataclass
class Row:
    """One micro-kernel with its register blocking and its types.

    Attributes:
        kernel, dtypes, isa: see ``backends.micro_kernels.Registered``; ``isa`` is "" where it is
            not registered (the reference one).
        cases: judged, by ``passed``, ``failed`` and ``known`` (a failure that the ledger explains).
        columns: the same for each of :data:`COLUMNS`.
        problems: lines of the problems.
        left_over: numbers of rows that were left over after whole blocks, or that were all there were.
        why: why it was never reached; "" where it was.
    """

    kernel: str
    dtypes: str
    isa: str
    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    columns: dict[str, Counter[str]] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    problems: set[str] = dataclasses.field(default_factory=set)
    left_over: set[int] = dataclasses.field(default_factory=set)
    why: str = ""

    @property
    def types(self) -> str:
        """Types of A and B: ``bf16-i8``."""
        return self.dtypes.rpartition("-")[0]

    def judge(self, kind: str, problem: str) -> None:
        """Count one case."""
        self.cases[kind] += 1
        self.problems.add(problem)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The rows, those that were reached first, and the levels of the machines that judged."""

    rows: tuple[Row, ...]
    levels: tuple[str, ...]


# -- counting -------------------------------------------------------------------------------------------------


def matrix(
    outcomes: Iterable[Outcome], levels: Sequence[str], registered: Sequence[Registered] | None = None
) -> Matrix:
    """Count outcomes by what the generated code says.

    Args:
        outcomes: of any backend; those without a product of the C++ templates are left out.
        levels: of the machines that judged, as ``machine.isa.isa_level`` calls them.
        registered: what Inductor has registered; ``None``: ask the torch at hand.
    """
    if registered is None:
        from pytest_gemm.backends.inductor import selection  # imports torch

        registered = selection.registered_micro_kernels()
    taken = set[str]().union(*(_TAKEN.get(level, ()) for level in levels))
    rows = {(one.kernel, one.dtypes, one.isa): Row(one.kernel, one.dtypes, one.isa) for one in registered}
    # Some are registered alike for several instruction sets: what was generated is the machine's own, or the first one.
    reachable: dict[tuple[str, str], Row] = {}
    for row in sorted(rows.values(), key=lambda row: row.isa not in taken):
        reachable.setdefault((row.kernel, row.dtypes), row)
    refusals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        if outcome.backend != "cpp":
            continue
        types, m, batch = _product(outcome.problem)
        if outcome.reason is not None and outcome.reason.code == micro_kernels.UNSUPPORTED:
            refusals[micro_kernels.kernel_of(outcome.candidate), types][outcome.reason.text] += 1
        if kind := _kind(outcome):
            _count(reachable, outcome, kind, types, m, batch)
    found = [*rows.values(), *(row for row in reachable.values() if not row.isa)]
    taken |= {row.isa for row in found if row.cases}
    met = {row.dtypes for row in found if row.cases}
    for row in found:
        if not row.cases:
            row.why = _why(row, taken, levels, met, refusals[row.kernel, row.types])
    return Matrix(tuple(sorted(found, key=_order)), tuple(dict.fromkeys(levels)))


def _order(row: Row) -> tuple[object, ...]:
    return not row.cases, row.isa, row.kernel.rsplit("-", 1)[0], row.dtypes, micro_kernels.register_block(row.kernel)


def _kind(outcome: Outcome) -> str:
    """How a case counts: ``passed``, ``failed``, ``known``; "" for one that says nothing of a kernel.

    A result of another kernel than the intended one is not judged, nor is a case that can end the process run.
    """
    not_run = outcome.reason is not None and outcome.reason.code == "can-crash"
    if outcome.status is Status.FALLBACK or (outcome.status is Status.KNOWN_FAILURE and not_run):
        return ""
    kinds = {Status.PASSED: "passed", Status.KNOWN_FAILURE: "known"}
    return kinds.get(outcome.status, "failed" if outcome.status.is_failure else "")


def _product(line: str) -> tuple[str, int, int]:
    """Types of A and B, the rows of a problem's product, and how many products it is.

    An empty type and no row for a line that this release does not know.
    """
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return "", 0, 1
    types = f"{problem.dtypes.a.name}-{problem.dtypes.b.name}"
    batch = problem.shape.batch or 1
    return (types, problem.shape.m * batch, 1) if problem.op.batch == "optional" else (types, problem.shape.m, batch)


def _count(rows: dict[tuple[str, str], Row], outcome: Outcome, kind: str, types: str, m: int, batch: int) -> None:
    """Enter an outcome in its row; one that ended before there was code in the rows that its name and types fit."""
    found = [one for text in outcome.configuration if (one := micro_kernels.parse(text)) is not None]
    if not found:
        asked = micro_kernels.split(outcome.candidate)
        for row in rows.values() if asked else ():
            if asked and row.kernel == micro_kernels.kernel_of(asked[0]) and row.types == types:
                row.judge(kind, outcome.problem)
        return
    # Of a batch, so many products go to the function for one thread, and what is left to the one for all threads.
    threads = max(one.threads for one in found)
    if len({one.threads for one in found}) > 1:
        found = [one for one in found if (batch >= threads if one.threads == 1 else batch % threads)] or found
    products: dict[tuple[str, str], list[Product]] = defaultdict(list)
    for one in found:
        products[one.kernel, one.dtypes].append(one)
    for key, same in products.items():
        row = rows.setdefault(key, Row(*key, ""))
        row.judge(kind, outcome.problem)
        for name in dict.fromkeys(name for one in same for name in _parts(one, one.m or m)):
            row.columns[name][kind] += 1
        height = micro_kernels.register_block(row.kernel)[0]
        row.left_over |= {rest for one in same if (rest := (one.m or m) % height)}


def _parts(one: Product, m: int) -> list[str]:
    """Which of :data:`COLUMNS` a product belongs to."""
    mr, nr, kr = micro_kernels.register_block(one.kernel)
    found = {
        "no tail": not (m % mr or one.n % nr or one.k % kr),
        "M < Mr": m < mr,
        "M tail": m > mr and m % mr,
        "N tail": one.n % nr,
        "K tail": one.k % kr,
        "K steps": one.cache is not None and one.per_thread is not None and one.cache[2] < one.per_thread[2],
        "K slices": one.slices > 1,
        "any M": not one.m,
        "grouped": one.grouped > 1,
    }
    return [name for name, holds in found.items() if holds]


def _why(row: Row, taken: set[str], levels: Sequence[str], met: set[str], refusals: Counter[str]) -> str:
    """Why a registered micro-kernel was not reached: the instruction set, Inductor's checks, or the run."""
    if row.isa not in taken:
        here = ", ".join(dict.fromkeys(levels)) or "an unknown level"
        if row.isa == "avx2" and any(level.startswith(("avx512", "amx")) for level in levels):
            return f"Inductor at {here} takes others; it has to generate for {row.isa}"
        return f"needs {row.isa}; judged on {here}"
    if count := refusals.total():
        return f"{refusals.most_common(1)[0][0]} ({count} problem{'s' if count > 1 else ''})"
    if row.dtypes not in met:
        return "no problem of the run has a product of these types"
    return "not asked for, --gemm-candidates=all has it"


# -- the texts ------------------------------------------------------------------------------------------------


def data(found: Matrix) -> str:
    """The matrix as JSON."""
    rows = []
    for row in found.rows:
        columns = {name: row.columns[name] for name in COLUMNS if name in row.columns}
        rows.append(
            {**vars(row), "columns": columns, "problems": len(row.problems), "left_over": sorted(row.left_over)}
        )
    return json.dumps({"levels": found.levels, "rows": rows}, indent=1) + "\n"


def page(found: Matrix, heads: Sequence[str] = (), title: str = "") -> str:
    """The matrix as Markdown.

    Args:
        found: what to write.
        heads: lines about the runs.
        title: heading.
    """
    reached = [row for row in found.rows if row.cases]
    missed: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)  # blockings beside one another
    for row in found.rows[len(reached) :]:
        kind, _, block = row.kernel.rpartition("-")
        missed[kind, row.dtypes, row.isa, row.why].append(block)
    return template("coverage.md.jinja", "pytest_gemm.tools").render(
        title=title or "Micro-kernels of the C++ templates",
        heads=heads,
        judged=sum(bool(row.isa) for row in reached),
        registered=sum(bool(row.isa) for row in found.rows),
        here=", ".join(found.levels) or "an unknown machine",
        cases=_cell(sum((row.cases for row in reached), Counter[str]())),
        problems=len(set[str]().union(*(row.problems for row in reached))),
        columns=COLUMNS,
        reached=[
            (
                row.kernel,
                row.dtypes,
                row.isa or "any",
                *map(_cell, (row.cases, *map(row.columns.get, COLUMNS))),
                _left_over(row),
            )
            for row in reached
        ],
        missed=[(f"{kind}-{', '.join(blocks)}", *rest) for (kind, *rest), blocks in missed.items()],
    )


def _cell(count: Counter[str] | None) -> str:
    if not count:
        return "."
    marked = (f"{count[name]} {letter}" for name, letter in (("failed", "F"), ("known", "K")) if count[name])
    return ", ".join([str(count["passed"]), *marked])


def _left_over(row: Row) -> str:
    """The remainders of M that were met, of all: ``1-3 of 3``; "" where a block has one row."""
    height = micro_kernels.register_block(row.kernel)[0]
    if height == 1:
        return ""
    runs: dict[int, list[int]] = defaultdict(list)
    for index, rest in enumerate(sorted(row.left_over)):
        runs[rest - index].append(rest)
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs.values()]
    return f"{' '.join(ranges) or 'none'} of {height - 1}"


# -- the command ----------------------------------------------------------------------------------------------


def write(
    path: Path, outcomes: Iterable[Outcome], levels: Sequence[str], registered: Sequence[Registered] | None = None
) -> None:
    """Write the matrix of a run as Markdown; for the arguments see :func:`matrix`."""
    path.write_text(page(matrix(outcomes, levels, registered)), encoding="utf-8")


def explained(record: record_module.Record, ledger: Ledger) -> list[Outcome]:
    """A record's outcomes; what failed, and this ledger knows, is a known failure, whatever ledger the run had.

    A record tells release and level of its machine.  How many threads a case had is read off its generated code: of one
    that ended before there was any, an entry that asks for threads explains nothing.  A wrong result has been compared
    with what the ledger of its run states, and with nothing else.
    """
    release = record.run.versions.get("torch", "")
    here = Environment(release, isa_module.flags_of(record.run.isa))
    found = []
    for outcome in record.outcomes:
        entry = None
        if outcome.status.is_failure:
            products = filter(None, map(micro_kernels.parse, outcome.configuration))
            threads = outcome.case.threads or max((one.threads for one in products), default=0)
            with contextlib.suppress(ProblemError):  # of another release's lines nothing is known
                entry = ledger.match(outcome, Problem.parse(outcome.problem), here.at(outcome.case.isa, threads))
        facts: dict[str, Any] = {"status": Status.KNOWN_FAILURE, "known_failure": entry.id} if entry else {}
        found.append(dataclasses.replace(outcome, **facts))
    return found


def run(given: argparse.Namespace) -> int:
    """Print the matrix."""
    records = [record_module.read(path) for path in given.records]
    ledger = Ledger.load(given.known_failures) if given.known_failures else Ledger()
    outcomes = [outcome for record in records for outcome in explained(record, ledger)]
    levels = [record.run.isa for record in records if record.run.isa]
    found = matrix(outcomes, levels)
    runs = [record.run for record in records]
    heads = [f"* {run.date}; {run.cpu}; torch {run.versions.get('torch', '?')}" for run in runs]
    show(data(found) if given.json else page(found, heads, given.title))
    return 0
