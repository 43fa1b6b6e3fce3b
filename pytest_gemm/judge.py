"""One case from operands to outcome: run, prove what ran, build the truth, compare.

No pytest here: a :class:`Judge` can be driven from a script.  The backend runs before the reference
exists, and nothing of the reference travels back to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_gemm import compare, operands, oracle, program
from pytest_gemm.backend import Backend, Prepared, Unsupported
from pytest_gemm.outcome import Outcome, Reason, Seconds, Status
from pytest_gemm.problem import Problem

__all__ = ["Case", "Evidence", "Judge", "run_once"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem on a backend, to be judged with several fillings on one artifact.

    Attributes:
        backend: who computes it.
        problem: what is computed.
        fillings: names of fillings, judged in this order; empty: the level's choice.
        seed: of all values.
        device: where, ``cpu`` or ``cuda``.
    """

    backend: Backend
    problem: Problem
    fillings: tuple[str, ...]
    seed: int
    device: str


@dataclasses.dataclass
class Evidence:
    """What a failed case leaves behind for the artifacts folder."""

    operands: operands.Operands
    actual: object
    interval: oracle.Interval
    source: str


@dataclasses.dataclass
class _Truth:
    """What is known about a problem and a filling whoever computes it."""

    operands: operands.Operands
    digest: str
    reference: oracle.Reference | None = None
    eager: torch.Tensor | Exception | None = None


@dataclasses.dataclass
class _Run:
    """One result, kept until the case ends to see whether somebody still writes to it."""

    truth: _Truth
    result: torch.Tensor
    kept: bytes | None


# Results up to this size are kept and checked again at the end of the case.
_KEEP_BYTES = 1 << 20


class Judge:
    """Judges cases and shares operands and references between the backends of one problem.

    They are kept until another problem comes: pytest asks for the backends of one problem one after the other.

    Args:
        may_run_eager: whether eager ATen may be run on a problem, to set results beside its own; it
            is not asked where it is known to kill the process.
    """

    def __init__(self, may_run_eager: Callable[[Problem, str], bool] = lambda *_: True) -> None:
        self._may_run_eager = may_run_eager
        self._earlier: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._known: tuple[tuple[str, int, str], dict[str, _Truth]] = (("", 0, ""), {})
        self.evidence: list[tuple[Outcome, Evidence]] = []

    def judge(self, case: Case) -> Iterator[Outcome]:
        """The outcomes of a case, one a filling; a single one when it ends before any filling."""
        self.evidence.clear()
        try:
            refusal = case.backend.supports(case.problem)
        except Exception as error:  # any exception of a backend is its case's failure
            yield _crash(case, "", error, "supports", Seconds())
            return
        if refusal is not None:
            yield _outcome(case, "", Status.UNSUPPORTED, refusal.reason)
            return
        try:
            truths = {filling: self._truth(case, filling) for filling in case.fillings}
        except Unsupported as missing:
            yield _outcome(case, "", Status.UNSUPPORTED, missing.reason)
            return
        if not truths:
            reason = Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
            yield _outcome(case, "", Status.UNSUPPORTED, reason)
            return
        first = next(iter(truths.values()))
        started = time.perf_counter()
        try:
            with _quiet():
                prepared = case.backend.prepare(case.problem, first.operands)
        except Unsupported as late:
            yield _outcome(case, "", Status.UNSUPPORTED, late.reason)
            return
        except Exception as error:  # as above
            seconds = Seconds(compile=time.perf_counter() - started)
            yield _crash(case, case.fillings[0], error, "prepare", seconds)
            return
        compile_seconds = time.perf_counter() - started

        runs: list[_Run] = []
        for index, (filling, truth) in enumerate(truths.items()):
            seconds = Seconds(compile=compile_seconds if index == 0 else 0.0)
            yield self._judge_filling(case, prepared, filling, truth, runs, seconds)
        if runs:
            again = self._run_again(case, prepared, runs)
            if again is not None:
                yield again

    # -- one filling -----------------------------------------------------------------------------

    def _judge_filling(
        self, case: Case, prepared: Prepared, filling: str, truth: _Truth, runs: list[_Run], seconds: Seconds
    ) -> Outcome:
        given = truth.operands
        started = time.perf_counter()
        _prime_allocator(case.problem, case.device)
        try:
            with _quiet():
                actual = prepared.run(given)
            if case.device == "cuda":
                torch.cuda.synchronize()
            proof = prepared.proof()
        except Exception as error:  # as above
            return _crash(case, filling, error, "run", seconds + Seconds(run=time.perf_counter() - started))
        seconds += Seconds(run=time.perf_counter() - started)
        kernels = proof.kernels

        def end(status: Status, reason: Reason | None = None, **facts: Any) -> Outcome:
            return _outcome(case, filling, status, reason, kernels=kernels, seconds=seconds, **facts)

        objection = proof.objection()
        if objection is not None:
            return end(Status.FELL_BACK, objection)
        written = given.changed(truth.digest)
        if written:
            return end(
                Status.INCORRECT, Reason("inputs-written", f"the backend wrote to its inputs: {', '.join(written)}")
            )

        started = time.perf_counter()
        if truth.reference is None:
            truth.reference = oracle.reference(case.problem, given)
        interval = oracle.interval(case.problem, given, truth.reference, prepared.contract)
        doubt = oracle.insensitive(case.problem, given, interval)
        verdict = compare.compare(actual, interval, case.problem, given, others=self._earlier_results(case))
        eager = self._beside_eager(case, truth, actual, interval)
        seconds += Seconds(reference=time.perf_counter() - started)

        facts: dict[str, Any] = {"tier": interval.tier, "ratio": verdict.ratio, "eager": eager}
        if verdict.mismatch is not None:
            reason = Reason(verdict.mismatch.code, verdict.mismatch.summary())
            outcome = end(Status.INCORRECT, reason, details=verdict.mismatch.text(), **facts)
            self.evidence.append((outcome, Evidence(given, actual, interval, _source(prepared))))
            return outcome
        if doubt is not None:
            return end(Status.MISTRUSTED, doubt, **facts)
        kept = _bytes(actual) if actual.numel() * actual.element_size() <= _KEEP_BYTES else None
        runs.append(_Run(truth, actual, kept))
        self._earlier_results(case)[f"filling {filling}, seed {case.seed}"] = actual
        return end(Status.PASSED, **facts)

    def _earlier_results(self, case: Case) -> dict[str, torch.Tensor]:
        """Results that this backend gave for the problem at hand: a wrong one may be one of these, kept too long."""
        key = f"{case.backend.name} {case.problem.line}"
        if self._earlier[0] != key:
            self._earlier = (key, {})
        return self._earlier[1]

    def _run_again(self, case: Case, prepared: Prepared, runs: list[_Run]) -> Outcome | None:
        """One filling once more: the same bits, and no earlier result touched since.

        It is one whose sums round, where there is one: on exact data any order of summation gives the same bits.

        Catches a cached result, a stale workspace, results that share memory, writes that come late and
        kernels that are not deterministic.
        """
        first = next((run for run in runs if run.truth.operands.quantum == 0.0), runs[0])
        started = time.perf_counter()

        def end(code: str, text: str) -> Outcome:
            seconds = Seconds(run=time.perf_counter() - started)
            filling = first.truth.operands.filling
            return _outcome(
                case, filling, Status.INCORRECT, Reason(code, text), kernels=prepared.proof().kernels, seconds=seconds
            )

        try:
            with _quiet():
                second = prepared.run(first.truth.operands)
        except Exception as error:  # as above
            return _crash(
                case, first.truth.operands.filling, error, "run again", Seconds(run=time.perf_counter() - started)
            )
        for run in runs:
            if run.kept is not None and _bytes(run.result) != run.kept:
                return end("result-rewritten", "a result that was handed out changed when the next one was computed")
        if prepared.contract.deterministic and first.kept is not None and _bytes(second) != first.kept:
            count = int((second != first.result).sum())
            return end(
                "not-deterministic",
                f"the same call gave other bits the second time ({count} of {second.numel()} elements); "
                "a backend that uses atomics declares deterministic=False",
            )
        return None

    # -- what backends share ---------------------------------------------------------------------

    def _truth(self, case: Case, filling: str) -> _Truth:
        key = (case.problem.line, case.seed, case.device)
        if self._known[0] != key:
            self._known = (key, {})
        truths = self._known[1]
        known = truths.get(filling)
        # A backend that wrote to its inputs must not spoil the next one's.
        if known is None or known.operands.changed(known.digest):
            made = operands.make(case.problem, filling, case.seed, case.device)
            known = truths[filling] = _Truth(made, made.digest())
        return known

    def _beside_eager(self, case: Case, truth: _Truth, actual: torch.Tensor, interval: oracle.Interval) -> str:
        if case.backend.name == "aten":
            return ""
        if not self._may_run_eager(case.problem, case.device):
            return "eager is not run: it can kill the process"
        if truth.eager is None:
            try:
                truth.eager = program.build(case.problem)(**program.args(case.problem, truth.operands))
            except Exception as error:  # eager cannot do everything that a template can
                truth.eager = error
        if isinstance(truth.eager, Exception):
            return f"eager cannot: {_last_line(truth.eager)}"
        return compare.against_eager(actual, truth.eager, interval).text()


