"""Rewrite the table of docs/results/libraries.md from run records and fingerprints.

    python examples/results.py docs/results/libraries.md OUT [OUT ...] --fingerprints=DIR

OUT is a folder of ``--gemm-output``, one for each run of an example; DIR that of ``pytest-gemm fingerprint --output``.
A record counts problems, each under the worst of its cases.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.run.record import Record, read
from pytest_gemm.text import table
from pytest_gemm.tools.fingerprint import load

HEAD = ("library", "release", "judged", "cases", "right", "wrong", "refused", "ops", "arithmetic", "seconds")
BLOCK = re.compile(r"(<!-- generated: libraries -->\n).*?(<!-- end -->)", re.DOTALL)


def row(backend: str, records: Iterable[Record], traits: Mapping[str, str]) -> tuple[str, ...]:
    """What the records of one backend say."""
    worst: dict[str, Outcome] = {}
    found, seconds = list(records), 0.0
    cases: set[tuple[str, str]] = set()
    for one in found:
        seconds += one.totals.wall_seconds if one.totals else 0.0
        for outcome in one.outcomes:
            if outcome.status is Status.PASSED or outcome.status.is_failure:
                cases.add((outcome.problem, outcome.distribution))
            if outcome.problem not in worst or outcome.status.is_failure:
                worst[outcome.problem] = outcome
    refused = [o for o in worst.values() if o.status is Status.UNSUPPORTED]
    wrong = [o for o in worst.values() if o.status.is_failure]
    judged = [o for o in worst.values() if o.status is not Status.UNSUPPORTED]
    ops = sorted({o.problem.partition(":")[0] for o in judged})
    versions = found[0].run.versions  # the distribution of tensorflow is tensorflow-cpu
    release = versions.get(backend) or next((v for name, v in versions.items() if backend in name), "?")
    counts = [len(judged), len(cases), len(judged) - len(wrong), len(wrong), len(refused), len(ops)]
    return (backend, release, *map(str, counts), traits.get(backend, ""), f"{seconds:.0f}" if seconds else "")


def arithmetic(folder: Path | None) -> dict[str, str]:
    """Width and order of the sums and subnormals of f32, or of i8 without it, as the fingerprints have them."""
    found = {}
    for path in sorted(folder.rglob("*.fingerprint.json")) if folder else ():
        one = load(path)
        for column in one.columns if one else ():
            if column.column in {"f32", "i8"} and one and not found.get(one.backend):
                names = {"accumulator": "", "order": "", "subnormals": "subnormals "}
                rows = [f"{names[name]}{column.traits[name]}" for name in names if name in column.traits]
                found[one.backend] = f"{column.column}: {', '.join(rows)}" if rows else ""
    return found


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--fingerprints", type=Path)
    given = parser.parse_args()
    records: dict[str, list[Record]] = {}
    for folder in given.records:
        record = read(folder / "run.jsonl" if folder.is_dir() else folder)
        records.setdefault(record.outcomes[0].backend, []).append(record)
    traits = arithmetic(given.fingerprints)
    rows = [row(name, found, traits) for name, found in records.items()]
    lines = "\n".join(table(HEAD, rows, (2, 3, 4, 5, 6, 7, 9), markdown=True))
    text = given.page.read_text(encoding="utf-8")
    given.page.write_text(BLOCK.sub(lambda m: f"{m[1]}{lines}\n{m[2]}", text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
