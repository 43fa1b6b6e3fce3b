"""The sentences of a judgement on speed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gemm.speed.gate.evidence import View


# -- words -------------------------------------------------------------------------------------------------------


def percent(change: float) -> str:
    """A change in percent."""
    return f"{100 * change:.1f}%"


def words(log_change: float) -> str:
    """A difference of logarithms of times in words: ``5.0% slower``."""
    change = math.expm1(log_change)
    return f"{percent(abs(change))} {'slower' if change >= 0 else 'faster'}"


def interval(view: View) -> str:
    """An estimate with its interval."""
    low, high = view.interval()
    return f"{words(view.estimate)} [{100 * math.expm1(low):+.1f}%, {100 * math.expm1(high):+.1f}%]"


def many(count: int, unit: str) -> str:
    """A count with its unit."""
    return f"{count} {unit}" + ("" if count == 1 else "s")
