"""Products of float32 as TF32 makes them, for tests of what contracts claim."""

from __future__ import annotations

import torch


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """x with the 10 stored bits of TF32, rounded to nearest, ties away from zero, as ``cvt.rna.tf32`` does."""
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def three_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Triton's ``tf32x3``: what is not finite of the smaller two products counts as zero."""
    big_a, big_b = to_tf32(a), to_tf32(b)
    low_a, low_b = to_tf32(a - big_a).double(), to_tf32(b - big_b).double()
    low = low_a @ big_b.double() + big_a.double() @ low_b
    return (low.nan_to_num(nan=0.0) + big_a.double() @ big_b.double()).float()
