"""The Inductor backend on real compiles: what it proves, refuses, rebinds, and leaves as it was."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_gemm.api.executed import is_product, products_in_source, record_products
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor import bindings, generated_code, torch_compat
from pytest_gemm.backends.inductor.artifact import Artifact, InductorPrepared
from pytest_gemm.backends.inductor.backend import InductorBackend, Space, _grown, cache_dir
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.operands import tensors as operands
from pytest_gemm.problem.problem import HINTS, Problem
from pytest_gemm.programs import program

pytestmark = pytest.mark.skipif(
    not CppBackend().availability("cpu").ok, reason=f"cpp: {CppBackend().availability('cpu').reason}"
)


@pytest.fixture(scope="module")
def cpp() -> CppBackend:
    return CppBackend(threads=1)


def made(line: str, seed: int = 1) -> tuple[Problem, operands.Operands]:
    problem = Problem.parse(line)
    return problem, operands.make(problem, "rand", seed)


def objection(prepared: InductorPrepared) -> str:
    """Code of what the proof says against the last run, "" for nothing."""
    found = prepared.proof().objection()
    return found.code if found else ""


def _error(problem: Problem, given: operands.Operands, result: torch.Tensor) -> float:
    """Worst error over the gauge |A| |B| (|bias|): 1e-6 is a right f32 answer, 1 is another weight's."""
    tensors = {n: t.double() for n, t in program.args(problem, given).items()}
    want = program.build(problem)(**tensors)
    gauge = tensors["a"].abs() @ given.b.double().abs()
    return float(((result.double() - want).abs() / gauge).max())


# -- proof -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "is_fused"),
    [("mm", True), ("cast mm", True), ("mm relu", False), ("mm relu mm", False), ("mm mm", True), ("relu", False)],
)
def test_a_step_after_any_call_of_a_template_is_not_fused(calls: str, is_fused: bool) -> None:
    """The first result of a program of two products was taken for a fused one, which rounds once."""
    compiled = SimpleNamespace(order=tuple(calls.split()), templates=("mm",) if "mm" in calls else ())
    shown: Any = SimpleNamespace(_compiled=compiled)
    assert Artifact.fused.fget(shown) == is_fused  # type: ignore[attr-defined]  # of a property


@pytest.mark.slow
def test_proof_names_the_micro_kernel_that_ran(cpp: CppBackend) -> None:
    """A run that called no kernel, and a product of a library in the wrapper, are no proof."""
    problem, given = made("linear:f32:nt:20x33x40:bias+relu")
    prepared = cpp.prepare(problem, given)
    result = prepared.run(given)
    proof = prepared.proof()
    assert _error(problem, given, result) < 1e-5
    assert objection(prepared) == ""
    (chosen,), (executed,) = proof.chosen, proof.executed
    assert chosen.startswith("CppMicro")
    assert executed in proof.generated
    assert prepared.contract.epilogue == "fused"
    assert cpp.candidates(problem, given).names[:1] == proof.chosen
    assert f"{executed} = async_compile" in prepared.source
    compiled = prepared.artifact._compiled
    compiled.foreign = ("extern_kernels.mm",)
    assert prepared.proof().foreign == compiled.foreign
    compiled.foreign = ()
    compiled.calls.clear()
    assert objection(prepared) == "nothing-executed"


@pytest.mark.compiler
def test_a_silent_fallback_of_inductor_is_seen_as_foreign(cpp: CppBackend) -> None:
    """Forced to C++ only, torch 2.13 answers a linear with a transposed input by MKL (oneDNN without MKL)."""
    problem = Problem.parse("linear:f32:tt:20x33x40")
    refusal = cpp.supports(problem)
    assert refusal is not None
    assert refusal.reason.code == "a-transposed"
    given = operands.make(problem, "rand", 1)
    try:
        prepared = cpp.prepare(problem, given)
    except Unsupported:
        return  # a build without MKL has no such path: refused, which is right too
    prepared.run(given)
    assert objection(prepared) == "foreign-kernel"


