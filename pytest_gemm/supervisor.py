"""A run without worker processes, watched by its parent: it ends with the status that pytest decided, or it is red.

A kernel can end the process that judges it, by a fault or by ``os._exit(0)``, and the status of such a process says
nothing of the tests.  So pytest forks at its start, before anything heavy is imported::

    parent                        child
    waits, passes signals on      is pytest: collects, judges, reports
          |<-- notes ---------------|   which test runs, what was judged, at last the exit status
          |<-- journal -------------|   what the test is doing

A child that is gone without a noted exit status has been ended by what it was doing.  The parent says which case that
was, what had been judged and what had failed, and ends with 1.  The child is pytest in every other way: it has the
terminal, the process group, and its own exit handlers.  When the parent dies the child is killed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest

from pytest_gemm import config as config_module
from pytest_gemm import options, records, selection, values, xdist
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.core.text import printable
from pytest_gemm.failures import text as text_module
from pytest_gemm.isolation import sanitizer, termination
from pytest_gemm.isolation.journal import Journals
from pytest_gemm.run import github, review, state, terminal
from pytest_gemm.worker.death import manner

# The name of the child's journal.
PROCESS: Final = "main"
# Signals that end a run; the parent hands on those that only it was sent.
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG: Final = 1
# What the parent writes behind the child's notes; JSON has no such character.
_END_OF_NOTES: Final = b"\0"
# Characters of one earlier failure that are shown again.
_FAILURE: Final = 4000


def begin(config: pytest.Config) -> int | None:
    """Run pytest again below a compute-sanitizer where ``--gemm-guard`` names a tool; let workers of xdist crash.

    Raises:
        pytest.UsageError: if an option cannot be combined with such a tool; the error names it.
    """
    tool = values.value(config, "guard")
    if tool not in options.TOOLS:
        xdist.allow_crashes(config)
        return None
    if values.value(config, "device") == "cpu":
        raise values.wrong(tool, "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if values.value(config, name) not in {"", "no"}:
            raise values.wrong(tool, f"kernels below it are many times slower: leave out --gemm-{name}")
    given = config.invocation_params
    return sanitizer.run(tool, [str(one) for one in given.args], given.dir)


def supervised(config: pytest.Config) -> Child | None:
    """Fork where another process is to watch this run; ``None`` where this one goes on unwatched.

    Only pytest's own program can be forked: a debugger and threads would stay behind.  A session that times is
    watched by the run that started it.
    """
    if config.pluginmanager.has_plugin(config_module.SPEED_WORKER) or sys.platform != "linux":
        return None
    debugged = config.getoption("usepdb", False) or config.getoption("trace", False) or sys.gettrace() is not None
    if hasattr(config, "workerinput") or threading.active_count() > 1 or debugged or not _is_program() or _is_traced():
        return None
    given = config_module.settings_given(config)
    if config_module.setting(given, "run", "supervise", config_module.ENGINE["run"]) == "no":
        return None
    child = config.stash[CHILD] = _start(config)
    return child


def _is_program() -> bool:
    """Whether pytest was started from a shell; a program that calls ``pytest.main()`` must not be forked."""
    frames = [(f.f_code.co_name.lstrip("_"), f.f_globals.get("__name__")) for f, _ in traceback.walk_stack(None)]
    above = list(itertools.dropwhile(lambda one: not (one[0].endswith("main") and one[1] == "_pytest.config"), frames))
    starts = {"_pytest.config", "__main__", "runpy"}
    return ("console_main", "_pytest.config") in above and {module for _, module in above} <= starts


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
        journals: where it writes down what it is doing; its parent removes the folder.
        notes: descriptor of a pipe that the parent reads.
    """

    journals: Journals
    notes: int

    def note(self, **entry: object) -> None:
        """Write down a fact of the run."""
        text = json.dumps(entry).encode() + b"\n"
        while text:
            text = text[os.write(self.notes, text) :]

    def noted(self, made: pytest.TestReport) -> None:
        """Write down the end of a test."""
        if made.when != "call" and not made.failed:
            return
        judged: Mapping[str, Any] = getattr(made, "gemm", {})
        failure = printable(made.longreprtext, _FAILURE) if made.failed else ""
        self.note(test=made.nodeid, end=str(made.outcome), failure=failure, outcomes=judged.get("outcomes", []))

    def finished(self, status: int) -> None:
        """pytest has come to its end.  The process is named, for a kernel may have made copies of it."""
        self.note(process=os.getpid(), status=status)
        termination.end_soon(status)


