"""Cases judged with guard pages, in a process that may die of it.

The process is kept from case to case, for importing torch and compiling cost seconds.  When one dies in a case, a new
one is asked again, with one operand at a page at a time: those that kill it alone are named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from pytest_gemm import operands
from pytest_gemm.backend import Backend, Unsupported
from pytest_gemm.fence import ALLOCATED, SIDES, Fence
from pytest_gemm.judge import Case, Judge
from pytest_gemm.outcome import Activity, Outcome, Reason, Status
from pytest_gemm.problem import Problem
from pytest_gemm.report import from_record, to_record
from pytest_gemm.watch import Diaries, Diary, Words, death

__all__ = ["GuardedJudge"]

# What the processor says to a program that touches a page that is not its own.
_FAULTS: Final = frozenset({-signal.SIGSEGV, -signal.SIGBUS})
_NAME: Final = "guarded"


class GuardedJudge:
    """Judges cases in a process of its own, with operands and results at guard pages; one of these a test process.

    Args:
        threads: CPU threads of that process.
        limit: seconds that a case may take there, compiles included; 0: none.
    """

    def __init__(self, threads: int, limit: float = 0.0) -> None:
        self._threads = threads
        self._limit = limit
        self._diaries = Diaries()
        self._process: Any = None
        self._line: Connection | None = None

    def judge(self, case: Case) -> list[Outcome]:
        """The outcomes of a case, first with everything ending at a page, then with everything beginning at one."""
        refusal = self._refusal(case)
        if refusal is not None:
            return [self._outcome(case, Status.UNSUPPORTED, refusal)]
        found: list[Outcome] = []
        for side in SIDES:
            outcomes = self._ask(case, Fence(side))
            if isinstance(outcomes, _Death):
                outcomes = [self._blamed(case, Fence(side), outcomes)]
            found += [dataclasses.replace(o, guard=side) for o in outcomes]
            if all(o.status is Status.UNSUPPORTED for o in outcomes):
                return found[:1]
        return found

    def close(self) -> None:
        """End the process."""
        self._end()
        self._diaries.close()

    # -- parts ---------------------------------------------------------------------------------------

    @staticmethod
    def _outcome(case: Case, status: Status, reason: Reason) -> Outcome:
        name, line = case.backend.name, case.problem.line
        return Outcome(name, line, "", case.seed, status, reason, **case.axes)

    @staticmethod
    def _refusal(case: Case) -> Reason | None:
        """Why a case cannot be judged this way."""
        if case.device != "cpu":
            return Reason("guard-device", "guard pages are the CPU's", "on CUDA see --gemm-sanitizer")
        if not case.fillings:
            return Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
        try:
            pickle.dumps(case.backend)
        except Exception as error:  # pickle raises whatever an object's own methods do
            text = f"{case.backend.name} cannot be sent to the process in which it may die: {error}"
            return Reason("guard-process", text, "register a function of a module that can be imported")
        return None

    def _ask(self, case: Case, fence: Fence) -> list[Outcome] | _Death:
        """The outcomes of the other process, or how it ended."""
        if self._line is None:
            here, there = multiprocessing.get_context("spawn").Pipe()
            arguments = (there, self._diaries.folder, self._threads)
            self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
            self._process.start()
            there.close()
            self._line = here
        try:
            # A problem is a line of text: its op has functions that no other process could be given.
            fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)} | {"problem": case.problem.line}
            self._line.send((fields, fence))
            if not self._line.poll(self._limit or None):
                return self._ended(self._limit)
            answer = self._line.recv()
        except (EOFError, OSError):
            return self._ended(0.0)
        if isinstance(answer, str):
            raise RuntimeError(f"the process with guard pages failed outside of a case:\n{answer}")
        return [from_record(record) for record in answer]

    def _ended(self, limit: float) -> _Death:
        process = self._process
        if limit:
            process.kill()
        process.join()
        status = process.exitcode
        words = self._diaries.words(_NAME)
        self._end()
        if limit and words is not None:
            words = dataclasses.replace(words, ended="timed-out", limit=limit)
        return _Death(words, status)

    def _end(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(None)
            self._line.close()
            self._line = None
            self._process.join()

    def _blamed(self, case: Case, fence: Fence, end: _Death) -> Outcome:
        """The outcome of a case that has killed its process, with the operands that alone are enough for it."""
        name, line = case.backend.name, case.problem.line
        activity = Activity(name, line, "the case", seed=case.seed, **case.axes)
        words = end.words if end.words is not None and end.words.activity is not None else Words(activity=activity)
        outcome = death(words, end.status)
        if end.status not in _FAULTS or words.ended:
            return outcome
        given = operands.make(case.problem, outcome.filling or case.fillings[0], case.seed, case.device)
        case = dataclasses.replace(case, fillings=(outcome.filling or case.fillings[0],))
        if isinstance(self._ask(case, Fence(fence.side, frozenset())), _Death):
            return outcome  # it needs no page for that
        names = [*(buffer.name for buffer in given.buffers), *ALLOCATED]
        guilty = [n for n in names if isinstance(self._ask(case, Fence(fence.side, frozenset({n}))), _Death)]
        where = "past the end of" if fence.side == "end" else "before the beginning of"
        what = " and of ".join(guilty) or "an operand (none of them alone, when it was tried again)"
        kernel = ", ".join(outcome.kernels) or case.backend.name
        text = f"{kernel} touches memory {where} {what}: {_signal(end.status)} at a guard page"
        return dataclasses.replace(outcome, reason=Reason("page-guard", text))


@dataclasses.dataclass(frozen=True)
class _Death:
    """The end of the other process: its last words, and its exit status."""

    words: Words | None
    status: int | None


def _signal(status: int | None) -> str:
    return signal.Signals(-status).name if status is not None and status < 0 else "it died"


def _serve(line: Connection, folder: Path, threads: int) -> None:
    """What the other process does: judge the cases that come in until there are no more."""
    torch.set_num_threads(threads)
    diary = Diary(folder, _NAME)
    if diary.stacks is not None:
        faulthandler.enable(file=diary.stacks, all_threads=False)
    backends: dict[str, Backend] = {}

    @contextlib.contextmanager
    def watch(activity: Activity) -> Iterator[None]:
        diary.doing(activity, 0.0)
        yield
        diary.over()

    while True:
        try:
            asked = line.recv()
        except EOFError:
            return
        if asked is None:
            return
        fields, fence = asked
        # The same backend for every case, with what it has compiled.
        backend = backends.setdefault(fields["backend"].name, fields["backend"])
        case = Case(**{**fields, "backend": backend, "problem": Problem.parse(fields["problem"])})
        diary.begin(case.problem.line)
        try:
            line.send(_judged(case, fence, watch))
        except Exception as error:  # of ours: the process that asks has to know
            import traceback

            line.send("".join(traceback.format_exception(error)))


def _judged(case: Case, fence: Fence, watch: Any) -> Sequence[dict[str, Any]]:
    # Eager is not asked: what kills this process has to be the case's own.
    judge = Judge(may_run_eager=lambda *_: False, watch=watch, fence=fence)
    with contextlib.suppress(Unsupported):
        return [to_record(outcome) for outcome in judge.judge(case)]
    return []
