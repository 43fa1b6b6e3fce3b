"""Input distributions of integers: every sum is exact, so that the result must be too.

``one-hot``, ``k-cover`` and ``tile-map`` are made so that the cause can be read from a wrong result: which k, which
tile, which element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.operands.magnitudes import Drawn, Headroom, Side, as_is, headroom_of, narrowest, on_grid, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.problem import Problem


def int_1(headroom: Headroom) -> Drawn:
    """{-1, 0, 1}; a quarter zeros, none at K = 1 where they would silence outputs.  Unsigned: {0, 1}.

    A sum of fp8 holds few bits: where K is longer than that, A is zero except for as many elements as they pay for.  In
    the same way the sums of a large problem are kept within what its output's type holds.
    """
    out, k = headroom.problem.dtypes.out, headroom.problem.terms
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
    "i4": 7, "f8e4m3fn": 2**4 - 1, "f8e5m2": 2**3 - 1, "f4e2m1fn": 2**2 - 1,
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
    k, budget = headroom.problem.terms, headroom.budget
    if headroom.all_integer and (k * 2**14 <= budget or (headroom.problem.op.int8 and k <= _SHORT_INT8 // 2)):
        return _int_2_dense(headroom)
    third = max(budget // 3, 1)
    most = min(_NARROW, *(_WIDE[side.dtype.name] for side in (headroom.a, headroom.b)))
    narrow = max(1, min(most, math.isqrt(third // max(k, 1))))
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

    if headroom.problem.b_is_a:
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

    Sums of both signs stay small, so where K allows more each fourth line is -128 .. -113 throughout, of u8 128 .. 143:
    where two of them meet, the sum is beyond 2^24 (from K of about 1160 on) and a float32 on its way would show.
    """
    k = max(headroom.problem.terms, 1)
    most = 2**15 if "u8" in (headroom.a.dtype.name, headroom.b.dtype.name) else 2**14

    def lines(side: Side) -> Array:
        table = _int8_table(least(side.dtype), int(side.dtype.max_finite))
        found = headroom.draw(side.name).look_up(side.drawn, table)
        if k > _SHORT_INT8:
            heavy = found[..., ::4, :]
            first = -128 if least(side.dtype) else 128
            heavy_table = np.arange(first, first + 16, dtype=np.float32)
            heavy[...] = headroom.draw(f"{side.name}-heavy").look_up(heavy.shape, heavy_table, 8)
        return found

    return on_grid(headroom, *headroom.both(lines), 104.0**2 * math.sqrt(k), k * most)


