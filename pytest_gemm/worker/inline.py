"""Foreign code, called: the one place where a backend is asked, compiles and runs.

Each call is guarded by :mod:`calls`, and the type of each answer is checked.  The judge's own process does this only
inline; otherwise it happens in a process of its own, see :mod:`process`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch

from pytest_gemm.api import device_kernels
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import CandidateBackend, Candidates, Prepared, Together, timed, unsupported
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Activity, Misconduct, Phase, Pruned, Unsupported
from pytest_gemm.core.text import first_line, kind_of, message, one_line
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import cpu_threads, settings
from pytest_gemm.operands import dtypes, tensors
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.worker import faults, streams
from pytest_gemm.worker.calls import KEPT_BYTES, Escape, asking, check_place, handing, has_bits, quiet, taken
from pytest_gemm.worker.load import loaded
from pytest_gemm.worker.messages import Announced, Built, How, Job, Ran, Thrown

_Kind = TypeVar("_Kind")
# The results of a call as ordinary tensors over the kernel's memory, and copies of them.
_Called = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
# Frames of a backend's exception that are shown: enough to see where, not a page.
_FRAMES: Final = 4
# Of mallopt: the complement of a byte that memory is filled with; 0 for none.
_M_PERTURB: Final = -6
_DETAILS: Final = 2000


@contextlib.contextmanager
def telling(phase: Phase, device: str) -> Iterator[None]:
    """A block of foreign code: what it raises is a refusal, a misconduct, or :class:`Thrown`."""
    try:
        yield
    except (Unsupported, Pruned, Misconduct, Thrown):
        raise
    except Exception as error:
        raise thrown(error, phase, device) from error


def thrown(error: Exception, phase: Phase, device: str) -> Thrown:
    """The description of an exception, without the frames of the judge and the worker."""
    raised = error.__cause__ if isinstance(error, Escape) and error.__cause__ is not None else error
    frames = [frame for frame in traceback.extract_tb(raised.__traceback__) if not _is_own(frame.filename)]
    where = "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()
    kind = kind_of(raised)
    memory = faults.out_of_memory(error, phase, device) or faults.no_room(error)
    last = faults.device_error(device) if memory is None else None
    lost = None if last is None else faults.lost(error, last, phase)
    return Thrown(kind, first_line(raised), f"{where}\n{kind}: {message(raised)[:_DETAILS]}", memory, lost)


def _is_own(file: str) -> bool:
    """Whether a frame is one of the judge's or the worker's."""
    own = {Path(__file__).parent, Path(__file__).parents[1] / "judging"}
    return file == contextlib.__file__ or Path(file).parent in own


class Inline:
    """Runs foreign code in this process, without limits.

    Args:
        calls: as of ``Keeper``.
    """

    is_inline = True

    def __init__(self, calls: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        self.deaths = 0
        self._calls = calls
        self.pages: GuardPages | None = None
        self._built: dict[int, tuple[Job, Prepared]] = {}
        self._count = 0
        self.pid = os.getpid()

    def watch(self, _: Activity) -> contextlib.AbstractContextManager[None]:
        """As :meth:`Worker.watch`."""
        return contextlib.nullcontext()

    def supports(self, job: Job) -> None:
        """As :meth:`Worker.supports`."""
        with telling(Phase.SUPPORTS, job.request.device), cpu_threads(job.threads):
            with quiet(), asking():
                found = unsupported(job.backend, job.problem, job.request)
                if found is not None and not isinstance(found, Unsupported):
                    raise TypeError(f"supports() returned {found!r}; return None, or Unsupported with the reason")
            if found is not None:
                raise found

    def candidates(self, job: Job, given: Operands) -> Candidates:
        """As :meth:`Worker.candidates`."""
        assert isinstance(job.backend, CandidateBackend)
        with (
            telling(Phase.CANDIDATES, job.request.device),
            cpu_threads(job.threads),
            handing(given, compiling=True) as own,
        ):
            listed = job.backend.candidates(job.problem, own, job.request)
            names = tuple(map(str, listed.names))
            if odd := [name for name in names if name != one_line(name)]:  # outcomes have printable names
                raise ValueError(f"candidates() lists a name that cannot be printed: {odd[0]!r}")
            return dataclasses.replace(listed, names=names)

    def prepare(self, job: Job, given: Operands) -> Built:
        """As :meth:`Worker.prepare`."""
        with telling(Phase.PREPARE, job.request.device), cpu_threads(job.threads):
            given.reset_out()
            with handing(given, compiling=True) as own:
                prepared = job.backend.prepare(job.problem, own, job.request)
            # Of no earlier worker either: what that has built is gone, and must not be taken for this.
            self._count = max(self._count + 1, time.monotonic_ns())
            self._built[self._count] = job, prepared
            with asking():
                source = getattr(prepared, "source", "")
                return Built(
                    number=self._count,
                    kernels=_kernels(prepared),
                    pruned=dict(getattr(prepared, "pruned", {})),
                    timings=dict(getattr(prepared, "timings", {})),
                    constant_b=bool(getattr(prepared, "constant_b", False)),
                    source=source if isinstance(source, str) else "",
                )

    def compile_together(self, jobs: Sequence[Announced]) -> None:
        """As :meth:`Worker.compile_together`."""

        def given() -> Iterator[tuple[Problem, Operands, BuildRequest]]:
            for job, distribution, seed in jobs:
                made = tensors.make(job.problem, distribution, seed, job.request.device)
                with cpu_threads(job.threads), handing(made, compiling=True) as own:
                    yield job.problem, own, job.request

        first, *_ = jobs[0]
        assert isinstance(first.backend, Together)
        with telling(Phase.PREPARE, first.request.device):
            first.backend.compile_together(given())

    def prepared(self, number: int) -> Prepared:
        """What was compiled."""
        return self._built[number][1]

    def run(self, number: int, given: Operands, how: How) -> Ran:
        """As :meth:`Worker.run`."""
        job, prepared = self._built[number]
        device = job.request.device
        # Once for each candidate is enough: what runs is decided when it is compiled.
        profiled = how.profiled and device is Device.CUDA and device_kernels.works()
        side = how.stream == "side" and device is Device.CUDA
        with telling(how.phase, device), cpu_threads(job.threads):
            with (
                contextlib.nullcontext() if self.pages is None else self.pages.running(),
                streams.on_side_stream(given) if side else contextlib.nullcontext(given) as streamed,
                _filled(how.fill) if how.fill else contextlib.nullcontext(),
            ):
                if how.phase is not Phase.RUN_AGAIN:
                    _prime_allocator(job.problem, device, how.fill)
                with device_kernels.profile() if profiled else contextlib.nullcontext() as names:
                    call = functools.partial(_called, job, prepared, streamed, how)
                    own, copies = call()[0] if how.calls == 1 else _odd(call, how.calls, job)
            proof = dataclasses.replace(_proof(prepared), profiled=None if names is None else tuple(names))
            with asking():
                contract = _of_type(prepared.contract, Contract, "the attribute contract is")
            objection = proof.objection()
        kept = given.out is None and sum(one.numel() * one.element_size() for one in own) < KEPT_BYTES
        return Ran(copies, proof, contract, (lambda: own) if kept else None, objection)

    def eager(self, problem: Problem, given: Operands) -> tuple[torch.Tensor, ...]:
        """As :meth:`Worker.eager`."""
        with telling(Phase.EAGER, given.device), settings(problem):
            given.reset_out()
            made = as_tuple(program.build(problem)(**program.args(problem, given)))
            wait_for(given.device)
            return made if given.out is None else tuple(map(torch.clone, made))  # a later run writes there

    def call(self, _: type[_Kind], name: str, *more: object, given: Operands | None = None) -> _Kind:
        """As :meth:`Worker.call`."""
        with telling(Phase.TIME, "cuda" if torch.cuda.is_initialized() else "cpu"), asking():
            return self._calls[name](self, *more, *([] if given is None else [given]))  # type: ignore[no-any-return]  # of this package

    def results(self, name: str, *more: object) -> tuple[torch.Tensor, ...]:
        """As :meth:`Worker.results`."""
        return self.call(tuple[torch.Tensor, ...], name, *more)

    def forget(self, number: int) -> None:
        """As :meth:`Worker.forget`."""
        self._built.pop(number, None)

    def release(self) -> None:
        """As :meth:`Worker.release`."""
        self._built.clear()

    def close(self) -> None:
        """Nothing runs."""


def _odd(call: Callable[[], list[_Called]], count: int, job: Job) -> _Called:
    """Of so many calls under load one whose results have other bits than those of most; without one, the first."""
    with loaded(job.request.device):
        made = call()
        first = odd = made[0]
        differing = 0
        for last in range(count - 1, -1, -1):
            for found in made:
                if not all(map(_equal, found[1], first[1])):
                    differing, odd = differing + 1, found
            if last:
                _prime_allocator(job.problem, job.request.device)
                made = call()
    return first if 2 * differing > count * len(made) else odd


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two results have the same bits."""
    if x.shape != y.shape or x.dtype != y.dtype or not (has_bits(x) and has_bits(y)):
        return False
    return torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (x, y)))


