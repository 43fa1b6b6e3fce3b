"""Faults of Triton's interpreter itself, found by kernels that any release has to compute.

Imported where Triton is.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
import triton
import triton.language as tl

from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES

_SIZE: Final = 16


@triton.jit  # type: ignore[untyped-decorator]
def _product(a: Any, b: Any, c: Any, size: tl.constexpr, sums: tl.constexpr) -> None:
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), out_dtype=sums))


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(values: Any, stored: Any, converted: Any, count: tl.constexpr) -> None:
    at = tl.arange(0, count)
    value = tl.load(values + at)
    tl.store(stored + at, value)
    tl.store(converted + at, value.to(converted.dtype.element_ty))


@functools.cache
def fault(dtype: str) -> str:
    """What the interpreter does wrong in a data type, "" for nothing."""
    kind = torch_dtype(DTYPES[dtype])
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-3, 4, (_SIZE, _SIZE), generator=drawn).to(kind) for _ in range(2))
    exact = (a.double() @ b.double()).to(kind if kind.is_floating_point else torch.int32)
    product = torch.empty_like(exact)
    try:
        _product[(1,)](a, b, product, _SIZE, tl.float32 if kind.is_floating_point else tl.int32)
    except Exception as error:  # of any kind: it is the interpreter's
        return f"it raises {type(error).__name__} in a product"
    if not torch.equal(product, exact):
        return f"its products of {dtype} are wrong"
    if not kind.is_floating_point or kind.itemsize > 2:
        return ""
    steps = 1 + torch.arange(64) * 2.0**-11  # values between two of the type, and halfway
    values = torch.cat([steps, -steps, steps * 2.0**-12, steps * 2.0**-24]).float()
    results = [torch.empty_like(values, dtype=kind) for _ in range(2)]
    _rounded[(1,)](values, *results, len(values))
    if not torch.equal(results[0], values.to(kind)):
        return f"it does not round to the nearest {dtype} where it stores sums of f32"
    return "" if torch.equal(results[1], values.to(kind)) else f"it does not round f32 to the nearest {dtype}"
