"""What Inductor's NVGEMM is in this release of PyTorch, read off its own code."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from types import CodeType
from typing import Any

import torch

from pytest_gemm.backends.inductor.hooks import found, is_there
from pytest_gemm.core.text import first_line

_PACKAGE = "torch._inductor.codegen.nv_universal_gemm"
_UTILS = "torch._inductor.utils"
# Operators that PyTorch brings, derived from the library's.
_OWN_OPERATORS = "torch._inductor.kernel.vendored_templates.cutedsl.wrappers"

# What is assumed where Inductor's code does not say it: the name in the newest release known.
_NEWEST = "cutlass.operators"


def release() -> str:
    """``torch 2.14.1``, without the build."""
    return f"torch {torch.__version__.split('+')[0]}"


@functools.cache
def module() -> str:
    """The module that Inductor looks for before it offers a candidate: ``cutlass_api`` or ``cutlass.operators``."""
    named = (text for text in _texts("ensure_nv_universal_gemm_available") if re.fullmatch(r"cutlass[\w.]*", text))
    return next(named, _NEWEST)


@functools.cache
def brings_operators() -> bool:
    """Whether Inductor puts operators of its own in the place of some of the library's, as torch 2.15 does.

    These are derived from the library's, of version 0.2 and later.
    """
    return is_there(f"{_PACKAGE}.kernel_cache:_replace_dense_efc_with_vendored")


def misfit() -> str:
    """Why Inductor cannot use the installed library, whose module is there; "" where it can."""
    if not brings_operators():
        return ""
    try:
        importlib.import_module(_OWN_OPERATORS)
    except ImportError as error:
        return first_line(error)
    return ""


@functools.cache
def adds() -> bool:
    """Whether Inductor offers candidates for a product with an addend."""
    return is_there(f"{_PACKAGE}:add_nv_universal_addmm_choices")


@functools.cache
def is_static() -> bool:
    """Whether Inductor offers candidates for fixed sizes only: it asks for symbols of any kind among the sizes."""
    return "has_free_symbols" in _texts("use_nv_universal_gemm_template")


def _texts(function: str) -> tuple[str, ...]:
    """Names and strings in the code of one of Inductor's functions; empty where this release does not have it."""
    if not is_there(f"{_UTILS}:{function}"):
        return ()
    code: CodeType = inspect.unwrap(found(f"{_UTILS}:{function}")).__code__
    constants: tuple[Any, ...] = code.co_consts
    return (*(text for text in constants if isinstance(text, str)), *code.co_names)
