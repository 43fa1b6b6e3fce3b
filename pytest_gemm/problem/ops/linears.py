"""linears: several linears of one input, each with its own weight and bias."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import FLOAT_HELP, Complaints, Matmul, Op, Tensor, Tensors, any_float
from pytest_gemm.problem.steps import StepKind

# Each weight is an argument of the program.
_MOST: Final = 64


def _around(_: Any, p: Any, t: Tensors, matmul: Matmul) -> Tensor:
    """One of the linears: ``b`` and ``bias`` are its own."""
    a = t["a"]
    c = matmul(a.flatten(0, -2), t["b"].mT)
    c = c + t["bias"] if "bias" in t else c
    return c.unflatten(0, (2, -1)) if p.has("a.3d") else c


def _check(p: Any) -> Complaints:
    shape = p.shape
    if not 2 <= (shape.batch or 0) <= _MOST:
        allowed = f"write for example 2x{shape.m}x{shape.n}x{shape.k}"
        yield "shape", 0, f"linears are two or more products, up to {_MOST}", allowed
    for index, step in enumerate(p.epilogue):
        if step.kind is StepKind.VIEW or (step.kind is StepKind.BINARY and step.extent):
            yield "epilogue", index, f"linears do not take {step}", f"drop {step}"


OP: Final = Op(
    "linears",
    "always",
    any_float,
    FLOAT_HELP,
    lambda torch, _, t: torch.nn.functional.linear(t["a"], t["b"], t.get("bias")),
    _around,
    layouts=(Layout.NT, Layout.TT),
    own_bias=True,
    several=True,
    check=_check,
    flags=("b.argument", "a.3d", "out.2d", "bias.first", "bias.last", "steps.first", "steps.last"),
)
