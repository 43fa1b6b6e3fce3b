"""What a mutation study has found, as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from studies import lines

from template_mutants import table
from template_mutants.study import Verdict

_TITLES: Mapping[str, str] = {"cpp": "C++", "triton": "Triton", "cutlass": "CUTLASS"}


def _counts(mutants: Sequence[table.Mutant], found: Iterable[Verdict]) -> dict[str, int]:
    """Numbers of mutants by what came of them; equivalent and null mutants apart."""
    kinds = {one.name: "null" if one.null else "equivalent" if one.equivalent else "" for one in mutants}
    count: Counter[str] = Counter()
    for one in found:
        kind = kinds.get(one.mutant)
        if kind is not None:
            count[f"{kind} {one.verdict}".strip()] += 1
    return count


def page(state: Path) -> str:
    """All that the folder of a study holds, as Markdown."""
    parts = []
    for folder in sorted(state.iterdir()):
        backend, _, release = folder.name.partition("-")
        if backend not in _TITLES or not (folder / "verdicts.jsonl").is_file():
            continue
        mutants = table.load(backend)
        # As written, and as the installed release has them: a place may have moved.
        digests = {(one.name, one.digest) for one in (*mutants, *table.in_release(mutants)[0])}
        records = map(json.loads, (folder / "verdicts.jsonl").read_text(encoding="utf-8").splitlines())
        known = {(one.mutant, one.level): one for one in (Verdict(**record) for record in records)}
        found = [one for one in known.values() if (one.mutant, one.digest) in digests]
        levels = dict.fromkeys(one.level for one in found)
        counts = {level: _counts(mutants, (one for one in found if one.level == level)) for level in levels}
        parts.append((_TITLES[backend], release, mutants, found, counts))
    return lines.page("template_mutants.md.jinja", parts=parts)
