"""Processes that a kernel leaves behind: who has started its process adopts them and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

_SET_CHILD_SUBREAPER: Final = 36
# Seconds in which they are ended: longer only for what runs under another user's id.
_LIMIT: Final = 5.0


def adopt() -> None:
    """From now on what descends from this process is its child as soon as its own parent has ended (prctl(2))."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(patience: float = 0.0) -> None:
    """End the children of this process, and those that become its children by that, until there is none.

    Args:
        patience: seconds in which they may end by themselves.
    """
    begun, listed = time.monotonic(), Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError, FileNotFoundError):  # there is none; the system does not list them
        while (spent := time.monotonic() - begun) < patience + _LIMIT:
            os.waitpid(-1, os.WNOHANG)
            if spent < patience:
                time.sleep(0.001)
            for child in listed.read_text().split() if spent >= patience else ():
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
