"""The request to a session: the file that tells a worker process what to load and what to time."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from pytest_gemm.config.config import CONFIG
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.machine.environment import THIS, Environment
from pytest_gemm.speed.data import Peaks

REQUEST: Final = "request.json"
SESSION: Final = "session.jsonl"
NOW: Final = "now.txt"
UNWRITTEN: Final = "unwritten.json"
"""Why files of a session's failures could not be written, by the option that asks for them; absent without failures."""
LOST: Final = 75
"""Exit status of a worker that lost the device to a case, whose sample is written; another worker takes the rest."""


class Project(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker loads so that it has the same backends as the run.

    Attributes:
        folder: working directory.
        root: pytest's rootdir.
        paths: files and folders of the tests; the conftests above them are loaded, the tests are not.
        ini: the configuration file, "" without one.
        flags: options of pytest that decide which conftests and plugins are loaded (``-p``, ``-o``, ``--pyargs`` ...).
        options: values of the other options by name; a worker takes those of this plugin and of conftests.
        command: pytest's arguments as the user gave them, for messages.
        loading: those of them that a rerun repeats, see ``effect.loading``.
    """

    folder: str
    root: str = ""
    paths: tuple[str, ...] = ()
    ini: str = ""
    flags: tuple[str, ...] = ()
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    command: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: pytest.Config) -> Project:
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
            command=tuple(map(str, config.invocation_params.args)),
            loading=config.stash[CONFIG].loading,
        )

    def arguments(self) -> list[str]:
        """Of pytest in a worker: what it loads, and nothing of what it would run or report."""
        ini = ["-c", self.ini] if self.ini else []
        return [*ini, f"--rootdir={self.root}", "-oaddopts=", "-s", *self.flags, *self.paths]

    @property
    def recording(self) -> str:
        """The command that records baselines of the same cases."""
        dropped, kept = {"--gemm-sessions", "--gemm-record"}, ["pytest"]
        for before, word in zip(["", *self.command], self.command, strict=False):
            if word.partition("=")[0] not in dropped and before != "--gemm-sessions":
                kept.append(word)
        return shlex.join([*kept, "--gemm-record"])


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, str) for one in value)
    return isinstance(value, (str, int, float))


class TimedCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A case of a request.

    Attributes:
        case: which.
        test: name of its test function; entries of the ledger may name it.
        selected: candidate that an earlier process of the run has selected by timing; "" where none has.
    """

    case: CaseId
    test: str = ""
    selected: str = ""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The request to one session.

    Attributes:
        cases: in the order in which they are to be timed.
        device: all of them compute there.
        group, index: see :class:`Session`.
        timed: ``False`` to compile and judge only, which fills the compilers' caches and may be done in parallel.
        peaks: of the machine; ``None``: measure them.
        commit: of the tree that is measured.
        socket: descriptor of this process's end where a session of another environment is interleaved with this one;
            ``None`` without one.
        begins: this session measures first.
        project: what to load.
        environment: folder of another environment, whose packages come before those of the project's folder; "" in
            the run's own one.
    """

    cases: tuple[TimedCase, ...]
    device: str
    group: str = "head"
    index: int = 0
    timed: bool = True
    peaks: Peaks | None = None
    commit: str = ""
    socket: int | None = None
    begins: bool = False
    project: Project = Project("")
    environment: str = ""

    @classmethod
    def read(cls, path: Path) -> Request:
        """The request in a file.

        Raises:
            ValueError: for a file that is not a request.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)


# -- the environments that are compared ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
    """An environment that is measured.

    Attributes:
        name: ``head`` or ``base``.
        environment: the one of the run, or another one.
    """

    name: str
    environment: Environment = THIS
