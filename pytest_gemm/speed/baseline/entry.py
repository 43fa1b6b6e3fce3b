"""One stored baseline: a line of a file."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.problem.problem import canonical_line
from pytest_gemm.storage import files
from pytest_gemm.storage.errors import FileError

if TYPE_CHECKING:
    from pytest_gemm.speed.gate.estimates import Stored


SESSIONS: Final = 12  # processes that a baseline rests on, unless the caller says otherwise
_DIGITS: Final = 5  # of a time: its last digit is a tenth of what the quietest kernels vary by
MICRO: Final = 1e-6


class BaselineError(FileError):
    """A store that cannot be read or written."""


# What is smaller is 0 in seconds, and has no logarithm.
_Time: TypeAlias = Annotated[float, msgspec.Meta(gt=1e-300, le=sys.float_info.max)]


class Epoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a span of comparable recordings begins.

    Recording again stays in the epoch.  A new one begins when a slow-down was accepted, or when the old estimates are
    not comparable: another timing contract, another comparator.

    Attributes:
        date: ISO 8601, of its first recording.
        commit: that was measured then, "" where unknown.
        contract: hash of how it was timed.
        subject_us: median over the sessions of the subject's estimate, in microseconds a call.
        comparator_us: the same of the comparator, ``None`` without one.
        reason: why the epoch began; "" for the first.
    """

    date: str
    commit: str
    contract: str
    subject_us: _Time
    comparator_us: _Time | None = None
    reason: str = ""