CHILD = pytest.StashKey[Child]()
"""Where a process that is watched by another one keeps what it tells that one."""


def _start(config: pytest.Config) -> Child:
    """Fork, and return in the child; the parent waits for it and ends as it does."""
    journals = Journals()
    reading, writing = os.pipe()  # which no kernel can remove, and no limit on files cuts off
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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        return Child(journals, writing)
    final = 1
    try:
        final = _watched(child, _Notes(reading, writing), journals, config)
    except BaseException:  # no copy of pytest may go on
        _say([traceback.format_exc()])
    finally:
        journals.close()
        os._exit(final)


# -- in the parent -----------------------------------------------------------------------------------


class _Notes:
    """What the child writes down, read while it runs: a pipe holds little."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._text = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._text.endswith(_END_OF_NOTES):
            self._text += os.read(self._reading, 1 << 16)

    def entries(self) -> Iterator[dict[str, Any]]:
        """All of them, without half a line of a process that died in it; the child has ended."""
        os.write(self._writing, _END_OF_NOTES)  # copies of the child may hold the pipe open
        self._reader.join()
        for line in self._text.split(b"\n")[:-1]:
            entry = json.loads(line)
            assert isinstance(entry, dict)
            yield entry


def _watched(child: int, notes: _Notes, journals: Journals, config: pytest.Config) -> int:
    """Wait for the child, and say what is to be said; returns the status to end with."""
    started = time.monotonic()
    status, sent = _wait(child)
    run = _Run(config, journals, notes)
    final = run.statuses.get(child)  # that the child has noted; None where it did not come to that
    if final is None:
        ended = status < 0 and -status in sent  # by a signal to this run
        _say(run.lines(status, time.monotonic() - started, from_outside=ended))
        if ended:
            journals.close()
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


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _say(lines: Sequence[str]) -> None:
    text = ("\n" + "\n".join(lines) + "\n").encode(errors="replace")
    while text:
        text = text[os.write(2, text) :]


class _Run:
    """What the child has left behind."""

    def __init__(self, config: pytest.Config, journals: Journals, notes: _Notes) -> None:
        self._config = config
        self._facts: dict[str, Any] = {}
        self._ended: dict[str, dict[str, Any]] = {}
        self.statuses: dict[int, int] = {}
        self._position = journals.position(PROCESS)
        self._folder = journals.folder
        begun: list[str] = []
        for entry in notes.entries():
            if "end" in entry:
                self._ended[entry["test"]] = entry
            elif "status" in entry:
                self.statuses[entry["process"]] = entry["status"]
            elif "test" in entry:
                begun.append(entry["test"])
            else:
                self._facts.update(entry)
        test = self._position.test if self._position else ""
        self._last = test or next((one for one in reversed(begun) if one not in self._ended), "")
        self._earlier = journals.outcomes(test) if test else ()

    def lines(self, status: int, seconds: float, *, from_outside: bool) -> list[str]:
        """What the parent says of a child that did not come to its end.

        Args:
            status: how it ended, negative for a signal.
            seconds: how long the run took.
            from_outside: whether a signal from another process ended the run; then no case caused it.
        """
        judged = [records.from_record(record) for entry in self._ended.values() for record in entry["outcomes"]]
        failures = [entry for entry in self._ended.values() if entry["failure"]]
        lines = [line for entry in failures for line in (f"FAILED {entry['test']}", entry["failure"], "")]
        annotations: list[str] = []
        if from_outside:
            lines.append(f"The run was ended by {manner(status)}.")
        else:
            crashed = self._crashed(status)
            judged += crashed
            lines += self._crash_lines(crashed, status)
            if record := self._facts.get("record"):
                with Path(record).open("a", encoding="utf-8") as file:
                    file.writelines(records.record_line(records.to_record(outcome)) for outcome in crashed)
            annotations = self._review(crashed, judged, seconds)
        lines += ["", *terminal.summary(judged, missing={}, stale_entries=(), processes=1, wall_seconds=seconds)]
        counts = Counter(entry["end"] for entry in self._ended.values())
        ends = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        end = f"{ends or 'no test'} before the end, in {seconds:.2f} s"
        return [*github.quoted(lines, self._github), *annotations, end]

    @property
    def _github(self) -> str:
        given = config_module.settings_given(self._config)
        return str(config_module.setting(given, "run", "github", config_module.ENGINE["run"]))

    def _review(self, crashed: Sequence[Outcome], judged: Sequence[Outcome], seconds: float) -> list[str]:
        """Write the summary for reviewers; returns the annotations."""
        wanted = github.is_wanted(self._github)
        died = "The process that ran the tests died, and the tests behind this one were not run."
        text = review.markdown(review.Run(judged, [died], [], seconds), review.TITLE)
        try:
            if record := self._facts.get("record"):
                Path(record).with_name("summary.md").write_text(text, encoding="utf-8")
            if wanted:
                github.append_summary(text)
        except OSError as error:
            _say([f"{error.filename or 'a summary'} is not complete: {error.strerror}"])
        return self._annotations(crashed) if wanted else []

    def _annotations(self, crashed: Sequence[Outcome]) -> list[str]:
        root = Path(self._facts.get("root", "."))
        backends = {name: github.Place(*place) for name, place in self._facts.get("places", {}).items()}
        ended = [(name, one["failure"], one["outcomes"]) for name, one in self._ended.items() if one["failure"]]
        for outcome in crashed:
            said = text_module.failure(outcome, self._rerun())
            ended.append((self._last, said, [records.to_record(outcome)] if outcome.status.is_failure else []))
        found = (review.failure(name, said, outcomes, (), root, backends) for name, said, outcomes in ended)
        return github.commands([one for one in found if one is not None], github.repository(root))

    def _crashed(self, status: int) -> list[Outcome]:
        """The outcomes of the last test, as the ledger leaves them; this process has read no configuration."""
        found = selection.crashed(self._last, self._position, self._earlier, status)
        known, facts = self._position.environment if self._position else None, self._facts
        ledger = config_module.ledger(self._config)
        return state.explain_for_worker(found, known, ledger, facts.get("devices", {}), facts.get("threads", 1))[0]

    def _crash_lines(self, crashed: Sequence[Outcome], status: int) -> list[str]:
        position = self._position
        shown = [outcome for outcome in crashed if outcome.status.is_failure or outcome.known_failure]
        lines = [text_module.failures(shown, self._rerun())] if shown else []
        if not crashed and position is not None and position.stack:
            lines.append(position.stack)
        where = f" in {self._last}" if self._last and not crashed else ""
        gone = f"The process that ran the tests is gone{where}: {manner(status)}"
        late = position is not None and position.ended == "timed-out"
        begun = {*self._ended, *([self._last] if self._last else [])}
        behind = max(0, int(self._facts.get("collected", 0)) - len(begun))
        return lines + end_lines("Nothing else ends it" if late else gone, behind)

    def _rerun(self) -> text_module.Rerun:
        root, here = Path(self._facts.get("root", ".")), Path(self._facts.get("here", "."))
        case = selection.case_id(self._last)
        options = self._facts.get("options", {}).get(case.backend if case else "", ())
        return selection.rerun(self._last, root, here, tuple(options))


def end_lines(what: str, behind: int) -> list[str]:
    """Why pytest ends here, and what would have been lost otherwise."""
    return [
        f"{what}, so pytest ends here, and {behind} more test(s) are not run.",
        "With -n 1 or more this case alone would have been lost, for a worker process is replaced.",
    ]
