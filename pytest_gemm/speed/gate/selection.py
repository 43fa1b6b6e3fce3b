"""Whether the candidate that was selected is the fastest, and what a change of selection did."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_gemm.speed.data import CaseKey, Judgement, Sample, Session, by_case
from pytest_gemm.speed.gate.sentences import percent

# -- notes beside the verdict ------------------------------------------------------------------------------------


def regret(sample: Sample) -> float | None:
    """How much longer the picked candidate takes than the fastest rival, as a fraction; 0.0 when it is the fastest.

    Median over the blocks of the differences of logarithms, each of the subject's visits in a block against the rival's
    in the same block.  ``None`` without rivals, or where the visits cannot be brought into blocks.
    """
    losses = _losses(sample).values()
    return max(0.0, *losses) if losses else None


def _losses(sample: Sample) -> dict[str, float]:
    """How much longer than each rival the picked candidate takes, as a fraction; negative for a slower rival."""
    found = {}
    for name, seconds in sample.rivals.items():
        if name in sample.picked or not seconds or len(sample.subject) % len(seconds):
            continue
        visits = len(sample.subject) // len(seconds)
        blocks = [
            statistics.fmean(math.log(s) for s in sample.subject[i * visits : (i + 1) * visits]) - math.log(rival)
            for i, rival in enumerate(seconds)
        ]
        found[name] = math.expm1(statistics.median(blocks))
    return found


def moved(before: Mapping[CaseKey, tuple[str, ...]], sessions: Iterable[Session]) -> list[CaseKey]:
    """Cases for which another candidate was picked than before, in any of the sessions.

    Args:
        before: what was picked then, by case.
        sessions: of now.
    """
    return [
        case
        for case, some in by_case(sessions).items()
        if before.get(case) and any(s.picked and set(s.picked) != set(before[case]) for s in some)
    ]


def annotate(
    judgements: Mapping[CaseKey, Judgement], before: Mapping[CaseKey, tuple[str, ...]], sessions: Iterable[Session]
) -> dict[CaseKey, Judgement]:
    """The judgements with ``selection``, ``regret`` and ``faster`` filled from the head's samples.

    These are notes, no verdicts.

    Args:
        judgements: of the head.
        before: what was picked in the baseline, or in the base environment.
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
            selection=_selection(before.get(case, ()), [s.picked for s in some], medians),
            regret=max(0.0, medians[fastest]) if fastest else None,
            faster=fastest if fastest and medians[fastest] > 0.0 else "",
        )
    return found


def _selection(before: tuple[str, ...], now: Sequence[tuple[str, ...]], losses: Mapping[str, float]) -> str:
    """What was picked and what is now, with how many sessions say so where they disagree; "" for no change.

    Where the earlier pick was timed beside the one of now, it says what the change makes.
    """
    counts = Counter(picked for picked in now if picked)
    changed = {picked: count for picked, count in counts.items() if set(picked) != set(before)}
    if not before or not changed:
        return ""
    total = sum(counts.values())
    parts = [
        "+".join(picked) + (f" in {count} of {total} sessions" if count < total else "")
        for picked, count in changed.items()
    ]
    text = f"was {'+'.join(before)}, is {', '.join(parts)}"
    timed = [losses[name] for name in before if name in losses]
    if not timed:
        return text
    loss = max(timed)
    return f"{text}, which takes {percent(abs(loss))} {'longer' if loss >= 0 else 'less'} than it in the same blocks"
