"""What the user's cache knows of this CPU, in a new cache: otherwise each compiles six programs to ask for it again."""

from __future__ import annotations

import shutil
from pathlib import Path

from pytest_gemm.backends.inductor import backend
from pytest_gemm.machine.code_key import code_key


def copy_to(inductor: Path) -> None:
    """Copy which vector code loads, where a run has found it out.

    Args:
        inductor: a folder that is given as ``TORCHINDUCTOR_CACHE_DIR``, or ``inductor-<torch>`` of a new cache.
    """
    known = backend.cache_dir() / "loads"
    if known.is_dir():
        shutil.copytree(known, inductor / code_key() / "loads", dirs_exist_ok=True)
