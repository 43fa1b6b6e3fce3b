"""A worker in a process of its own: asked, limited, and started again when the kernel has ended it.

::

    judge                        keeper                         worker
    asks, compares               forks one worker after another compiles, runs, gathers evidence
      |  questions, operands in shared memory                     |
      |---------------------------------------------------------->|
      |<------------------------- answers, the bytes of results --|
      |<---- "it ended, with this status" --|   (if it does)
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec
import torch

from pytest_gemm.api.protocols import Backend, Candidates
from pytest_gemm.core.outcome import Activity, Misconduct, Phase, Pruned, Reason, Unsupported
from pytest_gemm.core.text import described
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import faults, memory
from pytest_gemm.worker.answers import Answer, RanForm, held
from pytest_gemm.worker.death import manner, remedy, stack_frames
from pytest_gemm.worker.device import MUCH, Pool, bytes_at
from pytest_gemm.worker.keeper import GRACE, Keeper, Started
from pytest_gemm.worker.messages import Announced, Built, Died, How, Job, Ran, Thrown

_Kind = TypeVar("_Kind")
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)

_NEVER_REFUSED: Final = {"now", "fetch", "opens", "drop"}
_REFUSALS: Final = {kind.__name__: kind for kind in (Unsupported, Pruned, Misconduct)}
# Seconds between the end of a process and the notice of it.
_BRIEFLY: Final = 1.0
# Bytes of what it wrote when it died that are read.
_TRACE: Final = 1 << 16
# Characters of what a dying worker wrote to stdout and stderr that are shown.
_LAST_WORDS: Final = 600


class Process:
    """Runs foreign code in another process.

    Args:
        keeper: starts workers.
        limits: of a run and of a compile, in seconds; 0: none.

    Attributes:
        pages: as of :class:`Worker`.
        ended: exit status of the last process that has ended in a question, negative for a signal.
        deaths: how many processes have ended.
    """

    is_inline = False

    def __init__(self, keeper: Keeper, limits: tuple[float, float]) -> None:
        self._keeper = keeper
        self._names = {id(backend): name for name, backend in keeper.backends.items()}
        self._run_limit, self._compile_limit = limits
        self._limit, self.phase = self._compile_limit, Phase.CASE
        self._worker: Started | None = None
        self.pages: GuardPages | None = None
        self.ended: int | None = None
        self.deaths = 0
        self._arenas: dict[int, memory.Arena] = {}
        self._loaded: set[int] = set()
        self._built: dict[int, Job] = {}  # in the worker that lives
        self._forgotten: list[int] = []  # what was built and is not needed any more; 0: all of it
        self._at: tuple[str, GuardPages | None] = ("", None)  # the problem whose operands are loaded, and where
        self._pool: Pool | None = None
        self._is_staged: bool | None = None  # what lies on a device goes through the CPU

    @property
    def pid(self) -> int:
        """As :attr:`Worker.pid`."""
        return self._started().pid

    @contextlib.contextmanager
    def watch(self, activity: Activity) -> Iterator[None]:
        """A block whose questions have the limit of the activity's phase."""
        before = self.phase, self._limit
        self.phase = activity.phase
        self._limit = self._run_limit if activity.phase.is_run else self._compile_limit
        try:
            yield
        finally:
            self.phase, self._limit = before

    # -- questions

    def supports(self, job: Job) -> None:
        """As :meth:`Worker.supports`."""
        self._ask("supports", job)

    def candidates(self, job: Job, given: Operands) -> Candidates:
        """As :meth:`Worker.candidates`."""
        answer, _ = self._ask("candidates", job, given=given)
        return _there(answer.candidates)

    def prepare(self, job: Job, given: Operands) -> Built:
        """As :meth:`Worker.prepare`."""
        answer, _ = self._ask("prepare", job, given=given)
        built = _there(answer.built)
        self._built[built.number] = job
        return built

    def compile_together(self, jobs: Sequence[Announced]) -> None:
        """As :meth:`Worker.compile_together`."""
        self._ask("compile_together", jobs)

    def run(self, number: int, given: Operands, how: How) -> Ran:
        """As :meth:`Worker.run`."""
        answer, data = self._ask("run", number, how, given=given, built=number)
        ran, worker = _there(answer.ran), self._worker
        made = self._results(ran, data)
        arena = self._arenas[id(given)]
        written = arena.written()
        if inputs := [one for one in written if not one.startswith("out (")]:
            raise Misconduct("inputs-written", f"the backend wrote to its inputs: {', '.join(inputs)}")
        if written or not arena.beside_out_intact():
            raise Misconduct("written-beside", "the kernel wrote beside the elements of the given result")

        def now() -> tuple[torch.Tensor, ...]:
            if self._worker is not worker:
                raise Died(Reason("process-died", "the process that held the results has ended"))
            answer, data = self._ask("now", ran.number)
            if answer.ran is None or answer.ran.forms != ran.forms:
                raise self._misled("other results than it had returned")
            return self._results(answer.ran, data)

        # A pattern of a kernel's need not come to an end; its process has compared it.
        proof = dataclasses.replace(_there(ran.proof), wanted="", device_kernel="")
        contract = held(self._built[number], _there(ran.contract))
        return Ran(made, proof, contract, now if ran.number else None, ran.objection)

    def eager(self, problem: Problem, given: Operands) -> tuple[torch.Tensor, ...]:
        """As :meth:`Worker.eager`."""
        answer, data = self._ask("eager", problem, given=given)
        return self._results(_there(answer.ran), data)

    def call(self, kind: type[_Kind], name: str, *more: object, given: Operands | None = None) -> _Kind:
        """As :meth:`Worker.call`."""
        answer, _ = self._ask("call", name, *more, given=given)
        try:
            return msgspec.convert(answer.said, kind)
        except (msgspec.ValidationError, RecursionError):
            raise self._misled("another answer than it was asked for") from None

    def results(self, name: str, *more: object) -> tuple[torch.Tensor, ...]:
        """As :meth:`Worker.results`."""
        answer, data = self._ask("call", name, *more)
        return self._results(_there(answer.ran), data)

    def forget(self, number: int) -> None:
        """As :meth:`Worker.forget`; it goes with the next question."""
        self._forgotten.append(number)

    def release(self) -> None:
        """As :meth:`Worker.release`; where little is held it goes with the next question."""
        self._forgotten[:] = [0]
        if self._worker is not None and sum(arena.bytes for arena in self._arenas.values()) > MUCH:
            self._drop()
            with contextlib.suppress(Died):
                self._ask("drop")

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        self._gone()
        self._drop()
        if self._pool is not None:
            self._pool.close()

    # -- parts

    def _ask(
        self, question: str, *more: object, given: Operands | None = None, built: int = 0
    ) -> tuple[Answer, bytearray]:
        """What the worker answers, and bytes of results.

        Raises:
            Unsupported, Pruned, Misconduct, Thrown: as the worker tells it.
            Died: when it has ended instead, or the one has that built what is asked about.
        """
        if given is not None and given.device == "cuda" and self._is_staged is None:
            self._share()
        worker = self._started()
        if built and built not in self._built:
            raise Died(Reason("process-died", "the process that compiled the problem has ended"))
        said = os.fstat(worker.said).st_size
        files: list[int] = []
        load = None if given is None else self._load(given, files)
        asked = memory.pickled((question, more, load, self._forgotten), self._names)
        self._forgotten.clear()
        try:
            worker.end.settimeout(self._limit + GRACE if self._limit else None)
            memory.send(worker.end, asked, files=files)
            first, rest = self._answered(worker, said)
        except TimeoutError:
            raise self._too_late(worker) from None
        except (EOFError, ConnectionError):
            raise self._dead(worker, said) from None
        except ValueError as error:
            raise self._misled(str(error)) from None
        except KeyboardInterrupt:
            self._gone()
            raise
        try:
            answer = msgspec.msgpack.decode(first, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise self._misled("what no worker says") from None
        if answer.defect or (answer.failure is not None and answer.failure.lost is not None):
            self._gone()  # it can compute nothing more; another one can
        if answer.refusal is not None and question in _NEVER_REFUSED:
            raise self._misled("a refusal of what cannot be refused")
        _raise(answer)
        return answer, rest

    def _share(self) -> None:
        """Find out whether the worker can open memory of the device; otherwise what lies there goes through the CPU."""
        pool = Pool()
        try:
            block = pool.take(1)
            refused = self._ask("opens", *block.ticket)[0].refused
            pool.give(block)
        except OSError as error:
            refused = str(error)
        self._is_staged = bool(refused)
        if refused:
            warnings.warn(f"operands and results of kernels go through the memory of the CPU: {refused}", stacklevel=2)
        else:
            self._pool = pool

    def _load(self, given: Operands, files: list[int]) -> tuple[Any, ...]:
        """What a question says of its operands, whose copies are as they are now."""
        at = (given.problem.line, self.pages)
        if at != self._at:
            self._drop()
            self._at = at
        arena = self._arenas.get(id(given))
        if arena is None:
            arena = self._arenas[id(given)] = memory.Arena(given, list(self._arenas.values()), self._pool)
        if id(given) not in self._loaded and arena.bytes > MUCH:
            faults.release()  # the other process needs the memory
        arena.write()
        if id(given) in self._loaded:
            return id(given), self.pages
        self._loaded.add(id(given))
        if arena.before is not None and id(arena.before.given) in self._loaded:
            return id(given), self.pages, arena.skeleton, id(arena.before.given)
        files.append(arena.file)
        block = None if arena.block is None else arena.block.ticket
        return id(given), self.pages, arena.skeleton, 0, self._at, arena.size, arena.places, block

    def _drop(self) -> None:
        """Give back the memory of the problem before."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._loaded.clear()

    def _answered(self, worker: Started, said: int) -> tuple[bytes, bytearray]:
        """The next message of the worker; it is ended where its limit runs out."""
        until = time.monotonic() + self._limit
        if (spoken := worker.has_spoken(self._limit)) is None:
            raise self._dead(worker, said)
        if not spoken:
            raise self._too_late(worker)
        left = max(0.0, until - time.monotonic()) + GRACE
        first, rest, _ = memory.receive(worker.end, left if self._limit else 0.0)
        return first, rest

    def _results(self, ran: RanForm, data: bytearray) -> tuple[torch.Tensor, ...]:
        try:
            if ran.left and self._pool is not None:
                return self._fetched(ran, self._pool)
            return memory.results_of(ran.forms, torch.frombuffer(data, dtype=torch.uint8) if data else _NOTHING)
        except (torch.OutOfMemoryError, Died, Thrown):
            raise
        except Exception as error:  # of what makes tensors of its words
            raise self._misled(f"results that are none: {described(error)}") from None

    def _fetched(self, ran: RanForm, pool: Pool) -> tuple[torch.Tensor, ...]:
        """Copies of the results that the worker has on the device."""
        size = sum(one.size for one in ran.forms)
        block = pool.take(size)
        try:
            self._ask("fetch", *block.ticket)
            return memory.results_of(ran.forms, bytes_at(block.address, size))
        finally:
            torch.cuda.synchronize()
            pool.give(block)

    # -- the process

    def _started(self) -> Started:
        """A worker that lives."""
        if self._worker is not None and self._worker.has_ended():
            self._gone()  # between two questions
        if self._worker is None:
            self._loaded.clear()
            self._built.clear()
            self._worker = self._keeper.start()
            if self._worker is None:
                text = "the process that starts workers is gone: a kernel has ended or stopped it"
                raise Died(Reason("no-worker", text))
        return self._worker

    def _gone(self) -> int | None:
        """End the worker, and all that it has started; its exit status, if it is known."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        self.deaths += 1
        status = worker.reap()
        worker.close()
        return status

    def _misled(self, what: str) -> Died:
        """The end of a worker that sent what no worker sends."""
        self._gone()
        return Died(Reason("process-died", f"the kernel's process sent {what}"))

    def _dead(self, worker: Started, said: int) -> Died:
        """The end of the worker by what it was doing."""
        ended = worker.has_ended(_BRIEFLY)
        begin = max(said, os.fstat(worker.said).st_size - _LAST_WORDS)
        words = os.pread(worker.said, _LAST_WORDS, begin).decode(errors="replace").strip()
        frames = _frames(worker)
        self.ended = status = self._gone()
        if not ended:
            text = f"the kernel's process closed its connection or wrote into it in {self.phase}"
            return Died(Reason("process-died", text), words)
        text = f"the kernel's process died in {self.phase}: {manner(status)}"
        details = "\n".join(filter(None, (frames, words)))
        return Died(Reason("process-died", text, remedy(status)), details, status=status)

    def _too_late(self, worker: Started) -> Died:
        """The end of a worker whose limit has run out."""
        worker.signal(signal.SIGABRT)  # faulthandler writes where Python is
        worker.has_ended(GRACE)
        frames = _frames(worker)
        self._gone()
        option = "--gemm-timeout=RUN" if self.phase.is_run else "--gemm-timeout=RUN,COMPILE"
        text = f"no end in {self.phase} within {self._limit:g} s"
        reason = Reason("no-end", text, f"raise {option} if it is only slow")
        return Died(reason, frames, self._limit)


def _frames(worker: Started) -> str:
    """Where Python was in the worker when it ended."""
    begin = max(0, os.fstat(worker.stack).st_size - _TRACE)
    return stack_frames(os.pread(worker.stack, _TRACE, begin).decode(errors="replace"))


class Workers:
    """A process for each source of kernels: what one leaves behind is never another's.  PyTorch's own share one.

    Args:
        keeper, limits: as of :class:`Process`.
    """

    def __init__(self, keeper: Keeper, limits: tuple[float, float]) -> None:
        self._keeper, self._limits = keeper, limits
        self._processes: dict[str, Process] = {}

    def __call__(self, backend: Backend) -> Process:
        """The one of a backend."""
        source = "" if type(backend).__module__.startswith("pytest_gemm.backends.") else backend.name
        if source not in self._processes:
            self._processes[source] = Process(self._keeper, self._limits)
        return self._processes[source]

    def alone(self) -> Process:
        """A further one, which the caller closes."""
        return Process(self._keeper, self._limits)

    def close(self) -> None:
        """End all of them; who asks again gets new ones."""
        for one in self._processes.values():
            one.close()
        self._processes.clear()


def _there(found: _Kind | None) -> _Kind:
    """What an answer has to have."""
    if found is None:
        raise Died(Reason("process-died", "the kernel's process gave another answer than it was asked for"))
    return found


def _raise(answer: Answer) -> None:
    if (refusal := answer.refusal) is not None:
        reason = refusal.reason
        raise _REFUSALS.get(refusal.kind, Misconduct)(reason.code, reason.text, reason.remedy)
    if (failure := answer.failure) is not None:
        raise Thrown(failure.kind, failure.line, failure.details, failure.memory, failure.lost)
    if answer.defect:
        *_, line = answer.defect.strip().splitlines() or ["no words"]
        raise Died(Reason("process-died", f"the kernel's process failed outside of the kernel: {line}"), answer.defect)
