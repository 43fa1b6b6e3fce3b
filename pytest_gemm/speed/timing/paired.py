"""The paired timer: how long a call takes, beside another one that is timed milliseconds away.

A *block* times the subject and its comparator in the order ABBA or BAAB, drawn at random: an interleaved A/B.  What
drifts slowly (the clock, the temperature, a neighbour) meets both alike and cancels in their ratio.  One *reading* is
an unmeasured call, then enough calls to fill a millisecond.  docs/explanation/timing.md has the details.

:func:`measure` has no clock of its own: a :class:`Timer` has it, for the CPU (:class:`CpuTimer`), for CUDA
(:class:`CudaTimer`), or for a test.  torch is imported by what needs a device, and only then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Protocol

from pytest_gemm.speed.timing import clock

Call = Callable[[], object]
# Calls with operands of their own that are called one after the other.
Calls = Sequence[Call]

SUBJECT: Final = "subject"
COMPARATOR: Final = "comparator"

# Raise this number with every change of this module that changes an estimate.
_VERSION: Final = 2
# How much shorter or longer than the others a reading may be: which call is the last one cannot be foreseen.
_VARIES: Final = 0.1
# A median of fewer blocks does not show their spread.
_LEAST_BLOCKS: Final = 5
# In units of the least warm-up.
_LONGEST_WARM: Final = 10
# More calls than this in a reading mean that no time passes.
_MOST_CALLS: Final = 1_000_000


class TimingError(Exception):
    """A call that cannot be timed: it launches nothing, or takes no time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a case is timed.

    Attributes:
        blocks: of two readings of the subject and two of the comparator.
        reading_seconds: least time that the calls of one reading take together.
        warm_seconds: how long everything that is timed runs before anything counts, or up to ten times as long
            until the clock is steady.
        max_seconds: budget of a case.  A slow kernel gets fewer blocks, but never fewer than 5 (or than ``blocks``),
            and retaking ends at twice the budget.
        guard: a block is an outlier when its comparator took this much longer than the median, as a fraction.
        retakes: how many outliers may be measured again.
        seed: of the order of readings; with 0, that of the first session, ``Timer.warming`` is called.
    """

    blocks: int = 15
    reading_seconds: float = 1e-3
    warm_seconds: float = 0.1
    max_seconds: float = 6.0
    guard: float = 0.10
    retakes: int = 10
    seed: int = 0

    def contract(self) -> str:
        """Eight letters that change with everything about the timing that can change an estimate.

        The seed cannot.  Estimates of two contracts are not compared.
        """
        facts = {"version": _VERSION, **dataclasses.asdict(self)}
        # The name that the field had when the first baselines were recorded: their contract must not change.
        facts["arm_seconds"] = facts.pop("reading_seconds")
        del facts["seed"]
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=4).hexdigest()


@dataclasses.dataclass(frozen=True)
class Readings:
    """What was measured; the fields are those of ``speed.data.Sample``.

    Attributes:
        subject: seconds a call, one for each reading in order of time.
        comparator: the same, as long; empty without one.
        windows: how many of the subject's readings each window holds, for readings that were merged.
        calls: of the subject in one reading.
        retaken: blocks that were thrown away and measured again.
        disturbed: why the times are not to be trusted, as a sentence; "" when they are.
        telemetry: by name with the unit in it.
    """

    subject: tuple[float, ...]
    comparator: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    calls: int = 0
    retaken: int = 0
    disturbed: str = ""
    telemetry: Mapping[str, float] = dataclasses.field(default_factory=dict)


def merged(windows: Sequence[Readings]) -> Readings:
    """Readings that were taken in several windows of a session as those of one case.

    A window in which the machine was disturbed is left out; of fewer than half of them nothing is made, and the
    result has what disturbed them.
    """
    good = [one for one in windows if not one.disturbed]
    disturbed = ""
    if 2 * len(good) < len(windows):
        cause = next(one.disturbed for one in windows if one.disturbed)
        disturbed = f"{len(windows) - len(good)} of {len(windows)} windows were disturbed: {cause}"
        good = list(windows)

    names = dict.fromkeys(name for one in good for name in one.telemetry)
    telemetry = {name: max(one.telemetry.get(name, -math.inf) for one in good) for name in names}
    return Readings(
        subject=tuple(seconds for one in good for seconds in one.subject),
        comparator=tuple(seconds for one in good for seconds in one.comparator),
        windows=tuple(len(one.subject) for one in good),
        calls=good[0].calls,
        retaken=sum(one.retaken for one in windows),
        disturbed=disturbed,
        telemetry={**telemetry, "windows_left_out": float(len(windows) - len(good))},
    )


# -- what a timer is ----------------------------------------------------------------------------------------------


class Target(Protocol):
    """Something that a timer can time.

    Attributes:
        cycle: number of calls after which every set of operands was used once; calls are timed in multiples of it.
    """

    cycle: int

    def seconds(self, calls: int) -> float:
        """Seconds that ``calls`` calls took together, right after at least one that does not count."""

    def repeat(self, calls: int) -> int:
        """At least so many calls, by no clock of this process; how many it were."""


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
    """A clock with whatever belongs to it.  One case after the other: ``targets``, ``warming``, ``begin``, ``end``.

    Attributes:
        varies: readings have different numbers of calls.
        subject: the target of the case at hand that is judged.
    """

    varies: bool = False
    subject: Target

    def targets(self, works: Mapping[str, Calls]) -> Mapping[str, Target]:
        """Make everything of a case ready to be timed, under the same names."""

    def clock(self) -> float:
        """Seconds of the wall clock, from any origin."""
        return clock.now()

    def steady(self) -> bool:
        """Whether the clock of what computes has settled, as far as can be told."""
        return True

    def warming(self, _targets: Mapping[str, Target], _calls: Mapping[str, int], /) -> None:
        """The warm-up begins, with so many calls in a reading: one session measures what is no time here."""
        return

    def begin(self) -> None:
        """From here on the readings count."""

    def taken(self, _: str, /) -> None:
        """A reading of the target of this name has just been taken."""
        return

    def end(self) -> Conditions:
        """No more readings count; called after :meth:`begin` whatever happens."""


# -- blocks -------------------------------------------------------------------------------------------------------

# The readings of a block by name, seconds a call in order of time.
_Block = Mapping[str, Sequence[float]]


def measure(
    subject: Calls, comparator: Calls | None, *, timer: Timer, plan: Plan, calls: dict[str, int] | None = None
) -> Readings:
    """Time a call beside another one.

    Args:
        subject: what is timed; several calls for several sets of operands, one after the other.
        comparator: what is timed beside it; ``None`` for nothing: a block is two readings of the subject then.
        timer: for where the calls compute.
        plan: how.
        calls: how many calls fill a reading, by name.  What it lacks is measured and entered, so that a case that is
            timed in several windows is calibrated in the first one.

    Returns:
        The readings of all blocks that were not retaken.

    Raises:
        TimingError: when a call takes no time, or launches nothing on the device.
    """
    calls = {} if calls is None else calls
    works = {SUBJECT: subject} | ({} if comparator is None else {COMPARATOR: comparator})
    targets = timer.targets(works)
    started = timer.clock()
    for target in targets.values():
        target.seconds(target.cycle)
    for name, target in targets.items():
        if name not in calls:
            calls[name] = _calibrated(name, target, plan)
    if plan.seed == 0:
        timer.warming(targets, calls)
    # As full as the readings, so that the clock under them has settled.
    while (spent := timer.clock() - started) < plan.warm_seconds or (
        spent < _LONGEST_WARM * plan.warm_seconds and not timer.steady()
    ):
        for name, target in targets.items():
            target.seconds(calls[name])
    timer.begin()
    try:
        blocks, retaken = _taken(targets, calls, timer, plan, started)
    finally:
        conditions = timer.end()
    outliers = len(_outliers(blocks, plan))
    disturbed = [conditions.disturbed] if conditions.disturbed else []
    if 3 * outliers > len(blocks):
        disturbed.append(
            f"in {outliers} of {len(blocks)} blocks the {_anchor(works)} took over {plan.guard:.0%} longer than its "
            f"median, after {retaken} retaken"
        )
    found = {name: tuple(itertools.chain.from_iterable(block[name] for block in blocks)) for name in works}
    return Readings(
        subject=found[SUBJECT],
        comparator=found.get(COMPARATOR, ()),
        calls=calls[SUBJECT],
        retaken=retaken,
        disturbed="; ".join(disturbed),
        telemetry=conditions.telemetry,
    )


def _calibrated(name: str, target: Target, plan: Plan) -> int:
    """How many calls fill a reading: the least multiple of its cycle, by the fastest of some trials, plus a tenth."""
    calls, fastest = target.cycle, math.inf
    while True:
        fastest = min(fastest, target.seconds(calls) / calls)
        if fastest * calls >= plan.reading_seconds:
            return calls
        if calls >= _MOST_CALLS:
            raise TimingError(f"{calls} calls of the {name} take no more than {fastest * calls:g} s together")
        # A hundredfold at most: a first trial may have been too short for the clock.
        wanted = min(1.1 * plan.reading_seconds / fastest if fastest > 0.0 else math.inf, 100.0 * calls)
        calls = max(calls + target.cycle, math.ceil(min(wanted, _MOST_CALLS) / target.cycle) * target.cycle)


def _taken(
    targets: Mapping[str, Target], calls: Mapping[str, int], timer: Timer, plan: Plan, started: float
) -> tuple[list[_Block], int]:
    """All blocks of a case in order of time, and how many were retaken."""
    chance, first = random.Random(plan.seed), timer.clock()
    blocks: list[_Block] = []

    def block() -> _Block:
        """ABBA or BAAB."""
        pair = list(targets)
        if chance.random() < 0.5:
            pair.reverse()
        found: dict[str, list[float]] = defaultdict(list)
        for name in (*pair, *reversed(pair)):
            count = calls[name]
            if timer.varies:
                count = max(1, round(count * (1.0 + _VARIES * chance.uniform(-1.0, 1.0))))
            found[name].append(targets[name].seconds(count) / count)
            timer.taken(name)
        return found

    while len(blocks) < plan.blocks:
        expected = (timer.clock() - first) / len(blocks) if blocks else 0.0
        if len(blocks) >= _LEAST_BLOCKS and timer.clock() + expected > started + plan.max_seconds:
            break
        blocks.append(block())
    for retaken in range(plan.retakes):
        outliers = _outliers(blocks, plan)
        if not outliers or timer.clock() >= started + 2.0 * plan.max_seconds:
            return blocks, retaken
        del blocks[outliers[0]]
        blocks.append(block())
    return blocks, plan.retakes


def _anchor(some: Container[str]) -> str:
    """What tells a disturbed block from a good one; the subject only where nothing else is there."""
    return COMPARATOR if COMPARATOR in some else SUBJECT


def _outliers(blocks: Sequence[_Block], plan: Plan) -> list[int]:
    """Which blocks hold a reading of the anchor far above the median of all of them."""
    readings = [block[_anchor(block)] for block in blocks]
    limit = (1.0 + plan.guard) * statistics.median(itertools.chain.from_iterable(readings))
    return [index for index, some in enumerate(readings) if max(some) > limit]
