"""Values of what is added to a product: bias and residuals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from pytest_gemm.operands.integers import magnitudes
from pytest_gemm.operands.magnitudes import Drawn, Headroom, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream, drawn_shape
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.steps import Step, StepKind


def _addend_exponent(level: float, quantum: float, dtype: DType) -> int:
    """Exponent of an addend's unit so that its 6 bits reach half of ``level`` and stay on the grid.

    Half, so that no column of a result is all negative and silenced by a relu.
    """
    e = round(math.log2(level / 128)) if level > 0 else 0
    if quantum:
        e = max(e, round(math.log2(quantum)))
    return max(e, 0) if not dtype.is_float else e


def _random(headroom: Headroom, stream: Stream, shape: tuple[int, ...], level: float) -> Array:
    """Values of full significands, of about ``level``."""
    return scaled_lines(stream.binade(shape, headroom.wide), round(math.log2(level / 2 or 1.0)))


def bias_of(headroom: Headroom, drawn: Drawn, special: bool) -> Array | None:
    """The bias.  Exact: an arithmetic progression modulo a prime, so that every shift of it shows."""
    problem = headroom.problem
    shape = problem.bias_shape
    if shape is None:
        return None
    if special and problem.op.addend and problem.beta == 0.0:
        return np.full(shape, math.nan, dtype=np.float32)  # beta = 0 must not read it
    beta = abs(problem.beta) or 1.0
    # A bias without M rows belongs to the constants: one for every M.
    stream = headroom.draw("bias-m" if problem.step("bias") in (Step("bias", "m1"), Step("bias", "mn")) else "bias")
    # One element for the whole result (N = 1) must not turn all of it negative in front of a relu.
    positive = drawn.positive or math.prod(shape) == 1
    if not drawn.quantum:
        values = _random(headroom, stream, shape, drawn.level / max(beta, 1.0))
        return np.abs(values) if positive else values
    unit = _addend_exponent(drawn.level / max(beta, 1.0), drawn.quantum, problem.value_dtype)
    lowest = round(math.log2(drawn.quantum))
    if beta < 1.0:
        unit = max(unit, lowest + math.ceil(-math.log2(beta)))
    spare = drawn.spare * drawn.quantum / beta
    if headroom.target:
        # The grid of a short sum is coarse: fewer different values rather than a saturated activation.
        spare = min(spare, max(2.0 * drawn.level / beta, 3.0 * drawn.quantum))
    half = 1 if positive else 2
    while unit > lowest and 127 // half * 2.0**unit > spare:
        unit -= 1
    prime = next((p for p in (127, 61, 31, 13, 7) if p // half * 2.0**unit <= spare), 3)
    # A stride of a third to a half of the period: neighbours are far apart and differ in sign.
    start, stride = stream.below(prime), prime // 3 + stream.below(prime // 6 + 1)
    index = np.arange(math.prod(shape), dtype=np.int64)
    progression = (start + index * stride) % prime - (0 if positive else prime // 2)
    return scaled_lines(progression.astype(headroom.real).reshape(shape), unit)


# Rows of a table in which a residual is looked up: few enough that most are met several times, and no power of two.
TABLE_ROWS: Final = 11


def residuals_of(headroom: Headroom, drawn: Drawn) -> Iterator[tuple[Array, DType]]:
    """A residual for each binary step, or lines of a large one, with its dtype: that of the value it meets.

    In the product's places: of the result's shape, (N,) or (M, 1); of one that is looked up the table.
    """
    problem = headroom.problem
    rows, columns = problem.result_shape[-2:]
    shapes = {"": drawn_shape(problem.result_shape), "n": (columns,), "m1": (rows, 1), "at": (TABLE_ROWS, columns)}
    level, quantum, count = drawn.level, drawn.quantum, 0
    for step, dtype in zip(problem.passes, problem.value_dtypes, strict=False):
        if step.name == "scale":
            level, quantum = level * abs(step.numbers[0]), quantum * abs(step.numbers[0])
        elif step.spec.unit_range:
            level, quantum = 1.0, 0.0
        elif step.name == "gated":
            level, quantum = level**2 / 2.0, 0.0
        elif step.name == "clamp":
            level = min(level, max(map(abs, step.numbers)) or 1.0)
        if step.kind is not StepKind.BINARY:
            continue
        stream, shape, count = headroom.draw(f"r{count}"), shapes[step.extent], count + 1
        own = problem.residual_dtype(step, dtype)
        if own != dtype and not own.is_float:
            yield stream.look_up(shape, _codes(step, own, level, headroom, drawn.positive)), own
            continue
        exact = drawn.quantum > 0 or not dtype.is_float
        if step.name in {"add", "sub", "sum"}:
            if exact:
                unit = _addend_exponent(level, quantum, own)
                most = min(63, max(3, int(2.0 * level * 2.0**-unit))) if headroom.target else 63
                values = scaled_lines(magnitudes(stream, own, 0, most, headroom.real)(shape), unit)
            else:
                values = _random(headroom, stream, shape, level)
        elif exact:
            small = [1, 2, 3] if step.name == "mul" else [1, 2, 4, 0.5] if dtype.is_float else [1, 2, 4]
            values = stream.look_up(shape, np.array(small + [-x for x in small], dtype=headroom.real))
        else:
            values = _random(headroom, stream, shape, 4.0)  # [1, 2): no division by nearly zero
        yield np.abs(values) if drawn.positive else values, own


def _codes(step: Step, dtype: DType, level: float, headroom: Headroom, positive: bool) -> Array:
    """Codes of 8 bits around a step's zero point that stand for values of up to twice ``level``."""
    scale, zero = step.numbers
    most = min(127, max(3, round(2.0 * level / scale)))
    low, high = (0, 255) if dtype.name == "u8" else (-128, 127)
    first = max(low, int(zero) - (0 if positive else most))
    return np.arange(first, min(high, int(zero) + most) + 1, dtype=headroom.real)
