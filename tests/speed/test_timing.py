"""The paired timer: its order, its guard and its arithmetic on a virtual clock; its instruments on fakes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
import torch

from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.machine import processor
from pytest_gemm.operands.tensors import Operands, make
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import bench
from pytest_gemm.speed.timing import cpu, paired
from pytest_gemm.speed.timing import cuda as cuda_module
from pytest_gemm.speed.timing.changing import Changing
from pytest_gemm.speed.timing.cuda import CudaTimer, GpuState
from pytest_gemm.speed.timing.paired import Call, Conditions, Plan, Readings, Target, Timer, TimingError

# Seconds of a call that begins at a given time.
Cost = Callable[[float], float]


class Unchanging(Changing):
    """Operands that stay what they are, and results that are not looked at."""

    def __init__(self) -> None:
        pass

    def move(self) -> None:
        pass

    def write(self, content: int, aside: int = 0) -> None:
        pass

    def put(self, index: int) -> None:
        pass

    def memory(self) -> tuple[list[memoryview], list[bytes]]:
        return [memoryview(bytearray())], [b"", b""]

    def next_content(self) -> int:
        return 0

    def other_content(self, content: int) -> int:
        return content

    def see(self, made: object, content: int) -> None:
        pass


@pytest.fixture(autouse=True)
def calls_without_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    for timer in (cpu.CpuTimer, CudaTimer):
        monkeypatch.setattr(timer, "changing", Unchanging(), raising=False)


class VirtualTimer(Timer):
    """A clock that only the calls move: each has the cost that belongs to its name."""

    def __init__(self, **costs: Cost | float) -> None:
        self.now = 0.0
        self.readings: list[tuple[str, int, float]] = []
        self.has_ended = False
        self.costs = {name: cost if callable(cost) else (lambda _now, c=cost: c) for name, cost in costs.items()}

    def call(self, name: str) -> Call:
        def run() -> None:
            self.now += self.costs[name](self.now)

        run.__name__ = name
        return run

    def targets(self, works: Mapping[str, Sequence[Call]]) -> Mapping[str, Target]:
        found = {name: VirtualTarget(self, calls) for name, calls in works.items()}
        self.subject = found["subject"]
        return found

    def clock(self) -> float:
        return self.now

    def begin(self) -> None:
        self.readings.clear()

    def end(self) -> Conditions:
        self.has_ended = True
        return Conditions({})

    def measure(self, *, comparator: bool = True, **plan: Any) -> Readings:
        return paired.measure(
            [self.call("subject")],
            [self.call("comparator")] if comparator else None,
            timer=self,
            plan=Plan(**plan),
        )


class VirtualTarget:
    def __init__(self, timer: VirtualTimer, calls: Sequence[Call]) -> None:
        self.timer, self.calls, self.cycle = timer, calls, len(calls)

    def repeat(self, calls: int) -> int:
        return calls

    def seconds(self, calls: int) -> float:
        self.calls[0]()
        started = self.timer.now
        for call in itertools.islice(itertools.cycle(self.calls), calls):
            call()
        self.timer.readings.append((self.calls[0].__name__, calls, self.timer.now - started))
        return self.timer.now - started


# -- blocks --------------------------------------------------------------------------------------------------


def test_a_block_reads_both_twice_in_a_random_order_that_the_seed_repeats() -> None:
    orders = []
    for seed in (0, 0, 1):
        timer = VirtualTimer(subject=2e-3, comparator=3e-3)
        readings = timer.measure(seed=seed)
        names = [name for name, _, _ in timer.readings]
        orders.append([tuple(names[i : i + 4]) for i in range(0, len(names), 4)])
        assert len(readings.subject) == len(readings.comparator) == 30
    assert set(orders[0]) == {
        ("subject", "comparator", "comparator", "subject"),
        ("comparator", "subject", "subject", "comparator"),
    }
    assert orders[0] == orders[1] != orders[2]


def test_alone_the_subject_is_read_twice_a_block() -> None:
    readings = VirtualTimer(subject=2e-3).measure(comparator=False)
    assert readings.subject == pytest.approx((2e-3,) * 30)
    assert readings.comparator == ()


@pytest.mark.parametrize(("cost", "cycle"), [(1e-7, 1), (3e-6, 1), (3e-6, 7), (0.9e-3, 1), (5e-3, 3)])
def test_a_reading_is_a_millisecond_and_whole_cycles(cost: float, cycle: int) -> None:
    timer = VirtualTimer(subject=cost, comparator=10e-3)
    calls = [timer.call("subject") for _ in range(cycle)]
    readings = paired.measure(calls, [timer.call("comparator")], timer=timer, plan=Plan())
    mine = [(calls, seconds) for name, calls, seconds in timer.readings if name == "subject"]
    assert all(calls == readings.calls and calls % cycle == 0 for calls, _ in mine)
    assert all(0.999e-3 <= seconds <= 1.2e-3 + cost * cycle for _, seconds in mine)
    assert readings.subject == pytest.approx((cost,) * 30)


def test_everything_is_warm_before_it_counts() -> None:
    """For the first 50 ms all is ten times as slow."""
    timer = VirtualTimer(subject=lambda now: 1e-2 if now < 0.05 else 1e-3, comparator=1e-3)
    assert max(timer.measure(warm_seconds=0.1).subject) == pytest.approx(1e-3)


def test_what_drifts_cancels_in_the_ratio() -> None:
    """The machine gets slower by 1% with every 10 ms; within a block, ABBA has both at the same mean time."""

    def drifting(base: float) -> Cost:
        return lambda now: base * (1.0 + now)

    readings = VirtualTimer(subject=drifting(1e-3), comparator=drifting(1e-3)).measure(blocks=40)
    assert readings.subject[-1] > 1.2 * readings.subject[0]
    pairs = [
        math.log(sum(readings.subject[i : i + 2]) / sum(readings.comparator[i : i + 2]))
        for i in range(0, len(readings.subject), 2)
    ]
    assert abs(statistics.median(pairs)) < 5e-3
    assert max(map(abs, pairs)) < 1e-2


# -- the guard -----------------------------------------------------------------------------------------------


def burst(base: float, slow: float, *spans: tuple[float, float]) -> Cost:
    """``base`` seconds, but ``slow`` for a call that begins within a span."""
    return lambda now: slow if any(a <= now < b for a, b in spans) else base


@pytest.mark.parametrize("comparator", [True, False])
def test_a_block_beside_a_burst_is_measured_again(comparator: bool) -> None:
    cost = burst(1e-3, 3e-3, (0.15, 0.17))
    readings = VirtualTimer(subject=cost, comparator=cost).measure(comparator=comparator)
    assert readings.retaken > 0
    assert max(readings.subject) == pytest.approx(1e-3)
    assert len(readings.subject) == 30
    assert readings.disturbed == ""


def test_a_slow_subject_beside_a_steady_comparator_is_the_subject_s_own_affair() -> None:
    readings = VirtualTimer(subject=burst(1e-3, 3e-3, (0.15, 0.17)), comparator=1e-3).measure()
    assert readings.retaken == 0
    assert max(readings.subject) == pytest.approx(3e-3)
    assert readings.disturbed == ""


@pytest.mark.parametrize(("comparator", "who"), [(True, "comparator"), (False, "subject")])
def test_a_neighbour_that_does_not_go_away_disturbs(comparator: bool, who: str) -> None:
    """Every third reading is half as slow again."""
    reading = itertools.count()
    noisy = VirtualTimer(subject=lambda _now: 1.5e-3 if next(reading) % 6 < 2 else 1e-3, comparator=2e-3)
    if comparator:
        noisy.costs["comparator"], noisy.costs["subject"] = noisy.costs["subject"], noisy.costs["comparator"]
    readings = noisy.measure(comparator=comparator, retakes=4)
    assert readings.retaken == 4
    assert f"blocks the {who} took over 10% longer than its median, after 4 retaken" in readings.disturbed


def test_some_outlying_blocks_that_cannot_be_retaken_are_kept() -> None:
    cost = burst(1e-3, 3e-3, (0.15, 0.17))
    readings = VirtualTimer(subject=cost, comparator=cost).measure(retakes=0)
    assert (readings.retaken, readings.disturbed, len(readings.subject)) == (0, "", 30)
    assert max(readings.subject) == pytest.approx(3e-3)


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "plan", "blocks"),
    [(1e-3, {}, 15), (0.1, {}, 6), (10.0, {}, 5), (10.0, {"blocks": 2}, 2), (0.1, {"max_seconds": 60.0}, 15)],
)
def test_slow_kernels_get_fewer_blocks_but_not_under_five(cost: float, plan: dict[str, Any], blocks: int) -> None:
    timer = VirtualTimer(subject=cost, comparator=cost)
    readings = timer.measure(**plan)
    assert len(readings.subject) == 2 * blocks


def test_retaking_ends_with_the_time() -> None:
    spread = random.Random(0)
    timer = VirtualTimer(subject=0.1, comparator=lambda _now: spread.choice([0.1, 0.2]))
    readings = timer.measure(retakes=1000)
    assert readings.retaken < 20
    assert timer.now < 15.0


def test_a_call_that_takes_no_time_is_an_error() -> None:
    with pytest.raises(TimingError, match="calls of the subject take no more than 0 s together"):
        VirtualTimer(subject=0.0, comparator=1e-3).measure()


def test_the_conditions_end_even_when_a_call_fails() -> None:
    def fails(now: float) -> float:
        if now > 0.15:
            raise RuntimeError("boom")
        return 1e-3

    timer = VirtualTimer(subject=fails, comparator=1e-3)
    with pytest.raises(RuntimeError, match="boom"):
        timer.measure()
    assert timer.has_ended


# -- plans and readings ----------------------------------------------------------------------------------------


def test_the_contract_changes_with_all_that_can_change_an_estimate() -> None:
    plan = Plan()
    changed = {
        field.name: dataclasses.replace(plan, **{field.name: getattr(plan, field.name) * 2 + 1}).contract()
        for field in dataclasses.fields(plan)
    }
    assert changed.pop("seed") == plan.contract()
    assert plan.contract() == "8602c24c", "of the baselines that are stored"
    assert len({plan.contract(), *changed.values()}) == 1 + len(changed)


# -- the CPU -----------------------------------------------------------------------------------------------------


def test_the_cpu_timer_calls_in_turn_with_one_call_before_and_no_collector() -> None:
    made: list[str] = []
    collects: list[bool] = []

    def call(name: str) -> Call:
        def run() -> None:
            made.append(name)
            collects.append(gc.isenabled())

        return run

    target = cpu.CpuTimer().targets({"subject": [call("a"), call("b")]})["subject"]
    assert target.seconds(3) > 0.0
    assert target.seconds(1) > 0.0
    assert made == ["a", "b", "a", "b", "a", "b"]
    assert not any(collects)
    assert gc.isenabled()


def test_the_collector_is_back_after_a_call_that_fails() -> None:
    def fail() -> None:
        raise ValueError

    target = cpu.CpuTimer().targets({"subject": [fail]})["subject"]
    with pytest.raises(ValueError):  # noqa: PT011  # the call's own
        target.seconds(1)
    assert gc.isenabled()


def test_the_work_of_all_but_guests_on_the_own_cores_is_counted(tmp_path: Path) -> None:
    columns = "1 2 4 8 16 32 64 128 256 512"  # user nice system idle iowait irq softirq steal guest guest_nice
    (tmp_path / "stat").write_text(f"cpu 1 1 1\ncpu0 {columns}\ncpu1 {columns}\ncpu2 {columns}\nintr 5\n")
    ticks = processor.TICKS
    expected = {"busy": 2 * (1 + 2 + 4 + 32 + 64 + 128) / ticks, "stolen": 2 * 128 / ticks}
    assert processor.busy_seconds({0, 1}, tmp_path) == expected
    assert processor.busy_seconds({0}, tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("spent", "says"),
    [
        ({"busy": 0.9}, ""),  # seconds of ten
        ({"busy": 1.3}, "others used 0.13 of its cores"),
        ({"busy": 11.3, "own": 10.0}, "others used 0.13 of its cores"),
        ({"waited": 0.9}, ""),
        ({"waited": 2.0}, "others used 0.20 cores that it waited for"),
        ({"waited": 20.0, "own": 10.0}, "others used 1.00 cores that it waited for"),
        ({"waited": 20.0, "own": 20.0}, ""),  # four threads on two cores wait for each other
        ({"waited": 28.0, "own": 12.0}, "others used 0.80 cores that it waited for"),
        ({}, ""),  # the system tells nothing
    ],
)
def test_others_that_take_a_tenth_of_a_core_disturb(
    spent: dict[str, float], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "cores", lambda: range(2))
    timer = cpu.CpuTimer()
    spent = {"wall": 10.0, "own": 0.0, **spent} | ({"stolen": 0.0} if "busy" in spent else {})
    counters = iter([dict.fromkeys(spent, 1.0), {name: 1.0 + seconds for name, seconds in spent.items()}])
    monkeypatch.setattr(timer, "_counters", lambda: next(counters))
    timer.begin()
    found = timer.end()
    assert found.disturbed == says
    assert ("others_cores" in found.telemetry) == ("busy" in spent)
    assert ("waited_cores" in found.telemetry) == ("waited" in spent)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one core")
def test_cores_are_those_of_all_threads() -> None:
    """OpenMP binds each thread to a core."""
    own = os.sched_getaffinity(0)
    first, second, *_ = own
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.sched_setaffinity, 0, {second}).result()
        os.sched_setaffinity(0, {first})
        try:
            assert processor.cores() == {first, second}
        finally:
            os.sched_setaffinity(0, own)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count what threads wait")
def test_a_thread_that_shares_its_core_is_seen_to_wait() -> None:
    cores = os.sched_getaffinity(0)
    timer = cpu.CpuTimer()
    ends = time.monotonic() + 0.3
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while other.poll() is None and time.monotonic() < ends:  # it starts
            pass
        timer.begin()
        ends = time.monotonic() + 0.3
        while time.monotonic() < ends:
            pass
        found = timer.end()
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    assert "cores that it waited for" in found.disturbed
    assert 0.1 < found.telemetry["waited_cores"] <= 1.0


def test_a_product_is_timed_on_the_cpu() -> None:
    a = torch.rand(64, 64)
    readings = paired.measure(
        [lambda: a @ a],
        [lambda: a + a],
        timer=cpu.CpuTimer(),
        plan=Plan(blocks=2, retakes=0),
    )
    assert len(readings.subject) == len(readings.comparator) == 4
    assert all(0.0 < seconds < 1.0 for seconds in (*readings.subject, *readings.comparator))


# -- CUDA --------------------------------------------------------------------------------------------------------


class FakeCuda(cuda_module.CudaRuntime):
    """A device on which every call takes a millisecond for each kernel that it launches."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.capturing = False
        self.loses = 0  # nodes that a graph of several calls lacks
        self.replays: list[Counted] = []
        self.countable = True
        self.recovered = 0

    def call(self, name: str, kernels: int = 1, captures: bool = True) -> Call:
        def run() -> None:
            if self.capturing and not captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.launched += [name] * kernels

        return run

    def _collect(self, calls: Sequence[Call]) -> list[str]:
        self.launched = []
        for call in calls:
            call()
        return self.launched

    def warm(self, calls: Sequence[Call]) -> None:
        self._collect(calls)

    def capture(self, calls: Sequence[Call]) -> Counted:
        self.capturing = True
        try:
            found = self._collect(calls)
        finally:
            self.capturing = False
        return Counted(self, found[: len(found) - self.loses] if len(calls) > 1 else found)

    def nodes(self, graph: Counted) -> int | None:
        return len(graph.names) if self.countable else None

    def elapsed(self, lead: Call, between: Call, work: Call) -> float:
        lead()
        between()
        return 1e-3 * len(self._collect([work]))

    def recover(self) -> None:
        self.recovered += 1


