"""Numbers with their units."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.report.rows import Interval

# -- numbers as text -----------------------------------------------------------------------------------------

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
    if seconds is None:
        return "-"
    return " ".join(_scaled(seconds, _TIMES))


def rate_text(rate: float, unit: str) -> str:
    """A rate with three digits, prefix and unit: ``612 TFLOP/s``."""
    number, prefix = _scaled(rate, _RATES)
    return f"{number} {prefix}{unit}"


def operations(problem: Problem) -> str:
    """The unit of the problem's rate: ``FLOP/s``, or ``OP/s`` for integers."""
    return "FLOP/s" if problem.input_dtype.is_float else "OP/s"


def _signed(fraction: float) -> str:
    text = f"{100 * fraction:+.1f}"
    return "+0.0" if text == "-0.0" else text


def percent_text(fraction: float) -> str:
    """A signed fraction in percent."""
    return f"{_signed(fraction)}%"


def change_text(judgement: Judgement) -> str:
    """The change with its interval: ``+5.1% [+3.2, +7.0]``; ``-`` where nothing was compared."""
    if judgement.change is None:
        return "-"
    text = percent_text(judgement.change)
    if judgement.low is not None and judgement.high is not None:
        text += f" [{_signed(judgement.low)}, {_signed(judgement.high)}]"
    return text


def ratio_text(ratio: Interval | None) -> str:
    """A ratio with its interval: ``1.23x ±1.2%``; the half width is relative, and absent with a single session."""
    if ratio is None:
        return "-"
    text = f"{three(ratio.middle)}x"
    if ratio.high is None:
        return text
    return f"{text} ±{_three_percent(ratio.high / ratio.middle - 1)}"


def _three_percent(fraction: float) -> str:
    percent = 100 * fraction
    if percent >= 1000:  # two sessions that disagree: t of one degree of freedom is 12.7
        return ">999%"
    return f"{percent:.1f}%" if percent < 99.95 else f"{percent:.0f}%"
