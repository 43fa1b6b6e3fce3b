"""The decision: from evidence to verdicts, by screen and confirmation, the same for both designs.

``design`` reduces sessions to :class:`Evidence`, against baselines or base against head; from there on there is one
rule.  No clock, no file, no torch: what is decided here can be tabled and replayed.  ``docs/explanation/gate.md``
derives the rules and shows what they are worth; ``tests/studies/calibrate.py`` repeats that study on a machine's own
sessions.

Inside, all changes are differences of natural logarithms; :class:`Policy` and :class:`Judgement` use fractions (0.02 is
2%).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Verdict
from pytest_gemm.core.units import percent, plural
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import estimates
from pytest_gemm.speed.gate.estimates import Learnt, Location, Reading, Screened, Share, View
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.gate.sentences import reason, words

# A change that is not above zero at this level will not be found beyond the limit by the last look either.
_HOPELESS: Final = 0.25


# -- what is known of a case -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that a verdict on one case rests on: its sessions, and those that they are compared with.

    Attributes:
        case: which.
        base: the stored sessions, or the base's sessions of the pairs.
        head: the new sessions, or the head's of the pairs.
        values: logarithms of the head's estimates by share, or the differences within the pairs.
        then: location of the stored sessions by share; empty for pairs.
        learnt: from all cases.
        policy: of the gate.
        own_spread: whether the spread of the new sessions counts; in the screen only the baseline's does.
        has_comparator: whether all sessions timed one.
        differs: head's comparator is not base's, so that it is not taken off.
        since_first: how much slower the baseline is than the first epoch, by weight; empty without one.
        note: what every sentence ends with.
        is_far: too few sessions were undisturbed, and each is far beyond what it is compared with.
        move: by how much the machine became slower; what it gained hides a slow-down by time.
        both: anchor or comparator moved, so that a slow-down has to show by time and as a ratio.
    """

    case: CaseId
    base: Sequence[Reading]
    head: Sequence[Reading]
    values: Callable[[Share], Sequence[float]]
    then: Mapping[Share, Location]
    learnt: Learnt
    policy: Policy
    own_spread: bool
    has_comparator: bool
    differs: bool = False
    since_first: Mapping[float, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    is_far: bool = False
    move: float = 0.0
    both: bool = False

    def _view(self, share: Share) -> View:
        prior = self.learnt.priors[share]
        return estimates.change(
            self.values(share), self.then.get(share), prior, self.policy, own_spread=self.own_spread
        )

    @property
    def weight(self) -> float:
        """Share of the comparator that is taken off."""
        return self.learnt.weights[self.case] if self.has_comparator and not self.differs else 0.0

    @functools.cached_property
    def main(self) -> View:
        """The change by the chosen estimate."""
        return self._view(self.weight)

    @functools.cached_property
    def raw(self) -> View:
        """The change by time alone."""
        return self._view(0.0)

    @functools.cached_property
    def ratio(self) -> View | None:
        """The change by the ratio alone; ``None`` without a comparator."""
        return self._view(1.0) if self.has_comparator and not self.differs else None

    @functools.cached_property
    def comparator(self) -> View | None:
        """The change of the comparator; ``None`` without one."""
        return self._view(None) if self.has_comparator else None

    @functools.cached_property
    def minimum_effect(self) -> float:
        """The smallest slow-down that this policy sees, as a fraction."""
        weight = self.learnt.weights[self.case] if self.then else self.weight
        if not self.ratio:
            return self._smallest(weight)
        stored = len(self.base) if self.then else 0
        shares = (0.0, 1.0) if self.both else estimates.confirmed_by(weight, self.learnt, stored, self.policy)
        return max(map(self._smallest, shares))

    def _smallest(self, share: float) -> float:
        spread = self.then.get(share) or estimates.location(self.values(share), self.policy.floor)
        least = estimates.smallest(spread, share, self.learnt, self.policy, is_paired=not self.then)
        return (1 + least) * math.exp((1 - share) * max(0.0, -self.move)) - 1

    def seen(self, view: View, unit: str) -> str:
        """A change with the sessions that it rests on."""
        return f"{view} over {plural(len(self.head), unit)}"


Gathered: TypeAlias = "Evidence | Judgement | Sequence[Reading]"


class Claim(NamedTuple):
    """One null hypothesis of a case: the estimates that all have to reject it, with their limits.

    ``alone`` is the estimate that would have sufficed if the anchor had not moved.
    """

    code: str
    needed: tuple[tuple[View, float], ...]
    alone: tuple[View, float] | None

    @property
    def p_value(self) -> float:
        """Of the union of the null hypotheses: the largest."""
        return max(view.p_slower(limit) for view, limit in self.needed)

    @property
    def recurs(self) -> bool:
        """Whether every view shows the change in most sessions."""
        return all(view.recurs(limit) for view, limit in self.needed)


def claims_of(e: Evidence, move: float, *, both: bool, mirrored: bool) -> list[Claim]:
    """What can make the case slower (or faster): a change beyond delta, and a drift since the first epoch.

    An estimate that does not take all of the comparator off is as slow as the machine: that much is added to its limit.
    """
    sign = -1.0 if mirrored else 1.0

    def turned(view: View) -> View:
        turned = view.mirrored() if mirrored else view
        return turned if e.own_spread else turned.slowest()

    def claim(code: str, limit: float, since: Callable[[float], float]) -> Claim:
        if both and e.ratio:
            ratio = (turned(e.ratio), limit - since(1.0))
            return Claim(code, (ratio, (turned(e.raw), limit - since(0.0))), ratio)
        lift = (1 - e.weight) * max(0.0, sign * move)
        return Claim(code, ((turned(e.main), limit + lift - since(e.weight)),), None)

    code = "faster-confirmed" if mirrored else "slower-confirmed"
    found = [claim(code, math.log1p(e.policy.delta), lambda _: 0.0)]
    needed = {1.0, 0.0} if both and e.ratio else {e.weight}
    if not mirrored and needed <= e.since_first.keys():
        found.append(claim("drift", math.log1p(e.policy.drift), e.since_first.__getitem__))
    return found


# -- cases that no test decides ----------------------------------------------------------------------------------


def judged(e: Evidence, verdict: Verdict, why: Reason, shown: View, *, before: int = 0) -> Judgement:
    """The judgement with all its fields; ``before`` counts the screen's sessions."""
    weight = 0.0 if shown is e.raw else 1.0 if shown is e.ratio else e.weight
    low, high = shown.interval()
    if e.note:
        why = dataclasses.replace(why, text=f"{why.text}; {e.note}")
    return Judgement(
        case=e.case,
        verdict=verdict,
        reason=why,
        change=math.expm1(shown.estimate),
        low=math.expm1(low),
        high=math.expm1(high),
        minimum_effect=e.minimum_effect,
        seconds=statistics.median(r.subject for r in e.head),
        comparator_seconds=estimates.median_comparator(e.head),
        stored_seconds=statistics.median(r.subject for r in e.base),
        weight=weight,
        sessions=before + len(e.head),
    )


def without(
    case: CaseId, head: Sequence[Reading], needed: int, unit: str, *, shown: Judgement | None = None
) -> Judgement:
    """The judgement on a case with too few usable sessions; ``shown`` is the screen's judgement."""
    lost = [r.disturbed for r in head if r.disturbed]
    usable = len(head) - len(lost)
    if lost:
        why = reason("disturbed", lost=len(lost), sessions=plural(len(head), unit), cause=lost[0], needed=needed)
    else:
        why = reason("too-few", sessions=plural(usable, unit), needed=needed)
    if shown:
        return dataclasses.replace(shown, verdict=Verdict.UNDECIDED, reason=why, sessions=shown.sessions + usable)
    seconds = statistics.median(r.subject for r in head) if head else None
    return Judgement(case, Verdict.UNDECIDED, why, seconds=seconds, sessions=usable)


def no_baseline(case: CaseId, head: Sequence[Reading], against: str) -> Judgement:
    """The judgement on a case without a baseline."""
    usable = estimates.undisturbed(head) or list(head)
    return Judgement(
        case,
        Verdict.NO_BASELINE,
        reason("no-baseline", against=against),
        seconds=statistics.median(r.subject for r in usable) if usable else None,
        comparator_seconds=estimates.median_comparator(usable) if usable else None,
        sessions=len(usable),
    )


def is_beyond_guard(e: Evidence, move: float) -> bool:
    """Whether every session is beyond the guard by time and by ratio.

    Without a comparator, the slow-down of the machine is added to the limit.
    """
    limit = math.log1p(e.policy.guard)
    lift = 0.0 if e.ratio else max(0.0, move)
    views = [e.raw, e.ratio] if e.ratio else [e.raw]
    return all(c - lift > limit for v in views for c in v.changes)


# -- the anchor --------------------------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """How the machine, or what stands for it, moved."""

    reason: Reason | None
    move: float
    raw_moved: bool = False


STILL: Final = Anchor(None, 0.0)


def anchor_of(evidence: Iterable[Evidence], policy: Policy) -> Anchor:
    """Whether the comparators' median case moved, and whether the cases without one moved alike.

    By the estimate alone, not by its significance: to take a still anchor for a moved one costs power, to take a
    moved one for still makes a run red for nothing.
    """
    evidence = list(evidence)
    moves = [e.comparator.estimate for e in evidence if e.comparator]
    raw = [e.raw.estimate for e in evidence if not e.comparator]
    limit = math.log1p(policy.anchor_shift)
    middle = statistics.median(raw) if raw else 0.0
    if moves:
        move = statistics.median(moves)
        if abs(move) <= limit:
            return Anchor(None, move)
        along = sum(m * move > 0 for m in moves)
        why = reason("comparators-moved", move=words(move), along=along, count=len(moves))
        return Anchor(why, move, raw_moved=middle * move > 0 and abs(middle - move) <= limit)
    if len(raw) >= estimates.FEWEST_CASES and abs(middle) > limit:
        alike = sum(abs(m - middle) <= limit for m in raw)
        if alike >= 0.75 * len(raw):
            why = reason("all-moved", move=words(middle), alike=alike, count=len(raw))
            return Anchor(why, middle, raw_moved=True)
    return STILL


# -- the screen --------------------------------------------------------------------------------------------------


def screened(gathered: Mapping[CaseId, Gathered], unit: str, needed: int, learnt: Learnt, anchor: Anchor) -> Screened:
    """The screen's judgements, and the cases that have to be confirmed.

    A case is handed on when the t-test of "at most ``policy.delta`` slower" fails at ``policy.screen_level``; of two
    sessions by the slower one (for ``faster``, the faster one).

    Args:
        gathered: by case: its evidence, its readings where they are too few, or the judgement.
        unit: ``session`` or ``pair``; the machine is the same for both of a pair.
        needed: how many of them have to be usable.
        learnt: from all cases; the confirmation uses it too.
        anchor: how the machine moved.
    """
    judgements: dict[CaseId, Judgement] = {}
    wanted: dict[str, tuple[CaseId, ...]] = {"slower": (), "faster": (), "": ()}
    for case, one in gathered.items():
        if isinstance(one, Evidence):
            still = STILL if unit == "pair" else anchor
            both = still.reason is not None or _is_explained(one, mirrored=False)
            known = dataclasses.replace(one, move=still.move, both=both)
            judgements[case], direction = _screened(known, still, unit)
            wanted[direction] += (case,)
        else:
            judgements[case] = one if isinstance(one, Judgement) else without(case, one, needed, unit)
    return Screened(judgements, wanted["slower"], wanted["faster"], anchor.reason, anchor.move, learnt)


def _screened(e: Evidence, anchor: Anchor, unit: str) -> tuple[Judgement, str]:
    """The screen's judgement on a case, and ``slower`` or ``faster`` when it has to be confirmed."""
    both, policy = anchor.reason is not None, e.policy
    shown = e.ratio or e.raw if e.is_far else e.ratio if both and e.ratio else e.main
    seen = e.seen(shown, unit)

    def undecided(why: Reason) -> Judgement:
        return judged(e, Verdict.UNDECIDED, why, shown)

    if e.is_far or is_beyond_guard(e, anchor.move):
        return undecided(reason("to-confirm", seen=seen)), "slower"
    if anchor.raw_moved and not e.ratio:
        return undecided(reason("without-comparator", seen=seen, move=words(anchor.move))), ""
    for direction, mirrored in (("slower", False), ("faster", True)):
        claims = claims_of(e, anchor.move, both=both, mirrored=mirrored)
        if any(c.p_value < policy.screen_level for c in claims):
            return undecided(reason("to-confirm", seen=seen)), direction
        if any(c.alone and c.alone[0].p_slower(c.alone[1]) < policy.screen_level for c in claims):
            return undecided(_comparator_moved(e, unit)), ""
    if e.minimum_effect > policy.underpowered_from:
        return undecided(_underpowered(e, seen)), ""
    return judged(e, Verdict.SAME, reason("within", seen=seen, least=percent(e.minimum_effect)), shown), ""


def _comparator_moved(e: Evidence, unit: str) -> Reason:
    """The ratio moved and the time did not, so the comparator changed."""
    comparator = words(e.comparator.estimate) if e.comparator else ""
    return reason("comparator-moved", ratio=e.ratio or "", seen=e.seen(e.raw, unit), comparator=comparator)


def _underpowered(e: Evidence, seen: str) -> Reason:
    """The noise hides a change."""
    least, most = percent(e.minimum_effect), percent(e.policy.underpowered_from)
    return reason("underpowered", seen=seen, least=f"less than {least}", most=most)


def _is_explained(e: Evidence, *, mirrored: bool) -> bool:
    """Whether this case's comparator moved so that the ratio looks slower (or faster): beyond delta, at 5%."""
    if e.comparator is None or e.weight == 0:
        return False
    view = e.comparator if mirrored else e.comparator.mirrored()
    return view.estimate > math.log1p(e.policy.delta) and view.p_slower(0.0) < 0.05


# -- the confirmation --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the sessions of the confirmation.

    A case is slower by the t-test over all confirmed cases (Holm, ``policy.confirm_level`` divided by the looks) *and*
    when all sessions but a few repeat it.  Faster by the mirrored rule.  A case that is not clear yet keeps the
    screen's judgement unless this is the last look.

    Attributes:
        screened: what the screen said.
        policy: the levels and limits.
        unit: ``session`` or ``pair``; base and head of a pair alternate on one machine.
        last: no further look follows.
    """

    screened: Screened
    policy: Policy
    unit: str
    last: bool

    def judgements(
        self, gather: Callable[[CaseId, int], Evidence | Sequence[Reading] | None]
    ) -> dict[CaseId, Judgement]:
        """All judgements: those of the screen, replaced by the confirmation's for the cases that ``gather`` has.

        Args:
            gather: the evidence on a case that has to be confirmed, from the sessions of the confirmation alone, by the
                number that have to be usable; the readings where there are fewer, ``None`` where there are none.
        """
        policy, screened, further = self.policy, self.screened, f"further {self.unit}"
        judgements = dict(screened.judgements)
        looks = policy.looks((policy.pairs if self.unit == "pair" else policy.sessions)[1])
        needed = estimates.fewest(looks[-1] if self.last else looks[0])
        for cases, mirrored in ((screened.slower, False), (screened.faster, True)):
            known = []
            for case in cases:
                one, shown = gather(case, needed), screened.judgements[case]
                if isinstance(one, Evidence) and one.is_far:
                    view = one.ratio or one.raw
                    why = reason("far", seen=one.seen(view, further), times=1 + policy.far)
                    judgements[case] = judged(one, Verdict.SLOWER, why, view, before=shown.sessions)
                elif isinstance(one, Evidence):
                    known.append(one)
                elif one is not None:
                    judgements[case] = without(case, one, needed, further, shown=shown)
            judgements.update(self._decide(known, policy.confirm_level / len(looks), mirrored=mirrored))
        return judgements

    def _decide(self, evidence: Sequence[Evidence], level: float, *, mirrored: bool) -> dict[CaseId, Judgement]:
        """The judgements on those of the cases of one direction that are clear; ``mirrored``: look for faster."""
        same_machine = self.unit == "pair"
        moves = [e.comparator.estimate for e in evidence if e.comparator]
        now = statistics.median(moves) if len(moves) >= estimates.FEWEST_CASES else 0.0
        # A few pairs on a noisy machine look like a shift; only what the confirmation itself measures counts there.
        earlier = 0.0 if same_machine else self.screened.move
        shifted = max(abs(now), abs(earlier)) > math.log1p(self.policy.anchor_shift)
        both = {e.case: shifted or _is_explained(e, mirrored=mirrored) for e in evidence}
        move = 0.0 if same_machine else min(earlier, now) if mirrored else max(earlier, now)
        evidence = [dataclasses.replace(e, move=earlier, both=both[e.case]) for e in evidence]
        claims = [(e, c) for e in evidence for c in claims_of(e, move, both=both[e.case], mirrored=mirrored)]
        fallen: dict[CaseId, list[Claim]] = {}
        for (e, c), falls in zip(claims, _holm([c.p_value for _, c in claims], level), strict=True):
            if falls and c.recurs:
                fallen.setdefault(e.case, []).append(c)
        # What would have fallen if the anchor had stayed: the same procedure on one estimate alone.
        alone = [(e, *(c.alone or c.needed[0])) for e, c in claims]
        falls_alone = _holm([view.p_slower(limit) for _, view, limit in alone], level)
        fallen_alone = {
            e.case for (e, view, limit), falls in zip(alone, falls_alone, strict=True) if falls and view.recurs(limit)
        }
        found = {}
        for e in evidence:
            moved = both[e.case] and e.case in fallen_alone
            shown = e.ratio if both[e.case] and e.ratio else e.main
            decided = self._verdict(e, shown, fallen.get(e.case, ()), move, comparator_moved=moved, mirrored=mirrored)
            if decided is not None:
                found[e.case] = judged(e, *decided, shown, before=self.screened.judgements[e.case].sessions)
        return found

    def _verdict(
        self, e: Evidence, shown: View, fallen: Sequence[Claim], move: float, *, comparator_moved: bool, mirrored: bool
    ) -> tuple[Verdict, Reason] | None:
        """The verdict on a case; ``None`` where further sessions may decide it."""
        policy, unit = self.policy, self.unit
        view = shown.mirrored() if mirrored else shown
        seen = e.seen(shown, f"further {unit}")
        if fallen:
            return Verdict.FASTER if mirrored else Verdict.SLOWER, self._found(e, fallen[0], seen)
        if not mirrored and is_beyond_guard(e, move):
            return Verdict.SLOWER, reason("guard", seen=seen, guard=percent(policy.guard))
        if not self.last and view.p_slower(0.0) < _HOPELESS:
            return None
        if comparator_moved:
            return Verdict.UNDECIDED, _comparator_moved(e, unit)
        if e.minimum_effect > policy.underpowered_from:
            return Verdict.UNDECIDED, _underpowered(e, seen)
        if view.estimate > math.log1p(policy.delta) and view.interval()[0] > 0:
            return Verdict.UNDECIDED, reason("perhaps-slower", seen=seen, delta=percent(policy.delta))
        return Verdict.SAME, reason("not-confirmed", seen=seen)

    def _found(self, e: Evidence, claim: Claim, seen: str) -> Reason:
        """Slower, faster, or drifted."""
        view, limit = claim.needed[0]
        beyond = sum(change > limit for change in view.changes)
        often = f"in {beyond} of {plural(len(view.changes), self.unit)} (p {claim.p_value:.1g})"
        if claim.code == "drift":
            drift = self.policy.drift
            total = words(view.estimate + math.log1p(drift) - limit)
            return reason("drift", total=total, drift=percent(drift), often=often, seen=seen)
        alone = f"; by time alone {e.raw}" if len(claim.needed) > 1 else ""
        return reason(claim.code, seen=seen, delta=percent(self.policy.delta), often=often, alone=alone)


def _holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses fall by S. Holm's procedure (1979): the smallest against level/m, the next level/(m-1) ..."""
    falls = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        falls[index] = True
    return falls
