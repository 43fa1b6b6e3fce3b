"""The environments that are compared: this one, and the one that ``--gemm-against`` names."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gemm import __version__


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
