"""Two runs, of two releases or environments for instance, in one report: ``pytest-gemm compare BEFORE AFTER``."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Seconds, Status
from pytest_gemm.core.text import escaped, show, table
from pytest_gemm.core.units import plural
from pytest_gemm.record.reader import Run, read
from pytest_gemm.report import cases, runs
from pytest_gemm.report.cases import Facts, Row, Section
from pytest_gemm.report.model import TEMPLATES, status_of
from pytest_gemm.storage import files

# Families of a section that are shown.
_FAMILIES = 12
_HEAD = ("backend", "op", "types", "what", "cases", "first")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared.

    Attributes:
        before, after: the runs.
        environment: name and both values of what differs.
        warnings: why the runs cannot be compared in full.
        totals: counts and seconds, with both values.
        sections: what differs.
    """

    before: Run
    after: Run
    environment: Sequence[tuple[str, str, str]]
    warnings: Sequence[str]
    totals: Sequence[tuple[str, str, str]]
    sections: Sequence[Section]

    @property
    def is_bad(self) -> bool:
        """Whether anything is newly wrong, or may be: the later run did not end."""
        return not self.after.ended or any(one.is_bad and one.rows for one in self.sections)

    @property
    def verdict(self) -> str:
        """One line: the count of each section that is not empty."""
        counts = [f"{len(section.rows)} {section.title}" for section in self.sections if section.rows]
        return ", ".join(counts) or "no difference"

    def html(self) -> str:
        """One HTML document."""
        title = " and ".join(f"{run.path} ({runs.tested(run.head)})" for run in (self.before, self.after))
        return TEMPLATES.render("compare.html.jinja", found=self, title=title) + "\n"

    def text(self, *, markdown: bool = False) -> str:
        """For a terminal or a pull request."""
        return "\n".join(_lines(self, markdown=markdown)) + "\n"


def compared(before: Run, after: Run) -> Comparison:
    """Compare two runs."""
    old, new = (cases.join(run.outcomes) for run in (before, after))
    environment, warnings = runs.environment(before.head, after.head), runs.warnings(before, after)
    return Comparison(before, after, environment, warnings, _totals(old, new), cases.sections(old, new))


def _totals(before: Mapping[CaseId, Facts], after: Mapping[CaseId, Facts]) -> list[tuple[str, str, str]]:
    """Cases by status, and the seconds of those that both runs have."""
    old, new = (Counter(status_of(facts.outcomes) for facts in every.values()) for every in (before, after))
    counts = [
        (f"cases {status}", str(old[status]), str(new[status])) for status in Status if old[status] or new[status]
    ]
    both = before.keys() & after.keys()
    then, now = (sum((every[case].seconds for case in both), Seconds()) for every in (before, after))
    parts = {"compile": (then.compile, now.compile), "run": (then.run, now.run)}
    return counts + [(f"seconds to {part}, cases of both", f"{a:.0f}", f"{b:.0f}") for part, (a, b) in parts.items()]


def run(given: argparse.Namespace) -> int:
    """Print the report; returns 1 where a case is newly wrong or the later run did not end."""
    found = compared(read(given.before), read(given.after))
    if given.html is not None:
        files.replace(given.html, found.html().encode(errors="backslashreplace"))
    show(found.text(markdown=given.markdown))
    return int(found.is_bad)


# -- text and Markdown -------------------------------------------------------------------------------------------


def _lines(found: Comparison, *, markdown: bool) -> Iterator[str]:
    mark: Callable[[object], str] = escaped if markdown else str
    yield from [f"## {mark(found.verdict)}", ""] if markdown else [found.verdict, ""]
    for rows in (found.environment, found.totals):
        cells = [tuple(map(mark, row)) for row in rows]
        yield from table(("", "before", "after"), cells, (), markdown=markdown)
        yield ""
    for warning in found.warnings:
        yield f"**{mark(warning)}**" if markdown else f"warning: {warning}"
        yield ""
    for section in found.sections:
        if section.rows or section.notes:
            yield from _section(section, mark, markdown=markdown)
            yield ""
    if any(len(section.families) > _FAMILIES for section in found.sections):
        yield "--html=FILE writes every case."


def _section(section: Section, mark: Callable[[object], str], *, markdown: bool) -> Iterator[str]:
    indent = "" if markdown else "  "
    if not section.rows:
        none = "" if section.notes[0].startswith("Not compared") else "none. "
        yield f"{section.title}: {none}{mark(' '.join(section.notes))}"
        return
    title = f"{section.title}: {plural(len(section.rows), 'case')}"
    yield from [f"### {title}", ""] if markdown else [title]
    for line in (section.help, *section.notes):
        yield from [f"{indent}{mark(line)}", *[""] * markdown]
    cells = [_cells(rows, mark, markdown=markdown) for rows in section.families[:_FAMILIES]]
    yield from (indent + line for line in table(_HEAD, cells, (4,), markdown=markdown))
    if left := section.families[_FAMILIES:]:
        more = f"{plural(sum(map(len, left)), 'case')} of {plural(len(left), 'family', 'families')} more"
        yield from [*[""] * markdown, f"{indent}and {more}"]


def _cells(family: Sequence[Row], mark: Callable[[object], str], *, markdown: bool) -> tuple[str, ...]:
    row = family[0]
    first = f"{row.case.problem} {row.case.candidate}".rstrip()
    first = f"`{first}`" if markdown else first
    first += f" ({mark(row.note)})" if row.note else ""
    return (*map(mark, row.family), str(len(family)), first)
