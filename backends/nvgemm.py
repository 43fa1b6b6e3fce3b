"""``nvgemm``: Inductor's NVIDIA Universal GEMM backend, CuTe DSL kernels selected through ``cutlass_api``."""

from __future__ import annotations

import importlib.util

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import Selection
from pytest_gemm.backends.cutedsl import DEVICE_KERNEL
from pytest_gemm.backends.inductor.backend import InductorBackend, installed


class NvgemmBackend(InductorBackend):
    """The NVGEMM candidates alone."""

    name: str = "nvgemm"
    inductor_name: str = "NVGEMM"
    devices: tuple[str, ...] = ("cuda",)
    selection: Selection = Selection.ONE
    device_kernel: str = DEVICE_KERNEL
    rules = ("inductor-on-cuda", "nvgemm", "tma", "compact")

    def installation(self) -> Availability:
        """The CuTe DSL, and the module ``cutlass_api``, which PyPI does not have."""
        if not _has("cutlass"):
            return Availability.lacking(
                "no-cutlass-dsl", "the CuTe DSL is not installed", "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3'"
            )
        if not _has("cutlass_api"):
            return Availability.lacking(
                "no-cutlass-api",
                "the module cutlass_api is not installed; PyPI does not have it",
                "pip install 'git+https://github.com/NVIDIA/cutlass@cutlass_api#subdirectory=python/cutlass_api'",
            )
        return Availability(versions=installed("nvidia-cutlass-dsl", "cutlass_api"))


def _has(module: str) -> bool:
    """Whether ``module`` can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
