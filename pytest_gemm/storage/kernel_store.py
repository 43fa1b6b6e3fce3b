"""A store of compiled kernels by content, and the pool of compilers that fills it.

A CUTLASS kernel costs nvcc the better part of a minute, and PyTorch compiles the same one again and again: under
another entry name for every program, under another path on every machine.  Here a kernel is what determines its
machine code and nothing else:

* its text, with the entry function under one fixed name, without blank lines and trailing spaces;
* the compiler's flags without paths, the compiler's version, the architecture;
* the version of the headers that it includes.

The SHA-256 of these is its key.  ``<key>.o`` is the object, with :data:`ENTRY` as the name of its entry function;
``<key>.error`` stands in place of the object where the compiler rejected the text, so that a candidate that cannot be
compiled is tried once.  A store is a folder of plain files: it can be copied to another machine and is valid there.

No torch, no pytest: everything here can be tried without a compiler, see ``tests/backends/test_compile_ahead.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from pytest_gemm.storage import digests, files

ENTRY: Final = "pytest_gemm_entry"

# Part of every key: raise it when what is stored changes its meaning.
_FORMAT: Final = 1

# The one function that a generated kernel exports; while it is rendered Inductor calls it Placeholder.KERNEL_NAME.
_ENTRY_DECLARATION = re.compile(r"\bPT_EXPORT\s+int\s+([A-Za-z_][\w.]*)\s*\(")
_CONFIGURATION = re.compile(r"^// configuration name: (\S+)", re.MULTILINE)
# What Inductor appends to the file that it hands to the compiler: a heading and the command on a line each.
_COMMAND = re.compile(r"^// \w+ (?:Compilation|Linking) cmd\n// .*$", re.MULTILINE)
# Exit statuses of a shell whose command could not be started or was ended by a signal; nvcc's own are 1, 2 and 255.
_SHELLS: Final = range(126, 160)
# Messages that are not about the text: the machine was short of something, or the compiler is not set up.
_NOT_THE_TEXT = re.compile(
    r"died due to signal|No space left|Memory allocation failure|Cannot allocate memory|out of memory"
    r"|nvcc fatal|No such file or directory|Permission denied|Disk quota exceeded"
)


class CompileError(Exception):
    """The compiler rejects a kernel's text, and would do so again; the message is the compiler's."""


class CompilerError(Exception):
    """The compiler could not do its work: it died, ran out of time or memory, or is not there.  Nothing is stored."""


# -- what a kernel is ----------------------------------------------------------------------------------


def entry_of(text: str) -> str:
    """Name of the function that a generated kernel exports.

    Raises:
        ValueError: when there is none, or more than one.
    """
    names: list[str] = list(dict.fromkeys(_ENTRY_DECLARATION.findall(text)))
    if len(names) != 1:
        raise ValueError(f"a kernel exports one function, this text {len(names)}: {', '.join(names) or 'none'}")
    return names[0]


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """What turns a text into an object.

    Attributes:
        compiler: path of nvcc; not part of a key.
        version: nvcc's, ``13.0.88``.
        headers: version of the headers, see :func:`headers_version`.
        spare: a folder of headers that the toolkit lacks, looked at after its own; "" where it lacks none.
        architecture: as nvcc has it without ``sm_``, ``90a``.
        flags: without paths, in order.
        includes: folders of headers; not part of a key.
    """

    compiler: str
    version: str
    headers: str
    spare: str = ""
    architecture: str = ""
    flags: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()

    def command(self, text: str, made: str) -> list[str]:
        """The call that compiles the file ``text`` into the object ``made``."""
        return [self.compiler, *self.flags, *(f"-I{folder}" for folder in self.includes), "-c", "-o", made, text]

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the call: the host compiler looks into ``CPATH`` after all ``-I``."""
        path = [folder for folder in (os.environ.get("CPATH", ""), self.spare) if folder]
        return {**os.environ, "CPATH": os.pathsep.join(path)} if path else dict(os.environ)


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel that is wanted: its text in its normal form, see :meth:`of`, and what compiles it.

    Attributes:
        text: C++ with :data:`ENTRY` as its exported function.
        toolchain: the compiler with its flags.
    """

    text: str
    toolchain: Toolchain

    @classmethod
    def of(cls, text: str, toolchain: Toolchain) -> Job:
        """The kernel that Inductor generated.

        Raises:
            ValueError: when the text does not export exactly one function.
        """
        text = _COMMAND.sub("", text)
        entry = re.escape(entry_of(text))
        text = re.sub(rf"(?<![\w.]){entry}(?![\w.])", ENTRY, text)
        # From torch 2.15 on the kernel's types end with it, so that no two libraries have a type of the same name.
        inside = re.compile(rf"(?<=_){entry}(?![A-Za-z0-9])")
        own = hashlib.sha256(inside.sub("", text).encode()).hexdigest()[:8]
        text = inside.sub(f"{ENTRY}_{own}", text)
        kept: list[str] = []
        for line in map(str.rstrip, text.splitlines()):
            if line or (kept and kept[-1].endswith("\\")):  # a continued line takes in the next, blank or not
                kept.append(line)
        return cls("\n".join(kept) + "\n", toolchain)

    @functools.cached_property
    def key(self) -> str:
        """Its name in a store: 64 hexadecimal digits."""
        tools = self.toolchain
        facts = [_FORMAT, self.text, tools.version, tools.architecture, list(tools.flags), tools.headers]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def configuration(self) -> str:
        """Name of the kernel's configuration, which CUTLASS's generator gave it; "" where it is missing."""
        found = _CONFIGURATION.search(self.text)
        return found[1] if found else ""


def headers_version(tree: Path, wheel: str = "") -> str:
    """What distinguishes these headers: the wheel's version, or the hash of a checkout's ``version.h``.

    Args:
        tree: folder that has ``include/cutlass/version.h``.
        wheel: version of the wheel that the headers belong to, "" for a checkout.
    """
    if wheel:
        return f"nvidia-cutlass {wheel}"
    text = (tree / "include" / "cutlass" / "version.h").read_bytes()
    return f"version.h {hashlib.sha256(text).hexdigest()}"


# -- the store -----------------------------------------------------------------------------------------


class Store:
    """A folder of compiled kernels.

    Args:
        folder: made when it is not there.
        timeout: seconds that a compile may take, 0 for no limit.
    """

    def __init__(self, folder: Path, timeout: float = 0.0) -> None:
        self.folder = folder
        self.timeout = timeout

    def object_of(self, key: str) -> Path | None:
        """The object of a kernel, ``None`` when it is not in the store or damaged there."""
        path = self.folder / f"{key}.o"
        return path if digests.is_whole(path) else None

    def error_of(self, key: str) -> str:
        """The compiler's message against a kernel; "" when none is known."""
        path = self.folder / f"{key}.error"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def obtain(self, job: Job) -> Path:
        """The object of a kernel, compiled now if need be; one process compiles, the others wait for it.

        Raises:
            CompileError: when the compiler rejects it, now or when it was tried first.
            CompilerError: when the compiler could not do its work.
        """
        found = self._known(job.key)
        if found is None:
            with self._locked(job.key):
                found = self._known(job.key)  # another process may have compiled it meanwhile
                if found is None:
                    return self._compile(job)
        with contextlib.suppress(OSError):  # a store that cannot be written
            os.utime(found)  # what is used is not pruned
        return found

    def _known(self, key: str) -> Path | None:
        if found := self.object_of(key):
            return found
        if message := self.error_of(key):
            raise CompileError(message)
        return None

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # Apart from the kernels: a copy of the store needs its files only, no folder.
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        # Another process may be compiling the kernel: it has its own limit, and so has a third one ahead of this one.
        try:
            with files.locked(locks / key, 2 * self.timeout, mode=0o666):
                yield
        except files.LockTimeoutError as error:
            raise CompilerError(str(error)) from None

    def _compile(self, job: Job) -> Path:
        making = self.folder / "making"  # of this file system; what a killed process leaves there is no kernel
        making.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=making) as scratch:
            # A relative name: __FILE__ goes into the object, and the folder is not part of the kernel.
            (Path(scratch) / "kernel.cu").write_text(job.text, encoding="utf-8")
            command = job.toolchain.command("kernel.cu", "kernel.o")
            status, output = _run(command, job.toolchain.environment, scratch, self.timeout)
            made = Path(scratch) / "kernel.o"
            if status != 0 or not made.is_file():
                if status in _SHELLS or not output.strip() or _NOT_THE_TEXT.search(output):
                    raise CompilerError(f"exit status {status}: {output.strip() or 'no message'}")
                files.replace(self.folder / f"{job.key}.error", output.encode())
                raise CompileError(output)
            place = self.folder / f"{job.key}.o"
            os.replace(made, place)
            digests.is_whole(place)  # notes its digest
        return place


