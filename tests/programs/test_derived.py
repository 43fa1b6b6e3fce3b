"""Products that PyTorch makes of something else: gradients of a linear, convolutions."""

from __future__ import annotations

import pytest
import torch

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

LINES = (
    "linear_dgrad:bf16:nn:17x33x65", "linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f16:tn:33x24x17:add",
    "linear_wgrad:f32:tn:24x40x33",
)  # fmt: skip


def is_right(given: Operands, actual: torch.Tensor, contract: Contract | None = None) -> bool:
    contract = contract or Contract("f32", "eager")
    interval = interval_module.interval(given.problem, given, reference.reference(given.problem, given), contract)
    return verdict.compare(actual, interval, given.problem, given).ok


@pytest.mark.parametrize("line", LINES)
def test_eager_is_right_on_every_distribution(line: str) -> None:
    problem = Problem.parse(line)
    for distribution in distributions_for(problem):
        given = factory.make(problem, distribution, 0)
        assert is_right(given, AtenBackend().prepare(problem, given).run(given)), distribution


@pytest.mark.parametrize("line", LINES)
def test_a_gradient_is_the_one_that_backward_gives(line: str) -> None:
    given = factory.make(Problem.parse(line.replace(":relu", "").replace(":add", "")), "int-2", 0)
    inner = given.problem.op.name == "linear_dgrad"
    gradient = given.a if inner else given.a.mT
    rows = gradient.shape[0]
    x = torch.zeros(rows, given.b.shape[1], dtype=given.a.dtype) if inner else given.b
    weight = given.b if inner else torch.zeros(gradient.shape[1], given.b.shape[1], dtype=given.a.dtype)
    leaf = (x if inner else weight).detach().clone().requires_grad_()
    torch.nn.functional.linear(*((leaf, weight) if inner else (x, leaf))).backward(gradient)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, program.build(given.problem)(**program.args(given.problem, given)))


@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:4x4x4:m.dynamic"])
def test_sizes_are_fixed(line: str) -> None:
    with pytest.raises(ProblemError, match="has fixed sizes"):
        Problem.parse(line)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f32:tn:24x40x33:relu"])
def test_compiled_gradients_are_products_of_pytorch(line: str) -> None:
    problem = Problem.parse(line)
    given = factory.make(problem, "int-2", 0)
    prepared = AtenBackend().prepare(problem, given, DEFAULT.replace(mode=Mode.STATIC))
    assert is_right(given, prepared.run(given), prepared.contract)
    assert any("mm" in name for name in prepared.proof().executed)


@pytest.mark.slow
def test_a_gradient_of_a_constant_weight_is_a_product_of_the_template() -> None:
    problem = Problem.parse("linear_dgrad:f32:nn:33x24x40:relu")
    given = factory.make(problem, "int-2", 0)
    prepared = CppBackend(threads=1).prepare(problem, given)
    assert is_right(given, prepared.run(given), prepared.contract)
    assert not prepared.proof().foreign