class FakeDriver:
    """CUDA's driver with a limit of persisting L2, which it takes in whole pages."""

    def __init__(self, l2: int, status: int = 0) -> None:
        self.l2, self.status, self.resets = l2, status, 0

    def cuCtxGetLimit(self, size: Any, limit: int) -> int:  # noqa: N802  # the driver's name
        assert limit == 6
        size._obj.value = self.l2
        return self.status

    def cuCtxSetLimit(self, limit: int, size: ctypes.c_size_t) -> int:  # noqa: N802  # as above
        assert limit == 6
        self.l2 = size.value // 4096 * 4096
        return 0

    def cuCtxResetPersistingL2Cache(self) -> int:  # noqa: N802  # as above
        self.resets += 1
        return 0


@dataclasses.dataclass
class Counted:
    cuda: FakeCuda
    names: list[str]

    def replay(self) -> None:
        self.cuda.replays.append(self)
        self.cuda.launched += self.names


class WithoutGraphs(FakeCuda):
    """A device that captures nothing."""

    def __init__(self, why: str = "not permitted") -> None:
        super().__init__()
        self.why = why

    def capture(self, calls: Sequence[Call]) -> Counted:
        raise RuntimeError(self.why)


class FakeProbe:
    def __init__(self, *states: GpuState) -> None:
        self.states: Iterator[GpuState] = itertools.cycle(states or (GpuState(1980.0),))

    def __call__(self) -> GpuState | None:
        return next(self.states)


