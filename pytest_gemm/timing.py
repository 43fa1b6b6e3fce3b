"""The paired timer: how long a call takes, beside another one that is timed milliseconds away.

A *block* visits the subject and its comparator in the order ABBA or BAAB, drawn at random.  Whatever drifts slowly (the
clock, the temperature, a neighbour) meets both alike and cancels in their ratio.  One visit is an *arm*: an unmeasured
call, then enough calls to fill a millisecond.  docs/timing.md tells the whole of it.

:func:`measure` knows no clock of its own: a :class:`Timer` has it, for the CPU (:class:`CpuTimer`), for CUDA
(:class:`CudaTimer`), or for a test.  torch is imported by what needs a device, and only then.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import resource
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from pytest_gemm.machine import gpus, processor
from pytest_gemm.outcome import Reason, Status
from pytest_gemm.speed import CaseKey, Sample

__all__ = [
    "Arm",
    "Call",
    "Conditions",
    "CpuTimer",
    "CudaRuntime",
    "CudaTimer",
    "GpuState",
    "Plan",
    "Probe",
    "Readings",
    "Timer",
    "TimingError",
    "cores",
    "cross_check",
    "latency",
    "measure",
    "rotation",
    "waited",
]

Call = Callable[[], object]
# One call, or several with operands of their own that are called in turn.
Calls = Call | Sequence[Call]

# Raise this number with every change of this module that changes a figure.
_VERSION: Final = 1

# A median of fewer blocks says nothing of their spread.
_LEAST_BLOCKS: Final = 5

# In units of the least warm-up.
_LONGEST_WARM: Final = 10

# More calls than this in an arm mean that no time passes.
_MOST_CALLS: Final = 1_000_000


class TimingError(RuntimeError):
    """A call that cannot be timed: it launches nothing, or takes no time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a case is timed.

    Attributes:
        blocks: of two visits of the subject and two of the comparator.
        arm_seconds: least time that the calls of one visit take together.
        warm_seconds: how long everything that is timed runs before anything counts, or up to ten times as long
            until the clock is steady.
        max_seconds: budget of a case.  A slow kernel gets fewer blocks, but never fewer than 5 (or than ``blocks``),
            and retaking ends at twice the budget.
        guard: a block is spoilt when its comparator took this much longer than the median, as a fraction.
        retakes: how many spoilt blocks may be measured again.
        seed: of the order of visits.

    Raises:
        ValueError: for a field that is out of range, by name.
    """

    blocks: int = 15
    arm_seconds: float = 1e-3
    warm_seconds: float = 0.1
    max_seconds: float = 6.0
    guard: float = 0.10
    retakes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("blocks", 1), ("retakes", 0), ("warm_seconds", 0.0)):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        for name in ("arm_seconds", "max_seconds", "guard"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; give a positive number")

    def contract(self) -> str:
        """Eight letters that change with everything about the timing that can change a figure.

        The seed cannot.  Figures of two contracts are not compared.
        """
        facts = {"version": _VERSION, **dataclasses.asdict(self)}
        del facts["seed"]
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=4).hexdigest()


@dataclasses.dataclass(frozen=True)
class Readings:
    """What was measured; the fields are those of ``speed.Sample``.

    Attributes:
        subject: seconds a call, one for each visit in order of time.
        comparator: the same, as long; empty without one.
        rivals: the same of other candidates, half as long: one visit in each block.
        windows: how many of the subject's readings each window holds, for readings that were merged.
        calls: of the subject in one visit.
        retaken: blocks that were thrown away and measured again.
        disturbed: why the figures are not to be trusted, as a sentence; "" when they are.
        telemetry: by name with the unit in it.
    """

    subject: tuple[float, ...]
    comparator: tuple[float, ...] = ()
    rivals: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    windows: tuple[int, ...] = ()
    calls: int = 0
    retaken: int = 0
    disturbed: str = ""
    telemetry: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def sample(
        self,
        case: CaseKey,
        device: str,
        status: Status,
        *,
        reason: Reason | None = None,
        comparator_name: str = "",
        picked: Sequence[str] = (),
        kernels: Sequence[str] = (),
        phases: Mapping[str, float] | None = None,
        filling: str = "",
    ) -> Sample:
        """These readings with what else a ``speed.Sample`` says of a case."""
        return Sample(
            case=case,
            device=device,
            status=status,
            reason=reason,
            comparator_name=comparator_name,
            picked=tuple(picked),
            kernels=tuple(kernels),
            phases=phases or {},
            filling=filling,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
        )


def merged(windows: Sequence[Readings]) -> Readings:
    """Readings that were taken in several windows of a session as those of one case.

    A window in which the machine was disturbed is left out; of fewer than half of them nothing is made, and the
    result says what disturbed them.
    """
    good = [one for one in windows if not one.disturbed]
    if 2 * len(good) < len(windows):
        causes = dict.fromkeys(one.disturbed for one in windows if one.disturbed)
        return dataclasses.replace(
            merged([dataclasses.replace(one, disturbed="") for one in windows]),
            disturbed=f"{len(windows) - len(good)} of {len(windows)} windows were disturbed: {next(iter(causes))}",
        )

    def joined(pick: Callable[[Readings], Sequence[float]]) -> tuple[float, ...]:
        return tuple(itertools.chain.from_iterable(map(pick, good)))

    names = [name for one in good for name in one.telemetry]
    return Readings(
        subject=joined(lambda one: one.subject),
        comparator=joined(lambda one: one.comparator),
        rivals={name: joined(lambda one, name=name: one.rivals[name]) for name in good[0].rivals},  # type: ignore[misc]  # mypy does not see the default
        windows=tuple(len(one.subject) for one in good),
        calls=good[0].calls,
        retaken=sum(one.retaken for one in windows),
        telemetry={
            **{name: max(one.telemetry.get(name, -math.inf) for one in good) for name in dict.fromkeys(names)},
            "windows_left_out": float(len(windows) - len(good)),
        },
    )


# -- what a timer is ----------------------------------------------------------------------------------------------


class Arm(Protocol):
    """Something that a timer can time.

    Attributes:
        turn: number of calls after which every set of operands was used once; calls are timed in multiples of it.
    """

    turn: int

    def seconds(self, calls: int) -> float:
        """Seconds that ``calls`` calls took together, right after at least one that does not count."""
        ...


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Under which conditions was measured.

    Attributes:
        telemetry: by name with the unit in it.
        disturbed: what no pairing cancels, as a sentence; "" for nothing.
    """

    telemetry: Mapping[str, float]
    disturbed: str = ""


