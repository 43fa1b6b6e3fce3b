"""Names of candidates: unique, stable, and made of characters that a shell and a pattern take as they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["plain", "unique"]


def plain(text: str) -> str:
    """``text`` with every run of other characters than letters, digits and ``. _ = , + : @ % / -`` as one dash.

    What is left needs no quotes in a shell, and none of it means anything in a shell pattern.
    """
    return re.sub(r"[^A-Za-z0-9._=,+:@%/-]+", "-", text).strip("-")


def unique(candidates: Iterable[tuple[str, Mapping[str, object]]]) -> tuple[str, ...]:
    """One name for each candidate, no two alike, in the order given.

    A name that several candidates have is followed by as few of their facts as tell them apart, in the order in which
    the facts are given: ``triton_mm-64x64x32,s2,w4,GROUP_M=4``.  Candidates that no fact tells apart are counted:
    the second one is ``...@2``.

    Args:
        candidates: base name and further facts of each.
    """
    given = [(plain(base), facts) for base, facts in candidates]
    groups: dict[str, list[Mapping[str, object]]] = {}
    for base, facts in given:
        groups.setdefault(base, []).append(facts)
    telling = {base: _telling(group) for base, group in groups.items()}
    count: Counter[str] = Counter()
    names = []
    for base, facts in given:
        said = [plain(f"{key}={facts[key]}") for key in telling[base] if key in facts]
        name = ",".join([base, *said])
        count[name] += 1
        names.append(name if count[name] == 1 else f"{name}@{count[name]}")
    return tuple(names)


def _telling(group: Sequence[Mapping[str, object]]) -> list[str]:
    """Keys of which each splits the group further than those before it."""
    chosen: list[str] = []
    parts = 1
    for key in dict.fromkeys(key for facts in group for key in facts):
        split = len({tuple(str(facts.get(name)) for name in (*chosen, key)) for facts in group})
        if split > parts:
            chosen.append(key)
            parts = split
    return chosen
