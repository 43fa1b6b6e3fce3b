"""A keeper that judges share: the one that has started it, and the processes that this one starts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pytest_gemm.worker import keeper as keepers
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.messages import Died
from pytest_gemm.worker.process import Process

pytestmark = pytest.mark.slow


def environment(_: object, name: str) -> str:
    return os.environ.get(name, "")


@pytest.fixture
def shared() -> Iterator[Keeper]:
    with contextlib.closing(Keeper({}, 1, calls={"environment": environment}, shared=True)) as made:
        yield made


def told(work: Callable[[int], None]) -> tuple[int, int]:
    """A process that does this work, and what it has written."""
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            work(here)
        os._exit(0)
    os.close(here)
    written = os.read(there, 64)
    os.close(there)
    return child, int(written or 0)


def start(keeper: Keeper, file: int) -> None:
    started = Keeper({}, 1, address=keeper.address).start()
    os.write(file, str(started.pid if started else -1).encode())
    if started:
        time.sleep(60)


def test_a_worker_ends_with_its_judge(shared: Keeper) -> None:
    judge, worker = told(lambda file: start(shared, file))
    kernel = psutil.Process(worker)
    assert kernel.is_running()
    os.kill(judge, signal.SIGKILL)
    os.waitpid(judge, 0)
    kernel.wait(10)


def start_in_a_child(keeper: Keeper, file: int) -> None:
    if (child := os.fork()) == 0:
        start(keeper, file)
        os._exit(0)
    os.waitpid(child, 0)


def test_a_process_of_another_one_gets_no_worker(shared: Keeper) -> None:
    child, started = told(lambda file: start_in_a_child(shared, file))
    os.waitpid(child, 0)
    assert started == -1


def test_a_judge_whose_shared_keeper_is_gone_has_its_own(shared: Keeper) -> None:
    shared.close()
    own = Keeper({}, 1, calls={"environment": environment}, address=shared.address)
    with contextlib.closing(own), contextlib.closing(Process(own, (20.0, 20.0))) as worker:
        assert worker.call(str, "environment", "HOME") == os.environ["HOME"]


def test_a_worker_has_the_environment_of_its_judge(shared: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NO_TEXT", "\udcff")
    with contextlib.closing(Process(shared, (20.0, 20.0))) as worker:
        assert worker.call(str, "environment", "CUDA_VISIBLE_DEVICES") == "1"


def answers(started: Keeper) -> bool:
    with contextlib.closing(Process(started, (20.0, 20.0))) as worker:
        return worker.call(str, "environment", "HOME") == os.environ["HOME"]


def test_a_stopped_keeper_goes_on_for_each_of_its_judges(shared: Keeper) -> None:
    calls: list[Callable[[], bool]] = [lambda: answers(shared), lambda: told(lambda file: start(shared, file))[1] > 0]
    for call in calls:
        os.kill(shared._keeper, signal.SIGSTOP)
        assert call()


def test_a_keeper_that_never_answers_is_ended_and_named(shared: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "TRIES", 0)
    os.kill(shared._keeper, signal.SIGSTOP)
    with pytest.raises(Died, match="a kernel has ended or stopped it"):
        answers(shared)
    assert psutil.Process(shared._keeper).status() == psutil.STATUS_ZOMBIE
