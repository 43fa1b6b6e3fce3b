"""How tests are shared out among the workers of pytest-xdist, and how these start."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pytest_gemm.plugin import startup, xdist
from pytest_gemm.run import timeline

# A backend that notes when it is asked for which problem, and what its process is like; its last call may take long.
CONFTEST = """
    import os, pathlib, psutil, sys, time

    def pytest_runtest_protocol():
        with open(pathlib.Path(__file__).with_name("loaded.txt"), "a") as file:
            file.write(f"{'torch' in sys.modules}\\n")

    def mine(a, b):
        time.sleep(float(os.environ.get("SLEEP", "0")))
        # OpenMP ends a thread of its pool beside the one that takes its place: those that stay count.
        before = os.listdir("/proc/self/task")
        time.sleep(0.02)
        threads = len({*before}.intersection(os.listdir("/proc/self/task")))
        facts = [os.environ["PYTEST_XDIST_WORKER"], str(a.shape[0]), os.environ.get("OMP_WAIT_POLICY", "none")]
        keeper = psutil.Process().parents()[1].pid
        with open(pathlib.Path(__file__).with_name("begun.txt"), "a+", buffering=1) as file:
            file.write(" ".join([*facts, str(threads), str(keeper), str(os.getpid())]) + "\\n")
            file.seek(0)
            is_last = len({line.split()[1] for line in file}) == 16
        time.sleep(60 * (is_last and "STAYS" in os.environ))
        return (a.float() @ b.float()).to(a.dtype)

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", mine)
"""
LINES = [f"mm:f32:nn:{m}x8x16" for m in range(1, 17)]
TEST = f"""
    import pytest

    @pytest.mark.gemm(problems={LINES}, distributions=["rand"])
    def test_made(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


def run(pytester: pytest.Pytester, *options: str) -> list[list[str]]:
    """Run those tests; the lines of the backend, in the order of time."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    result = pytester.runpytest_subprocess("--gemm-backends=mine", *options, timeout=200)
    result.assert_outcomes(passed=len(LINES))
    return [line.split() for line in (pytester.path / "begun.txt").read_text(encoding="utf-8").splitlines()]


# -- the order -------------------------------------------------------------------------------------------------------


def test_a_problem_that_takes_longer_than_a_share_is_divided_by_backends() -> None:
    dynamic = [f"t.py::test[{who}-mm:f32:nn:{m}x8x8:m.dynamic]" for who in ("aten", "cpp") for m in (2, 17)]
    other = [f"t.py::test[{who}-mm:f32:nn:8x8x{k}]" for who in ("aten", "cpp") for k in (16, 32)]
    seconds = {**dict.fromkeys(dynamic, 4.0), **dict.fromkeys(other, 1.0)}
    assert len({*xdist.divided([*dynamic, *other], seconds, 1).values()}) == 3
    divided = xdist.divided([*dynamic, *other], seconds, 4)
    assert divided[dynamic[0]] == divided[dynamic[1]] != divided[dynamic[2]] == divided[dynamic[3]]
    assert divided[other[0]] == divided[other[2]], "these share their operands"


def test_what_is_not_recorded_is_guessed_by_the_size_of_its_product() -> None:
    recorded = timeline.expected({"t.py::test[aten-mm:f32:nn:8x8x8]": 1.5}, ["a/t.py::test[aten-mm:f32:nn:8x8x8]"])
    assert [*recorded.values()] == [1.5]
    guesses = timeline.expected({}, ["t.py::test[cpp-mm:f32:nn:2x2x2]", "t.py::test[cpp-mm:f32:nn:97x193x65601]"])
    assert guesses["t.py::test[cpp-mm:f32:nn:97x193x65601]"] > 2 * guesses["t.py::test[cpp-mm:f32:nn:2x2x2]"]
    ids = ["t.py::test[triton-mm:f16:nn:16x64x64]", "t.py::test[triton-mm:f16:nn:128x256x512]"]
    few, many = timeline.expected({}, ids, every=True).values()
    assert many > 2 * few


@pytest.mark.parametrize("workers", [2, 16, 64])
def test_a_run_ends_close_to_the_least_time_that_its_tests_allow(pytester: pytest.Pytester, workers: int) -> None:
    ids = [f"t.py::test[mine-mm:f32:nn:{m}x1x1]" for m in range(1, 501)]
    took = {one: 10.0 / rank**0.5 for rank, one in enumerate(ids, 1)}  # 10 s, 7.1 s, ... 0.4 s
    least = max(sum(took.values()) / workers, 10.0)
    assert simulated(pytester, [*reversed(ids)], took, took, workers) < 1.1 * least
    by_chance = simulated(pytester, [*reversed(ids)], took, {}, workers)
    assert workers == 2 or by_chance > 1.15 * least


def test_no_second_long_test_waits_behind_a_long_one(pytester: pytest.Pytester) -> None:
    sizes = random.Random(1).choices(range(20, 70), k=150)
    took = {f"t.py::test[mine-mm:f32:nn:{i}x1x1]": size * (i % 3 == 0) + 0.05 for i, size in enumerate(sizes, 1)}
    assert simulated(pytester, [*took], took, took, 20) < 1.15 * sum(took.values()) / 20


def test_where_a_failure_ends_the_run_tests_begin_in_the_order_of_the_level(pytester: pytest.Pytester) -> None:
    ids = [f"t.py::test[mine-mm:f32:nn:{m}x1x1]" for m in range(1, 41)]
    took = {one: float(rank) for rank, one in enumerate(ids, 1)}
    begun: list[str] = []
    simulated(pytester, ids, took, took, 2, "-x", begun=begun)
    assert [ids.index(one) for one in begun] == pytest.approx([*range(len(ids))], abs=4)


def simulated(
    pytester: pytest.Pytester,
    ids: list[str],
    took: dict[str, float],
    known: dict[str, float],
    workers: int,
    *args: str,
    begun: list[str] | None = None,
) -> float:
    """When the last test ends, with workers that begin a test as those of xdist: when they know the next one."""
    config = pytester.parseconfig("-n2", "--dist=load", "--gemm-backends=aten", *args)
    config.option.tx = ["popen"] * workers
    quiet: Any = SimpleNamespace(loadscopesched=lambda *_: None)
    scheduler: Any = xdist.scheduler(config, quiet, known)
    nodes = [Node(f"gw{i}") for i in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, ids)
    scheduler.schedule()
    now = 0.0
    while busy := [node for node in nodes if node.begin(now, ids, took)]:
        node = min(busy, key=lambda one: one.end)
        now, index = node.end, node.queue.pop(0)
        node.end = 0.0
        if begun is not None:
            begun.append(ids[index])
        scheduler.mark_test_complete(node, index)
        if scheduler.tests_finished:
            for one in nodes:
                one.shutdown()
    assert not any(node.queue for node in nodes)
    return now


class Node:
    """A worker that computes nothing."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name, _io=None)
        self.shutting_down = False
        self.queue: list[int] = []
        self.end = 0.0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def begin(self, now: float, ids: list[str], took: dict[str, float]) -> bool:
        """Whether it has a test that it runs, or begins one now."""
        if not self.end and (len(self.queue) > 1 or (self.queue and self.shutting_down)):
            self.end = now + took[ids[self.queue[0]]]
        return bool(self.end)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.study
def test_the_longest_recorded_case_starts_first(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    monkeypatch.setenv("SLEEP", "0.45")
    run(pytester, "-n2")  # long enough to be recorded
    (path,) = (pytester.path / "cache" / "pytest-gemm" / "durations").glob("*.json")
    known = json.loads(path.read_text(encoding="utf-8"))
    assert len(known) == len(LINES)
    path.write_text(json.dumps({name: 30.0 if "nn:13x" in name else 0.5 for name in known}), encoding="utf-8")
    (pytester.path / "begun.txt").unlink()
    monkeypatch.setenv("SLEEP", "0")
    order = run(pytester, "-n2")
    firsts = {worker: m for worker, m, *_ in reversed(order)}
    assert "13" in firsts.values(), "a worker begins with it, though another may begin before"


# -- the start -------------------------------------------------------------------------------------------------------


def until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_workers_import_torch_first_share_a_keeper_have_no_more_threads_than_cores_and_end_with_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of the run get the signal; that pytest alone gets it is tried in ``test_exit_codes.py``."""
    scratch = pytester.mkdir("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("STAYS", "yes")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    cores = max(2, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gemm-backends=mine", "--gemm-output=."]
    begun, loaded, record, log = (pytester.path / name for name in ("begun.txt", "loaded.txt", "run.jsonl", "log"))
    with log.open("wb") as file:  # without the server, for they begin without torch and are one group
        run = subprocess.Popen([*command, f"-n{cores}"], stdout=file, stderr=file, start_new_session=True)
        until(lambda: begun.exists() and len({*re.findall(r" (\d+) p", begun.read_text())}) == len(LINES), 200.0)
        until(lambda: record.exists() and record.read_text().count("\n") > 1, 10.0)  # the first test is over
        time.sleep(0.5)
        os.killpg(run.pid, signal.SIGTERM)
        status = run.wait(60)
    said = log.read_text()
    assert status == 143, said
    assert "SIGTERM" in said
    assert "INTERNALERROR" not in said
    assert "totals" in json.loads(record.read_text().splitlines()[-1])
    lines = map(str.split, begun.read_text().splitlines())
    workers, _, policies, threads, keepers, processes = zip(*lines, strict=True)
    until(lambda: not any(lives(int(one)) for one in processes), 15.0)
    assert not list(scratch.glob("pytest-gemm-*"))

    assert loaded.read_text().split() == ["True"] * len(LINES)
    assert {*policies} == {"passive"}  # the judge's process waits meanwhile
    # Besides its own: that of execnet, that of the watch, and the pool of PyTorch where a worker has several.
    assert max(map(int, threads)) <= 1 + 3
    assert len({*workers}) > 1
    assert len({*keepers}) == 1, "that of their controller"


@pytest.mark.parametrize("given", [None, "4"])
def test_a_worker_s_context_has_one_queue_unless_that_is_set_and_its_kernels_have_what_the_user_has(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    look = ctypes.CDLL(None).getenv
    look.restype = ctypes.c_char_p
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)

    class Driver:
        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *_: seen.append((look(name.encode()), os.environ.get(name)))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    startup._start_driver()
    assert {*seen} == {((given or "1").encode(), given)}
    assert look(name.encode()) == (given.encode() if given else None)


@pytest.mark.slow
def test_more_threads_than_cores_do_not_spin(pytester: pytest.Pytester) -> None:
    cores = len(os.sched_getaffinity(0))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    pytester.runpytest_subprocess("--gemm-backends=mine", "-n2", f"--gemm-threads={cores}", timeout=200)
    begun = (pytester.path / "begun.txt").read_text(encoding="utf-8").splitlines()
    assert {line.split()[2] for line in begun} == {"passive"}
