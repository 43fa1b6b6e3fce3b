"""What can become of a case: a status, a reason that a machine and a human can read, the facts beside it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from pytest_gemm.text import DETAILS, printable

# The ways in which a user's program reaches a kernel, see docs/modes.md.
MODES: Final = ("eager", "static", "dynamic", "cudagraphs", "aoti", "cpp-wrapper")


class Status(enum.Enum):
    """How a case ended.  The values are the words of reports, JUnit properties and the run record."""

    PASSED = "passed"
    INCORRECT = "incorrect"
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"
    FALLBACK = "fallback"
    MISTRUSTED = "mistrusted"  # the data could not have told right from wrong
    PRUNED = "pruned"  # a choice that autotuning would leave out as well: it does not compile or does not fit
    UNSUPPORTED = "unsupported"
    KNOWN_FAILURE = "known-failure"
    NOT_RUN = "not-run"

    @property
    def is_failure(self) -> bool:
        """Whether the case turns the run red."""
        return self in _FAILURES

    def __str__(self) -> str:
        return self.value


_FAILURES = frozenset({Status.INCORRECT, Status.CRASHED, Status.TIMED_OUT, Status.FALLBACK, Status.MISTRUSTED})


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why: a short stable code for machines, a sentence for people, and what would change it.

    Attributes:
        code: stable, lower case with dashes, for instance ``no-cuda-device``.
        text: one sentence.
        remedy: what the reader can do about it; "" where nothing can be done.
    """

    code: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("code", "text", "remedy"):  # often a backend's words
            object.__setattr__(self, name, printable(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.text} ({self.remedy})" if self.remedy else self.text


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Where a case's wall-clock time went, in seconds."""

    compile: float = 0.0
    run: float = 0.0
    reference: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compile + other.compile, self.run + other.run, self.reference + other.reference)


@dataclasses.dataclass(frozen=True)
class Activity:
    """What a process is doing right now: what is known of a case when the process hangs or dies.

    Attributes:
        backend, problem, distribution, seed, choice: the case, as in :class:`Outcome`.
        mode, isa, threads: as in :class:`Outcome`.
        phase: ``operands``, ``compile``, ``run``, ``run again``, ``reference`` or ``eager``.
        kernels: names of the kernels, as far as they are known by then.
        device: where the case computes, ``cpu`` or ``cuda``.
    """

    backend: str
    problem: str
    phase: str
    distribution: str = ""
    seed: int = 0
    choice: str = ""
    kernels: tuple[str, ...] = ()
    device: str = "cpu"
    mode: str = ""
    isa: str = ""
    threads: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one case: one problem, one distribution, one seed on one backend.

    Attributes:
        backend, problem, distribution, seed: the case; ``problem`` is the canonical line.
        status: how it ended.
        reason: why it is not ``passed``; ``None`` for a pass.
        kernels: names of what ran, as the backend proved them.
        tier: which tier of the oracle decided (``exact``, ``hard``, ``statistical``), "" before judging.
        ratio: worst error over bound; at most 1 for a pass, 0 where every element is exact, ``None`` unjudged.
        details: the located mismatch, several lines, ready to be shown.
        eager: the comparison with eager in words ("bit-equal", "1 ulp apart in 3 of 512").
        seconds: where the time went.
        test: name of the test function that judged it.
        known_failure: id of the ledger entry that explains it, or "".
        choice: the candidate of the backend that was asked for by name, "" where the backend chose.
        chosen: candidates that the proof says were chosen, whoever chose them; empty before that is known.
        configuration: what the generated code says of each product's kernel and blockings, where the backend reads it.
        sampled: what was looked at of a large result that was judged by sample; "" where it was all of it.
        mode: how the kernel was reached, one of ``backend.MODES``; "" for the backend's own way.
        guard: which end of operands and results was at a guard page, ``end`` or ``begin``; "" for ordinary memory.
        threads: CPU threads of the case, where several numbers were asked for; 0: those of the run.
        isa: the instruction set that the kernel was generated for, one of ``machine.isa.ISAS``; "" for the
            machine's own.
        fused: whether the product's own kernel did the whole epilogue; ``None`` without one, or where nobody knows.
        fusions: steps that Inductor's scheduler fused into a C++ template, by its own counter.
    """

    backend: str
    problem: str
    distribution: str
    seed: int
    status: Status
    reason: Reason | None = None
    kernels: tuple[str, ...] = ()
    tier: str = ""
    ratio: float | None = None
    details: str = ""
    eager: str = ""
    seconds: Seconds = Seconds()
    test: str = ""
    known_failure: str = ""
    choice: str = ""
    chosen: tuple[str, ...] = ()
    sampled: str = ""
    mode: str = ""
    guard: str = ""
    isa: str = ""
    threads: int = 0
    configuration: tuple[str, ...] = ()
    fused: bool | None = None
    fusions: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", printable(self.details, DETAILS))
        object.__setattr__(self, "choice", printable(self.choice))
        for name in ("kernels", "chosen", "configuration"):  # a backend's words
            object.__setattr__(self, name, tuple(map(printable, getattr(self, name))))

    @property
    def who(self) -> str:
        """The backend, with what was asked for: ``cpp``, ``cpp@aoti``, ``cpp@aoti@avx2@2t``."""
        return who(self.backend, self.mode, self.isa, self.threads)


def who(backend: str, mode: str = "", isa: str = "", threads: int = 0) -> str:
    """A backend with the mode, the instruction set and the CPU threads asked for, as test ids and reports have it."""
    return "@".join(filter(None, (backend, mode, isa, f"{threads}t" if threads else "")))


class Unsupported(Exception):
    """A refusal with a reason, decided before anything runs.  Not a skip, and not a failure.

    ``supports()`` returns one; ``prepare()`` may raise one when only the compiler knows.
    """

    def __init__(self, code: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.reason = Reason(code, text, remedy)


class Pruned(Exception):
    """A choice that autotuning would leave out as well: it does not compile for this device, or does not fit it.

    ``prepare()`` raises it.  Not a failure of the backend, for Inductor goes on without the candidate; but
    the run says which ones were lost, and why.
    """

    def __init__(self, code: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.reason = Reason(code, text, remedy)


class Verdict(enum.Enum):
    """What the gate says of a case.  The values are the words of reports and records."""

    SAME = "same"
    SLOWER = "slower"
    FASTER = "faster"
    UNDECIDED = "undecided"
    NO_BASELINE = "no-baseline"

    def __str__(self) -> str:
        return self.value
