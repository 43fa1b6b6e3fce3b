"""The command ``pytest-gemm cache key``: the key under which a CI keeps the folder of the cache.

A service that keeps folders between jobs never changes what it has under one key, and restores the newest one whose key
has a given beginning.  So the beginning names what the kernels were compiled for, and the end which kernels there are:
a job that compiled nothing new finds its key taken and stores nothing.  What is restored counts as used, so no age
shows which kernels no job needs any more: the beginning names the month too, and the first job of one begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import time
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
    prefix = f"pytest-gemm-{platform.machine()}-torch-{torch}-{code_key()}-{time.strftime('%Y%m', time.gmtime())}-"
    kept = list(cache.entries(folder)) if folder.is_dir() else []
    paths = (path for entry in kept for path in entry if path.suffix not in _CHEAP)
    names = sorted(str(path.relative_to(folder)) for path in paths)
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:12]
    return {"folder": str(folder), "prefix": prefix, **({"key": prefix + digest} if names else {})}


def run(_: argparse.Namespace) -> int:
    """Show the folder and its key.

    Raises:
        ValueError: when there is no torch.
    """
    show("".join(f"{name}={value}\n" for name, value in keys().items()))
    return 0
