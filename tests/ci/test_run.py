"""``.ci/run``: the commands of README.md, as they stand there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = """\
    python3 -m venv .venv && echo torch==2.13.0 with $PYTEST_ADDOPTS
    .venv/bin/pytest --gemm-level=smoke
    .venv/bin/pytest tests -n auto
"""


# What runs behind the commands: the suite as on other processors.
CAPPED = "python tests/studies/caps.py --level=smoke ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx2"


def run(
    folder: Path, readme: str, tests: int = 0, lint: int = 0, caps: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``.ci/run`` in a folder where the environment, its pytest and lint are scripts."""
    programs = {
        ".ci/lint": f"echo says lint; exit {lint}",
        ".venv/bin/pytest": f'echo "pytest $*"; exit {tests}',
        ".venv/bin/python": f'echo "python $*"; exit {caps}',
        "bin/python3": 'echo "python3 $*"',
    }
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    environment = {"PATH": f"{folder}/bin:{os.defpath}", **variables}
    command = ["bash", str(folder / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_readme_has_both_commands(tmp_path: Path) -> None:
    done = run(tmp_path, (ROOT / "README.md").read_text(encoding="utf-8").replace(" && .venv/bin/pip install", " && :"))
    assert done.returncode == 0, done.stderr
    assert "python3 -m venv .venv\n" in done.stdout
    assert "pytest --gemm-backends=aten,cpp" in done.stdout
    assert "\npytest tests -n auto\n" in done.stdout
    assert done.stdout.endswith(f"{CAPPED}\n")


def test_both_run_as_they_are_written(tmp_path: Path) -> None:
    done = run(tmp_path, README)
    assert (done.returncode, done.stderr) == (0, "")
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("==")]
    expected = ["python3 -m venv .venv", "torch==2.13.0 with --gemm-output=build/run", "pytest tests -n auto", CAPPED]
    assert said == expected


def test_another_release_of_torch(tmp_path: Path) -> None:
    assert "\ntorch==2.14.* with" in run(tmp_path, README, TORCH_VERSION="2.14.*").stdout


@pytest.mark.parametrize(
    ("readme", "red", "status", "last"),
    [
        (README, {"tests": 1}, 1, CAPPED),
        (README, {"lint": 1}, 1, "says lint"),
        (README, {"caps": 3}, 3, CAPPED),
        (README.replace("echo", "false"), {}, 1, "python3 -m venv .venv"),
        ("", {}, 4, ""),
    ],
    ids=["tests", "lint", "caps", "first-command", "no-commands"],
)
def test_what_is_red_ends_it(tmp_path: Path, readme: str, red: dict[str, int], status: int, last: str) -> None:
    done = run(tmp_path, readme, **red)  # type: ignore[arg-type]  # each of them is a number
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("==")]
    assert (done.returncode, said[-1] if said else "") == (status, last)
    assert ("README.md has 0 commands" in done.stderr) == (not readme)