def _called(job: Job, prepared: Prepared, given: Operands, how: How) -> list[_Called]:
    """What a call gives, or one call each of several threads at once; these would write to the same given result."""
    device, callers = job.request.device, 0 if given.out is not None else how.callers
    is_plain = how.phase is Phase.TIME or callers
    with cpu_threads(job.request.run_threads), handing(given) as handed:
        with timed(prepared, handed) if is_plain else contextlib.nullcontext(lambda: prepared.run(handed)) as call:
            given.reset_out()  # what is timed has been called before
            made = _in_threads(call, callers, job.problem) if callers else [call()]
        wait_for(device)
        found = [taken(as_tuple(one)) for one in made]
        wait_for(device)  # for the copies, which may be on a stream of the block's
    for own, _ in found:
        check_place(own, given)
    return found


def _in_threads(call: Callable[[], Any], count: int, problem: Problem) -> list[Any]:
    """What a call gives in each of so many new threads, which begin it together."""
    begin = threading.Barrier(count)

    def called() -> Any:
        with settings(problem), torch.no_grad():  # which a new thread does not have
            begin.wait()
            return call()

    with ThreadPoolExecutor(count) as threads:
        return [one.result() for one in [threads.submit(called) for _ in range(count)]]


def as_tuple(made: Any) -> tuple[torch.Tensor, ...]:
    """What a program returned, as a tuple."""
    return made if isinstance(made, tuple) else (made,)