@pytest.mark.compiler
def test_a_forced_backend_without_a_choice_is_refused_not_answered_by_aten(cpp: CppBackend) -> None:
    with pytest.raises(Unsupported) as caught:
        cpp.prepare(*made("mm:f32:nn:20x33x40:b.argument"))
    assert caught.value.reason.code == "no-candidate"


def test_products_are_recorded() -> None:
    a = torch.ones(2, 2)
    with record_products() as seen:
        torch.relu(a @ a)
        torch.nn.functional.linear(a, a, a[0])
        torch.nn.functional.conv2d(a[:, :, None, None], a[:, :, None, None])
    assert seen == ["aten.mm.default", "aten.addmm.default", "aten.convolution.default"]


# -- one artifact for all distributions ---------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize(
    "line",
    [
        "linear:f32:nt:20x33x40:bias+relu",
        "mm:bf16:nn:20x33x40",
        "addmm:f16:nn:20x33x40:bias",
        "bmm:f32:nn:3x20x33x40:b.constant",
        "woq_int8:bf16-i8-bf16:nt:20x64x64",
    ],
)
def test_rebinding_gives_the_new_weights_answer_without_a_compile(line: str) -> None:
    problem = Problem.parse(line)
    backend = CppBackend(threads=1)
    first, second = (operands.make(problem, "rand", seed) for seed in (1, 2))
    prepared = backend.prepare(problem, first)
    before = prepared.run(first)
    after = prepared.run(second)
    again = prepared.run(first)
    assert backend.log.compiles == 1
    assert torch.equal(before, again)
    eager = program.build(problem)(**program.args(problem, second))
    assert not torch.equal(before, after)
    assert (after.double() - eager.double()).abs().max() < 0.02 * eager.double().abs().max()


