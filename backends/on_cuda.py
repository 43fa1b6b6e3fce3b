"""A function that launches kernels on a CUDA device, as a backend: what the examples of GPU libraries derive from.

Its sums are those of NVIDIA's tensor cores, and it refuses a machine without a CUDA device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.rules import check
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(eq=False)
class CudaCallableBackend(CallableBackend):
    """A function on CUDA alone.

    Attributes:
        devices: CUDA.
        rules: groups of ``backends/rules.toml`` that exclude problems; ``tma``: rows begin at multiples of 16 bytes.
    """

    devices: tuple[str, ...] = ("cuda",)
    rules: Iterable[str] = ()

    def supports(self, problem: Problem, request: BuildRequest = DEFAULT) -> Unsupported | None:
        """As any function, without what the rules exclude."""
        return super().supports(problem, request) or check(tuple(self.rules), problem, request)
