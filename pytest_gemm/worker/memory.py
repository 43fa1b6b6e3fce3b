"""What a judge and a worker in another process hand each other: copies of operands in shared memory, bytes of results.

The judge's own operands are never seen by a kernel.  Of a worker's answers nothing is unpickled: what comes back is
data whose types are checked (msgspec), and bytes.
"""

from __future__ import annotations

import fcntl
import io
import math
import mmap
import os
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import psutil
import torch

from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import described
from pytest_gemm.operands.memory import Margins, same_bytes
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.worker.calls import has_bits
from pytest_gemm.worker.device import Block, Pool, bytes_at

# Where a storage begins in shared memory: as far as PyTorch aligns those that it allocates, on a device most of all.
_ALIGNED: Final = 512
# Bytes before, between and behind storages, where nothing may be written.
_MARGIN: Final = 4096
# Of memory that a kernel sees too: it cannot take pages away, on which this process would die (SIGBUS).
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
# The first words of a message: how many bytes follow, and how many of them are the first part.
_HEAD: Final = 16
# Bytes that the first part has at most; of a larger second part there has to be as much memory.
_MOST: Final = 1 << 28


# -- messages ----------------------------------------------------------------------------------------


def send(end: socket.socket, first: bytes, rest: Sequence[memoryview | bytes] = (), files: Sequence[int] = ()) -> None:
    """Send a message of two parts, with open files."""
    size = len(first) + sum(map(len, rest))
    head = size.to_bytes(8, "little") + len(first).to_bytes(8, "little")
    socket.send_fds(end, [head], files)
    for part in (first, *rest):
        end.sendall(part)


