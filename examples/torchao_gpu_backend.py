"""torchao's quantised linears on CUDA as the backend ``torchao-gpu``; judged on an H200.

Requirements: torchao==0.18.0; torch for CUDA; compute capability 8.0, for fp8 8.9
Run: PYTHONPATH=examples pytest -p torchao_gpu_backend --pyargs pytest_gemm.conformance --gemm-backends=torchao-gpu

int_mm is ``safe_int_mm`` and da8w8 ``int_scaled_matmul``, whose sums are int32; scaled_mm is a linear of two
``Float8Tensor`` with scales of rows (e4m3, ``KernelPreference.TORCH``: cuBLASLt, without fast accumulation but where
the problem asks for it); woq_int4 one of ``Int4TilePackedTo4dTensor``, whose weight is decoded to bf16, an error of u
for each, and summed in f32 (https://docs.pytorch.org/ao/stable/).  All round to the tensor's type after every
operation, as eager PyTorch does.  Nothing is f32, and so nothing TF32.  A linear of ``Int8Tensor`` is PyTorch's own mm.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported

SCALES = {"da8w8": "rowwise", "scaled_mm": "rowwise", "woq_int4": "group"}  # of torchao's linears
TYPES = {"scaled_mm": "f8e4m3fn-f8e4m3fn-bf16", "woq_int4": "bf16-i4-bf16"}


def matmul(a: Any, b: Any) -> Any:
    """The product of two int8 matrices."""
    from torchao.kernel import safe_int_mm

    return safe_int_mm(a, b)


def linear(problem: Any, **t: Any) -> Any:
    """The linear of an op, by torchao's tensors."""
    import torch.nn.functional as f
    from torchao import quantization as ao
    from torchao.float8.inference import Float8MMConfig
    from torchao.kernel import int_scaled_matmul
    from torchao.quantization.quantize_.common import KernelPreference as Preference

    a, b, out = t["a"], t["b"], getattr(f.torch, problem.dtypes.out.torch_name)
    if problem.op.name == "da8w8":
        return lambda: (int_scaled_matmul(a, b.mT, t["scale_a"]) * t["scale_b"] + t.get("bias", 0)).to(out)
    if problem.op.name == "scaled_mm":
        how = Float8MMConfig(use_fast_accum=problem.has("math.fast_accumulate")), None, Preference.TORCH, out
        x, w = (ao.Float8Tensor(*s, [1, a.shape[1]], *how) for s in ((a, t["scale_a"]), (b.mT, t["scale_b"].mT)))
        return lambda: f.linear(x, w, t.get("bias"))
    n, k = b.shape
    wide = f.pad(b, (0, -k % 1024, 0, -n % 8))  # as from_hp() pads it
    scales = f.pad(t["quantisation"], (0, 0, 0, -n % 8, 0, -k % 1024 // problem.group_size)).contiguous()
    packed = f.torch.ops.aten._convert_weight_to_int4pack((wide[:, ::2] << 4 | wide[:, 1::2]).contiguous(), 8)
    return functools.partial(f.linear, a, ao.Int4TilePackedTo4dTensor(packed, scales, [1, problem.group_size], b.shape))


class TorchaoGpuBackend(CudaCallableBackend):
    """The backend."""

    epilogue = "eager"

    def bind(self, problem: Any, tensors: Any) -> Any:
        """The linears; of int_mm the product inside of the program."""
        return linear(problem, **tensors) if problem.op.name in SCALES else None

    def contract(self, problem: Any, *, own: bool = False) -> Any:
        """A rounding of each 4-bit weight."""
        error = {"input_error": 2.0**-8, "input_bits": 8} if problem.op.name == "woq_int4" else {}
        return dataclasses.replace(super().contract(problem, own=own), **error)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """The quantised products, of which torchao has one kind each."""
        op, kind = problem.op.name, SCALES.get(problem.op.name, "")
        alone = not ({*problem.flags} - {"math.fast_accumulate"} or problem.chain or problem.shape.batch)
        if kind and not (alone and problem.step(kind) and TYPES.get(op, str(problem.dtypes)) == str(problem.dtypes)):
            return Unsupported("scales", f"torchao's {op} is {TYPES.get(op, op)} with quant.{kind}, without steps")
        return super().supports(problem, request or DEFAULT)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"distributions": ("torchao",), "batched": False, "library": True, "rules": ("scaled",)}
    registry.add(TorchaoGpuBackend("torchao-gpu", matmul, ("i8",), imports=("torchao.quantization",), **how))
