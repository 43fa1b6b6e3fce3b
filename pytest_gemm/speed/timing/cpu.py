"""The timer of CPU calls."""

from __future__ import annotations

import gc
import itertools
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from pytest_gemm.machine import processor
from pytest_gemm.speed.timing import clock
from pytest_gemm.speed.timing.paired import SUBJECT, Call, Calls, Conditions, Target, Timer

if TYPE_CHECKING:  # it imports torch
    from pytest_gemm.speed.timing.changing import Changing

_Kind = TypeVar("_Kind")

# -- the CPU ------------------------------------------------------------------------------------------------------

# Cores' worth of other processes' work beyond which a measurement is disturbed.  A product that is divided among its
# threads once and for all waits for the slowest of them, and one that shares its core with so much takes a tenth
# longer, which makes a block an outlier.  docs/explanation/timing.md shows what more of it does.
LOAD_OF_OTHERS: Final = 0.10


class _CpuTarget(Target):
    """Calls on the CPU, one after the other, each with the operands of another set, and these with another content."""

    cycle = 1

    def __init__(self, calls: Calls, changing: Changing, *, is_seen: bool) -> None:
        self._calls = calls
        self._changing = changing
        self._is_seen = is_seen
        self._memories, self._contents = changing.memory()
        self._turn = 0

    def _steps(self) -> Iterator[tuple[memoryview, bytes, Call]]:
        """What is written where before which call; without the content of the operands as they are given."""

        def from_here(some: Sequence[_Kind]) -> Iterator[_Kind]:
            return itertools.islice(itertools.cycle(some), self._turn % len(some), None)

        order = from_here(self._memories), from_here(self._contents[1:]), from_here(self._calls)
        return zip(*order, strict=False)

    def repeat(self, calls: int) -> int:
        for call in itertools.islice(itertools.cycle(self._calls), calls):
            call()
        return calls

    def seconds(self, calls: int) -> float:
        content = self._changing.next_content()
        steps = self._steps()
        self._turn += calls + 1
        collects = gc.isenabled()
        gc.disable()
        try:
            memory, bits, call = next(steps)
            memory[:] = bits
            call()
            # The loop itself costs some 200 ns a call, for subject and comparator alike.
            started = clock.now_ns()
            for memory, bits, call in itertools.islice(steps, calls - 1):
                memory[:] = bits
                call()
            memory, _, call = next(steps)
            memory[:] = self._contents[content]
            made = call()
            ended = clock.now_ns()
        finally:
            if collects:
                gc.enable()
        if self._is_seen:
            self._changing.see(made, content)
        return (ended - started) * 1e-9


class CpuTimer(Timer):
    """Times calls by the wall clock, with Python's garbage collector off.

    Whether the clock is steady is unknown: that of a virtual machine is not the host's.

    Telemetry: ``waited_cores``, for how many cores' worth of time this process's threads were ready to run and did not,
    because others ran there; ``others_cores``, how many cores' worth of work somebody else did on the cores that the
    main thread may run on (of which ``stolen_cores`` by the hypervisor for other machines).  What the system does not
    tell is left out.

    Attributes:
        changing: the operands of the calls, and what becomes of their results.
    """

    changing: Changing

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    varies = True

    def targets(self, works: Mapping[str, Calls]) -> Mapping[str, Target]:
        """Nothing has to be made ready."""
        self.changing.move()
        found = {name: _CpuTarget(calls, self.changing, is_seen=name == SUBJECT) for name, calls in works.items()}
        self.subject = found[SUBJECT]
        return found

    def begin(self) -> None:
        """Read the counters."""
        self._before = self._counters()

    def end(self) -> Conditions:
        """Read the counters again."""
        after = self._counters()
        spent = {name: after[name] - then for name, then in self._before.items() if name in after}
        telemetry, disturbed, wall = {}, [], spent["wall"]
        if wall <= 0.0:
            return Conditions({})
        own = spent["own"] / wall
        if "waited" in spent:
            lost = max(0.0, spent["waited"]) / wall
            # More own threads than cores wait for each other, which no other process causes.
            lost -= min(lost, max(0.0, own + lost - len(processor.cores())))
            telemetry["waited_cores"] = lost
            if lost > LOAD_OF_OTHERS:
                disturbed.append(f"others used {lost:.2f} cores that it waited for")
        if "busy" in spent:
            others = max(0.0, spent["busy"] / wall - own)
            telemetry |= {"others_cores": others, "stolen_cores": spent["stolen"] / wall}
            # The kernel counts in ticks: a tick at either end may belong to the time before or after.
            if others - 2.0 / processor.TICKS / wall > LOAD_OF_OTHERS:
                disturbed.append(f"others used {others:.2f} of its cores")
        return Conditions(telemetry, "; ".join(disturbed))

    def _counters(self) -> dict[str, float]:
        """Seconds since some origin: by the clock, and of CPU time; what the system does not count is left out."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found = processor.busy_seconds(os.sched_getaffinity(0))
        if (lost := processor.waited()) is not None:
            found["waited"] = lost
        own = usage.ru_utime + usage.ru_stime
        return found | {"wall": clock.now(), "own": own}
