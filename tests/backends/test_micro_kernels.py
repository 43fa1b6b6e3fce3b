"""Micro-kernels and blockings of the C++ templates: names, what the generated code says, forcing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import subprocess
import sys
import types
import uuid
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx  # first: what is below it imports each other in a circle
from oracle import judged
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen import cpp_micro_gemm
from torch._inductor.codegen.common import KernelTemplate

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Candidates
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cpp.micro_kernels import Axes, Product
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.conformance import matrix
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Status, Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import calls

needs_compiler = pytest.mark.skipif(
    not CppBackend().availability("cpu").ok, reason=f"cpp: {CppBackend().availability('cpu').reason}"
)

VEC = "CppMicroGemmFP32Vec-4x24x1"


def given(line: str, seed: int = 1) -> tuple[Problem, tensors.Operands]:
    problem = Problem.parse(line)
    return problem, tensors.make(problem, "rand", seed)


# -- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (Axes(), {}),
        (Axes(slices=0), {"cpp.gemm_max_k_slices": 0}),
        (Axes(cache=(2, 1, 16)), {"cpp.gemm_cache_blocking": "2,1,16"}),
        (
            Axes(4, (1, 1, 1), (2, 1, 2)),
            {"cpp.gemm_max_k_slices": 4, "cpp.gemm_thread_factors": "2,1,2", "cpp.threads": 4},
        ),
        (Axes(threads=(5,)), {"cpp.threads": 5}),
    ],
)
def test_the_axes_of_a_name_are_options_of_inductor(axes: Axes, options: Mapping[str, object]) -> None:
    assert micro_kernels.split(f"{VEC}{axes}") == (VEC, axes)
    assert options.items() <= axes.options.items()
    assert set(axes.options) <= set(torch._inductor.config.get_config_copy())
    grouped = f"{VEC},grouped{axes}"
    assert micro_kernels.split(grouped) == (f"{VEC},grouped", axes)
    assert (micro_kernels.kernel_of(grouped), micro_kernels.register_block(grouped)) == (VEC, (4, 24, 1))


@pytest.mark.parametrize(
    "suffix", [",kslices=", ",cache=1.2", ",cache=0.1.1", ",threads=2x1x1", ",threads=2.1", ",tma-store", ","]
)
def test_a_suffix_that_says_nothing_is_none_of_ours(suffix: str) -> None:
    assert micro_kernels.split(f"{VEC}{suffix}") is None


@pytest.mark.parametrize(("line", "given", "has"), [
    ("linear:f32:nt:17x65x127:bias", {}, ",cache=1.2.1,threads=2.1.2"), ("bmm:f32:nn:3x17x65x127", {}, ",threads=5"),
    ("linear:f32:nt:17x65x127:m.dynamic", {}, ",threads=2"), ("linears:f32:nt:2x17x65x127", {}, ",threads=1.3.1"),
    ("linear:f32:nt:17x65x127", {"mode": Mode.DYNAMIC}, ",kslices=0,threads=4"),
    ("linear:f32:nt:17x1024x1024", {}, ""), ("linear:f32:nt:17x65x0", {}, ""),
    ("linear:f32:nt:17x65x127", {"run_threads": 2}, ""),
])  # fmt: skip
def test_two_problems_of_three_are_given_a_blocking_that_their_template_takes(
    line: str, given: dict[str, Any], has: str
) -> None:
    problem, asked = Problem.parse(line), BuildRequest(**given)
    suffixes = [CppBackend().space_of_one(problem, number, asked).suffix for number in range(90)]
    assert has in suffixes
    assert suffixes.count("") == (30 if has else 90)
    if not re.search(r"threads=\d\.", has):  # parts end the process of a batch, and an open M ignores them
        assert not any(re.search(r"threads=\d\.", suffix) for suffix in suffixes)
    if problem.op.several:  # their template adds no slices of K
        assert not any(re.search(r"kslices|threads=\d\.\d\.[2-9]", suffix) for suffix in suffixes)


@pytest.mark.parametrize(("release", "added"), [((2, 12), False), ((2, 13), True)])
def test_slices_of_k_of_wide_blocks_are_asked_for_where_they_are_added(
    monkeypatch: pytest.MonkeyPatch, release: tuple[int, int], added: bool
) -> None:
    monkeypatch.setattr(torch_compat, "torch_release", lambda: release)
    problem = Problem.parse("linear:f32:nt:17x65x127:bias")
    found = {CppBackend().space_of_one(problem, number).suffix for number in range(90)}
    assert (",cache=1.2.1,threads=2.1.2" in found) is added
    assert {",cache=1.2.4,threads=2.2.1", ",cache=2.1.4,threads=1.2.2"} <= found


def test_lines_of_one_kernel_share_its_blocking() -> None:
    lines = ("mm:f16:nn:17x65x127", "mixed_mm:f16-i8-f16:nn:17x65x127", "mm:f16:nt:17x65x127:a.offset:b.padded")
    assert len({CppBackend().by_line(Problem.parse(line)) for line in lines}) == 1


def test_quick_has_a_packed_batch_with_several_register_blocks_of_n_in_a_cache_block() -> None:
    backend, found = CppBackend(), set()
    for problem in (one for one in matrix.products("quick") if one.op.name == "bmm" and one.has("b.constant")):
        axes = micro_kernels.split(backend.space_of_one(problem, backend.by_line(problem)).suffix)
        found.add(bool(axes and axes[1].cache and axes[1].cache[1] > 1) and problem.shape.n > 96)
    assert True in found


def test_quick_has_int4_blocks_of_k_that_begin_within_a_group_and_others() -> None:
    """With more threads than blocks the heuristic takes a register block of 4 x 64 x 32, on every CPU with AVX-512."""
    backend, begins_at_group = CppBackend(), set()
    for problem in (one for one in matrix.products("quick") if one.line.startswith("woq_int4:bf16")):
        shape, group = problem.shape, problem.group_size or 0
        axes = micro_kernels.split(backend.space_of_one(problem, backend.by_line(problem)).suffix)
        if (
            axes
            and axes[1].cache
            and math.prod(axes[1].threads or ()) > -(-shape.m // 4) * shape.n // 64
            and group > 32
        ):
            parts = axes[1].cache[2], -(-shape.k // 32 // (axes[1].factors or (1, 1, 1))[2])
            begins_at_group.add(all(part * 32 % group == 0 for part in parts))
    assert begins_at_group == {True, False}


# -- what the generated code says --------------------------------------------------------------------


def text_of(kind: Any, registered: Any) -> str:
    """The code of a micro-kernel, rendered by Inductor, before the constants of a product function of 20 x 96 x 256."""
    types_ = registered.input_dtype, registered.input2_dtype, registered.output_dtype, registered.compute_dtype
    kernel = types.SimpleNamespace(assert_function="TORCH_CHECK", unroll_pragma=lambda _: "")
    m, n, k = registered.register_blocking
    micro = kind("kernel_micro_gemm", *types_, registered.register_blocking)
    micro.use_local_vnni_blocking(False)
    names = {"num_threads": 2, "N": 96, "K": 256, "Mr": m, "Nr": n, "Kr": k, "M": 20}
    blocks = {"Mt": 3, "Nt": 2, "Kt": 128, "Mc": 3, "Nc": 1, "Kc": 64}
    names |= {f"{name}_blocks": count for name, count in blocks.items()}
    constants = [f"constexpr int64_t {name} = {value};" for name, value in names.items()]
    return "\n".join([micro.codegen_define(kernel), 'extern "C" void kernel()', *constants])


def dtypes_of(registered: Any) -> str:
    """Types of A, B and the sum, as the problem line names them."""
    names = {f"torch.{one.torch_name}": name for name, one in reversed([*DTYPES.items()])}
    types_ = registered.input_dtype, registered.input2_dtype, registered.output_dtype
    return "-".join(names[str(dtype)] for dtype in types_)


@pytest.mark.slow
def test_every_registered_micro_kernel_is_known_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_micro_gemm, "pick_vec_isa", cpu_vec_isa.VecAMX)
    parsed = staticmethod(functools.cache(KernelTemplate._template_from_string))  # as in a compile of ours
    monkeypatch.setattr(KernelTemplate, "_template_from_string", parsed)
    for kind, one in [(kind, one) for kind, found in cpp_micro_gemm.micro_gemm_configs.items() for one in found]:
        (found,) = micro_kernels.products(text_of(kind, one))
        assert found.kernel == micro_kernels.kernel_name(kind.__name__, one.register_blocking)
        assert found.dtypes == dtypes_of(one)
        assert (found.m, found.n, found.k, found.threads) == (20, 96, 256, 2)
        assert (found.per_thread, found.cache) == ((3, 2, 128), (3, 1, 64))


def product(kernel: str = VEC, dtypes: str = "f32-f32-f32", **facts: Any) -> Product:
    defaults: dict[str, Any] = {"threads": 4, "m": 20, "n": 33, "k": 40, "per_thread": (3, 1, 40), "cache": (3, 1, 40)}
    return Product(kernel, dtypes, **{**defaults, **facts})


@pytest.mark.parametrize(
    ("found", "choice", "words"),
    [
        ([product()], VEC, ""),
        ([product()], "", ""),
        ([], VEC, ""),
        ([product("CppMicroGemmRef-1x1x1")], VEC, "CppMicroGemmRef-1x1x1, not"),
        ([product(), product("CppMicroGemmFP32Vec-8x8x1")], VEC, "beside"),
        ([product(), product("CppMicroGemmFP32Vec-8x8x1", "bf16-bf16-f32")], VEC, ""),
        ([product()], f"{VEC},cache=4.1.99", ""),  # no larger than what a thread has
        ([product()], f"{VEC},cache=3.1.8", "cache blocks"),
        ([product()], f"{VEC},threads=2.2.1", ""),
        ([product()], f"{VEC},threads=4.1.1", "each thread"),
        ([product(threads=1), product()], f"{VEC},threads=4", ""),  # of a batch
        ([product()], f"{VEC},threads=5", "for 4 threads, not 5"),
        ([product(per_thread=(3, 1, 10))], f"{VEC},kslices=2", "4 slices"),
        ([product(grouped=2)], f"{VEC},grouped,cache=3.1.99", ""),
        ([product()], f"{VEC},grouped", "computes one product"),
        ([product(grouped=2)], VEC, "computes several products"),
        ([product("CppMicroGemmRef-1x1x1", grouped=2)], f"{VEC},grouped", f"CppMicroGemmRef-1x1x1, not {VEC}"),
    ],
)
def test_code_that_is_not_what_was_asked_for_is_no_proof(found: list[Product], choice: str, words: str) -> None:
    said = micro_kernels.contradiction(found, choice)
    assert words in said
    assert bool(said) == bool(words)
    proof = Proof(("a",), ("k",), ("k",), contradiction=said)
    assert (proof.objection() is None) == (not words)


@pytest.mark.parametrize(
    ("facts", "suffix", "met"),
    [
        ({}, ",kslices=4", False),
        ({"per_thread": (5, 2, 10)}, ",kslices=4", True),
        ({"m": 0, "per_thread": None, "cache": None, "most_slices": 4}, ",kslices=4", True),  # decided at run time
        ({"m": 0, "per_thread": None, "cache": None}, ",cache=2.2.8", False),
        ({"per_thread": None, "cache": None}, ",threads=4.1.1", False),
        ({"m": 0, "per_thread": None, "cache": None}, ",threads=4", True),
        ({}, ",kslices=1", True),
    ],
)
def test_blockings_that_make_no_difference_are_said(facts: dict[str, Any], suffix: str, met: bool) -> None:
    assert (micro_kernels.unmet([product(**facts)], f"{VEC}{suffix}") == "") == met


# -- Inductor ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def generating_for(isa: type[cpu_vec_isa.VecISA]) -> Iterator[None]:
    """Let Inductor choose micro-kernels as on another machine; nothing may be compiled."""
    with (
        patch.object(cpp_micro_gemm, "pick_vec_isa", isa),
        patch.object(cpu_vec_isa.VecAMX, "is_amx_fp16_supported", lambda _: True),
        patch.object(torch.cpu, "_is_amx_fp16_supported", lambda: True),
    ):
        yield


@needs_compiler
@pytest.mark.parametrize(
    ("isa", "line", "names", "refused"),
    [
        (cpu_vec_isa.VecAMX, "linear:bf16:nt:20x96x64:bias", "GemmAMX-32x16x32 GemmAMX-16x48x32", ""),
        (cpu_vec_isa.VecAMX, "linear:bf16:nt:20x96x63:bias", "GemmFP32Vec-8x48x1", "GemmAMX-32x32x32"),
        (cpu_vec_isa.VecAMX, "linear:f16:nt:20x96x64:bias", "Brgemm-48x16x32", ""),
        (cpu_vec_isa.VecAVX512, "linear:f32:nt:20x96x64", "GemmFP32Vec-8x48x1", ""),
        (cpu_vec_isa.VecAVX2, "woq_int8:bf16-i8-bf16:nt:3x64x128", "GemmFP32Vec-2x16x64", "GemmFP32Vec-8x8x1"),
    ],
)
def test_every_micro_kernel_that_fits_is_listed_without_a_compile(
    isa: type[cpu_vec_isa.VecISA], line: str, names: str, refused: str
) -> None:
    backend = CppBackend(threads=1)
    problem, first = given(line)
    before = cpp_micro_gemm.micro_gemm_configs
    with generating_for(isa), calls.quiet():
        found = backend.candidates(problem, first).names
    assert {f"CppMicro{name}" for name in (*names.split(), "GemmRef-1x1x1")} <= set(found)
    assert f"CppMicro{refused}" not in found
    assert (backend.log.compiles, cpp_micro_gemm.micro_gemm_configs is before) == (0, True)


@needs_compiler
def test_the_reference_micro_kernel_of_a_large_product_is_had_by_name_only() -> None:
    backend, reference = CppBackend(threads=1), "CppMicroGemmRef-1x1x1"
    problem, first = given("linear:f32:nt:1024x1024x512")
    with calls.quiet():
        assert reference not in backend.candidates(problem, first).names
        assert backend.candidates(problem, first, BuildRequest(candidate="CppMicroGemmRef*")).named == (reference,)


LINE = "linear:f32:nt:5x25x33:bias+relu"


@pytest.fixture(scope="module")
def cpp() -> CppBackend:
    return CppBackend(threads=2)


@pytest.mark.slow
@needs_compiler
def test_the_micro_kernel_that_was_asked_for_is_in_the_code_and_computes(cpp: CppBackend) -> None:
    problem, first = given(LINE)
    pick, *others = cpp.candidates(problem, first).names
    before = cpp_micro_gemm.micro_gemm_configs
    names = [others[0], "CppMicroGemmRef-1x1x1"]
    for name in names:
        (outcome,) = judged(cpp, LINE, "rand", candidates=name)
        assert (outcome.status, outcome.candidate) == (Status.PASSED, name)
        (said,) = outcome.configuration
        assert said.startswith(f"{name}:f32-f32-f32:5x25x33,kslices=1,")
    assert cpp_micro_gemm.micro_gemm_configs is before
    assert pick not in names
    recipe = cpp.recipe(problem, first, BuildRequest(candidate=names[1]))
    assert recipe.setup == micro_kernels.registering(names[1])


@pytest.mark.compiler
@needs_compiler
def test_k_slices_are_read_off_the_code_and_stated() -> None:
    """A name's parts have threads of their own, whatever the run has."""
    cpp = CppBackend(threads=1)
    problem, first = given(LINE)
    pick = cpp.candidates(problem, first).names[0]
    prepared = cpp.prepare(problem, first, BuildRequest(candidate=f"{pick},cache=1.1.8,threads=1.1.2"))
    (one,) = prepared.artifact.products
    assert (one.slices, one.cache, prepared.contract) == (2, (1, 1, 8), Contract("f32", "fused", slices=2))
    assert prepared.run(first).shape == (5, 25)
    assert prepared.proof().objection() is None
    # The same artifact does not answer for another candidate.
    other = BuildRequest(candidate=f"{pick},cache=1.1.4")
    prepared.artifact.spec = dataclasses.replace(prepared.artifact.spec, request=other)
    objection = prepared.proof().objection()
    assert objection is not None
    assert objection.code == "another-candidate"


