"""One case from operands to outcome: run, prove what ran, build the truth, compare.

A backend that has several candidates for a problem is judged in as many ways as the case asks for: each candidate is
compiled end to end and judged like a backend of its own.

No pytest here: a :class:`Judge` can be driven from a script.  The backend runs before the reference exists, and nothing
of the reference travels back to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pytest_gemm.api.protocols import Backend, CandidateBackend
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Pruned, Reason, Seconds, Status, Unsupported
from pytest_gemm.core.text import one_line
from pytest_gemm.judging import imitations, repeated, sampled, verdict
from pytest_gemm.judging.attempt import Attempt, Ended
from pytest_gemm.judging.case import Case, Evidence, Judged
from pytest_gemm.judging.inherited import PRODUCT, Theirs, is_pytorch, of_pytorch
from pytest_gemm.judging.results import Returned, differing, digest_of, fingerprint_of
from pytest_gemm.judging.truth import EagerRefusal, Truth, Truths
from pytest_gemm.numerics import precision
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands.distributions import DISTRIBUTIONS
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.storage.datafile import document
from pytest_gemm.worker import calls, faults
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Built, Died, How, Job, Ran, Thrown, Worker

# Runs a case that has passed as it is timed: gets the case, what was compiled for it and the operands.
Timing = Callable[[Case, Built, operands.Operands], Ran]
# The same for a case.
Timed = Callable[[operands.Operands], Ran]

# Names of causes by the codes of reasons.
_CAUSES: Final = document(Path(__file__).with_name("causes.toml"))["codes"]
# Failed outcomes of one case whose tensors are kept: hundreds of candidates may fail alike.
_EVIDENCE: Final = 8
# With more candidates than this each is judged with two distributions.
_MANY: Final = 8
# Names of candidates that a sentence lists.
_NAMES: Final = 40
_ATEN: Final = AtenBackend()


@dataclasses.dataclass
class _Run:
    """What a run has returned, kept until the case ends to see whether the backend still writes to it.

    Attributes:
        truth: what it was held against.
        returned: the results and the copies of them; ``None`` where they are too large to be kept.
        fingerprint: of those that are.
    """

    truth: Truth
    returned: Returned | None
    fingerprint: str = ""

    @classmethod
    def of(cls, truth: Truth, returned: Returned) -> _Run:
        """With what their size allows."""
        if sum(one.numel() * one.element_size() for one in returned.copies) >= calls.KEPT_BYTES:
            return cls(truth, None, fingerprint_of(returned.copies))
        return cls(truth, returned)

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """The results in the program's form; none where they are too large to be kept."""
        return () if self.returned is None else program.gathered(self.truth.problem, self.returned.results)

    def differs(self, other: Returned) -> str:
        """How many elements of the same program's other results have other bits, in brackets; "" for none."""
        if self.returned is None:
            return "" if fingerprint_of(other.copies) == self.fingerprint else " (of a large result)"
        first = self.returned.copies
        if not all(map(verdict.comparable, other.copies, first)):
            return " (it is of another type or shape)"
        count = sum(map(differing, other.copies, first))
        return f" ({count} of {sum(one.numel() for one in first)} elements)" if count else ""


