"""``pytest-gemm doctor``: shows of every backend whether it can run here, and tries one product.

Each check has a worker process of its own and all of them work at once, so one that takes long holds up no other.  A
check is shown when it ends.  A step that takes longer than the limit ends its process, and its check has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm import __version__
from pytest_gemm.api import settings
from pytest_gemm.api.registry import RegistryError
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Activity, Phase, Status
from pytest_gemm.core.text import show
from pytest_gemm.isolation.worker import Death, Lane, Service, Worker
from pytest_gemm.machine import gpus, processor
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker.death import manner

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig

# The smoke product is the first that the backend supports: TMA can load its operands, no dimension is special.  All are
# in the quick level, so that after a run of that level their kernels are in the caches and in the store of CUTLASS.
_SMOKE: Final = ("mm:f16:nt:32x64x128", "mm:f32:nn:32x64x128", "mm:f64:nn:64x48x1000", "int_mm:i8-i8-i32:nt:32x64x128")
# Flags of the CPU that matter to a matrix product.
_UNITS: Final = {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16"}
# Characters of a line.
_WIDTH: Final = 118


def run(given: argparse.Namespace) -> int:
    """Show the report; returns 1 where something is broken, or a named backend cannot run."""
    words = [f"--gemm-backends={given.backends}", f"--gemm-device={given.device}"]
    words += [f"--gemm-threads={given.threads}"] if given.threads else []
    words += [f"--gemm-timeout={given.timeout},{given.timeout}"]
    words += ["--gemm-allow=missing"] if given.allow_missing else []
    words += [f"--gemm-set={one}" for one in given.set]
    # Of an installed pytest-gemm pytest says that it is imported already; a project may turn warnings into errors.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os.environ["PYTEST_ADDOPTS"] = ""  # it is about runs of tests
    return int(pytest.main([*words, *given.pytest_args], plugins=[_Plugin()]))


class _Plugin:
    """Shows the report where pytest would run its session: the ini file is read, conftests are imported."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Configure pytest as ``--fixtures`` does, show the report, and end."""
        from pytest_gemm.config import CONFIG

        config._do_configure()
        try:
            healthy = report(config.stash[CONFIG])
        finally:
            config._ensure_unconfigure()
        return int(pytest.ExitCode.OK if healthy else pytest.ExitCode.TESTS_FAILED)


