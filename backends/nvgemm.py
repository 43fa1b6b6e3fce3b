"""``nvgemm``: Inductor's NVIDIA Universal GEMM backend, CuTe DSL kernels out of CUTLASS's library of operators.

The library has had two names: ``cutlass_api``, and ``cutlass.operators`` from torch 2.14 on.  Inductor's own code says
which one it imports.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import DEFAULT, BuildRequest, Selection
from pytest_gemm.backends.cutedsl import DEVICE_KERNEL
from pytest_gemm.backends.inductor.backend import InductorBackend, installed
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class _Library:
    """A package that has the operators: its distribution, and how to install it; the version is filled in."""

    distribution: str
    remedy: str


# By the module that Inductor imports.
_LIBRARIES: Mapping[str, _Library] = {
    "cutlass_api": _Library(
        "cutlass_api",
        "pip install 'git+https://github.com/NVIDIA/cutlass@cutlass_api#subdirectory=python/cutlass_api'",
    ),
    "cutlass.operators": _Library("nvidia-cutlass-operators", "pip install nvidia-cutlass-operators=={version}"),
}


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
        from pytest_gemm.backends.inductor import nvgemm_facts

        if not _has("cutlass"):
            return Availability.lacking(
                "no-cutlass-dsl", "the CuTe DSL is not installed", "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3'"
            )
        module = nvgemm_facts.module()
        library = _LIBRARIES.get(module, _Library(module, f"install the package that has the module {module}"))
        remedy = library.remedy.format(version="0.2.0" if nvgemm_facts.brings_operators() else "0.1.0")
        if not _has(module):
            text = f"Inductor of {nvgemm_facts.release()} imports {module}, which is not installed"
            return Availability.lacking("no-cutlass-operators", text, remedy)
        if why := nvgemm_facts.misfit():
            text = f"Inductor of {nvgemm_facts.release()} cannot use the installed {library.distribution}: {why}"
            return Availability.lacking("other-cutlass-operators", text, remedy)
        return Availability(versions=installed("nvidia-cutlass-dsl", library.distribution))

    def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, Any]:
        """With every operator of the library among the candidates, but where the winner is wanted that a user gets."""
        options = super().options(problem, request)
        if self.selects(request) != Selection.WINNER:
            options["nvgemm_max_profiling_configs"] = None
        return options


def _has(module: str) -> bool:
    """Whether ``module`` can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
