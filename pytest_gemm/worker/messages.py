"""What a judge asks a worker, and what a worker answers.

Tensors go as copies; all else that a worker says of itself is testimony, of types that are checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import torch

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Backend, Candidates
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.core.outcome import Activity, Phase, Reason
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.guard_pages import GuardPages
    from pytest_gemm.operands.tensors import Operands

_Kind = TypeVar("_Kind")


@dataclasses.dataclass(frozen=True)
class Job:
    """A problem on a backend.

    Attributes:
        backend: computes it.
        problem: what is computed.
        request: how it is built, and where.
        threads: CPU threads of PyTorch while it is compiled and run; 0: as many as there are.
    """

    backend: Backend
    problem: Problem
    request: BuildRequest
    threads: int = 0


# A job with the distribution and the seed of its operands.
Announced: TypeAlias = tuple[Job, str, int]


@dataclasses.dataclass(frozen=True)
class Built:
    """What was compiled.

    Attributes:
        number: by which the worker knows it.
        kernels: names of the kernels that a run will use, as far as they are known before it has run.
        pruned: candidates that the backend pruned by itself, where it reports them.
        timings: seconds a call of candidates that were timed to select one.
        constant_b: B is part of what was compiled, so that what is written to its memory later does not count.
        source: the generated program, "" where there is none.
    """

    number: int
    kernels: tuple[str, ...] = ()
    pruned: Mapping[str, Reason] = dataclasses.field(default_factory=dict)
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    constant_b: bool = False
    source: str = ""


@dataclasses.dataclass(frozen=True)
class How:
    """How a program is run.

    Attributes:
        phase: what it is for.
        profiled: whether the device's profiler looks on, where there is one.
        stream: ``default``, or ``side`` for a CUDA stream of its own, see ``streams``.
        calls: how often; of several, which run beside other load, results with other bits than most are returned.
        fill: byte that fresh memory is filled with; 0: NaN lies where the result may be.
        callers: how many new threads make each call at once, as it is timed; 0: the thread that has compiled makes it.
    """

    phase: Phase = Phase.RUN
    profiled: bool = False
    stream: str = "default"
    calls: int = 1
    fill: int = 0
    callers: int = 0


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run has returned, and what is known of it.

    Attributes:
        results: copies of the results, made as soon as the call had returned; of large ones see ``calls.taken``.
        proof: what was executed.
        objection: of the proof, as the process that computed compares its patterns.
        contract: the arithmetic that the compiled problem promises.
        now: reads the same results from the kernel's own memory; ``None`` where that is not kept.
    """

    results: tuple[torch.Tensor, ...]
    proof: Proof
    contract: Contract
    now: Callable[[], tuple[torch.Tensor, ...]] | None = None
    objection: Reason | None = None


class Thrown(Exception):
    """An exception of foreign code, told by the process in which it was raised.

    Attributes:
        kind: its class.
        line: the first line of what it says.
        details: its innermost frames, and all that it says.
        memory: the reason, where memory ran out; else ``None``.
        lost: the reason, where the process can compute nothing more on the device; else ``None``.
    """

    def __init__(self, kind: str, line: str, details: str, memory: Reason | None, lost: Reason | None) -> None:
        super().__init__(f"{kind}: {line}")
        self.kind, self.line, self.details, self.memory, self.lost = kind, line, details, memory, lost


class Died(Exception):
    """The worker has ended in the middle of what it was asked, or was ended because its limit ran out.

    Attributes:
        reason: how.
        details: where Python was, and what the process said last.
        limit: of what it was asked, in seconds, where that ran out; else 0.
        status: exit status, negative for a signal; ``None`` where it is unknown.
    """

    def __init__(self, reason: Reason, details: str = "", limit: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason.text)
        self.reason, self.details, self.limit, self.status = reason, details, limit, status


class Worker(Protocol):
    """What runs foreign code for a judge.

    Each question may raise :class:`Thrown` and ``Misconduct``, and :class:`Died` where the worker is another process.

    Attributes:
        is_inline: the code runs in the judge's own process, on the judge's own operands.
        pages: where a run has its operands and results, ``None`` for ordinary memory.
        pid: of the process that the code runs in.
        deaths: how many such processes have ended.
    """

    is_inline: bool
    pages: GuardPages | None
    deaths: int

    @property
    def pid(self) -> int: ...  # noqa: D102  # see above

    def watch(self, activity: Activity) -> AbstractContextManager[None]:
        """A block that may not come back, or whose questions may not."""

    def supports(self, job: Job) -> None:
        """Ask the backend whether it supports the problem; raises ``Unsupported`` when it does not."""

    def candidates(self, job: Job, given: Operands) -> Candidates:
        """The candidates of the problem; raises ``Unsupported`` when there is none."""

    def prepare(self, job: Job, given: Operands) -> Built:
        """Compile the problem; raises ``Unsupported`` and ``Pruned`` as the backend does."""

    def compile_together(self, jobs: Sequence[Announced]) -> None:
        """Compile what several jobs of one backend need that will be prepared."""

    def run(self, number: int, given: Operands, how: How) -> Ran:
        """Run what was built; the device has finished.

        Args:
            number: of a :class:`Built`.
            given: operands of the problem.
            how: how; in the phase ``TIME`` it is the call that is timed.
        """

    def eager(self, problem: Problem, given: Operands) -> tuple[torch.Tensor, ...]:
        """The results of the program in eager PyTorch."""

    def call(self, kind: type[_Kind], name: str, *more: object, given: Operands | None = None) -> _Kind:
        """What one of the keeper's functions returns there.

        Args:
            kind: type of what it returns, as msgspec checks it.
            name: of the function.
            more: its arguments, behind the :class:`Worker` in the process that runs kernels.
            given: the last one, where operands belong to them.
        """

    def results(self, name: str, *more: object) -> tuple[torch.Tensor, ...]:
        """The same of a function that returns results."""

    def forget(self, number: int) -> None:
        """Free what was built and its results."""

    def release(self) -> None:
        """Free whatever was built, and every result."""
