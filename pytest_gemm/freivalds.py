"""Products checked without being computed: ``C x`` against ``A (B x)``, in time of the order of the operands.

Two uses of one idea (Freivalds, *Probabilistic machines can use less running time*, IFIP 1977):

* :func:`times` on integers modulo the prime 2^61 - 1 with random x.  If a row of C is not that of A @ B, the two sides
  agree with a probability of 2^-61 at most: the difference is a linear form in x that is not zero, as no entry of a
  difference that occurs here reaches the prime.
* :func:`project` on floats in float64 with random signs.  What rounding may do to ``C x`` is bounded by whoever asks.

Both work where the tensors lie.  On a CPU they use float64 matrix products, on a CUDA device only elementwise
multiplication and sums: a library's float64 product can be emulated there, and this is the arithmetic that judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch

__all__ = ["PRIME", "add", "bits_of", "grid_faults", "project", "residue", "subtract", "times"]

PRIME: Final = 2**61 - 1
_BITS: Final = 61

# Elements that are converted to float64 at once: on a CPU they stay in a cache, on a device they fill it.
_CHUNK: Final = {"cpu": 1 << 18, "cuda": 1 << 25}
# Terms of a sum that is exact in float64; longer ones are added up modulo the prime.
_TERMS: Final = 4096
_SUM_BITS: Final = 53


def _pieces(x: torch.Tensor, terms: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Parts (rows, columns, x[rows, columns]) of a matrix, no wider than ``terms``."""
    rows, columns = x.shape
    chunk = _CHUNK.get(x.device.type, 1 << 22)
    wide = min(terms, max(columns, 1))
    high = max(1, chunk // wide)
    for first in range(0, rows, high):
        for left in range(0, columns, wide):
            there = slice(first, min(first + high, rows)), slice(left, min(left + wide, columns))
            yield *there, x[there]


def _thin(x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """x @ vectors in float64 for a few vectors (S, n); of a float64 x that may be written to."""
    if x.device.type == "cpu":
        return x @ vectors
    return torch.stack([(x * vectors[:, n]).sum(1) for n in range(vectors.shape[1])], 1)


def project(
    x: torch.Tensor, vectors: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """``change(x) @ vectors`` in float64, on x's device.

    Args:
        x: (R, S), any dtype and strides.
        vectors: (S, n), float64, on the same device.
        change: applied to float64 copies of parts of x, elementwise.
    """
    found = torch.zeros(x.shape[0], vectors.shape[1], dtype=torch.float64, device=x.device)
    for rows, columns, part in _pieces(x, x.shape[1]):
        wide = part.to(torch.float64)
        found[rows] += _thin(wide if change is None else change(wide), vectors[columns])
    return found


# -- arithmetic modulo the prime -----------------------------------------------------------------------


def residue(x: torch.Tensor) -> torch.Tensor:
    """x modulo the prime, as int64 in [0, p); integers below 2^53 in float64, or any int64."""
    return torch.remainder(x.to(torch.int64), PRIME)


def add(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """u + v for residues."""
    total = u + v  # below 2^62
    return torch.where(total >= PRIME, total - PRIME, total)


def subtract(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """u - v for residues."""
    return torch.where(u >= v, u - v, u - v + PRIME)


def shift(u: torch.Tensor, count: int) -> torch.Tensor:
    """u * 2^count for residues: a rotation of 61 bits, as 2^61 is 1 modulo the prime."""
    count %= _BITS
    if count == 0:
        return u
    # What leaves an int64 on the left is cut off by the mask anyway; both parts together are below 2^61.
    found = ((u << count) & PRIME) + (u >> (_BITS - count))
    return torch.where(found == PRIME, 0, found)


def bits_of(largest: float) -> int:
    """Bits of integers up to ``largest``."""
    return max(1, math.ceil(math.log2(max(largest, 1.0) + 1.0)))


def _limbs(v: torch.Tensor, width: int) -> torch.Tensor:
    """Residues (S,) as digits of ``width`` bits, float64, (S, n), the lowest first."""
    mask = (1 << width) - 1
    return torch.stack([((v >> low) & mask).to(torch.float64) for low in range(0, _BITS, width)], 1)


def times(x: torch.Tensor, unit: float, bits: int, v: torch.Tensor) -> torch.Tensor | None:
    """``(x / unit) @ v`` modulo the prime, or ``None`` where float64 cannot hold partial sums of such integers.

    v is cut into digits so short that sums of up to 4096 terms stay below 2^53: each part is exact in float64 in any
    order of summation.

    Args:
        x: (R, S), multiples of ``unit``.  A row with another element, see :func:`grid_faults`, has an undefined result.
        unit: the grid, a power of two.
        bits: of the integers ``x / unit``.
        v: residues, (S,), on x's device.

    Returns:
        Residues, (R,).
    """
    terms = min(_TERMS, max(x.shape[1], 1))
    width = _SUM_BITS - 1 - bits - math.ceil(math.log2(terms))
    if width < 4:
        return None
    digits = _limbs(v, width)
    found = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    for rows, columns, part in _pieces(x, terms):
        wide = part.to(torch.float64)
        if unit != 1.0:
            wide = wide.mul_(1.0 / unit) if wide is not part else wide * (1.0 / unit)
        sums = _thin(wide, digits[columns])
        for n in range(digits.shape[1]):
            found[rows] = add(found[rows], shift(residue(sums[:, n]), n * width))
    return found


def grid_faults(x: torch.Tensor, unit: float, bits: int) -> torch.Tensor:
    """Rows of (R, S) with an element that is no multiple of ``unit``, or larger than ``2^bits`` of it; NaN included."""
    found = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    for rows, _, part in _pieces(x, x.shape[1]):
        narrow = part.dtype not in (torch.float64, torch.int32) and 2.0**-60 < unit < 2.0**60
        real = part.to(torch.float32 if narrow else torch.float64) * (1.0 / unit)
        # One look at the whole, and at its rows only where something is off.
        if torch.equal(real, real.round()) and float(real.abs().amax()) <= 2.0**bits:
            continue
        found[rows] |= ~((real.abs() <= 2.0**bits) & (real == real.round())).all(1)
    return found
