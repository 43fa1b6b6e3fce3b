"""The process that starts workers: a fork of the judge's process that has computed nothing.

So a worker has every backend that was registered, also a function of a conftest.py, and a new one costs a fork.  The
keeper imports what all workers need.  A worker leads a process group of its own, which ends with it::

    judge -> keeper -> parent of a worker -> worker

No torch here: a run without GEMM tests must not import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import fcntl
import importlib
import os
import shutil
import signal
import socket
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from pytest_gemm.worker.confinement import confine

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend

_PR_SET_PDEATHSIG: Final = 1
# Seconds that a process has to end when it was told to.
GRACE: Final = 5.0
# What the keeper is told: to fork a worker with the files that come along, or one that starts CUDA at once.
_START, _START_CUDA = b"s", b"c"

# Of PyTorch: whether there is a device is asked without CUDA, which a fork could not use any more.
_WITHOUT_CUDA: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Of OpenMP: a thread that spins keeps the other process from its core.
PASSIVE: Final = ("OMP_WAIT_POLICY", "passive")


def cuda_has_started() -> bool:
    """Whether this process uses the driver of a CUDA device, which a fork of it then cannot."""
    with contextlib.suppress(OSError):
        return any(os.readlink(one.path).startswith("/dev/nvidia") for one in os.scandir("/proc/self/fd"))
    return False


@dataclasses.dataclass
class Started:
    """A worker that has been started.

    Attributes:
        pid: of the process, and of its group.
        end: the socket that it listens to.
        status: where its exit status is told.
        said: open file of what it writes to stdout and stderr.
        stack: open file of where Python was when it ended.
    """

    pid: int
    end: socket.socket
    status: socket.socket
    said: int
    stack: int

    def has_ended(self, wait: float = 0.0) -> bool:
        """Whether it has ended, in so many seconds at most."""
        return bool(connection.wait([self.status], wait))

    def has_spoken(self, limit: float) -> bool | None:
        """Waits until it has said something, so many seconds at most (0: no limit); ``None`` where it has ended."""
        ready = connection.wait([self.end, self.status], limit or None)
        return None if ready == [self.status] else bool(ready)

    def close(self) -> None:
        """Forget what it has said."""
        self.end.close()
        self.status.close()
        os.close(self.said)
        os.close(self.stack)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)

    def reap(self) -> int | None:
        """End its group; the exit status, negative for a signal, ``None`` where it is unknown.  The files stay open."""
        self.end.close()
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.status.settimeout(GRACE)
        said = b""
        with contextlib.suppress(OSError):
            said = self.status.recv(64)
        self.status.close()
        return int(said) if said else None


class Keeper:
    """The judge's handle of the process that starts workers; to be made before this one computes.

    Args:
        backends: every registered backend, by name.
        threads: CPU threads of PyTorch in a worker.
        modules: what every worker will need.
        calls: functions that a worker can be asked to call, by name; they get the ``Inline`` and what was asked with.
        confined: a worker has no rights outside of a folder of its own, see ``confinement``.

    Attributes:
        backends, threads, modules, calls, confined: the same.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        threads: int,
        modules: Sequence[str] = (),
        calls: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        *,
        confined: bool = False,
    ) -> None:
        self.backends, self.threads, self.modules, self.calls = backends, threads, modules, calls
        self.confined = confined
        self._lock = threading.Lock()
        self._first: Started | None = None
        self._control, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when there are threads; none of them is needed there
            self._keeper = os.fork()
        if self._keeper == 0:
            self._control.close()
            _keep(there, self)
        there.close()

    def prepare(self, *, cuda: bool = False) -> None:
        """Begin with the imports and the first worker; with ``cuda`` it starts CUDA meanwhile."""
        if self._first is None:
            self._first = self._begun(_START_CUDA if cuda else _START)

    def start(self) -> Started | None:
        """A new worker; ``None`` where the keeper is gone."""
        with self._lock:
            begun, self._first = self._first or self._begun(_START), None
        pid = b""
        with contextlib.suppress(OSError):
            pid = begun.status.recv(64)
        if pid:
            return dataclasses.replace(begun, pid=int(pid))
        begun.close()
        return None

    def _begun(self, how: bytes) -> Started:
        """A worker that is not there yet."""
        here, there = socket.socketpair()
        status, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # its process id, and its exit status
        # Files without a name: whatever ends this process, nothing is left.
        said, stack = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("said", "stack"))
        with contextlib.suppress(OSError):
            socket.send_fds(self._control, [how], [there.fileno(), told.fileno(), said, stack])
        there.close()
        told.close()
        return Started(0, here, status, said, stack)

    def close(self) -> None:
        """End the keeper."""
        if self._first is not None:
            self._first.close()
        self._control.close()
        with contextlib.suppress(OSError):
            os.kill(self._keeper, signal.SIGKILL)
            os.waitpid(self._keeper, 0)


