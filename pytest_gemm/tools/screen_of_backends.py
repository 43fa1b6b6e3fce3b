"""A screen about the backends that a conftest registers, by pytest's own start: ``doctor`` and ``fingerprint``.

pytest reads the ini file, imports the conftests and is configured; then the screen is shown in place of a session.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.text import show as print_text

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig

# Writes the screen by its second argument, line by line, and returns whether all is well.
Report = Callable[["GemmConfig", Callable[[str], object]], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that such commands share."""
    parser.add_argument("--backends", default="auto", metavar="LIST", help="default: auto, all that can run here")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: each backend's")
    parser.add_argument("--threads", metavar="N", help="CPU threads (default: the cores)")
    parser.add_argument("--timeout", metavar="SECONDS", default="1800", help="limit of one backend (default: 1800)")
    parser.add_argument("--allow-missing", action="store_true", help="a named backend may be missing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME.KEY=VALUE", help="a backend's setting")
    parser.add_argument(
        "pytest_args",
        nargs="*",
        metavar="ARG",
        help="pytest's: a folder whose conftest.py registers backends; behind --: options, -p PLUGIN for instance",
    )


class _Screen:
    """A plugin that shows the screen where pytest would run its session."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Configure pytest as ``--fixtures`` does, show the screen, and end."""
        from pytest_gemm.config import CONFIG

        config._do_configure()
        try:
            healthy = self._report(config.stash[CONFIG], lambda line: print_text(f"{line}\n"))
        finally:
            config._ensure_unconfigure()
        return int(pytest.ExitCode.OK if healthy else pytest.ExitCode.TESTS_FAILED)


def show(given: argparse.Namespace, report: Report, options: Sequence[str] = ()) -> int:
    """Show a screen; returns the exit status.

    Args:
        given: what :func:`add_arguments` parsed.
        report: the screen.
        options: further ones of pytest.
    """
    words = [f"--gemm-backends={given.backends}", f"--gemm-device={given.device}", *options]
    words += [f"--gemm-threads={given.threads}"] if given.threads else []
    words += [f"--gemm-timeout=60,{given.timeout}", *(["--gemm-allow=missing"] if given.allow_missing else [])]
    words += [f"--gemm-set={one}" for one in given.set]
    os.environ["PYTEST_ADDOPTS"] = ""  # it is about runs of tests
    return int(pytest.main([*words, *given.pytest_args], plugins=[_Screen(report)]))
