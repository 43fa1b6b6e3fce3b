"""What a run leaves for its reviewers: the summary of the job, and annotations."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gemm.config.config import CONFIG
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.plugin import reports
from pytest_gemm.record.writer import Writer
from pytest_gemm.report import github, review
from pytest_gemm.report.github import Annotation
from pytest_gemm.run.progress import is_read_by_github, quoted
from pytest_gemm.verdict import Red, causes


class Review:
    """The hooks of the process that reports.

    Args:
        config: pytest's.
        writer: of the run.
    """

    def __init__(self, config: pytest.Config, writer: Writer) -> None:
        self._config, self._writer, self._settings = config, writer, config.stash[CONFIG]
        self._backends = github.places_of_backends(self._settings.backends)
        self._failed: dict[str, tuple[str, Sequence[Outcome], Sequence[str]]] = {}
        self._wanted = is_read_by_github()

    def failed(self, report: pytest.TestReport, outcomes: Sequence[Outcome]) -> None:
        """Remember a failure of a test that judged something."""
        if self._wanted and hasattr(report, "gemm"):
            self._failed[report.nodeid] = (report.longreprtext, outcomes, report.gemm_verdicts)

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
        """Quote for GitHub what others say, and add the annotations, which are commands."""
        if not self._wanted:
            return (yield)
        before, after = quoted(())
        terminalreporter.write_line(before)
        try:
            return (yield)
        finally:
            terminalreporter.write_line(after)
            root = github.repository(self._config.rootpath)
            for line in github.commands([*self._of_tests(), *self._of_run()], root):
                terminalreporter.write_line(line)

    def _of_tests(self) -> list[Annotation]:
        root = self._config.rootpath
        found = (review.failure(nodeid, *failed, root, self._backends) for nodeid, failed in self._failed.items())
        return [one for one in found if one is not None]

    def _of_run(self) -> list[Annotation]:
        backends, ledger = self._backends, self._settings.ledger
        lines = {entry.id: entry.line for entry in ledger.entries}
        found = []
        for cause in causes(self._writer.run):
            where = backends.get(cause.name)
            if cause.red is Red.LEDGER and ledger.path is not None:
                where = github.Place(str(ledger.path), lines[cause.name])
            found.append(Annotation(_TITLES[cause.red], cause.text, (where,), (cause.red.name,)))
        return found


_TITLES: Final = {
    Red.CASE: "a case failed",
    Red.BACKEND: "a backend judged nothing",
    Red.SLOWER: "slower",
    Red.NO_BASELINE: "no baseline",
    Red.UNDECIDED: "undecided",
    Red.LEDGER: "a known failure has become right",
    Red.FILE: "a file is not complete",
}
