"""A matrix product in C, called through ctypes, that adds a bias and applies relu itself: the backend ``c``.

Requirements: a C compiler
Run: PYTHONPATH=examples pytest -p c_kernel --pyargs pytest_gemm.conformance --gemm-backends=c
"""

import ctypes
import functools
import subprocess
import tempfile
from typing import Any

import torch

SOURCE = b"""
void gemm(long m, long n, long k, const float *a, long am, long ak, const float *b, long bk, long bn,
          const float *bias, int relu, float *c) {
    for (long i = 0; i < m; i++) for (long j = 0; j < n; j++) {
        float sum = 0;
        for (long p = 0; p < k; p++) sum += a[i * am + p * ak] * b[p * bk + j * bn];
        if (bias) sum += bias[j];
        c[i * n + j] = relu && sum < 0 ? 0 : sum;  // NaN stays NaN
    }
}"""


@functools.cache
def gemm() -> Any:
    """The compiled function; its file is not needed once it is loaded."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-xc", "-", "-o", file.name], input=SOURCE, check=True)
        return ctypes.CDLL(file.name).gemm


def matmul(a: torch.Tensor, b: torch.Tensor, bias: Any = None, activation: str | None = None) -> torch.Tensor:
    """The product of two matrices in f32, which C reads in their own strides."""
    c = torch.empty(a.shape[0], b.shape[1])
    tensors = [None if x is None else ctypes.c_void_p(x.data_ptr()) for x in (a, b, bias, c)]
    m, n, k, *strides = map(ctypes.c_long, (*c.shape, a.shape[1], *a.stride(), *b.stride()))
    gemm()(m, n, k, tensors[0], *strides[:2], tensors[1], *strides[2:], tensors[2], activation == "relu", tensors[3])
    return c


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    registry.add_callable("c", matmul, dtypes=("f32",), batched=False, linear=matmul, activations=("relu",))
