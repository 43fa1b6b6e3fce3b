"""Products without scales: mm, addmm, bmm, baddbmm, linear, int_mm, mixed_mm."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import (
    FLOAT_HELP,
    FLOATS,
    OUTPUTS,
    PRECISION,
    UNIFORM_HELP,
    Op,
    any_float,
    dtype_of,
    uniform_float,
)

_BATCHED: Final = ("a.broadcast", "b.broadcast", "a.batch_middle", "b.batch_middle")
_ALL: Final = ("b.alias_t", "b.argument", *OUTPUTS)


def _one_integer_side(a: str, b: str, out: str) -> bool:
    return (a in FLOATS and b in {"i8", "u8"} and out == a) or (b in FLOATS and a in {"i8", "u8"} and out == b)


def _mixed(torch: Any, p: Any, t: dict[str, Any]) -> Any:
    out = dtype_of(torch, p)
    a, b = t["a"], t["b"]
    return torch.mm(a if p.dtypes.a.is_float else a.to(out), b if p.dtypes.b.is_float else b.to(out))


PRODUCTS: Final = (
    Op(
        "mm",
        "never",
        any_float,
        FLOAT_HELP,
        lambda torch, _, t: torch.mm(t["a"], t["b"]),
        flags=(*_ALL, *PRECISION, "program.chained", "b.alias"),
    ),
    Op(
        "addmm",
        "never",
        any_float,
        FLOAT_HELP,
        lambda torch, p, t: torch.addmm(t["bias"], t["a"], t["b"], beta=p.beta, alpha=p.alpha),
        addend=True,
        flags=(*_ALL, *PRECISION),
    ),
    Op(
        "bmm",
        "always",
        any_float,
        FLOAT_HELP,
        lambda torch, _, t: torch.bmm(t["a"], t["b"]),
        constant_b=False,
        flags=(*_ALL, *PRECISION, *_BATCHED, "program.chained", "b.alias"),
    ),
    Op(
        "baddbmm",
        "always",
        uniform_float,
        UNIFORM_HELP,
        lambda torch, p, t: torch.baddbmm(t["bias"], t["a"], t["b"], beta=p.beta, alpha=p.alpha),
        constant_b=False,
        addend=True,
        flags=(*_ALL, *PRECISION, *_BATCHED),
    ),
    Op(
        "linear",
        "optional",
        any_float,
        FLOAT_HELP,
        lambda torch, _, t: torch.nn.functional.linear(t["a"], t["b"], t.get("bias")),
        layouts=(Layout.NT, Layout.TT),
        own_bias=True,
        weight=True,
        flags=(*_ALL, *PRECISION, "program.chained", "a.4d"),
    ),
)

INT_MM: Final = Op(
    "int_mm",
    "never",
    lambda a, b, out: (a, b, out) == ("i8", "i8", "i32"),
    "i8-i8-i32",
    lambda torch, _, t: torch._int_mm(t["a"], t["b"]),
    flags=_ALL,
)

MIXED_MM: Final = Op(
    "mixed_mm",
    "never",
    _one_integer_side,
    "float-i8-float or i8-float-float, for example f16-i8-f16",
    _mixed,
    converts=True,
    flags=("b.argument", *OUTPUTS, *PRECISION),
)
