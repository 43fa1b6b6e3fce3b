"""What is compared: a run record with the sessions beside it, and what is said of two of them as a whole."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_gemm.record import record
from pytest_gemm.record.record import Provenance, Record
from pytest_gemm.speed.data import Session, read_session

# Arguments of pytest that change no outcome; the second kind has a word behind it.
_IDLE: Final = ("--gemm-output", "--junit", "-q", "-v", "--tb", "--color", "-n", "--dist", "--durations", "-p")
_TAKES_WORD: Final = frozenset({"-n", "-p", "--dist", "--gemm-output", "--junit-xml"})


@dataclasses.dataclass(frozen=True)
class Run:
    """A record and what lies beside it.

    Attributes:
        path: of the record.
        record: the run.
        sessions: of the speed suite, those of the head that came to their end, in order of time.
    """

    path: Path
    record: Record
    sessions: tuple[Session, ...] = ()


def load(path: Path) -> Run:
    """A run by its record, or by the folder of its ``--gemm-output``.

    Raises:
        ValueError: for anything else, with what to do.
    """
    file = file_of(path)
    found = record.read(file)
    return Run(file, found, tuple(_sessions(file.parent / "samples", found.run.date)))


def file_of(path: Path) -> Path:
    """The run record that a path names: itself, or the one in the folder of a ``--gemm-output``.

    Raises:
        ValueError: for a folder without one.
    """
    file = path / "run.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"{path}: has no run.jsonl; name a run record, or the folder of a run's --gemm-output")
    return file


def _sessions(folder: Path, began: str) -> Iterator[Session]:
    """The sessions that a run has kept; those of an earlier run with the same output are left out."""
    read = [read_session(path) for path in sorted(folder.glob("*.jsonl"))]
    for one in sorted(read, key=lambda session: (session.date, session.index)):
        if one.complete and one.group == "head" and not _is_earlier(one.date, began):
            yield one


def _is_earlier(date: str, began: str) -> bool:
    try:
        then = datetime.datetime.strptime(date, "%Y-%m-%dT%H:%M:%S%z")
        return then < datetime.datetime.strptime(began, "%Y-%m-%d %H:%M:%S %z")
    except ValueError:  # a record without its first line
        return False


# -- environments ------------------------------------------------------------------------------------------------


def interpreter(path: Path) -> Path | None:
    """The interpreter that a path names: a Python, or a virtual environment; ``None`` for anything else."""
    if path.is_dir():
        inside = (path / "bin" / "python", path / "Scripts" / "python.exe")
        return next((python for python in inside if python.exists()), None)
    return path if path.name.startswith("python") and os.access(path, os.X_OK) and path.is_file() else None


def recipe(python: Path, other: Provenance | None) -> str:
    """The command that makes the record of an environment, with the arguments of the other run."""
    arguments = deciding_arguments(other.command) if other else ["--gemm-backends=..."]
    where = [] if any(not word.startswith("-") for word in arguments) else ["--pyargs", "pytest_gemm.conformance"]
    return shlex.join([str(python), "-m", "pytest", *where, *arguments, "--gemm-output=DIR"])


# -- what both are ------------------------------------------------------------------------------------------------


def deciding_arguments(command: Sequence[str]) -> list[str]:
    """The arguments that decide what is judged."""
    words = iter(command[1:])
    found = []
    for word in words:
        if word in _TAKES_WORD:
            next(words, None)
        elif not word.startswith(_IDLE):
            found.append(word)
    return found


def environment(before: Provenance, after: Provenance) -> list[tuple[str, str, str]]:
    """What the runs are of: torch in any case, and whatever else differs; ``-`` for what is not there."""
    names = dict.fromkeys(("torch", *before.versions, *after.versions))
    found = [(name, before.versions.get(name, "-"), after.versions.get(name, "-")) for name in names]
    found += [
        (name, " ".join(sorted(map(str, a))) or "-", " ".join(sorted(map(str, b))) or "-")
        for name, a, b in (
            ("machine", [before.machine], [after.machine]),
            ("CPU", [before.cpu], [after.cpu]),
            ("instruction set", [before.isa], [after.isa]),
            ("GPUs", before.gpus, after.gpus),
            ("CPU threads of a process", [before.threads or "-"], [after.threads or "-"]),
        )
    ]
    return [(name, a, b) for name, a, b in found if name == "torch" or a != b]


def warnings(before: Record, after: Record) -> list[str]:
    """Why the two cannot be compared in full, one sentence each."""
    found = []
    hardware = [(run.machine, run.cpu, run.isa, run.gpus) for run in (before.run, after.run)]
    if hardware[0] != hardware[1]:
        found.append("The runs are of different hardware: a kernel, bits or a time may differ for that reason alone.")
    if before.run.threads != after.run.threads and before.run.threads and after.run.threads:
        found.append(
            "The processes of the runs had different numbers of CPU threads: bits may differ for that reason alone."
        )
    asked = [deciding_arguments(run.command) for run in (before.run, after.run)]
    if set(asked[0]) != set(asked[1]):
        only = [shlex.join(_without(*pair)) or "nothing" for pair in (asked, asked[::-1])]
        found.append(f"The runs were asked for different things: only before {only[0]}, only after {only[1]}.")
    for name, one in (("before", before), ("after", after)):
        if one.totals is None or one.torn:
            found.append(f"The run {name} did not end: cases are missing.")
    return found


def _without(words: Iterable[str], others: Sequence[str]) -> list[str]:
    return [word for word in words if word not in others]
