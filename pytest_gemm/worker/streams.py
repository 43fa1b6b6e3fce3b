"""A second CUDA stream: the current one of a run, and the one that writes the operands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from pytest_gemm.operands.tensors import Operands

# Cycles that the stream waits before the operands are written: some 10 ms, in which a kernel elsewhere has begun.
_CYCLES: Final = 20_000_000
# Of every byte: NaN in each type of floats.
_POISON: Final = 0xFF


@contextlib.contextmanager
def on_side_stream(given: Operands) -> Iterator[Operands]:
    """A block on a stream of its own, which writes the operands late; the device has finished at its end.

    They are copies in other memory.  A kernel on another stream does not wait for them and reads NaN: PyTorch's streams
    and the default one do not wait for each other.
    """
    late = given.clone()
    for one in late.buffers:
        one.storage.view(torch.uint8).fill_(_POISON)
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    with torch.cuda.stream(torch.cuda.Stream()):
        cuda._sleep(_CYCLES)
        for one, source in zip(late.buffers, given.buffers, strict=True):
            one.storage.copy_(source.storage)
        yield late
    torch.cuda.synchronize()
