"""One attempt at a case: its phases, each watched, timed, and ended by an outcome where something is raised."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from pytest_gemm.api.proof import Proof
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Pruned, Reason, Seconds, Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.truth import Truth
from pytest_gemm.worker.inline import thrown
from pytest_gemm.worker.messages import Built, Died, Thrown

# Encloses every call that may not return.
Watching = Callable[[Activity], AbstractContextManager[None]]

# What the watch calls a phase that begins the reason code of a crash by another name.
_WATCHED: Final = {Phase.CANDIDATES: Phase.COMPILE, Phase.PREPARE: Phase.COMPILE}
# Phases in which a problem may turn out to be unsupported.
_MAY_BE_UNSUPPORTED: Final = frozenset({Phase.SUPPORTS, Phase.OPERANDS, Phase.CANDIDATES, Phase.PREPARE})
# Phases of the harness's own code: an exception there is a defect of the harness, unless the machine is at fault.
_OWN: Final = frozenset({Phase.OPERANDS, Phase.REFERENCE, Phase.EAGER})
# What there is before the phase PREPARE.
_NOTHING: Final = Built(0)
# The part of an outcome's seconds that a phase belongs to.
_SECONDS: Final = {
    Phase.PREPARE: "compile",
    **dict.fromkeys((Phase.RUN, Phase.TIME, Phase.RUN_AGAIN), "run"),
    **dict.fromkeys((Phase.REFERENCE, Phase.EAGER), "reference"),
}
# What an outcome reports of a proof, beside the kernels' names.
_PROVED: Final = ("chosen", "configuration", "fused", "fusions", "composed", "whole", "compiled_with")


class Ended(Exception):
    """An attempt has come to its end in the middle of a phase.

    Attributes:
        outcome: how.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


@dataclasses.dataclass
class Attempt:
    """A case with one candidate and one distribution, on its way to an outcome.

    Attributes:
        case: what is judged.
        watch: watches over each phase.
        candidate: by name; "" where the backend selects one.
        distribution: of the operands.
        truth: of the distribution; spoiled when the backend misbehaves.
        built: the compiled problem, from the phase ``PREPARE`` on.
        announced: with how many other problems it was compiled, as far as is known before its kernels are.
        died: the worker has ended, and with it what it had built.
        kernels: as far as they are known.
        facts: what an outcome reports of the last run and its result.
        seconds: spent so far.
    """

    case: Case
    watch: Watching
    candidate: str = ""
    distribution: str = ""
    truth: Truth | None = None
    built: Built = _NOTHING
    announced: int = 0
    died: bool = False
    kernels: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: Seconds = dataclasses.field(default_factory=Seconds)

    def turn_to(self, distribution: str, truth: Truth | None = None) -> None:
        """Go on with another distribution of what was compiled."""
        self.distribution, self.truth, self.facts = distribution, truth, {}
        self.kernels = self.kernels or self.built.kernels

    def proved(self, proof: Proof) -> None:
        """Keep what the last run has executed."""
        self.kernels, self.facts = proof.kernels, {name: getattr(proof, name) for name in _PROVED}

    def end(self, status: Status, reason: Reason | None = None, details: str = "", cause: str = "") -> Outcome:
        """An outcome with what is known so far."""
        details = "\n".join(filter(None, (details, self.case.alone if status.is_failure else "")))
        facts = {"details": details, "cause": cause, "compiled_with": self.announced, **self.facts}
        known = {"kernels": self.kernels, "seconds": self.seconds, **facts}
        return Outcome(self.case.id(self.candidate), self.distribution, self.case.seed, status, reason, **known)

    @contextlib.contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A block that may not come back.

        Raises:
            Ended: for an exception in the block.
            Exception: for one of the harness's own code.
        """
        case, started = self.case, time.perf_counter()
        distribution = self.distribution or next(iter(case.distributions), "")
        seen = _WATCHED.get(phase, phase)
        kernels = ("eager ATen",) if phase is Phase.EAGER else self.kernels
        activity = Activity(case.id(self.candidate), seen, distribution, case.seed, kernels, case.device)
        try:
            with self.watch(activity):
                yield
        except Ended:
            raise
        except Exception as error:  # any exception of a backend is its case's failure
            if self.truth is not None:
                # Where the judge's own part fails, PyTorch's product has nothing to do with it either.
                self.truth.spoiled |= isinstance(error, Misconduct) or phase in {Phase.OPERANDS, Phase.REFERENCE}
            self._spend(phase, started)
            raise Ended(self.failed(phase, error)) from None
        self._spend(phase, started)

    def _spend(self, phase: Phase, started: float) -> None:
        if part := _SECONDS.get(phase):
            self.seconds += Seconds(**{part: time.perf_counter() - started})

    def failed(self, phase: Phase, error: Exception) -> Outcome:
        """The outcome of an exception.

        Raises:
            Exception: the exception itself, where it is a defect of the harness.
        """
        if isinstance(error, Unsupported) and phase in _MAY_BE_UNSUPPORTED:
            return dataclasses.replace(self.end(Status.UNSUPPORTED, error.reason), distribution="")
        if isinstance(error, Unsupported) and phase is Phase.RUN and error.reason.code == "not-taken":
            return self.end(Status.UNSUPPORTED, error.reason)
        if isinstance(error, Pruned) and phase is Phase.PREPARE:
            # Without a name the backend has tried one candidate after the other, and none was left.
            status = Status.PRUNED if self.candidate else Status.CRASHED
            return dataclasses.replace(self.end(status, error.reason), distribution="")
        if isinstance(error, Died):
            self.died = True
            status = Status.TIMED_OUT if error.limit else Status.CRASHED
            kernels = self.kernels if phase is not Phase.EAGER else ("eager ATen",)
            outcome = dataclasses.replace(self.end(status, error.reason, details=error.details), kernels=kernels)
            return self._of_phase(phase, outcome)
        known = error if isinstance(error, Thrown) else thrown(error, phase, self.case.device)
        self.died |= known.lost is not None
        reason = Reason(f"{phase.replace(' ', '-')}-{known.kind}", f"{known.kind} in {phase}: {known.line}")
        crash = self._of_phase(phase, self.end(Status.CRASHED, reason, details=known.details))
        if (machine := known.memory or known.lost) is not None:
            crash = dataclasses.replace(crash, reason=machine)
        if isinstance(error, Misconduct):  # it came to its end: what it returned, or left behind, is wrong
            return dataclasses.replace(crash, status=Status.INCORRECT, reason=error.reason, details="")
        if isinstance(error, Unsupported) and phase not in _OWN:
            text = f"the backend supports the problem and raised Unsupported in {phase}: {error.reason.text}"
            reason = Reason("late-refusal", text, "raise Unsupported in supports() or prepare(), before anything runs")
            return dataclasses.replace(crash, reason=reason)
        if machine is None and phase in _OWN and not isinstance(error, Thrown):
            raise error
        return crash

    def _of_phase(self, phase: Phase, outcome: Outcome) -> Outcome:
        """Without a distribution, where the phase has none."""
        return dataclasses.replace(outcome, distribution="") if phase in {Phase.SUPPORTS, Phase.OPERANDS} else outcome
