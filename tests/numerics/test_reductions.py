"""Sums of rows and of columns behind a product, and what a residual of another dtype is."""

from __future__ import annotations

from typing import Literal

import oracle
import pytest
import torch
from mutants import right

from pytest_gemm.judging import verdict
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.epilogue import Span, reduced
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

LINES = (
    "mm:bf16:nn:33x65x127:sums-m:program.multi_output",
    "mm:f32:tn:33x65x127:relu+sums-n:program.multi_output",
    "linear:f32-f32-bf16:nt:33x65x127:bias+cast-f32+add+squares-n:program.multi_output",
    "bmm:f16:nn:3x33x64x65:squares-m:program.multi_output",
    "linear_wgrad:bf16:tn:65x98x33:sums-k:program.multi_output",
    "linear:bf16:nt:17x65x96:gelu+sums-n:program.branching",
    "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:33x64x128:sums-m:quant.rowwise:program.multi_output",
)


@pytest.mark.parametrize("epilogue", ["eager", "either"])
@pytest.mark.parametrize("line", LINES)
def test_a_sum_is_right_where_it_has_every_line(line: str, epilogue: Literal["eager", "either"]) -> None:
    problem = Problem.parse(line)
    step = problem.reduction
    assert step is not None
    for distribution in distributions_for(problem):
        given = oracle.make(line, distribution)
        results = program.build(problem, right)(**program.args(problem, given))
        spans = interval_module.intervals(
            problem, given, reference.reference(problem, given), Contract(epilogue=epilogue)
        )
        for result, output, span in zip(results, problem.outputs, spans, strict=True):
            found = verdict.compare(result, span, output, given)
            assert found.ok, (distribution, found.mismatch)
        summed = given.a if step.text == "k" else results[0] if problem.has("program.multi_output") else None
        if summed is not None and distribution in {"int-2", "rand"}:
            shorter = step.apply(torch, summed.narrow(step.dim, 0, summed.shape[step.dim] - 1), None)
            assert not verdict.compare(shorter, spans[1], problem.outputs[1], given).ok, distribution


def test_a_sum_that_may_overflow_on_the_way_is_not_judged() -> None:
    large = Span.of(torch.tensor([[3e38, 3e38, -3e38], [3e38, -3e38, 1.0]], dtype=torch.float64))
    step = Problem.parse("mm:f32:nn:2x3x4:sums-n").reduction
    assert step is not None
    assert reduced(step, large)[1].flatten().tolist() == [True, True]
    assert not bool(reduced(step, large.map(lambda x: x / 4))[1].any())


def test_a_residual_in_bf16_is_added_to_a_value_of_f32() -> None:
    for line in ("linear:f16:nt:33x65x127:bias+cast-f32+add-bf16", "mm:bf16:nn:64x128x128:cast-f32+add-bf16:r0.alias"):
        for distribution in distributions_for(Problem.parse(line)):
            given = oracle.make(line, distribution)
            assert given.residuals[0].dtype == torch.bfloat16
            assert oracle.is_right(given, oracle.computed(given)), distribution
    given = oracle.make("mm:f32:nn:33x65x127:add-bf16", "rand")
    assert not oracle.is_right(given, given.a @ given.b)
