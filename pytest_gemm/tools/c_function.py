"""A function of a C library as one of tensors: its declaration is read, and what it names is handed over."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES

SIGNATURE: Final = "void f(int m, int n, int k, const float* a, const float* b, float* c)"
"""Of a function of a shared library, unless ``--signature`` gives another one."""

# Types of C that a pointer may point to.
_ELEMENTS: Final = {
    **{"float": "f32", "double": "f64", "_Float16": "f16", "uint16_t": "bf16", "int8_t": "i8", "int32_t": "i32"},
    "int": "i32",
}
_PARAMETER: Final = re.compile(r"(?:const\s+)?(\w+)\s*(\*?)\s*(?:const\s+|__restrict__\s+|restrict\s+)?(\w+)")
_MATRICES: Final = ("a", "b", "c", "bias")
_NUMBERS: Final = ("m", "n", "k", "lda", "ldb", "ldc", "alpha", "beta")


def of_library(path: str, symbol: str, signature: str) -> Callable[..., Any]:
    """A function of tensors around one of C, on row-major matrices; what is strided is copied before."""
    parameters = c_parameters(signature)
    foreign = getattr(ctypes.CDLL(str(Path(path).absolute())), symbol)
    foreign.argtypes = [ctypes.c_void_p if name in _MATRICES else kind for name, kind in parameters.items()]
    foreign.restype = None if signature.lstrip().startswith("void") else ctypes.c_int
    dtypes = {name: torch_dtype(DTYPES[parameters[name]]) for name in _MATRICES if name in parameters}

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (a.dim(), a.dtype, b.dtype) != (2, dtypes["a"], dtypes["b"]):
            raise TypeError(f"{symbol} takes matrices of {dtypes['a']} and {dtypes['b']}")
        (m, k), n = a.shape, b.shape[1]
        tensors = {"a": a.contiguous(), "b": b.contiguous(), "c": a.new_empty(m, n, dtype=dtypes["c"])}
        if bias is not None:
            tensors["bias"] = bias.contiguous()
        values = {"m": m, "n": n, "k": k, "lda": k, "ldb": n, "ldc": n, "alpha": 1, "beta": 0}
        values |= {name: one.data_ptr() for name, one in tensors.items()}
        if code := foreign(*(values[name] for name in parameters)):
            raise ValueError(f"{symbol} returned {code}")
        return tensors["c"]

    return call if "bias" in dtypes else lambda a, b: call(a, b)  # noqa: PLW0108  # whose parameters are asked for


def c_parameters(signature: str) -> dict[str, Any]:
    """The parameters of a C function by name: the dtype of a matrix, the ctypes type of a number.

    Raises:
        ValueError: for what cannot be handed over.
    """
    outline = re.fullmatch(r"\s*(?:void|int)\s+\w+\s*\((.*)\)\s*;?\s*", signature, re.DOTALL)
    found: dict[str, Any] = {}
    for text in map(str.strip, outline[1].split(",") if outline else []):
        parts = _PARAMETER.fullmatch(text)
        kind, star, name = parts.groups() if parts else ("", "", "")
        name = {"out": "c", "y": "c"}.get(name.lower(), name.lower())
        number = getattr(ctypes, f"c_{re.sub('(?<=[0-9])_t$', '', kind)}", None)  # ctypes names them as C does
        found[name] = _ELEMENTS.get(kind) if star else number
        if found[name] is None or name not in (_MATRICES if star else _NUMBERS):
            known = f"pointers {' '.join(_MATRICES)} to {', '.join(_ELEMENTS)}, and numbers {' '.join(_NUMBERS)}"
            raise ValueError(f"--signature={signature}: cannot hand over {text!r}; known are {known}")
    if not {"a", "b", "c"} <= found.keys():
        raise ValueError(f"--signature={signature}: give a function of C with pointers a, b and c, as {SIGNATURE!r}")
    return found
