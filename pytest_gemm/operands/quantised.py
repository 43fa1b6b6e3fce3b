"""Quantised operands: scales of integer products, and weights in codes of 4 or 8 bits with scales and zero points."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from pytest_gemm.operands.magnitudes import Drawn, Grid, Headroom, eighths, powers_of_two, scaled_lines
from pytest_gemm.operands.random_streams import Array
from pytest_gemm.problem.ops.woq import CODES

# Distributions whose integers must come through as they are.
_NEUTRAL: Final = frozenset({"k-cover", "tile-map"})
# Distributions whose scales of groups are 1.
_UNSCALED: Final = _NEUTRAL | {"int-1"}
# Distributions whose A is what the product multiplies, so that the zero point is added to what is stored; in the others
# the stored integers take their whole range.
_BEFORE_ZERO: Final = _UNSCALED | {"one-hot"}


def quantise(headroom: Headroom, drawn: Drawn, distribution: str) -> None:
    """Put scales, zero points and codes in the place of what a distribution has drawn, where the op has any."""
    if headroom.problem.op.int8:
        _scale_int8(headroom, drawn, distribution)
        if headroom.problem.step("absmax"):  # largest magnitudes: 127 scales, which of a power of two is exact
            for name in ("scale_a", "scale_b"):
                setattr(drawn, name, np.asarray(getattr(drawn, name) * np.float32(127.0)))
    elif headroom.problem.op.coded:
        _code(headroom, drawn, distribution)
    elif headroom.b.dtype.name == "i4":
        _quantise(headroom, drawn, distribution)


def _scale_int8(headroom: Headroom, drawn: Drawn, distribution: str) -> None:
    """Scales of A and B that bring an integer product to where its steps and its result tell values apart.

    8 or 40 steps of an 8-bit result, elsewhere the middle of an activation, or 4.  Powers of two where the distribution
    is exact, full significands elsewhere.  A's zero point is added to what is stored.
    """
    problem, exact = headroom.problem, drawn.quantum > 0 and distribution not in {"rand", "rand-positive"}
    requant, static = problem.step("requant"), problem.step("static")
    assert drawn.scale_b is not None
    if headroom.zero and distribution in _BEFORE_ZERO:
        drawn.a = drawn.a + headroom.zero

    def scales(name: str, shape: tuple[int, ...]) -> Array:
        stream = headroom.draw(name)
        return powers_of_two(stream, shape) if exact else np.abs(stream.binade(shape, False))

    if problem.step("rowwise") is not None:
        rows = headroom.a.shape[:2] if problem.shape.batch is not None else headroom.a.shape[1:2]
        drawn.scale_a = scales("scale-a", (*rows, 1))
    elif static is None:
        drawn.scale_a = scales("scale-both", (1,)).reshape(())
    size = static.numbers[0] if static else 0.5
    if distribution in _NEUTRAL:
        unit = 2.0 ** -round(math.log2(size))
        if drawn.scale_a is not None:
            drawn.scale_a, unit = np.full_like(drawn.scale_a, 4.0), 0.25
        drawn.scale_b = np.full_like(drawn.scale_b, unit)
        return
    if distribution == "rand":
        drawn.quantum = drawn.spare = 0.0
    # Of small integers so few steps that many values lie half way between two.
    steps = 8.0 if distribution == "int-1" else 40.0
    target = steps * requant.numbers[0] if requant else headroom.target or 4.0
    e = round(math.log2(target / (drawn.level * size)))
    drawn.scale_b = scaled_lines(drawn.scale_b, e)
    drawn.level, drawn.quantum = drawn.level * size * 2.0**e, drawn.quantum * 2.0 ** (e + math.floor(math.log2(size)))
    if exact and drawn.scale_a is not None:
        drawn.quantum *= 0.25  # the smallest of its powers is 1/8


def _quantise(headroom: Headroom, drawn: Drawn, distribution: str) -> None:
    """Scales and zeros of the groups of a 4-bit weight, (K / group, N, 2), and codes of 0 to 15 in place of B's values.

    Exact distributions whose digits mean something keep a scale of 1.  The others have powers of two and zeros of up to
    8 scales, other ones from group to group and from column to column.
    """
    shape = (headroom.problem.terms // headroom.problem.group_size, headroom.b.shape[1])
    assert drawn.b is not None
    drawn.b = drawn.b + 8
    scales, zeros = headroom.draw("affine"), headroom.draw("affine-zero")
    if distribution in _UNSCALED:
        scale, zero = np.ones(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    elif drawn.quantum > 0:
        scale = eighths(scales, shape)
        zero = scale * zeros.look_up(shape, np.arange(-8, 9, dtype=np.float32), 8)
    else:
        scale = np.abs(scales.binade(shape, False))
        zero = scale * zeros.uniform(shape, False) * np.float32(4.0)
        zero = np.abs(zero) if drawn.positive else np.zeros_like(zero) if distribution == "specials" else zero
    if headroom.problem.op.quantises_a:
        zero = np.zeros_like(scale)
        if drawn.quantum > 0:
            _span_255(drawn)
    drawn.quantisation = np.stack([scale, zero], axis=-1)


def _code(headroom: Headroom, drawn: Drawn, distribution: str) -> None:
    """Scales of the groups of a weight, (N, groups), their zero points, and codes in place of B's values.

    Zero points differ from group to group and from column to column.  Where B's values mean something, their codes move
    with the zero point, as far as there is room; elsewhere they take their whole range whatever it is.  Of NF4 only -1,
    0 and 1 are on a grid.
    """
    problem, b = headroom.problem, drawn.b
    assert b is not None
    shape = (1 if problem.step("tensorwise") else headroom.b.shape[1], -(-problem.terms // problem.group_size))
    scales, zeros = headroom.draw("affine"), headroom.draw("affine-zero")
    (low, middle, high), is_exact = CODES[problem.dtypes.b.name], drawn.quantum > 0
    if problem.step("zeros"):
        reach, moves = 8 if is_exact or high == 15 else 64, False
        first, last = middle - reach, middle + reach - 1
        if distribution in _UNSCALED | {"specials"} or drawn.positive:
            # Of a large B some lines are drawn, and they are rotated.
            moves = b.shape[1] == shape[0] and b.size > 0
            own = (max(first, low - int(b.min())), min(last, high - int(b.max()))) if moves else (middle, middle)
            first, last = own
        drawn.zero_b = zeros.look_up(shape, np.arange(first, last + 1, dtype=np.float32), 8)
        each = drawn.zero_b.repeat(problem.group_size, 1)[:, : problem.terms] if moves else middle
        drawn.b = b + each
    elif problem.step("nf4") and distribution == "int-1":
        drawn.b = np.where(b < 0, 0, np.where(b > 0, 15, 7)).astype(b.dtype)
    else:
        drawn.b = b + middle
        if problem.step("nf4"):
            vars(drawn).update(vars(Grid()))
    if distribution in _UNSCALED:
        drawn.scale_b = np.ones(shape, dtype=np.float32)
    elif is_exact and not problem.step("nf4"):
        drawn.scale_b = eighths(scales, shape)
    else:
        unit = 8.0 if problem.step("nf4") else 1.0 if problem.dtypes.b.name == "i4" else 2.0**-7
        drawn.scale_b = np.abs(scales.binade(shape, False)) * np.float32(unit)
    if problem.a_rule and drawn.quantum > 0:
        _span_127(drawn, 32 if problem.a_rule == "q8_0" else problem.terms)


def _span_127(drawn: Drawn, size: int) -> None:
    """Integers of each block of a row of A from -127 to 127, one of which is the one or the other: in steps of 1.

    It stands at the same place of each block, so that rows that are rotated have one in each too.
    """
    unit = _wrapped(drawn, -127.0)
    rows, blocks = np.arange(drawn.a.shape[1])[:, None], np.arange(drawn.a.shape[2] // size)
    drawn.a[:, rows, blocks * size + rows % size] = np.where(rows % 2, -127.0, 127.0) * unit


def _span_255(drawn: Drawn) -> None:
    """Integers of 8 bits in each row of A, from -128 to 127: a step of 1 is what such a row is quantised by.

    The two stand at places of their own in each row.
    """
    unit = _wrapped(drawn, -128.0)
    rows, k = np.arange(drawn.a.shape[1]), drawn.a.shape[2]
    for place, end in ((0, -128.0), (k // 2, 127.0)):
        drawn.a[:, rows, (rows + place) % k] = end * unit


def _wrapped(drawn: Drawn, least: float) -> np.float32:
    """Let A's integers that leave [least, 127] come in at the other end; their unit."""
    unit = np.float32(drawn.units[0])
    drawn.a = (np.mod(drawn.a / unit - least, 128.0 - least) + least) * unit
    return unit
