"""Faults for ``studies/fault_study.py``: a backend for each, which is correct but for one problem."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import unittest
import warnings
from collections.abc import Callable
from typing import Any, Final

import pytest

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, Candidates
from pytest_gemm.api.registry import Registry
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

# Rows of the problem that a fault strikes at, and of the one beside it at which the same backend is correct.
GUILTY: Final = 8
CONTROLS: Final = 9
# Where an exception can be raised.
PLACES: Final = ("supports", "prepare", "run", "run again", "proof", "contract", "candidates")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that a backend does.

    Attributes:
        kind: what, in words.
        where: one of :data:`PLACES`; ``result``: what it does to its result; ``availability``.
        do: does it; a fault of the result is given the right one.
        expected: statuses that its case may end with.
        ends: the process ends with it.
    """

    kind: str
    where: str
    do: Callable[..., Any]
    expected: tuple[str, ...] = ("crashed",)
    ends: bool = False

    @property
    def name(self) -> str:
        """Of its backend."""
        words = f"{self.kind} in {self.where}"
        return "f-" + "".join(c if c.isalnum() else "-" for c in words)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Own(BaseException):
    pass


class Numbered(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307  # a mistake that a backend can make


def raises(error: Callable[[], BaseException]) -> Callable[..., Any]:
    """A fault that raises a new exception of this kind."""

    def do(*_: object) -> None:
        raise error()

    return do


def recursion(*_: object) -> None:
    recursion()


def calls(function: Callable[..., Any], *args: object, **named: object) -> Callable[..., Any]:
    """A fault that is one call."""
    return lambda *_: function(*args, **named)


RAISED: Final[dict[str, Callable[..., Any]]] = {
    "RuntimeError": raises(lambda: RuntimeError("out of registers")),
    "AssertionError": raises(AssertionError),
    "KeyError of two lines": raises(lambda: KeyError("one\ntwo")),
    "StopIteration": raises(StopIteration),
    "MemoryError": raises(MemoryError),
    "RecursionError": recursion,
    "OSError": raises(lambda: BrokenPipeError(32, "Broken pipe")),
    "CancelledError": raises(asyncio.CancelledError),
    "unittest.SkipTest": raises(lambda: unittest.SkipTest("no such kernel")),
    "a lone surrogate": raises(lambda: ValueError("\ud800")),
    "terminal escapes": raises(lambda: ValueError("\x1b[2J\x1b]0;title\x07\x00")),
    "10 MB of text": raises(lambda: ValueError("x" * 10_000_000)),
    "__str__ raises": raises(Mute),
    "__str__ returns an int": raises(Numbered),
    "an odd class": raises(lambda: type("a\x1b[31m b", (Exception,), {})("odd")),
    "a cause that is mute": raises(lambda: _caused(RuntimeError("outer"), Mute())),
    "own BaseException": raises(Own),
    "SystemExit(0)": raises(lambda: SystemExit(0)),
    "GeneratorExit": raises(GeneratorExit),
    "pytest.skip": calls(pytest.skip, "no such kernel"),
    "pytest.xfail": calls(pytest.xfail, "known"),
    "pytest.fail": calls(pytest.fail, "broken"),
    "pytest.exit(0)": calls(pytest.exit, "enough", returncode=0),
    "pytest.importorskip": calls(pytest.importorskip, "no_such_module"),
}


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class NoTensor:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def _subclass(right: Any) -> Any:
    import torch

    return right.as_subclass(type("Sub", (torch.Tensor,), {}))


def _quantised(right: Any) -> Any:
    import torch

    return torch.quantize_per_tensor(right, 1.0, 0, torch.qint8)


WRONG: Final = ("crashed", "incorrect")
RESULTS: Final[dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]]] = {
    "None": (lambda _: None, WRONG),
    "an int": (lambda _: 7, WRONG),
    "a str": (lambda _: "\ud800", WRONG),
    "a list": (lambda right: [right], WRONG),
    "nested lists of numbers": (lambda right: right.tolist(), WRONG),
    "a NumPy array": (lambda right: right.numpy(), WRONG),
    "three tensors": (lambda right: (right, right, right), WRONG),
    "no tensor": (lambda _: (), WRONG),
    "a generator": (lambda right: (row for row in right), WRONG),
    "an object that answers nothing": (lambda _: NoTensor(), WRONG),
    "another shape": (lambda right: right[:1], WRONG),
    "another dtype": (lambda right: right.double(), WRONG),
    "complex": (lambda right: right.to(__import__("torch").complex64), WRONG),
    "sparse": (lambda right: right.to_sparse(), WRONG),
    "on meta": (lambda right: right.to("meta"), WRONG),
    "quantised": (_quantised, WRONG),
    "with a gradient": (lambda right: right.requires_grad_(), (*WRONG, "passed")),
    "a subclass": (_subclass, (*WRONG, "passed")),
}


