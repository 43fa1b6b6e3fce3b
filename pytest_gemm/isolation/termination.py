"""How processes end: by SIGTERM as by Ctrl-C, and at the end of the tests whatever threads a kernel has left.

Where SIGTERM ends a run, workers end, temporary folders go, and the run record is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any, Final

from pytest_gemm.core.text import one_line

STATUS = 128 + signal.SIGTERM
"""The exit status of a run that SIGTERM ended: 143, as of a process that the signal itself ends."""
# ``timeout`` sends the signal to its process group, and the process that watches this one sends it, too.
_SAME: Final = 2.0


class Terminated(KeyboardInterrupt):
    """Raised in the main thread where SIGTERM finds it."""


class Termination:
    """The handler of SIGTERM of a run's main process.

    Only where the signal has no other handler.  The first signal raises :class:`Terminated`; another one, 2 s later or
    more, ends the process at once.  A process that is forked meanwhile ends as if there were no handler.

    Attributes:
        received: whether the signal has come.
    """

    def __init__(self) -> None:
        self.received = False
        self._since = 0.0
        self._process = os.getpid()
        main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
        self._installed = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._installed:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: Any) -> None:
        again = self.received and time.monotonic() - self._since >= _SAME
        if again or os.getpid() != self._process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        if self.received:
            return
        self.received, self._since = True, time.monotonic()
        raise Terminated("SIGTERM")

    def close(self) -> None:
        """Take the handler away."""
        if self._installed:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False


# -- threads of kernels -------------------------------------------------------------------------------------------

# Seconds that other threads have to end when all else is done; xdist ends its workers after 10.
_GRACE: Final = 5.0


def end_soon(status: int) -> None:
    """End this process although a kernel's thread goes on, for which Python waits at the exit; called at the very end.

    A thread of an executor ends when Python asks it to.  What else is there after the time is named on stderr.

    Args:
        status: to end with.
    """
    threading.Thread(target=_end, args=(status,), daemon=True).start()


def _end(status: int) -> None:
    time.sleep(_GRACE)
    left = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    if left:  # else the main thread is at work: it writes a report, for instance
        names = ", ".join(map(one_line, left))
        os.write(
            2, f"gemm: {len(left)} thread(s) still there {_GRACE:g} s after the tests, now ended: {names}\n".encode()
        )
        leave(status)


def leave(status: int) -> None:
    """Do all that is to be done at the exit, and end."""
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
