"""woq_int8: a weight in int8 with a scale for each column."""

from __future__ import annotations

import itertools
from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import HALVES, OUTPUTS, Matmul, Op, Tensor, Tensors, around_dense, dtype_of

# Weights of the flag concat: as many as Inductor's pattern has.
THIRDS: Final = 3


def _thirds(torch: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    """Three weights, each converted and multiplied by as a program with three linears does, side by side."""
    out = dtype_of(torch, p)
    products = [matmul(t["a"], t[f"b{index}"].mT.to(out)) * t[f"scale{index}"] for index in range(THIRDS)]
    return torch.cat(products, -1)


def _native(torch: Any, p: Any, t: Tensors) -> Tensor:
    if p.has("program.concat"):
        return _thirds(torch, p, t, torch.mm)
    return torch._weight_int8pack_mm(t["a"], t["b"], t["scale"])


def _around(torch: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    if p.has("program.concat"):
        return _thirds(torch, p, t, matmul)
    return around_dense(torch, p, t, matmul) * t["scale"]


def _derived(torch: Any, p: Any, t: Tensors) -> Tensors:
    """The weights of ``concat``, and their scales, one below the other; Inductor's matcher decides in which order."""
    if not p.has("program.concat"):
        return {}
    orders = itertools.product(("b", "scale"), itertools.permutations(range(THIRDS)))
    named = [[f"{name}{index}" for index in order] for name, order in orders]
    return {f"{'+'.join(o)}:concat": torch.cat([t[name] for name in o]) for o in named if set(o) <= set(t)}


OP: Final = Op(
    "woq_int8",
    "never",
    lambda a, b, out: a in HALVES | {"f32"} and b == "i8" and out == a,
    "bf16-i8-bf16, f16-i8-f16 or f32-i8-f32",
    _native,
    _around,
    layouts=(Layout.NT,),
    weight=True,
    converts=True,
    weight_scales=True,
    scale_dtype=lambda out: out,
    derived=_derived,
    flags=("b.argument", *OUTPUTS, "program.concat"),
)
