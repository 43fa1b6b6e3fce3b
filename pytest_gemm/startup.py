"""How the workers of pytest-xdist start and end: side by side, with their threads, and ready before their tests.

xdist starts one worker after the other, and a worker imports torch when its first test needs it.  The controller waits
for their ends.  With many workers these seconds decide how long a run takes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_gemm import forkserver, selection
from pytest_gemm.api import device_kernels
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.backends.inductor import ahead
from pytest_gemm.config import CONFIG, GemmConfig, workers
from pytest_gemm.core import trace
from pytest_gemm.core.case_id import Device
from pytest_gemm.isolation import termination
from pytest_gemm.options import is_any_given
from pytest_gemm.storage import cache, files
from pytest_gemm.values import cores
from pytest_gemm.worker.keeper import Keeper, cuda_has_started

KEEPER = pytest.StashKey[Keeper]()
"""What starts workers for this process, where kernels have a process of their own."""

# With fewer tests for each worker some may get none.
_A_WORKER: Final = 3
# As many workers leave no core for a process beside them, on a machine of so many.
_FEW: Final = 2
# What the first case of a process imports: the judge, and what it records the kernels with.
_JUDGING: Final = ("torch", "torch.profiler", "pytest_gemm.judging.judge", "torch._dynamo")
# What the first question to a worker imports.
_WORKING: Final = ("torch", "torch._dynamo", "pytest_gemm.worker.server")
# What the first compile by Inductor imports.  None of these starts its pool of compile processes.
_COMPILING: Final = ("torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "torch._inductor.codegen.triton")


def register(config: pytest.Config) -> None:
    """Add the hooks in a run with GEMM tests."""
    keep_bytecode()
    made = _Worker(config) if hasattr(config, "workerinput") else _Controller(config)
    config.pluginmanager.register(made, "gemm-startup")


def keeper(settings: GemmConfig, config: pytest.Config) -> Keeper | None:
    """What starts workers for this process, before it computes; ``None`` where kernels run inline.

    They do for a debugger, and where fuzzing and guard pages have judges that may die.
    """
    debugged = config.getoption("usepdb", False) or config.getoption("trace", False)
    if settings.inline or debugged or settings.fuzz or settings.guard == "pages" or sys.platform != "linux":
        return None
    if cuda_has_started() and any(device != Device.CPU for device in settings.devices.values()):
        text = (
            "kernels run in pytest's process: CUDA was started in it before, and a fork of it cannot use the device. "
            "If a conftest.py asks torch.cuda.is_available(), PYTORCH_NVML_BASED_CUDA_CHECK=1 answers without a start"
        )
        config.issue_config_time_warning(pytest.PytestWarning(text), 2)
        return None
    compiling = any(honours(backend, Capability.USER_CACHES) for backend in settings.backends)
    backends = {backend.name: backend for backend in settings.registry}
    return Keeper(backends, settings.threads, (*_WORKING, *(_COMPILING if compiling else ())))


def keep_bytecode() -> None:
    """Keep Python's bytecode in the cache where nothing else does: without it every process compiles torch, 6 s.

    So it is where ``PYTHONDONTWRITEBYTECODE`` is set, as images often do, and torch was installed without bytecode, as
    uv does.  That variable keeps files out of the installation, which this leaves as it is.
    """
    if not os.environ.get("PYTHONDONTWRITEBYTECODE") or sys.pycache_prefix:
        return
    torch = find_spec("torch")
    if torch is None or torch.origin is None or Path(cache_from_source(torch.origin)).exists():
        return
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.use() / "bytecode")
    sys.dont_write_bytecode = False
    del os.environ["PYTHONDONTWRITEBYTECODE"]


class _Controller:
    """The hooks of the process that starts the workers."""

    def __init__(self, config: pytest.Config) -> None:
        settings = config.stash[CONFIG]
        # Started before all else, for it imports torch meanwhile.
        forks = settings.fork and workers(config) > 1 and is_any_given(config)
        self._launch = _fork_server(config, settings) if forks else ""

    @pytest.hookimpl(optionalhook=True, trylast=True)  # what others change in a specification is in it
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: Sequence[Any]) -> None:
        """Start them all at once, and say where they have more threads than there are cores."""
        terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and (warning := oversubscribed(config.stash[CONFIG], config)):
            terminal.ensure_newline()
            terminal.write_line(f"gemm: {warning}")
        group = getattr(getattr(config.pluginmanager.get_plugin("dsession"), "nodemanager", None), "group", None)
        here = [spec for spec in specs if spec.popen]
        for spec in here:
            if self._launch and not spec.python and not spec.chdir:
                spec.python = self._launch
        if not is_any_given(config):
            return
        settings = config.stash[CONFIG]
        if settings.generates and not any(settings.isas) and len(here) > _FEW and (process := ahead.start()):
            config.add_cleanup(process.kill)
        if group is not None and len(here) > 1:
            group.makegateway = _handed_out(group.makegateway, here)


def _fork_server(config: pytest.Config, settings: GemmConfig) -> str:
    """Start a process that forks workers; returns the command that starts one, instead of Python's.

    On a system without ``/proc`` it is "".
    """
    compiling = any(honours(backend, Capability.USER_CACHES) for backend in settings.backends)
    modules = ("torch", "torch._dynamo", *(_COMPILING if compiling else ()))
    folder = files.own_folder()
    path = str(folder / "workers")
    with socket.socket(socket.AF_UNIX) as listening:
        opened = os.open(folder, os.O_RDONLY)
        try:
            listening.bind(forkserver.short(opened, "workers"))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            return ""
        finally:
            os.close(opened)
        listening.listen(1024)
        process = subprocess.Popen(
            [sys.executable, forkserver.__file__, "serve", str(listening.fileno()), *modules],
            stdin=subprocess.PIPE,
            env={**_passive(settings, config), **os.environ},
            pass_fds=(listening.fileno(),),
        )

    def stop() -> None:
        process.communicate()  # it ends when its standard input does
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(stop)
    return shlex.join([sys.executable, "-I", "-S", forkserver.__file__, "launch", path])


def _handed_out(start: Callable[[Any], Any], specs: Sequence[Any]) -> Callable[[Any], Any]:
    """What execnet starts a process with, where these have been started: xdist asks for one after the other."""

    def timed(spec: Any) -> Any:
        with trace.span(f"start of {spec.id}"):
            made = start(spec)
            made._rinfo()  # which xdist would wait for, and keeps
            return made

    with ThreadPoolExecutor(len(specs)) as pool:
        started = {spec.id: pool.submit(timed, spec) for spec in specs}

    def handed_out(spec: Any) -> Any:
        found = started.pop(getattr(spec, "id", None), None)
        return start(spec) if found is None else found.result()

    return handed_out


def oversubscribed(settings: GemmConfig, config: pytest.Config) -> str:
    """What is wrong where workers and their threads are more than the cores; "" where they are not."""
    count, threads = workers(config), max([settings.threads, *(max(pair) for pair in settings.thread_axis)])
    if count == 1 or threads == 1 or count * threads <= cores():
        return ""
    right = max(1, cores() // threads)
    return (
        f"{count} workers with {threads} threads each are {count * threads} threads on {cores()} cores, which wait for "
        f"one another; -n {right} fits"
    )


def _passive(settings: GemmConfig, config: pytest.Config) -> dict[str, str]:
    """What OpenMP reads when it is loaded: a thread that spins keeps another one from its core."""
    return {"OMP_WAIT_POLICY": "passive"} if oversubscribed(settings, config) else {}


def _start_cuda(*, profiled: bool) -> None:
    """Make the CUDA context, and with ``profiled`` load the profiler's library; what fails, fails in the first test."""
    with trace.span("start of CUDA"), contextlib.suppress(Exception):
        import_module("torch").zeros(1, device="cuda")
        if profiled:
            device_kernels.works()


