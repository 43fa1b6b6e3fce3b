"""The store of baselines: ``baselines/<hardware-key>/<backend>.jsonl``, one line of JSON a case, sorted by case.

The files are made to be read in a pull request and merged by git: keys stand in a fixed order, figures have five
digits, and a recording rewrites the lines of its own cases only.  ``docs/baselines.md`` describes them for people.

Writing is atomic and serialised.  A file that cannot be read is never written over.

    python -m pytest_gemm.baseline show [DIR]
    python -m pytest_gemm.baseline diff OLD NEW          folders or git revisions
    python -m pytest_gemm.baseline prune DIR HARDWARE CASE...
    python -m pytest_gemm.baseline resolve FILE          after a merge that left one case twice
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import fnmatch
import itertools
import json
import math
import operator
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from pytest_gemm import roofline
from pytest_gemm.commands import Parser
from pytest_gemm.outcome import FileError, Reason
from pytest_gemm.problem.errors import did_you_mean
from pytest_gemm.problem.problem import Problem, canonical_line
from pytest_gemm.speed import CaseKey, Ceilings, Judgement, Sample, Session, Verdict, by_case, read_session
from pytest_gemm.storage import files

if TYPE_CHECKING:
    from pytest_gemm.gate import Policy, Stored  # late otherwise: the command line needs no scipy

__all__ = [
    "SESSIONS",
    "Baseline",
    "BaselineError",
    "Change",
    "Difference",
    "Entries",
    "Epoch",
    "Recorded",
    "Refusal",
    "Store",
    "differences",
    "from_sessions",
    "got_slower",
    "hardware_keys",
    "incomparable",
    "main",
    "read_tree",
    "recordable",
    "stored",
]

SESSIONS: Final = 12  # processes that a baseline rests on, unless the caller says otherwise
_DIGITS: Final = 5  # of a time: its last digit is a tenth of what the quietest kernels vary by
_MICRO: Final = 1e-6


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
        return tuple((one.date, one.subject_us * _MICRO, one.commit) for one in known)

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
        from pytest_gemm.gate import Reading, Stored

        def reading(subject_us: float, comparator_us: float | None) -> Reading:
            return Reading(subject_us * _MICRO, None if comparator_us is None else comparator_us * _MICRO)

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
_MARKER: Final = re.compile(r"(<{7}|\|{7}|>{7})( |\Z)|={7}\Z")
_RESTORE: Final = "restore the line from git, or delete it and record its case anew"


class _Line:
    """One line of a file on its way to a :class:`Baseline`."""

    def __init__(self, path: Path | str, number: int, text: str) -> None:
        self.path = path
        self.number = number
        self.text = text

    def fail(self, problem: str, remedy: str = _RESTORE) -> NoReturn:
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
class _Kept:
    """A baseline with the line that it stands in, so that a line nobody recorded anew stays as it is, byte by byte."""

    baseline: Baseline
    text: str
    number: int


def _parse(text: str, backend: str, path: Path | str) -> dict[CaseKey, _Kept]:
    """All baselines of a file's text, in the file's order.

    The order of the lines means nothing, and blank ones are passed over: both come from merging by hand, and the next
    recording puts them right.
    """
    found: dict[CaseKey, _Kept] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if _MARKER.match(line.rstrip()):
            remedy = f"keep one line of each case, or run {_command('resolve', path)}, which keeps the newest"
            raise BaselineError(path, number, "a conflict that git left", remedy)
        if not line.strip():
            continue
        baseline = Baseline.parse(line, backend, path, number)
        if (twin := found.get(baseline.case)) is not None:
            dates = f"(dates {twin.baseline.date or '?'} and {baseline.date or '?'})"
            remedy = f"keep one of them, or run {_command('resolve', path)}, which keeps the newest"
            problem = f"{baseline.case} stands on line {twin.number} already {dates}"
            raise BaselineError(path, number, problem, remedy)
        found[baseline.case] = _Kept(baseline, line.rstrip("\r"), number)
    if not found:
        raise BaselineError(path, 0, "is empty", "restore it from git, or delete it")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise BaselineError(path, line, "is not UTF-8", _RESTORE) from None
    except OSError as error:
        raise BaselineError(path, 0, f"cannot be read: {error.strerror}", "make it a readable file") from None


def _command(*words: object) -> str:
    return shlex.join(["python", "-m", "pytest_gemm.baseline", *map(str, words)])


# -- what a recording did ------------------------------------------------------------------------------------------

Kind = Literal["updated", "accepted", "restarted"]


@dataclasses.dataclass(frozen=True)
class Change:
    """A line that a recording replaced.

    Attributes:
        old, new: what stood there, and what stands there now.
        kind: ``updated`` within the epoch, ``accepted`` for a slow-down with a reason, ``restarted`` where the two
            are not comparable; the last two began an epoch.
    """

    old: Baseline
    new: Baseline
    kind: Kind

    @property
    def change(self) -> float:
        """Relative change of the median time, 0.05 for 5% slower."""
        return self.new.median_us / self.old.median_us - 1.0

    def __str__(self) -> str:
        times = f"{self.new.case}: {_time(self.old.median_us)} -> {_time(self.new.median_us)}"
        if self.kind == "restarted":
            return f"{times}, not comparable: {self.new.reason}; epoch {self.new.epoch} begins"
        accepted = f", accepted: {self.new.reason}" if self.kind == "accepted" else ""
        return f"{times} ({_percent(self.change)}){accepted}"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A case that was measured and not stored: its old line stays.

    Attributes:
        old: what stays.
        new: what was measured.
        reason: why, and the options that would store it.
    """

    old: Baseline
    new: Baseline
    reason: Reason


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a recording did, each in the order of the cases.

    Attributes:
        new: cases that had no baseline.
        changed: cases that had one.
        refused: cases whose old line stays, because they got slower and nobody accepted it.
        idle_accepts: patterns of ``--gemm-accept`` that no slower case answers to.
    """

    new: tuple[Baseline, ...] = ()
    changed: tuple[Change, ...] = ()
    refused: tuple[Refusal, ...] = ()
    idle_accepts: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What happened to each case, for the terminal."""
        return [
            *(f"new {one.case}: {_time(one.median_us)}" for one in self.new),
            *(f"{one.kind} {one}" for one in self.changed),
            *(f"refused {one.new.case}: {one.reason}" for one in self.refused),
            *(f"--gemm-accept={shlex.quote(one)} names no case that got slower" for one in self.idle_accepts),
        ]


