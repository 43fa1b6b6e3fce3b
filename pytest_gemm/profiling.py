"""The hooks of ``--gemm-profile``: spans of collection, waiting and tests, and how they reach the controller."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

import pytest

from pytest_gemm import trace
from pytest_gemm.config import CONFIG, SPEED_WORKER
from pytest_gemm.run.profile import TEST, WAIT, Profile, Used, used
from pytest_gemm.run.state import RunState
from pytest_gemm.values import cores

# Seconds from which on the trace shows a fixture.
_WORTH_A_SPAN: Final = 0.001


def register(config: pytest.Config, state: RunState, pid: int) -> None:
    """Add the hooks where the run asks for them; a process that times is left alone."""
    if config.stash[CONFIG].profile and not config.pluginmanager.has_plugin(SPEED_WORKER):
        config.pluginmanager.register(Profiler(config, state, pid), "gemm-profile")


class Profiler:
    """One in each process; the one that reports puts them together.

    Args:
        config: pytest's.
        state: of the run.
        pid: of the process whose start is the run's; a supervised one is a fork.
    """

    def __init__(self, config: pytest.Config, state: RunState, pid: int) -> None:
        self._config, self._state, self._pid = config, state, pid
        self._process = os.environ.get("PYTEST_XDIST_WORKER", "main") if hasattr(config, "workerinput") else "main"
        self._controls = self._process == "main" and str(config.getoption("dist", "no")) != "no"
        self._began = self._idle_since = self._collected = 0.0
        self._profile = Profile()
        trace.begin()

    def pytest_unconfigure(self) -> None:
        """A later run in this process need not be profiled."""
        trace.stop()

    # -- spans

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """pytest and its plugins are loaded."""
        self._began = self._collected = trace.now()
        trace.add("start", trace.process_start(self._pid), end=self._began)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Collect."""
        start = trace.now()
        result = yield
        if not self._controls:
            trace.add("collect", start)
            self._idle_since = trace.now()
        return result

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """The last of these begins the tests."""
        self._collected = trace.now()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """A test; a worker waits before it."""
        if self._process != "main":
            trace.add(WAIT, self._idle_since)
        start = trace.now()
        result = yield
        trace.add(item.name, start, TEST, {"test": item.nodeid})
        self._idle_since = trace.now()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """A fixture that takes its time; the one of the judge imports torch."""
        start = trace.now()
        result = yield
        if trace.now() - start > _WORTH_A_SPAN:
            trace.add(fixturedef.argname, start, "import of torch" if fixturedef.argname == "_gemm_judge" else "")
        return result

    # -- how they travel

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send what there is with the report."""
        made: Any = yield  # pytest keeps and ships extra attributes
        if call.when == "call":
            _say_how_it_ended(getattr(made, "gemm", {}).get("outcomes", ()))
        made.gemm_trace = {"process": self._process, "spans": trace.taken()}
        return made  # type: ignore[no-any-return]  # a report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test's process sent."""
        if self._process == "main" and (sent := getattr(report, "gemm_trace", None)) is not None:
            self._profile.absorb(sent["process"], sent["spans"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in the rest; a worker that died has sent none."""
        output, name = getattr(node, "workeroutput", {}), str(node.gateway.id)
        if "gemm_trace" in output:
            self._profile.absorb(name, output["gemm_trace"])
            self._profile.used[name] = Used(**output["gemm_used"])
        else:
            self._profile.died.add(name)

    @pytest.hookimpl(wrapper=True, trylast=True)  # around what others do at the end, and inside pytest's summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Send the rest, or write the trace."""
        ended = trace.now()
        if self._process != "main":
            trace.add(WAIT, self._idle_since)
            output = session.config.workeroutput  # type: ignore[attr-defined]  # xdist's
            output["gemm_trace"], output["gemm_used"] = trace.taken(), dataclasses.asdict(used())
            return (yield)
        if self._controls:
            trace.add("start and collection of the workers", self._began, end=self._collected)
            trace.add("tests", self._collected, end=ended)
        else:
            self._profile.used["main"] = used()
        result = yield
        trace.add("end of the run", ended)
        self._profile.absorb("main", trace.taken())
        self._profile.close(ended)
        if (path := self._config.stash[CONFIG].file("trace.json")) is not None:
            with self._state.writing(path):
                self._profile.write(path)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Where the time went."""
        path = self._config.stash[CONFIG].file("trace.json")
        kept = f"trace: {path}; ui.perfetto.dev shows it" if path else "--gemm-output=DIR keeps the trace"
        terminalreporter.section("GEMM profile")
        for line in (*self._profile.lines(cores()), kept):
            terminalreporter.write_line(line)


def _say_how_it_ended(outcomes: Iterable[Mapping[str, Any]]) -> None:
    """Add the status to the spans of a case, which were kept before it was known."""
    found = {(one["candidate"], one["distribution"]): str(one["status"]) for one in outcomes}
    for span in trace.kept():
        args = span["args"]
        if "distribution" in args and found:
            which = args["distribution"]
            alike = [status for (_, distribution), status in found.items() if distribution in {which, ""}]
            args["status"] = found.get((args["candidate"], which), (*alike, *found.values())[0])
