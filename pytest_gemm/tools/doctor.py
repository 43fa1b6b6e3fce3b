"""``pytest-gemm doctor``: one screen that shows of every backend whether it can run here, and tries one product.

Each question is asked in a child process of its own, forked before this one has imported torch: a kernel that kills
its process, or never returns, is then one line of the screen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm import __version__
from pytest_gemm.machine import gpus, processor
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.tools import screen_of_backends

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend
    from pytest_gemm.config import GemmConfig


# The smoke product is the first that the backend claims: TMA can load its operands, no dimension is special.
_SMOKE: Final = ("mm:f16:nt:128x96x64", "mm:f32:nn:128x96x64", "mm:f64:nn:128x96x64", "int_mm:i8-i8-i32:nt:128x96x64")

_WIDTH: Final = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``pytest-gemm doctor``."""
    screen_of_backends.add_arguments(parser)


def run(given: argparse.Namespace) -> int:
    """Show the screen; returns 1 where something is broken or a named backend cannot run."""
    return screen_of_backends.show(given, report)


@dataclasses.dataclass(frozen=True)
class Examination:
    """What is known of one backend.

    Attributes:
        backend, device: who, and where it would compute.
        available: whether it says that it can run here.
        healthy: whether its smoke product was right as well.
        lines: for the screen, without the backend's name.
    """

    backend: str
    device: str
    available: bool
    healthy: bool
    lines: tuple[str, ...]


def machine() -> list[str]:
    """The lines about the machine and the software, above the backends."""
    facts = in_child(_facts, 120.0)
    lines = [f"pytest-gemm {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"]
    if "error" in facts:
        return [*lines, f"torch: {facts['error']}"]
    return [*lines, *facts["lines"]]


def examine(config: GemmConfig) -> Iterator[Examination]:
    """Ask the selected backends one after the other; a compiler may take minutes."""
    for backend in config.backends:
        device = config.device_of(backend)
        limit = config.compile_timeout or None

        def ask(backend: Backend = backend, device: str = device) -> dict[str, Any]:
            return _ask(backend, device, config.threads)

        started = time.perf_counter()
        found = in_child(ask, limit)
        yield _examination(backend.name, device, found, time.perf_counter() - started)


def report(config: GemmConfig, write: Callable[[str], object]) -> bool:
    """Write the whole screen, line by line as the answers come.

    Args:
        config: which backends are asked for.
        write: takes a line.

    Returns:
        Whether all is well: every smoke product is right, and every backend that was named can run
        (``--allow-missing`` forgives that).
    """
    for line in machine():
        write(line)
    write("")
    healthy = True
    for found in examine(config):
        for line in screen(found):
            write(line)
        excused = found.available or not config.named or "missing" in config.allow
        healthy = healthy and found.healthy and excused
    return healthy


def _examination(name: str, device: str, found: dict[str, Any], seconds: float) -> Examination:
    """The answer of a child as lines of the screen."""
    if "error" in found:
        return Examination(name, device, True, False, (f"FAILED: {found['error']} (after {seconds:.0f} s)",))
    versions = ", ".join(" ".join(pair) for pair in found["versions"])
    if found["reason"]:
        lines = [f"cannot run: {found['reason']}"]
        if found["remedy"]:
            lines.append(f"to run it: {found['remedy']}")
        return Examination(name, device, False, True, tuple(lines))
    lines = [f"can run{f': {versions}' if versions else ''}"]
    if not found["smoke"]:
        lines.append(f"no smoke product: it claims none of {' '.join(_SMOKE)}")
        return Examination(name, device, True, True, tuple(lines))
    verdict = found["status"] if not found["text"] else f"{found['status']}: {found['text']}"
    lines.append(f"{found['smoke']} {verdict}, {found['seconds']:.1f} s with its compile")
    if found["kernels"]:
        lines.append(f"kernel {', '.join(found['kernels'])}")
    return Examination(name, device, True, found["status"] == "passed", tuple(lines))


