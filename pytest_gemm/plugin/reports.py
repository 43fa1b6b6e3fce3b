"""What a run adds to pytest's reports, and what a timed run shows and writes at its end."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.config.config import has_cuda_device
from pytest_gemm.core.outcome import Outcome, Status, Verdict
from pytest_gemm.core.text import printable, ratio_text
from pytest_gemm.machine import software
from pytest_gemm.record.lines import Head, Terms
from pytest_gemm.record.reader import Run
from pytest_gemm.record.writer import OfTest, Writer
from pytest_gemm.report.model import failures, status_of
from pytest_gemm.verdict import Red

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig


def show_speed(measured: Sequence[Any], pages: Sequence[Path], reporter: Any) -> None:
    """The table of each device, and where the pages are."""
    from pytest_gemm.speed.report import text

    for run in _timed(measured):
        reporter.section(f"GEMM speed on {run.hardware}")
        for line in text.table(run):
            reporter.write_line(line)
    for path in pages:
        reporter.write_line(f"speed report: {path}")


def write_speed(settings: GemmConfig, writer: Writer, measured: Sequence[Any]) -> list[Path]:
    """Write the pages that were asked for, each about one machine; returns those that are complete."""
    runs, pages = _timed(measured), []
    for run in runs:
        path = settings.file(f"report-{run.hardware}.html" if len(runs) > 1 else "report.html")
        if path is None:
            break
        from pytest_gemm.speed.report import page

        with writer.writing(path):
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


def shows_more_than_times(run: Run) -> bool:
    """Whether not every case was timed and is right, of which the table of times says all."""
    return any(outcome.tier or outcome.status is not Status.PASSED for outcome in run.outcomes)


def attach(made: Any, item: pytest.Item, when: str, judged: OfTest, verdicts: Sequence[str]) -> None:
    """Add what was judged to a test's report: attributes of plain data travel through xdist."""
    if made.failed:
        shown = made.longreprtext
        if (said := printable(shown, len(shown))) != shown:  # a worker could not send it
            made.longrepr = said
    if when == "call":
        judged.process = os.environ.get("PYTEST_XDIST_WORKER", "main")
        made.gemm, made.gemm_verdicts = judged.to_dict(), list(verdicts)
        own = [(name, value) for name, value in item.user_properties if not name.startswith("gemm_")]
        # In place, for it is read again for the teardown's report; and without those of an attempt before this one.
        item.user_properties[:] = [*own, *junit_properties(judged.outcomes, verdicts)]


def junit_properties(outcomes: Sequence[Outcome], verdicts: Iterable[str] = ()) -> list[tuple[str, object]]:
    """What a JUnit report says of a test: backend, candidates, kernels, status, worst error/bound, why, the gate."""
    if not outcomes:
        return []
    case = outcomes[0].case
    ratios = [o.ratio for o in outcomes if o.ratio is not None]
    asked = {"mode": case.mode.value, "threads": case.threads, "run_threads": case.run_threads, "isa": case.isa}
    properties: dict[str, object] = {
        "backend": case.backend,
        "problem": case.problem,
        **{name: value for name, value in asked.items() if value},
        "candidate": ", ".join(dict.fromkeys(name for o in outcomes for name in o.candidates)),
        "kernel": ", ".join(dict.fromkeys(kernel for o in outcomes for kernel in o.kernels)),
        "status": str(status_of(outcomes)),
        "error_over_bound": ratio_text(max(ratios, default=None)),
    }
    ended = next((o for o in outcomes if o.status is status_of(outcomes)), outcomes[0])
    why = {
        "code": ended.code,
        "cause": ended.cause,
        "reason": ended.reason and ended.why,
        "known_failure": ended.known_failure,
    }
    properties |= {name: value for name, value in {**why, "verdict": ", ".join(verdicts)}.items() if value}
    return [(f"gemm_{name}", value) for name, value in properties.items()]


def why_failed(report: pytest.TestReport, outcomes: Sequence[Outcome]) -> Red:
    """Why a test failed: for its speed alone, or for anything else."""
    if report.when != "call" or failures(outcomes):
        return Red.CASE
    verdicts = getattr(report, "gemm_verdicts", ())
    return min((_SLOW[one] for one in verdicts if one in _SLOW), default=Red.CASE)


_SLOW: Final = {
    str(Verdict.SLOWER): Red.SLOWER,
    str(Verdict.NO_BASELINE): Red.NO_BASELINE,
    str(Verdict.UNDECIDED): Red.UNDECIDED,
}


def head(config: GemmConfig, command: Sequence[str]) -> Head:
    """The first line of the record of this run."""
    versions: dict[str, str] = {}
    for backend in config.backends:
        origin = config.registry.origin(backend.name)
        versions |= {origin.distribution: origin.version} if origin else {}
        versions |= software.installed(getattr(backend, "distributions", ()))
    terms = Terms(
        tuple(backend.name for backend in config.backends),
        config.named,
        config.allow,
        bool(config.fuzz),
        config.wanted_candidates,
        tuple(entry.id for entry in config.ledger.entries if not entry.sometimes),
    )
    number, total = config.shard or (0, 0)
    gpus = any(config.device_of(backend) == "cuda" for backend in config.backends) and has_cuda_device()
    return Head.of(
        command,
        gpus=gpus,
        versions=versions,
        threads=config.threads,
        compiled_as=str(config.machine or ""),
        terms=terms,
        options=config.deciding,
        shard=number,
        shards=total,
    )


def status_words(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Category, letter and word of a test that pytest would call passed, skipped or xfailed; ``None``: pytest's."""
    if word := getattr(report, "gemm_word", ""):
        return "failed", "F", word
    judged = getattr(report, "gemm", None)
    if judged is None or report.when != "call" or not (report.passed or report.skipped):
        return None
    if report.passed:
        verdicts = report.gemm_verdicts
        words = {"undecided": ("undecided", "?", "UNDECIDED"), "no-baseline": ("no-baseline", "b", "NO-BASELINE")}
        return next((words[verdict] for verdict in words if verdict in verdicts), None)
    ended = {record["status"] for record in judged["outcomes"]}
    xfailed = hasattr(report, "wasxfail")
    own = [Status.KNOWN_FAILURE] if xfailed else [Status.NOT_RUN, Status.PRUNED, Status.UNSUPPORTED]
    found = next((str(status) for status in own if str(status) in ended), "")  # "": a skip of the user's
    return (found, found[0], found.upper()) if found else None
