"""Products that PyTorch makes of something else: gradients of a linear, convolutions."""

from __future__ import annotations

import pytest
import torch
from oracle import computed, is_right, make, refuses_line

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem

LINES = (
    "linear_dgrad:bf16:nn:17x33x65", "linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f16:tn:33x24x17:add",
    "linear_wgrad:f32:tn:24x40x33",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_eager_is_right_on_every_distribution(line: str) -> None:
    problem = Problem.parse(line)
    for distribution in distributions_for(problem):
        given = make(problem.line, distribution)
        assert is_right(given, AtenBackend().prepare(problem, given).run(given)), distribution


@pytest.mark.parametrize("line", LINES)
def test_a_gradient_is_the_one_that_backward_gives(line: str) -> None:
    given = make(line.replace(":relu", "").replace(":add", ""), "int-2")
    inner = given.problem.op.name == "linear_dgrad"
    gradient = given.a if inner else given.a.mT
    rows = gradient.shape[0]
    x = torch.zeros(rows, given.b.shape[1], dtype=given.a.dtype) if inner else given.b
    weight = given.b if inner else torch.zeros(gradient.shape[1], given.b.shape[1], dtype=given.a.dtype)
    leaf = (x if inner else weight).detach().clone().requires_grad_()
    torch.nn.functional.linear(*((leaf, weight) if inner else (x, leaf))).backward(gradient)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, computed(given))


@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:4x4x4:m.dynamic"])
def test_sizes_are_fixed(line: str) -> None:
    refuses_line(line, "has fixed sizes")


@pytest.mark.slow
@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f32:tn:24x40x33:relu"])
def test_compiled_gradients_are_products_of_pytorch(line: str) -> None:
    problem = Problem.parse(line)
    given = make(problem.line, "int-2")
    prepared = AtenBackend().prepare(problem, given, DEFAULT.replace(mode=Mode.STATIC))
    assert is_right(given, prepared.run(given), prepared.contract)
    assert any("mm" in name for name in prepared.proof().executed)


@pytest.mark.slow
def test_a_gradient_of_a_constant_weight_is_a_product_of_the_template() -> None:
    problem = Problem.parse("linear_dgrad:f32:nn:33x24x40:relu")
    given = make(problem.line, "int-2")
    prepared = CppBackend(threads=1).prepare(problem, given)
    assert is_right(given, prepared.run(given), prepared.contract)
    assert not prepared.proof().foreign
