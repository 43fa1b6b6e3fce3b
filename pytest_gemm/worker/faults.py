"""What an exception reveals about the machine: no memory was left, or the device is lost to this process.

CUDA calls some errors sticky: after an illegal address every later call of the process fails with the same error,
and nothing but another process gets the device back.  Such errors also come late, at the next call that waits.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re

import psutil
import torch

from pytest_gemm.core.outcome import Reason
from pytest_gemm.core.text import causes, first_line, message
from pytest_gemm.storage import cache

# Messages of allocators without memory, whose exceptions have no type of their own.
_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# What no compiler can do anything about, and what shows that the cache folder is none.
_NO_ROOM = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
_NO_FOLDER = NotADirectoryError, FileExistsError, PermissionError
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_ROOM = "make room there, or let XDG_CACHE_HOME or TORCHINDUCTOR_CACHE_DIR name another folder"
_CUDA_ERROR = re.compile(r"(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): ([^\n]+)")


# -- memory ----------------------------------------------------------------------------------------


def out_of_memory(error: BaseException, phase: str, device: str) -> Reason | None:
    """The reason ``out-of-memory``, with what was asked for and what there is; ``None`` for any other exception.

    Args:
        error: what was raised.
        phase: what was being done, as in ``outcome.Activity``.
        device: where the case computes, ``cpu`` or ``cuda``; the exception itself decides whose memory it was.
    """
    for part in causes(error):
        text = message(part)
        on_device = isinstance(part, torch.OutOfMemoryError) or ("CUDA" in text and device == "cuda")
        if not (
            isinstance(part, MemoryError | torch.OutOfMemoryError)
            or (isinstance(part, RuntimeError) and any(mark in text for mark in _NO_MEMORY))
        ):
            continue
        asked = _ASKED.search(text)
        size = f"{_size(float(asked[1]) * _UNITS[asked[2]])} asked for" if asked else ""
        facts = _device_memory() if on_device and device == "cuda" else _host_memory()
        words = f"out of memory in {phase}: {', '.join(filter(None, (size, facts)))}"
        sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
        return Reason("out-of-memory", words, "test processes share the memory: use fewer with -n" if sharing else "")
    return None


def no_room(error: BaseException) -> Reason | None:
    """The reason ``no-room``, where files cannot be written; ``None`` for any other exception."""
    folders = [*filter(None, (str(cache.home()), os.environ.get("TORCHINDUCTOR_CACHE_DIR")))]
    for part in causes(error):
        text = message(part, 1 << 16)  # a compiler's has its command first
        line = next((line for line in text.splitlines() if any(words in line for words in _NO_ROOM)), "")
        if isinstance(part, _NO_FOLDER) and str(part.filename).startswith(tuple(folders)):
            line = text
        if line:
            return Reason("no-room", f"files cannot be written (caches: {', '.join(folders)}): {line}", _ROOM)
    return None


def _size(count: float) -> str:
    """A number of bytes for a reader."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = max(0, min(int(count).bit_length() - 1, 59)) // 10
    return f"{count / (1 << 10 * power):.4g} {units[power]}"


def _device_memory() -> str:
    """What the CUDA device has, in words; "" where it cannot be asked."""
    try:
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
    except Exception:  # a device that cannot be asked: the exception at hand is what matters
        return ""
    return f"the device has {_size(total)}, of which {_size(free)} are free and {_size(held)} held by this process"


def _host_memory() -> str:
    """What the machine has, in words."""
    memory = psutil.virtual_memory()
    return f"the machine has {_size(memory.total)}, of which {_size(memory.available)} are available"


def release() -> None:
    """Give back what a failed case still holds, so that the next one and the other processes have it."""
    gc.collect()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a lost device has nothing to give, and the outcome names it
            torch.cuda.empty_cache()


# -- a lost device ---------------------------------------------------------------------------------


def device_error(device: str) -> Exception | None:
    """The error that every further call on the device raises; ``None`` while it can be used.

    Asked twice: an error that was only pending is raised once, a sticky one always.

    Args:
        device: ``cpu``, which is never lost, or ``cuda``.
    """
    if device != "cuda" or not torch.cuda.is_initialized():
        return None
    return _raised_by(device) and _raised_by(device)


def _raised_by(device: str) -> Exception | None:
    """What the device answers to a small piece of work."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device=device)
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # others would get a context
                torch.cuda.synchronize(index)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # AcceleratorError or RuntimeError, by release
        return error
    return None


def lost(error: BaseException, last: BaseException, phase: str) -> Reason:
    """Why a device is lost to this process.

    Args:
        error: what the case raised.
        last: what the device has raised since, see :func:`device_error`.
        phase: where it showed.
    """
    found = next((m[1] for part in (*causes(error), last) if (m := _CUDA_ERROR.search(message(part)))), "")
    found = found or first_line(last) or type(last).__name__
    code = "illegal-address" if "illegal memory access" in found else "cuda-error"
    text = f"CUDA error in {phase}: {found}; the process has lost the device"
    remedy = "such errors show late: run the case alone with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer"
    return Reason(code, text, remedy)
