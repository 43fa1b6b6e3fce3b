"""The command lines of the processes that time."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from pytest_gemm import __version__
from pytest_gemm.config import cores

# What a recording has no use for.
_ITS_GATE: Final = tuple(
    f"--gemm-{name}" for name in ("sessions", "gate", "no-baseline", "undecided", "undecided-share")
)


@dataclasses.dataclass(frozen=True)
class Command:
    """How the run was started.

    Attributes:
        arguments: pytest's, as given.
        folder: where.
        xdist: whether ``-n`` is known.
    """

    arguments: tuple[str, ...]
    folder: Path
    xdist: bool

    def session(self, folder: Path, threads: int) -> list[str]:
        """Arguments of a session that finds its request in ``folder``."""
        return [
            *_without_the_run_s_own(self.arguments),
            *(["-n", "0"] if self.xdist else []),
            "--benchmark-disable",
            "--maxfail=0",
            f"--gemm-threads={threads}",
            f"--gemm-session={folder}",
        ]

    def recording(self, threads: int) -> str:
        """The command that records baselines of the same cases."""
        plain = _without(_without_the_run_s_own(self.arguments), *_ITS_GATE)
        own = [] if threads == cores() else [f"--gemm-threads={threads}"]
        return shlex.join(["pytest", *plain, *own, "--gemm-record"])


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in options:
        own.add_argument(option)
    return own.parse_known_args(list(arguments))[1]


def _without_the_run_s_own(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that are the run's alone: where it reports, how it is shared out, when it stops."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flags in (
        ("-n", "--numprocesses"),
        ("--dist",),
        ("--tx",),
        ("--maxprocesses",),
        ("--maxfail",),
        ("--junitxml", "--junit-xml"),
        ("--gemm-threads",),
        *(
            (f"--gemm-{name}",)
            for name in ("run-record", "coverage", "report", "summary", "samples", "accept", "reason", "against")
        ),
        *((f"--benchmark-{name}",) for name in ("json", "save", "csv", "storage", "compare-fail", "sort", "group-by")),
        *((f"--benchmark-{name}",) for name in ("columns", "name", "timer", "min-rounds", "min-time", "max-time")),
    ):
        own.add_argument(*flags)
    for name in ("compare", "histogram", "cprofile", "warmup"):
        own.add_argument(f"--benchmark-{name}", nargs="?")
    for name in ("record", "force", "prune"):
        own.add_argument(f"--gemm-{name}", nargs="?")
    for flags in (
        ("-x", "--exitfirst"),
        ("--stepwise", "--sw"),
        ("--pdb",),
        *((f"--benchmark-{name}",) for name in ("only", "skip", "enable", "autosave", "verbose", "quiet", "save-data")),
    ):
        own.add_argument(*flags, action="store_true")
    return own.parse_known_args(list(arguments))[1]


# -- the other environment ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Group:
    """An environment that is measured.

    Attributes:
        name: ``head`` or ``base``.
        python: its interpreter.
        first: folder to import from before all others; ``None``: nothing special.
        label: for people.
    """

    name: str
    python: str = sys.executable
    first: Path | None = None
    label: str = "this environment"


def resolve(text: str, scratch: Path) -> Group:
    """The group that ``--gemm-against`` names.

    Args:
        text: an interpreter, a virtual environment, a wheel, or a folder to import from first.
        scratch: where a wheel is unpacked.

    Raises:
        pytest.UsageError: when it is none of these, or its interpreter has another pytest-gemm or none.
    """
    flag = f"--gemm-against={text}"
    path = Path(text).absolute()
    group = Group("base", label=text)
    if path.is_file() and path.suffix == ".whl":
        target = scratch / "wheel"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise pytest.UsageError(f"{flag}: pip cannot unpack the wheel: {done.stderr.strip()[-300:]}")
        group = dataclasses.replace(group, first=target)
    elif path.is_dir() and (python := path / "bin" / "python").exists():
        group = dataclasses.replace(group, python=str(python))
    elif path.is_dir():
        group = dataclasses.replace(group, first=path)
    elif (found := shutil.which(text)) is not None:
        group = dataclasses.replace(group, python=found)
    else:
        raise pytest.UsageError(
            f"{flag}: name an interpreter, a virtual environment, a wheel, or a folder to import from first"
        )
    if group.first is not None and not (group.first / "torch" / "__init__.py").is_file():
        raise pytest.UsageError(
            f"{flag}: holds no torch, so both sides would run the same one; name where one is installed "
            "(pip install --target), or a virtual environment"
        )
    if group.python != sys.executable:
        has_torch = "import importlib.util as u; assert u.find_spec('torch'), 'no torch'"
        asked = [group.python, "-c", f"import pytest_gemm; print(pytest_gemm.__version__); {has_torch}"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise pytest.UsageError(f"{flag}: {group.python} does not run: {error}") from None
        version = done.stdout.strip()
        if done.returncode and version == __version__:
            raise pytest.UsageError(f"{flag}: holds no torch: {group.python} -m pip install torch")
        if done.returncode or version != __version__:
            has = f"has pytest-gemm {version}" if version and not done.returncode else "has no pytest-gemm"
            raise pytest.UsageError(
                f"{flag}: {has}, and both groups need {__version__}: {group.python} -m pip install the same pytest-gemm"
            )
    return group
