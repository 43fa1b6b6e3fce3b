"""The paired timer: how long a call takes, beside another one that is timed milliseconds away.

A *block* times the subject and its comparator in the order ABBA or BAAB, drawn at random: an interleaved A/B.  What
drifts slowly (the clock, the temperature, a neighbour) meets both alike and cancels in their ratio.  One *reading* is
an unmeasured call, then enough calls to fill a millisecond.  docs/timing.md has the details.

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

from pytest_gemm.speed.timing.plan import Call, Calls, Plan, Readings, Target, Timer, TimingError

# A median of fewer blocks says nothing of their spread.
_LEAST_BLOCKS: Final = 5

# In units of the least warm-up.
_LONGEST_WARM: Final = 10

# More calls than this in a reading mean that no time passes.
_MOST_CALLS: Final = 1_000_000


# -- blocks -------------------------------------------------------------------------------------------------------

SUBJECT: Final = "subject"
COMPARATOR: Final = "comparator"
_CANDIDATE: Final = "candidate "

# The readings of a block by name, seconds a call in order of time.
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
        comparator: what is timed beside it; ``None`` for nothing: a block is two readings of the subject then.
        candidates: further candidates by name, timed once in the middle of each block.
        timer: for where the calls compute.
        plan: ``None`` for the defaults.
        calls: how many calls fill a reading, by name.  What it lacks is measured and entered, so that a case that is
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
    targets = timer.targets({name: block_sequence(calls) for name, calls in works.items()})
    started = timer.clock()
    for target in targets.values():
        target.seconds(target.cycle)
    calls = {} if calls is None else calls
    for name, target in targets.items():
        if name not in calls:
            calls[name] = _calibrated(name, target, plan)
    # As full as the readings, so that the clock under them has settled.
    while (spent := timer.clock() - started) < plan.warm_seconds or (
        spent < _LONGEST_WARM * plan.warm_seconds and not timer.steady()
    ):
        for name, target in targets.items():
            target.seconds(calls[name])
    taking = _Blocks({name: (target, calls[name]) for name, target in targets.items()}, timer, plan)
    timer.begin()
    try:
        blocks, retaken, spoilt = taking.take(started)
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
        candidates={name.removeprefix(_CANDIDATE): of(name) for name in targets if name.startswith(_CANDIDATE)},
        calls=taking.calls(SUBJECT),
        retaken=retaken,
        disturbed="; ".join(why),
        telemetry={
            **conditions.telemetry,
            "blocks": float(len(blocks)),
            "blocks_spoilt": float(spoilt),
            **({"comparator_calls": float(taking.calls(COMPARATOR))} if comparator is not None else {}),
        },
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


class _Blocks:
    """Takes the blocks of a case.

    Args:
        targets: what is timed, with the calls of a reading.
        timer: whose clock limits the time.
        plan: of the case.
    """

    def __init__(self, targets: Mapping[str, tuple[Target, int]], timer: Timer, plan: Plan) -> None:
        self._targets = targets
        self._timer = timer
        self._plan = plan
        self._random = random.Random(plan.seed)
        # What tells a disturbed block from a good one; the subject only where nothing else is there.
        self._anchor = COMPARATOR if COMPARATOR in targets else SUBJECT

    def calls(self, name: str) -> int:
        """Calls in one reading."""
        return self._targets[name][1]

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
        candidates = [name for name in self._targets if name.startswith(_CANDIDATE)]
        self._random.shuffle(candidates)
        pair = [name for name in (SUBJECT, COMPARATOR) if name in self._targets]
        if self._random.random() < 0.5:
            pair.reverse()
        found: dict[str, list[float]] = defaultdict(list)
        for name in (*pair, *candidates, *reversed(pair)):
            target, calls = self._targets[name]
            found[name].append(target.seconds(calls) / calls)
            self._timer.taken(name)
        return found

    def _spoilt(self, blocks: Sequence[_Block]) -> list[int]:
        """Which blocks hold a reading of the anchor far above the median of all of them."""
        median = statistics.median(itertools.chain.from_iterable(block[self._anchor] for block in blocks))
        limit = (1.0 + self._plan.guard) * median
        return [index for index, block in enumerate(blocks) if max(block[self._anchor]) > limit]