def receive(end: socket.socket, limit: float = 0.0, files: int = 0) -> tuple[bytes, bytearray, list[int]]:
    """A message as :func:`send` sent it.

    Args:
        end: of the socket.
        limit: seconds until all of it has to be there; 0: none.
        files: how many open files may come along; further ones are closed.

    Raises:
        EOFError: when the other end is closed.
        TimeoutError: when the limit runs out.
        ValueError: for a size that no message has.
    """
    until = time.monotonic() + limit
    end.settimeout(limit or None)
    head, opened, _, _ = socket.recv_fds(end, _HEAD, files)  # as a whole, as it was sent
    size, first = (int.from_bytes(one, "little") for one in (head[:8], head[8:]))
    rest = size - first
    if not head:
        raise EOFError
    too_large = first > _MOST or (rest > _MOST and rest > psutil.virtual_memory().available)
    if len(head) < _HEAD or rest < 0 or too_large:
        raise ValueError(f"a message of {size} bytes, the first {first} of them words")
    data, done = bytearray(size), 0
    while done < size:
        if limit and (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        end.settimeout(left if limit else None)
        if not (count := end.recv_into(memoryview(data)[done:])):
            raise EOFError
        done += count
    return bytes(data[:first]), data[first:], opened


# -- operands ------------------------------------------------------------------------------------------


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


class _Pickler(pickle.Pickler):
    """Writes tensors as views of numbered storages, and registered backends by name."""

    def __init__(self, file: io.BytesIO, backends: Mapping[int, str]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._backends = backends
        self._seen: dict[tuple[str, int], int] = {}
        self.storages: list[torch.Tensor] = []

    def reducer_override(self, one: Any) -> Any:
        """How a tensor or a backend is written; anything else as always."""
        if isinstance(one, torch.Tensor):
            place = one.device.type, one.untyped_storage().data_ptr()
            if place not in self._seen:
                self._seen[place] = len(self.storages)
                self.storages.append(_bytes_of(one))
            view = (one.dtype, tuple(one.shape), one.stride(), one.storage_offset())
            return _viewed, (self._seen[place], *view, one.is_conj(), one.is_neg(), one.requires_grad)
        name = self._backends.get(id(one))
        return NotImplemented if name is None else (_registered, (name,))


# What a worker unpickles with: the registered backends, and the storages of the operands at hand.
_BACKENDS: dict[str, Backend] = {}
_STORAGES: list[torch.Tensor] = []


def _registered(name: str) -> Backend:
    return _BACKENDS[name]


def _viewed(storage: int, dtype: torch.dtype, shape: Any, stride: Any, offset: int, *bits: bool) -> torch.Tensor:
    conj, neg, grad = bits
    lies = _STORAGES[storage]
    x = torch.empty(0, dtype=dtype, device=lies.device).set_(lies.untyped_storage(), offset, shape, stride)
    x = x.conj() if conj else x
    return (torch._neg_view(x) if neg else x).requires_grad_(grad)


def pickled(one: object, backends: Mapping[int, str]) -> bytes:
    """A question without tensors."""
    file = io.BytesIO()
    try:
        _Pickler(file, backends).dump(one)
    except Exception as error:  # pickle raises whatever an object's own methods do
        text = f"what is not registered has to be pickled for the process of the kernel: {described(error)}"
        raise Unsupported("not-sent", text, "register the backend, or --gemm-set=run.inline=yes") from None
    return file.getvalue()


def unpickled(data: bytes, backends: Mapping[str, Backend]) -> Any:
    """What :func:`pickled` wrote, in the worker."""
    _BACKENDS.update(backends)
    return pickle.loads(data)


class Arena:
    """Copies of the storages of operands in memory that a worker sees too.

    Args:
        given: the operands, which this keeps alive.
        before: other operands whose storages these may lie in; then they have the same memory here as well.
        pool: blocks on the device; ``None``: what lies there is copied through memory of the CPU.

    Attributes:
        before: the same; ``None`` where the memory is new.
        file: descriptor of the memory.
        size: of it, in bytes.
        block: the memory on the device, where there is any.
        places: where each storage lies, where it begins, and how many bytes it has.
        skeleton: the operands without what is in memory.
    """

    def __init__(self, given: Operands, before: Sequence[Arena] = (), pool: Pool | None = None) -> None:
        self.given = given
        file = io.BytesIO()
        pickler = _Pickler(file, {})
        pickler.dump(given)
        self.skeleton = file.getvalue()
        self._originals = pickler.storages
        self.places: list[Place] = []
        ends = {True: 0, False: 0}
        for one in self._originals:
            on_device = "staged" if pool is None else "device"
            where = on_device if one.is_cuda else "host"
            shared = where == "device"
            begin = -(-(ends[shared] + _MARGIN) // _ALIGNED) * _ALIGNED
            self.places.append((where, begin, one.numel()))
            ends[shared] = begin + one.numel() + _MARGIN
        self.size = max(ends[False], 1)
        self.block: Block | None = None
        self._pool = pool
        self.before = next((one for one in before if one._is_of(self._originals)), None)
        if self.before is None:
            self.file = os.memfd_create("operands", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.file, self.size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            if ends[True] and pool is not None:
                self.block = pool.take(ends[True])
            address = 0 if self.block is None else self.block.address
            self._copies = mapped(self.file, self.size, self.places, address)
            # Of each storage what lies before it and behind it; apart for the two kinds of memory.
            self._margins = []
            for shared in (True, False):
                numbers = [i for i, (where, *_) in enumerate(self.places) if (where == "device") is shared]
                own = [self.places[i] for i in numbers]
                beside = [(w, place, _MARGIN) for w, begin, n in own for place in (begin - _MARGIN, begin + n)]
                if beside:
                    self._margins.append((numbers, Margins(mapped(self.file, self.size, beside, address))))
        else:
            self.file, self._copies, self._margins = os.dup(self.before.file), self.before._copies, self.before._margins
        buffers = {one.storage.untyped_storage().data_ptr(): one for one in given.buffers}
        known = [buffers.get(one.untyped_storage().data_ptr()) for one in self._originals]
        self._names = ["an operand" if one is None else one.name for one in known]
        self._begins = [0 if one is None else one.view.storage_offset() * one.view.element_size() for one in known]

    def _is_of(self, storages: Sequence[torch.Tensor]) -> bool:
        """Whether these are the storages that it has copies of."""
        pairs = ([(x.data_ptr(), x.numel()) for x in ones] for ones in (self._originals, storages))
        return len(set(map(tuple, pairs))) == 1

    def write(self) -> None:
        """Copy what the operands are now."""
        for copy, original in zip(self._copies, self._originals, strict=True):
            copy.copy_(original)
        for _, margins in self._margins:
            margins.fill()
        if any(one.is_cuda for one in self._originals):
            torch.cuda.synchronize()

    def written(self) -> tuple[str, ...]:
        """Names of the operands whose copies, or what lies beside them, are not what they were, with the first byte.

        A given result may be, not what lies beside it.
        """
        places = []
        for number, (copy, original) in enumerate(zip(self._copies, self._originals, strict=True)):
            if self._names[number] != "out" and not same_bytes(copy, there := original.to(copy.device)):
                places.append((number, int((copy != there).byte().argmax())))
        for numbers, margins in self._margins:
            if (byte := margins.written()) is not None:
                part, byte = divmod(byte, _MARGIN)
                number = numbers[part // 2]
                places.append((number, byte + (self.places[number][2] if part % 2 else -_MARGIN)))
        text = "{} (byte {} from its first element)"
        return tuple(text.format(self._names[number], byte - self._begins[number]) for number, byte in places)

    def beside_out_intact(self) -> bool:
        """Whether all that lies around the elements of a given result is as it was."""
        copies = dict(zip(self._names, self._copies, strict=True))
        given = [one for one in self.given.buffers if one.name == "out"]
        return all(one.over(copies["out"].view(one.storage.dtype), 0).guards_intact() for one in given)

    def close(self) -> None:
        """Give the memory back, when no tensor over it is left."""
        os.close(self.file)
        if self.block is not None and self._pool is not None:
            self._pool.give(self.block)

    @property
    def bytes(self) -> int:
        """How much memory it has."""
        return self.size + (0 if self.block is None else self.block.size)


# Where a storage lies (``host``, ``device``, or ``staged``: on the device, handed over through the CPU's memory), where
# it begins there, and how many bytes it has.
Place = tuple[str, int, int]


def mapped(file: int, size: int, places: Sequence[Place], block: int = 0) -> list[torch.Tensor]:
    """The storages in shared memory, as bytes; ``block`` is the address of the memory on the device."""
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) != _SEALS or os.fstat(file).st_size != size:
        raise ValueError("memory of operands that is not sealed, or of another size")
    memory = mmap.mmap(file, size)
    found = []
    for where, first, count in places:
        if where == "device":
            found.append(bytes_at(block + first, count))
        elif count:
            found.append(torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=first))
        else:
            found.append(torch.empty(0, dtype=torch.uint8))
    return found


def operands_in(skeleton: bytes, storages: Sequence[torch.Tensor]) -> Operands:
    """The operands of an :class:`Arena`, in the worker."""
    _STORAGES[:] = storages
    found = pickle.loads(skeleton)
    assert isinstance(found, Operands)
    return found


# -- results -------------------------------------------------------------------------------------------


class Form(msgspec.Struct, frozen=True):
    """What a result is, beside its bytes.

    Attributes:
        dtype, layout, device: as PyTorch spells them.
        shape: its sizes.
        bits: whether its elements can be had, in the order of their indices.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    device: str
    bits: bool

    @property
    def size(self) -> int:
        """How many bytes follow; raises ``ValueError`` where there is no such type."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or any(n < 0 for n in self.shape):
            raise ValueError(f"no shape or type: {self.shape} of {self.dtype}")
        return math.prod(self.shape) * dtype.itemsize if self.bits else 0


def forms(results: Sequence[torch.Tensor]) -> tuple[list[Form], list[torch.Tensor]]:
    """What results are, and the bytes of those that have any."""
    found, data = [], []
    for one in results:
        bits = has_bits(one)
        dtype, layout = (str(x).removeprefix("torch.") for x in (one.dtype, one.layout))
        found.append(Form(dtype, tuple(one.shape), layout, str(one.device), bits))
        if bits:
            flat = one.contiguous().view(-1) if one.numel() else one.new_empty(0)
            data.append(flat.view(torch.uint8))
    return found, data


def sent(data: Sequence[torch.Tensor]) -> list[memoryview]:
    """Bytes as they go through a socket."""
    return [one.cpu().numpy().data for one in data]


def results_of(found: Sequence[Form], data: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results; of one that has no elements in memory a tensor of its kind.

    Args:
        found: what they are.
        data: their bytes, on the CPU or on the device.

    Raises:
        ValueError: where the bytes are not those of the forms.
    """
    sizes = [one.size for one in found]
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes, and {sum(sizes)} announced")
    made = []
    for one, part in zip(found, data.split(sizes), strict=True):
        is_meta = not one.bits and one.layout == "strided"
        layout, device = getattr(torch, one.layout), "meta" if is_meta else one.device if one.bits else "cpu"
        x = torch.empty(one.shape, dtype=getattr(torch, one.dtype), layout=layout, device=device)
        if one.bits != has_bits(x):  # its elements would be whatever this process had there
            raise ValueError(f"no {one.layout} tensor on {one.device}")
        if one.size:
            x.view(-1).view(torch.uint8).copy_(part)
        made.append(x)
    return tuple(made)
