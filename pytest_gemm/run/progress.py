"""Progress of a long wait, on a terminal or in a log."""

from __future__ import annotations

import time
from typing import Any


class Display:
    """Where progress is shown: one line that is written over on a terminal, a line now and then elsewhere.

    Args:
        reporter: pytest's terminal reporter, ``None`` for silence.
    """

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._next = 0.0
        self._open = False

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._reporter is not None:
            if self._open:
                self._reporter.rewrite("", erase=True)
                self._open = False
            self._reporter.ensure_newline()
            self._reporter.write_line(text)

    def progress(self, text: str) -> None:
        """How far it is; not every call is shown."""
        now = time.monotonic()
        if self._reporter is None or now < self._next:
            return
        if self._reporter.isatty:
            self._next = now + 0.5
            self._reporter.rewrite(text, erase=True)
            self._open = True
        else:
            self._next = now + 15.0
            self.line(text)
