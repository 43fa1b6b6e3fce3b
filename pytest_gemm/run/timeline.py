"""Where the time of a run goes: the spans and the trace file, and what tests took last time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gemm.config.config import CONFIG, SPEED_WORKER, GemmConfig
from pytest_gemm.core import trace
from pytest_gemm.core.text import table
from pytest_gemm.machine import processor
from pytest_gemm.record.writer import Writer
from pytest_gemm.storage import cache, files

# Seconds: a shorter run is not recorded.
_WORTH_KEEPING: Final = 10.0
# Options on which the seconds of a test depend that its name does not have.
_OPTIONS: Final = ("level", "candidates", "distributions", "reference", "guard", "threads", "device")
# Tests that are kept of each kind of run; those that ran last.
_MOST: Final = 50_000
# Seconds of a test that is not recorded, and multiplications a second that the reference makes for it.
_USUAL: Final = 0.3
_PRODUCTS: Final = 4e8
_SIZES: Final = re.compile(r":((?:\d+x){2,}\d+)")
# The kind of the span of a test; what no span inside covers is pytest's and the plugin's own.
_TEST: Final = "pytest, fixtures, reports"

Span = Mapping[str, Any]


def register(config: pytest.Config, writer: Writer) -> None:
    """Add the hooks; a process that times is left alone."""
    settings, is_worker = config.stash[CONFIG], hasattr(config, "workerinput")
    if config.pluginmanager.has_plugin(SPEED_WORKER):
        return
    if settings.profile:
        config.pluginmanager.register(_Profile(config, writer), "gemm-profile")
    if not (is_worker or config.option.collectonly or settings.compile_only or settings.fuzz):
        config.pluginmanager.register(_Durations(config), "gemm-durations")


# -- what tests took -------------------------------------------------------------------------------------------


def path_of(config: GemmConfig) -> Path:
    """The record of runs like this one: with this CPU, this torch and these options."""
    cpu = processor.cpu()
    facts = [cpu.name, str(cpu.logical), metadata.version("torch"), *(config.options[name] for name in _OPTIONS)]
    return cache.home() / "durations" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"


def read(path: Path) -> dict[str, float]:
    """The recorded seconds by test; nothing where the file is missing or is no such record."""
    try:
        return {name: float(seconds) for name, seconds in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def record(path: Path, seconds: Mapping[str, float]) -> None:
    """Add a run; where the folder cannot be written the next run knows nothing of it."""
    earlier = {name: took for name, took in read(path).items() if name not in seconds}
    kept = [*earlier.items(), *((name, round(took, 3)) for name, took in seconds.items())][-_MOST:]
    with contextlib.suppress(OSError):
        files.replace(path, json.dumps(dict(kept)).encode())


def expected(known: Mapping[str, float], ids: Iterable[str]) -> dict[str, float]:
    """Seconds of each test: as recorded, else a guess that grows with its product, as the reference does."""

    def guess(name: str) -> float:
        sizes = _SIZES.search(name)  # to a tenth, so that most tests keep their order
        return _USUAL + (round(math.prod(map(int, sizes[1].split("x"))) / _PRODUCTS, 1) if sizes else 0.0)

    return {nodeid: known.get(name := name_of(nodeid), guess(name)) for nodeid in ids}


def name_of(nodeid: str) -> str:
    """A test without the folder that it lies in, which depends on where pytest is started."""
    file, _, rest = nodeid.partition("::")
    return f"{file.rpartition('/')[2]}::{rest}"


class _Durations:
    """Records what the tests took; in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = path_of(config.stash[CONFIG])
        self._took: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took."""
        self._took[name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Record it."""
        if sum(self._took.values()) >= _WORTH_KEEPING:
            record(self._path, self._took)


# -- spans -----------------------------------------------------------------------------------------------------


