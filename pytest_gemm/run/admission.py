"""Memory that test processes share: a case of gigabytes begins when what it needs is free.

One such case at a time computes on a device.  Those so small that every worker of pytest-xdist could have one share the
lock.  A case that needs more than is free when it has the lock is not run.  Cases of less than a GiB take no part.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import torch

from pytest_gemm.core.outcome import Reason
from pytest_gemm.judging.case import Case
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.storage import files
from pytest_gemm.worker import faults
from pytest_gemm.worker.calls import KEPT_BYTES

_GIB: Final = 1 << 30
# Of what is free this much is promised: the rest is for small cases and for fragments.
_SHARE: Final = 0.9
# What the judge needs beside operands and results: pieces in float64, and on a CPU the references of lines.
_OWN: Final = {"cuda": 2 * _GIB, "cpu": 3 * _GIB}


def needed(case: Case) -> int:
    """Bytes that a case needs on its device; 0 for one of less than a GiB.

    They are the operands of each distribution and a packed or converted copy of them, and two results: the one that is
    judged, and a partial or an intermediate one; and what the judge keeps: each result and its copy.
    """
    problem = case.problem
    shape, dtypes = problem.shape, problem.dtypes
    batch = 1 if shape.batch is None else shape.batch

    def size(count: int, dtype: DType) -> int:
        return batch * count * dtype.bits // 8

    result = size(shape.m * shape.n, problem.result_dtype)
    given = size(shape.m * shape.k, dtypes.a) + size(shape.k * shape.n, dtypes.b)
    given += sum(result for step, _ in problem.residuals if not step.extent)
    kept = 2 * len(case.distributions) if result < KEPT_BYTES else 0
    total = given * (len(case.distributions) + 1) + (2 + kept) * result
    total += given * len(case.distributions) + result  # the kernel's process has copies of the operands and results
    return 0 if total < _GIB else total + _OWN[case.device]


@contextlib.contextmanager
def admitted(need: int, device: str) -> Iterator[Reason | None]:
    """A block that has so much memory for itself; it begins when the other processes leave it.

    Args:
        need: bytes, as :func:`needed` has them.
        device: whose memory.

    Yields:
        Why there will not be so much; ``None`` where it is there.
    """
    if not need:
        yield None
        return
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with contextlib.ExitStack() as held:
        if 1 < workers <= free(device) * _SHARE / need:
            held.callback(os.close, files.shared(_lock(device)))
        else:
            held.enter_context(files.locked(_lock(device)))
        if need > (there := free(device) * _SHARE):
            text = f"the case needs {need / _GIB:.1f} GiB of memory, and there are {there / _GIB:.1f} GiB for it"
            yield Reason("too-little-memory", text)
            return
        held.callback(faults.release)
        yield None


def _lock(device: str) -> Path:
    """The lock of a device's memory, for this user's test processes."""
    name = str(torch.cuda.get_device_properties(0).uuid) if device == "cuda" else device
    return files.private_folder() / f"memory-{name}.lock"


def free(device: str) -> int:
    """Bytes that this process could have."""
    faults.release()
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    available = int(psutil.virtual_memory().available)
    limit = Path("/sys/fs/cgroup/memory.max")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        cache = re.search(r"^inactive_file (\d+)$", limit.with_name("memory.stat").read_text(encoding="ascii"), re.M)
        used = int(limit.with_name("memory.current").read_text(encoding="ascii"))
        available = min(available, int(limit.read_text(encoding="ascii")) - used + (int(cache[1]) if cache else 0))
    return available
