"""Run records as one HTML page that loads nothing, several runs side by side; ``pytest-gemm results``."""

from __future__ import annotations

import argparse
import base64
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import show
from pytest_gemm.failures import findings
from pytest_gemm.failures.findings import Finding
from pytest_gemm.failures.text import Rerun, folder_name
from pytest_gemm.record.reader import Run, read
from pytest_gemm.report import review, runs
from pytest_gemm.report.model import TEMPLATES, Tally, by, distinct, having, kind
from pytest_gemm.storage import files

# Error maps that a page holds, one a failure; each has some 30 kB.
_PICTURES: Final = 12
# Options that decide what a rerun computes; those of the case come from the case.
_RERUN: Final = ("level", "known-failures", "device", "candidates", "reference", "threads", "set")
# Columns of counts that a table has where one of them is not zero.
_IF_ANY: Final = ("new", "known", "refused")


@dataclasses.dataclass(frozen=True)
class Failure:
    """Cases that are wrong in one way.

    Attributes:
        shown: the one of them that is shown.
        run: that it is of.
        counts: problems by run.
        problems: their lines, in order.
        title: the verdict with its cause, or the code of the reason.
        condition: what separates them from what passed, in the last run that has them.
    """

    shown: Outcome
    run: Run
    counts: Sequence[int]
    problems: Sequence[str]
    title: str
    condition: str = ""

    @property
    def rerun(self) -> str:
        """The command that runs the case again."""
        words = runs.deciding_arguments(self.run.head.command)
        # A word behind a short option, -k for instance, is no file.
        files_ = [w for before, w in zip(["", *words], words, strict=False) if w[0] != "-" and not _is_short(before)]
        target = ["--pyargs"] * ("--pyargs" in words) + files_
        options = tuple(word for word in words if word.startswith(tuple(f"--gemm-{name}=" for name in _RERUN)))
        return Rerun(" ".join(target) if files_ else "--pyargs pytest_gemm.conformance", options).line(self.shown)

    @property
    def folder(self) -> str:
        """Where the run left the files of the case, within its folder of output; "" where it left none."""
        found = f"failures/{folder_name(self.shown)}"
        return found if self.run.path and (self.run.path.parent / found).is_dir() else ""

    @property
    def picture(self) -> Path | None:
        """The error map of the case."""
        found = self.run.path.parent / self.folder / "error_map.png" if self.run.path and self.folder else None
        return found if found and found.is_file() else None


def page(found: Sequence[Run], title: str) -> str:
    """The runs as one HTML document, the last one being the one that is judged.

    Styles, script and error maps are inside, and a content security policy forbids to load anything else.
    """
    labels = _labels(found)
    ways = sorted(failures(found), key=lambda one: -len(one.problems))
    drawn = [one for one in ways if one.picture][:_PICTURES]
    last, tallies = found[-1], [Tally.of(run.outcomes) for run in found]
    text = TEMPLATES.render(
        "results.html.jinja",
        title=title,
        runs=list(zip(labels, found, strict=True)),
        label=labels[-1],
        tally=tallies[-1],
        judged=sum(one.was_judged for one in last.outcomes),
        new=[one for one in ways if not one.shown.known_failure],
        known=[one for one in ways if one.shown.known_failure],
        rows=_rows(found),
        refused=by(having(last.outcomes, "unsupported", "not-run", "pruned"), "who", "why"),
        distinct=distinct,
        pictures={one.shown: _picture(one.picture) for one in drawn if one.picture},
        columns=[["right", *(name for name in _IF_ANY if getattr(one, name)), "worst"] for one in tallies],
    )
    return text + "\n"


def failures(found: Sequence[Run]) -> Iterator[Failure]:
    """The ways in which cases of the runs are wrong: findings, and failures that the ledger explains."""
    groups: dict[tuple[str, str, str], dict[int, Finding]] = defaultdict(dict)
    for number, run in enumerate(found):
        known = by(having(run.outcomes, "known-failure"), "who", "known_failure", "ended", "code").values()
        for one in (*findings.findings(run.outcomes), *map(Finding, known)):
            groups[one.who, one.simplest.known_failure, one.title][number] = one
    for (*_, title), of_runs in groups.items():
        number = max(of_runs)  # what is shown is of the last run that has it
        counts = [len(of_runs[i].problems) if i in of_runs else 0 for i in range(len(found))]
        problems = list(dict.fromkeys(line for one in of_runs.values() for line in one.problems))
        last = of_runs[number]
        shown = (last.simplest, *last.outcomes)
        every = [Failure(one, found[number], counts, problems, title, last.condition) for one in shown]
        yield next((one for one in every if one.picture), every[0])


def _is_short(word: str) -> bool:
    return len(word) == 2 and word[0] == "-"


def _picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


# -- op x dtypes x backend ---------------------------------------------------------------------------------------


def _cells(outcomes: Sequence[Outcome]) -> dict[tuple[str, str, str], list[Outcome]]:
    cells: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        cells[one.op, kind(one.problem), one.who].append(one)
    return cells


def _rows(found: Sequence[Run]) -> list[tuple[tuple[str, str, str], list[Tally]]]:
    """Op, dtypes and backend, with the counts of each run."""
    cells = [_cells(run.outcomes) for run in found]
    keys = sorted({key for some in cells for key in some})
    return [(key, [Tally.of(some.get(key, ())) for some in cells]) for key in keys]


# -- the command -------------------------------------------------------------------------------------------------


def _labels(found: Sequence[Run]) -> Sequence[str]:
    """What tells each run from the others."""
    names = [
        [f"torch {run.head.versions.get('torch', '?')}" for run in found],
        [(run.path.parent.name if run.path else "") or str(run.path) for run in found],
        [f"{run.head.date[:16]}" for run in found],
    ]
    numbers = [f"run {i}" for i in range(1, len(found) + 1)]
    return next((some for some in names if len(set(some)) == len(some)), numbers)


def run(given: argparse.Namespace) -> int:
    """Print the records as Markdown that fits a comment, or write them as HTML."""
    found = list(map(read, given.records))
    title = given.title or f"Results of {runs.tested(*(run.head for run in found))}"
    if given.html is not None:
        files.replace(given.html, page(found, title).encode(errors="backslashreplace"))
    else:
        show(review.markdown(found, title))
    return 0