@pytest.mark.compiler
def test_a_replay_that_differs_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the recorded packing not the one that made the constant, every distribution would be compiled."""
    monkeypatch.setattr(bindings, "_replay", lambda packing, view, tensor: packing.replay(view(tensor)) * 1.5)
    problem = Problem.parse("linear:f32:nt:20x33x40:bias+relu")
    backend = CppBackend(threads=1)
    first, second = (operands.make(problem, "rand", seed) for seed in (1, 2))
    prepared = backend.prepare(problem, first)
    assert _error(problem, first, prepared.run(first)) < 1e-5
    assert _error(problem, second, prepared.run(second)) < 1e-5
    assert "does not follow" in prepared.artifact.rebind_reason
    assert backend.log.compiles == 3


@pytest.mark.compiler
def test_a_small_bias_is_text_and_compiled_for_each_distribution() -> None:
    problem = Problem.parse("linear:f32:nt:20x7x40:bias")
    backend = CppBackend(threads=1)
    first, second = (operands.make(problem, "rand", seed) for seed in (1, 2))
    prepared = backend.prepare(problem, first)
    for given in (first, second, second):
        assert _error(problem, given, prepared.run(given)) < 1e-5
    assert backend.log.compiles == 2
    assert "bias" in prepared.artifact.rebind_reason


def test_a_weight_changed_in_place_is_bound_again(cpp: CppBackend) -> None:
    problem, given = made("linear:f32:nt:20x33x40:bias+relu", 4)
    prepared = cpp.prepare(problem, given)
    prepared.run(given)
    given.b.mul_(-1)
    assert _error(problem, given, prepared.run(given)) < 1e-5


def test_stand_ins_have_the_geometry_of_a_parameter() -> None:
    storage = torch.zeros(1000)
    guarded = storage.as_strided((3, 5), (8, 1), 128)
    shifted = storage.as_strided((5, 3), (1, 8), 129)
    assert bindings.stand_in(guarded, 1).storage_offset() == 0
    one = bindings.stand_in(shifted, 1)
    assert (one.storage_offset(), one.stride()) == (1, (1, 8))
    assert one.unique().numel() == 15


# -- m.dynamic ---------------------------------------------------------------------------------------------


def test_dyn_m_is_one_artifact_for_several_m() -> None:
    backend = CppBackend(threads=1)
    lines = [f"linear:f32:nt:{m}x33x40:bias+add:m.dynamic" for m in (5, 2, 96)]
    prepared = []
    for line in lines:
        problem, given = made(line)
        one = backend.prepare(problem, given)
        result = one.run(given)
        assert result.shape == problem.result_shape
        assert objection(one) == ""
        assert _error(problem, given, result) < 1e-5
        prepared.append(one)
    assert backend.log.compiles == 1
    assert len({id(p.artifact) for p in prepared}) == 1
    assert prepared[0].artifact.problem.shape.m == HINTS["m"]


def test_a_view_behind_a_product_has_no_dynamic_dimension() -> None:
    line = "linear:f32:nt:24x64x65:bias+view-4x6x4x16+perm-0_2_1_3+mul"
    assert bindings.dynamic_dimensions(Problem.parse(line)) == {}


def test_an_error_of_generated_code_is_not_replaced_by_one_of_dynamo_s() -> None:
    problem, given = made("mm:f32:nn:8x8x8:b.argument")
    tensors = program.args(problem, given)

    def compiler(_graph: torch.fx.GraphModule, _examples: object) -> Callable[..., torch.Tensor]:
        def generated(*_args: torch.Tensor) -> torch.Tensor:
            raise ValueError("the kernel's own error")

        return generated

    module = bindings.straight_line(problem, {}, tuple(tensors))
    with pytest.raises(ValueError, match="the kernel's own error"):
        torch.compile(module, fullgraph=True, backend=compiler)(*tensors.values())


def test_a_program_that_would_compile_again_says_so(cpp: CppBackend) -> None:
    prepared = cpp.prepare(*made("linear:f32:nt:20x33x40:bias+relu"))
    tensors = program.args(*made("linear:f32:nt:21x33x40:bias+relu"))
    with pytest.raises(bindings.RecompileError, match="20x33x40"):
        prepared.artifact.run(tensors)


# -- supports ------------------------------------------------------------------------------------------

_CLAIMS = {
    "mm:f32:nn:20x33x40": "",
    "bmm:f32:nn:3x20x33x40": "",
    "bmm:f32:nn:3x20x33x40:b.constant+parameter": "",
    "bmm:bf16:nn:3x20x33x40:a.broadcast": "a-strided",
    "bmm:f32:tn:3x20x33x40": "a-transposed",
    # One row of a transposed A is a row like any other, unless its elements lie apart.
    "mm:f32:tt:1x20x40": "",
    "mm:f32:tt:1x20x40:a.padded": "a-transposed",
    "bmm:f32:nn:3x1x33x40": "decomposed",
    "mm:f32:nn:1x1x40": "decomposed",
    "addmm:f32:nn:1x12x10:bias": "decomposed",
    "mm:f64:nn:20x33x40": "dtype",
    "mm:f16:nn:20x33x40:b.argument": "weight-not-constant",
    "baddbmm:f32:nn:3x20x33x40:bias": "no-candidate",
    "int_mm:i8-i8-i32:nt:20x33x40": "no-candidate",
    "mixed_mm:bf16-i8-bf16:nn:20x33x40": "dequant-kept",
    # The conversion writes operands of its own, row by row.
    "mm:f32-f32-bf16:tn:20x33x40": "",
    "bmm:f32-f32-f16:tn:3x20x33x40:a.padded": "",
    "bmm:f32-f32-bf16:nn:3x20x33x40:a.broadcast": "",
    "linear:f32-f32-bf16:nt:2x20x33x40:bias:a.padded": "",
}


@pytest.mark.compiler
@pytest.mark.parametrize(("line", "code"), _CLAIMS.items(), ids=str)
def test_supports_agrees_with_inductor(cpp: CppBackend, line: str, code: str) -> None:
    """Nothing is compiled: where Inductor has candidates it lists them."""
    problem, given = made(line)
    refusal = cpp.supports(problem)
    assert (refusal.reason.code if refusal else "") == code
    listed = cpp._list(problem, given, DEFAULT, Space())
    assert any(name.startswith("CppMicro") for name in listed) == (not code)


def test_an_m_that_no_dynamic_artifact_contains_is_refused(cpp: CppBackend) -> None:
    refusal = cpp.supports(Problem.parse("mm:f32:nn:1x33x40:m.dynamic"))
    assert refusal is not None
    assert refusal.reason.code == "dynamic-m-0-1"
    assert cpp.supports(Problem.parse("mm:f32:nn:1x33x40:m.dynamic+unknown")) is None


# -- nothing is left behind ----------------------------------------------------------------------------


def test_nothing_global_is_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx  # first: the modules below import each other in a circle
    import torch._inductor.config as inductor_config
    from torch._dynamo import guards
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def state() -> list[object]:
        return [
            dict(os.environ),
            inductor_config.get_config_copy(),
            functorch_config.get_config_copy(),
            dynamo_config.get_config_copy(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            AlgorithmSelectorCache.__call__,
            CppGemmTemplate.prep_weight,
            KernelTemplate._template_from_string,
            PyCodeCache.load_by_key_path,
            guards.profile_guard_manager,
        ]

    before = state()
    refused = made("mm:f32:nn:20x33x40:b.argument")  # the error's way out undoes everything too
    assert str(cache_dir()).startswith(str(tmp_path))
    with pytest.raises(Unsupported):
        CppBackend(threads=torch.get_num_threads() + 1).prepare(*refused)
    assert state() == before


def test_a_compile_for_the_cpu_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    def started(*_: object) -> None:
        raise AssertionError("CUDA is started")

    monkeypatch.setattr(torch.cuda, "get_rng_state", started)
    # As on a machine with a GPU, for Dynamo's own question alone.
    answers = lambda: sys._getframe(1).f_code.co_filename == convert_frame.__file__  # noqa: E731  # patched in
    monkeypatch.setattr(torch.cuda, "is_available", answers)
    CppBackend(threads=1).prepare(*made("mm:f32:nn:20x33x40"))  # whose kernel another test has compiled


def test_the_users_cache_directory_wins_over_the_default_that_inductor_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere/else")
    assert cache_dir().parent == Path("/somewhere/else")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache_dir_utils.default_cache_dir())
    assert "pytest-gemm" in str(cache_dir())
    with torch_compat.cache_dir_set("/ours"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/ours"


@pytest.mark.compiler
def test_few_artifacts_are_kept() -> None:
    backend = CppBackend(threads=1)
    backend.keep = 1
    for line in ("mm:f32:nn:20x33x40", "linear:f32:nt:20x33x40:bias+relu", "mm:f32:nn:20x33x40"):
        problem, given = made(line)
        assert backend.prepare(problem, given).run(given).shape == problem.result_shape
    assert backend.log.compiles == 3


# -- the other backends --------------------------------------------------------------------------------


def test_this_torch_lacks_nothing() -> None:
    assert torch_compat.lacks() == ()


@pytest.mark.parametrize("make", BUILTIN, ids=lambda make: make.name)
def test_a_backend_that_cannot_run_says_what_would_help(make: functools.partial[InductorBackend]) -> None:
    backend = make()
    for device in ("cpu", "cuda"):
        reason = backend.availability(device).reason
        assert reason is None or (reason.code and reason.text and reason.remedy)
    refusal = backend.supports(Problem.parse("woq_int4:bf16-i4-bf16:nt:2x8x64:quant.group-64"))
    assert refusal is not None


# How the schedulings of torch 2.15.0 write a kernel into the wrapper: NVUniversalGemmScheduling
# .define_kernel(), TritonTemplate with its heuristics, and a pointwise kernel.
WRAPPER_2_15 = """
cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''
void kernel() {}
''')

cpp_fused_mm_1 = async_compile.cpp_pybinding(['float*'], r'''
kernel_micro_gemm<true>();
''')

nv_universal_gemm_fused_mm_0a1b2c3d = async_compile.nv_universal_gemm('nv_universal_gemm_fused_mm_0a1b2c3d', r'''
def nv_universal_gemm_fused_mm_0a1b2c3d_main(in_ptr0, in_ptr1, out_ptr0, stream=None):
    pass
