"""What a run is compared with: stored baselines, or sessions of another environment that pair with its own.

Both designs reduce sessions to :class:`Evidence`, of which :mod:`decide` makes judgements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Verdict
from pytest_gemm.core.units import plural
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, estimates, mending
from pytest_gemm.speed.gate.decide import Anchor, Evidence, Gathered
from pytest_gemm.speed.gate.estimates import (
    Learnt,
    Reading,
    Readings,
    Screened,
    Share,
    Spreads,
    Stored,
    View,
    logs,
    paired,
)
from pytest_gemm.speed.gate.policy import Policy
from pytest_gemm.speed.gate.sentences import reason


@dataclasses.dataclass(frozen=True)
class Design:
    """Screen and confirmation of one kind of run.

    Attributes:
        policy: of the gate.
        stored: the baselines; ``None`` where the readings of base and head are compared in pairs.
    """

    policy: Policy
    stored: Mapping[CaseId, Stored] | None = None

    @functools.cached_property
    def _baselines(self) -> Mapping[CaseId, Stored] | None:
        return None if self.stored is None else mending.mended_baselines(self.stored, self.policy)

    def _mended(self, base: Readings, head: Readings) -> tuple[Readings, Readings]:
        """Without what a session's comparators alone have done."""
        if self._baselines is None:
            base, head = (mending.mended(some, mending.usual(some), self.policy) for some in (base, head))
            return base, head
        usually = mending.usual({case: one.readings for case, one in self._baselines.items()})
        return base, mending.mended(head, usually, self.policy)

    def screen(self, base: Readings, head: Readings) -> Screened:
        """Judge the first sessions; ``base`` is without effect where baselines are stored."""
        base, head = self._mended(base, head)
        return self._screen_pairs(base, head) if self._baselines is None else self._screen_stored(self._baselines, head)

    def confirm(
        self, screened: Screened, more: Callable[[tuple[CaseId, ...], int], tuple[Readings, Readings]]
    ) -> dict[CaseId, Judgement]:
        """The judgements of all cases, looked at as often as :meth:`Policy.looks` says.

        Args:
            screened: what the screen concluded.
            more: readings of base and head for the open cases, after how many sessions of the confirmation, or pairs.
        """
        policy = self.policy
        judgements, known = dict(screened.judgements), screened.judgements
        counts = policy.looks(policy.confirm_pairs if self.stored is None else policy.confirm_sessions)
        for count in counts:
            cases = screened.wanted
            if not cases:
                break
            base, head = ({case: some[case] for case in cases if case in some} for some in more(cases, count))
            found = self.look(base, head, screened, last=count == counts[-1])
            judgements.update((case, found[case]) for case in cases)
            screened = dataclasses.replace(
                screened,
                slower=tuple(case for case in screened.slower if found[case] == known[case]),
                faster=tuple(case for case in screened.faster if found[case] == known[case]),
            )
        return judgements

    def look(self, base: Readings, head: Readings, screened: Screened, *, last: bool = True) -> dict[CaseId, Judgement]:
        """Judge all cases: the wanted ones by the sessions of the confirmation alone, the others as screened.

        The rule is that of :class:`decide.Look`.  Weight and common variance are those of the screen.  A wanted
        case that ``head`` lacks stays to be confirmed.
        """
        stored, policy, learnt = self._baselines, self.policy, screened.learnt
        base, head = self._mended(base, head)

        def of_sessions(case: CaseId, needed: int) -> Evidence | Sequence[Reading] | None:
            if stored is None or case not in head:
                return None
            return _against_stored(stored[case], head[case], learnt, policy, needed)

        def of_pairs(case: CaseId, needed: int) -> Evidence | Sequence[Reading] | None:
            if case not in head or case not in base:
                return None
            pairs = _Pairs.of(base[case], head[case])
            return _of_pairs(case, pairs, learnt, policy, needed, comparators_differ=screened.anchor is not None)

        unit, gather = ("pair", of_pairs) if stored is None else ("session", of_sessions)
        return decide.Look(screened, policy, unit, last).judgements(gather)

    # -- against stored baselines: sessions of the head, each against all stored ones -------------------------------

    def _screen_stored(self, stored: Mapping[CaseId, Stored], head: Readings) -> Screened:
        """Judge the first sessions of the head against what is stored.

        The estimate is the median of the sessions against that of the stored ones, with the spread of the baseline.
        """
        policy = self.policy
        learnt = estimates.learn(_spreads(stored, policy))
        needed = estimates.fewest(policy.screen_sessions)

        def gather(case: CaseId, some: Sequence[Reading]) -> Gathered:
            if case not in stored or not stored[case].readings:
                return decide.no_baseline(case, some, "no baseline is stored for this case")
            if case not in learnt.at:
                return _thin(case, stored[case], some, policy)
            return _against_stored(stored[case], some, learnt, policy, needed, own_spread=False)

        gathered = {case: gather(case, some) for case, some in head.items()}
        anchor = decide.anchor_of((e for e in gathered.values() if isinstance(e, Evidence) and not e.is_far), policy)
        return decide.screened(gathered, "session", needed, learnt, anchor)

    # -- two builds side by side: the difference within a pair, which the state of the machine is not in ------------

    def _screen_pairs(self, base: Readings, head: Readings) -> Screened:
        """Judge the first pairs of sessions of two environments that ran in alternation.

        The spread of the differences chooses the weight (a spread is independent of the location, so this does not
        favour a verdict).  A comparator that itself differs between the environments is left out, case by case or, when
        its median case moved, altogether.
        """
        policy = self.policy
        needed = max(2, estimates.fewest(policy.screen_pairs))
        pairs = {case: _Pairs.of(base[case], some) for case, some in head.items() if case in base}
        enough = {case: one.whole for case, one in pairs.items() if len(one.whole.head) >= needed}
        learnt = estimates.learn(
            {
                case: estimates.spreads(one.differences, policy.floor, has_comparator=one.has_comparator)
                for case, one in enough.items()
            }
        )
        whole = _median_case((one for one in enough.values() if one.has_comparator), learnt, policy)
        why = reason("comparators-differ", whole=whole) if whole and _differs(whole, policy) else None

        def gather(case: CaseId, some: Sequence[Reading]) -> Gathered:
            if not base.get(case):
                return decide.no_baseline(case, some, "the base did not run this case")
            return _of_pairs(case, pairs[case], learnt, policy, needed, comparators_differ=why is not None)

        gathered = {case: gather(case, some) for case, some in head.items()}
        weights = {case: one.weight for case, one in gathered.items() if isinstance(one, Evidence) and one.is_far}
        learnt = learnt._replace(weights={**learnt.weights, **weights})
        anchor = Anchor(why, whole.estimate if whole else 0.0)
        return decide.screened(gathered, "pair", needed, learnt, anchor)


