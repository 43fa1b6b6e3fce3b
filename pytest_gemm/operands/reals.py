"""Input distributions of real values: uniform, positive, small, large and of wide range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.operands.integers import least
from pytest_gemm.operands.magnitudes import Draw, Drawn, Headroom, narrowest, real_of, scale_pair, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.dtypes import DType

# -- random distributions ----------------------------------------------------------------------------------


def _integers(
    stream: Stream, shape: tuple[int, ...], dtype: DType, most: int, positive: bool, real: type[Any]
) -> Array:
    """Uniform integers of the full range, or of magnitude up to ``most``."""
    if dtype.name == "u8" or positive:
        return stream.look_up(shape, np.arange(0, min(most, int(dtype.max_finite)) + 1, dtype=real))
    low, high = -min(most, -least(dtype)), min(most, int(dtype.max_finite))
    return stream.look_up(shape, np.arange(low, high + 1, dtype=real))


@dataclasses.dataclass(frozen=True)
class _Side:
    """How a random distribution draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


UNIFORM: Final = _Side(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
_POSITIVE: Final = _Side(lambda s, shape, wide: np.abs(s.uniform(shape, wide)), 1 / 3, 0.5)
_BINADE: Final = _Side(lambda s, shape, wide: s.binade(shape, wide), 7 / 12)


def _random_quantised(
    headroom: Headroom,
    draw: Draw,
    side: _Side,
    lift: Callable[[DType], int] = lambda _: 0,
    scale_exponent: Callable[[float, float], int] | None = None,
) -> Drawn:
    """Random fp8 with random scales of full significands.

    Args:
        headroom: of a quantised problem.
        draw: its streams.
        side: how elements are drawn.
        lift: the power of two of an element by its dtype.
        scale_exponent: ``scale_exponent(rms, bound)`` is the exponent that the scales add to
            the product; by default the one that fits.
    """
    k, lifts = max(headroom.k, 1), lift(headroom.a) + lift(headroom.b)
    rms = 0.76**2 * max(math.sqrt(k) * side.square, k * side.mean**2) * 2.0**lifts
    bound = k * 2.0**lifts
    e = (scale_exponent or headroom.exponent)(rms, bound)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        return scaled_lines(side.draw(draw(name), shape, headroom.wide), lift(dtype))

    scale_a, scale_b = scale_pair(headroom, draw, lambda stream, shape: np.abs(stream.binade(shape, False)))
    return Drawn(
        lines("a", headroom.a_drawn, headroom.a),
        None if headroom.b_is_a else lines("b", headroom.b_drawn, headroom.b),
        rms * 2.0**e,
        scale=scaled_lines(scale_b, e // 2),
        positive=side.mean > 0,
        scale_a=scaled_lines(scale_a, e - e // 2),
    )


def random(
    headroom: Headroom, draw: Draw, side: _Side, exponents: Callable[[float, float], tuple[int, int]] | None = None
) -> Drawn:
    """Random lines; ``exponents(rms, bound)`` gives the powers of two of A and B, by default what fits."""
    if headroom.quantised:
        return _random_quantised(headroom, draw, side)
    real, k = real_of(headroom), max(headroom.k, 1)
    positive = side.mean > 0
    most = 255 if headroom.int8 else 128
    if headroom.all_integer and not headroom.int8:
        # An int32 product that is cast to a narrow float: eight standard deviations must fit.
        most = max(1, min(128, int(math.sqrt(3 * headroom.room / (8 * math.sqrt(k))) / (2 if headroom.adds else 1))))
    squares, tops, means = [], [], []
    for dtype in (headroom.a, headroom.b):
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -least(dtype)))
        squares.append(side.square if dtype.is_float else top**2 / 3)
        means.append(side.mean if dtype.is_float else top / 2 if dtype.name == "u8" or positive else 0.0)
        tops.append(top)
    factor = (0.76 if headroom.b.name == "i4" else 0.76 * 2.0**-7) if headroom.scaled else 1.0
    rms = factor * max(math.sqrt(k * squares[0] * squares[1]), k * means[0] * means[1])
    bound = factor * k * tops[0] * tops[1]
    ea, eb = exponents(rms, bound) if exponents else headroom.split(headroom.exponent(rms, bound))

    def lines(name: str, shape: tuple[int, ...], dtype: DType, e: int) -> Array:
        if not dtype.is_float:
            return _integers(draw(name), shape, dtype, most, positive, real)
        return scaled_lines(side.draw(draw(name), shape, headroom.wide), e)

    scale = None
    if headroom.scaled:
        # Weights of 8 bits have scales of about 2^-7 of the weight's range.
        scale = np.abs(draw("scale").binade((headroom.b_shape[1],), False)) * np.float32(2.0**-7)
    drawn = Drawn(
        lines("a", headroom.a_drawn, headroom.a, ea),
        None if headroom.b_is_a else lines("b", headroom.b_drawn, headroom.b, eb),
        rms * 2.0 ** (ea + eb),
        scale=scale,
        positive=positive,
    )
    if headroom.all_integer:
        drawn.quantum, drawn.spare = 1.0, headroom.limit - bound
        drawn.units, drawn.magnitude_bound = (1.0, 1.0), bound
    return drawn


def rand(headroom: Headroom, draw: Draw) -> Drawn:
    """Uniform values in [-1, 1]."""
    return random(headroom, draw, UNIFORM)


def rand_positive(headroom: Headroom, draw: Draw) -> Drawn:
    """Uniform values in [0, 1]: nothing cancels."""
    return random(headroom, draw, _POSITIVE)


def rand_small(headroom: Headroom, draw: Draw) -> Drawn:
    """Products as small as they may be while every product and partial sum stays a multiple of 2^-126.

    With p significand bits in [0.5, 1) * 2^s, a product is a multiple of 2^(2s - 2p): s = -38 for f32 and -54 for
    bf16 leave nothing that hardware which flushes subnormals could flush.  An f16 result is about 2^-9; those
    of its elements that cancel are subnormal.  So is A in f16, at 2^-20: every product of f16 is a normal float32, so
    nothing excuses a kernel that flushes its inputs.
    """
    if headroom.quantised:
        # Subnormals of fp8, which no kernel may flush; the scales bring the product back to about 1.
        return _random_quantised(
            headroom, draw, _BINADE, lambda dtype: dtype.emin, lambda rms, _bound: -round(math.log2(rms))
        )
    names = {d.name for d in (*narrowest(headroom.problem), headroom.a, headroom.b)}

    def exponents(rms: float, _bound: float) -> tuple[int, int]:
        if "f16" in names:
            e = -9 - round(math.log2(rms))
            if headroom.a.name == headroom.b.name == "f16" and not headroom.b_is_a:
                return -20, min(e + 20, 15)
            ea, eb = headroom.split(e)
            return max(ea, -13), max(eb, -13)
        each = -54 if names <= {"bf16", "i8", "u8"} else -38 if "f64" not in names or len(names) > 1 else -200
        return (each if headroom.a.is_float else 0), (each if headroom.b.is_float else 0)

    return random(headroom, draw, _BINADE, exponents)


def rand_large(headroom: Headroom, draw: Draw) -> Drawn:
    """Sums of magnitudes up to 2^124 (2^400 for f64, whose reference squares them); f16: a result near 65504."""
    ceiling = 2.0**400 if headroom.wide else 2.0**124

    def exponent_of(rms: float, bound: float) -> int:
        if headroom.room < ceiling / 2.0**20:
            peak = bound if headroom.b_is_a else min(bound, 8.0 * rms)
            return math.floor(math.log2(headroom.room) - math.log2(peak + 2.0 * headroom.adds * rms))
        return math.floor(math.log2(min(headroom.room, ceiling)) - math.log2(bound + 2.0 * headroom.adds * rms))

    if headroom.quantised:
        # The largest binade but one of fp8, whose products leave the range of f16; the scales say how large the
        # result is.
        return _random_quantised(headroom, draw, _BINADE, lambda dtype: dtype.emax, exponent_of)

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        # Scales of about 2^-7 come after the sum, which must not overflow before them.
        e = exponent_of(rms, bound) - (8 if headroom.scaled else 0)
        if headroom.b_is_a:
            return e // 2, e // 2
        ea, eb = headroom.split(e)
        if "f16" in (headroom.a.name, headroom.b.name):
            # One operand at the top of f16's range, the other where the result needs it.
            if headroom.a.is_float and headroom.b.is_float:
                return 15, max(e - 15, -13)
            return (min(ea, 15), 0) if headroom.a.is_float else (0, min(eb, 15))
        return ea, eb

    return random(headroom, draw, _BINADE, exponents)


def rand_wide(headroom: Headroom, draw: Draw) -> Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    names = (headroom.a.name, headroom.b.name)
    binades = 64 if headroom.wide else 8 if headroom.quantised else 10 if "f16" in names else 32

    def lines(stream: Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    side = _Side(lines, 7 / 12 * (4 / 3) / binades)
    return random(headroom, draw, side)
