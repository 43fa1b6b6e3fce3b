"""DeepGEMM's bf16 and block-scaled fp8 products on CUDA as the backend ``deepgemm``; judged on an H200.

Requirements: sgl-deep-gemm==0.2.5 (SGLang's build, the one with wheels); torch for CUDA 13, nvcc 12.9 or newer; Hopper
Run: PYTHONPATH=examples pytest -p deepgemm_backend --pyargs pytest_gemm.conformance --gemm-backends=deepgemm

https://github.com/deepseek-ai/DeepGEMM: ``fp8_gemm_nt`` is A @ B.T with a scale for each 128 elements of a row of A
and for each block of 128 x 128 of B, in f32 on Hopper.  The tensor core's sum of few bits is multiplied by both scales
and added to one in f32 at each block ("two-level accumulation", README).  ``bf16_gemm`` sums in f32.  Rows begin at
multiples of 16 bytes, as TMA needs them.  The result is rounded once.  There is no f32, and so no TF32.

DeepGEMM's own distribution deep-gemm on the package index lacks CUTLASS's headers, which its kernels include.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.callable import plain
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices."""
    import deep_gemm

    out = a.new_empty(a.shape[0], b.shape[1])
    deep_gemm.bf16_gemm_nn(a, b, out)
    return out


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    """The product of fp8 with scales of blocks."""
    import deep_gemm
    import torch

    def call() -> Any:
        out = torch.empty(a.shape[0], b.shape[1], dtype=torch.bfloat16, device=a.device)
        deep_gemm.fp8_gemm_nt((a, scale_a), (b.mT, scale_b.mT), out)
        return out

    return call


class DeepGemmBackend(CudaCallableBackend):
    """The backend."""

    def bind(self, problem: Any, tensors: Any) -> Any:
        """The product with scales; any other program is built around the product."""
        return scaled(**tensors) if problem.op.name == "scaled_mm" else None

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """Bf16, and fp8 with the scales that the library's default recipe has."""
        is_own = str(problem.dtypes) == "f8e4m3fn-f8e4m3fn-bf16" and problem.scale_blocks == (1, 128)
        if problem.op.name == "scaled_mm" and not (is_own and plain(problem) and not problem.epilogue):
            remedy = "write f8e4m3fn-f8e4m3fn-bf16 and quant.blocks, no steps and no flags"
            return Unsupported("scales", "fp8_gemm_nt takes e4m3 with scales of blocks, and returns bf16", remedy)
        return super().supports(problem, request or DEFAULT)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"distributions": ("sgl-deep-gemm",), "imports": ("deep_gemm",), "rules": ("tma",)}
    how["arithmetic"] = {"slices": 1}
    registry.add(DeepGemmBackend("deepgemm", matmul, ("bf16",), batched=False, library=True, **how))
