"""da8w8: a linear whose input and weight are int8 with scales, as torchao writes it in eager PyTorch."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops import qlinear
from pytest_gemm.problem.ops.op import HALVES, OUTPUTS, Matmul, Op, Tensor, Tensors, dtype_of


def _rows(p: Any, x: Tensor) -> Tensor:
    """A tensor with a row for each of M, which may be 3-D, as one matrix of rows."""
    return x if p.shape.batch is None else x.reshape(p.shape.batch * p.shape.m, x.shape[-1])


def _around(torch: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    """The int32 product times A's and B's scales: in their type, which is f32 where the result is f16.

    Where A is 3-D it is reshaped after the scales and before the bias, as a quantised linear does.
    """
    shape = p.shape
    scale_a = _rows(p, t["scale_a"]) if p.step("rowwise") is not None else t["scale_a"]
    c = matmul(_rows(p, t["a"]), t["b"].mT)
    x = c.to(getattr(torch, "bfloat16" if p.dtypes.out.name == "bf16" else "float32")) * scale_a * t["scale_b"]
    x = x if shape.batch is None else x.reshape(shape.batch, shape.m, shape.n)
    return (x + t["bias"] if "bias" in t else x).to(dtype_of(torch, p))


OP: Final = Op(
    "da8w8",
    "optional",
    lambda a, b, out: a == b == "i8" and out in HALVES | {"f32"},
    "i8-i8-f32, i8-i8-bf16 or i8-i8-f16",
    lambda torch, p, t: _around(torch, p, t, torch._int_mm),
    _around,
    own_bias=True,
    layouts=(Layout.NT,),
    scales=("rowwise", "columnwise"),
    weight=True,
    weight_scales=True,
    scale_dtype=lambda out: "bf16" if out == "bf16" else "f32",
    int8=True,
    derived=qlinear.derived,
    flags=("b.alias_t", "b.argument", *OUTPUTS),
)