PLAN = Plan(blocks=3, warm_seconds=0.0, reading_seconds=3e-3)


def on_cuda(
    cuda: FakeCuda, probe: FakeProbe | None = None, *, subject: Sequence[Call], comparator: Sequence[Call]
) -> Readings:
    return paired.measure(subject, comparator, timer=CudaTimer(cuda, probe or FakeProbe()), plan=PLAN)


def test_a_target_on_cuda_is_a_graph_of_all_operand_sets_in_turn() -> None:
    cuda = FakeCuda()
    sets = [cuda.call(name, kernels=2) for name in "xy"]
    readings = on_cuda(cuda, subject=sets, comparator=[cuda.call("c")])
    assert readings.subject == pytest.approx((2e-3,) * 6)
    assert readings.comparator == pytest.approx((1e-3,) * 6)
    assert readings.telemetry["graph"] == 1.0
    graphs = {tuple(graph.names) for graph in cuda.replays}
    # The calls of the last graphs fill the target; a reading launches its graph twice, and the second one counts.
    assert ("x", "x", "y", "y") in graphs
    assert ("c",) * 4 in graphs
    assert cuda.replays[-1] is cuda.replays[-2]
    assert cuda.recovered == 0


@pytest.mark.parametrize("who", ["subject", "comparator"])
def test_one_call_that_cannot_be_captured_takes_the_graph_from_both(who: str) -> None:
    cuda = FakeCuda()
    subject, comparator = ([cuda.call(name, captures=name != who)] for name in ("subject", "comparator"))
    readings = on_cuda(cuda, subject=subject, comparator=comparator)
    assert readings.telemetry["graph"] == 0.0
    assert readings.subject == readings.comparator
    assert readings.subject == pytest.approx((1e-3,) * 6)
    assert cuda.replays == []
    assert cuda.recovered == 1


