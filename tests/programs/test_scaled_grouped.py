"""Grouped products of fp8 with a scale for each row of each A and each column of each B."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compared, computed, is_right, make, scales

from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem

FORMS = ("scaled_grouped_mm", "scaled_grouped_mm_n", "scaled_grouped_mm_k", "scaled_grouped_bmm")
every_form = pytest.mark.parametrize("op", FORMS)


def line(op: str, shape: str = "4x32x48x64", more: str = "") -> str:
    return f"{op}:f8e4m3fn-f8e4m3fn-bf16:nt:{shape}:quant.rowwise{more}"


def by_hand(o: Operands, scales_of: Callable[[int], int] = lambda group: group) -> torch.Tensor:
    """Group by group, of elements that are multiplied by their scales first; ``scales_of`` is another group's."""
    batch, a, b = o.problem.shape.batch or 0, o.a.double(), o.b.double()
    scale_a, scale_b = (scale.double() for scale in scales(o))
    pieces = []
    for group in range(batch):
        first, last = o.groups[group] if o.groups else (0, 0)
        other = scales_of(group)
        if o.problem.op.ragged == "k":
            x, y = a[:, first:last], b[first:last]
            sa, sb = scale_a.reshape(batch, -1)[other], scale_b.reshape(batch, -1)[other]
        elif o.problem.op.ragged == "m":
            x, y, sa, sb = a[first:last], b[group], scale_a[first:last], scale_b[other]
        elif o.problem.op.ragged == "n":
            x, y, sa, sb = a[group], b[:, first:last], scale_a[other], scale_b[first:last]
        else:
            x, y, sa, sb = a[group], b[group], scale_a[other], scale_b[other]
        pieces.append((x * sa[:, None]) @ (y * sb))
    ragged = o.problem.op.ragged
    joined = torch.cat(pieces, 0 if ragged == "m" else 1) if ragged in {"m", "n"} else torch.stack(pieces)
    return joined.bfloat16()


@every_form
def test_each_distribution_finds_a_right_result_right(op: str) -> None:
    problem = Problem.parse(line(op))
    for distribution in distributions_for(problem):
        o = factory.make(problem, distribution, 1)
        if distribution != "specials":  # no scale is taken out of an infinity
            assert is_right(o, by_hand(o)), distribution
        made = computed(o, lambda a, b: a.float() @ b.float())
        assert made.dtype == torch.bfloat16
        assert is_right(o, made), distribution


@every_form
@pytest.mark.parametrize("distribution", ["rand", "int-2"])
def test_scales_of_another_group_are_found(op: str, distribution: str) -> None:
    o = make(line(op), distribution, 1)
    found = compared(o, by_hand(o, lambda group: (group + 1) % 4))
    assert found.mismatch is not None
    if op == "scaled_grouped_mm" and distribution == "rand":  # B alone has scales by group
        assert "were those of the group after" in found.mismatch.text()


@every_form
def test_scales_that_are_left_out_or_exchanged_are_found(op: str) -> None:
    o = make(line(op, "4x32x32x64"), "rand", 2)
    a, b = scales(o)
    changes: tuple[dict[str, Any], ...] = (
        {"scale_a": torch.ones_like(a)},
        {"scale_b": torch.ones_like(b)},
        {"scale_a": b.reshape(a.shape), "scale_b": a.reshape(b.shape)},
    )
    for wrong in changes:
        assert not is_right(o, by_hand(dataclasses.replace(o, **wrong)))


def test_a_channel_of_zeros_has_the_least_scale() -> None:
    """Of a gradient of weights: a row of A that is zero in all groups, which a reciprocal of its scale makes NaN."""
    o = make(line("scaled_grouped_mm_k", "4x40x96x64"), "specials")
    (row,) = (~o.a.float().bool().any(1)).nonzero().flatten().tolist()
    assert scales(o)[0].reshape(4, 40)[:, row].tolist() == [2.0**-126] * 4
    right = computed(o, lambda a, b: a.float() @ b.float())
    assert is_right(o, right)
    wrong = right.clone()
    wrong[:, row] = torch.nan
    assert not is_right(o, wrong)


def test_a_product_without_groups_has_special_operands() -> None:
    assert make("scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:0x1x2x1:quant.rowwise", "specials").a.numel() == 0
