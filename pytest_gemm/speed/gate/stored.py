"""The gate against stored baselines: sessions of the head, each against all stored ones."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Verdict
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, estimates
from pytest_gemm.speed.gate.decide import Evidence, Gathered
from pytest_gemm.speed.gate.estimates import Learnt, Reading, Screened, Spreads, Stored, logs, paired, undisturbed
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.gate.sentences import many, reason


def screen(stored: Mapping[CaseId, Stored], head: Mapping[CaseId, Sequence[Reading]], policy: Policy) -> Screened:
    """Judge the first sessions of the head against what is stored.

    The estimate is the median of the sessions against that of the stored ones, with the spread of the baseline.
    """
    learnt = estimates.learn(_spreads(stored, policy))
    needed = estimates.fewest(policy.screen_sessions)

    def gather(case: CaseId, some: Sequence[Reading]) -> Gathered:
        if case not in stored or not stored[case].readings:
            return decide.no_baseline(case, some, "no baseline is stored for this case")
        if case not in learnt.at:
            return _thin(case, stored[case], some, policy)
        found = _gathered(stored[case], some, learnt, policy, needed, confirming=False)
        return found or decide.without(case, some, needed, "session")

    gathered = {case: gather(case, some) for case, some in head.items()}
    anchor = decide.anchor_of((e for e in gathered.values() if isinstance(e, Evidence) and not e.is_far), policy)
    return decide.screened(gathered, policy, "session", learnt, anchor)


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
    wanted = {case: stored[case] for case in screened.wanted}
    learnt = Learnt(_spreads(wanted, policy), screened.weights, screened.priors)

    def gather(case: CaseId, needed: int) -> Evidence | Sequence[Reading] | None:
        some = head.get(case)
        return some and (_gathered(stored[case], some, learnt, policy, needed, confirming=True) or some)

    return decide.confirmed(screened, gather, policy, "session", last=last)


def minimum_effect(stored: Mapping[CaseId, Stored], policy: Policy) -> dict[CaseId, float]:
    """The smallest slow-down of each case that screen and confirmation find with a power of 95%, as a fraction.

    A case with fewer usable sessions than ``policy.fewest_stored`` is left out.
    """
    learnt = estimates.learn(_spreads(stored, policy))
    return {
        case: estimates.smallest(by[weight], learnt.priors[weight], by[weight].sessions, policy.sessions, policy)
        for case, by in learnt.at.items()
        for weight in [learnt.weights[case]]
    }


def _spreads(stored: Mapping[CaseId, Stored], policy: Policy) -> Spreads:
    """The spreads of the cases that have enough usable sessions."""
    usable = {case: undisturbed(one.readings) for case, one in stored.items()}
    return {
        case: estimates.spreads(functools.partial(logs, some), policy.floor, has_comparator=paired(some))
        for case, some in usable.items()
        if len(some) >= policy.fewest_stored
    }


def _thin(case: CaseId, stored: Stored, head: Sequence[Reading], policy: Policy) -> Judgement:
    """The judgement on a case whose baseline has too few sessions."""
    usable = len(undisturbed(stored.readings))
    return dataclasses.replace(
        decide.no_baseline(case, head, ""),
        verdict=Verdict.UNDECIDED,
        reason=reason("thin-baseline", usable=many(usable, "usable session"), needed=policy.fewest_stored),
        stored_seconds=statistics.median(r.subject for r in stored.readings),
    )


def _gathered(
    stored: Stored, head: Sequence[Reading], learnt: Learnt, policy: Policy, needed: int, *, confirming: bool
) -> Evidence | None:
    """The evidence on a case; ``None`` with too few undisturbed sessions.

    A case is decided although its sessions are disturbed when each new session is far beyond the slowest stored one,
    by time and as a ratio.  Without a comparator the load and the code cannot be told apart.
    """
    case, base, usable = stored.case, undisturbed(stored.readings), undisturbed(head)
    is_far = len(usable) < needed
    if is_far:
        usable = list(head)
        if len(head) < needed or not (paired(head) and paired(base)):
            return None
        changes = [x - max(logs(base, w)) for w in (0.0, 1.0) for x in logs(head, w)]
        if not estimates.is_far(changes, policy):
            return None
    then, first = learnt.at[case], stored.first
    since_first = {}
    if first is not None:
        known = (w for w in then if w is not None and (not w or first.comparator))
        since_first = {w: then[w].centre - logs([first], w)[0] for w in known}
    return Evidence(
        case,
        base,
        usable,
        functools.partial(logs, usable),
        then,
        learnt,
        policy,
        own_spread=confirming,
        has_comparator=paired(usable) and 1.0 in then,
        since_first=since_first,
        note=stored.note,
        is_far=is_far,
    )
