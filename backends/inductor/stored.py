"""Compiled files on the disk: Inductor takes whatever is there, and here what is damaged is made again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.storage import digests, files

# Seconds to wait for another process that compiles the same, as Inductor does.
PATIENCE: Final = 600.0


@contextlib.contextmanager
def whole(paths: Sequence[Path], lock: Path) -> Iterator[None]:
    """Remove what is damaged of these files before a block that makes those that are not there.

    Args:
        paths: the files.
        lock: that Inductor holds while it makes them.
    """
    if any(path.exists() for path in paths):
        with files.locked(lock, PATIENCE, mode=0o666):
            for path in paths:
                digests.is_whole(path)
    yield
    for path in paths:
        digests.is_whole(path)  # notes its digest


def compiled(call: Callable[..., None], lock: str, builders: Sequence[Any], *others: Any) -> None:
    """``codecache._worker_compile_cpp``: libraries, objects and precompiled headers that are not there are compiled."""
    with whole([Path(builder.get_target_file_path()) for builder in builders], Path(lock)):
        call(lock, builders, *others)


def probed(call: Callable[[Any], str], builder: Any) -> str:
    """``CppBuilder.get_target_file_path`` in ``VecISA.check_build``, which holds the lock of what it looks for."""
    path = Path(call(builder))
    if getattr(_probing, "is_on", False):
        digests.is_whole(path)
    return str(path)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """The block asks whether vector code loads: a damaged answer would be no."""
    _probing.is_on = True
    try:
        yield
    finally:
        _probing.is_on = False


_probing: Final = threading.local()


def written(call: Callable[..., tuple[str, str]], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """``codecache.write``: a text that is not there is written; what follows it in its file is Inductor's."""
    text: str | bytes = kwargs["content"] if "content" in kwargs else args[0]
    data = text.encode() if isinstance(text, str) else text
    found = call(*args, **kwargs)
    path = Path(found[1])
    if not path.read_bytes().startswith(data):
        digests.remove(path)
        found = call(*args, **kwargs)
    return found