def one_hot(headroom: Headroom) -> Drawn:
    """Rows of A hold a single 1; B has integers of the full significand: C repeats rows of B bit for bit."""
    matrices, m, k = headroom.a.shape
    a = np.zeros((matrices * m, k), dtype=headroom.real)
    rows = np.arange(matrices * m)
    # Evenly over K, so that few rows reach the head, the middle and the tail alike.
    a[rows, (headroom.draw("a").below(k) + rows * max(1, k // max(m, 1))) % k] = 1.0
    # As many bits as B has, less one where a bias shares the accumulator with a 24-bit element.
    dtype, budget = headroom.b.dtype, headroom.budget
    bits = min(dtype.precision, budget.bit_length() - 1)
    highest = 2**bits - 1 if dtype.is_float else int(min(dtype.max_finite, budget))
    b = magnitudes(headroom.draw("b"), dtype, 1, highest, headroom.real)(headroom.b.shape)
    drawn = on_grid(headroom, a.reshape(headroom.a.shape), b, 0.58 * highest, highest, only_b=True)
    if headroom.target or headroom.quantised or not dtype.is_float:
        return drawn
    # No magnitude is needed: fixed point in (-1, 1), or less where there is less room.
    e = min(-math.ceil(math.log2(highest)), headroom.exponent(0.58 * highest, highest))
    drawn.b, drawn.level = scaled_lines(b, e), 0.58 * highest * 2.0**e
    drawn.quantum, drawn.base_quantum, drawn.units = 2.0**e, 2.0**e, (1.0, 2.0**e)
    return drawn


def _exact_results(headroom: Headroom) -> float:
    """What a product may be so that it is exact in every dtype that the value goes through, after an addition too."""
    return _integer_span(headroom.problem) * (0.875 if headroom.adds else 1.0)


def _integer_span(problem: Problem) -> float:
    """All integers up to this are exact in every dtype that the value goes through."""
    return 2.0 ** min(d.precision or 31 for d in narrowest(problem))


def digit_plan(problem: Problem) -> tuple[int, int]:
    """How many consecutive k a block of ``k-cover`` has, each with a power of 4, and how many blocks a column has."""
    headroom = headroom_of(problem)
    n, k = max(problem.result_shape[-1], 1), max(problem.terms, 1)
    exact = min(_exact_results(headroom), headroom.room)
    for digits in range(8, 1, -1):
        overlap = -(-k // (digits * n))
        total, highest = (4**digits - 1) // 3, 4 ** (digits - 1)
        # The largest result of a kernel that doubles a k must still be exact, or the k could not be named.
        fits = min(overlap, 2) * total + highest <= exact and highest <= headroom.b.dtype.max_finite
        if fits and overlap * total <= headroom.budget:
            return digits, overlap
    return 1, -(-k // n)


def _block_sign(index: int) -> int:
    """Sign of a column's block of this index: + + - + - + ..., so that sums stay at one or two blocks' worth."""
    return -1 if index >= 2 and index % 2 == 0 else 1


def k_cover(headroom: Headroom) -> Drawn:
    """A is 1; column j of B carries 4^0, 4^1 ... at the k of block j, and of block j + N, j + 2N ... if N is small."""
    digits, overlap = digit_plan(headroom.problem)
    k, lines = headroom.problem.terms, headroom.b.shape[1]
    at = np.arange(k)
    block, n = at // digits, max(lines, 1)
    sign = np.array([_block_sign(index) for index in range(overlap)], dtype=headroom.real)[block // n]
    # The weight of k, in every column whose blocks include that of k; columns past the last block start over.
    column = np.arange(lines)[:, None]
    mine = (column % -(-k // digits) == block) if overlap == 1 else (column == block % n)
    a, b = (np.ones(side.shape, dtype=headroom.real) for side in (headroom.a, headroom.b))
    np.multiply(4.0 ** (at % digits), mine, out=b[...], casting="unsafe")
    # The sign depends on k alone: it can sit on either side, on one that has signs.
    if headroom.a.dtype.name == "u8":
        b *= sign
    else:
        a *= sign
    total = (4**digits - 1) // 3
    # A digit must stay a digit.
    spare = min(headroom.limit - overlap * total, _integer_span(headroom.problem) / 8)
    return as_is(headroom, a, b, float(total), spare, float(overlap * total))


def _prime_at_most(limit: int) -> int:
    """The largest prime up to ``limit``, 1 below 2."""
    return next((p for p in range(limit, 1, -1) if all(p % q for q in range(2, math.isqrt(p) + 1))), 1)


def tile_map_period(problem: Problem) -> tuple[int, int]:
    """``(I, J)``: the ``tile-map`` distribution encodes i modulo I and j modulo J.

    ``(M, N)`` where the output can hold M * N distinct integers.  Otherwise primes, so that a shift by a
    tile's edge, a power of two, is never a multiple of the period.
    """
    headroom = headroom_of(problem)
    a, b, rows = headroom.a.dtype, headroom.b.dtype, headroom.a.shape[1]
    most = int(min(_exact_results(headroom), headroom.limit // 2, headroom.room))
    # In terms of N alone, as B must not depend on M.  B holds J and j, A holds i.
    j_most = min(int(b.max_finite), math.isqrt(most) + 1, 2**b.precision if b.is_float else most)
    j = problem.shape.n if problem.shape.n <= j_most else _prime_at_most(j_most)
    i_most = min(int(a.max_finite) - max(headroom.zero, 0), most // max(j, 1), 2**a.precision if a.is_float else most)
    i = rows if rows <= i_most else _prime_at_most(i_most)
    return max(i, 1), max(j, 1)


def tile_map(headroom: Headroom) -> Drawn:
    """C[i, j] = (i mod I) * J + (j mod J) + 1, through the first and the last k; A is zero at the others."""
    i_period, j_period = tile_map_period(headroom.problem)
    a = np.zeros(headroom.a.shape, dtype=headroom.real)
    a[..., 0] = np.arange(headroom.a.shape[1]) % i_period
    a[..., -1] = 1.0
    b = magnitudes(headroom.draw("b"), headroom.b.dtype, 1, 1, headroom.real)(headroom.b.shape)
    b[..., 0] = j_period
    b[..., -1] = np.arange(headroom.b.shape[1]) % j_period + 1
    # The bias takes what tile_map_period leaves of the output's integers; level and spare know nothing of M.
    spare = min(headroom.limit / 2, _integer_span(headroom.problem) / 8)
    return as_is(headroom, a, b, 128.0, spare, float(i_period * j_period))


# Products of two numbers from which on a problem is large: M N K of some ten seconds of float64 on a CPU.
LARGE: Final = 2**33
LARGE_RESULT: Final = 2**25
LARGE_OPERAND: Final = 2**27


def is_large(problem: Problem) -> bool:
    """Whether computing the whole product once more in float64 on the CPU costs too much.

    That is from M N K > 2^33 on, or where the result has more than 2^25 elements, or an operand more than 2^27.
    """
    shape = problem.shape
    batch = 1 if shape.batch is None else shape.batch
    if batch * shape.m * shape.n > LARGE_RESULT or batch * max(shape.m, shape.n) * shape.k > LARGE_OPERAND:
        return True
    return batch * shape.m * shape.n * shape.k > LARGE
