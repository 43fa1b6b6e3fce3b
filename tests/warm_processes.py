"""Processes that begin where Python has imported PyTorch: most of what a short command takes is that import.

A server imports once, and forks for each command.  ``pytest``, ``pytest-gemm`` and ``python`` of :func:`programs` are
scripts that hand it their arguments, folder, variables and streams, and end as the process does that it forked::

    the command's shell          a script of programs()        the server               its fork
        pytest --gemm-... ----->  connects, sends  --------->  forks, waits  -------->  runs .venv/bin/pytest
        exit status       <-----  ends with it     <---------  sends it      <--------  ends
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_IMPORTS: Final = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.select_algorithm",
    "scipy.stats",
    "msgspec",
    "pytest",
    "tabulate",
)

_CLIENT: Final = """#!{python} -IS
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(asked).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(asked)
    answer = server.recv(8)
    sys.stdout = None
    os._exit(int(answer) if answer else 255)
"""


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Path]:
    """A folder of programs as in the ``bin`` of an environment, while the server runs.

    Args:
        folder: a new folder with a short path, for the address of a socket has 100 characters at most.
    """
    folder.mkdir()
    real = Path(sys.executable).parent
    for program in ("pytest", "pytest-gemm", "python", "python3"):
        script = folder / program
        text = _CLIENT.format(python=sys.executable, address=str(folder / "socket"), program=str(real / program))
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)
    # A fork has one thread: those of OpenBLAS would be lost.
    variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder / "socket")]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline(), "the server has ended"
        yield folder
        server.terminate()


def _serve(address: str) -> None:
    for name in _IMPORTS:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # a collection would copy all of it into the fork
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
        os.write(1, b"ready\n")
        while True:
            client, _ = listener.accept()
            if not os.fork():
                listener.close()
                return _answer(client)
            client.close()


def _answer(client: socket.socket) -> None:
    """In a fork of the server: ask another one to run the command, and send its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "big"):
        asked += client.recv(1 << 16)
    program, arguments, folder, variables = json.loads(asked)
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client.sendall(str(status if status >= 0 else 128 - status).encode())
        os._exit(0)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # read again
    sys.path[1:1] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    _run(Path(program), arguments)


def _run(program: Path, arguments: list[str]) -> None:
    """As Python runs a script of its environment, or what ``python`` is given."""
    if not program.name.startswith("python"):
        sys.argv, sys.path[0] = [str(program), *arguments], str(program.parent)
        runpy.run_path(str(program), run_name="__main__")
    elif arguments[:1] == ["-m"]:
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        os.execv(program, [str(program), *arguments])


if __name__ == "__main__":
    _serve(sys.argv[1])
