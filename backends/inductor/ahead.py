"""What the first C++ kernel on a machine waits for, made while the workers of a run start.

Inductor compiles and loads a few lines for each instruction set of the CPU, one after the other, and then a header for
all of its kernels.  Every worker waits for that, some 20 s; a process of its own has done it when the first one asks.
A process that fails leaves it to the workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest_gemm.storage import cache

# Compiled for the header: its size does not matter.
_LINE = "mm:f32:nn:16x16x16"


def start() -> subprocess.Popen[bytes] | None:
    """Start the process, where nothing of the kind is in the caches; ``None`` where something is."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    kept = Path(given).glob("*/loads") if given else cache.home().glob("inductor-*/*/loads")
    if next(kept, None) is not None:
        return None
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Ask for every instruction set at once, then compile one kernel."""
    from pytest_gemm.backends.cpp.backend import CppBackend
    from pytest_gemm.backends.inductor import torch_compat
    from pytest_gemm.backends.inductor.backend import cache_dir
    from pytest_gemm.operands import tensors
    from pytest_gemm.operands.distributions import distributions_for
    from pytest_gemm.problem.problem import Problem

    torch_compat.ask_levels(str(cache_dir()))
    problem = Problem.parse(_LINE)
    CppBackend().prepare(problem, tensors.make(problem, distributions_for(problem)[0], 0))


if __name__ == "__main__":
    main()
