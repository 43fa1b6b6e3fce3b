"""Every candidate is judged by name: names, lists, single candidates, what is pruned, and memory full of poison."""

# ruff: noqa: ARG001, ARG005 - fakes have the signatures of what they stand for
from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch._inductor.compile_fx  # first: what is below it imports each other in a circle

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability, CandidateBackend, Candidates
from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.api.settings import configure
from pytest_gemm.backends import cutedsl
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor import artifact as artifact_module
from pytest_gemm.backends.inductor import compilation, poisoning, selection, torch_compat
from pytest_gemm.backends.inductor import compiled as compiled_module
from pytest_gemm.backends.inductor.backend import Space
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import CandidateSelection, CaseId, Device
from pytest_gemm.core.outcome import Misconduct, Outcome, Phase, Pruned, Reason, Status, Unsupported
from pytest_gemm.failures import text as text_module
from pytest_gemm.judging import case as case_module
from pytest_gemm.judging import judge
from pytest_gemm.ledger.entry import Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics import interval, reference, tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import calls

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unexplained")]

needs_compiler = pytest.mark.skipif(
    not CppBackend().availability("cpu").ok, reason=f"cpp: {CppBackend().availability('cpu').reason}"
)
needs_triton = pytest.mark.skipif(
    not TritonBackend().availability("cuda").ok, reason=f"needs a GPU: {TritonBackend().availability('cuda').reason}"
)

LINE = "linear:f32:nt:20x33x40:bias+relu"


def given(line: str = LINE, distribution: str = "rand", seed: int = 1) -> tuple[Problem, operands.Operands]:
    problem = Problem.parse(line)
    return problem, operands.make(problem, distribution, seed)


# -- names -------------------------------------------------------------------------------------------


TRITON = {"ACC_TYPE": "tl.float32", "ALLOW_TF32": False, "EVEN_K": True, "GROUP_M": 8, "USE_FAST_ACCUM": False}


def triton_caller(number: int, m: int = 64, n: int = 128, k: int = 32, **facts: object) -> Any:
    """A candidate with what torch 2.11 to 2.13 give theirs: ``TritonTemplateCaller`` in select_algorithm.py."""
    stages, warps = facts.pop("stages", 4), facts.pop("warps", 8)
    kwargs = {**TRITON, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, **facts}
    described = [f"{key}={kwargs[key]!r}" for key in sorted(kwargs)]
    about = {"num_stages": stages, "num_warps": warps, "GROUP_M": kwargs["GROUP_M"], "backend": "Triton"}
    return SimpleNamespace(
        name=f"{facts.pop('template', 'triton_mm')}_{number}",
        description=", ".join([*described, f"num_stages={stages}", f"num_warps={warps}"]),
        log_info={"tile_shape": str((m, k, n)), **about},
    )


def test_what_tells_candidates_apart_is_in_their_names_and_nothing_else() -> None:
    choices = [
        triton_caller(0, GROUP_M=8, EVEN_K=True),
        triton_caller(1, GROUP_M=4, EVEN_K=False),  # EVEN_K says the same again
        triton_caller(2, stages=3, GROUP_M=8),
        *(triton_caller(2 + n, 128, EPILOGUE_SUBTILE=n, template="triton_blackwell") for n in (1, 2)),
    ]
    assert selection.choice_names(choices) == (
        "triton_mm-64x128x32,s4,w8,EVEN_K=True",
        "triton_mm-64x128x32,s4,w8,EVEN_K=False",
        "triton_mm-64x128x32,s3,w8",
        "triton_blackwell-128x128x32,s4,w8,EPILOGUE_SUBTILE=1",
        "triton_blackwell-128x128x32,s4,w8,EPILOGUE_SUBTILE=2",
    )


@pytest.mark.parametrize(("wanted", "impossible", "made", "chosen"), [
    (1, (), [128], 128), (1, (128,), [128, 16], 16), ("triton_mm-32x128x32,s4,w8", (), [32], 32),
    (2, (16, 32, 64, 128), [64, 128, 16, 32], None),
])  # fmt: skip
def test_code_is_made_of_the_wanted_candidate_alone(
    wanted: int | str, impossible: tuple[int, ...], made: list[int], chosen: int | None
) -> None:
    rendered: list[int] = []

    def generate(_: object, *, BLOCK_M: int, **facts: object) -> Any:  # noqa: N803  # Inductor's name
        rendered.append(BLOCK_M)
        if BLOCK_M in impossible:
            raise NotImplementedError
        return SimpleNamespace(**vars(triton_caller(0, BLOCK_M)), output_node=lambda: None)

    seen = compilation.Session()
    watch = selection._Selection(seen, wanted, listing=False)
    facts = {"BLOCK_N": 128, "BLOCK_K": 32, "num_stages": 4, "num_warps": 8}
    template = SimpleNamespace(name="mm")
    choices = [watch.generate(generate, template, BLOCK_M=m, **facts) for m in (16, 32, 64, 128)]
    for choice in choices:
        choice.annotations = {"size": choice.name}  # as Inductor does with what it was given
    watch.select(lambda *_: None, None, "mm", choices)
    assert rendered == made
    assert seen.candidate == (f"triton_mm-{chosen}x128x32,s4,w8" if chosen else "")
    assert [choice.annotations for choice in choices] == [{"size": "triton_mm_0"}] * bool(chosen)
    assert len(seen.choices) == 4
    assert bool(seen.empty) is (chosen is None)


def test_every_kind_of_candidate_has_a_name_that_a_shell_and_a_pattern_take_as_it_is() -> None:
    blocking = SimpleNamespace(block_m=8, block_n=48, block_k=1)
    template = SimpleNamespace(name="CppMicroGemmFP32Vec", register_blocking=blocking)
    metadata = SimpleNamespace(kernel_name="Kernel(a; b)[128]")
    operation = SimpleNamespace(configuration_name=lambda: "cutlass3x_sm90_tensorop_f16_128x128x64_2x1x1_0_tnt")
    choices = [
        triton_caller(0),
        SimpleNamespace(name="cpp_3", template=template),
        SimpleNamespace(name="cutlass_1", info_kwargs={"op": operation, "swizzle": 2}),
        SimpleNamespace(name="nv", kernel=SimpleNamespace(metadata=metadata)),
        SimpleNamespace(name="decompose_k_mm_16_split_3"),
        SimpleNamespace(_wrapped=triton_caller(5, 16, 16, 16, stages=1, warps=2)),
    ]
    names = selection.choice_names(choices)
    assert names == (
        "triton_mm-64x128x32,s4,w8",
        "CppMicroGemmFP32Vec-8x48x1",
        "cutlass3x_sm90_tensorop_f16_128x128x64_2x1x1_0_tnt,swizzle=2",
        "Kernel-a-b-128",
        "decompose_k_mm_16_split",
        "triton_mm-16x16x16,s1,w2",
    )
    assert all(shlex.quote(name) == name and not set(name) & set("*?[]") for name in names)