class Timer(Protocol):
    """A clock with whatever belongs to it.  One case after the other: ``arms``, ``begin``, visits, ``end``."""

    def arms(self, works: Mapping[str, Sequence[Call]]) -> Mapping[str, Arm]:
        """Make everything of a case ready to be timed, under the same names."""
        ...

    def clock(self) -> float:
        """Seconds of the wall clock, from any origin."""
        ...

    def steady(self) -> bool:
        """Whether the clock of what computes has settled, as far as can be told."""
        ...

    def begin(self) -> None:
        """From here on the visits count."""
        ...

    def visited(self, name: str) -> None:
        """An arm has just been timed."""
        ...

    def end(self) -> Conditions:
        """No more visits count; called after :meth:`begin` whatever happens."""
        ...


# -- blocks -------------------------------------------------------------------------------------------------------

_SUBJECT: Final = "subject"
_COMPARATOR: Final = "comparator"
_RIVAL: Final = "rival "

# The visits of a block by name, seconds a call in order of time.
_Block = Mapping[str, Sequence[float]]


def _sequence(calls: Calls) -> tuple[Call, ...]:
    return (calls,) if callable(calls) else tuple(calls)


def measure(
    subject: Calls,
    comparator: Calls | None,
    rivals: Mapping[str, Calls] | None = None,
    *,
    timer: Timer,
    plan: Plan | None = None,
    filling: dict[str, int] | None = None,
) -> Readings:
    """Time a call beside another one.

    Args:
        subject: what is timed; several calls for several sets of operands, used in turn.
        comparator: what is timed beside it; ``None`` for nothing: a block is two visits of the subject then.
        rivals: further candidates by name, visited once in the middle of each block.
        timer: for where the calls compute.
        plan: ``None`` for the defaults.
        filling: how many calls fill a visit, by name.  What it lacks is measured and entered, so that a case that is
            timed in several windows is calibrated in the first one.

    Returns:
        The readings of all blocks that were not retaken.

    Raises:
        TimingError: when a call takes no time, or launches nothing on the device.
    """
    plan = plan or Plan()
    works = {_SUBJECT: subject}
    if comparator is not None:
        works[_COMPARATOR] = comparator
    works |= {_RIVAL + name: calls for name, calls in (rivals or {}).items()}
    arms = timer.arms({name: _sequence(calls) for name, calls in works.items()})
    started = timer.clock()
    for arm in arms.values():
        arm.seconds(arm.turn)
    filling = {} if filling is None else filling
    for name, arm in arms.items():
        if name not in filling:
            filling[name] = _calibrated(name, arm, plan)
    # As full as the visits, so that the clock under them has settled.
    while (spent := timer.clock() - started) < plan.warm_seconds or (
        spent < _LONGEST_WARM * plan.warm_seconds and not timer.steady()
    ):
        for name, arm in arms.items():
            arm.seconds(filling[name])
    visits = _Visits({name: (arm, filling[name]) for name, arm in arms.items()}, timer, plan)
    timer.begin()
    try:
        blocks, retaken, spoilt = visits.take(started)
    finally:
        conditions = timer.end()
    why = [conditions.disturbed] if conditions.disturbed else []
    if 3 * spoilt > len(blocks):
        who = "comparator" if comparator is not None else "subject"
        why.append(
            f"in {spoilt} of {len(blocks)} blocks the {who} took over {plan.guard:.0%} longer than its median, "
            f"after {retaken} retaken"
        )

    def of(name: str) -> tuple[float, ...]:
        return tuple(itertools.chain.from_iterable(block.get(name, ()) for block in blocks))

    return Readings(
        subject=of(_SUBJECT),
        comparator=of(_COMPARATOR),
        rivals={name.removeprefix(_RIVAL): of(name) for name in arms if name.startswith(_RIVAL)},
        calls=visits.calls(_SUBJECT),
        retaken=retaken,
        disturbed="; ".join(why),
        telemetry={
            **conditions.telemetry,
            "blocks": float(len(blocks)),
            "blocks_spoilt": float(spoilt),
            **({"comparator_calls": float(visits.calls(_COMPARATOR))} if comparator is not None else {}),
        },
    )


