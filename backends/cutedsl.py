"""``cutedsl``: CuTe DSL kernels through ``cutlass.operators``.  It has no products yet; it says so."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, NoReturn

from pytest_gemm.backend import Availability, Unsupported
from pytest_gemm.backends.inductor import installed, no_cuda
from pytest_gemm.outcome import Reason
from pytest_gemm.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands import Operands

__all__ = ["CuteDslBackend"]

_REMEDY = "pip install 'nvidia-cutlass-dsl[cu13]==4.6.3' nvidia-cutlass-operators==0.1.0"


class CuteDslBackend:
    """Known by name and by what it needs; every problem is refused until its kernels are wired up."""

    name: str = "cutedsl"
    devices: tuple[str, ...] = ("cuda",)

    def availability(self, device: str) -> Availability:
        """A CUDA device and the two packages."""
        if device != "cuda":
            return Availability(Reason("device", f"cutedsl computes on cuda, not on {device}", "--gemm-device=cuda"))
        if reason := no_cuda():
            return Availability(reason)
        try:
            found = importlib.util.find_spec("cutlass.operators") is not None
        except ImportError:
            found = False
        if not found:
            return Availability(Reason("no-cutlass-operators", "nvidia-cutlass-operators is not installed", _REMEDY))
        return Availability(versions=installed("nvidia-cutlass-dsl", "nvidia-cutlass-operators"))

    def supports(self, problem: Problem) -> Unsupported:
        """A refusal for every problem."""
        return Unsupported("not-wired", f"pytest-gemm does not run {problem.op.name} through cutlass.operators yet")

    def prepare(self, problem: Problem, operands: Operands) -> NoReturn:
        """Never.

        Raises:
            Unsupported: always.
        """
        raise self.supports(problem)