# -- Inductor ------------------------------------------------------------------------------------------

UNFIT = "OutOfResources: out of resource: shared memory, Required: 262144"


class TwoCandidates(CppBackend):
    """ATen beside the C++ template: the only way to a choice that Inductor has on every CPU."""

    name = "two"
    inductor_name = "ATEN,CPP"
    selection = Selection.WINNER


@pytest.fixture(scope="module")
def two() -> TwoCandidates:
    return TwoCandidates(threads=1)


@needs_compiler
def test_candidates_are_listed_without_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller

    made: list[str] = []
    backend = TwoCandidates(threads=1)
    problem, first = given("mm:f32:nn:64x64x64")
    with (
        patch.object(AsyncCompile, "cpp_pybinding", lambda *args: made.append("compiled")),
        patch.object(CppTemplateCaller, "benchmark", lambda *args, out: made.append("benchmarked")),
        calls.quiet(),
    ):
        names = backend.candidates(problem, first).names
    assert made == []
    assert len(names) == len(set(names)) > 2
    assert names[0].startswith("CppMicroGemmFP32Vec-")
    assert backend.log.compiles == 0
    monkeypatch.setattr(compiled_module, "torch_compat", None)  # asked again, nothing is traced
    assert backend.candidates(problem, given("mm:f32:nn:64x64x64", seed=5)[1]).names == names


@needs_compiler
def test_the_candidate_that_was_asked_for_is_the_one_that_runs(two: TwoCandidates) -> None:
    problem, first = given("mm:f32:nn:64x64x64")
    cpp, aten, *_ = two.candidates(problem, first).names
    expected = first.a.double() @ first.b.double()
    for name in (cpp, aten):
        prepared = two.prepare(problem, first, BuildRequest(candidate=name))
        assert (prepared.run(first).double() - expected).abs().max() < 1e-4
        assert prepared.artifact.chosen == (name,)
        assert (prepared.proof().chosen == (name,)) == (name == cpp)  # ATen's is somebody else's product
        assert bool(prepared.proof().foreign) == (name == aten)


@needs_compiler
def test_a_name_that_no_candidate_has_is_refused(two: TwoCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, first = given("mm:f32:nn:64x64x64")
    for is_listed in (False, True):  # listed, and Inductor does not offer it any more
        if is_listed:
            monkeypatch.setattr(two, "_space_of", lambda *args: Space())
        with pytest.raises(Unsupported) as caught:
            two.prepare(problem, first, BuildRequest(candidate="CppMicroGemmAMX-32x32x32"))
        assert caught.value.reason.code == "unknown-candidate"


@needs_compiler
def test_an_artifact_of_one_candidate_is_kept_for_any_m_only() -> None:
    backend = CppBackend(threads=1)
    for m in (5, 96):
        problem, first = given(f"linear:f32:nt:{m}x33x40:bias+add:m.dynamic")
        name = backend.candidates(problem, first).names[0]
        backend.prepare(problem, first, BuildRequest(candidate=name)).run(first)
    assert backend.log.compiles == 1
    problem, first = given()
    name = backend.candidates(problem, first).names[0]
    for _ in range(2):
        backend.prepare(problem, first, BuildRequest(candidate=name)).run(first)
    assert backend.log.compiles == 3


@needs_compiler
def test_the_winner_is_benchmarked(two: TwoCandidates) -> None:
    problem, first = given("mm:f32:nn:64x64x64")
    timed: list[str] = []
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller

    def benchmark(self: Any, *args: Any, out: torch.Tensor) -> float:
        timed.append(self.name)
        return 1e-9

    with patch.object(CppTemplateCaller, "benchmark", benchmark), calls.quiet():
        prepared = TwoCandidates(threads=1).prepare(problem, first)
    assert timed
    assert prepared.artifact.chosen[0].startswith("CppMicroGemm")
    assert prepared.pruned == {}


@needs_compiler
@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (f"No valid triton configs. {UNFIT}", "out-of-resources", f"No valid triton configs. {UNFIT}"),
        ("an illegal access\nwas encountered", "benchmark-failed", "RuntimeError: an illegal access"),
    ],
)
def test_what_a_benchmark_fails_with_is_said_of_the_candidate_that_inductor_leaves_out(
    said: str, code: str, text: str
) -> None:
    from torch._inductor.codegen.cpp_template_kernel import CppTemplateCaller

    def benchmark(self: Any, *args: Any, out: torch.Tensor) -> float:
        raise RuntimeError(said)

    problem, first = given("mm:f32:nn:64x64x64")
    with patch.object(CppTemplateCaller, "benchmark", benchmark), calls.quiet():
        prepared = TwoCandidates(threads=1).prepare(problem, first)
    ((name, reason),) = prepared.pruned.items()
    assert name.startswith("CppMicroGemmFP32Vec-")
    assert (reason.code, reason.text) == (code, text)


@contextlib.contextmanager
def failing_to_load(error: Exception) -> Iterator[None]:
    """The compile of every C++ kernel fails, as that of a Triton kernel that does not fit does: when it is loaded."""
    from torch._inductor.async_compile import AsyncCompile

    def cpp_pybinding(self: Any, argtypes: Any, source: str) -> None:
        raise error

    with patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding):
        yield


