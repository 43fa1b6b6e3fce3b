"""One case from operands to outcome: run, prove what ran, build the truth, compare.

A backend that has several candidates for a problem (``CandidateBackend``) is judged in as many ways as the case
requests: each candidate is compiled end to end and judged like a backend of its own.

No pytest here: a :class:`Judge` can be driven from a script.  The backend runs before the reference
exists, and nothing of the reference travels back to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from pytest_gemm.api import device_kernels
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import CandidateBackend, Prepared, names_candidates, unsupported
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.case_id import Device, Mode
from pytest_gemm.judging import calls, faults, properties, sampled
from pytest_gemm.judging import eager as eager_module
from pytest_gemm.judging import verdict as verdict_module
from pytest_gemm.judging.calls import Escape, Misconduct, asking, calling, hand, plain
from pytest_gemm.judging.case import Case, Evidence
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.numerics import sensitivity, span
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import settings
from pytest_gemm.operands import dtypes, views
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands.distributions import DISTRIBUTIONS
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.outcome import Activity, Outcome, Phase, Pruned, Reason, Seconds, Status, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.text import first_line, kind_of, message, printable


@dataclasses.dataclass
class _Truth:
    """What is known about a problem and a distribution whoever computes it.

    ``intervals`` are kept for the contract that came last: the candidates of a backend mostly share one.  ``spoiled``:
    a backend has taken the memory of an operand away.
    """

    operands: operands.Operands
    digest: str
    spoiled: bool = False
    reference: reference_module.Reference | None = None
    intervals: tuple[Contract, tuple[span.Interval, ...]] | None = None
    eager: tuple[torch.Tensor, ...] | Exception | None = None
    sample: sampled.Sample | None = None


@dataclasses.dataclass
class _Run:
    """One result, kept until the case ends to see whether somebody still writes to it."""

    truth: _Truth
    results: tuple[torch.Tensor, ...]
    kept: bytes | None

    @classmethod
    def of(cls, truth: _Truth, results: tuple[torch.Tensor, ...]) -> _Run:
        """With a copy of the bits of a result that is not too large."""
        small = sum(r.numel() * r.element_size() for r in results) <= _KEEP_BYTES
        return cls(truth, results, _bytes(results) if small else None)


# Times a case that has passed: gets the case, what was compiled for it and the operands, returns the last result.
Timing = Callable[[Case, Prepared, operands.Operands], Any]

_NO_TIME = Seconds()

# Results up to this size are kept and checked again at the end of the case.
_KEEP_BYTES = 1 << 20
# Failed outcomes of one case whose tensors are kept: hundreds of candidates may fail alike.
_EVIDENCE = 8
# With more candidates than this each is judged with two distributions.
_MANY = 8
# Names of candidates that a sentence lists.
_NAMES = 40


class Judge:
    """Judges cases and shares operands and references between the backends and candidates of one problem.

    They are kept until another problem comes: pytest asks for the backends of one problem one after the other.

    Args:
        may_run_eager: whether eager ATen may be run on a problem, to set results beside its own; it
            is not asked where it is known to kill the process.
        watch: is told of everything that may not come back, for as long as it lasts.
        reference: ``full``, ``sampled`` or ``auto``, see ``sampled.applies``.
        pages: where operands and results lie, ``None`` for ordinary memory.
    """

    def __init__(
        self,
        may_run_eager: Callable[[Problem, str], bool] = lambda *_: True,
        watch: Callable[[Activity], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
        reference: str = "auto",
        pages: GuardPages | None = None,
    ) -> None:
        self._reference = reference
        self._pages = pages
        self._may_run_eager = may_run_eager
        self._watch = watch
        self._lost: dict[str, Outcome] = {}
        self._earlier: tuple[str, dict[str, tuple[torch.Tensor, ...]]] = ("", {})
        self._known: tuple[tuple[str, int, str], dict[str, _Truth]] = (("", 0, ""), {})
        self.evidence: list[tuple[Outcome, Evidence]] = []

    def has_lost(self, device: str) -> bool:
        """Whether this process can compute nothing more on the device: a kernel has broken its context."""
        return device in self._lost

    def judge(
        self,
        case: Case,
        done: frozenset[str] = frozenset(),
        withheld: Callable[[str], Outcome | None] = lambda _: None,
        timing: Timing | None = None,
    ) -> Iterator[Outcome]:
        """The outcomes of a case, one a choice and distribution; a single one when it ends before any distribution.

        Args:
            case: what to judge.
            done: choices that have been judged before and are left out; "" is the case as a whole.
            withheld: the outcome of a choice that must not be run, ``None`` for one that may.
            timing: is called with what has passed, and its last result is judged as well: one outcome more a choice.
        """
        self.evidence.clear()
        if "" in done:
            return
        if case.device in self._lost:
            yield self._not_run(case)
            return
        starved = False
        for outcome in _threaded(case, self._cases(case, done, withheld, timing)):
            self._keep_operands(case, outcome)
            yield outcome
            starved = starved or (outcome.reason is not None and outcome.reason.code == "out-of-memory")
        if starved:
            self._known, self._earlier = (("", 0, ""), {}), ("", {})
            faults.release()

    def relate(self, case: Case) -> Iterator[Outcome]:
        """The outcomes of the properties that results of a case have to one another, one a property.

        The backend picks its candidate by itself.  No reference is asked: see ``metamorphic``.
        """
        self.evidence.clear()
        yield from _threaded(case, self._relate(case))

    def _relate(self, case: Case) -> Iterator[Outcome]:
        case = dataclasses.replace(case, choices=case.choices if case.choices in {"one", "winner"} else "")
        if case.device in self._lost:
            yield self._not_run(case)
            return
        if (end := _refusal(case)) is not None:
            yield end
            return
        refusal = None
        if case.mode is Mode.AOTI:
            refusal = Unsupported(
                "aoti-property", "a package has its constants inside: each property would be a compile"
            )
        asked = properties.applicable(case.problem)
        if refusal is None and not asked:
            refusal = Unsupported("no-property", f"no property says anything about {case.problem}")
        if refusal is not None:
            yield _outcome(case, "", Status.UNSUPPORTED, refusal.reason)
            return
        started = time.perf_counter()
        try:
            first = operands.make(case.problem, asked[0].distribution, case.seed, case.device)
            with self._doing(case, Phase.COMPILE, asked[0].distribution):
                prepared = _prepare(case, "", first)
        except Unsupported as late:
            yield _outcome(case, "", Status.UNSUPPORTED, late.reason)
            return
        except Exception as error:  # any exception of a backend is its case's failure
            seconds = Seconds(compile=time.perf_counter() - started)
            yield self._crashed(case, asked[0].distribution, error, Phase.PREPARE, seconds)
            return
        seconds = Seconds(compile=time.perf_counter() - started)
        bases: dict[str, torch.Tensor] = {}
        for one in asked:
            yield self._related(case, prepared, one, bases, seconds)
            seconds = _NO_TIME
            if self.has_lost(case.device):
                return

    def _related(
        self,
        case: Case,
        prepared: Prepared,
        one: properties.Property,
        bases: dict[str, torch.Tensor],
        seconds: Seconds,
    ) -> Outcome:
        """Whether one property holds; ``bases`` keeps the result on each distribution's own operands."""

        def make(problem: Problem) -> operands.Operands:
            return operands.make(problem, one.distribution, case.seed, case.device)

        def run(given: operands.Operands) -> torch.Tensor:
            other = given.problem != case.problem
            artifact = _prepare(dataclasses.replace(case, problem=given.problem), "", given) if other else prepared
            results = _run(artifact, given, case.device)
            wrong = _miscounted(given.problem, results) or _complaint(given.problem, results, given)
            if wrong is not None:
                raise Misconduct(wrong.code, wrong.text)
            last: torch.Tensor = results[-1].clone()
            return last

        started, kernels = time.perf_counter(), _kernels_of(prepared)
        try:
            with self._doing(case, Phase.RUN, one.distribution, kernels):
                if one.distribution not in bases:
                    bases[one.distribution] = run(make(case.problem))
                    if (objection := _proof(prepared).objection()) is not None:
                        del bases[one.distribution]
                        return _outcome(
                            case, one.distribution, Status.FALLBACK, objection, kernels=kernels, seconds=seconds
                        )
                bench = properties.Bench(case.problem, _contract(prepared), make, run, bases[one.distribution])
                text = one.check(bench)
        except Exception as error:  # as above
            seconds += Seconds(run=time.perf_counter() - started)
            return self._crashed(case, one.distribution, error, Phase.RUN, seconds, kernels)
        seconds += Seconds(run=time.perf_counter() - started)
        proved: dict[str, Any] = {"kernels": _kernels_of(prepared), "seconds": seconds}
        if text and one.gated:
            reason = Reason(f"property-{one.name}", f"{one.help}; here {text}")
            return _outcome(case, one.distribution, Status.INCORRECT, reason, **proved)
        told = f"{one.help}: not here, {text}, which is no error" if text else ""
        return _outcome(case, one.distribution, Status.PASSED, details=told, **proved)

    def _keep_operands(self, case: Case, outcome: Outcome) -> None:
        """Evidence of a failure that has no wrong result to show: a crash, a fallback."""
        known = any(kept is outcome for kept, _ in self.evidence)
        truth = self._known[1].get(outcome.distribution or (case.distributions[0] if case.distributions else ""))
        if outcome.status.is_failure and not known and truth is not None:
            self._keep(outcome, Evidence(truth.operands))

    def _keep(self, outcome: Outcome, evidence: Evidence) -> None:
        if len(self.evidence) < _EVIDENCE:
            self.evidence.append((outcome, evidence))

    def _cases(
        self,
        case: Case,
        done: frozenset[str],
        withheld: Callable[[str], Outcome | None],
        timing: Timing | None,
    ) -> Iterator[Outcome]:
        if (end := _refusal(case)) is not None:
            yield end
            return
        if not case.distributions:
            reason = Reason("no-operands", f"operands of {case.problem.op.name} cannot be built yet")
            yield _outcome(case, "", Status.UNSUPPORTED, reason)
            return
        try:
            first = self._truth(case, case.distributions[0])
        except Unsupported as missing:
            yield _outcome(case, "", Status.UNSUPPORTED, missing.reason)
            return
        except Exception as error:
            yield self._fault_or_raise(case, "", error, Phase.OPERANDS)
            return
        try:
            choices, left_out = self._choices(case, first.operands)
        except Unsupported as none:
            yield _outcome(case, "", Status.UNSUPPORTED, none.reason)
            return
        except Exception as error:  # as above
            yield self._crashed(case, case.distributions[0], error, Phase.CANDIDATES, Seconds())
            return
        case = dataclasses.replace(case, distributions=_telling(case.distributions, len(choices)))
        if case.mode is Mode.AOTI and case.problem.constant_b:
            case = dataclasses.replace(case, distributions=_rounding(case.distributions))
        pruned: list[Outcome] = []
        for choice in choices:
            if choice in done:
                continue
            if self.has_lost(case.device):
                yield self._not_run(case, choice)
                continue
            held = withheld(choice) if choice else None
            for outcome in self._judge_choice(case, choice, timing) if held is None else [held]:
                if outcome.status is Status.PRUNED and outcome.candidate == choice:
                    pruned.append(outcome)
                yield outcome
        for choice, why in left_out.items():
            if choice not in done:
                yield _outcome(case, "", Status.UNSUPPORTED, why, choice=printable(choice))
        # A user who names candidates may name one that is pruned; nobody else is content with nothing judged.
        if pruned and len(pruned) == len(choices) and not names_candidates(case.choices):
            yield _outcome(case, "", Status.CRASHED, _all_pruned(pruned))

    # -- which candidates ------------------------------------------------------------------------

    def _choices(self, case: Case, given: operands.Operands) -> tuple[tuple[str, ...], Mapping[str, Reason]]:
        """Names of the candidates to judge, a single "" where the backend selects one; and what does not support it.

        Raises:
            Unsupported: when none has the name that was asked for.
        """
        wanted, backend = case.choices, case.backend
        if wanted in {"", "one", "winner"}:
            return ("",), {}
        by_name = names_candidates(wanted)
        if not isinstance(backend, CandidateBackend):
            if not by_name:
                return ("",), {}
            raise Unsupported("no-such-choice", f"{backend.name} has no candidates, so none is called {wanted}")
        handed = hand(given)
        with self._doing(case, Phase.COMPILE), _quiet(), calling(compiling=True):
            listed = backend.candidates(case.problem, handed.operands, case.request(wanted if by_name else ""))
            names = tuple(map(str, listed.names))
            if odd := [name for name in names if name != printable(name)]:  # outcomes have printable names
                raise ValueError(f"candidates() lists a name that cannot be printed: {odd[0]!r}")
        handed.check()
        found = picked(names, wanted) or listed.named
        if not found:
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            text = f"no candidate is called {wanted}; there are {', '.join(names[:_NAMES])}{more}"
            raise Unsupported("no-such-choice", text)
        return found, listed.unsupported if wanted == "all" else {}

    def _judge_choice(self, case: Case, choice: str, timing: Timing | None) -> Iterator[Outcome]:
        """One candidate, or the backend's own way, with all distributions; timed if all of them passed."""
        try:
            truths = {distribution: self._truth(case, distribution, choice) for distribution in case.distributions}
        except Unsupported as missing:
            yield _outcome(case, "", Status.UNSUPPORTED, missing.reason, choice=choice)
            return
        except Exception as error:
            yield self._fault_or_raise(case, "", error, Phase.OPERANDS, choice=choice)
            return
        first = next(iter(truths.values()))
        started = time.perf_counter()
        try:
            with self._doing(case, Phase.COMPILE, choice=choice):
                prepared = _prepare(case, choice, first.operands)
                pruned = _pruned(prepared)
        except Unsupported as late:
            yield _outcome(case, "", Status.UNSUPPORTED, late.reason, choice=choice)
            return
        except Pruned as lost:
            seconds = Seconds(compile=time.perf_counter() - started)
            # Without a name the backend has tried one candidate after the other, and none was left.
            status = Status.PRUNED if choice else Status.CRASHED
            yield _outcome(case, "", status, lost.reason, choice=choice, seconds=seconds)
            return
        except Exception as error:  # as above
            first.spoiled = isinstance(error, Misconduct)
            seconds = Seconds(compile=time.perf_counter() - started)
            yield self._crashed(case, case.distributions[0], error, Phase.PREPARE, seconds, choice=choice)
            return
        compile_seconds = time.perf_counter() - started
        for name, reason in pruned.items():
            yield _outcome(case, "", Status.PRUNED, reason, choice=printable(name))

        runs: list[_Run] = []
        for index, (distribution, truth) in enumerate(truths.items()):
            seconds = Seconds(compile=compile_seconds if index == 0 else 0.0)
            yield self._judge_distribution(case, choice, prepared, distribution, truth, runs, seconds)
            if self.has_lost(case.device):
                return
        if runs:
            again = self._run_again(case, choice, prepared, runs)
            if again is not None:
                yield again
                return
        if timing is not None and len(runs) == len(truths):
            truth, distribution = runs[-1].truth, runs[-1].truth.operands.distribution
            timed = functools.partial(timing, case, prepared)
            yield self._judge_distribution(case, choice, prepared, distribution, truth, runs, Seconds(), timed)

    # -- one distribution -----------------------------------------------------------------------------

    def _judge_distribution(
        self,
        case: Case,
        choice: str,
        prepared: Prepared,
        distribution: str,
        truth: _Truth,
        runs: list[_Run],
        seconds: Seconds,
        timed: Callable[[operands.Operands], Any] | None = None,
    ) -> Outcome:
        """One result: of a run, or with ``timed`` the one that it returns."""
        given = truth.operands
        started = time.perf_counter()
        kernels = _kernels_of(prepared)
        try:
            with (
                self._doing(case, Phase.RUN if timed is None else Phase.TIME, distribution, kernels, choice),
                contextlib.nullcontext() if self._pages is None else self._pages.running(),
            ):
                _prime_allocator(case.problem, case.device)
                with _profiled(asked=case.device == "cuda" and not runs) as profiled:
                    results = _run(prepared, given, case.device, timed)
            proof = dataclasses.replace(_proof(prepared), profiled=None if profiled is None else tuple(profiled))
            kernels, objection, contract = proof.kernels, proof.objection(), _contract(prepared)
        except Exception as error:  # as above
            truth.spoiled = isinstance(error, Misconduct)
            seconds += Seconds(run=time.perf_counter() - started)
            return self._crashed(case, distribution, error, Phase.RUN, seconds, kernels, choice)
        seconds += Seconds(run=time.perf_counter() - started)

        def end(status: Status, reason: Reason | None = None, **facts: Any) -> Outcome:
            return _outcome(case, distribution, status, reason, seconds=seconds, **_proved(proof, choice), **facts)

        if objection is not None:
            return end(Status.FALLBACK, objection)
        if (wrong := _miscounted(case.problem, results)) is not None:
            return end(Status.CRASHED, wrong)
        handed, results = results, program.gathered(case.problem, results)

        started, phase = time.perf_counter(), Phase.REFERENCE
        try:
            with self._doing(case, phase, distribution, kernels, choice):
                written = given.changed(truth.digest)
                if written:
                    names = ", ".join(written)
                    return end(Status.INCORRECT, Reason("inputs-written", f"the backend wrote to its inputs: {names}"))
                judged = self._judged(case, truth, results, contract)
            phase = Phase.EAGER
            with self._doing(case, phase, distribution, ("eager ATen",), choice):
                beside = not judged[-1].note and all(one.comparison.is_comparable for one in judged)
                eager = self._beside_eager(case, truth, results, contract) if beside else ""
        except Exception as error:
            seconds += Seconds(reference=time.perf_counter() - started)
            return self._fault_or_raise(case, distribution, error, phase, seconds, kernels, choice)
        seconds += Seconds(reference=time.perf_counter() - started)

        last, ratio = judged[-1], max(one.comparison.ratio for one in judged)
        facts: dict[str, Any] = {"tier": last.tier, "ratio": ratio, "eager": eager, "sampled": last.note}
        for place, one in enumerate(judged):
            verdict = one.comparison
            if verdict.mismatch is None:
                continue
            which = f"{case.problem.output_names[place]}: " if len(judged) > 1 else ""
            reason = Reason(verdict.mismatch.code, which + verdict.mismatch.summary())
            told = which + verdict.mismatch.text() + _places(case.problem.outputs[place])
            outcome = end(Status.INCORRECT, reason, details=told, **facts)
            self._keep(outcome, Evidence.of(one, prepared, place))
            return outcome
        doubt = next((one.doubt for one in judged if one.doubt is not None), None)
        if doubt is not None:
            return end(Status.MISTRUSTED, doubt, **facts)
        if timed is None:
            runs.append(_Run.of(truth, handed))
            self._earlier_results(case)[f"distribution {distribution}, seed {case.seed}"] = results
        return end(Status.PASSED, **facts)

    def _judged(
        self, case: Case, truth: _Truth, results: tuple[torch.Tensor, ...], contract: Contract
    ) -> list[sampled.Judged]:
        """The verdict on each result: by sample, or on every element."""
        given = truth.operands
        if sampled.applies(case.problem, self._reference):
            if truth.sample is None:
                truth.sample = sampled.Sample(given)
            return [
                truth.sample.judge(output, result, contract, self._others(case, place))
                for place, (output, result) in enumerate(zip(case.problem.outputs, results, strict=True))
            ]
        found = []
        for place, (output, used, interval) in enumerate(_asked(case.problem, truth, results, contract)):
            doubt = sensitivity.insensitive(output, used, interval) if used is given else None
            verdict = verdict_module.compare(results[place], interval, output, used, others=self._others(case, place))
            found.append(sampled.Judged(verdict, interval.tier, doubt, "", given, results[place], interval))
        return found

    def _others(self, case: Case, place: int) -> dict[str, torch.Tensor]:
        """Earlier results of that place by the name of what they answered."""
        return {name: results[place] for name, results in self._earlier_results(case).items()}

    def _earlier_results(self, case: Case) -> dict[str, tuple[torch.Tensor, ...]]:
        """Results that this backend gave for the problem at hand: a wrong one may be one of these, kept too long."""
        key = f"{case.backend.name} {case.mode} {case.isa} {case.problem.line}"
        if self._earlier[0] != key:
            self._earlier = (key, {})
        return self._earlier[1]

    def _run_again(self, case: Case, choice: str, prepared: Prepared, runs: list[_Run]) -> Outcome | None:
        """One distribution once more: the same bits, and no earlier result touched since.

        It is one whose sums round, where there is one: on exact data any order of summation gives the same bits.

        Catches a cached result, a stale workspace, results that share memory, writes that come late and
        kernels that are not deterministic.
        """
        first = next((run for run in runs if run.truth.operands.quantum == 0.0), runs[0])
        distribution, kernels = first.truth.operands.distribution, _kernels_of(prepared)
        started = time.perf_counter()

        def end(code: str, text: str) -> Outcome:
            proved, seconds = _proved(proof, choice), Seconds(run=time.perf_counter() - started)
            return _outcome(case, distribution, Status.INCORRECT, Reason(code, text), seconds=seconds, **proved)

        try:
            with self._doing(case, Phase.RUN_AGAIN, distribution, kernels, choice):
                second = _run(prepared, first.truth.operands, case.device)
                proof, contract = _proof(prepared), _contract(prepared)
        except Exception as error:  # as above
            first.truth.spoiled = isinstance(error, Misconduct)
            seconds = Seconds(run=time.perf_counter() - started)
            return self._crashed(case, distribution, error, Phase.RUN_AGAIN, seconds, kernels, choice)
        for run in runs:
            if run.kept is not None and _bytes(run.results) != run.kept:
                return end("result-rewritten", "a result that was handed out changed when the next one was computed")
        same_kind = len(second) == len(first.results) and all(map(eager_module.comparable, second, first.results))
        if not same_kind:
            return end("not-deterministic", "the same call gave something of another type or shape the second time")
        if first.kept is None or _bytes(second) == first.kept:
            return None
        if not contract.deterministic:
            return self._judge_again(case, contract, first.truth, second, end)
        count = sum(int((new != old).sum()) for new, old in zip(second, first.results, strict=True))
        total = sum(result.numel() for result in second)
        return end(
            "not-deterministic",
            f"the same call gave other bits the second time ({count} of {total} elements); "
            "a backend that uses atomics declares deterministic=False",
        )

    def _judge_again(
        self,
        case: Case,
        contract: Contract,
        truth: _Truth,
        second: tuple[torch.Tensor, ...],
        end: Callable[[str, str], Outcome],
    ) -> Outcome | None:
        """The second result of a backend that may give other bits: they have to be right ones too."""
        second = program.gathered(case.problem, second)
        for place, (output, used, interval) in enumerate(_asked(case.problem, truth, second, contract)):
            wrong = verdict_module.compare(second[place], interval, output, used).mismatch
            if wrong is not None:
                return end(wrong.code, f"the same call gave a wrong result the second time: {wrong.summary()}")
        return None

    # -- what can go wrong with the machine ------------------------------------------------------

    def _doing(
        self, case: Case, phase: Phase, distribution: str = "", kernels: tuple[str, ...] = (), choice: str = ""
    ) -> AbstractContextManager[None]:
        """Watch over a part of the case that may not come back."""
        distribution = distribution or case.distributions[0]
        activity = Activity(case.id(choice), phase, distribution, case.seed, kernels, Device(case.device))
        return self._watch(activity)

    def _crashed(
        self,
        case: Case,
        distribution: str,
        error: Exception,
        phase: Phase,
        seconds: Seconds,
        kernels: tuple[str, ...] = (),
        choice: str = "",
    ) -> Outcome:
        """The outcome of an exception that the backend has to answer for."""
        crash = _crash(case, distribution, error, phase, seconds)
        outcome = dataclasses.replace(crash, kernels=kernels, case=case.id(choice))
        if isinstance(error, Misconduct):  # it came to its end: what it returned, or left behind, is wrong
            return dataclasses.replace(outcome, status=Status.INCORRECT, reason=error.reason, details="")
        if isinstance(error, Unsupported):
            text = f"the backend claimed the problem and refused it in {phase}: {error.reason.text}"
            reason = Reason("late-refusal", text, "refuse in supports() or prepare(), before anything runs")
            return dataclasses.replace(outcome, reason=reason)
        return self._fault(outcome, error, phase, case.device) or outcome

    def _fault_or_raise(
        self,
        case: Case,
        distribution: str,
        error: Exception,
        phase: Phase,
        seconds: Seconds = _NO_TIME,
        kernels: tuple[str, ...] = (),
        choice: str = "",
    ) -> Outcome:
        """The same of one in the harness's own part: the machine's fault is the case's end, any other a defect here."""
        crash = _crash(case, distribution, error, phase, seconds)
        outcome = dataclasses.replace(crash, kernels=kernels, case=case.id(choice))
        found = self._fault(outcome, error, phase, case.device)
        if found is None:
            raise error
        return found

    def _fault(self, outcome: Outcome, error: Exception, phase: Phase, device: str) -> Outcome | None:
        """The outcome with the machine's own reason: no memory, or a lost device; ``None`` for any other exception."""
        reason = faults.out_of_memory(error, phase, device)
        if reason is not None:
            return dataclasses.replace(outcome, reason=reason)
        last = faults.device_error(device)
        if last is None:
            return None
        lost = dataclasses.replace(outcome, reason=faults.lost(error, last, phase))
        self._lost.setdefault(device, lost)
        return lost

    def _not_run(self, case: Case, choice: str = "") -> Outcome:
        """A case, or a choice of one, that comes after the one that has lost the device."""
        broke = self._lost[case.device]
        reason = Reason(
            "device-lost",
            f"{broke.problem} on {broke.backend} has lost the device to this process",
            "with -n 1 or more another process goes on",
        )
        return _outcome(case, "", Status.NOT_RUN, reason, choice=choice)

    # -- what backends share ---------------------------------------------------------------------

    def _truth(self, case: Case, distribution: str, choice: str = "") -> _Truth:
        key = (case.problem.line, case.seed, case.device)
        if self._known[0] != key:
            self._known = (key, {})
        truths = self._known[1]
        known = truths.get(distribution)
        with self._doing(case, Phase.OPERANDS, distribution, choice=choice):
            # A backend that wrote to its inputs must not spoil the next one's.
            if known is None or known.spoiled or known.operands.changed(known.digest):
                made = operands.make(case.problem, distribution, case.seed, case.device)
                made = made if self._pages is None else self._pages.place(made)
                known = truths[distribution] = _Truth(made, made.digest())
        return known

    def _beside_eager(self, case: Case, truth: _Truth, actual: tuple[torch.Tensor, ...], contract: Contract) -> str:
        if case.backend.name == "aten" and case.mode in {Mode.OWN, Mode.EAGER}:
            return ""
        if not self._may_run_eager(case.problem, case.device):
            return "eager is not run: it can kill the process"
        if truth.eager is None:
            try:
                # Some of what eager refuses would be a fault of the device if it were tried.
                if refusal := AtenBackend().refusal(case.problem, case.device):
                    raise refusal
                with settings(case.problem):
                    made = program.build(case.problem)(**program.args(case.problem, truth.operands))
                truth.eager = program.gathered(case.problem, views.in_product(case.problem, _tuple(made)))
                _wait_for(case.device)
            except Exception as error:  # eager cannot do everything that a template can
                truth.eager = error
                if faults.device_error(case.device) is not None:
                    raise
        if isinstance(truth.eager, Exception):
            return f"eager cannot: {_last_line(truth.eager)}"
        intervals = _intervals(case.problem, truth, contract)
        count = len(intervals)  # a second product is one of what the first one gave, which differs from eager's
        return eager_module.beside_eager(
            actual[:count], truth.eager[:count], intervals, case.problem.output_names[:count]
        )


