"""A run without worker processes, watched by its parent: it ends with the status that pytest decided, or it is red.

A kernel can end the process that judges it, by a fault or by ``os._exit(0)``, and the status of such a process says
nothing of the tests.  So pytest forks at its start, before anything heavy is imported::

    parent                        child
    waits, passes signals on      is pytest: collects, judges, reports
          |<-- journal, diary ------|   what was judged, and what it is doing
          |<-- exit status ---------|   through a pipe, when pytest has come to its end

A child that is gone without that word has been ended by what it was doing.  The parent says which case that was, what
had been judged and what had failed, and ends with 1.  The child is pytest in every other way: it has the terminal, the
process group, and its own exit handlers.  When the parent dies the child is killed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import pytest

from pytest_gemm import records, selection
from pytest_gemm.failures import text as text_module
from pytest_gemm.isolation.journal import Diaries, Words, manner
from pytest_gemm.outcome import Outcome
from pytest_gemm.run import terminal
from pytest_gemm.text import printable

# The name of the child's diary.
PROCESS: Final = "main"
# Signals that end a run; the parent hands on those that only it was sent.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG: Final = 1
# Characters of one earlier failure that are shown again.
_FAILURE: Final = 4000

# What the ledger says of outcomes, whose process had these last words.
Explained = Callable[[Sequence[Outcome], Words | None, Mapping[str, Any]], list[Outcome]]


def wanted(config: pytest.Config) -> bool:
    """Whether this process is pytest's own program and can be forked: a debugger and threads would stay behind."""
    if sys.platform != "linux" or hasattr(config, "workerinput") or threading.active_count() > 1:
        return False
    debugged = config.getoption("usepdb", False) or config.getoption("trace", False) or sys.gettrace() is not None
    return not debugged and _is_program() and not _is_traced()


def _is_program() -> bool:
    """Whether pytest was started from a shell; a program that calls ``pytest.main()`` must not be forked."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name.endswith("main") and _module(frame) == "_pytest.config"):
        frame = frame.f_back
    above = []
    while frame is not None:
        above.append((frame.f_code.co_name.lstrip("_"), _module(frame)))
        frame = frame.f_back
    return ("console_main", "_pytest.config") in above and {m for _, m in above} <= {"_pytest.config", *_STARTS}


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


# Modules that a program begins in.
_STARTS: Final = ("__main__", "runpy")


def _is_traced() -> bool:
    """Whether gdb or strace looks on, who would follow the parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines())


# -- in the child ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Child:
    """What the process that is pytest tells its parent.

    Attributes:
        diaries: where it writes down what it is doing; its parent removes the folder.
    """

    diaries: Diaries
    journal: int
    pipe: int

    def note(self, **entry: object) -> None:
        """Write down a fact of the run, in one system call."""
        os.write(self.journal, json.dumps(entry).encode() + b"\n")

    def noted(self, made: pytest.TestReport) -> None:
        """Write down the end of a test."""
        if made.when != "call" and not made.failed:
            return
        judged: Mapping[str, Any] = getattr(made, "gemm", {})
        failure = printable(made.longreprtext, _FAILURE) if made.failed else ""
        self.note(test=made.nodeid, end=str(made.outcome), failure=failure, outcomes=judged.get("outcomes", []))

    def finished(self, status: int) -> None:
        """pytest has come to its end.  The process is named, for a kernel may have made copies of it."""
        os.write(self.pipe, f"{os.getpid()} {status}\n".encode())


def start(explained: Explained) -> Child:
    """Fork, and return in the child; the parent waits for it and ends as it does.

    Args:
        explained: what the ledger says of the outcomes of a case that ended the child; called in the parent.
    """
    diaries = Diaries()
    path = diaries.folder / "journal"
    journal = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    read_end, write_end = os.pipe()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # there would be no status to ask for
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_ENDING})
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads, of which there are none of Python's
        child = os.fork()
    if child == 0:
        os.close(read_end)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Child(diaries, journal, write_end)
    final = 1
    try:
        os.close(write_end)
        final = _watched(child, read_end, diaries, explained)
    except BaseException:  # no copy of pytest may go on
        _say([traceback.format_exc()])
    finally:
        diaries.close()
        os._exit(final)


# -- in the parent -----------------------------------------------------------------------------------


def _watched(child: int, pipe: int, diaries: Diaries, explained: Explained) -> int:
    """Wait for the child, and say what is to be said; returns the status to end with."""
    started = time.monotonic()
    status, sent = _wait(child)
    final = _handed(child, pipe)
    if final is None:
        ended = status < 0 and -status in sent  # by somebody
        _say(_Journal(diaries).lines(status, None if ended else explained, time.monotonic() - started))
        if ended:
            diaries.close()
            _end_by(-status)
    elif final == 0 and status != 0:
        _say([f"The tests were over when the process of pytest ended: {manner(status)}.", "The run is red for that."])
    return final or int(final is None or status != 0)


