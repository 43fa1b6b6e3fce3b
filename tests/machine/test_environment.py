"""Environments as a user names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_gemm.machine.environment import resolve


@pytest.mark.slow
def test_an_environment_is_an_interpreter_or_a_venv_with_the_same_pytest_gemm(tmp_path: Path) -> None:
    assert resolve(sys.executable).python == sys.executable
    assert resolve(sys.prefix).python == f"{sys.prefix}/bin/python"
    with pytest.raises(ValueError, match=r"name an interpreter or a virtual environment"):
        resolve(str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    with pytest.raises(ValueError, match=r"has no pytest-gemm, and every environment needs"):
        resolve(str(tmp_path))
