"""``nvgemm``: which module a release of PyTorch takes its operators from, and what it offers candidates for."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import utils

from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.backends import nvgemm
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.problem.problem import Problem

MM = "mm:bf16:nn:128x128x128"
Become = Callable[[int, int], None]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Become:
    """A function that makes PyTorch one of a release."""
    return lambda major, minor: monkeypatch.setattr(torch_compat, "torch_release", lambda: (major, minor))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Become:
    """A function that gives the machine a GPU of a compute capability."""

    def become(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    return become


def refusal(text: str, **request: Any) -> str:
    """Why nvgemm does not support a problem, "" where it does."""
    return str(NvgemmBackend().supports(Problem.parse(text), BuildRequest(**request)) or "")


def test_the_installed_torch_imports_the_module_of_its_release() -> None:
    module, *_ = nvgemm._library(torch_compat.torch_release())
    available: Any = utils.ensure_nv_universal_gemm_available
    assert f'find_spec("{module}")' in inspect.getsource(available.__wrapped__)


@pytest.mark.parametrize(
    ("minor", "module", "remedy"),
    [
        (13, "cutlass_api", "cutlass@cutlass_api"),
        (14, "cutlass.operators", "nvidia-cutlass-operators==0.1.0"),
        (15, "cutlass.operators", "nvidia-cutlass-operators==0.2.0"),
    ],
)
def test_a_release_asks_for_the_module_that_it_imports(
    release: Become, monkeypatch: pytest.MonkeyPatch, minor: int, module: str, remedy: str
) -> None:
    release(2, minor)
    monkeypatch.setattr(nvgemm, "_has", lambda name: name == "cutlass")
    reason = NvgemmBackend().installation().reason
    assert reason is not None
    assert f"imports {module}, which" in reason.text
    assert remedy in reason.remedy


def test_a_library_that_inductor_cannot_use_is_named(release: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15.0 ends a compile with nvidia-cutlass-operators 0.1.0."""

    def fail(_name: str) -> types.ModuleType:
        raise ImportError("cannot import name 'efc' from 'cutlass.operators.providers.cutedsl.evt'")

    monkeypatch.setattr(nvgemm, "_has", bool)
    monkeypatch.setattr(nvgemm, "importlib", types.SimpleNamespace(import_module=fail))
    release(2, 15)
    reason = NvgemmBackend().installation().reason
    assert reason is not None
    assert reason.code == "other-cutlass-operators"
    assert "cannot import name 'efc'" in reason.text
    assert reason.remedy.endswith("nvidia-cutlass-operators==0.2.0")
    release(2, 14)
    assert NvgemmBackend().installation().reason is None


def test_an_addend_needs_a_release_and_a_gpu_that_have_it(release: Become, device: Become) -> None:
    addmm, linear = "addmm:bf16:nn:128x128x128:bias", "linear:f16:nt:128x128x128:bias"
    release(2, 13)
    device(10, 0)
    assert "only for products without an addend" in refusal(addmm)
    assert "only for products without an addend" in refusal(linear)
    release(2, 14)
    assert refusal(addmm) == refusal(linear) == ""
    assert "alpha and beta are 1" in refusal("addmm:bf16:nn:128x128x128:bias+alpha-0.5")
    assert "Inductor's lowering of baddbmm" in refusal("baddbmm:bf16:nn:2x128x128x128:bias")
    for capability in ((9, 0), (12, 0)):
        device(*capability)
        assert "Blackwell" in refusal(addmm)
        assert refusal(MM) == ""


def test_grouped_products_need_blackwell(device: Become) -> None:
    grouped = "grouped_mm:bf16:nt:4x64x96x128"
    device(9, 0)
    assert "Blackwell" in refusal(grouped)
    device(10, 0)
    assert refusal(grouped) == ""
    assert "column-major" in refusal(grouped.replace("nt", "nn"))


def test_scales_for_a_row_or_the_tensor_have_no_candidate() -> None:
    for scales in ("quant.tensorwise", "quant.rowwise"):
        assert "each 16 or 32 elements" in refusal(f"scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:128x128x128:{scales}")


def test_sizes_may_be_symbols_where_the_release_takes_them(release: Become) -> None:
    release(2, 14)
    assert refusal(f"{MM}:m.dynamic") == refusal(MM, mode="dynamic") == ""
    release(2, 15)
    assert "all sizes are fixed" in refusal(f"{MM}:m.dynamic")
    assert "all sizes are fixed" in refusal(MM, mode="dynamic")
    assert refusal(MM) == ""
    assert "package of AOTInductor's" in refusal(MM, mode="aoti")


def test_every_operator_is_a_candidate_unless_the_winner_is_wanted() -> None:
    """Inductor's own limit leaves out most of the library; a user meets what it leaves."""
    problem = Problem.parse(MM)
    assert NvgemmBackend().options(problem)["nvgemm_max_profiling_configs"] is None
    winner = BuildRequest(selection=Selection.WINNER)
    assert "nvgemm_max_profiling_configs" not in NvgemmBackend().options(problem, winner)
