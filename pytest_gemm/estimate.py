"""The hooks that say early how long a run will take, and that record what its tests took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from pytest_gemm import selection, xdist
from pytest_gemm.config import CONFIG, SPEED_WORKER, workers
from pytest_gemm.run import durations


def register(config: pytest.Config) -> None:
    """Add the hooks in the process that reports, where the tests of a suite run."""
    settings, other = config.stash[CONFIG], hasattr(config, "workerinput") or config.option.collectonly
    if not other and not config.pluginmanager.has_plugin(SPEED_WORKER) and not settings.compile_only:
        config.pluginmanager.register((_Fuzzing if settings.fuzz else _Estimate)(config), "gemm-estimate")


class _Fuzzing:
    """The hook of a run that fuzzes, which runs in one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._settings = config.stash[CONFIG]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> str | None:
        """Say how the time is divided."""
        names = [backend.name for backend in selection.available(self._settings)]
        if not items or not names:
            return None
        each = f": {self._settings.fuzz / len(names):.3g} s for each of {', '.join(names)}" if len(names) > 1 else ""
        return f"gemm: fuzzing takes {self._settings.fuzz:g} s{each}; a trial that is at work then is finished"


class _Estimate:
    """The hooks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._path = durations.path_of(config.stash[CONFIG])
        self._took: defaultdict[str, float] = defaultdict(float)
        self._said = False

    @pytest.hookimpl(tryfirst=True)  # pytest shows these lines in the reverse order
    def pytest_report_collectionfinish(self, items: Sequence[pytest.Item]) -> list[str]:
        """Say it without xdist."""
        return self._lines(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Say it when the first worker has collected."""
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._said or terminal is None:
            return
        self._said = True
        for line in self._lines(ids):
            terminal.ensure_newline()
            terminal.write_line(line)

    def _lines(self, ids: Iterable[str]) -> list[str]:
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for nodeid in ids:
            if selection.case_id(nodeid) is not None:
                groups[xdist.scope(nodeid)].append(durations.name_of(nodeid))
        said = durations.estimate(durations.read(self._path), groups.values(), workers(self._config)) if groups else ""
        return [f"gemm: the tests take {said}, by earlier runs on this machine"] if said else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took; a timed one is measured before it begins."""
        if selection.case_id(report.nodeid) is not None and not getattr(report, "gemm", {}).get("verdicts"):
            self._took[durations.name_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Record it."""
        if sum(self._took.values()) >= durations.WORTH_A_LINE:
            durations.record(self._path, self._took)
