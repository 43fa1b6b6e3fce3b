"""The timer of CUDA calls: CUDA graphs between events, and the clocks, temperatures and throttling of the GPU."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.machine import gpus
from pytest_gemm.speed.timing import clock
from pytest_gemm.speed.timing.paired import COMPARATOR, SUBJECT, Call, Calls, Conditions, Target, Timer, TimingError

if TYPE_CHECKING:  # it imports torch
    from pytest_gemm.speed.timing.changing import Changing

# -- the state of a GPU -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GpuState:
    """What a GPU reports of itself; ``None`` for what it does not.

    Attributes:
        sm_mhz: clock of its multiprocessors.
        reasons: bits for why the clock is what it is, see :data:`_REASONS`.
        joule: energy that it has used since some origin.
    """

    sm_mhz: float | None = None
    reasons: int = 0
    joule: float | None = None


# Bits of nvmlClocksEventReasons (nvml.h) in words.  An idle GPU and clocks set by a user do not count as an event.
_REASONS: Final = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
_SW_POWER_CAP: Final = 0x04
_THROTTLES: Final = (0x08, 0x20, 0x40, 0x80)

# SM clocks come in steps of 15 MHz, about 1%: a difference of two steps is one.
_CLOCKS_DIFFER: Final = 0.02


def _nvml_reader(visible: gpus.Gpu) -> Callable[[], GpuState]:
    """Reads a GPU by NVML, the module ``pynvml`` (distribution nvidia-ml-py): microseconds a reading."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByUUID(visible.uuid)

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(gpu, *arguments)
        except nvml.NVMLError:  # this GPU does not tell: a MIG instance has no clock of its own
            return None

    def read() -> GpuState:
        # The counter of a GPU that is cut into instances is that of all of them.
        millijoule = None if visible.mig else ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return GpuState(
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            reasons=ask(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0,
            joule=None if millijoule is None else millijoule * 1e-3,
        )

    return read


def _probe_of() -> Callable[[], GpuState | None]:
    """A reader of the GPU that CUDA calls device 0; it returns ``None`` where nothing can be read."""
    gpu = gpus.visible_gpu()
    with contextlib.suppress(Exception):  # of an NVML that does not know the GPU
        if gpu is not None:
            return _nvml_reader(gpu)
    return lambda: None


# -- the timer ----------------------------------------------------------------------------------------------------


class CudaRuntime:
    """The functions of CUDA that the timer needs, through torch; the current device and stream."""

    def __init__(self) -> None:
        # Of the last readings, whether the device went on: half of them are the comparator's.
        self._went_on: collections.deque[bool] = collections.deque(maxlen=4 * _OFTEN)
        self._l2: int | None = None

    def warm(self, calls: Sequence[Call]) -> None:
        """Run everything twice on another stream: capture must not meet a first call, which allocates and compiles."""
        import torch

        self._went_on.clear()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in (*calls, *calls):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def capture(self, calls: Sequence[Call]) -> Any:
        """A CUDA graph of the calls, one after the other.

        Raises:
            RuntimeError: when one of them does what must not be captured, for instance waits for the device.
        """
        import torch

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Capture happens on a stream of its own; what other threads of the process do must not spoil it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty graph is told by its nodes
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for call in calls:
                    call()
        graph.instantiate()
        return graph

    def nodes(self, graph: Any) -> int | None:
        """How many kernels, copies and fills a graph holds; ``None`` where there is no driver."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        count = ctypes.c_size_t()
        code = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        return int(count.value) if code == 0 else None

    def elapsed(self, lead: Call, between: Call, work: Call) -> float:
        """Seconds on the device from the end of ``between`` to the end of ``work``.

        ``lead`` keeps the device busy while the others are being launched, so that no launch is in the time.

        Raises:
            Misconduct: where the device goes on when the stream of the calls has ended.
        """
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        lead()
        between()
        begin.record()
        work()
        end.record()
        end.synchronize()
        found, ended = float(begin.elapsed_time(end)) * 1e-3, clock.now()
        torch.cuda.synchronize()
        more = clock.now() - ended
        self._went_on.append(more > max(_GOES_ON, 0.2 * found))
        if sum(self._went_on) > _OFTEN:
            text = f"the device worked for {more * 1e3:.2g} ms more when the calls' own stream had ended"
            raise Misconduct("written-after-return", text, _JOIN)
        return found

    def l2_changed(self) -> tuple[int, int] | None:
        """Bytes of L2 for data that stays there: how many there were at the first call, and the others that are now.

        They are as many as at the first call again, and no data stays.  ``None`` where they were, and without a driver.
        """
        with contextlib.suppress(OSError):
            driver, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
            if driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING) == 0:
                self._l2 = size.value if self._l2 is None else self._l2  # each GPU has a default of its own
                driver.cuCtxResetPersistingL2Cache()
                if (sizes := (self._l2, size.value)) != (size.value,) * 2:
                    driver.cuCtxSetLimit(_PERSISTING, ctypes.c_size_t(self._l2))
                    driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING)  # which may round it
                    self._l2 = size.value
                    return sizes
        return None

    def recover(self) -> None:
        """Wait for the device after a capture that failed."""
        import torch

        torch.cuda.synchronize()


# Seconds that a wait for an idle device may take, and how often it may be longer: a host may stop this process.
_GOES_ON: Final = 5e-4
_OFTEN: Final = 3
_JOIN: Final = "have the current stream wait for every other one"
# CU_LIMIT_PERSISTING_L2_CACHE_SIZE of cuda.h.
_PERSISTING: Final = 0x06


def _launch(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


class _CudaTarget(Target):
    """Calls on the device: a graph of them, or where the timer gave graphs up, launches from Python.

    The results of the last call and of one at random are looked at; right before that one the operands of its set
    change, so that no call before it could compute its result.
    """

    def __init__(self, name: str, calls: Sequence[Call], timer: CudaTimer) -> None:
        self.cycle = len(calls)
        self._name = name
        self._calls = calls
        self._timer = timer
        self._graph: Any = None
        self._length = 0
        self._at = 0
        self._kept: list[object] = []

    def nodes(self) -> int | None:
        """Nodes of one cycle, each call captured alone; ``None`` where they cannot be counted.

        Raises:
            Misconduct: for a call that launches nothing, or that does not wait for what it has launched.
            RuntimeError: for one that cannot be captured.
        """
        runtime, total = self._timer.runtime, 0
        for index, call in enumerate(self._calls):
            try:
                count = runtime.nodes(runtime.capture([call]))
            except RuntimeError as error:
                if self._name == SUBJECT and "unjoined" in str(error):
                    text = f"call {index} leaves work on a stream that the current one does not wait for"
                    raise Misconduct("written-after-return", text, _JOIN) from error
                raise
            if count is None:
                return None
            if count == 0:
                text = f"call {index} of the {self._name} launches nothing on the device"
                raise Misconduct("launches-nothing", text, "compute in every call, on the current stream")
            total += count
        return total

    def repeat(self, calls: int) -> int:
        """So many calls, or as many graphs as hold them; how many it were."""
        if not self._timer.graphs:
            for call in itertools.islice(itertools.cycle(self._calls), calls):
                call()
            return calls
        graphs = -(-calls // self._length)
        for _ in range(graphs):
            self._graph.replay()
        return graphs * self._length

    def seconds(self, calls: int) -> float:
        """See :class:`Target`; the calls that do not count are as many again, or one cycle without a graph."""
        timer, runtime = self._timer, self._timer.runtime
        if timer.graphs and calls != self._length:
            self._capture(calls)
        if timer.graphs:
            lead = work = self._graph.replay
        else:
            order = self._order(calls)
            lead, work = functools.partial(_launch, self._calls), functools.partial(_launch, order)
        is_changed = (calls - 1 - self._at) % self.cycle == 0  # the last call has the set of the other one
        content = aside = 0
        if is_seen := self._name == SUBJECT:
            last = timer.changing.next_content()
            other = timer.changing.other_content(last)
            content, aside = (other, last) if is_changed else (last, other)
        found = runtime.elapsed(lead, functools.partial(timer.changing.write, content, aside), work)
        if is_seen:
            for one, had in zip(reversed(self._kept), (last, aside), strict=False):
                timer.changing.see(one, had)
        return found

    def _keeping(self, call: Call) -> None:
        self._kept.append(call())

    def _order(self, calls: int) -> list[Call]:
        """The calls of a reading, with a change of A before one at random; what that and the last return is kept."""
        order = list(itertools.islice(itertools.cycle(self._calls), calls))
        self._at, self._kept = random.randrange(calls), []
        for at in {calls - 1, self._at}:
            order[at] = functools.partial(self._keeping, order[at])
        order.insert(self._at, functools.partial(self._timer.changing.put, self._at % self.cycle))
        return order

    def _capture(self, calls: int) -> None:
        """Capture the calls, and see that all of them are in the graph."""
        runtime = self._timer.runtime
        try:
            self._graph, self._kept = None, []  # its memory is needed
            self._graph = runtime.capture(self._order(calls))
        except RuntimeError:
            self._kept = []
            self._timer.give_up_graphs()
            return
        self._length = calls
        expected, found = self._timer.expected_nodes.get(self._name), runtime.nodes(self._graph)
        if expected is not None and found is not None and found < expected * (calls // self.cycle):
            raise TimingError(
                f"the graph of {calls} calls of the {self._name} has {found} nodes, "
                f"not {expected * calls // self.cycle}"
            )


_SETTLED_SECONDS: Final = 0.15
# Between two changes of the energy counter at least, which moves every 0.02 to 0.1 s; and for both together at most.
_ENERGY_SECONDS: Final = 0.09
_LONGEST_ENERGY: Final = 0.25


class CudaTimer(Timer):
    """Times calls by events on the device, each target a CUDA graph.

    One launch of a graph replaces the launches of its calls, so that a small kernel is timed and not Python.  Every
    call is captured alone as well: one that launches nothing, or that is missing in the graph, is an error.  When
    one of a case's calls cannot be captured, all of the case are launched from Python between the events.

    Every reading ends with a wait for the device, so that the wall clock limits the time.

    Telemetry: ``graph`` (1 or 0), ``sm_mhz_min``, ``sm_mhz_max``, for each reason that held the clock the share of
    readings that gave it (``sw_power_cap_share``), and ``joule``, the energy of a call of the subject.

    Args:
        runtime: CUDA.
        probe: reads the state of the GPU within microseconds; ``None`` for NVML.

    Attributes:
        changing: the operands of the calls, and what becomes of their results.
    """

    changing: Changing

    def __init__(self, runtime: CudaRuntime | None = None, probe: Callable[[], GpuState | None] | None = None) -> None:
        self.runtime = runtime or CudaRuntime()
        self.graphs = True
        self.expected_nodes: dict[str, int | None] = {}
        self._probe = probe or _probe_of()
        self._states: list[tuple[str, GpuState]] = []
        self._clocks: list[tuple[float, float]] = []
        self._joule: float | None = None

    def targets(self, works: Mapping[str, Calls]) -> Mapping[str, Target]:
        """Warm everything up, and capture every call once."""
        self.graphs = True
        self._clocks.clear()
        self.changing.move()
        targets = {name: _CudaTarget(name, calls, self) for name, calls in works.items()}
        self.subject = targets[SUBJECT]
        for calls in works.values():
            self.runtime.warm(calls)
        try:
            self.expected_nodes = {name: target.nodes() for name, target in targets.items()}
        except RuntimeError:
            self.give_up_graphs()
        return targets

    def give_up_graphs(self) -> None:
        """Launch from Python from now on: all targets, or the one with a graph would look faster than it is."""
        self.graphs = False
        self.expected_nodes = {}
        self.runtime.recover()

    def steady(self) -> bool:
        """Whether the SM clock has kept within 2% for as long as it takes the power limit to act.

        A GPU that is given a full load begins at its highest clock, and comes down when it has drawn too much for a
        while: from 1980 to 1500 MHz within 0.3 s on an H200.
        """
        state, now = self._probe(), self.clock()
        if state is None or state.sm_mhz is None:
            return True
        self._clocks.append((now, state.sm_mhz))
        recent = [mhz for when, mhz in self._clocks if when >= now - _SETTLED_SECONDS]
        return now - self._clocks[0][0] >= _SETTLED_SECONDS and max(recent) <= (1.0 + _CLOCKS_DIFFER) * min(recent)

    def begin(self) -> None:
        """Read the state of the GPU."""
        self._states.clear()
        self.taken("")

    def taken(self, name: str) -> None:
        """Read the state again: the clock is still what it was in the reading."""
        if (state := self._probe()) is not None:
            self._states.append((name, state))

    def warming(self, targets: Mapping[str, Target], calls: Mapping[str, int], /) -> None:
        """Measure the energy of a call of the subject."""
        self._joule = self.energy(targets[SUBJECT], calls[SUBJECT])

    def energy(self, target: Target, calls: int) -> float | None:
        """Joules a call, of the whole GPU, while it makes nothing but these calls.

        They are counted from one change of the counter to another one about 0.1 s later, in two readings at least.

        Args:
            target: what is called.
            calls: in a reading.

        Returns:
            ``None`` where NVML has no counter, or where it does not move within 0.25 s.
        """
        if (state := self._probe()) is None or state.joule is None:
            return None
        last, made, readings, started = state.joule, 0, 0, self.clock()
        first: tuple[float, float, int] | None = None
        while readings < 2 or self.clock() - started <= _LONGEST_ENERGY:
            target.seconds(calls)
            readings += 1
            # With the calls of a reading that do not count in its time.
            made += 2 * calls if self.graphs else calls + target.cycle
            now, state = self.clock(), self._probe()
            if state is not None and state.sm_mhz is not None:
                self._clocks.append((now, state.sm_mhz))
            if state is None or state.joule is None or state.joule == last:
                continue
            last = state.joule
            if first is None:
                first = (now, last, made)
            elif now - first[0] >= _ENERGY_SECONDS:
                return (last - first[1]) / (made - first[2])
        return None

    def end(self) -> Conditions:
        """Read the state once more, and sum up the readings, each with the name of the target before it."""
        self.taken("")
        # The reading before the first sample covers the warm-up as well; none is of an idle device.
        states, telemetry = self._states, {"graph": float(self.graphs)}
        if self._joule is not None:
            telemetry["joule"] = self._joule

        def clocks(*names: str) -> list[float]:
            return [s.sm_mhz for target, s in states if s.sm_mhz is not None and (not names or target in names)]

        if found := clocks():
            telemetry |= {"sm_mhz_min": min(found), "sm_mhz_max": max(found)}
        shares = {bit: sum(bool(s.reasons & bit) for _, s in states) / len(states) for bit in _REASONS if states}
        telemetry |= {f"{_REASONS[bit]}_share": share for bit, share in shares.items() if share}
        disturbed = [
            f"throttled: {_REASONS[bit].replace('_', ' ')} in {shares[bit]:.0%} of {len(states)} readings"
            for bit in _THROTTLES
            if shares.get(bit)
        ]
        mine, other = clocks(SUBJECT), clocks(COMPARATOR)
        if shares.get(_SW_POWER_CAP) and mine and other:
            a, b = statistics.median(mine), statistics.median(other)
            if abs(a - b) > _CLOCKS_DIFFER * min(a, b):
                disturbed.append(f"power-capped, at {a:.0f} MHz under the subject and {b:.0f} MHz under the comparator")
        return Conditions(telemetry, "; ".join(disturbed))


# -- operand sets ----------------------------------------------------------------------------------------------


def l2_cache_bytes() -> int:
    """Size of the device's last-level cache."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


# Sets of operands beyond which making them costs more than a cold cache is worth.
_MOST_SETS: Final = 64


def rotation(bytes_of_operands: int, device: str) -> int:
    """How many sets of operands to cycle through, so that none is found in the cache.

    On CUDA they hold twice the L2 cache together: what a call reads was thrown out since it was last read.  At most 64,
    which leaves out products of less than about 2 MB on a GPU with 50 MB of L2.  On the CPU one: its kernels are timed
    on what their last call left in the caches, in both targets alike.

    Args:
        bytes_of_operands: of one set, its result included.
        device: ``cpu`` or ``cuda``.
    """
    if device != "cuda":
        return 1
    return min(_MOST_SETS, max(1, math.ceil(2 * l2_cache_bytes() / max(1, bytes_of_operands))))
