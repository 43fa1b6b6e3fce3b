"""numpy's matrix product (its BLAS) as the backend ``numpy``.

Requirements: numpy
Run: PYTHONPATH=examples pytest -p numpy_backend --pyargs pytest_gemm.conformance --gemm-backends=numpy

numpy.matmul returns the type of its operands (https://numpy.org/doc/stable/reference/generated/numpy.matmul.html), so
a product in f32 may be added up in f32.  The BLAS promises no order of the sum; NaN and infinity are IEEE's, and
subnormal numbers are kept.  Both operands and the result are shared with PyTorch, nothing is copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from pytest_gemm.api.registry import Registry


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices or of two batches of them."""
    import torch

    with np.errstate(all="ignore"):  # numpy warns of a NaN, which a project may turn into an error
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))


def pytest_gemm_register_backends(registry: Registry) -> None:
    """Register the backend."""
    registry.add_callable("numpy", matmul, dtypes=("f32", "f64"), distributions=("numpy",))
