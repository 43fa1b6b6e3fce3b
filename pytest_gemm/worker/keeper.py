"""The process that starts workers: a fork of the judge's process that has computed nothing.

So a worker has every backend that was registered, also a function of a conftest.py, and a new one costs a fork.  The
keeper imports what all workers need.  A worker leads a process group of its own, which ends with it::

    judge -> keeper -> parent of a worker -> worker

The workers of pytest-xdist are judges that share the keeper of their controller: it imports once for all of them.

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
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import psutil
import pytest

from pytest_gemm.machine import processor
from pytest_gemm.worker import descendants
from pytest_gemm.worker.confinement import confine

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend

_PR_SET_PDEATHSIG: Final = 1
# Seconds that a process has to end when it was told to.
GRACE: Final = 5.0
# How often the keeper is waited for so long, imports included.
TRIES: Final = 60
# Bytes before a request that say how many follow.
_HEAD: Final = 8

# Of PyTorch: whether there is a device is asked without CUDA, which a fork could not use any more.
_WITHOUT_CUDA: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
# Of NumPy's and SciPy's libraries: they start a thread for each core that they see, which spins before it sleeps.
ALONE: Final = ("OPENBLAS_NUM_THREADS", "1")


def cuda_has_started() -> bool:
    """Whether this process uses the driver of a CUDA device, which a fork of it then cannot."""
    with contextlib.suppress(OSError):
        return any(os.readlink(one.path).startswith("/dev/nvidia") for one in os.scandir("/proc/self/fd"))
    return False


class _Request(msgspec.Struct):
    """What a judge tells the keeper.

    Attributes:
        starts: fork a worker with the files that come along; otherwise the keeper imports what workers need.
        threads: CPU threads of PyTorch in the worker.
        cuda: the worker starts CUDA at once.
        environment: of the judge, which the worker has too.
    """

    starts: bool
    threads: int = 0
    cuda: bool = False
    environment: dict[bytes, bytes] = {}


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
        with contextlib.suppress(ValueError):  # none, or what no parent says
            return int(said)
        return None


class Keeper:
    """The judge's handle of the process that starts workers; to be made before this one computes.

    Args:
        backends: every registered backend, by name.
        threads: CPU threads of PyTorch in a worker.
        modules: what every worker will need.
        calls: functions that a worker can be asked to call, by name; they get the ``Inline`` and what was asked with.
        confined: a worker has no rights outside of a folder of its own, see ``confinement``.
        shared: processes that this one starts may use the keeper, too.
        address: of a shared keeper of the process that has started this one; where that is gone there is a new one.
        passive: threads of a worker give up their core while they wait; not where it times, for a user's do not.

    Attributes:
        backends, threads, modules, calls, confined, passive: the same.
        address: of this keeper, where it is shared; else "".
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        threads: int,
        modules: Sequence[str] = (),
        calls: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        *,
        confined: bool = False,
        shared: bool = False,
        address: str = "",
        passive: bool = True,
    ) -> None:
        self.backends, self.threads, self.modules, self.calls = backends, threads, modules, calls
        self.confined, self.address, self.passive = confined, address, passive
        self._lock = threading.Lock()
        self._first: Started | None = None
        self._keeper, self._is_own = 0, False
        if address:
            self._control = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):  # a kernel has ended it
                self._control.connect(address)
                self._keeper = _other_end(self._control)
                return
            self._control.close()
        self._control, there = socket.socketpair()
        reached = None
        if shared:
            self.address = f"\0pytest-gemm-{secrets.token_hex(16)}"  # of no file
            reached = socket.socket(socket.AF_UNIX)
            reached.bind(self.address)
            reached.listen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when there are threads; none of them is needed there
            self._keeper, self._is_own = os.fork(), True
        if self._keeper == 0:
            self._control.close()
            _keep(there, reached, self)
        there.close()
        if reached is not None:
            reached.close()

    def load(self) -> None:
        """Begin with the imports."""
        self._tell(_Request(starts=False), [])

    def prepare(self, *, cuda: bool = False) -> None:
        """Begin with the imports and the first worker; with ``cuda`` it starts CUDA meanwhile."""
        if self._first is None:
            self._first = self._begun(cuda=cuda)

    def start(self) -> Started | None:
        """A new worker; ``None`` where the keeper is gone."""
        with self._lock:
            begun, self._first = self._first or self._begun(), None
        for _ in range(TRIES):
            self._signal(signal.SIGCONT)  # a kernel may have stopped it
            if begun.has_ended(GRACE):  # or begun: the first thing that it tells
                break
        else:
            self._signal(signal.SIGKILL)
            self._control.close()
        pid = b""
        begun.status.settimeout(GRACE)
        with contextlib.suppress(OSError):
            pid = begun.status.recv(64)
        if pid:
            return dataclasses.replace(begun, pid=int(pid))
        begun.close()
        return None

    def _begun(self, *, cuda: bool = False) -> Started:
        """A worker that is not there yet."""
        here, there = socket.socketpair()
        status, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # its process id, and its exit status
        # Files without a name: whatever ends this process, nothing is left.
        said, stack = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("said", "stack"))
        request = _Request(starts=True, threads=self.threads, cuda=cuda, environment=dict(os.environb))
        self._tell(request, [there.fileno(), told.fileno(), said, stack])
        there.close()
        told.close()
        return Started(0, here, status, said, stack)

    def _signal(self, number: int) -> None:
        if self._keeper:  # 0 is one of another container, and to the system all of this group
            with contextlib.suppress(OSError):
                os.kill(self._keeper, number)

    def _tell(self, request: _Request, files: Sequence[int]) -> None:
        data = msgspec.msgpack.encode(request)
        with contextlib.suppress(OSError):  # the keeper is gone: there will be no worker
            socket.send_fds(self._control, [len(data).to_bytes(_HEAD, "little")], files)
            self._control.sendall(data)

    def close(self) -> None:
        """End the keeper."""
        if self._first is not None:
            self._first.close()
        self._control.close()
        if self._is_own:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            with contextlib.suppress(OSError):
                connection.wait([ended := os.pidfd_open(self._keeper)], 2 * GRACE)
                os.close(ended)
            self._signal(signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(self._keeper, 0)
            self._is_own = False


KEEPER: Final = pytest.StashKey[Keeper]()
"""Where pytest's configuration has what starts workers, where kernels have a process of their own."""


# -- in the keeper -------------------------------------------------------------------------------------------


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _keep(control: socket.socket, reached: socket.socket | None, told: Keeper) -> NoReturn:
    """Start workers until the judge that has started this process closes its end."""
    try:
        judge = os.getppid()
        descendants.adopt()
        signal.signal(signal.SIGTERM, _end)
        _die_with(judge, signal.SIGTERM)
        os.setsid()  # out of reach of Ctrl-C
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that have ended need no wait
        faulthandler.disable()  # it would write to a file of the judge's
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        ends = [control] if reached is None else [control, reached]
        _cover_others(null, {end.fileno() for end in ends})
        if told.passive:
            processor.wait_passively()
        if reached is not None:
            os.environ.setdefault(*ALONE)
            reached.listen()  # again, so that a judge that calls learns the id of this process
        while True:
            for end in connection.wait(ends):
                assert isinstance(end, socket.socket)
                if end is reached:
                    ends += _connected(end, judge)
                elif (received := _received(end)) is not None:
                    _serve(*received, told, ends)
                elif end is control:
                    _end()
                else:
                    ends.remove(end)
                    end.close()
    finally:  # no copy of pytest may go on
        os._exit(1)


def _other_end(end: socket.socket) -> int:
    """The process at the other end of a connection."""
    return int.from_bytes(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)


def _end(*_: object) -> NoReturn:
    """End with all that workers have left behind; their parents end by themselves when the judge has."""
    descendants.end(patience=1.0)
    os._exit(0)


def _connected(reached: socket.socket, judge: int) -> list[socket.socket]:
    """The end of another judge that has called: a process that the first one has started, and no kernel."""
    end, _ = reached.accept()
    with contextlib.suppress(psutil.Error):
        if psutil.Process(_other_end(end)).ppid() == judge:
            return [end]
    end.close()
    return []


def _received(end: socket.socket) -> tuple[_Request, list[int]] | None:
    """What a judge tells, with files; ``None`` when it has closed its end."""
    with contextlib.suppress(OSError):
        head, files, _, _ = socket.recv_fds(end, _HEAD, 4)
        rest = b"" if len(head) < _HEAD else end.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        if rest:
            return msgspec.msgpack.decode(rest, type=_Request), files
    return None


def _serve(request: _Request, files: Sequence[int], told: Keeper, ends: Sequence[socket.socket]) -> None:
    """Do what a judge tells."""
    _import(told.modules)
    # The worker's parent is a process of its own: a kernel may end it.
    keeper = os.getpid()
    if request.starts and os.fork() == 0:
        for end in ends:
            end.close()
        _die_with(keeper)
        os.environb.clear()
        os.environb.update(request.environment)
        if told.passive:
            processor.wait_passively()
        _watch(*files, told=told, request=request)
        os._exit(0)
    for one in files:
        os.close(one)


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


def _watch(file: int, status: int, said: int, stack: int, *, told: Keeper, request: _Request) -> None:
    """Start a worker, wait for its end, and tell it."""
    for own in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(own, signal.SIG_DFL)
    descendants.adopt()
    for number in (1, 2):
        os.dup2(said, number)
    folder = tempfile.mkdtemp(prefix="pytest-gemm-") if told.confined else ""
    parent, worker = os.getpid(), os.fork()
    if worker == 0:
        _die_with(parent)
        os.close(status)
        os.setpgid(0, 0)
        try:
            if folder:
                confine(folder)
            _work(file, stack, told, request)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(file)
    os.write(status, str(worker).encode())
    connection.wait([status, os.pidfd_open(worker)])  # it ends, or its judge does
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    descendants.end()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os.write(status, str(code).encode())


def _work(file: int, stack: int, told: Keeper, request: _Request) -> None:
    """Be a worker."""
    from pytest_gemm.worker.server import serve

    # In a thread of its own: OpenMP keeps the threads of a thread that has computed, and a fork has none of these; what
    # may have computed before the fork is pytest's main thread.
    given = socket.socket(fileno=file), told.backends, request.threads, told.calls, stack
    served = threading.Thread(target=serve, args=given)
    served.start()
    if request.cuda:
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
