"""Products that PyTorch makes of something else, gradients of a linear, and sums of two products."""

from __future__ import annotations

import pytest
import torch
from oracle import computed, is_right, make

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.problem import Problem

SUM = "mm_plus_mm:bf16:nn:33x40x96"


@pytest.mark.parametrize("line", ["linear_dgrad:bf16:nn:17x33x65", "linear_wgrad:f32:tn:24x40x33"])
def test_a_gradient_is_the_one_that_backward_gives(line: str) -> None:
    given = make(line, "int-2")
    inner = given.problem.op.name == "linear_dgrad"
    gradient = given.a if inner else given.a.mT
    rows = gradient.shape[0]
    x = torch.zeros(rows, given.b.shape[1], dtype=torch.float64) if inner else given.b.double()
    weight = given.b.double() if inner else torch.zeros(gradient.shape[1], given.b.shape[1], dtype=torch.float64)
    leaf = (x if inner else weight).detach().clone().requires_grad_()
    torch.nn.functional.linear(*((leaf, weight) if inner else (x, leaf))).backward(gradient.double())
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.to(given.a.dtype), computed(given))


@pytest.mark.slow
@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f32:tn:24x40x33:relu"])
def test_compiled_gradients_are_products_of_pytorch(line: str) -> None:
    problem = Problem.parse(line)
    given = make(problem.line, "int-2")
    prepared = AtenBackend().prepare(problem, given, DEFAULT.replace(mode=Mode.STATIC))
    assert is_right(given, prepared.run(given), prepared.contract)
    assert any("mm" in name for name in prepared.proof().executed)


def test_a_sum_is_of_two_products_of_half_the_k() -> None:
    seen: list[tuple[int, ...]] = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(a.shape))
        return a @ b

    computed(make(SUM), matmul)
    assert seen == [(33, 48)] * 2


@pytest.mark.parametrize(
    ("ab", "cd", "ad", "cb"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (1, -1, 0, 0), (0, 0, 1, 1), (1, 0, 1, 0), (1, 0, 0, 1), (2, 1, 0, 0)],
    ids=["first", "second", "minus", "crossed", "one A", "one B", "twice"],
)
def test_each_confusion_of_the_two_products_is_found(ab: int, cd: int, ad: int, cb: int) -> None:
    for distribution in ("int-2", "rand"):
        given = make(SUM, distribution)
        (a, c), (b, d) = given.a.float().chunk(2, 1), given.b.float().chunk(2, 0)
        assert is_right(given, (a @ b + c @ d).bfloat16())
        assert not is_right(given, (ab * (a @ b) + cd * (c @ d) + ad * (a @ d) + cb * (c @ b)).bfloat16())


def test_halves_that_are_rounded_are_right_only_where_they_may_be() -> None:
    given = make("mm_plus_mm:bf16:nn:64x64x4096", "rand-positive")
    halves = [(a.double() @ b.double()).bfloat16() for a, b in zip(given.a.chunk(2, 1), given.b.chunk(2), strict=True)]
    rounded = halves[0] + halves[1]
    assert is_right(given, rounded)
    assert not is_right(given, rounded, Contract("f32", "fused"))
