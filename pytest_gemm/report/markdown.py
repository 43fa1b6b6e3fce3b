"""Run records as a Markdown page: ``pytest-gemm results RECORD... > docs/results/mine.md``.

Its text is ``templates/page.md.jinja``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import ratio_text
from pytest_gemm.failures import findings
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.reader import Run
from pytest_gemm.report.model import TEMPLATES, Tally, by, distinct, having, judged, kind, statuses


def page(runs: Sequence[Run], title: str) -> str:
    """Markdown: versions, counts, distance from the bounds, what was pruned, unsupported and wrong."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    unsupported = having(outcomes, "unsupported", "not-run")
    return TEMPLATES.render(
        "page.md.jinja",
        title=title,
        runs=runs,
        counts=_counts(outcomes),
        distances=_distances(outcomes),
        epilogues=_epilogues(outcomes),
        judged=judged(outcomes),
        pruned=by((o for o in having(outcomes, "pruned") if o.reason), "backend", "code"),
        findings=findings.findings(outcomes),
        known=by(having(outcomes, "known-failure"), "who", "known_failure", "code"),
        unsupported=by((o for o in unsupported if o.reason), "who", "status.value", "reason.text"),
    )


def _counts(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """The table of problems by backend and status, its head first."""
    used = statuses(outcomes)
    rows: list[list[object]] = [
        ["backend", *used, "problems judged", "cases judged", "distinct candidates", "distinct kernels"]
    ]
    for backend, group in by(outcomes, "who").items():
        counts = Tally.of(group).counts
        cases = judged(group)
        kernels = {kernel.split(" (")[0] for kernel in distinct(cases, "kernels")}
        facts = (distinct(cases, "problem"), cases, distinct(cases, "candidates"), kernels)
        rows.append([backend, *(counts.get(status, "") for status in used), *map(len, facts)])
    return rows


def _distances(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """The table of the worst error over bound of what passed, its head first."""
    passed = judged(having(outcomes, "passed"))
    tiers = sorted(distinct(passed, "tier"))
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for outcome in passed:
        ratios[outcome.who, kind(outcome.problem), outcome.tier].append(outcome.ratio or 0.0)
    rows: list[list[object]] = [["backend", "dtypes", *tiers]]
    for who, dtypes in sorted({key[:2] for key in ratios}):
        cells = (ratios.get((who, dtypes, tier)) for tier in tiers)
        rows.append([who, dtypes, *(ratio_text(max(found)) if found else "" for found in cells)])
    return rows if passed else []


def _epilogue(line: str) -> tuple[str, str]:
    """The op, and the steps with what makes two results or reads A twice."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
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
