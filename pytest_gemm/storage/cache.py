"""What runs keep for the next ones, and for how long.

Compiled kernels are kept in ``$XDG_CACHE_HOME/pytest-gemm`` or ``~/.cache/pytest-gemm``: those of Inductor in a folder
for each release of torch, CUTLASS objects in ``cutlass-kernels``.  Once a day at most a run begins by removing what has
not been used for 30 days.  A process that uses the folder shares its lock until it ends; removing needs the lock alone,
so it never takes what a running process uses.

An *entry* is what belongs together: the files of one folder whose names have the same beginning up to the first dot, or
everything in a folder that is named by a hash.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from pytest_gemm.storage import files
from pytest_gemm.storage.errors import FileError

_DAY: Final = 86400.0
# Entries that have not been used for longer are removed.
_DAYS: Final = 30
_LOCK: Final = ".lock"
_TIDIED: Final = ".tidied"
_HASH: Final = re.compile(r"[A-Za-z0-9_-]{24,}")


def home() -> Path:
    """The folder: ``$XDG_CACHE_HOME/pytest-gemm`` or ``~/.cache/pytest-gemm``."""
    # Not by platformdirs: it is a pytest plugin too, which every start of pytest would load.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-gemm"


def own_recording() -> Path:
    """The folder of the samples of a recording that names none."""
    return home() / "last-recording"


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The last recording: ``pytest-gemm baseline accept`` records from its samples, on its terms.

    Attributes:
        samples: folder of its sessions.
        baselines: the store.
        sessions: how many a case needs.
        force: see ``record.recordable``.
    """

    samples: Path
    baselines: Path
    sessions: Annotated[int, msgspec.Meta(ge=1)]
    force: bool


def keep_recording(recording: Recording) -> None:
    """Let it be the last one; then the samples of an earlier one that named no folder are removed."""
    samples, baselines = recording.samples.absolute(), recording.baselines.absolute()
    recording = msgspec.structs.replace(recording, samples=samples, baselines=baselines)
    files.replace(home() / "last-recording.json", msgspec.json.encode(recording, enc_hook=str))
    if (own := own_recording()).is_symlink():  # of an earlier version: to samples that stay
        own.unlink()
    elif own.resolve() != samples.resolve():
        shutil.rmtree(own, ignore_errors=True)


def last_recording() -> Recording | None:
    """The last one; ``None`` before any.

    Raises:
        FileError: where its file is damaged.
    """
    path = home() / "last-recording.json"
    try:
        return msgspec.json.decode(files.content(path), type=Recording, dec_hook=lambda kind, text: kind(text))
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        remedy = "record again, or give --samples, --baselines and --sessions"
        raise FileError(path, 0, f"is damaged: {error}", remedy) from None


_shared: Final[dict[Path, int]] = {}


def use() -> Path:
    """The folder, from which nothing is removed until this process has ended."""
    folder = home()
    if folder not in _shared and folder.is_dir():
        with contextlib.suppress(OSError):  # nothing is removed from a folder that cannot be written
            _shared[folder] = files.shared(folder / _LOCK)
    return folder


def entries(folder: Path) -> Iterator[tuple[Path, ...]]:
    """Everything that is kept: of each entry its files and links, or its one folder."""
    for kind in sorted(one.path for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)):
        for place, folders, names in os.walk(kind):
            links = [name for name in folders if os.path.islink(os.path.join(place, name))]
            hashed = [name for name in folders if _HASH.fullmatch(name) and name not in links]
            folders[:] = [name for name in folders if name not in hashed]
            groups = {name: [name] for name in hashed}
            for name in (*names, *links):
                groups.setdefault(name.partition(".")[0], []).append(name)
            yield from (tuple(Path(place, name) for name in group) for group in groups.values())


def tidy() -> None:
    """Remove entries that no run has used for 30 days, where no process uses the folder; at the start of a run."""
    folder, now = home(), time.time()
    with contextlib.suppress(OSError):  # no folder, or a process that uses it
        stamp = folder / _TIDIED
        if stamp.exists() and now - stamp.stat().st_mtime < _DAY:
            return
        with files.locked(folder / _LOCK, -1.0):
            stamp.touch()
            for paths in entries(folder):
                if now - _used(paths) > _DAYS * _DAY:
                    _remove(paths)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _used(paths: Sequence[Path]) -> float:
    """When the files of an entry were last written or read, as far as the file system notes that; since the epoch."""
    times = [0.0]
    for file in paths[0].rglob("*") if _is_folder(paths[0]) else paths:
        if not _is_folder(file):  # looking into a folder, or through a link, counts as reading it
            with contextlib.suppress(OSError):  # it has vanished
                state = file.lstat()
                times.append(state.st_mtime if file.is_symlink() else max(state.st_mtime, state.st_atime))
    return max(times)


def _remove(paths: Sequence[Path]) -> None:
    """Remove an entry, and the folders that it leaves empty; the folder of all has the lock."""
    with contextlib.suppress(OSError):
        for path in paths:
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for parent in paths[0].parents:
            parent.rmdir()
