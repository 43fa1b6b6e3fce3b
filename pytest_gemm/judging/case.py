"""A case as the judge takes it, and the evidence that it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device, Mode
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.numerics.interval import Interval
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker.messages import Job, Ran


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem on a backend, to be judged with several distributions on one artifact.

    Attributes:
        backend: computes it.
        problem: what is computed.
        distributions: names of distributions, judged in this order; empty: operands cannot be built yet.
        seed: of all values.
        device: where.
        candidates: which of the backend's candidates are judged.
        mode: how the kernel is reached.
        threads: CPU threads of PyTorch while it is compiled and run; 0: as many as there are.
        run_threads: CPU threads with which it is run, where these are not those it is compiled with; 0: the same.
        isa: instruction set of the CPU to generate for, one of ``machine.isa.ISAS``; "": the machine's own.
        machine, user_caches: see :class:`BuildRequest`.
        calls: how often one distribution is run once more; several calls run beside other load, see ``How``.
        callers: how many threads make each of these calls at once, see ``How``.
        alone: where it is judged once more as compiled alone, what a failure of it then says; else "".
    """

    backend: Backend
    problem: Problem
    distributions: tuple[str, ...]
    seed: int
    device: Device
    candidates: CandidateSelection = dataclasses.field(default_factory=CandidateSelection)
    mode: Mode = Mode.OWN
    threads: int = 0
    isa: str = ""
    machine: str = ""
    user_caches: str = ""
    run_threads: int = 0
    calls: int = 1
    callers: int = 0
    alone: str = ""

    def request(self, candidate: str = "") -> BuildRequest:
        """How its backend is to build the problem, with one candidate or the one that the backend selects."""
        return BuildRequest(
            device=self.device,
            candidate=candidate,
            selection=Selection(self.candidates.text if self.candidates.by_backend else ""),
            mode=self.mode,
            isa=self.isa,
            machine=self.machine,
            user_caches=self.user_caches,
            run_threads=self.run_threads,
            alone=bool(self.alone),
        )

    def job(self, candidate: str = "") -> Job:
        """What a worker is asked of it, with one candidate or the one that the backend selects."""
        return Job(self.backend, self.problem, self.request(candidate), self.threads)

    def id(self, candidate: str = "") -> CaseId:
        """The identity of the case, or of one candidate of it."""
        name, line, ran = self.backend.name, self.problem.line, self.run_threads
        return CaseId(name, line, candidate, self.mode, self.isa, self.threads, run_threads=ran)


@dataclasses.dataclass
class Evidence:
    """What a failed case leaves behind for the artifacts folder; of a large one, the lines that show it.

    Attributes:
        operands: that it ran on.
        actual, interval: the wrong result and what it might have been; ``None`` where there is none to compare.
        source: the generated program, "" where there is none.
        again: runs the compiled problem on other operands, until the next case; ``None`` when it never came to be, or
            when the operands are but lines of those that it ran on.
        place: which of several results is wrong.
    """

    operands: Operands
    actual: torch.Tensor | None = None
    interval: Interval | None = None
    source: str = ""
    again: Callable[[Operands], Ran] | None = None
    place: int = 0


@dataclasses.dataclass(frozen=True)
class Judged:
    """What the judge gives back.

    Attributes:
        outcome: how the case ended with one candidate and one distribution.
        evidence: of a failure; ``None`` of a pass, and of failures beyond the first few of a case.
    """

    outcome: Outcome
    evidence: Evidence | None = None
