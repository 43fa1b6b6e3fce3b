"""Compile ahead of the tests what the selected cases will need, on all cores at once.

A backend that can say which kernels a problem needs (:class:`Compiling`) is asked for all selected problems; kernels
that several problems share are compiled once, and those of an earlier run not at all.  The tests then find everything
in the store.  With ``--gemm-compile-only`` that is all that happens.

Asking means generating the programs, which the backends' code does: it is done in workers.  They see no device; what
they are asked does not need one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from unittest.mock import patch

import pytest

from pytest_gemm.api.protocols import Compiling
from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import line_with
from pytest_gemm.machine import gpus
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run.progress import Display
from pytest_gemm.storage.kernel_store import CompilePool, Job, Store
from pytest_gemm.worker.keeper import Keeper

# Problems that one process is given at a time: enough to outweigh the call, few enough to keep all processes busy.
_CHUNK = 6
# For fewer problems than this a process that imports torch costs more than compiling in parallel gains.
_WORTH_WHILE = 3


@dataclasses.dataclass
class Harvest:
    """What was compiled ahead for one backend.

    Attributes:
        backend: its name.
        kernels: by key.
        needs: keys of the kernels of each problem, by its line, in the order of the problems.
        cached: keys that were in the store before.
        refused: what the compiler said against a kernel, by key; its candidate is pruned.
        undone: why the compiler could not do its work, by key.
        unknown: why the kernels of a problem are not known, by its line; its test will say more.
        unasked: why a problem could not be asked about, by its line: the process that was to ask died, for instance.
        seconds: by the clock.
    """

    backend: str
    kernels: dict[str, Job] = dataclasses.field(default_factory=dict)
    needs: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    cached: set[str] = dataclasses.field(default_factory=set)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    undone: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown: dict[str, str] = dataclasses.field(default_factory=dict)
    unasked: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def compiled(self) -> int:
        """How many kernels the compiler has made."""
        return len(self.kernels.keys() - self.cached - self.refused.keys() - self.undone.keys())

    @property
    def complete(self) -> bool:
        """Whether all that can be compiled has been."""
        return not self.undone and not self.unasked


def architecture_of(config: GemmConfig) -> str:
    """What to compile for: as a backend is set, or the architecture of this machine's first device; "" if unknown."""
    if config.arch:
        return config.arch
    gpu = gpus.visible_gpu()
    return gpu.architecture if gpu else ""


# -- in a worker -------------------------------------------------------------------------------------

# A problem's line with its kernels, none where it is unsupported, or with why they are not known.
_Answer = tuple[str, list[Job] | str]


def _ask(_: object, backend: Compiling, lines: Sequence[str], architecture: str, wanted: str) -> list[_Answer]:
    """Ask a backend for the kernels of these problems.

    Args:
        backend: that is asked.
        lines: the problems.
        architecture: as nvcc has it.
        wanted: as ``--gemm-candidates``.
    """
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    selection = CandidateSelection(wanted)
    request = BuildRequest(Device.CUDA, selection=Selection(wanted if selection.by_backend else ""))
    found: list[_Answer] = []
    for line in lines:
        problem = Problem.parse(line)
        try:
            lacking = backend.supports(problem, request) is not None
            select = None if selection.by_backend else functools.partial(selection.of, problem=line)
            found.append((line, [] if lacking else backend.jobs(problem, request, architecture, select)))
        except Unsupported:
            found.append((line, []))
        except Exception as error:  # of the compiler under test: the problem's own test will say more
            found.append((line, f"{type(error).__name__}: {error}"))
    return found


# -- in the process that runs the tests ----------------------------------------------------------------


def run(config: GemmConfig, cases: Sequence[CaseId], display: Display) -> list[Harvest]:
    """Compile what the selected cases need, backend by backend.

    Args:
        config: of the run.
        cases: of the tests.
        display: for the progress.

    Raises:
        pytest.UsageError: when nothing else was asked for and it is not known for which device to compile.
    """
    found = []
    for name in dict.fromkeys(case.backend for case in cases):
        backend = config.registry[name]
        problems = list(dict.fromkeys(case.problem for case in cases if case.backend == name))
        if not isinstance(backend, Compiling) or (len(problems) < _WORTH_WHILE and not config.compile_only):
            continue
        architecture = architecture_of(config)
        if not architecture:
            why = "NVML does not report the device to compile for"
            if config.compile_only:
                named = f"--gemm-set={name}.arch=90a for instance"
                raise pytest.UsageError(f"--gemm-compile-only: {why}; name its architecture, {named}")
            display.line(f"{name}: {why}, so nothing is compiled ahead of the tests")
            continue
        harvest = compile_for(config, backend, problems, architecture, display)
        display.line(note(harvest))
        found.append(harvest)
    return found