# That of one H100 before anything has run, that of GPUs without one, and one that the driver does not take.
@pytest.mark.parametrize("default", [9_830_400, 0, 1_000_001])
def test_l2_that_was_set_aside_before_the_kernel_came_is_not_its_fault(
    monkeypatch: pytest.MonkeyPatch, default: int
) -> None:
    driver = FakeDriver(default)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    bench._timer_of.cache_clear()  # that of an earlier test knows another default
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    assert bench.begin(None, "cuda") == []
    timer = bench._timer(Device.CUDA)  # as operands say it
    bench._check(timer)
    driver.l2 = 16 << 20  # by a kernel
    with pytest.raises(Misconduct, match=f"sets 16.8 MB of L2 aside .*, and {default / 1e6:.3g} MB were before it"):
        bench._check(timer)
    assert driver.l2 == default // 4096 * 4096
    bench._check(timer)  # the next kernel has not done it
    assert driver.resets == 4


def test_a_gpu_without_the_limit_has_none_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(1, status=215)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    runtime = cuda_module.CudaRuntime()
    assert runtime.l2_changed() is None
    driver.l2 = 2
    assert runtime.l2_changed() is None


def test_a_later_case_has_its_graphs_again() -> None:
    cuda = FakeCuda()
    timer = CudaTimer(cuda, FakeProbe())
    good, bad = cuda.call("good"), cuda.call("bad", captures=False)
    assert paired.measure([bad], None, timer=timer, plan=PLAN).telemetry["graph"] == 0.0
    assert paired.measure([good], None, timer=timer, plan=PLAN).telemetry["graph"] == 1.0


