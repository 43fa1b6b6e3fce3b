"""What models have around a product: constants, operands of other dtypes, graphs of PT2E, views that change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from oracle import computed, exact, is_right, judged, make, refuses_line
from torch._dynamo.utils import counters

from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.outcome import Status
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step
from pytest_gemm.programs import program

PT2E = "qlinear:u8-i8-f32:nt:17x65x126:bias:quant.static:a.7bit:program.pt2e"


def integers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An integer product."""
    c: torch.Tensor = a.double() @ b.double()
    return c.to(torch.int32)


def with_steps(steps: str) -> Callable[[Operands], torch.Tensor]:
    """A kernel that has these steps in the place of the problem's."""

    def kernel(o: Operands) -> torch.Tensor:
        epilogue = tuple(map(Step.parse, steps.split("+"))) if steps else ()
        other = dataclasses.replace(o.problem, epilogue=epilogue, flags=())
        product = integers if o.problem.op.int8 else exact
        made: torch.Tensor = program.build(other, product)(**program.args(o.problem, o))
        return made

    return kernel


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Operands], torch.Tensor]:
    """A kernel that reads another tensor than the one it gets."""
    return lambda o: computed(o, exact, **{name: change(program.args(o.problem, o)[name])})


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("mm:f32:nn:33x65x127:shift", with_steps("shift--1")),
        ("linear:bf16:nt:33x65x127:bias+shift-1.1+relu", with_steps("bias+relu+shift-1.1")),
        ("mm:f64:nn:33x65x127:shift-0.1", with_steps("shift-0.10000000149011612")),
        ("linear:bf16:nt:33x65x127:bias+add-n_f32", with_tensor("r0", lambda r: r.bfloat16())),
        ("mm:f16:nn:33x65x127:mul-bf16", lambda o: computed(o).half()),
        ("bmm:f32:nn:3x33x65x127:sub-m1_f16+relu", lambda o: computed(o).half()),
        ("linear:f32:nt:33x65x127:perm-0_1+add", with_tensor("r0", lambda r: r.roll(1))),
        ("woq:f32-u8-f32:nt:17x33x65:quant.tensorwise", with_tensor("scale_b", torch.ones_like)),
        ("mm:i32:nn:17x33x65", lambda o: computed(o).to(torch.int16)),
        ("qlinear:u8-i8-f32:nt:2x17x65x126:bias+sum+relu:quant.static:r0.view", with_steps("bias+relu")),
    ],
)
def test_a_right_kernel_passes_and_a_wrong_one_does_not(line: str, wrong: Callable[[Operands], torch.Tensor]) -> None:
    caught = set()
    for distribution in distributions_for(Problem.parse(line)):
        o = make(line, distribution)
        right = computed(o, integers if o.problem.op.int8 else exact)
        assert is_right(o, right), distribution
        caught |= set() if is_right(o, wrong(o).to(right.dtype)) else {distribution}
    assert caught


@pytest.mark.parametrize("mode", ["fused", "either"])
def test_a_constant_may_have_the_precision_of_the_kernel(mode: Literal["fused", "either"]) -> None:
    o = make("linear:bf16:nt:33x65x127:shift-1.1", "rand")
    product = o.a.double() @ o.b.double()
    for term in (1.1, float(torch.tensor(1.1)), float(torch.tensor(1.1, dtype=torch.bfloat16))):
        assert is_right(o, (product + term).to(torch.bfloat16), Contract(epilogue=mode))
    assert not is_right(o, (product + 1.11).to(torch.bfloat16), Contract(epilogue=mode))


@pytest.mark.parametrize("line", [PT2E, PT2E.replace("bias:quant.static", "relu:quant.dynamic")])
def test_what_pt2e_writes_is_right_as_it_is_written(line: str) -> None:
    for distribution in distributions_for(Problem.parse(line)):
        o = make(line, distribution)
        tensors = program.args(o.problem, o)
        written = computed(o, None)
        assert is_right(o, written), distribution
        assert not is_right(o, computed(o, None, b=tensors["b"].roll(1, 0))), distribution
        assert not is_right(o, written * (1 + 2.0**-9)), distribution


@pytest.mark.slow
def test_freezing_makes_a_quantised_linear_of_pt2e() -> None:
    counters["inductor"].clear()
    assert {o.status for o in judged(CppBackend(), PT2E, "int-2")} == {Status.PASSED}
    assert counters["inductor"]["qlinear_weight_prepack_matcher_count"] == 1


def test_what_contradicts_itself_is_refused() -> None:
    refuses_line("mm:f32:nn:8x8x8:shift-0", "shift-1.5: constant addend")
    refuses_line("mm:f32:nn:8x8x8:add-n_f32", "the value is f32 already.*write add-n")
    refuses_line("linears:f32:nt:2x8x8x8:add-bf16+cast-f16:steps.first", "cast-f16, which is no step of one product")
    refuses_line("qlinear:u8-i8-f16:nt:8x16x8:quant.static:program.pt2e", "has no f16")
    refuses_line("qlinear:u8-i8-f32:nt:8x16x8:add:quant.static:r0.view", "about a sum in place.*add sum")
