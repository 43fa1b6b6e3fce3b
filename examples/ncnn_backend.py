"""ncnn's Gemm and MatMul layers on the CPU as the backend ``ncnn``.

Requirements: ncnn
Run: PYTHONPATH=examples pytest -p ncnn_backend --pyargs pytest_gemm.conformance --gemm-backends=ncnn

Gemm multiplies two matrices, MatMul two batches (https://github.com/Tencent/ncnn/blob/master/docs/developer-guide
/operators.md), in f32 where use_bf16_storage and the options of fp16 are off.  The page says nothing of the order of
the sum, NaN and subnormal numbers.  bf16 is left out: ncnn may round ties away from zero
(https://github.com/Tencent/ncnn/pull/6925), which no contract can say.
"""

from __future__ import annotations

from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported

MODEL = """7767517
3 3
Input a 0 1 a
Input b 0 1 b
{layer} product 2 1 a b c
"""


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import ncnn
    import torch

    net = ncnn.Net()
    net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_fp16_packed = False
    net.opt.use_bf16_storage, net.opt.num_threads = False, torch.get_num_threads()
    net.load_param_mem(MODEL.format(layer="Gemm" if a.dim() == 2 else "MatMul"))
    net.load_model_mem(b"\0" * 16)
    x, y = (one.contiguous().numpy() for one in (a, b))
    extractor = net.create_extractor()
    extractor.input("a", ncnn.Mat(x))
    extractor.input("b", ncnn.Mat(y))
    status, made = extractor.extract("c")
    if status:
        raise RuntimeError(f"ncnn's extract returned {status}")
    return torch.from_numpy(made.numpy().copy())


class NcnnBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """All but empty operands."""
        if problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("empty", "an ncnn::Mat has no empty dimension")
        return super().supports(problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    registry.add(NcnnBackend("ncnn", matmul, ("f32",), distributions=("ncnn",), imports=("ncnn",)))
