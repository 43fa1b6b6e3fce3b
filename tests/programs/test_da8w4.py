"""da8w4: an A that the op quantises itself times a weight of 4 bits."""

from __future__ import annotations

import torch
from oracle import computed, interval, is_right, make

from pytest_gemm.numerics.dynamic import quantised
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build

GROUPS = "da8w4:f32-i4-f32:nt:17x65x128:bias:quant.group-32"
HALF = "da8w4:bf16-i4-bf16:nt:9x32x64:quant.group-64"


def exactly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def test_integers_are_exact_and_no_row_has_an_infinity() -> None:
    found = distributions_for(Problem.parse(GROUPS))
    assert {"int-2", "rand", "int-1", "rand-wide"} <= set(found)
    assert "specials" not in found
    for distribution in found:
        assert (interval(make(GROUPS, distribution)).tier == "exact") == (distribution in {"int-2", "int-1"})


def test_a_result_that_is_cut_off_is_caught() -> None:
    operands = make(HALF, "int-2")
    right = computed(operands, exactly)
    assert is_right(operands, right)
    wide = Problem.parse(HALF.replace("bf16", "f32"))
    given = args(operands.problem, operands)
    sums = build(wide, exactly)(**given | {"a": given["a"].float()})
    assert is_right(operands, sums.bfloat16())
    assert not is_right(operands, (sums.view(torch.int32) & -65536).view(torch.float32).bfloat16())


def test_other_codes_scales_or_rows_are_caught() -> None:
    operands = make(GROUPS, "rand")
    given = args(operands.problem, operands)
    pairs = given["b"].unflatten(1, (-1, 2)).flip(2).flatten(1)
    assert not is_right(operands, computed(operands, exactly, b=pairs))
    assert not is_right(operands, computed(operands, exactly, quantisation=given["quantisation"].roll(1, 0)))
    assert not is_right(operands, computed(operands, exactly, b=given["b"] - 1))
    # Not quantised at all, quantised for the whole of A, and in 127 steps to either side.
    a, whole, side = (
        operands.a,
        (operands.a.max() - operands.a.min()) / 255,
        operands.a.abs().amax(1, keepdim=True) / 127,
    )
    for codes in (a, torch.round(a / whole) * whole, torch.round(a / side) * side):
        assert not is_right(operands, exactly(codes, operands.weight) + given["bias"])


def test_only_what_is_near_a_half_has_two_codes() -> None:
    a = torch.tensor([[-128.0, 127.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 255.0, 4.5]]).double()
    found = quantised(a)
    assert found.spread.tolist() == [[0.0, 0.0, 0.5, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 0.5]]
    assert found.middle.tolist() == a.tolist()
    # The code of 0 lies between two integers: one end of the row is cut off, and it is open which.
    ends = quantised(torch.tensor([[-1.0, 1.0, 0.0]]).double()).spread * 127.5
    assert ends.tolist() == [[0.5, 0.5, 0.0]]
