"""A limit for whatever may never end, and what a process leaves behind when it ends with it.

An endless kernel cannot be interrupted, a segmentation fault tells nothing, and after an illegal address the process
has lost its device.  Each of them ends one process, so what matters is kept outside of it: a :class:`Journal` holds
in files what the process is doing and what it has judged of the test at hand.  The process that hands out the tests
reads them (:class:`Journals`), adds how the case at hand ended, and lets another worker go on with the same test behind
that case.  ``docs/explanation/faults.md`` has the whole story.  No torch here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import IO

from pytest_gemm.core.outcome import Activity, Outcome
from pytest_gemm.isolation.journal import Journal, death, end_process
from pytest_gemm.worker.death import OWN, SHOWN

# -- the limit -------------------------------------------------------------------------------------

# The limit of the kernel that runs, in seconds; 0: none runs.  A copy of the process that the kernel forks has no
# thread that watches it, and may wait for ever for threads that were not copied.
_running = 0.0


def _limit_of_a_copy() -> None:
    if _running:  # faulthandler would wait for its thread, which was not copied
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _running)


os.register_at_fork(after_in_child=_limit_of_a_copy)

# How often is looked whether a limit has run out, in seconds.
_POLL = 0.1
# How much later than the watch the backstop ends a process at least, in seconds.
_GRACE = 5.0


class Watch:
    """Ends the process when something takes longer than its limit: ``with watch(activity): ...``.

    A thread looks on.  Where Python's lock is not given back (a kernel that was called with it) no thread of Python
    runs any more, so there is a backstop: a timer of faulthandler's, which needs no lock.

    Args:
        run: limit of one run of a kernel, in seconds; 0: none.
        compile_: limit of one compile, and of whatever else the harness does in a case; 0: none.
        journal: where the last entry go.
        last_call: is told the outcome before the process ends, where no other process will report it.
        stacks: where the backstop writes the stack, a file or its descriptor; ``None``: no backstop.
    """

    def __init__(
        self,
        run: float,
        compile_: float,
        journal: Journal,
        last_call: Callable[[Outcome], None] | None = None,
        stacks: IO[str] | int | None = None,
    ) -> None:
        self.journal = journal
        self._run = run
        self._compile = compile_
        self._last_call = last_call
        self._backstop = _Backstop(stacks)
        # When the limit of what may not come back runs out, by time.monotonic(), and the thread that does it.
        self._now: tuple[float, int] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def __call__(self, activity: Activity) -> Iterator[None]:
        """Watch over the block, which holds no other of this kind; its limit follows from the activity's phase."""
        limit = self._run if activity.phase.is_run else self._compile
        process = os.getpid()
        global _running  # noqa: PLW0603  # hooks of a fork cannot be taken back, so there is one
        _running = limit if activity.phase.is_run else 0.0
        with self._lock:
            self.journal.doing(activity, limit)
            if limit:
                self._now = time.monotonic() + limit, threading.get_ident()
                self._backstop.hold(limit + _GRACE)
            else:
                self._backstop.drop()
        if limit and self._thread is None:
            self._thread = threading.Thread(target=self._look_on, name="pytest-gemm-watch", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            if os.getpid() != process:  # a kernel has forked, and this copy would go on as another pytest
                os._exit(1)
            _running = 0.0
            with self._lock:  # not before the last entry of a limit that has just run out
                self._now = None
                self.journal.over()

    def lift(self) -> None:
        """No limit for the block at hand: a debugger is open in it."""
        with self._lock:
            self._now = None
            self._backstop.drop()

    def rest(self) -> None:
        """Nothing is to be watched for a while: a test has ended."""
        with self._lock:
            self._backstop.drop()

    def close(self) -> None:
        """Stop looking on."""
        self._closed.set()
        self.rest()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look_on(self) -> None:
        while not self._closed.wait(_POLL):
            with self._lock:
                self._backstop.move_on()
                if self._now is not None and time.monotonic() >= self._now[0]:
                    self._end(self._now[1])

    def _end(self, thread: int) -> None:
        """Say what did not end, and end the process: nothing else ends a kernel."""
        try:
            self.journal.time_is_up(_stack_of(thread))
            if self._last_call is not None:
                self._last_call(death(self.journal.position, None))
        finally:
            end_process()


class _Backstop:
    """faulthandler's timer, kept ahead of the time as long as Python runs.

    Setting it costs 0.1 ms, for it starts a thread; so it is set a third too far, and again when that has passed.

    Args:
        file: where it writes the stack; ``None``: no backstop.
    """

    def __init__(self, file: IO[str] | int | None) -> None:
        self._file = file
        self._seconds = 0.0
        self._until = 0.0

    def hold(self, seconds: float) -> None:
        """End the process when Python stands still for so long from now on, or for up to a third longer."""
        if self._file is None or (seconds == self._seconds and self._until - time.monotonic() >= seconds):
            return
        far = seconds * 4 / 3
        faulthandler.dump_traceback_later(far, exit=True, file=self._file)
        self._seconds, self._until = seconds, time.monotonic() + far

    def move_on(self) -> None:
        """Python runs."""
        if self._seconds:
            self.hold(self._seconds)

    def drop(self) -> None:
        """Take it away."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            self._seconds = 0.0


def _stack_of(thread: int) -> str:
    """The innermost frames of a thread behind the judge's, as a traceback shows them."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    judge = [i for i, f in enumerate(frames) if any(own in f.filename for own in OWN)]
    inner = frames[judge[-1] + 1 :] if judge else frames
    return "".join(traceback.format_list(inner[-SHOWN:])).rstrip()