def compile_for(
    config: GemmConfig, backend: Compiling, problems: Sequence[str], architecture: str, display: Display
) -> Harvest:
    """Compile what one backend needs for these problems.

    Args:
        config: of the run.
        backend: whose kernels.
        problems: lines, each once.
        architecture: as nvcc has it.
        display: for the progress.
    """
    harvest = Harvest(backend.name)
    started = time.perf_counter()
    store = Store(backend.store.folder, config.limits[1])
    todo = list(problems)
    harvest.needs = {line: set() for line in todo}
    terms, count = (architecture, config.wanted_candidates), min(config.jobs, -(-len(problems) // _CHUNK))
    with CompilePool(store, config.jobs) as compilers, _asking(backend, terms, count) as ask:
        while todo:
            waiting = {ask(chunk): chunk for at in range(0, len(todo), _CHUNK) if (chunk := todo[at : at + _CHUNK])}
            fresh: dict[str, set[str]] = {}
            for chunk, answers in _as_answered(waiting, compilers, backend.name, display):
                if isinstance(answers, str):
                    harvest.unasked.update(dict.fromkeys(chunk, answers))
                    continue
                for line, jobs in answers:
                    fresh[line] = _noted(harvest, line, jobs, store)
                compilers.submit(harvest.kernels.values())
            compilers.finish(lambda progress: display.progress(f"compiling for {backend.name}: {progress}"))
            if harvest.unasked:
                break
            # A candidate that was refused just now gives way to another one: which, is known by asking again.
            lost = compilers.rejected.keys() - harvest.cached
            todo = [line for line, keys in fresh.items() if keys & lost]
        harvest.refused, harvest.undone = compilers.rejected, compilers.undone
    harvest.seconds = time.perf_counter() - started
    return harvest


@contextlib.contextmanager
def _asking(
    backend: Compiling, terms: tuple[str, str], count: int
) -> Iterator[Callable[[Sequence[str]], Future[list[_Answer] | str]]]:
    """A function that has one of ``count`` workers asked for the kernels of some problems."""
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        keeper = Keeper({backend.name: backend}, 1, ("torch",), {"ask": _ask})
    # They import torch, and the keeper is to be a fork without it.
    from pytest_gemm.worker.messages import Died, Thrown
    from pytest_gemm.worker.process import Process

    workers = [Process(keeper, (0.0, 0.0)) for _ in range(count)]
    idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
    for one in workers:
        idle.put(one)

    def ask(lines: Sequence[str]) -> list[_Answer] | str:
        worker = idle.get()
        try:
            return worker.call(list[_Answer], "ask", backend, lines, *terms)
        except Died:
            return "the process that was to ask died"
        except (Thrown, Unsupported) as error:  # Unsupported: a backend that cannot be pickled
            return str(error)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(count)
    try:
        yield lambda lines: threads.submit(ask, lines)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        keeper.close()  # its workers end with it
        for one in workers:
            one.close()


def _as_answered(
    waiting: dict[Future[list[_Answer] | str], list[str]], compilers: CompilePool, name: str, display: Display
) -> Iterator[tuple[list[str], list[_Answer] | str]]:
    """Chunks with their answers as they come, or with why there is none; the compilers work on meanwhile."""
    while waiting:
        to_go = sum(map(len, waiting.values()))
        display.progress(f"compiling for {name}: {to_go} problems to ask, {compilers.progress}")
        for future in wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future), future.result()


def _noted(harvest: Harvest, line: str, jobs: list[Job] | str, store: Store) -> set[str]:
    """Enter the answer for a problem; the keys that it did not need before."""
    if isinstance(jobs, str):
        harvest.unknown[line] = jobs
        return set()
    for job in jobs:
        if job.key not in harvest.kernels:
            harvest.kernels[job.key] = job
            if store.object_of(job.key) or store.error_of(job.key):
                harvest.cached.add(job.key)
    fresh = {job.key for job in jobs} - harvest.needs[line]
    harvest.needs[line] |= fresh
    return fresh


# -- what is said of it --------------------------------------------------------------------------------


def note(harvest: Harvest) -> str:
    """One line: ``cutlass: 167 kernels, 160 from the cache, 7 compiled in 61 s``."""
    text = f"{harvest.backend}: {len(harvest.kernels)} kernels, {len(harvest.cached)} from the cache, "
    text += f"{harvest.compiled} compiled in {harvest.seconds:.0f} s"
    for what, those in (("refused by nvcc", harvest.refused), ("not compiled", harvest.undone)):
        text += f", {len(those)} {what}" if those else ""
    if harvest.unasked:
        text += f"; {len(harvest.unasked)} problems could not be asked about: {next(iter(harvest.unasked.values()))}"
    return text


def complaints(harvest: Harvest) -> list[str]:
    """The lines that ``--gemm-compile-only`` ends with: what could not be compiled, for which problem, and why."""
    lines = []
    for what, those in (("refused by nvcc", harvest.refused), ("not compiled", harvest.undone)):
        for key, message in those.items():
            name = harvest.kernels[key].configuration or key
            first = next(line for line, keys in harvest.needs.items() if key in keys)
            lines.append(f"{what}: {name}, for {first}: {line_with(message, 'error')}")
    for line, message in harvest.unknown.items():
        lines.append(f"Inductor generates no kernel for {line}: {message.splitlines()[0][:200]}")
    lines += [f"not asked for its kernels: {line}: {why}" for line, why in harvest.unasked.items()]
    return lines
