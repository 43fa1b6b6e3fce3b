"""What runs keep for the next ones, and its limits: ``pytest-gemm cache prune``.

Compiled kernels are kept in ``$XDG_CACHE_HOME/pytest-gemm`` or ``~/.cache/pytest-gemm``: those of Inductor in a folder
for each release of torch, CUTLASS objects in ``cutlass-kernels``.  Once a day at most a run begins by removing what has
not been used for long, then the least recently used beyond a size.  A process that uses the folder shares its lock
until it ends; pruning needs the lock alone, so it never takes what a running process uses.

An *entry* is what belongs together: the files of one folder whose names have the same beginning up to the first dot, or
everything in a folder that is named by a hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.text import show
from pytest_gemm.storage import files

_DAY: Final = 86400.0
_GB: Final = 10**9
_LOCK: Final = ".lock"
_PRUNED: Final = ".pruned"
# A run that prunes does so for this long at most, in seconds.
_PATIENCE: Final = 5.0
_HASH: Final = re.compile(r"[A-Za-z0-9_-]{24,}")


def home() -> Path:
    """The folder: ``$XDG_CACHE_HOME/pytest-gemm`` or ``~/.cache/pytest-gemm``."""
    # Not by platformdirs: it is a pytest plugin too, which every start of pytest would load.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-gemm"


def last_recording() -> Path:
    """The samples of the last recording, for ``pytest-gemm baseline accept``: a folder, or a link to where they are."""
    return home() / "last-recording"


def begin_recording(samples: Path) -> None:
    """Let :func:`last_recording` be this folder, whatever it was before."""
    place = last_recording()
    if place.is_symlink():
        place.unlink()
    if samples != place:
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(samples.absolute())


def keep_terms(**terms: object) -> None:
    """Keep on which terms the last recording records: ``pytest-gemm baseline accept`` does the same."""
    files.replace(home() / "last-recording.json", json.dumps(terms).encode())


def kept_terms() -> dict[str, Any]:
    """What :func:`keep_terms` was given; empty before any recording."""
    try:
        terms: dict[str, Any] = json.loads((home() / "last-recording.json").read_bytes())
    except FileNotFoundError:
        return {}
    return terms


_shared: Final[dict[Path, int]] = {}


def use() -> Path:
    """The folder, from which nothing is pruned until this process has ended."""
    folder = home()
    if folder not in _shared and folder.is_dir():
        with contextlib.suppress(OSError):  # a folder that cannot be written cannot be pruned either
            _shared[folder] = files.shared(folder / _LOCK)
    return folder


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is kept.

    Attributes:
        days: entries that have not been used for so long go; 0: no limit.
        gigabytes: beyond this the least recently used go; 0: no limit.
    """

    days: float = 30.0
    gigabytes: float = 20.0

    @classmethod
    def from_environment(cls) -> Limits:
        """Those of ``PYTEST_GEMM_CACHE_DAYS`` and ``PYTEST_GEMM_CACHE_GB``.

        Raises:
            ValueError: when one is no number.
        """
        found = {}
        for field, name in (("days", "PYTEST_GEMM_CACHE_DAYS"), ("gigabytes", "PYTEST_GEMM_CACHE_GB")):
            if text := os.environ.get(name, ""):
                if not re.fullmatch(r"\d{1,12}(\.\d{1,12})?", text):
                    raise ValueError(f"{name}={text}: give a number, 0 for no limit")
                found[field] = float(text)
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Files that belong together.

    Attributes:
        paths: files, links, or one folder.
        size: bytes on the disk.
        used: when it was last written or read, as far as the file system notes that; seconds since the epoch.
    """

    paths: tuple[Path, ...]
    size: int
    used: float


def entries(folder: Path) -> Iterator[Entry]:
    """Everything that is kept; what vanishes meanwhile is left out."""
    for kind in sorted(one.path for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)):
        for place, folders, names in os.walk(kind):
            links = [name for name in folders if os.path.islink(os.path.join(place, name))]
            hashed = [name for name in folders if _HASH.fullmatch(name) and name not in links]
            folders[:] = [name for name in folders if name not in hashed]
            groups = {name: [name] for name in hashed}
            for name in (*names, *links):
                groups.setdefault(name.partition(".")[0], []).append(name)
            for group in groups.values():
                paths = tuple(Path(place, name) for name in group)
                found = [stat for path in paths for stat in _stats(path)]
                used = max((max(stat.st_mtime, stat.st_atime) for stat in found), default=0.0)
                yield Entry(paths, sum(stat.st_blocks for stat in found) * 512, used)


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of a file, or of every file below a folder."""
    below = (Path(place, name) for place, _, names in os.walk(path) for name in names)
    for one in below if path.is_dir() and not path.is_symlink() else (path,):
        with contextlib.suppress(OSError):
            yield one.lstat()


@dataclasses.dataclass
class Pruned:
    """What was removed.

    Attributes:
        count: of the entries that were removed.
        size: of these, in bytes.
        left: bytes that stay.
    """

    count: int = 0
    size: int = 0
    left: int = 0


def prune(folder: Path, limits: Limits, *, seconds: float = float("inf"), spared: float = 0.0) -> Pruned:
    """Remove what is beyond the limits; the caller holds the lock.

    Args:
        folder: as :func:`home`.
        limits: what may stay.
        seconds: stop after this time.
        spared: entries used in the last so many seconds stay, whatever their size.
    """
    now, until = time.time(), time.monotonic() + seconds
    oldest = now - limits.days * _DAY if limits.days else -math.inf
    most = limits.gigabytes * _GB if limits.gigabytes else math.inf
    done, kept = Pruned(), []
    for entry in entries(folder):
        if entry.used < oldest:
            _remove(folder, entry, done)
        else:
            kept.append(entry)
            done.left += entry.size
        if time.monotonic() > until:
            return done
    for entry in sorted(kept, key=lambda one: one.used):
        if done.left <= most or entry.used > now - spared:
            break
        done.left -= entry.size
        _remove(folder, entry, done)
        if time.monotonic() > until:
            break
    return done


def _remove(folder: Path, entry: Entry, done: Pruned) -> None:
    for path in entry.paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    done.count += 1
    done.size += entry.size
    with contextlib.suppress(OSError):  # a folder that is not empty stays
        for parent in entry.paths[0].parents:
            if parent == folder:
                break
            parent.rmdir()


def tidy() -> None:
    """Prune when that has not been done for a day, and no process uses the folder; at the start of a run.

    Raises:
        ValueError: when a limit in the environment is no number.
    """
    limits, folder = Limits.from_environment(), home()
    with contextlib.suppress(OSError):  # no folder, or a process that uses it
        stamp = folder / _PRUNED
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _DAY:
            return
        with files.locked(folder / _LOCK, -1.0):
            stamp.touch()
            prune(folder, limits, seconds=_PATIENCE, spared=_DAY)


# -- the command ---------------------------------------------------------------------------------------------------


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < _GB else f"{count / _GB:.2f} GB"


def prune_now() -> int:
    """Remove what is beyond the limits, and say so; returns 1 while a process uses the folder.

    Raises:
        ValueError: for a limit that is no number.
    """
    folder, limits = home(), Limits.from_environment()
    if not folder.is_dir():
        show(f"{folder}: nothing is kept\n")
        return 0
    try:
        with files.locked(folder / _LOCK, -1.0):
            done = prune(folder, limits)
    except files.LockTimeoutError:
        show(f"{folder}: a running process uses it, so nothing was removed; try again when it has ended\n")
        return 1
    show(f"{folder}: removed {done.count} entries, {_size(done.size)}; {_size(done.left)} are left\n")
    return 0
