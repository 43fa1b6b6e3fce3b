"""Products whose weight is quantised: woq_int8 with a scale for each column, woq_int4 with scales of groups of K.

Both are kernels of ATen's; woq_int4 adds a zero after it has scaled.  ``woq`` is what other libraries have: codes of 4
or 8 bits, ``(code - zero point) * scale`` with a scale and a zero point for each group and column, or places in a
table, times A in float, or times the codes of A that the kernel makes itself.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import OUTPUTS, Complaints, Matmul, Op, Problem, Tensor, Tensors, around_dense, dtype_of

_ATEN_GROUPS: Final = (32, 64, 128, 256)
# Weights of the flag concat: as many as Inductor's pattern has.
THIRDS: Final = 3


def _thirds(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """Three weights, each converted and multiplied by as a program with three linears does, side by side."""
    out = dtype_of(torch, p)
    products = [matmul(t["a"], t[f"b{index}"].mT.to(out)) * t[f"scale{index}"] for index in range(THIRDS)]
    return torch.cat(products, -1)


def _int8(torch: Any, p: Problem, t: Tensors) -> Tensor:
    if p.has("program.concat"):
        return _thirds(torch, p, t, torch.mm)
    if p.has("program.pt2e"):  # of a sequence, which is 3-D in a decoder
        return (torch.nn.functional.linear(t["a"][None], t["b"].to(dtype_of(torch, p))) * t["scale"])[0]
    return torch._weight_int8pack_mm(t["a"], t["b"], t["scale"])


def _around_int8(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    if p.has("program.concat"):
        return _thirds(torch, p, t, matmul)
    return around_dense(torch, p, t, matmul) * t["scale"]


def _concat(torch: Any, p: Problem, t: Tensors) -> Tensors:
    """The weights of ``concat``, and their scales, one below the other; Inductor's matcher decides in which order."""
    if not p.has("program.concat"):
        return {}
    orders = itertools.product(("b", "scale"), itertools.permutations(range(THIRDS)))
    named = [[f"{name}{index}" for index in order] for name, order in orders]
    return {f"{'+'.join(o)}:concat": torch.cat([t[name] for name in o]) for o in named if set(o) <= set(t)}


def _check_int8(p: Problem) -> Complaints:
    if p.has("program.concat") and p.shape.n % THIRDS:
        problem = f"program.concat: N={p.shape.n} is not the columns of {THIRDS} equal weights"
        yield "flags", p.flags.index("program.concat"), problem, f"a multiple of {THIRDS}"


def _pack(torch: Any, _: Any, t: Tensors) -> Tensor:
    """Two codes of 0 to 15 in a byte, in ATen's order, which depends on the processor."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(t["b"].to(torch.int32).contiguous(), 1)


def _int4(torch: Any, p: Problem, t: Tensors) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(t["a"], t["b"], p.group_size, t["quantisation"])


def _packed(torch: Any, p: Problem, t: Tensors) -> Tensors:
    return {"b:packed": _pack(torch, p, t), ":group": torch.tensor(p.group_size)} if "b" in t else {}


def check_groups(p: Problem) -> Complaints:
    """K is a whole number of groups, in a size that ATen has."""
    if p.group_size not in _ATEN_GROUPS:
        yield "quant", 0, f"{p.op.name} has no group of {p.group_size}", "give a group of 32, 64, 128 or 256"
    if p.shape.k % p.group_size:
        problem = f"K={p.shape.k} is no multiple of the group {p.group_size}"
        yield "quant", 0, problem, "give another K, or a group of 32, 64, 128 or 256"


# The entries of bitsandbytes' NF4, by their codes: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023,
# appendix E), of which -1, 0 and 1 are exact.
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# The least code, the one in the middle, which is subtracted where there are no zero points, and the largest.
CODES: Final = {"i4": (0, 8, 15), "u8": (0, 128, 255), "i8": (-128, 0, 127)}


def weight_of(torch: Any, p: Problem, t: Tensors, dtype: Any) -> Tensor:
    """The N x K weight that the codes ``b`` mean with ``scale_b`` and ``zero_b``, computed in a dtype."""

    def each(name: str) -> Tensor:
        return t[name].repeat_interleave(p.group_size, 1)[:, : p.shape.k].to(dtype)

    if p.step("nf4"):
        codes = torch.tensor(NF4, dtype=torch.float32, device=t["b"].device).to(dtype)[t["b"].long()]
    else:
        codes = t["b"].to(dtype) - (each("zero_b") if "zero_b" in t else CODES[p.dtypes.b.name][1])
    return codes * each("scale_b")


def _quantised_a(torch: Any, p: Problem, a: Tensor) -> Tensor:
    """A of f32 as the codes that the kernel makes of it mean: 127 steps to the largest magnitude, in f32."""
    size, kept = (32, torch.float16) if p.a_rule == "q8_0" else (p.shape.k, torch.float32)
    blocks = a.unflatten(-1, (-1, size))
    step = blocks.abs().amax(-1, keepdim=True) / 127.0
    codes = torch.round(blocks / torch.where(step > 0, step, 1.0))
    return (codes * step.to(kept)).flatten(-2)


def _coded(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The weight is decoded to f32, which keeps the product too up to its one rounding."""
    a = _quantised_a(torch, p, t["a"]) if p.a_rule else t["a"].to(torch.float32)
    return matmul(a, weight_of(torch, p, t, torch.float32).mT).to(dtype_of(torch, p))


