"""The examples of GPU libraries refuse a machine without a GPU or library, and pass on what the library's pages name.

The libraries are stood in for by PyTorch under their own signatures: what is tested is which function gets which
operand, layout, scale and addend.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tf32
import torch

from pytest_gemm.api.registry import Registry
from pytest_gemm.backends import on_cuda, tensor_core
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.machine import software
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem

FOLDER = Path(__file__).parents[2] / "examples"
FP8 = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:"
# Of each example problems that it supports, and others with the reason's code.
PROBLEMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "cupy": (
        [
            "mm:f64:nn:17x65x127",
            "bmm:f16:nn:3x32x16x24",
            "mm:f32:nn:2x17x16384",
            "mm:f16:nn:64x48x4096",
            "mm:f16:nt:16x16x16384:math.half_partials",
        ],
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
        [
            "woq_int8:bf16-i8-bf16:nt:17x65x256",
            "woq_int8:f16-i8-f16:nt:64x65x1024",
            "woq_int4:bf16-i4-bf16:nt:4x48x192:quant.group-64",
        ],
        {
            "mm:bf16:nn:16x16x32": "op",
            "woq_int8:f16-i8-f16:nt:17x65x127": "shape",
            "woq_int8:f16-i8-f16:nt:17x65x128": "half-partials",
            "woq_int8:bf16-i8-bf16:nt:1x64x1024": "half-partials",
            "woq_int8:f32-i8-f32:nt:17x64x128": "dtype",
            "woq_int4:f32-i4-f32:nt:4x48x192:quant.group-64": "dtype",
            "woq_int8:f16-i8-f16:nt:17x64x128:relu": "op",
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
        [
            "int_mm:i8-i8-i32:nt:17x64x128",
            f"{FP8}32x64x128:bias:quant.rowwise",
            "da8w8:i8-i8-f16:nt:17x64x128:quant.rowwise",
        ],
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


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stand-in for a library: functions by the name of their module."""
    monkeypatch.setattr(tensor_core, "contract", lambda *_, **__: Contract("f32"))

    def stand_in(name: str, **members: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(members)

    return stand_in


def judged(backend: Any, line: str) -> list[Outcome]:
    problem = Problem.parse(line)
    assert backend.supports(problem) is None
    return list(Judge().outcomes(Case(backend, problem, distributions_for(problem), 0, Device.CPU)))


def assert_right(backend: Any, line: str) -> None:
    outcomes = judged(backend, line)
    assert outcomes
    assert [(o.distribution, o.reason) for o in outcomes if o.status is not Status.PASSED] == []


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
    monkeypatch.setattr(on_cuda, "no_device", lambda *_: None)
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


@pytest.mark.parametrize(
    "line",
    ["mm:f32:tn:17x65x127", "addmm:bf16:nn:33x64x128:bias-mn+alpha-0.5+beta-2", "baddbmm:f16:nn:3x8x16x24:bias-mn"],
)
def test_flaggems_adds_in_the_kernel(load: Load, library: Callable[..., None], line: str) -> None:
    library("flag_gems", mm=torch.mm, bmm=torch.bmm, addmm=torch.addmm, baddbmm=torch.baddbmm)
    _, backend = load("flaggems")
    assert_right(backend, line)
    fused = backend.contract(Problem.parse(line)).epilogue == "fused"
    assert fused is ("add" in line)


def test_flaggems_holds_f32_on_hopper_to_three_parts_of_tf32(load: Load, library: Callable[..., None]) -> None:
    _, backend = load("flaggems")
    library("flag_gems")
    assert backend.contract(Problem.parse("mm:f32:nn:16x16x16")).input_error == 3 * 2.0**-20
    assert backend.contract(Problem.parse("mm:f16:nn:16x16x16")).input_error == 0.0


@pytest.mark.parametrize("line", ["mm:f32:nn:1000x40x24", "mm:f32:nn:1x64x64"])
def test_flaggems_loses_the_low_bits_of_subnormal_operands(load: Load, library: Callable[..., None], line: str) -> None:
    library("flag_gems", mm=tf32.three_products, bmm=torch.bmm, addmm=torch.addmm, baddbmm=torch.baddbmm)
    assert_right(load("flaggems")[1], line)


def test_tilelang_has_tf32(load: Load, library: Callable[..., None]) -> None:
    _, backend = load("tilelang")
    library("tilelang")
    assert backend.contract(Problem.parse("mm:f32:nn:16x16x16")).input_bits == 11
    assert backend.contract(Problem.parse("mm:bf16:nn:16x16x16")).input_error == 0.0


def _cublaslt(a: Any, b: Any, c: Any = None, *, alpha: Any = None, beta: Any = None, **more: Any) -> Any:
    """nvmath's matmul: a bias has an element for each row of the result."""
    x = (a.double() @ b.double()) * (1.0 if alpha is None else alpha)
    x = x if c is None else x + beta * c.double()
    if "bias" in (more.get("epilog_inputs") or {}):
        bias = more["epilog_inputs"]["bias"]
        assert bias.shape == (a.shape[0],)
        x = x.to(a.dtype).double() + bias.double()[:, None]  # as kernels do that slice K
    name = more.get("epilog", "")
    x = x.relu() if "RELU" in name else x
    x = torch.nn.functional.gelu(x, approximate="tanh") if "GELU" in name else x
    return x.to(a.dtype)


def _nvmath(library: Callable[..., None], product: Callable[..., Any] = _cublaslt) -> None:
    """nvmath-python's names, with this product."""
    epilogs = {name: name for name in ("BIAS", "RELU", "GELU", "RELU_BIAS", "GELU_BIAS")}
    names: dict[str, Any] = {
        "MatmulComputeType": SimpleNamespace(COMPUTE_32F=68),
        "MatmulReductionScheme": SimpleNamespace(COMPUTE_TYPE=2),
        "MatmulPlanPreferences": functools.partial(SimpleNamespace, reduction_scheme_mask=7),
    }
    library("nvmath.linalg.advanced", matmul=product, MatmulEpilog=epilogs, **names)


@pytest.mark.parametrize(
    ("line", "mask"), [("mm:f16:nn:2x17x512", 2), ("mm:bf16:nt:1x16x512", 2), ("mm:f32:nn:5x6x7", 7)]
)
def test_nvmath_adds_slices_in_f32(load: Load, library: Callable[..., None], line: str, mask: int) -> None:
    masks = []

    def product(*given: Any, preferences: Any, **more: Any) -> Any:
        masks.append(preferences.reduction_scheme_mask)
        return _cublaslt(*given, **more)

    _nvmath(library, product)
    backend = load("nvmath")[1]
    assert_right(backend, line)
    assert {*masks} == {mask}
    assert_right(backend, f"{line}:math.half_partials" if mask == 2 else line)
    assert masks[-1] == 7


@pytest.mark.parametrize(
    "line",
    [
        "mm:f16:nt:17x65x127",
        "linear:bf16:nt:17x65x127:bias",
        "linear:bf16:nt:17x65x127:bias+gelu_tanh",
        "linear:bf16:nt:17x65x127:bias+relu",
        "linear:f32:nt:17x65x127:bias+gelu_tanh",
        "linear:f16:nt:3x17x65x127:bias+relu",
        "addmm:f32:nn:33x65x127:bias+alpha-0.5+beta-2",
    ],
)
def test_nvmath_has_the_bias_of_columns(load: Load, library: Callable[..., None], line: str) -> None:
    _nvmath(library)
    assert_right(load("nvmath")[1], line)


def test_jax_gets_addresses_of_16_bytes(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = load("jax-gpu")
    taken: list[torch.Tensor] = []

    def from_dlpack(one: torch.Tensor) -> torch.Tensor:
        taken.append(one)
        return one

    numpy = SimpleNamespace(from_dlpack=from_dlpack, matmul=lambda x, y, **_: x @ y, float32=1, int32=2)
    monkeypatch.setattr(torch.Tensor, "astype", torch.Tensor.to, raising=False)
    jax = ModuleType("jax")
    vars(jax).update(numpy=numpy, lax=SimpleNamespace(Precision=SimpleNamespace(HIGHEST=3)), block_until_ready=len)
    monkeypatch.setitem(sys.modules, "jax", jax)
    a = torch.ones(9 * 8)[1:65].view(8, 8)
    assert torch.equal(module.matmul(a, a.mT), torch.full((8, 8), 8.0))
    assert [one.data_ptr() % 16 for one in taken] == [0, 0]


def test_gemlite_tunes_itself_with_a_copy(load: Load, library: Callable[..., None], monkeypatch: Any) -> None:
    module, backend = load("gemlite")
    library("gemlite.helper")
    seen: list[Any] = []

    def linear(_: Any, *, a: Any, b: Any, scale: Any, **_more: Any) -> Any:
        seen.append(a)
        if len(seen) == 1:
            a.copy_(a.clone())  # the tuner's restore_value
        return lambda: (a.double() @ b.double().T * scale.double().reshape(1, -1)).to(a.dtype)

    monkeypatch.setattr(module, "linear", linear)
    assert_right(backend, "woq_int8:bf16-i8-bf16:nt:1x64x128")


def _gemm(a: Any, b: Any, *, bias: Any = None, alpha: Any = 1.0, out_dtype: Any = None, **_: Any) -> Any:
    """quack's gemm."""
    x = (a.double() @ b.double()) * alpha
    return (x if bias is None else x + bias.double()).to(out_dtype or a.dtype)


def _gemm_act(a: Any, b: Any, *, bias: Any, activation: str, **_: Any) -> Any:
    """quack's gemm_act, with what is stored before the activation."""
    x = _gemm(a.double(), b, bias=bias)
    f = torch.nn.functional
    acts: dict[str, Any] = {"relu": f.relu, "silu": f.silu}
    acts["gelu_tanh_approx"] = functools.partial(f.gelu, approximate="tanh")
    return None, acts[activation](x).to(a.dtype)


def _gemm_add(a: Any, b: Any, c: Any, *, alpha: float, beta: float, **_: Any) -> Any:
    """quack's gemm_add."""
    return (_gemm(a.double(), b, alpha=alpha) + beta * c).to(a.dtype)


@pytest.mark.parametrize(
    "line",
    [
        "linear:bf16:nt:17x64x128:bias",
        "linear:f16:nt:17x64x128:bias+silu",
        "linear:f16:nt:17x64x128:gelu_tanh",
        "addmm:bf16:nn:33x64x128:bias-mn+alpha-0.5+beta-2",
        "baddbmm:f16:nn:3x32x16x24:bias-mn+beta-0",
        f"{FP8}17x64x128:bias:quant.tensorwise",
    ],
)
def test_quack_has_epilogues_and_one_factor(load: Load, library: Callable[..., None], line: str) -> None:
    library("quack.gemm_interface", gemm=_gemm, gemm_act=_gemm_act, gemm_add=_gemm_add)
    assert_right(load("quack")[1], line)


def _blocks(a: tuple[Any, Any], b: tuple[Any, Any], out: Any) -> None:
    """DeepGEMM's fp8_gemm_nt: scales of 128 elements of a row of A, and of blocks of 128 x 128 of B, stored N x K."""
    (x, of_x), (y, of_y) = a, b
    assert of_x.shape == (x.shape[0], -(-x.shape[1] // 128))
    assert of_y.shape == (-(-y.shape[0] // 128), -(-y.shape[1] // 128))
    wide_x = of_x.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    wide_y = of_y.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: y.shape[0], : y.shape[1]]
    out.copy_((x.double() * wide_x) @ (y.double() * wide_y).T)


@pytest.mark.parametrize("line", ["mm:bf16:nt:17x64x128", f"{FP8}33x272x384:quant.blocks"])
def test_deepgemm_has_scales_of_blocks(load: Load, library: Callable[..., None], line: str) -> None:
    library("deep_gemm", fp8_gemm_nt=_blocks, bf16_gemm_nn=lambda a, b, out: out.copy_(a.double() @ b.double()))
    assert_right(load("deepgemm")[1], line)
