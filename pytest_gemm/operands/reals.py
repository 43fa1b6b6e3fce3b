"""Input distributions of real values: uniform, positive, small, large and of wide range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from pytest_gemm.operands.integers import least
from pytest_gemm.operands.magnitudes import Drawn, Headroom, Side, narrowest, scale_pair, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream

# The powers of two of A and B by the typical magnitude of a product and what it cannot exceed.
Exponents = Callable[[float, float], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Values:
    """How a random distribution draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


UNIFORM: Final = _Values(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
_POSITIVE: Final = _Values(lambda s, shape, wide: np.abs(s.uniform(shape, wide)), 1 / 3, 0.5)
_BINADE: Final = _Values(lambda s, shape, wide: s.binade(shape, wide), 7 / 12)


def _scales(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales of full significands in [0.5, 1)."""
    return np.abs(stream.binade(shape, False))


def _random_quantised(
    headroom: Headroom,
    values: _Values,
    lifts: tuple[int, int] = (0, 0),
    exponent: Callable[[float, float], int] | None = None,
) -> Drawn:
    """Random fp8 with random scales of full significands.

    Args:
        headroom: of a quantised problem.
        values: how elements are drawn.
        lifts: the powers of two of the elements of A and of B.
        exponent: ``exponent(rms, bound)`` is the exponent that the scales add to the product; by default the one
            that fits.
    """
    k, lift = max(headroom.k, 1), sum(lifts)
    rms = 0.76**2 * max(math.sqrt(k) * values.square, k * values.mean**2) * 2.0**lift
    e = (exponent or headroom.exponent)(rms, k * 2.0**lift)

    def lines(side: Side) -> Array:
        drawn = values.draw(headroom.draw(side.name), side.drawn, headroom.wide)
        return scaled_lines(drawn, lifts[side.name == "b"])

    scales = scale_pair(headroom, _scales, e)
    return Drawn(*headroom.both(lines), rms * 2.0**e, 0.0, *scales, positive=values.mean > 0)


def random(headroom: Headroom, values: _Values, exponents: Exponents | None = None) -> Drawn:
    """Random lines; ``exponents(rms, bound)`` gives the powers of two of A and B, by default what fits."""
    if headroom.quantised:
        return _random_quantised(headroom, values)
    k, positive = max(headroom.k, 1), values.mean > 0
    most = 255 if headroom.int8 else 128
    if headroom.all_integer and not headroom.int8:
        # An int32 product that is cast to a narrow float: eight standard deviations must fit.
        most = max(1, min(128, int(math.sqrt(3 * headroom.room / (8 * math.sqrt(k))) / (2 if headroom.adds else 1))))
    squares, tops, means = [], [], []
    for dtype in (headroom.a.dtype, headroom.b.dtype):
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -least(dtype)))
        squares.append(values.square if dtype.is_float else top**2 / 3)
        means.append(values.mean if dtype.is_float else top / 2 if dtype.name == "u8" or positive else 0.0)
        tops.append(top)
    factor = (0.76 if headroom.b.dtype.name == "i4" else 0.76 * 2.0**-7) if headroom.scaled else 1.0
    rms = factor * max(math.sqrt(k * squares[0] * squares[1]), k * means[0] * means[1])
    bound = factor * k * tops[0] * tops[1]
    powers = exponents(rms, bound) if exponents else headroom.split(headroom.exponent(rms, bound))

    def lines(side: Side) -> Array:
        stream, dtype = headroom.draw(side.name), side.dtype
        if dtype.is_float:
            return scaled_lines(values.draw(stream, side.drawn, headroom.wide), powers[side.name == "b"])
        # Integers of the full range, or of magnitude up to ``most``.
        low = 0 if positive else -min(most, -least(dtype))
        return stream.look_up(side.drawn, np.arange(low, min(most, int(dtype.max_finite)) + 1, dtype=headroom.real))

    drawn = Drawn(*headroom.both(lines), rms * 2.0 ** sum(powers), positive=positive)
    if headroom.scaled:
        # Weights of 8 bits have scales of about 2^-7 of the weight's range.
        drawn.scale_b = _scales(headroom.draw("scale"), (headroom.b.shape[1],)) * np.float32(2.0**-7)
    if headroom.all_integer:
        drawn.quantum, drawn.spare = 1.0, headroom.limit - bound
        drawn.units, drawn.magnitude_bound = (1.0, 1.0), bound
    return drawn


def rand(headroom: Headroom) -> Drawn:
    """Uniform values in [-1, 1]."""
    return random(headroom, UNIFORM)


def rand_positive(headroom: Headroom) -> Drawn:
    """Uniform values in [0, 1]: nothing cancels."""
    return random(headroom, _POSITIVE)


def rand_small(headroom: Headroom) -> Drawn:
    """Products as small as they may be while every product and partial sum stays a multiple of 2^-126.

    With p significand bits in [0.5, 1) * 2^s, a product is a multiple of 2^(2s - 2p): s = -38 for f32 and -54 for
    bf16 leave nothing that hardware which flushes subnormals could flush.  An f16 result is about 2^-9; those
    of its elements that cancel are subnormal.  So is A in f16, at 2^-20: every product of f16 is a normal float32, so
    nothing excuses a kernel that flushes its inputs.
    """
    a, b = headroom.a.dtype, headroom.b.dtype
    if headroom.quantised:
        # Subnormals of fp8, which no kernel may flush; the scales bring the product back to about 1.
        return _random_quantised(headroom, _BINADE, (a.emin, b.emin), lambda rms, _bound: -round(math.log2(rms)))
    names = {d.name for d in (*narrowest(headroom.problem), a, b)}

    def exponents(rms: float, _bound: float) -> tuple[int, int]:
        if "f16" in names:
            e = -9 - round(math.log2(rms))
            if a.name == b.name == "f16" and not headroom.b_is_a:
                return -20, min(e + 20, 15)
            ea, eb = headroom.split(e)
            return max(ea, -13), max(eb, -13)
        each = -54 if names <= {"bf16", "i8", "u8"} else -38 if "f64" not in names or len(names) > 1 else -200
        return (each if a.is_float else 0), (each if b.is_float else 0)

    return random(headroom, _BINADE, exponents)


def rand_large(headroom: Headroom) -> Drawn:
    """Sums of magnitudes up to 2^124 (2^400 for f64, whose reference squares them); f16: a result near 65504."""
    a, b = headroom.a.dtype, headroom.b.dtype
    most = 2.0**400 if headroom.wide else 2.0**124

    def exponent_of(rms: float, bound: float) -> int:
        peak = bound
        if headroom.room < most / 2.0**20 and not headroom.b_is_a:
            peak = min(bound, 8.0 * rms)
        return math.floor(math.log2(min(headroom.room, most)) - math.log2(peak + 2.0 * headroom.adds * rms))

    if headroom.quantised:
        # The largest binade but one of fp8, whose products leave the range of f16; the scales say how large the
        # result is.
        return _random_quantised(headroom, _BINADE, (a.emax, b.emax), exponent_of)

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        # Scales of about 2^-7 come after the sum, which must not overflow before them.
        e = exponent_of(rms, bound) - (8 if headroom.scaled else 0)
        if headroom.b_is_a:
            return e // 2, e // 2
        ea, eb = headroom.split(e)
        if "f16" in (a.name, b.name):
            # One operand at the top of f16's range, the other where the result needs it.
            if a.is_float and b.is_float:
                return 15, max(e - 15, -13)
            return (min(ea, 15), 0) if a.is_float else (0, min(eb, 15))
        return ea, eb

    return random(headroom, _BINADE, exponents)


def rand_wide(headroom: Headroom) -> Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    has_half = "f16" in (headroom.a.dtype.name, headroom.b.dtype.name)
    binades = 64 if headroom.wide else 8 if headroom.quantised else 10 if has_half else 32

    def draw(stream: Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    return random(headroom, _Values(draw, 7 / 12 * (4 / 3) / binades))