# The compiler's process group ends with us however we end, also by SIGKILL: its standard input is a pipe that we
# hold open, and when that closes the shell's other child ends the group.
_GUARDED: Final = 'exec 3<&0 </dev/null; "$@" 3<&- & work=$!; { cat <&3; kill -KILL 0; } >/dev/null 2>&1 & wait "$work"'


def _run(command: list[str], environment: dict[str, str], folder: str, timeout: float) -> tuple[int, str]:
    """Run a compiler at low priority; its exit status (above 128 for a signal) and its output.

    Raises:
        CompilerError: when it takes too long.
    """
    if nice := shutil.which("nice"):
        command = [nice, "-n", "10", *command]
    ours, lifeline = os.pipe()
    start = ["sh", "-c", _GUARDED, "sh", *command]
    options: Any = {"stdin": ours, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    try:
        process = subprocess.Popen(start, cwd=folder, env=environment, **options)
        with process:
            _running.add(process)
            try:
                output, _ = process.communicate(timeout=timeout or None)
            except subprocess.TimeoutExpired:
                raise CompilerError(f"it had not finished after {timeout:g} s") from None
            finally:
                _running.discard(process)
                _kill(process)
    finally:
        os.close(ours)
        os.close(lifeline)
    return process.returncode, output.decode(errors="replace")


_running: set[subprocess.Popen[bytes]] = set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a compiler with all its processes, if it has not ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def renamed(made: Path, entry: str, place: Path) -> None:
    """Copy an object of the store to ``place`` with ``entry`` as the name of its exported function.

    Raises:
        CompilerError: when ``objcopy`` (of binutils, which every host compiler needs) is missing or fails.
    """
    with tempfile.TemporaryDirectory(prefix="renaming-", dir=place.parent) as scratch:
        copy = Path(scratch) / place.name
        command = ["objcopy", f"--redefine-sym={ENTRY}={entry}", str(made), str(copy)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except OSError as error:
            raise CompilerError(f"objcopy: {error}; install binutils") from error
        except subprocess.CalledProcessError as error:
            raise CompilerError(f"objcopy: {error.stderr.strip()}") from error
        os.replace(copy, place)


# -- many at once --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of the compile pool.

    Attributes:
        done, total: kernels; those that were in the store count as done.
        running: compilers at work.
        failed: kernels that could not be compiled.
        seconds: since the pool started.
    """

    done: int
    total: int
    running: int
    failed: int
    seconds: float

    def __str__(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        text = f"{self.done}/{self.total} kernels, {self.running} at work, {minutes}:{seconds:02d}"
        return f"{text}, {self.failed} failed" if self.failed else text


class CompilePool:
    """Compilers at work on a store, several at a time and each kernel once.

    Used as a context: leaving it by an exception (an interrupt) ends every compiler that runs.

    Args:
        store: what to fill.
        workers: compilers at a time.

    Attributes:
        rejected: the compiler's message against a kernel, by key.
        undone: why the compiler could not do its work, by key.
        jobs: every kernel that was requested, by key.
    """

    def __init__(self, store: Store, workers: int) -> None:
        self.store = store
        self.rejected: dict[str, str] = {}
        self.undone: dict[str, str] = {}
        self.jobs: dict[str, Job] = {}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="nvcc")
        self._futures: list[Future[None]] = []
        self._started = time.perf_counter()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _kill(process)
        self._pool.shutdown()

    def submit(self, jobs: Iterable[Job]) -> None:
        """Request kernels; those that were requested before are not done twice."""
        for job in jobs:
            if job.key not in self.jobs:
                self.jobs[job.key] = job
                self._futures.append(self._pool.submit(self._obtain, job))

    def _obtain(self, job: Job) -> None:
        try:
            self.store.obtain(job)
        except CompileError as error:
            self.rejected[job.key] = str(error)
        except CompilerError as error:
            self.undone[job.key] = str(error)

    @property
    def progress(self) -> Progress:
        """Where it stands now."""
        done, failed = sum(future.done() for future in self._futures), len(self.rejected) + len(self.undone)
        return Progress(done, len(self.jobs), len(_running), failed, time.perf_counter() - self._started)

    def finish(self, tell: Callable[[Progress], None], interval: float = 0.5) -> None:
        """Wait until every kernel is done.

        Args:
            tell: called with the progress, at least once and then every ``interval`` seconds.
            interval: in seconds.
        """
        while waiting := [future for future in self._futures if not future.done()]:
            tell(self.progress)
            wait(waiting, timeout=interval, return_when=FIRST_COMPLETED)
        for future in self._futures:
            future.result()
        tell(self.progress)