@dataclasses.dataclass(eq=False)
class Judge:
    """Judges cases and shares operands and references between the backends and candidates of one problem.

    Attributes:
        eager: why eager ATen does not run a problem on a device; "" where its results are set beside.
        beside: results are set beside eager's, right ones too.
        reference: which results are judged by sample, see ``sampled.applies``.
        pages: where a worker has operands and results, ``None`` for ordinary memory.
        stream: ``default``, or ``side`` to run on a CUDA stream of its own, see ``streams``.
        statements: names the known wrong answers that a wrong result is compared with, see ``imitations``.
        workers: what runs the foreign code of a backend; ``None``: this process does.
        announced: cases of one backend that will be judged, to be compiled together with the first of them.
    """

    eager: EagerRefusal = lambda *_: ""
    reference: str = "auto"
    pages: GuardPages | None = None
    stream: str = "default"
    statements: Callable[[Outcome, Problem], Sequence[str]] = lambda *_: ()
    workers: Callable[[Backend], Worker] | None = None
    announced: Sequence[Case] = ()
    beside: bool = True
    _worker: Worker = dataclasses.field(default_factory=Inline)
    _truths: Truths = dataclasses.field(default_factory=Truths)
    _batch: Sequence[tuple[int, Job]] = ()  # what was compiled together; it ends with the worker's next death

    def outcomes(self, case: Case, **how: Any) -> list[Outcome]:
        """The outcomes of :meth:`judge`, without their evidence."""
        return [judged.outcome for judged in self.judge(case, **how)]

    def judge(
        self, case: Case, withheld: Callable[[str], Outcome | None] = lambda _: None, timing: Timing | None = None
    ) -> Iterator[Judged]:
        """Judge a case: an outcome for each candidate and distribution; one when it ends before any distribution.

        Args:
            case: what to judge.
            withheld: the outcome of a candidate that must not be run, ``None`` for one that may.
            timing: is called with what has passed, and what it returns is judged as well: one more outcome each.
        """
        self._worker = self.worker_of(case.backend)
        self._worker.pages = self.pages
        self._worker.release()
        kept, starved = 0, False
        for judged in map(_named, _threaded(case, _ended(self._case(case, withheld, timing)))):
            found = judged if judged.evidence else Judged(judged.outcome, self._operands_of(case, judged.outcome))
            kept += found.evidence is not None
            yield found if kept <= _EVIDENCE else Judged(found.outcome)
            starved = starved or (found.outcome.reason is not None and found.outcome.reason.code == "out-of-memory")
        if starved:
            self.release()

    def of_changed(self, case: Case, ran: Ran, change: Callable[[operands.Operands], object]) -> str | None:
        """What is wrong with the results of a call whose operands were changed first; ``None`` for nothing.

        Raises:
            Misconduct: for a shape that has no place in the product.
        """
        given = self._truths.of(case, case.distributions[0]).operands.clone()
        change(given)
        made = program.gathered(case.problem, Returned.of(given, ran).results)
        verdicts = Truth(given, given.digest()).verdicts(made, ran.contract, {}, self.reference)
        wrong = (one.comparison.mismatch for one in verdicts)
        return next((one.summary() for one in wrong if one is not None), None)

    def worker_of(self, backend: Backend) -> Worker:
        """What runs the code of a backend."""
        return self._worker if self.workers is None else self.workers(backend)

    def release(self) -> None:
        """Free the operands and results of the last problem."""
        self._worker.release()
        self._truths.forget()
        faults.release()

    def _operands_of(self, case: Case, outcome: Outcome) -> Evidence | None:
        """Evidence of a failure that has no wrong result to show: a crash, a fallback."""
        distribution = outcome.distribution or next(iter(case.distributions), "")
        truth = self._truths.known(distribution) if outcome.status.is_failure else None
        return None if truth is None else Evidence(truth.operands)

    def _attempt(self, case: Case, candidate: str = "") -> Attempt:
        return Attempt(case, self._worker.watch, candidate)

    def _truth(self, attempt: Attempt, distribution: str) -> Truth:
        attempt.distribution = distribution
        with attempt.phase(Phase.OPERANDS):
            return self._truths.of(attempt.case, distribution)

    # -- the candidates of a case ----------------------------------------------------------------

    def _case(self, case: Case, withheld: Callable[[str], Outcome | None], timing: Timing | None) -> Iterator[Judged]:
        attempt = self._attempt(case)
        with attempt.phase(Phase.SUPPORTS):
            self._worker.supports(case.job())
        if not case.distributions:
            reason = Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
            raise Ended(attempt.end(Status.UNSUPPORTED, reason))
        first = self._truth(attempt, case.distributions[0]).operands
        candidates: tuple[str, ...] = ("",)
        if not case.candidates.by_backend:
            with attempt.phase(Phase.CANDIDATES):
                candidates = self._candidates(case, first)
        case = dataclasses.replace(case, distributions=_sufficient(case, len(candidates)))
        pruned: list[Reason] = []
        for candidate in candidates:
            held = withheld(candidate) if candidate else None
            for judged in _ended(self._candidate(case, candidate, timing)) if held is None else [Judged(held)]:
                outcome = judged.outcome
                if outcome.status is Status.PRUNED and outcome.candidate == candidate and outcome.reason:
                    pruned.append(outcome.reason)
                truth, theirs = self._truths.known(outcome.distribution or case.distributions[0]), Theirs()
                if outcome.status in {Status.CRASHED, Status.TIMED_OUT} and truth is not None:
                    theirs = self._pytorch(case, truth)
                    outcome = theirs.of_ended(outcome)
                yield Judged(outcome, judged.evidence)
                if theirs.died:
                    break  # and what was compiled has gone with it
        # A user who names candidates may name one that is pruned; in any other run something has to be judged.
        if pruned and len(pruned) == len(candidates) and not case.candidates.by_name:
            yield Judged(self._attempt(case).end(Status.CRASHED, _all_pruned(pruned)))

    def _candidates(self, case: Case, given: operands.Operands) -> tuple[str, ...]:
        """Names of the candidates to judge; a single "" for a backend without any.

        Raises:
            Unsupported: when none has the name that was asked for.
        """
        wanted, backend = case.candidates, case.backend
        if not isinstance(backend, CandidateBackend):
            if not wanted.by_name:
                return ("",)
            raise Unsupported("unknown-candidate", f"{backend.name} has no candidates, so none is called {wanted.text}")
        listed = self._worker.candidates(case.job(wanted.text if wanted.by_name else ""), given)
        names = listed.names
        found = wanted.of(names, case.problem.line) or listed.named
        if not found:
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            text = f"no candidate is called {wanted.text}; there are {', '.join(names[:_NAMES])}{more}"
            raise Unsupported("unknown-candidate", text)
        return found

    def _candidate(self, case: Case, candidate: str, timing: Timing | None) -> Iterator[Judged]:
        """One candidate, or the one that the backend selects, with all distributions; timed if all of them passed."""
        attempt = self._attempt(case, candidate)
        truths = [self._truth(attempt, distribution) for distribution in case.distributions]
        attempt.distribution, attempt.truth = case.distributions[0], truths[0]
        with attempt.phase(Phase.PREPARE):
            if not candidate and case.id() in {one.id() for one in self.announced}:
                self._compile_announced()
            is_announced = (self._worker.deaths, case.job(candidate)) in self._batch
            attempt.announced = len(self._batch) - 1 if is_announced else 0
            # The kernels are not known before the first run, so the watch has none.
            attempt.built = self._worker.prepare(case.job(candidate), truths[0].operands)
        for name, reason in attempt.built.pruned.items():
            yield Judged(self._attempt(case, one_line(name)).end(Status.PRUNED, reason))
        runs: list[_Run] = []
        refusals: list[Outcome] = []
        for truth in truths:
            for judged in _ended(self._distribution(attempt, truth, runs)):
                if judged.outcome.status is Status.UNSUPPORTED:
                    refusals.append(judged.outcome)
                else:
                    yield judged
            attempt.seconds = Seconds()
            if attempt.died:
                return
        if len(refusals) == len(truths):
            yield Judged(dataclasses.replace(refusals[0], distribution=""))
            return
        for one in refusals:  # a problem is taken or not, whatever its values
            assert one.reason is not None
            late = Reason("late-refusal", f"taken with other values, and with these refused: {one.reason.text}")
            yield Judged(dataclasses.replace(one, status=Status.CRASHED, reason=late))
        again = list(_ended(self._run_again(attempt, runs)))
        yield from again
        if again or len(runs) < len(truths):
            return
        attempt.seconds = Seconds()
        if timing is None:  # a session of many processes times what one has judged
            again = list(_ended(self._on_other_values(attempt, runs)))
            yield from again
            if not again:
                self._worker.forget(attempt.built.number)
        else:
            timed = functools.partial(timing, case, attempt.built)
            yield from _ended(self._distribution(attempt, runs[-1].truth, runs, timed))

    def _compile_announced(self) -> None:
        """What fails in it shows again where it is judged."""
        jobs = [(case.job(), case.distributions[0], case.seed) for case in self.announced if case.distributions]
        self.announced = ()
        with contextlib.suppress(Died, Thrown, Unsupported, Pruned, Misconduct):
            self._worker.compile_together(jobs)
            self._batch = [(self._worker.deaths, job) for job, *_ in jobs]

    # -- one distribution ------------------------------------------------------------------------

    def _distribution(
        self, attempt: Attempt, truth: Truth, runs: list[_Run], timed: Timed | None = None
    ) -> Iterator[Judged]:
        """One result: of a run, or with ``timed`` the one that it returns."""
        case = attempt.case
        attempt.turn_to(truth.operands.distribution, truth)
        phase = Phase.RUN if timed is None else Phase.TIME
        returned, contract = self._run(attempt, truth, phase, timed, profiled=not runs)
        verdicts = self._verdicts(attempt, truth, returned.results, contract)
        with attempt.phase(Phase.REFERENCE):
            count = returned.rewritten()
        if count:
            text = f"{count} elements of the result changed after the call had returned, and no other call was made"
            reason = Reason("written-after-return", text, "wait for every thread and process before returning")
            raise Ended(attempt.end(Status.INCORRECT, reason))
        if any(not one.comparison.ok for one in verdicts):
            yield self._wrong(attempt, truth, returned, contract, verdicts, is_timed=timed is not None)
            return
        if (doubt := next((one.doubt for one in verdicts if one.doubt is not None), None)) is not None:
            raise Ended(attempt.end(Status.MISTRUSTED, doubt))
        if timed is None:
            runs.append(_Run.of(truth, returned))
            if kept := runs[-1].results:
                self._truths.earlier(case)[f"distribution {attempt.distribution}, seed {case.seed}"] = kept
        yield Judged(attempt.end(Status.PASSED))

    def _wrong(
        self,
        attempt: Attempt,
        truth: Truth,
        returned: Returned,
        contract: Contract,
        verdicts: Sequence[sampled.ResultVerdict],
        *,
        is_timed: bool,
    ) -> Judged:
        """The first wrong result: where it is wrong, and whether PyTorch's own product is, too."""
        problem = attempt.case.problem
        place, one = next((place, one) for place, one in enumerate(verdicts) if not one.comparison.ok)
        theirs = self._pytorch(attempt.case, truth)
        attempt.died |= theirs.died
        others = {name: results[place] for name, results in self._truths.earlier(attempt.case).items()}
        result = program.gathered(problem, returned.results)[place]
        one, cause, beside = theirs.apart(place, problem.outputs[place], result, one, others)
        wrong = one.comparison.mismatch
        assert wrong is not None
        wrong = wrong if cause or is_timed else self._repeated(attempt, truth, place, result, one)
        again = functools.partial(self._again, attempt, truth, place)
        if wrong.name == repeated.UNWRITTEN.name and (unwritten := theirs.leaves_unwritten(place, one, again)):
            cause, beside = f"{PRODUCT}: {wrong.name}", unwritten
        which = f"{problem.output_names[place]}: " if len(verdicts) > 1 else ""
        first, *more = (which + wrong.text()).splitlines()
        details = "\n".join([first, *([f"  {beside}"] if beside else []), *more])
        if steps := problem.outputs[place].view_steps:
            details += f"\n  (indices before view step {'+'.join(map(str, steps))})"
        outcome = attempt.end(Status.INCORRECT, Reason(wrong.code, first), details, cause or wrong.name)
        failure = imitations.Failure(truth.operands, returned.results, contract, place, one, outcome.candidates)
        names = self.statements(of_pytorch(outcome) if cause else outcome, problem)
        imitated = imitations.imitated(failure, names)
        outcome = dataclasses.replace(outcome, imitates=imitated, inherited=bool(cause))
        actual = one.actual if isinstance(one.actual, torch.Tensor) else None
        run = None if one.note else functools.partial(self._worker.run, attempt.built.number, how=How())
        return Judged(outcome, Evidence(one.operands, actual, one.interval, attempt.built.source, run, place))

    def _pytorch(self, case: Case, truth: Truth) -> Theirs:
        """What PyTorch's own product gives of the same operands, in the process of PyTorch's own backends."""
        threads, worker = (case.threads, case.run_threads), self.worker_of(_ATEN)
        # In this process it must not be run where it can kill it; with guard pages GuardedJudge asks for itself.
        withheld = worker.is_inline and self.eager(case.problem, case.device)
        if is_pytorch(case) or truth.spoiled or withheld or self.pages is not None or threads in truth.pytorch:
            return truth.pytorch.get(threads, Theirs())
        given = case.problem, case.distributions, case.seed, case.device
        case = Case(_ATEN, *given, threads=threads[0], run_threads=threads[1])
        judge = dataclasses.replace(self, _worker=worker)
        attempt = judge._attempt(case)
        attempt.turn_to(truth.operands.distribution, truth)
        try:
            with attempt.phase(Phase.PREPARE):
                worker.supports(case.job())
                attempt.built = worker.prepare(case.job(), truth.operands)
            returned, contract = judge._run(attempt, truth, Phase.RUN)
            with attempt.phase(Phase.REFERENCE):
                results = program.gathered(case.problem, returned.results)
                verdicts = truth.verdicts(results, contract, {}, self.reference)
            found = Theirs(results, verdicts, again=functools.partial(judge._again, attempt, truth))
        except Ended as end:
            found = Theirs(ended=end.outcome, died=attempt.died and worker is self._worker)
        truth.pytorch[threads] = found
        return found

    def _run(
        self,
        attempt: Attempt,
        truth: Truth,
        phase: Phase,
        timed: Timed | None = None,
        *,
        profiled: bool = False,
        calls: int = 1,
        callers: int = 0,
    ) -> tuple[Returned, Contract]:
        """Run, and prove that the backend did it; what runs again has proved it.

        Raises:
            Ended: for an exception, where it did not, or has not returned as many results as the program has.
        """
        case, given = attempt.case, truth.operands
        with attempt.phase(phase):
            how = How(phase, profiled, self.stream, calls, callers=callers)
            ran = self._worker.run(attempt.built.number, given, how) if timed is None else timed(given)
            attempt.proved(ran.proof)
            objection = None if phase is Phase.RUN_AGAIN else ran.proof.objection() or ran.objection
            returned = Returned.of(given, ran)
        if objection is not None:
            raise Ended(attempt.end(Status.FALLBACK, objection))
        expected = case.problem.several or len(case.problem.outputs)
        if len(returned.results) != expected:
            text = f"{len(returned.results)} results came back, and the program has {expected}"
            raise Ended(attempt.end(Status.CRASHED, Reason("wrong-outputs", text)))
        return returned, ran.contract

    def _verdicts(
        self, attempt: Attempt, truth: Truth, made: tuple[torch.Tensor, ...], contract: Contract
    ) -> list[sampled.ResultVerdict]:
        """The verdict on each result.

        Raises:
            Ended: where the backend wrote to its inputs.
        """
        case, made = attempt.case, program.gathered(attempt.case.problem, made)
        with attempt.phase(Phase.REFERENCE):
            if self._worker.is_inline and (written := truth.operands.changed(truth.digest)):
                reason = Reason("inputs-written", f"the backend wrote to its inputs: {', '.join(written)}")
                raise Ended(attempt.end(Status.INCORRECT, reason))
            verdicts = truth.verdicts(made, contract, self._truths.earlier(case), self.reference)
            if contract.deterministic and all(one.comparison.is_comparable for one in verdicts):
                short = hashlib.blake2b(truth.digest.encode(), digest_size=8).hexdigest()
                attempt.facts |= {"bits": digest_of(made), "operands": short}
        last = verdicts[-1]
        with attempt.phase(Phase.EAGER):
            beside = self.beside and not last.note and not is_pytorch(case)
            beside = beside and all(one.comparison.is_comparable for one in verdicts)
            eager = truth.beside_eager(made, contract, self.eager, self._worker) if beside else ""
        ratio = max(one.comparison.ratio for one in verdicts)
        attempt.facts |= {"tier": last.tier, "ratio": ratio, "eager": eager, "sampled": last.note}
        return verdicts

    # -- once more -------------------------------------------------------------------------------

    def _run_again(self, attempt: Attempt, runs: list[_Run]) -> Iterator[Judged]:
        """One distribution once more: the same bits, and no earlier result touched since.

        It is one whose sums round, where there is one: on exact data any order of summation gives the same bits.

        Catches a cached result, a stale workspace, results that share memory, late writes and kernels that are not
        deterministic.  Of many calls under load the one with other bits than most is looked at: that catches a race.
        """
        if not runs:
            return
        first = next((run for run in runs if run.truth.operands.quantum == 0.0), runs[0])
        attempt.turn_to(first.truth.operands.distribution, first.truth)
        calls, callers = attempt.case.calls, attempt.case.callers
        second, contract = self._run(attempt, first.truth, Phase.RUN_AGAIN, calls=calls, callers=callers)
        when = "the second time" if calls == 1 else f"in one of {calls} calls under load"
        when += {0: "", 1: " of another thread"}.get(callers, f" of {callers} threads at once")
        wrong: Reason | None = None
        cause = ""
        with attempt.phase(Phase.REFERENCE):
            rewritten = any(run.returned.rewritten() for run in runs if run.returned is not None)
        if rewritten:
            wrong = Reason("result-rewritten", "a result that was handed out changed when the next one was computed")
        elif difference := first.differs(second):  # which a kernel may divide otherwise where threads share the cores
            mismatch = self._mismatch(attempt, first.truth, second, contract)
            text = f"the same call gave other bits {when}{difference}"
            if mismatch is not None:  # other bits have to be right ones too
                code = "not-deterministic" if contract.deterministic else mismatch.code
                wrong = Reason(code, f"{text}, wrong ones: {mismatch.summary()}")
                cause = mismatch.name if mismatch.name in repeated.NAMES else repeated.RACE.name
            elif contract.deterministic and not callers:
                wrong = Reason("not-deterministic", f"{text}; a backend that uses atomics declares deterministic=False")
        if wrong is not None:
            yield Judged(attempt.end(Status.INCORRECT, wrong, cause=cause))

    def _on_other_values(self, attempt: Attempt, runs: list[_Run]) -> Iterator[Judged]:
        """One distribution with other values in the same A and B, as ``weight.copy_()`` leaves them.

        Catches what was made of an operand and kept by its address.  A B that is part of what was compiled stays.
        """
        run = next((run for run in runs if run.truth.operands.quantum > 0.0), runs[0])
        registered = attempt.case.mode.is_compiled or getattr(attempt.case.backend, "constant_b", None)
        is_constant = attempt.built.constant_b and registered is not False
        names = tuple(name for name in run.truth.changeable if not (name == "b" and is_constant and registered))
        if not names:
            return
        with run.truth.other_values(names) as truth:
            attempt.turn_to(run.truth.operands.distribution, run.truth)
            if is_constant and "b" in names:  # its process alone says so: for other values it is compiled anew
                with attempt.phase(Phase.PREPARE):
                    attempt.built = self._worker.prepare(attempt.case.job(attempt.candidate), truth.operands)
            returned, contract = self._run(attempt, truth, Phase.RUN_AGAIN)
            wrong = self._mismatch(attempt, truth, returned, contract)
        if wrong is None:
            return
        changed = f"other values were written to {_capitals(names)}"
        when = "one of several calls is wrong" if wrong.name in repeated.NAMES else f"wrong after {changed}"
        reason = Reason(wrong.code, f"{when}: {wrong.summary()}")
        cause = wrong.name
        for kept in dict.fromkeys((*((name,) for name in names), names)):
            with run.truth.other_values(tuple(name for name in names if name not in kept)) as before:
                is_stale = self._mismatch(attempt, before, returned, contract, repeats=False) is None
            if is_stale:
                reason, cause = _stale(changed, kept), ""
                break
        yield Judged(attempt.end(Status.INCORRECT, reason, wrong.text(), cause))

    def _mismatch(
        self, attempt: Attempt, truth: Truth, returned: Returned, contract: Contract, *, repeats: bool = True
    ) -> verdict.Mismatch | None:
        """What is wrong with the results of a further run; ``None`` for nothing."""
        with attempt.phase(Phase.REFERENCE):
            made = program.gathered(truth.problem, returned.results)
            verdicts = truth.verdicts(made, contract, {}, self.reference)
        place, one = next(((n, one) for n, one in enumerate(verdicts) if not one.comparison.ok), (0, None))
        if one is None or not repeats:
            return one.comparison.mismatch if one is not None else None
        return self._repeated(attempt, truth, place, made[place], one)

    def _repeated(
        self, attempt: Attempt, truth: Truth, place: int, result: torch.Tensor, one: sampled.ResultVerdict
    ) -> verdict.Mismatch:
        """What is wrong with a result, with the cause that more calls with the same operands prove."""
        return repeated.described(result, one, functools.partial(self._again, attempt, truth, place))

    def _again(self, attempt: Attempt, truth: Truth, place: int, fill: int) -> torch.Tensor | None:
        """One of the results of a further call, with fresh memory filled with a byte; ``None`` if it fails."""
        with contextlib.suppress(Ended), attempt.phase(Phase.RUN):
            ran = self._worker.run(attempt.built.number, truth.operands, How(stream=self.stream, fill=fill))
            made: torch.Tensor = program.gathered(truth.problem, Returned.of(truth.operands, ran).results)[place]
            return made
        return None


