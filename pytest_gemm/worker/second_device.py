"""A second CUDA device: where a problem with ``device.second`` is called after the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from pytest_gemm.operands.tensors import Operands
from pytest_gemm.worker.calls import has_bits

# The first one is the current device, which is 0 in every worker.
_SECOND: Final = "cuda:1"


@contextlib.contextmanager
def copied(given: Operands) -> Iterator[Operands]:
    """A block with copies of the operands on the second device; the operands are what these are at its end.

    All goes through the CPU.  After a copy from device to device the first one has access to the memory of the second:
    a kernel that is launched there by mistake would compute the right result.
    """
    copies = given.moved(lambda one: one.over(one.storage.cpu().to(_SECOND, copy=True), 0))
    yield copies
    for here, there in zip(given.buffers, copies.buffers, strict=True):
        here.storage.copy_(there.storage.cpu())
    if given.a.is_cuda:
        torch.cuda.synchronize()  # an error of what ran on the first device shows now


def back(results: Sequence[torch.Tensor], given: Operands) -> tuple[torch.Tensor, ...]:
    """Results where the operands are; what is on no GPU, or has no elements, stays as it is."""
    return tuple(one.cpu().to(given.a.device) if one.is_cuda and has_bits(one) else one for one in results)
