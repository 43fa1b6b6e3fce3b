"""Input distributions of integers: every sum is exact, so that the result must be too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.operands.magnitudes import Drawn, Headroom, Side, on_grid
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.problem import Problem


def int_1(headroom: Headroom) -> Drawn:
    """{-1, 0, 1}; a quarter zeros, none at K = 1 where they would silence outputs.  Unsigned: {0, 1}.

    A sum of fp8 holds few bits: where K is longer than that, A is zero except for as many elements as they pay for.  In
    the same way the sums of a large problem are kept within what its output's type holds.
    """
    out, k = headroom.problem.dtypes.out, headroom.k
    kept = k
    if headroom.quantised:
        kept = min(k, headroom.budget)
    elif is_large(headroom.problem) and out.is_float and not headroom.target:
        # The whole result is to be checked exactly, so that its type has to hold the sums.  No scale depends on it,
        # and B must not: it is the same for every M.
        kept = min(k, 2**out.precision * (3 if headroom.adds else 4) // 4)
    codes = np.array([0, 0, 1, 1, 1, -1, -1, -1] if k > 1 else [1, -1], dtype=headroom.real)

    def lines(side: Side) -> Array:
        stream = headroom.draw(side.name)
        if side.name == "a" and kept < k:
            sparse = np.zeros(side.drawn, dtype=codes.dtype)
            _spread(stream, sparse, kept, lambda some: stream.look_up(some, codes, 8))
            return sparse
        return stream.look_up(side.drawn, np.abs(codes) if side.dtype.name == "u8" else codes, 8)

    terms = max(kept, 1)
    return on_grid(headroom, *headroom.both(lines), 0.75 * math.sqrt(terms), terms)


# Widest integer of the int-2 distribution.  Wider than TF32 (11 bits) and bfloat16 for f32, than f32 for f64.
_WIDE: Final = {
    "f64": 2**40 - 1, "f32": 2**16 - 1, "tf32": 2**11 - 1, "f16": 2**11 - 1, "bf16": 2**8 - 1, "i8": 127, "u8": 255,
    "i4": 7, "f8e4m3fn": 2**4 - 1, "f8e5m2": 2**3 - 1,
}  # fmt: skip
# In these types each line has one wider element, as wide as the budget allows and no wider than this.
_WIDEST: Final = {"f32": 2**24 - 1}
_NARROW: Final = 7


def _spread(stream: Stream, lines: Array, count: int, values: Callable[[tuple[int, ...]], Array]) -> None:
    """Overwrite ``count`` elements of each line, one at a random place in each of ``count`` equal stretches.

    Without replacement by construction, so a line's sum of magnitudes has a bound and not an expectation.
    """
    length = lines.shape[-1]
    if count >= length:
        lines[...] = values(lines.shape)
    elif count:
        edges = np.arange(count + 1, dtype=np.int64) * length // count
        shape = (*lines.shape[:-1], count)
        offset = stream.words(shape, 32).astype(np.int64) % np.diff(edges)
        np.put_along_axis(lines, edges[:-1] + offset, values(shape), axis=-1)


@functools.lru_cache(maxsize=16)
def _signed_table(low: int, high: int, wide: bool, signed: bool) -> Array:
    """65536 integers of [low, high]; when signed, a run of them for each sign, so that both are independent."""
    table: Array = np.resize(np.arange(low, high + 1, dtype=np.float64 if wide else np.float32), 65536)
    if signed:
        table[32768:] = -table[:32768]
    return table


@functools.lru_cache(maxsize=3)
def _int8_table(low: int, high: int) -> Array:
    """65536 integers of 8 bits, half of them the extremes and the others all equally likely."""
    table = np.resize(np.arange(low, high + 1, dtype=np.float32), 65536)
    table[:32768] = np.resize(np.array([low, high], dtype=np.float32), 32768)
    return table


def least(dtype: DType) -> int:
    """The smallest integer of a type of 4 or 8 bits."""
    return {"u8": 0, "i4": -8}.get(dtype.name, -128)


def magnitudes(
    stream: Stream, dtype: DType, low: int, high: int, real: type[Any]
) -> Callable[[tuple[int, ...]], Array]:
    """Integers of either sign (unless unsigned) with magnitudes in [low, high]."""

    def draw(shape: tuple[int, ...]) -> Array:
        if high < 16384:
            return stream.look_up(shape, _signed_table(low, high, real is np.float64, dtype.name != "u8"))
        bits = stream.words(shape, 64 if high >= 2**31 else 32)
        one = bits.dtype.type(1)
        values = (bits >> one) % bits.dtype.type(high - low + 1) + bits.dtype.type(low)
        found: Array = values.astype(real)
        if dtype.name != "u8":
            np.negative(found, out=found, where=(bits & one) == one)
        return found

    return draw


def int_2(headroom: Headroom) -> Drawn:
    """Wide integers against narrow ones: wide in A at even k, in B at odd k, narrow (1..7) everywhere else.

    A third of the budget each goes to the wide elements of A, to those of B and to the narrow products; where
    it does not pay for all, wide elements are spread thinly over the line.  A wide element always meets a narrow
    one, so the sum of magnitudes has a hard bound at any K.  Integers: full range, half of it the extremes.

    Half of the third of an f32 side pays for one element a line of 18 bits or more: a sum of two bf16 (16 bits and a
    sign) does not hold it, so that an f32 product in three bf16 products shows at any K.
    """
    k, budget = headroom.k, headroom.budget
    if headroom.all_integer and (k * 2**14 <= budget or (headroom.int8 and k <= _SHORT_INT8 // 2)):
        return _int_2_dense(headroom)
    third = max(budget // 3, 1)
    narrow = max(1, min(_NARROW, math.isqrt(third // max(k, 1))))
    narrow_square = (narrow + 1) * (2 * narrow + 1) / 6.0
    # Only a very small room (an int32 product cast to f16 or f8) cannot afford a narrow element everywhere.
    kept = min(k, third // narrow**2)

    def lines(side: Side, first: int, stride: int, wide: int, count: int, widest: int = 0) -> Array:
        stream = headroom.draw(side.name)

        def between(low: int, high: int) -> Callable[[tuple[int, ...]], Array]:
            return magnitudes(stream, side.dtype, low, high, headroom.real)

        if kept < k and side.name == "a":
            found = np.zeros(side.drawn, dtype=headroom.real)
            _spread(stream, found, kept, between(1, narrow))
        else:
            found = between(1, narrow)(side.drawn)
        own = found[..., first::stride]
        _spread(stream, own, count, between(-(-wide // 2), wide))
        if widest:
            _spread(stream, own, 1, between(-(-widest // 2), widest))
        return found

    if headroom.b_is_a:
        # Row against row: sum |a_i a_j| <= max sum a^2 (Cauchy and Schwarz), so it is squares that are budgeted.
        count = min(2, k)
        wide = max(narrow, min(_WIDE[headroom.a.dtype.name], math.isqrt(2 * third // max(count, 1))))
        bound = count * wide**2 + k * narrow**2
        a = lines(headroom.a, 0, 1, wide, count)
        return on_grid(headroom, a, None, max(bound / math.sqrt(max(k, 1)), 1.0), max(bound, 1))

    bound, square = kept * narrow**2, kept * narrow_square**2
    found = []
    for side, first, places in ((headroom.a, 0, (k + 1) // 2), (headroom.b, 1, k // 2)):
        wide = max(1, min(_WIDE[side.dtype.name], third // narrow))
        widest = min(_WIDEST.get(side.dtype.name, 0), third // (2 * narrow))
        widest = widest if widest > wide and places else 0
        count = min(places, (third - widest * narrow) // (wide * narrow))
        bound += (count * wide + widest) * narrow
        square += (count * wide**2 + widest**2) * 7 / 12 * narrow_square
        found.append(lines(side, first, 2, wide, count, widest))
    return on_grid(headroom, found[0], found[1], max(math.sqrt(square), 1.0), max(bound, 1))


# Up to this K no sum of int8 products leaves what float32 holds exactly: 2^24 / 128^2.
_SHORT_INT8: Final = 1024


def _int_2_dense(headroom: Headroom) -> Drawn:
    """Full-range integers: half of them extremes, where a 16-bit intermediate of a pair saturates.

    Sums of both signs stay small, so where K allows more each fourth line is -128 .. -113 throughout: where two of
    them meet, the sum is beyond 2^24 (from K of about 1160 on) and a float32 on its way would show.
    """
    k = max(headroom.k, 1)

    def lines(side: Side) -> Array:
        table = _int8_table(least(side.dtype), int(side.dtype.max_finite))
        found = headroom.draw(side.name).look_up(side.drawn, table)
        if k > _SHORT_INT8:
            heavy = found[..., ::4, :]
            heavy_table = np.arange(-128, -112, dtype=np.float32)
            heavy[...] = headroom.draw(f"{side.name}-heavy").look_up(heavy.shape, heavy_table, 8)
        return found

    return on_grid(headroom, *headroom.both(lines), 104.0**2 * math.sqrt(k), k * 2**14)


# Products of two numbers from which on a problem is large: M N K of some ten seconds of float64 on a CPU.
LARGE: Final = 2**33


def is_large(problem: Problem) -> bool:
    """Whether computing the whole product once more in float64 on the CPU costs too much: M N K > 2^33."""
    shape = problem.shape
    return shape.m * shape.n * shape.k * (1 if shape.batch is None else shape.batch) > LARGE
