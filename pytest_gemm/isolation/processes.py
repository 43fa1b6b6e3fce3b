"""Ending a process and all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def end_process() -> None:
    """End this process at once, and the compilers that it has started: they would outlive it."""
    try:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(1)


def _descendants(root: int) -> list[int]:
    """Processes that this one started, and those that they started; none where there is no ``/proc``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended since
            continue
        # "pid (name) state ppid ...", and a name may hold brackets and blanks.
        children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    ahead = [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found