# -- the evidence against stored baselines ---------------------------------------------------------------------------


def minimum_effect(stored: Mapping[CaseId, Stored], policy: Policy) -> dict[CaseId, float]:
    """The smallest slow-down of each case that screen and confirmation find with a power of 95%, as a fraction.

    A case with fewer usable sessions than ``policy.fewest_stored`` is left out.
    """
    learnt = estimates.learn(_spreads(mending.mended_baselines(stored, policy), policy))
    found = {}
    for case, by in learnt.at.items():
        weight = learnt.weights[case]
        shares = estimates.confirmed_by(weight, learnt, by[weight].sessions, policy) if 1.0 in by else (weight,)
        found[case] = max(estimates.smallest(by[share], share, learnt, policy) for share in shares)
    return found


def _spreads(stored: Mapping[CaseId, Stored], policy: Policy) -> Spreads:
    """The spreads of the cases that have enough usable sessions."""
    usable = {case: estimates.undisturbed(one.readings) for case, one in stored.items()}
    return {
        case: estimates.spreads(functools.partial(logs, some), policy.floor, has_comparator=paired(some))
        for case, some in usable.items()
        if len(some) >= policy.fewest_stored
    }


def _thin(case: CaseId, stored: Stored, head: Sequence[Reading], policy: Policy) -> Judgement:
    """The judgement on a case whose baseline has too few sessions."""
    usable = len(estimates.undisturbed(stored.readings))
    return dataclasses.replace(
        decide.no_baseline(case, head, ""),
        verdict=Verdict.UNDECIDED,
        reason=reason("thin-baseline", usable=plural(usable, "usable session"), needed=policy.fewest_stored),
        stored_seconds=statistics.median(r.subject for r in stored.readings),
    )


