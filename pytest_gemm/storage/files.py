"""Files that several processes write: locks that name their holder, and files that are replaced as a whole.

The ``filelock`` library does not serve here.  Its lock does not name the holder, and readers cannot share it: its
lock for readers and writers is an SQLite database, which forked children do not hold.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final


class LockTimeoutError(OSError):
    """Another process holds the lock for longer than the caller waits; the message names the process."""


def private_folder() -> Path:
    """This user's folder among the temporary files, made with mode 0700 where it is missing.

    Raises:
        PermissionError: when something else has that name: a link, or a folder of another user.
    """
    path = Path(tempfile.gettempdir()) / f"pytest-gemm-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)  # FileExistsError for a dangling link
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is a link or belongs to another user; remove it, or set TMPDIR")
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def locked(
    path: Path, wait: float = 0.0, waiting: Callable[[str, float], object] | None = None, mode: int = 0o600
) -> Iterator[None]:
    """Hold the exclusive lock of a file for the block; the system frees it when the process dies.

    Args:
        path: the lock file, made where it is missing.  A link is an error.  Nothing is truncated before it is
            locked.
        wait: seconds to wait for another process; 0: without a limit, negative: not at all.
        waiting: called with the holder ("process 123") and the seconds waited so far, about ten times a second.
        mode: of a new file.

    Raises:
        LockTimeoutError: when the limit has passed.
        OSError: when the file cannot be opened or locked; ELOOP for a link.
    """
    handle = os.open(path, _FLAGS, mode)
    try:
        started = time.monotonic()
        while not _try(handle):
            holder, waited = _holder(handle), time.monotonic() - started
            if wait and waited >= wait:
                raise LockTimeoutError(f"{holder} holds {path}" + (f" for more than {wait:g} s" if wait > 0 else ""))
            if waiting is not None:
                waiting(holder, waited)
            time.sleep(0.1)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def shared(path: Path) -> int:
    """Share the lock of a file with others until this process and the children that it forks have ended.

    Returns:
        a descriptor; closing it gives the lock back.

    Raises:
        OSError: when the file cannot be opened or locked.
    """
    handle = os.open(path, _FLAGS, 0o600)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder for the block; the system frees it when the process dies.  Nothing in it changes.

    Raises:
        LockTimeoutError: where another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        is_free = True
        with contextlib.suppress(OSError):  # of a file system without locks
            is_free = _try(handle)
        if not is_free:
            raise LockTimeoutError(f"another run writes to {folder}")
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a fork may have the descriptor, too
        os.close(handle)


# Bytes that a person's file has at most.
_MOST: Final = 256 << 20
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(handle: int) -> str:
    """The process whose number stands in a lock file."""
    number = os.pread(handle, 32, 0).strip()
    return f"process {number.decode()}" if number.isdigit() else "another process"


def content(path: Path) -> bytes:
    """The bytes of a file that a person may have damaged.

    Raises:
        OSError: where it cannot be read, has no end, or has more than 256 MiB.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):  # reading a folder says what it is
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if state.st_size > _MOST:
        raise OSError(errno.EFBIG, f"it has {state.st_size >> 20} MiB, and {_MOST >> 20} are read at most", str(path))
    return path.read_bytes()


def replace(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a file whole or not at all, in a folder that is made where it is missing.

    A process that reads it meanwhile gets what stood there.  Of a link the file behind it is replaced, and the link
    stays.

    Args:
        path: the file.
        data: all of it.
        durable: wait until a power cut would leave it whole, which takes milliseconds.

    Raises:
        OSError: when it cannot be written, with the name of the file; what stood there stays.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{os.getpid()}.{target.name}.tmp")
    try:
        with contextlib.suppress(FileExistsError):  # below a file: opening says so
            target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())  # before the name: a power cut must not leave the name of an empty file
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # below a file there is nothing to remove
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def leave(folder: Path, name: str, value: object) -> None:
    """Leave a value for other processes of the run: the cases to time, or what was measured."""
    with tempfile.NamedTemporaryFile("wb", dir=folder, delete=False) as file:
        pickle.dump(value, file)
    os.replace(file.name, folder / name)


def left(folder: Path, name: str) -> Collection[Any]:
    """The value that another process has left under the name; () where none has."""
    path = folder / name
    found: Collection[Any] = pickle.loads(path.read_bytes()) if path.exists() else ()
    return found
