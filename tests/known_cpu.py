"""What the user's cache knows of this CPU, in a new cache: otherwise each compiles six programs to ask for it again."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Final

from pytest_gemm.machine.code_key import code_key
from pytest_gemm.storage import cache


def of_home(home: Path | None = None) -> Path:
    """Where a run keeps compiled kernels unless ``TORCHINDUCTOR_CACHE_DIR`` is set, which Inductor itself does, too."""
    return (home or cache.home()) / f"inductor-{version('torch')}"


# Before a test has a home of its own, and before Inductor is imported.
_USERS: Final = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or of_home())


def copy_to(inductor: Path) -> None:
    """Copy which vector code loads, where a run has found it out.

    Args:
        inductor: a folder that is given as ``TORCHINDUCTOR_CACHE_DIR``, or that of :func:`of_home`.
    """
    known = _USERS / code_key() / "loads"
    if known.is_dir():
        shutil.copytree(known, inductor / code_key() / "loads", dirs_exist_ok=True)
