"""The examples of GPU libraries refuse what they cannot run, with a reason, and declare the arithmetic of the library.

What a library computes is judged where there is a GPU: see ``docs/how-to/other-libraries.md``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_gemm.api import callable as functions
from pytest_gemm.api.registry import Registry
from pytest_gemm.machine import software
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

FOLDER = Path(__file__).parents[2] / "examples"
FP8 = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:"
# Of each example problems that it supports, and others with the reason's code.
PROBLEMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "cupy": (
        ["mm:f64:nn:17x65x127", "mm:f16:nn:64x48x4096", "mm:f16:nt:16x16x16384:math.half_partials"],
        {"mm:bf16:nn:16x16x16": "dtype", "mm:f16:nn:2x17x16384": "half-partials"},
    ),
    "cutile": (
        ["mm:f32:nn:17x65x127", "int_mm:i8-i8-i32:nt:17x64x128"],
        {"bmm:f16:nn:3x32x16x24": "batch", f"{FP8}32x64x128:quant.rowwise": "op"},
    ),
    "deepgemm": (
        ["mm:bf16:nt:17x64x128", f"{FP8}128x256x512:quant.blocks"],
        {
            "mm:bf16:nt:17x64x100": "alignment",
            "mm:f16:nt:17x64x128": "dtype",
            f"{FP8}32x64x128:quant.rowwise": "scales",
            f"{FP8}32x64x128:bias:quant.blocks": "scales",
        },
    ),
    "flaggems": (
        ["mm:f32:nn:17x65x127", "baddbmm:f16:nn:3x32x16x24:bias-mn"],
        {"mm:f64:nn:17x65x127": "dtype", "int_mm:i8-i8-i32:nt:17x64x128": "dtype"},
    ),
    "gemlite": (
        ["woq_int8:f16-i8-f16:nt:64x65x1024", "woq_int4:bf16-i4-bf16:nt:4x48x192:quant.group-64"],
        {
            "mm:bf16:nn:16x16x32": "op",
            "woq_int8:f16-i8-f16:nt:17x65x127": "shape",
            "woq_int8:bf16-i8-bf16:nt:1x64x1024": "half-partials",
            "woq_int8:f32-i8-f32:nt:17x64x128": "dtype",
        },
    ),
    "jax-gpu": (["mm:bf16:nt:17x65x127", "int_mm:i8-i8-i32:nt:17x64x128"], {"mm:f64:nn:17x65x127": "dtype"}),
    "nvmath": (
        ["mm:f64:nn:17x65x127", "linear:bf16:nt:17x65x127:bias+gelu_tanh"],
        {"mm:f32:nn:17x65x0": "empty", "int_mm:i8-i8-i32:nt:17x64x128": "dtype"},
    ),
    "quack": (
        ["linear:bf16:nt:16x64x128:bias+silu", f"{FP8}32x64x128:bias:quant.tensorwise"],
        {"mm:f32:nn:16x16x16": "dtype", "mm:f16:nn:16x17x16": "alignment", f"{FP8}32x64x128:quant.rowwise": "scales"},
    ),
    "tilelang": (
        ["mm:f16:tt:17x65x127", "linear:f32:nt:17x65x127:bias"],
        {"mm:f32:nn:17x65x0": "empty", "bmm:f16:nn:3x32x16x24": "batch"},
    ),
    "torchao-gpu": (
        [f"{FP8}32x64x128:bias:quant.rowwise", "da8w8:i8-i8-f16:nt:17x64x128:quant.rowwise"],
        {
            f"{FP8}32x64x128:quant.tensorwise": "scales",
            f"{FP8}32x65x128:quant.rowwise": "scaled-mm-shape",
            "woq_int4:f16-i4-f16:nt:4x48x192:quant.group-64": "scales",
            "mm:bf16:nn:16x16x32": "dtype",
        },
    ),
}
Load = Callable[[str], tuple[ModuleType, Any]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """An example's module and its backend."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def found(name: str) -> tuple[ModuleType, Any]:
        module = importlib.import_module(f"{name.replace('-', '_')}_backend")
        registry = Registry()
        module.pytest_gemm_register_backends(registry)
        return module, registry[name]

    return found


