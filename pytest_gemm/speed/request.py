"""What a session is asked: the file by which a run tells a worker process what to load and what to time."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from pytest_gemm.speed.data import Peaks

REQUEST: Final = "request.json"
SESSION: Final = "session.jsonl"
NOW: Final = "now.txt"
LOST: Final = 75
"""Exit status of a worker that lost the device to a case, whose sample is written; another worker takes the rest."""
WORKER: Final = "gemm-speed-worker"
"""Name of pytest's plugin in a worker process; a conftest may look for it."""


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker loads so that it knows the same backends as the run.

    Attributes:
        folder: working directory.
        root: pytest's rootdir.
        paths: files and folders of the tests; the conftests above them are loaded, the tests are not.
        ini: the configuration file, "" without one.
        flags: options of pytest that decide which conftests and plugins are loaded (``-p``, ``-o``, ``--pyargs`` ...).
        options: values of the other options by name; a worker takes those of this plugin and of conftests.
        tests: name of the test function of each case, by "backend problem"; entries of the ledger may ask for it.
        command: pytest's arguments as the user gave them, for messages.
    """

    folder: str
    root: str = ""
    paths: tuple[str, ...] = ()
    ini: str = ""
    flags: tuple[str, ...] = ()
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tests: Mapping[str, str] = msgspec.field(default_factory=dict)
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: pytest.Config, tests: Mapping[str, str]) -> Project:
        """The project of a run."""
        given = config.option
        flags = [f"--import-mode={given.importmode}", *(f"-p{name}" for name in given.plugins or ())]
        flags += [f"-o{text}" for text in given.override_ini or ()]
        flags += [f"--confcutdir={given.confcutdir}"] if given.confcutdir else []
        flags += ["--pyargs"] * bool(given.pyargs) + ["--noconftest"] * bool(given.noconftest)
        return cls(
            folder=str(config.invocation_params.dir),
            root=str(config.rootpath),
            paths=tuple(map(str, config.args)),
            ini=str(config.inipath or ""),
            flags=tuple(flags),
            options={name: value for name, value in vars(given).items() if _is_plain(value)},
            tests=tests,
            command=tuple(map(str, config.invocation_params.args)),
        )

    def arguments(self) -> list[str]:
        """Of pytest in a worker: what it loads, and nothing of what it would run or report."""
        ini = ["-c", self.ini] if self.ini else []
        return [*ini, f"--rootdir={self.root}", "-oaddopts=", "-s", *self.flags, *self.paths]

    @property
    def recording(self) -> str:
        """The command that records baselines of the same cases."""
        drop, words = {"--gemm-sessions", "--gemm-record"}, list(self.command)
        kept = [
            word
            for before, word in zip(["", *words], words, strict=False)
            if word.partition("=")[0] not in drop and before != "--gemm-sessions"
        ]
        return shlex.join(["pytest", *kept, "--gemm-record"])


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, str) for one in value)
    return isinstance(value, (str, int, float))


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one session is asked for.

    Attributes:
        cases: backend and problem line of each, in the order in which they are to be timed.
        device: all of them compute there.
        group, index: see :class:`Session`.
        timed: ``False`` to compile and judge only, which fills the compilers' caches and may be done in parallel.
        peaks: of the machine; ``None``: measure them.
        pinned: candidates of cases whose backend selects by timing, the one to time first and the others behind it,
            by "backend problem"; an earlier process of the run has selected.
        spared: candidates that a backend need not time to select one, by "backend problem".
        commit: of the tree that is measured.
        socket: descriptor of this process's end where a session of another environment is interleaved with this one;
            ``None`` without one.
        begins: this session measures first.
        before: candidate that was selected for the baseline, or in the base environment, by "backend problem"; where
            another one is selected now it is timed beside that.
        project: what to load.
    """

    cases: tuple[tuple[str, str], ...]
    device: str
    group: str = "head"
    index: int = 0
    timed: bool = True
    peaks: Peaks | None = None
    pinned: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    spared: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    commit: str = ""
    socket: int | None = None
    begins: bool = False
    before: Mapping[str, str] = msgspec.field(default_factory=dict)
    project: Project = Project("")

    def pinned_of(self, backend: str, problem: str) -> tuple[str, ...]:
        """The candidates of a case, the one to time first; empty where the backend selects by itself."""
        return self.pinned.get(f"{backend} {problem}", ())

    def write(self, folder: Path) -> Path:
        """Write the file that a worker process reads."""
        path = folder / REQUEST
        path.write_bytes(msgspec.json.encode(self))
        return path

    @classmethod
    def read(cls, path: Path) -> Request:
        """The request in a file.

        Raises:
            ValueError: for a file that is not a request.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)
