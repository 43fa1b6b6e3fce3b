"""Memory on the CPU that ends, or begins, where an inaccessible page begins.

A kernel that reads or writes one byte past an operand is killed by the processor at once (SIGSEGV), whatever the byte
holds.  Poison finds what a kernel *uses* of memory that is not its own; a page finds what it touches.

Operands are placed at the granularity of their elements, as views of a user's are.  What PyTorch allocates itself
(results, intermediates, packed constants) keeps the 64-byte alignment of its allocator, so up to 63
bytes may lie between such a tensor's end and the page.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gemm.operands.memory import Guarded
from pytest_gemm.operands.tensors import Operands

# Which end of a tensor is at a page.
Side = Literal["end", "begin"]
SIDES: Final[tuple[Side, ...]] = ("end", "begin")
# What lies at pages beside the operands: results and intermediates, and what a compiler packs a constant into.
ALLOCATED: Final = ("out", "packed")

_PROT_NONE: Final = 0
_ALIGNMENT: Final = 64


def _at_page(count: int, dtype: torch.dtype, side: Side, alignment: int) -> torch.Tensor:
    """``count`` elements of fresh memory between two pages that cannot be touched.

    Raises:
        OSError: when the system does not protect the pages.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    page, nbytes = mmap.PAGESIZE, count * dtype.itemsize
    room = -(-nbytes // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for address in (start, start + page + room):
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = page if side == "begin" else page + (room - nbytes) // alignment * alignment
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)  # keeps the memory alive


_ACTIVE: ContextVar[GuardPages | None] = ContextVar("pytest_gemm_pages", default=None)


def active(name: str) -> GuardPages | None:
    """The guard pages of the run, where they are for what has this name."""
    pages = _ACTIVE.get()
    return pages if pages is not None and pages.wants(name) else None


def moved(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of what PyTorch has allocated, at a page; the tensor itself where no guard pages are active for it.

    Args:
        tensor: dense, on any device.
        name: one of :data:`ALLOCATED`.
    """
    pages = active(name)
    if pages is None or tensor.device.type != "cpu" or tensor.is_mkldnn:
        return tensor
    flat = _copied(tensor, pages.side, _ALIGNMENT)
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _copied(view: torch.Tensor, side: Side, alignment: int) -> torch.Tensor:
    """The memory from the first to the last element of a view, at a page."""
    spans = ((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    extent = 1 + sum(spans) if view.numel() else 0
    flat = _at_page(extent, view.dtype, side, alignment)
    return flat.copy_(view.as_strided((extent,), (1,), view.storage_offset())) if extent else flat


@dataclasses.dataclass(frozen=True)
class GuardPages:
    """Where operands and results of a run lie.

    Attributes:
        side: which end of them is at a page.
        only: names of those that are; ``None``: all.
    """

    side: Side
    only: frozenset[str] | None = None

    def wants(self, name: str) -> bool:
        """Whether what has this name is put at a page."""
        return self.only is None or name in self.only

    def place(self, given: Operands) -> Operands:
        """The operands with the same values and strides at pages; no memory lies outside of what the program takes."""
        return given.moved(lambda old: self._placed(old) if self.wants(old.name) else old)

    @staticmethod
    def copies(given: Operands, placed: Operands) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory at a page with the memory of the same elements in the operands that were placed."""
        pairs = ((new.storage, old.whole) for old, new in zip(given.buffers, placed.buffers, strict=True))
        return [
            (there, here.as_strided((there.numel(),), (1,), here.storage_offset()))
            for there, here in pairs
            if there.data_ptr() != here.untyped_storage().data_ptr() and there.numel()
        ]

    def beside(self, placed: Operands) -> list[tuple[str, torch.Tensor]]:
        """What operands leave of their pages, and where that lies."""
        places = []
        for one in placed.buffers:
            begin, end = one.storage.data_ptr(), one.storage.data_ptr() + one.storage.nbytes
            where, first = ("before", begin - begin % mmap.PAGESIZE) if self.side == "end" else ("behind", end)
            count = (begin if self.side == "end" else -end) % mmap.PAGESIZE
            if count and self.wants(one.name):
                memory = (ctypes.c_uint8 * count).from_address(first)
                places.append((f"{one.name} ({where} its elements)", torch.frombuffer(memory, dtype=torch.uint8)))
        return places

    def _placed(self, old: Guarded) -> Guarded:
        return old.over(_copied(old.whole, self.side, 1), old.whole.storage_offset())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A block in which :func:`moved` and :func:`products` put results at pages too."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def products() -> contextlib.AbstractContextManager[object]:
    """A block in which ATen's products write their results at pages, where guard pages are active for them."""
    return _Results() if active("out") else contextlib.nullcontext()


class _Results(TorchDispatchMode):
    """Has ATen's products write their results at pages: each is computed a second time, into such memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        aten: Any = torch.ops.aten
        products = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._int_mm, aten._scaled_mm)
        self._writing = {product.default: product.out for product in products}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in self._writing or not isinstance(made, torch.Tensor):
            return made
        place = moved(made, "out")
        return made if place is made else self._writing[func](*args, **(kwargs or {}), out=place)
