"""How the rows of a grouped product are divided, and the rows that no group owns.

A row that no group owns holds NaN in A: a kernel that lets it into a result shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.ops.grouped_mm import ALIGNMENT
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

# The label of a row that no group owns, as in DeepGEMM's ``m_indices``.
_NO_GROUP: Final = -1
# With ``groups.sparse`` one group of four has rows; with ``groups.unowned`` up to an eighth of the rows has no group.
_FILLED: Final = 4
_UNOWNED: Final = 8


def divided(problem: Problem, draw: Callable[[str], Stream]) -> dict[str, Array]:
    """What tells the program which rows, columns or products belong to which group, by field of ``Operands``; int32.

    ``labels`` is the group of each row, -1 behind the last group.
    """
    found = dict[str, Array]()
    if problem.op.grouped:
        found["offs"] = _ends(problem, draw("offs"))
    if problem.has("groups.labels"):
        groups = np.arange(len(found["offs"]), dtype=np.int32)
        owned = np.repeat(groups, np.diff(found["offs"], prepend=0))
        found["labels"] = np.pad(owned, (0, problem.ends - len(owned)), constant_values=_NO_GROUP)
    if problem.has("groups.masked"):
        found["counts"] = _counts(problem, draw("counts"))
    return found


def _ends(problem: Problem, stream: Stream) -> Array:
    """Where the groups of a grouped product end: int32, the last one at the end of what is divided.

    Rows end at random, so that no tile's edge is an end; columns and products at multiples of 16 bytes, as PyTorch
    requires.  Of three groups and more one is empty, at a random place.  Flags of ``groups`` divide otherwise.
    """
    groups, unit = problem.shape.batch or 0, 1
    if problem.has("groups.aligned") or problem.micro_block:
        unit = ALIGNMENT
    elif problem.op.ragged != "m" and problem.ends % (aligned := 128 // problem.dtypes.a.bits) == 0:
        unit = aligned
    rows = problem.ends // unit
    if problem.has("groups.unowned"):
        rows -= 1 + stream.below(max(1, rows // _UNOWNED))
    # Of each routing how many groups share the most of it, and how much of it each other group has at most.
    routings = {"crowded": (1, 3), "sparse": (max(1, groups // _FILLED), 0), "single": (1, 1)}
    routing = next((given for word, given in routings.items() if problem.has(f"groups.{word}")), None)
    if routing is not None:
        bounds = [0, *itertools.accumulate(_sizes(groups, rows, *routing, stream))]
    else:
        bounds = [0, *sorted(stream.below(rows + 1) for _ in range(groups - 1)), rows]
        if groups >= 3:
            empty = stream.below(groups)
            if empty == groups - 1:
                bounds[empty] = rows
            else:
                bounds[empty + 1] = bounds[empty]
    return np.array(bounds[1 : groups + 1], dtype=np.int32) * np.int32(unit)


def _sizes(groups: int, rows: int, large: int, most: int, stream: Stream) -> list[int]:
    """Sizes of groups, in random order: ``large`` of them share what the others, each of at most ``most``, leave."""
    places = _shuffled(groups, stream)
    sizes = [0] * groups
    for place in places[large:]:
        sizes[place] = min(stream.below(most + 1), rows)
        rows -= sizes[place]
    cuts = [0, *sorted(stream.below(rows + 1) for _ in range(large - 1)), rows]
    for place, (first, last) in zip(places, itertools.pairwise(cuts), strict=False):
        sizes[place] = last - first
    return sizes


def _shuffled(groups: int, stream: Stream) -> list[int]:
    return sorted(range(groups), key=lambda _: stream.below(1 << 30))


def _counts(problem: Problem, stream: Stream) -> Array:
    """How many rows of each A count, int32, (B,): of one all, of three and more one has none."""
    groups, m = problem.shape.batch or 0, problem.shape.m
    counts = np.array([stream.below(m + 1) for _ in range(groups)], dtype=np.int32)
    first, *others = _shuffled(groups, stream)
    counts[first] = m
    if len(others) > 1:
        counts[others[0]] = 0
    return counts


def idle_rows(problem: Problem, a: Tensor, offs: Tensor | None, counts: Tensor | None) -> Tensor | None:
    """Which rows of A no group owns, bool, ([B,] M), on the CPU; ``None`` where the problem has none."""
    if counts is not None:
        return torch.arange(a.shape[-2]) >= counts.cpu()[:, None]
    if offs is not None and problem.has("groups.unowned"):
        return torch.arange(a.shape[-2]) >= offs[-1].cpu()
    return None


def spoil(a: Tensor, idle: Tensor | None) -> None:
    """Write NaN to rows of A, which lie at the end of each matrix."""
    if idle is None:
        return
    for matrix, rows in zip(a, idle, strict=True) if a.dim() == 3 else [(a, idle)]:
        matrix[int(rows.logical_not().sum()) :].fill_(math.nan)


def of_groups(given: Operands, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """A program's results with zeros in the rows of which nothing is promised: whatever lies there is right."""
    idle = given.idle
    if idle is None or not given.problem.is_partial:
        return results

    def zeroed(x: Any) -> Any:
        fits = isinstance(x, Tensor) and x.layout is torch.strided and x.dim() == 2 and len(x) == len(idle)
        return torch.where(idle.to(x.device)[:, None], 0.0, x) if fits else x

    return tuple(map(zeroed, results))
