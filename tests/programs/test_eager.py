"""An exact product is right on every distribution of each op, and eager PyTorch is but for known failures."""

from __future__ import annotations

import dataclasses

import pytest
from oracle import computed, is_right, judged, make

from pytest_gemm.api.request import BuildRequest, Selection
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.config.options import suite
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import known

LEDGER = Ledger.load(suite("conformance") / "known_failures.toml")
FP8 = "scaled_mm:f8e4m3fn-f8e5m2-{}:nt:33x40x250:{}"
LINES = (
    # Prologues.
    "mm:bf16:nn:33x40x65:a.relu", "mm:f16:tt:33x40x65:a.floor", "bmm:bf16:nn:3x17x24x40:a.tril",
    "linear:f32:nt:2x17x24x40:bias+relu:a.floor:b.halved", "addmm:bf16:nn:17x24x40:bias:b.relu",
    "mm:f32-f32-f16:nn:33x40x65:a.tril:b.floor", "mm:f16:nn:33x40x65:a.floor:b.halved",
    "mm:f32:nn:33x40x65:a.relu:b.relu",
    # Sums of two products, and gradients.
    "mm_plus_mm:bf16:nn:33x40x96", "mm_plus_mm:f16:tt:17x33x66:relu", "mm_plus_mm:f32:nt:5x3x0",
    "linear_dgrad:bf16:nn:17x33x65", "linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f16:tn:33x24x17:add",
    "linear_wgrad:f32:tn:24x40x33",
    # Groups.
    "grouped_mm:bf16:nt:4x33x40x64", "grouped_mm:f16:nt:2x40x7x1000:bias+gelu",
    "grouped_mm:f32:nt:6x5x33x64:a.padded+offset:b.broadcast",
    "grouped_mm_k:bf16:tn:4x32x40x64", "grouped_mm_k:f32:nn:3x17x36x8:relu", "grouped_mm_k:f16:nt:2x9x8x512:bias",
    "grouped_mm_n:bf16:nt:4x33x40x64", "grouped_mm_n:f16:nn:3x8x8x16:bias+gelu", "grouped_mm_n:f32:nt:5x3x12x64:add",
    "grouped_bmm:bf16:nn:3x33x64x72", "grouped_bmm:f32:nt:2x5x7x8:mul",
    # Quantised operands.
    *(FP8.format(out, rest) for out in ("bf16", "f16", "f32") for rest in (
        "quant.tensorwise", "bias:quant.tensorwise", "quant.rowwise", "bias+relu:quant.rowwise",
        "quant.tensorwise:math.fast_accumulate",
    )),
    "qlinear:u8-i8-f32:nt:17x65x127:bias+gelu:quant.static-0.02_7:a.7bit",
    "qlinear:u8-i8-i8:nt:17x65x127:quant.dynamic+requant-0.37_3:a.7bit",
    "qlinear:u8-i8-u8:nt:17x65x127:bias+sum-0.25_5+relu:quant.static+requant-0.37_3:a.7bit",
    "qlinear:u8-i8-i8:nt:17x65x127:sum-0.3_-4:quant.dynamic+requant-0.5_-3:a.7bit",
    "da8w8:i8-i8-bf16:nt:2x9x64x127:bias:quant.rowwise", "da8w8:i8-i8-f32:nt:3x0x16x32:quant.rowwise",
    "woq_int4:bf16-i4-bf16:nt:9x64x256:quant.group-64", "woq_int4:f32-i4-f32:nt:3x16x128:relu:quant.group-32",
    "da8w4:f32-i4-f32:nt:17x65x128:bias:quant.group-32", "da8w4:f32-i4-f32:nt:17x64x128:relu:quant.group",
    "qlinear:u8-i8-f32:nt:17x65x127:bias+relu:quant.static-0.02_7+bias_codes:a.7bit",
    "qlinear:u8-i8-u8:nt:17x65x127:bias:quant.dynamic+bias_codes+requant-0.37_3:a.7bit",
    "da8w8:i8-i8-f16:nt:17x65x127:bias:quant.rowwise+absmax", "mixed_mm:f32-f16-f32:nn:17x65x127:bias",
    "woq:f16-u8-f16:nt:17x65x100:bias+relu:quant.group-16+zeros", "woq:f32-i8-f32:nt:3x16x1100:quant.columnwise",
    "woq:f32-i4-f32:nt:17x65x96:bias:quant.group-32+inside-q8_0", "woq:bf16-i4-bf16:nt:9x16x128:quant.group-64+nf4",
    "woq:f32-i8-f32:nt:17x65x32:gelu:quant.group-16+inside-row", "woq:bf16-i4-bf16:nt:3x4x0:quant.columnwise+zeros",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_an_exact_product_is_right_and_eager_is_or_the_ledger_knows_it(line: str) -> None:
    backend, problem = AtenBackend(), Problem.parse(line)
    assert backend.supports(problem) is None
    refusal = backend.unsupported(problem, "cpu")
    for distribution in distributions_for(problem):
        o = make(line, distribution, 1)
        if problem.op.name != "woq_int4":  # no product of two tensors: its weight has scales of groups
            assert is_right(o, computed(o)), distribution
    if refusal is not None:
        pytest.skip(str(refusal))  # of this release
    outcomes = judged(backend, line, judge=Judge(statements=LEDGER.statements), seed=1)
    named = [dataclasses.replace(one, test="test_product") for one in outcomes]
    explained, _ = known.explain(named, problem, LEDGER, known.environment("cpu"))
    assert not [one for one in explained if one.status in {Status.INCORRECT, Status.CRASHED}]
    assert all(one.kernels for one in explained)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "products", "is_bound_again"), [
    # The packed weight, the scales' products and the column sums follow from the new constants.
    ("qlinear:u8-i8-f32:nt:9x16x64:bias:quant.static-0.02_7", 1, True),
    ("da8w8:i8-i8-f32:nt:9x16x64:quant.rowwise", 1, True), ("linear_dgrad:f32:nn:33x24x40:relu", 1, True),
    # So do relu(B), the halves of B and the size of a group.
    ("mm:f32:nn:33x40x65:b.relu", 1, True), ("mm_plus_mm:f32:nt:33x40x96:b.constant:m.dynamic", 2, True),
    ("woq_int4:bf16-i4-bf16:nt:17x64x128:quant.group-32", 1, True),
    ("linear:bf16:nt:5x65x96:b.padded+relu", 1, True),
])  # fmt: skip
def test_a_template_has_the_constants_of_the_problem(line: str, products: int, is_bound_again: bool) -> None:
    backend = CppBackend(threads=1)
    for distribution in ("int-2", "rand"):
        o = make(line, distribution)
        prepared = backend.prepare(o.problem, o, BuildRequest(selection=Selection.ONE))
        assert is_right(o, prepared.run(o), prepared.contract), distribution
        proof = prepared.proof()
        assert proof.objection() is None
        assert (len(proof.executed), proof.foreign) == (products, ())
    assert (backend.log.compiles == 1) is is_bound_again, prepared.artifact.rebind_reason