class Baseline(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    rename={
        "candidate": "choice",
        "shown_us": "median_us",
        "minimum_effect": "detectable",
        "selected": "picked",
    },
):
    """What is stored of a case on one hardware key: one line of the file, with its keys in this order.

    Attributes:
        backend: name of the file, which is not repeated in the line.
        problem, candidate: the rest of the case.
        comparator: name of the comparator, "" without one.
        shown_us: the median for readers of the file; 0.0 in memory, see :attr:`median_us`.
        tflops: 1e12 operations a second at the median, ``None`` where unknown.
        gbs: 1e9 bytes a second at the median, ``None`` where unknown.
        roofline: share of the attainable rate, ``None`` without them.
        minimum_effect: smallest slow-down that the gate finds with a power of 95%, as a fraction, or ``None``.
        spread: median over the sessions of the relative spread within the process (``Sample.spread``).
        selected: candidates that the backend selected, sorted.
        subject_us: the subject's estimate of each session (``Sample.estimate``), in microseconds a call.
        comparator_us: the comparator's of each session, as long as ``subject_us``; empty without one.
        contract: hash of how it was timed; estimates of two contracts are not compared.
        software: versions by name.
        commit: that was measured, "" where unknown.
        date: ISO 8601, of the first session.
        epochs: where each epoch of the case began, oldest first; empty before it is recorded.
    """

    backend: str = ""
    problem: Annotated[str, msgspec.Meta(min_length=1)]
    candidate: str = ""
    comparator: str = ""
    shown_us: _Time = 0.0
    tflops: _Time | None = None
    gbs: _Time | None = None
    roofline: _Time | None = None
    minimum_effect: _Time | None = None
    spread: Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
    selected: tuple[str, ...] = ()
    subject_us: Annotated[tuple[_Time, ...], msgspec.Meta(min_length=1)]
    comparator_us: tuple[_Time, ...] = ()
    contract: str
    software: Mapping[str, str]
    commit: str
    date: str
    epochs: Annotated[tuple[Epoch, ...], msgspec.Meta(min_length=1)]

    @property
    def case(self) -> CaseId:
        """Which case it is of."""
        return CaseId(self.backend, self.problem, self.candidate)

    @property
    def median_us(self) -> float:
        """Median over the sessions of the subject's estimate, in microseconds a call."""
        return statistics.median(self.subject_us)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 1."""
        return max(1, len(self.epochs))

    @property
    def start(self) -> Epoch:
        """The recording that the current epoch began with: what a slow drift is measured from."""
        return self.epochs[-1] if self.epochs else self.beginning()

    @property
    def reason(self) -> str:
        """Why the current epoch began: the text of ``--reason`` for an accepted slow-down; "" for the first."""
        return self.start.reason

    def beginning(self, reason: str = "") -> Epoch:
        """The epoch that begins with this recording, because of ``reason``."""
        comparator = _median(self.comparator_us) if self.comparator_us else None
        return Epoch(self.date, self.commit, self.contract, _median(self.subject_us), comparator, reason)

    def stored(self, note: str = "") -> Stored:
        """What the gate compares with, in seconds.

        Args:
            note: label of what else differs, for instance other software.
        """
        from pytest_gemm.speed.gate.estimates import Reading, Stored

        def reading(subject_us: float, comparator_us: float | None) -> Reading:
            return Reading(subject_us * MICRO, None if comparator_us is None else comparator_us * MICRO)

        comparators: Sequence[float | None] = self.comparator_us or [None] * len(self.subject_us)
        readings = tuple(map(reading, self.subject_us, comparators))
        is_first = self.start == self.beginning(self.start.reason)
        first = None if is_first else reading(self.start.subject_us, self.start.comparator_us)
        return Stored(self.case, readings, first, note)

    def without_comparator(self) -> Baseline:
        """The same as if the subject had been timed alone."""
        epochs = tuple(replace(epoch, comparator_us=None) for epoch in self.epochs)
        return replace(self, comparator="", comparator_us=(), epochs=epochs)

    def line(self) -> str:
        """The baseline as one line of JSON, without a newline; :meth:`parse` reads it.

        Times have five digits, rates four, fractions three.
        """
        line = replace(
            self,
            backend="",
            shown_us=_median(self.subject_us),
            tflops=_short(self.tflops, 4),
            gbs=_short(self.gbs, 4),
            roofline=_short(self.roofline, 3),
            minimum_effect=_short(self.minimum_effect, 3),
            spread=_short(self.spread, 3),
            subject_us=tuple(map(_short, self.subject_us)),
            comparator_us=tuple(map(_short, self.comparator_us)),
            software=dict(sorted(self.software.items())),
            epochs=self.epochs or (self.beginning(),),
        )
        return json.dumps(msgspec.to_builtins(line), ensure_ascii=False)

    @classmethod
    def parse(cls, text: str, backend: str, path: Path | str = "<line>", number: int = 0) -> Baseline:
        """Read one line.

        Args:
            text: the line.
            backend: whose file it stands in.
            path: of that file, for the message.
            number: 1-based number of the line, for the message.

        Raises:
            BaselineError: when it is not a baseline.
        """
        try:
            line = msgspec.convert(json.loads(text, object_pairs_hook=_unique), cls)
            _check(line)
            return replace(line, backend=backend, problem=canonical_line(line.problem), shown_us=0.0)
        except json.JSONDecodeError as error:
            what = f"torn or broken at column {error.colno}: {error.msg.removesuffix(' starting at')}"
            raise BaselineError(path, number, what, RESTORE) from None
        except (ValueError, RecursionError) as error:
            remedy = _NEWER if "unknown field" in str(error) else RESTORE
            raise BaselineError(path, number, str(error), remedy) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"duplicate key {key!r}")
    return dict(pairs)


def _check(line: Baseline) -> None:
    """See that the values of a line agree.

    Raises:
        ValueError: when two of them contradict each other.
    """
    subject, comparator = len(line.subject_us), len(line.comparator_us)
    if line.backend:
        raise ValueError("the field `backend` is the name of the file and does not stand in a line")
    if comparator and comparator != subject:
        raise ValueError(f"subject_us and comparator_us have {subject} and {comparator} sessions")
    if bool(line.comparator) != bool(comparator):
        raise ValueError("comparator and comparator_us need each other")
    if not math.isclose(line.shown_us, line.median_us, rel_tol=10.0 ** (1 - _DIGITS)):
        raise ValueError(f"median_us is {line.shown_us:g}, but the median of subject_us is {line.median_us:g}")


def _short(value: float | None, digits: int = _DIGITS) -> Any:
    """A value with as many significant digits as a line shows; ``None`` stays."""
    return None if value is None else float(f"{value:.{digits}g}")


def _median(estimates: Sequence[float]) -> float:
    """Median of the estimates as a line shows them, so that it is the same before writing and after reading."""
    return float(_short(statistics.median(_short(one) for one in estimates)))


# -- reading -----------------------------------------------------------------------------------------------------

MARKER: Final = re.compile(r"(<{7}|\|{7}|>{7})( |\Z)|={7}\Z")
RESTORE: Final = "restore the line from git, or delete it and record its case again"
_NEWER: Final = "if a newer pytest-gemm wrote it, update this one; otherwise delete the key"


@dataclasses.dataclass(frozen=True)
class Kept:
    """A baseline with the line that it stands in, so that a line that is not recorded again stays the same bytes."""

    baseline: Baseline
    text: str
    number: int


def parse(text: str, backend: str, path: Path | str) -> dict[CaseId, Kept]:
    """All baselines of a file's text, in the file's order.

    The order of the lines means nothing, and blank ones are passed over: both come from merging by hand, and the next
    recording puts them right.

    Args:
        text: of the file.
        backend: whose file it is.
        path: of the file, for the message.
    """
    found: dict[CaseId, Kept] = {}
    remedy = "keep one line of each case, the newest"
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if MARKER.match(line.rstrip()):
            raise BaselineError(path, number, "a conflict that git left", remedy)
        one = Kept(Baseline.parse(line, backend, path, number), line.rstrip("\r"), number)
        if earlier := found.get(one.baseline.case):
            dates = f"(dates {earlier.baseline.date or '?'} and {one.baseline.date or '?'})"
            case = f"{one.baseline.case} stands on line {earlier.number} already {dates}"
            raise BaselineError(path, number, case, remedy)
        found[one.baseline.case] = one
    if not found:
        raise BaselineError(path, 0, "is empty", "restore it from git, or delete it")
    return found


def read_text(path: Path) -> str:
    """The text of a baseline file."""
    try:
        return files.content(path).decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BaselineError(path, line, "is not UTF-8", RESTORE) from None
    except OSError as error:
        raise BaselineError(path, 0, f"cannot be read: {error.strerror}", "make it a readable file") from None
