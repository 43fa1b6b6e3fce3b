"""da8w4: the op quantises the rows of A to 8 bits itself, and multiplies by a weight of 4 bits with scales of groups.

``_dyn_quant_matmul_4bit``, of a weight that ``_dyn_quant_pack_4bit_weight`` has packed with its scales and the bias.
A group of all of K has a kernel of its own.
"""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.ops.op import OUTPUTS, Complaints, Matmul, Problem, Tensor, Tensors, dtype_of
from pytest_gemm.problem.ops.woq import check_groups, of_codes


def _pack(torch: Any, p: Problem, t: Tensors) -> Tensor:
    """Two codes in a byte, the first in its lower half; the packed weight holds scales and bias too."""
    codes, scales = t["b"], t["quantisation"][..., 0].mT.to(torch.float32).contiguous()
    halves = (codes[:, ::2] | (codes[:, 1::2] << 4)).contiguous()
    sizes = (p.group_size, p.shape.k, p.shape.n)
    return torch.ops.aten._dyn_quant_pack_4bit_weight(halves, scales, t.get("bias"), *sizes)


def _native(torch: Any, p: Problem, t: Tensors) -> Tensor:
    return torch.ops.aten._dyn_quant_matmul_4bit(t["a"], t["b"], p.group_size, p.shape.k, p.shape.n)


def _around(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The same with ``matmul`` for codes and scaled weights, in f32."""
    a = t["a"].to(torch.float32)
    low, high = a.amin(1, keepdim=True).clamp(max=0.0), a.amax(1, keepdim=True).clamp(min=0.0)
    scale = torch.where(high == low, 1.0, 255.0 / (high - low))
    zero = torch.round(-128.0 - low * scale)
    codes = torch.clamp(torch.round(a * scale) + zero, -128.0, 127.0) - zero
    each = t["quantisation"][..., 0].to(torch.float32).repeat_interleave(p.group_size, 0)
    c = matmul(codes, (t["b"].mT.to(torch.float32) - 8.0) * each) / scale
    return (c + t["bias"].to(torch.float32) if "bias" in t else c).to(dtype_of(torch, p))


def _derived(torch: Any, p: Problem, t: Tensors) -> Tensors:
    parts = [name for name in ("b", "quantisation", "bias") if name in t]
    return {f"{'+'.join(parts)}:packed": _pack(torch, p, t)} if "b" in parts and "quantisation" in parts else {}


def _check(p: Problem) -> Complaints:
    yield from check_groups(p)
    if p.shape.k == 0:
        yield "shape", 2, "a row without elements has no scale", "give a K of 32 or more"
    if p.dtypes.a.name == "bf16" and p.group_size != p.shape.k:
        yield "quant", 0, f"with an A of bf16 the group is all of K={p.shape.k}", "write f32-i4-f32, or another K"


OPS: Final = (
    of_codes(
        "da8w4",
        dtypes=("f32-i4-f32", "bf16-i4-bf16"),
        native=_native,
        around=_around,
        help="aten::_dyn_quant_matmul_4bit: rows of A are quantised to 8 bits by the op, B is packed i4",
        scales=("group",),
        own_bias=True,
        quantises_a=True,
        pack=_pack,
        derived=_derived,
        check=_check,
        flags=OUTPUTS[1:],
    ),
)
