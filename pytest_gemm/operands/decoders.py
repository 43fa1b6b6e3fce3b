"""Input distributions from whose wrong result the cause can be read: which k, which tile, which element."""

from __future__ import annotations

import math

import numpy as np

from pytest_gemm.operands.integers import magnitudes
from pytest_gemm.operands.magnitudes import Drawn, Headroom, as_is, headroom_of, narrowest, on_grid, scaled_lines
from pytest_gemm.problem.problem import Problem


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
    n, k = max(problem.shape.n, 1), max(problem.shape.k, 1)
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
    k, lines = headroom.k, headroom.b.shape[1]
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


def decode_k(problem: Problem, column_j: int, expected: float, actual: float) -> list[tuple[int, str]]:
    """Name the k that a kernel dropped or doubled, from one wrong element of a ``k-cover`` result.

    The difference is read as a number in base 4 with digits -1, 0, 1, 2: dropped, right, doubled, tripled.

    Args:
        problem: the problem that was computed.
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
    digits, overlap = digit_plan(problem)
    k, n = problem.shape.k, problem.shape.n
    blocks = -(-k // digits)
    rest = int(difference)
    found = []
    for digit in range(digits):
        value = (rest + 1) % 4 - 1
        rest = (rest - value) // 4
        if value == 0:
            continue
        for index in range(overlap):
            block = column_j % blocks if overlap == 1 else column_j + index * n
            at = block * digits + digit
            if at >= k:
                continue
            word = {-1: "dropped", 1: "doubled", 2: "tripled"}.get(value * _block_sign(index))
            if word is not None:
                found.append((at, word if overlap == 1 else f"maybe {word}"))
    return sorted(found) if rest == 0 else []


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


def decode_source(problem: Problem, value: float) -> tuple[int, int] | None:
    """Where an element of a ``tile-map`` product belongs: (i, j), each modulo :func:`tile_map_period`.

    Args:
        problem: the problem that was computed.
        value: an element of A @ B, that is without bias, factors and activation.

    Returns:
        ``None`` for a value that no element of the product has.
    """
    i_period, j_period = tile_map_period(problem)
    if not math.isfinite(value) or value != int(value) or not 1 <= value <= i_period * j_period:
        return None
    return divmod(int(value) - 1, j_period)
