"""What a run adds to pytest's reports, and what a timed run shows and writes at its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm.core.outcome import Status
from pytest_gemm.core.text import printable
from pytest_gemm.record import records

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig
    from pytest_gemm.run.state import RunState


def show_speed(measured: Sequence[Any], pages: Sequence[Path], reporter: Any) -> None:
    """The table of each device, and where the pages are."""
    from pytest_gemm.speed.report import text

    for run in _timed(measured):
        reporter.section(f"GEMM speed on {run.hardware}")
        for line in text.table(run):
            reporter.write_line(line)
    for path in pages:
        reporter.write_line(f"speed report: {path}")


def write_speed(settings: GemmConfig, state: RunState, measured: Sequence[Any]) -> list[Path]:
    """Write the pages that were asked for, each about one machine; returns those that are complete."""
    runs, pages = _timed(measured), []
    for run in runs:
        path = settings.file(f"report-{run.hardware}.html" if len(runs) > 1 else "report.html")
        if path is None:
            break
        from pytest_gemm.speed.report import page

        with state.writing(path):
            path.write_text(page.page(run, _speed_title(settings)), encoding="utf-8")
            pages.append(path)
    return pages


def speed_markdown(settings: GemmConfig, measured: Sequence[Any]) -> str:
    """The same for the summary of a job; "" where nothing was timed."""
    if not (runs := _timed(measured)):
        return ""
    from pytest_gemm.speed.report import text

    return "\n".join(text.markdown(run, _speed_title(settings)) for run in runs)


def _timed(measured: Sequence[Any]) -> list[Any]:
    return [made for made in measured if made.sessions]


def _speed_title(settings: GemmConfig) -> str:
    return f"GEMM speed of {', '.join(backend.name for backend in settings.backends)}"


def attach(made: Any, item: pytest.Item, when: str, judged: Mapping[str, Any], verdicts: Sequence[str]) -> None:
    """Add what was judged to a test's report: attributes of plain data travel through xdist."""
    if made.failed:
        shown = made.longreprtext
        if (said := printable(shown, len(shown))) != shown:  # a worker could not send it
            made.longrepr = said
    if when == "call":
        process = os.environ.get("PYTEST_XDIST_WORKER", "main")
        made.gemm = {**judged, "process": process, "verdicts": list(verdicts)}
        own = [(name, value) for name, value in item.user_properties if not name.startswith("gemm_")]
        # In place, for it is read again for the teardown's report; and without those of an attempt before this one.
        item.user_properties[:] = [*own, *records.junit_properties(judged["outcomes"], verdicts)]


def status_words(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Category, letter and word of a test that pytest would call passed, skipped or xfailed; ``None``: pytest's."""
    judged = getattr(report, "gemm", None)
    if judged is None or report.when != "call" or not (report.passed or report.skipped):
        return None
    if report.passed:
        verdicts = judged.get("verdicts", ())
        words = {"undecided": ("undecided", "?", "UNDECIDED"), "no-baseline": ("no-baseline", "b", "NO-BASELINE")}
        return next((words[verdict] for verdict in words if verdict in verdicts), None)
    ended = {record["status"] for record in judged["outcomes"]}
    xfailed = hasattr(report, "wasxfail")
    own = [Status.KNOWN_FAILURE] if xfailed else [Status.NOT_RUN, Status.PRUNED, Status.UNSUPPORTED]
    found = next((str(status) for status in own if str(status) in ended), "")  # "": a skip of the user's
    return (found, found[0], found.upper()) if found else None
