"""MNN's matrix product on the CPU as the backend ``mnn``.

Requirements: mnn
Run: PYTHONPATH=examples pytest -p mnn_backend --pyargs pytest_gemm.conformance --gemm-backends=mnn

expr.matmul multiplies two matrices or two batches (https://github.com/alibaba/MNN/blob/2.5.3/docs/pymnn/expr.md), on
x86 in f32.  The page says nothing of the order of the sum, NaN and subnormal numbers.  An empty result cannot be read.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import torch
    from MNN import expr

    expr.set_thread_number(torch.get_num_threads())
    x, y = (expr.const(one.contiguous().numpy(), list(one.shape), expr.NCHW) for one in (a, b))
    return torch.from_numpy(expr.matmul(x, y).read().copy())


class MnnBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """All but empty results."""
        if problem.shape.is_empty:
            return Unsupported("empty", "MNN's Var.read fails where there is nothing to read")
        return super().supports(problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    registry.add(MnnBackend("mnn", matmul, ("f32",), distributions=("mnn",), imports=("MNN.expr",)))
