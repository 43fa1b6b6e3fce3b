"""Operations of PyTorch: data types, layouts and forms that each supports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from pytest_gemm.problem.layout import Layout


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation under its ATen-style name, with what its grammar allows.

    Attributes:
        name: the key of :data:`OPS`.
        batch: ``"never"``, ``"always"`` or ``"optional"``.
        dtypes: whether a triple of dtype names makes sense (a backend may still refuse it).
        dtypes_help: the same in words, with an example.
        constant_b: whether B is a weight, constant for the compiler, unless a flag says otherwise.
        addend: whether the op itself takes a bias operand C (``beta * C + alpha * A @ B``).
        layouts: layouts that can be expressed.
    """

    name: str
    batch: str
    dtypes: Callable[[str, str, str], bool]
    dtypes_help: str
    constant_b: bool = True
    addend: bool = False
    layouts: tuple[Layout, ...] = tuple(Layout)
    scales: tuple[str, ...] = ()


_FLOATS: Final = frozenset({"f64", "f32", "f16", "bf16"})
HALVES: Final = frozenset({"f16", "bf16"})
_FP8: Final = frozenset({"f8e4m3fn", "f8e5m2"})


def _uniform_float(a: str, b: str, out: str) -> bool:
    return a == b == out and a in _FLOATS


def _float(a: str, b: str, out: str) -> bool:
    return _uniform_float(a, b, out) or (a == b == "f32" and out in HALVES)


def _quantised(a: str, b: str, out: str) -> bool:
    return a in {"u8", "i8"} and b == "i8" and out in {"f32", "f16", "bf16", "u8", "i8"}


def _one_integer_side(a: str, b: str, out: str) -> bool:
    return (a in _FLOATS and b in {"i8", "u8"} and out == a) or (b in _FLOATS and a in {"i8", "u8"} and out == b)


_LINEAR_LAYOUTS: Final = (Layout.NT, Layout.TT)

# Flags about one of several products.
OF_ONE: Final = ("bias-first", "bias-last", "steps-first", "steps-last")
_UNIFORM_HELP: Final = "one of f64 f32 f16 bf16"
_FLOAT_HELP: Final = f"{_UNIFORM_HELP}, f32-f32-bf16 or f32-f32-f16 (converted first, as autocast does)"

# How many weights the flag concat speaks of: as many as Inductor's pattern has.
THIRDS: Final = 3
# Ops that add a bias of shape (N,) themselves.
OWN_BIAS: Final = frozenset({"linear", "linears", "qlinear", "da8w8", "scaled_mm"})
OPS: Final[Mapping[str, Op]] = {
    op.name: op
    for op in (
        Op("mm", "never", _float, _FLOAT_HELP),
        Op("addmm", "never", _float, _FLOAT_HELP, addend=True),
        Op("bmm", "always", _float, _FLOAT_HELP, constant_b=False),
        Op("baddbmm", "always", _uniform_float, _UNIFORM_HELP, constant_b=False, addend=True),
        Op("linear", "optional", _float, _FLOAT_HELP, layouts=_LINEAR_LAYOUTS),
        Op("linears", "always", _float, _FLOAT_HELP, layouts=_LINEAR_LAYOUTS),
        Op("int_mm", "never", lambda a, b, out: (a, b, out) == ("i8", "i8", "i32"), "i8-i8-i32"),
        Op("mixed_mm", "never", _one_integer_side, "float-i8-float or i8-float-float, for example f16-i8-f16"),
        Op(
            "woq_int8",
            "never",
            lambda a, b, out: a in HALVES | {"f32"} and b == "i8" and out == a,
            "bf16-i8-bf16, f16-i8-f16 or f32-i8-f32",
            layouts=(Layout.NT,),
        ),
        Op(
            "woq_int4",
            "never",
            lambda a, b, out: a in HALVES | {"f32"} and b == "i4" and out == a,
            "for example bf16-i4-bf16",
            layouts=(Layout.NT,),
            scales=("group",),
        ),
        Op(
            "qlinear",
            "never",
            _quantised,
            "u8 or i8, i8, and one of f32 f16 bf16 u8 i8, for example u8-i8-f32",
            layouts=(Layout.NT,),
            scales=("static", "dynamic"),
        ),
        Op(
            "da8w8",
            "optional",
            lambda a, b, out: a == b == "i8" and out in HALVES | {"f32"},
            "i8-i8-f32, i8-i8-bf16 or i8-i8-f16",
            layouts=(Layout.NT,),
            scales=("rowwise", "columnwise"),
        ),
        Op(
            "scaled_mm",
            "never",
            lambda a, b, out: a in _FP8 and b in _FP8 and out in {"bf16", "f16", "f32"},
            "for example f8e4m3fn-f8e4m3fn-bf16",
            constant_b=False,
            layouts=(Layout.NT,),
            scales=("tensorwise", "rowwise"),
        ),
        Op("grouped_mm", "always", _uniform_float, _UNIFORM_HELP, constant_b=False, layouts=(Layout.NN, Layout.NT)),
    )
}


# Ops that have a program; the others come with their operands.
PROGRAMS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "linears", "int_mm", "mixed_mm", "scaled_mm", "grouped_mm"}
    | {"woq_int8", "woq_int4", "qlinear", "da8w8"}
)

# Ops whose second argument is the N x K weight as stored, not its K x N view.
WEIGHT_OPS = frozenset({"linear", "woq_int8", "woq_int4", "qlinear", "da8w8"})

# Ops whose weight a user packs once, outside of the program.
PACKED_OPS = frozenset({"woq_int4", "qlinear"})