def _wait(child: int) -> tuple[int, set[int]]:
    """The child's exit status, negative for a signal, and the signals that were to end the run."""
    sent: set[int] = set()
    while True:
        info = signal.sigwaitinfo({signal.SIGCHLD, *_ENDING})
        if info.si_signo != signal.SIGCHLD:
            sent.add(info.si_signo)
            if info.si_code <= 0:  # of a process; what the terminal sends, the child gets as well
                os.kill(child, info.si_signo)
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), sent


def _handed(child: int, pipe: int) -> int | None:
    """The exit status that the child has handed over; ``None`` where it did not come to that."""
    os.set_blocking(pipe, False)  # a copy of the child may hold the other end
    try:
        words = os.read(pipe, 1 << 12).split()
    except BlockingIOError:
        return None
    handed = dict(zip(words[::2], words[1::2], strict=False))
    status = handed.get(str(child).encode())
    return int(status) if status is not None else None


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _say(lines: Sequence[str]) -> None:
    text = ("\n" + "\n".join(lines) + "\n").encode(errors="replace")
    while text:
        text = text[os.write(2, text) :]


class _Journal:
    """What the child has left behind."""

    def __init__(self, diaries: Diaries) -> None:
        self.run: dict[str, Any] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.begun: list[str] = []
        self.collected = 0
        self.words = diaries.words(PROCESS)
        for entry in _entries(diaries.folder / "journal"):
            if "end" in entry:
                self.ended[entry["test"]] = entry
            elif "test" in entry:
                self.begun.append(entry["test"])
            else:
                self.run.update(entry)
        test = self.words.test if self.words else ""
        self.last = test or next((one for one in reversed(self.begun) if one not in self.ended), "")
        self.earlier = diaries.outcomes(test) if test else ()

    def lines(self, status: int, explained: Explained | None, seconds: float) -> list[str]:
        """What the parent says of a child that did not come to its end.

        Args:
            status: how it ended, negative for a signal.
            explained: asks the ledger; ``None`` where the run was ended from outside, so that no case is the cause.
            seconds: how long the run took.
        """
        judged = [records.from_record(record) for entry in self.ended.values() for record in entry["outcomes"]]
        failures = [entry for entry in self.ended.values() if entry["failure"]]
        lines = [line for entry in failures for line in (f"FAILED {entry['test']}", entry["failure"], "")]
        if explained is None:
            lines.append(f"The run was ended by {manner(status)}.")
        else:
            crashed = explained(selection.crashed(self.last, self.words, self.earlier, status), self.words, self.run)
            where = f" in {self.last}" if self.last and not crashed else ""
            lines += [text_module.failure(o, self._rerun()) for o in crashed if o.status.is_failure or o.known_failure]
            if not crashed and self.words is not None and self.words.stack:
                lines.append(self.words.stack)
            late = self.words is not None and self.words.ended == "timed-out"
            gone = (
                "Nothing else ends it" if late else f"The process that ran the tests is gone{where}: {manner(status)}"
            )
            lines += end_lines(gone, self._behind())
            judged += crashed
            if record := self.run.get("record"):
                with Path(record).open("a", encoding="utf-8") as file:
                    file.writelines(records.record_line(records.to_record(o)) for o in crashed)
        lines += ["", *terminal.summary(judged, missing={}, stale_entries=(), processes=1, wall_seconds=seconds)]
        counts = Counter(entry["end"] for entry in self.ended.values())
        said = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        return [*lines, f"{said or 'no test'} before the end, in {seconds:.2f} s"]

    def _behind(self) -> int:
        return max(0, int(self.run.get("collected", 0)) - len({*self.ended, *([self.last] if self.last else [])}))

    def _rerun(self) -> text_module.Rerun:
        root, here = Path(self.run.get("root", ".")), Path(self.run.get("here", "."))
        case = selection.split_id(self.last)
        options = self.run.get("options", {}).get(case[0] if case else "", ())
        return selection.rerun(self.last, root, here, tuple(options))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal, without half a line of a process that died in it."""
    if not path.exists():  # a kernel has removed it
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        assert isinstance(entry, dict)
        yield entry


def end_lines(what: str, behind: int) -> list[str]:
    """Why pytest ends here, and what would have been lost otherwise."""
    return [
        f"{what}, so pytest ends here, and {behind} more test(s) are not run.",
        "With -n 1 or more this case alone would have been lost, for a worker process is replaced.",
    ]
