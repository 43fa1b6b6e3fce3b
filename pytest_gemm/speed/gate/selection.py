"""What a change of the selected candidate was."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.speed.data import Judgement, Session, by_case


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
    """The judgements with ``selection`` filled from the head's samples: a note, no verdict.

    Args:
        judgements: of the head.
        before: what was selected in the baseline, or in the base environment.
        sessions: of the head.
    """
    samples = by_case(sessions)
    return {
        case: dataclasses.replace(
            judgement, selection=_selection(before.get(case, ()), [s.selected for s in samples.get(case, ())])
        )
        for case, judgement in judgements.items()
    }


def _selection(before: tuple[str, ...], now: Sequence[tuple[str, ...]]) -> str:
    """What was selected and what is now, with the number of sessions where they disagree; "" for no change."""
    counts = Counter(selected for selected in now if selected)
    changed = {selected: count for selected, count in counts.items() if set(selected) != set(before)}
    if not before or not changed:
        return ""
    total = sum(counts.values())
    parts = [
        "+".join(selected) + (f" in {count} of {total} sessions" if count < total else "")
        for selected, count in changed.items()
    ]
    return f"was {'+'.join(before)}, is {', '.join(parts)}"
