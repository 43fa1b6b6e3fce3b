"""The verdict on a run: a function from its record to the exit status and its causes."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Final

from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.record.reader import Run

# Exit statuses of pytest: all passed, some failed, wrong options, nothing was collected.
_OK, _FAILED, _WRONG, _NOTHING = 0, 1, 4, 5
ENDED: Final = frozenset({_OK, _FAILED, _NOTHING})
"""Exit statuses by which pytest says that a run went through all its tests."""
# Reasons that the sentence about a backend without a judged case gives.
_WHY_SHOWN: Final = 3


class Red(enum.IntEnum):
    """Why a run is red.  The values are its exit status; of several reasons the least one counts."""

    CASE = 1
    """A test failed: a wrong result, a crash, a limit, a fallback; or a kernel ended the process.  pytest's own."""
    BACKEND = 10
    """A named backend did not run or judged no case, a part of a registration was not called, a device was lost, or no
    candidate is called as asked for."""
    SLOWER = 11
    """A timed case is slower than its baseline, or than the environment of ``--gemm-against``."""
    NO_BASELINE = 12
    """A timed case has no baseline: store one with ``--gemm-record``."""
    UNDECIDED = 13
    """More of the timed cases stayed undecided than ``--gemm-undecided`` allows."""
    LEDGER = 14
    """A known failure no longer fails: its entry applied to cases that ran, and none failed."""
    FILE = 15
    """A file that was asked for, by ``--gemm-output`` for instance, could not be written."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """What turns a run red without being a test's failure.

    Attributes:
        red: its kind.
        name: of what it is about: a backend, an entry of the ledger, a file.
        text: a sentence, what is wrong before its first colon.
    """

    red: Red
    name: str
    text: str


# What a failed test says, by its kind; and an exit status that no test and no cause explains.
_TEST_FAILED: Final = {
    Red.CASE: "a test failed",
    Red.SLOWER: "a timed case is slower",
    Red.NO_BASELINE: "a timed case has no baseline",
    Red.UNDECIDED: "a timed case is undecided",
}
_STATUS: Final = {1: "not everything was compiled", 3: "an internal error", 5: "no test was run"}


def verdict(run: Run) -> tuple[int, list[Cause]]:
    """The exit status of a run that ended, and what beside failed tests turns it red.

    What needs the outcomes of all shards is left to their merge.
    """
    found, status = causes(run), run.totals.status
    if status not in ENDED:
        return status, found
    if status == _NOTHING and run.head.shards and run.totals.division.tests:
        status = _OK  # the other shards have them
    return min((*run.totals.failed, *(cause.red for cause in found)), default=status), found


def last_line(run: Run) -> str:
    """Why a run is red, in one line; "" of a green one, and where pytest says below what is wrong with its options."""
    status, found = verdict(run)
    if status in {_OK, _WRONG}:
        return ""
    failed = [_TEST_FAILED.get(Red(red), "a test failed") for red in sorted(run.totals.failed)]
    whys = [*failed, *(cause.text.partition(": ")[0] for cause in found)]
    if status not in {*Red} or not whys:
        whys = [_STATUS.get(status, "the run was interrupted")]
    return f"FAILED: {'; '.join(dict.fromkeys(whys))} (status {status})"


def causes(run: Run) -> list[Cause]:
    """What turns a run red without being a test's failure."""
    totals = run.totals
    lost = [outcome for outcome in run.outcomes if outcome.status is Status.NOT_RUN and outcome.code == "device-lost"]
    found = [] if "missing" in run.head.terms.allow else missing(run)
    if lost:
        text = f"a device was lost, and {len(lost)} case(s) were not run"
        found.append(Cause(Red.BACKEND, "device-lost", text))
    found += [*unjudged(run), *uncalled(run)]
    if wanted := _unknown_candidate(run):
        text = f"no candidate of any problem is called as --gemm-candidates={wanted} asks: the refusals list names"
        found.append(Cause(Red.BACKEND, "candidates", text))
    if totals.undecided:
        text = "more of the timed cases stayed undecided than --gemm-undecided allows"
        found.append(Cause(Red.UNDECIDED, "share", text))
    for entry in stale(run):
        text = f"known failure {entry!r} passed everywhere it applied: delete it from the ledger"
        found.append(Cause(Red.LEDGER, entry, text))
    return found + [Cause(Red.FILE, name, f"{name} is not complete: {why}") for name, why in totals.lost.items()]


def missing(run: Run) -> list[Cause]:
    """The backends that were asked for and cannot run, which ``--gemm-allow=missing`` accepts."""
    return [Cause(Red.BACKEND, name, f"{name} did not run: {reason}") for name, reason in run.totals.missing.items()]


def unjudged(run: Run) -> list[Cause]:
    """The named backends of which tests were run and no case was judged.

    With ``auto`` that is an error where it holds for all of them.
    """
    terms = run.head.terms
    if "unjudged" in terms.allow or terms.fuzz or run.head.shards:
        return []
    judged = {outcome.backend for outcome in run.outcomes if outcome.was_judged}
    if not terms.named and judged:
        return []

    def text(name: str) -> str:
        why = _why_unjudged([outcome for outcome in run.outcomes if outcome.backend == name])
        why = why or f"no selected test calls gemm_check for {name}"
        return f"{name} judged no case: {why}; --gemm-allow=unjudged accepts that"

    return [Cause(Red.BACKEND, name, text(name)) for name in sorted(run.totals.asked - judged)]


def uncalled(run: Run) -> list[Cause]:
    """The backends of which a part was written out when they were registered that no case called."""
    terms = run.head.terms
    if "unjudged" in terms.allow or run.head.shards:
        return []
    judged = {outcome.backend for outcome in run.outcomes if outcome.was_judged or not terms.named}
    remedy = "judge what calls it (on a device: --gemm-device), or take it out; --gemm-allow=unjudged accepts that"
    return [
        Cause(Red.BACKEND, name, f"{name} was registered with {', '.join(parts)}, which no case called: {remedy}")
        for name, parts in run.totals.uncalled.items()
        if name in judged
    ]


def _why_unjudged(outcomes: Sequence[Outcome]) -> str:
    """What became of cases of which none was judged: the most frequent reasons; "" where there are no cases."""
    groups = Counter((str(o.status), o.reason.text if o.reason else "no reason") for o in outcomes)
    shown = [f"{count} {status} ({reason})" for (status, reason), count in groups.most_common(_WHY_SHOWN)]
    more = [f"{len(groups) - _WHY_SHOWN} more reason(s)"] if len(groups) > _WHY_SHOWN else []
    return ", ".join(shown + more) or ""


def _unknown_candidate(run: Run) -> str:
    """The name in ``--gemm-candidates`` that no candidate of any problem has; "" where there is none such."""
    wanted = run.head.terms.candidates if not run.head.shards else ""
    named = CandidateSelection(wanted).by_name
    return wanted if named and run.outcomes and not any(outcome.candidate for outcome in run.outcomes) else ""


def stale(run: Run) -> list[str]:
    """Ledger entries that applied to something that ran, of which all passed: they are to be deleted.

    Only a run of the whole level shows this: a narrowed one may have left out the cases that fail.
    """
    if run.totals.narrowed or run.head.shards:
        return []
    passed, failed, differed = (run.totals.use.get(name, {}) for name in ("passed", "failed", "differed"))
    return [one for one in run.head.terms.entries if one in passed and one not in failed and one not in differed]
