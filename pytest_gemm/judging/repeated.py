"""A wrong result computed again: whether it is the same, and whether it is when fresh memory holds something else."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Final

import torch

from pytest_gemm.judging.recompute import Cause
from pytest_gemm.judging.sampled import ResultVerdict
from pytest_gemm.judging.verdict import Mismatch

RACE: Final = Cause(
    "race or leftover state",
    "calls with the same operands gave different values: a race, random numbers, or what a call leaves behind",
)
UNWRITTEN: Final = Cause(
    "unwritten memory", "the values change with what fresh memory holds: some of it is used that nothing has written"
)
NAMES: Final = frozenset({RACE.name, UNWRITTEN.name})
"""Of causes that only several calls show."""

# What unwritten memory may look like; any other cause recomputes the bad elements.
_VAGUE: Final = frozenset({"", "never computed", "one value", "constant factor", "overflow", "misplaced elements"})
# Causes that say themselves why two calls differ.
_LEFT: Final = frozenset({"stale data", "added to an earlier result"})
# Bytes that fresh memory is filled with: 0.01, 785 and 8e37 in f32 and bf16, 1.1, 4.3 and NaN in f16.  Not in turn, as
# a kernel may be wrong in every other call, or in every third one.
_FILLS: Final = (0x3C, 0x44, 0x7E, 0x7E, 0x44, 0x3C, 0x44)


def described(result: torch.Tensor, judged: ResultVerdict, call: Callable[[int], torch.Tensor | None]) -> Mismatch:
    """What is wrong with a result, with the cause that more calls with the same operands prove.

    Args:
        result: a wrong one.
        judged: the verdict on it.
        call: makes the call again, with fresh memory filled with a byte or, for 0, as it was; ``None`` if it fails.
    """
    wrong = judged.comparison.mismatch
    assert wrong is not None
    interval = judged.interval
    width = interval.hi - interval.lo if result.shape == interval.lo.shape else torch.tensor(2 * wrong.bound)
    if not judged.comparison.is_comparable:
        return wrong
    # Of NaN and infinity, which have no width, a kernel that loses them leaves sums like the others.
    finite = width[width.isfinite()]
    width = width.nan_to_num(float(finite.max()) if finite.numel() else 0.0, posinf=math.inf)
    is_steady = all(_alike(result, call(0), width) for _ in range(2))
    if is_steady and wrong.cause and wrong.name not in _VAGUE | _LEFT:
        return wrong
    runs = [(fill, call(fill)) for fill in _FILLS]
    if any(made is None for _, made in runs):
        return wrong
    alike: dict[bool, bool] = {True: True, False: True}  # of the same fill, and of others
    for (one, x), (other, y) in itertools.combinations(runs, 2):
        alike[one == other] &= _alike(x, y, width)
    is_unwritten = alike[True] and not alike[False]
    if not is_unwritten and (wrong.name in _LEFT or (is_steady and all(alike.values()))):
        return wrong
    cause = UNWRITTEN if is_unwritten else RACE
    return dataclasses.replace(wrong, name=cause.name, cause=cause.text)


def _alike(x: torch.Tensor | None, y: torch.Tensor | None, width: torch.Tensor) -> bool:
    """Whether two results are no further apart than right ones may be, or one of the calls failed."""
    if x is None or y is None:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    x, y = (one.detach().cpu().to(torch.float64) for one in (x, y))
    return bool(((x == y) | (x.isnan() & y.isnan()) | ((x - y).abs() <= width)).all())