# -- what a kernel leaves behind, with a right result ------------------------------------------------


def _thread(*_: object) -> None:
    def late() -> None:
        time.sleep(0.05)
        raise RuntimeError("late")

    threading.excepthook = lambda _: None  # pytest warns of it, and that is all
    threading.Thread(target=late, daemon=True).start()


def _close(*numbers: int) -> Callable[..., Any]:
    def do(*_: object) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):
                os.close(number)

    return do


def _away(*_: object) -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def _fork_and_leave(*_: object) -> None:
    if os.fork() == 0:
        os._exit(0)


def _flood(*_: object) -> None:
    os.write(1, b"\x1b[31m\x00" * 1_000_000)
    sys.stderr.write("\ud800" * 1000)


def _patch_time(*_: object) -> None:
    time.perf_counter = lambda: 0.0
    time.monotonic = lambda: 1e9


def _signals(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _warn(*_: object) -> None:
    warnings.simplefilter("error")
    with contextlib.suppress(Warning):
        warnings.warn("\ud800\x1b", stacklevel=1)


def _limit_files(*_: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.RLIM_INFINITY))


def _forget(*_: object) -> None:
    for name in [name for name in sys.modules if name.startswith(("json", "pytest_gemm.report.terminal"))]:
        del sys.modules[name]


def _builtins(*_: object) -> None:
    sys.path.clear()
    sys.argv.clear()


def _settings(*_: object) -> None:
    gc.disable()
    gc.set_threshold(0)
    random.seed(0)
    sys.setswitchinterval(1.0)


def _hooks(*_: object) -> None:
    sys.excepthook = lambda *_: os._exit(0)
    sys.unraisablehook = lambda _: os._exit(0)


def _unraisable(*_: object) -> None:
    class Unraisable:
        def __del__(self) -> None:
            raise RuntimeError("\ud800")

    Unraisable()


LEFT: Final[dict[str, Callable[..., Any]]] = {
    "a thread that raises later": _thread,
    "another working folder, which is gone": _away,
    "stdin closed": _close(0),
    "stdout closed": _close(1),
    "stderr closed": _close(2),
    "the temporary folder removed": lambda *_: shutil.rmtree(tempfile.gettempdir(), ignore_errors=True),
    "a copy of the process that goes on": calls(os.fork),
    "a copy of the process that leaves": _fork_and_leave,
    "a flood on stdout": _flood,
    "no sys.stdout": lambda *_: vars(sys).update(stdout=None, stderr=None),
    "the clocks replaced": _patch_time,
    "signals ignored": _signals,
    "warnings as errors": _warn,
    "a limit of files": _limit_files,
    "no environment": calls(os.environ.clear),
    "modules forgotten": _forget,
    "no sys.path": _builtins,
    "no garbage collection": _settings,
    "excepthook leaves": _hooks,
    "deep recursion allowed": calls(sys.setrecursionlimit, 100_000),
    "umask 777": calls(os.umask, 0o777),
    "niceness": calls(os.nice, 1),
    "__del__ raises": _unraisable,
}


# -- what ends the process ---------------------------------------------------------------------------


def _killed(number: int) -> Callable[..., Any]:
    return lambda *_: os.kill(os.getpid(), number)


def _endless(*_: object) -> None:
    while True:
        time.sleep(60)


def _leave_in_a_thread(*_: object) -> None:
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()


def _close_all(*_: object) -> None:
    os.closerange(3, 256)
    os._exit(0)


ENDING: Final[dict[str, Callable[..., Any]]] = {
    "os._exit(0)": calls(os._exit, 0),
    "os._exit(1)": calls(os._exit, 1),
    "os._exit(5)": calls(os._exit, 5),
    "os._exit(0) of a thread": _leave_in_a_thread,
    "os._exit(0) with all files closed": _close_all,
    "os.execv": calls(os.execv, "/bin/true", ["true"]),
    "os.abort": calls(os.abort),
    "a segmentation fault": calls(ctypes.string_at, 0),
    "free() of no memory": lambda *_: ctypes.CDLL(None).free(ctypes.c_void_p(16)),
    "SIGKILL": _killed(signal.SIGKILL),
    "SIGTERM": _killed(signal.SIGTERM),
    "SIGBUS": _killed(signal.SIGBUS),
    "SIGALRM": _killed(signal.SIGALRM),
    "no end": _endless,
    "no end, with Python's lock": lambda *_: ctypes.PyDLL(None).sleep(60),
}
# In the process of a run without workers SIGTERM ends the run, as anybody's does.
OTHERWISE: Final = {
    "SIGTERM": ("crashed", "interrupted"),
    "no end": ("timed-out",),
    "no end, with Python's lock": ("timed-out",),
}


