"""Models of a store: how a result is rounded to the precision of its type."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable


def rounded(x: float, p: int, mode: str) -> float:
    """``x`` to p significand bits; RNE, RNA (ties away), RZ, RU or RD.  No ends of a range."""
    quantum = 2.0 ** (math.frexp(x)[1] - p)
    scaled = x / quantum
    whole = math.trunc(scaled)
    rest = abs(scaled - whole)
    away = {
        "RNE": rest > 0.5 or (rest == 0.5 and whole % 2 == 1),
        "RNA": rest >= 0.5,
        "RZ": False,
        "RU": rest > 0 and x > 0,
        "RD": rest > 0 and x < 0,
    }[mode]
    return (whole + (math.copysign(1, x) if away else 0)) * quantum


def same(x: float, y: float) -> bool:
    """Whether two numbers are equal."""
    return x == y


def stores(p: int) -> dict[str, Callable[[float], float]]:
    """How a sum may come to a result of p bits."""
    found: dict[str, Callable[[float], float]] = {
        mode: functools.partial(rounded, p=p, mode=mode) for mode in ("RNE", "RZ", "RNA", "RU", "RD")
    }
    for name, bits in (("f16", 11), ("bf16", 8)):
        if bits != p:
            found[f"via {name}"] = lambda x, bits=bits: rounded(  # type: ignore[misc]  # the default binds the loop
                rounded(x, bits, "RNE"), p, "RNE"
            )
    return found