@pytest.mark.compiler
@needs_compiler
def test_the_lines_blocking_is_in_the_code_the_outcome_and_the_script(cpp: CppBackend) -> None:
    problem, first = given("linear:f32:nt:33x66x257:bias+relu")
    space = cpp.space_of_one(problem, cpp.by_line(problem))
    assert space.suffix.endswith(",threads=1.2.2")
    (outcome,) = judged(cpp, problem.line, "rand")
    assert (outcome.status, outcome.candidate) == (Status.PASSED, "")
    (chosen,), (code,) = outcome.chosen, outcome.configuration
    assert chosen.endswith(space.suffix)
    assert ",kslices=2,threads=4," in code
    for candidate in ("", chosen):  # a program of several products has no single name
        recipe = cpp.recipe(problem, first, BuildRequest(candidate=candidate))
        assert dict(space.options).items() <= recipe.options.items()
        assert recipe.threads == 4
    (outcome,) = judged(cpp, problem.line, "rand", candidates="winner")
    assert outcome.chosen == cpp.candidates(problem, first).names[:1]
    # Code of another blocking is no proof.
    prepared = cpp.prepare(problem, first)
    prepared.run(first)
    prepared.artifact.spec = dataclasses.replace(prepared.artifact.spec, suffix=",threads=2.1.2")
    assert prepared.proof().contradiction


