"""Run records as one HTML page that loads nothing, several runs side by side; ``pytest-gemm results``."""

from __future__ import annotations

import argparse
import base64
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_gemm.compare import runs
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.text import show
from pytest_gemm.failures.text import Rerun, folder_name
from pytest_gemm.record.record import Record, read
from pytest_gemm.record.records import status_of
from pytest_gemm.run import page as markdown
from pytest_gemm.run.terminal import by, distinct, having
from pytest_gemm.speed.report import figures
from pytest_gemm.speed.report.templates import render
from pytest_gemm.storage import files

# Error maps that a page holds, one a failure; each has some 30 kB.
_PICTURES: Final = 12
# Problems that a failure lists.
_PROBLEMS: Final = 100
# Options that decide what a rerun computes; those of the case come from the case.
_RERUN: Final = ("level", "known-failures", "device", "candidates", "reference", "threads", "set")
# Columns of counts that a table has where one of them is not zero.
_IF_ANY: Final = ("new", "known", "refused")
# Rows of a figure of errors.
_ROWS: Final = 24


@dataclasses.dataclass(frozen=True)
class Run:
    """A record on the page.

    Attributes:
        path: of the record.
        record: the run.
        label: what tells it from the others.
    """

    path: Path
    record: Record
    label: str = ""

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Those of the record."""
        return self.record.outcomes

    @property
    def ended(self) -> bool:
        """Whether the record is whole."""
        return self.record.totals is not None and not self.record.torn

    def counts(self, outcomes: Sequence[Outcome]) -> Tally:
        """The problems of some outcomes by how they ended."""
        ends = Counter(status_of(group) for group in by(outcomes, "who", "problem").values())
        return Tally(
            right=ends[Status.PASSED],
            known=ends[Status.KNOWN_FAILURE],
            new=sum(count for status, count in ends.items() if status.is_failure),
            refused=sum(ends[status] for status in (Status.UNSUPPORTED, Status.PRUNED, Status.NOT_RUN)),
            worst=max((o.ratio for o in having(outcomes, "passed") if o.ratio is not None), default=None),
        )


@dataclasses.dataclass(frozen=True)
class Tally:
    """Problems by how they ended, each under the worst of its cases.

    Attributes:
        right: passed.
        known: wrong as an entry of the ledger says.
        new: wrong, and no entry explains it.
        refused: unsupported, pruned or not run.
        worst: largest error over bound of what passed.
    """

    right: int = 0
    known: int = 0
    new: int = 0
    refused: int = 0
    worst: float | None = None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Cases that are wrong in one way.

    Attributes:
        who, entry, status, code: what they agree in; ``entry`` is the ledger's, "" for none.
        shown: the one of them that is shown.
        run: that it is of.
        counts: problems by run.
        problems: their lines, in order.
        before: what became of these problems in the runs before the first that has the failure; "" where none has them.
    """

    who: str
    entry: str
    status: Status
    code: str
    shown: Outcome
    run: Run
    counts: Sequence[int]
    problems: Sequence[str]
    before: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from the others."""
        return self.who, self.entry, str(self.status), self.code

    @property
    def listed(self) -> Sequence[str]:
        """The first problems."""
        return self.problems[:_PROBLEMS]

    @property
    def rerun(self) -> str:
        """The command that runs the case again."""
        words = runs.deciding_arguments(self.run.record.run.command)
        # A word behind a short option, -k for instance, is no file.
        files_ = [w for before, w in zip(["", *words], words, strict=False) if w[0] != "-" and not _is_short(before)]
        target = ["--pyargs"] * ("--pyargs" in words) + files_
        options = tuple(word for word in words if word.startswith(tuple(f"--gemm-{name}=" for name in _RERUN)))
        return Rerun(" ".join(target) if files_ else "--pyargs pytest_gemm.conformance", options).line(self.shown)

    @property
    def folder(self) -> str:
        """Where the run left the files of the case, within its folder of output; "" where it left none."""
        found = f"failures/{folder_name(self.shown)}"
        return found if (self.run.path.parent / found).is_dir() else ""

    @property
    def picture(self) -> Path | None:
        """The error map of the case."""
        found = self.run.path.parent / self.folder / "error_map.png"
        return found if self.folder and found.is_file() else None


def page(found: Sequence[Run], title: str) -> str:
    """The runs as one HTML document, the last one being the one that is judged.

    Styles, script and error maps are inside, and a content security policy forbids to load anything else.
    """
    wrong = sorted(failures(found), key=lambda one: (bool(one.entry), one.who, one.entry, one.code))
    drawn = [one for one in wrong if one.picture][:_PICTURES]
    rows = _rows(found)
    tallies = [run.counts(run.outcomes) for run in found]
    text = render(
        "results.html.jinja",
        "pytest_gemm.compare",
        title=title,
        runs=found,
        last=found[-1],
        tally=tallies[-1],
        judged=len([o for o in found[-1].outcomes if o.was_judged]),
        new=[one for one in wrong if not one.entry],
        known=[one for one in wrong if one.entry],
        rows=rows,
        distances=_distances(found),
        refused=by(having(found[-1].outcomes, "unsupported", "not-run", "pruned"), "who", "why"),
        distinct=distinct,
        pictures={one.key: _picture(one.picture) for one in drawn if one.picture},
        columns=[["right", *(name for name in _IF_ANY if getattr(one, name)), "worst"] for one in tallies],
    )
    return text + "\n"


def failures(found: Sequence[Run]) -> Iterator[Failure]:
    """The ways in which cases of the runs are wrong."""
    groups: dict[tuple[str, str, Status, str], dict[int, list[Outcome]]] = defaultdict(lambda: defaultdict(list))
    for number, run in enumerate(found):
        for one in run.outcomes:
            if one.status.is_failure or one.status is Status.KNOWN_FAILURE:
                groups[one.who, one.known_failure, one.ended, one.code][number].append(one)
    for (who, entry, status, code), outcomes in groups.items():
        number = max(outcomes)  # what is shown is of the last run that has it
        counts = [len(distinct(outcomes.get(i, ()), "problem")) for i in range(len(found))]
        problems = list(dict.fromkeys(o.problem for some in outcomes.values() for o in some))
        before = _before(found, min(outcomes), who, problems)
        every = [
            Failure(who, entry, status, code, shown, found[number], counts, problems, before)
            for shown in outcomes[number]
        ]
        yield next((one for one in every if one.picture), every[0])


def _before(found: Sequence[Run], first: int, who: str, problems: Sequence[str]) -> str:
    """What became of a backend's problems before the run with the number ``first``."""
    lines = set(problems)
    earlier = [o for run in found[:first] for o in run.outcomes if o.who == who and o.problem in lines]
    if entries := sorted({o.known_failure for o in earlier} - {""}):
        return f"Known before as {', '.join(entries)}."
    if any(o.status.is_failure for o in earlier):
        return "Wrong before, for another reason."
    return f"First in {found[first].label}, right before." if having(earlier, "passed") else ""


