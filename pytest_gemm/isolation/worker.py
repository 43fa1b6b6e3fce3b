"""A worker process that may die with what it runs, and the next one in its place."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.isolation.journal import Journal, Journals, Position
from pytest_gemm.isolation.limits import Watch
from pytest_gemm.records import from_record, to_record

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.problem.problem import Problem


# Requests after which a judge is replaced: a compiler keeps something of every program it has made.
_TRIALS: Final = 300
# Characters of what a dying process said that are shown.
_LAST_WORDS: Final = 600


@dataclasses.dataclass(frozen=True)
class Death:
    """The end of a judge in the middle of a request.

    Attributes:
        position: its last entry; ``None`` where it was in no case.
        status: its exit status, negative for a signal.
        said: the end of what it wrote to stderr.
    """

    position: Position | None
    status: int
    said: str


@dataclasses.dataclass(frozen=True)
class Service:
    """What a judge answers a request with."""

    config: GemmConfig
    judge: Judge
    journal: Journal
    watch: Watch


Eager = Callable[["Problem", str], str]
# An answer that is no outcome is JSON data.
Answer = Callable[[Service, "dict[str, Any]"], Iterator[Any]]


class Lane:
    """The asking end of one line of judges: one of them at a time answers a request.

    Attributes:
        deaths: how many judges have ended in the middle of a request.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self._journals = Journals()
        self._errors = self._journals.folder / "stderr"
        self._errors.touch()
        self._socket, self._there = socket.socketpair()
        self._lines = self._socket.makefile("rb")

    def ask(self, request: Mapping[str, object]) -> tuple[list[Outcome], Death | None]:
        """The outcomes that a judge answers with, and how it ended if it did.

        Raises:
            RuntimeError: as :meth:`answers`.
        """
        found = list(self.answers(request))
        end = found.pop() if found and isinstance(found[-1], Death) else None
        return [from_record(record) for record in found], end

    def answers(self, request: Mapping[str, object], limit: float | None = None) -> Iterator[Any]:
        """What a judge answers, as it comes: JSON data, and last a :class:`Death` where the judge ends.

        Args:
            request: JSON data for the judge.
            limit: seconds to wait for each answer; ``None``: the judge's own limits are enough.

        Raises:
            RuntimeError: when the process that forks judges is gone, or a judge failed outside of a case.
        """
        said = self._errors.stat().st_size
        self._socket.settimeout(limit)
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            for message in self._messages():
                if "answer" in message:
                    yield message["answer"]
                elif "error" in message:
                    raise RuntimeError(f"the process that judges failed outside of a case:\n{message['error']}")
                elif "exit" in message:
                    self.deaths += 1
                    position = self._journals.position(message["process"])
                    known = position if position is not None and position.activity is not None else None
                    yield Death(known, message["exit"], self._tail(said))
                    return
                else:
                    if message["leaves"]:
                        next(message for message in self._messages() if "exit" in message)
                    return
        except TimeoutError:
            raise RuntimeError(f"no answer within {limit:g} s") from None
        except OSError:
            pass
        raise RuntimeError(f"the process that starts the judges is gone: {self._tail(said) or 'nothing is known'}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            try:
                message = json.loads(line)
            except ValueError:  # half a line of a process that died in it
                continue
            assert isinstance(message, dict)
            yield message

    def _tail(self, said: int) -> str:
        """What was written to stderr since then, the end of it."""
        with self._errors.open("rb") as file:
            file.seek(said)
            return file.read().decode(errors="replace").strip()[-_LAST_WORDS:]

    def _close_socket(self) -> None:
        self._lines.close()
        self._socket.close()


class Worker(Lane):
    """A process that forks judges, one after the other, which answer requests.

    Created before this process has asked any backend whether it is available: see the module.

    Args:
        config: what the run was asked for.
        answer: is called in a judge for each request.
        eager: why a judge does not compute a problem with eager PyTorch, as :class:`Judge` has it.
        beside: how many more lanes of judges there are, which answer at the same time.

    Attributes:
        beside: these lanes.
    """

    def __init__(self, config: GemmConfig, answer: Answer, *, eager: Eager = lambda *_: "", beside: int = 0) -> None:
        super().__init__()
        self.beside = [Lane() for _ in range(beside)]
        lanes = [self, *self.beside]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when there are threads; none of them is needed there
            self._keeper = os.fork()
        if self._keeper == 0:
            for lane in lanes:
                lane._close_socket()
            _keep(config, answer, lanes, eager=eager)
        for lane in lanes:
            lane._there.close()

    def close(self) -> None:
        """End the processes, whatever they are doing, and remove what they left."""
        try:
            os.killpg(self._keeper, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self._keeper, signal.SIGKILL)  # it had not come to founding its group
        os.waitpid(self._keeper, 0)
        for lane in (self, *self.beside):
            lane._close_socket()
            lane._journals.close()


# -- in the keeper ---------------------------------------------------------------------------------


def _keep(config: GemmConfig, answer: Answer, lanes: Sequence[Lane], *, eager: Eager) -> NoReturn:
    """Fork judges, one after the other in each lane, until the socket is closed."""
    lane = lanes[0]
    try:
        os.setpgid(0, 0)  # out of reach of Ctrl-C; with its judges and their compilers it is ended as one
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        _complain_in(lane)
        _cover_others(null, {one._there.fileno() for one in lanes})
        faulthandler.disable()  # it would write to a file of the parent's
        import pytest_gemm.judging.judge  # noqa: F401  # so that no judge has to import torch

        for other in lanes[1:]:
            if os.fork() == 0:
                lane = other
                _complain_in(lane)
                break
        for one in lanes:
            if one is not lane:
                one._there.close()
        there, folder, number = lane._there, lane._journals.folder, 0
        while True:
            name = _judge(number)
            judge = os.fork()
            if judge == 0:
                _serve(config, answer, there, folder, name, eager=eager)
                os._exit(0)
            _, status = os.waitpid(judge, 0)
            message = {"exit": os.waitstatus_to_exitcode(status), "process": name}
            there.sendall(b"\n" + json.dumps(message).encode() + b"\n")
            number += 1
    except OSError:  # the socket is closed
        os._exit(0)
    except BaseException:  # nothing may go on in a copy of pytest
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _judge(number: int) -> str:
    """The name of a judge's journal."""
    return f"judge-{number}"


def _complain_in(lane: Lane) -> None:
    """Let this process write its errors where the lane's asking end reads them."""
    said = os.open(lane._errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 2)
    os.close(said)


def _cover_others(null: int, ours: Set[int]) -> None:
    """Replace other pipes and sockets by the null device: a reader would wait for their end until this process ends."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) not in {0, 1, 2, *ours} and os.readlink(f"/proc/self/fd/{entry}")[:4] in {"pipe", "sock"}:
                os.dup2(null, int(entry))


# -- in a judge ------------------------------------------------------------------------------------


def _serve(config: GemmConfig, answer: Answer, there: socket.socket, folder: Path, name: str, *, eager: Eager) -> None:
    """Judge what comes through the socket."""
    import torch

    from pytest_gemm.judging.judge import Judge

    torch.set_num_threads(config.threads)
    journal = Journal(folder, name)
    assert journal.stacks is not None
    faulthandler.enable(file=journal.stacks, all_threads=False)
    watch = Watch(config.timeout, config.compile_timeout, journal, stacks=journal.stacks)
    service = Service(config, Judge(eager, watch, statements=config.ledger.statements), journal, watch)

    def say(**message: object) -> None:
        there.sendall(json.dumps(message).encode() + b"\n")

    for count, line in enumerate(there.makefile("rb"), 1):
        journal.begin(f"request {count}")
        try:
            for one in answer(service, json.loads(line)):
                say(answer=to_record(one) if isinstance(one, Outcome) else one)
        except Exception:  # of ours: the process that asks has to know
            say(error=traceback.format_exc())
            continue
        watch.rest()
        journal.end()
        leaves = count >= _TRIALS or any(map(service.judge.has_lost, ("cpu", "cuda")))
        say(end=True, leaves=leaves)
        if leaves:
            return
