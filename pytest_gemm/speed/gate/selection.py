"""Whether the candidate that was selected is the fastest, and what a change of selection did."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.speed.data import Judgement, Sample, Session, by_case
from pytest_gemm.speed.report.units import percent


def _losses(sample: Sample) -> dict[str, float]:
    """How much longer than each other candidate the selected one takes, as a fraction; negative for a slower one.

    Median over the blocks of the differences of logarithms: the subject's readings in a block against the candidate's
    in the same block.  A candidate whose readings do not divide into blocks is left out.
    """
    found = {}
    for name, seconds in sample.candidates.items():
        if name in sample.selected or not seconds or len(sample.subject) % len(seconds):
            continue
        readings = len(sample.subject) // len(seconds)
        blocks = [
            statistics.fmean(math.log(s) for s in sample.subject[i * readings : (i + 1) * readings])
            - math.log(candidate)
            for i, candidate in enumerate(seconds)
        ]
        found[name] = math.expm1(statistics.median(blocks))
    return found


def changed(before: Mapping[CaseId, tuple[str, ...]], sessions: Iterable[Session]) -> list[CaseId]:
    """Cases for which another candidate was selected than before, in any of the sessions.

    Args:
        before: what was selected then, by case.
        sessions: of now.
    """
    return [
        case
        for case, some in by_case(sessions).items()
        if before.get(case) and any(s.selected and set(s.selected) != set(before[case]) for s in some)
    ]


def annotate(
    judgements: Mapping[CaseId, Judgement], before: Mapping[CaseId, tuple[str, ...]], sessions: Iterable[Session]
) -> dict[CaseId, Judgement]:
    """The judgements with ``selection``, ``regret`` and ``faster`` filled from the head's samples.

    These are notes, no verdicts.

    Args:
        judgements: of the head.
        before: what was selected in the baseline, or in the base environment.
        sessions: of the head.
    """
    samples = by_case(sessions)
    found = {}
    for case, judgement in judgements.items():
        some = samples.get(case, [])
        losses: dict[str, list[float]] = {}
        for sample in some:
            for name, loss in _losses(sample).items():
                losses.setdefault(name, []).append(loss)
        medians = {name: statistics.median(those) for name, those in losses.items()}
        fastest = max(medians, key=medians.__getitem__, default="")
        found[case] = dataclasses.replace(
            judgement,
            selection=_selection(before.get(case, ()), [s.selected for s in some], medians),
            regret=max(0.0, medians[fastest]) if fastest else None,
            faster=fastest if fastest and medians[fastest] > 0.0 else "",
        )
    return found


def _selection(before: tuple[str, ...], now: Sequence[tuple[str, ...]], losses: Mapping[str, float]) -> str:
    """What was selected and what is now, with the number of sessions where they disagree; "" for no change.

    Where the earlier candidate was timed beside the one of now, it tells their difference.
    """
    counts = Counter(selected for selected in now if selected)
    changed = {selected: count for selected, count in counts.items() if set(selected) != set(before)}
    if not before or not changed:
        return ""
    total = sum(counts.values())
    parts = [
        "+".join(selected) + (f" in {count} of {total} sessions" if count < total else "")
        for selected, count in changed.items()
    ]
    text = f"was {'+'.join(before)}, is {', '.join(parts)}"
    timed = [losses[name] for name in before if name in losses]
    if not timed:
        return text
    loss = max(timed)
    return f"{text}, which takes {percent(abs(loss))} {'longer' if loss >= 0 else 'less'} than it in the same blocks"