def test_every_gpu_example_is_here() -> None:
    names = {path.name for path in FOLDER.glob("*_backend.py") if "on_cuda" in path.read_text(encoding="utf-8")}
    assert names == {f"{name.replace('-', '_')}_backend.py" for name in PROBLEMS}


@pytest.mark.parametrize("name", PROBLEMS)
def test_it_registers_without_its_library(load: Load, name: str) -> None:
    before = set(sys.modules)
    _, backend = load(name)
    libraries = {one.partition(".")[0] for one in backend.imports} | {"jax", "cupy"}
    assert not {one for one in set(sys.modules) - before if one.partition(".")[0] in libraries}
    assert backend.availability("cpu").reason.remedy == "--gemm-device=cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", PROBLEMS)
def test_without_a_gpu_it_says_so(load: Load, name: str) -> None:
    reason = load(name)[1].availability("cuda").reason
    assert reason.code in {"no-cuda-device", "no-cuda-torch"}
    assert reason.remedy


@pytest.mark.parametrize("name", PROBLEMS)
def test_without_its_library_it_names_the_package(load: Load, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, backend = load(name)
    monkeypatch.setattr(functions, "no_device", lambda *_: None)
    monkeypatch.setattr(software, "installed", lambda _: {"torch": "2.15.0"})
    reason = backend.availability("cuda").reason
    assert reason.text == f"{backend.distributions[0]} is not installed"
    assert reason.remedy == f"pip install {' '.join(backend.distributions)}"
    required = re.search(r"^Requirements: (.*(?:\n(?!Run).*)*)", str(module.__doc__), re.MULTILINE)
    assert required
    assert backend.distributions[0].removesuffix("lib") in required[1]


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, (lines, _) in PROBLEMS.items() for line in lines])
def test_it_supports(load: Load, name: str, line: str) -> None:
    assert load(name)[1].supports(Problem.parse(line)) is None


@pytest.mark.parametrize(
    ("name", "line", "code"), [(name, *one) for name, (_, lines) in PROBLEMS.items() for one in lines.items()]
)
def test_it_refuses(load: Load, name: str, line: str, code: str) -> None:
    refused = load(name)[1].supports(Problem.parse(line))
    assert refused is not None
    assert (refused.reason.code, bool(refused.reason.text)) == (code, True)


# What a contract says beyond sums of the tensor core in f32 around which PyTorch computes the other steps.
CONTRACTS: list[tuple[str, str, dict[str, Any]]] = [
    ("cupy", "mm:f16:nn:64x48x4096", {}),
    ("deepgemm", f"{FP8}128x256x512:quant.blocks", {"epilogue": "fused"}),
    (
        "flaggems",
        "mm:f32:nn:16x16x16",
        {"input_error": 3 * 2.0**-20, "input_smallest": 2.0**-136, "alignment_bits": 24, "chunk": 4, "or_scalar": True},
    ),
    ("flaggems", "addmm:bf16:nn:33x64x128:bias-mn+alpha-0.5+beta-2", {"epilogue": "fused"}),
    ("gemlite", "woq_int8:bf16-i8-bf16:nt:17x65x256", {"slices": 16, "partials": "out", "deterministic": False}),
    ("nvmath", "linear:bf16:nt:17x65x127:bias+gelu_tanh", {"epilogue": "either"}),
    ("quack", "linear:bf16:nt:16x64x128:bias+silu", {"epilogue": "fused"}),
    (
        "tilelang",
        "mm:f32:nn:16x16x16",
        {"input_error": 2.0**-9, "input_bits": 11, "alignment_bits": 24, "chunk": 4, "or_scalar": True},
    ),
    (
        "torchao-gpu",
        "woq_int4:bf16-i4-bf16:nt:4x48x192:quant.group-64",
        {"input_error": 2.0**-8, "input_bits": 8},
    ),
]


@pytest.mark.parametrize(("name", "line", "further"), CONTRACTS)
def test_its_contract_says_what_the_library_s_pages_do(
    load: Load, monkeypatch: pytest.MonkeyPatch, name: str, line: str, further: dict[str, Any]
) -> None:
    monkeypatch.setattr(tensor_core, "contract", lambda *_, **__: Contract("f32"))  # which asks for the device
    backend = load(name)[1]
    expected: dict[str, Any] = {"epilogue": "eager", **further}
    own = not line.startswith("mm:")
    assert backend.contract(Problem.parse(line), own=own) == Contract("f32", **expected)
