"""nvmath-python's cuBLASLt product with epilogues on CUDA as the backend ``nvmath``; judged on an H200.

Requirements: nvmath-python[cu13]==1.0.0 (cuda-bindings, cuda-core, cuda-pathfinder, cuBLAS 13); torch for CUDA
Run: PYTHONPATH=examples pytest -p nvmath_backend --pyargs pytest_gemm.conformance --gemm-backends=nvmath

https://docs.nvidia.com/cuda/nvmath-python/latest/host-apis/linalg/generated/nvmath.linalg.advanced.matmul.html: F(alpha
a @ b + beta c), where F is the epilog.  COMPUTE_32F, asked for here, sums f32, bf16 and f16 in f32 and uses no TF32
(https://docs.nvidia.com/cuda/cublas/#cublascomputetype-t); f64 is summed in f64.  c is added in the sum's type.

Of a bias and an activation NVIDIA says only that they come after the product: a kernel that slices K may round it
first, as those of bf16 in cuBLAS 13.1 do on an H200.  Slices of K may be stored in the result's type
(CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE), but where PyTorch's ``allow_bf16_reduced_precision_reduction`` is off a mask
excludes it here.  GELU is the approximation with tanh, as PyTorch takes it (aten/src/ATen/native/cuda/Blas.cpp).  fp8
has scales for whole tensors, which this file leaves out.

A bias belongs to the rows of a column-major result, so a linear is computed as (W @ A.T).T.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pytest_gemm.api.callable import plain
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract

EPILOGS = {("bias",): "BIAS", ("relu",): "RELU", ("gelu_tanh",): "GELU"}
EPILOGS |= {("bias", "relu"): "RELU_BIAS", ("bias", "gelu_tanh"): "GELU_BIAS"}


def matmul(a: Any, b: Any, **more: Any) -> Any:
    """The product of two matrices or of two batches of them; ``more``: addend, factors and epilog."""
    import torch
    from nvmath.linalg.advanced import MatmulComputeType, MatmulPlanPreferences, MatmulReductionScheme
    from nvmath.linalg.advanced import matmul as product

    x, y = (one if 1 in one.stride()[-2:] else one.contiguous() for one in (a, b))
    options = {} if a.dtype == torch.float64 else {"compute_type": MatmulComputeType.COMPUTE_32F}
    allowed = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(a.dtype)
    preferences = MatmulPlanPreferences()
    if allowed and not getattr(torch.backends.cuda.matmul, f"allow_{allowed}_reduced_precision_reduction"):
        preferences.reduction_scheme_mask = MatmulReductionScheme.COMPUTE_TYPE
    return product(x, y, options=options, preferences=preferences, **more)


def linear(problem: Any, a: Any, b: Any, bias: Any = None) -> Any:
    """A linear with its bias and activation."""
    from nvmath.linalg.advanced import MatmulEpilog

    epilog = MatmulEpilog[EPILOGS[tuple(step.name for step in problem.epilogue)]]
    inputs = None if bias is None else {"bias": bias}
    return lambda: matmul(b, a.mT, epilog=epilog, epilog_inputs=inputs).mT


def addmm(problem: Any, a: Any, b: Any, bias: Any) -> Any:
    """The product and its addend, each with its factor."""
    c = bias.expand(*a.shape[:-1], b.shape[-1]).contiguous()
    return lambda: matmul(a, b, c=c, alpha=problem.alpha, beta=problem.beta)


class NvmathBackend(CudaCallableBackend):
    """The backend."""

    def bind(self, problem: Any, tensors: Any) -> Any:
        """Linears with the steps of an epilog, addmm and baddbmm; any other program is built around the product."""
        steps, fused = tuple(map(str, problem.epilogue)), {"linear": linear, "addmm": addmm, "baddbmm": addmm}
        own = steps in EPILOGS if problem.op.name == "linear" else problem.op.addend and not problem.chain
        return fused[problem.op.name](problem, **tensors) if own and plain(problem) else None

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """A product may be rounded before its bias and its activation."""
        found = super().contract(problem, own=own)
        return dataclasses.replace(found, epilogue="either") if own and problem.op.name == "linear" else found

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """The products that have elements: the library refuses a size of 0."""
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "nvmath takes no operand without elements: its extents are strictly positive")
        return super().supports(problem, request)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs, dtypes = ("nvmath-python", "cuda-bindings", "cuda-core"), ("f64", "f32", "bf16", "f16")
    how: dict[str, Any] = {"distributions": needs, "imports": ("nvmath.linalg.advanced",), "library": True}
    registry.add(NvmathBackend("nvmath", matmul, dtypes, **how))
