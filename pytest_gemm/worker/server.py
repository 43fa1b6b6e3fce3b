"""The worker's end: it answers one question after the other."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from pytest_gemm import trace
from pytest_gemm.api.protocols import Backend, Compiling
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.outcome import Misconduct, Pruned, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import memory
from pytest_gemm.worker.answers import Answer, Failure, RanForm, Refusal, Span
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import How, Job, Ran, Thrown

# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD: Final = 50_000


def serve(end: socket.socket, backends: Mapping[str, Backend], threads: int, stack: int) -> None:
    """Answer questions until the judge closes its end."""
    torch.set_num_threads(threads)
    gc.freeze()  # torch and a compiler are millions of objects that every collection would visit
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
    faulthandler.enable(file=stack, all_threads=True)
    process = os.getpid()
    trace.taken()  # of pytest's process
    worker, encoder = _Server(backends), msgspec.msgpack.Encoder(enc_hook=str)
    while True:
        try:
            first, _, files = memory.receive(end)
        except (EOFError, OSError):
            return
        data: list[memoryview] = []
        try:
            answer, data = worker.answer(first, files)
        except (Unsupported, Pruned, Misconduct) as error:
            reason = error.reason
            answer = Answer(Refusal(type(error).__name__, reason.code, reason.text, reason.remedy))
        except Thrown as error:
            answer = Answer(failure=Failure(error.kind, error.line, error.details, error.memory, error.lost))
        except Exception:  # of ours: the judge has to know
            answer = Answer(defect=traceback.format_exc())
        if os.getpid() != process:  # a kernel has forked, and this copy would answer too
            os._exit(1)
        spans = [msgspec.convert(one, Span) for one in trace.taken()] if trace.is_on() else []
        answer = msgspec.structs.replace(answer, counts=worker.counts(), spans=spans)
        memory.send(end, encoder.encode(answer), data)


class _Server:
    """What a worker does with a question."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = backends
        self._stores = {name: one.store for name, one in backends.items() if isinstance(one, Compiling)}
        self._inline = Inline()
        self._operands: dict[int, tuple[Operands, list[torch.Tensor]]] = {}
        self._results: dict[int, Ran] = {}
        self._problem = ""

    def answer(self, first: bytes, files: Sequence[int]) -> tuple[Answer, list[memoryview]]:
        """The answer to a question, and the bytes of results."""
        question, more, load, forgotten = memory.unpickled(first, self._backends)
        for one in forgotten:
            self._forget(one)
        given = [] if load is None else [self._loaded(load, files)]
        found = getattr(self, f"_{question}")(*more, *given)
        return found if isinstance(found, tuple) else (found or Answer(), [])

    def _loaded(self, load: tuple[Any, ...], files: Sequence[int]) -> Operands:
        key, *new = load
        if new:
            skeleton, before, *place = new
            if before:
                storages = self._operands[before][1]
            else:
                storages = memory.mapped(files[0], *place)
                os.close(files[0])
            made = memory.operands_in(skeleton, storages)
            if made.problem.line != self._problem:
                self._operands.clear()
                self._problem = made.problem.line
            self._operands[key] = made, storages
        return self._operands[key][0]

    def _supports(self, job: Job) -> None:
        self._inline.supports(job)

    def _candidates(self, job: Job, given: Operands) -> Answer:
        return Answer(candidates=self._inline.candidates(job, given))

    def _prepare(self, job: Job, given: Operands) -> Answer:
        return Answer(built=self._inline.prepare(job, given))

    def _run(self, number: int, how: How, given: Operands) -> tuple[Answer, list[memoryview]]:
        ran = self._inline.run(number, given, how)
        kept = 0
        if ran.now is not None:
            kept = len(self._results) + 1
            self._results[kept] = ran
        forms, data = memory.forms(ran.results)
        return Answer(ran=RanForm(forms, kept, ran.proof, ran.contract)), data

    def _now(self, number: int) -> tuple[Answer, list[memoryview]]:
        now = self._results[number].now
        assert now is not None
        forms, data = memory.forms(now())
        return Answer(ran=RanForm(forms, 0)), data

    def _eager(self, problem: Problem, given: Operands) -> tuple[Answer, list[memoryview]]:
        forms, data = memory.forms(self._inline.eager(problem, given))
        return Answer(ran=RanForm(forms, 0)), data

    def _drop(self) -> None:
        self._operands.clear()

    def _forget(self, number: int) -> None:
        if number:
            self._inline.forget(number)
            return
        self._inline.release()
        self._results.clear()

    def counts(self) -> dict[str, dict[str, int | float]]:
        """What became of the kernels that backends requested since the last answer."""
        found = {}
        for name, store in self._stores.items():
            if store.counts.kernels:
                found[name] = dataclasses.asdict(store.counts)
                store.counts = type(store.counts)()
        return found