def _calibrated(name: str, arm: Arm, plan: Plan) -> int:
    """How many calls fill an arm: the least multiple of its turn, by the fastest of some trials, plus a tenth."""
    calls, fastest = arm.turn, math.inf
    while True:
        fastest = min(fastest, arm.seconds(calls) / calls)
        if fastest * calls >= plan.arm_seconds:
            return calls
        if calls >= _MOST_CALLS:
            raise TimingError(f"{calls} calls of the {name} take no more than {fastest * calls:g} s together")
        # A hundredfold at most: a first trial may have been too short for the clock.
        wanted = min(1.1 * plan.arm_seconds / fastest if fastest > 0.0 else math.inf, 100.0 * calls)
        calls = max(calls + arm.turn, math.ceil(min(wanted, _MOST_CALLS) / arm.turn) * arm.turn)


class _Visits:
    """Takes the blocks of a case.

    Args:
        arms: what is visited, with the calls of a visit.
        timer: whose clock limits the time.
        plan: of the case.
    """

    def __init__(self, arms: Mapping[str, tuple[Arm, int]], timer: Timer, plan: Plan) -> None:
        self._arms = arms
        self._timer = timer
        self._plan = plan
        self._random = random.Random(plan.seed)
        # What tells a disturbed block from a good one; the subject only where nothing else is there.
        self._anchor = _COMPARATOR if _COMPARATOR in arms else _SUBJECT

    def calls(self, name: str) -> int:
        """Calls in one visit."""
        return self._arms[name][1]

    def take(self, started: float) -> tuple[list[_Block], int, int]:
        """All blocks in order of time, how many were retaken, and how many are spoilt all the same."""
        plan, clock = self._plan, self._timer.clock
        blocks: list[_Block] = []
        first = clock()
        while len(blocks) < plan.blocks:
            expected = (clock() - first) / len(blocks) if blocks else 0.0
            if len(blocks) >= _LEAST_BLOCKS and clock() + expected > started + plan.max_seconds:
                break
            blocks.append(self._block())
        retaken = 0
        while retaken < plan.retakes and clock() < started + 2.0 * plan.max_seconds:
            spoilt = self._spoilt(blocks)
            if not spoilt:
                break
            del blocks[spoilt[0]]
            blocks.append(self._block())
            retaken += 1
        return blocks, retaken, len(self._spoilt(blocks))

    def _block(self) -> _Block:
        """One block: ABBA or BAAB, the rivals in its middle, where they have as much of the block before as after."""
        rivals = [name for name in self._arms if name.startswith(_RIVAL)]
        self._random.shuffle(rivals)
        pair = [name for name in (_SUBJECT, _COMPARATOR) if name in self._arms]
        if self._random.random() < 0.5:
            pair.reverse()
        found: dict[str, list[float]] = defaultdict(list)
        for name in (*pair, *rivals, *reversed(pair)):
            arm, calls = self._arms[name]
            found[name].append(arm.seconds(calls) / calls)
            self._timer.visited(name)
        return found

    def _spoilt(self, blocks: Sequence[_Block]) -> list[int]:
        """Which blocks hold a visit of the anchor far above the median of all of them."""
        median = statistics.median(itertools.chain.from_iterable(block[self._anchor] for block in blocks))
        limit = (1.0 + self._plan.guard) * median
        return [index for index, block in enumerate(blocks) if max(block[self._anchor]) > limit]


