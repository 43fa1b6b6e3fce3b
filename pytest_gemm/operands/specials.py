"""Input distribution of special values: NaN, infinities, signed zeros and the ends of the range."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np

from pytest_gemm.operands.magnitudes import Drawn, Headroom, Side
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.operands.reals import UNIFORM, random

# Values of k at which B holds a zero for A's special values to meet.
_ZEROS: Final = 3


def _plain_ks(lines: Array, stream: Stream, tiny: float, count: int) -> list[int]:
    """Up to ``count`` places along K, at random, at which no line has a special value or one below ``tiny``."""
    special = ~np.isfinite(lines) | ((lines != 0) & (np.abs(lines) < tiny))
    drawn = dict.fromkeys(stream.below(lines.shape[-1]) for _ in range(2 * count + 2))
    return [k for k in drawn if not special[..., k].any()][:count]


def _range_shifts(headroom: Headroom, ea: int, eb: int) -> list[int]:
    """Exponents of the powers of two that A is multiplied by and B divided by, of magnitudes 2^ea and 2^eb.

    40 either way where the type has the range.  Where subnormal inputs are promised (f32 and f16, docs/oracle.md), as
    many as make one side subnormal and leave the other a factor of two below the type's largest number.
    """
    a, b = headroom.a.dtype, headroom.b.dtype
    if headroom.problem.autocast and a.name == "f16":
        return []  # compiled code may leave the conversion out, and a subnormal loses more bits by it than u says
    subnormal = [min(eb - b.emin, a.emax - 1 - ea), -min(ea - a.emin, b.emax - 1 - eb)]
    return {"f16": subnormal, "f32": [40, -40, *subnormal], "bf16": [40, -40], "tf32": [40, -40]}.get(a.name, [])


def _plant(side: Side, lines: Array, stream: Stream, at: list[int]) -> None:
    """Put special values into a few lines, at some of the k in ``at``, or anywhere without one.

    A line of -0.0 and the smallest subnormal travel along: they must not disturb anything either.
    """
    dtype, k = side.dtype, lines.shape[-1]
    flat = lines.reshape(-1, k)
    tiny = 2.0 ** (dtype.emin - dtype.precision + 1)
    values = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0": -0.0, "subnormal": tiny}
    known = [kind for kind in values if dtype.has_inf or not kind.endswith("inf")]
    special = min(len(known), len(flat) // 4 or (1 if lines.shape[1] > 1 and len(lines) else 0))
    if not dtype.is_float or special == 0:
        return
    first = stream.below(len(flat))
    if special == 1:
        known = [known[stream.below(3)] if dtype.has_inf else "nan"]
    for index, kind in enumerate(known[:special]):
        # Spread over the lines: neighbours in one vector register would hide a leak between them.
        row = (first + index * max(1, len(flat) // special)) % len(flat)
        if kind == "-0" or (kind == "subnormal" and dtype.name == "f16"):
            flat[row] = -0.0
        flat[row, at[stream.below(len(at))] if at else stream.below(k)] = values[kind]


def _plant_in_b(headroom: Headroom, a: Array, b: Array, shifts: list[int]) -> list[int]:
    """Special values for B, zeros for A's to meet, and the powers of two of ``shifts``; the k of the zeros."""
    _plant(headroom.b, b, headroom.draw("b-specials"), [])
    stream = headroom.draw("b-zeros")
    tiny = 2.0**headroom.b.dtype.emin if headroom.a.dtype.has_inf else 0.0
    found = _plain_ks(b, stream, tiny, _ZEROS + len(shifts))
    for k in found[:_ZEROS]:
        for matrix in b:
            matrix[stream.below(len(matrix)), k] = 0.0
    for k, shift in zip(found[_ZEROS:], shifts, strict=False):
        a[..., k] *= 2.0**shift
        b[..., k] *= 2.0**-shift
    return found[:_ZEROS]


def _face_specials(lines: Array, other: Array, stream: Stream) -> None:
    """Put a zero where a NaN or an infinity of ``lines`` meets one line of ``other``."""
    for matrix, _, k in np.argwhere(~np.isfinite(lines)).tolist():
        for facing in other[matrix : matrix + 1] if len(other) == len(lines) else other:
            finite = np.flatnonzero(np.isfinite(facing[:, k]))
            if len(finite):
                facing[finite[stream.below(len(finite))], k] = 0.0


def specials(headroom: Headroom) -> Drawn:
    """The ``rand`` distribution with special values, each in one row of A or one column of B.

    A NaN and an infinity meet a zero in some line of the other side: the product is NaN, and a kernel that skips zeros
    loses it.  A's come to where B has zeros, as B must not depend on M.

    An infinity never meets a subnormal in one product: the result would tell whether subnormal inputs count as
    zero (Inf * 0 is NaN), and instructions for bf16 dot products (VDPBF16PS, TDPBF16PS) define that they do.

    A line of -0.0 gives zeros of known sign.  In f16 a line whose only number is the smallest subnormal gives results
    that underflow when they are stored.  At a few k a huge number meets a tiny one (:func:`_range_shifts`); in f64 at
    every k, as the bound of its reference grows with the range within a line.
    """
    movable = not (headroom.b_is_a or headroom.problem.has("r0.alias") or headroom.problem.has("program.chained"))
    used = [(0, 0)]  # fp8 has its powers of two in the scales

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        ea, eb = headroom.split(headroom.exponent(rms, bound))
        apart = 200 if movable and headroom.a.dtype.name == headroom.b.dtype.name == "f64" else 0
        used.append((ea + apart, eb - apart))
        return used[-1]

    a, b = (dataclasses.replace(side, whole=True) for side in (headroom.a, headroom.b))
    drawn = random(dataclasses.replace(headroom, a=a, b=b), UNIFORM, exponents)
    drawn.a = np.ascontiguousarray(drawn.a)
    zeros: list[int] = []
    if drawn.b is not None:
        drawn.b = np.ascontiguousarray(drawn.b)
        zeros = _plant_in_b(headroom, drawn.a, drawn.b, _range_shifts(headroom, *used[-1]) if movable else [])
    _plant(headroom.a, drawn.a, headroom.draw("a-specials"), zeros)
    other = drawn.a if drawn.b is None else drawn.b  # self: A meets itself
    _face_specials(other, drawn.a, headroom.draw("a-zeros"))
    tiny = 2.0 ** min(headroom.a.dtype.emin, headroom.b.dtype.emin)
    for one, met in ((drawn.a, other), (other, drawn.a)):
        infinite = np.isinf(met).any(axis=tuple(range(met.ndim - 1)))  # by k
        one[(one != 0) & (np.abs(one) < tiny) & infinite] = 1.0
    return drawn
