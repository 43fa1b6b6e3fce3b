"""woq_int4: a weight in 4-bit codes with a scale and a zero for each group of K and column."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import HALVES, Complaints, Op, Tensor, Tensors


def _pack(torch: Any, _: Any, weight: Tensor) -> Tensor:
    """Two codes of 0 to 15 in a byte, in ATen's order, which depends on the processor."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.to(torch.int32).contiguous(), 1)


def _native(torch: Any, p: Any, t: Tensors) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(t["a"], t["b"], p.group_size, t["quantisation"])


def _derived(torch: Any, p: Any, t: Tensors) -> Tensors:
    return {"b:packed": _pack(torch, p, t["b"])} if "b" in t else {}


def _check(p: Any) -> Complaints:
    if p.shape.k % p.group_size:
        problem = f"K={p.shape.k} is no multiple of the group {p.group_size}"
        yield "quant", 0, problem, "give another K, or a group of 32, 64, 128 or 256"


OP: Final = Op(
    "woq_int4",
    "never",
    lambda a, b, out: a in HALVES | {"f32"} and b == "i4" and out == a,
    "for example bf16-i4-bf16",
    _native,
    layouts=(Layout.NT,),
    scales=("group",),
    weight=True,
    converts=True,
    weight_scales=True,
    pack=_pack,
    derived=_derived,
    check=_check,
)