def test_a_call_that_launches_nothing_is_an_error() -> None:
    cuda = FakeCuda()
    with pytest.raises(Misconduct, match="call 1 of the subject launches nothing on the device"):
        on_cuda(cuda, subject=[cuda.call("x"), cuda.call("y", kernels=0)], comparator=[cuda.call("c")])


def test_a_call_that_leaves_work_on_another_stream_is_an_error() -> None:
    cuda = WithoutGraphs("CUDA error: capturing stream has unjoined work")
    with pytest.raises(Misconduct, match="call 0 leaves work on a stream") as found:
        on_cuda(cuda, subject=[cuda.call("x")], comparator=[cuda.call("c")])
    assert found.value.reason.code == "written-after-return"


@pytest.mark.parametrize("often", [1, 3])
def test_a_device_that_goes_on_is_an_error_where_it_does_so_often(often: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, **_: object) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, _: object) -> float:
            return 0.1

    waits = itertools.cycle([2e-3] + [0.0] * (often - 1))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(next(waits)))
    cuda, nothing = cuda_module.CudaRuntime(), lambda: None
    for _ in range(3):  # a host may stop the process
        assert cuda.elapsed(nothing, nothing, nothing) == pytest.approx(1e-4)
    with pytest.raises(Misconduct, match="the device worked for"):
        _ = [cuda.elapsed(nothing, nothing, nothing) for _ in range(9)]


