"""What a program does to A or B before it multiplies them."""

from __future__ import annotations

import pytest
import torch
from oracle import is_right, make

from pytest_gemm.judging import sampled
from pytest_gemm.operands import prologues
from pytest_gemm.problem.problem import Problem


@pytest.mark.parametrize("flag", ["a.relu", "a.floor", "a.tril", "b.relu", "b.floor", "b.halved"])
@pytest.mark.parametrize("distribution", ["int-2", "rand"])
def test_a_prologue_that_is_left_out_or_reads_beyond_the_edge_is_found(flag: str, distribution: str) -> None:
    problem = Problem.parse(f"mm:f32:nn:33x40x65:{flag}")
    given = make(problem.line, distribution)
    a, b = (prologues.after(problem, name, x) for name, x in (("a", given.a), ("b", given.b)))
    assert is_right(given, a @ b)
    assert not is_right(given, given.a @ given.b)
    if flag.endswith("floor"):
        # A tile of 128 products, of which the last ones are zeros that the prologue has made halves of.
        beyond = torch.full((128 - 65,), 0.5)
        assert not is_right(given, a @ b + beyond.sum() * 0.5)


def test_the_grid_moves_with_the_prologue() -> None:
    plain, halved, floor = (make(f"mm:bf16:nn:33x40x65{flag}", "int-2") for flag in ("", ":b.halved", ":a.floor"))
    assert halved.quantum <= plain.quantum / 2
    assert 0 < floor.quantum <= 0.5


def test_both_factors_of_one_sign_leave_no_statistics() -> None:
    for flags, expected in ((":a.relu", True), (":a.relu:b.halved", True), (":a.relu:b.floor", False)):
        assert make(f"mm:f32:nn:33x40x65{flags}", "rand").zero_mean is expected


def test_it_is_judged_on_every_element() -> None:
    assert sampled.applies(Problem.parse("mm:f32:nn:33x40x65"), "sampled")
    assert not sampled.applies(Problem.parse("mm:f32:nn:33x40x65:a.relu"), "sampled")
