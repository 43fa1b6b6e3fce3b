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
from typing import Any

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.micro_kernels import Product, Registered
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import record as record_module
from pytest_gemm.text import show

# What each column counts.  With sizes M x N x K and a register block Mr x Nr x Kr:
COLUMNS: Mapping[str, str] = {
    "no tail": "M, N and K are multiples of the block",
    "M < Mr": "fewer rows than one block has",
    "M tail": "rows remain after whole blocks",
    "N tail": "columns remain after whole blocks, or fewer than one block has",
    "K tail": "K is no multiple of Kr",
    "K steps": "a cache block holds a part of K only, so the micro-kernel accumulates into its result",
    "K slices": "K is split between threads, and partial sums are added",
    "any M": "one program for any M: blockings are computed at run time",
    "grouped": "one function computes several products of one A",
}

# Instruction sets whose micro-kernels Inductor takes on a machine of this level, see machine.isa_level().
_TAKEN: Mapping[str, frozenset[str]] = {
    "avx2": frozenset({"avx2"}),
    "avx512": frozenset({"avx512"}),
    "avx512-vnni": frozenset({"avx512", "avx512_vnni"}),
    "avx512-bf16": frozenset({"avx512", "avx512_vnni"}),
    "amx": frozenset({"avx512", "avx512_vnni", "amx"}),
    "neon": frozenset({"neon"}),
    "sve": frozenset({"neon", "sve"}),
    "sve2": frozenset({"neon", "sve"}),
}


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

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "kernel": self.kernel,
            "dtypes": self.dtypes,
            "isa": self.isa,
            "cases": dict(self.cases),
            "columns": {name: dict(self.columns[name]) for name in COLUMNS if self.columns.get(name)},
            "problems": len(self.problems),
            "left_over": sorted(self.left_over),
            "why": self.why,
        }


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
    taken = {isa for level in levels for isa in _TAKEN.get(level, frozenset())}
    rows = {(one.kernel, one.dtypes, one.isa): Row(one.kernel, one.dtypes, one.isa) for one in registered}
    # Some are registered alike for several instruction sets: what was generated is the machine's own, or the first one.
    reachable: dict[tuple[str, str], Row] = {}
    for row in sorted(rows.values(), key=lambda row: row.isa not in taken):
        reachable.setdefault((row.kernel, row.dtypes), row)
    refusals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        if outcome.backend != "cpp":
            continue
        if outcome.reason is not None and outcome.reason.code == micro_kernels.UNSUPPORTED:
            refusals[micro_kernels.kernel_of(outcome.candidate), _types(outcome.problem)][outcome.reason.text] += 1
        kind = _kind(outcome)
        if kind:
            _count(reachable, outcome, kind)
    found = [*rows.values(), *(row for row in reachable.values() if not row.isa)]
    taken |= {row.isa for row in found if row.cases}
    met = {row.dtypes for row in found if row.cases}
    for row in found:
        if not row.cases:
            row.why = _why(row, taken, levels, met, refusals)
    return Matrix(tuple(sorted(found, key=_order)), tuple(dict.fromkeys(levels)))


def _order(row: Row) -> tuple[object, ...]:
    return not row.cases, row.isa, row.kernel.rsplit("-", 1)[0], row.dtypes, micro_kernels.register_block(row.kernel)


def _kind(outcome: Outcome) -> str:
    """How a case counts: ``passed``, ``failed``, ``known``; "" for one that says nothing of a kernel.

    A result of another kernel than the intended one is not judged.
    """
    if outcome.status is Status.PASSED:
        return "passed"
    if outcome.status is Status.FALLBACK:
        return ""
    if outcome.status is Status.KNOWN_FAILURE:  # one that can end the process is not run
        return "" if outcome.reason is not None and outcome.reason.code == "can-crash" else "known"
    return "failed" if outcome.status.is_failure else ""


def _types(line: str) -> str:
    """Types of A and B of a problem's product: ``bf16-i8``; "" for a line that this release does not know."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return ""
    return f"{problem.dtypes.a.name}-{problem.dtypes.b.name}"


def _rows_of(line: str) -> tuple[int, int]:
    """Rows of a problem's product, and how many products it is."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return 0, 1
    batch = problem.shape.batch or 1
    return (problem.shape.m * batch, 1) if problem.op.batch == "optional" else (problem.shape.m, batch)


