"""The journal of a process: what it began, so that its death can be written from it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from pytest_gemm.core.outcome import Activity, Outcome, Phase, Reason, Seconds, Status
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.records import from_record, plain, to_record, typed
from pytest_gemm.storage import files
from pytest_gemm.worker.death import manner, remedy, stack_frames

# -- what a process leaves behind ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a process stands: the last entry of its journal.

    Attributes:
        test: node id of the test that it was in, "" between tests.
        call: how many times that test had asked for a judgement before, from 0.
        activity: the last thing that it did in this test; ``None`` before the first.
        over: that had come to its end: the process died after it, before the next.
        environment: where it ran; ``None`` before the first judgement of a test.
        ended: why it ended itself: ``timed-out``, ``lost-device``, or "" when it did not.
        limit: of that activity, in seconds; 0: none.
        stack: where Python was, innermost frame last; "" where that is unknown.
    """

    test: str = ""
    call: int = 0
    activity: Activity | None = None
    over: bool = False
    environment: Environment | None = None
    ended: str = ""
    limit: float = 0.0
    stack: str = ""


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What processes that are gone have judged of a test.

    Attributes:
        outcomes: in their order, the last one of a process being how it ended.
        complete: nothing is left to be judged.
    """

    outcomes: tuple[Outcome, ...] = ()
    complete: bool = False

    @property
    def candidates(self) -> frozenset[str]:
        """The candidates that are judged; "" is the case as a whole."""
        return frozenset(outcome.candidate for outcome in self.outcomes)


# The part of an outcome's seconds that a phase belongs to; the others belong to the reference.
_SECONDS: Final = {Phase.COMPILE: "compile", Phase.RUN: "run", Phase.RUN_AGAIN: "run"}


def death(position: Position, status: int | None) -> Outcome:
    """The outcome of the case that a process ended with.

    Args:
        position: its last entry, which names an activity.
        status: its exit status, negative for a signal, ``None`` where it is unknown.
    """
    doing = position.activity
    assert doing is not None, "a death without an activity belongs to no case"
    seconds = Seconds()
    if position.ended == "timed-out":
        option = "--gemm-timeout=RUN" if doing.phase.is_run else "--gemm-timeout=RUN,COMPILE"
        text = f"no end in {doing.phase} within {position.limit:g} s"
        reason = Reason("no-end", text, f"raise {option} if it is only slow")
        part = _SECONDS.get(doing.phase, "reference")
        seconds = Seconds(**{part: position.limit})
    else:
        where = f"after {doing.phase}" if position.over else f"in {doing.phase}"
        reason = Reason("process-died", f"the test process died {where}: {manner(status)}", remedy(status))
    return Outcome(
        doing.case,
        doing.distribution,
        doing.seed,
        Status.TIMED_OUT if position.ended == "timed-out" else Status.CRASHED,
        reason,
        kernels=doing.kernels,
        details=position.stack,
        seconds=seconds,
    )


class Journal:
    """What one test process writes down for the process that started it.

    A line that is overwritten in place says what it is doing (one system call; the file outlives the process), and
    a file for each test holds what was judged in it, so that another process can continue after the last case.

    Args:
        folder: shared by all processes of a run; ``None``: nothing is written.
        process: name of this one, ``gw0`` for instance.
        replaceable: when this process ends itself, another one takes its test over.

    Attributes:
        position: what would be its last entry now.
        outcomes: what was judged of the test at hand.
        stacks: where faulthandler writes, ``None`` without a folder.
    """

    def __init__(self, folder: Path | None = None, process: str = "main", *, replaceable: bool = False) -> None:
        self.position = Position()
        self.outcomes: list[Outcome] = []
        self.replaceable = replaceable and folder is not None
        self.stacks: IO[str] | None = None
        self._folder = folder
        self._line = -1
        self._calls = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # a kernel may have removed it, with the worker before this one
            self._line = os.open(folder / f"{process}.now", os.O_CREAT | os.O_RDWR, 0o600)
            self.stacks = (folder / f"{process}.stack").open("w", encoding="utf-8")
            self._write(self.position)

    def _write(self, position: Position) -> None:
        self.position = position
        if self._line >= 0:
            # What an earlier, longer line leaves behind the newline is not read.
            with contextlib.suppress(OSError):  # a full disk
                os.pwrite(self._line, json.dumps(plain(self.position)).encode() + b"\n", 0)

    def begin(self, test: str) -> None:
        """A test begins that will ask for judgements."""
        self._calls = 0
        self.outcomes = []
        self._write(Position(test))

    def end(self) -> None:
        """The test has been reported: no other process has to go on with it."""
        if self._folder is not None:
            _judged_file(self._folder, self.position.test).unlink(missing_ok=True)
        self._write(Position())

    def doing(self, activity: Activity, limit: float) -> None:
        """Something begins that may not come back, and for which ``limit`` seconds are given (0: no limit)."""
        self._write(dataclasses.replace(self.position, activity=activity, over=False, limit=limit))

    def over(self) -> None:
        """It came back."""
        self._write(dataclasses.replace(self.position, over=True))

    def open_call(self, environment: Environment) -> Earlier:
        """The test asks for its next judgement.

        Args:
            environment: where this process judges.

        Returns:
            what earlier processes judged when they were asked the same.
        """
        call, self._calls = self._calls, self._calls + 1
        # The names of a CPU's instruction sets are many, and the reader runs on the same machine.
        written = dataclasses.replace(environment, isa=environment.isa if environment.device == "cuda" else ())
        self._write(Position(self.position.test, call, environment=written))
        if self._folder is None:
            return Earlier()
        return _earlier(self._folder, self.position.test).get(call, Earlier())

    def judged(self, outcome: Outcome) -> None:
        """An outcome that another process need not judge again."""
        self.outcomes.append(outcome)
        self._note(outcome=to_record(outcome))

    def close_call(self) -> None:
        """All outcomes of this judgement are there."""
        self._note(complete=True)

    def _note(self, **entry: object) -> None:
        if self._folder is not None:
            _append(self._folder, self.position.test, {"call": self.position.call, **entry})

    def leave(self) -> None:
        """End this process, which has lost its device and can judge nothing more; returns where no process replaces it.

        What was judged of the test has been written down, the case that lost the device included.
        """
        if self.replaceable:
            self._write(dataclasses.replace(self.position, ended="lost-device"))
            end_process()

    def time_is_up(self, stack: str) -> None:
        """The last entry of a process that will be ended because its limit has run out."""
        self._write(dataclasses.replace(self.position, ended="timed-out", stack=stack))

    def close(self) -> None:
        """The process has come to its proper end."""
        if self._line >= 0:
            os.close(self._line)
            self._line = -1
        if self.stacks is not None:
            self.stacks.close()
            self.stacks = None


def _judged_file(folder: Path, test: str) -> Path:
    return folder / f"{hashlib.sha256(test.encode()).hexdigest()[:32]}.judged"


def _append(folder: Path, test: str, entry: Mapping[str, object]) -> None:
    """One write a line: a process that dies in it leaves half a line at most.

    Where the folder is gone or the disk is full, the run goes on without.
    """
    line = json.dumps(entry) + "\n"
    with contextlib.suppress(OSError), _judged_file(folder, test).open("a", encoding="utf-8") as file:
        file.write(line)


def _earlier(folder: Path, test: str) -> dict[int, Earlier]:
    """What was judged of a test, by its judgements."""
    try:
        text = _judged_file(folder, test).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    found: dict[int, Earlier] = {}
    for line in text.split("\n")[:-1]:  # without half a line at the end
        entry = json.loads(line)
        known = found.get(entry["call"], Earlier())
        more = (from_record(entry["outcome"]),) if "outcome" in entry else ()
        found[entry["call"]] = Earlier((*known.outcomes, *more), complete=known.complete or not more)
    return found


class Journals:
    """The journals of all test processes, in the one that hands out the tests.

    Attributes:
        folder: where they lie; removed by :meth:`close`.
        unfinished: node ids of the tests that another process goes on with and has not reported yet.
    """

    def __init__(self) -> None:
        self.folder = files.own_folder()
        self.unfinished: set[str] = set()

    def position(self, process: str) -> Position | None:
        """The last entry of a process; ``None`` when it left none."""
        try:
            line, newline, _ = (self.folder / f"{process}.now").read_bytes().partition(b"\n")
        except OSError:
            return None
        if not newline:
            return None
        position = typed(json.loads(line), Position)
        stack = (self.folder / f"{process}.stack").read_text(encoding="utf-8", errors="replace")
        if position.ended or not stack:
            return position
        # faulthandler's timer ended the process, or the signal of which it tells did.
        ended = "timed-out" if stack.startswith("Timeout ") else ""
        return dataclasses.replace(position, ended=ended, stack=stack_frames(stack))

    def inherit(self, process: str, test: str, status: int | None) -> Outcome | None:
        """Add how a process ended to what was judged of its test, so that another one can go on behind that.

        Args:
            process: the one that is gone.
            test: node id of the test that it was running.
            status: its exit status, negative for a signal, ``None`` where it is unknown.

        Returns:
            the outcome of the case that it ended with; ``None`` when it was in no case of this test, and going on
            would only end the next process.
        """
        position = self.position(process)
        if position is None or position.test != test or position.activity is None:
            return None
        self.unfinished.add(test)
        if position.ended == "lost-device":  # it has written down the case itself
            return self.outcomes(test)[-1]
        outcome = death(position, status)
        _append(self.folder, test, {"call": position.call, "outcome": to_record(outcome)})
        return outcome

    def outcomes(self, test: str) -> tuple[Outcome, ...]:
        """What was judged of a test so far."""
        return tuple(outcome for earlier in _earlier(self.folder, test).values() for outcome in earlier.outcomes)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


# -- the end of a process ---------------------------------------------------------------------------


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
