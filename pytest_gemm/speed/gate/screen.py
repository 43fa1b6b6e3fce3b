"""The gate: from sessions to verdicts.  Pure statistics over ``speed``'s data.

No clock, no file, no torch: what is decided here can be tabled and replayed.  ``docs/gate.md`` derives the rules and
shows what they are worth; ``calibrate`` repeats that study on a machine's own sessions.

Inside, all changes are differences of natural logarithms; :class:`Policy` and ``speed.Judgement``
speak of fractions (0.02 is 2%).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate.estimates import (
    Learnt,
    Reading,
    Screened,
    Stored,
    learn,
    log_estimates,
    paired,
    usable_prior,
)
from pytest_gemm.speed.gate.evidence import (
    Anchor,
    Evidence,
    View,
    all_evidence,
    anchor_of,
    claims_of,
    fewest,
    gathered,
    median_comparator,
)
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.gate.sentences import interval, many, percent, words

"""Shares of the comparator that may be taken off, the default first."""


def judged(e: Evidence, verdict: Verdict, reason: Reason, *, by: View | None = None, before: int = 0) -> Judgement:
    """The judgement with all its fields; ``by`` is the figure that is shown, ``before`` the screen's sessions."""
    view = by or e.main
    weight = e.weight
    if by is not None and by is e.raw:
        weight = 0.0
    elif by is not None and by is e.ratio:
        weight = 1.0
    low, high = view.interval()
    if e.note:
        reason = dataclasses.replace(reason, text=f"{reason.text}; {e.note}")
    return Judgement(
        case=e.case,
        verdict=verdict,
        reason=reason,
        change=math.expm1(view.estimate),
        low=math.expm1(low),
        high=math.expm1(high),
        minimum_effect=e.minimum_effect if math.isfinite(e.minimum_effect) else None,
        seconds=e.seconds,
        comparator_seconds=e.comparator_seconds,
        stored_seconds=e.stored_seconds,
        weight=weight,
        sessions=before + e.sessions,
    )


def without(
    case: CaseId, head: Sequence[Reading], needed: int, unit: str, *, shown: Judgement | None = None
) -> Judgement:
    """The judgement on a case with too few usable sessions; ``shown`` is what the screen said of it."""
    lost = [r for r in head if r.disturbed]
    usable = len(head) - len(lost)
    if lost:
        reason = Reason(
            "disturbed",
            f"{len(lost)} of {many(len(head), unit)} disturbed ({lost[0].disturbed}); it takes {needed} calm ones",
            "run again when the machine is quiet",
        )
    else:
        reason = Reason(
            "too-few", f"a figure in {many(usable, unit)}; it takes {needed}", "see why the other sessions have none"
        )
    if shown:
        return dataclasses.replace(shown, verdict=Verdict.UNDECIDED, reason=reason, sessions=shown.sessions + usable)
    seconds = statistics.median(r.subject for r in head) if head else None
    return Judgement(case, Verdict.UNDECIDED, reason, seconds=seconds, sessions=usable)


def no_baseline(case: CaseId, head: Sequence[Reading], against: str) -> Judgement:
    """The judgement on a case without a baseline."""
    usable = usable_prior(head) or list(head)
    return Judgement(
        case,
        Verdict.NO_BASELINE,
        Reason("no-baseline", f"there is nothing to compare with: {against}"),
        seconds=statistics.median(r.subject for r in usable) if usable else None,
        comparator_seconds=median_comparator(usable) if usable else None,
        sessions=len(usable),
    )


# -- the screen --------------------------------------------------------------------------------------------------


def beyond_guard(e: Evidence, policy: Policy, move: float) -> bool:
    """Whether every session is beyond the guard by time and by ratio.

    Without a comparator, what the machine lost stands in for it.
    """
    limit = math.log1p(policy.guard)
    lift = 0.0 if e.ratio else max(0.0, move)
    views = [e.raw, e.ratio] if e.ratio else [e.raw]
    return all(c - lift > limit for v in views for c in v.changes)


def is_far(changes: Iterable[float], policy: Policy) -> bool:
    """Whether all of the changes are so large that no disturbance explains them; see docs/gate.md."""
    return all(change > math.log1p(policy.far) for change in changes)


def although_disturbed(
    stored: Stored, head: Sequence[Reading], learnt: Learnt, policy: Policy, needed: int, *, confirming: bool
) -> Evidence | None:
    """The evidence of all sessions, for a case that too few calm ones are left of and that is :func:`_far` slower.

    That is each new session against the slowest stored one, by time and as a ratio.  Without a comparator the load
    and the code cannot be told apart.
    """
    then = usable_prior(stored.readings)
    if len(head) < needed or not (paired(head) and paired(then)):
        return None
    changes = [x - max(log_estimates(then, w)) for w in (0.0, 1.0) for x in log_estimates(head, w)]
    return gathered(stored, head, learnt, policy, confirming=confirming) if is_far(changes, policy) else None


def judged_far(e: Evidence, policy: Policy, unit: str, *, before: int = 0) -> Judgement:
    """The judgement on a case that :func:`_far` holds of, in the screen and in the confirmation."""
    shown = e.ratio or e.raw
    text = (
        f"{interval(shown)} over {many(e.sessions, unit)}; most were disturbed, and yet each was more than "
        f"{1 + policy.far:g} times as slow as what it is compared with"
    )
    return judged(e, Verdict.SLOWER, Reason("far", text), by=shown, before=before)


