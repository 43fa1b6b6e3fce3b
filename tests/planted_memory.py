"""Products that touch memory which is not theirs; a module of its own, for another process has to import it."""

from __future__ import annotations

import ctypes

import torch


def honest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def reads_on(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One byte behind the last element of A, which it does not even use."""
    last = sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True))
    ctypes.string_at(a.data_ptr() + (last + 1) * a.element_size(), 1)
    return a @ b