KEEPER: Final = pytest.StashKey[Keeper]()
"""Where pytest's configuration has what starts workers, where kernels have a process of their own."""


# -- in the keeper -------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep(control: socket.socket, told: Keeper) -> NoReturn:
    """Start workers until the judge closes its end."""
    try:
        _die_with(os.getppid())
        os.setsid()  # out of reach of Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that have ended need no wait
        faulthandler.disable()  # it would write to a file of the judge's
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        _cover_others(null, {control.fileno()})
        os.environ.setdefault(*PASSIVE)
        modules = told.modules
        while True:
            word, files, _, _ = socket.recv_fds(control, 1, 4)
            if not word:
                os._exit(0)
            _import(modules)
            modules = ()
            # The worker's parent is a process of its own: a kernel may end it.
            parent = os.getpid()
            if os.fork() == 0:
                control.close()
                _die_with(parent)
                _watch(*files, keeper=told, cuda=word == _START_CUDA)
                os._exit(0)
            for one in files:
                os.close(one)
    finally:  # no copy of pytest may go on
        os._exit(1)


def _import(modules: Sequence[str]) -> None:
    """Import them; what fails here fails in the worker, with its reason."""
    before = os.environ.get(_WITHOUT_CUDA)
    os.environ[_WITHOUT_CUDA] = "1"
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    os.environ.pop(_WITHOUT_CUDA)
    if before is not None:
        os.environ[_WITHOUT_CUDA] = before


def _watch(file: int, told: int, said: int, stack: int, *, keeper: Keeper, cuda: bool) -> None:
    """Start a worker, wait for its end, and tell it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (1, 2):
        os.dup2(said, number)
    folder = tempfile.mkdtemp(prefix="pytest-gemm-") if keeper.confined else ""
    parent, worker = os.getpid(), os.fork()
    if worker == 0:
        _die_with(parent)
        os.close(told)
        os.setpgid(0, 0)
        try:
            if folder:
                confine(folder)
            _work(file, stack, keeper, cuda=cuda)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(file)
    os.write(told, str(worker).encode())
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.write(told, str(status).encode())


def _work(file: int, stack: int, keeper: Keeper, *, cuda: bool) -> None:
    """Be a worker."""
    from pytest_gemm.worker.server import serve

    # In a thread of its own: OpenMP keeps the threads of a thread that has computed, and a fork has none of these; what
    # may have computed before the fork is pytest's main thread.
    given = socket.socket(fileno=file), keeper.backends, keeper.threads, keeper.calls, stack
    served = threading.Thread(target=serve, args=given)
    served.start()
    if cuda:
        with contextlib.suppress(Exception):  # what fails here, fails in the first question with its reason
            importlib.import_module("torch").zeros(1, device="cuda")
    served.join()


def _cover_others(null: int, ours: set[int]) -> None:
    """Replace what else can be written to by the null device: pytest's files, and the pipes and sockets of others."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            writable = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            what = os.readlink(f"/proc/self/fd/{number}")
            kept = number in {0, 1, 2, null, *ours} or what.startswith(("/dev/nvidia", "anon_inode:"))
            if not kept and (writable or what.startswith("pipe:")):
                os.dup2(null, number)