def _time(us: float) -> str:
    """A time for people, four digits."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.4g} {unit}"
    return f"{us:.4g} us"


def _percent(change: float) -> str:
    return f"{100 * change:+.1f}%"


# -- the store -----------------------------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SUFFIX: Final = ".jsonl"


def hardware_keys(folder: Path) -> list[str]:
    """The hardware keys that a folder of baselines has files for, sorted."""
    return sorted({path.parent.name for path in folder.glob(f"*/*{_SUFFIX}") if not path.name.startswith(".")})


@dataclasses.dataclass(frozen=True)
class Store:
    """The baselines of one hardware key.

    Attributes:
        folder: what holds the folders of all hardware keys, usually ``baselines``.
        hardware: the key.
        wait: seconds after which a recording gives up waiting for another one.
    """

    folder: Path
    hardware: str
    wait: float = 60.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.hardware):
            raise ValueError(f"hardware key {self.hardware!r} cannot name a folder: use letters, digits, '-', '_', '.'")

    @property
    def place(self) -> Path:
        """The folder of this hardware key."""
        return self.folder / self.hardware

    def path(self, backend: str) -> Path:
        """The file of a backend, whether it exists or not.

        Raises:
            ValueError: for a name that is none of a file.
        """
        if not _NAME.fullmatch(backend):
            raise ValueError(f"backend {backend!r} cannot name a file: use letters, digits, '-', '_', '.'")
        return self.place / f"{backend}{_SUFFIX}"

    def backends(self) -> list[str]:
        """Backends that have baselines here, sorted."""
        return sorted(
            path.name.removesuffix(_SUFFIX)
            for path in self.place.glob(f"*{_SUFFIX}")
            if _NAME.fullmatch(path.name.removesuffix(_SUFFIX)) and path.exists()  # a link may point to nothing
        )

    def _kept(self, backend: str) -> dict[CaseKey, _Kept]:
        path = self.path(backend)
        return _parse(_read_text(path), backend, path) if path.exists() else {}

    def load(self, backend: str) -> dict[CaseKey, Baseline]:
        """The baselines of a backend by case; empty where nothing was recorded.

        Raises:
            BaselineError: when the file cannot be read.
        """
        return {case: kept.baseline for case, kept in self._kept(backend).items()}

    def load_all(self, backends: Iterable[str] | None = None) -> dict[CaseKey, Baseline]:
        """The same of several backends, by default of all that have baselines here."""
        names = self.backends() if backends is None else backends
        return {case: one for backend in names for case, one in self.load(backend).items()}

    def nearest(self) -> list[str]:
        """The other hardware keys that have baselines, the most alike first: by the words that they begin with."""
        words = self.hardware.split("-")

        def likeness(key: str) -> int:
            return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, words, key.split("-"))))

        return sorted((key for key in hardware_keys(self.folder) if key != self.hardware), key=likeness, reverse=True)

    def no_baseline(self, record: str = "pytest perf --gemm-record") -> Reason:
        """Why a case of this hardware key has no baseline, and the command that records one."""
        others = self.nearest()
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        elsewhere = f"; there are some for {names}, which do not compare" if others and not self.backends() else ""
        return Reason("no-baseline", f"no baseline is stored on {self.hardware}{elsewhere}", f"record it: {record}")

    # -- writing -----------------------------------------------------------------------------------------------

    def record(
        self,
        entries: Iterable[Baseline],
        *,
        slower: Collection[CaseKey],
        accept: Collection[str] = (),
        reason: str = "",
    ) -> Recorded:
        """Store baselines; the lines of all other cases stay as they are.

        Several processes may record at once: each reads the files anew when its turn comes.  A process that is
        killed leaves every file as it was or as it was to become.

        Args:
            entries: what was measured, see :func:`from_sessions`.
            slower: cases that the gate found slower than what is stored; each has to be accepted.
            accept: names of such cases, or shell patterns over them.
            reason: why they may be slower; goes into their lines.  Without it nothing is accepted.

        Raises:
            BaselineError: when a file cannot be read or written.  A file that cannot be read stays as it is, and so
                do the others.
            ValueError: when a case is given twice.
        """
        given = sorted(entries, key=lambda one: one.case)
        for case, count in Counter(one.case for one in given).items():
            if count > 1:
                raise ValueError(f"{case} is to be recorded {count} times at once: one baseline a case")
        reason = " ".join(reason.split())
        accepting = _Accepting(tuple(accept), reason)
        new: list[Baseline] = []
        changed: list[Change] = []
        refused: list[Refusal] = []
        if given:
            with self._lock():
                files = {backend: self._kept(backend) for backend in dict.fromkeys(one.case.backend for one in given)}
                for one in given:
                    kept = files[one.case.backend]
                    old = kept[one.case].baseline if one.case in kept else None
                    result = accepting.decide(old, one, slower=one.case in slower)
                    if isinstance(result, Refusal):
                        refused.append(result)
                        continue
                    if isinstance(result, Change):
                        changed.append(result)
                        final = result.new
                    else:
                        new.append(result)
                        final = result
                    kept[final.case] = _Kept(final, final.line(), 0)
                touched = {one.case.backend for one in new} | {one.new.case.backend for one in changed}
                for backend in sorted(touched):
                    self._write(backend, files[backend])
        return Recorded(tuple(new), tuple(changed), tuple(refused), accepting.idle)

    def unused(self, wanted: Collection[CaseKey], backends: Iterable[str] | None = None) -> list[CaseKey]:
        """Cases with a baseline that the suite no longer has.

        Args:
            wanted: every case of the suite; a run that was narrowed down cannot tell.
            backends: whose baselines are looked at, by default all that are here.
        """
        return sorted(set(self.load_all(backends)) - set(wanted))

    def prune(self, wanted: Collection[CaseKey], backends: Iterable[str] | None = None) -> list[CaseKey]:
        """Delete the baselines that :meth:`unused` lists, and return their cases.

        Raises:
            BaselineError: when a file cannot be read or written.
        """
        return self._delete(lambda case: case not in wanted, backends)

    def prune_command(self, cases: Iterable[CaseKey]) -> str:
        """The command that deletes the baselines of these cases."""
        return _command("prune", self.folder, self.hardware, *map(str, cases))

    def _delete(self, unwanted: Callable[[CaseKey], bool], backends: Iterable[str] | None) -> list[CaseKey]:
        if not self.place.is_dir():
            return []
        gone: list[CaseKey] = []
        with self._lock():
            files = {backend: self._kept(backend) for backend in (self.backends() if backends is None else backends)}
            for backend, kept in files.items():
                found = [case for case in kept if unwanted(case)]
                if found:
                    gone += found
                    self._write(backend, {case: one for case, one in kept.items() if case not in found})
        return sorted(gone)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the hardware key's folder alone, and clear away what a killed recording left.

        The kernel frees the lock of a process that dies.  The lock file goes with its holder, so that no checkout
        collects it; one that was taken on a name already gone is dropped and taken again.
        """
        path = self.place / ".lock"
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            handle = _acquire(path, self.wait)
        except TimeoutError:
            remedy = "wait until the other recording ends, or end it"
            raise BaselineError(path, 0, f"another process has held it for {self.wait:g} s", remedy) from None
        except OSError as error:
            raise BaselineError(path, 0, f"cannot be locked: {error.strerror}", "make its folder writable") from None
        try:
            for left in self.place.glob(f".*{_SUFFIX}.tmp"):
                left.unlink()
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    def _write(self, backend: str, kept: Mapping[CaseKey, _Kept]) -> None:
        """Put a file in place whole; one without a line is deleted.  The lock is held.

        A link stays one: what it points to is replaced.
        """
        path = Path(os.path.realpath(self.path(backend)))
        text = "".join(kept[case].text + "\n" for case in sorted(kept))
        try:
            if kept:
                # What the command line could not decode becomes a JSON escape.
                files.replace(path, text.encode("utf-8", "backslashreplace"))
            else:
                path.unlink()
            _sync_folder(path.parent)
        except OSError as error:
            raise BaselineError(path, 0, f"cannot be written: {error.strerror}", "what stood there stays") from None


