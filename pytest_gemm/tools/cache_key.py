"""The command ``pytest-gemm cache``: ``prune``, which the storage does, and ``key``, under which a CI keeps the folder.

A service that keeps folders between jobs never changes what it has under one key, and restores the newest one whose key
has a given beginning.  So the beginning names what the kernels were compiled for, and the end which kernels there are:
a job that compiled nothing new finds its key taken and stores nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
from importlib import metadata
from typing import Final

from pytest_gemm.core.text import show
from pytest_gemm.machine.code_key import code_key
from pytest_gemm.storage import cache

# Generated programs and locks: each run writes its own, and none is worth a new copy of the folder.
_CHEAP: Final = frozenset({".py", ".lock"})


def keys() -> dict[str, str]:
    """The folder, the beginning of its key and, where something is kept, the key.

    Raises:
        ValueError: when there is no torch.
    """
    folder = cache.home()
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ValueError("no torch is installed here, and kernels are compiled for one: install torch first") from None
    prefix = f"pytest-gemm-{platform.machine()}-torch-{torch}-{code_key()}-"
    kept = list(cache.entries(folder)) if folder.is_dir() else []
    paths = (path for entry in kept for path in entry.paths if path.suffix not in _CHEAP)
    names = sorted(str(path.relative_to(folder)) for path in paths)
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return {"folder": str(folder), "prefix": prefix, **({"key": prefix + digest} if names else {})}


def run(given: argparse.Namespace) -> int:
    """Run one task; returns 1 while a process uses what is to be removed.

    Raises:
        ValueError: for a limit that is no number, or a key without a torch.
    """
    if given.task != "key":
        return cache.prune_now()
    show("".join(f"{name}={value}\n" for name, value in keys().items()))
    return 0