# -- the CPU ------------------------------------------------------------------------------------------------------

# Cores' worth of other processes' work beyond which a measurement is disturbed.  A product that is divided among its
# threads once and for all waits for the slowest of them, and one that shares its core with so much takes a tenth
# longer: what spoils a block.  docs/timing.md shows what more of it does.
LOAD_OF_OTHERS: Final = 0.10


class _CpuArm:
    """Calls on the CPU, one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.turn = len(calls)
        self._calls = calls

    def seconds(self, calls: int) -> float:
        turns = itertools.repeat(self._calls, calls // self.turn)
        collects = gc.isenabled()
        gc.disable()
        try:
            self._calls[-1]()
            # The loop itself costs some 30 ns a call, in both arms alike.
            started = time.perf_counter_ns()
            for turn in turns:
                for call in turn:
                    call()
            return (time.perf_counter_ns() - started) * 1e-9
        finally:
            if collects:
                gc.enable()


@dataclasses.dataclass(frozen=True)
class _CpuState:
    """Clocks and counters of a moment: seconds of CPU time since some origin, of all processes and of this one.

    ``waited`` is what this process's threads have waited for a core, ``None`` where the system does not tell.
    """

    wall: float
    busy: float | None
    stolen: float
    own: float
    waited: float | None
    preempted: int
    mhz: tuple[float, ...]


class CpuTimer:
    """Times calls by the wall clock, with Python's garbage collector off in the arms.

    Telemetry: ``waited_cores``, for how many cores' worth of time this process's threads were ready to run and did not,
    because others ran there; ``others_cores``, how many cores' worth of work somebody else did on the cores that the
    main thread may run on (of which ``stolen_cores`` by the hypervisor for other machines), ``own_cores``,
    ``preemptions`` (involuntary context switches) and ``cpu_mhz_min``, ``cpu_mhz_max`` over these cores at both ends.
    What the system does not tell is left out.

    Args:
        proc: where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: _CpuState | None = None

    def arms(self, works: Mapping[str, Sequence[Call]]) -> Mapping[str, Arm]:
        """Nothing has to be made ready."""
        return {name: _CpuArm(calls) for name, calls in works.items()}

    def clock(self) -> float:
        """``time.perf_counter``."""
        return time.perf_counter()

    def steady(self) -> bool:
        """Nobody can tell: a virtual machine's clock is not the host's."""
        return True

    def begin(self) -> None:
        """Read the counters."""
        self._before = self._state()

    def visited(self, name: str) -> None:
        """Reading counters here would disturb the next arm."""

    def end(self) -> Conditions:
        """Read the counters again."""
        before, after = self._before, self._state()
        assert before is not None
        wall = after.wall - before.wall
        telemetry = {"preemptions": float(after.preempted - before.preempted)}
        clocks = before.mhz + after.mhz
        if clocks:
            telemetry |= {"cpu_mhz_min": min(clocks), "cpu_mhz_max": max(clocks)}
        if wall <= 0.0:
            return Conditions(telemetry)
        own, why = (after.own - before.own) / wall, []
        if before.waited is not None and after.waited is not None:
            lost = max(0.0, after.waited - before.waited) / wall
            # More own threads than cores wait for each other, which is nobody else's doing.
            lost -= min(lost, max(0.0, own + lost - cores(self._proc)))
            telemetry["waited_cores"] = lost
            if lost > LOAD_OF_OTHERS:
                why.append(f"its threads waited for {lost:.2f} cores that others kept busy")
        if before.busy is not None and after.busy is not None:
            stolen = (after.stolen - before.stolen) / wall
            others = max(0.0, (after.busy - before.busy) / wall - own)
            telemetry |= {"own_cores": own, "others_cores": others, "stolen_cores": stolen}
            # The kernel counts in ticks: a tick at either end may belong to the time before or after.
            if others - 2.0 / _TICKS / wall > LOAD_OF_OTHERS:
                why.append(f"others kept {others:.2f} cores busy meanwhile")
        return Conditions(telemetry, "; ".join(why))

    def _state(self) -> _CpuState:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        busy, stolen = self._busy()
        return _CpuState(
            wall=time.perf_counter(),
            busy=busy,
            stolen=stolen,
            own=usage.ru_utime + usage.ru_stime,
            waited=waited(self._proc),
            preempted=usage.ru_nivcsw,
            mhz=processor.cpu_mhz(),
        )

    def _busy(self) -> tuple[float | None, float]:
        try:
            text = (self._proc / "stat").read_text(encoding="utf-8")
        except OSError:
            return None, 0.0
        return _busy_seconds(text, os.sched_getaffinity(0))


