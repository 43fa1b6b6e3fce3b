"""The reasons of the gate, which are a table, ``sentences.toml``, and the words for numbers in them."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from pytest_gemm.core.outcome import Reason
from pytest_gemm.core.units import percent
from pytest_gemm.storage.datafile import document


def words(log_change: float) -> str:
    """A difference of logarithms of times in words: ``5.0% slower``."""
    change = math.expm1(log_change)
    return f"{percent(abs(change))} {'slower' if change >= 0 else 'faster'}"


def reason(name: str, **values: object) -> Reason:
    """An entry of the table with its values."""
    entry = _table()[name]
    return Reason(entry.get("code", name), entry["text"].format_map(values), entry.get("remedy", ""))


@functools.cache
def _table() -> dict[str, Any]:
    return document(Path(__file__).with_name("sentences.toml"))