def screen(found: Examination) -> list[str]:
    """The lines of one backend, wrapped; the first begins with its name and device."""
    head = f"{found.backend:<10} {found.device:<5} "
    indent = " " * len(head)
    wrapper = textwrap.TextWrapper(_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
    wrapper.break_on_hyphens = False
    lines = [line for text in found.lines for line in wrapper.wrap(text)]
    return [head + lines[0][len(head) :], *lines[1:]]


# -- in the child ------------------------------------------------------------------------------------------


def _facts() -> dict[str, Any]:
    """torch, the CPU and the GPUs."""
    import torch

    from pytest_gemm.backends.inductor import torch_compat

    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"
    lines = [f"torch {torch.__version__}{cuda}"]
    lines += [f"  {lack}" for lack in torch_compat.lacks()]
    lines.append(f"CPU: {processor.cpu().name}, {len(os.sched_getaffinity(0))} cores; Inductor vectorises for {_isa()}")
    lines.append(_levels())
    if torch.cuda.is_available():
        driver = next((gpu.driver for gpu in gpus.gpus()), "unknown")
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            memory = f"{found.total_memory / 2**30:.0f} GiB"
            lines.append(f"GPU {index}: {found.name}, sm_{found.major}{found.minor}, {memory}, driver {driver}")
    else:
        lines.append("GPU: none that PyTorch sees")
    return {"lines": lines}


def _isa() -> str:
    """What Inductor's C++ is vectorised for, with the matrix units that its micro-kernels may use."""
    from pytest_gemm.backends.inductor import cpu_isa

    flags = processor.cpu().flags
    units = [f for f in ("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16") if f in flags]
    return f"{cpu_isa.vector_isa()} (the CPU has {', '.join(units) or 'no matrix units'})"


def _levels() -> str:
    """What ``--gemm-isa`` takes here, and why it takes no more."""
    from pytest_gemm.backends.inductor import cpu_isa, torch_compat
    from pytest_gemm.backends.inductor.backend import cache_dir

    here, cannot = ["native"], []
    executed = isa_module.isas(processor.cpu().flags)
    for isa in isa_module.ISAS:
        lack = "not in this CPU"
        if isa in executed:
            with torch_compat.cache_dir_set(str(cache_dir(isa))):
                lack = cpu_isa.lacks_isa(isa)
        if lack:
            cannot.append((isa, lack))
        else:
            here.append(isa)
    reasons = {lack: ", ".join(isa for isa, why in cannot if why == lack) for _, lack in cannot}
    without = "".join(f"; {names}: {lack}" for lack, names in reasons.items())
    return f"  --gemm-isa takes {', '.join(here)}{without}"


def _ask(backend: Backend, device: str, threads: int) -> dict[str, Any]:
    """Availability, and the smoke product where there is one."""
    availability = backend.availability(device)
    reason = availability.reason
    found: dict[str, Any] = {
        "versions": list(availability.versions),
        "reason": reason.text if reason else "",
        "remedy": reason.remedy if reason else "",
        "smoke": "",
    }
    if reason is not None:
        return found
    import torch

    from pytest_gemm.api.request import DEFAULT
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.problem.problem import Problem

    problem = next((p for p in map(Problem.parse, _SMOKE) if backend.supports(p, DEFAULT) is None), None)
    if problem is None:
        return found
    torch.set_num_threads(threads)
    started = time.perf_counter()
    outcomes = Judge().outcomes(Case(backend, problem, ("rand",), 0, device))
    worst = next((o for o in outcomes if o.status.is_failure), outcomes[0])
    found |= {
        "smoke": problem.line,
        "status": str(worst.status),
        "text": worst.reason.text if worst.reason else "",
        "kernels": list(worst.kernels),
        "seconds": time.perf_counter() - started,
    }
    return found


def in_child(ask: Callable[[], dict[str, Any]], limit: float | None) -> dict[str, Any]:
    """What ``ask`` answers in a forked process; ``{"error": ...}`` when that dies, raises or takes too long.

    A fork and not a new interpreter: a backend that a conftest registered need not be picklable.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns when the parent has threads; the child starts none of them
        child = os.fork()
    if child == 0:
        os.close(read_end)
        # Whatever a compiler says goes with the rest of its errors, not between the lines of the screen.
        os.dup2(2, 1)
        try:
            answer = ask()
        except BaseException as error:  # everything ends here: the process is left with os._exit
            first = next(iter(str(error).strip().splitlines()), "")
            answer = {"error": f"{type(error).__name__}: {first}"}
        with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write_end)
    return _answer(child, read_end, limit)


def _answer(child: int, read_end: int, limit: float | None) -> dict[str, Any]:
    """Read the child's answer; kill it when the limit has passed."""
    import select

    deadline = None if limit is None else time.monotonic() + limit
    pieces = []
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return {"error": f"no answer within {limit:.0f} s"}
            piece = pipe.read(1 << 16)
            if not piece:
                break
            pieces.append(piece)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"error": f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"}
    try:
        answer = json.loads(b"".join(pieces))
    except ValueError:
        return {"error": f"its process ended with exit code {os.waitstatus_to_exitcode(status)} and no answer"}
    assert isinstance(answer, dict)
    return answer
