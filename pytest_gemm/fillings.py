"""The fillings: what values the operands hold, and what each of them would tell.

:data:`FILLINGS` is the catalogue, :func:`fillings_for` what of it fits a problem.  The fillings and their limits are
tiers 2 and 3 of the project's oracle (docs).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from pytest_gemm.draws import Array, Stream, drawn_shape
from pytest_gemm.frames import (
    UNIT_RANGE,
    Draw,
    Drawn,
    Frame,
    budget_of,
    frame_of,
    narrowest,
    neutral_scales,
    on_grid,
    real_of,
    saturating_steps,
    scale_pair,
    scaled_lines,
)
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

__all__ = [
    "FILLINGS",
    "TABLE_ROWS",
    "Filling",
    "bias_of",
    "decode_k",
    "decode_source",
    "fillings_for",
    "is_large",
    "k_cover_digits",
    "residuals_of",
    "tile_map_period",
]

_Build = Callable[[Frame, Draw], Drawn]


# -- exact fillings -----------------------------------------------------------------------------------


def _int_1(frame: Frame, draw: Draw) -> Drawn:
    """{-1, 0, 1}; a quarter zeros, none at K = 1 where they would silence outputs.  Unsigned: {0, 1}.

    A sum of fp8 holds few bits: where K is longer than that, A is zero but for as many elements as they pay for.  In
    the same way the sums of a large problem are kept within what its output's type holds.
    """
    out = frame.problem.dtypes.out
    kept = frame.k
    if frame.quantised:
        kept = min(kept, budget_of(frame))
    elif is_large(frame.problem) and out.is_float and not frame.target:
        # The whole result is to be checked exactly, so that its type has to hold the sums.  No scale depends on it,
        # and B must not: it is the same for every M.
        kept = min(kept, 2**out.precision * (3 if frame.adds else 4) // 4)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        codes = [0, 0, 1, 1, 1, -1, -1, -1] if frame.k > 1 else [1, -1]
        values = np.array(codes, dtype=real_of(frame))
        stream = draw(name)
        if name == "a" and kept < frame.k:
            sparse = np.zeros(shape, dtype=values.dtype)
            _spread(stream, sparse, kept, lambda some: stream.look_up(some, values, 8))
            return sparse
        return stream.look_up(shape, np.abs(values) if dtype.name == "u8" else values, 8)

    b = None if frame.twin else lines("b", frame.b_drawn, frame.b)
    rms = 0.75 * math.sqrt(max(kept, 1))
    return on_grid(frame, draw, lines("a", frame.a_drawn, frame.a), b, rms, max(kept, 1))


# Widest integer of the int-2 filling.  Wider than TF32 (11 bits) and bfloat16 for f32, than f32 for f64.
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
        return
    if count == 0:
        return
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


def _least(dtype: DType) -> int:
    """The smallest integer of a type of 4 or 8 bits."""
    return {"u8": 0, "i4": -8}.get(dtype.name, -128)


def _magnitudes(
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


def _int_2(frame: Frame, draw: Draw) -> Drawn:
    """Wide integers against narrow ones: wide in A at even k, in B at odd k, narrow (1..7) everywhere else.

    A third of the budget each goes to the wide elements of A, to those of B and to the narrow products; where
    it does not pay for all, wide elements are spread thinly over the line.  A wide element always meets a narrow
    one, so the sum of magnitudes has a hard bound at any K.  Integers: full range, half of it the extremes.

    Half of the third of an f32 side pays for one element a line of 18 bits or more: a sum of two bf16 (16 bits and a
    sign) does not hold it, so that an f32 product in three bf16 products shows at any K.
    """
    k, real = frame.k, real_of(frame)
    budget = budget_of(frame)
    if frame.all_integer and (k * 2**14 <= budget or (frame.int8 and k <= _SHORT_INT8 // 2)):
        return _int_2_dense(frame, draw)
    third = max(budget // 3, 1)
    narrow = max(1, min(_NARROW, math.isqrt(third // max(k, 1))))
    narrow_square = (narrow + 1) * (2 * narrow + 1) / 6.0
    # Only a very small room (an int32 product cast to f16 or f8) cannot afford a narrow element everywhere.
    kept = min(k, third // narrow**2)

    def lines(
        name: str, shape: tuple[int, ...], dtype: DType, first: int, stride: int, wide: int, count: int, widest: int = 0
    ) -> Array:
        stream = draw(name)
        every = _magnitudes(stream, dtype, 1, narrow, real)
        if kept < k and name == "a":
            found = np.zeros(shape, dtype=real)
            _spread(stream, found, kept, every)
        else:
            found = every(shape)
        own = found[..., first::stride]
        _spread(stream, own, count, _magnitudes(stream, dtype, -(-wide // 2), wide, real))
        if widest:
            _spread(stream, own, 1, _magnitudes(stream, dtype, -(-widest // 2), widest, real))
        return found

    if frame.twin:
        # Row against row: sum |a_i a_j| <= max sum a^2 (Cauchy and Schwarz), so it is squares that are budgeted.
        count = min(2, k)
        wide = max(narrow, min(_WIDE[frame.a.name], math.isqrt(2 * third // max(count, 1))))
        bound = count * wide**2 + k * narrow**2
        a = lines("a", frame.a_drawn, frame.a, 0, 1, wide, count)
        return on_grid(frame, draw, a, None, max(bound / math.sqrt(max(k, 1)), 1.0), max(bound, 1))

    bound, square = kept * narrow**2, kept * narrow_square**2
    found = []
    for name, shape, dtype, first, places in (
        ("a", frame.a_drawn, frame.a, 0, (k + 1) // 2),
        ("b", frame.b_drawn, frame.b, 1, k // 2),
    ):
        wide = max(1, min(_WIDE[dtype.name], third // narrow))
        widest = min(_WIDEST.get(dtype.name, 0), third // (2 * narrow))
        widest = widest if widest > wide and places else 0
        count = min(places, (third - widest * narrow) // (wide * narrow))
        bound += (count * wide + widest) * narrow
        square += (count * wide**2 + widest**2) * 7 / 12 * narrow_square
        found.append(lines(name, shape, dtype, first, 2, wide, count, widest))
    return on_grid(frame, draw, found[0], found[1], max(math.sqrt(square), 1.0), max(bound, 1))


# Up to this K no sum of int8 products leaves what float32 holds exactly: 2^24 / 128^2.
_SHORT_INT8: Final = 1024


def _int_2_dense(frame: Frame, draw: Draw) -> Drawn:
    """Full-range integers: half of them extremes, where a 16-bit intermediate of a pair saturates.

    Sums of both signs stay small, so where K allows more each fourth line is -128 .. -113 throughout: where two of
    them meet, the sum is beyond 2^24 (from K of about 1160 on) and a float32 on its way would show.
    """
    heavy_table = np.arange(-128, -112, dtype=np.float32)

    def lines(name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        found = draw(name).look_up(shape, _int8_table(_least(dtype), int(dtype.max_finite)))
        if frame.k > _SHORT_INT8:
            heavy = found[..., ::4, :]
            heavy[...] = draw(f"{name}-heavy").look_up(heavy.shape, heavy_table, 8)
        return found

    b = None if frame.twin else lines("b", frame.b_drawn, frame.b)
    k = max(frame.k, 1)
    return on_grid(frame, draw, lines("a", frame.a_drawn, frame.a), b, 104.0**2 * math.sqrt(k), k * 2**14)


def _one_hot(frame: Frame, draw: Draw) -> Drawn:
    """Rows of A hold a single 1; B has integers of the full significand: C repeats rows of B bit for bit."""
    real = real_of(frame)
    matrices, m, k = frame.a_shape
    a = np.zeros((matrices * m, k), dtype=real)
    rows = np.arange(matrices * m)
    # Evenly over K, so that few rows reach the head, the middle and the tail alike.
    a[rows, (draw("a").below(k) + rows * max(1, k // max(m, 1))) % k] = 1.0
    # As many bits as B has, less one where a bias shares the accumulator with a 24-bit element.
    bits = min(frame.b.precision, budget_of(frame).bit_length() - 1)
    highest = 2**bits - 1 if frame.b.is_float else int(min(frame.b.max_finite, budget_of(frame)))
    stream = draw("b")
    b = _magnitudes(stream, frame.b, 1, highest, real)(frame.b_shape)
    drawn = on_grid(frame, draw, a.reshape(frame.a_shape), b, 0.58 * highest, highest, only_b=True)
    if frame.target or frame.quantised or not frame.b.is_float:
        return drawn
    # Nothing asks for a magnitude: fixed point in (-1, 1), or less where there is less room.
    e = min(-math.ceil(math.log2(highest)), frame.exponent(0.58 * highest, highest))
    level = 0.58 * highest * 2.0**e
    return dataclasses.replace(
        drawn, b=scaled_lines(b, e), quantum=2.0**e, grain=2.0**e, level=level, units=(1.0, 2.0**e)
    )


def _integer_span(problem: Problem) -> float:
    """All integers up to this are exact in every dtype that the value goes through."""
    return 2.0 ** min(d.precision or 31 for d in narrowest(problem))


def _digit_plan(problem: Problem) -> tuple[int, int]:
    """Digits d of a column in ``k-cover`` and the number of blocks of d k's that a column carries."""
    frame = frame_of(problem)
    n, k = max(problem.shape.n, 1), max(problem.shape.k, 1)
    exact = min(_integer_span(problem) * (0.875 if frame.adds else 1.0), frame.room)
    highest = frame.b.max_finite
    for digits in range(8, 1, -1):
        blocks = -(-k // digits)
        overlap = -(-blocks // n)
        total = (4**digits - 1) // 3
        # The largest result of a kernel that doubles a k must still be exact, or the k could not be named.
        fits = min(overlap, 2) * total + 4 ** (digits - 1) <= exact and 4 ** (digits - 1) <= highest
        if fits and overlap * total <= budget_of(frame):
            return digits, overlap
    return 1, -(-k // n)


def k_cover_digits(problem: Problem) -> int:
    """How many consecutive k a column of the ``k-cover`` filling carries, each with another power of 4."""
    return _digit_plan(problem)[0]


def _block_sign(turn: int) -> int:
    """Sign of a column's ``turn``-th block: + + - + - + ..., so that sums stay at one or two blocks' worth."""
    return -1 if turn >= 2 and turn % 2 == 0 else 1


def _k_cover(frame: Frame, _draw: Draw) -> Drawn:
    """A is 1; column j of B carries 4^0, 4^1 ... at the k of block j, and of block j + N, j + 2N ... if N is small."""
    digits, overlap = _digit_plan(frame.problem)
    real, k, n = real_of(frame), frame.k, max(frame.b_shape[1], 1)
    at = np.arange(k)
    block = at // digits
    sign = np.array([_block_sign(turn) for turn in range(overlap)], dtype=real)[block // n]
    b = np.zeros(frame.b_shape, dtype=real)
    # The weight of k, in every column whose blocks include that of k; columns past the last block start over.
    blocks = -(-k // digits)
    column = np.arange(frame.b_shape[1])[:, None]
    mine = (column % blocks == block) if overlap == 1 else (column == block % n)
    np.multiply(4.0 ** (at % digits), mine, out=b[...], casting="unsafe")
    a = np.ones(frame.a_shape, dtype=real)
    # The sign depends on k alone: it can sit on either side, on one that has signs.
    if frame.a.name == "u8":
        b *= sign
    else:
        a *= sign
    total = (4**digits - 1) // 3
    # A digit must stay a digit.
    scale_a, scale = neutral_scales(frame)
    spare = min(frame.limit - overlap * total, _integer_span(frame.problem) / 8)
    return Drawn(
        a, b, float(total), 1.0, spare, scale,
        positive=True, scale_a=scale_a, units=(1.0, 1.0), reach=float(overlap * total),
    )  # fmt: skip


def decode_k(problem: Problem, column_j: int, expected: float, actual: float) -> list[tuple[int, str]]:
    """Name the k that a kernel dropped or doubled, from one wrong element of a ``k-cover`` result.

    The difference is read as a number in base 4 with digits -1, 0, 1, 2: dropped, right, doubled, tripled.

    Args:
        problem: the problem that was filled.
        column_j: the element's column.
        expected: the right value, or any value that differs from it by what the bias adds.
        actual: what the kernel gave, from the same place in the chain of the epilogue (before it, or after
            steps that left the value as it is).

    Returns:
        ``(k, "dropped" | "doubled" | "tripled")`` in the order of k; with the word ``maybe`` before it where a
        column carries several blocks of k (N < K / digits) and each of them explains the difference.  Empty
        where no set of k explains it.
    """
    difference = actual - expected
    if not math.isfinite(difference) or difference != int(difference):
        return []
    digits, overlap = _digit_plan(problem)
    k, n = problem.shape.k, problem.shape.n
    blocks = -(-k // digits)
    rest = int(difference)
    found = []
    for digit in range(digits):
        value = (rest + 1) % 4 - 1
        rest = (rest - value) // 4
        if value == 0:
            continue
        for turn in range(overlap):
            block = column_j % blocks if overlap == 1 else column_j + turn * n
            at = block * digits + digit
            if at >= k:
                continue
            word = {-1: "dropped", 1: "doubled", 2: "tripled"}.get(value * _block_sign(turn))
            if word is not None:
                found.append((at, word if overlap == 1 else f"maybe {word}"))
    return sorted(found) if rest == 0 else []


def _prime_at_most(limit: int) -> int:
    """The largest prime up to ``limit``, 1 below 2."""
    return next((p for p in range(limit, 1, -1) if all(p % q for q in range(2, math.isqrt(p) + 1))), 1)


def tile_map_period(problem: Problem) -> tuple[int, int]:
    """``(I, J)``: the ``tile-map`` filling tells i modulo I and j modulo J.

    ``(M, N)`` where the output can hold M * N distinct integers.  Otherwise primes, so that a shift by a
    tile's edge, a power of two, is never a multiple of the period.
    """
    frame = frame_of(problem)
    most = int(min(_integer_span(problem) * (0.875 if frame.adds else 1.0), frame.limit // 2, frame.room))
    # In terms of N alone, as B must not depend on M.  B holds J and j, A holds i.
    j_most = min(int(frame.b.max_finite), math.isqrt(most) + 1, 2**frame.b.precision if frame.b.is_float else most)
    j = problem.shape.n if problem.shape.n <= j_most else _prime_at_most(j_most)
    i_most = min(
        int(frame.a.max_finite) - max(frame.zero, 0),
        most // max(j, 1),
        2**frame.a.precision if frame.a.is_float else most,
    )
    rows = frame.a_shape[1]
    i = rows if rows <= i_most else _prime_at_most(i_most)
    return max(i, 1), max(j, 1)


def _tile_map(frame: Frame, draw: Draw) -> Drawn:
    """C[i, j] = (i mod I) * J + (j mod J) + 1, through the first and the last k; A is zero at the others."""
    i_period, j_period = tile_map_period(frame.problem)
    real = real_of(frame)
    a = np.zeros(frame.a_shape, dtype=real)
    a[..., 0] = np.arange(frame.a_shape[1]) % i_period
    a[..., -1] = 1.0
    b = _magnitudes(draw("b"), frame.b, 1, 1, real)(frame.b_shape)
    b[..., 0] = j_period
    b[..., -1] = np.arange(frame.b_shape[1]) % j_period + 1
    scale_a, scale = neutral_scales(frame)
    # The bias takes what tile_map_period leaves of the output's integers; level and spare know nothing of M.
    spare = min(frame.limit / 2, _integer_span(frame.problem) / 8)
    return Drawn(
        a, b, 128.0, 1.0, spare, scale,
        positive=True, scale_a=scale_a, units=(1.0, 1.0), reach=float(i_period * j_period),
    )  # fmt: skip


def decode_source(problem: Problem, value: float) -> tuple[int, int] | None:
    """Where an element of a ``tile-map`` product belongs: (i, j), each modulo :func:`tile_map_period`.

    Args:
        problem: the problem that was filled.
        value: an element of A @ B, that is without bias, factors and activation.

    Returns:
        ``None`` for a value that no element of the product has.
    """
    i_period, j_period = tile_map_period(problem)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= i_period * j_period:
        return None
    return divmod(int(value) - 1, j_period)


# -- random fillings ----------------------------------------------------------------------------------


def _integers(
    stream: Stream, shape: tuple[int, ...], dtype: DType, most: int, positive: bool, real: type[Any]
) -> Array:
    """Uniform integers of the full range, or of magnitude up to ``most``."""
    if dtype.name == "u8" or positive:
        return stream.look_up(shape, np.arange(0, min(most, int(dtype.max_finite)) + 1, dtype=real))
    low, high = -min(most, -_least(dtype)), min(most, int(dtype.max_finite))
    return stream.look_up(shape, np.arange(low, high + 1, dtype=real))


@dataclasses.dataclass(frozen=True)
class _Side:
    """How a random filling draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


_UNIFORM: Final = _Side(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
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


def _random(
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
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -_least(dtype)))
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


def _rand(frame: Frame, draw: Draw) -> Drawn:
    return _random(frame, draw, _UNIFORM)


def _rand_positive(frame: Frame, draw: Draw) -> Drawn:
    return _random(frame, draw, _POSITIVE)


def _rand_small(frame: Frame, draw: Draw) -> Drawn:
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

    return _random(frame, draw, _BINADE, exponents)


def _rand_large(frame: Frame, draw: Draw) -> Drawn:
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

    return _random(frame, draw, _BINADE, exponents)


def _rand_wide(frame: Frame, draw: Draw) -> Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    names = (frame.a.name, frame.b.name)
    binades = 64 if frame.wide else 8 if frame.quantised else 10 if "f16" in names else 32

    def lines(stream: Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    side = _Side(lines, 7 / 12 * (4 / 3) / binades)
    return _random(frame, draw, side)


# A line of -0.0 and the smallest subnormal travel along: they must not disturb anything either.
_SPECIALS: Final = ("nan", "inf", "-inf", "-0", "subnormal")


# Values of k at which B holds a zero for A's special values to meet.
_ZEROS: Final = 3


def _plain_ks(lines: Array, stream: Stream, tiny: float, count: int) -> list[int]:
    """Up to ``count`` places along K, at random, at which no line has a special value or one below ``tiny``."""
    special = ~np.isfinite(lines) | ((lines != 0) & (np.abs(lines) < tiny))
    drawn = dict.fromkeys(stream.below(lines.shape[-1]) for _ in range(2 * count + 2))
    return [k for k in drawn if not special[..., k].any()][:count]


def _range_shifts(frame: Frame, ea: int, eb: int) -> list[int]:
    """Exponents of the powers of two that A is multiplied by and B divided by, of magnitudes 2^ea and 2^eb.

    40 either way where the type has the range.  Where subnormal inputs are promised (f32 and f16, docs/oracle.md), as
    many as make one side subnormal and leave the other a factor of two below the type's largest number.
    """
    a, b = frame.a, frame.b
    if frame.problem.autocast and a.name == "f16":
        return []  # compiled code may leave the conversion out, and a subnormal loses more bits by it than u says
    subnormal = [min(eb - b.emin, a.emax - 1 - ea), -min(ea - a.emin, b.emax - 1 - eb)]
    return {"f16": subnormal, "f32": [40, -40, *subnormal], "bf16": [40, -40], "tf32": [40, -40]}.get(a.name, [])


def _face_specials(lines: Array, other: Array, stream: Stream) -> None:
    """Put a zero where a NaN or an infinity of ``lines`` meets one line of ``other``."""
    for matrix, _, k in np.argwhere(~np.isfinite(lines)).tolist():
        for facing in other[matrix : matrix + 1] if len(other) == len(lines) else other:
            finite = np.flatnonzero(np.isfinite(facing[:, k]))
            if len(finite):
                facing[finite[stream.below(len(finite))], k] = 0.0


def _specials(frame: Frame, draw: Draw) -> Drawn:
    """The ``rand`` filling with special values, each in one row of A or one column of B.

    A NaN and an infinity meet a zero in some line of the other side: the product is NaN, and a kernel that skips zeros
    loses it.  A's come to where B has zeros, as B must not depend on M.

    An infinity never meets a subnormal in one product: the result would tell whether subnormal inputs count as
    zero (Inf * 0 is NaN), and instructions for bf16 dot products (VDPBF16PS, TDPBF16PS) define that they do.

    A line of -0.0 gives zeros of known sign.  In f16 a line whose only number is the smallest subnormal gives results
    that underflow when they are stored.  At a few k a huge number meets a tiny one (:func:`_range_shifts`); in f64 at
    every k, as the bound of its reference grows with the range within a line.
    """
    movable = not (frame.twin or frame.problem.has("res-a") or frame.problem.has("again"))
    exponents = 0, 0

    def fit(rms: float, bound: float) -> tuple[int, int]:
        nonlocal exponents
        ea, eb = frame.split(frame.exponent(rms, bound))
        apart = 200 if movable and frame.a.name == frame.b.name == "f64" else 0
        exponents = ea + apart, eb - apart
        return exponents

    drawn = _random(dataclasses.replace(frame, whole=True), draw, _UNIFORM, fit)

    def plant(name: str, lines: Array, dtype: DType, at: list[int]) -> None:
        matrices, count, k = lines.shape
        known = tuple(kind for kind in _SPECIALS if dtype.has_inf or not kind.endswith("inf"))
        special = min(len(known), matrices * count // 4 or (1 if count > 1 and matrices else 0))
        if not dtype.is_float or special == 0:
            return
        stream = draw(f"{name}-specials")
        tiny = 2.0 ** (dtype.emin - dtype.precision + 1)
        values = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0": -0.0, "subnormal": tiny}
        flat = lines.reshape(matrices * count, k)
        first = stream.below(len(flat))
        kinds = known[:special] if special > 1 else (_SPECIALS[stream.below(3)] if dtype.has_inf else "nan",)
        for index, kind in enumerate(kinds):
            # Spread over the lines: neighbours in one vector register would hide a leak between them.
            row = (first + index * max(1, len(flat) // special)) % len(flat)
            if kind == "-0" or (kind == "subnormal" and dtype.name == "f16"):
                flat[row] = -0.0
            flat[row, at[stream.below(len(at))] if at else stream.below(k)] = values[kind]

    drawn.a = np.ascontiguousarray(drawn.a)
    zeros: list[int] = []
    if drawn.b is not None:
        drawn.b = np.ascontiguousarray(drawn.b)
        plant("b", drawn.b, frame.b, [])
        shifts = _range_shifts(frame, *exponents) if movable else []
        stream = draw("b-zeros")
        found = _plain_ks(drawn.b, stream, 2.0**frame.b.emin if frame.a.has_inf else 0.0, _ZEROS + len(shifts))
        zeros = found[:_ZEROS]
        for k in zeros:
            for matrix in drawn.b:
                matrix[stream.below(len(matrix)), k] = 0.0
        for k, shift in zip(found[_ZEROS:], shifts, strict=False):
            drawn.a[..., k] *= 2.0**shift
            drawn.b[..., k] *= 2.0**-shift
    plant("a", drawn.a, frame.a, zeros)
    b = drawn.a if drawn.b is None else drawn.b  # self: A meets itself
    _face_specials(b, drawn.a, draw("a-zeros"))
    for one, other in ((drawn.a, b), (b, drawn.a)):
        infinite = np.isinf(other).any(axis=tuple(range(other.ndim - 1)))  # by k
        tiny = (one != 0) & (np.abs(one) < 2.0 ** min(frame.a.emin, frame.b.emin))
        one[tiny & infinite] = 1.0
    return drawn


# -- bias and residuals -------------------------------------------------------------------------------


def _addend_exponent(level: float, quantum: float, dtype: DType) -> int:
    """Exponent of an addend's unit so that its 6 bits reach half of ``level`` and stay on the grid.

    Half, so that no column of a result is all negative and silenced by a relu.
    """
    e = round(math.log2(level / 128)) if level > 0 else 0
    if quantum:
        e = max(e, round(math.log2(quantum)))
    return max(e, 0) if not dtype.is_float else e


def bias_of(frame: Frame, drawn: Drawn, draw: Draw, exact: bool, special: bool) -> Array | None:
    """The bias.  Exact: an arithmetic progression modulo a prime, so that every shift of it shows."""
    problem = frame.problem
    shape = problem.bias_shape
    if shape is None:
        return None
    if special and problem.op.addend and problem.beta == 0.0:
        return np.full(shape, math.nan, dtype=np.float32)  # beta = 0 must not read it
    real, out, beta = real_of(frame), problem.value_dtype, abs(problem.beta) or 1.0
    # A bias without M rows belongs to the constants: one for every M.
    stream = draw("bias-m" if problem.step("bias") in (Step("bias", "m1"), Step("bias", "mn")) else "bias")
    # One element for the whole result (N = 1) must not turn all of it negative in front of a relu.
    positive = drawn.positive or math.prod(shape) == 1
    if not exact:
        size = drawn.level / max(beta, 1.0)
        values = stream.binade(shape, frame.wide) * real(2.0 ** round(math.log2(size / 2 if size else 1.0)))
        found: Array = np.abs(values) if positive else values
        return found
    unit = _addend_exponent(drawn.level / max(beta, 1.0), drawn.quantum, out)
    if beta < 1.0:
        unit = max(unit, round(math.log2(drawn.quantum)) + math.ceil(-math.log2(beta)))
    spare = drawn.spare * drawn.quantum / beta
    if frame.target:
        # The grid of a short sum is coarse: fewer different values rather than a saturated activation.
        spare = min(spare, max(2.0 * drawn.level / beta, 3.0 * drawn.quantum))
    lowest = round(math.log2(drawn.quantum))
    half = 1 if positive else 2
    while unit > lowest and 127 // half * 2.0**unit > spare:
        unit -= 1
    prime = next((p for p in (127, 61, 31, 13, 7) if p // half * 2.0**unit <= spare), 3)
    # A stride of a third to a half of the period: neighbours are far apart and differ in sign.
    start, stride = stream.below(prime), prime // 3 + stream.below(prime // 6 + 1)
    index = np.arange(math.prod(shape), dtype=np.int64)
    values = ((start + index * stride) % prime - (0 if positive else prime // 2)).astype(real)
    return scaled_lines(values.reshape(shape), unit)


# Rows of a table in which a residual is looked up: few enough that most are met several times, and no power of two.
TABLE_ROWS: Final = 11


def residuals_of(frame: Frame, drawn: Drawn, draw: Draw, exact: bool) -> list[tuple[Array, DType]]:
    """A residual for each binary step, or lines of a large one, with its dtype: that of the value it meets.

    In the product's places: of the result's shape, (N,) or (M, 1); of one that is looked up the table.
    """
    problem = frame.problem
    whole, dtype, level = drawn_shape(problem.result_shape), problem.value_dtype, drawn.level
    columns = problem.result_shape[-1]
    shapes = {"": whole, "n": (columns,), "m1": (problem.result_shape[-2], 1), "at": (TABLE_ROWS, columns)}
    quantum = drawn.quantum
    found: list[tuple[Array, DType]] = []
    for step in problem.passes:
        if step.kind is StepKind.CAST:
            dtype = step.dtype
        elif step.name == "scale":
            level, quantum = level * abs(step.numbers[0]), quantum * abs(step.numbers[0])
        elif step.name in UNIT_RANGE:
            level, quantum = 1.0, 0.0
        elif step.name == "gated":
            level, quantum = level**2 / 2.0, 0.0
        elif step.name == "clamp":
            level = min(level, max(map(abs, step.numbers)) or 1.0)
        if step.kind is not StepKind.BINARY:
            continue
        stream, shape = draw(f"r{len(found)}"), shapes[step.extent]
        if (codes := problem.residual_dtype(step, dtype)) != dtype:
            found.append((_codes(step, codes, level, drawn.positive, real_of(frame), stream, shape), codes))
            continue
        if step.name in {"add", "sub", "sum"}:
            if exact or not dtype.is_float:
                unit = _addend_exponent(level, quantum, dtype)
                most = min(63, max(3, int(2.0 * level * 2.0**-unit))) if frame.target else 63
                values = scaled_lines(_magnitudes(stream, dtype, 0, most, real_of(frame))(shape), unit)
            else:
                values = stream.binade(shape, frame.wide) * real_of(frame)(2.0 ** round(math.log2(level / 2 or 1.0)))
        elif exact or not dtype.is_float:
            small = [1, 2, 3] if step.name == "mul" else [1, 2, 4, 0.5] if dtype.is_float else [1, 2, 4]
            values = stream.look_up(shape, np.array(small + [-x for x in small], dtype=real_of(frame)))
        else:
            values = stream.binade(shape, frame.wide) * real_of(frame)(2.0)  # [1, 2): no division by nearly zero
        found.append((np.abs(values) if drawn.positive else values, dtype))
    return found


def _codes(
    step: Step, dtype: DType, level: float, positive: bool, real: type[Any], stream: Stream, shape: tuple[int, ...]
) -> Array:
    """Codes of 8 bits around a step's zero point that stand for values of up to twice ``level``."""
    scale, zero = step.numbers
    most = min(127, max(3, round(2.0 * level / scale)))
    low, high = (0, 255) if dtype.name == "u8" else (-128, 127)
    first = max(low, int(zero) - (0 if positive else most))
    return stream.look_up(shape, np.arange(first, min(high, int(zero) + most) + 1, dtype=real))


# -- the catalogue ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Filling:
    """A way to choose values.

    Attributes:
        name: what a case and the command line call it.
        help: one sentence: what it holds and what it finds.
        exact: whether products lie on a grid (:attr:`Operands.quantum` > 0).
        zero_mean: whether entries are independent with zero mean, where the result is finite.
        applies: whether it can be made for a problem and would tell anything.
    """

    name: str
    help: str
    exact: bool
    zero_mean: bool
    applies: Callable[[Problem], bool]
    _build: _Build = dataclasses.field(repr=False)


def _has_float(p: Problem) -> bool:
    return p.dtypes.a.is_float or p.dtypes.b.is_float


def _always(_: Problem) -> bool:
    return True


def _sums_fit(p: Problem, terms: int) -> bool:
    """Whether partial sums of ``terms`` ones are exact where a half type may have to hold them."""
    return not p.has("reduced") or terms <= budget_of(frame_of(p))


def _gated_by_a(p: Problem) -> bool:
    """The result is multiplied by A: zeros and tiny numbers leave nothing of it."""
    return p.has("res-a") and next(s.name for s in p.passes if s.kind is StepKind.BINARY) == "mul"


def _requantised(p: Problem) -> bool:
    """The result has 8 bits of its own scale: no integer comes through as it is."""
    return p.step("requant") is not None


def _only_floats(p: Problem) -> bool:
    """No step on the way is an integer or an 8-bit float, whose range extremes would leave."""
    return _has_float(p) and all(d.is_float and d.bits > 8 for d in narrowest(p))


# In the order of how much one of them tells alone.
FILLINGS: Final[Mapping[str, Filling]] = MappingProxyType(
    {
        f.name: f
        for f in (
            Filling(
                "int-2",
                "wide against narrow integers, exact sums: indexing, reduced precision, split-K partials, bad stores",
                True,
                False,
                _always,
                _int_2,
            ),
            Filling(
                "rand",
                "uniform in [-1, 1] with full significands (integers: full range): the everyday case",
                False,
                True,
                _always,
                _rand,
            ),
            Filling(
                "k-cover",
                "A = 1 and powers of 4 along K in B, exact: names the k that was dropped or doubled",
                True,
                False,
                lambda p: (
                    p.shape.k >= 1
                    and not (p.is_twin or saturating_steps(p) or _requantised(p))
                    and _sums_fit(p, _digit_plan(p)[1])
                ),
                _k_cover,
            ),
            Filling(
                "specials",
                "rand with NaN, infinities, -0.0 and a subnormal in single rows and columns, and huge against tiny",
                False,
                True,  # where the result is finite
                lambda p: _only_floats(p) and p.shape.k >= 1 and p.shape.m * p.shape.n >= 2,
                _specials,
            ),
            Filling(
                "tile-map",
                "C[i, j] encodes i and j, exact: tells where a misplaced element came from",
                True,
                False,
                lambda p: (
                    p.shape.k >= 2 and not (p.is_twin or saturating_steps(p) or _requantised(p)) and not _gated_by_a(p)
                ),
                _tile_map,
            ),
            Filling(
                "int-1",
                "-1, 0 and 1, exact at any K: indexing, masks, strides",
                True,
                False,
                lambda p: _sums_fit(p, p.shape.k),
                _int_1,
            ),
            Filling(
                "one-hot",
                "one 1 in each row of A and full significands in B: rows of B come out bit for bit",
                True,
                False,
                lambda p: p.shape.k >= 1 and not p.is_twin and not _gated_by_a(p),
                _one_hot,
            ),
            Filling(
                "rand-positive",
                "uniform in [0, 1], of int8 in [0, 127]: rounding that drifts, the largest sums; no signs, no relu",
                False,
                False,
                # A saturating step would see one value: a sum of positive numbers hardly varies.  Of fp8 in the bits of
                # a tensor core a long one says nothing: the hard bound grows with K, and it drifts, so no other holds.
                lambda p: (
                    (_has_float(p) or _long_integers(p))
                    and not saturating_steps(p)
                    and not (p.has("fast-acc") and p.shape.k > 4096)
                ),
                _rand_positive,
            ),
            Filling(
                "rand-wide",
                "magnitudes log-uniform over many binades: absolute tolerances and fixed-point tricks fail",
                False,
                True,
                _has_float,
                _rand_wide,
            ),
            Filling(
                "rand-large",
                "magnitudes near the upper end: overflow in a narrower intermediate",
                False,
                True,
                # Partial sums that may be stored in f16 may overflow there.
                lambda p: (
                    _only_floats(p)
                    and not saturating_steps(p)
                    and not (p.has("reduced") and p.dtypes.out.name == "f16")
                ),
                _rand_large,
            ),
            Filling(
                "rand-small",
                "magnitudes near the lower end: underflow in a narrower intermediate",
                False,
                True,
                lambda p: _only_floats(p) and not saturating_steps(p) and not _gated_by_a(p),
                _rand_small,
            ),
        )
    }
)


# Products of two numbers from which on a problem is large: M N K of some ten seconds of float64 on a CPU.
LARGE: Final = 2**33


def is_large(problem: Problem) -> bool:
    """Whether computing the whole product once more in float64 on the CPU costs too much: M N K > 2^33."""
    shape = problem.shape
    return shape.m * shape.n * shape.k * (1 if shape.batch is None else shape.batch) > LARGE


def fillings_for(problem: Problem) -> tuple[str, ...]:
    """Names of all fillings that apply, the most telling first; none where operands cannot be built."""
    try:
        frame_of(problem)
    except Unsupported:
        return ()
    found = [name for name, filling in FILLINGS.items() if filling.applies(problem)]
    if (_must_promote(problem) or _long_integers(problem)) and "rand-positive" in found:
        found.remove("rand-positive")
        found.insert(found.index("rand") + 1, "rand-positive")
    if is_large(problem) and problem.dtypes.out.precision < DTYPES["f32"].precision and "int-1" in found:
        # The one whose sums a half type holds: each element of such a result can be checked.
        found.remove("int-1")
        found.insert(0, "int-1")
    return tuple(found)


# Products of fp8 from which on a tensor core that is never promoted leaves the bound of one that is: on positive data
# it loses 3 % of a sum of 2048 (a model of Hopper's), where promoted every 128 it may lose 1.6 % and loses 0.05 %.
_LONG_FP8: Final = 2048


def _must_promote(problem: Problem) -> bool:
    """Whether a kernel that adds fp8 in few bits although it must not shows, and it does so on positive data."""
    return problem.op.name == "scaled_mm" and not problem.has("fast-acc") and problem.shape.k >= _LONG_FP8


# Products of int8 from which on the sums of positive ones, 4032 on average, pass 2^27.
_LONG_INT8: Final = 1 << 15


def _long_integers(problem: Problem) -> bool:
    """Whether positive integers tell more than random signs: sums of those stay far from the limits of int32."""
    return problem.op.name == "int_mm" and not problem.epilogue and problem.shape.k > _LONG_INT8
