"""``nvgemm``: which module a release of PyTorch takes its operators from, and what it offers candidates for."""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.backends import nvgemm
from pytest_gemm.backends.inductor import hooks, nvgemm_facts
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.problem.problem import Problem

# What torch/_inductor/utils.py has, by release, without what neither name depends on.
SINCE_2_11 = """
def ensure_nv_universal_gemm_available():
    "Check if NVIDIA Universal GEMM (cutlass_api) is importable; cache the result for reuse."
    try:
        available = importlib.util.find_spec("cutlass_api") is not None
    except ImportError:
        return False
    return available

def use_nv_universal_gemm_template(layout, m, n, k, mat_a, mat_b):
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
    return not any(has_free_unbacked_symbols(dim) for dim in [m, n, k])
"""
SINCE_2_14 = SINCE_2_11.replace('"cutlass_api"', '"cutlass.operators"')
SINCE_2_15 = SINCE_2_14.replace("has_free_unbacked_symbols", "has_free_symbols")

MM = "mm:bf16:nn:128x128x128"
# What is remembered of a release.
FACTS = (nvgemm_facts.module, nvgemm_facts.adds, nvgemm_facts.is_static, nvgemm_facts.brings_operators)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes Inductor that of a release: the text of its functions, and whether it has addmm."""

    def become(text: str, addmm: bool = False) -> None:
        inductor: Any = types.SimpleNamespace(importlib=importlib)
        names: dict[str, Any] = vars(inductor)
        exec(text, names)  # the constants above
        monkeypatch.setattr(nvgemm_facts, "found", lambda where: names[where.partition(":")[2]])
        monkeypatch.setattr(nvgemm_facts, "is_there", lambda where: where.partition(":")[2] in names or addmm)
        for fact in FACTS:
            fact.cache_clear()

    yield become
    for fact in FACTS:
        fact.cache_clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that gives the machine a GPU of a compute capability."""

    def become(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    return become


def refusal(text: str, **request: Any) -> str:
    """Why nvgemm does not support a problem, "" where it does."""
    return str(NvgemmBackend().supports(Problem.parse(text), BuildRequest(**request)) or "")


def test_the_installed_torch_says_its_module() -> None:
    """This is what the rules rest on: the real function, and no table of versions."""
    nvgemm_facts.module.cache_clear()
    assert nvgemm_facts.module() in nvgemm._LIBRARIES
    found: Any = hooks.found("torch._inductor.utils:ensure_nv_universal_gemm_available")
    assert f'find_spec("{nvgemm_facts.module()}")' in inspect.getsource(found.__wrapped__)


@pytest.mark.parametrize(
    ("text", "module", "remedy"),
    [
        (SINCE_2_11, "cutlass_api", "cutlass@cutlass_api"),
        (SINCE_2_14, "cutlass.operators", "nvidia-cutlass-operators"),
        (SINCE_2_14.replace("cutlass.operators", "cutlass.kernels"), "cutlass.kernels", "the package that has"),
        ("", "cutlass.operators", "nvidia-cutlass-operators"),  # a release in which neither function is left
    ],
    ids=["2.11", "2.14", "unknown", "renamed"],
)
def test_a_release_asks_for_the_module_that_it_imports(
    release: Callable[..., None], monkeypatch: pytest.MonkeyPatch, text: str, module: str, remedy: str
) -> None:
    release(text)
    monkeypatch.setattr(nvgemm, "_has", lambda name: name == "cutlass")
    reason = NvgemmBackend().installation().reason
    assert reason is not None
    assert f"imports {module}, which" in reason.text
    assert remedy in reason.remedy
    monkeypatch.setattr(nvgemm, "_has", lambda name: name in {"cutlass", module})
    assert NvgemmBackend().installation().reason is None


def test_a_library_that_inductor_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15.0 ends a compile with nvidia-cutlass-operators 0.1.0."""
    real = importlib.import_module

    def fail(name: str) -> types.ModuleType:
        if name == nvgemm_facts._OWN_OPERATORS:
            raise ImportError("cannot import name 'efc' from 'cutlass.operators.providers.cutedsl.evt'")
        return real(name)

    monkeypatch.setattr(nvgemm, "_has", bool)
    monkeypatch.setattr(nvgemm_facts, "brings_operators", lambda: True)
    monkeypatch.setattr("importlib.import_module", fail)
    reason = NvgemmBackend().installation().reason
    assert reason is not None
    assert reason.code == "other-cutlass-operators"
    assert "cannot import name 'efc'" in reason.text
    assert reason.remedy.endswith("nvidia-cutlass-operators==0.2.0") or "cutlass_api" in reason.remedy
    monkeypatch.setattr(nvgemm_facts, "brings_operators", lambda: False)
    assert NvgemmBackend().installation().reason is None


def test_an_addend_needs_a_release_and_a_gpu_that_have_it(
    release: Callable[..., None], device: Callable[[int, int], None]
) -> None:
    addmm, linear = "addmm:bf16:nn:128x128x128:bias", "linear:f16:nt:128x128x128:bias"
    release(SINCE_2_11)
    device(10, 0)
    assert "only for products without an addend" in refusal(addmm)
    assert "only for products without an addend" in refusal(linear)
    release(SINCE_2_14, addmm=True)
    assert refusal(addmm) == refusal(linear) == ""
    assert "alpha and beta are 1" in refusal("addmm:bf16:nn:128x128x128:bias+alpha-0.5")
    assert "Inductor's lowering of baddbmm" in refusal("baddbmm:bf16:nn:2x128x128x128:bias")
    for capability in ((9, 0), (12, 0)):
        device(*capability)
        assert "Blackwell" in refusal(addmm)
        assert refusal(MM) == ""


def test_grouped_products_need_blackwell(device: Callable[[int, int], None]) -> None:
    grouped = "grouped_mm:bf16:nt:4x64x96x128"
    device(9, 0)
    assert "Blackwell" in refusal(grouped)
    device(10, 0)
    assert refusal(grouped) == ""
    assert "column-major" in refusal(grouped.replace("nt", "nn"))


def test_scales_for_a_row_or_the_tensor_have_no_candidate() -> None:
    for scales in ("quant.tensorwise", "quant.rowwise"):
        assert "each 16 or 32 elements" in refusal(f"scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:128x128x128:{scales}")


def test_sizes_may_be_symbols_where_the_release_takes_them(release: Callable[..., None]) -> None:
    release(SINCE_2_14)
    assert refusal(f"{MM}:m.dynamic") == refusal(MM, mode="dynamic") == ""
    release(SINCE_2_15)
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
