"""The bits that operands are made of, and matrices larger than what is drawn.

Values come from the raw bits of numpy's Philox generator, keyed by blake2b, and are mapped to numbers here, so that the
same key gives the same bytes on every machine and with every release of numpy.

Cost: about 10 ns per element.  Of a matrix of more than 2^22 elements only so many are drawn, and its further lines are
these, rotated along K by an even number of places, each line by another: time and memory are those of copying it, on
the device itself (see :func:`all_lines`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# Elements of a matrix that are drawn; a larger one is made of them.
_DRAWN: Final = 1 << 22
# Matrices up to which each is filled by copies of its own.
_FEW: Final = 256


class Stream:
    """Raw random bits of one operand.  No distribution method of numpy: those may change between versions."""

    def __init__(self, *key: str) -> None:
        digest = hashlib.blake2b("\0".join(key).encode(), digest_size=16).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest, "little"))

    def words(self, shape: tuple[int, ...], bits: int) -> Array:
        """Unsigned integers of 8, 16, 32 or 64 random bits each."""
        count = math.prod(shape)
        raw = np.asarray(self._bits.random_raw(-(-count * bits // 64)), dtype="<u8")
        return raw.view(f"<u{bits // 8}")[:count].reshape(shape)

    def below(self, limit: int) -> int:
        """One integer of [0, limit)."""
        return int(self.words((1,), 64)[0]) % limit

    def look_up(self, shape: tuple[int, ...], values: Array, bits: int = 16) -> Array:
        """Values selected by random words of ``bits`` bits: word w selects ``values[w % len(values)]``."""
        words = self.words(shape, bits)
        if words.size > 1 << bits:  # a full table is made faster than that many remainders are taken
            return np.asarray(np.resize(values, 1 << bits)[words])
        return np.asarray(values[words % np.asarray(len(values), dtype=np.uint32)])

    def uniform(self, shape: tuple[int, ...], wide: bool) -> Array:
        """Uniform in [-1, 1], float64 with 53 random bits when ``wide``, else float32."""
        if wide:
            return (self.words(shape, 64).view("<i8") >> 10).astype(np.float64) * 2.0**-53
        return self.words(shape, 32).view("<i4").astype(np.float32) * np.float32(2.0**-31)

    def binade(self, shape: tuple[int, ...], wide: bool) -> Array:
        """Either sign, magnitude in [0.5, 1), every bit of the significand random."""
        if wide:
            bits = self.words(shape, 64)
            return ((bits & np.uint64(0x800FFFFFFFFFFFFF)) | np.uint64(1022 << 52)).view("<f8")
        bits = self.words(shape, 32)
        return ((bits & np.uint32(0x807FFFFF)) | np.uint32(126 << 23)).view("<f4")


def drawn_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to draw for one of ``([matrices,] lines, K)``: fewer lines of a single matrix where there are too many.

    A handful of lines is drawn whole, however long they are.  Otherwise their number is odd: offsets that lose their
    upper bits are wrong by a power of two, and no two lines that lie so far apart may be made of the same one.
    """
    matrices, lines, k = (1, *shape)[-3:]
    most = (max(16, _DRAWN // max(k, 1)) - 1) | 1
    return shape if matrices * lines <= most else (1, most, k)[3 - len(shape) :]


@dataclasses.dataclass(frozen=True, eq=False)
class Lines:
    """A large stack of matrices made of few lines.

    Line i of all is drawn line ``i mod R``, rotated by ``2 ((i // R) step mod K / 2)`` places; the last element of an
    odd K stays where it is.  A rotation by an even number keeps what the distributions promise of a line as such and of
    even against odd k, and no two lines are the same up to R K / 2 of them.

    Attributes:
        drawn: the R lines, (R, K).
        shape: in memory: (matrices, lines, K), or (matrices, K, lines) where ``transposed``; or without the first.
    """

    drawn: Array
    shape: tuple[int, ...]
    transposed: bool = False

    def write(self, view: Tensor) -> bool:
        """Fill ``view``, of any device: the lines are converted to its dtype once, and copied there.

        Returns:
            Whether all of it is finite.
        """
        lines = torch.from_numpy(self.drawn).to(view.dtype).to(view.device)
        count, k = lines.shape
        even = k - k % 2
        half = max(even // 2, 1)
        step = next(s for s in range(int(0.618 * half) + 1, 2 * half + 2) if math.gcd(s, half) == 1)
        twice = torch.cat([lines[:, :even], lines[:, :even]], 1)
        to = view.mT if self.transposed else view
        to = to if to.dim() == 3 else to[None]
        if len(to) > _FEW:
            _gather(lines, twice, step, to)
            return is_finite(lines)
        for index, matrix in enumerate(to):
            first = 0
            while first < len(matrix):
                rotation, row = divmod(index * len(matrix) + first, count)
                size = min(count - row, len(matrix) - first)
                place = 2 * (rotation * step % half)
                matrix[first : first + size, :even] = twice[row : row + size, place : place + even]
                matrix[first : first + size, even:] = lines[row : row + size, even:]
                first += size
        return is_finite(lines)


def _gather(lines: Tensor, twice: Tensor, step: int, to: Tensor) -> None:
    """:meth:`Lines.write` for a stack of many matrices, where a copy for each would take seconds."""
    count, even = len(lines), twice.shape[1] // 2
    half = max(even // 2, 1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[to.element_size()]
    lines, twice, to = lines.view(bits), twice.view(bits), to.view(bits)
    matrices = max(1, _DRAWN // max(1, to[0].numel()))
    columns = torch.arange(even, device=to.device)
    for first, part in zip(range(0, len(to), matrices), to.split(matrices), strict=True):
        line = torch.arange(first * to.shape[1], (first + len(part)) * to.shape[1], device=to.device)
        place, row = 2 * (line // count * step % half), line % count
        part[..., :even] = twice[row[:, None], place[:, None] + columns].view(*part.shape[:2], even)
        part[..., even:] = lines[row, even:].view(*part.shape[:2], -1)


def all_lines(drawn: Array, shape: tuple[int, ...], transposed: bool = False) -> Array | Lines:
    """Lines that were drawn as those of ``shape``, in storage order."""
    if drawn.shape == shape:
        return drawn.swapaxes(-1, -2) if transposed else drawn
    *front, lines, k = shape
    in_memory = (*front, k, lines) if transposed else shape
    return Lines(drawn.reshape(-1, k), in_memory, transposed)


def is_finite(x: Tensor) -> bool:
    """No NaN and no infinity; torch has no isfinite of fp8."""
    if not x.dtype.is_floating_point or x.dtype == torch.float4_e2m1fn_x2:
        return True
    return bool(torch.isfinite(x.to(torch.float32) if x.element_size() == 1 else x).all())
