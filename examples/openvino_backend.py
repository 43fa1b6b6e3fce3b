"""OpenVINO's matrix product on the CPU as the backend ``openvino``.

Requirements: openvino
Run: PYTHONPATH=examples pytest -p openvino_backend --pyargs pytest_gemm.conformance --gemm-backends=openvino

https://docs.openvino.ai/2024/openvino-workflow/running-inference/inference-devices-and-modes/cpu-device.html has the
types that the device computes in, f32 and bf16: f16 is converted to f32, and INFERENCE_PRECISION_HINT selects bf16
for bf16 alone.  CPU_DENORMALS_OPTIMIZATION is off, which keeps subnormal numbers, and so is dynamic quantisation.
In f32 both operands are inputs, as subnormal numbers of a constant become zeros whatever the options are
(https://github.com/openvinotoolkit/openvino/pull/19360).  An i8 weight is decoded to f32: one rounding more.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.numerics.contract import Contract


def tensor(one: Any) -> Any:
    """An OpenVINO tensor in the memory of PyTorch's."""
    import openvino
    import torch

    if one.dtype is torch.bfloat16:  # numpy has no bf16
        return openvino.Tensor(one.view(torch.int16).numpy(), one.shape, openvino.Type.bf16)
    return openvino.Tensor(one.numpy(), shared_memory=True)


def matmul(a: Any, b: Any, scale: Any = None) -> Any:
    """A product of two inputs, or with a constant weight, which OpenVINO packs; one with a scale is N x K."""
    import openvino
    import torch
    from openvino import opset13 as ops

    a, b = a.contiguous(), b.contiguous()
    given = [tensor(a), tensor(b)]
    inputs = [ops.parameter(list(one.shape), one.element_type) for one in given]
    weight = inputs[1]
    if b.dim() == 2 and b.dtype is not torch.float32:
        inputs, weight = inputs[:1], ops.constant(given.pop(), shared_memory=True)
    if scale is not None:
        weight = ops.multiply(ops.convert(weight, "f32"), scale.reshape(-1, 1).numpy())
    model = openvino.Model([ops.matmul(inputs[0], weight, False, scale is not None)], inputs)
    kind = "bf16" if a.dtype is torch.bfloat16 else "f32"
    options = {"CPU_DENORMALS_OPTIMIZATION": "NO", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = openvino.Core().compile_model(model, "CPU", {**options, "INFERENCE_PRECISION_HINT": kind})
    request = compiled.create_infer_request()
    request.infer(given)
    made = request.get_output_tensor(0).data.copy()
    return torch.from_numpy(made.view("int16")).view(torch.bfloat16) if kind == "bf16" else torch.from_numpy(made)


class OpenVinoBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def bind(self, problem: Any, t: Any) -> Any:
        """A product with a compressed weight and its scale; of others the product alone is called."""
        own = problem.op.name == "woq_int8" and problem.dtypes.a.name == "f32"
        return (
            functools.partial(matmul, t["a"], t["b"], t["scale"])
            if own and not problem.epilogue and not problem.flags
            else None
        )

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """A weight is decoded first."""
        return dataclasses.replace(super().contract(problem, own=own), input_error=2.0**-24 if own else 0.0)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs: dict[str, Any] = {"distributions": ("openvino",), "imports": ("openvino",)}
    registry.add(OpenVinoBackend("openvino", matmul, ("f32", "bf16", "f16"), **needs))
