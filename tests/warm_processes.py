"""Processes that begin where Python has imported what they need: most of what a short command takes is that.

The server of ``forkserver`` imports once, and forks for each command.  ``pytest``, ``pytest-gemm`` and
``python`` of :class:`Programs` are scripts that hand it their arguments, folder, variables and streams, and end as its
fork does::

    the command's shell          a script                      the server               its fork
        pytest --gemm-... ----->  connects, sends  --------->  forks, waits  -------->  runs .venv/bin/pytest
        exit status       <-----  ends with it     <---------  sends it      <--------  ends

A fork has the limits, the group and the threads' number of the server.  What a test asks of these, or of an import,
it has to ask of ``sys.executable``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import asked_once
import forkserver
from _pytest.config import default_plugins

_IMPORTS: Final = (
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "scipy.stats",
    "msgspec", "pytest", "tabulate", "torch.utils.cpp_extension", "sympy.tensor.tensor", "execnet", "matplotlib.figure",
    "matplotlib.backends.backend_agg", "xdist.dsession", "xdist.plugin", "pytest_benchmark.plugin",
    "pytest_gemm.plugin.plugin", "pytest_gemm.plugin.hooks", "pytest_gemm.plugin.xdist", "pytest_gemm.run.check",
    "pytest_gemm.failures.artifacts", "pytest_gemm.conformance.matrix", "pytest_gemm.backends.builtin",
    "pytest_gemm.backends.cpp.backend", "pytest_gemm.worker.process", "pytest_gemm.worker.inline",
    "pytest_gemm.report.terminal", "pytest_gemm.report.github", "pytest_gemm.api.callable", "pytest_gemm.speed.report",
    "pdb", "xdist.looponfail", "platformdirs.pytest_plugin", "pytest_rerunfailures",
    *(f"_pytest.{name}" for name in default_plugins),
)  # fmt: skip

# Python that is given a file starts as usual.
_SCRIPT: Final = """#!{python} -IS
import os, sys
program, arguments = {program!r}, sys.argv[1:]
is_code = arguments[:-1] in (["-c"], ["-u", "-c"])
if {is_python} and arguments[:1] != ["-m"] and not is_code:
    os.execv(program, [program, *arguments])
sys.path.insert(0, {package!r})
import forkserver
del sys.path[0]
told = {run!r} + f"_run({{__file__!r}}, {{program!r}}, {{arguments!r}})"
others = [int(one) for one in os.listdir("/proc/self/fd") if int(one) > 2]
forkserver.launch({address!r}, [told], [one for one in others if os.path.exists(f"/proc/self/fd/{{one}}")])
os.execv(program, [program, *arguments])
"""

# In the fork: as Python runs a script of its environment, a module, or code.
_RUN: Final = """
def _run(script, program, arguments):
    import os, runpy, site, sys, tempfile
    from _pytest.assertion.rewrite import AssertionRewritingHook
    tempfile.tempdir = None  # read again
    folder, name = os.path.split(program)
    sys.executable = os.path.join(os.path.dirname(script), "python")
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    AssertionRewritingHook._warn_already_imported = lambda *_: None  # plugins are
    prefix = os.path.dirname(folder)
    if prefix != sys.prefix:
        for module in [one for one in sys.modules if one.partition(".")[0] == "pytest_gemm"]:
            del sys.modules[module]
        sys.prefix = sys.exec_prefix = prefix
        site.addsitedir(site.getsitepackages([prefix])[0])
    try:
        if arguments[:-1] in (["-c"], ["-u", "-c"]):
            sys.argv, sys.path[0] = ["-c"], ""
            exec(arguments[-1], sys.modules["__main__"].__dict__)
        elif name.startswith("python"):
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [program, *arguments], folder
            runpy.run_path(program, run_name="__main__")
    finally:
        sys.stdout.flush()
"""


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of an environment, while the server runs.

    Attributes:
        folder: of them, as the environment's ``bin``.
    """

    folder: Path

    @property
    def address(self) -> str:
        """Of the server."""
        return str(self.folder / "socket")

    @property
    def python(self) -> str:
        """In place of ``sys.executable``."""
        return str(self.folder / "python")

    def wake(self) -> None:
        """Have the server import, which it does when it is asked first."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(self.address)

    def write(self, script: Path, program: Path) -> None:
        """Write a script that stands for a program, of any environment with the packages of this one."""
        text = _SCRIPT.format(
            python=sys.executable,
            program=str(program),
            is_python=program.name.startswith("python"),
            package=str(Path(forkserver.__file__).parent),
            run=_RUN,
            address=self.address,
        )
        script.write_text(text, encoding="utf-8")
        script.chmod(0o755)


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Programs]:
    """Start the server and write the scripts.

    Args:
        folder: a new folder with a short path, for the address of a socket has 100 characters at most.
    """
    folder.mkdir()
    found = Programs(folder)
    for name in ("pytest", "pytest-gemm", "python", "python3"):
        found.write(folder / name, Path(sys.executable).parent / name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(found.address)
        listening.listen(64)
        command = [sys.executable, forkserver.__file__, str(listening.fileno()), *_IMPORTS, asked_once.__file__]
        server = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, pass_fds=(listening.fileno(),))
    try:
        yield found
    finally:
        server.communicate()  # it ends when its standard input does
