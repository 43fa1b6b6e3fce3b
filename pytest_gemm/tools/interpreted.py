"""Faults of Triton's interpreter itself, found by a kernel that any release has to compute.

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
# Of operands; their products are exact in f32, with sums between two numbers of a half, and halfway.
_LARGEST: Final = 40
# Of half of the lines, so that some sums are subnormal in f16.
_SMALL: Final = 2.0**-14


@triton.jit  # type: ignore[untyped-decorator]
def _product(a: Any, b: Any, stored: Any, converted: Any, size: tl.constexpr, sums: tl.constexpr) -> None:
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at), out_dtype=sums)
    tl.store(stored + at, product)
    tl.store(converted + at, product.to(converted.dtype.element_ty))


@functools.cache
def fault(dtype: str) -> str:
    """What the interpreter does wrong in a data type, "" for nothing."""
    kind, drawn = torch_dtype(DTYPES[dtype]), torch.Generator().manual_seed(0)
    is_float = kind.is_floating_point
    scale = torch.tensor([1.0, _SMALL if is_float else 1.0]).repeat(_SIZE // 2)
    a, b = (torch.randint(-_LARGEST, _LARGEST + 1, (_SIZE, _SIZE), generator=drawn) for _ in range(2))
    a, b = (a * scale[:, None]).to(kind), (b * scale).to(kind)
    exact = (a.double() @ b.double()).to(kind if is_float else torch.int32)
    results = [torch.empty_like(exact) for _ in range(2)]
    try:
        _product[(1,)](a, b, *results, _SIZE, tl.float32 if is_float else tl.int32)
    except Exception as error:  # of any kind: it is the interpreter's
        return f"it raises {type(error).__name__} in a product"
    return "" if all(torch.equal(result, exact) for result in results) else f"its products of {dtype} are wrong"
