"""The shipped cases: what each level holds."""

from __future__ import annotations

import pytest

from pytest_gemm.backends.cutedsl import CuteDslBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.problem import shapes
from pytest_gemm.problem.problem import Problem


def test_levels_hold_each_other() -> None:
    quick, full, exhaustive = (set(matrix.products(level)) for level in ("quick", "full", "exhaustive"))
    assert quick <= full <= exhaustive
    assert len(full) >= 2_000


def test_the_huge_level_is_apart_and_holds_what_32_bits_do_not() -> None:
    huge = matrix.products("huge")
    assert not set(huge) & set(matrix.products("exhaustive"))
    cpu, cuda = (set(matrix.products("huge", device=device)) for device in ("cpu", "cuda"))
    assert cpu < cuda == set(huge)
    batches = [1 if p.shape.batch is None else p.shape.batch for p in huge]
    assert max(batches) > 65535
    for own in (cpu, cuda):
        assert max(p.shape.m for p in own) > 2**21
        assert max(p.shape.k for p in own) > 40_000
        assert max(p.shape.m * p.shape.n for p in own) > 2**31
        assert max(p.shape.m * p.shape.k for p in own) > 2**31
    assert max(p.shape.m * p.shape.n for p in cuda) > 2**32
    assert {p.op.name for p in cuda} >= {"mm", "addmm", "linear", "bmm", "baddbmm", "int_mm"}


def test_the_quick_level_has_what_the_templates_branch_on() -> None:
    quick = matrix.products("quick")
    assert {p.op.name for p in quick} >= {"mm", "addmm", "bmm", "baddbmm", "linear", "int_mm", "mixed_mm", "woq_int8"}
    assert {str(p.layout) for p in quick if p.op.name == "mm"} == {"nn", "nt", "tn", "tt"}
    assert {p.shape.m for p in quick} >= {0, 1, 2, 3, 16, 17, 32}
    assert {flag for p in quick for flag in p.flags} >= {
        "m.dynamic",
        "a.padded",
        "b.padded",
        "a.offset",
        "b.offset",
        "b.broadcast",
        "b.alias_t",
    }
    steps = {step.name for p in quick for step in p.epilogue}
    assert steps >= {
        "bias",
        "relu",
        "gelu",
        "gelu_tanh",
        "silu",
        "sigmoid",
        "tanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
    }
    assert steps >= {"clamp", "add", "mul", "sub", "div", "scale", "cast", "alpha", "beta"}


def test_the_quick_level_has_long_dimensions() -> None:
    """M, N, K and the batch beyond 16 bits; few columns of a long K; two batch dimensions."""
    quick = matrix.products("quick")
    longest = 1 << 16
    for size in ("m", "n", "k", "batch"):
        assert any((getattr(p.shape, size) or 0) > longest for p in quick), size
    assert any(0 < p.shape.n < 4 and p.shape.k > 1000 for p in quick)
    assert {p.op.name for p in quick if (p.shape.batch or 0) > 50} >= {"bmm", "baddbmm"}
    assert any(p.has("a.4d") for p in quick)
    assert any(p.op.name == "int_mm" and p.shape.k > longest for p in quick)


def test_the_quick_level_has_what_backends_that_load_with_tma_take() -> None:
    quick = matrix.products("quick")
    assert "int_mm:i8-i8-i32:nt:512x1024x2048" in map(str, quick)
    cutlass = [p for p in quick if CutlassBackend().supports(p) is None]
    rows = {p.shape.m for p in cutlass}
    assert rows >= {1, 64, 256}
    for tile in (64, 256):
        assert rows & {*range(tile - 8, tile)}, f"less than {tile}"
        assert rows & {*range(tile + 1, tile + 9)}, f"more than {tile}"
    assert {str(p.layout) for p in cutlass if p.op.name == "mm"} == {"nn", "nt", "tn", "tt"}
    assert {p.op.name for p in cutlass} >= {"mm", "addmm", "bmm", "linear", "int_mm", "mixed_mm"}
    # A bias in the product keeps CUTLASS from fusing, so each step stands without one too.
    fused = [p for p in cutlass if p.step("bias") is None]
    steps = {step.name for p in fused for step in p.passes}
    assert steps >= {"relu", "gelu", "tanh", "exp", "sigmoid", "silu", "add", "sub", "mul", "div"}
    assert all(any(p.has(flag) for p in fused) for flag in ("program.multi_output", "r0.alias"))
    for backend in (CuteDslBackend(), NvgemmBackend()):
        assert sum(backend.supports(p) is None for p in quick) >= 60, backend.name


def test_the_quick_level_switches_what_a_user_can() -> None:
    quick = matrix.products("quick")
    # A product of matrices and one of batches: kernels of their own.
    assert {p.shape.batch is None for p in quick if p.has("math.tf32")} == {False, True}
    assert {str(p.dtypes) for p in quick if p.has("math.half_partials")} == {"f16", "bf16"}
    assert {p.op.name for p in quick if p.autocast} >= {"mm", "linear", "addmm", "bmm"}
    assert {str(p.dtypes) for p in quick if p.autocast} == {"f32-f32-bf16", "f32-f32-f16"}


def test_every_problem_of_the_matrix_can_be_read_back() -> None:
    for problem in matrix.products("full"):
        assert Problem.parse(str(problem)) == problem


@pytest.mark.slow
def test_every_set_has_a_reason_and_a_problem_of_its_own() -> None:
    for name in (*matrix.families(), "caches", "races"):
        for one in shapes.read(matrix.CASES / f"{name}.toml"):
            assert one.help, f"{name}.toml: {one.name}"
            assert one.problems, f"{name}.toml: {one.name}"


def facts(problem: Problem) -> list[object]:
    names = list(dict.fromkeys(step.name for step in problem.steps))
    return [str(problem.dtypes), str(problem.layout), *(problem.flags or ("plain",)), *(names or ("none",))]


def test_what_is_spread_meets_every_value_of_the_other_axes() -> None:
    for name, template in (("scaled", "scales"), ("quantised", "qlinear")):
        (found,) = (one for one in shapes.read(matrix.CASES / f"{name}.toml") if one.name == template)
        sizes = {problem.shape for problem in found.problems}
        assert len(sizes) > 1
        values = {fact for problem in found.problems for fact in facts(problem)}
        for fact in values:
            assert {one.shape for one in found.problems if fact in facts(one)} == sizes, fact
