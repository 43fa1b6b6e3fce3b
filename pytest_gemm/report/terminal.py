"""The summary of a run: its sentences are in ``templates/summary.txt.jinja``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pytest_gemm.core.outcome import Outcome, Seconds, Status
from pytest_gemm.core.text import table
from pytest_gemm.record.reader import Run
from pytest_gemm.report.model import TEMPLATES, Tally, by, distinct, failures, having, judged, statuses
from pytest_gemm.verdict import Red, causes

# The columns that the table of a run always has.
_ALWAYS: Final = frozenset({Status.PASSED, Status.INCORRECT, Status.FALLBACK, Status.UNSUPPORTED, Status.KNOWN_FAILURE})
# Rows of ops that are shown below failures.
_ROWS: Final = 8


def summary(run: Run, *, verbose: bool = True) -> list[str]:
    """The lines of the terminal summary.

    Args:
        run: what was judged.
        verbose: whether the table has a row for each op even where that would hide the failures above it.
    """
    outcomes, found = run.outcomes, causes(run)
    unsupported = by(having(outcomes, "unsupported"), "who", "why")
    tallies = Tally.by_op(outcomes, _ROWS if failures(outcomes) and not verbose else len(outcomes))
    told = {"device-lost", *run.totals.missing}  # in lines of their own
    text = TEMPLATES.render(
        "summary.txt.jinja",
        run=run,
        outcomes=outcomes,
        table=_status_table(tallies, outcomes),
        is_short=len(tallies) < len(by(outcomes, "who", "op")),
        judged=judged(outcomes),
        unsupported=sorted(unsupported.items(), key=lambda item: -len(distinct(item[1], "problem"))),
        stale=[cause for cause in found if cause.red is Red.LEDGER],
        further=[cause for cause in found if cause.red is Red.BACKEND and cause.name not in told],
        total=sum((outcome.seconds for outcome in outcomes), Seconds()),
    )
    return text.split("\n")[:-1]


def incomplete(run: Run) -> list[str]:
    """A line for each file that is not complete."""
    return [f"{name} is not complete: {why}; the run is red for it" for name, why in run.totals.lost.items()]


def _status_table(tallies: Mapping[tuple[str, str], Tally], outcomes: list[Outcome]) -> list[str]:
    """Problems by backend, op and status."""
    columns = [status for status in Status if status in {*_ALWAYS, *statuses(outcomes)}]
    head = ["backend", "op", *map(str, columns), "cases", "correctly rounded"]
    rows = []
    for (backend, op), tally in (*tallies.items(), (("all", ""), Tally.of(outcomes))):
        counts = (str(tally.counts.get(status, ".")) for status in columns)
        rows.append([backend, op, *counts, str(tally.judged), tally.nearest])
    return table(head, rows, range(2, len(head)))
