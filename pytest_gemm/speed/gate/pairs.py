"""The gate of a comparison of two builds, timed side by side."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pytest_gemm.case_id import CaseId
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.gate import decide, sentences
from pytest_gemm.speed.gate.decide import Gathered
from pytest_gemm.speed.gate.estimates import (
    Prior,
    Reading,
    Screened,
    choose,
    common,
    location,
    log_estimates,
    of_comparator,
    paired,
    pooled,
    prior_of_comparators,
)
from pytest_gemm.speed.gate.evidence import (
    Evidence,
    View,
    by_pairs,
    fewest,
    is_far,
    median_comparator,
    smallest,
)
from pytest_gemm.speed.gate.policy import WEIGHTS, Policy

# -- base against head -------------------------------------------------------------------------------------------


def _couples(base: Sequence[Reading], head: Sequence[Reading]) -> list[tuple[Reading, Reading]]:
    """Neighbouring sessions of base and head, by their number, or by position where they have none."""

    def numbered(some: Sequence[Reading]) -> dict[int, Reading]:
        return {position if r.session is None else r.session: r for position, r in enumerate(some)}

    left, right = numbered(base), numbered(head)
    return [(left[n], right[n]) for n in sorted(left.keys() & right.keys())]


def _whole(couples: Iterable[tuple[Reading, Reading]]) -> list[tuple[Reading, Reading]]:
    """The pairs of which neither is disturbed."""
    return [(b, h) for b, h in couples if not b.disturbed and not h.disturbed]


def _differences(couples: Sequence[tuple[Reading, Reading]], weight: float) -> list[float]:
    before, after = zip(*couples, strict=True)
    return [h - b for b, h in zip(log_estimates(before, weight), log_estimates(after, weight), strict=True)]


def _both_paired(couples: Sequence[tuple[Reading, Reading]]) -> bool:
    return all(paired(couple) for couple in couples)


def _comparator_changes(couples: Sequence[tuple[Reading, Reading]]) -> list[float]:
    before, after = zip(*couples, strict=True)
    return [h - b for b, h in zip(of_comparator(before), of_comparator(after), strict=True)]


def _comparator_view(couples: Sequence[tuple[Reading, Reading]], prior: Prior, policy: Policy) -> View | None:
    """How head's comparator differs from base's; ``None`` without one."""
    return by_pairs(_comparator_changes(couples), prior, policy) if _both_paired(couples) else None


def _gather_pairs(
    case: CaseId,
    couples: Sequence[tuple[Reading, Reading]],
    weight: float,
    priors: Mapping[float, Prior],
    policy: Policy,
    *,
    comparator: View | None,
    differs: bool,
) -> Evidence:
    """The evidence on a case that has enough pairs; ``differs``: head's comparator is not base's, so there is none."""
    has_comparator = _both_paired(couples) and not differs
    weight = weight if has_comparator else 0.0

    def view(w: float) -> View:
        return by_pairs(_differences(couples, w), priors[w], policy)

    spread = location(_differences(couples, weight), policy.floor)
    variance, df = pooled(priors[weight], spread)
    scale = math.sqrt(max(variance, policy.floor**2))
    before, after = zip(*couples, strict=True)
    return Evidence(
        case=case,
        weight=weight,
        main=view(weight),
        raw=view(0.0),
        ratio=view(1.0) if has_comparator else None,
        comparator=comparator,
        since_first={},
        sessions=len(couples),
        seconds=statistics.median(r.subject for r in after),
        comparator_seconds=median_comparator(after),
        stored_seconds=statistics.median(r.subject for r in before),
        minimum_effect=smallest(scale, df, 0, policy.screen_pairs, policy.confirm_pairs, policy),
        note=_RAW_NOTE if differs else "",
    )


def _far(
    case: CaseId, couples: Sequence[tuple[Reading, Reading]], priors: Mapping[float, Prior], policy: Policy, needed: int
) -> Evidence | None:
    """The evidence of disturbed pairs that are all far slower; the two of a pair meet the same load."""
    if len(couples) < needed:
        return None
    weights = (0.0, 1.0) if _both_paired(couples) else (0.0,)
    if not is_far(itertools.chain.from_iterable(_differences(couples, w) for w in weights), policy):
        return None
    found = _gather_pairs(case, couples, weights[-1], priors, policy, comparator=None, differs=False)
    return dataclasses.replace(found, is_far=True)


_RAW_NOTE: Final = "by time alone, for the comparator differs between base and head"


def screen(
    base: Mapping[CaseId, Sequence[Reading]], head: Mapping[CaseId, Sequence[Reading]], policy: Policy
) -> Screened:
    """Judge the first pairs of sessions of two environments that ran in alternation.

    The figure is the difference within a pair, which the state of the machine is not in.  Its spread chooses the weight
    (a spread knows nothing of the location, so this does not favour a verdict).  A comparator that itself differs
    between the environments is left out, case by case or, when its median case moved, altogether.
    """
    needed = max(2, fewest(policy.screen_pairs))
    couples = {c: _whole(_couples(base[c], some)) for c, some in head.items() if c in base}
    couples = {c: some for c, some in couples.items() if len(some) >= needed}
    at = {
        c: {w: location(_differences(some, w), policy.floor) for w in (WEIGHTS if _both_paired(some) else (0.0,))}
        for c, some in couples.items()
    }
    priors = common(at)
    compared = {c: some for c, some in couples.items() if _both_paired(some)}
    spreads = [location(_comparator_changes(some), policy.floor) for some in compared.values()]
    of_comparators = prior_of_comparators(spreads)
    comparators = {c: _comparator_view(some, of_comparators, policy) for c, some in compared.items()}
    whole = _median_case(compared, of_comparators, policy)
    reason = sentences.comparators_differ(whole) if whole and _differs(whole, policy) else None
    weights = choose(at)
    gathered: dict[CaseId, Gathered] = {}
    for case, some in head.items():
        if case in couples:
            comparator = comparators.get(case)
            differs = comparator is not None and (reason is not None or _differs(comparator, policy))
            gathered[case] = _gather_pairs(
                case, couples[case], weights[case], priors, policy, comparator=comparator, differs=differs
            )
        elif not base.get(case):
            gathered[case] = decide.no_baseline(case, some, "the base did not run this case")
        elif far := _far(case, _couples(base[case], some), priors, policy, needed):
            gathered[case] = far
            weights[case] = far.weight
        else:
            gathered[case] = decide.without(case, _merged(base[case], some), needed, "pair")
    still = decide.Anchor(None, 0.0, raw_moved=False)  # the machine is the same for both
    return dataclasses.replace(
        decide.screened(gathered, policy, still, "pair"),
        anchor=reason,
        move=whole.estimate if whole else 0.0,
        weights=weights,
        priors=priors,
        of_comparators=of_comparators,
    )


def _median_case(
    couples: Mapping[CaseId, Sequence[tuple[Reading, Reading]]], prior: Prior, policy: Policy
) -> View | None:
    """How head's comparators as a whole differ from base's: the median case of each pair; ``None`` without any.

    What the machine does within a pair is in all its cases, so the pairs are what varies, not the cases.
    """
    by_pair: dict[int, list[float]] = {}
    for some in couples.values():
        for position, (before, after) in enumerate(some):
            change = math.log((after.comparator or math.nan) / (before.comparator or math.nan))
            number = position if after.session is None else after.session
            by_pair.setdefault(number, []).append(change)
    if len(by_pair) < 2:
        return None
    return by_pairs([statistics.median(some) for some in by_pair.values()], prior, policy)


def _differs(comparator: View, policy: Policy) -> bool:
    """Whether one case's comparator differs between base and head: beyond the shift, at 5% on either side."""
    limit = math.log1p(policy.anchor_shift)
    return abs(comparator.estimate) > limit and min(comparator.p_slower(0.0), comparator.p_faster(0.0)) < 0.025


def _merged(base: Sequence[Reading], head: Sequence[Reading]) -> list[Reading]:
    """Head's readings, disturbed where base's are."""
    return [
        dataclasses.replace(h, disturbed=h.disturbed or (f"base: {b.disturbed}" if b.disturbed else ""))
        for b, h in _couples(base, head)
    ]


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
    looks = policy.looks(policy.confirm_pairs)
    needed = fewest(looks[-1] if last else looks[0])

    def gather(case: CaseId) -> Gathered:
        shown = screened.judgements[case]
        if case not in head or case not in base:
            return shown
        every = _couples(base[case], head[case])
        couples = _whole(every)
        if len(couples) < needed:
            return _far(case, every, screened.priors, policy, needed) or decide.without(
                case, _merged(base[case], head[case]), needed, "further pair", shown=shown
            )
        comparator = _comparator_view(couples, screened.of_comparators, policy)
        differs = comparator is not None and (screened.anchor is not None or _differs(comparator, policy))
        weight = screened.weights[case]
        return _gather_pairs(case, couples, weight, screened.priors, policy, comparator=comparator, differs=differs)

    return decide.confirmed(screened, gather, policy, "pair", policy.confirm_pairs, last=last)