def run_once(worker: Worker, case: Case) -> None:
    """Compile and run a case without judging it; nothing for an unsupported case.

    Raises:
        Thrown, Died, Misconduct: as of :class:`Worker`.
    """
    job = case.job()
    with contextlib.suppress(Unsupported), worker.watch(Activity(case.id(), Phase.COMPILE)):
        worker.supports(job)
        given = operands.make(case.problem, case.distributions[0], case.seed, case.device)
        worker.run(worker.prepare(job, given).number, given, How())


# -- parts -------------------------------------------------------------------------------------------


def _ended(found: Iterator[Judged]) -> Iterator[Judged]:
    """What is found, and the outcome that ended it."""
    try:
        yield from found
    except Ended as end:
        yield Judged(end.outcome)


def _named(judged: Judged) -> Judged:
    """With the name of the reason where the result says no more of the cause.

    Of an exception or the end of a process: what it was, and the phase.
    """
    outcome, reason = judged.outcome, judged.outcome.reason
    if outcome.cause or reason is None or not outcome.status.is_failure:
        return judged
    raised = re.match(r"(\w+) in ([\w ]+): ", reason.text)
    died = re.match(r"the kernel's process died in ([\w ]+): (SIG\w+)?", reason.text)
    crash = f"{raised[1]} in {raised[2]}" if raised else f"{died[2] or 'exit'} in {died[1]}" if died else ""
    cause = _CAUSES.get(reason.code, crash if outcome.status is Status.CRASHED else "")
    return dataclasses.replace(judged, outcome=dataclasses.replace(outcome, cause=cause))


