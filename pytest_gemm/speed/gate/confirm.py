"""Confirmation: what the screening suspects, measured again."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate.estimates import FEWEST_CASES, Reading, Screened, Stored, learn, usable_prior
from pytest_gemm.speed.gate.evidence import Claim, Evidence, View, claims_of, fewest, gathered
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.gate.screen import (
    although_disturbed,
    beyond_guard,
    judged,
    judged_far,
    moved_noticeably,
    underpowered,
    without,
)
from pytest_gemm.speed.gate.sentences import interval, many, percent, words

# -- the confirmation --------------------------------------------------------------------------------------------


def _holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses fall by S. Holm's procedure (1979): the smallest against level/m, the next level/(m-1) ..."""
    falls = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


def _explained(e: Evidence, policy: Policy, *, mirrored: bool) -> bool:
    """Whether this case's comparator moved so that the ratio looks slower (or faster): beyond delta, at 5%."""
    if e.comparator is None or e.weight == 0:
        return False
    view = e.comparator if mirrored else e.comparator.mirrored()
    limit = math.log1p(policy.delta)
    return view.estimate > limit and view.p_slower(0.0) < 0.05


def _confirmed(
    evidence: Sequence[Evidence],
    screened: Screened,
    policy: Policy,
    unit: str,
    *,
    mirrored: bool,
    same_machine: bool,
    level: float,
    last: bool,
) -> dict[CaseId, Judgement]:
    """The judgements on one direction's cases, by the confirmation alone.

    Args:
        evidence: of the cases to be confirmed that have enough sessions.
        screened: what the screen said.
        policy: the levels and limits.
        unit: ``session`` or ``pair``.
        mirrored: look for faster.
        same_machine: base and head alternate on it, so that no case is as slow as the machine became.
        level: of this look.
        last: no further sessions follow; otherwise a case that is not clear yet keeps the screen's judgement.
    """
    moves = [e.comparator.estimate for e in evidence if e.comparator]
    now = statistics.median(moves) if len(moves) >= FEWEST_CASES else 0.0
    # A few pairs of a restless machine look like a shift; only what the confirmation itself sees counts there.
    earlier = 0.0 if same_machine else screened.move
    shifted = max(abs(now), abs(earlier)) > math.log1p(policy.anchor_shift)
    both = {e.case: shifted or _explained(e, policy, mirrored=mirrored) for e in evidence}
    move = 0.0 if same_machine else min(earlier, now) if mirrored else max(earlier, now)
    claims = [(e, c) for e in evidence for c in claims_of(e, policy, move, both=both[e.case], mirrored=mirrored)]
    fallen: dict[CaseId, list[Claim]] = {}
    for (e, c), falls in zip(claims, _holm([c.p_value for _, c in claims], level), strict=True):
        if falls and c.recurs:
            fallen.setdefault(e.case, []).append(c)
    # What would have fallen if the anchor had stayed: the same procedure on the figure alone.
    alone = [(e, *(c.alone or c.needed[0])) for e, c in claims]
    fallen_alone = {
        e.case
        for (e, view, limit), falls in zip(alone, _holm([v.p_slower(x) for _, v, x in alone], level), strict=True)
        if falls and view.recurs(limit)
    }
    found: dict[CaseId, Judgement] = {}
    for e in evidence:
        shown = e.ratio if both[e.case] and e.ratio else e.main
        seen = f"{interval(shown)} over {many(e.sessions, f'further {unit}')}"
        if fallen.get(e.case):
            verdict, reason = _fallen(e, fallen[e.case], policy, seen, unit, mirrored=mirrored)
        elif not mirrored and beyond_guard(e, policy, move):
            verdict = Verdict.SLOWER
            text = f"{seen}, beyond the guard of {percent(policy.guard)} in each, whatever the noise"
            reason = Reason("guard", text)
        elif not last and _is_open(shown.mirrored() if mirrored else shown):
            continue
        elif both[e.case] and e.case in fallen_alone:
            verdict, reason = Verdict.UNDECIDED, moved_noticeably(e, unit)
        else:
            verdict, reason = _not_confirmed(e, shown, policy, seen, mirrored=mirrored)
        before = screened.judgements[e.case].sessions
        found[e.case] = judged(e, verdict, reason, by=shown, before=before)
    return found


# A change that is not above zero at this level will not be found beyond the limit by the last look either.
_HOPELESS: Final = 0.25


def _is_open(view: View) -> bool:
    """Whether further sessions may still show the change."""
    return view.p_slower(0.0) < _HOPELESS


