"""optimum-quanto's product with an 8-bit weight, and that of two 8-bit operands, on the CPU as the backend ``quanto``.

Requirements: optimum-quanto
Run: PYTHONPATH=examples pytest -p quanto_backend --pyargs pytest_gemm.conformance --gemm-backends=quanto

``quanto::qbytes_mm`` is what a linear of a quantised weight calls
(https://github.com/huggingface/optimum-quanto/blob/main/optimum/quanto/library/README.md).  In f32 and f16, and in bf16
where K is no multiple of 4, the weight is decoded to A's type first: one more rounding of each.  Else it is ATen's
kernel for bf16.  i8 by i8 is summed in int32 and multiplied by the product of both scales, in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract


def product(a: Any, b: Any) -> Any:
    """The product of two matrices: scales of 1."""
    import torch

    weight = b.mT.contiguous()
    return torch.ops.quanto.qbytes_mm(a, weight, torch.ones(len(weight), 1, dtype=a.dtype))


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """woq_int8 and da8w8 with one scale of A."""
    import torch

    if not takes(problem):
        return None
    scale = tensors["scale" if problem.op.name == "woq_int8" else "scale_b"].reshape(-1, 1)
    if problem.op.name == "da8w8":
        scale = tensors["scale_a"] * scale
    out = getattr(torch, problem.dtypes.out.torch_name)
    return lambda: torch.ops.quanto.qbytes_mm(tensors["a"], tensors["b"], scale).to(out)


def takes(problem: Any) -> bool:
    """Whether it is one product with scales, and nothing around it."""
    is_one = problem.op.name == "woq_int8" or (problem.op.name == "da8w8" and problem.step("columnwise") is not None)
    return is_one and not problem.epilogue and not problem.flags and problem.shape.batch is None


class QuantoBackend(CallableBackend):
    """The backend."""

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """The weight that is decoded first is rounded to A's type."""
        out = problem.dtypes.out
        decodes = problem.op.name == "woq_int8" and (out.name != "bf16" or problem.shape.k % 4 != 0)
        return Contract("f32", "fused", input_error=out.unit_roundoff if decodes else 0.0)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """What the example binds."""
        return None if takes(problem) else Unsupported("op", "it has woq_int8, and da8w8 with quant.columnwise")


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"distributions": ("optimum-quanto",), "imports": ("optimum.quanto",), "bind": bind}
    registry.add(QuantoBackend("quanto", product, ("f32", "f16", "bf16", "i8"), devices=("cpu",), **facts))