def _threaded(case: Case, found: Iterator[Judged]) -> Iterator[Judged]:
    """What is found with the case's CPU threads; the consumer has its own number of them."""
    while True:
        with precision.cpu_threads(case.threads):
            judged = next(found, None)
        if judged is None:
            return
        yield judged


def _sufficient(case: Case, candidates: int) -> tuple[str, ...]:
    """The distributions that are worth their time."""
    distributions = case.distributions
    exact = next((name for name in distributions if DISTRIBUTIONS[name].exact), "")
    rounding = next((name for name in distributions if not DISTRIBUTIONS[name].exact), "")
    if case.mode is Mode.AOTI and case.problem.constant_b:  # each costs a compile of half a minute
        return (rounding or exact,)
    return tuple(filter(None, (exact, rounding))) if candidates > _MANY else distributions


def _stale(changed: str, kept: tuple[str, ...]) -> Reason:
    """Why a result is wrong that is right for what some operands held before."""
    names = _capitals(kept)
    remedy = f"keep what is made of {names} by the address and the version counter, or make it anew"
    code, what = ("stale-weight", "weight") if kept == ("b",) else ("stale-operand", f"values of {names}")
    return Reason(code, f"{changed}, and the result is that of the {what} before", remedy)


def _capitals(names: tuple[str, ...]) -> str:
    return " and ".join(name.upper() for name in sorted(names))


def _all_pruned(reasons: Sequence[Reason]) -> Reason:
    causes = Counter(reason.code for reason in reasons)
    counts = ", ".join(f"{count} {code}" for code, count in causes.most_common())
    return Reason("all-pruned", f"every candidate that was tried was pruned ({counts}): {reasons[0].text}")
