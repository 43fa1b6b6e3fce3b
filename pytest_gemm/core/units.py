"""Numbers with their units, and counts with their nouns."""

from __future__ import annotations

from collections.abc import Sequence

_THOUSANDTHS = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
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
    return _small(seconds, "s")


def joules_text(joules: float | None) -> str:
    """An energy with three digits and its unit: ``31.0 mJ``; ``-`` for none."""
    return _small(joules, "J")


def _small(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    number, prefix = _scaled(value, _THOUSANDTHS)
    return f"{number} {prefix}{unit}"


def rate_text(rate: float, unit: str) -> str:
    """A rate with three digits, prefix and unit: ``612 TFLOP/s``."""
    number, prefix = _scaled(rate, _RATES)
    return f"{number} {prefix}{unit}"


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
