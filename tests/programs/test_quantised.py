"""Quantised products, from the line to the verdict: integers with scales and zero points, weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import computed, is_right, make, scales

from pytest_gemm.api.request import DEFAULT, BuildRequest, Selection
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.numerics import epilogue
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step
from pytest_gemm.programs.program import args

# -- mutants, caught: each computes the program in f32 with one mistake ----------------------------------


def agrees(operands: Operands, actual: torch.Tensor, contract: Contract | None = None) -> bool:
    """Whether the oracle accepts a result, without a contract as one of a fused kernel."""
    return is_right(operands, actual, contract or Contract("f32"))


def exactly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An integer product."""
    c: torch.Tensor = a.double() @ b.double()
    return c.to(torch.int32)


def in_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As VPMADDUBSW adds u8 x i8: two products along K saturate in 16 bits."""
    products = a.int()[:, :, None] * b.int()[None]
    pairs: torch.Tensor = products.reshape(len(a), -1, 2, b.shape[1]).sum(2).clamp(-(2**15), 2**15 - 1)
    return pairs.sum(1).to(torch.int32)


def with_zero(operands: Operands, zero: int, tail: int = 0) -> torch.Tensor:
    """A dynamic problem's program with another zero point, or without B's last columns along K in its compensation."""
    tensors = args(operands.problem, operands)
    both = tensors["scale_b"] * tensors["scale_a"]
    sums = tensors["b"][:, : tensors["b"].shape[1] - tail].to(torch.float32).sum(1)
    return exactly(tensors["a"], tensors["b"].mT).float() * both - both * zero * sums


LINE = "qlinear:u8-i8-f32:nt:17x65x126:quant.dynamic"


@pytest.mark.parametrize("line", [
    "qlinear:u8-i8-f32:nt:17x65x126:bias+add+relu:quant.static-0.02_128",
    "qlinear:i8-i8-bf16:nt:17x33x1100:bias+gelu:quant.dynamic",
    "qlinear:u8-i8-i8:nt:33x65x127:bias:quant.static+requant-0.37_-5",
    "qlinear:u8-i8-u8:nt:33x65x127:relu:quant.dynamic+requant",
    "qlinear:u8-i8-u8:nt:33x65x127:bias+sum-0.25_5:quant.static+requant-0.37_3",
    "qlinear:u8-i8-i8:nt:17x33x126:sum-0.3_-4+relu:quant.dynamic+requant",
    "da8w8:i8-i8-bf16:nt:17x65x127:bias:quant.rowwise",
    "da8w8:i8-i8-f16:nt:2x9x33x1100:bias+relu:quant.columnwise",
])  # fmt: skip
def test_a_correct_program_is_accepted(line: str) -> None:
    for distribution in distributions_for(Problem.parse(line)):
        operands = make(line, distribution)
        contract = Contract("f32", "eager")
        assert agrees(operands, computed(operands, exactly), contract), distribution


def mutants(operands: Operands) -> dict[str, torch.Tensor]:
    zero, (_, scale) = operands.zero, scales(operands)
    return {
        "sign of the zero point": with_zero(operands, -zero),
        "zero point ignored": with_zero(operands, 0),
        "compensation without the tail of K": with_zero(operands, zero, tail=2),
        "one scale for all columns": computed(operands, exactly, scale_b=torch.full_like(scale, float(scale[0]))),
        "scales of the next column": computed(operands, exactly, scale_b=scale.roll(1)),
        "pairs saturate in 16 bits": computed(operands, in_pairs),
        "saturated at 2^16": computed(operands, lambda a, b: exactly(a, b).clamp(-(2**16), 2**16)),
    }


@pytest.mark.parametrize("name", list(mutants(make(LINE, "rand"))))
def test_a_mutant_about_integers_is_caught(name: str) -> None:
    assert any(not agrees(o := make(LINE, distribution), mutants(o)[name]) for distribution in ("int-2", "rand"))


def accumulated(line: str, distribution: str, scale: float, zero: int) -> bool:
    """Whether a residual of 8 bits is accepted that was added with this scale and zero point instead of its own."""
    operands = make(line, distribution)
    (own,) = [step for step in operands.problem.passes if step.name == "sum"]
    r = operands.residuals[0].float()
    replaced = (r - zero) * (scale / own.numbers[0]) + own.numbers[1]  # what its own step makes that sum of
    return agrees(operands, computed(operands, exactly, r0=replaced))


@pytest.mark.parametrize("line", [
    "qlinear:u8-i8-u8:nt:17x65x126:bias+sum-0.25_5:quant.static+requant",
    "qlinear:u8-i8-i8:nt:17x65x126:sum-0.3_-4+relu:quant.static+requant",
])  # fmt: skip
def test_a_residual_of_codes_has_its_own_scale_and_zero_point(line: str) -> None:
    (own,) = [step for step in Problem.parse(line).passes if step.name == "sum"]
    scale, zero = own.numbers
    for distribution in ("int-2", "rand"):
        assert accumulated(line, distribution, scale, int(zero))
        residual = make(line, distribution).residuals[0]
        assert str(residual.dtype) == f"torch.{Problem.parse(line).dtypes.out.torch_name}"
        for other in ((scale, 0), (scale, -int(zero)), (1.0, int(zero)), (1 / scale, int(zero)), (0.0, 0)):
            assert not accumulated(line, distribution, *other), other


def test_what_is_added_to_codes_may_be_rounded_in_either_order_and_not_at_all_by_a_power_of_two() -> None:
    f32, codes = torch.float32, torch.arange(256, dtype=torch.float64)
    step = Problem.parse("qlinear:u8-i8-u8:nt:1x1x1:sum-0.3_5:quant.static+requant").step("sum")
    assert step is not None
    span = epilogue.accumulated(step, codes, epilogue.Arithmetic(DTYPES["f32"], "fused"))
    scale = torch.tensor(0.3, dtype=f32)
    for value in ((codes.to(f32) - 5) * scale, codes.to(f32) * scale - scale * 5):
        assert bool(((span.lo <= value.double()) & (value.double() <= span.hi)).all())
    assert float((span.hi - span.lo).max()) < 1e-4
    thin = epilogue.accumulated(Step("sum", "0.25_5"), codes, epilogue.Arithmetic(DTYPES["f32"], "fused"))
    assert thin.thin
    assert torch.equal(thin.lo, (codes - 5) / 4)


def test_seven_bits_do_not_saturate_in_pairs() -> None:
    operands = make(f"{LINE}:a.7bit", "int-2")
    assert int(operands.a.max()) == 127
    assert agrees(operands, computed(operands, in_pairs))


def requantised(operands: Operands, how: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """An 8-bit result in float64, which ``how`` makes of the values in units of its scale."""
    step, scale = operands.problem.step("requant"), operands.scale
    assert step is not None
    assert scale is not None
    c = (operands.a.double() - operands.zero) @ operands.b.double() * scale
    info = torch.iinfo(torch.int8)
    return (how(c / step.numbers[0]) + step.numbers[1]).clamp(info.min, info.max).to(torch.int8)


@pytest.mark.parametrize(("how", "right"), [
    (torch.round, True), (torch.trunc, False), (torch.floor, False),
    (lambda y: torch.floor(y + 0.5), False),  # ties upwards
    (lambda y: torch.round(y).clamp(-100, 100), False),
])  # fmt: skip
def test_an_8_bit_result_is_rounded_to_nearest_even_and_saturated(
    how: Callable[[torch.Tensor], torch.Tensor], right: bool
) -> None:
    # An even zero point: both orders round ties alike.
    line = "qlinear:u8-i8-i8:nt:64x65x64:quant.static+requant-0.5_-4"
    found = [make(line, distribution) for distribution in ("int-2", "rand", "int-1")]
    assert all(agrees(operands, requantised(operands, how)) for operands in found) is right


@pytest.mark.parametrize(("value", "scale", "zero", "low", "high"), [
    (2.25, "0.5", 3, 7, 8),  # 4.5 + 3: RNE gives 4 before the zero point and 8 after it: 7 or 8
    (2.0, "0.5", 3, 7, 7), (-100.0, "0.5", 3, 0, 0), (200.0, "0.5", 3, 255, 255),
    (0.37 * 4.5, "0.37", 2, 6, 7),  # the reciprocal's rounding straddles the half
    (0.37 * 4.6, "0.37", 2, 7, 7),
])  # fmt: skip
def test_codes_on_either_side_of_a_half(value: float, scale: str, zero: int, low: int, high: int) -> None:
    problem = Problem.parse(f"qlinear:u8-i8-u8:nt:1x1x1:quant.static+requant-{scale}_{zero}")
    x = torch.tensor([value], dtype=torch.float64)
    codes, _ = epilogue.requantised(problem, epilogue.Span(x, x))
    assert (float(codes.lo), float(codes.hi)) == (low, high)


def test_scales_of_a_are_told_apart_from_those_of_b() -> None:
    operands = make("da8w8:i8-i8-f32:nt:64x64x128:quant.rowwise", "int-2")
    a, b = scales(operands)
    assert agrees(operands, computed(operands, exactly))
    exchanged = computed(operands, exactly, scale_a=b[:, None], scale_b=a[:, 0])
    assert not agrees(operands, exchanged)


def test_a_converted_sum_is_rounded_to_bf16_by_eager_code_for_certain() -> None:
    operands = make("da8w8:i8-i8-bf16:nt:17x65x127:quant.rowwise", "rand")
    a, b = scales(operands)
    skipped = (((operands.a.double() @ operands.b.double()).float() * a).bfloat16() * b).bfloat16()
    assert is_right(operands, skipped, Contract(epilogue="either"))
    assert not is_right(operands, skipped, Contract(epilogue="eager"))


# -- 4 bits -------------------------------------------------------------------------------------------


def rounded_weights(operands: Operands) -> torch.Tensor:
    """The product of 4-bit weights that are rounded to bf16 after their scales."""
    assert operands.quantisation is not None
    each = operands.quantisation.double().repeat_interleave(operands.problem.group_size, 0)
    weights = ((operands.b.double() - 8) * each[..., 0] + each[..., 1]).bfloat16()
    return (operands.a.double() @ weights.double()).to(operands.a.dtype)


def test_a_weight_rounded_to_bf16_needs_the_contract_that_says_so() -> None:
    contract = Contract("f32", input_error=2.0**-8, input_bits=8)
    operands = make("woq_int4:bf16-i4-bf16:nt:33x64x1024:quant.group-32", "rand")
    assert not agrees(operands, rounded_weights(operands))
    assert agrees(operands, rounded_weights(operands), contract)
    exact = make("woq_int4:bf16-i4-bf16:nt:9x64x256:quant.group-64", "int-2")  # whose weights are integers of few bits
    assert agrees(exact, rounded_weights(exact), contract)


ONE = BuildRequest(selection=Selection.ONE)
THIRDS = "woq_int8:bf16-i8-bf16:nt:17x192x128:relu:program.concat"


def test_three_weights_are_three_products_side_by_side() -> None:
    operands = make(THIRDS, "rand")
    contract, tensors = Contract("f32", "eager"), args(operands.problem, operands)
    assert tensors["b1"].data_ptr() - tensors["b0"].data_ptr() == 64 * 128  # a view of B: nothing is copied
    assert agrees(operands, computed(operands), contract)
    for one, other in (("b0", "b1"), ("scale1", "scale2")):
        exchanged = {one: tensors[other], other: tensors[one]}
        assert not agrees(operands, computed(operands, **exchanged), contract)
    assert not agrees(operands, computed(operands, b2=tensors["b0"]), contract)


@pytest.mark.slow
def test_weights_are_put_together_and_each_on_its_own_is_no_proof() -> None:
    problem, backend = Problem.parse(THIRDS), CppBackend(threads=1)
    for distribution in ("int-2", "rand"):
        operands = make(THIRDS, distribution)
        prepared = backend.prepare(problem, operands, ONE)
        assert agrees(operands, prepared.run(operands), prepared.contract)
        assert prepared.proof().objection() is None
        assert prepared.contract.epilogue == "either"  # the program rounds a product before it scales it
        assert [one.n for one in prepared.artifact.products] == [192]
    assert backend.log.compiles == 1

    class Singles(CppBackend):
        def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, object]:
            return {**super().options(problem, request), "cpp.enable_concat_linear": False}

    singles = Singles(threads=1).prepare(problem, operands, ONE)
    singles.run(operands)
    objection = singles.proof().objection()
    assert objection is not None
    assert objection.code == "other-template"


@pytest.mark.compiler
def test_compiled_aten_packs_4_bit_weights_in_the_program_and_refuses_8_bits() -> None:
    compiled = AtenBackend().compiled
    refusal = compiled.supports(Problem.parse(LINE))
    assert refusal is not None
    assert refusal.reason.code == "not-frozen"
    operands = make("woq_int4:bf16-i4-bf16:nt:3x16x64:quant.group-32", "int-2")
    assert agrees(operands, compiled.prepare(operands.problem, operands).run(operands), Contract("f32"))