@pytest.mark.compiler
@needs_compiler
@pytest.mark.parametrize(
    ("suffix", "code"),
    [(",kslices=2", "blocking-unmet"), (",x=1", "unknown-candidate")],
)
def test_blockings_that_cannot_be_are_refused(cpp: CppBackend, suffix: str, code: str) -> None:
    problem, first = given(LINE)
    pick = cpp.candidates(problem, first).names[0]
    (outcome,) = judged(cpp, LINE, "rand", candidates=f"{pick}{suffix}")
    assert outcome.status is Status.UNSUPPORTED
    assert outcome.reason is not None
    assert outcome.reason.code.startswith(code)


@pytest.mark.slow
@needs_compiler
def test_caches_do_not_answer_one_blocking_with_another() -> None:
    problem, first = given("bmm:f32:nn:2x5x25x33")
    backend, request = CppBackend(threads=1), BuildRequest(user_caches=f"blockings-{uuid.uuid4().hex}")
    pick, *_ = backend.candidates(problem, first, request).names
    names = [pick, f"{pick},cache=1.1.4"]
    said: list[tuple[str, ...]] = []
    cached = []
    for name in names * 2:  # the second time out of the caches
        prepared = backend.prepare(problem, first, request.replace(candidate=name))
        prepared.run(first)
        assert prepared.proof().objection() is None
        said.append(prepared.proof().configuration)
        cached.append("out of the FX graph cache" in prepared.proof().chosen[0])
    assert cached == [False] * 2 + [True] * 2
    assert len(set(said)) == 2
    assert said[:2] == said[2:]


