"""``pytest-gemm doctor``: shows of every backend whether it can run here, and tries one product.

Each check has a process of its own and all of them work at once, so one that takes long holds up no other.  A
check is shown when it ends.  A step that takes longer than the limit ends its process, and its check has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gemm import __version__
from pytest_gemm.api import settings
from pytest_gemm.api.registry import RegistryError
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Activity, Phase, Status
from pytest_gemm.core.text import show
from pytest_gemm.machine import gpus, isa, processor
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.messages import Died, Thrown
from pytest_gemm.worker.process import Process

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig

# The smoke product is the first that the backend supports: TMA can load its operands, no dimension is special.  All are
# in the quick level, so that after a run of that level their kernels are in the caches and in the store of CUTLASS.
_SMOKE: Final = ("mm:f16:nt:32x64x128", "mm:f32:nn:32x64x128", "mm:f64:nn:64x48x1000", "int_mm:i8-i8-i32:nt:32x64x128")
# Flags of the CPU that matter to a matrix product.
_UNITS: Final = {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16"}
# Releases that compute wrong results whatever is asked of them, and what of.
_PREDICATED: Final = "drops predicated copies on CUDA 13 (NVIDIA/cutlass issue 3241): install another release"
_WRONG: Final = {("nvidia-cutlass-dsl", "4.5.0"): _PREDICATED, ("nvidia-cutlass-dsl", "4.5.1"): _PREDICATED}
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
        from pytest_gemm.config.config import CONFIG

        config._do_configure()
        try:
            healthy = report(config.stash[CONFIG])
        finally:
            config._ensure_unconfigure()
        return int(pytest.ExitCode.OK if healthy else pytest.ExitCode.TESTS_FAILED)


class _Check:
    """Questions to a worker.

    Args:
        questions: names of the functions that are asked one after the other, until there is a verdict.
        process: where they are asked.

    Attributes:
        name: of the backend, or ``machine``.
        device: of the backend, "" for the machine.
        lines: the answers, the verdict first.
        said: the verdict: ``works``, ``missing``, ``failed``, or "" for none.
        seconds: how long they took.
    """

    def __init__(self, name: str, device: str, process: Process, *questions: str) -> None:
        self.name, self.device = name, device
        self.lines: list[str] = []
        self.said, self.seconds = "", 0.0
        self._process, self._questions = process, questions

    def ask(self) -> _Check:
        """Wait for the answers."""
        started = time.perf_counter()
        try:
            for question in self._questions:
                with self._process.watch(Activity(CaseId(self.name, ""), Phase.COMPILE)):
                    lines = [] if self.said else self._process.call(_Lines, question, self.name)
                for text, said in lines:
                    self._add(text, said)
        except (Died, Thrown) as error:
            self._add(f"FAILED: {_why(error)}", "failed")
        self.seconds = time.perf_counter() - started
        self._process.close()
        return self

    def _add(self, text: str, said: str) -> None:
        self.said = said or self.said
        self.lines.insert(0 if said else len(self.lines), text)

    def show(self) -> None:
        """Write the lines of the report."""
        head = f"{self.name:<10} {self.device:<5}{self.seconds:6.1f} s  "
        for text in self.lines:
            for line in textwrap.wrap(text, _WIDTH - len(head), subsequent_indent="  ", break_on_hyphens=False):
                _line(head + line)
                head = " " * len(head)


def _why(error: Died | Thrown) -> str:
    if isinstance(error, Thrown):
        return f"{error.kind}: {error.line}"
    if error.limit:
        return f"no answer within {error.limit:g} s; for more time give --timeout=SECONDS"
    return ": ".join([error.reason.text, *error.details.splitlines()[-1:]])


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
    calls = {"machine": _machine, "can run": _can_run, "product": _product}
    modules = ("torch", "torch._dynamo", "pytest_gemm.judging.judge")
    bound = {name: functools.partial(function, config) for name, function in calls.items()}
    keeper = Keeper({one.name: one for one in config.registry}, config.threads, modules, bound)

    def check(name: str, device: str, *questions: str) -> _Check:
        return _Check(name, device, Process(keeper, config.limits), *questions)

    with contextlib.closing(keeper), futures.ThreadPoolExecutor(len(devices)) as threads:
        machine = check("machine", "", "machine").ask()  # the others need its torch
        machine.show()
        if machine.said == "failed":
            _line("nothing else was asked")
            return False
        checks = [check(name, device, "can run", "product") for name, device in devices.items()]
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


# A line of an answer, and the verdict that it is, "" for none.
_Lines = list[tuple[str, str]]


def _can_run(config: GemmConfig, _: object, name: str) -> _Lines:
    """Whether a backend can run here."""
    registry = config.registry
    loads = name in registry.shipped() and registry.origin(name) is None
    try:
        backend = registry.named(name)
    except RegistryError as error:
        return [(f"FAILED: {error}", "failed")]
    if loads:
        settings.configure(backend, {})
    device = config.device_of(backend)
    origin = registry.origin(name)
    lines = [(f"of {origin}, on {device}", "")] if origin else []
    availability = backend.availability(device)
    if (reason := availability.reason) is not None:
        return [*lines, (f"cannot run: {reason}", "missing")]
    if availability.versions:
        lines.append((f"with {', '.join(' '.join(pair) for pair in availability.versions)}", ""))
        lines += [(f"warning: {' '.join(pair)} {_WRONG[pair]}", "") for pair in availability.versions if pair in _WRONG]
    return lines


def _product(config: GemmConfig, _: object, name: str) -> _Lines:
    """One product of a backend, judged where it runs."""
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge

    backend = config.registry[name]
    problem = next((p for p in map(Problem.parse, _SMOKE) if backend.supports(p, DEFAULT) is None), None)
    if problem is None:
        return [(f"can run; no smoke product: it supports none of {' '.join(_SMOKE)}", "works")]
    started = time.perf_counter()
    outcomes = Judge().outcomes(Case(backend, problem, ("rand",), 0, config.device_of(backend)))
    worst = next((o for o in outcomes if o.status.is_failure), outcomes[0])
    seconds = f"{time.perf_counter() - started:.1f} s with its compile"
    kernels = [(f"kernel {', '.join(worst.kernels)}", "")] if worst.kernels else []
    if worst.status is Status.PASSED:
        return [(f"can run: {problem.line} passed, {seconds}", "works"), *kernels]
    why = f": {worst.reason.text}" if worst.reason else ""
    return [(f"FAILED: {problem.line} {worst.status}{why}, {seconds}", "failed"), *kernels]


def _machine(_: GemmConfig, __: object, ___: str) -> _Lines:
    """What the backends share."""
    import torch

    cpu, cores = processor.cpu(), len(os.sched_getaffinity(0))
    units = [flag for flag in cpu.flags if flag in _UNITS]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    lines = [f"torch {torch.__version__}, {cuda}"]
    lines.append(f"CPU: {cpu.name}, {cores} cores, {', '.join(units) or 'no matrix units'}")
    lines += [f"{library} is capped at {level} by the environment" for library, level in isa.caps(cpu.flags).items()]
    lines += [f"GPU {gpu.index}: {gpu.name}, sm_{gpu.architecture}, driver {gpu.driver}" for gpu in gpus.gpus()]
    return [(line, "") for line in lines]
