"""What can become of a case: a status, a reason that a machine and a human can read, the facts beside it."""

from __future__ import annotations

import dataclasses
import enum

from pytest_gemm.core.case_id import CaseId, Device, Mode, Word
from pytest_gemm.core.text import DETAILS, one_line, printable
from pytest_gemm.core.units import plural


class Phase(Word):
    """A part of a case.  The values are the words of reports, and begin the reason code of a crash."""

    SUPPORTS = "supports"
    OPERANDS = "operands"
    CANDIDATES = "candidates"
    PREPARE = "prepare"
    COMPILE = "compile"
    RUN = "run"
    RUN_AGAIN = "run again"
    REFERENCE = "reference"
    EAGER = "eager"
    TIME = "time"
    CASE = "the case"
    TEST = "the test"
    HARNESS = "the harness"

    @property
    def is_run(self) -> bool:
        """Whether the time limit of a run applies; the limit of a compile applies to the others."""
        return self in {Phase.RUN, Phase.RUN_AGAIN, Phase.EAGER}


class Status(enum.Enum):
    """How a case ended.  The values are the words of reports, JUnit properties and the run record."""

    PASSED = "passed"
    """The result is within the interval, and the backend computed it."""
    INCORRECT = "incorrect"
    """The result is outside the interval, of another shape or dtype, or not the same twice; or an input was changed."""
    CRASHED = "crashed"
    """An exception, or the end of the process; or every candidate was pruned."""
    TIMED_OUT = "timed-out"
    """A compile or a run reached its limit, ``--gemm-timeout``."""
    FALLBACK = "fallback"
    """Another implementation computed the result, or there is no proof that the backend did."""
    IMPOSSIBLE = "impossible"
    """Timed, and in every window faster than the machine can be: not all calls computed it."""
    MISTRUSTED = "mistrusted"
    """The values could not tell right from wrong, or only the kernel of a batch fails: a defect of the test."""
    KNOWN_FAILURE = "known-failure"
    """The case failed as an entry of the ledger says, or was not run because the entry says that it can crash."""
    PRUNED = "pruned"
    """Autotuning would leave the candidate out as well: it does not compile for the device, or does not fit it."""
    UNSUPPORTED = "unsupported"
    """The backend does not accept the problem; the reason is counted in the summary."""
    NOT_RUN = "not-run"
    """The device was lost to the process before the case."""

    @property
    def is_failure(self) -> bool:
        """Whether the case turns the run red."""
        return self in _FAILURES

    def __str__(self) -> str:
        return self.value


WITHHELD = "can-crash"
"""Code of the reason of a case that the ledger forbids to run."""

