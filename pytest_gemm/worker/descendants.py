"""Processes that a kernel leaves behind: who has started its process adopts them and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

import psutil

_SET_CHILD_SUBREAPER: Final = 36
# Seconds in which they are ended: longer only for what runs under another user's id.
_LIMIT: Final = 5.0
_PAUSE: Final = 0.001


def adopt() -> None:
    """From now on what descends from this process is its child as soon as its own parent has ended (prctl(2))."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(patience: float = 0.0) -> None:
    """End the children of this process, and those that become its children by that, until there is none.

    Args:
        patience: seconds in which they may end by themselves.
    """
    begun = time.monotonic()
    with contextlib.suppress(ChildProcessError):  # there is none
        while (spent := time.monotonic() - begun) < patience + _LIMIT:
            os.waitpid(-1, os.WNOHANG)
            if spent < patience:
                time.sleep(_PAUSE)
                continue
            for child in _children():
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)


def _children() -> list[int]:
    with contextlib.suppress(OSError):  # quicker, so that a process that forks on and on does not get away
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    return [one.pid for one in psutil.Process().children()]
