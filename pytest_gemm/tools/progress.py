"""One line of progress on a terminal, gone at the end; nothing elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

# Seconds between two changes of the line.
_REWRITTEN: Final = 0.2
_ERASE: Final = "\r\x1b[K"


@contextlib.contextmanager
def shown(text: Callable[[], str]) -> Iterator[None]:
    """Show what ``text`` returns, with the seconds since the beginning, while the block runs.

    It is written to standard error, where that is a terminal: the other output may be read by a program.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended, started = threading.Event(), time.monotonic()

    def write() -> None:
        while not ended.wait(_REWRITTEN):
            line = f"{time.monotonic() - started:.0f} s: {text()}"
            sys.stderr.write(_ERASE + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stderr.write(_ERASE)
        sys.stderr.flush()
