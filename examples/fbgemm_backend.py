"""FBGEMM's 8-bit linear on the CPU, as PyTorch has it, as the backend ``fbgemm``.

Requirements: a torch that is built with FBGEMM, as those of PyPI are
Run: PYTHONPATH=examples pytest -p fbgemm_backend --pyargs pytest_gemm.conformance --gemm-backends=fbgemm

https://docs.pytorch.org/docs/stable/generated/torch.ao.nn.quantized.Linear.html: ``quantized::linear`` and
``quantized::linear_relu`` take u8 codes with a scale and a zero point, an i8 weight with a scale for each column, a
bias in f32, and give u8 codes.  FBGEMM sums in int32, multiplies in f32, and rounds to nearest even
(https://github.com/pytorch/FBGEMM/blob/main/include/fbgemm/QuantUtils.h).  Its product of f32 by a weight that is
packed in f16 sums in f32 (https://github.com/pytorch/FBGEMM/blob/main/include/fbgemm/FbgemmFP16.h).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import Availability
from pytest_gemm.core.outcome import Unsupported


@contextlib.contextmanager
def engine() -> Iterator[Any]:
    """A block in which weights are packed by FBGEMM, without PyTorch's warnings that quantized tensors go."""
    import torch

    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch
    torch.backends.quantized.engine = before


def product(a: Any, weight: Any) -> Any:
    """The product of a matrix in f32 and a packed one, which FBGEMM keeps in f16."""
    with engine() as torch:
        return torch.fbgemm_linear_fp16_weight_fp32_activation(a.contiguous(), weight, None)


def pack(b: Any) -> Any:
    """A weight of f16 as FBGEMM packs it."""
    with engine() as torch:
        return torch.fbgemm_pack_gemm_matrix_fp16(b.mT.float().contiguous())


def linear(problem: Any, a: Any, b: Any, columns: Any, bias: Any) -> Callable[[], Any]:
    """The call of the operator of codes of A (M, K) and of B (N, K)."""
    (scale, zero), (out_scale, out_zero) = (problem.step(name).numbers for name in ("static", "requant"))
    with engine() as torch:
        zeros = torch.zeros(len(columns), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(b.contiguous(), columns.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(weight, bias)
        given = torch._make_per_tensor_quantized_tensor(a.contiguous(), scale, int(zero))
        operator = torch.ops.quantized.linear_relu if problem.step("relu") else torch.ops.quantized.linear
    return lambda: operator(given, packed, out_scale, int(out_zero)).int_repr()


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The linear with its bias and a relu, or the product with a weight of f16."""
    if problem.op.name != "qlinear":
        return None if problem.epilogue else functools.partial(product, tensors["a"], pack(tensors["b"]))
    bias = tensors["bias"].float() if "bias" in tensors else None
    return linear(problem, tensors["a"], tensors["b"], tensors["scale_b"], bias)


def takes(problem: Any) -> bool:
    """Whether it is u8 codes in and out with no step but a bias and a relu, or an f32 matrix by one of f16."""
    steps = [str(step) for step in problem.chain if step.name != "bias"]
    is_linear = str(problem.dtypes) == "u8-i8-u8" and steps in ([], ["relu"]) and problem.step("static") is not None
    return is_linear or str(problem.dtypes) == "f32-f16-f32"


class FbgemmBackend(CallableBackend):
    """The backend."""

    def availability(self, device: str) -> Availability:
        """A build of PyTorch with FBGEMM."""
        import torch

        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return Availability.lacking("no-fbgemm", "this PyTorch is built without FBGEMM", "install one with it")
        return super().availability(device)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """What the operators take."""
        if not takes(problem):
            return Unsupported("op", "FBGEMM's are a static qlinear from u8 to u8, and mixed_mm of f32 and f16")
        return None


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    registry.add(FbgemmBackend("fbgemm", product, ("u8", "i8", "f32"), bind=bind, pack=pack, devices=("cpu",)))
