"""Numbers with their units, and ratios with their intervals."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from scipy import special

from pytest_gemm.problem.problem import Problem

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
# Matrix rates are quoted in TFLOP/s however high they are.
_RATES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def three(value: float) -> str:
    """A positive number with three significant digits and no exponent: 1.23, 12.3, 123, 1230."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> tuple[str, str]:
    # 0.9995: what would be rounded to 1000 of a unit is shown as 1.00 of the next.
    unit, name = next(((u, n) for u, n in units if value >= 0.9995 * u), units[-1])
    return three(value / unit), name


def seconds_text(seconds: float | None) -> str:
    """A time with three digits and its unit: ``12.3 us``; ``-`` for none."""
    return "-" if seconds is None else " ".join(_scaled(seconds, _TIMES))


def rate_text(rate: float, unit: str) -> str:
    """A rate with three digits, prefix and unit: ``612 TFLOP/s``."""
    number, prefix = _scaled(rate, _RATES)
    return f"{number} {prefix}{unit}"


def operations(problem: Problem) -> str:
    """The unit of the problem's rate: ``FLOP/s``, or ``OP/s`` for integers."""
    return "FLOP/s" if problem.input_dtype.is_float else "OP/s"


def signed(fraction: float) -> str:
    """A signed fraction in percent, without the sign of the unit: ``+5.1``."""
    text = f"{100 * fraction:+.1f}"
    return "+0.0" if text == "-0.0" else text


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction in percent: ``5.1%``."""
    return f"{100 * fraction:.{digits}f}%"


def plural(count: int, word: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio of times with its 95% interval over sessions.

    Attributes:
        middle: geometric mean over the sessions.
        low, high: ends of the interval, ``None`` with fewer than two sessions.
    """

    middle: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """``1.23x ±1.2%``; the half width is relative, and absent with a single session."""
        text = f"{three(self.middle)}x"
        if self.high is None:
            return text
        half = self.high / self.middle - 1
        if half >= 10:  # two sessions that disagree: t of one degree of freedom is 12.7
            return f"{text} ±>999%"
        return f"{text} ±{percent(half, 1 if 100 * half < 99.95 else 0)}"


def interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of one ratio a session, with Student's 95% interval on the logarithms.

    Args:
        ratios: positive, one for each session; at least one.
    """
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    middle = statistics.fmean(logs)
    if n < 2:
        return Interval(math.exp(middle))
    half = float(special.stdtrit(n - 1, 0.975)) * statistics.stdev(logs) / math.sqrt(n)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))
