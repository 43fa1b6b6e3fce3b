"""A matrix product in numba that adds a bias and applies relu itself: the backend ``numba``.

Requirements: numba
Run: PYTHONPATH=examples pytest -p numba_kernel --pyargs pytest_gemm.conformance --gemm-backends=numba
"""

from typing import Any

import numba
import numpy as np
import torch


# One signature for arrays of any strides.  No fastmath: it would lose NaN and infinity.
@numba.njit([f"void({t}[:,:], {t}[:,:], {t}[:], b1, {t}[:,::1])" for t in ("f4", "f8")], parallel=True, cache=True)
def kernel(a: Any, b: Any, bias: Any, relu: bool, c: Any) -> None:
    """One row of C a thread: sums in the type of C, rounded nowhere else."""
    for i in numba.prange(c.shape[0]):
        for k in range(a.shape[1]):
            for j in range(c.shape[1]):
                c[i, j] += a[i, k] * b[k, j]
        for j in range(c.shape[1]):
            c[i, j] += bias[j]
            if relu and c[i, j] < 0:
                c[i, j] = 0


def matmul(a: torch.Tensor, b: torch.Tensor, bias: Any = None, activation: str | None = None) -> torch.Tensor:
    """The product of two matrices, which numba reads in their own strides."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    added = np.zeros(b.shape[1], c.numpy().dtype) if bias is None else bias.numpy()
    kernel(a.numpy(), b.numpy(), added, activation == "relu", c.numpy())
    return c


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"linear": matmul, "activations": ("relu",), "distributions": ("numba",)}
    registry.add_callable("numba", matmul, dtypes=("f32", "f64"), batched=False, **how)
