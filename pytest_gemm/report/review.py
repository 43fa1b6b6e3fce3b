"""What a reviewer reads of runs: Markdown for the summary of a job or a comment, and annotations.

The text of the Markdown is ``templates/review.md.jinja``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import code_cell, escaped, printable, ratio_text
from pytest_gemm.record.lines import Head
from pytest_gemm.record.reader import Run
from pytest_gemm.report import github
from pytest_gemm.report.github import Annotation
from pytest_gemm.report.model import TEMPLATES, Tally, by, distinct, failures, having, spread, statuses
from pytest_gemm.verdict import causes

# Rows of a table: of failures that are open, of those that are folded, and of any other table.
_OPEN: Final = 10
_FOLDED: Final = 40
_OTHERS: Final = 20
# Lines of an annotation between what failed and how to run it again.
_LINES: Final = 3
# Characters of a reason.
_REASON: Final = 240


# -- Markdown ------------------------------------------------------------------------------------------------


def title(run: Run) -> str:
    """The heading of a run's summary."""
    what = "GEMM fuzzing" if run.head.terms.fuzz else "GEMM correctness"
    return f"{what} of {', '.join(run.head.terms.backends)}"


def markdown(runs: Sequence[Run], title: str) -> str:
    """A few lines, a table of counts and one of failures of all runs; the rest is folded.

    It has less than 65,536 characters, which is as long as a comment on GitHub can be.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    failed = [some for group in by(outcomes, "who", "problem").values() if (some := failures(group))]
    known = by(having(outcomes, "known-failure"), "known_failure")
    left = [o for o in having(outcomes, "unsupported", "not-run", "pruned") if o.reason]
    reds = [cause.text for run in runs for cause in causes(run)] + [
        "a run did not end" for run in runs if not run.ended
    ]
    text = TEMPLATES.render(
        "review.md.jinja",
        title=title,
        tally=Tally.of(outcomes),
        reds=reds,
        seconds=sum(run.totals.wall_seconds for run in runs),
        table=_counts(outcomes),
        failed=[_row(some) for some in spread(failed, lambda some: (some[0].who, some[0].status, some[0].code))],
        first=_OPEN,
        folded=_OPEN + _FOLDED,
        most=_OTHERS,
        known=sorted(known.items()),
        left=sorted(by(left, "who", "status.value", "reason.text").items(), key=lambda item: -len(item[1])),
        facts=list(dict.fromkeys(", ".join(_facts(run.head)) for run in runs)),
        short=lambda text: escaped(printable(text, _REASON)),
        code=code_cell,
    )
    return text.strip() + "\n"


def _row(failed: Sequence[Outcome]) -> list[str]:
    """A failed problem on a backend: where, how, why, how far beyond the bound."""
    worst = max(failed, key=lambda one: (one.ratio is not None, one.ratio or 0.0))
    distributions = " ".join(sorted(filter(None, distinct(failed, "distribution"))))
    why = escaped(printable(worst.reason.text if worst.reason else "", _REASON))
    return [
        code_cell(worst.problem),
        code_cell(worst.who),
        str(worst.status),
        why,
        distributions,
        ratio_text(worst.ratio),
    ]


def _counts(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """Problems by backend, op and status; by backend alone where that would be long."""
    used = statuses(outcomes)
    groups: Mapping[Any, list[Outcome]] = by(outcomes, "who", "op")
    if len(groups) > _OTHERS:
        groups = {(who, "all"): group for who, group in by(outcomes, "who").items()}
    rows: list[list[object]] = [["backend", "op", *used, "correctly rounded"]]
    for (who, op), group in list(groups.items())[: 2 * _OTHERS]:
        tally = Tally.of(group)
        rows.append([code_cell(who), op, *(tally.counts.get(status, "") for status in used), tally.nearest])
    return rows


def _facts(head: Head) -> list[str]:
    versions = [f"{name} {version}" for name, version in sorted(head.versions.items())]
    return [*versions, *head.hardware]


# -- annotations -----------------------------------------------------------------------------------------------


def failure(
    nodeid: str,
    said: str,
    outcomes: Sequence[Outcome],
    verdicts: Sequence[str],
    root: Path,
    backends: Mapping[str, github.Place],
) -> Annotation | None:
    """The annotation of a test that failed; ``None`` for a test that is not of a case.

    Args:
        nodeid: of the test.
        said: the text of its failure.
        outcomes: what it judged.
        verdicts: of the gate.
        root: folder that the id begins at.
        backends: where backends are defined, by their names.
    """
    if not outcomes:
        return None
    wrong = failures(outcomes)
    worst = (wrong or outcomes)[0]
    ended = str(worst.status) if wrong else next(iter(verdicts), "failed")
    lines = said.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(worst.problem)), None)
    block = [] if first is None else lines[first : first + 1 + _LINES]
    block = block or [f"{worst.problem} on {worst.who}: {ended}"]
    reruns = [line for line in lines if line.startswith("  rerun: ")]
    where = (github.place_of_case(nodeid, worst.problem, root), backends.get(worst.backend))
    text = "\n".join(dict.fromkeys(line.strip() for line in block + reruns[:1]))
    return Annotation(f"{worst.who}: {ended}", text, where, (worst.who, ended, worst.code))
