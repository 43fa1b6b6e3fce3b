"""The timer of CPU calls."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import time
from collections.abc import Mapping
from typing import Final

import psutil

from pytest_gemm.machine import processor
from pytest_gemm.speed.timing.paired import Calls, Conditions, Target, Timer

# -- the CPU ------------------------------------------------------------------------------------------------------

# Cores' worth of other processes' work beyond which a measurement is disturbed.  A product that is divided among its
# threads once and for all waits for the slowest of them, and one that shares its core with so much takes a tenth
# longer, which makes a block an outlier.  docs/explanation/timing.md shows what more of it does.
LOAD_OF_OTHERS: Final = 0.10


class _CpuTarget(Target):
    """Calls on the CPU, one after the other."""

    def __init__(self, calls: Calls) -> None:
        self.cycle = len(calls)
        self._calls = calls

    def seconds(self, calls: int) -> float:
        rounds = itertools.repeat(self._calls, calls // self.cycle)
        collects = gc.isenabled()
        gc.disable()
        try:
            self._calls[-1]()
            # The loop itself costs some 30 ns a call, for subject and comparator alike.
            started = time.perf_counter_ns()
            for calls_of_round in rounds:
                for call in calls_of_round:
                    call()
            return (time.perf_counter_ns() - started) * 1e-9
        finally:
            if collects:
                gc.enable()


class CpuTimer(Timer):
    """Times calls by the wall clock, with Python's garbage collector off.

    Whether the clock is steady is unknown: that of a virtual machine is not the host's.

    Telemetry: ``waited_cores``, for how many cores' worth of time this process's threads were ready to run and did not,
    because others ran there; ``others_cores``, how many cores' worth of work somebody else did on the cores that the
    main thread may run on (of which ``stolen_cores`` by the hypervisor for other machines).  What the system does not
    tell is left out.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def targets(self, works: Mapping[str, Calls]) -> Mapping[str, Target]:
        """Nothing has to be made ready."""
        return {name: _CpuTarget(calls) for name, calls in works.items()}

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
            lost -= min(lost, max(0.0, own + lost - cores()))
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
        return found | {"wall": time.perf_counter(), "own": own}


def cores() -> int:
    """How many cores the threads of this process together may run on; OpenMP binds each of its own to one."""
    found = set(os.sched_getaffinity(0))
    for thread in psutil.Process().threads():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= os.sched_getaffinity(thread.id)
    return len(found)