class _Worker:
    """The hooks of a worker."""

    def __init__(self, config: pytest.Config) -> None:
        settings = config.stash[CONFIG]
        # NumPy's and SciPy's libraries start a thread for each core that they see, which spins before it sleeps.
        # Nothing here computes with them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        for name, value in _passive(settings, config).items():
            os.environ.setdefault(name, value)

    @pytest.hookimpl(tryfirst=True)  # the controller knows what was collected, and waits for the other workers
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Import what the first test would wait for; what fails here, fails there with its reason."""
        settings = session.config.stash[CONFIG]
        cases = [case for item in session.items if (case := selection.parameter_of(item)) is not None]
        apart = settings.fuzz or settings.guard == "pages" or session.config.option.collectonly
        few = len(cases) < _A_WORKER * workers(session.config)
        if apart or few or any(map(selection.timed, session.items)):  # a process that times is not disturbed
            return
        keeper = session.config.stash.get(KEEPER, None)
        if keeper is not None:
            keeper.prepare()
        backends = [settings.registry[name] for name in dict.fromkeys(one.case.backend for one in cases)]
        compiling = any(honours(backend, Capability.USER_CACHES) for backend in backends)
        cuda = any(settings.device_of(backend) == "cuda" for backend in backends)
        with trace.span("import of torch"), ThreadPoolExecutor(1) as beside, contextlib.suppress(Exception):
            for name in _JUDGING:
                import_module(name)
            if cuda:  # which takes as long as the imports, without Python
                beside.submit(_start_cuda, profiled=keeper is None)
            for name in _COMPILING if compiling and keeper is None else ():
                import_module(name)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """The session is over."""
        atexit.register(_leave)
        termination.end_soon(0)


def _leave() -> None:
    """Do all that is to be done at the exit, and end: Python would take torch apart first, for a second."""
    atexit.unregister(_leave)
    termination.leave(0)
