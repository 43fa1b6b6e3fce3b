"""mm_plus_mm: the sum of two products; what a line means, what is right, and who computes it."""

from __future__ import annotations

import pytest
import torch
from oracle import computed, is_right, make, refuses_line, says

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem

_LINE = "mm_plus_mm:bf16:nn:33x40x96"


def test_a_k_that_has_no_halves_is_refused() -> None:
    refuses_line("mm_plus_mm:bf16:nn:33x40x97", "two equal halves")


@pytest.mark.parametrize("line", [_LINE, "mm_plus_mm:f16:tt:17x33x66:relu", "mm_plus_mm:f32:nt:5x3x0"])
def test_the_program_is_two_products_and_right(line: str) -> None:
    problem, seen = Problem.parse(line), list[torch.Size]()

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.shape)
        return a @ b

    for distribution in distributions_for(problem):
        given = make(problem.line, distribution)
        assert is_right(given, computed(given))
        assert is_right(given, computed(given, matmul))
    assert {*seen} == {(problem.shape.m, problem.shape.k // 2)}


@pytest.mark.parametrize(
    ("ab", "cd", "ad", "cb"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (1, -1, 0, 0), (0, 0, 1, 1), (1, 0, 1, 0), (1, 0, 0, 1), (2, 1, 0, 0)],
    ids=["first", "second", "minus", "crossed", "one A", "one B", "twice"],
)
def test_each_confusion_of_the_two_products_is_found(ab: int, cd: int, ad: int, cb: int) -> None:
    for distribution in ("int-2", "rand"):
        given = make(_LINE, distribution)
        (a, c), (b, d) = given.a.float().chunk(2, 1), given.b.float().chunk(2, 0)
        assert is_right(given, (a @ b + c @ d).bfloat16())
        assert not is_right(given, (ab * (a @ b) + cd * (c @ d) + ad * (a @ d) + cb * (c @ b)).bfloat16())


def test_halves_that_are_rounded_are_right_only_where_they_may_be() -> None:
    given = make("mm_plus_mm:bf16:nn:64x64x4096", "rand-positive")
    halves = [(a.double() @ b.double()).bfloat16() for a, b in zip(given.a.chunk(2, 1), given.b.chunk(2), strict=True)]
    rounded = halves[0] + halves[1]
    assert is_right(given, rounded)
    assert not is_right(given, rounded, Contract("f32", "fused"))


@pytest.mark.parametrize(("line", "words"), [
    (_LINE, "ATen and Triton candidates only"), ("mm_plus_mm:f32:nt:33x40x96:b.constant", ""),
    ("mm_plus_mm:f32:tn:33x40x96:b.constant", "contiguous rows"),
])  # fmt: skip
def test_the_templates_of_c_plus_plus_take_a_constant_b_only(line: str, words: str) -> None:
    says(CppBackend().supports(Problem.parse(line)), words)


def test_bf16_needs_onednn_at_the_level() -> None:
    refusal = CppBackend().supports(Problem.parse(f"{_LINE}:b.constant"), BuildRequest(isa="avx2"))
    assert refusal is None or "avx2" in str(refusal)


def test_who_computes_it_on_a_gpu() -> None:
    assert TritonBackend().supports(Problem.parse(_LINE)) is None
    assert "no CUTLASS candidate" in str(CutlassBackend().supports(Problem.parse(_LINE)))
    assert AtenBackend().supports(Problem.parse(_LINE)) is None


@pytest.mark.slow
def test_a_constant_b_is_two_products_of_the_template() -> None:
    problem = Problem.parse("mm_plus_mm:f32:nt:33x40x96:b.constant:m.dynamic")
    given = make(problem.line, "int-2")
    prepared = CppBackend(threads=1).prepare(problem, given, DEFAULT)
    assert is_right(given, prepared.run(given), prepared.contract)
    proof = prepared.proof()
    assert len(proof.executed) == 2
    assert not proof.foreign
