"""The worker's end: it answers one question after the other."""

from __future__ import annotations

import faulthandler
import gc
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Misconduct, Pruned, Unsupported
from pytest_gemm.operands.memory import Margins
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import faults, memory
from pytest_gemm.worker.answers import Answer, Failure, RanForm, Refusal
from pytest_gemm.worker.device import Opened, bytes_at
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Announced, How, Job, Thrown

# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD: Final = 50_000
# Bytes of results that a socket takes sooner than the judge can ask for them.
_FEW: Final = 1 << 18


def serve(
    end: socket.socket,
    backends: Mapping[str, Backend],
    threads: int,
    calls: Mapping[str, Callable[..., Any]],
    stack: int,
) -> None:
    """Answer questions until the judge closes its end."""
    torch.set_num_threads(threads)
    gc.freeze()  # torch and a compiler are millions of objects that every collection would visit
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    faulthandler.enable(file=stack, all_threads=True)
    process = os.getpid()
    worker, encoder = _Server(backends, calls), msgspec.msgpack.Encoder(enc_hook=str)
    while True:
        try:
            first, _, files = memory.receive(end, files=16)
        except (EOFError, OSError):
            return
        data: list[memoryview] = []
        try:
            answer, data = worker.answer(first, files)
        except (Unsupported, Pruned, Misconduct) as error:
            answer = Answer(Refusal(type(error).__name__, error.reason))
        except Thrown as error:
            answer = Answer(failure=Failure(error.kind, error.line, error.details, error.memory, error.lost))
        except Exception:  # of ours: the judge has to know
            answer = Answer(defect=traceback.format_exc())
        if os.getpid() != process:  # a kernel has forked, and this copy would answer too
            os._exit(1)
        memory.send(end, encoder.encode(answer), data)


class _Server:
    """What a worker does with a question."""

    def __init__(self, backends: Mapping[str, Backend], calls: Mapping[str, Callable[..., Any]]) -> None:
        self._backends = backends
        self._inline = Inline(calls)
        self._operands: dict[int, tuple[Operands, list[torch.Tensor]]] = {}
        self._results: dict[int, Callable[[], tuple[torch.Tensor, ...]]] = {}
        self._at: object = None  # the problem, and where its operands lie
        self._opened = Opened()
        self._shares = False  # memory on the device
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # where it is computed, and in shared memory
        self._margins: list[tuple[str, Margins]] = []  # what operands at pages leave of these
        self._left: list[torch.Tensor] = []  # bytes of results that wait to be fetched

    def answer(self, first: bytes, files: Sequence[int]) -> tuple[Answer, list[memoryview]]:
        """The answer to a question, and the bytes of results."""
        question, more, load, forgotten = memory.unpickled(first, self._backends)
        for one in forgotten:
            self._forget(one)
        left, self._left = self._left, []
        if question == "fetch":
            self._fetch(left, *more)
            return Answer(), []
        given = [] if load is None else [self._loaded(load, files)]
        for there, here in self._staged if given else ():
            there.copy_(here)
        for _, margins in self._margins if given else ():
            margins.fill()
        found = getattr(self, f"_{question}")(*more, *given)
        for there, here in self._staged if given else ():
            here.copy_(there)
        for where, margins in self._margins if given else ():
            if margins.written() is not None:
                raise Misconduct("inputs-written", f"the backend wrote to its inputs: {where}")
        return found if isinstance(found, tuple) else (found or Answer(), [])

    def _loaded(self, load: tuple[Any, ...], files: Sequence[int]) -> Operands:
        key, self._inline.pages, *new = load
        if new:
            skeleton, before, *place = new
            if before:
                storages = self._operands[before][1]
            else:
                storages = self._mapped(files[0], *place)
                os.close(files[0])
            operands = memory.operands_in(skeleton, storages)
            if (pages := self._inline.pages) is not None:
                placed = pages.place(operands)
                self._staged += pages.copies(operands, placed)
                self._margins += [(where, Margins([part])) for where, part in pages.beside(placed)]
                operands = placed
            self._operands[key] = operands, storages
        return self._operands[key][0]

    def _mapped(
        self, file: int, at: object, size: int, places: Sequence[memory.Place], block: tuple[int, bytes, int] | None
    ) -> list[torch.Tensor]:
        """The storages of operands."""
        if at != self._at:
            self._clear()
            self._at = at
        self._shares = self._shares or block is not None
        found = memory.mapped(file, size, places, 0 if block is None else self._opened.address(*block))
        for number, (where, *_) in enumerate(places):
            if where == "staged":
                self._staged.append((found[number].cuda(), found[number]))
                found[number] = self._staged[-1][0]
        return found

    def _opens(self, *block: Any) -> Answer:
        """Whether memory of the judge's can be opened here."""
        try:
            self._opened.address(*block)
        except (OSError, RuntimeError) as error:
            return Answer(refused=str(error) or type(error).__name__)
        return Answer()

    def _fetch(self, left: Sequence[torch.Tensor], *block: Any) -> None:
        """Write the results that were left to a block."""
        address = self._opened.address(*block)
        for one in left:
            bytes_at(address, one.numel()).copy_(one)
            address += one.numel()
        torch.cuda.synchronize()

    def _call(self, name: str, *more: Any) -> tuple[Answer, list[memoryview]]:
        found: Any = self._inline.call(object, name, *more)
        if isinstance(found, tuple) and all(isinstance(one, torch.Tensor) for one in found):
            return self._returned(found, number=0)
        return Answer(said=found), []

    def _supports(self, job: Job) -> None:
        self._inline.supports(job)

    def _candidates(self, job: Job, given: Operands) -> Answer:
        return Answer(candidates=self._inline.candidates(job, given))

    def _prepare(self, job: Job, given: Operands) -> Answer:
        return Answer(built=self._inline.prepare(job, given))

    def _compile_together(self, jobs: Sequence[Announced]) -> None:
        self._inline.compile_together(jobs)

    def _run(self, number: int, how: How, given: Operands) -> tuple[Answer, list[memoryview]]:
        ran = self._inline.run(number, given, how)
        kept = 0
        if ran.now is not None:
            kept = len(self._results) + 1
            self._results[kept] = ran.now
        more = {"proof": ran.proof, "contract": ran.contract, "objection": ran.objection}
        return self._returned(ran.results, number=kept, **more)

    def _returned(self, results: Sequence[torch.Tensor], **more: Any) -> tuple[Answer, list[memoryview]]:
        """Results as the judge gets them: large ones on the device where it has sent operands so, else as bytes."""
        forms, data = memory.forms(results)
        left = sum(one.numel() for one in data)
        if self._shares and left > _FEW and all(one.is_cuda for one in data):
            self._left = data
            return Answer(ran=RanForm(forms, left=left, **more)), []
        return Answer(ran=RanForm(forms, **more)), memory.sent(data)

    def _now(self, number: int) -> tuple[Answer, list[memoryview]]:
        return self._returned(self._results[number](), number=0)

    def _eager(self, problem: Problem, given: Operands) -> tuple[Answer, list[memoryview]]:
        return self._returned(self._inline.eager(problem, given), number=0)

    def _drop(self) -> None:
        self._clear()
        faults.release()

    def _clear(self) -> None:
        self._operands.clear()
        self._staged.clear()
        self._margins.clear()
        self._opened.close_large()

    def _forget(self, number: int) -> None:
        if number:
            self._inline.forget(number)
            return
        self._inline.release()
        self._results.clear()
