"""Plain data of speed: what one process measured of a case, and what the gate says of it.

A *session* is one fresh process.  However many times it times a case, it yields one figure: what repeats within a
process is not independent (the same memory, the same clock, the same neighbours).  So a :class:`Sample` keeps all its
readings and the gate takes one number of each.

Everything here is frozen, knows no torch, and becomes JSON and back without loss.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import json
import math
import statistics
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.outcome import Reason, Status, Verdict

TURNS: Final = "-turns"
"""How the contract of a session ends that was timed in alternation with another one."""


@dataclasses.dataclass(frozen=True, order=True)
class CaseKey:
    """What is timed: a problem on a backend, with the choice that was asked for.

    Attributes:
        backend: name of the backend.
        problem: the canonical problem line.
        choice: the candidate that was asked for by name, "" for the backend's own.
    """

    backend: str
    problem: str
    choice: str = ""

    def __str__(self) -> str:
        return f"{self.backend}-{self.problem}" + (f"@{self.choice}" if self.choice else "")


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine reached when it was asked for nothing else.

    Attributes:
        flops: highest matrix rate by name of the input dtype, in FLOP/s (operations, for integers).
        bandwidth: of the memory in byte/s, the better of copying (read and written bytes together) and reading.
        disturbed: why one of them is missing that was asked for: others kept the cores busy in every try; "" when none.
    """

    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: float = 0.0
    disturbed: str = ""

    @classmethod
    def of(cls, sessions: Iterable[Session]) -> Ceilings:
        """Those of the first session that could measure all of them; the last one's where none could."""
        found = [session.ceilings for session in sessions]
        return next((one for one in found if not one.disturbed), found[-1] if found else cls())


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one process measured of one case.

    Attributes:
        case: what was timed.
        device: ``cpu`` or ``cuda``.
        status: how the case ended when its result was judged after timing; only ``passed`` counts as a figure.
        reason: why it is not ``passed``.
        subject: seconds a call, one for each visit of the subject in order of time (four arms of a block, two of them
            the subject's).
        comparator: the same of the comparator, as long as ``subject``; empty without one.
        comparator_name: who that was, "" for nobody.
        windows: how many of the readings each span of the session holds, in order; empty: all are of one span.
        calls: calls in one visit.
        retaken: blocks that the guard threw away and measured again.
        disturbed: why the figure is not to be trusted although it was retaken; "" when it is.
        picked: choices that the backend chose, as its proof says.
        ranking: candidates that the backend timed in order to choose, the fastest first.
        ranking_seconds: seconds a call of each of them, as the backend measured it.
        kernels: names of the kernels that ran.
        rivals: seconds a call of other candidates measured in the same blocks, by name; see autotune regret.
        telemetry: clocks, power, load and such, by name with the unit in it (``sm_mhz_min``).
        phases: seconds that this process spent on the case: ``prepare``, ``judge``, ``time``.
        distribution: of the operands that were timed, "" where it did not come to that.
    """

    case: CaseKey
    device: str
    status: Status
    reason: Reason | None = None
    subject: tuple[float, ...] = ()
    comparator: tuple[float, ...] = ()
    comparator_name: str = ""
    windows: tuple[int, ...] = ()
    calls: int = 0
    retaken: int = 0
    disturbed: str = ""
    picked: tuple[str, ...] = ()
    ranking: tuple[str, ...] = ()
    ranking_seconds: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    rivals: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    telemetry: Mapping[str, float] = dataclasses.field(default_factory=dict)
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    distribution: str = ""

    @property
    def is_timed(self) -> bool:
        """Whether there is a figure: the result was right, and readings were taken."""
        return self.status is Status.PASSED and bool(self.subject)

    @property
    def figure(self) -> float:
        """What the session says of the subject, in seconds a call: the median over its windows of their medians.

        A window lasts for a fraction of a second, in which a shared machine is in one state; a session visits a case
        in several windows that lie far apart, and the median over these is what repeats in the next process
        (docs/gate.md has the measurement).
        """
        return statistics.median(statistics.median(some) for some in self._windows(self.subject))

    @property
    def comparator_figure(self) -> float | None:
        """The same of the comparator, so that the quotient of both is the median over the windows of *their* quotients.

        In a window both saw the same state of the machine, which the quotient cancels.  ``None`` without a comparator.
        """
        if not self.comparator:
            return None
        pairs = zip(self._windows(self.comparator), self._windows(self.subject), strict=True)
        return self.figure * statistics.median(statistics.median(c) / statistics.median(s) for c, s in pairs)

    def times(self, base: Sample) -> tuple[float, float | None] | None:
        """How many times as long as in ``base`` subject and comparator took: medians of the windows' quotients.

        Of two sessions that took turns (``turns``): window i of one comes right before or after window i
        of the other, so that each quotient is of one state of the machine.  ``None`` where the windows are not as many;
        the second is ``None`` where either has no comparator.
        """

        def quotient(mine: Sequence[float], theirs: Sequence[float]) -> float:
            pairs = zip(self._windows(mine), base._windows(theirs), strict=True)
            return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)

        if not (self.is_timed and base.is_timed) or len(self.windows) != len(base.windows):
            return None
        both = self.comparator and base.comparator
        return quotient(self.subject, base.subject), quotient(self.comparator, base.comparator) if both else None

    def _windows(self, readings: Sequence[float]) -> list[Sequence[float]]:
        ends = list(itertools.accumulate(self.windows or (len(readings),)))
        return [readings[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def median(self) -> float:
        """Median of all of the subject's readings."""
        return statistics.median(self.subject)

    @property
    def spread(self) -> float:
        """Relative spread within the process: median absolute deviation of the readings over their median."""
        middle = self.median
        return statistics.median(abs(x - middle) for x in self.subject) / middle


@dataclasses.dataclass(frozen=True)
class Session:
    """One process: where and with what it ran, and its samples.

    Attributes:
        hardware: the hardware key, for instance ``amd-epyc-avx2-4c``.
        software: versions by name: torch, triton, driver ...
        contract: hash of how it was timed and of the inputs; figures of two contracts are not compared.
        arm: ``head``, or ``base`` for the environment of ``--gemm-against``.
        index: which of the arm's sessions.
        date: ISO 8601, when it began.
        commit: of the checkout that was measured, "" where unknown; with ``+dirty`` for a changed tree.
        ceilings: of the machine, as measured by this run.
        samples: in order of measurement.
        seconds: wall-clock time of the whole process, 0.0 while it is unknown.
        complete: whether the process came to its end.
    """

    hardware: str
    software: Mapping[str, str] = dataclasses.field(default_factory=dict)
    contract: str = ""
    arm: str = "head"
    index: int = 0
    date: str = ""
    commit: str = ""
    ceilings: Ceilings = Ceilings()
    samples: tuple[Sample, ...] = ()
    seconds: float = 0.0
    complete: bool = True

    @property
    def took_turns(self) -> bool:
        """Whether it was timed in alternation with a session of the other arm."""
        return self.contract.endswith(TURNS)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The gate's verdict on a case, with what it rests on.

    Attributes:
        case: which.
        verdict: the word.
        reason: a stable code and a sentence, for every verdict: ``within``, ``slower-confirmed``, ``not-confirmed``,
            ``anchor-shift``, ``too-noisy``, ``disturbed``, ``drift``, ``guard``, ``no-baseline`` ...
        change: relative change of the time against what was stored, 0.05 for 5% slower; ``None`` without a baseline.
        low, high: 95% interval of ``change``.
        detectable: the smallest slow-down that would have been seen with a power of 95%; ``None`` where unknown.
        seconds: median over the sessions of the subject's figure.
        comparator_seconds: the same of the comparator, ``None`` without one.
        stored_seconds: the baseline's, ``None`` without one.
        weight: share of the comparator that was taken off, 0 for raw time, 1 for the ratio.
        sessions: processes that were looked at, those of the confirmation included.
        selection: what changed about the choice ("was ..., is ..."), "" for nothing.
        regret: how much longer than the fastest candidate the picked one takes, as a fraction; ``None`` unmeasured.
        faster: that candidate's name, "" where the picked one is the fastest.
    """

    case: CaseKey
    verdict: Verdict
    reason: Reason
    change: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    seconds: float | None = None
    comparator_seconds: float | None = None
    stored_seconds: float | None = None
    weight: float = 0.0
    sessions: int = 0
    selection: str = ""
    regret: float | None = None
    faster: str = ""


# -- as lines of JSON ----------------------------------------------------------------------------------------


class SessionError(ValueError):
    """A file that is no record of a session, with the line that is wrong."""


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no measurement")
    return value


def sample_line(sample: Sample) -> str:
    """A sample as one line of JSON, with its newline."""
    return json.dumps({"sample": _plain(sample)}) + "\n"


def session_line(session: Session) -> str:
    """The head of a session as one line of JSON: everything but its samples."""
    facts = _plain(dataclasses.replace(session, samples=()))
    del facts["samples"]
    return json.dumps({"session": facts}) + "\n"


_hints: Final = functools.cache(typing.get_type_hints)


def _built(kind: Any, value: Any, place: str) -> Any:
    """What :func:`_plain` made ``value`` of, checked against its type.

    Raises:
        ValueError: for anything else; it names the place.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {typing.Union, types.UnionType}:  # X | None
        return None if value is None else _built(inner[0], value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(_built(inner[0], one, place) for one in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _built(inner[1], one, f"{place}.{key}") for key, one in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        if unknown := sorted(value.keys() - hints.keys()):
            raise ValueError(f"{place} has {', '.join(unknown)}, which is unknown")
        fields = {field.name for field in dataclasses.fields(kind) if field.default is field.default_factory}
        if missing := sorted(fields - value.keys()):
            raise ValueError(f"{place} has no {', '.join(missing)}")
        return kind(**{key: _built(hints[key], one, key) for key, one in value.items()})
    if isinstance(kind, enum.EnumMeta):
        return kind(value)
    if kind is float and type(value) in {int, float} and abs(value) < sys.float_info.max:  # neither NaN nor infinite
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{place} is {value!r:.40}")
    return value


def _sample(data: Any) -> Sample:
    found: Sample = _built(Sample, data, "sample")
    for name, readings in (("subject", found.subject), ("comparator", found.comparator), *found.rivals.items()):
        if not all(seconds > 0.0 for seconds in readings):
            raise ValueError(f"{name} has {min(readings):g}, which is no time")
    counts = {len(found.subject), sum(found.windows or [len(found.subject)]), len(found.comparator or found.subject)}
    if len(counts) > 1 or not all(count > 0 for count in found.windows):
        raise ValueError("subject, comparator and windows do not have as many readings")
    return found


def read_session(path: Path) -> Session:
    """The session in a file of one head line, any number of samples and, when it came to its end, ``{"end": ...}``.

    A process that was killed leaves a torn last line: what stands before it is read, and ``complete`` is ``False``.

    Raises:
        SessionError: for any other line that cannot be read, with the file and the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SessionError(f"{path}: {error}") from None
    return _session(path, lines)


def _session(path: Path, lines: Sequence[str]) -> Session:
    head: Session | None = None
    samples: list[Sample] = []
    end: Mapping[str, float] | None = None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if "session" in data:
                head = _built(Session, data["session"], "session")
            elif "sample" in data:
                samples.append(_sample(data["sample"]))
            else:
                end = {"seconds": _built(float, data["end"]["seconds"], "seconds")}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:  # noqa: PERF203  # it names the line
            if number == len(lines) and not line.endswith("\n"):
                break
            raise SessionError(f"{path}, line {number}: no line of a session: {error}") from None
    if head is None:
        raise SessionError(f"{path}: the line about the session is missing")
    seconds = end["seconds"] if end else 0.0
    return dataclasses.replace(head, samples=tuple(samples), complete=end is not None, seconds=seconds)


def by_case(sessions: Iterable[Session]) -> dict[CaseKey, list[Sample]]:
    """The timed samples of several sessions by case, in order."""
    found: dict[CaseKey, list[Sample]] = {}
    for session in sessions:
        for sample in session.samples:
            if sample.is_timed:
                found.setdefault(sample.case, []).append(sample)
    return found
