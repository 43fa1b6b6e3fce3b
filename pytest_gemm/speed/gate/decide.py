"""The decision: from evidence to verdicts, by screen and confirmation, the same for both designs.

``stored`` (against baselines) and ``pairs`` (base against head) reduce sessions to :class:`Evidence`; from there on
there is one rule.  No clock, no file, no torch: what is decided here can be tabled and replayed.  ``docs/gate.md``
derives the rules and shows what they are worth; ``calibrate`` repeats that study on a machine's own sessions.

Inside, all changes are differences of natural logarithms; :class:`Policy` and :class:`Judgement` use fractions (0.02 is
2%).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Reason, Verdict
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import sentences
from pytest_gemm.speed.gate.estimates import FEWEST_CASES, Reading, Screened, undisturbed
from pytest_gemm.speed.gate.evidence import Claim, Evidence, View, claims_of, median_comparator
from pytest_gemm.speed.gate.policy import Policy

Gathered: TypeAlias = Evidence | Judgement
"""The evidence on a case, or the judgement on a case that has too little of it."""

# A change that is not above zero at this level will not be found beyond the limit by the last look either.
_HOPELESS: Final = 0.25


def judged(e: Evidence, verdict: Verdict, reason: Reason, shown: View, *, before: int = 0) -> Judgement:
    """The judgement with all its fields; ``before`` counts the screen's sessions."""
    weight = 0.0 if shown is e.raw else 1.0 if shown is e.ratio else e.weight
    low, high = shown.interval()
    if e.note:
        reason = dataclasses.replace(reason, text=f"{reason.text}; {e.note}")
    return Judgement(
        case=e.case,
        verdict=verdict,
        reason=reason,
        change=math.expm1(shown.estimate),
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
    """The judgement on a case with too few usable sessions; ``shown`` is the screen's judgement."""
    lost = [r.disturbed for r in head if r.disturbed]
    usable = len(head) - len(lost)
    reason = sentences.too_few(lost, len(head) if lost else usable, needed, unit)
    if shown:
        return dataclasses.replace(shown, verdict=Verdict.UNDECIDED, reason=reason, sessions=shown.sessions + usable)
    seconds = statistics.median(r.subject for r in head) if head else None
    return Judgement(case, Verdict.UNDECIDED, reason, seconds=seconds, sessions=usable)


def no_baseline(case: CaseId, head: Sequence[Reading], against: str) -> Judgement:
    """The judgement on a case without a baseline."""
    usable = undisturbed(head) or list(head)
    return Judgement(
        case,
        Verdict.NO_BASELINE,
        sentences.without_baseline(against),
        seconds=statistics.median(r.subject for r in usable) if usable else None,
        comparator_seconds=median_comparator(usable) if usable else None,
        sessions=len(usable),
    )


def is_beyond_guard(e: Evidence, policy: Policy, move: float) -> bool:
    """Whether every session is beyond the guard by time and by ratio.

    Without a comparator, the slow-down of the machine is added to the limit.
    """
    limit = math.log1p(policy.guard)
    lift = 0.0 if e.ratio else max(0.0, move)
    views = [e.raw, e.ratio] if e.ratio else [e.raw]
    return all(c - lift > limit for v in views for c in v.changes)


# -- the anchor --------------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """How the machine, or what stands for it, moved."""

    reason: Reason | None
    move: float
    raw_moved: bool


def anchor_of(evidence: Iterable[Evidence], policy: Policy) -> Anchor:
    """Whether the comparators' median case moved, and whether the cases without one moved alike.

    By the estimate alone, not by its significance: to take a calm anchor for a moved one costs power, to take a
    moved one for calm makes a run red for nothing.
    """
    evidence = list(evidence)
    moves = [e.comparator.estimate for e in evidence if e.comparator]
    raw = [e.raw.estimate for e in evidence if not e.comparator]
    limit = math.log1p(policy.anchor_shift)
    middle = statistics.median(raw) if raw else 0.0
    if moves:
        move = statistics.median(moves)
        if abs(move) <= limit:
            return Anchor(None, move, raw_moved=False)
        along = sum(m * move > 0 for m in moves)
        reason = sentences.comparators_moved(move, along, len(moves))
        return Anchor(reason, move, raw_moved=middle * move > 0 and abs(middle - move) <= limit)
    if len(raw) >= FEWEST_CASES and abs(middle) > limit:
        alike = sum(abs(m - middle) <= limit for m in raw)
        if alike >= 0.75 * len(raw):
            reason = sentences.all_moved(middle, alike, len(raw))
            return Anchor(reason, middle, raw_moved=True)
    return Anchor(None, 0.0, raw_moved=False)


# -- the screen --------------------------------------------------------------------------------------------------


def screened(gathered: Mapping[CaseId, Gathered], policy: Policy, anchor: Anchor, unit: str) -> Screened:
    """The screen's judgements, and the cases that have to be confirmed.

    A case is handed on when the t-test of "at most ``policy.delta`` slower" fails at ``policy.screen_level``.

    Args:
        gathered: by case.
        policy: the levels and limits.
        anchor: how the machine moved.
        unit: ``session`` or ``pair``.
    """
    judgements: dict[CaseId, Judgement] = {}
    wanted: dict[str, list[CaseId]] = {"slower": [], "faster": [], "": []}
    for case, one in gathered.items():
        direction = ""
        if isinstance(one, Judgement):
            judgements[case] = one
        else:
            judgements[case], direction = _screened(one, policy, anchor, unit)
        wanted[direction].append(case)
    return Screened(
        judgements, tuple(wanted["slower"]), tuple(wanted["faster"]), anchor.reason, anchor.move, anchor.raw_moved
    )


def _screened(e: Evidence, policy: Policy, anchor: Anchor, unit: str) -> tuple[Judgement, str]:
    """The screen's judgement on a case, and ``slower`` or ``faster`` when it has to be confirmed."""
    both = anchor.reason is not None
    shown = e.ratio or e.raw if e.is_far else e.ratio if both and e.ratio else e.main
    told = sentences.seen(shown, e.sessions, unit)

    def undecided(reason: Reason) -> Judgement:
        return judged(e, Verdict.UNDECIDED, reason, shown)

    if e.is_far or is_beyond_guard(e, policy, anchor.move):
        return undecided(sentences.to_confirm(told)), "slower"
    if anchor.raw_moved and not e.ratio:
        return undecided(sentences.without_comparator(told, anchor.move)), ""
    for direction, mirrored in (("slower", False), ("faster", True)):
        claims = claims_of(e, policy, anchor.move, both=both, mirrored=mirrored)
        if any(c.p_value < policy.screen_level for c in claims):
            return undecided(sentences.to_confirm(told)), direction
        if any(c.alone and c.alone[0].p_slower(c.alone[1]) < policy.screen_level for c in claims):
            return undecided(sentences.comparator_moved(e, unit)), ""
    if e.minimum_effect > policy.underpowered_from:
        return undecided(sentences.underpowered(e, policy, told)), ""
    return judged(e, Verdict.SAME, sentences.within(e, told), shown), ""


# -- the confirmation --------------------------------------------------------------------------------------------


def confirmed(
    screened: Screened, gather: Callable[[CaseId], Gathered], policy: Policy, unit: str, count: int, *, last: bool
) -> dict[CaseId, Judgement]:
    """All judgements: those of the screen, replaced by the confirmation's for the cases that ``gather`` has.

    Slower is what the t-test says over all confirmed cases (Holm, ``policy.confirm_level`` divided by the looks) *and*
    the sessions repeat, but for a few.  Faster by the mirrored rule.  A case that is not clear yet keeps the screen's
    judgement unless this is the last look.

    Args:
        screened: what the screen said.
        gather: the evidence on a case that has to be confirmed, from the sessions of the confirmation alone.
        policy: the levels and limits.
        unit: ``session`` or ``pair``; base and head of a pair alternate on one machine.
        count: sessions or pairs of the whole confirmation.
        last: no further look follows.
    """
    judgements = dict(screened.judgements)
    for cases, mirrored in ((screened.slower, False), (screened.faster, True)):
        known = []
        for case in cases:
            one = gather(case)
            if isinstance(one, Judgement):
                judgements[case] = one
            elif one.is_far:
                shown = one.ratio or one.raw
                reason = sentences.far(policy, sentences.seen(shown, one.sessions, f"further {unit}"))
                before = screened.judgements[case].sessions
                judgements[case] = judged(one, Verdict.SLOWER, reason, shown, before=before)
            else:
                known.append(one)
        look = _Look(screened, policy, unit, policy.confirm_level / len(policy.looks(count)), mirrored, last)
        judgements.update(look.decide(known))
    return judgements


@dataclasses.dataclass(frozen=True)
class _Look:
    """One look at the cases of one direction.

    Attributes:
        screened, policy, unit, last: as in :func:`confirmed`.
        level: of significance, of this look.
        mirrored: look for faster.
    """

    screened: Screened
    policy: Policy
    unit: str
    level: float
    mirrored: bool
    last: bool

    def decide(self, evidence: Sequence[Evidence]) -> dict[CaseId, Judgement]:
        """The judgements on those of the cases that are clear."""
        same_machine = self.unit == "pair"
        moves = [e.comparator.estimate for e in evidence if e.comparator]
        now = statistics.median(moves) if len(moves) >= FEWEST_CASES else 0.0
        # A few pairs on a noisy machine look like a shift; only what the confirmation itself measures counts there.
        earlier = 0.0 if same_machine else self.screened.move
        shifted = max(abs(now), abs(earlier)) > math.log1p(self.policy.anchor_shift)
        both = {e.case: shifted or self._is_explained(e) for e in evidence}
        move = 0.0 if same_machine else min(earlier, now) if self.mirrored else max(earlier, now)
        claims = [
            (e, c) for e in evidence for c in claims_of(e, self.policy, move, both=both[e.case], mirrored=self.mirrored)
        ]
        fallen: dict[CaseId, list[Claim]] = {}
        for (e, c), falls in zip(claims, _holm([c.p_value for _, c in claims], self.level), strict=True):
            if falls and c.recurs:
                fallen.setdefault(e.case, []).append(c)
        # What would have fallen if the anchor had stayed: the same procedure on one estimate alone.
        alone = [(e, *(c.alone or c.needed[0])) for e, c in claims]
        falls_alone = _holm([view.p_slower(limit) for _, view, limit in alone], self.level)
        fallen_alone = {
            e.case for (e, view, limit), falls in zip(alone, falls_alone, strict=True) if falls and view.recurs(limit)
        }
        found = {}
        for e in evidence:
            moved = both[e.case] and e.case in fallen_alone
            shown = e.ratio if both[e.case] and e.ratio else e.main
            decided = self._verdict(e, shown, fallen.get(e.case, ()), move, comparator_moved=moved)
            if decided is not None:
                found[e.case] = judged(e, *decided, shown, before=self.screened.judgements[e.case].sessions)
        return found

    def _is_explained(self, e: Evidence) -> bool:
        """Whether this case's comparator moved so that the ratio looks slower (or faster): beyond delta, at 5%."""
        if e.comparator is None or e.weight == 0:
            return False
        view = e.comparator if self.mirrored else e.comparator.mirrored()
        return view.estimate > math.log1p(self.policy.delta) and view.p_slower(0.0) < 0.05

    def _verdict(
        self, e: Evidence, shown: View, fallen: Sequence[Claim], move: float, *, comparator_moved: bool
    ) -> tuple[Verdict, Reason] | None:
        """The verdict on a case; ``None`` where further sessions may decide it."""
        policy, unit = self.policy, self.unit
        view = shown.mirrored() if self.mirrored else shown
        told = sentences.seen(shown, e.sessions, f"further {unit}")
        if fallen:
            verdict = Verdict.FASTER if self.mirrored and fallen[0].code != "drift" else Verdict.SLOWER
            return verdict, sentences.confirmed(e, fallen[0], policy, told, unit, mirrored=self.mirrored)
        if not self.mirrored and is_beyond_guard(e, policy, move):
            return Verdict.SLOWER, sentences.beyond_guard(policy, told)
        if not self.last and view.p_slower(0.0) < _HOPELESS:
            return None
        if comparator_moved:
            return Verdict.UNDECIDED, sentences.comparator_moved(e, unit)
        if e.minimum_effect > policy.underpowered_from:
            return Verdict.UNDECIDED, sentences.underpowered(e, policy, told)
        is_open = view.estimate > math.log1p(policy.delta) and view.interval()[0] > 0
        reason = sentences.not_confirmed(policy, told, is_open=is_open)
        return (Verdict.UNDECIDED if is_open else Verdict.SAME), reason


def _holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses fall by S. Holm's procedure (1979): the smallest against level/m, the next level/(m-1) ..."""
    falls = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


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
            is the last look; measures what is missing and returns the judgements.
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