def _acquire(path: Path, wait: float) -> int:
    """A descriptor that holds an exclusive lock on the file of this name.

    Raises:
        TimeoutError: when another process holds it for longer than ``wait`` seconds.
    """
    deadline = time.monotonic() + wait
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass  # held by another, or its holder has just deleted the name
        except OSError:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(0.01)


def _sync_folder(folder: Path) -> None:
    """Make a change of names in a folder last."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Accepting:
    """The rules of recording: what replaces a line, and what has to be accepted first."""

    def __init__(self, patterns: Sequence[str], reason: str) -> None:
        self.patterns = patterns
        self.reason = reason
        self.used: set[str] = set()

    @property
    def idle(self) -> tuple[str, ...]:
        """Patterns that no slower case answered to."""
        return tuple(pattern for pattern in self.patterns if pattern not in self.used)

    def decide(self, old: Baseline | None, new: Baseline, *, slower: bool) -> Baseline | Change | Refusal:
        """What becomes of a measured case."""
        if old is None:
            return dataclasses.replace(new, epochs=(new.beginning(),))
        if old.contract != new.contract:
            return _restarted(old, new, f"timed in another way ({old.contract or '-'} -> {new.contract or '-'})")
        if slower:
            name = str(new.case)
            answers = {p for p in self.patterns if p == name or fnmatch.fnmatchcase(name, p)}
            self.used |= answers
            if not answers or not self.reason:
                return _refusal(old, new, named=bool(answers))
            return Change(old, _begun(old, new, self.reason), "accepted")
        if old.comparator != new.comparator:
            reason = f"comparator changed ({old.comparator or 'none'} -> {new.comparator or 'none'})"
            return _restarted(old, new, reason)
        return Change(old, dataclasses.replace(new, epochs=old.epochs), "updated")


def _begun(old: Baseline, new: Baseline, reason: str) -> Baseline:
    """``new`` as the beginning of an epoch after those of ``old``."""
    return dataclasses.replace(new, epochs=(*old.epochs, new.beginning(reason)))


def _restarted(old: Baseline, new: Baseline, reason: str) -> Change:
    return Change(old, _begun(old, new, reason), "restarted")


def _refusal(old: Baseline, new: Baseline, *, named: bool) -> Refusal:
    change = f"{_time(old.median_us)} -> {_time(new.median_us)} ({_percent(new.median_us / old.median_us - 1.0)})"
    options = "--gemm-reason='why it may be slower'"
    if not named:
        options = f"--gemm-accept={shlex.quote(str(new.case))} {options}"
    return Refusal(
        old, new, Reason("slower", f"got slower, {change}; its old line stays", f"to store it, add {options}")
    )


# -- for the gate --------------------------------------------------------------------------------------------------


def stored(baselines: Mapping[CaseKey, Baseline], now: Session) -> dict[CaseKey, Stored]:
    """What the gate compares a run with.

    A baseline that was timed in another way is left out, see :func:`incomparable`.  One of other software is compared,
    and its note says so.  Of one that was recorded beside another comparator only the subject's time is left.

    Args:
        baselines: of the run's hardware key.
        now: a session of the run.
    """
    comparators = {sample.case: sample.comparator_name for sample in now.samples if sample.is_timed}

    def seen(one: Baseline) -> Stored:
        note = _software_note(one.software, now.software)
        if comparators.get(one.case, one.comparator) == one.comparator:
            return one.stored(note)
        beside = f"recorded beside {one.comparator or 'no comparator'}"
        return one.without_comparator().stored("; ".join(filter(None, [note, beside])))

    return {case: seen(one) for case, one in baselines.items() if one.contract == now.contract}


def incomparable(baselines: Mapping[CaseKey, Baseline], now: Session) -> list[CaseKey]:
    """Cases whose baselines were timed in another way than the session; recording them anew replaces these."""
    return sorted(case for case, one in baselines.items() if one.contract != now.contract)


def got_slower(
    baselines: Mapping[CaseKey, Baseline], sessions: Sequence[Session], policy: Policy
) -> dict[CaseKey, Judgement]:
    """Cases that the sessions of a recording find slower than what is stored, by the rules of the gate.

    The first sessions screen and all others confirm, so that no session is used twice.  Where too few of them, or of
    those that are stored, are usable to judge a case, it counts as slower when its time seems to be beyond the
    tolerance: recording less must not be a way around ``--gemm-accept``.

    Args:
        baselines: what is stored on the sessions' hardware key.
        sessions: of the recording.
        policy: of the gate.
    """
    from pytest_gemm import gate

    if not sessions:
        return {}
    known = stored(baselines, sessions[0])
    screened = gate.screen(known, gate.readings(sessions[: policy.screen_sessions]), policy)
    judgements = gate.confirm(known, gate.readings(sessions[policy.screen_sessions :]), screened, policy)

    def seems_slower(judgement: Judgement) -> bool:
        figures = [one.figure for one in timed.get(judgement.case, ()) if not one.disturbed]
        limit = baselines[judgement.case].median_us * _MICRO * (1.0 + policy.delta)
        return bool(figures) and statistics.median(figures) > limit

    timed = by_case(sessions)
    return {
        case: one
        for case, one in judgements.items()
        if one.verdict is Verdict.SLOWER
        or (one.reason.code in {"to-confirm", "too-few", "disturbed", "thin-baseline"} and seems_slower(one))
    }


def _software_note(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between the software of the baseline and that of the run; "" for nothing."""
    names = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
    if not names:
        return ""
    return "recorded with " + ", ".join(
        f"{name} {then.get(name, 'absent')} (now {now.get(name, 'absent')})" for name in names
    )


