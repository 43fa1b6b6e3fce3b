"""What a mixture of experts takes beside tokens and first weights: the second weights, and where each token goes."""

from __future__ import annotations

import math

import numpy as np

from pytest_gemm.operands.magnitudes import Headroom
from pytest_gemm.operands.random_streams import Array, Lines, all_lines, drawn_shape
from pytest_gemm.problem.dtypes import DTYPES, DType


def drawn(headroom: Headroom) -> dict[str, tuple[Array | Lines, DType]]:
    """The values and the dtype of ``down``, ``ids`` and ``weights``, see :class:`Operands`.

    The second weights are uniform in every distribution, as no sum of gated values is exact, and of a size that leaves
    the magnitude of these.
    """
    shape = headroom.problem.shape
    whole = (shape.batch or 0, shape.k, shape.n // 2)
    lines = headroom.draw("down").uniform(drawn_shape(whole), wide=False)
    down = all_lines(lines * np.float32(2.0 ** -round(math.log2(whole[2]) / 2)), whole)
    ids = _chosen(headroom)
    weights = np.float32(1.125) + headroom.draw("weights").uniform(ids.shape, wide=False)
    weights /= weights.sum(axis=1, keepdims=True)
    return {
        "down": (down, headroom.problem.dtypes.b),
        "ids": (ids.astype(np.int32), DTYPES["i32"]),
        "weights": (weights, DTYPES["f32"]),
    }


def _chosen(headroom: Headroom) -> Array:
    """The experts of each token, (T, k), at random and in no order; where there are few tokens, some have none.

    With ``routing.crowded`` one of the experts is among those of each.
    """
    problem, stream = headroom.problem, headroom.draw("ids")
    experts, choices = problem.shape.batch or 0, np.arange(problem.choices)
    rank = stream.words((problem.shape.m, experts), 32)
    if problem.has("routing.crowded"):
        rank[:, stream.below(experts)] = 0
    first = rank.argsort(axis=1, kind="stable")[:, : problem.choices]
    tokens = np.arange(problem.shape.m)[:, None]
    found: Array = first[tokens, (tokens + choices) % problem.choices]  # a crowded one is not always the first
    return found
