"""Whether a case can tell a right result from a wrong one."""

from __future__ import annotations

import math
from typing import Final

import torch

from pytest_gemm.numerics.span import Interval
from pytest_gemm.outcome import Reason
from pytest_gemm.problem.problem import Problem

# Fewer elements than this are no evidence for or against a distribution: a 1 x 1 output of int-1 data is 0
# one time in three or so.  Other distributions of the same problem stand in.
_ENOUGH_ELEMENTS: Final = 32

# Share of one value above which an output carries no information.  relu leaves half zeros, relu of a product with
# a sparse residual more; at 32 fair coins 15/16 heads has a chance of 8e-9.
_DOMINANT_SHARE: Final = 15 / 16

# Share of elements where 0 would be accepted as well, above which a kernel that computes nothing might pass.  gelu and
# silu of large integers leave half of them; at 32 elements chance makes 3/4 of that one time in 400.
_BLIND_SHARE: Final = 3 / 4

# Elements that are looked at; evenly spread over the output.
_SAMPLE: Final = 4096


def _dominant(x: torch.Tensor) -> tuple[float, float]:
    """The most frequent value, NaN counted as infinity, and its share."""
    values, counts = x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).unique(return_counts=True)
    top = int(counts.argmax())
    return float(values[top]), int(counts[top]) / x.numel()


def insensitive(problem: Problem, interval: Interval) -> Reason | None:
    """Why this case could not tell a right result from a wrong one; ``None`` when it could.

    Judged by what is expected, not by how the operands were made: an output dominated by one value, or
    intervals so wide that zero would be accepted for most elements.  K = 0 and alpha = 0 are exempt:
    there a constant is the point of the case.
    """
    count = interval.expected.numel()
    if count < _ENOUGH_ELEMENTS or problem.shape.k == 0 or problem.alpha == 0.0:
        return None
    # An odd stride, so that the sample does not run down one column of a power-of-two output.
    stride = max(1, count // _SAMPLE) | 1
    expected = interval.expected.flatten()[::stride]
    lo, hi = interval.lo.flatten()[::stride], interval.hi.flatten()[::stride]
    constant, share = _dominant(expected)
    if share > _DOMINANT_SHARE and constant == 0.0:
        text = f"{share:.0%} of the expected elements are 0: a kernel that computes nothing could pass"
        return Reason("mostly-zero", text, "choose a distribution with more non-zero products")
    # A constant that the products already have is made on purpose (k-cover); one that comes after them is not.
    if share > _DOMINANT_SHARE and _dominant(interval.product.flatten()[::stride])[1] <= _DOMINANT_SHARE:
        text = f"the epilogue turns {share:.0%} of the elements into {constant:g} whatever the product is"
        return Reason("saturated", text, "choose a distribution of smaller magnitude or of both signs")
    # Elements that must be exactly what they are (the zeros of a relu) are not blind.
    blind = int(((lo != hi) & (lo <= 0.0) & (hi >= 0.0)).sum()) / expected.numel()
    if blind > _BLIND_SHARE:
        text = f"the bound admits 0 for {blind:.0%} of the elements"
        return Reason("bound-too-wide", text, "choose an exact distribution, or a contract with a wider accumulator")
    return None
