"""torchao's quantised linears on the CPU as the backend ``torchao``.

Requirements: torchao
Run: PYTHONPATH=examples pytest -p torchao_backend --pyargs pytest_gemm.conformance --gemm-backends=torchao

int_mm is ``safe_int_mm`` and da8w8 ``int_scaled_matmul``, with exact int32 sums; woq_int8 and woq_int4 are a linear
of ``Int8Tensor`` and of ``Int4OpaqueTensor``, whose weight is packed.  All round to the tensor's type after every
operation, as eager PyTorch does (https://docs.pytorch.org/ao/stable/).
"""

from __future__ import annotations

import functools
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported

OPS = ("int_mm", "da8w8", "woq_int8", "woq_int4")


def matmul(a: Any, b: Any) -> Any:
    """The product of two int8 matrices."""
    from torchao.kernel import safe_int_mm

    return safe_int_mm(a, b)


class TorchaoBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)
    epilogue = "eager"

    def bind(self, problem: Any, t: Any) -> Any:
        """Pack the weight, and return the linear; of int_mm the product is called inside of the program."""
        import torch
        from torchao.kernel import int_scaled_matmul
        from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor
        from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

        if problem.op.name == "int_mm":
            return None
        if problem.op.name == "da8w8":
            out, scale_a = getattr(torch, problem.dtypes.out.torch_name), t["scale_a"].contiguous()
            return lambda: (int_scaled_matmul(t["a"], t["b"].mT, scale_a) * t["scale_b"]).to(out)
        n, k = t["b"].shape
        if problem.op.name == "woq_int8":
            weight = Int8Tensor(t["b"], t["scale"].reshape(n, 1), [1, k], t["a"].dtype)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(t["b"].to(torch.int32).contiguous(), 1)
            weight = Int4OpaqueTensor(packed, t["quantisation"], [1, problem.group_size], torch.Size([n, k]))
        return functools.partial(torch.nn.functional.linear, t["a"], weight)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """The quantised products, without what torchao leaves to PyTorch."""
        if problem.op.name not in OPS:
            return Unsupported("op", f"torchao's linears are {', '.join(OPS)}")
        if problem.op.name != "int_mm" and (problem.epilogue or problem.flags or problem.shape.batch):
            return Unsupported("steps", "the example has the linear alone", "leave out steps and flags")
        if problem.op.name == "da8w8" and not problem.step("rowwise"):
            return Unsupported("scales", "int_scaled_matmul takes a scale for each row", "write quant.rowwise")
        return None


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    imports = ("torchao.prototype.quantization.int4.int4_opaque_tensor",)  # what the calls import
    how: dict[str, Any] = {"batched": False, "distributions": ("torchao",), "imports": imports}
    registry.add(TorchaoBackend("torchao", matmul, ("i8",), **how))
