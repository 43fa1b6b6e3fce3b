"""How long and how often a call is timed, and what was read."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Reason, Status
from pytest_gemm.speed.data import Sample

Call = Callable[[], object]
# One call, or several with operands of their own that are called in turn.
Calls = Call | Sequence[Call]

# Raise this number with every change of this module that changes a figure.
_VERSION: Final = 1


class TimingError(RuntimeError):
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
        guard: a block is spoilt when its comparator took this much longer than the median, as a fraction.
        retakes: how many spoilt blocks may be measured again.
        seed: of the order of readings.

    Raises:
        ValueError: for a field that is out of range, by name.
    """

    blocks: int = 15
    reading_seconds: float = 1e-3
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
        for name in ("reading_seconds", "max_seconds", "guard"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value}; give a positive number")

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
    """What was measured; the fields are those of ``speed.Sample``.

    Attributes:
        subject: seconds a call, one for each reading in order of time.
        comparator: the same, as long; empty without one.
        candidates: the same of other candidates, half as long: one reading in each block.
        windows: how many of the subject's readings each window holds, for readings that were merged.
        calls: of the subject in one reading.
        retaken: blocks that were thrown away and measured again.
        disturbed: why the figures are not to be trusted, as a sentence; "" when they are.
        telemetry: by name with the unit in it.
    """

    subject: tuple[float, ...]
    comparator: tuple[float, ...] = ()
    candidates: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    windows: tuple[int, ...] = ()
    calls: int = 0
    retaken: int = 0
    disturbed: str = ""
    telemetry: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def sample(
        self,
        case: CaseId,
        device: str,
        status: Status,
        *,
        reason: Reason | None = None,
        comparator_name: str = "",
        selected: Sequence[str] = (),
        kernels: Sequence[str] = (),
        phases: Mapping[str, float] | None = None,
        distribution: str = "",
    ) -> Sample:
        """These readings with what else a ``speed.Sample`` says of a case."""
        return Sample(
            case=case,
            device=device,
            status=status,
            reason=reason,
            comparator_name=comparator_name,
            selected=tuple(selected),
            kernels=tuple(kernels),
            phases=phases or {},
            distribution=distribution,
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
        candidates={name: joined(lambda one, name=name: one.candidates[name]) for name in good[0].candidates},  # type: ignore[misc]  # mypy does not see the default
        windows=tuple(len(one.subject) for one in good),
        calls=good[0].calls,
        retaken=sum(one.retaken for one in windows),
        telemetry={
            **{name: max(one.telemetry.get(name, -math.inf) for one in good) for name in dict.fromkeys(names)},
            "windows_left_out": float(len(windows) - len(good)),
        },
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
    """A clock with whatever belongs to it.  One case after the other: ``targets``, ``begin``, readings, ``end``."""

    def targets(self, works: Mapping[str, Sequence[Call]]) -> Mapping[str, Target]:
        """Make everything of a case ready to be timed, under the same names."""
        ...

    def clock(self) -> float:
        """Seconds of the wall clock, from any origin."""
        ...

    def steady(self) -> bool:
        """Whether the clock of what computes has settled, as far as can be told."""
        ...

    def begin(self) -> None:
        """From here on the readings count."""
        ...

    def taken(self, name: str) -> None:
        """A reading has just been taken."""
        ...

    def end(self) -> Conditions:
        """No more readings count; called after :meth:`begin` whatever happens."""
        ...
