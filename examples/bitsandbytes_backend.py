"""bitsandbytes' 8-bit linear (LLM.int8) and 4-bit linear (NF4) on the CPU as the backend ``bitsandbytes``.

Requirements: bitsandbytes
Run: PYTHONPATH=examples pytest -p bitsandbytes_backend --pyargs pytest_gemm.conformance --gemm-backends=bitsandbytes

https://huggingface.co/docs/bitsandbytes/main/en/reference/functional: ``int8_linear_matmul`` sums in int32, and
``int8_mm_dequant`` multiplies by the statistics of A's rows and of B's columns, their largest magnitudes, divides by
127 * 127 and adds a bias.  It computes in f32 and rounds once.  ``matmul_4bit`` decodes a weight in blocks to the type
of A, which is one more rounding, and multiplies then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gemm.api.callable import CallableBackend, plain
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract


def matmul(a: Any, b: Any) -> Any:
    """The product of two int8 matrices."""
    from bitsandbytes import functional

    return functional.int8_linear_matmul(a, b.mT)


def bind(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What the library has an operator for."""
    if problem.op.name == "int_mm":
        return None
    return (int8 if problem.op.name == "da8w8" else nf4)(problem, tensors)


def int8(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """The product and what follows it, with the bias."""
    import torch
    from bitsandbytes import functional

    a, b, bias = tensors["a"], tensors["b"], tensors.get("bias")
    out = getattr(torch, problem.dtypes.out.torch_name)
    rows, columns = tensors["scale_a"].flatten(), tensors["scale_b"].flatten()
    dequant = torch.ops.bitsandbytes.int8_mm_dequant.default

    def int8_mm_dequant() -> Any:
        return dequant(functional.int8_linear_matmul(a, b), rows, columns, dtype=out, bias=bias)

    return int8_mm_dequant


def nf4(problem: Any, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """A product with a weight of NF4, of which two codes are a byte, the first one its upper half."""
    import bitsandbytes
    from bitsandbytes import functional

    a, codes = tensors["a"], tensors["b"].reshape(-1, 2)
    packed = ((codes[:, 0] << 4) | codes[:, 1]).reshape(-1, 1)
    table = functional.get_4bit_type("nf4", device="cpu")
    known = {"blocksize": problem.group_size, "quant_type": "nf4", "dtype": a.dtype}
    state = functional.QuantState(tensors["scale_b"].flatten(), tensors["b"].shape, table, **known)
    return functools.partial(bitsandbytes.matmul_4bit, a, packed, quant_state=state)


class BitsAndBytesBackend(CallableBackend):
    """The backend."""

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """A weight of NF4 is rounded to A's type."""
        error = problem.dtypes.out.unit_roundoff + 2.0**-24 if problem.op.name == "woq" else 0.0
        return dataclasses.replace(super().contract(problem, own=own), input_error=error)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """int_mm, and what is bound."""
        if problem.op.name == "int_mm":
            return super().supports(problem)
        has_own = problem.step("absmax") or problem.step("nf4")
        if has_own and plain(problem) and not problem.chain:
            return None
        return Unsupported("op", "bitsandbytes has int_mm, da8w8 with quant.absmax, and woq with quant.nf4, no steps")


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    facts: Any = {"batched": False, "distributions": ("bitsandbytes",), "imports": ("bitsandbytes",), "bind": bind}
    dtypes = ("i8", "f32", "f16", "bf16")
    registry.add(BitsAndBytesBackend("bitsandbytes", matmul, dtypes, devices=("cpu",), **facts))