def _answers(lane: Lane, request: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The lines that a worker process answers, as they come; the last one says why there are no more."""
    try:
        for one in lane.answers(request):
            if not isinstance(one, Death):
                yield one
            elif one.position is not None and one.position.ended == "timed-out":
                limit = f"no answer within {one.position.limit:g} s; for more time give --timeout=SECONDS"
                yield f"FAILED: {limit}", "failed"
            else:
                why = ": ".join([f"its process died: {manner(one.status)}", *one.said.splitlines()[-1:]])
                yield f"FAILED: {why}", "failed"
    except RuntimeError as error:
        yield f"FAILED: {str(error).strip().splitlines()[-1]}", "failed"


@dataclasses.dataclass
class _Check:
    """A question to a worker process.

    Attributes:
        name: of the backend, or ``machine``.
        device: of the backend, "" for the machine.
        lane: where it is asked.
        request: as :func:`_answer` takes it.
        lines: the answer, its verdict first.
        said: the verdict: ``works``, ``missing``, ``failed``, or "" for none.
        seconds: how long it took.
    """

    name: str
    device: str
    lane: Lane
    request: Mapping[str, object]
    lines: list[str] = dataclasses.field(default_factory=list)
    said: str = ""
    seconds: float = 0.0

    def ask(self) -> _Check:
        """Wait for the answer."""
        started = time.perf_counter()
        for text, said in _answers(self.lane, self.request):
            self.said = said or self.said
            self.lines.insert(0 if said else len(self.lines), text)
        self.seconds = time.perf_counter() - started
        return self

    def show(self) -> None:
        """Write the lines of the report."""
        head = f"{self.name:<10} {self.device:<5}{self.seconds:6.1f} s  "
        for text in self.lines:
            for line in textwrap.wrap(text, _WIDTH - len(head), subsequent_indent="  ", break_on_hyphens=False):
                _line(head + line)
                head = " " * len(head)


def _line(text: str) -> None:
    show(f"{text}\n")
    sys.stdout.flush()  # the next line may take a while


def report(config: GemmConfig) -> bool:
    """Write the whole report, check by check as they end.

    Args:
        config: which backends are asked for; its limits are those of each step of a check.

    Returns:
        Whether all is well: every smoke product is right, and every backend that was named can run (``--allow-missing``
        forgives that).
    """
    started = time.monotonic()
    _line(f"pytest-gemm {__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    devices = {backend.name: str(config.device_of(backend)) for backend in config.backends}
    if not config.named:  # what distributions ship is loaded by a worker process, which may die of it
        devices |= {name: "" for name in config.registry.shipped() if name not in devices}
    with contextlib.ExitStack() as stack:
        # The threads end when their worker does, so that is closed first.
        threads = stack.enter_context(futures.ThreadPoolExecutor(len(devices)))
        worker = Worker(config, _answer, beside=len(devices) - 1)
        stack.callback(worker.close)
        machine = _Check("machine", "", worker, {}).ask()  # the others need its torch
        machine.show()
        if machine.said == "failed":
            _line("nothing else was asked")
            return False
        lanes = iter((worker, *worker.beside))
        checks = [_Check(name, device, next(lanes), {"backend": name}) for name, device in devices.items()]
        _line(f"{len(checks)} checks at once")
        for done in futures.as_completed([threads.submit(check.ask) for check in checks]):
            done.result().show()
    said = {check.said for check in checks}
    _line(_total(checks, time.monotonic() - started))
    return "failed" not in said and ("missing" not in said or not config.named or "missing" in config.allow)


def _total(checks: Sequence[_Check], seconds: float) -> str:
    """The last line."""
    words = {"works": "can run", "missing": "cannot run", "failed": "FAILED"}
    named = {said: [check.name for check in checks if check.said == said] for said in words}
    parts = [f"{words[said]}: {' '.join(names)}" for said, names in named.items() if names]
    return "; ".join([f"{seconds:.0f} s", *parts])


# -- in the worker process ---------------------------------------------------------------------------------


def _answer(service: Service, request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines that answer a request."""
    case = CaseId(request.get("backend", ""), "")
    if not case.backend:
        with service.watch(Activity(case, Phase.COMPILE)):
            yield from ((line, "") for line in _machine())
        return
    registry, name = service.config.registry, case.backend
    with service.watch(Activity(case, Phase.COMPILE)):
        loads = name in registry.shipped() and registry.origin(name) is None
        try:
            backend = registry.named(name)
        except RegistryError as error:
            yield f"FAILED: {error}", "failed"
            return
        if loads:
            settings.configure(backend, {})
        device = service.config.device_of(backend)
        if origin := registry.origin(name):
            yield f"of {origin}, on {device}", ""
        availability = backend.availability(device)
        asked = () if availability.reason else map(Problem.parse, _SMOKE)
        problem = next((p for p in asked if backend.supports(p, DEFAULT) is None), None)
    if (reason := availability.reason) is not None:
        yield f"cannot run: {reason}", "missing"
        return
    if availability.versions:
        yield f"with {', '.join(' '.join(pair) for pair in availability.versions)}", ""
    if problem is None:
        yield f"can run; no smoke product: it supports none of {' '.join(_SMOKE)}", "works"
        return
    from pytest_gemm.judging.case import Case

    started = time.perf_counter()
    outcomes = service.judge.outcomes(Case(backend, problem, ("rand",), 0, device))
    worst = next((o for o in outcomes if o.status.is_failure), outcomes[0])
    seconds = f"{time.perf_counter() - started:.1f} s with its compile"
    if worst.status is Status.PASSED:
        yield f"can run: {problem.line} passed, {seconds}", "works"
    else:
        why = f": {worst.reason.text}" if worst.reason else ""
        yield f"FAILED: {problem.line} {worst.status}{why}, {seconds}", "failed"
    if worst.kernels:
        yield f"kernel {', '.join(worst.kernels)}", ""


def _machine() -> Iterator[str]:
    import torch

    cpu, cores = processor.cpu(), len(os.sched_getaffinity(0))
    units = [flag for flag in cpu.flags if flag in _UNITS]
    yield f"torch {torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'}"
    yield f"CPU: {cpu.name}, {cores} cores, {', '.join(units) or 'no matrix units'}"
    for gpu in gpus.gpus():
        yield f"GPU {gpu.index}: {gpu.name}, sm_{gpu.architecture}, driver {gpu.driver}"
