"""A GEMM in TileLang, as its quick start writes it, on CUDA as the backend ``tilelang``; judged on an H200.

Requirements: tilelang==0.1.15 apache-tvm-ffi<0.1.13 z3-solver<4.15.5 torch-c-dlpack-ext cloudpickle ml-dtypes; nvcc
Run: PYTHONPATH=examples pytest -p tilelang_backend --pyargs pytest_gemm.conformance --gemm-backends=tilelang

https://tilelang.com/ (Quick Start): copies of tiles, ``T.gemm`` into a fragment of f32, one copy out, which rounds.
Elements beyond the edge are zeros.  The kernel is compiled for each shape and layout.  On Hopper ``T.gemm`` of f16 and
bf16 is wgmma; of f32 it is mma.sync in TF32, the 13 low bits cut (``mma_sync<kTensorFloat32, ...>`` of unconverted
words in the source that 0.1.15 generates).  No page promises more, so the contract has TF32.  There is no fp8 here.
Operands are copied where neither they nor their transposes are compact.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract


def program(m: int, n: int, k: int, dtype: str, ta: bool, tb: bool) -> Any:
    """The kernel as TileLang's program; ``ta``, ``tb``: A or B is stored transposed."""
    from tilelang import language as t

    bm, bn, bk = 64, 64, 32

    def product(a, b, c):
        with t.Kernel(t.ceildiv(n, bn), t.ceildiv(m, bm), threads=128) as (x, y):
            of_a = t.alloc_shared((bk, bm) if ta else (bm, bk), dtype)
            of_b = t.alloc_shared((bn, bk) if tb else (bk, bn), dtype)
            sums = t.alloc_fragment((bm, bn), "float32")
            t.clear(sums)
            for i in t.Pipelined(t.ceildiv(k, bk), num_stages=3):
                t.copy(a[i * bk, y * bm] if ta else a[y * bm, i * bk], of_a)
                t.copy(b[x * bn, i * bk] if tb else b[i * bk, x * bn], of_b)
                t.gemm(of_a, of_b, sums, transpose_A=ta, transpose_B=tb)
            t.copy(sums, c[y * bm, x * bn])

    shapes = {"a": (k, m) if ta else (m, k), "b": (n, k) if tb else (k, n), "c": (m, n)}
    product.__annotations__ = {name: t.Tensor(shape, dtype) for name, shape in shapes.items()}
    return t.prim_func(product)


@functools.cache
def compiled(*key: Any) -> Any:
    """The kernel for this machine's GPU."""
    return __import__("tilelang").compile(program(*key), out_idx=[-1])


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices."""
    ta, tb = (not x.is_contiguous() and x.mT.is_contiguous() for x in (a, b))
    x, y = ((one.mT if turned else one).contiguous() for one, turned in ((a, ta), (b, tb)))
    return compiled(a.shape[0], b.shape[1], a.shape[1], str(a.dtype).removeprefix("torch."), ta, tb)(x, y)


class TileLangBackend(CudaCallableBackend):
    """The backend."""

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """That of the tensor cores; f32 is cut to TF32."""
        found = super().contract(problem, own=own)
        tf32 = {"input_error": 2.0**-9, "input_bits": 11, "alignment_bits": 24, "chunk": 4, "or_scalar": True}
        return dataclasses.replace(found, **tf32) if problem.input_dtype.name == "f32" else found

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """Matrices that have elements."""
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "the kernel is compiled for sizes above 0")
        return super().supports(problem, request)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs = ("tilelang", "apache-tvm-ffi", "z3-solver")
    how: dict[str, Any] = {"distributions": needs, "imports": ("tilelang",), "batched": False}
    registry.add(TileLangBackend("tilelang", matmul, ("f32", "bf16", "f16"), **how))
