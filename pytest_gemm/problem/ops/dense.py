"""Products without scales: mm, addmm, bmm, baddbmm, linear, linears, int_mm, mixed_mm, mm_plus_mm."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import (
    FLOATS,
    FLOATS_AND_AUTOCAST,
    GIVEN,
    OUTPUTS,
    PRECISION,
    PROLOGUES,
    SLICED,
    VIEWS,
    WIDENED,
    Complaints,
    Matmul,
    Op,
    Problem,
    Tensor,
    Tensors,
    dtype_of,
    given_out,
    wide_out,
)
from pytest_gemm.problem.steps import StepKind

_BATCHED: Final = ("batch.dynamic", "a.broadcast", "b.broadcast", "a.batch_middle", "b.batch_middle")
_MASKED: Final = (*_BATCHED, "groups.masked")
_ALL: Final = ("b.alias_t", "b.argument", "n.dynamic", "k.dynamic", *OUTPUTS)
_WEIGHTS: Final = (Layout.NT, Layout.TT)
# Each weight of linears is an argument of the program.
_MOST: Final = 64


def _addmm(name: str) -> Any:
    def native(torch: Any, p: Problem, t: Tensors) -> Tensor:
        return getattr(torch, name)(
            t["bias"], t["a"], t["b"], beta=p.beta, alpha=p.alpha, **wide_out(torch, p), **given_out(t)
        )

    return native


def _linear(torch: Any, _: Problem, t: Tensors) -> Tensor:
    return torch.nn.functional.linear(t["a"], t["b"], t.get("bias"))


def _mixed(torch: Any, p: Problem, t: Tensors) -> Tensor:
    out = dtype_of(torch, p)
    a, b = t["a"], t["b"]
    return torch.mm(a if p.dtypes.a == p.dtypes.out else a.to(out), b if p.dtypes.b == p.dtypes.out else b.to(out))


def _around_one_of_linears(_: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """One of the linears: ``b`` and ``bias`` are its own."""
    c = matmul(t["a"].flatten(0, -2), t["b"].mT)
    c = c + t["bias"] if "bias" in t else c
    return c.unflatten(0, (2, -1)) if p.has("a.3d") else c


def _around_mm_plus_mm(_: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The first half of K and the second, each a product of its own."""
    half = p.shape.k // 2
    a, b = t["a"], t["b"]
    c, d = a[:, half:], b[half:]
    if p.has("program.mixed_layouts"):
        c, d = c.mT.contiguous().mT, d.mT.contiguous().mT
    return matmul(a[:, :half], b[:half]) + matmul(c, d)


def _halves(_: Any, p: Problem, t: Tensors) -> Tensors:
    """The two factors that are made of a constant B."""
    half = p.shape.k // 2
    return {"b:first": t["b"][:half], "b:second": t["b"][half:]} if "b" in t else {}


def _check_mm_plus_mm(p: Problem) -> Complaints:
    if p.shape.k % 2:
        yield "shape", 2, f"K={p.shape.k} is no sum of two equal halves", "give an even K"


def _check_linears(p: Problem) -> Complaints:
    shape = p.shape
    if not 2 <= (shape.batch or 0) <= _MOST:
        allowed = f"write for example 2x{shape.m}x{shape.n}x{shape.k}"
        yield "shape", 0, f"linears are two or more products, up to {_MOST}", allowed
    for index, step in enumerate(p.epilogue):
        if step.kind is StepKind.VIEW or (step.kind is StepKind.BINARY and step.extent):
            yield "epilogue", index, f"linears do not take {step}", f"drop {step}"


OPS: Final = (
    Op(
        "mm",
        "never",
        (*FLOATS_AND_AUTOCAST, *WIDENED, "i32"),
        lambda torch, p, t: torch.mm(t["a"], t["b"], **wide_out(torch, p), **given_out(t)),
        help="torch.mm(a, b)",
        flags=(*_ALL, *PRECISION, *PROLOGUES, *VIEWS, *GIVEN, "out.alias", "program.chained", "b.alias"),
    ),
    Op(
        "addmm",
        "never",
        (*FLOATS_AND_AUTOCAST, *WIDENED),
        _addmm("addmm"),
        help="torch.addmm: beta * bias + alpha * (a @ b)",
        addend=True,
        flags=(*_ALL, *PRECISION, *PROLOGUES, *VIEWS, *GIVEN, "out.addend"),
    ),
    Op(
        "bmm",
        "always",
        (*FLOATS_AND_AUTOCAST, *WIDENED),
        lambda torch, p, t: torch.bmm(t["a"], t["b"], **wide_out(torch, p), **given_out(t)),
        help="torch.bmm(a, b)",
        constant_b=False,
        flags=(*_ALL, *PRECISION, *PROLOGUES, *VIEWS, *GIVEN, "out.alias", *_MASKED, "program.chained", "b.alias"),
    ),
    Op(
        "baddbmm",
        "always",
        FLOATS,
        _addmm("baddbmm"),
        help="torch.baddbmm: beta * bias + alpha * (a @ b), matrix by matrix",
        constant_b=False,
        addend=True,
        flags=(*_ALL, *PRECISION, *VIEWS, *GIVEN, "out.addend", *_BATCHED),
    ),
    Op(
        "linear",
        "optional",
        FLOATS_AND_AUTOCAST,
        _linear,
        help="F.linear(a, b, bias), of an A of two dimensions or more",
        layouts=_WEIGHTS,
        own_bias=True,
        weight=True,
        flags=(*_ALL, *PRECISION, *PROLOGUES, *VIEWS, *GIVEN[1:], "program.chained", "a.4d", "batch.dynamic"),
    ),
    Op(
        "linears",
        "always",
        FLOATS_AND_AUTOCAST,
        _linear,
        _around_one_of_linears,
        help="several linears of one input, each with its own weight and bias; the batch is their number",
        layouts=_WEIGHTS,
        own_bias=True,
        several=True,
        check=_check_linears,
        flags=("b.argument", "a.3d", "out.2d", "bias.first", "bias.last", "steps.first", "steps.last"),
    ),
    Op(
        "int_mm",
        "never",
        ("i8-i8-i32", "u8-i8-i32"),
        lambda torch, _, t: torch._int_mm(t["a"], t["b"], **given_out(t)),
        help="torch._int_mm: 8-bit integers summed in i32",
        flags=(*_ALL, *SLICED, "out.given", "out.copied", "out.padded"),
    ),
    Op(
        "mixed_mm",
        "never",
        (
            *(line for x in FLOATS for i in ("i8", "u8") for line in (f"{x}-{i}-{x}", f"{i}-{x}-{x}")),
            *("f32-f16-f32", "f32-bf16-f32"),
        ),
        _mixed,
        help="torch.mm of floats and of 8-bit integers or a half type, which the program converts to the float type",
        converts=True,
        flags=("b.argument", *OUTPUTS, *PRECISION),
    ),
    Op(
        "mm_plus_mm",
        "never",
        ("f32", "f16", "bf16"),
        lambda torch, p, t: _around_mm_plus_mm(torch, p, t, torch.mm),
        _around_mm_plus_mm,
        help="torch.mm of the first halves of K, plus torch.mm of the second halves",
        constant_b=False,
        summands=2,
        derived=_halves,
        check=_check_mm_plus_mm,
        flags=("b.argument", "r0.alias", "program.multi_output", "program.mixed_layouts", "math.tf32"),
    ),
)