def _count(rows: dict[tuple[str, str], Row], outcome: Outcome, kind: str) -> None:
    """Enter an outcome in its row; one that ended before there was code in the rows that its name and types fit."""
    found = [one for text in outcome.configuration if (one := micro_kernels.parse(text)) is not None]
    if not found:
        asked = micro_kernels.split(outcome.candidate)
        for (kernel, dtypes), row in rows.items():
            if (
                asked
                and kernel == micro_kernels.kernel_of(asked[0])
                and dtypes.startswith(f"{_types(outcome.problem)}-")
            ):
                row.cases[kind] += 1
                row.problems.add(outcome.problem)
        return
    m, batch = _rows_of(outcome.problem)
    # Of a batch, so many products go to the function for one thread, and what is left to the one for all threads.
    threads = max(one.threads for one in found)
    if len({one.threads for one in found}) > 1:
        found = [one for one in found if (batch >= threads if one.threads == 1 else batch % threads)] or found
    kernels = {(one.kernel, one.dtypes): one for one in found}
    for key, first in kernels.items():
        row = rows.setdefault(key, Row(first.kernel, first.dtypes, ""))
        row.cases[kind] += 1
        row.problems.add(outcome.problem)
        same = [one for one in found if (one.kernel, one.dtypes) == key]
        for name in dict.fromkeys(name for one in same for name in _parts(one, one.m or m)):
            row.columns[name][kind] += 1
        height = micro_kernels.register_block(first.kernel)[0]
        row.left_over |= {rest for one in same if (rest := (one.m or m) % height)}


def _parts(one: Product, m: int) -> list[str]:
    """Which of :data:`COLUMNS` a product belongs to."""
    mr, nr, kr = micro_kernels.register_block(one.kernel)
    found = {
        "no tail": not (m % mr or one.n % nr or one.k % kr),
        "M < Mr": m < mr,
        "M tail": m > mr and bool(m % mr),
        "N tail": bool(one.n % nr),
        "K tail": bool(one.k % kr),
        "K steps": one.cache is not None and one.per_thread is not None and one.cache[2] < one.per_thread[2],
        "K slices": one.slices > 1,
        "any M": not one.m,
        "grouped": one.grouped > 1,
    }
    return [name for name, holds in found.items() if holds]


def _why(
    row: Row,
    taken: set[str],
    levels: Sequence[str],
    met: set[str],
    refusals: Mapping[tuple[str, str], Counter[str]],
) -> str:
    """Why a registered micro-kernel was not reached: the instruction set, Inductor's checks, or the run."""
    here = ", ".join(dict.fromkeys(levels)) or "an unknown level"
    if row.isa not in taken:
        if any(row.isa in _TAKEN.get(level, frozenset()) for level in _lower(levels)):
            return f"Inductor at {here} takes others; it has to generate for {row.isa}"
        return f"needs {row.isa}; judged on {here}"
    said = refusals.get((row.kernel, row.dtypes.rsplit("-", 1)[0]))
    if said:
        (words, _), count = said.most_common(1)[0], sum(said.values())
        return f"{words} ({count} problem{'s' if count > 1 else ''})"
    if row.dtypes not in met:
        return "no problem of the run has a product of these types"
    return "not asked for, --gemm-candidates=all has it"


def _lower(levels: Sequence[str]) -> list[str]:
    """The x86 levels below these."""
    order = ["avx2", "avx512", "avx512-vnni", "avx512-bf16", "amx"]
    top = max((order.index(level) for level in levels if level in order), default=-1)
    return order[: max(top, 0)]


# -- the texts ------------------------------------------------------------------------------------------------


def text(found: Matrix, suffix: str = ".md", heads: Sequence[str] = (), title: str = "") -> str:
    """The matrix as Markdown, or as JSON for the suffix ``.json``.

    Args:
        found: what to write.
        suffix: of the file's name.
        heads: lines about the runs, for Markdown.
        title: heading of the Markdown.
    """
    if suffix == ".json":
        data = {"levels": list(found.levels), "rows": [row.to_json() for row in found.rows]}
        return json.dumps(data, indent=1) + "\n"
    return "\n".join(_page(found, heads, title or "Micro-kernels of the C++ templates")) + "\n"


