"""The store of baselines: ``baselines/<hardware-key>/<backend>.jsonl``, one line of JSON a case, sorted by case.

The files are made to be read in a pull request and merged by git: keys stand in a fixed order, values have five
digits, and a recording rewrites the lines of its own cases only.  ``docs/how-to/baselines.md`` describes them for
people.

Writing is atomic and serialised.  A file that cannot be read is never written over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason
from pytest_gemm.core.units import seconds_text, signed
from pytest_gemm.speed.baseline.entry import MICRO, Baseline, BaselineError, Kept, parse, read_text
from pytest_gemm.storage import files

# -- what a recording did ------------------------------------------------------------------------------------------

Kind = Literal["new", "updated", "accepted", "restarted", "refused"]


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of a case that was measured.

    Attributes:
        kind: ``new`` without an old line, ``updated`` within the epoch, ``accepted`` for a slow-down with a reason,
            ``restarted`` where the two are not comparable; the last two began an epoch.  ``refused``: the case got
            slower and was not accepted, so that its old line stays.
        new: what was measured.
        old: what stood there; ``None`` for a new case.
    """

    kind: Kind
    new: Baseline
    old: Baseline | None = None

    @property
    def text(self) -> str:
        """What happened to the case; for a refused one with the command that would store it."""
        now, reason = self.new.median_us, self.new.reason
        if self.old is None:
            return seconds_text(now * MICRO)
        times = f"{seconds_text(self.old.median_us * MICRO)} -> {seconds_text(now * MICRO)}"
        if self.kind == "restarted":
            return f"{times}, not comparable: {reason}; epoch {self.new.epoch} begins"
        times += f" ({signed(now / self.old.median_us - 1.0)}%)"
        if self.kind == "refused":
            text = f"got slower, {times}; its old line stays"
            return str(Reason("slower", text, f"to store it: {accept_command([self.new.case])}"))
        return f"{times}, accepted: {reason}" if self.kind == "accepted" else times

    def __str__(self) -> str:
        return f"{self.kind} {self.new.case}: {self.text}"


