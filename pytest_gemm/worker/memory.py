"""What a judge and a worker in another process hand each other: copies of operands in shared memory, bytes of results.

The judge's own operands are never seen by a kernel.  Of a worker's answers nothing is unpickled: what comes back is
data whose types are checked (msgspec), and bytes.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import described
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.worker.calls import has_bits
from pytest_gemm.worker.device import Block, Pool, bytes_at

# Where a storage begins in shared memory: as far as PyTorch aligns those that it allocates, on a device most of all.
_ALIGNED: Final = 512
# The first words of a message: how many bytes follow, and how many of them are the first part.
_HEAD: Final = 16


# -- messages ----------------------------------------------------------------------------------------


def send(end: socket.socket, first: bytes, rest: Sequence[memoryview | bytes] = (), files: Sequence[int] = ()) -> None:
    """Send a message of two parts, with open files."""
    size = len(first) + sum(map(len, rest))
    head = size.to_bytes(8, "little") + len(first).to_bytes(8, "little")
    socket.send_fds(end, [head], files)
    for part in (first, *rest):
        end.sendall(part)


def receive(end: socket.socket) -> tuple[bytes, bytearray, list[int]]:
    """A message as :func:`send` sent it.

    Raises:
        EOFError: when the other end is closed.
        TimeoutError: when the socket's limit runs out.
    """
    head, files, _, _ = socket.recv_fds(end, _HEAD, 16)
    while len(head) < _HEAD:
        if not (more := end.recv(_HEAD - len(head))):
            raise EOFError
        head += more
    data = bytearray(int.from_bytes(head[:8], "little"))
    view, done = memoryview(data), 0
    while done < len(data):
        if not (count := end.recv_into(view[done:])):
            raise EOFError
        done += count
    first = int.from_bytes(head[8:], "little")
    return bytes(view[:first]), data[first:], files


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
            self.places.append((where, ends[shared], one.numel()))
            ends[shared] += -(-one.numel() // _ALIGNED) * _ALIGNED
        self.size = max(ends[False], 1)
        self.block: Block | None = None
        self._pool = pool
        self.before = next((one for one in before if one._is_of(self._originals)), None)
        if self.before is None:
            self.file = os.memfd_create("operands", os.MFD_CLOEXEC)
            os.ftruncate(self.file, self.size)
            if ends[True] and pool is not None:
                self.block = pool.take(ends[True])
            self._copies = mapped(self.file, self.size, self.places, 0 if self.block is None else self.block.address)
        else:
            self.file, self._copies = os.dup(self.before.file), self.before._copies
        names = {one.storage.untyped_storage().data_ptr(): one.name for one in given.buffers}
        self._names = [names.get(one.untyped_storage().data_ptr(), "an operand") for one in self._originals]

    def _is_of(self, storages: Sequence[torch.Tensor]) -> bool:
        """Whether these are the storages that it has copies of."""
        pairs = ([(x.data_ptr(), x.numel()) for x in ones] for ones in (self._originals, storages))
        return len(set(map(tuple, pairs))) == 1

    def write(self) -> None:
        """Copy what the operands are now."""
        for copy, original in zip(self._copies, self._originals, strict=True):
            copy.copy_(original)
        if any(one.is_cuda for one in self._originals):
            torch.cuda.synchronize()

    def written(self) -> tuple[str, ...]:
        """Names of the operands whose copies are not what they were; a given result may be."""
        storages = zip(self._names, self._copies, self._originals, strict=True)
        return tuple(
            name
            for name, copy, original in storages
            if name != "out" and not torch.equal(copy, original.to(copy.device))
        )

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
    made, begin = [], 0
    for one in found:
        dtype = getattr(torch, one.dtype, None)
        if not isinstance(dtype, torch.dtype) or any(n < 0 for n in one.shape):
            raise ValueError(f"no such tensor: {one}")
        if not one.bits:
            made.append(_without_bits(one, dtype))
            continue
        x = torch.empty(one.shape, dtype=dtype, device=one.device)
        size = x.numel() * x.element_size()
        if begin + size > len(data):
            raise ValueError("bytes of a result are missing")
        if size:
            x.view(-1).view(torch.uint8).copy_(data[begin:][:size])
        made.append(x)
        begin += size
    return tuple(made)


def _without_bits(one: Form, dtype: torch.dtype) -> torch.Tensor:
    if one.layout == "sparse_coo":
        return torch.zeros(one.shape, dtype=dtype).to_sparse()
    if one.layout != "strided":
        return torch.empty(one.shape, dtype=dtype, layout=getattr(torch, one.layout))
    return torch.empty(one.shape, dtype=dtype, device="meta")
