"""BLIS's matrix product (the kernels of cython-blis) as the backend ``blis``.

Requirements: blis
Run: PYTHONPATH=examples pytest -p blis_backend --pyargs pytest_gemm.conformance --gemm-backends=blis

gemm is that of the BLAS for f32 and f64 (https://github.com/explosion/cython-blis#usage), so the sums are of that type,
in any order; NaN and infinity are IEEE's, and subnormal numbers are kept.  It takes compact matrices: a transposed one
of f32 is flagged, another strided one is copied, and a batch is one matrix after the other.  In f64 transposed ones
are copied too: their flags read and write outside of the matrices (docs/defects/libraries).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_gemm.api.registry import Registry


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two matrices or of two batches of them."""
    import torch
    from blis.py import gemm

    if a.dim() == 3:
        return torch.stack([matmul(x, y) for x, y in zip(a, b, strict=True)]) if len(a) else torch.bmm(a, b)
    flags = [one.mT.is_contiguous() and one.dtype is torch.float32 for one in (a, b)]
    x, y = ((one.mT if flag else one.contiguous()).numpy() for one, flag in zip((a, b), flags, strict=True))
    return torch.from_numpy(gemm(x, y, trans1=flags[0], trans2=flags[1]))


def pytest_gemm_register_backends(registry: Registry) -> None:
    """Register the backend."""
    registry.add_callable("blis", matmul, dtypes=("f32", "f64"), distributions=("blis",))