# -- from sessions -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entries:
    """Baselines made of sessions.

    Attributes:
        baselines: sorted by case.
        left_out: cases that cannot be recorded, with the reason.
    """

    baselines: tuple[Baseline, ...] = ()
    left_out: Mapping[CaseKey, Reason] = dataclasses.field(default_factory=dict)


def recordable(
    sessions: Sequence[Session], *, k: int = SESSIONS, disturbed: float = 0.2, force: bool = False
) -> Reason | None:
    """Why these sessions make no baseline; ``None`` when they do.

    Args:
        sessions: of one arm.
        k: how many are needed.
        disturbed: tolerated share of timed samples that are disturbed (other load, throttling).  A busy machine is
            busy for the samples as well that happened to look quiet.
        force: record all the same from a changed tree, a busy machine or few sessions.  Sessions that do not belong
            together never make a baseline.
    """
    for name, found in (
        ("hardware key", {s.hardware for s in sessions}),
        ("timing contract", {s.contract for s in sessions}),
        ("commit", {s.commit for s in sessions}),
        ("software", {", ".join(f"{n} {v}" for n, v in sorted(s.software.items())) for s in sessions}),
    ):
        if len(found) > 1:
            text = f"the sessions differ in their {name}: {' / '.join(sorted(found))}"
            return Reason("mixed-sessions", text, "measure all of them anew")
    if force and sessions:
        return None
    if len(sessions) < k:
        return Reason("too-few-sessions", f"{len(sessions)} of {k} sessions were measured", "measure the others too")
    if sessions[0].commit.endswith("+dirty"):
        text = f"the tree has changes that no commit has ({sessions[0].commit}), so nobody could repeat the figures"
        return Reason("dirty-tree", text, "commit them first")
    timed = [sample for session in sessions for sample in session.samples if sample.is_timed]
    spoilt = [sample for sample in timed if sample.disturbed]
    if len(spoilt) > disturbed * len(timed):
        usual, _ = Counter(sample.disturbed for sample in spoilt).most_common(1)[0]
        text = f"{len(spoilt)} of {len(timed)} samples were disturbed, for instance: {usual}"
        return Reason("disturbed", text, "measure on a quiet machine")
    return None


