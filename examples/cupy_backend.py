"""CuPy's matrix product (cuBLAS) on CUDA as the backend ``cupy``; judged on an H200.

Requirements: cupy-cuda13x==14.2.0 numpy (cupy-cuda12x for CUDA 12); torch for CUDA
Run: PYTHONPATH=examples pytest -p cupy_backend --pyargs pytest_gemm.conformance --gemm-backends=cupy

cupy.matmul is numpy's (https://docs.cupy.dev/en/stable/reference/generated/cupy.matmul.html): the result has the type
of its operands.  f16 is summed in f32 by cuBLAS; f32 is multiplied as f32 unless CUPY_TF32=1 is set
(https://docs.cupy.dev/en/stable/reference/environment.html).  There is no bf16 without ml_dtypes and no fp8: both are
left out, and so are integers, whose result has their own 8 bits.

cuBLAS may add slices of K in the type of the result unless CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION is set
(https://docs.nvidia.com/cuda/cublas/#cublasmath-t), and CuPy sets nothing.  So sums of f16 with K above 4096 are taken
with ``math.half_partials`` alone; the bound of shorter ones is that of slices in f32.

Operands are shared through DLPack, strides included; the product runs on PyTorch's current stream.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported

LONG = 4096  # cuBLAS 13.1 on an H200 added slices in f16 at K = 16384 and 65601, and nowhere up to 4096


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import cupy
    import torch

    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        return torch.from_dlpack(cupy.matmul(cupy.from_dlpack(a), cupy.from_dlpack(b)))


class CupyBackend(CudaCallableBackend):
    """The backend."""

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """Products whose slices are not added in f16, but where the problem allows it."""
        if problem.dtypes.out.name == "f16" and problem.shape.k > LONG and not problem.has("math.half_partials"):
            text = f"cuBLAS may add slices of K={problem.shape.k} in f16, and CuPy has no setting against it"
            return Unsupported("half-partials", text, f"write K up to {LONG}, or math.half_partials")
        return super().supports(problem, request or DEFAULT)


def distribution() -> str:
    """The wheel of CuPy that is installed; that for CUDA 13 where none is."""
    from pytest_gemm.machine.software import installed

    return next(iter(installed(("cupy-cuda13x", "cupy-cuda12x", "cupy"))), "cupy-cuda13x")


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes, needs = ("f64", "f32", "f16"), (distribution(),)
    registry.add(CupyBackend("cupy", matmul, dtypes, distributions=needs, imports=("cupy",), library=True))
