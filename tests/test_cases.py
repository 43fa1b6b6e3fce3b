"""Axes into cases, and the shipped matrix."""

from __future__ import annotations

import pytest

from pytest_gemm.cases import Cases, unique
from pytest_gemm.conformance import matrix
from pytest_gemm.problem import Problem


def test_combine_expand_filter() -> None:
    cases = (
        Cases()
        .combine(m=[1, 2], n=[3])
        .combine(k=[4, 5])
        .expand("dtype", lambda p: ["f32", "bf16"] if p["m"] == 1 else [])
        .filter(lambda p: p["k"] == 4 or p["dtype"] == "f32")
    )
    lines = [str(p) for p in cases.problems("mm:{dtype}:nn:{m}x{n}x{k}")]
    assert lines == ["mm:f32:nn:1x3x4", "mm:bf16:nn:1x3x4", "mm:f32:nn:1x3x5"]


def test_an_axis_is_given_once() -> None:
    with pytest.raises(ValueError, match="'m' is there already"):
        Cases().combine(m=[1]).combine(m=[2])


def test_problems_are_distinct_and_keep_their_order() -> None:
    found = Cases().combine(e=["", "", "relu"]).problems("mm:f32:nn:1x1x1:{e}")
    assert [str(p) for p in found] == ["mm:f32:nn:1x1x1", "mm:f32:nn:1x1x1:relu"]
    assert unique([*found, *found]) == found


def test_levels_hold_each_other() -> None:
    quick, full, exhaustive = (set(matrix.products(level)) for level in ("quick", "full", "exhaustive"))
    assert quick <= full <= exhaustive
    assert len(full) >= 2_000


def test_the_quick_level_has_what_the_templates_branch_on() -> None:
    quick = matrix.products("quick")
    assert {p.op.name for p in quick} >= {"mm", "addmm", "bmm", "baddbmm", "linear", "int_mm", "mixed_mm", "woq_int8"}
    assert {str(p.layout) for p in quick if p.op.name == "mm"} == {"nn", "nt", "tn", "tt"}
    assert {p.shape.m for p in quick} >= {0, 1, 2, 3, 16, 17, 32, 1000}
    assert max(p.shape.k for p in quick) == 16384
    assert {flag for p in quick for flag in p.flags} >= {
        "dyn-m",
        "pad-lda",
        "pad-ldb",
        "off-a",
        "off-b",
        "bcast-b",
        "self",
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


def test_every_problem_of_the_matrix_can_be_read_back() -> None:
    for problem in matrix.products("full"):
        assert Problem.parse(str(problem)) == problem
