"""What a program does to A or B before it multiplies them."""

from __future__ import annotations

import pytest
import torch
from oracle import computed, is_right, make

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.judging import sampled
from pytest_gemm.operands import prologues
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem


@pytest.mark.parametrize(("text", "words"), [
    ("mm:f32:nn:4x4x4:a.relu+floor", "contradict"), ("mm:f32:nn:4x4x4:b.alias:a.relu", "contradict"),
    ("int_mm:i8-i8-i32:nn:4x4x4:a.relu", "int_mm does not take a.relu, or use mm addmm bmm linear"),
    ("mm:f32:nn:4x4x4:b.tril", "unknown flag"),
])  # fmt: skip
def test_a_line_that_contradicts_itself_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProblemError) as failure:
        Problem.parse(text)
    assert all(word in str(failure.value) for word in words.split(", or "))


@pytest.mark.parametrize(
    "line",
    [
        "mm:bf16:nn:33x40x65:a.relu", "mm:f16:tt:33x40x65:a.floor", "bmm:bf16:nn:3x17x24x40:a.tril",
        "linear:f32:nt:2x17x24x40:bias+relu:a.floor:b.halved", "addmm:bf16:nn:17x24x40:bias:b.relu",
        "mm:f32-f32-f16:nn:33x40x65:a.tril:b.floor", "mm:f16:nn:33x40x65:a.floor:b.halved",
        "mm:f32:nn:33x40x65:a.relu:b.relu",
    ],
)  # fmt: skip
def test_eager_is_right_on_every_distribution(line: str) -> None:
    problem = Problem.parse(line)
    for distribution in distributions_for(problem):
        given = make(problem.line, distribution)
        assert is_right(given, computed(given)), distribution


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


@pytest.mark.slow
def test_a_constant_that_is_folded_is_that_of_the_problem() -> None:
    """Two problems of one geometry: the packed copy of relu(B) is made anew."""
    backend = CppBackend(threads=1)
    for seed in (0, 1):
        given = factory.make(Problem.parse("mm:f32:nn:33x40x65:b.relu"), "int-2", seed)
        prepared = backend.prepare(given.problem, given, DEFAULT)
        assert is_right(given, prepared.run(given), prepared.contract)
        assert prepared.proof().executed
