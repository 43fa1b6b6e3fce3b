"""Another environment: the interpreter that runs in it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from pytest_gemm import __version__


@dataclasses.dataclass(frozen=True)
class Environment:
    """What a process is started with.

    Attributes:
        label: for people.
        python: its interpreter.
    """

    label: str = "this environment"
    python: str = sys.executable

    @property
    def folder(self) -> str:
        """Where its packages lie."""
        return str(Path(self.python).parent.parent)


THIS: Final = Environment()


def resolve(text: str) -> Environment:
    """The environment that a user names.

    Args:
        text: an interpreter or a virtual environment.

    Raises:
        ValueError: when it is neither, or its interpreter has no torch, another pytest-gemm or none.
    """
    inside = Path(text).absolute() / "bin" / "python"
    program = str(inside) if inside.exists() else shutil.which(text)
    if program is None:
        raise ValueError("name an interpreter or a virtual environment")
    python = str(Path(program).absolute())
    if python != sys.executable and (lack := _lack(python)):
        raise ValueError(lack)
    return Environment(text, python)


def _lack(python: str) -> str:
    """What an interpreter lacks to be measured, with the remedy; "" for nothing."""
    has_torch = "import importlib.util as u; assert u.find_spec('torch'), 'no torch'"
    command = [python, "-c", f"import pytest_gemm; print(pytest_gemm.__version__); {has_torch}"]
    try:
        # Not in the folder of a clone: "-c" imports from there what is not installed.
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=os.sep)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    version = done.stdout.strip()
    if version == __version__:
        return f"holds no torch: {python} -m pip install torch" if done.returncode else ""
    has = f"has pytest-gemm {version}" if version and not done.returncode else "has no pytest-gemm"
    return f"{has}, and every environment needs {__version__}: {python} -m pip install the same pytest-gemm"
