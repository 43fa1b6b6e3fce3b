"""A kernel that has passed and is being timed: what its process measures of it, and what the judge makes of that."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pytest_gemm.core.outcome import Activity, Misconduct, Phase, Reason
from pytest_gemm.core.units import seconds_text
from pytest_gemm.machine import processor
from pytest_gemm.speed.timing import clock, paired

if TYPE_CHECKING:
    import torch

    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.operands.tensors import Operands
    from pytest_gemm.worker.inline import Inline
    from pytest_gemm.worker.messages import Ran
    from pytest_gemm.worker.process import Process

# Seconds of calls that are timed from outside, how often again where the clocks differ, and how much less than that
# the kernel's own clock may have seen: a question and its answer take a millisecond.
_STRETCH: Final = 0.02
_AGAIN: Final = 5
_AGREES: Final = 0.7
BRIEF: Final = paired.Plan(blocks=1, reading_seconds=2.5e-4, warm_seconds=0.0, retakes=0, guard=10.0, seed=1)
"""How a comparator is timed in its own process."""
# How much longer or shorter it may take beside a kernel.
_MOVED: Final = 1.5


@dataclasses.dataclass(frozen=True)
class Kept:
    """A kernel that is being timed.

    Attributes:
        case: as it was judged, with its one candidate.
        worker: the kernel's process, with :data:`bench.CALLS`.
        number: by which the worker knows it.
        first: the run that was judged.
    """

    case: Case
    worker: Process | Inline
    number: int
    first: Ran

    def keep(self, comparator: int, given: Operands) -> None:
        """Have the worker keep it with copies of its operands, beside a comparator (its number; 0: none)."""
        self.worker.call(type(None), "keep", self.number, comparator, self.case.backend.name, given=given)

    def window(self, plan: paired.Plan, *, is_looked_at: bool) -> paired.Readings:
        """Time it for a while.

        Args:
            plan: how.
            is_looked_at: its calls are timed from this process as well, and its threads are counted.

        Raises:
            Misconduct: where its own clock saw much less than this process', or something works between the calls, and
                for what it does to a clock or a cache.
        """
        with self.worker.watch(Activity(self.case.id(), Phase.TIME)):
            readings = self._window(plan, stays=is_looked_at)
            if not is_looked_at:
                return readings
            outside = self._outside(readings)
            threads, others = self.worker.call(tuple[float, str], "working", self.number)
            # What shares the machine may have come between: a window and a stretch that follow at once see the same.
            short, again = dataclasses.replace(plan, blocks=1, warm_seconds=0.0), [readings]
            while not others and statistics.median(again[-1].subject) < _AGREES * outside:
                if len(again) > _AGAIN:
                    least = seconds_text(statistics.median(again[-1].subject))
                    text = f"a call took {least} by the clock of the kernel's process"
                    text += f", and {seconds_text(outside)} by that of the judge's"
                    raise Misconduct("clock-disagrees", text, "leave the clocks alone, and compute in every call")
                again.append(self._window(short, stays=True))
                outside = self._outside(again[-1])
        disturbed = f"{others}, not of this case, worked all the time" if others else readings.disturbed
        telemetry = {**readings.telemetry, "threads": threads}
        return dataclasses.replace(readings, telemetry=telemetry, disturbed=disturbed)

    def _window(self, plan: paired.Plan, *, stays: bool) -> paired.Readings:
        return self.worker.call(paired.Readings, "window", self.number, plan, stays)

    def _outside(self, readings: paired.Readings) -> float:
        """Seconds of a call by this process' clock, right after a window."""
        pid, calls = self.worker.pid, max(readings.calls, math.ceil(_STRETCH / statistics.median(readings.subject)))
        started, before = clock.now(), processor.ran(pid)
        calls = self.worker.call(int, "stretch", self.number, calls)
        took = clock.now() - started
        if self.case.device == "cpu":  # what its busiest thread waited while others ran is no time of its calls
            ran = max((spent - before.get(task, spent) for task, spent in processor.ran(pid).items()), default=0)
            took = min(took, ran * 1e-9 or took)
        return took / calls

    def wrong(self, judge: Judge, distribution: str) -> Reason | None:
        """What is wrong with a timed result: with the last one, or one that is not as its operands let expect.

        Args:
            judge: of the case.
            distribution: of the operands that it was kept with.
        """
        from pytest_gemm.speed.timing import changing

        case = dataclasses.replace(self.case, distributions=(distribution,))

        def judged(results: tuple[torch.Tensor, ...], change: Callable[[Operands], object]) -> str | None:
            return judge.of_changed(case, dataclasses.replace(self.first, results=results, now=None), change)

        try:
            last = self.worker.results("last", self.number)
            if not _same(self.first.results, last) and (wrong := judged(last, lambda _: None)) is not None:
                return _when_timed(wrong)
            doubt = self.worker.call(changing.Doubt | None, "doubt", self.number)  # type: ignore[arg-type]  # a union
            if doubt is None:
                return None
            changed = functools.partial(changing.change, doubt=doubt)
            wrong = judged(self.worker.results("doubted", self.number), changed)
        except Misconduct as error:
            return error.reason
        if wrong is None:
            return None
        if doubt.is_kept:
            text = "A had changed before a timed call, and an earlier result came back"
            return Reason("replayed", f"{text}: {wrong}", "compute in every call, from what the operands hold then")
        return _when_timed(wrong)

    def drop(self) -> None:
        """Have the worker free it."""
        self.worker.call(type(None), "drop", self.number)


def beside(readings: paired.Readings, own: tuple[float, float], least: float) -> paired.Readings:
    """A window of a kernel, disturbed where its comparator took another time than in a process that no kernel reaches.

    Args:
        readings: of the window.
        own: seconds of a call of the comparator in its own process, before the window and behind it.
        least: of all such times of the session; the others may have met a load.
    """
    took = statistics.median(readings.comparator)
    if least / _MOVED <= took <= max(own) * _MOVED:
        return readings
    text = f"the comparator took {seconds_text(took)} beside it, and {seconds_text(min(own))} in a process of its own"
    return dataclasses.replace(readings, disturbed="; ".join(filter(None, (readings.disturbed, text))))


def _when_timed(why: str) -> Reason:
    return Reason("timed-wrong", f"right when it was judged, and wrong in a timed call: {why}")


def _same(first: tuple[torch.Tensor, ...], last: tuple[torch.Tensor, ...]) -> bool:
    """Whether the last results are the same as the first, bit for bit."""
    from pytest_gemm.judging.results import differing

    alike = [(x.shape, x.dtype) for x in last] == [(x.shape, x.dtype) for x in first]
    return alike and not any(map(differing, last, first))
