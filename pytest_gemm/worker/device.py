"""Device memory that two processes see: CUDA IPC of the driver, in blocks that hold nothing else.

PyTorch's own sharing opens a whole segment of its allocator, with whatever the judge keeps beside what it shares.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections import defaultdict
from typing import Any, Final

import torch

# Bytes of a block that is kept for other operands; larger ones are given back.
MUCH: Final = 1 << 26
# Bytes of the smallest block, and what those above MUCH are multiples of.
_LEAST: Final = 1 << 21
_OUT_OF_MEMORY: Final = 2


class _Handle(ctypes.Structure):
    """What another process opens a block by: 64 bytes, which the driver takes by value."""

    _fields_ = [("data", ctypes.c_char * 64)]


@dataclasses.dataclass(frozen=True)
class Block:
    """Device memory.

    Attributes:
        number: by which the worker knows it.
        handle: by which it opens it.
        size: in bytes.
        address: in this process.
    """

    number: int
    handle: bytes
    size: int
    address: int

    @property
    def ticket(self) -> tuple[int, bytes, int]:
        """What the worker opens it by."""
        return self.number, self.handle, self.size


class Pool:
    """The judge's blocks."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: dict[int, list[Block]] = defaultdict(list)

    def take(self, size: int) -> Block:
        """A block of at least so many bytes.

        Raises:
            OSError: where the driver does not share memory.
            torch.OutOfMemoryError: when there is none.
        """
        size = max(_LEAST, 1 << (size - 1).bit_length()) if 0 < size <= MUCH else -(-max(size, 1) // _LEAST) * _LEAST
        if self._free[size]:
            return self._free[size].pop()
        address, handle = ctypes.c_uint64(), _Handle()
        if _status("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size)) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            if _status("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size)) == _OUT_OF_MEMORY:
                raise torch.OutOfMemoryError(f"CUDA error: out of memory. Tried to allocate {size} bytes to share")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return Block(next(self._numbers), bytes(handle), size, address.value)

    def give(self, block: Block) -> None:
        """Take a block back."""
        if block.size <= MUCH:
            self._free[block.size].append(block)
        else:
            _status("cuMemFree_v2", ctypes.c_uint64(block.address))

    def close(self) -> None:
        """Free all of them."""
        for blocks in self._free.values():
            for block in blocks:
                _status("cuMemFree_v2", ctypes.c_uint64(block.address))
        self._free.clear()


class Opened:
    """The worker's view of the blocks."""

    def __init__(self) -> None:
        self._addresses: dict[int, tuple[int, int]] = {}

    def address(self, number: int, handle: bytes, size: int) -> int:
        """Where a block begins in this process; raises ``OSError`` where the driver refuses to open it."""
        if number not in self._addresses:
            torch.zeros(1, device="cuda")  # the driver needs the context of this process
            address = ctypes.c_uint64()
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(1))
            self._addresses[number] = address.value, size
        return self._addresses[number][0]

    def close_large(self) -> None:
        """Close the blocks that the judge does not keep."""
        for number, (address, size) in list(self._addresses.items()):
            if size > MUCH:
                _status("cuIpcCloseMemHandle", ctypes.c_uint64(address))
                del self._addresses[number]


class _Interface:
    """Bytes on the device as PyTorch takes them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_at(address: int, size: int) -> torch.Tensor:
    """Bytes on the device as a tensor with a storage of its own."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cuda")
    return torch.as_tensor(_Interface(address, size), device="cuda")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _status(function: str, *arguments: Any) -> int:
    return int(getattr(_driver(), function)(*arguments))


def _call(function: str, *arguments: Any) -> None:
    """Call the driver; raises ``OSError`` for an error."""
    if status := _status(function, *arguments):
        raise OSError(f"{function} fails with CUDA error {status}")
