"""mm_plus_mm: the sum of two products; what a line means, what is right, and who computes it."""

from __future__ import annotations

import pytest
import torch

from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import as_allowed
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

_LINE = "mm_plus_mm:bf16:nn:33x40x96"


def is_right(given: Operands, actual: torch.Tensor, contract: Contract | None = None) -> bool:
    contract = contract or as_allowed(Contract("f32", "eager"), given.problem)
    interval = interval_module.interval(given.problem, given, reference.reference(given.problem, given), contract)
    return verdict.compare(actual, interval, given.problem, given).ok


def test_a_k_that_has_no_halves_is_refused() -> None:
    with pytest.raises(ProblemError, match="two equal halves"):
        Problem.parse("mm_plus_mm:bf16:nn:33x40x97")


@pytest.mark.parametrize("line", [_LINE, "mm_plus_mm:f16:tt:17x33x66:relu", "mm_plus_mm:f32:nt:5x3x0"])
def test_the_program_is_two_products_and_right(line: str) -> None:
    problem, seen = Problem.parse(line), list[torch.Size]()

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(a.shape)
        return a @ b

    for distribution in distributions_for(problem):
        given = factory.make(problem, distribution, 0)
        assert is_right(given, program.build(problem)(**program.args(problem, given)))
        assert is_right(given, program.build(problem, matmul)(**program.args(problem, given)))
    assert {*seen} == {(problem.shape.m, problem.shape.k // 2)}


@pytest.mark.parametrize(
    ("ab", "cd", "ad", "cb"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (1, -1, 0, 0), (0, 0, 1, 1), (1, 0, 1, 0), (1, 0, 0, 1), (2, 1, 0, 0)],
    ids=["first", "second", "minus", "crossed", "one A", "one B", "twice"],
)
def test_each_confusion_of_the_two_products_is_found(ab: int, cd: int, ad: int, cb: int) -> None:
    for distribution in ("int-2", "rand"):
        given = factory.make(Problem.parse(_LINE), distribution, 0)
        (a, c), (b, d) = given.a.float().chunk(2, 1), given.b.float().chunk(2, 0)
        assert is_right(given, (a @ b + c @ d).bfloat16())
        assert not is_right(given, (ab * (a @ b) + cd * (c @ d) + ad * (a @ d) + cb * (c @ b)).bfloat16())


def test_halves_that_are_rounded_are_right_only_where_they_may_be() -> None:
    given = factory.make(Problem.parse("mm_plus_mm:bf16:nn:64x64x4096"), "rand-positive", 0)
    halves = [(a.double() @ b.double()).bfloat16() for a, b in zip(given.a.chunk(2, 1), given.b.chunk(2), strict=True)]
    rounded = halves[0] + halves[1]
    assert is_right(given, rounded)
    assert not is_right(given, rounded, Contract("f32", "fused"))


@pytest.mark.parametrize(("line", "words"), [
    (_LINE, "ATen and Triton candidates only"), ("mm_plus_mm:f32:nt:33x40x96:b.constant", ""),
    ("mm_plus_mm:f32:tn:33x40x96:b.constant", "contiguous rows"),
])  # fmt: skip
def test_the_templates_of_c_plus_plus_take_a_constant_b_only(line: str, words: str) -> None:
    refusal = CppBackend().supports(Problem.parse(line))
    assert (refusal is None) == (not words)
    assert words in str(refusal or "")


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
    given = factory.make(problem, "int-2", 0)
    prepared = CppBackend(threads=1).prepare(problem, given, DEFAULT)
    assert is_right(given, prepared.run(given), prepared.contract)
    proof = prepared.proof()
    assert len(proof.executed) == 2
    assert not proof.foreign
