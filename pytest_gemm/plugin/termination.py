"""How processes end: by SIGTERM as by Ctrl-C.

Where SIGTERM ends a run, workers end, temporary folders go, and the run record is closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any, Final

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
