"""da8w4: an A that the op quantises itself times a weight of 4 bits."""

from __future__ import annotations

import pytest
import torch
from oracle import computed, interval, make, refuses_line

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.numerics.dynamic import quantised
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build

GROUPS = "da8w4:f32-i4-f32:nt:17x65x128:bias:quant.group-32"
WHOLE = "da8w4:f32-i4-f32:nt:17x64x128:relu:quant.group"
HALF = "da8w4:bf16-i4-bf16:nt:9x32x64:quant.group-64"


def agrees(operands: Operands, actual: torch.Tensor) -> bool:
    bound = interval(operands)
    return bool(((actual.double() >= bound.lo) & (actual.double() <= bound.hi)).all())


def exactly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


@pytest.mark.parametrize("line", [GROUPS, WHOLE])
def test_aten_is_right_and_integers_are_exact(line: str) -> None:
    backend, problem = AtenBackend(), Problem.parse(line)
    found = distributions_for(problem)
    assert {"int-2", "rand", "int-1", "rand-wide"} <= set(found)
    assert "specials" not in found
    for distribution in found:
        operands = make(line, distribution)
        assert (interval(operands).tier == "exact") == (distribution in {"int-2", "int-1"})
        assert agrees(operands, backend.prepare(problem, operands).run(operands))
        assert agrees(operands, computed(operands, exactly))


def test_a_result_that_is_cut_off_is_caught() -> None:
    operands = make(HALF, "int-2")
    right = computed(operands, exactly)
    assert agrees(operands, right)
    wide = Problem.parse(HALF.replace("bf16", "f32"))
    given = args(operands.problem, operands)
    sums = build(wide, exactly)(**given | {"a": given["a"].float()})
    assert agrees(operands, sums.bfloat16())
    assert not agrees(operands, (sums.view(torch.int32) & -65536).view(torch.float32).bfloat16())


def test_other_codes_scales_or_rows_are_caught() -> None:
    operands = make(GROUPS, "rand")
    given = args(operands.problem, operands)
    pairs = given["b"].unflatten(1, (-1, 2)).flip(2).flatten(1)
    assert not agrees(operands, computed(operands, exactly, b=pairs))
    assert not agrees(operands, computed(operands, exactly, quantisation=given["quantisation"].roll(1, 0)))
    assert not agrees(operands, computed(operands, exactly, b=given["b"] - 1))
    # Not quantised at all, quantised for the whole of A, and in 127 steps to either side.
    a, each = operands.a, operands.weight
    bias = given["bias"]
    assert not agrees(operands, exactly(a, each) + bias)
    step = (a.max() - a.min()) / 255
    assert not agrees(operands, exactly(torch.round(a / step) * step, each) + bias)
    step = a.abs().amax(1, keepdim=True) / 127
    assert not agrees(operands, exactly(torch.round(a / step) * step, each) + bias)


def test_only_what_is_near_a_half_has_two_codes() -> None:
    a = torch.tensor([[-128.0, 127.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 255.0, 4.5]]).double()
    found = quantised(a)
    assert found.spread.tolist() == [[0.0, 0.0, 0.5, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 0.5]]
    assert found.middle.tolist() == a.tolist()
    # The code of 0 lies between two integers: one end of the row is cut off, and it is open which.
    ends = quantised(torch.tensor([[-1.0, 1.0, 0.0]]).double()).spread * 127.5
    assert ends.tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("da8w4:f32-i4-f32:nt:3x16x96:quant.group-64", "no multiple of the group"),
        ("da8w4:bf16-i4-bf16:nt:3x16x128:quant.group-64", "the group is all of K=128"),
        ("da8w4:f32-i4-f32:nt:3x16x0:quant.group-64", "a row without elements has no scale"),
        ("da8w4:f32-i4-f32:nt:3x16x64", "da8w4 needs its scales"),
    ],
)
def test_a_line_that_means_nothing_is_refused(line: str, complaint: str) -> None:
    refuses_line(line, complaint)