def run_once(case: Case, threads: int) -> None:
    """Compile and run a case without judging it, in a process of its own; nothing for a case that is refused."""
    if case.backend.supports(case.problem) is not None:
        return
    torch.set_num_threads(threads)
    given = operands.make(case.problem, case.fillings[0], case.seed, case.device)
    with _quiet(), contextlib.suppress(Unsupported):
        case.backend.prepare(case.problem, given).run(given)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A compiler's own deprecation warnings are no finding, whatever filters the user's pytest has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _prime_allocator(problem: Problem, device: str) -> None:
    """Leave NaN in the memory that the result is likely to get, so that unwritten elements show."""
    dtype = program.torch_dtype(problem.result_dtype)
    torch.full(
        problem.result_shape,
        float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max,
        dtype=dtype,
        device=device,
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().cpu().view(torch.uint8).flatten().numpy().tobytes())


def _source(prepared: Prepared) -> str:
    """The generated program, where the backend has one."""
    source = getattr(prepared, "source", "")
    return source if isinstance(source, str) else ""


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")


def _outcome(case: Case, filling: str, status: Status, reason: Reason | None = None, **facts: Any) -> Outcome:
    return Outcome(case.backend.name, case.problem.line, filling, case.seed, status, reason, **facts)


# Frames of a backend's exception that are shown: enough to see where, not a page.
_FRAMES = 4


def _crash(case: Case, filling: str, error: Exception, phase: str, seconds: Seconds) -> Outcome:
    """An exception of a backend, with its innermost frames; ours are left out."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) != Path(__file__)]
    where = "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    reason = Reason(f"{phase.replace(' ', '-')}-{type(error).__name__}", f"{type(error).__name__} in {phase}: {first}")
    details = f"{where}\n{type(error).__name__}: {str(error)[:2000]}"
    return _outcome(case, filling, Status.CRASHED, reason, details=details, seconds=seconds)
