"""What a reviewer reads of runs: Markdown for the summary of a job or a comment, and annotations.

The text of the Markdown is ``templates/review.md.jinja``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import code_cell, escaped, printable, ratio_text
from pytest_gemm.failures import findings
from pytest_gemm.failures.findings import Finding
from pytest_gemm.record.lines import Head
from pytest_gemm.record.reader import Run
from pytest_gemm.record.writer import OfTest
from pytest_gemm.report import github
from pytest_gemm.report.github import Annotation
from pytest_gemm.report.model import TEMPLATES, Tally, by, having, judged, statuses
from pytest_gemm.report.runs import tested
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
    return f"{what} of {tested(run.head)}"


def markdown(runs: Sequence[Run], title: str) -> str:
    """A few lines, a table of counts and one of failures of all runs; the rest is folded.

    It has less than 65,536 characters, which is as long as a comment on GitHub can be.
    """
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    found = findings.findings(outcomes)
    known = by(having(outcomes, "known-failure"), "known_failure")
    left = [o for o in having(outcomes, "unsupported", "not-run", "pruned") if o.reason]
    reds = [cause.text for run in runs for cause in causes(run)] + [
        "a run did not end" for run in runs if not run.ended
    ]
    text = TEMPLATES.render(
        "review.md.jinja",
        title=title,
        tally=Tally.of(outcomes),
        batched=sum(one.compiled_with > 0 for one in judged(outcomes)),
        reds=reds,
        seconds=sum(run.totals.wall_seconds for run in runs),
        table=_counts(outcomes),
        failed=list(map(_row, found)),
        wrong=sum(len(one.problems) for one in found),
        first=_OPEN,
        folded=_OPEN + _FOLDED,
        most=_OTHERS,
        known=sorted(known.items()),
        left=sorted(by(left, "who", "status.value", "reason.text").items(), key=lambda item: -len(item[1])),
        facts=list(dict.fromkeys(_facts(run.head) for run in runs)),
        short=lambda text: escaped(printable(text, _REASON)),
        code=code_cell,
    )
    return text.strip() + "\n"


def _row(found: Finding) -> list[object]:
    """A finding: what, how often and when, the simplest problem, and how far that is beyond the bound."""
    one = found.simplest
    why = escaped(printable(one.reason.text if one.reason else "", _REASON))
    what, who, problem = escaped(printable(found.title, _REASON)), code_cell(found.who), code_cell(one.problem)
    return [what, who, len(found.problems), escaped(found.condition), problem, why, ratio_text(one.ratio)]


def _counts(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """Problems by backend, op and status; by backend alone where that would be long."""
    used = statuses(outcomes)
    rows: list[list[object]] = [
        [code_cell(who), op, *(tally.counts.get(status, "") for status in used), tally.nearest]
        for (who, op), tally in Tally.by_op(outcomes, _OTHERS).items()
    ]
    return [["backend", "op", *used, "correctly rounded"], *rows[: 2 * _OTHERS]]


def _facts(head: Head) -> str:
    return ", ".join([*(f"{name} {version}" for name, version in sorted(head.versions.items())), *head.hardware])


# -- annotations -----------------------------------------------------------------------------------------------


def annotation(
    finding: Finding | None,
    tests: Sequence[Any],
    judged: OfTest,
    root: Path,
    backends: Mapping[str, github.Place],
) -> Annotation:
    """The annotation of a finding, at its simplest problem, or of a test that no wrong result made fail.

    Args:
        finding: what failed.
        tests: reports of the tests that failed of it; that of the simplest problem first.
        judged: what the first test judged.
        root: folder that the ids begin at.
        backends: where backends are defined, by their names.
    """
    first = tests[0]
    worst = finding.simplest if finding else judged.outcomes[0]
    ended = finding.title if finding else next(iter(first.gemm_verdicts), "failed")
    if finding:
        lines = findings.text(finding, judged.rerun, len(tests)).splitlines()
    else:
        lines = [*first.longreprtext.splitlines()[: 1 + _LINES], f"rerun: {judged.rerun}"]
    where = (github.place_of_case(first.nodeid, worst.problem, root), backends.get(worst.backend))
    text = "\n".join(dict.fromkeys(line.strip() for line in lines))
    return Annotation(f"{worst.who}: {ended}", text, where)
