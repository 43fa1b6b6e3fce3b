"""What a kernel starts ends with its process or with the run, wherever it has fled to."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Workers

pytestmark = pytest.mark.slow


def flees() -> None:
    if os.fork() == 0:
        time.sleep(600)


def forks_on() -> None:
    while os.fork() == 0:
        time.sleep(0.02)


def kills_the_parent_of_its_worker() -> None:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(600)


def starting(child: Callable[[], None], told: Path) -> CallableBackend:
    """A right product whose first call starts a session of processes, and writes its id to a file."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not told.exists():
            if os.fork() == 0:
                os.setsid()
                told.with_suffix(".new").write_text(str(os.getpid()))
                told.with_suffix(".new").rename(told)
                with contextlib.suppress(BaseException):
                    child()
                os._exit(0)
            while not told.exists() or child is kills_the_parent_of_its_worker:
                time.sleep(0.01)
        return a @ b

    return CallableBackend("mine", kernel, frozenset({"f32"}), True, None, True)


def members(told: Path) -> list[int]:
    """Processes of the session."""
    session, found = int(told.read_text()), []
    for one in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            found += [one] if os.getsid(one) == session else []
    return found


@pytest.mark.parametrize("child", [flees, forks_on, kills_the_parent_of_its_worker])
def test_what_a_kernel_has_started_ends_with_it(child: Callable[[], None], tmp_path: Path) -> None:
    backend, is_right = starting(child, tmp_path / "told"), child is not kills_the_parent_of_its_worker
    keeper = Keeper({"mine": backend}, 1)
    with contextlib.closing(keeper):
        with contextlib.closing(Workers(keeper, (20.0, 60.0))) as workers:
            (outcome, *_) = judged(backend, "mm:f32:nn:9x16x8", "int-2", judge=Judge(workers=workers))
            assert outcome.status is (Status.PASSED if is_right else Status.CRASHED)
            assert members(tmp_path / "told")
        assert not (is_right and members(tmp_path / "told"))
    assert not members(tmp_path / "told")


def test_it_ends_with_a_judge_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    judge = os.fork()
    if judge == 0:
        with contextlib.suppress(BaseException):
            backend = starting(flees, told)
            workers = Workers(Keeper({"mine": backend}, 1), (20.0, 60.0))
            judged(backend, "mm:f32:nn:9x16x8", "int-2", judge=Judge(workers=workers))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(judge, 0)
    until = time.monotonic() + 20.0
    while members(told) and time.monotonic() < until:
        time.sleep(0.05)
    assert not members(told)
