"""Products checked without being computed: ``C x`` against ``A (B x)``, in time of the order of the operands.

Two uses of one idea (Freivalds, *Probabilistic machines can use less running time*, IFIP 1977):

* :func:`times` on integers modulo the prime 2^61 - 1 with random x.  If a row of C is not that of A @ B, the two sides
  agree with a probability of 2^-61 at most: the difference is a linear form in x that is not zero, as no entry of a
  difference that occurs here reaches the prime.
* :func:`project` on floats in float64 with random signs.  What rounding may do to ``C x`` is for the caller to bound.

Both work where the tensors lie.  On a CPU they use float64 matrix products, on a CUDA device only elementwise
multiplication and sums: a library's float64 product can be emulated there, and this is the arithmetic that judges.

The CPU's part is done in one thread: it is so little that on busy cores several wait longer than they work.
Measured on two shared cores: 0.1 s instead of 8 s for 16 million elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from pytest_gemm.numerics.precision import cpu_threads

PRIME: Final = 2**61 - 1
_BITS: Final = 61

# Elements that are converted to float64 at once: on a CPU they stay in a core's cache, on a device they fill it.
_CHUNK: Final = {"cpu": 1 << 18, "cuda": 1 << 25}
# Terms of a sum that is exact in float64; longer ones are added up modulo the prime.
_TERMS: Final = 4096
_SUM_BITS: Final = 53


def _pieces(x: Tensor, terms: int) -> Iterator[tuple[tuple[slice, slice], slice, Tensor]]:
    """Parts of matrices (P, R, S), no wider than ``terms``: ((matrices, rows), columns, the part in float64).

    The float64 copies lie in memory that the next part reuses.
    """
    count, rows, columns = x.shape
    wide = min(terms, max(columns, 1))
    fit = max(1, _CHUNK.get(x.device.type, 1 << 22) // wide)
    high, many = max(1, min(rows, fit)), max(1, min(count, fit // max(rows, 1)))
    turned = x.stride(1) < x.stride(2)
    memory = torch.empty(many * high * wide, dtype=torch.float64, device=x.device)
    for place, first, left in itertools.product(range(0, count, many), range(0, rows, high), range(0, columns, wide)):
        there = slice(place, place + many), slice(first, first + high), slice(left, left + wide)
        part = x[there]
        flat = memory[: part.numel()]
        copy = flat.view(part.mT.shape).mT if turned else flat.view(part.shape)
        yield there[:2], there[2], copy.copy_(part)


def _thin(x: Tensor, vectors: Tensor, matrices: slice, columns: slice) -> Tensor:
    """x @ vectors in float64 for the columns (P, R, S) and matrices that x is a part of, and a few vectors."""
    vectors = vectors[columns] if vectors.dim() == 2 else vectors[matrices, columns]
    if x.device.type == "cpu":
        return x @ vectors
    return torch.stack([(x * vectors[..., None, :, n]).sum(-1) for n in range(vectors.shape[-1])], -1)


@cpu_threads(1)
def project(x: Tensor, vectors: Tensor) -> Tensor:
    """x @ vectors in float64, on x's device.

    Args:
        x: (P, R, S), any dtype and strides.
        vectors: (S, n) for all matrices or (P, S, n), float64, on the same device.

    Returns:
        (P, R, n).
    """
    found = torch.zeros(*x.shape[:2], vectors.shape[-1], dtype=torch.float64, device=x.device)
    for (matrices, rows), columns, part in _pieces(x, max(x.shape[2], 1)):
        found[matrices, rows] += _thin(part, vectors, matrices, columns)
    return found


@cpu_threads(1)
def norms(x: Tensor, order: int = 2) -> Tensor:
    """Norms of the rows of matrices (P, R, S), any dtype and strides: (P, R), float64, on x's device."""
    found = torch.zeros(x.shape[:2], dtype=torch.float64, device=x.device)
    for (matrices, rows), _, part in _pieces(x, max(x.shape[2], 1)):
        found[matrices, rows] = torch.linalg.vector_norm(part, order, -1)
    return found


# -- arithmetic modulo the prime -----------------------------------------------------------------------


def residue(x: Tensor) -> Tensor:
    """x modulo the prime, as int64 in [0, p); integers below 2^53 in float64, or any int64."""
    return torch.remainder(x.to(torch.int64), PRIME)


def add(u: Tensor, v: Tensor) -> Tensor:
    """u + v for residues."""
    total = u + v  # below 2^62
    return torch.where(total >= PRIME, total - PRIME, total)


def shift(u: Tensor, count: int) -> Tensor:
    """u * 2^count for residues: a rotation of 61 bits, as 2^61 is 1 modulo the prime."""
    count %= _BITS
    if count == 0:
        return u
    # What leaves an int64 on the left is cut off by the mask; both parts together are below 2^61.
    found = ((u << count) & PRIME) + (u >> (_BITS - count))
    return torch.where(found == PRIME, 0, found)


def bits_of(largest: float) -> int:
    """Bits of integers up to ``largest``."""
    return max(1, math.ceil(math.log2(max(largest, 1.0) + 1.0)))


def _limbs(v: Tensor, width: int) -> Tensor:
    """Residues (..., S) as digits of ``width`` bits, float64, (..., S, n), the lowest first."""
    mask = (1 << width) - 1
    return torch.stack([((v >> low) & mask).to(torch.float64) for low in range(0, _BITS, width)], -1)


@cpu_threads(1)
def times(x: Tensor, unit: float, bits: int, v: Tensor, faults: Tensor | None = None) -> Tensor | None:
    """``(x / unit) @ v`` modulo the prime, or ``None`` where float64 cannot hold partial sums of such integers.

    v is cut into digits so short that sums of up to 4096 terms stay below 2^53: each part is exact in float64 in any
    order of summation.

    Args:
        x: (P, R, S).  A row with an element that is no multiple of ``unit``, or larger, has an undefined result.
        unit: the grid, a power of two.
        bits: of the integers ``x / unit``: magnitudes up to 2^bits.
        v: residues, (S,) for all matrices or (P, S), on x's device.
        faults: bool, (P, R): is set for the rows that have an undefined result.

    Returns:
        Residues, (P, R).
    """
    terms = min(_TERMS, max(x.shape[2], 1))
    width = _SUM_BITS - 1 - bits - math.ceil(math.log2(terms))
    if width < 4:
        return None
    digits = _limbs(v, width)
    found = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    for (matrices, rows), columns, part in _pieces(x, terms):
        if unit != 1.0:
            part.mul_(1.0 / unit)
        # One look at the whole, and at its rows only where something is off.
        if faults is not None and not (torch.equal(part, part.round()) and float(part.abs().amax()) <= 2.0**bits):
            faults[matrices, rows] |= ~((part.abs() <= 2.0**bits) & (part == part.round())).all(-1)
            part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        sums = _thin(part, digits, matrices, columns)
        for n in range(digits.shape[-1]):
            found[matrices, rows] = add(found[matrices, rows], shift(residue(sums[..., n]), n * width))
    return found
