"""What a change of the selected candidate was: a note on a case, no verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.speed.data import Session, by_case


def changes(before: Mapping[CaseId, tuple[str, ...]], sessions: Iterable[Session]) -> dict[CaseId, str]:
    """What was selected and what is now, with the number of sessions where they disagree; of changed cases only.

    Args:
        before: what was selected in the baseline, or in the base environment, by case.
        sessions: of the head.
    """
    found = {}
    for case, samples in by_case(sessions).items():
        then = before.get(case, ())
        counts = Counter(sample.selected for sample in samples if sample.selected)
        changed = {selected: count for selected, count in counts.items() if set(selected) != set(then)}
        if then and changed:
            total = sum(counts.values())
            parts = [
                "+".join(selected) + (f" in {count} of {total} sessions" if count < total else "")
                for selected, count in changed.items()
            ]
            found[case] = f"was {'+'.join(then)}, is {', '.join(parts)}"
    return found