def _page(found: Matrix, heads: Sequence[str], title: str) -> list[str]:
    reached = [row for row in found.rows if row.cases]
    missed = [row for row in found.rows if not row.cases]
    cases = sum((row.cases for row in reached), Counter[str]())
    problems = {line for row in reached for line in row.problems}
    registered = sum(1 for row in found.rows if row.isa)
    lines = [f"# {title}", "", *heads, *([""] if heads else [])]
    here = ", ".join(found.levels) or "an unknown machine"
    first = (
        f"{sum(1 for row in reached if row.isa)} of {registered} registered configurations (micro-kernel x register "
        f"blocking x types) were judged on {here}: {_cell(cases)} cases of {len(problems)} problems."
    )
    second = (
        "A cell counts cases: passed, then failed (F) and known failures (K) if any. `left over` lists the remainders "
        "M mod Mr that occurred, and how many are possible."
    )
    lines += [
        *(first, "", second, ""),
        *(f"* {name}: {what}." for name, what in COLUMNS.items()),
        "",
        "## Reached",
        "",
    ]
    head = ["micro-kernel", "types", "for", "cases", *COLUMNS, "left over"]
    body = [
        [
            row.kernel,
            row.dtypes,
            row.isa or "any",
            _cell(row.cases),
            *(_cell(row.columns.get(name, Counter())) for name in COLUMNS),
            _left_over(row),
        ]
        for row in reached
    ]
    lines += [*_table(head, body), "", "## Never reached", ""]
    if missed:
        lines += [*_table(["micro-kernel", "types", "for", "why"], _merged(missed)), ""]
    else:
        lines += ["None.", ""]
    return lines[:-1]


def _merged(missed: Sequence[Row]) -> list[list[str]]:
    """A line for each class, types and reason: their blockings beside one another."""
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in missed:
        kind, _, block = row.kernel.rpartition("-")
        groups[kind, row.dtypes, row.isa, row.why].append(block)
    return [[f"{kind}-{', '.join(blocks)}", dtypes, isa, why] for (kind, dtypes, isa, why), blocks in groups.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _cell(count: Counter[str]) -> str:
    if not count:
        return "."
    parts = [str(count["passed"])]
    parts += [f"{count[name]} {letter}" for name, letter in (("failed", "F"), ("known", "K")) if count[name]]
    return ", ".join(parts)


def _left_over(row: Row) -> str:
    """The remainders of M that were met, of all: ``1-3 of 3``; "" where a block has one row."""
    height = micro_kernels.register_block(row.kernel)[0]
    if height == 1:
        return ""
    return f"{_ranges(sorted(row.left_over)) or 'none'} of {height - 1}"


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


# -- the command ----------------------------------------------------------------------------------------------


def write(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write the matrix of a run, as Markdown or by the file's suffix."""
    found = matrix(outcomes, [isa_module.isa_level(processor.cpu().flags)])
    path.write_text(text(found, path.suffix), encoding="utf-8")


def explained(record: record_module.Record, ledger: Ledger) -> list[Outcome]:
    """A record's outcomes; what failed, and this ledger knows, is a known failure, whatever ledger the run had.

    A record tells release and level of its machine.  How many threads a case had is read off its generated code: of one
    that ended before there was any, an entry that asks for threads explains nothing.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pytest-gemm coverage``."""
    parser.add_argument("records", nargs="+", type=Path, help="run.jsonl of --gemm-output")
    parser.add_argument("--title", default="", help="heading of the page")
    parser.add_argument("--json", action="store_true", help="the data instead of a page")
    parser.add_argument(
        "--known-failures", type=Path, metavar="FILE", help="a ledger that knows what failed, in place of the runs' own"
    )


def run(given: argparse.Namespace) -> int:
    """Print the matrix."""
    records = [record_module.read(path) for path in given.records]
    ledger = Ledger.load(given.known_failures) if given.known_failures else Ledger()
    outcomes = [outcome for record in records for outcome in explained(record, ledger)]
    levels = [record.run.isa for record in records if record.run.isa]
    heads = [line for record in records for line in _head(record)]
    show(text(matrix(outcomes, levels), ".json" if given.json else ".md", heads, given.title))
    return 0


def _head(record: record_module.Record) -> list[str]:
    run = record.run
    return [f"* {run.date}; {run.cpu}; torch {run.versions.get('torch', '?')}"]