def own_seconds(spans: Iterable[Span]) -> Counter[str]:
    """Seconds by kind, each second for the innermost span; one without a kind counts as the one around it."""
    found, around = Counter[str](), list[tuple[str, float]]()
    for span in sorted(spans, key=lambda one: (one["start"], -one["seconds"])):
        while around and around[-1][1] <= span["start"]:
            around.pop()
        kind = span["kind"] or (around[-1][0] if around else span["name"])
        found[kind] += span["seconds"]
        if around:
            found[around[-1][0]] -= span["seconds"]
        around.append((kind, span["start"] + span["seconds"]))
    return found


class _Profile:
    """The hooks of ``--gemm-profile``: workers send their spans with the reports, the process that reports writes."""

    def __init__(self, config: pytest.Config, writer: Writer) -> None:
        self._config, self._writer, self._is_worker = config, writer, hasattr(config, "workerinput")
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)
        trace.begin()
        self._began = trace.now()

    def pytest_unconfigure(self) -> None:
        """A later run in this process need not be profiled."""
        trace.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Collect."""
        with trace.span("collect"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send what there is with the report."""
        made: Any = yield  # pytest keeps and ships extra attributes
        made.gemm_trace = trace.taken()
        return made  # type: ignore[no-any-return]  # a report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test's process sent; the report itself is the span of a part of its test."""
        if self._is_worker:
            return
        made: Any = report
        lane = self._spans[made.node.gateway.id if hasattr(made, "node") else "main"]
        whole = {"name": f"{report.when} {report.nodeid.partition('::')[2]}", "kind": _TEST, "thread": 0}
        lane.append({**whole, "start": report.start, "seconds": report.duration, "args": {"test": report.nodeid}})
        lane += made.__dict__.pop("gemm_trace", ())

    @pytest.hookimpl(wrapper=True, trylast=True)  # around what others do at the end, and inside pytest's summary
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Write the trace."""
        with trace.span("end of the run"):
            result = yield
        path = self._config.stash[CONFIG].file("trace.json")
        if not self._is_worker:
            self._spans["main"] += trace.taken()
            if path is not None:
                with self._writer.writing(path):
                    path.write_text(json.dumps({"traceEvents": self._events()}), encoding="utf-8")
        return result

    def _events(self) -> list[dict[str, Any]]:
        """The spans in Chrome's trace format: a lane for each thread of each process."""
        lanes: dict[tuple[str, int], int] = {}
        found: list[dict[str, Any]] = []
        for process, spans in sorted(self._spans.items()):
            for span in sorted(spans, key=lambda one: (one["thread"], one["start"], -one["seconds"])):
                lane = lanes.setdefault((process, span["thread"]), len(lanes))
                times = {"ts": (span["start"] - self._began) * 1e6, "dur": span["seconds"] * 1e6}
                what = {"name": span["name"], "cat": span["kind"] or "step", "args": span["args"]}
                found.append({**what, **times, "pid": 1, "tid": lane, "ph": "X"})
        for (process, thread), lane in lanes.items():
            name = {"name": f"{process}, thread {thread}" if thread else process}
            found.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": name})
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The seconds of the processes that ran tests, by kind."""
        judging = self._spans.keys() - {"main"} or {"main"}
        found = Counter[str]()
        for name in judging:
            found.update(own_seconds(span for span in self._spans[name] if span["thread"] == 0))
        total = sum(found.values()) or 1.0
        rows = [(kind, f"{seconds:.1f}", f"{seconds / total:.1%}") for kind, seconds in found.most_common()]
        path = self._config.stash[CONFIG].file("trace.json")
        terminalreporter.section("GEMM profile")
        for line in table(("what", "seconds", "share"), rows, (1, 2)):
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"{len(judging)} process(es), {total:.1f} s in all, within {trace.now() - self._began:.1f} s"
        )
        terminalreporter.write_line(
            f"trace: {path}; ui.perfetto.dev shows it" if path else "--gemm-output=DIR keeps the trace"
        )