def record_sessions(
    store: Store,
    sessions: Sequence[Session],
    policy: Policy,
    *,
    k: int = SESSIONS,
    force: bool = False,
    accept: Collection[str] = (),
    reason: str = "",
) -> tuple[Recorded, dict[CaseKey, str]]:
    """Store what sessions measured.

    Args:
        store: of their hardware.
        sessions: of one arm.
        policy: of the gate, which says what is detectable and what got slower.
        k: how many sessions are needed.
        force: see :func:`recordable`.
        accept: patterns of cases that may have got slower.
        reason: why they may.

    Returns:
        What was done, and a sentence for each timed case that was not recorded.
    """
    timed = by_case(sessions)
    objection = recordable(sessions, k=k, force=force)
    if objection is not None:
        forced = "" if objection.code == "mixed-sessions" else " (--gemm-force records all the same)"
        return Recorded(), dict.fromkeys(timed, f"not recorded: {objection}{forced}")
    least = min(len(sessions), k)
    # One disturbed session of a dozen is left out, and the case is recorded all the same.
    entries = from_sessions(sessions, k=max(1, least - least // 4), policy=policy)
    slower = got_slower(store.load_all({key.backend for key in timed}), sessions, policy)
    done = store.record(entries.baselines, slower=slower.keys(), accept=accept, reason=reason)
    refused = {key: f"not recorded: {key}: {why}" for key, why in entries.left_out.items()}
    return done, refused | {one.new.case: f"not recorded: {one.new.case}: {one.reason}" for one in done.refused}


def from_sessions(
    sessions: Sequence[Session],
    *,
    k: int = SESSIONS,
    policy: Policy | None = None,
) -> Entries:
    """Baselines of the cases of several sessions, one figure a session.

    Args:
        sessions: of one arm, all of one hardware key, contract and commit (:func:`recordable` checks that).
        k: undisturbed sessions that a case needs; one with fewer is left out.  More are all used.
        policy: of the gate, for the smallest detectable slow-down.
    """
    samples: dict[CaseKey, list[Sample]] = {}
    for session in sessions:
        last = {sample.case: sample for sample in session.samples}  # one figure a session, whatever it repeated
        for case, sample in last.items():
            samples.setdefault(case, []).append(sample)
    baselines: list[Baseline] = []
    left_out: dict[CaseKey, Reason] = {}
    for case in sorted(samples):
        good = [sample for sample in samples[case] if sample.is_timed and not sample.disturbed]
        names = {sample.comparator_name if sample.comparator else "" for sample in good}
        if len(good) < k:
            left_out[case] = _too_few(samples[case], len(good), k)
        elif len(names) > 1:
            text = f"its comparator differs between sessions: {' / '.join(name or 'none' for name in sorted(names))}"
            left_out[case] = Reason("mixed-comparators", text)
        else:
            baselines.append(_entry(good, sessions[0], Ceilings.of(sessions)))
    if policy is not None and baselines:
        from pytest_gemm.gate import detectable

        seen = detectable({one.case: one.stored() for one in baselines}, policy)
        baselines = [dataclasses.replace(one, detectable=seen.get(one.case)) for one in baselines]
    return Entries(tuple(baselines), left_out)


def _too_few(samples: Sequence[Sample], good: int, k: int) -> Reason:
    """Why a case has fewer figures than it needs: the most frequent cause in full."""
    causes = Counter(
        f"disturbed: {sample.disturbed}" if sample.is_timed else f"{sample.status}: {sample.reason or 'no reason'}"
        for sample in samples
        if sample.disturbed or not sample.is_timed
    )
    cause = "; {1} of them {0}".format(*causes.most_common(1)[0]) if causes else ""
    return Reason("too-few-figures", f"{good} of {len(samples)} sessions gave a figure, {k} are needed{cause}")


def _entry(samples: Sequence[Sample], session: Session, ceilings: Ceilings) -> Baseline:
    """The baseline of one case."""
    problem = Problem.parse(samples[0].case.problem)
    work = roofline.work(problem)
    comparators = [sample.comparator_figure for sample in samples]
    subject_us = tuple(sample.figure / _MICRO for sample in samples)
    seconds = statistics.median(subject_us) * _MICRO
    return Baseline(
        case=samples[0].case,
        subject_us=subject_us,
        comparator=samples[0].comparator_name if samples[0].comparator else "",
        comparator_us=tuple(one / _MICRO for one in comparators if one is not None),
        spread=statistics.median(sample.spread for sample in samples),
        picked=tuple(sorted({name for sample in samples for name in sample.picked})),
        tflops=work.flops / seconds / 1e12,
        gbs=work.bytes / seconds / 1e9,
        roofline=roofline.share(seconds, work, roofline.dtype_name(problem), ceilings),
        contract=session.contract,
        software=session.software,
        commit=session.commit,
        date=session.date,
    )


# -- comparing two states of the store -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """A case whose baseline differs between two states of the store.

    Attributes:
        hardware: the hardware key.
        case: which.
        old: ``None`` for an added case.
        new: ``None`` for a removed one.
    """

    hardware: str
    case: CaseKey
    old: Baseline | None
    new: Baseline | None

    @property
    def change(self) -> float | None:
        """Relative change of the median time; ``None`` where there are not two comparable figures."""
        if self.old is None or self.new is None or self.old.contract != self.new.contract:
            return None
        return self.new.median_us / self.old.median_us - 1.0

    @property
    def note(self) -> str:
        """What else is to be said: added, removed, not comparable, another choice, why a slow-down was accepted."""
        if self.new is None:
            return "removed"
        if self.old is None:
            return "added"
        notes = []
        if self.new.epoch > self.old.epoch and self.new.reason:
            notes.append(self.new.reason)
        elif self.old.contract != self.new.contract:
            notes.append(f"timed in another way ({self.old.contract or '-'} -> {self.new.contract or '-'})")
        if self.old.picked != self.new.picked:
            notes.append(f"choice {' '.join(self.old.picked) or '-'} -> {' '.join(self.new.picked) or '-'}")
        return "; ".join(notes)


Tree = Mapping[str, Mapping[CaseKey, Baseline]]  # by hardware key


def read_tree(source: str, repo: Path = Path(), inside: str = "baselines") -> Tree:
    """All baselines of a folder or of a git revision, by hardware key.

    Args:
        source: a folder of hardware keys, or else a revision.
        repo: a folder of the repository that the revision is of.
        inside: where the store lies in the revision, from the repository's root.

    Raises:
        BaselineError: when it is neither, or holds a file that cannot be read.
    """
    folder = Path(source)
    if folder.is_dir():
        if any(folder.glob(f"*{_SUFFIX}")):
            raise BaselineError(folder, 0, "is the folder of one hardware key", f"give its parent, {folder.parent}")
        return {key: Store(folder, key).load_all() for key in hardware_keys(folder)}
    commit = _git(repo, source, "rev-parse", "--verify", "--quiet", f"{source}^{{commit}}").strip()
    listing = _git(repo, source, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, "--", f"{inside}/")
    found: dict[str, dict[CaseKey, Baseline]] = {}
    for name in filter(None, listing.split("\0")):
        hardware, _, file = name.removeprefix(f"{inside}/").partition("/")
        backend = file.removesuffix(_SUFFIX)
        if backend == file or not _NAME.fullmatch(backend):
            continue
        text = _git(repo, source, "show", f"{commit}:{name}")
        kept = _parse(text, backend, f"{source}:{name}")
        found.setdefault(hardware, {}).update((case, one.baseline) for case, one in kept.items())
    return found


def _git(repo: Path, source: str, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, check=True)
        return done.stdout.decode("utf-8")
    except FileNotFoundError:
        raise BaselineError(source, 0, "is no folder, and there is no git", "install git, or give a folder") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        problem = f"is neither a folder nor a revision of {repo.resolve()}" + (f" ({said})" if said else "")
        raise BaselineError(source, 0, problem, "give one of them") from None
    except UnicodeDecodeError:
        raise BaselineError(source, 0, f"git {' '.join(words)} gave no UTF-8", _RESTORE) from None


def differences(old: Tree, new: Tree) -> list[Difference]:
    """Cases that differ, the worst slow-down first; then the incomparable, the added, the removed."""
    found = [
        Difference(hardware, case, old.get(hardware, {}).get(case), new.get(hardware, {}).get(case))
        for hardware in sorted({*old, *new})
        for case in sorted({*old.get(hardware, {}), *new.get(hardware, {})})
    ]

    def order(one: Difference) -> tuple[int, float]:
        if one.old is None or one.new is None:
            return (2 if one.old is None else 3), 0.0
        return (1, 0.0) if one.change is None else (0, -one.change)

    return sorted((one for one in found if one.old != one.new), key=order)


def _difference_rows(found: Sequence[Difference]) -> list[list[str]]:
    def time_of(one: Baseline | None) -> str:
        return "-" if one is None else _time(one.median_us)

    def speedup(one: Baseline | None) -> str:
        return "-" if one is None or one.speedup is None else f"{one.speedup:.2f}x"

    rows = [["case", "old", "new", "change", "speed-up", "note"]]
    several = len({one.hardware for one in found}) > 1
    for one in found:
        change = "-" if one.change is None else _percent(one.change)
        case = f"{one.hardware} {one.case}" if several else str(one.case)
        both = f"{speedup(one.old)} -> {speedup(one.new)}"
        rows.append([case, time_of(one.old), time_of(one.new), change, both if both != "- -> -" else "-", one.note])
    return rows


def _text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """First and last column left-aligned, figures right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i in (0, last) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ["---", *["---:"] * (len(rows[0]) - 2), "---"]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]


# -- the command line ----------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> list[str]:
    keys = hardware_keys(given.dir)
    if not keys:
        raise BaselineError(given.dir, 0, "holds no baselines", "record some: pytest perf --gemm-record")
    rows = [["hardware key", "backend", "cases", "sessions", "recorded", "torch"]]
    for key in keys:
        store = Store(given.dir, key)
        for backend in store.backends():
            found = store.load(backend).values()
            counts = sorted({len(one.subject_us) for one in found})
            days = sorted({one.date[:10] for one in found})
            versions = sorted({one.software.get("torch", "?") for one in found})
            rows.append([key, backend, str(len(found)), _range(counts), _range(days), ", ".join(versions)])
    return _text_table(rows)


def _range(values: Sequence[object]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"


def _diff(given: argparse.Namespace) -> list[str]:
    old, new = (read_tree(source, given.repo, given.inside.strip("/")) for source in (given.old, given.new))
    if not any(old.values()) and not any(new.values()):
        remedy = "give folders of hardware keys, or --inside for where the revisions have them"
        raise BaselineError(f"{given.old} and {given.new}", 0, "hold no baselines", remedy)
    found = differences(old, new)
    total = len({(key, case) for tree in (old, new) for key, cases in tree.items() for case in cases})
    if not found:
        return [f"no difference in {total} case(s)"]
    rows = _difference_rows(found)
    table = [*_markdown_table(rows), ""] if given.markdown else [*_text_table(rows), ""]
    return [*table, f"{len(found)} of {total} case(s) differ"]


def _prune(given: argparse.Namespace) -> list[str]:
    store = Store(given.dir, given.hardware)
    if not store.place.is_dir():
        raise BaselineError(store.place, 0, "does not exist", f"known: {', '.join(hardware_keys(given.dir)) or 'none'}")
    names = [str(case) for case in store.load_all()]
    for pattern in given.cases:
        if pattern not in names and not fnmatch.filter(names, pattern):
            hint = did_you_mean(pattern, names)
            raise BaselineError(store.place, 0, f"no case {pattern!r}{hint}", "nothing was deleted")
    gone = store._delete(
        lambda case: any(str(case) == one or fnmatch.fnmatchcase(str(case), one) for one in given.cases), None
    )
    return [f"deleted {case}" for case in gone]


def _resolve(given: argparse.Namespace) -> list[str]:
    """Keep the newest line of each case, and drop git's markers."""
    path: Path = given.file
    backend = path.name.removesuffix(_SUFFIX)
    if path.suffix != _SUFFIX or not path.is_file():
        raise BaselineError(path, 0, "is no file of baselines", f"name one, DIR/HARDWARE/BACKEND{_SUFFIX}")
    place = path.absolute().parent
    store = Store(place.parent, place.name)
    newest: dict[CaseKey, _Kept] = {}
    dropped = 0
    with store._lock():
        for number, line in enumerate(_read_text(path).split("\n"), 1):
            if not line.strip() or _MARKER.match(line.rstrip()):
                continue
            one = _Kept(Baseline.parse(line, backend, path, number), line.rstrip("\r"), number)
            twin = newest.get(one.baseline.case)
            dropped += twin is not None
            if twin is None or _instant(twin.baseline.date) <= _instant(one.baseline.date):
                newest[one.baseline.case] = one
        store._write(backend, newest)
    return [f"{path}: {len(newest)} case(s), {dropped} older line(s) dropped"]


def _instant(date: str) -> datetime.datetime:
    """A date of ISO 8601 for comparing; without a time zone it is UTC, and what is no date is older than all."""
    try:
        found = datetime.datetime.fromisoformat(date.replace("Z", "+00:00"))  # Python 3.10 does not know "Z"
    except ValueError:
        found = datetime.datetime.min
    return found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)


def _record(given: argparse.Namespace) -> list[str]:
    """Record from sessions that a run has kept: one that was cut short, or that ran where the store is not."""
    if given.sessions < 1:
        raise ValueError(f"--sessions={given.sessions}: give 1 or more")
    if bool(given.accept) != bool(given.reason):
        raise ValueError("--accept names cases, and --reason says why they may be slower: give both, or neither")
    files = sorted(given.samples.glob("*.jsonl"))
    if not files:
        remedy = "name the folder that a run was given as --gemm-samples"
        raise BaselineError(given.samples, 0, "holds no sessions (*.jsonl)", remedy)
    read = {file: read_session(file) for file in files}
    lines = [f"{file.name} did not come to its end and is left out" for file, one in read.items() if not one.complete]
    whole = [one for one in read.values() if one.complete]
    timed = [sample for one in whole for sample in one.samples if sample.is_timed]
    if not timed:
        raise BaselineError(given.samples, 0, "holds no session that timed anything", "see why the run ended")
    from pytest_gemm.gate import Policy

    of_hardware: dict[str, list[Session]] = {}  # a run may time on the CPU and on a GPU
    for one in whole:
        of_hardware.setdefault(one.hardware, []).append(one)
    for hardware, some in of_hardware.items():
        store = Store(given.baselines, hardware)
        device = next((sample.device for one in some for sample in one.samples), timed[0].device)
        done, refused = record_sessions(
            store,
            some,
            Policy.for_device(device),
            k=given.sessions,
            force=given.force,
            accept=given.accept,
            reason=given.reason,
        )
        # What a run calls --gemm-force is --force here.
        told = [line.replace("--gemm-", "--") for line in (*done.lines(), *dict.fromkeys(refused.values()))]
        stored_any = bool(done.new or done.changed)
        lines += [f"baselines in {store.place}:" if stored_any else f"nothing was recorded in {store.place}:", *told]
        given.status |= bool(refused) or not stored_any
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 when a case was not recorded, 0 otherwise."""
    parser = Parser(prog="python -m pytest_gemm.baseline", description="stored baselines of speed")
    parser.set_defaults(status=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="hardware keys, backends, cases, dates")
    show.add_argument("dir", nargs="?", type=Path, default=Path("baselines"), metavar="DIR")
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", help="what changed between two states of the store")
    for name in ("old", "new"):
        diff.add_argument(name, metavar=name.upper(), help="a folder of baselines, or else a git revision")
    diff.add_argument("--repo", type=Path, default=Path(), metavar="DIR", help="of the revisions (default: here)")
    diff.add_argument("--inside", default="baselines", metavar="PATH", help="where they have them, from their root")
    diff.add_argument("--markdown", action="store_true", help="a table for a pull request")
    diff.set_defaults(run=_diff)

    prune = commands.add_parser("prune", help="delete the baselines of cases")
    prune.add_argument("dir", type=Path, metavar="DIR")
    prune.add_argument("hardware", metavar="HARDWARE")
    prune.add_argument("cases", nargs="+", metavar="CASE", help="name of a case, or a shell pattern over names")
    prune.set_defaults(run=_prune)

    resolve = commands.add_parser("resolve", help="after a merge: keep the newest line of each case")
    resolve.add_argument("file", type=Path, metavar="FILE")
    resolve.set_defaults(run=_resolve)

    record = commands.add_parser("record", help="record from the sessions that a run kept with --gemm-samples")
    record.add_argument("samples", type=Path, metavar="SAMPLES")
    record.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR", help="default: baselines")
    record.add_argument("--sessions", type=int, default=SESSIONS, metavar="K", help=f"needed (default: {SESSIONS})")
    record.add_argument("--force", action="store_true", help="as --gemm-force")
    record.add_argument("--accept", action="append", default=[], metavar="CASE", help="as --gemm-accept")
    record.add_argument("--reason", default="", metavar="TEXT", help="as --gemm-reason")
    record.set_defaults(run=_record)

    given = parser.parse_args(arguments)
    try:
        lines = given.run(given)
    except (BaselineError, ValueError) as error:
        parser.error(str(error))
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return int(given.status)


if __name__ == "__main__":
    raise SystemExit(main())
