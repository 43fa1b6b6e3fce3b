"""Merged fixes of PyTorch's GEMM code, undone: which level finds them?

    python tests/studies/fix_study.py [TABLE...] [--level quick] [--runs cpp] [--jobs N] > ROWS

A fix is undone in memory when the module is imported, as a mutant is.  It is found where a problem of the level fails
that reaches the changed place, on a backend that runs where none are named; ``inductor`` runs its share of the level.
The rows are JSON; ``--page ROWS...`` makes ``docs/results/fixes.md`` of them.  The state is kept as by
``template_mutant_study.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines
from template_mutants import table
from template_mutants.study import Study, Verdict
from template_mutants.table import Mutant

from pytest_gemm.conformance import matrix
from pytest_gemm.core.text import show
from pytest_gemm.problem.axes import LEVELS, QUICK
from pytest_gemm.storage.datafile import document

FIXES: Final = Path(__file__).parents[1] / "template_mutants" / "fixes.toml"
# The backends that run Inductor's code, by how a user meets a fix, in the order in which they are tried.
ORDER: Final = {
    "cpp": ("cpp", "inductor"),
    "inductor": ("cpp", "inductor"),
    "triton": ("triton", "inductor"),
    "inductor-cuda": ("inductor", "triton"),
}


# Files of which all is done when candidates are benchmarked.
_BEFORE_BENCHMARKS: Final = ("fx_passes/*", "kernel/*.py", "*lowerings.py", "decomposition.py", "freezing.py")
_ON_GPU: Final = {"triton", "inductor-cuda"}


class Fix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fix; ``fixes.toml`` describes the fields."""

    name: str
    pull: str
    merged: str
    runs: str
    file: str
    old: str
    new: str
    wrong: str
    shown: str = ""
    alone: str = ""
    after: str = ""
    also: tuple[dict[str, str], ...] = ()
    held_out: bool = False
    missed: str = ""

    @property
    def mutant(self) -> Mutant:
        """What undoes it."""
        return Mutant(self.name, self.file, self.old, self.new, self.wrong, after=self.after, also=self.also)


def read(path: Path = FIXES) -> list[Fix]:
    """The fixes of a table."""
    (rows,) = document(path).values()
    return msgspec.convert(rows, list[Fix], strict=False)


class _OfAutotuning(Study):
    """A study of ``inductor``, whose programs follow from benchmarks.

    The survey sees what comes before these.  Each problem may reach a mutant of what they do.
    """

    def survey(self, mutants: Sequence[Mutant]) -> dict[str, dict[str, Any]]:
        answers = super().survey(mutants)
        late = [m.name for m in mutants if not any(fnmatch.fnmatchcase(m.file, name) for name in _BEFORE_BENCHMARKS)]
        return {line: {**answer, "reached": [*answer["reached"], *late]} for line, answer in answers.items()}

    def changing(self, _: Mutant, problems: Sequence[str], __: Mapping[str, Mapping[str, Any]]) -> list[str]:
        return [*problems]


def verdicts(fixes: Sequence[Fix], runs: str, level: str, state: Path, jobs: int, most: int) -> dict[str, Verdict]:
    """What comes of each fix that a user meets in one way, with the backend before the problem that found it."""
    device = "cuda" if runs in _ON_GPU else "cpu"
    open_ = [fix.mutant for fix in fixes if fix.runs == runs]
    results: dict[str, Verdict] = {}
    for backend in ORDER[runs]:
        problems = (matrix.autotuned if backend == "inductor" else matrix.products)(level, device)
        kind = _OfAutotuning if backend == "inductor" else Study
        study = kind(backend, level, [problem.line for problem in problems], state, jobs, most)
        there, _ = table.in_release(open_)
        if not there:
            break
        for verdict in study.verdicts(there, there):
            what = f"{verdict.verdict} {verdict.problem} {verdict.seconds:.0f} s"
            sys.stderr.write(f"{backend} {verdict.mutant}: {what}\n")
            if verdict.verdict == "killed" or verdict.mutant not in results:
                results[verdict.mutant] = dataclasses.replace(verdict, problem=f"{backend} {verdict.problem}".strip())
        killing = (v.problem.partition(" ")[2] for v in results.values() if v.problem.startswith(f"{backend} "))
        for line in study.right(sorted({*killing})):
            sys.stderr.write(f"{backend} {line} fails with all fixes\n")
        open_ = [mutant for mutant in open_ if results[mutant.name].verdict != "killed"]
    return results


def page(fixes: Sequence[Fix], rows: Sequence[Verdict]) -> str:
    """What came of each fix, as Markdown; of several rows of a fix and a level that which found it."""
    found: dict[tuple[str, str], Verdict] = {}
    for row in sorted(rows, key=lambda row: row.verdict == "killed"):
        found[row.mutant, row.level] = row
    for (name, level), row in [*found.items()]:  # what quick finds, full finds
        if level == QUICK and row.verdict == "killed":
            found[name, "full"] = row
    groups = {
        f"{where}, {of}": [fix for fix in fixes if (fix.runs in _ON_GPU, bool(fix.alone)) == (on_gpu, alone)]
        for where, on_gpu in (("CPU", False), ("GPU", True))
        for of, alone in (("of products", False), ("of code generation at large", True))
    }
    counts = {
        name + which: [len(part), *(number for level in (QUICK, "full") for number in _counted(part, found, level))]
        for name, group in groups.items()
        for which, part in (("", group), (", held out", [fix for fix in group if fix.held_out]))
        if part
    }
    return lines.page("fixes.md.jinja", counts=counts, groups=groups, found=found)


def _counted(fixes: Sequence[Fix], found: Mapping[tuple[str, str], Verdict], level: str) -> tuple[int, int]:
    """How many of the fixes were run at a level, and how many of these it finds."""
    rows = [row for fix in fixes if (row := found.get((fix.name, level))) is not None]
    return len(rows), sum(row.verdict == "killed" for row in rows)


def main() -> int:
    """Print a row for each fix."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=[FIXES])
    parser.add_argument("--level", choices=LEVELS, default=QUICK, help="of the suite (default: quick)")
    parser.add_argument("--runs", choices=tuple(ORDER), default="cpp", help="how users meet them (default: cpp)")
    parser.add_argument("--only", default="", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="problems for a fix (default: 0, all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--state", type=Path, default=Path("build/fixes"), help="folder of the answers")
    parser.add_argument("--page", nargs="+", type=Path, metavar="ROWS", help="print the page of these rows")
    asked = parser.parse_args()
    if asked.page:
        texts = [text for path in asked.page for text in path.read_text(encoding="utf-8").splitlines()]
        show(page(read(), [msgspec.json.decode(text, type=Verdict) for text in texts]))
        return 0
    fixes = [fix for path in asked.tables for fix in read(path) if not asked.only or fix.name in asked.only.split(",")]
    state = asked.state.resolve()
    for verdict in verdicts(fixes, asked.runs, asked.level, state, asked.jobs, asked.most).values():
        show(json.dumps(dataclasses.asdict(verdict)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
