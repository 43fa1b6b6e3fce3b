"""Workers that are forks of one process, which has imported torch: a program of its own, without the package.

``serve`` is started once, and imports when it is asked first.  Each worker is started as a script with :func:`launch`,
which hands its files and its environment over a socket.  The server forks, and the copy goes on as the Python that was
asked for.  ``launch`` stays, and ends as the copy does; it returns where a fork would not be safe, or there is no
server.
"""

# ``launch`` runs for each worker while others wait for it, so each part imports what it needs.
from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of typing takes longer to import than the rest of a launch
if TYPE_CHECKING:
    from typing import Any

_FORKED = b"ok"


def short(folder: int, name: str) -> str:
    """A path of a file in an open folder: that of a socket has at most 107 bytes."""
    return f"/proc/self/fd/{folder}/{name}"


def launch(path: str, arguments: list[str], files: list[int]) -> None:
    """Have a worker forked, which has these files too; returns where that cannot be."""
    import _signal  # type: ignore[import-not-found]  # signal takes ten times as long
    import _socket
    import array
    import marshal

    try:
        server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        folder, name = os.path.split(path)
        server.connect(short(os.open(folder, os.O_RDONLY), name))
        told = marshal.dumps(({**os.environ}, os.getcwd(), arguments[-1], files))
        streams = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2, *files]).tobytes())]
        server.sendmsg([len(told).to_bytes(4, "big")], streams)
        server.sendall(told)
        if server.recv(2) != _FORKED:
            return
    except OSError:
        return
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # the copy gets it, too
    for stream in (0, 1):  # which end when the copy closes them
        os.close(stream)
    status = int(server.recv(16) or b"1")
    if status < 0:
        if -status != _signal.SIGKILL:  # which has no other handler
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(descriptor: int, modules: list[str]) -> None:
    """Import modules and fork for each launch, until the standard input ends.

    Args:
        descriptor: of the socket that launches connect to.
        modules: by name or by path.
    """
    import contextlib
    import gc
    import importlib
    import runpy
    import select
    import signal
    import socket
    import weakref

    listening = socket.socket(fileno=descriptor)
    awake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not live in a copy
    asked: list[Any] = [0, listening]
    if 0 in select.select(asked, [], [])[0]:
        return  # the run launches nothing
    for name in modules:
        with contextlib.suppress(Exception):  # the first test says what is wrong
            runpy.run_path(name) if name.endswith(".py") else importlib.import_module(name)
    for one in weakref.finalize._registry:  # type: ignore[attr-defined]
        one.atexit = False  # what is loaded ends with its process
    gc.collect()
    gc.freeze()
    copies: dict[int, socket.socket] = {}
    while True:
        watched: list[Any] = [0, awake, listening, *copies.values()]
        ready = select.select(watched, [], [])[0]
        if awake in ready:
            os.read(awake, 1024)
        if 0 in ready:
            for pid in copies:
                os.kill(pid, signal.SIGKILL)
            return
        for pid, launched in [*copies.items()]:
            if launched in ready:  # it was killed
                os.kill(pid, signal.SIGKILL)
        if listening in ready:
            launched, _ = listening.accept()
            with contextlib.suppress(OSError, ValueError, EOFError):
                _fork(launched, listening, copies, interrupted)
        _reap(copies)


def _reap(copies: dict[int, Any]) -> None:
    """Tell the launches of those copies that have ended how they did."""
    import contextlib

    for pid in [*copies]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            launched = copies.pop(pid)
            with contextlib.suppress(OSError):  # it was killed
                launched.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            launched.close()


def _fork(launched: Any, listening: Any, copies: dict[int, Any], interrupted: Any) -> None:
    import marshal
    import socket

    launched.settimeout(10.0)
    head, streams, _, _ = socket.recv_fds(launched, 4, 16)
    if not head:  # imports were all that was wanted
        launched.close()
        return
    size, told = int.from_bytes(head, "big"), b""
    while len(told) < size:
        told += launched.recv(size - len(told)) or b"?" * size
    launched.settimeout(None)
    try:
        if not _is_safe():
            launched.close()
            return
        launched.sendall(_FORKED)
        pid = os.fork()
        if pid:
            copies[pid] = launched
            return
        for one in (launched, listening, *copies.values()):
            one.close()
        _become(streams, interrupted, *marshal.loads(told))
    finally:
        for stream in streams:
            os.close(stream)


def _is_safe() -> bool:
    """Whether a copy has all that this process has: there are no other threads, and no device is open."""
    import contextlib

    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself is closed
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(one.startswith("/dev/nvidia") for one in files)


def _become(
    streams: list[int], interrupted: Any, environment: dict[str, str], folder: str, program: str, files: list[int]
) -> None:
    """Go on as ``python -u -c PROGRAM``."""
    import atexit
    import fcntl
    import signal
    import threading
    import traceback
    import types

    status = 1
    try:
        signal.set_wakeup_fd(-1)
        apart = [fcntl.fcntl(stream, fcntl.F_DUPFD, 256) for stream in streams]  # what follows overwrites none
        for number, stream in zip((0, 1, 2, *files), apart, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupted)  # a background job ignores it
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = ["-c"]
        sys.path.insert(0, "")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            made = open(number, "w" if number else "r", buffering=1, closefd=False)  # noqa: SIM115
            for known in (name, f"__{name}__"):
                setattr(sys, known, made)
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(program, main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as Python's own end does
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the others, as Python does at its end
        atexit._run_exitfuncs()
        os._exit(status)


if __name__ == "__main__":
    del sys.path[0]  # that of this file, whose modules have names of others
    serve(int(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # bindings of what was imported complain of leaks when Python takes it apart
