"""The paired timer: how long a call takes, beside another one that is timed milliseconds away.

A *block* visits the subject and its comparator in the order ABBA or BAAB, drawn at random.  Whatever drifts slowly (the
clock, the temperature, a neighbour) meets both alike and cancels in their ratio.  One visit is an *arm*: an unmeasured
call, then enough calls to fill a millisecond.  docs/timing.md tells the whole of it.

:func:`measure` knows no clock of its own: a :class:`Timer` has it, for the CPU (:class:`CpuTimer`), for CUDA
(:class:`CudaTimer`), or for a test.  torch is imported by what needs a device, and only then.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_gemm.speed.timing.plan import Arm, Call, Calls, Plan, Readings, Timer, TimingError

# A median of fewer blocks says nothing of their spread.
_LEAST_BLOCKS: Final = 5

# In units of the least warm-up.
_LONGEST_WARM: Final = 10

# More calls than this in an arm mean that no time passes.
_MOST_CALLS: Final = 1_000_000


# -- blocks -------------------------------------------------------------------------------------------------------

SUBJECT: Final = "subject"
COMPARATOR: Final = "comparator"
_CANDIDATE: Final = "candidate "

# The visits of a block by name, seconds a call in order of time.
_Block = Mapping[str, Sequence[float]]


def block_sequence(calls: Calls) -> tuple[Call, ...]:
    """One call or several as a tuple."""
    return (calls,) if callable(calls) else tuple(calls)


def measure(
    subject: Calls,
    comparator: Calls | None,
    candidates: Mapping[str, Calls] | None = None,
    *,
    timer: Timer,
    plan: Plan | None = None,
    calls: dict[str, int] | None = None,
) -> Readings:
    """Time a call beside another one.

    Args:
        subject: what is timed; several calls for several sets of operands, used in turn.
        comparator: what is timed beside it; ``None`` for nothing: a block is two visits of the subject then.
        candidates: further candidates by name, visited once in the middle of each block.
        timer: for where the calls compute.
        plan: ``None`` for the defaults.
        calls: how many calls fill a visit, by name.  What it lacks is measured and entered, so that a case that is
            timed in several windows is calibrated in the first one.

    Returns:
        The readings of all blocks that were not retaken.

    Raises:
        TimingError: when a call takes no time, or launches nothing on the device.
    """
    plan = plan or Plan()
    works = {SUBJECT: subject}
    if comparator is not None:
        works[COMPARATOR] = comparator
    works |= {_CANDIDATE + name: calls for name, calls in (candidates or {}).items()}
    arms = timer.arms({name: block_sequence(calls) for name, calls in works.items()})
    started = timer.clock()
    for arm in arms.values():
        arm.seconds(arm.turn)
    calls = {} if calls is None else calls
    for name, arm in arms.items():
        if name not in calls:
            calls[name] = _calibrated(name, arm, plan)
    # As full as the visits, so that the clock under them has settled.
    while (spent := timer.clock() - started) < plan.warm_seconds or (
        spent < _LONGEST_WARM * plan.warm_seconds and not timer.steady()
    ):
        for name, arm in arms.items():
            arm.seconds(calls[name])
    visits = _Visits({name: (arm, calls[name]) for name, arm in arms.items()}, timer, plan)
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
        subject=of(SUBJECT),
        comparator=of(COMPARATOR),
        candidates={name.removeprefix(_CANDIDATE): of(name) for name in arms if name.startswith(_CANDIDATE)},
        calls=visits.calls(SUBJECT),
        retaken=retaken,
        disturbed="; ".join(why),
        telemetry={
            **conditions.telemetry,
            "blocks": float(len(blocks)),
            "blocks_spoilt": float(spoilt),
            **({"comparator_calls": float(visits.calls(COMPARATOR))} if comparator is not None else {}),
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
        self._anchor = COMPARATOR if COMPARATOR in arms else SUBJECT

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
        """One block: ABBA or BAAB, the other candidates in its middle, with as much of the block before as after."""
        candidates = [name for name in self._arms if name.startswith(_CANDIDATE)]
        self._random.shuffle(candidates)
        pair = [name for name in (SUBJECT, COMPARATOR) if name in self._arms]
        if self._random.random() < 0.5:
            pair.reverse()
        found: dict[str, list[float]] = defaultdict(list)
        for name in (*pair, *candidates, *reversed(pair)):
            arm, calls = self._arms[name]
            found[name].append(arm.seconds(calls) / calls)
            self._timer.visited(name)
        return found

    def _spoilt(self, blocks: Sequence[_Block]) -> list[int]:
        """Which blocks hold a visit of the anchor far above the median of all of them."""
        median = statistics.median(itertools.chain.from_iterable(block[self._anchor] for block in blocks))
        limit = (1.0 + self._plan.guard) * median
        return [index for index, block in enumerate(blocks) if max(block[self._anchor]) > limit]
