"""Environments as a user names them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_gemm.machine.environment import Environment, resolve


@pytest.mark.slow
def test_an_environment_is_an_interpreter_a_venv_a_wheel_or_a_folder(tmp_path: Path) -> None:
    assert resolve(sys.executable, tmp_path).python == sys.executable
    folder = tmp_path / "checkout"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no torch, so that of this environment would run"):
        resolve(str(folder), tmp_path)
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").touch()
    assert resolve(str(folder), tmp_path).first == folder
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (folder / "bin" / "python").chmod(0o755)
    with pytest.raises(ValueError, match=r"has no pytest-gemm, and every environment needs"):
        resolve(str(folder), tmp_path)
    with pytest.raises(ValueError, match=r"name an interpreter, a virtual environment"):
        resolve("nowhere", tmp_path)
    wheel = tmp_path / "mine-1-py3-none-any.whl"
    wheel.write_text("no wheel")
    with pytest.raises(ValueError, match="pip cannot unpack the wheel"):
        resolve(str(wheel), tmp_path)


def test_a_folder_comes_before_what_is_imported_from_first_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert Environment("a", first=Path("folder")).variables["PYTHONPATH"] == os.pathsep.join(["folder", "mine"])
    assert Environment("b").variables["PYTHONPATH"] == "mine"
