"""How the workers of pytest-xdist start: side by side, with their threads, and ready before their tests.

xdist starts one worker after the other, and a worker imports torch when its first test needs it.  With many workers
these seconds decide how long a run takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Final

import pytest

from pytest_gemm.api import device_kernels
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.backends.inductor import ahead
from pytest_gemm.config.config import CONFIG, SPEED_WORKER, GemmConfig, workers
from pytest_gemm.config.options import is_any_given
from pytest_gemm.core.case_id import Device
from pytest_gemm.plugin import selection
from pytest_gemm.worker import confinement
from pytest_gemm.worker.keeper import ALONE, KEEPER, Keeper, cuda_has_started

# As many workers leave no core for a process beside them, on a machine of so many.
_FEW: Final = 2
# How many queues of work a process has on a device, eight without it.
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
# What the first case of a process imports; where kernels run in it, too, that is more.
_JUDGING: Final = ("torch", "pytest_gemm.judging.judge")
# What the first question to a worker imports.
_WORKING: Final = ("torch", "torch._dynamo", "pytest_gemm.worker.server")
# What the first compile by Inductor imports.  None of these starts its pool of compile processes.
_COMPILING: Final = (
    *(f"torch._inductor.{one}" for one in ("compile_fx", "codegen.cpp", "codegen.triton", "freezing", "choices")),
    *("torch.export._trace", "torch.utils.cpp_extension", "sympy.tensor.tensor"),
)


def register(config: pytest.Config) -> None:
    """Add the hooks of a worker, in a run with GEMM tests."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Worker(), "gemm-startup")


def keeper(settings: GemmConfig, config: pytest.Config) -> Keeper | None:
    """What starts workers for this process, before it computes; ``None`` where kernels run inline.

    They do for a debugger.  The controller of pytest-xdist starts one for all of its workers.

    Raises:
        pytest.UsageError: for what such a process is needed for and cannot be had.
    """
    debugged = config.getoption("usepdb", False) or config.getoption("trace", False)
    inline = settings.inline or debugged or sys.platform != "linux"
    own = "kernels run in pytest's own process: on Linux, leave out run.inline=yes, --pdb and --trace"
    if inline and settings.guard == "pages":  # an access to a page would end pytest
        raise pytest.UsageError(f"--gemm-guard=pages: {own}")
    if settings.confined and (lacks := own if inline else confinement.lacks()):
        raise pytest.UsageError(f"--gemm-set=run.confined=yes: {lacks}")
    if inline:
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
    modules = (*_WORKING, *(_COMPILING if compiling else ()))
    if config.pluginmanager.has_plugin(SPEED_WORKER):
        from pytest_gemm.speed.bench import CALLS

        return Keeper(backends, settings.speed.threads, modules, CALLS, confined=settings.confined, passive=False)
    shared = str(config.getoption("dist", "no")) != "no" and not hasattr(config, "workerinput")
    address = shared_keeper(config)
    made = Keeper(backends, settings.threads, modules, confined=settings.confined, shared=shared, address=address)
    if is_any_given(config):  # GEMM tests will come
        if shared:
            made.load()
        elif address:  # the process begins while this one imports torch and collects
            cuda = "cuda" in settings.devices.values()
            made.prepare(cuda=cuda)
            if cuda:
                threading.Thread(target=_start_driver, daemon=True).start()
    return made


def shared_keeper(config: pytest.Config) -> str:
    """The address of the controller's keeper, in a worker of pytest-xdist that it has started itself; else ""."""
    address, controller = getattr(config, "workerinput", {}).get("gemm_keeper", ("", 0))
    return str(address) if controller == os.getppid() else ""


def before_workers(settings: GemmConfig, config: pytest.Config, specs: Sequence[Any]) -> None:
    """Compile Inductor's header ahead of the workers."""
    generates = is_any_given(config) and settings.generates and not any(settings.isas)
    if generates and sum(spec.popen is not None for spec in specs) > _FEW and (process := ahead.start()):
        config.add_cleanup(process.kill)


def _start_driver() -> None:
    """Make the context that PyTorch will use, before it is imported: the driver makes those of all processes in turn.

    Nothing here needs work queues beside each other, and a context with one of them takes a third of the time.
    """
    if not (is_given := _QUEUES in os.environ):
        os.putenv(_QUEUES, "1")  # for the driver alone: what has ``os.environ`` is a user's kernel, too
    with contextlib.suppress(OSError, AttributeError):  # without a driver, or with another one
        driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        driver.cuInit(0)
        driver.cuDeviceGet(ctypes.byref(device), 0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)
    if not is_given:
        os.unsetenv(_QUEUES)


def _start_cuda(*, profiled: bool) -> None:
    """Make the CUDA context, and with ``profiled`` load the profiler's library; what fails, fails in the first test."""
    with contextlib.suppress(Exception):
        import_module("torch").zeros(1, device="cuda")
        if profiled:
            device_kernels.works()


class _Worker:
    """The hooks of a worker."""

    def __init__(self) -> None:
        os.environ.setdefault(*ALONE)  # nothing here computes with them

    @pytest.hookimpl(tryfirst=True)  # the controller knows what was collected, and waits for the other workers
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Import what the first test would wait for; what fails here, fails there with its reason."""
        settings = session.config.stash[CONFIG]
        cases = [case for item in session.items if (case := selection.parameter_of(item)) is not None]
        few = len(cases) < workers(session.config)  # some get none
        timed = any(map(selection.timed, session.items))  # its processes must not be disturbed
        if session.config.option.collectonly or few or timed:
            return
        backends = [settings.registry[name] for name in dict.fromkeys(one.case.backend for one in cases)]
        compiling = any(honours(backend, Capability.USER_CACHES) for backend in backends)
        cuda = any(settings.device_of(backend) == "cuda" for backend in backends)
        keeper = session.config.stash.get(KEEPER, None)
        if keeper is not None:
            keeper.prepare(cuda=cuda)
        with ThreadPoolExecutor(1) as beside, contextlib.suppress(Exception):
            inline = (*_WORKING, *(_COMPILING if compiling else ())) if keeper is None else ()
            for name in (*_JUDGING, *inline):
                import_module(name)
            if cuda:  # which takes as long as the imports, without Python
                beside.submit(_start_cuda, profiled=keeper is None)
