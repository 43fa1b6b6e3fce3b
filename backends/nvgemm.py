"""``nvgemm``: Inductor's NVIDIA Universal GEMM backend, CuTe DSL kernels out of CUTLASS's library of operators."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import DEFAULT, BuildRequest, Selection
from pytest_gemm.backends.cutedsl import DEVICE_KERNEL
from pytest_gemm.backends.inductor.backend import InductorBackend, installed
from pytest_gemm.core.text import first_line
from pytest_gemm.problem.problem import Problem

# Operators that PyTorch brings since 2.15, derived from those of the library's version 0.2 and later.
_OWN_OPERATORS = "torch._inductor.kernel.vendored_templates.cutedsl.wrappers"


class NvgemmBackend(InductorBackend):
    """The NVGEMM candidates alone."""

    name: str = "nvgemm"
    inductor_name: str = "NVGEMM"
    devices: tuple[str, ...] = ("cuda",)
    selection: Selection = Selection.ONE
    device_kernel: str = DEVICE_KERNEL
    rules = ("inductor-on-cuda", "nvgemm", "tma", "compact", "grouped")

    def installation(self) -> Availability:
        """The CuTe DSL, and the library of operators that this torch's Inductor imports."""
        from pytest_gemm.backends.inductor.torch_compat import torch_release

        if not _has("cutlass"):
            return Availability.lacking(
                "no-cutlass-dsl", "the CuTe DSL is not installed", "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3'"
            )
        release = torch_release()
        module, distribution, remedy = _library(release)
        inductor = f"Inductor of torch {release[0]}.{release[1]}"
        if not _has(module):
            text = f"{inductor} imports {module}, which is not installed"
            return Availability.lacking("no-cutlass-operators", text, remedy)
        if release >= (2, 15):
            try:
                importlib.import_module(_OWN_OPERATORS)
            except ImportError as error:
                text = f"{inductor} cannot use the installed {distribution}: {first_line(error)}"
                return Availability.lacking("other-cutlass-operators", text, remedy)
        return Availability(versions=installed("nvidia-cutlass-dsl", distribution))

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """With every operator of the library among the candidates, but where the winner is wanted that a user gets."""
        options = super().options(problem, request)
        if self.selects(request) != Selection.WINNER:
            options["nvgemm_max_profiling_configs"] = None
        return options


def _library(release: tuple[int, int]) -> tuple[str, str, str]:
    """The module with the operators that Inductor of a release imports, its distribution, and how to install it."""
    if release < (2, 14):
        source = "git+https://github.com/NVIDIA/cutlass@cutlass_api#subdirectory=python/cutlass_api"
        return "cutlass_api", "cutlass_api", f"pip install '{source}'"
    version = "0.2.0" if release >= (2, 15) else "0.1.0"
    return "cutlass.operators", "nvidia-cutlass-operators", f"pip install nvidia-cutlass-operators=={version}"


def _has(module: str) -> bool:
    """Whether ``module`` can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