@needs_compiler
def test_a_candidate_that_does_not_fit_is_pruned_and_one_that_fails_otherwise_is_not() -> None:
    problem, first = given()
    backend = CppBackend(threads=1)
    name = backend.candidates(problem, first).names[0]
    unfit = RuntimeError(f"No valid triton configs. {UNFIT}")
    with failing_to_load(unfit), pytest.raises(Pruned) as caught:
        backend.prepare(problem, first, BuildRequest(candidate=name))
    assert caught.value.reason.code == "out-of-resources"
    assert "262144" in caught.value.reason.text
    with failing_to_load(ZeroDivisionError("in codegen")), pytest.raises(Exception, match="in codegen"):
        backend.prepare(problem, first, BuildRequest(candidate=name))
    with failing_to_load(unfit), pytest.raises(Pruned) as caught:
        CppBackend(threads=1).prepare(problem, first, BuildRequest(selection=Selection.ONE))
    assert caught.value.reason.code == "all-pruned"


def named(kind: str, text: str, **attributes: object) -> Exception:
    """An exception of that type name: torch and triton move theirs between modules."""
    error: Exception = type(kind, (Exception,), {})(text)
    vars(error).update(attributes)
    return error


CUDA_ERROR = "warning: x\n/a/b.cu(3): error: tile\nfatal: y"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (named("CUDACompileError", "C++ compile error", output=CUDA_ERROR), "compile-error", "b.cu(3): error: tile"),
        (named("OutOfResources", "out of resource: shared memory, Required: 9"), "out-of-resources", "Required: 9"),
        (named("NoTritonConfigsError", "No valid triton configs. OutOfResources: Required: 9"),
         "out-of-resources", "Required: 9"),
        (named("InductorError", "OutOfMemoryError: out of resource: mm Required: 262144 Hardware limit:232448"),
         "out-of-resources", "Required: 262144"),
        (named("NoTritonConfigsError", "No valid triton configs. PTXASError: it died"), "compile-error", "it died"),
        (named("InductorError", "wrapped", inner_exception=named("PTXASError", "PTXAS error: internal")),
         "compile-error", "PTXAS"),
        (named("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), "", ""),
        (named("NoTritonConfigsError", "No triton configs are available"), "", ""),
        (named("CppCompileError", "C++ compile error", output="error: no"), "", ""),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_what_autotuning_drops_and_what_is_a_failure(error: Exception, code: str, text: str) -> None:
    reason = torch_compat.why_pruned(error)
    assert (reason.code if reason else "") == code
    assert reason is None or text in reason.text


@pytest.mark.parametrize("chosen", [False, True])
def test_a_refusal_by_nvcc_is_pruned_until_the_candidate_is_part_of_the_program(chosen: bool) -> None:
    """Autotuning leaves out what does not compile; a fused kernel that does not is what a user gets."""
    error = named("CUDACompileError", "C++ compile error", output="b.cu(3): error: no operator")
    spec = compilation.CompileSpec("CUTLASS", {}, "", threads=1, candidate=0)
    seen = compilation.Session(choices=["a", "b"], chosen=["a"] if chosen else [], candidate="a")
    pruned: dict[str, Any] = {}
    if chosen:
        with pytest.raises(type(error)):
            compiled_module.after_failure(Problem.parse("bmm:f16:nn:3x32x16x24:add"), spec, seen, error, pruned)
        assert not pruned
    else:
        compiled_module.after_failure(Problem.parse("mm:f16:nn:32x16x24"), spec, seen, error, pruned)
        assert pruned["a"].code == "compile-error"


def test_the_product_inside_decompose_k_is_its_own() -> None:
    session = compilation.Session(chosen=["decompose_k_mm_16_split"], choices=["decompose_k_mm_16_split"])
    compiled: Any = SimpleNamespace(
        session=session,
        templates=(),
        kernels={"triton_red_fused_sum_0": False},
        calls=["triton_red_fused_sum_0"],
        in_cpp=False,
        foreign=("aten.bmm.dtype_out", "extern_kernels.bmm_dtype"),
        products=(),
    )
    artifact = object.__new__(artifact_module.Artifact)
    artifact.problem = Problem.parse("mm:f16:nn:16x16x4096")
    artifact._compiled, artifact.spec = compiled, compilation.CompileSpec("TRITON", {}, "", threads=1)
    objection = artifact.proof().objection()
    assert objection is not None  # any other candidate's product by ATen is a fallback
    assert objection.code == "foreign-kernel"
    session.subgraphs.append("decompose_k_mm_16_split")
    proof = artifact.proof()
    assert proof.objection() is None
    assert proof.kernels == ("triton_red_fused_sum_0 (decompose_k_mm_16_split)",)
    # What the device's profiler sees of it is cuBLAS's product and the generated sum.
    seen = ("nvjet_sm90_hss_64x8_64x16_1x2_h_bz_NNT", "triton_red_fused_sum_0")
    assert dataclasses.replace(proof, profiled=seen).objection() is None
    assert dataclasses.replace(proof, profiled=seen[:1]).objection() is not None
    compiled.foreign = ("aten.bmm.dtype_out", "torch.ops.aten.bmm.dtype")
    assert artifact.proof().foreign == ()
    compiled.foreign = ("aten.bmm.dtype_out", "extern_kernels.mm")
    assert artifact.proof().foreign == ("extern_kernels.mm",)


def test_the_product_inside_decompose_k_is_not_selected_where_it_is_timed() -> None:
    """A selection that waits for epilogues times its candidates later: each split's own product was noted as chosen."""
    seen = compilation.Session()
    watch = selection._Selection(seen, None, listing=False)
    inner, *splits = (Mock(spec=["name", "output_node"]) for _ in range(3))
    inner.name, splits[0].name, splits[1].name = "bmm_dtype", "decompose_k_mm_3_split_0", "decompose_k_mm_197_split_0"

    def times(*_: object) -> dict[Any, float]:
        watch.select(lambda *given: given[2][0].output_node(), None, "bmm", [inner])  # that of a split's own program
        return dict.fromkeys(splits, 1.0)

    watch.select(lambda *_: None, None, "mm", splits)
    watch.time("it gave no time", times)
    splits[1].output_node()
    assert seen.choices == ["decompose_k_mm_3_split", "decompose_k_mm_197_split"]
    assert seen.chosen == ["decompose_k_mm_197_split"]
    assert len(seen.timings) == 2


def test_triton_candidates_come_from_where_inductor_has_them() -> None:
    backend = TritonBackend()

    def spaces(line: str) -> list[tuple[str, str]]:
        return [(s.suffix, s.only) for s in backend.spaces(Problem.parse(line))]

    assert spaces("mm:f16:nn:64x64x2047") == [("", "*")]
    assert spaces("mm:f16:nn:64x64x2048") == [("", "*"), ("", "decompose_k*")]
    assert spaces("linear:f16:nt:2x32x64x2048") == [("", "*"), ("", "decompose_k*")]
    assert spaces("linear:f16:nt:2x64x64x2048") == [("", "*")]  # 128 rows
    assert spaces("linear:f16:nt:64x64x2048:bias") == [("", "*")]
    assert spaces("mm:f16:nn:16x16x2048:m.dynamic") == [("", "*")]
    configure(backend, {"space": "exhaustive"})
    assert spaces("mm:f16:nn:64x64x64") == [("", "*"), (",tma-store", "triton_mm_persistent_tma*")]
    problem = Problem.parse("mm:f16:nn:64x64x64")
    assert backend.options(problem)["max_autotune_gemm_search_space"] == "EXHAUSTIVE"
    winner = backend.options(problem, BuildRequest(selection=Selection.WINNER))
    assert winner["max_autotune_gemm_search_space"] == "EXHAUSTIVE"
    # A user has decompose-K among the candidates; the one that follows from a line is a template.
    assert winner["triton.num_decompose_k_splits"] > 0
    assert backend.options(problem)["triton.num_decompose_k_splits"] == 0


def test_the_template_of_a_shared_a_is_a_space_where_the_release_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def spaces(line: str) -> list[str]:
        return [space.only for space in TritonBackend().spaces(Problem.parse(line))]

    for has, found in ((False, ["*"]), (True, ["*", "triton_bmm_shared_a-*"])):
        monkeypatch.setattr(torch_compat, "has_option", lambda name, has=has: has)
        assert spaces("bmm:f16:nn:64x32x32x32:a.broadcast") == found
        assert spaces("bmm:f16:nn:63x32x32x32:a.broadcast") == spaces("bmm:f16:nn:64x32x32x32") == ["*"]


def specs_of_artifacts(monkeypatch: pytest.MonkeyPatch) -> list[compilation.CompileSpec]:
    """What every artifact from now on is compiled by, which is none."""
    compiled: list[compilation.CompileSpec] = []

    def artifact(problem: Problem, tensors: Any, spec: compilation.CompileSpec) -> Any:
        compiled.append(spec)
        return SimpleNamespace(rebind_reason="", compiles=1, chosen=(), fused=True, finish=lambda: None)

    monkeypatch.setattr(artifact_module, "Artifact", artifact)
    return compiled


def test_the_candidates_of_several_spaces_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spaced(TritonBackend):
        def spaces(self, problem: Problem) -> tuple[Space, ...]:
            return (Space(), Space(",tma-store", "t_tma*", (("triton.enable_template_tma_store", True),)))

    asked: list[dict[str, Any]] = []

    def list_candidates(problem: Problem, tensors: Any, spec: compilation.CompileSpec) -> tuple[str, ...]:
        asked.append(dict(spec.options))
        return "t-1", "t_tma-1"

    monkeypatch.setattr(compiled_module, "list_candidates", list_candidates)
    compiled = specs_of_artifacts(monkeypatch)
    monkeypatch.setattr(tensor_core, "contract", lambda *args, **kwargs: Contract())
    backend = Spaced(threads=1)
    problem, first = given("mm:f16:nn:64x64x64")
    assert backend.candidates(problem, first).names == ("t-1", "t_tma-1", "t_tma-1,tma-store")
    assert [o.get("triton.enable_template_tma_store") for o in asked] == [None, True]
    for name in ("t_tma-1", "t_tma-1,tma-store"):
        backend.prepare(problem, first, BuildRequest(candidate=name))
    assert [spec.candidate for spec in compiled] == ["t_tma-1", "t_tma-1"]
    assert [spec.options.get("triton.enable_template_tma_store") for spec in compiled] == [None, True]
    assert len(asked) == 2


def test_the_users_caches_keep_candidates_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the FX graph cache know nothing of what was left of a selection."""
    monkeypatch.setattr(compiled_module, "list_candidates", lambda *args: ("a", "b"))
    compiled = specs_of_artifacts(monkeypatch)
    backend = CppBackend(threads=1)
    problem, first = given()
    for name in ("a", "b", "", ""):
        backend.artifact(problem, first, BuildRequest(candidate=name, user_caches="tag"))
    assert [spec.cache_tag for spec in compiled] == ["tag-a", "tag-b", "tag", "tag"], "each time a compile"


def test_a_candidate_that_slices_k_is_held_to_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    backend, problem = TritonBackend(), Problem.parse("mm:f16:nn:16x16x4096")

    def contract(*chosen: str) -> Contract:
        artifact: Any = SimpleNamespace(chosen=chosen, fused=False)
        return backend.contract(problem, artifact)

    plain, sliced = contract("triton_mm-16x16x16,s1,w1"), contract("decompose_k_mm_16_split")
    assert plain.slices == 1
    assert sliced.slices >= 16
    assert sliced.partials == "f32"
    assert sliced.or_scalar  # cuBLAS chooses the kernel for a slice
    # A slice of 256 products is what a library can slice again, not the whole K.
    assert sliced.slices <= 16 * (256 // 16)


@needs_triton
@pytest.mark.parametrize(
    "line", ["mm:f16:nt:64x96x256", "addmm:bf16:nn:33x65x127:bias", "bmm:f32:nn:3x32x16x24", "mm:f16:nn:16x16x4096"]
)
def test_triton_candidates_on_a_gpu(line: str) -> None:
    problem = Problem.parse(line)
    backend = TritonBackend()
    first = operands.make(problem, "int-2", 0, "cuda")
    names = backend.candidates(problem, first).names
    assert len(set(names)) == len(names) > 3
    assert TritonBackend().candidates(problem, first).names == names
    case = case_module.Case(backend, problem, ("int-2", "rand"), 0, Device.CUDA, CandidateSelection("3"))
    outcomes = judge.Judge().outcomes(case)
    assert {o.status for o in outcomes} <= {Status.PASSED, Status.PRUNED}, outcomes
    assert {o.candidate for o in outcomes} == {names[0], names[len(names) // 2], names[-1]} or len(outcomes) >= 3
    for outcome in outcomes:
        if outcome.status is Status.PASSED:
            assert outcome.chosen == (outcome.candidate,)


# -- the judge -----------------------------------------------------------------------------------------


class Prepared:
    contract = Contract()

    def __init__(self, problem: Problem, way: str, pruned: dict[str, Reason] | None = None) -> None:
        self.problem, self.way = problem, way
        self.pruned = pruned or {}

    def run(self, given: operands.Operands) -> torch.Tensor:
        c = given.a @ given.b
        if "off" in self.way:
            c[1:] += 1
        if "crash" in self.way:
            raise RuntimeError("planted in run")
        return c

    def proof(self) -> Proof:
        return Proof((self.way,), ("kernel",), ("kernel",))


class Fake:
    """A backend with candidates by name: what they do is in their names."""

    name = "fake"

    def __init__(self, *names: str) -> None:
        self.names = names
        self.listed = 0
        self.prepared: list[str] = []

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        return None

    def prepare(self, problem: Problem, given: operands.Operands, request: BuildRequest) -> Prepared:
        if request.candidate:
            return self.prepare_one(problem, request.candidate)
        self.prepared.append("")
        if all("unfit" in name for name in self.names):
            raise Pruned("all-pruned", "all candidates were pruned")
        lost = {n: Reason("out-of-resources", "too large") for n in self.names if "unfit" in n}
        return Prepared(problem, "own", lost)

    def candidates(self, problem: Problem, given: operands.Operands, request: BuildRequest) -> Candidates:
        self.listed += 1
        return Candidates(self.names)

    def prepare_one(self, problem: Problem, choice: str) -> Prepared:
        self.prepared.append(choice)
        if "unfit" in choice:
            raise Pruned("out-of-resources", "out of resource: shared memory")
        if "broken" in choice:
            raise ValueError("planted in prepare")
        return Prepared(problem, choice)


MM = Problem.parse("mm:f32:nn:8x16x32")
DISTRIBUTIONS = ("int-2", "rand", "k-cover", "specials")


def judged(backend: Any, choices: str, distributions: tuple[str, ...] = DISTRIBUTIONS, **kwargs: Any) -> list[Outcome]:
    case = case_module.Case(backend, MM, distributions, 0, Device.CPU, CandidateSelection(choices))
    return judge.Judge().outcomes(case, **kwargs)


class Tuner(Fake):
    """Its candidate has the name of the way in which it is selected."""

    def prepare(self, problem: Problem, given: operands.Operands, request: BuildRequest) -> Prepared:
        return Prepared(problem, request.candidate or request.selection.value or "own")


@pytest.mark.parametrize(("choices", "chosen"), [("", "own"), ("one", "one"), ("winner", "winner"), ("all", "own")])
def test_a_backend_picks_in_the_way_that_was_asked_for(choices: str, chosen: str) -> None:
    backend = Tuner("own")
    (outcome,) = judged(backend, choices, ("rand",))
    assert outcome.chosen == (chosen,)
    assert (outcome.candidate, backend.listed) == (("own", 1) if choices == "all" else ("", 0))


@pytest.mark.parametrize(("choices", "expected"), [
    ("1", "a"), ("2", "ag"), ("3", "adg"), ("4", "aceg"), ("99", "abcdefg"), ("b", "b"), ("[ce]", "ce"),
    ("?", "abcdefg"),
])  # fmt: skip
def test_a_number_is_spread_and_a_pattern_is_matched(choices: str, expected: str) -> None:
    outcomes = judged(Fake(*"abcdefg"), choices, ("rand",))
    assert "".join(dict.fromkeys(o.candidate for o in outcomes)) == expected


def test_of_many_candidates_a_half_is_judged_and_all_of_them_by_a_few_problems() -> None:
    few, many = [f"tile-{n}" for n in range(32)], [f"tile-{n}" for n in range(180)]
    assert CandidateSelection("half").of(few, MM.line) == (*few,)
    halves = [CandidateSelection("half").of(many, f"mm:f32:nn:8x16x{k}") for k in range(1, 13)]
    assert all(70 <= len(half) <= 110 for half in halves)
    assert {*many} == {name for half in halves for name in half}
    assert [*halves[0]] == [name for name in many if name in halves[0]]  # in their order, the same whenever asked
    half = CandidateSelection("half").of(many, MM.line)
    assert {o.candidate for o in judged(Fake(*many), "half", ("rand",))} == {*half}


def test_a_backend_without_candidates_goes_its_only_way_unless_one_is_named() -> None:
    many = Fake("own")
    single = SimpleNamespace(
        name="single",
        availability=many.availability,
        supports=many.supports,
        prepare=lambda problem, given, request=None: Prepared(problem, "own"),
    )
    assert not isinstance(single, CandidateBackend)
    for choices in ("all", "7"):
        assert {o.status for o in judged(single, choices)} == {Status.PASSED}
    (outcome,) = judged(single, "a")
    assert outcome.status is Status.UNSUPPORTED


def test_with_many_candidates_each_is_judged_with_one_exact_and_one_random_distribution() -> None:
    few, many = [f"c{i}" for i in range(8)], [f"c{i}" for i in range(9)]
    assert {o.distribution for o in judged(Fake(*few), "all")} == set(DISTRIBUTIONS)
    outcomes = judged(Fake(*many), "all", ("specials", "k-cover", "rand", "int-2"))
    assert {o.distribution for o in outcomes} == {"k-cover", "specials"}  # the first of each kind, as the case has them
    assert {o.candidate for o in outcomes} == set(many)
    assert {o.distribution for o in judged(Fake(*many), "c1")} == set(DISTRIBUTIONS)


def test_a_backend_that_drops_every_candidate_by_itself_fails() -> None:
    (outcome,) = judged(Fake("a-unfit"), "")
    assert outcome.status is Status.CRASHED
    assert outcome.code == "all-pruned"


@pytest.mark.parametrize(
    ("names", "choices", "found"),
    [
        ("a b-unfit c-broken d", "all", ["a passed", "b-unfit pruned", "c-broken crashed", "d passed"]),
        ("a b-off c", "all", ["a passed", "b-off incorrect", "c passed"]),
        ("a b-crash", "all", ["a passed", "b-crash crashed"]),
        ("a b-unfit", "winner", ["b-unfit pruned", " passed"]),  # what the backend drops by itself
    ],
)
def test_each_candidate_has_its_own_status(names: str, choices: str, found: list[str]) -> None:
    outcomes = judged(Fake(*names.split()), choices, ("rand",))
    assert [f"{o.candidate} {o.status.value}" for o in outcomes] == found
    for outcome in outcomes:
        if outcome.candidate == "b-unfit" and choices == "all":
            assert outcome.reason == Reason("out-of-resources", "out of resource: shared memory")


def test_the_truth_is_computed_once_for_all_candidates() -> None:
    with (
        patch.object(reference, "reference", side_effect=reference.reference) as references,
        patch.object(interval, "interval", side_effect=interval.interval) as intervals,
    ):
        assert len(judged(Fake(*(f"c{i}" for i in range(30))), "all")) == 60
    assert references.call_count == intervals.call_count == 3  # of two distributions, and of other values in A and B


@pytest.mark.parametrize("fault", ["off", "crash", "broken"])
def test_evidence_of_failed_candidates_is_bounded(fault: str) -> None:
    backend = Fake(*(f"c{i}-{fault}" for i in range(10)))
    case = case_module.Case(backend, MM, ("rand",), 0, Device.CPU, CandidateSelection("all"))
    found = [one.evidence for one in judge.Judge().judge(case)]
    assert [one is not None for one in found] == [True] * 8 + [False] * 2
    assert all(one is None or one.operands.distribution == "rand" for one in found)


def test_an_outcome_and_the_watch_know_the_kernels_of_what_runs() -> None:
    one, watch = judge.Judge(), Mock(side_effect=lambda _: contextlib.nullcontext())
    one._worker.watch = watch  # type: ignore[method-assign]  # what it is told
    case = case_module.Case(Fake("a", "b-crash"), MM, ("int-2", "rand"), 0, Device.CPU, CandidateSelection("all"))
    found = one.outcomes(case)
    assert {o.kernels for o in found if o.status is Status.CRASHED} == {("kernel (b-crash)",)}
    assert [o.seconds.compile > 0.0 for o in found] == [True, False, True, False]
    assert {a.phase for (a,), _ in watch.call_args_list if "eager ATen" in a.kernels} == {Phase.EAGER}


# -- poison --------------------------------------------------------------------------------------------


def _kernel_of(prepared: Any) -> tuple[Any, str, Callable[..., Any]]:
    """The generated module, the name of its one template kernel, and that kernel."""
    compiled = prepared.artifact._compiled
    (module,) = compiled.modules
    (name,) = compiled.templates
    return module, name, getattr(module, name).kernel


def output_of(args: tuple[Any, ...]) -> torch.Tensor:
    """The result among what a kernel is called with."""
    return next(a for a in reversed(args) if isinstance(a, torch.Tensor) and a.shape == (20, 33))


@needs_compiler
@pytest.mark.parametrize("first_row", [0, 19])
def test_what_is_left_out_cannot_live_on_the_last_result(first_row: int) -> None:
    """The allocator gives the memory of a result that is gone to the next one, with the right values in it."""
    problem, first = given("mm:f32:nn:20x33x40")
    prepared = CppBackend(threads=1).prepare(problem, first)
    assert not prepared.run(first).isnan().any()
    module, name, kernel = _kernel_of(prepared)

    def leaves_rows(*args: Any) -> None:
        out = output_of(args)
        before = out.clone()
        kernel(*args)
        out[first_row:] = before[first_row:]  # as if nobody had written them

    getattr(module, name).kernel = leaves_rows
    result: Any = prepared.run(first)
    assert result[first_row:].isnan().all()
    assert not result[:first_row].isnan().any()


@needs_compiler
@pytest.mark.parametrize("beside", [-1, 20 * 33])
def test_a_kernel_that_writes_beside_its_output_is_wrong(beside: int) -> None:
    """A row too many lies in memory of the allocator that no tensor has."""
    problem, first = given("mm:f32:nn:20x33x40")
    prepared = CppBackend(threads=1).prepare(problem, first)
    module, name, kernel = _kernel_of(prepared)

    def writes_an_element_more(*args: Any) -> None:
        kernel(*args)
        out = output_of(args)
        out.as_strided((1,), (1,), out.storage_offset() + beside).zero_()

    prepared.run(first)
    getattr(module, name).kernel = writes_an_element_more
    with pytest.raises(Misconduct, match="wrote before or behind a result"):
        prepared.run(first)


def test_poison_is_nan_in_every_float_between_strided_elements_too() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert poisoning.poison(torch.zeros(5, dtype=dtype)).isnan().all()
    wide = poisoning.poison(torch.zeros(40).as_strided((3, 4), (10, 1)))
    assert wide.as_strided((33,), (1,)).isnan().all()
    assert (poisoning.poison(torch.zeros(3, dtype=torch.int32)) == -1).all()
    assert poisoning.poison(torch.empty(0)).numel() == 0


@needs_compiler
def test_a_timed_call_gets_memory_as_a_users_program_does() -> None:
    problem, first = given()
    prepared = CppBackend(threads=1).prepare(problem, first)
    (module,) = prepared.artifact._compiled.modules
    before = {name: getattr(module, name) for name in poisoning.allocators_of(module)}
    assert "empty_strided_cpu" in before
    with (
        patch.object(poisoning, "poison", side_effect=poisoning.poison) as poisoned,
        prepared.timed(first) as call,
    ):
        seen, counted = poisoned.call_count, len(prepared.proof().executed)
        assert seen  # the run that comes before the timed ones is judged memory
        call()
        assert poisoned.call_count == seen
        assert {name: getattr(module, name) for name in before} == before
        assert len(prepared.proof().executed) == counted
    prepared.run(first)
    assert len(prepared.proof().executed) == counted


# -- CuTe DSL ------------------------------------------------------------------------------------------


class Operator:
    def __init__(self, name: str, writes: bool = True) -> None:
        self.metadata = SimpleNamespace(operator_name=name)
        self.compiled = 0
        self.writes = writes

    def compile(self, arguments: Any, target: str) -> str:
        self.compiled += 1
        return "compiled"

    def run(self, arguments: Any, compiled: str, stream: object) -> None:
        if self.writes:
            arguments.out.copy_((arguments.a.float() @ arguments.b.float()).to(arguments.out.dtype))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[Operator]:
    """``cutlass.operators`` with a few operators, on the CPU."""
    found = [Operator("op_b"), Operator("op_a"), Operator("op(a)"), Operator("op_a"), Operator("op_lazy", writes=False)]

    def arguments(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, accumulate: torch.dtype) -> Any:
        return SimpleNamespace(a=a, b=b, out=out)

    module = SimpleNamespace(GemmArguments=arguments, get_operators=lambda arguments, target_sm: found)
    monkeypatch.setitem(sys.modules, "cutlass.operators", module)
    monkeypatch.setattr(cutedsl, "_target", lambda: "90a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return found


def test_cutedsl_has_its_operators_as_candidates(operators: list[Operator]) -> None:
    problem, first = given("mm:f16:nn:16x24x32")
    backend = cutedsl.CuteDslBackend()
    assert isinstance(backend, CandidateBackend)
    names = backend.candidates(problem, first).names
    assert names == ("op-a", "op_a", "op_a@2", "op_b", "op_lazy")
    assert not any(operator.compiled for operator in operators)
    prepared = backend.prepare(problem, first, BuildRequest(candidate="op_a@2"))
    assert [operator.compiled for operator in operators] == [0, 0, 0, 1, 0]
    assert prepared.proof().chosen == ("op_a@2",)
    with pytest.raises(Unsupported):
        backend.prepare(problem, first, BuildRequest(candidate="op_c"))
    operators.clear()
    with pytest.raises(Unsupported):
        backend.candidates(problem, first)


def test_an_operator_that_leaves_its_output_alone_returns_poison(operators: list[Operator]) -> None:
    problem, first = given("mm:f16:nn:16x24x32")
    backend = cutedsl.CuteDslBackend()
    assert not backend.prepare(problem, first, BuildRequest(candidate="op_b")).run(first).isnan().any()
    assert backend.prepare(problem, first, BuildRequest(candidate="op_lazy")).run(first).isnan().all()


def test_cutedsl_picks_the_fastest_operator(operators: list[Operator], monkeypatch: pytest.MonkeyPatch) -> None:
    problem, first = given("mm:f16:nn:16x24x32")
    speeds = iter((3e-6, 4e-6, 1e-6, 2e-6, 5e-6))
    monkeypatch.setattr(cutedsl, "_device_seconds", lambda call: next(speeds))
    backend = cutedsl.CuteDslBackend()
    request = BuildRequest(selection=Selection.WINNER)
    prepared = backend.prepare(problem, first, request)
    assert len(prepared.timings) == len(operators)
    assert prepared.proof().chosen == ("op_a@2",)


# -- the ledger ----------------------------------------------------------------------------------------

ENTRY = """
[[known-failure]]
id = "five-stages"
backend = "triton"
reason = "the fifth stage is never waited for"
candidate = "triton_mm-*,s5,*"
"""


def test_a_ledger_entry_may_speak_of_candidates(tmp_path: Path) -> None:
    path, env, (four, five) = (
        tmp_path / "ledger.toml",
        Environment("2.11.0"),
        (f"triton_mm-64x64x32,s{n},w8" for n in "45"),
    )
    path.write_text(ENTRY)
    ledger = Ledger.load(path)

    def explained(candidate: str = "", *chosen: str) -> bool:
        case = CaseId("triton", MM.line, candidate)
        outcome = Outcome(case, "rand", 0, Status.INCORRECT, test="test_product", chosen=chosen)
        return ledger.match(outcome, MM, env) is not None

    # Where the backend chose by itself it is the candidate that it chose.
    found = [explained(five), explained(four), explained("", five), explained("", four), explained()]
    assert found == [True, False, True, False, False]
    # An entry that kills the process withholds its candidates only.
    path.write_text(ENTRY + "crashes = true\n")
    withheld = [
        Ledger.load(path).applicable("triton", MM, "test_product", env, *name) for name in ((), (four,), (five,))
    ]
    assert [entry and entry.id for entry in withheld] == [None, None, "five-stages"]


# -- the plugin ----------------------------------------------------------------------------------------

CONFTEST = """
    import sys
    sys.path.insert(0, {here!r})
    from test_candidates import Fake

    class Other(Fake):
        name = "other"
        def supports(self, problem, request=None):
            from pytest_gemm.core.outcome import Unsupported
            return Unsupported("op", "never") if problem.shape.m == 5 else None

    def pytest_gemm_register_backends(registry):
        registry.add(Fake(*{names!r}))
        registry.add(Other("x", "y"))
"""

SUITE = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32", "mm:f32:nn:5x16x32"], any_problem=True)
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


def with_candidates(pytester: pytest.Pytester, *names: str) -> None:
    pytester.makeconftest(CONFTEST.format(here=str(Path(__file__).parent), names=names))


FAKE = ("--gemm-backends=fake", "--gemm-problem=mm:f32:nn:8x16x32")


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    with_candidates(pytester, "good-1", "good-2", "bad-off", "big-unfit")
    pytester.makepyfile(test_it=SUITE)
    return pytester


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "--gemm-known-failures=none", *args)


def records(path: Path) -> list[dict[str, Any]]:
    return [r for r in map(json.loads, path.read_text().splitlines()) if "backend" in r and "status" in r]


def test_a_wrong_candidate_is_named_and_rerun_by_its_name(project: pytest.Pytester) -> None:
    record, junit = project.path / "run.jsonl", project.path / "junit.xml"
    result = run(project, *FAKE, "--gemm-candidates=all", "--gemm-output=.", f"--junit-xml={junit}")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "incorrect: *: mm:f32:nn:8x16x32 on fake: *",
            "  candidate bad-off",
            "  rerun: pytest * --gemm-candidates=bad-off",
            "fake: 3 kernels judged, with 3 tile choices",
            "fake pruned 1 (1 different) for out-of-resources: big-unfit: out of resource: shared memory",
        ]
    )
    assert "--gemm-candidates=all" not in result.stdout.str()
    statuses = {(r["candidate"], r["status"]) for r in records(record)}
    assert statuses == {("good-1", "passed"), ("good-2", "passed"), ("bad-off", "incorrect"), ("big-unfit", "pruned")}
    assert {tuple(r["chosen"]) for r in records(record) if r["candidate"] == "good-1"} == {("good-1",)}
    assert any("bad-off" in place.name for place in (project.path / "failures").iterdir())
    found = {p.get("name"): p.get("value") for p in ET.parse(junit).iter("property")}
    assert found["gemm_candidate"] == "good-1, good-2, bad-off, big-unfit"
    line = next(text for text in result.outlines if "rerun: pytest" in text).split("rerun: pytest ")[1]
    again = run(project, *shlex.split(line))
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["  candidate bad-off"])


def test_a_pattern_takes_the_candidates_that_it_matches(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=fake,other", "--gemm-candidates=good-*", "--gemm-allow=unjudged", "-v")
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["unsupported"]) == (2, 2)  # "other" has none of these
    result.stdout.fnmatch_lines(["*other does not support 1: no candidate is called good-[*]; there are x, y"])


def test_a_pattern_that_matches_nothing_at_all_fails_the_run(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=fake,other", "--gemm-candidates=goood-*")
    assert result.ret == 10
    outcomes = result.parseoutcomes()
    assert outcomes["unsupported"] == 4
    assert "failed" not in outcomes
    result.stdout.fnmatch_lines(["no candidate of any problem is called as --gemm-candidates=goood-[*] asks: *"])


def test_a_pruned_candidate_by_name_is_shown_and_no_failure(project: pytest.Pytester) -> None:
    asked = (*FAKE, "--gemm-candidates=big*")
    assert run(project, *asked).ret == 10  # nothing was judged
    result = run(project, *asked, "--gemm-allow=unjudged", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*PRUNED*"])
    assert result.parseoutcomes()["pruned"] == 1


def test_a_case_of_which_every_candidate_is_pruned_fails(project: pytest.Pytester) -> None:
    with_candidates(project, "a-unfit", "b-unfit")
    result = run(project, *FAKE, "--gemm-level=full")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["crashed: all-pruned: * on fake: every candidate that was tried was pruned (2 out-of-resources)*"]
    )
    (line,) = (text for text in result.outlines if "rerun: pytest" in text)
    assert "--gemm-level=full" in line
    assert "--gemm-candidates" not in line  # all of them are this level's own


def test_the_default_is_the_own_way_at_quick_and_all_from_full_on(project: pytest.Pytester) -> None:
    record = project.path / "run.jsonl"
    common = (*FAKE, "--gemm-output=.")
    assert run(project, *common).ret == 0
    assert {r["candidate"] for r in records(record)} == {"", "big-unfit"}
    result = run(project, *common, "--gemm-level=full")
    assert result.ret == 1
    assert {r["candidate"] for r in records(record)} == {"good-1", "good-2", "bad-off", "big-unfit"}
    result.stdout.fnmatch_lines(["  rerun: * --gemm-level=full * --gemm-candidates=bad-off"])


def test_the_winner_of_a_benchmark_is_rerun_by_its_name() -> None:
    outcome = Outcome(CaseId("triton", MM.line), "rand", 0, Status.INCORRECT, chosen=("triton_mm-64x64x32,s5,w8",))
    rerun = text_module.Rerun("test_it.py", ("--gemm-threads=3", "--gemm-candidates=winner"))
    assert rerun.line(outcome).endswith(" --gemm-threads=3 --gemm-candidates=triton_mm-64x64x32,s5,w8")
    by_rule = dataclasses.replace(rerun, options=("--gemm-candidates=one",))
    assert by_rule.line(outcome).endswith(" --gemm-candidates=one")


def test_a_candidate_that_can_kill_the_process_is_not_run_and_the_others_are(project: pytest.Pytester) -> None:
    with_candidates(project, "good-1", "b-off", "good-2")
    record, ledger = project.path / "run.jsonl", project.path / "ledger.toml"
    ledger.write_text(
        '[[known-failure]]\nid = "kills"\nbackend = "fake"\nreason = "it aborts"\ncandidate = "*-off"\ncrashes = true\n'
    )
    result = run(project, *FAKE, "--gemm-candidates=all", "--gemm-output=.", f"--gemm-known-failures={ledger}")
    assert result.ret == 0
    found = {(r["candidate"], r["status"], (r["reason"] or {}).get("code")) for r in records(record)}
    assert found == {
        ("good-1", "passed", None),
        ("b-off", "known-failure", "can-crash"),  # had it run, the code would be another
        ("good-2", "passed", None),
    }


DYING = """
    import os
    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.api.request import Capability
    from pytest_gemm.numerics.contract import Contract

    class Prepared:
        contract = Contract()
        def run(self, operands): return operands.a @ operands.b
        def proof(self): return Proof(("c",), ("k",), ("k",))

    class Dying:
        name = "dying"
        capabilities = {Capability.USER_CACHES}
        def __init__(self, how="", home=0):
            self.how, self.home = how, home or os.getpid()
        def availability(self, device): return Availability()
        def supports(self, problem, request=None): return None
        def prepare(self, problem, operands, request=None):
            if os.getpid() != self.home:
                if self.how == "die":
                    os._exit(3)
                raise KeyError("planted elsewhere")
            return Prepared()
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("die", "on dying: the kernel's process died in compile: it ended itself with exit status 3"),
        ("raise", "on dying: KeyError in the process that ran it first: 'planted elsewhere'"),
    ],
)
def test_a_crash_in_the_other_process_is_one_crashed_case(pytester: pytest.Pytester, how: str, words: str) -> None:
    pytester.syspathinsert()
    pytester.makepyfile(dying=DYING)
    pytester.makeconftest(
        f"""
        from dying import Dying

        def pytest_gemm_register_backends(registry):
            registry.add(Dying({how!r}))
        """
    )
    pytester.makepyfile(
        test_it="""
        import dataclasses
        import pytest

        @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32"], distributions=["rand"])
        def test_elsewhere(gemm_case, gemm_check):
            user = gemm_check.user_caches(gemm_case)
            gemm_check.run_in_worker(user)
            gemm_check(user)
        """
    )
    result = run(pytester, "--gemm-backends=dying")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"crashed: *: mm:f32:nn:8x16x32 {words}", "  rerun: pytest *"])
    assert "run_in_worker" not in result.stdout.str()