@pytest.mark.slow
@pytest.mark.study
def test_a_script_leaves_one_micro_kernel_registered() -> None:
    """In a process of its own, where nothing of Inductor has been imported before."""
    shown = (
        "found = [(c.__name__, *one.register_blocking) for c, all in micro.micro_gemm_configs.items() for one in all]",
        "print(sorted(set(found)))",
    )
    lines = ["import torch, torch._inductor.config", *micro_kernels.registering(VEC), *shown]
    lines += [*micro_kernels.registering("CppMicroGemmRef-1x1x1"), *shown]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[('CppMicroGemmFP32Vec', 4, 24, 1)]", "[]"]


class Listing:
    """A backend with two candidates of a list, and more of them by name."""

    name = "cpp"
    supports = availability = staticmethod(lambda *_: None)

    def candidates(self, problem: Problem, given: tensors.Operands, request: BuildRequest) -> Candidates:
        return Candidates(("a", "b"), (request.candidate,) if request.candidate.startswith("a,") else ())

    def prepare(self, problem: Problem, given: tensors.Operands, request: BuildRequest) -> Any:
        raise Unsupported("stop", f"{request.candidate} came this far")


@pytest.mark.parametrize(
    ("wanted", "ended"),
    [
        ("all", [("a", "stop"), ("b", "stop")]),
        ("b*", [("b", "stop")]),
        ("a,k=1", [("a,k=1", "stop")]),
        ("d", [("", "unknown-candidate")]),
    ],
)
def test_what_is_not_listed_is_judged_by_name(wanted: str, ended: list[tuple[str, str]]) -> None:
    backend: Any = Listing()
    outcomes = judged(backend, LINE, "int-1", candidates=wanted)
    assert [(o.candidate, o.reason.code if o.reason else "") for o in outcomes] == ended
