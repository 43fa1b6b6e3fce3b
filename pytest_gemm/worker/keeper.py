"""The process that starts workers: a fork of the judge's process that has computed nothing.

So a worker has every backend that was registered, also a function of a conftest.py, and a new one costs a fork.  The
keeper imports what all workers need.  A worker leads a process group of its own, which ends with it.

No torch here: a run without GEMM tests must not import it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from pytest_gemm.worker.death import stack_frames

if TYPE_CHECKING:
    from pytest_gemm.api.protocols import Backend

_PR_SET_PDEATHSIG: Final = 1
# Seconds that a process has to end when it was told to.
GRACE: Final = 5.0
# Characters of what a dying worker wrote to stdout and stderr that are shown.
_LAST_WORDS: Final = 600
# What the keeper is told: to import, and to fork a worker with the socket that comes along.
_IMPORT, _START = b"i", b"s"
# What it says of a worker whose exit status nobody has seen.
_UNKNOWN: Final = b"?"

# Of OpenMP: a thread that spins keeps the other process from its core.
PASSIVE: Final = ("OMP_WAIT_POLICY", "passive")


class Keeper:
    """The judge's handle of the process that starts workers; to be made before this one computes.

    Args:
        backends: every registered backend, by name.
        threads: CPU threads of PyTorch in a worker.
        modules: what every worker will need.

    Attributes:
        backends: the same.
        pid: of the last worker; 0 before the first.
    """

    def __init__(self, backends: Mapping[str, Backend], threads: int, modules: Sequence[str] = ()) -> None:
        self.backends = backends
        self.pid = 0
        # Files without a name: whatever ends this process, nothing is left.
        self._said, self._stack = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("said", "stack"))
        self._control, there = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns when there are threads; none of them is needed there
            self._keeper = os.fork()
        if self._keeper == 0:
            self._control.close()
            _keep(there, backends, threads, modules, self._said, self._stack)
        there.close()

    def prepare(self) -> None:
        """Begin with the imports."""
        with contextlib.suppress(OSError):
            self._control.sendall(_IMPORT)

    def start(self) -> socket.socket | None:
        """A new worker, by the socket that it listens to; ``None`` where the keeper is gone."""
        os.ftruncate(self._stack, 0)
        here, there = socket.socketpair()
        try:
            socket.send_fds(self._control, [_START], [there.fileno()])
            self.pid = int(self._control.recv(64) or b"0")
        except OSError:
            self.pid = 0
        there.close()
        if self.pid:
            return here
        here.close()
        return None

    def fileno(self) -> int:
        """What can be read from when the worker has ended: ``select`` takes this object for its file."""
        return self._control.fileno()

    def signal(self, number: int) -> None:
        """Send the worker a signal."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)

    def reap(self) -> int | None:
        """End the worker's group; its exit status, negative for a signal, ``None`` where nobody is left to tell it."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._control.settimeout(GRACE)
        try:
            said = self._control.recv(64)
        except OSError:
            said = b""
        self._control.settimeout(None)
        return None if said in {b"", _UNKNOWN} else int(said)

    def frames(self) -> str:
        """Where Python was in the worker when it ended."""
        return stack_frames(os.pread(self._stack, os.fstat(self._stack).st_size, 0).decode(errors="replace"))

    def said(self) -> int:
        """How much workers have written to stdout and stderr."""
        return os.fstat(self._said).st_size

    def last_words(self, said: int) -> str:
        """What was written since then, the end of it."""
        begin = max(said, self.said() - _LAST_WORDS)
        return os.pread(self._said, _LAST_WORDS, begin).decode(errors="replace").strip()

    def close(self) -> None:
        """End the keeper, and its worker."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._control.close()
        with contextlib.suppress(OSError):
            os.kill(self._keeper, signal.SIGKILL)
            os.waitpid(self._keeper, 0)
        os.close(self._said)
        os.close(self._stack)


# -- in the keeper -------------------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _keep(
    control: socket.socket,
    backends: Mapping[str, Backend],
    threads: int,
    modules: Sequence[str],
    said: int,
    stack: int,
) -> NoReturn:
    """Fork workers, one after the other, until the judge closes its end."""
    try:
        _die_with(os.getppid())
        os.setsid()  # out of reach of Ctrl-C
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()  # it would write to a file of the judge's
        null = os.open(os.devnull, os.O_RDWR)
        for number, file in ((0, null), (1, said), (2, said)):
            os.dup2(file, number)
        _cover_others(null, {control.fileno()})
        os.environ.setdefault(*PASSIVE)
        while True:
            word, files, _, _ = socket.recv_fds(control, 1, 1)
            if not word:
                os._exit(0)
            for name in modules:
                importlib.import_module(name)
            modules = ()
            if word == _START:
                # The worker's parent is a process of its own: a kernel may end it.
                keeper, parent = os.getpid(), os.fork()
                if parent == 0:
                    _die_with(keeper)
                    _watch(control, files[0], backends, threads, stack)
                    os._exit(0)
                os.close(files[0])
                if os.waitpid(parent, 0)[1] != 0:
                    control.sendall(_UNKNOWN)
    except OSError:  # the judge is gone
        os._exit(0)
    except BaseException:  # no copy of pytest may go on
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _watch(control: socket.socket, file: int, backends: Mapping[str, Backend], threads: int, stack: int) -> None:
    """Start a worker, and wait for its end."""
    parent, worker = os.getpid(), os.fork()
    if worker == 0:
        control.close()
        _die_with(parent)
        os.setpgid(0, 0)
        from pytest_gemm.worker.server import serve

        os.lseek(stack, 0, os.SEEK_SET)
        # In a thread of its own: OpenMP keeps the threads of a thread that has computed, and a fork has none of these;
        # what may have computed before the fork is pytest's main thread.
        served = threading.Thread(target=serve, args=(socket.socket(fileno=file), backends, threads, stack))
        served.start()
        served.join()
        os._exit(0)
    os.close(file)
    control.sendall(str(worker).encode())
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    control.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _cover_others(null: int, ours: set[int]) -> None:
    """Replace other pipes and sockets by the null device: a reader would wait for their end until this process ends."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) not in {0, 1, 2, *ours} and os.readlink(f"/proc/self/fd/{entry}")[:4] in {"pipe", "sock"}:
                os.dup2(null, int(entry))