_FAILURES = frozenset(
    {Status.INCORRECT, Status.CRASHED, Status.TIMED_OUT, Status.FALLBACK, Status.IMPOSSIBLE, Status.MISTRUSTED}
)


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
            object.__setattr__(self, name, one_line(getattr(self, name)))

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
    """What a process is doing: what is known of a case when the process hangs or dies.

    Attributes:
        case: the case.
        phase: the part of it.
        distribution, seed: of the operands.
        kernels: names of the kernels, as far as they are known.
        device: where the case computes.
    """

    case: CaseId
    phase: Phase
    distribution: str = ""
    seed: int = 0
    kernels: tuple[str, ...] = ()
    device: Device = Device.CPU


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one case with one distribution and one seed.

    Attributes:
        case: the case.
        distribution, seed: of its operands.
        status: how it ended.
        reason: why it is not ``passed``; ``None`` for a pass.
        kernels: names of the kernels that ran, as the backend proved them.
        tier: which tier of the oracle decided (``exact``, ``hard``, ``statistical``), "" before judging.
        ratio: worst error over bound; at most 1 for a pass, 0 where every element is exact, ``None`` unjudged.
        cause: short name of what was computed instead (``K tail``, ``bias missing``); "" where nothing is certain.
        details: the located mismatch, several lines, ready to be shown.
        eager: the comparison with eager in words ("bit-equal", "1 ulp apart in 3 of 512").
        seconds: where the time went.
        test: name of the test function that judged it.
        known_failure: id of the ledger entry that explains it, or "".
        failed_as: what a known failure would have been without the ledger; ``None`` for any other status.
        imitates: of the wrong answers that the ledger states for the case those that this one is, see
            ``ledger.computes``; ``None`` where the result was right, or was not compared.
        inherited: PyTorch's own product fails in the same way on the same operands, as ``cause`` says.
        chosen: candidates that the proof names as selected; empty before that is known.
        configuration: what the generated code says of each product's kernel and blockings, where the backend reads it.
        sampled: which part of a large result was judged; "" for all of it.
        fused: whether the product's own kernel did the whole epilogue; ``None`` without one, or where it is unknown.
        fusions: steps that Inductor's scheduler fused into a C++ template, by its own counter.
        composed: whether eager PyTorch computed a part of the problem around the backend's function; ``None`` where the
            backend is no function.
        whole: whether ``bind=`` or ``linear=`` of a function computed the problem; ``None`` where it has neither.
        bits: digest of the results' values, see ``results.digest_of``; "" where another run may give other bits.
        operands: digest of the operands that they are results of; "" without ``bits``.
        compiled_with: how many other kernels were one translation unit with its own; 0: compiled alone, as for a user.
    """

    case: CaseId
    distribution: str
    seed: int
    status: Status
    reason: Reason | None = None
    kernels: tuple[str, ...] = ()
    tier: str = ""
    ratio: float | None = None
    cause: str = ""
    details: str = ""
    eager: str = ""
    seconds: Seconds = Seconds()
    test: str = ""
    known_failure: str = ""
    chosen: tuple[str, ...] = ()
    sampled: str = ""
    configuration: tuple[str, ...] = ()
    fused: bool | None = None
    fusions: int = 0
    composed: bool | None = None
    whole: bool | None = None
    bits: str = ""
    operands: str = ""
    failed_as: Status | None = None
    imitates: tuple[str, ...] | None = None
    inherited: bool = False
    compiled_with: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", printable(self.details, DETAILS))
        for name in ("kernels", "chosen", "configuration"):  # a backend's words
            object.__setattr__(self, name, tuple(map(one_line, getattr(self, name))))

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self.case.backend

    @property
    def problem(self) -> str:
        """The canonical problem line."""
        return self.case.problem

    @property
    def candidate(self) -> str:
        """The candidate that was asked for by name, "" where the backend selected one."""
        return self.case.candidate

    @property
    def mode(self) -> Mode:
        """How the kernel was reached."""
        return self.case.mode

    @property
    def who(self) -> str:
        """The backend, with what was asked for: ``cpp``, ``cpp@aoti``, ``cpp@aoti@avx2@2t``."""
        return self.case.who

    @property
    def op(self) -> str:
        """Name of the problem's op."""
        return self.problem.partition(":")[0]

    @property
    def why(self) -> str:
        """The reason in words, with its remedy."""
        return str(self.reason or "no reason")

    @property
    def code(self) -> str:
        """Code of the reason; "" without one."""
        return self.reason.code if self.reason else ""

    @property
    def batch(self) -> str:
        """What its kernel was compiled with, in words; "" of one that was compiled alone."""
        return f"compiled with {plural(self.compiled_with, 'other kernel')}" if self.compiled_with else ""

    @property
    def ended(self) -> Status:
        """The status without the ledger."""
        return self.failed_as or self.status

    @property
    def was_judged(self) -> bool:
        """Whether the case was run and its result judged: not unsupported, pruned, left out or withheld."""
        if self.status is Status.KNOWN_FAILURE:
            return self.code != WITHHELD
        return self.status not in {Status.UNSUPPORTED, Status.PRUNED, Status.NOT_RUN}

    @property
    def candidates(self) -> tuple[str, ...]:
        """The candidate that was asked for, or those that the backend selected."""
        return (self.candidate,) if self.candidate else self.chosen


class _Refusal(Exception):
    """An exception with a reason.

    Args:
        code, text, remedy: of the :class:`Reason`.
    """

    def __init__(self, code: str, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.reason = Reason(code, text, remedy)


class Unsupported(_Refusal):
    """A refusal with a reason, decided before anything runs.  Not a skip, and not a failure.

    ``supports()`` returns one; ``prepare()`` may raise one when only the compiler knows.
    """


class Pruned(_Refusal):
    """A choice that autotuning would leave out as well: it does not compile for this device, or does not fit it.

    ``prepare()`` raises it.  Not a failure of the backend, for Inductor goes on without the candidate; but
    the run says which ones were lost, and why.
    """


class Misconduct(_Refusal):
    """A kernel came to its end and did what no kernel may do.  The case is incorrect, for this reason."""


class Verdict(enum.Enum):
    """What the gate says of a case.  The values are the words of reports and records."""

    SAME = "same"
    """No change was confirmed, by a comparison that could have found one."""
    SLOWER = "slower"
    """A slow-down beyond the tolerance, which further timing processes confirmed."""
    FASTER = "faster"
    """A speed-up beyond the tolerance, confirmed in the same way."""
    UNDECIDED = "undecided"
    """The measurement cannot decide: too few, too noisy or disturbed processes, or the whole machine changed."""
    NO_BASELINE = "no-baseline"
    """Nothing is stored for the case under the hardware key."""

    def __str__(self) -> str:
        return self.value
