"""A matrix product in Triton that adds a bias and applies relu itself: the backend ``triton-mine``.

Requirements: triton; without a GPU the kernel runs in Triton's interpreter, which has no sums of bf16
Run: PYTHONPATH=examples pytest -p triton_kernel --pyargs pytest_gemm.conformance --gemm-backends=triton-mine
"""

import os

import numpy as np
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # before the decorator reads it
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, bias, c, m, n, k, am, ak, bk, bn, relu: tl.constexpr, tile: tl.constexpr):
    """A square tile of C; what lies beyond an edge is masked."""
    i, j = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1) * tile + tl.arange(0, tile)
    sums = tl.full((tile, tile), 0.0, tl.float32)
    for start in range(0, k, tile):
        p = start + tl.arange(0, tile)
        x = tl.load(a + i[:, None] * am + p[None, :] * ak, mask=(i[:, None] < m) & (p[None, :] < k), other=0.0)
        y = tl.load(b + p[:, None] * bk + j[None, :] * bn, mask=(p[:, None] < k) & (j[None, :] < n), other=0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")  # and not TF32
    sums = sums if bias is None else sums + tl.load(bias + j, mask=j < n, other=0.0)[None, :]
    sums = tl.where(sums < 0, 0.0, sums) if relu else sums  # tl.maximum would lose NaN
    tl.store(c + i[:, None] * n + j[None, :], sums.to(c.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))


def matmul(a, b, bias=None, activation=None):
    """The product of two matrices, which the kernel reads in their own strides."""
    (m, k), n = a.shape, b.shape[1]
    c, grid = a.new_empty(m, n), (triton.cdiv(m, 32), triton.cdiv(n, 32))
    with np.errstate(all="ignore"):  # the interpreter warns of NaN and infinity
        if c.numel():
            kernel[grid](a, b, bias, c, m, n, k, *a.stride(), *b.stride(), activation == "relu", 32)
    return c


def pytest_gemm_register_backends(registry):
    """Register the backend."""
    how = {"linear": matmul, "activations": ("relu",), "distributions": ("triton",), "batched": False}
    if torch.cuda.is_available():  # its sums are those of tensor cores
        how |= {"devices": ("cuda",)}
    dtypes = ("f32", "f16", "bf16") if torch.cuda.is_available() else ("f32", "f16")
    registry.add_callable("triton-mine", matmul, dtypes=dtypes, **how)
