"""What a run leaves for its reviewers: the summary of the job, and annotations."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gemm.config.config import CONFIG
from pytest_gemm.core.units import plural
from pytest_gemm.failures import findings
from pytest_gemm.failures.findings import Finding
from pytest_gemm.plugin import reports
from pytest_gemm.record.writer import OfTest, Writer
from pytest_gemm.report import github, review
from pytest_gemm.report.github import Annotation
from pytest_gemm.run.progress import is_read_by_github, quoted
from pytest_gemm.verdict import Red, causes, last_line


class Review:
    """The hooks of the process that reports.

    Args:
        config: pytest's.
        writer: of the run.
    """

    def __init__(self, config: pytest.Config, writer: Writer) -> None:
        self._config, self._writer, self._settings = config, writer, config.stash[CONFIG]
        self._backends = github.places_of_backends(self._settings.backends)
        self._failed: dict[str, tuple[Any, OfTest]] = {}
        self._wanted = is_read_by_github()

    def failed(self, report: pytest.TestReport, judged: OfTest) -> None:
        """Remember a test that failed for what it judged, not for a statement of its own."""
        if judged.rerun and judged.rerun in report.longreprtext:
            self._failed[report.nodeid] = report, judged

    def write(self, measured: Sequence[Any]) -> None:
        """Write ``summary.md``, and the summary of the job.

        Args:
            measured: what was timed.
        """
        run, settings = self._writer.run, self._settings
        path = settings.file("summary.md")
        if path is None and not self._wanted:
            return
        parts = [reports.speed_markdown(settings, measured)]
        if reports.shows_more_than_times(run) or causes(run):
            parts.append(review.markdown([run], review.title(run)))
        text = "\n".join(filter(None, parts))
        if path is not None and text:
            with self._writer.writing(path):
                path.write_text(text, encoding="utf-8")
        if self._wanted and text:
            with self._writer.writing(Path("the summary of the job")):
                github.append_summary(text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, object, object]:
        """Show each finding once; quote for GitHub what others say, and add the annotations, which are commands."""
        before, after = quoted(()) if self._wanted else ("", "")
        every, found = terminalreporter.stats.get("failed", []), self._findings()
        if every and self._config.get_verbosity() < _ALL:
            terminalreporter.stats["failed"] = self._grouped(every, found)
        if before:
            terminalreporter.write_line(before)
        try:
            return (yield)
        finally:
            if every:
                terminalreporter.stats["failed"] = every  # pytest's last line counts them
            if after:
                terminalreporter.write_line(after)
                root = self._config.rootpath
                of_tests = [
                    review.annotation(finding, tests, self._failed[tests[0].nodeid][1], root, self._backends)
                    for finding, tests in found
                ]
                for line in github.commands([*self._of_run(), *of_tests], github.repository(root)):
                    terminalreporter.write_line(line)
            if line := last_line(self._writer.run):
                terminalreporter.write_line(line, red=True)

    def _findings(self) -> list[tuple[Finding | None, list[Any]]]:
        """The reports of the tests that failed of each finding, that of its simplest problem first.

        A test that no wrong result made fail, a slower one, is alone.
        """
        homes = {id(one): report for report, judged in self._failed.values() for one in judged.outcomes}
        found: list[tuple[Finding | None, list[Any]]] = []
        seen: set[str] = set()
        for finding in findings.findings(self._writer.run.outcomes):
            ordered = [homes.get(id(one)) for one in (finding.simplest, *finding.outcomes)]
            mine = {one.nodeid: one for one in ordered if one is not None and one.nodeid not in seen}
            seen |= mine.keys()
            if mine:
                found.append((finding, list(mine.values())))
        return found + [(None, [report]) for name, (report, _) in self._failed.items() if name not in seen]

    def _grouped(self, every: Sequence[Any], found: Sequence[tuple[Finding | None, Sequence[Any]]]) -> list[Any]:
        """The reports of failed tests with one for each finding, which has its text."""
        shown, hidden = {}, set()
        for finding, (first, *others) in found:
            made = copy.copy(first)
            made.gemm_word = _word(finding, first) + (f", {plural(1 + len(others), 'test')}:" if others else "")
            if finding is not None:
                rerun, tests = self._failed[first.nodeid][1].rerun, 1 + len(others)
                made.longrepr = _Shown(findings.text(finding, rerun, tests) if others else first.longreprtext)
            shown[id(first)] = made
            hidden |= {id(one) for one in others}
        return [shown.get(id(one), one) for one in every if id(one) not in hidden]

    def _of_run(self) -> list[Annotation]:
        backends, ledger = self._backends, self._settings.ledger
        lines = {entry.id: entry.line for entry in ledger.entries}
        found = []
        for cause in causes(self._writer.run):
            where = backends.get(cause.name)
            if cause.red is Red.LEDGER and ledger.path is not None:
                where = github.Place(str(ledger.path), lines[cause.name])
            found.append(Annotation(_TITLES[cause.red], cause.text, (where,)))
        return found


@dataclasses.dataclass(frozen=True)
class _Shown:
    """The text of a failure, none of which pytest's short summary repeats."""

    text: str

    def toterminal(self, writer: Any) -> None:
        """As pytest asks for it."""
        writer.line(self.text)


def _word(finding: Finding | None, report: Any) -> str:
    """What the short summary begins with: ``incorrect: K tail``, ``slower +20.7%``."""
    if finding is not None:
        return finding.title
    change = re.search(r"[+-]\d+\.\d%", report.longreprtext)
    verdict = next(iter(report.gemm_verdicts), "FAILED")
    return f"{verdict} {change[0]}" if change and verdict != "FAILED" else verdict


# Verbosity from which each failure is shown.
_ALL: Final = 2
_TITLES: Final = {
    Red.CASE: "a case failed",
    Red.BACKEND: "a backend judged nothing",
    Red.SLOWER: "slower",
    Red.NO_BASELINE: "no baseline",
    Red.UNDECIDED: "undecided",
    Red.LEDGER: "a known failure has become right",
    Red.FILE: "a file is not complete",
}