def _check_coded(p: Problem) -> Complaints:
    """What the formats of libraries rule out."""
    for index, step in enumerate(p.quant):
        if step.name == "nf4" and p.dtypes.b.name != "i4":
            yield "quant", index, "nf4 is a table of 16 entries", f"write {p.dtypes.a.name}-i4-{p.dtypes.out.name}"
        if step.name == "zeros" and (p.step("nf4") or p.a_rule):
            other = p.step("nf4") or p.step("inside")
            yield "quant", index, f"{other} has no zero points", "drop zeros"
        if step.name == "inside":
            if p.step("nf4") or str(p.dtypes) not in {"f32-i4-f32", "f32-i8-f32"}:
                problem = f"{step} multiplies codes by codes, and a result in f32"
                yield "quant", index, problem, "write f32-i4-f32 or f32-i8-f32, without nf4"
            if p.shape.k == 0:
                yield "shape", 2, "a row without elements has no scale", "give a K of 32 or more"
            if step.text == "q8_0" and p.shape.k % 32:
                yield "shape", 2, f"K={p.shape.k} is not made of blocks of 32", "give a K of 32, 64, 96 ..."
            if step.text == "q8_0" and p.group_size != 32:
                yield "quant", index, "Q8_0 has blocks of 32", "write group-32+inside-q8_0"
        if step.name == "nf4" and p.shape.k % p.group_size:
            problem = f"K={p.shape.k} is no multiple of {p.group_size}: blocks of NF4 would go on in the next row"
            yield "shape", 2, problem, "give another K or group"


# A product whose weight is stored N x K, in codes with scales.
of_codes: Final = functools.partial(
    Op, batch="never", layouts=(Layout.NT,), weight=True, converts=True, weight_scales=True
)

OPS: Final = (
    of_codes(
        "woq_int8",
        dtypes=("bf16-i8-bf16", "f16-i8-f16", "f32-i8-f32"),
        native=_int8,
        around=_around_int8,
        help="torch._weight_int8pack_mm: the weight is i8 with a scale for each column",
        scale_dtype=lambda out: out,
        derived=_concat,
        check=_check_int8,
        flags=("b.argument", *OUTPUTS, "program.concat", "program.pt2e"),
    ),
    of_codes(
        "woq_int4",
        dtypes=("bf16-i4-bf16", "f16-i4-f16", "f32-i4-f32"),
        native=_int4,
        help="aten::_weight_int4pack_mm_for_cpu: the weight is packed i4 with scales of groups of K",
        scales=("group",),
        pack=_pack,
        derived=_packed,
        check=check_groups,
    ),
    of_codes(
        "woq",
        dtypes=tuple(f"{x}-{codes}-{x}" for x in ("f32", "bf16", "f16") for codes in ("i4", "u8", "i8")),
        native=lambda torch, p, t: _coded(torch, p, t, torch.mm),
        around=_coded,
        help="a linear whose weight is codes of 4 or 8 bits: (code - zero point) * scale, decoded to f32",
        scales=("group", "columnwise", "tensorwise"),
        coded=True,
        check=_check_coded,
        flags=("b.argument", *OUTPUTS[1:]),
    ),
)
