"""The gate against stored baselines: sessions of the head, each against all stored ones."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, sentences
from pytest_gemm.speed.gate.decide import Gathered
from pytest_gemm.speed.gate.estimates import (
    Learnt,
    Location,
    Prior,
    Reading,
    Screened,
    Stored,
    disturbed_share,
    learn,
    location,
    log_estimates,
    of_comparator,
    paired,
    pooled,
    undisturbed,
)
from pytest_gemm.speed.gate.evidence import Evidence, View, fewest, is_far, median_comparator, smallest
from pytest_gemm.speed.gate.policy import Policy


def screen(stored: Mapping[CaseId, Stored], head: Mapping[CaseId, Sequence[Reading]], policy: Policy) -> Screened:
    """Judge the first sessions of the head against what is stored.

    The estimate is the median of the sessions against that of the stored ones, with the spread of the baseline.
    """
    learnt = learn(stored, policy)
    gathered = {case: _screening(case, some, stored, learnt, policy) for case, some in head.items()}
    anchor = decide.anchor_of((e for e in gathered.values() if isinstance(e, Evidence) and not e.is_far), policy)
    found = decide.screened(gathered, policy, anchor, "session")
    return dataclasses.replace(
        found, weights=learnt.weights, priors=learnt.priors, of_comparators=learnt.of_comparators
    )


def _screening(
    case: CaseId, some: Sequence[Reading], stored: Mapping[CaseId, Stored], learnt: Learnt, policy: Policy
) -> Gathered:
    if case not in stored or not stored[case].readings:
        return decide.no_baseline(case, some, "no baseline is stored for this case")
    if case not in learnt.at:
        return _thin(case, stored[case], some, policy)
    needed = fewest(policy.screen_sessions)
    return _gathered(stored[case], some, learnt, policy, needed, confirming=False) or decide.without(
        case, some, needed, "session"
    )


def confirm(
    stored: Mapping[CaseId, Stored],
    head: Mapping[CaseId, Sequence[Reading]],
    screened: Screened,
    policy: Policy,
    *,
    last: bool = True,
) -> dict[CaseId, Judgement]:
    """Judge all cases: the wanted ones by ``head``, the sessions of the confirmation alone, the others as screened.

    A wanted case that ``head`` lacks stays to be confirmed.
    """
    learnt = learn(stored, policy, screened)
    looks = policy.looks(policy.confirm_sessions)
    needed = fewest(looks[-1] if last else looks[0])

    def gather(case: CaseId) -> Gathered:
        shown = screened.judgements[case]
        if case not in head:
            return shown
        return _gathered(stored[case], head[case], learnt, policy, needed, confirming=True) or decide.without(
            case, head[case], needed, "further session", shown=shown
        )

    return decide.confirmed(screened, gather, policy, "session", policy.confirm_sessions, last=last)


def anchor_shift(
    stored: Mapping[CaseId, Stored], head: Mapping[CaseId, Sequence[Reading]], policy: Policy
) -> Reason | None:
    """Whether the comparators as a whole moved since the baseline: one fact about the run, not one a case."""
    return screen(stored, head, policy).anchor


def minimum_effect(stored: Mapping[CaseId, Stored], policy: Policy) -> dict[CaseId, float]:
    """The smallest slow-down of each case that screen and confirmation find with a power of 95%, as a fraction.

    A case with fewer usable sessions than ``policy.fewest_stored`` is left out.
    """
    learnt = learn(stored, policy)
    return {case: _minimum_effect(case, learnt, policy) for case in learnt.at}


def _minimum_effect(case: CaseId, learnt: Learnt, policy: Policy) -> float:
    weight = learnt.weights[case]
    then = learnt.at[case][weight]
    variance, df = pooled(learnt.priors[weight], then)
    scale = math.sqrt(max(variance, policy.floor**2))
    return smallest(scale, df, then.sessions, policy.screen_sessions, policy.confirm_sessions, policy)


def _thin(case: CaseId, stored: Stored, head: Sequence[Reading], policy: Policy) -> Judgement:
    """The judgement on a case whose baseline has too few sessions."""
    return dataclasses.replace(
        decide.no_baseline(case, head, ""),
        verdict=Verdict.UNDECIDED,
        reason=sentences.thin_baseline(len(undisturbed(stored.readings)), policy),
        stored_seconds=statistics.median(r.subject for r in stored.readings),
    )


# -- evidence ----------------------------------------------------------------------------------------------------


def _gathered(
    stored: Stored, head: Sequence[Reading], learnt: Learnt, policy: Policy, needed: int, *, confirming: bool
) -> Evidence | None:
    """The evidence on a case; ``None`` with too few undisturbed sessions.

    A case is decided although its sessions are disturbed when each new session is far beyond the slowest stored one,
    by time and as a ratio.  Without a comparator the load and the code cannot be told apart.
    """
    usable = undisturbed(head)
    if len(usable) >= needed:
        return _evidence(stored, usable, learnt, policy, confirming=confirming)
    then = undisturbed(stored.readings)
    if len(head) < needed or not (paired(head) and paired(then)):
        return None
    changes = [x - max(log_estimates(then, w)) for w in (0.0, 1.0) for x in log_estimates(head, w)]
    if not is_far(changes, policy):
        return None
    return dataclasses.replace(_evidence(stored, head, learnt, policy, confirming=confirming), is_far=True)


def _evidence(stored: Stored, head: Sequence[Reading], learnt: Learnt, policy: Policy, *, confirming: bool) -> Evidence:
    """The evidence on a case that has enough of everything."""
    case, then = stored.case, learnt.at[stored.case]
    known = undisturbed(stored.readings)
    has_comparator = paired(head) and 1.0 in then
    weight = learnt.weights[case] if has_comparator else 0.0

    def view(w: float) -> View:
        return _against_stored(log_estimates(head, w), then[w], learnt.priors[w], policy, confirming=confirming)

    first = stored.first
    since_first = {}
    if first is not None:
        since_first = {w: then[w].centre - log_estimates([first], w)[0] for w in then if not w or first.comparator}
    comparator = None
    if has_comparator:
        comparator = _against_stored(
            of_comparator(head),
            learnt.comparator[case],
            learnt.of_comparators,
            policy,
            confirming=confirming,
        )
    return Evidence(
        case=case,
        weight=weight,
        main=view(weight),
        raw=view(0.0),
        ratio=view(1.0) if has_comparator else None,
        comparator=comparator,
        since_first=since_first,
        sessions=len(head),
        seconds=statistics.median(r.subject for r in head),
        comparator_seconds=median_comparator(head),
        stored_seconds=statistics.median(r.subject for r in known),
        minimum_effect=_minimum_effect(case, learnt, policy),
        note=stored.note,
    )


def _against_stored(now: Sequence[float], then: Location, prior: Prior, policy: Policy, *, confirming: bool) -> View:
    """The change of the figures ``now`` against the stored ones.

    The screen knows the spread from the baseline alone.  The confirmation pools its own with it, and takes its own
    (moderated) if that is larger: a head that became noisy must not be judged by the calm of the baseline.
    """
    head = location(now, policy.floor)
    if confirming and head.df:
        variance, df = pooled(prior, then, head)
        variance = max(variance, pooled(prior, head)[0])
    else:
        variance, df = pooled(prior, then)
    error = math.sqrt(
        max(variance, policy.floor**2) * (disturbed_share(head.sessions) + disturbed_share(then.sessions))
    )
    return View(head.centre - then.centre, error, df, tuple(x - then.centre for x in now))