def cores(proc: Path = Path("/proc")) -> int:
    """How many cores the threads of this process together may run on; OpenMP binds each of its own to one."""
    found = set(os.sched_getaffinity(0))
    for path in proc.glob("self/task/*"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
            found |= os.sched_getaffinity(int(path.name))
    return len(found)


def waited(proc: Path = Path("/proc")) -> float | None:
    """Seconds that all threads of this process were ready to run and did not, since they began.

    The kernel counts it in nanoseconds, not in ticks, and core by core.

    Args:
        proc: where procfs is mounted.

    Returns:
        ``None`` where nothing is counted.
    """
    found = []
    for path in proc.glob("self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            found.append(int(path.read_text(encoding="utf-8").split()[1]))
    return sum(found) * 1e-9 if any(found) else None


_TICKS: Final = os.sysconf("SC_CLK_TCK")


def _busy_seconds(text: str, cores: set[int]) -> tuple[float | None, float]:
    """CPU seconds since the start of the system that ``cores`` were not idle, and those of them that were stolen.

    Args:
        text: of ``/proc/stat``; see proc(5) for its columns.
        cores: by number.

    Returns:
        ``(None, 0.0)`` where nothing is counted, as in some sandboxes.
    """
    busy = stolen = 0
    for line in text.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(field) for field in fields]
            # user nice system (idle iowait) irq softirq steal; guest time is counted under user.
            busy += sum(ticks[:3]) + sum(ticks[5:8])
            stolen += sum(ticks[7:8])
    return (busy / _TICKS, stolen / _TICKS) if busy else (None, 0.0)


# -- CUDA ---------------------------------------------------------------------------------------------------------


class CudaRuntime:
    """The few things that the timer asks of CUDA, through torch; the current device and stream."""

    def warm(self, calls: Sequence[Call]) -> None:
        """Run everything twice on another stream: capture must not meet a first call, which allocates and compiles."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in (*calls, *calls):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def capture(self, calls: Sequence[Call]) -> Any:
        """A CUDA graph of the calls in turn.

        Raises:
            RuntimeError: when one of them does what must not be captured, for instance waits for the device.
        """
        import torch

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Capture happens on a stream of its own; what other threads of the process do must not spoil it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
        graph.instantiate()
        return graph

    def nodes(self, graph: Any) -> int | None:
        """How many kernels, copies and fills a graph holds; ``None`` where the driver cannot be asked."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        count = ctypes.c_size_t()
        code = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
        return int(count.value) if code == 0 else None

    def replay(self, graph: Any) -> None:
        """Launch a graph."""
        graph.replay()

    def elapsed(self, lead: Call, work: Call) -> float:
        """Seconds on the device from the end of ``lead`` to the end of ``work``.

        ``lead`` keeps the device busy while ``work`` is being launched, so that the launch is not in the figure.
        """
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        lead()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def recover(self) -> None:
        """Wait for the device after a capture that failed."""
        import torch

        torch.cuda.synchronize()


class _CudaArm:
    """Calls on the device: a graph of them, or where the timer gave graphs up, launches from Python."""

    def __init__(self, name: str, calls: Sequence[Call], timer: CudaTimer) -> None:
        self.turn = len(calls)
        self._name = name
        self._calls = calls
        self._timer = timer
        self._graph: Any = None
        self._length = 0

    def nodes(self) -> int | None:
        """Nodes of one turn, each call captured alone; ``None`` where they cannot be counted.

        Raises:
            TimingError: for a call that launches nothing.
            RuntimeError: for one that cannot be captured.
        """
        runtime, total = self._timer.runtime, 0
        for index, call in enumerate(self._calls):
            count = runtime.nodes(runtime.capture([call]))
            if count is None:
                return None
            if count == 0:
                raise TimingError(f"call {index} of the {self._name} launches nothing on the device")
            total += count
        return total

    def seconds(self, calls: int) -> float:
        """See :class:`Arm`; the calls that do not count are as many again, or one turn without a graph."""
        runtime = self._timer.runtime
        if self._timer.graphs and calls != self._length:
            self._capture(calls)
        if self._timer.graphs:
            return runtime.elapsed(self._replay, self._replay)

        def launch(count: int) -> None:
            for call in itertools.islice(itertools.cycle(self._calls), count):
                call()

        return runtime.elapsed(lambda: launch(self.turn), lambda: launch(calls))

    def _replay(self) -> None:
        self._timer.runtime.replay(self._graph)

    def _capture(self, calls: int) -> None:
        """Capture the calls, and see that all of them are in the graph."""
        runtime = self._timer.runtime
        try:
            self._graph = None  # its memory is needed
            self._graph = runtime.capture(list(itertools.islice(itertools.cycle(self._calls), calls)))
        except RuntimeError:
            self._timer.give_up_graphs()
            return
        self._length = calls
        expected, found = self._timer.expected_nodes.get(self._name), runtime.nodes(self._graph)
        if expected is not None and found is not None and found < expected * (calls // self.turn):
            raise TimingError(
                f"the graph of {calls} calls of the {self._name} has {found} nodes, not {expected * calls // self.turn}"
            )


@dataclasses.dataclass(frozen=True)
class GpuState:
    """What a GPU said of itself; ``None`` for what it did not.

    Attributes:
        sm_mhz, memory_mhz: clocks.
        watts: power that it draws.
        celsius: its temperature.
        reasons: bits that say why the clock is what it is, see :data:`_REASONS`.
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    reasons: int = 0


class Probe(Protocol):
    """Reads the state of a GPU.

    Attributes:
        quick: whether it takes less than a millisecond, so that it can be asked after every visit.
    """

    quick: bool

    def read(self) -> GpuState | None:
        """The state now; ``None`` when it cannot be read."""
        ...


# Bits of nvmlClocksEventReasons (nvml.h) in words.  An idle GPU and clocks that somebody set are no event.
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
_SETTLED_SECONDS: Final = 0.15


class CudaTimer:
    """Times calls by events on the device, each arm a CUDA graph.

    One launch of a graph replaces the launches of its calls, so that a small kernel is timed and not Python.  Every
    call is captured alone as well: one that launches nothing, or that is missing in the arm's graph, is an error.  When
    one of a case's calls cannot be captured, all of the case are launched from Python between the events.

    Telemetry: ``graph`` (1 or 0), ``sm_mhz_min``, ``sm_mhz_max``, ``memory_mhz_min``, ``watts_max``, ``celsius_max``,
    and for each reason that held the clock the share of readings that gave it (``sw_power_cap_share``).

    Args:
        runtime: CUDA.
        probe: of the GPU's state; ``None`` for NVML, or nvidia-smi where the module ``pynvml`` is not installed.
    """

    def __init__(self, runtime: CudaRuntime | None = None, probe: Probe | None = None) -> None:
        self.runtime = runtime or CudaRuntime()
        self.graphs = True
        self.expected_nodes: dict[str, int | None] = {}
        self._probe = probe
        self._states: list[tuple[str, GpuState]] = []
        self._clocks: list[tuple[float, float]] = []

    def arms(self, works: Mapping[str, Sequence[Call]]) -> Mapping[str, Arm]:
        """Warm everything up, and capture every call once."""
        self.graphs = True
        self._clocks.clear()
        arms = {name: _CudaArm(name, calls, self) for name, calls in works.items()}
        for calls in works.values():
            self.runtime.warm(calls)
        try:
            self.expected_nodes = {name: arm.nodes() for name, arm in arms.items()}
        except TimingError:
            raise
        except RuntimeError:
            self.give_up_graphs()
        return arms

    def give_up_graphs(self) -> None:
        """Launch from Python from now on: both arms, or the one with a graph would look faster than it is."""
        self.graphs = False
        self.expected_nodes = {}
        self.runtime.recover()

    def clock(self) -> float:
        """``time.perf_counter``; every visit ends with a wait for the device."""
        return time.perf_counter()

    def steady(self) -> bool:
        """Whether the SM clock has kept within 2% for as long as it takes the power limit to act.

        A GPU that is given a full load begins at its highest clock, and comes down when it has drawn too much for a
        while: from 1980 to 1500 MHz within 0.3 s on an H200.
        """
        if self._probe is None:
            self._probe = _probe()
        if not self._probe.quick:
            return True
        state, now = self._probe.read(), self.clock()
        if state is None or state.sm_mhz is None:
            return True
        self._clocks.append((now, state.sm_mhz))
        recent = [mhz for when, mhz in self._clocks if when >= now - _SETTLED_SECONDS]
        return now - self._clocks[0][0] >= _SETTLED_SECONDS and max(recent) <= (1.0 + _CLOCKS_DIFFER) * min(recent)

    def begin(self) -> None:
        """Read the state of the GPU."""
        if self._probe is None:
            self._probe = _probe()
        self._states.clear()
        self._read("")

    def visited(self, name: str) -> None:
        """Read the state again if that is quick: the clock is still what it was in the visit."""
        if self._probe is not None and self._probe.quick:
            self._read(name)

    def end(self) -> Conditions:
        """Read the state once more, and sum up."""
        self._read("")
        # The reading before the first visit speaks of the warm-up as well; none is of an idle device.
        return _gpu_conditions(self._states, graphs=self.graphs)

    def _read(self, name: str) -> None:
        state = self._probe.read() if self._probe is not None else None
        if state is not None:
            self._states.append((name, state))


def _gpu_conditions(states: Sequence[tuple[str, GpuState]], *, graphs: bool) -> Conditions:
    """Sum up readings of the GPU, each with the name of the arm that it came after."""
    telemetry = {"graph": float(graphs)}

    def known(field: str, name: str | None = None) -> list[float]:
        found = [getattr(state, field) for arm, state in states if name is None or arm == name]
        return [value for value in found if value is not None]

    for field, ends in (("sm_mhz", "min max"), ("memory_mhz", "min"), ("watts", "max"), ("celsius", "max")):
        values = known(field)
        for end in ends.split() if values else ():
            telemetry[f"{field}_{end}"] = min(values) if end == "min" else max(values)
    shares = {bit: sum(bool(s.reasons & bit) for _, s in states) / len(states) for bit in _REASONS} if states else {}
    telemetry |= {f"{_REASONS[bit]}_share": share for bit, share in shares.items() if share}
    why = [
        f"throttled: {_REASONS[bit].replace('_', ' ')} in {shares[bit]:.0%} of {len(states)} readings"
        for bit in _THROTTLES
        if shares.get(bit)
    ]
    mine, other = known("sm_mhz", _SUBJECT), known("sm_mhz", _COMPARATOR)
    if shares.get(_SW_POWER_CAP) and mine and other:
        a, b = statistics.median(mine), statistics.median(other)
        if abs(a - b) > _CLOCKS_DIFFER * min(a, b):
            why.append(f"power-capped, at {a:.0f} MHz under the subject and {b:.0f} MHz under the comparator")
    return Conditions(telemetry, "; ".join(why))


class _Nvml:
    """NVML through the module ``pynvml`` (distribution nvidia-ml-py): microseconds a reading."""

    quick = True

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        # The function's name before and after driver 535.
        self._reasons = getattr(
            nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
        )

    def read(self) -> GpuState | None:
        nvml, gpu = self._nvml, self._gpu

        def ask(question: Callable[..., Any] | None, *arguments: Any) -> Any:
            if question is None:
                return None
            try:
                return question(gpu, *arguments)
            except nvml.NVMLError:  # this GPU does not tell: a MIG instance has no clock of its own
                return None

        milliwatts = ask(nvml.nvmlDeviceGetPowerUsage)
        return GpuState(
            sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            watts=None if milliwatts is None else milliwatts / 1e3,
            celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            reasons=ask(self._reasons) or 0,
        )


class _Smi:
    """nvidia-smi: tens of milliseconds a reading, so only before and after."""

    quick = False
    _NUMBERS: Final = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    # The field's name since driver 535, and before.
    _REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def read(self) -> GpuState | None:
        for reasons in self._REASONS:
            rows = gpus.query_gpus((*self._NUMBERS, reasons), select=self._uuid)
            if rows:
                sm, memory, watts, celsius = (_number(rows[0][field]) for field in self._NUMBERS)
                bits = rows[0][reasons]
                return GpuState(sm, memory, watts, celsius, int(bits, 16) if bits.startswith("0x") else 0)
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Blind:
    """Nothing can be read of the GPU."""

    quick = False

    def read(self) -> GpuState | None:
        return None


def _probe() -> Probe:
    """The best way to read the GPU that CUDA calls device 0."""
    gpu = gpus.visible_gpu()
    if gpu is None:
        return _Blind()
    with (
        contextlib.suppress(Exception),
        warnings.catch_warnings(),
    ):  # of a module that is missing, old, or finds no NVML
        warnings.simplefilter("ignore")
        return _Nvml(importlib.import_module("pynvml"), gpu.uuid)
    return _Smi(gpu.uuid)


# Sets of operands beyond which making them costs more than a cold cache is worth.
_MOST_SETS: Final = 64


def rotation(bytes_of_operands: int, device: str) -> int:
    """How many sets of operands to call in turn, so that none is found in the cache.

    On CUDA they hold twice the L2 cache together: what a call reads was thrown out since it was last read.  At most 64,
    which leaves out products of less than about 2 MB on a GPU with 50 MB of L2.  On the CPU one: its kernels are timed
    on what their last call left in the caches, in both arms alike.

    Args:
        bytes_of_operands: of one set, its result included.
        device: ``cpu`` or ``cuda``.
    """
    if device != "cuda":
        return 1
    import torch

    cache = int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return min(_MOST_SETS, max(1, math.ceil(2 * cache / max(1, bytes_of_operands))))


# Trials of a call from Python, an odd number.
_LATENCIES: Final = 21


def latency(calls: Calls) -> float:
    """Seconds from a call in Python until the device has finished it, the median of some: what a user waits for.

    It holds what a graph leaves out: PyTorch's guards, the launches, the wait.  An advisory figure, taken unpaired.
    """
    import torch

    found = []
    for call in itertools.islice(itertools.cycle(_sequence(calls)), _LATENCIES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def cross_check(calls: Calls, seconds: float) -> float | None:
    """The timer against a second instrument: ``seconds`` a call over the device time that the profiler sees.

    About 1: between the nodes of a graph the device pauses for about a microsecond, which the profiler does not count.
    Far below 1 the timer missed work; far above it timed something else than kernels.

    Args:
        calls: what was timed.
        seconds: a call, as timed.

    Returns:
        ``None`` where no profiler sees a device.
    """
    from pytest_gemm.api import device_kernels

    if not device_kernels.works():
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    sequence = _sequence(calls)
    turns = math.ceil(10 / len(sequence))
    for call in sequence:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for call in sequence * turns:
            call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA"]
    microseconds = float(sum(e.time_range.elapsed_us() for e in events))
    return seconds / (microseconds * 1e-6 / (turns * len(sequence))) if microseconds else None
