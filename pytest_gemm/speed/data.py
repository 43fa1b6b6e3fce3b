"""Plain data of speed: what one process measured of a case, and what the gate concludes.

A *session* is one fresh process.  However many times it times a case, it yields one estimate: repeats within a process
are not independent (the same memory, the same clock, the same neighbours).  A :class:`Sample` keeps all its readings;
the gate uses one number of each.

Everything here is frozen, needs no torch, and is stored as lines of JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status, Verdict
from pytest_gemm.storage import files
from pytest_gemm.storage.errors import FileError

INTERLEAVED: Final = "-interleaved"
"""Suffix of the contract of a session that was timed in alternation with another one."""


class Peaks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest rates that the machine reached in microbenchmarks.

    Attributes:
        flops: highest matrix rate by name of the input dtype, in FLOP/s (operations, for integers).
        bandwidth: of the memory in byte/s, the better of copying (read and written bytes together) and reading.
        disturbed: why a requested rate is missing: other processes kept the cores busy in every try; "" when none is.
    """

    flops: Mapping[str, float] = msgspec.field(default_factory=dict)
    bandwidth: float = 0.0
    disturbed: str = ""

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> Peaks:
        """Those of the last session that measured all of them; of the last session where none did."""
        found = [session.peaks for session in sessions]
        return next((one for one in reversed(found) if not one.disturbed), found[-1] if found else cls())

    def or_higher(self, again: Peaks) -> Peaks:
        """The larger of each: a peak that was measured beside a load came out too low, and none comes out too high."""
        flops = {name: max(rate, self.flops.get(name, 0.0)) for name, rate in again.flops.items()}
        missing = again.disturbed if self.disturbed else ""
        return Peaks({**self.flops, **flops}, max(self.bandwidth, again.bandwidth), missing)


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one process measured of one case.

    Attributes:
        case: what was timed.
        device: ``cpu`` or ``cuda``.
        status: how the case ended when its result was judged after timing; only ``passed`` gives an estimate.
        reason: why it is not ``passed``.
        subject: seconds a call, one for each reading of the subject in order of time (a block has four readings, two of
            them of the subject).
        comparator: the same of the comparator, as long as ``subject``; empty without one.
        comparator_name: name of the comparator, "" without one.
        windows: how many of the readings each window of the session holds, in order; empty: all are of one window.
        calls: calls in one reading.
        retaken: blocks that the guard rejected and that were measured again.
        disturbed: why the estimate is not reliable although blocks were retaken; "" when it is.
        selected: candidates that the backend selected, as its proof shows.
        ranking: candidates that the backend timed in order to select one, the fastest first.
        kernels: names of the kernels that ran.
        telemetry: clocks, power, load and such, by name with the unit in it (``sm_mhz_min``).
        phases: seconds that this process spent on the case: ``prepare``, ``judge``, ``time``.
        distribution: of the operands that were timed, "" where none were.
        least: seconds that a call takes at least on the machine, see ``roofline.least_seconds``; ``None`` where the
            machine is not known.
        computing: seconds that a call's operations take at least by the measured peaks, see ``roofline.floor``; 0 where
            that is not known.
        reading: the same of the bytes that have to cross the memory bus.

    Raises:
        ValueError: for readings that are no times, or that are not as many as they have to be.
    """

    case: CaseId
    device: Annotated[str, msgspec.Meta(pattern="^(cpu|cuda)$")]
    status: Status
    reason: Reason | None = None
    subject: tuple[float, ...] = ()
    comparator: tuple[float, ...] = ()
    comparator_name: str = ""
    windows: tuple[int, ...] = ()
    calls: int = 0
    retaken: int = 0
    disturbed: str = ""
    selected: tuple[str, ...] = ()
    ranking: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    telemetry: Mapping[str, float] = msgspec.field(default_factory=dict)
    phases: Mapping[str, float] = msgspec.field(default_factory=dict)
    distribution: str = ""
    least: float | None = None
    computing: float = 0.0
    reading: float = 0.0

    def __post_init__(self) -> None:
        for name, readings in (("subject", self.subject), ("comparator", self.comparator)):
            for seconds in readings:
                if not 0.0 < seconds < math.inf:
                    raise ValueError(f"{name} has {seconds:g}, which is not a time")
        counts = {len(self.subject), sum(self.windows or [len(self.subject)]), len(self.comparator or self.subject)}
        if len(counts) > 1 or not all(count > 0 for count in self.windows):
            raise ValueError("subject, comparator and windows do not have the same number of readings")

    @property
    def is_timed(self) -> bool:
        """Whether there is an estimate: the result was right, and readings were taken."""
        return self.status is Status.PASSED and bool(self.subject)

    @property
    def is_impossible(self) -> bool:
        """Whether no window can have been one of calls that compute the product, by the ceiling or by the roofline."""
        return self.is_above_ceiling or self._is_below(self.roofline)

    @property
    def is_above_ceiling(self) -> bool:
        """Whether every window is too short for the units of the machine, of which nothing is measured."""
        return self._is_below(self.least or 0.0)

    @property
    def roofline(self) -> float:
        """Seconds that a call takes at least by the measured peaks; 0 where that is not known."""
        return max(self.computing, self.reading)

    def _is_below(self, seconds: float) -> bool:
        return self.is_timed and max(self._medians(self.subject)) < seconds

    @property
    def estimate(self) -> float:
        """Seconds a call of the subject in this session: the median over its windows of their medians.

        A window lasts for a fraction of a second, in which a shared machine is in one state.  A session times a case
        in several windows that lie far apart; the median over these is what repeats in the next process
        (docs/explanation/gate.md has the measurement).
        """
        return statistics.median(self._medians(self.subject))

    @property
    def comparator_estimate(self) -> float | None:
        """The same of the comparator, such that the quotient of both is the median of the windows' quotients.

        In a window both met the same state of the machine, which the quotient cancels.  ``None`` without a comparator.
        """
        if not self.comparator:
            return None
        return self.estimate * _quotient(self._medians(self.comparator), self._medians(self.subject))

    def times(self, base: Sample) -> tuple[float, float | None] | None:
        """Time of subject and comparator as multiples of those of ``base``: medians of the windows' quotients.

        For two interleaved sessions: window i of one comes right before or after window i of the other, so that each
        quotient is of one state of the machine.  ``None`` where the numbers of windows differ; the second is ``None``
        where either has no comparator.
        """
        if not (self.is_timed and base.is_timed) or len(self.windows) != len(base.windows):
            return None
        subject = _quotient(self._medians(self.subject), base._medians(base.subject))
        if not (self.comparator and base.comparator):
            return subject, None
        return subject, _quotient(self._medians(self.comparator), base._medians(base.comparator))

    def _medians(self, readings: Sequence[float]) -> list[float]:
        """The median of each window's readings."""
        ends = list(itertools.accumulate(self.windows or (len(readings),)))
        return [statistics.median(readings[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def spread(self) -> float:
        """Relative spread within the process: median absolute deviation of the readings over their median."""
        middle = statistics.median(self.subject)
        return statistics.median(abs(x - middle) for x in self.subject) / middle


def _quotient(now: Iterable[float], then: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(now, then, strict=True))


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One process: where and with what it ran, and its samples.

    Attributes:
        hardware: the hardware key, for instance ``amd-epyc-avx2-4c``.
        software: versions by name: torch, triton, driver ...
        contract: hash of how it was timed and of the inputs; estimates of two contracts are not compared.
        group: ``head``, or ``base`` for the environment of ``--gemm-against``.
        index: number of the session within its group.
        date: ISO 8601, when it began.
        commit: of the checkout that was measured, "" where unknown; with ``+dirty`` for a changed tree.
        peaks: of the machine, as measured by this run.
        samples: in order of measurement.
        seconds: wall-clock time of the whole process, 0.0 while it is unknown.
        complete: whether the process came to its end.
        shared: top-level modules that a process of another environment imported from the project's folder.
        inductor: digests of the files of torch's ``_inductor``, as ``software.inductor`` has them.
    """

    hardware: str
    software: Mapping[str, str] = msgspec.field(default_factory=dict)
    contract: str = ""
    group: str = "head"
    index: int = 0
    date: str = ""
    commit: str = ""
    peaks: Peaks = msgspec.field(default_factory=Peaks)
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    complete: bool = True
    shared: tuple[str, ...] = ()
    inductor: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_interleaved(self) -> bool:
        """Whether it was timed in alternation with a session of the other group."""
        return self.contract.endswith(INTERLEAVED)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The gate's verdict on a case, with what it rests on.

    Attributes:
        case: which.
        verdict: the word.
        reason: a stable code and a sentence, for every verdict: ``within``, ``slower-confirmed``, ``not-confirmed``,
            ``anchor-shift``, ``underpowered``, ``disturbed``, ``drift``, ``guard``, ``no-baseline`` ...
        change: relative change of the time against what was stored, 0.05 for 5% slower; ``None`` without a baseline.
        low, high: 95% interval of ``change``.
        minimum_effect: the smallest slow-down that would have been seen with a power of 95%; ``None`` where unknown.
        seconds: median over the sessions of the subject's estimate.
        comparator_seconds: the same of the comparator, ``None`` without one.
        stored_seconds: the baseline's, ``None`` without one.
        weight: share of the comparator that was taken off, 0 for raw time, 1 for the ratio.
        sessions: processes that were looked at, those of the confirmation included.
        selection: what changed about the selected candidate ("was ..., is ..."), "" for nothing.
    """

    case: CaseId
    verdict: Verdict
    reason: Reason
    change: float | None = None
    low: float | None = None
    high: float | None = None
    minimum_effect: float | None = None
    seconds: float | None = None
    comparator_seconds: float | None = None
    stored_seconds: float | None = None
    weight: float = 0.0
    sessions: int = 0
    selection: str = ""


# -- as lines of JSON ----------------------------------------------------------------------------------------


class SessionError(FileError):
    """A file that is not the record of a session."""


class _End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a session file has one of these keys."""

    session: Session | None = None
    sample: Sample | None = None
    end: _End | None = None


_LINES: Final = msgspec.json.Decoder(_Line)


def _text(line: _Line) -> str:
    return msgspec.json.encode(line).decode() + "\n"


def sample_line(sample: Sample) -> str:
    """A sample as one line of JSON, with its newline."""
    return _text(_Line(sample=sample))


def session_line(session: Session) -> str:
    """A session without its samples and seconds as one line of JSON."""
    return _text(_Line(session=msgspec.structs.replace(session, samples=(), seconds=0.0)))


def end_line(seconds: float) -> str:
    """The last line of a session that came to its end."""
    return _text(_Line(end=_End(round(seconds, 3))))


def session_text(session: Session) -> str:
    """The file of a session that came to its end."""
    return "".join([session_line(session), *map(sample_line, session.samples), end_line(session.seconds)])


def read_session(path: Path) -> Session:
    """The session in a file of a head line, any number of samples and, when it came to its end, ``{"end": ...}``.

    A later head line takes the place of the first: the peaks were measured again.

    A process that was killed leaves a torn last line: the lines before it are read, and ``complete`` is ``False``.

    Raises:
        SessionError: for any other line that cannot be read, with the file and the line's number.
    """
    remedy = "delete the file, or measure again"
    try:
        lines = files.content(path).splitlines(keepends=True)
    except OSError as error:
        raise SessionError(path, 0, f"cannot be read: {error.strerror}", remedy) from None
    head: Session | None = None
    samples: list[Sample] = []
    end: _End | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = _LINES.decode(text)
            if line == _Line():
                raise ValueError("none of the keys session, sample, end")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not text.endswith(b"\n"):
                break
            raise SessionError(path, number, f"not a line of a session: {error}", remedy) from None
        head = line.session or head
        samples += [line.sample] if line.sample else []
        end = line.end or end
    if head is None:
        raise SessionError(path, 0, "the line about the session is missing", remedy)
    seconds = end.seconds if end else 0.0
    return msgspec.structs.replace(head, samples=tuple(samples), complete=end is not None, seconds=seconds)


def by_case(sessions: Iterable[Session]) -> dict[CaseId, list[Sample]]:
    """The timed samples of several sessions by case, in order."""
    found: dict[CaseId, list[Sample]] = {}
    for session in sessions:
        for sample in session.samples:
            if sample.is_timed:
                found.setdefault(sample.case, []).append(sample)
    return found
