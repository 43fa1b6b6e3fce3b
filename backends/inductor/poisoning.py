"""Memory that a compiled program gets: poisoned, so that what is not written is seen, with checked bands around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final
from weakref import ref

import torch

from pytest_gemm.backends.inductor.hooks import patched
from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.operands import guard_pages

# Every byte of memory that a generated program gets: NaN as a float of any width, -1 as an integer.
_POISON: Final = 0xFF
# Bytes of poison before and after what a program gets: a multiple of every alignment that a kernel is compiled for.
_BAND: Final = 512
# Storages above this many bytes are not kept alive to the end of the program, which may have no memory to spare.
_KEPT: Final = 1 << 24
# A function of a generated module that takes a shape, a stride and a dtype.
_Allocator = Callable[..., torch.Tensor]


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` after every byte of its storage became poison, between the elements of a strided one too."""
    storage: Any = tensor.untyped_storage()
    if storage.nbytes():
        storage.fill_(_POISON)  # on the current stream, ahead of the kernels that get it
    return tensor


class _Bands:
    """The memory around what a program got in one call."""

    def __init__(self) -> None:
        self._around: list[tuple[Callable[[], Any], int]] = []

    def allocate(self, allocator: _Allocator, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> torch.Tensor:
        """What ``allocator(shape, stride, dtype)`` would return, with bands of memory before and after its elements."""
        band, extent = _BAND // dtype.itemsize, 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        flat = allocator((extent + 2 * band,), (1,), dtype)
        storage = flat.untyped_storage()
        held: Callable[[], Any] = ref(storage) if storage.nbytes() > _KEPT else lambda: storage
        self._around.append((held, extent * dtype.itemsize))
        # Not as_strided: what is allocated is no view of another tensor.
        return flat.new_empty(0).set_(storage, band, shape, stride)

    def check(self) -> None:
        """Look at the bands.

        Raises:
            Misconduct: ``written-beside``.
        """
        bands = []
        for held, inside in self._around:
            storage = held()
            if storage is not None:
                raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                bands += [raw[:_BAND], raw[_BAND + inside :]]
        for device in {band.device for band in bands}:
            if not bool((torch.cat([band for band in bands if band.device == device]) == _POISON).all()):
                text = "the kernel wrote before or behind a result, or an intermediate, that the program allocated"
                raise Misconduct("written-beside", text)


def _poisoning(allocator: _Allocator, bands: _Bands | None) -> _Allocator:
    """``allocator`` with poison in what it returns, and around it."""

    def poisoned(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *rest: Any) -> torch.Tensor:
        if bands is not None and all(shape):
            return poison(bands.allocate(allocator, shape, stride, dtype))
        return poison(guard_pages.moved(allocator(shape, stride, dtype, *rest), "out"))

    return poisoned


def allocators_of(module: ModuleType) -> tuple[str, ...]:
    """Names of the functions by which a generated module gets memory for results, intermediates and workspaces."""
    return tuple(n for n, value in vars(module).items() if n.startswith("empty_strided") and callable(value))


@contextlib.contextmanager
def poisoned_memory(modules: tuple[ModuleType, ...], *, check_bands: bool = True) -> Iterator[None]:
    """Let these generated modules find poison in and around whatever they allocate: results, intermediates, workspaces.

    The allocator hands out the memory of the last result again and again, and an element that is not written, or a
    workspace that is taken for zero, would show the right value of the call before.

    Args:
        modules: the programs.
        check_bands: whether the memory around is looked at: not where it must be what the
            allocator gives (a CUDA graph's).

    Raises:
        Misconduct: ``written-beside``, where the program came to its end.
    """
    bands = _Bands() if check_bands and not guard_pages.active("out") else None
    # Memory that several processes share, or the host's, is not replaced by other memory.
    plain = {"empty_strided_cpu", "empty_strided_cuda", "empty_strided_xpu"}
    places = [
        (module, name, _poisoning(getattr(module, name), bands if name in plain else None))
        for module in modules
        for name in allocators_of(module)
    ]
    with patched(places):
        yield
    if bands is not None:
        bands.check()