def accept_command(cases: Iterable[CaseId]) -> str:
    """The command that stores cases of the last recording although they got slower."""
    return shlex.join(["pytest-gemm", "baseline", "accept", *map(str, cases), "--reason", "why it may be slower"])


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
        wait: seconds to wait for another recording; 0: no limit, negative: not at all.
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
        files = (path for path in self.place.glob(f"*{_SUFFIX}") if path.exists())  # a link may point to nothing
        return sorted(path.stem for path in files if _NAME.fullmatch(path.stem))

    def _kept(self, backend: str) -> dict[CaseId, Kept]:
        path = self.path(backend)
        return parse(read_text(path), backend, path) if path.exists() else {}

    def load(self, backend: str) -> dict[CaseId, Baseline]:
        """The baselines of a backend by case; empty where nothing was recorded.

        Raises:
            BaselineError: when the file cannot be read.
        """
        return {case: kept.baseline for case, kept in self._kept(backend).items()}

    def load_all(self, backends: Iterable[str] | None = None) -> dict[CaseId, Baseline]:
        """The same of several backends, by default of all that have baselines here."""
        names = self.backends() if backends is None else backends
        return {case: one for backend in names for case, one in self.load(backend).items()}

    def no_baseline(self, record: str = "pytest perf --gemm-record") -> Reason:
        """Why a case of this hardware key has no baseline, and the command that records one."""
        others = [key for key in hardware_keys(self.folder) if key != self.hardware]
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        elsewhere = f"; there are some for {names}, which do not compare" if others and not self.backends() else ""
        return Reason("no-baseline", f"no baseline is stored on {self.hardware}{elsewhere}", f"record it: {record}")

    # -- writing -----------------------------------------------------------------------------------------------

    def record(
        self, entries: Iterable[Baseline], *, slower: Collection[CaseId], accept: Collection[str] = (), reason: str = ""
    ) -> list[Change]:
        """Store baselines, and return what became of each; the lines of all other cases stay as they are.

        Several processes may record at once: each reads the files again when its turn comes.  A process that is
        killed leaves every file as it was or as it was to become.

        Args:
            entries: what was measured, see :func:`from_sessions`.
            slower: cases that the gate found slower than what is stored; each has to be accepted.
            accept: names of such cases, or shell patterns over them.
            reason: why they may be slower; goes into their lines.  Without it nothing is accepted.

        Raises:
            BaselineError: when a file cannot be read or written.  A file that cannot be read stays as it is, and so
                do the others.
        """
        given = sorted(entries, key=lambda one: one.case)
        reason = " ".join(reason.split())
        changes: list[Change] = []
        if given:
            with self._lock():
                files = {backend: self._kept(backend) for backend in dict.fromkeys(one.backend for one in given)}
                for one in given:
                    kept = files[one.backend].get(one.case)
                    accepted = reason if any(names(pattern, one.case) for pattern in accept) else ""
                    old = kept.baseline if kept else None
                    changes.append(_change(old, one, slower=one.case in slower, reason=accepted))
                stored = [one.new for one in changes if one.kind != "refused"]
                for one in stored:
                    files[one.backend][one.case] = Kept(one, one.line(), 0)
                for backend in sorted({one.backend for one in stored}):
                    self._write(backend, files[backend])
        changes.sort(key=lambda one: (one.kind == "refused", one.kind != "new"))
        return changes

    def check(self) -> None:
        """See that a recording could be stored here now.

        Raises:
            BaselineError: when it could not.
        """
        with self._lock():
            pass
        with contextlib.suppress(OSError):  # they stay where they hold something
            self.place.rmdir()
            self.folder.rmdir()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the hardware key's folder alone, and remove what a killed recording left.

        The lock file is in this user's temporary folder, so that no checkout collects it.
        """
        digest = hashlib.blake2b(os.fsencode(self.place.resolve()), digest_size=8).hexdigest()
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            lock = files.private_folder() / f"baselines-{digest}.lock"
            with files.locked(lock, self.wait):
                for left in self.place.glob(f".*{_SUFFIX}.tmp"):
                    left.unlink()
                yield
        except files.LockTimeoutError as error:
            remedy = "wait until the other recording ends, or end it"
            raise BaselineError(self.place, 0, f"is being written by another recording ({error})", remedy) from None
        except OSError as error:
            raise BaselineError(self.place, 0, f"cannot be locked: {error.strerror}", "make it writable") from None

    def _write(self, backend: str, kept: Mapping[CaseId, Kept]) -> None:
        """Put a file in place whole.  The lock is held.

        A link stays one: what it points to is replaced.
        """
        path = self.path(backend)
        text = "".join(kept[case].text + "\n" for case in sorted(kept))
        try:
            # What the command line could not decode becomes a JSON escape.
            files.replace(path, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise BaselineError(path, 0, f"cannot be written: {error.strerror}", "what stood there stays") from None


def _change(old: Baseline | None, new: Baseline, *, slower: bool, reason: str) -> Change:
    """What becomes of a measured case; ``reason``: why it may have got slower, "" where that is not accepted."""
    if old is None:
        return Change("new", replace(new, epochs=(new.beginning(),)))

    def begun(kind: Kind, why: str) -> Change:
        return Change(kind, replace(new, epochs=(*old.epochs, new.beginning(why))), old)

    if old.contract != new.contract:
        return begun("restarted", f"timed in another way ({old.contract or '-'} -> {new.contract or '-'})")
    if slower:
        return begun("accepted", reason) if reason else Change("refused", new, old)
    if old.comparator != new.comparator:
        return begun("restarted", f"comparator changed ({old.comparator or 'none'} -> {new.comparator or 'none'})")
    return Change("updated", replace(new, epochs=old.epochs), old)


def names(pattern: str, case: CaseId) -> bool:
    """Whether a pattern of the command line, or a name, is of this case."""
    return pattern == str(case) or fnmatch.fnmatchcase(str(case), pattern)