def run_once(case: Case, threads: int) -> None:
    """Compile and run a case without judging it, in a process of its own; nothing for a case that is refused."""
    if unsupported(case.backend, case.problem, case.request()) is not None:
        return
    torch.set_num_threads(case.threads or threads)
    given = operands.make(case.problem, case.distributions[0], case.seed, case.device)
    with contextlib.suppress(Unsupported):
        _run(_prepare(case, "", given), given, case.device)


def _threaded(case: Case, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """The outcomes, each found with the case's CPU threads, which nobody else has who gets one."""
    while True:
        with program.cpu_threads(case.threads):
            outcome = next(outcomes, None)
        if outcome is None:
            return
        yield outcome


# -- choices -----------------------------------------------------------------------------------------


def picked(names: Sequence[str], wanted: str) -> tuple[str, ...]:
    """Which of a backend's candidates ``--gemm-choices`` asks for, where it says ``all``, a number or a pattern."""
    if wanted == "all":
        return tuple(names)
    if wanted.isdigit():
        return _spread(names, int(wanted))
    return tuple(name for name in names if fnmatch.fnmatchcase(name, wanted))


def _spread(names: Sequence[str], count: int) -> tuple[str, ...]:
    """``count`` of the names at even distances, the first and the last among them."""
    if count >= len(names):
        return tuple(names)
    steps = max(count - 1, 1)
    return tuple(names[round(i * (len(names) - 1) / steps)] for i in range(count))


def _telling(distributions: tuple[str, ...], choices: int) -> tuple[str, ...]:
    """With many choices the first distribution of exact sums and the first of those that round."""
    if choices <= _MANY:
        return distributions
    found = [next((f for f in distributions if DISTRIBUTIONS[f].exact is exact), "") for exact in (True, False)]
    return tuple(filter(None, found))


def _rounding(distributions: tuple[str, ...]) -> tuple[str, ...]:
    """The first distribution whose sums round: where each costs a compile of half a minute, one has to do."""
    return tuple(f for f in distributions if not DISTRIBUTIONS[f].exact)[:1] or distributions[:1]


def _refusal(case: Case) -> Outcome | None:
    """The outcome of a case that its backend does not support as requested; ``None`` where it does."""
    try:
        with _quiet(), asking():
            found = unsupported(case.backend, case.problem, case.request())
            if found is not None and not isinstance(found, Unsupported):
                raise TypeError(f"supports() returned {found!r}; return None, or Unsupported with the reason")
    except Unsupported as none:
        found = none
    except Exception as error:  # any exception of a backend is its case's failure
        return _crash(case, "", error, Phase.SUPPORTS, Seconds())
    return None if found is None else _outcome(case, "", Status.UNSUPPORTED, found.reason)


def _prepare(case: Case, choice: str, given: operands.Operands) -> Prepared:
    handed = hand(given)
    with _quiet(), calling(compiling=True):
        prepared = case.backend.prepare(case.problem, handed.operands, case.request(choice))
    handed.check()
    return prepared


def _pruned(prepared: Prepared) -> dict[str, Reason]:
    """Candidates that the backend left out by itself, where it says so."""
    with asking():
        found: dict[str, Reason] = dict(getattr(prepared, "pruned", {}))
    return found


def _all_pruned(pruned: Sequence[Outcome]) -> Reason:
    reasons = [outcome.reason for outcome in pruned if outcome.reason is not None]
    causes = Counter(reason.code for reason in reasons)
    said = ", ".join(f"{count} {code}" for code, count in causes.most_common())
    return Reason("all-pruned", f"every candidate that was tried was pruned ({said}): {reasons[0].text}")


# -- parts -------------------------------------------------------------------------------------------


def _run(
    prepared: Prepared,
    given: operands.Operands,
    device: str,
    timed: Callable[[operands.Operands], Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The results in the product's places, of which there are two with ``tap``; the device has finished.

    Args:
        prepared: what computes them.
        given: on these.
        device: where.
        timed: what to call instead of its ``run``.

    Raises:
        Misconduct: for results, or for things done beside them, that no contract allows.
        Exception: whatever the backend raises.
    """
    handed = hand(given)
    with _quiet(), calling():
        made = (prepared.run if timed is None else timed)(handed.operands)
        _wait_for(device)
    handed.check()
    try:
        return views.in_product(given.problem, plain(_tuple(made), given))
    except views.WrongShape as wrong:
        raise Misconduct("wrong-shape", str(wrong)) from None


def _proof(prepared: Prepared) -> Proof:
    with asking():
        proof = prepared.proof()
    if not isinstance(proof, Proof):
        raise TypeError(f"proof() returned {type(proof).__name__}, not a Proof")
    return proof


def _contract(prepared: Prepared) -> Contract:
    with asking():
        contract = prepared.contract
    if not isinstance(contract, Contract):
        raise TypeError(f"the attribute contract is {type(contract).__name__}, not a Contract")
    return contract


def _places(output: Problem) -> str:
    """How to read a place of a result that is stored through a move; "" for any other."""
    return f"\n  (places of the product; it is stored after {'+'.join(map(str, output.moves))})" if output.moves else ""


def _miscounted(problem: Problem, results: tuple[torch.Tensor, ...]) -> Reason | None:
    """What is wrong with the number of results; ``None`` for nothing."""
    expected = problem.several or len(problem.outputs)
    if len(results) == expected:
        return None
    return Reason("wrong-outputs", f"{len(results)} results came back, and the program has {expected}")


def _complaint(problem: Problem, results: tuple[torch.Tensor, ...], given: operands.Operands) -> Reason | None:
    """What is wrong with the type or shape of the last result; ``None`` for nothing."""
    found = None if problem.several else verdict_module.complaint_of(results[-1], problem.outputs[-1], given)
    return None if found is None else Reason(*found)


def _tuple(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@contextlib.contextmanager
def _profiled(*, asked: bool) -> Iterator[list[str] | None]:
    """Names of the kernels that the device executes in the block, ``None`` where they are not asked for or not seen.

    Once for each candidate is enough: what runs is decided when it is compiled.
    """
    if not asked or not device_kernels.works():
        yield None
        return
    with device_kernels.profile() as names:
        yield names


def _intervals(problem: Problem, truth: _Truth, contract: Contract) -> tuple[span.Interval, ...]:
    """What each result may be under ``contract``; the reference behind it is computed once."""
    if truth.reference is None:
        truth.reference = reference_module.reference(problem, truth.operands)
    if truth.intervals is None or truth.intervals[0] != contract:
        truth.intervals = contract, interval_module.intervals(problem, truth.operands, truth.reference, contract)
    return truth.intervals[1]


def _asked(
    problem: Problem, truth: _Truth, results: tuple[torch.Tensor, ...], contract: Contract
) -> Iterator[tuple[Problem, operands.Operands, span.Interval]]:
    """For each result the problem that it answers, on which operands, and what it may be.

    The second product of ``again`` is judged on what the first one returned, if that can be an operand at all.
    """
    outputs, given = problem.outputs, truth.operands
    for output, interval in zip(outputs, _intervals(problem, truth, contract), strict=not problem.has("again")):
        yield output, given, interval
    if problem.has("again") and verdict_module.complaint_of(results[0], outputs[0], given) is None:
        used = operands.again(given, outputs[1], results[0])
        yield (
            outputs[1],
            used,
            interval_module.interval(outputs[1], used, reference_module.reference(outputs[1], used), contract),
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A compiler's own deprecation warnings are no finding, whatever filters the user's pytest has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _prime_allocator(problem: Problem, device: str) -> None:
    """Leave NaN in the memory that the result is likely to get, so that unwritten elements show."""
    dtype = dtypes.torch_dtype(problem.result_dtype)
    torch.full(
        problem.result_shape,
        float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max,
        dtype=dtype,
        device=device,
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> bytes:
    # A copy, since a result of one element may have any stride, with which it cannot be viewed as bytes.
    flat = (t.detach().cpu().clone(memory_format=torch.contiguous_format).flatten() for t in tensors)
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in flat)


def _wait_for(device: str) -> None:
    """Until the device has computed all that it was given: errors of a kernel show no earlier."""
    if device == "cuda":
        torch.cuda.synchronize()


def _kernels_of(prepared: Prepared) -> tuple[str, ...]:
    """Names of the kernels that a run will use, as far as the backend knows them before it has run."""
    try:
        proof = _proof(prepared)
    except Exception:  # it need not have an answer yet
        return ()
    return proof.kernels if proof.executed else tuple(dict.fromkeys((*proof.generated, *proof.chosen)))


def _proved(proof: Proof, choice: str) -> dict[str, Any]:
    """What an outcome says of the kernel that ran."""
    fused = {"fused": proof.fused, "fusions": proof.fusions}
    made = {"kernels": proof.kernels, "chosen": proof.chosen, "configuration": proof.configuration}
    return {**made, "choice": choice, **fused}


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")


def _outcome(
    case: Case, distribution: str, status: Status, reason: Reason | None = None, choice: str = "", **facts: Any
) -> Outcome:
    return Outcome(case.id(choice), distribution, case.seed, status, reason, **facts)


# Frames of a backend's exception that are shown: enough to see where, not a page.
_FRAMES = 4


def _crash(case: Case, distribution: str, error: Exception, phase: Phase, seconds: Seconds) -> Outcome:
    """An exception of a backend, with its innermost frames; ours are left out."""
    raised = error.__cause__ if isinstance(error, Escape) and error.__cause__ is not None else error
    ours = {Path(__file__), Path(calls.__file__), Path(contextlib.__file__)}
    frames = [f for f in traceback.extract_tb(raised.__traceback__) if Path(f.filename) not in ours]
    where = "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()
    kind, said = kind_of(raised), message(raised)
    reason = Reason(f"{phase.replace(' ', '-')}-{kind}", f"{kind} in {phase}: {first_line(raised)}")
    details = f"{where}\n{kind}: {said[:2000]}"
    return _outcome(case, distribution, Status.CRASHED, reason, details=details, seconds=seconds)