def screened_as(e: Evidence, policy: Policy, anchor: Anchor, *, both: bool, unit: str) -> tuple[Judgement, str]:
    """The screen's judgement on a case, and ``slower`` or ``faster`` when it wants confirmation."""
    shown = e.ratio if both and e.ratio else e.main
    seen = f"{interval(shown)} over {many(e.sessions, unit)}"
    if beyond_guard(e, policy, anchor.move):
        return unconfirmed(e, shown, unit), "slower"
    if anchor.raw_moved and not e.ratio:
        reason = Reason(
            "anchor-shift",
            f"{seen}; without a comparator that cannot be told from the machine, {words(anchor.move)} as a whole",
            "give the case a comparator, or run base against head",
        )
        return judged(e, Verdict.UNDECIDED, reason, by=shown), ""
    for direction, mirrored in (("slower", False), ("faster", True)):
        claims = claims_of(e, policy, anchor.move, both=both, mirrored=mirrored)
        if any(c.p_value < policy.screen_level for c in claims):
            return unconfirmed(e, shown, unit), direction
        if any(c.alone and c.alone[0].p_slower(c.alone[1]) < policy.screen_level for c in claims):
            return judged(e, Verdict.UNDECIDED, moved_noticeably(e, unit), by=shown), ""
    if e.minimum_effect > policy.underpowered_from:
        return judged(e, Verdict.UNDECIDED, underpowered(e, policy, seen), by=shown), ""
    text = f"{seen}; {percent(e.minimum_effect)} slower would have been seen"
    return judged(e, Verdict.SAME, Reason("within", text), by=shown), ""


def unconfirmed(e: Evidence, shown: View, unit: str) -> Judgement:
    """The judgement on a suspect before its confirmation."""
    seen = f"{interval(shown)} over {many(e.sessions, unit)}"
    reason = Reason("to-confirm", f"{seen}: has to be confirmed", "let the confirmation run")
    return judged(e, Verdict.UNDECIDED, reason, by=shown)


def moved_noticeably(e: Evidence, unit: str) -> Reason:
    """Why a ratio that moved says nothing: the time did not move with it, so it was the comparator."""
    ratio = interval(e.ratio) if e.ratio else ""
    comparator = words(e.comparator.estimate) if e.comparator else ""
    return Reason(
        "anchor-shift",
        f"as a ratio {ratio}, by time alone {interval(e.raw)} over {many(e.sessions, unit)}: the comparator is "
        f"{comparator}",
        "record anew, or run base against head",
    )


def underpowered(e: Evidence, policy: Policy, seen: str) -> Reason:
    """Why the noise hides a change."""
    least = f"less than {percent(e.minimum_effect)}" if math.isfinite(e.minimum_effect) else "anything"
    return Reason(
        "underpowered",
        f"{seen}; {least} slower would go unseen, and {percent(policy.underpowered_from)} is the most that may",
        "record more sessions, or on a quieter machine",
    )


def screen(stored: Mapping[CaseId, Stored], head: Mapping[CaseId, Sequence[Reading]], policy: Policy) -> Screened:
    """Judge the first sessions of the head against what is stored.

    A case is handed on when the t-test of "at most ``policy.delta`` slower" fails at ``policy.screen_level``: median of
    the sessions against median of the stored ones, with the spread of the baseline.
    """
    learnt, needed = learn(stored, policy), fewest(policy.screen_sessions)
    evidence = {e.case: e for e in all_evidence(stored, head, learnt, policy)}
    anchor = anchor_of(evidence.values(), policy)
    judgements: dict[CaseId, Judgement] = {}
    wanted: dict[str, list[CaseId]] = {"slower": [], "faster": []}
    for case, some in head.items():
        if case in evidence:
            judgements[case], direction = screened_as(
                evidence[case], policy, anchor, both=anchor.reason is not None, unit="session"
            )
            if direction:
                wanted[direction].append(case)
        elif case not in stored or not stored[case].readings:
            judgements[case] = no_baseline(case, some, "no baseline is stored for this case")
        elif case not in learnt.at:
            judgements[case] = thin(case, stored[case], some, policy)
        elif far := although_disturbed(stored[case], some, learnt, policy, needed, confirming=False):
            judgements[case] = unconfirmed(far, far.ratio or far.raw, "session")
            wanted["slower"].append(case)
        else:
            judgements[case] = without(case, some, needed, "session")
    return Screened(
        judgements=judgements,
        slower=tuple(wanted["slower"]),
        faster=tuple(wanted["faster"]),
        anchor=anchor.reason,
        move=anchor.move,
        raw_moved=anchor.raw_moved,
        weights=learnt.weights,
        priors=learnt.priors,
        of_comparators=learnt.of_comparators,
    )


def thin(case: CaseId, stored: Stored, head: Sequence[Reading], policy: Policy) -> Judgement:
    """A case with too few sessions."""
    usable = len(usable_prior(stored.readings))
    reason = Reason(
        "thin-baseline",
        f"the baseline has {many(usable, 'usable session')}; it takes {policy.fewest_stored}",
        "record it anew, with more sessions",
    )
    return dataclasses.replace(
        no_baseline(case, head, ""),
        verdict=Verdict.UNDECIDED,
        reason=reason,
        stored_seconds=statistics.median(r.subject for r in stored.readings),
    )
