"""A run record as a page: ``pytest-gemm results RECORD... > docs/results/mine.md``.

Records of several runs make one page.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.records import ratio_text, status_of
from pytest_gemm.run.record import Record, read
from pytest_gemm.run.terminal import by_problem, pruned_by_cause
from pytest_gemm.text import show


def page(records: Sequence[Record], title: str) -> str:
    """Markdown: versions, counts, distance from the bounds, what was pruned, refused and wrong."""
    outcomes = [o for record in records for o in record.outcomes]
    parts = [
        [f"# {title}", ""],
        _runs(records),
        _counts(outcomes),
        _distances(outcomes),
        _epilogues(outcomes),
        _pruned(outcomes),
        _failures(outcomes),
        _refused(outcomes),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in rows), ""]


def _runs(records: Sequence[Record]) -> list[str]:
    lines: list[str] = []
    for record in records:
        run, totals = record.run, record.totals
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        lines += [f"`{' '.join(run.command)}`", ""]
        lines += [f"* {run.date}; {'; '.join([run.cpu, *run.gpus])}", f"* {versions}"]
        end = f"{totals.wall_seconds:.0f} s, {totals.processes} process(es)" if totals else "did not end"
        lines.append(f"* {len(record.outcomes)} outcomes, {end}")
        lines += ["* the last line is torn and was left out"] if record.torn else []
        lines += [f"* {note}" for note in totals.notes] if totals else []
        lines.append("")
    return lines


def _by_backend(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.who].append(outcome)
    return found


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    used = [s for s in Status if any(o.status is s for o in outcomes)]
    rows = []
    for backend, group in _by_backend(outcomes).items():
        counts = Counter(status_of(g) for g in by_problem(group).values())
        judged = [o for o in group if o.ratio is not None]
        rows.append(
            [
                backend,
                *(counts[s] or "" for s in used),
                len({o.problem for o in judged}),
                len(judged),
                len({name for o in judged for name in o.candidates}),
                len({k.split(" (")[0] for o in judged for k in o.kernels}),
            ]
        )
    head = ["backend", *map(str, used), "problems judged", "cases judged", "distinct choices", "distinct kernels"]
    note = "Problems by status; a problem counts under the worst of its cases."
    return ["## Counts", "", note, "", *_table(head, rows)]


def _kind(line: str) -> str:
    """Dtypes of a problem with the flags that change its arithmetic."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return "?"
    modes = [flag for flag in problem.flags if flag.startswith("math.")]
    return " ".join([str(problem.dtypes), *modes])


def _distances(outcomes: Sequence[Outcome]) -> list[str]:
    """Worst error over bound of what passed."""
    worst: dict[tuple[str, str], dict[str, Outcome]] = defaultdict(dict)
    kinds = {line: _kind(line) for line in {o.problem for o in outcomes}}
    for outcome in outcomes:
        if outcome.status is Status.PASSED and outcome.ratio is not None:
            row = worst[outcome.who, kinds[outcome.problem]]
            if outcome.tier not in row or outcome.ratio > (row[outcome.tier].ratio or 0.0):
                row[outcome.tier] = outcome
    tiers = sorted({tier for row in worst.values() for tier in row})
    rows = [
        [backend, kind, *(ratio_text(row[tier].ratio) if tier in row else "" for tier in tiers)]
        for (backend, kind), row in sorted(worst.items())
    ]
    note = (
        "Worst error over bound of what passed, by tier of the oracle. 0: every element was exact. Results of 16 bits "
        "and fewer are compared after rounding, where the figure is 0 or 1 more often than anything between."
    )
    return ["## Distance from the bounds", "", note, "", *_table(["backend", "dtypes", *tiers], rows)] if rows else []


def _epilogue(line: str) -> tuple[str, str]:
    """The op, and the steps with what makes two results or reads A twice."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return "?", ""
    steps = "+".join(str(step) for step in problem.epilogue)
    two = [flag for flag in ("program.multi_output", "program.branching", "r0.alias") if problem.has(flag)]
    return problem.op.name, " ".join([steps, *two])


def _epilogues(outcomes: Sequence[Outcome]) -> list[str]:
    """Whether the product's own kernel did the whole epilogue, by backend, op and epilogue."""
    groups: dict[tuple[str, str, str], dict[str, Outcome]] = defaultdict(dict)
    for outcome in outcomes:
        if outcome.fused is not None:
            groups[(outcome.who, *_epilogue(outcome.problem))].setdefault(outcome.problem, outcome)
    rows = []
    for (backend, op, epilogue), problems in sorted(groups.items()):
        apart = [o.problem for o in problems.values() if not o.fused]
        fusions = sorted({o.fusions for o in problems.values()})
        first = f"`{apart[0]}`" if apart else ""
        rows.append([backend, op, epilogue, len(problems), len(apart) or "", " ".join(map(str, fusions)), first])
    note = (
        "Number of problems per epilogue, and in how many of them another kernel ran after the product's own; "
        "nodes that Inductor's scheduler fused into a C++ template (0 where the lowering had done so before)."
    )
    head = ["backend", "op", "epilogue", "problems", "apart", "nodes", "first apart"]
    return ["## Epilogues", "", note, "", *_table(head, rows)] if rows else []


def _pruned(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [
        [
            backend,
            code,
            len(group),
            group[0].candidate,
            group[0].problem,
            group[0].reason.text if group[0].reason else "",
        ]
        for (backend, code), group in sorted(pruned_by_cause(outcomes).items())
    ]
    head = ["backend", "cause", "count", "first", "in", "says"]
    return ["## Pruned candidates", "", *_table(head, rows)] if rows else []


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    """What failed, known or not: one line for each problem and reason."""
    groups: dict[tuple[str, str, str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status.is_failure or outcome.status is Status.KNOWN_FAILURE:
            code = outcome.reason.code if outcome.reason else ""
            groups[outcome.who, outcome.known_failure or "not known", str(outcome.status), code].append(outcome)
    if not groups:
        return ["## Failures", "", "None.", ""]
    rows = [
        [
            backend,
            entry,
            status,
            code,
            len({o.problem for o in group}),
            f"`{group[0].problem}` {group[0].distribution}".strip(),
        ]
        for (backend, entry, status, code), group in sorted(groups.items())
    ]
    return ["## Failures", "", *_table(["backend", "known as", "status", "reason", "problems", "first"], rows)]


def _refused(outcomes: Sequence[Outcome]) -> list[str]:
    counts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.status in {Status.UNSUPPORTED, Status.NOT_RUN} and outcome.reason:
            counts[outcome.who, f"{outcome.status}: {outcome.reason.text}"].add(outcome.problem)
    rows = [[backend, text, len(lines)] for (backend, text), lines in sorted(counts.items())]
    return ["## Refused or not run", "", *_table(["backend", "reason", "problems"], rows)] if rows else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pytest-gemm results``."""
    parser.add_argument("records", nargs="+", type=Path, help="run.jsonl of --gemm-output")
    parser.add_argument("--title", default="Results", help="heading of the page")


def run(given: argparse.Namespace) -> int:
    """Print the page."""
    show(page([read(path) for path in given.records], given.title))
    return 0
