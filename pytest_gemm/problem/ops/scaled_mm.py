"""scaled_mm: fp8 operands with scales for the whole tensor or for each row of A and column of B."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import OUTPUTS, Matmul, Op, Tensor, Tensors, dtype_of

_FP8: Final = frozenset({"f8e4m3fn", "f8e5m2"})


def _native(torch: Any, p: Any, t: Tensors) -> Tensor:
    return torch._scaled_mm(
        t["a"],
        t["b"],
        scale_a=t["scale_a"],
        scale_b=t["scale_b"],
        bias=t.get("bias"),
        out_dtype=dtype_of(torch, p),
        use_fast_accum=p.has("math.fast_accumulate"),
    )


def _around(torch: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    """fp8 holds neither the sum nor the scaled sum: ``matmul`` gives f32, and the result is rounded once."""
    c = matmul(t["a"], t["b"]).to(torch.float32) * t["scale_a"] * t["scale_b"]
    return (c + t["bias"].to(torch.float32) if "bias" in t else c).to(dtype_of(torch, p))


OP: Final = Op(
    "scaled_mm",
    "never",
    lambda a, b, out: a in _FP8 and b in _FP8 and out in {"bf16", "f16", "f32"},
    "for example f8e4m3fn-f8e4m3fn-bf16",
    _native,
    _around,
    constant_b=False,
    own_bias=True,
    rounds_once=True,
    layouts=(Layout.NT,),
    scales=("tensorwise", "rowwise"),
    flags=("b.alias_t", "b.argument", *OUTPUTS, "math.fast_accumulate"),
)