def _freed(right: Any) -> Any:
    right.untyped_storage().resize_(0)
    return right


AT_EXIT: Final[dict[str, Callable[..., Any]]] = {
    "atexit: os._exit(0)": calls(atexit.register, os._exit, 0),
    "atexit: SIGKILL": lambda *_: atexit.register(os.kill, os.getpid(), signal.SIGKILL),
}


def faults() -> list[Fault]:
    """All of them."""
    found = [Fault(kind, place, do) for kind, do in RAISED.items() for place in PLACES]
    found += [Fault(kind, "availability", do, ("missing",)) for kind, do in RAISED.items()]
    found += [Fault(kind, "result", do, expected) for kind, (do, expected) in RESULTS.items()]
    found += [Fault(kind, "run", do, ("passed", "crashed", "incorrect")) for kind, do in LEFT.items()]
    found += [Fault(kind, "run", do, OTHERWISE.get(kind, ("crashed",)), ends=True) for kind, do in ENDING.items()]
    early = (("os._exit(0)", "prepare"), ("SIGKILL", "prepare"), ("os._exit(0)", "supports"))
    found += [Fault(kind, where, ENDING[kind], ends=True) for kind, where in early]
    found += [Fault(kind, "run", do, ("passed",), ends=True) for kind, do in AT_EXIT.items()]
    refuses = raises(lambda: Unsupported("hard-data", "not this data"))
    found += [Fault("Unsupported", "run", refuses), Fault("Unsupported", "run again", refuses)]
    found.append(Fault("freed storage", "result", _freed, WRONG, ends=True))
    return [*found, Fault("KeyboardInterrupt", "run", raises(KeyboardInterrupt))]


# -- the backends ------------------------------------------------------------------------------------


class Prepared:
    def __init__(self, backend: Faulty, problem: Problem) -> None:
        self._backend = backend
        self._problem = problem
        self._runs = 0

    @property
    def contract(self) -> Contract:
        self._backend.strike("contract", self._problem)
        return Contract(epilogue="eager")

    def run(self, operands: Any) -> Any:
        self._runs += 1
        self._backend.strike("run" if self._runs == 1 else "run again", self._problem)
        right, fault = operands.a @ operands.b, self._backend.fault
        return fault.do(right) if fault and fault.where == "result" and self._backend.hits(self._problem) else right

    def proof(self) -> Proof:
        self._backend.strike("proof", self._problem)
        return Proof((self._backend.name,), ("faulty_kernel",), ("faulty_kernel",) if self._runs else ())


class Faulty:
    devices = ("cpu",)

    def __init__(self, name: str, fault: Fault | None = None) -> None:
        self.name = name
        self.fault = fault

    def hits(self, problem: Problem) -> bool:
        return problem.shape.m == GUILTY

    def strike(self, where: str, problem: Problem) -> None:
        if self.fault is not None and self.fault.where == where and self.hits(problem):
            self.fault.do()

    def availability(self, device: str) -> Availability:
        if self.fault is not None and self.fault.where == "availability":
            self.fault.do()
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        self.strike("supports", problem)
        return None

    def prepare(self, problem: Problem, operands: Any, request: object = None) -> Prepared:
        self.strike("prepare", problem)
        return Prepared(self, problem)


class Choosing(Faulty):
    def candidates(self, problem: Problem, operands: Any, request: object) -> Candidates:
        self.strike("candidates", problem)
        return Candidates(("only",))


def pytest_gemm_register_backends(registry: Registry) -> None:
    """A correct backend, and one for each fault that ``FAULTS`` names."""
    add: Callable[[Any], None] = registry.add  # what is prepared has a property in the place of a contract
    add(Faulty("correct"))
    wanted = os.environ["FAULTS"].split(",")
    for fault in faults():
        if fault.name in wanted:
            add((Choosing if fault.where == "candidates" else Faulty)(fault.name, fault))
