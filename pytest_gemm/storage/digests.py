"""Digests of compiled files: what is damaged on the disk is made again.

``FILE.sha256`` beside a file holds its digest, written when the file was made or first met.  A compiled file that is
empty, cut off or changed would crash every later run, or compute something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from pathlib import Path
from typing import Final

from pytest_gemm.storage import files

_SUFFIX: Final = ".sha256"
# Where an ELF file for 64 bits says where its last part begins, how large an entry of that is, and how many there are.
_SECTIONS: Final = struct.Struct("<40xQ10xHH2x")

# Files that this process has found whole, as they were then: each is asked about several times.
_whole: Final[dict[str, tuple[int, int, int]]] = {}


def is_whole(path: Path) -> bool:
    """Whether a file is there and as it was made; a damaged one is removed.

    The caller holds what keeps other processes from writing the file now.
    """
    try:
        found = path.stat()
    except OSError:
        return False
    state = found.st_ino, found.st_size, found.st_mtime_ns
    if _whole.get(str(path)) == state:
        return True
    beside = digest_of(path)
    with contextlib.suppress(OSError):
        made, kept = digest(path), _text(beside)
        if made != kept and (kept or not _is_complete(path)):
            remove(path)
            return False
        if not kept:
            files.replace(beside, made.encode())
    _whole[str(path)] = state
    return True


def digest_of(path: Path) -> Path:
    """The file that has the digest of another one."""
    return path.with_name(path.name + _SUFFIX)


def digest(path: Path) -> str:
    """Of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:  # a precompiled header has 150 MB
        while data := file.read(1 << 20):
            found.update(data)
    return found.hexdigest()


def remove(path: Path) -> None:
    """Remove a damaged file."""
    path.unlink(missing_ok=True)
    digest_of(path).unlink(missing_ok=True)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace") if path.exists() else ""


def _is_complete(path: Path) -> bool:
    """Whether a file without a digest may be taken for one: it is not empty, and a library has its last part."""
    with path.open("rb") as file:
        head = file.read(_SECTIONS.size)
    if not head.startswith(b"\x7fELF"):
        return bool(head) and path.suffix != ".so"
    if len(head) < _SECTIONS.size:
        return False
    start, size, count = map(int, _SECTIONS.unpack(head))
    return path.stat().st_size >= start + size * count