@pytest.mark.parametrize("every", [1, 2, 8])
def test_on_cuda_a_result_of_an_earlier_call_of_the_same_reading_is_a_doubt(every: int) -> None:
    given = make(Problem.parse("mm:f32:nn:33x48x40"), "rand", 0)
    sets, calls = [given, given.clone()], itertools.count()
    results: list[torch.Tensor] = []

    def call(one: Operands) -> torch.Tensor:
        cuda.launched.append("x")
        if next(calls) % every == 0:
            results[:] = [one.a @ one.b]
        return results[0].clone()

    cuda = WithoutGraphs()  # so that all is called
    timer = CudaTimer(cuda, FakeProbe())
    timer.changing = tried = Changing(sets, 4)
    plan = dataclasses.replace(PLAN, blocks=10, reading_seconds=0.02)
    paired.measure([functools.partial(call, one) for one in sets], None, timer=timer, plan=plan)
    assert (tried.doubt is None) == (every == 1)


def test_a_graph_that_lacks_calls_is_an_error() -> None:
    cuda = FakeCuda()
    cuda.loses = 1
    with pytest.raises(TimingError, match=r"the graph of \d+ calls of the \w+ has \d+ nodes, not \d+"):
        on_cuda(cuda, subject=[cuda.call("x")], comparator=[cuda.call("c")])
    cuda.countable = False  # an old driver does not tell
    assert on_cuda(cuda, subject=[cuda.call("x")] * 2, comparator=[cuda.call("c")] * 2).telemetry["graph"] == 1.0


FAST, SLOW = GpuState(1980.0), GpuState(1200.0)


@pytest.mark.parametrize(
    ("reasons", "says"),
    [
        (0x01, ""),  # idle
        (0x02, ""),  # clocks that somebody set
        (0x10, ""),
        (0x08, "throttled: hw slowdown in 50% of"),
        (0x20, "throttled: sw thermal slowdown"),
        (0x40, "throttled: hw thermal slowdown"),
        (0x80, "throttled: hw power brake"),
    ],
)
def test_a_throttled_gpu_disturbs(reasons: int, says: str) -> None:
    cuda = FakeCuda()
    # Two states, one after the other, meet subject and comparator alike: the order ABBA has an even number of readings.
    probe = FakeProbe(FAST, dataclasses.replace(SLOW, reasons=reasons))
    readings = on_cuda(cuda, probe, subject=[cuda.call("s")], comparator=[cuda.call("c")])
    assert says in readings.disturbed
    assert bool(says) == bool(readings.disturbed)
    expected = {"sm_mhz_min": 1200, "sm_mhz_max": 1980}
    assert expected.items() <= readings.telemetry.items()
    shares = {name: share for name, share in readings.telemetry.items() if name.endswith("_share")}
    assert list(shares.values()) == ([pytest.approx(0.5)] if reasons > 0x02 else [])


@pytest.mark.parametrize(("mhz", "disturbs"), [(1500.0, False), (1515.0, False), (1600.0, True)])
def test_a_power_cap_disturbs_only_when_it_meets_one_target_more_than_the_other(mhz: float, disturbs: bool) -> None:
    cuda = FakeCuda()
    timer = CudaTimer(cuda, probe := FakeProbe())
    capped = GpuState(1500.0, reasons=0x04)

    def taken(name: str) -> None:
        probe.states = itertools.repeat(capped if name == "subject" else dataclasses.replace(capped, sm_mhz=mhz))
        CudaTimer.taken(timer, name)

    timer.taken = taken  # type: ignore[method-assign]  # the state is that of the target
    readings = paired.measure([cuda.call("s")], [cuda.call("c")], timer=timer, plan=PLAN)
    assert readings.telemetry["sw_power_cap_share"] > 0.8
    assert ("power-capped, at 1500 MHz under the subject and 1600 MHz" in readings.disturbed) == disturbs
    assert bool(readings.disturbed) == disturbs


