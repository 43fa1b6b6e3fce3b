"""``pytest-gemm doctor``: shows of every backend whether it can run here, and tries one product.

A worker process answers one question after the other, each within a limit, and each answer is shown as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm import __version__
from pytest_gemm.api.protocols import CandidateBackend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.case_id import CaseId
from pytest_gemm.isolation.worker import Service, Worker
from pytest_gemm.machine import gpus, processor
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.outcome import Activity, Phase, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.backend_command import WIDTH, Unanswered, answers, show

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig

# The smoke product is the first that the backend supports: TMA can load its operands, no dimension is special.
_SMOKE: Final = ("mm:f16:nt:128x96x64", "mm:f32:nn:128x96x64", "mm:f64:nn:128x96x64", "int_mm:i8-i8-i32:nt:128x96x64")
# Flags of the CPU that matter to a matrix product.
_UNITS: Final = {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16"}


def run(given: argparse.Namespace) -> int:
    """Show the report; returns 1 where something is broken or a named backend cannot run."""
    return show(given, report)


def report(config: GemmConfig, write: Callable[[str], object]) -> bool:
    """Write the whole report, line by line as the answers come.

    Args:
        config: which backends are asked for.
        write: takes a line.

    Returns:
        Whether all is well: every smoke product is right, and every backend that was named can run
        (``--allow-missing`` forgives that).
    """
    write(f"pytest-gemm {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    states = set()
    with contextlib.closing(Worker(config, _answer)) as worker:
        compiles = any(isinstance(backend, CandidateBackend) for backend in config.backends)
        for fact in ("torch", "GPU", *(["Inductor"] if compiles else []), *(["C++"] if config.generates else [])):
            for line, state in _told(worker, config.timeout, fact=fact):
                write(f"{fact}: {line}" if state else line)
        write("")
        for backend in config.backends:
            head = f"{backend.name:<10} {config.device_of(backend):<5} "
            for text, state in _told(worker, backend=backend.name):
                lines = textwrap.wrap(text, WIDTH - len(head), subsequent_indent="  ", break_on_hyphens=False)
                for line in lines:
                    write(head + line)
                    head = " " * len(head)
                states.add(state)
    excused = not config.named or "missing" in config.allow
    return "failed" not in states and (excused or "missing" not in states)


def _told(worker: Worker, limit: float | None = None, **request: object) -> Iterator[tuple[str, str]]:
    """The lines that answer a request, each with what it means for its backend: "", ``missing`` or ``failed``."""
    started = time.perf_counter()
    try:
        yield from answers(worker, limit, **request)
    except Unanswered as error:
        yield f"FAILED: {error} (after {time.perf_counter() - started:.0f} s)", "failed"


# -- in the worker process ---------------------------------------------------------------------------------


def _answer(service: Service, request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines that answer a request."""
    case = CaseId(request.get("backend", ""), "")
    if "fact" in request:
        with service.watch(Activity(case, Phase.RUN)):
            yield from ((line, "") for line in _FACTS[request["fact"]]())
        return
    backend = service.config.registry[request["backend"]]
    device = service.config.device_of(backend)
    with service.watch(Activity(case, Phase.COMPILE)):
        availability = backend.availability(device)
        asked = () if availability.reason else map(Problem.parse, _SMOKE)
        problem = next((p for p in asked if backend.supports(p, DEFAULT) is None), None)
    if (reason := availability.reason) is not None:
        yield f"cannot run: {reason.text}", "missing"
        if reason.remedy:
            yield f"to run it: {reason.remedy}", "missing"
        return
    versions = ", ".join(" ".join(pair) for pair in availability.versions)
    yield f"can run{f': {versions}' if versions else ''}", ""
    if problem is None:
        yield f"no smoke product: it supports none of {' '.join(_SMOKE)}", ""
        return
    from pytest_gemm.judging.case import Case

    started = time.perf_counter()
    outcomes = service.judge.outcomes(Case(backend, problem, ("rand",), 0, device))
    worst = next((o for o in outcomes if o.status.is_failure), outcomes[0])
    verdict = f"{worst.status}: {worst.reason.text}" if worst.reason else str(worst.status)
    seconds = time.perf_counter() - started
    state = "" if worst.status is Status.PASSED else "failed"
    yield f"{problem.line} {verdict}, {seconds:.1f} s with its compile", state
    if worst.kernels:
        yield f"kernel {', '.join(worst.kernels)}", ""


def _torch() -> Iterator[str]:
    import torch

    cpu, cores = processor.cpu(), len(os.sched_getaffinity(0))
    units = [flag for flag in cpu.flags if flag in _UNITS]
    yield f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'}"
    yield f"CPU: {cpu.name}, {cores} cores, {', '.join(units) or 'no matrix units'}"


def _gpus() -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        yield "GPU: none that PyTorch sees"
        return
    driver = next((gpu.driver for gpu in gpus.gpus()), "unknown")
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        yield f"GPU {index}: {found.name}, sm_{found.major}{found.minor}, {memory}, driver {driver}"


def _inductor() -> Iterator[str]:
    """What this torch lacks."""
    from pytest_gemm.backends.inductor import torch_compat

    yield from torch_compat.lacks()


def _vectors() -> Iterator[str]:
    """What Inductor's C++ is vectorised for."""
    from pytest_gemm.backends.inductor import cpu_isa

    taken = levels()
    yield f"C++: Inductor vectorises for {cpu_isa.vector_isa()}"
    yield taken


def levels() -> str:
    """What ``--gemm-isa`` takes here, and why it takes no more."""
    from pytest_gemm.backends.inductor import cpu_isa, torch_compat
    from pytest_gemm.backends.inductor.backend import cache_dir

    executed = isa_module.isas(processor.cpu().flags)
    # Each answer is a compile and a process that loads its result: a minute one after the other on an AMX machine.
    with torch_compat.cache_dir_set(str(cache_dir())), futures.ThreadPoolExecutor() as pool:
        lacks = dict.fromkeys(isa_module.ISAS, "not in this CPU")
        lacks |= zip(executed, pool.map(cpu_isa.lacks_isa, executed), strict=True)
    names = {why: ", ".join(isa for isa in lacks if lacks[isa] == why) for why in lacks.values()}
    here = ", ".join(["native", *(isa for isa in lacks if not lacks[isa])])
    return f"  --gemm-isa takes {here}{''.join(f'; {some}: {why}' for why, some in names.items() if why)}"


_FACTS: Final[Mapping[str, Callable[[], Iterator[str]]]] = {
    "torch": _torch,
    "GPU": _gpus,
    "Inductor": _inductor,
    "C++": _vectors,
}
