"""Memory around a tensor: poison where a kernel has no business to read, and proof that nothing was written.

Every tensor is a window into a larger storage.  Each byte of that storage that is not the tensor's is poison: NaN,
because finite poison times a masked zero hides a one-sided mask, or an extreme number where there is no NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_gemm.core.case_id import Device
from pytest_gemm.operands import views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.random_streams import Array, Lines, Stream, is_finite
from pytest_gemm.problem.dtypes import DType
from pytest_gemm.problem.ops.microscaled import MAGNITUDES

# Bytes of poison before and after the data; a multiple of 64, so the data stays aligned, and wide enough for
# the widest vector that a kernel loads past an end (a warp's 32 x 16 bytes).
_BAND_BYTES: Final = 512
# Bytes from which a storage on a device is hashed where it lies, by :func:`_checksum`.
_LARGE_BYTES: Final = 1 << 24
# Elements between two rows of a padded matrix: 8 keeps 16-byte alignment of a row for 2-byte types.  fp8 takes 16, as
# no kernel multiplies it unaligned.
_PAD: Final = 8
_PAD_FP8: Final = 16
# And to what a row is padded so that each begins where a hint of alignment says.
_ALIGNED: Final = 64


def _poison(count: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """``count`` poisoned elements: NaN, or of types that have none, the two extremes in turn.

    Unsigned ones alternate between the two largest, as 0 is harmless.
    """
    if dtype == torch.float4_e2m1fn_x2:
        # It has no NaN: bytes of its largest numbers, 6 and -6.
        return torch.full((count,), 0xF7, dtype=torch.uint8, device=device).view(dtype)
    flat = torch.empty(count, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return flat.fill_(math.nan)
    info = torch.iinfo(dtype)
    flat[0::2] = info.min if info.min < 0 else info.max - 1
    flat[1::2] = info.max
    return flat


def poison_of(dtype: torch.dtype) -> float | int:
    """What a result holds before it is written: NaN, or the largest integer."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


@dataclasses.dataclass(frozen=True, eq=False)
class Guarded:
    """A tensor inside a larger storage whose other bytes are poison.

    Attributes:
        name: which operand it is: ``a b out offs bias r0 i0 scale scale_a zero_a scale_b zero_b quantisation``.
        storage: the whole memory as a flat tensor, guard bands included.
        view: the strided window of the data, not expanded over a batch.
        whole: the tensor that the program takes, where ``view`` is a view that it makes; otherwise ``view``.
        finite: whether the view holds no NaN and no infinity.
    """

    name: str
    storage: Tensor
    view: Tensor
    whole: Tensor
    finite: bool

    def clone(self) -> Guarded:
        """The same bytes in fresh memory: values, strides, offset and poison."""
        return self.over(self.storage.clone(), 0)

    def over(self, storage: Tensor, first: int | torch.SymInt) -> Guarded:
        """The same geometry over another storage, which begins at element ``first`` of this one."""
        view, whole = (
            storage.as_strided(x.size(), x.stride(), x.storage_offset() - first) for x in (self.view, self.whole)
        )
        return dataclasses.replace(self, storage=storage, view=view, whole=whole)

    def guards_intact(self) -> bool:
        """Whether every byte outside the view still is the poison that was put there."""
        expected = _poison(self.storage.numel(), self.storage.dtype)
        window = expected.as_strided(self.view.size(), self.view.stride(), self.view.storage_offset())
        window.copy_(self.view)
        return bool(np.array_equal(_bytes(expected), _bytes(self.storage)))


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Whether flat tensors of bytes are equal, compared eight at once where their number allows it."""
    kind = torch.uint8 if len(x) % 8 else torch.int64
    return torch.equal(x.view(kind), y.view(kind))


# What margins hold in turn: NaN in types of two and four bytes.  No byte is the same in both, so a kernel that always
# writes the same value is seen in one of two calls.
_PATTERNS: Final = ((0xC1, 0x7F), (0x9E, 0xFF))


@functools.lru_cache(maxsize=64)
def _patterns(device: str, count: int) -> tuple[Tensor, ...]:
    kinds = (torch.tensor(one, dtype=torch.uint8, device=device) for one in _PATTERNS)
    return tuple(one.repeat(-(-count // 2))[:count] for one in kinds)


class Margins:
    """Memory beside operands that belongs to none: filled before a call, looked at after it.

    Args:
        parts: its bytes, on one device, the same number in each.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        self._patterns = list(_patterns(str(parts[0].device), sum(map(len, parts))))

    def fill(self) -> None:
        """Write the other pattern."""
        self._patterns.reverse()
        torch._foreach_copy_(self._parts, self._patterns[0].split(len(self._parts[0])))

    def written(self) -> int | None:
        """The first byte that was written to, counted through all parts; ``None`` for none."""
        now = torch.cat(self._parts)
        return None if same_bytes(now, self._patterns[0]) else int((now != self._patterns[0]).byte().argmax())


def digest(flat: Tensor) -> str:
    """Hash of every byte of a flat tensor."""
    if flat.numel() * flat.element_size() >= _LARGE_BYTES and flat.device.type != "cpu":
        return _checksum(flat)  # rather than through the host's bus
    return hashlib.blake2b(_bytes(flat).data, digest_size=16).hexdigest()