def wait_for(device: str) -> None:
    """Until the device has computed all that it was given: errors of a kernel show no earlier."""
    if device == "cuda":
        # ATen asks whether a launch has failed after each of its own; a kernel that did not ask leaves that behind.
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()


def _proof(prepared: Prepared) -> Proof:
    """What the last run executed."""
    with asking():
        return _of_type(prepared.proof(), Proof, "proof() returned")


def _of_type(found: object, kind: type[_Kind], what: str) -> _Kind:
    if not isinstance(found, kind):
        raise TypeError(f"{what} {type(found).__name__}, not a {kind.__name__}")
    return found


def _kernels(prepared: Prepared) -> tuple[str, ...]:
    """Names of the kernels that a run will use, as far as they are known before it has run."""
    try:
        proof = _proof(prepared)
    except Exception:  # it need not have an answer yet
        return ()
    return proof.kernels if proof.executed else tuple(dict.fromkeys((*proof.generated, *proof.chosen)))


@contextlib.contextmanager
def _filled(byte: int) -> Iterator[None]:
    """A block in which memory that glibc allocates is filled with a byte; other libraries of C have no such option."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(_M_PERTURB, byte ^ 0xFF)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


def _prime_allocator(problem: Problem, device: str, fill: int = 0) -> None:
    """Leave NaN in the memory that the result is likely to get, so that unwritten elements show; or other bytes."""
    if fill:
        for size in (1, 2, 4, 8):  # of accumulators too
            torch.full((math.prod(problem.result_shape) * size,), fill, dtype=torch.uint8, device=device)
        return
    dtype = dtypes.torch_dtype(problem.result_dtype)
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    torch.full(problem.result_shape, value, dtype=dtype, device=device)
