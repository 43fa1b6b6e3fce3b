"""How long the timing of a device takes, and how far it is: by what sessions took on this machine, or by the first one.

Confirming sessions are planned when a case seems slower; until then they are no part of the estimate.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from pytest_gemm.run import durations, progress
from pytest_gemm.run.progress import Display, Pace
from pytest_gemm.speed.data import Sample
from pytest_gemm.speed.report import units

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.speed.runner import Timed

COMPILE: Final = "compile"
SESSION: Final = "session"


def _names(kind: str, cases: Iterable[Timed]) -> tuple[str, ...]:
    """What a step costs by itself, and for each case."""
    return (kind, *(f"{kind} {backend} {problem}" for backend, problem in cases))


class Outlook:
    """The estimate of one device.

    Args:
        config: of the run.
        device: where the cases compute.
        cases: those of the run.
        groups: how many environments are timed.
    """

    def __init__(self, config: GemmConfig, device: str, cases: Sequence[Timed], groups: int) -> None:
        speed = config.speed
        kind = ("speed", device, groups, speed.windows, speed.threads, speed.comparator, speed.regret)
        self._path = durations.path_of(config, *kind)
        self._took: defaultdict[str, list[float]] = defaultdict(list)
        self._cases = cases
        self._said = False
        self._planned = 0
        self._pace = Pace([], {})
        self._what, self._hedge = "", ""

    def plan(self, sessions: int, *, unit: str, compiles: bool, open_end: bool, display: Display) -> None:
        """Begin with the compile, where it is a step of its own, and so many sessions.

        Args:
            sessions: how many sessions, or pairs, are sure.
            unit: ``session`` or ``pair``.
            compiles: several processes compile and judge before.
            open_end: a case that seems slower gets more of them.
            display: where the estimate is shown as soon as there is one.
        """
        known = durations.read(self._path)
        first = [_names(COMPILE, self._cases)] if compiles else []
        steps = [*first, *[_names(SESSION, self._cases)] * sessions]
        self._pace = Pace(steps, {name: taken.seconds for name, taken in known.items()})
        self._hedge = durations.hedge(known[name] for step in steps for name in step if name in known)
        more = "; a case that seems slower takes more" if open_end else ""
        self._what = f"{units.plural(sessions, unit)} of {units.plural(len(self._cases), 'case')}{{}}{more}"
        self._planned = sessions
        self._say(self._pace.left(), "by earlier runs on this machine", display)

    def more(self, sessions: int, cases: Sequence[Timed]) -> None:
        """So many further sessions, where they were not planned."""
        self._pace.add([_names(SESSION, cases)] * max(sessions - self._planned, 0))
        self._planned = max(sessions, self._planned)

    def left(self, kind: str, live: float | None, display: Display) -> str:
        """The end of a line of progress; "" where it is unknown.

        Args:
            kind: of the step at hand.
            live: what the processes at work say of their own rest, in seconds.
            display: where the estimate is shown, where it was not known before.
        """
        if kind != self._pace.kind:  # what is not planned: candidates are selected again
            return ""
        seconds = self._pace.left(live)
        self._say(seconds, "by its first samples", display)
        return progress.left(seconds)

    def compiled(self, seconds: float, samples: Iterable[Sample]) -> None:
        """The cases have been compiled and judged."""
        self._end(COMPILE, seconds, samples, seconds)

    def session(self, seconds: float, samples: Collection[Sample]) -> None:
        """A session, or a pair of them, has ended."""
        self._planned = max(self._planned - 1, 0)
        inside = sum(sum(sample.phases.values()) for sample in samples)
        self._end(SESSION, seconds, samples, min(inside, seconds))

    def _end(self, kind: str, seconds: float, samples: Iterable[Sample], shared: float) -> None:
        """Share the seconds of a step out among its cases, by what each took; the rest is what any step costs."""
        took: dict[str, float] = {}
        for sample in samples:
            name = f"{kind} {sample.case.backend} {sample.case.problem}"
            took[name] = took.get(name, 0.0) + sum(sample.phases.values())
        whole = sum(took.values()) or 1.0
        took = {kind: seconds - shared, **{name: shared * one / whole for name, one in took.items()}}
        for name, one in took.items():
            self._took[name].append(one)
        self._pace.end(took)

    def record(self) -> None:
        """Keep what the steps took, for the next run."""
        if self._took:
            durations.record(self._path, {name: statistics.fmean(took) for name, took in self._took.items()})

    def _say(self, seconds: float | None, source: str, display: Display) -> None:
        if self._said or seconds is None or not self._planned:
            return
        self._said = True
        if seconds >= durations.WORTH_A_LINE:
            text = self._what.format(f" take {self._hedge} {durations.words(seconds)}, {source}")
            display.line(f"speed: {text}")
