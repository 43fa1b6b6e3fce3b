"""A run record as a Markdown page: ``pytest-gemm results RECORD... > docs/results/mine.md``.

Records of several runs make one page.  Its text is ``templates/page.md.jinja``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.record import Record
from pytest_gemm.record.records import ratio_text
from pytest_gemm.run import review
from pytest_gemm.run.terminal import by, distinct, having, status_counts, template


def page(records: Sequence[Record], title: str) -> str:
    """Markdown: versions, counts, distance from the bounds, what was pruned, unsupported and wrong."""
    outcomes = [outcome for record in records for outcome in record.outcomes]
    failures = [o for o in outcomes if o.status.is_failure or o.status is Status.KNOWN_FAILURE]
    unsupported = having(outcomes, "unsupported", "not-run")
    return template("page.md.jinja").render(
        title=title,
        records=records,
        counts=_counts(outcomes),
        distances=_distances(outcomes),
        epilogues=_epilogues(outcomes),
        judged=[outcome for outcome in outcomes if outcome.ratio is not None],
        pruned=by((o for o in having(outcomes, "pruned") if o.reason), "backend", "code"),
        failures=by(failures, "who", "known_failure", "status.value", "code"),
        unsupported=by((o for o in unsupported if o.reason), "who", "status.value", "reason.text"),
    )


def _counts(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """The table of problems by backend and status, its head first."""
    used = [status for status in Status if any(o.status is status for o in outcomes)]
    rows: list[list[object]] = [
        ["backend", *used, "problems judged", "cases judged", "distinct candidates", "distinct kernels"]
    ]
    for backend, group in by(outcomes, "who").items():
        counts = status_counts(group)
        judged = [outcome for outcome in group if outcome.ratio is not None]
        kernels = {kernel.split(" (")[0] for kernel in distinct(judged, "kernels")}
        facts = (distinct(judged, "problem"), judged, distinct(judged, "candidates"), kernels)
        rows.append([backend, *(counts[status] or "" for status in used), *map(len, facts)])
    return rows


def _problem(line: str) -> Problem | None:
    try:
        return Problem.parse(line)
    except ProblemError:
        return None


def kind(line: str) -> str:
    """Dtypes of a problem with the flags that change its arithmetic."""
    problem = _problem(line)
    modes = [flag for flag in problem.flags if flag.startswith("math.")] if problem else []
    return " ".join([str(problem.dtypes), *modes]) if problem else "?"


def _distances(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """The table of the worst error over bound of what passed, its head first."""
    passed = [outcome for outcome in having(outcomes, "passed") if outcome.ratio is not None]
    kinds = {line: kind(line) for line in distinct(passed, "problem")}
    tiers = sorted(distinct(passed, "tier"))
    worst: dict[tuple[str, str], dict[str, float | None]] = {}
    for outcome in passed:
        row = worst.setdefault((outcome.who, kinds[outcome.problem]), dict.fromkeys(tiers, None))
        row[outcome.tier] = max(row[outcome.tier] or 0.0, outcome.ratio or 0.0)
    rows: list[list[object]] = [["backend", "dtypes", *tiers]]
    for key, row in sorted(worst.items()):
        rows.append([*key, *("" if ratio is None else ratio_text(ratio) for ratio in row.values())])
    return rows if passed else []


def _epilogue(line: str) -> tuple[str, str]:
    """The op, and the steps with what makes two results or reads A twice."""
    problem = _problem(line)
    if problem is None:
        return "?", ""
    steps = "+".join(map(str, problem.steps))
    two = [flag for flag in ("program.multi_output", "program.branching", "r0.alias") if problem.has(flag)]
    return problem.op.name, " ".join([steps, *two])


def _epilogues(outcomes: Iterable[Outcome]) -> list[list[object]]:
    """Whether the product's own kernel did the whole epilogue: rows by backend, op and epilogue."""
    groups: dict[tuple[str, str, str], dict[str, Outcome]] = {}
    for outcome in outcomes:
        if outcome.fused is not None:
            groups.setdefault((outcome.who, *_epilogue(outcome.problem)), {}).setdefault(outcome.problem, outcome)
    rows: list[list[object]] = []
    for key, problems in sorted(groups.items()):
        apart = [f"`{outcome.problem}`" for outcome in problems.values() if not outcome.fused]
        fusions = " ".join(map(str, sorted(distinct(problems.values(), "fusions"))))
        rows.append([*key, len(problems), len(apart) or "", fusions, *(apart[:1] or [""])])
    return rows


def comment(records: Sequence[Record], title: str) -> str:
    """The same, short enough for a comment of a pull request."""
    outcomes = [outcome for record in records for outcome in record.outcomes]
    red = [text for record in records for text in (record.totals.red if record.totals else ("a run did not end",))]
    seconds = sum(record.totals.wall_seconds for record in records if record.totals)
    return review.markdown(review.Run(outcomes, red, [record.run for record in records], seconds), title)
