"""The gate of a comparison of two builds, timed side by side.

The estimate is the difference within a pair, which the state of the machine is not in.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_gemm.case_id import CaseId
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, estimates, sentences
from pytest_gemm.speed.gate.decide import Anchor, Evidence, Gathered
from pytest_gemm.speed.gate.estimates import Learnt, Reading, Screened, Share, View, logs, paired
from pytest_gemm.speed.gate.policy import Policy


class _Pairs(NamedTuple):
    """Neighbouring sessions of base and head; both have as many."""

    base: Sequence[Reading]
    head: Sequence[Reading]

    @classmethod
    def of(cls, base: Sequence[Reading], head: Sequence[Reading]) -> _Pairs:
        """The sessions that have a partner, by their number, or by position where they have none."""
        left, right = (
            {position if r.session is None else r.session: r for position, r in enumerate(some)}
            for some in (base, head)
        )
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


def screen(
    base: Mapping[CaseId, Sequence[Reading]], head: Mapping[CaseId, Sequence[Reading]], policy: Policy
) -> Screened:
    """Judge the first pairs of sessions of two environments that ran in alternation.

    The spread of the differences chooses the weight (a spread knows nothing of the location, so this does not favour a
    verdict).  A comparator that itself differs between the environments is left out, case by case or, when its median
    case moved, altogether.
    """
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
    reason = sentences.reason("comparators-differ", whole=whole) if whole and _differs(whole, policy) else None
    gathered: dict[CaseId, Gathered] = {}
    for case, some in head.items():
        if case in enough:
            gathered[case] = _evidence(case, enough[case], learnt, policy, comparators_differ=reason is not None)
        elif not base.get(case):
            gathered[case] = decide.no_baseline(case, some, "the base did not run this case")
        else:
            far = _far(case, pairs[case], learnt, policy, needed)
            gathered[case] = far or decide.without(case, pairs[case].merged, needed, "pair")
    weights = {case: one.weight for case, one in gathered.items() if isinstance(one, Evidence) and one.is_far}
    learnt = learnt._replace(weights={**learnt.weights, **weights})
    anchor = Anchor(reason, whole.estimate if whole else 0.0, raw_moved=False)
    return decide.screened(gathered, policy, "pair", learnt, anchor)


def confirm(
    base: Mapping[CaseId, Sequence[Reading]],
    head: Mapping[CaseId, Sequence[Reading]],
    screened: Screened,
    policy: Policy,
    *,
    last: bool = True,
) -> dict[CaseId, Judgement]:
    """Judge all cases: the wanted ones by the pairs of the confirmation alone, the others as screened.

    The rule is that of :func:`decide.confirmed`, on the differences within pairs.  Weight and common variance are
    those of the screen.
    """
    learnt = Learnt({}, screened.weights, screened.priors)

    def gather(case: CaseId, needed: int) -> Evidence | Sequence[Reading] | None:
        if case not in head or case not in base:
            return None
        pairs = _Pairs.of(base[case], head[case])
        if len(pairs.whole.head) >= needed:
            return _evidence(case, pairs.whole, learnt, policy, comparators_differ=screened.anchor is not None)
        return _far(case, pairs, learnt, policy, needed) or pairs.merged

    return decide.confirmed(screened, gather, policy, "pair", last=last)


def _evidence(case: CaseId, pairs: _Pairs, learnt: Learnt, policy: Policy, *, comparators_differ: bool) -> Evidence:
    """The evidence on a case that has enough pairs."""
    found = _compared(case, pairs, learnt, policy)
    if found.comparator is None or not (comparators_differ or _differs(found.comparator, policy)):
        return found
    return dataclasses.replace(
        found, differs=True, note="by time alone, for the comparator differs between base and head"
    )


def _compared(case: CaseId, pairs: _Pairs, learnt: Learnt, policy: Policy) -> Evidence:
    has = pairs.has_comparator
    return Evidence(case, *pairs, pairs.differences, {}, learnt, policy, own_spread=True, has_comparator=has)


def _far(case: CaseId, pairs: _Pairs, learnt: Learnt, policy: Policy, needed: int) -> Evidence | None:
    """The evidence of disturbed pairs that are all far slower; the two of a pair meet the same load."""
    weights = (0.0, 1.0) if pairs.has_comparator else (0.0,)
    changes = [change for weight in weights for change in pairs.differences(weight)]
    if len(pairs.head) < needed or not estimates.is_far(changes, policy):
        return None
    found = _compared(case, pairs, learnt._replace(weights={case: weights[-1]}), policy)
    return dataclasses.replace(found, is_far=True)


def _median_case(pairs: Iterable[_Pairs], learnt: Learnt, policy: Policy) -> View | None:
    """How head's comparators as a whole differ from base's: the median case of each pair; ``None`` without any.

    What the machine does within a pair is in all its cases, so the pairs are what varies, not the cases.
    """
    by_pair: dict[int, list[float]] = {}
    for one in pairs:
        for position, (before, after) in enumerate(zip(*one, strict=True)):
            change = math.log((after.comparator or math.nan) / (before.comparator or math.nan))
            number = position if after.session is None else after.session
            by_pair.setdefault(number, []).append(change)
    if len(by_pair) < 2:
        return None
    medians = [statistics.median(some) for some in by_pair.values()]
    return estimates.change(medians, None, learnt.priors[None], policy, own_spread=True)


def _differs(comparator: View, policy: Policy) -> bool:
    """Whether a comparator differs between base and head: beyond the shift, at 5% on either side."""
    limit = math.log1p(policy.anchor_shift)
    return (
        abs(comparator.estimate) > limit and min(comparator.p_slower(0.0), comparator.mirrored().p_slower(0.0)) < 0.025
    )