def _bytes(flat: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a flat tensor, on the CPU; bits, so that NaN equals NaN."""
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).cpu().numpy()
    return found


# Words of 32 bits that share a sum, and the odd number that the multipliers are powers of (of the golden ratio's bits).
_ROW_WORDS: Final = 1 << 16
_CHUNK_WORDS: Final = 1 << 22


@functools.lru_cache(maxsize=2)
def _multipliers(device: str) -> Tensor:
    """Random multipliers of 64 bits, for words of 32: a multilinear hash."""
    words = Stream("checksum").words((_ROW_WORDS,), 64)
    return torch.from_numpy(words.view("<i8").astype(np.int64)).to(device)


def _checksum(flat: Tensor) -> str:
    """Hash of a large storage, computed where it lies in about the time of reading it.

    The storage is cut into rows of 2^16 words w of 32 bits; of each row ``sum w_i r_i mod 2^64`` with random r is kept,
    a multilinear hash: two different rows agree with a probability of at most 2^-32, over the r.  The sums are hashed
    by blake2b.
    """
    raw = flat.view(torch.uint8)
    whole = raw.numel() // 4 * 4
    words, rest = raw[:whole].view(torch.int32), raw[whole:]
    found = hashlib.blake2b(_bytes(rest).tobytes(), digest_size=16)
    r = _multipliers(str(flat.device))
    for first in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[first : first + _CHUNK_WORDS]
        full = chunk.numel() // _ROW_WORDS * _ROW_WORDS
        sums = [(chunk[:full].view(-1, _ROW_WORDS) * r).sum(1)]
        if full < chunk.numel():
            tail = chunk[full:]
            sums.append((tail * r[: tail.numel()]).sum().reshape(1))
        found.update(_bytes(torch.cat(sums)).tobytes())
    return found.hexdigest()


def packed(values: Array) -> npt.NDArray[np.uint8]:
    """Lines of f4 two in a byte, each the number that is nearest, and of two the one whose code is even."""
    magnitudes = np.array(MAGNITUDES)
    edges = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(values)
    # Counting edges in bytes is faster than a search: there are 7.
    low, high = (sum(side(size, edge).view(np.uint8) for edge in edges) for side in (np.greater, np.greater_equal))
    codes = np.where(low % 2 == 0, low, high) | (np.signbit(values).view(np.uint8) << 3)
    both: npt.NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return both


def _stored_as(values: npt.NDArray[Any], element: torch.dtype) -> torch.dtype:
    """The type in which values are copied: that of bytes that are packed already is the element's."""
    return element if values.dtype == np.uint8 and element.itemsize == 1 else torch.from_numpy(values).dtype


def guarded(
    name: str,
    values: Array | Lines,
    dtype: DType,
    device: Device,
    *,
    padded: bool = False,
    aligned: bool = False,
    offset: bool = False,
    apart: bool = False,
    middle: bool = False,
    cut: str = "",
    matrix: bool = False,
) -> Guarded:
    """``values`` in row-major order between two guard bands.

    Args:
        name: of the operand.
        values: in the order in which they are stored.
        dtype: of the tensor.
        device: where it lies.
        padded: there are poisoned elements behind each row.
        aligned: so many that a row begins at a multiple of 64 elements.
        offset: it begins an element past an aligned address.
        apart: each matrix begins 64-byte aligned, as a tensor of its own would.
        middle: the first dimension lies between the two others in memory.
        cut: the view that the program makes of a larger tensor, see :meth:`Facts.view_of`.
        matrix: the tensor of the program is the only one of the first dimension.
    """
    if dtype.is_packed:
        assert not isinstance(values, Lines)
        values = packed(values)
    element, shape = torch_dtype(dtype), values.shape
    gap = (_PAD_FP8 if dtype.bits <= 8 and dtype.is_float else _PAD) if padded else 0
    gap = _ALIGNED - shape[-1] % _ALIGNED if aligned else gap
    gap = 2 * views.lead(dtype) if cut == "sliced" else gap
    strides = [1] * len(shape)
    step = 2 if cut == "strided" else 1
    for dim in (2, 0, 1) if middle else reversed(range(len(shape))):
        unit = 64 // element.itemsize if apart and dim == 0 else 1
        step = -(-step // unit) * unit
        strides[dim] = step
        # A zero-size dimension keeps a stride of at least 1, as torch.empty has it.
        step *= max(shape[dim], 1) + (gap if dim == len(shape) - 1 else 0)
    band = _BAND_BYTES // element.itemsize
    first = band + offset
    if cut == "sliced":
        first += views.lead(dtype)
    elif cut == "tail":
        first, step = first + strides[matrix], step + strides[matrix]
    if isinstance(values, Lines):
        flat = _poison(first + step + band, element, device)
        finite = values.write(flat.as_strided(shape, strides, first))
    else:
        flat = _poison(first + step + band, element)
        flat.as_strided(shape, strides, first).copy_(torch.from_numpy(values).view(_stored_as(values, element)))
        flat = flat.to(device)
        finite = is_finite(flat.as_strided(shape, strides, first))
    view = flat.as_strided(shape, strides, first)
    return Guarded(name, flat, view, views.whole_of(view, cut, dtype, offset, dim=int(matrix)), finite)
