"""One stored baseline: a line of a file."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_gemm.problem.problem import canonical_line
from pytest_gemm.speed.data import CaseKey
from pytest_gemm.storage.errors import FileError
from pytest_gemm.text import did_you_mean

if TYPE_CHECKING:
    from pytest_gemm.speed.gate.estimates import Stored


SESSIONS: Final = 12  # processes that a baseline rests on, unless the caller says otherwise
_DIGITS: Final = 5  # of a time: its last digit is a tenth of what the quietest kernels vary by
MICRO: Final = 1e-6


class BaselineError(FileError):
    """A store that cannot be read or written."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Where a span of comparable recordings begins.

    Recording anew stays in the epoch.  A new one begins when a slow-down was accepted, or when the old figures are
    not comparable: another timing contract, another comparator.

    Attributes:
        date: ISO 8601, of its first recording.
        commit: that was measured then, "" where unknown.
        contract: hash of how it was timed.
        subject_us: median over the sessions of the subject's figure, in microseconds a call.
        comparator_us: the same of the comparator, ``None`` without one.
        reason: why the epoch began; "" for the first.
    """

    date: str
    commit: str
    contract: str
    subject_us: float
    comparator_us: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What is stored of a case on one hardware key: one line of the file.

    Attributes:
        case: which; the backend is the file's name and not repeated in the line.
        subject_us: the subject's figure of each session (``Sample.figure``), in microseconds a call.
        comparator: name of the comparator, "" without one.
        comparator_us: its figure of each session, as long as ``subject_us``; empty without one.
        spread: median over the sessions of the relative spread within the process (``Sample.spread``).
        picked: choices that the backend chose, sorted.
        tflops: 1e12 operations a second at the median, ``None`` where unknown.
        gbs: 1e9 bytes a second at the median, ``None`` where unknown.
        roofline: share of the attainable rate, ``None`` without ceilings.
        detectable: smallest slow-down that the gate sees with a power of 95%, as a fraction; ``None`` where unknown.
        contract: hash of how it was timed; figures of two contracts are not compared.
        software: versions by name.
        commit: that was measured, "" where unknown.
        date: ISO 8601, of the first session.
        epochs: where each epoch of the case began, oldest first; empty before it is recorded.
    """

    case: CaseKey
    subject_us: tuple[float, ...]
    comparator: str = ""
    comparator_us: tuple[float, ...] = ()
    spread: float = 0.0
    picked: tuple[str, ...] = ()
    tflops: float | None = None
    gbs: float | None = None
    roofline: float | None = None
    detectable: float | None = None
    contract: str = ""
    software: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str = ""
    date: str = ""
    epochs: tuple[Epoch, ...] = ()

    @property
    def median_us(self) -> float:
        """Median over the sessions of the subject's figure, in microseconds a call."""
        return statistics.median(self.subject_us)

    @property
    def speedup(self) -> float | None:
        """Median over the sessions of comparator over subject: above 1 the subject is faster."""
        if not self.comparator_us:
            return None
        return statistics.median(c / s for s, c in zip(self.subject_us, self.comparator_us, strict=True))

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 1."""
        return max(1, len(self.epochs))

    @property
    def first(self) -> Epoch:
        """The very first recording."""
        return self.epochs[0] if self.epochs else self.beginning()

    @property
    def start(self) -> Epoch:
        """The recording that the current epoch began with: what a slow drift is measured from."""
        return self.epochs[-1] if self.epochs else self.beginning()

    @property
    def reason(self) -> str:
        """Why the current epoch began: the text of ``--gemm-reason`` for an accepted slow-down; "" for the first."""
        return self.start.reason

    @property
    def history(self) -> tuple[tuple[str, float, str], ...]:
        """Date, seconds a call and commit of each epoch's beginning and, last, of this baseline; oldest first."""
        known = [*(self.epochs or (self.start,)), *([] if self._starts_its_epoch else [self.beginning()])]
        return tuple((one.date, one.subject_us * MICRO, one.commit) for one in known)

    @property
    def _starts_its_epoch(self) -> bool:
        return self.start == self.beginning(self.start.reason)

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
        return Stored(
            case=self.case,
            readings=tuple(map(reading, self.subject_us, comparators)),
            first=None if self._starts_its_epoch else reading(self.start.subject_us, self.start.comparator_us),
            note=note,
        )

    def without_comparator(self) -> Baseline:
        """The same as if the subject had been timed alone."""
        epochs = tuple(dataclasses.replace(epoch, comparator_us=None) for epoch in self.epochs)
        return dataclasses.replace(self, comparator="", comparator_us=(), epochs=epochs)

    def line(self) -> str:
        """The baseline as one line of JSON, without a newline; :meth:`parse` reads it.

        Times have five digits, rates four, fractions three.
        """
        facts = {
            "problem": self.case.problem,
            "choice": self.case.choice or None,
            "comparator": self.comparator or None,
            "median_us": _median(self.subject_us),
            "tflops": _short(self.tflops, 4),
            "gbs": _short(self.gbs, 4),
            "roofline": _short(self.roofline, 3),
            "detectable": _short(self.detectable, 3),
            "spread": _short(self.spread, 3),
            "picked": list(self.picked) or None,
            "subject_us": [_short(us) for us in self.subject_us],
            "comparator_us": [_short(us) for us in self.comparator_us] or None,
            "contract": self.contract,
            "software": dict(sorted(self.software.items())),
            "commit": self.commit,
            "date": self.date,
            "epochs": [_epoch_facts(one) for one in self.epochs or (self.beginning(),)],
        }
        # No figure can be NaN here: _short refuses it.
        return json.dumps({key: value for key, value in facts.items() if value is not None}, ensure_ascii=False)

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
        return _Line(path, number, text).baseline(backend)


