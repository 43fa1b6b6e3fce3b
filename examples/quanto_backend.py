"""optimum-quanto's products with a weight of 8 or 4 bits, and of two 8-bit operands, on the CPU as ``quanto``.

Requirements: optimum-quanto
Run: PYTHONPATH=examples pytest -p quanto_backend --pyargs pytest_gemm.conformance --gemm-backends=quanto

``quanto::qbytes_mm`` is what a linear of a quantised weight calls
(https://github.com/huggingface/optimum-quanto/blob/main/optimum/quanto/library/README.md).  In f32 and f16, and in bf16
where K is no multiple of 4, the weight is decoded to A's type first: one more rounding of each.  Else it is ATen's
kernel for bf16.  A weight of 4 bits is decoded too, when its zero points are subtracted as integers.  i8 by i8 is
summed in int32 and multiplied by the product of both scales, in f32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend, plain
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract


def product(a: Any, b: Any) -> Any:
    """The product of two matrices: scales of 1."""
    import torch

    weight = b.mT.contiguous()
    return torch.ops.quanto.qbytes_mm(a, weight, torch.ones(len(weight), 1, dtype=a.dtype))


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """woq_int8, woq with codes of 4 bits, and da8w8 with one scale of A."""
    import torch

    if not takes(problem):
        return None
    if problem.op.name == "woq":
        return functools.partial(torch.nn.functional.linear, tensors["a"], int4(problem, tensors))
    scale = tensors["scale" if problem.op.name == "woq_int8" else "scale_b"].reshape(-1, 1)
    if problem.op.name == "da8w8":
        scale = tensors["scale_a"] * scale
    out = getattr(torch, problem.dtypes.out.torch_name)
    return lambda: torch.ops.quanto.qbytes_mm(tensors["a"], tensors["b"], scale).to(out)


def int4(problem: Any, tensors: Mapping[str, Any]) -> Any:
    """A weight of 4 bits in groups of its rows, with zero points."""
    import torch
    from optimum.quanto import WeightQBitsTensor, qint4

    b, size = tensors["b"], problem.group_size
    zeros = tensors["zero_b"] if "zero_b" in tensors else torch.full_like(tensors["scale_b"], 8, dtype=torch.uint8)
    scale, shift = (x.reshape(-1, 1) for x in (tensors["scale_b"], zeros))
    return WeightQBitsTensor(qint4, 0, size, b.size(), b.stride(), b.reshape(-1, size), scale, shift)


def takes(problem: Any) -> bool:
    """Whether it is one product with scales, and nothing around it."""
    is_one = problem.op.name == "woq_int8" or (problem.op.name == "da8w8" and problem.step("columnwise") is not None)
    if problem.op.name == "woq" and problem.dtypes.b.name == "i4":
        is_one = not (problem.step("nf4") or problem.step("inside") or problem.shape.k % problem.group_size)
        is_one = is_one and problem.shape.k > 0  # the packing of codes divides by their number
    return is_one and not problem.epilogue and plain(problem)


class QuantoBackend(CallableBackend):
    """The backend."""

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """The weight that is decoded first is rounded to A's type."""
        out = problem.dtypes.out
        decodes = problem.op.name == "woq" or (
            problem.op.name == "woq_int8" and (out.name != "bf16" or problem.shape.k % 4 != 0)
        )
        return Contract("f32", "fused", input_error=out.unit_roundoff if decodes else 0.0)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """What the example binds."""
        return None if takes(problem) else Unsupported("op", "it has woq_int8, woq of i4, and da8w8 with columnwise")


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"distributions": ("optimum-quanto",), "imports": ("optimum.quanto",), "bind": bind}
    registry.add(QuantoBackend("quanto", product, ("f32", "f16", "bf16", "i8"), devices=("cpu",), **facts))