@pytest.mark.parametrize(
    ("period", "milliseconds", "joule"),
    [(0.016, 1, 0.7), (0.016, 500, 350.0), (0.096, 1, 0.7), (0.5, 1, None), (0.0, 1, None)],
)
@pytest.mark.parametrize("captures", [True, False])
def test_the_energy_of_a_call_is_counted_between_changes_of_the_counter(
    period: float, milliseconds: int, joule: float | None, captures: bool
) -> None:
    """A GPU of 700 W with a counter that moves once a period, or that has none."""

    class Clocked(FakeCuda):
        now = 0.0

        def elapsed(self, lead: Call, between: Call, work: Call) -> float:
            self.now += 1e-3 * len(self._collect([lead, between]))
            seconds = 1e-3 * len(self._collect([work]))
            self.now += seconds
            return seconds

    cuda = Clocked()
    timer = CudaTimer(cuda, lambda: GpuState(joule=700 * period * (cuda.now // period) if period else None))
    timer.clock = lambda: cuda.now  # type: ignore[method-assign]  # the virtual one
    call = cuda.call("s", kernels=milliseconds, captures=captures)
    found = paired.measure([call], None, timer=timer, plan=PLAN).telemetry
    assert found.get("joule") == (joule and pytest.approx(joule, rel=0.1))


# -- how the state of a GPU is read --------------------------------------------------------------------------------


def state_after_a_case() -> Conditions:
    timer = CudaTimer(FakeCuda())
    timer.begin()
    return timer.end()


def test_nvml_tells_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    state: dict[str, Any] = {
        "NVML_CLOCK_SM": 1,
        "nvmlDeviceGetHandleByUUID": asked.append,
        "nvmlDeviceGetClockInfo": lambda _gpu, kind: {1: 1980}[kind],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _gpu: 0x80,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _gpu: 5000,
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.module(**state))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = state_after_a_case()
    assert asked == ["GPU-aaa"]
    assert found.telemetry == {
        "graph": 1.0,
        "sm_mhz_min": 1980.0,
        "sm_mhz_max": 1980.0,
        "hw_power_brake_share": 1.0,
    }
    assert found.disturbed == "throttled: hw power brake in 100% of 2 readings"
    whole = cuda_module._probe_of()()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-222")
    part = cuda_module._probe_of()()
    assert whole is not None
    assert part is not None
    assert (whole.joule, part.joule) == (5.0, None)  # the counter is that of all instances


@pytest.mark.parametrize("library", [fake_nvml.without_a_driver(), fake_nvml.module()], ids=["no-driver", "others"])
def test_where_the_gpu_in_use_is_unknown_no_other_one_is_read(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-unknown")
    assert state_after_a_case() == Conditions({"graph": 1.0})


# -- operand sets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "sets"), [(60 << 20, 2), (50 << 20, 2), (100 << 20, 1), (1 << 30, 1), (4096, 64), (0, 64)]
)
def test_operand_sets_hold_twice_the_cache(size: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    assert cuda_module.rotation(size, "cuda") == sets
    assert cuda_module.rotation(size, "cpu") == 1


# -- windows -------------------------------------------------------------------------------------------------


def window(seconds: float, disturbed: str = "") -> paired.Readings:
    return paired.Readings(
        (seconds,) * 2,
        (2 * seconds,) * 2,
        calls=3,
        retaken=1,
        disturbed=disturbed,
        telemetry={"load": seconds},
    )


def test_windows_are_joined_and_a_disturbed_one_is_left_out() -> None:
    made = paired.merged([window(1.0), window(9.0, "a neighbour"), window(2.0)])
    assert made.subject == (1.0, 1.0, 2.0, 2.0)
    assert made.comparator == (2.0, 2.0, 4.0, 4.0)
    assert (made.windows, made.calls, made.retaken, made.disturbed) == ((2, 2), 3, 3, "")
    assert made.telemetry == {"load": 2.0, "windows_left_out": 1.0}


def test_too_many_disturbed_windows_disturb_the_case() -> None:
    made = paired.merged([window(1.0), window(9.0, "a neighbour"), window(8.0, "another")])
    assert made.disturbed == "2 of 3 windows were disturbed: a neighbour"
    assert made.windows == (2, 2, 2)