''', precompile_metadata={'variant_name': 'GEMM', 'cc': 90})

triton_tem_fused_bmm_2 = async_compile.triton('triton_tem_fused_bmm_2', '''
@triton_heuristics.template(num_stages=2, num_warps=4)
@triton.jit
def triton_tem_fused_bmm_2(arg_A, arg_B, out_ptr0):
    acc += tl.dot(a, b, allow_tf32=ALLOW_TF32)
''', device_str='cuda')

triton_poi_fused_relu_3 = async_compile.triton('triton_poi_fused_relu_3', '''
@triton_heuristics.pointwise(size_hints={'x': 1024})
@triton.jit
def triton_poi_fused_relu_3(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""


def test_templates_are_told_from_other_kernels() -> None:
    assert generated_code.kernels_of(WRAPPER_2_15) == {
        "cpp_fused_0": False,
        "cpp_fused_mm_1": True,
        "nv_universal_gemm_fused_mm_0a1b2c3d": True,
        "triton_tem_fused_bmm_2": True,
        "triton_poi_fused_relu_3": False,
    }
    assert products_in_source(WRAPPER_2_15) == ()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("extern_kernels.mm(a, b, out=c)", "extern_kernels.mm"),
        ("extern_kernels.relu(c)", ""),
        ("buf = torch.ops.mkl._mkl_linear.default(x)", "torch.ops.mkl._mkl_linear.default"),
        (
            "buf0 = torch.ops.mkldnn._convolution_pointwise.default(a, b, None)",
            "torch.ops.mkldnn._convolution_pointwise.default",
        ),
        # Of torch 2.15, and the operators behind PyTorch's eager kernels in other languages than C++.
        ("extern_kernels._quack_symmetric_mm(arg0_1, out=buf0)", "extern_kernels._quack_symmetric_mm"),
        ("extern_kernels._mm_plus_mm(arg0_1, arg1_1, arg2_1, arg3_1, out=buf0)", "extern_kernels._mm_plus_mm"),
        ("buf0 = torch.ops._native.bmm_triton_0(arg0_1, arg1_1)", "torch.ops._native.bmm_triton_0"),
        ("buf0 = torch.ops._native.topk_cutedsl_3(arg0_1, 4)", ""),
        ("buf0 = torch.ops.aten.topk.default(arg0_1, 4)", ""),
    ],
)
def test_products_are_read_in_a_program(call: str, name: str) -> None:
    assert products_in_source(f"        {call}\n") == ((name,) if name else ())


def test_whatever_inductor_registers_to_be_selected_is_known_as_a_product_of_a_library() -> None:
    import torch._inductor.compile_fx

    names = vars(torch._inductor.select_algorithm.extern_kernels)
    assert {"mm", "bmm_dtype"} <= {*names}
    assert [name for name in names if not is_product(f"extern_kernels.{name}")] == []


@pytest.mark.parametrize(
    ("shape", "more", "stride"),
    [
        ((3, 17, 5), {1: 44}, (305, 5, 1)),
        ((1, 17, 5), {1: 44}, (305, 5, 1)),  # the stride of a size of one is asked of, too
        ((4, 17, 1), {1: 44}, (61, 1, 1)),
        ((17, 1), {0: 44}, (1, 1)),
    ],
)
def test_a_contiguous_operand_that_grows_is_contiguous(
    shape: tuple[int, ...], more: dict[int, int], stride: tuple[int, ...]
) -> None:
    assert _grown(torch.zeros(shape), more).stride() == stride


def test_an_operand_that_grows_keeps_its_gaps() -> None:
    padded = torch.zeros(3, 17, 8)[..., :5]
    assert _grown(padded, {1: 44}).stride() == (61 * 8, 8, 1)
