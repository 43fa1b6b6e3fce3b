"""A clock that plays recorded time, so that pytest-benchmark shows what was measured in other processes."""

from __future__ import annotations

from collections.abc import Sequence


class Replay:
    """Time that passes by readings: :meth:`clock` is a benchmark's timer and :meth:`step` its target."""

    def __init__(self) -> None:
        self._now = 0.0
        self._readings: list[float] = []

    def load(self, readings: Sequence[float]) -> None:
        """What the next steps take, in seconds."""
        self._readings = list(readings)

    def clock(self) -> float:
        """Seconds since nothing in particular."""
        return self._now

    def step(self) -> None:
        """Let the time of one reading pass."""
        if self._readings:
            self._now += self._readings.pop(0)
