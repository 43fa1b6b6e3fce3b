"""bitsandbytes' 8-bit linear (LLM.int8) on the CPU as the backend ``bitsandbytes``.

Requirements: bitsandbytes
Run: PYTHONPATH=examples pytest -p bitsandbytes_backend --pyargs pytest_gemm.conformance --gemm-backends=bitsandbytes

https://huggingface.co/docs/bitsandbytes/main/en/reference/functional: ``int8_linear_matmul`` sums in int32, and
``int8_mm_dequant`` multiplies by the statistics of A's rows and of B's columns, the largest magnitudes that stand for
the code 127: each is 127 times a scale, and the sums are divided by 127 * 127.  It computes in f32 and rounds once.
Beside the two roundings of two scales there are those of both statistics, of the constant 1 / 127^2, and of the product
with it: (1 + 2^-24)^4 - 1 < 5 * 2^-24.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Unsupported


def matmul(a: Any, b: Any) -> Any:
    """The product of two int8 matrices."""
    from bitsandbytes import functional

    return functional.int8_linear_matmul(a, b.mT)


def statistics(scale: Any, count: int) -> Any:
    """The largest magnitude of each row, for which the code 127 stands."""
    import torch

    return (127.0 * scale.to(torch.float32)).reshape(-1).expand(count).contiguous()


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """da8w8: the product and what follows it, with the bias."""
    import torch
    from bitsandbytes import functional

    if problem.op.name != "da8w8" or problem.chain or problem.flags:
        return None
    a, b, out = tensors["a"].flatten(0, -2), tensors["b"], getattr(torch, problem.dtypes.out.torch_name)
    rows, columns = statistics(tensors["scale_a"], a.shape[0]), statistics(tensors["scale_b"], b.shape[0])
    dequant, bias = torch.ops.bitsandbytes.int8_mm_dequant.default, tensors.get("bias")

    def int8_mm_dequant() -> Any:
        sums = functional.int8_linear_matmul(a, b)
        return dequant(sums, rows, columns, dtype=out, bias=bias).reshape(problem.result_shape)

    return int8_mm_dequant


class BitsAndBytesBackend(CallableBackend):
    """The backend."""

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """The products of int8."""
        if problem.op.name not in {"int_mm", "da8w8"}:
            return Unsupported("op", "the 8-bit product of bitsandbytes is int_mm and da8w8")
        return super().supports(problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"batched": False, "distributions": ("bitsandbytes",), "imports": ("bitsandbytes",), "bind": bind}
    facts |= {"arithmetic": {"scale_error": 5 * 2.0**-24}, "devices": ("cpu",)}
    registry.add(BitsAndBytesBackend("bitsandbytes", matmul, ("i8",), **facts))
