"""Rewrite the tables of docs/results/libraries.md from run records.

    python examples/results.py docs/results/libraries.md OUT [OUT ...]
    python examples/results.py docs/results/libraries.md OUT [OUT ...] --block=libraries-gpu

OUT is a folder of ``--gemm-output``: of a run of the suite, or of ``pytest perf``, which has samples.  The page has a
block of tables between two marks for the libraries on a CPU, and one for those on a GPU.  A record counts problems,
each under the worst of its cases.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pytest_gemm.core.text import table
from pytest_gemm.record.reader import Run, read
from pytest_gemm.speed.data import by_case, read_session

HEAD = ("library", "release", "judged", "cases", "right", "wrong", "refused", "ops", "seconds")
# Where the name of a backend is not a part of its distribution's, without hyphens.
DISTRIBUTIONS = {"cutile": "cuda-tile", "fbgemm": "torch", "ggml": "pywhispercpp"}


def release_of(backend: str, versions: Mapping[str, str]) -> str:
    """The version of a backend's distribution: that of tensorflow is tensorflow-cpu, that of jax-gpu is jax."""
    name = DISTRIBUTIONS.get(backend, backend.removesuffix("-gpu"))
    return versions.get(name) or next((v for one, v in versions.items() if name in one.replace("-", "")), "?")


def row(backend: str, records: Iterable[Run]) -> tuple[str, ...]:
    """What the records of one backend say."""
    found = list(records)
    seconds = sum(one.totals.wall_seconds for one in found)
    outcomes = [outcome for one in found for outcome in one.outcomes]
    judged = [outcome for outcome in outcomes if outcome.was_judged]
    problems = {outcome.problem for outcome in judged}
    wrong = {outcome.problem for outcome in judged if outcome.status.is_failure}
    refused = {outcome.problem for outcome in outcomes} - problems
    cases = {(outcome.problem, outcome.distribution) for outcome in judged}
    ops = {problem.partition(":")[0] for problem in problems}
    counts = [str(len(each)) for each in (problems, cases, problems - wrong, wrong, refused, ops)]
    release = release_of(backend, found[0].head.versions)
    return (backend, release, *counts, f"{seconds:.0f}" if seconds else "")


def speed(folders: Iterable[Path]) -> list[str]:
    """A table of times over ATen's, with that of the fastest readings: a row for a library, a column for a problem."""
    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        for case, samples in by_case(map(read_session, sorted(folder.glob("samples/*.jsonl")))).items():
            both = [one for one in samples if one.comparator_name == "aten" and one.comparator]
            if ratios := [one.estimate / beside for one in both if (beside := one.comparator_estimate)]:
                fastest = [min(min(getattr(one, name)) for one in both) for name in ("subject", "comparator")]
                text = f"{statistics.median(ratios):.2f} ({fastest[0] / fastest[1]:.2f})"
                found.setdefault(case.backend, {})[case.problem] = text
    problems = sorted({problem for one in found.values() for problem in one})
    rows = [(name, *(one.get(problem, "") for problem in problems)) for name, one in found.items()]
    head = ("time over ATen's", *(f"`{problem}`" for problem in problems))
    return ["", *table(head, rows, range(1, len(head)), markdown=True)] if rows else []


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--block", default="libraries", help="the name in the mark before the tables")
    given = parser.parse_args()
    timed = [folder for folder in given.records if (folder / "samples").is_dir()]
    records: dict[str, list[Run]] = {}
    for folder in given.records:
        if folder not in timed:
            record = read(folder / "run.jsonl" if folder.is_dir() else folder)
            records.setdefault(record.outcomes[0].backend, []).append(record)
    rows = [row(name, found) for name, found in records.items()]
    lines = "\n".join([*table(HEAD, rows, range(2, len(HEAD)), markdown=True), *speed(timed)])
    text = given.page.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- generated: {re.escape(given.block)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = block.subn(lambda m: f"{m[1]}{lines}\n{m[2]}", text)
    if not count:
        marks = f"<!-- generated: {given.block} --> and <!-- end -->"
        parser.error(
            f"{given.page}: has no block for the tables; write the lines {marks} into it, or name another by --block"
        )
    given.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
