"""Commands about the backends that a conftest registers, ``doctor`` and ``fingerprint``: arguments, start, worker.

pytest reads the ini file, imports the conftests and is configured; then the report is shown in place of a session.
The backends work in a worker process: a kernel that ends its process, or never returns, is one line of the report.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.run.progress import Display
from pytest_gemm.text import show as print_text

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig

# Writes a report to its second argument, line by line, and returns whether all is well.
Report = Callable[["GemmConfig", Display], bool]

WIDTH: Final = 118
"""Characters of a line."""
# Between two looks for an answer, in seconds.
_TICK: Final = 0.5
# Limit of a run of a kernel, in seconds.
_RUN_LIMIT: Final = "120"


def ticking(items: Iterator[Any], tick: Callable[[], object]) -> Iterator[Any]:
    """The items as they come; ``tick`` is called in between, twice a second.

    Raises:
        Exception: what ``items`` raises.
    """
    came: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def take() -> None:
        try:
            for item in items:
                came.put(("item", item))
            came.put(("end", None))
        except Exception as error:  # raised where they are taken
            came.put(("raised", error))

    threading.Thread(target=take, daemon=True).start()
    while True:
        try:
            what, item = came.get(timeout=_TICK)
        except queue.Empty:
            tick()
            continue
        if what == "raised":
            raise item
        if what == "end":
            return
        yield item


class _Screen:
    """What a display needs of pytest's terminal reporter, which writes nothing outside of a session."""

    def __init__(self) -> None:
        self.isatty = sys.stdout.isatty()

    def ensure_newline(self) -> None:
        """All lines end with one."""

    def write_line(self, text: str) -> None:
        """A line that stays."""
        print_text(f"{text}\n")
        sys.stdout.flush()

    def rewrite(self, text: str, erase: bool) -> None:
        """A line that is written over; ``erase`` takes away what was there."""
        print_text("\r" + "\x1b[K" * erase + text[:WIDTH])
        sys.stdout.flush()


class _Plugin:
    """A plugin that shows the report where pytest would run its session."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Configure pytest as ``--fixtures`` does, show the report, and end."""
        from pytest_gemm.config import CONFIG

        config._do_configure()
        try:
            display = Display(_Screen(), quiet=config.option.verbose < 0, since=time.monotonic())
            healthy = self._report(config.stash[CONFIG], display)
        finally:
            config._ensure_unconfigure()
        return int(pytest.ExitCode.OK if healthy else pytest.ExitCode.TESTS_FAILED)


def show(given: argparse.Namespace, report: Report, options: Sequence[str] = (), run_limit: str = _RUN_LIMIT) -> int:
    """Show a report; returns the exit status.

    Args:
        given: the arguments of ``commands.toml``.
        report: the report.
        options: further ones of pytest.
        run_limit: seconds that a run of a kernel may take.
    """
    words = [f"--gemm-backends={given.backends}", f"--gemm-device={given.device}", *options]
    words += [f"--gemm-threads={given.threads}"] if given.threads else []
    words += [
        f"--gemm-timeout={run_limit},{given.timeout}",
        *(["--gemm-allow=missing"] if given.allow_missing else []),
    ]
    words += [f"--gemm-set={one}" for one in given.set]
    # Of an installed pytest-gemm pytest says that it is imported already; a project may turn warnings into errors.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os.environ["PYTEST_ADDOPTS"] = ""  # it is about runs of tests
    return int(pytest.main([*words, *given.pytest_args], plugins=[_Plugin(report)]))
