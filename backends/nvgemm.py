"""``nvgemm``: Inductor's NVIDIA Universal GEMM backend, CuTe DSL kernels selected through ``cutlass_api``."""

from __future__ import annotations

import importlib.util

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.backends import tensor_core
from pytest_gemm.backends.cutedsl import DEVICE_KERNEL
from pytest_gemm.backends.inductor.backend import (
    InductorBackend,
    has_no_kernel,
    installed,
)
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.outcome import Reason, Unsupported
from pytest_gemm.problem.problem import Problem


class NvgemmBackend(InductorBackend):
    """The NVGEMM candidates alone."""

    name: str = "nvgemm"
    inductor_name: str = "NVGEMM"
    devices: tuple[str, ...] = ("cuda",)
    selection: Selection = Selection.ONE
    device_kernel: str = DEVICE_KERNEL

    def installation(self) -> Availability:
        """The CuTe DSL, and the module ``cutlass_api``, which PyPI does not have."""
        if not _has("cutlass"):
            return Availability(
                Reason(
                    "no-cutlass-dsl", "the CuTe DSL is not installed", "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3'"
                )
            )
        if not _has("cutlass_api"):
            return Availability(
                Reason(
                    "no-cutlass-api",
                    "the module cutlass_api is not installed; PyPI does not have it",
                    "pip install 'git+https://github.com/NVIDIA/cutlass@cutlass_api#subdirectory=python/cutlass_api'",
                )
            )
        return Availability(versions=installed("nvidia-cutlass-dsl", "cutlass_api"))

    def unsupported(self, problem: Problem, request: BuildRequest) -> Unsupported | None:
        """mm and bmm (and a linear without bias) in f16 and bf16 on 16-byte aligned operands."""
        if reason := has_no_kernel(problem, "cuda"):
            return reason
        out = problem.dtypes.out.name
        biased = problem.op.addend or (problem.op.name == "linear" and problem.step("bias") is not None)
        if problem.grouped or problem.op.name == "scaled_mm":
            return Unsupported("op", "cutlass_api's kernels for grouped and scaled products are Blackwell's")
        if biased or problem.op.name not in {"mm", "bmm", "linear"}:
            return Unsupported("op", "Inductor has NVGEMM candidates only for products without an addend")
        if out not in {"f16", "bf16"}:
            return Unsupported("dtype", f"NVGEMM's kernels for mm and bmm take f16 and bf16, not {out}")
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "Inductor has NVGEMM candidates only for products that are not empty")
        return tensor_core.unaligned(problem) or tensor_core.not_compact(problem)

    def sum(self, problem: Problem) -> Contract:
        """Tensor cores into f32."""
        return tensor_core.contract(problem)


def _has(module: str) -> bool:
    """Whether ``module`` can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
