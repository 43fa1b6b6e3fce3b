"""SIGTERM ends a run as Ctrl-C does, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_gemm.plugin import termination

CONFTEST = """
    import os
    import pathlib
    import time

    def slow(a, b):
        pathlib.Path(f"pid-{os.getpid()}").touch()
        if a.shape[0] > 8:
            time.sleep(60)
        return a @ b

    def pytest_gemm_register_backends(registry):
        registry.add_callable("slow", slow)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32", "mm:f32:nn:9x16x64"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


def until(what: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_run_that_is_terminated_ends_its_workers_and_cleans_up(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of the run get the signal; that pytest alone gets it is tried in ``test_exit_codes.py``."""
    scratch = pytester.mkdir("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--gemm-backends=slow",
        "--gemm-output=.",
        "-n2",
    ]
    with (pytester.path / "log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        record = pytester.path / "run.jsonl"
        until(lambda: record.exists() and record.read_text().count("\n") > 1, 200.0)  # the first test is over
        until(lambda: (pytester.path / "log").read_text() and len(list(pytester.path.glob("pid-*"))) > 1)
        time.sleep(0.5)
        os.killpg(run.pid, signal.SIGTERM)
        status = run.wait(60)
    said = (pytester.path / "log").read_text()
    assert status == 143, said
    assert "SIGTERM" in said
    assert "INTERNALERROR" not in said
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert "totals" in lines[-1]
    workers = [int(path.name.removeprefix("pid-")) for path in pytester.path.glob("pid-*")]
    until(lambda: not any(map(lives, workers)), 15.0)
    assert not list(scratch.glob("pytest-gemm-*"))


def test_the_handler_is_installed_where_there_is_none_and_taken_away() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        one = termination.Termination()
        handler = signal.getsignal(signal.SIGTERM)
        assert handler is not signal.SIG_DFL
        termination.Termination().close()
        assert signal.getsignal(signal.SIGTERM) is handler, "the first one keeps the signal"
        one.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_process_ends_at_once() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    one = termination.Termination()
    try:
        child = os.fork()
        if child == 0:
            try:
                time.sleep(60)
            finally:
                os._exit(7)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        one.close()
        signal.signal(signal.SIGTERM, before)
