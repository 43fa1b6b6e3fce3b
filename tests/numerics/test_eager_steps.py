"""A kernel that rounds after each step is right where it says so, for every op and half type, and else it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import interval, reference
from pytest_gemm.numerics.epilogue import apply
from pytest_gemm.numerics.product import Bounding
from pytest_gemm.numerics.reference import as_added, widened, with_addend
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

Epilogue = Literal["fused", "eager", "either"]
# Programs of more than one result, or of more than a product and its steps.
OTHERS = ("program.chained", "program.branching")


def problems() -> Iterator[Problem]:
    """Those of quick with a result in a half type that is one product with its steps."""
    for one in matrix.products("quick"):
        is_one = not (one.op.several or one.reduction or any(map(one.has, OTHERS)))
        if is_one and one.dtypes.out.name in {"f16", "bf16"} and one.shape.flops < 2e6:
            yield one


def wrong(problem: Problem, distribution: str, epilogue: Epilogue) -> int:
    """Elements that are blamed of a kernel that is exact but for a rounding after the product and after each step."""
    backend = CallableBackend("mine", torch.matmul, bind=lambda *_: None, epilogue=epilogue)
    given, contract = tensors.make(problem, distribution, 0), backend.contract(problem, own=True)
    truth = reference.reference(problem, given)
    bounding, out = Bounding(problem, given, truth, contract), problem.dtypes.out
    x = round_to(with_addend(problem, truth.c, bounding.scale, None), out)
    if bounding.addend is not None:
        x = round_to(x + bounding.addend, out)
    residuals = iter(given.residuals)
    for step in problem.passes:
        bias = as_added(problem, given) if step.kind is StepKind.BIAS else None
        r = widened(next(residuals)) if step.kind is StepKind.BINARY else bias
        out = step.makes(out)
        x = round_to(apply(step, x, r), out)
    found = interval.intervals(problem, given, truth, contract)[-1]
    return int((verdict.ratios(x.reshape(found.lo.shape), found) > 1.0).sum())


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["eager", "either"])
def test_no_kernel_that_rounds_after_each_step_is_blamed(epilogue: Epilogue) -> None:
    tried = {(problem.op.name, problem.dtypes.out.name) for problem in problems()}
    assert {("da8w8", "f16"), ("da8w8", "bf16"), ("qlinear", "bf16"), ("scaled_mm", "f16"), ("woq", "bf16")} <= tried
    cases = ((problem, sorted(distributions_for(problem), key="rand".__ne__)[0]) for problem in problems())
    assert [(problem.line, name) for problem, name in cases if wrong(problem, name, epilogue)] == []


@pytest.mark.parametrize(
    "line",
    [
        "da8w8:i8-i8-f16:nt:17x65x127:bias:quant.rowwise",
        "da8w8:i8-i8-bf16:nt:17x65x127:bias:quant.columnwise+absmax",
        "da8w4:bf16-i4-bf16:nt:17x64x128:bias:quant.group-128",
        "qlinear:u8-i8-bf16:nt:17x65x130:bias+add+relu:quant.static-0.02_128",
        "scaled_mm:f8e4m3fn-f8e4m3fn-f16:nt:17x64x128:bias:quant.rowwise",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:17x64x128:bias+relu:quant.tensorwise",
        "linear:bf16:nt:17x65x127:bias+add",
    ],
)
def test_a_kernel_is_blamed_for_a_rounding_that_it_does_not_state(line: str) -> None:
    problem = Problem.parse(line)
    blamed = {epilogue: wrong(problem, "rand", epilogue) for epilogue in ("fused", "eager", "either")}
    assert blamed["fused"] > 0
    assert (blamed["eager"], blamed["either"]) == (0, 0)
