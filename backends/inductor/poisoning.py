"""Memory that a compiled program gets: poisoned, so that what is not written is seen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from pytest_gemm.backends.inductor.hooks import patched
from pytest_gemm.operands import guard_pages

# Every byte of memory that a generated program gets: NaN as a float of any width, -1 as an integer.
_POISON = 0xFF


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` after every byte of its storage became poison, between the elements of a strided one too."""
    storage: Any = tensor.untyped_storage()
    if storage.nbytes():
        storage.fill_(_POISON)  # on the current stream, ahead of the kernels that get it
    return tensor


def _poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``allocate`` with poison in what it returns."""

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(guard_pages.moved(allocate(*args, **kwargs), "out"))

    return poisoned


def allocators_of(module: ModuleType) -> tuple[str, ...]:
    """Names of the functions by which a generated module gets memory for results, intermediates and workspaces."""
    return tuple(n for n, value in vars(module).items() if n.startswith("empty_strided") and callable(value))


def poisoned_memory(modules: tuple[ModuleType, ...]) -> AbstractContextManager[None]:
    """Let these generated modules find poison in whatever they allocate: results, intermediates, workspaces.

    The allocator hands out the memory of the last result again and again, and an element that is not written, or a
    workspace that is taken for zero, would show the right value of the call before.
    """
    places = [(module, name) for module in modules for name in allocators_of(module)]
    return patched((module, name, _poisoning(getattr(module, name))) for module, name in places)
