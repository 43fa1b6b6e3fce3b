"""oneMKL's products on the CPU, by its C interface, as the backend ``mkl``.

Requirements: mkl
Run: PYTHONPATH=examples pytest -p mkl_backend --pyargs pytest_gemm.conformance --gemm-backends=mkl

https://www.intel.com/content/www/us/en/docs/onemkl/developer-reference-c/2025-1/blas-routines.html: cblas_?gemm and
cblas_gemm_bf16bf16f32 and _f16f16f32 are ``C = alpha * op(A) * op(B) + beta * C``; C is f32 where A and B are halves.
cblas_gemm_s8u8s32 adds an offset to each element of A and of B before it multiplies: an i8 A is given as u8 with the
offset -128.  C holds the bias before the call, and is not read where beta is 0.  The same bits again are promised with
MKL_CBWR alone, so the contract says ``deterministic=False``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend, plain

ROW_MAJOR, AS_IT_IS, TRANSPOSED, ONE_OFFSET = 101, 111, 112, 173
Int, Float = ctypes.c_int, ctypes.c_float
NAMES = {"float32": "sgemm", "float64": "dgemm", "bfloat16": "gemm_bf16bf16f32", "float16": "gemm_f16f16f32"}


@functools.cache
def library() -> Any:
    """The library of the distribution ``mkl``."""
    files = importlib.metadata.files("mkl") or []
    return ctypes.CDLL(str(next(one.locate() for one in files if one.name.startswith("libmkl_rt.so"))))


def placed(x: Any) -> tuple[Any, int, int]:
    """A matrix as MKL reads it, whether it is transposed, and its leading dimension."""
    for word, y in ((AS_IT_IS, x), (TRANSPOSED, x.mT)):
        rows, columns = y.shape
        if (y.stride(1) == 1 or columns == 1) and (y.stride(0) >= columns or rows == 1):
            return y, word, max(y.stride(0), columns, 1)
    return x.contiguous(), AS_IT_IS, max(x.shape[1], 1)


def gemm(a: Any, b: Any, c: Any, alpha: float = 1.0, beta: float = 0.0) -> None:
    """``c = alpha * a @ b + beta * c`` of matrices."""
    import torch

    offset = 0
    if a.dtype is torch.int8:
        a, offset = a.view(torch.uint8) ^ 128, -128
    (a, word_a, lda), (b, word_b, ldb) = placed(a), placed(b)
    sizes = map(Int, (*c.shape, a.shape[1] if word_a == AS_IT_IS else a.shape[0]))
    name = "gemm_s8u8s32" if c.dtype is torch.int32 else NAMES[str(a.dtype).rpartition(".")[2]]
    factor = ctypes.c_double if c.dtype is torch.float64 else Float
    x, y, z = (ctypes.c_void_p(one.data_ptr()) for one in (a, b, c))
    words, ldc = [Int(ROW_MAJOR), Int(word_a), Int(word_b)], Int(max(c.shape[1], 1))
    if name == "gemm_s8u8s32":
        zero, small = ctypes.byref(ctypes.c_int32(0)), ctypes.c_int8
        rest = (x, Int(lda), small(offset), y, Int(ldb), small(0), factor(beta), z, ldc, zero)
        library().cblas_gemm_s8u8s32(*words, Int(ONE_OFFSET), *sizes, factor(alpha), *rest)
        return
    function = getattr(library(), f"cblas_{name}")
    function(*words, *sizes, factor(alpha), x, Int(lda), y, Int(ldb), factor(beta), z, ldc)


def product(a: Any, b: Any, alpha: float = 1.0, bias: Any = None, beta: float = 0.0) -> Any:
    """``alpha * a @ b + beta * bias``, of matrices or of two batches of them."""
    import torch

    kind = a.dtype if a.dtype is torch.float64 else torch.float32 if a.is_floating_point() else torch.int32
    c = torch.empty(*a.shape[:-1], b.shape[-1], dtype=kind)
    if bias is not None and beta:
        c.copy_(bias)
    for one in zip(a, b, c, strict=True) if a.dim() == 3 else [(a, b, c)]:
        gemm(*one, alpha, beta)
    return c.to(a.dtype) if a.is_floating_point() else c


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """A product with an addend: C before the call."""
    owns = problem.op.name in {"addmm", "baddbmm", "linear"}
    if not owns or problem.chain or not plain(problem) or "bias" not in tensors:
        return None
    b = tensors["b"].mT if problem.op.weight else tensors["b"]
    return functools.partial(product, tensors["a"], b, problem.alpha, tensors["bias"], problem.beta)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"distributions": ("mkl",), "deterministic": False, "bind": bind, "devices": ("cpu",)}
    registry.add(CallableBackend("mkl", product, ("f32", "f64", "bf16", "f16", "u8", "i8"), **facts))
