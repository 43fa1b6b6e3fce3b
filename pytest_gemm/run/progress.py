"""How far a long wait is, and how long it still takes: precompiling, timing, fuzzing, fingerprints, the doctor.

What steps took in earlier runs is in :mod:`pytest_gemm.run.durations`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_gemm.run import durations, github

INTERVAL: Final = 30.0
"""Seconds between two lines of progress where the output is no terminal."""
# Between two changes of the line on a terminal.
_REWRITTEN: Final = 0.5


class Display:
    """Progress of a long wait: one line that is written over on a terminal, a line now and then elsewhere.

    Args:
        reporter: pytest's terminal reporter, ``None`` for silence.
        quiet: show no progress, only the lines that stay.
        since: the first line of progress comes so many seconds after this moment, by ``time.monotonic()``, where the
            output is no terminal; ``None``: it comes at once.
    """

    def __init__(self, reporter: Any, *, quiet: bool = False, since: float | None = None) -> None:
        self._reporter = reporter
        self._quiet = quiet or reporter is None
        self._next = since + INTERVAL if since is not None and not self._quiet and not reporter.isatty else 0.0
        self._open = False

    @classmethod
    def of(cls, config: Any) -> Display:
        """That of a run of pytest, without progress where ``-q`` is given."""
        return cls(config.pluginmanager.get_plugin("terminalreporter"), quiet=config.get_verbosity() < 0)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._reporter is not None:
            self.clear()
            self._reporter.ensure_newline()
            for line in github.quoted([text], "auto") if "##[" in text else [text]:  # a command in the middle of a line
                self._reporter.write_line(line)

    def clear(self) -> None:
        """Take away the line that is written over."""
        if self._open:
            self._reporter.rewrite("", erase=True)
            self._open = False

    def progress(self, text: str) -> None:
        """How far it is; not every call is shown."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        self._open = self._reporter.isatty
        self._next = now + (_REWRITTEN if self._open else INTERVAL)
        if self._open:
            self._reporter.rewrite(text, erase=True)
        else:
            self.line(text)


class Pace:
    """How long the rest of some steps takes, one after the other.

    A step has names, each of which costs seconds of its own: ``session`` what every session costs, ``session aten
    mm:...`` what the case costs in it.  A name that is not known costs the mean of the known ones with its first word,
    where half of a step is known, or the step has no other name.

    Args:
        steps: the names of each step.
        known: seconds by name.
        clock: seconds, never going back.
    """

    def __init__(
        self, steps: Iterable[Sequence[str]], known: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps = [tuple(step) for step in steps]
        self._known = dict(known)
        self._clock = clock
        self._since = clock()

    @property
    def kind(self) -> str:
        """The first name of the step at hand; "" behind the last."""
        return self._steps[0][0] if self._steps else ""

    def add(self, steps: Iterable[Sequence[str]]) -> None:
        """Further steps, behind all others."""
        self._steps += map(tuple, steps)

    def end(self, took: Mapping[str, float]) -> None:
        """The first step has ended; ``took`` is what each of its names cost."""
        self._known |= took
        self._steps = self._steps[1:]
        self._since = self._clock()

    def left(self, live: float | None = None) -> float | None:
        """Seconds that the rest takes; ``None`` where that is unknown.

        Args:
            live: what the step at hand says of its own rest.
        """
        if not self._steps:
            return 0.0
        first, *others = self._steps
        elapsed = self._clock() - self._since
        expected = self._expected(first)
        whole = expected if live is None else elapsed + live
        if whole is None:
            return None
        costs = [whole if step == first and live is not None else self._expected(step) for step in others]
        return max(whole - elapsed, 0.0) + sum(costs) if None not in costs else None  # type: ignore[arg-type]  # see it

    def _expected(self, step: Sequence[str]) -> float | None:
        """Seconds of a step; ``None`` where too little is known."""
        costs = [self._known.get(name, self._usual(name)) for name in step]
        known = sum(name in self._known for name in step)
        if None in costs or (len(step) > 1 and known * 2 < len(step)):
            return None
        return sum(costs)  # type: ignore[arg-type]  # see above

    def _usual(self, name: str) -> float | None:
        """The mean of those with its first word that cost something; ``None`` where none is known."""
        kind = f"{name.partition(' ')[0]} "
        found = [seconds for known, seconds in self._known.items() if seconds and known.startswith(kind)]
        return statistics.fmean(found) if found else None


def left(seconds: float | None) -> str:
    """``; about 3 min left``, at the end of a line of progress; "" where it is unknown."""
    return "" if seconds is None else f"; about {durations.words(seconds)} left"
