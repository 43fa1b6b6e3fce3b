"""How a process ended, in words."""

from __future__ import annotations

import re
import signal
from typing import Final

# Frames of a stack that are shown: enough to see where, not a page.
SHOWN: Final = 6
# In the file of each of our own frames; what is called from there is the backend's.
OWN: Final = ("pytest_gemm/judging/", "pytest_gemm/worker/")
# In the frames of the thread that answers a judge.
_ANSWERS: Final = "pytest_gemm/worker/server.py"


def manner(status: int | None) -> str:
    """How a process ended, in words.

    Args:
        status: its exit status, negative for a signal, ``None`` where it is unknown.
    """
    if status is None:
        return "nothing is known of its exit status"
    if status >= 0:
        return f"it ended itself with exit status {status}"
    try:
        return f"{signal.Signals(-status).name} ({signal.strsignal(-status)})"
    except ValueError:
        return f"signal {-status}"


def remedy(status: int | None) -> str:
    """What a reader can do about such an end."""
    if status == -signal.SIGKILL:
        return "it was killed, as Linux does when memory runs out: see dmesg; use fewer workers (-n)"
    return "run the case alone under a debugger: gdb --args python -m pytest ..."


def stack_frames(dump: str) -> str:
    """The innermost frames of the thread that ran the kernel, innermost last, out of what faulthandler wrote."""
    threads = re.split(r"^(?:Current thread|Thread|Stack) .*$", dump, flags=re.MULTILINE)[1:]
    judging = next((t for t in threads if _ANSWERS in t), threads[0] if threads else "")
    frames = re.findall(r'^ +(File ".*)$', judging, re.MULTILINE)
    inner = [i for i, frame in enumerate(frames) if any(own in frame for own in OWN)]
    return "\n".join(reversed(frames[: min(inner[0] if inner else SHOWN, SHOWN)]))