def _is_short(word: str) -> bool:
    return len(word) == 2 and word[0] == "-"


def _picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


# -- op x dtypes x backend ---------------------------------------------------------------------------------------


def _cells(outcomes: Sequence[Outcome]) -> dict[tuple[str, str, str], list[Outcome]]:
    kinds = {line: markdown.kind(line) for line in distinct(outcomes, "problem")}
    cells: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        cells[one.op, kinds[one.problem], one.who].append(one)
    return cells


def _rows(found: Sequence[Run]) -> list[tuple[tuple[str, str, str], list[Tally]]]:
    """Op, dtypes and backend, with the counts of each run."""
    cells = [(run, _cells(run.outcomes)) for run in found]
    keys = sorted({key for _, some in cells for key in some})
    return [(key, [run.counts(some.get(key, ())) for run, some in cells]) for key in keys]


# -- distance to the bound ---------------------------------------------------------------------------------------


def _distances(found: Sequence[Run]) -> list[str]:
    """The figures: for each backend and kind of data, and each run, which errors were found; the largest first."""
    groups: dict[tuple[str, str], list[list[tuple[float, str]]]] = defaultdict(lambda: [[] for _ in found])
    for number, run in enumerate(found):
        for (_, kind, who), outcomes in _cells([o for o in run.outcomes if o.ratio is not None]).items():
            groups[who, kind][number] += [(o.ratio or 0.0, _colour(o.status)) for o in outcomes]
    ordered = sorted(groups.items(), key=lambda item: (-max(max(some)[0] for some in item[1] if some), item[0]))
    rows = [
        (f"{who} {kind}" + (f", {run.label}" if len(found) > 1 else ""), some)
        for (who, kind), by_run in ordered
        for run, some in zip(found, by_run, strict=True)
        if some
    ]
    return [figures.distances(rows[at : at + _ROWS]) for at in range(0, len(rows), _ROWS)]


def _colour(status: Status) -> str:
    """As page.css has it: new failures, known ones, and what is right."""
    return "#d55e00" if status.is_failure else "#e69f00" if status is Status.KNOWN_FAILURE else "#009e73"


# -- the command -------------------------------------------------------------------------------------------------


def load(paths: Sequence[Path]) -> list[Run]:
    """The runs of records, or of folders of ``--gemm-output``, each with a label of its own.

    Raises:
        ValueError: for what is no record.
    """
    found = [(file, read(file)) for file in map(runs.file_of, paths)]
    names = [
        [f"torch {record.run.versions.get('torch', '?')}" for _, record in found],
        [file.parent.name or str(file) for file, _ in found],
        [f"{record.run.date[:16]}" for _, record in found],
    ]
    numbers = [f"run {i}" for i in range(1, len(found) + 1)]
    labels = next((some for some in names if len(set(some)) == len(some)), numbers)
    return [Run(file, record, label) for (file, record), label in zip(found, labels, strict=True)]


def run(given: argparse.Namespace) -> int:
    """Print the records as Markdown, all of them or what fits a comment, and write them as HTML."""
    found = load(given.records)
    records = [one.record for one in found]
    if given.html is not None:
        files.replace(given.html, page(found, given.title).encode(errors="backslashreplace"))
    if given.comment:
        show(markdown.comment(records, given.title))
    elif given.html is None:
        show(markdown.page(records, given.title))
    return 0