def _fallen(
    e: Evidence, claims: Sequence[Claim], policy: Policy, seen: str, unit: str, *, mirrored: bool
) -> tuple[Verdict, Reason]:
    """Slower, faster, or drifted."""
    first = claims[0]
    view, limit = first.needed[0]
    beyond = sum(c > limit for c in view.changes)
    often = f"in {beyond} of {many(len(view.changes), unit)} (p {first.p_value:.1g})"
    if first.code == "drift":
        total = words(view.estimate + math.log1p(policy.drift) - limit)
        text = f"{total} than in the first epoch, beyond the {percent(policy.drift)} of drift {often}; {seen}"
        return Verdict.SLOWER, Reason("drift", text)
    text = f"{seen}, by more than {percent(policy.delta)} {often}"
    if len(first.needed) > 1:
        text += f"; by time alone {interval(e.raw)}"
    if mirrored:
        return Verdict.FASTER, Reason("faster-confirmed", text, "record it, so that it is kept")
    return Verdict.SLOWER, Reason("slower-confirmed", text)


def _not_confirmed(e: Evidence, shown: View, policy: Policy, seen: str, *, mirrored: bool) -> tuple[Verdict, Reason]:
    """Same when the suspicion went away, undecided when it did not."""
    if e.minimum_effect > policy.underpowered_from:
        return Verdict.UNDECIDED, underpowered(e, policy, seen)
    view = shown.mirrored() if mirrored else shown
    limit = math.log1p(policy.delta)
    if view.estimate > limit and view.interval()[0] > 0:
        text = f"{seen}: it may be more than the tolerated {percent(policy.delta)}, but not surely"
        return Verdict.UNDECIDED, Reason("not-confirmed", text, "run again with more sessions")
    return Verdict.SAME, Reason("not-confirmed", f"{seen}: what the screen saw did not recur")


def conclude(
    screened: Screened,
    gather: Callable[[CaseId], Evidence | Judgement],
    policy: Policy,
    unit: str,
    *,
    same_machine: bool,
    level: float,
    last: bool,
) -> dict[CaseId, Judgement]:
    """All judgements: those of the screen, replaced by the confirmation's for the cases that ``gather`` knows."""
    judgements = dict(screened.judgements)
    for cases, mirrored in ((screened.slower, False), (screened.faster, True)):
        known = []
        for case in cases:
            one = gather(case)
            if isinstance(one, Judgement):
                judgements[case] = one
            else:
                known.append(one)
        judgements.update(
            _confirmed(
                known,
                screened,
                policy,
                unit,
                mirrored=mirrored,
                same_machine=same_machine,
                level=level,
                last=last,
            )
        )
    return judgements


def by_looks(
    screened: Screened,
    policy: Policy,
    sessions: int,
    look: Callable[[tuple[CaseId, ...], int, Screened, bool], dict[CaseId, Judgement]],
) -> dict[CaseId, Judgement]:
    """The judgements of a confirmation that is looked at as often as :meth:`Policy.looks` says.

    Args:
        screened: what the screen said.
        policy: of the gate.
        sessions: of the whole confirmation, or pairs.
        look: takes the cases that are open, after how many sessions, the screen's word on these cases, and whether it
            is the last look; measures what is missing and returns what :func:`confirm` or :func:`confirm_pair` says.
    """
    judgements = dict(screened.judgements)
    counts = policy.looks(sessions)
    for count in counts:
        if not screened.wanted:
            break
        last = count == counts[-1]
        found = look(screened.wanted, count, screened, last)
        judgements.update((case, found[case]) for case in screened.wanted)
        still = {case for case in screened.wanted if found[case] == screened.judgements[case]}
        screened = dataclasses.replace(
            screened,
            slower=tuple(case for case in screened.slower if case in still),
            faster=tuple(case for case in screened.faster if case in still),
        )
    return judgements


def confirm(
    stored: Mapping[CaseId, Stored],
    head: Mapping[CaseId, Sequence[Reading]],
    screened: Screened,
    policy: Policy,
    *,
    last: bool = True,
) -> dict[CaseId, Judgement]:
    """Judge all cases: the wanted ones by ``head``, the sessions of the confirmation alone, the others as screened.

    Slower is what the t-test says over all confirmed cases (Holm, ``policy.confirm_level`` divided by the looks) *and*
    the sessions repeat, but for a few.  Faster by the mirrored rule.  A wanted case that ``head`` lacks stays to be
    confirmed, and unless this is the last look so does one that further sessions may decide.
    """
    learnt = learn(stored, policy, screened)
    looks = policy.looks(policy.confirm_sessions)

    def gather(case: CaseId) -> Evidence | Judgement:
        if case not in head:
            return screened.judgements[case]
        usable, needed = usable_prior(head[case]), fewest(looks[-1] if last else looks[0])
        if len(usable) < needed:
            shown = screened.judgements[case]
            if far := although_disturbed(stored[case], head[case], learnt, policy, needed, confirming=True):
                return judged_far(far, policy, "further session", before=shown.sessions)
            return without(case, head[case], needed, "further session", shown=shown)
        return gathered(stored[case], usable, learnt, policy, confirming=True)

    level = policy.confirm_level / len(looks)
    return conclude(screened, gather, policy, "session", same_machine=False, level=level, last=last)
