"""The speed suite as a user of a clone runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm_processes import Programs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.study
def test_sessions_start_where_warnings_are_errors(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the lock of the machine lies there
    options = ("--gemm-backends=aten", "--gemm-problem=mm:f32:nn:32x64x64", "--gemm-sessions=1")
    others = ("--gemm-allow=no-baseline,slower", "--gemm-set=speed.windows=3", f"--gemm-output={tmp_path / 'out'}")
    command = [programs.python, "-m", "pytest", "perf", "-q", "-p", "no:cacheprovider", *options, *others]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "out" / "samples").glob("cpu-head-*.jsonl"))
