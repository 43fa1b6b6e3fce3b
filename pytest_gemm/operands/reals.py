"""Input distributions of real values: uniform, positive, small, large and of wide range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.operands.integers import least
from pytest_gemm.operands.magnitudes import Draw, Drawn, Frame, narrowest, real_of, scale_pair, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.dtypes import DType

# -- random fillings ----------------------------------------------------------------------------------


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
    """How a random filling draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


UNIFORM: Final = _Side(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
_POSITIVE: Final = _Side(lambda s, shape, wide: np.abs(s.uniform(shape, wide)), 1 / 3, 0.5)
_BINADE: Final = _Side(lambda s, shape, wide: s.binade(shape, wide), 7 / 12)


def _random_quantised(
    frame: Frame,
    draw: Draw,
    side: _Side,
    lift: Callable[[DType], int] = lambda _: 0,
    reach: Callable[[float, float], int] | None = None,
) -> Drawn:
    """Random fp8 with random scales of full significands.

    Args:
        frame: of a quantised problem.
        draw: its streams.
        side: how elements are drawn.
        lift: the power of two of an element by its dtype.
        reach: ``reach(rms, bound)`` is the exponent that the scales add to the product; by default what fits.
    """
    k, lifts = max(frame.k, 1), lift(frame.a) + lift(frame.b)
    rms = 0.76**2 * max(math.sqrt(k) * side.square, k * side.mean**2) * 2.0**lifts
    bound = k * 2.0**lifts
    e = (reach or frame.exponent)(rms, bound)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        return scaled_lines(side.draw(draw(name), shape, frame.wide), lift(dtype))

    scale_a, scale_b = scale_pair(frame, draw, lambda stream, shape: np.abs(stream.binade(shape, False)))
    return Drawn(
        lines("a", frame.a_drawn, frame.a),
        None if frame.twin else lines("b", frame.b_drawn, frame.b),
        rms * 2.0**e,
        scale=scaled_lines(scale_b, e // 2),
        positive=side.mean > 0,
        scale_a=scaled_lines(scale_a, e - e // 2),
    )


def random(
    frame: Frame, draw: Draw, side: _Side, exponents: Callable[[float, float], tuple[int, int]] | None = None
) -> Drawn:
    """Random lines; ``exponents(rms, bound)`` gives the powers of two of A and B, by default what fits."""
    if frame.quantised:
        return _random_quantised(frame, draw, side)
    real, k = real_of(frame), max(frame.k, 1)
    positive = side.mean > 0
    most = 255 if frame.int8 else 128
    if frame.all_integer and not frame.int8:
        # An int32 product that is cast to a narrow float: eight standard deviations must fit.
        most = max(1, min(128, int(math.sqrt(3 * frame.room / (8 * math.sqrt(k))) / (2 if frame.adds else 1))))
    squares, tops, means = [], [], []
    for dtype in (frame.a, frame.b):
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -least(dtype)))
        squares.append(side.square if dtype.is_float else top**2 / 3)
        means.append(side.mean if dtype.is_float else top / 2 if dtype.name == "u8" or positive else 0.0)
        tops.append(top)
    factor = (0.76 if frame.b.name == "i4" else 0.76 * 2.0**-7) if frame.scaled else 1.0
    rms = factor * max(math.sqrt(k * squares[0] * squares[1]), k * means[0] * means[1])
    bound = factor * k * tops[0] * tops[1]
    ea, eb = exponents(rms, bound) if exponents else frame.split(frame.exponent(rms, bound))

    def lines(name: str, shape: tuple[int, ...], dtype: DType, e: int) -> Array:
        if not dtype.is_float:
            return _integers(draw(name), shape, dtype, most, positive, real)
        return scaled_lines(side.draw(draw(name), shape, frame.wide), e)

    scale = None
    if frame.scaled:
        # Weights of 8 bits have scales of about 2^-7 of the weight's range.
        scale = np.abs(draw("scale").binade((frame.b_shape[1],), False)) * np.float32(2.0**-7)
    drawn = Drawn(
        lines("a", frame.a_drawn, frame.a, ea),
        None if frame.twin else lines("b", frame.b_drawn, frame.b, eb),
        rms * 2.0 ** (ea + eb),
        scale=scale,
        positive=positive,
    )
    if frame.all_integer:
        drawn.quantum, drawn.spare = 1.0, frame.limit - bound
        drawn.units, drawn.reach = (1.0, 1.0), bound
    return drawn


def rand(frame: Frame, draw: Draw) -> Drawn:
    """Uniform values in [-1, 1]."""
    return random(frame, draw, UNIFORM)


def rand_positive(frame: Frame, draw: Draw) -> Drawn:
    """Uniform values in [0, 1]: nothing cancels."""
    return random(frame, draw, _POSITIVE)


def rand_small(frame: Frame, draw: Draw) -> Drawn:
    """Products as small as they may be while every product and partial sum stays a multiple of 2^-126.

    With p significand bits in [0.5, 1) * 2^s, a product is a multiple of 2^(2s - 2p): s = -38 for f32 and -54 for
    bf16 leave nothing that hardware which flushes subnormals could flush.  An f16 result is about 2^-9; those
    of its elements that cancel are subnormal.  So is A in f16, at 2^-20: every product of f16 is a normal float32, so
    nothing excuses a kernel that flushes its inputs.
    """
    if frame.quantised:
        # Subnormals of fp8, which no kernel may flush; the scales bring the product back to about 1.
        return _random_quantised(
            frame, draw, _BINADE, lambda dtype: dtype.emin, lambda rms, _bound: -round(math.log2(rms))
        )
    names = {d.name for d in (*narrowest(frame.problem), frame.a, frame.b)}

    def exponents(rms: float, _bound: float) -> tuple[int, int]:
        if "f16" in names:
            e = -9 - round(math.log2(rms))
            if frame.a.name == frame.b.name == "f16" and not frame.twin:
                return -20, min(e + 20, 15)
            ea, eb = frame.split(e)
            return max(ea, -13), max(eb, -13)
        each = -54 if names <= {"bf16", "i8", "u8"} else -38 if "f64" not in names or len(names) > 1 else -200
        return (each if frame.a.is_float else 0), (each if frame.b.is_float else 0)

    return random(frame, draw, _BINADE, exponents)


def rand_large(frame: Frame, draw: Draw) -> Drawn:
    """Sums of magnitudes up to 2^124 (2^400 for f64, whose reference squares them); f16: a result near 65504."""
    ceiling = 2.0**400 if frame.wide else 2.0**124

    def reach(rms: float, bound: float) -> int:
        if frame.room < ceiling / 2.0**20:
            peak = bound if frame.twin else min(bound, 8.0 * rms)
            return math.floor(math.log2(frame.room) - math.log2(peak + 2.0 * frame.adds * rms))
        return math.floor(math.log2(min(frame.room, ceiling)) - math.log2(bound + 2.0 * frame.adds * rms))

    if frame.quantised:
        # The largest binade but one of fp8, whose products leave the range of f16; the scales say how large the
        # result is.
        return _random_quantised(frame, draw, _BINADE, lambda dtype: dtype.emax, reach)

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        # Scales of about 2^-7 come after the sum, which must not overflow before them.
        e = reach(rms, bound) - (8 if frame.scaled else 0)
        if frame.twin:
            return e // 2, e // 2
        ea, eb = frame.split(e)
        if "f16" in (frame.a.name, frame.b.name):
            # One operand at the top of f16's range, the other where the result needs it.
            if frame.a.is_float and frame.b.is_float:
                return 15, max(e - 15, -13)
            return (min(ea, 15), 0) if frame.a.is_float else (0, min(eb, 15))
        return ea, eb

    return random(frame, draw, _BINADE, exponents)


def rand_wide(frame: Frame, draw: Draw) -> Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    names = (frame.a.name, frame.b.name)
    binades = 64 if frame.wide else 8 if frame.quantised else 10 if "f16" in names else 32

    def lines(stream: Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    side = _Side(lines, 7 / 12 * (4 / 3) / binades)
    return random(frame, draw, side)
