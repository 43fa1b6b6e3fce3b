"""How far a long wait is: precompiling, timing, fuzzing."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from typing import Any, Final

INTERVAL: Final = 30.0
"""Seconds between two lines of progress where the output is no terminal."""
# Between two changes of the line on a terminal.
_REWRITTEN: Final = 0.5


class Display:
    """Progress of a long wait: one line that is written over on a terminal, a line now and then elsewhere.

    Args:
        reporter: pytest's terminal reporter, ``None`` for silence.
        quiet: show no progress, only the lines that stay.
    """

    def __init__(self, reporter: Any, *, quiet: bool = False) -> None:
        self._reporter = reporter
        self._quiet = quiet or reporter is None
        self._next = 0.0
        self._open = False

    @classmethod
    def of(cls, config: Any) -> Display:
        """That of a run of pytest, without progress where ``-q`` is given."""
        return cls(config.pluginmanager.get_plugin("terminalreporter"), quiet=config.get_verbosity() < 0)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._reporter is not None:
            self.clear()
            self._reporter.ensure_newline()
            for line in quoted([text]) if "##[" in text else [text]:  # a command in the middle of a line
                self._reporter.write_line(line)

    def clear(self) -> None:
        """Take away the line that is written over."""
        if self._open:
            self._reporter.rewrite("", erase=True)
            self._open = False

    def progress(self, text: str) -> None:
        """How far it is; not every call is shown."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._open = self._reporter.isatty
        self._next = now + (_REWRITTEN if self._open else INTERVAL)
        if self._open:
            self._reporter.rewrite(text, erase=True)
        else:
            self.line(text)


def is_read_by_github() -> bool:
    """Whether GitHub reads the output."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def quoted(lines: Iterable[str]) -> list[str]:
    """Lines in which GitHub looks for no commands, whatever a kernel has written there; elsewhere they are as given."""
    if not is_read_by_github():
        return list(lines)
    token = secrets.token_hex(16)  # nothing that is in the lines can have known it
    return [f"::stop-commands::{token}", *lines, f"::{token}::"]