def _short(value: float | None, digits: int = _DIGITS) -> Any:
    """A figure with as many significant digits as a line shows; ``None`` stays.

    Raises:
        ValueError: for what is no figure.
    """
    if value is None:
        return None
    if not math.isfinite(value):
        raise ValueError(f"{value} is no measurement")
    return float(f"{value:.{digits}g}")


def _median(figures: Sequence[float]) -> float:
    """Median of the figures as a line shows them, so that it is the same before writing and after reading."""
    return float(_short(statistics.median(_short(one) for one in figures)))


def _epoch_facts(epoch: Epoch) -> dict[str, Any]:
    """An epoch as JSON data; what is empty is left out."""
    facts = {
        **dataclasses.asdict(epoch),
        "subject_us": _short(epoch.subject_us),
        "comparator_us": _short(epoch.comparator_us),
        "reason": epoch.reason or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


# -- reading -----------------------------------------------------------------------------------------------------

_REQUIRED: Final = frozenset(
    {"problem", "median_us", "spread", "subject_us", "contract", "software", "commit", "date", "epochs"}
)
_OPTIONAL: Final = frozenset(
    {"choice", "comparator", "tflops", "gbs", "roofline", "detectable", "picked", "comparator_us"}
)
_EPOCH_OPTIONAL: Final = frozenset({"comparator_us", "reason"})
_EPOCH_REQUIRED: Final = frozenset(field.name for field in dataclasses.fields(Epoch)) - _EPOCH_OPTIONAL
MARKER: Final = re.compile(r"(<{7}|\|{7}|>{7})( |\Z)|={7}\Z")
RESTORE: Final = "restore the line from git, or delete it and record its case anew"


class _Line:
    """One line of a file on its way to a :class:`Baseline`."""

    def __init__(self, path: Path | str, number: int, text: str) -> None:
        self.path = path
        self.number = number
        self.text = text

    def fail(self, problem: str, remedy: str = RESTORE) -> NoReturn:
        """Say what is wrong here.

        Raises:
            BaselineError: always.
        """
        raise BaselineError(self.path, self.number, problem, remedy) from None

    def data(self) -> dict[str, Any]:
        """The line as JSON."""
        try:
            # NaN, and an integer that no float holds, are refused where their key is known.
            found = json.loads(self.text, parse_int=_whole, object_pairs_hook=self._object)
        except json.JSONDecodeError as error:
            self.fail(f"torn or broken at column {error.colno}: {error.msg.removesuffix(' starting at')}")
        except RecursionError:
            self.fail("torn or broken: brackets without end")
        if not isinstance(found, dict):
            self.fail(f"{_shown(found)} is no baseline")
        return found

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        for key, count in counts.items():
            if count > 1:
                self.fail(f"key {key!r} stands {count} times", "keep the right one")
        return dict(pairs)

    def keys(
        self, data: Mapping[str, Any], required: frozenset[str], optional: frozenset[str], place: str = ""
    ) -> None:
        """Refuse keys that are unknown, and the absence of required ones."""
        for key in data:
            if key not in required | optional:
                hint = did_you_mean(key, required | optional)
                remedy = "if a newer pytest-gemm wrote it, update this one; otherwise delete the key"
                self.fail(f"unknown key {key!r}{place}{hint}", remedy)
        if missing := sorted(required - data.keys()):
            self.fail(f"{', '.join(missing)} missing{place}")

    def text_of(self, data: Mapping[str, Any], key: str) -> str:
        value = data.get(key, "")
        if not isinstance(value, str):
            self.fail(f"{key} is {_shown(value)}, not a text")
        return value

    def figure(self, value: Any, key: str, *, positive: bool = True) -> float:
        """A finite number that is no less than 0, and more where it has to be positive."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(f"{key} has {_shown(value)}, not a number")
        if not 0 <= value < math.inf or (positive and not value):
            self.fail(f"{key} has {_shown(value)}, which cannot be measured")
        return float(value)

    def optional_figure(self, data: Mapping[str, Any], key: str) -> float | None:
        return self.figure(data[key], key) if key in data else None

    def list_of(self, data: Mapping[str, Any], key: str) -> list[Any]:
        value = data.get(key, [])
        if not isinstance(value, list):
            self.fail(f"{key} is {_shown(value)}, not a list")
        return value

    def figures(self, data: Mapping[str, Any], key: str) -> tuple[float, ...]:
        return tuple(self.figure(value, key) for value in self.list_of(data, key))

    def texts(self, data: Mapping[str, Any], key: str) -> tuple[str, ...]:
        values = self.list_of(data, key)
        if not all(isinstance(value, str) for value in values):
            self.fail(f"{key} is {_shown(values)}, not a list of texts")
        return tuple(values)

    def baseline(self, backend: str) -> Baseline:
        """The baseline, checked for what would make its figures meaningless."""
        data = self.data()
        self.keys(data, _REQUIRED, _OPTIONAL)
        software = data["software"]
        if not isinstance(software, dict) or not all(isinstance(value, str) for value in software.values()):
            self.fail(f"software is {_shown(software)}, not versions by name")
        found = Baseline(
            case=CaseKey(backend, canonical_line(self.text_of(data, "problem")), self.text_of(data, "choice")),
            subject_us=self.figures(data, "subject_us"),
            comparator=self.text_of(data, "comparator"),
            comparator_us=self.figures(data, "comparator_us"),
            spread=self.figure(data["spread"], "spread", positive=False),
            picked=self.texts(data, "picked"),
            tflops=self.optional_figure(data, "tflops"),
            gbs=self.optional_figure(data, "gbs"),
            roofline=self.optional_figure(data, "roofline"),
            detectable=self.optional_figure(data, "detectable"),
            contract=self.text_of(data, "contract"),
            software=software,
            commit=self.text_of(data, "commit"),
            date=self.text_of(data, "date"),
            epochs=tuple(self.epoch(one) for one in self.list_of(data, "epochs")),
        )
        if not found.case.problem:
            self.fail("problem is empty")
        if not found.subject_us:
            self.fail("subject_us is empty")
        if not found.epochs:
            self.fail("epochs is empty")
        if found.comparator_us and len(found.comparator_us) != len(found.subject_us):
            counts = f"{len(found.subject_us)} and {len(found.comparator_us)} sessions"
            self.fail(f"subject_us and comparator_us have {counts}")
        if bool(found.comparator) != bool(found.comparator_us):
            self.fail("comparator and comparator_us do not go without each other")
        median = self.figure(data["median_us"], "median_us")
        if not math.isclose(median, found.median_us, rel_tol=10.0 ** (1 - _DIGITS)):
            remedy = "a figure is not edited by hand: restore the line from git, or record its case anew"
            self.fail(f"median_us is {median:g}, but that of subject_us is {found.median_us:g}", remedy)
        return found

    def epoch(self, data: Any) -> Epoch:
        if not isinstance(data, dict):
            self.fail(f"epochs has {_shown(data)}, not the beginning of an epoch")
        self.keys(data, _EPOCH_REQUIRED, _EPOCH_OPTIONAL, " in epochs")
        return Epoch(
            self.text_of(data, "date"),
            self.text_of(data, "commit"),
            self.text_of(data, "contract"),
            self.figure(data["subject_us"], "subject_us in epochs"),
            self.optional_figure(data, "comparator_us"),
            self.text_of(data, "reason"),
        )


def _whole(digits: str) -> float:
    """An integer; one that is longer than any float is infinite, as Python refuses to read the longest."""
    return int(digits) if len(digits) < 300 else float(digits)


def _shown(value: object) -> str:
    """A value as the reader of the file knows it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclasses.dataclass(frozen=True)
class Kept:
    """A baseline with the line that it stands in, so that a line nobody recorded anew stays as it is, byte by byte."""

    baseline: Baseline
    text: str
    number: int


def parse(text: str, backend: str, path: Path | str) -> dict[CaseKey, Kept]:
    """All baselines of a file's text, in the file's order.

    The order of the lines means nothing, and blank ones are passed over: both come from merging by hand, and the next
    recording puts them right.
    """
    found: dict[CaseKey, Kept] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if MARKER.match(line.rstrip()):
            remedy = f"keep one line of each case, or run {command('resolve', path)}, which keeps the newest"
            raise BaselineError(path, number, "a conflict that git left", remedy)
        if not line.strip():
            continue
        baseline = Baseline.parse(line, backend, path, number)
        if (twin := found.get(baseline.case)) is not None:
            dates = f"(dates {twin.baseline.date or '?'} and {baseline.date or '?'})"
            remedy = f"keep one of them, or run {command('resolve', path)}, which keeps the newest"
            problem = f"{baseline.case} stands on line {twin.number} already {dates}"
            raise BaselineError(path, number, problem, remedy)
        found[baseline.case] = Kept(baseline, line.rstrip("\r"), number)
    if not found:
        raise BaselineError(path, 0, "is empty", "restore it from git, or delete it")
    return found


def read_text(path: Path) -> str:
    """The text of a baseline file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BaselineError(path, line, "is not UTF-8", RESTORE) from None
    except OSError as error:
        raise BaselineError(path, 0, f"cannot be read: {error.strerror}", "make it a readable file") from None


def command(*words: object) -> str:
    """A command line for baselines."""
    return shlex.join(["pytest-gemm", "baseline", *map(str, words)])
