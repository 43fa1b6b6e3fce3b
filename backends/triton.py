"""``triton``: Inductor's Triton GEMM templates on a CUDA device."""

from __future__ import annotations

import importlib.util
from typing import Any

from pytest_gemm.backend import Availability, Contract, Unsupported
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.inductor import InductorBackend, cuda_options, has_no_kernel, installed, no_cuda, unclaimed
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import Problem

__all__ = ["TritonBackend"]

_DTYPES = frozenset({"f16", "bf16", "f32"})


class TritonBackend(InductorBackend):
    """The Triton templates alone.  They take any strides; accumulation is in f32, without TF32 unless allowed."""

    name: str = "triton"
    inductor_name: str = "TRITON"
    devices: tuple[str, ...] = ("cuda",)
    # Some twenty candidates of 2 to 20 s each would be compiled and timed for every problem.
    candidates: str = "one"

    def availability(self, device: str) -> Availability:
        """A CUDA device and the package ``triton``."""
        if device != "cuda":
            return Availability(Reason("device", f"triton computes on cuda, not on {device}", "--gemm-device=cuda"))
        if reason := no_cuda():
            return Availability(reason)
        if importlib.util.find_spec("triton") is None:
            return Availability(Reason("no-triton", "the package triton is not installed", "pip install triton"))
        return Availability(versions=installed("triton"))

    def supports(self, problem: Problem) -> Unsupported | None:
        """mm, addmm, bmm, baddbmm, linear, int_mm and mixed_mm in f16, bf16, f32 (and int8 to int32)."""
        if refusal := unclaimed(problem) or has_no_kernel(problem, "cuda"):
            return refusal
        out = problem.dtypes.out.name
        if problem.shape.is_empty or (problem.shape.k == 0 and problem.op.name != "bmm"):
            return Unsupported("empty", "Inductor asks Triton for products that are not empty only, and ATen for those")
        if problem.op.name == "woq_int8":
            return Unsupported("op", "Inductor lowers _weight_int8pack_mm with ATen and C++ candidates only")
        if out not in _DTYPES and problem.op.name != "int_mm":
            return Unsupported("dtype", f"Inductor's Triton templates take f16, bf16 and f32, not {out}")
        return None

    def options(self, problem: Problem) -> dict[str, Any]:
        """With the persistent TMA template among the candidates, where Inductor's condition for it holds."""
        return {**super().options(problem), **cuda_options(), "triton.enable_persistent_tma_matmul": True}

    def sum(self, problem: Problem) -> Contract:
        """Tensor cores into f32 for f16 and bf16; f32 by fused multiply-adds as long as TF32 is off."""
        return tensor_core.contract(problem)