def _against_stored(
    stored: Stored, head: Sequence[Reading], learnt: Learnt, policy: Policy, needed: int, *, own_spread: bool = True
) -> Evidence | Sequence[Reading]:
    """The evidence on a case; its readings where too few sessions are undisturbed.

    A case is decided although its sessions are disturbed when each new session is far beyond the slowest stored one,
    by time and as a ratio.  Without a comparator the load and the code cannot be told apart.
    """
    case, base, usable = stored.case, estimates.undisturbed(stored.readings), estimates.undisturbed(head)
    is_far = len(usable) < needed
    if is_far:
        usable = list(head)
        if len(head) < needed or not (paired(head) and paired(base)):
            return head
        if not estimates.is_far((x - max(logs(base, w)) for w in (0.0, 1.0) for x in logs(head, w)), policy):
            return head
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
        own_spread=own_spread,
        has_comparator=paired(usable) and 1.0 in then,
        since_first=since_first,
        note=stored.note,
        is_far=is_far,
    )


# -- the evidence of pairs --------------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Neighbouring sessions of base and head; both have as many."""

    base: Sequence[Reading]
    head: Sequence[Reading]

    @classmethod
    def of(cls, base: Sequence[Reading], head: Sequence[Reading]) -> _Pairs:
        """The sessions that have a partner, by their number."""
        left, right = ({r.session: r for r in some} for some in (base, head))
        both = sorted(left.keys() & right.keys())
        return cls([left[n] for n in both], [right[n] for n in both])

    @property
    def whole(self) -> _Pairs:
        """The pairs of which neither is disturbed."""
        kept = [(b, h) for b, h in zip(*self, strict=True) if not b.disturbed and not h.disturbed]
        return _Pairs([b for b, _ in kept], [h for _, h in kept])

    @property
    def merged(self) -> list[Reading]:
        """Head's readings, disturbed where base's are."""
        return [
            dataclasses.replace(h, disturbed=h.disturbed or (f"base: {b.disturbed}" if b.disturbed else ""))
            for b, h in zip(*self, strict=True)
        ]

    @property
    def has_comparator(self) -> bool:
        """Whether all sessions have one."""
        return paired(self.base) and paired(self.head)

    def differences(self, share: Share) -> list[float]:
        """Of the logarithms, pair by pair."""
        return [h - b for b, h in zip(logs(self.base, share), logs(self.head, share), strict=True)]


def _of_pairs(
    case: CaseId, pairs: _Pairs, learnt: Learnt, policy: Policy, needed: int, *, comparators_differ: bool
) -> Evidence | Sequence[Reading]:
    """The evidence on a case; head's readings where too few pairs are undisturbed, unless all of them are far slower.

    The two of a pair meet the same load.
    """
    is_far = len(pairs.whole.head) < needed
    if is_far:
        weights = (0.0, 1.0) if pairs.has_comparator else (0.0,)
        changes = [change for weight in weights for change in pairs.differences(weight)]
        if len(pairs.head) < needed or not estimates.is_far(changes, policy):
            return pairs.merged
        learnt = learnt._replace(weights={case: weights[-1]})
    used = pairs if is_far else pairs.whole
    has = used.has_comparator
    found = Evidence(case, *used, used.differences, {}, learnt, policy, own_spread=True, has_comparator=has)
    if is_far:
        return dataclasses.replace(found, is_far=True)
    if found.comparator is None or not (comparators_differ or _differs(found.comparator, policy)):
        return found
    note = "by time alone, for the comparator differs between base and head"
    return dataclasses.replace(found, differs=True, note=note)


def _median_case(pairs: Iterable[_Pairs], learnt: Learnt, policy: Policy) -> View | None:
    """How head's comparators as a whole differ from base's: the median case of each pair; ``None`` without any.

    What the machine does within a pair is in all its cases, so the pairs are what varies, not the cases.
    """
    by_pair: dict[int, list[float]] = {}
    for one in pairs:
        for reading, change in zip(one.head, one.differences(None), strict=True):
            by_pair.setdefault(reading.session, []).append(change)
    if len(by_pair) < 2:
        return None
    medians = [statistics.median(some) for some in by_pair.values()]
    return estimates.change(medians, None, learnt.priors[None], policy, own_spread=True)


def _differs(comparator: View, policy: Policy) -> bool:
    """Whether a comparator differs between base and head: beyond the shift, at 5% on either side."""
    p_value = min(comparator.p_slower(0.0), comparator.mirrored().p_slower(0.0))
    return abs(comparator.estimate) > math.log1p(policy.anchor_shift) and p_value < 0.025
