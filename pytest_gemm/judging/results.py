"""Results as the judge compares them: their number, their places, their bits, and digests of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Final

import torch

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.operands import memory, views
from pytest_gemm.operands.groups import of_groups
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.worker.calls import has_bits
from pytest_gemm.worker.messages import Ran

# Bytes of a result that its digest reads: 64 MiB take a twentieth of a second.
_DIGESTED: Final = 1 << 26


@dataclasses.dataclass(frozen=True)
class Returned:
    """What a run has returned.

    Attributes:
        ran: as the worker gave it, with zeros where nothing is promised.
        results: the results in the product's places.
    """

    ran: Ran
    results: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, given: Operands, ran: Ran) -> Returned:
        """With the results in the product's places; raises ``Misconduct`` for a shape that has none."""
        if given.problem.is_partial:
            later = ran.now
            now = None if later is None else lambda: of_groups(given, later())
            ran = dataclasses.replace(ran, results=of_groups(given, ran.results), now=now)
        try:
            return cls(ran, views.in_product(given.problem, ran.results))
        except views.WrongShape as wrong:
            raise Misconduct("wrong-shape", str(wrong)) from None

    @property
    def copies(self) -> tuple[torch.Tensor, ...]:
        """The results as they were returned."""
        return self.ran.results

    def rewritten(self) -> int:
        """How many elements have changed since the call returned; a sparse result has none to compare."""
        if self.ran.now is None:
            return 0
        pairs = zip(self.ran.now(), self.copies, strict=True)
        return sum(differing(new, old) for new, old in pairs if new is not old and has_bits(old))


def differing(new: torch.Tensor, old: torch.Tensor) -> int:
    """How many elements of a tensor have other bits than those of another tensor of its shape and dtype."""
    return int((words(new) != words(old)).count_nonzero())


def words(x: torch.Tensor) -> torch.Tensor:
    """A view of the bits of each element, of complex ones of each part, as integers: NaN is NaN, and 0 is not -0."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def fingerprint_of(results: Sequence[torch.Tensor]) -> str:
    """A hash of every byte of large results in the order of their indices; on a GPU in about the time of reading."""
    return " ".join(memory.digest(x.contiguous().flatten()) for x in results)


def digest_of(results: Sequence[torch.Tensor]) -> str:
    """A short digest of the values of results: strides do not count, and every NaN is the same one.

    Of a result of more than :data:`_DIGESTED` bytes every second, third ... line of its longest dimension is read.
    """
    found = hashlib.sha256()  # processors have instructions for it: three times as fast as blake2b
    for result in results:
        x, step = result.detach(), -(-result.numel() * result.element_size() // _DIGESTED)
        if step > 1:
            x = x.movedim(max(range(x.dim()), key=x.size), 0)[::step]
        x = x.cpu()
        if x.is_floating_point():
            x = x.float() if x.element_size() == 1 else x  # torch cannot fill fp8 by a mask
            nans = x.isnan()
            x = x.masked_fill(nans, math.nan) if bool(nans.any()) else x
        # A copy, since a result of one element may have any stride, with which it cannot be viewed as bytes.
        found.update(x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]
