"""Products of complex numbers: both parts of an element are real sums of 2 K products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mutants import Mutant, Planted, Tensors, whole
from studies import mutant_study
from torch import Tensor

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.case import Case
from pytest_gemm.numerics import reference
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args
from pytest_gemm.speed.roofline import work

LINE = "complex_mm:f32:nt:17x33x65:b.conj"
LINES = [
    LINE,
    "complex_mm:f64:tt:9x10x11:a.padded+conj",
    "complex_mm:f32:nn:9x10x11:b.padded",
    "complex_addmm:f32:tn:9x10x11:bias-mn+alpha-0.5+beta-2",
    "complex_bmm:f64:nn:3x4x5x6:b.broadcast",
    "complex_bmm:f32:nt:3x4x5x1:a.batch_middle+conj",
]


def numbers(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


@pytest.mark.parametrize("line", LINES)
def test_the_reference_is_the_product_of_complex_numbers(line: str) -> None:
    problem = Problem.parse(line)
    operands = tensors.make(problem, "rand", 0)
    given = {name: x.double() for name, x in args(problem, operands).items()}
    a = numbers(given["a"].mT).mT if problem.layout.a_transposed else numbers(given["a"])
    b = numbers(given["b"].mT).mT if problem.layout.b_transposed else numbers(given["b"])
    c = (a.conj() if problem.has("a.conj") else a) @ (b.conj() if problem.has("b.conj") else b)
    assert c.shape[-2:] == (problem.shape.m, problem.shape.n)
    torch.testing.assert_close(reference.reference(problem, operands).c, torch.view_as_real(c).flatten(-2))


@pytest.mark.parametrize("line", LINES)
def test_aten_is_right(line: str) -> None:
    problem, backend = Problem.parse(line), AtenBackend()
    found = distributions_for(problem)
    assert {"rand", "int-1", "one-hot"} <= set(found)
    outcomes = [one.outcome for one in mutant_study.judge().judge(Case(backend, problem, found, 0, Device.CPU))]
    assert {outcome.status for outcome in outcomes} == {Status.PASSED}, outcomes


def _parts(
    made: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[Tensors, Problem], Tensor]:
    """A product of A, stored by rows, and of the conjugate of B, which is stored by columns, from their parts."""

    def run(t: Tensors, _: Problem) -> Tensor:
        a, b = numbers(t["a"].double()), numbers(t["b"].mT.double()).mT
        return torch.stack(made(a.real, a.imag, b.real, -b.imag), -1).flatten(-2).to(t["a"].dtype)

    return run


def _right(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return p @ r - q @ s, p @ s + q @ r


def _in_three(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Three products in place of four: parts are differences of sums that are larger than they, and rounded."""
    x, y, z = (p @ r).float(), (q @ s).float(), ((p + q).float() @ (r + s).float())
    return (x - y).double(), (z - x - y).double()


MUTANTS = {
    "the conjugate is forgotten": lambda p, q, r, s: _right(p, q, r, -s),
    "A is conjugated instead of B": lambda p, q, r, s: _right(p, -q, r, -s),
    "one of four products is lost": lambda p, q, r, s: (p @ r, p @ s + q @ r),
    "one of four products has the wrong sign": lambda p, q, r, s: (p @ r + q @ s, p @ s + q @ r),
    "the parts are exchanged": lambda p, q, r, s: _right(p, q, r, s)[::-1],
    "the last product of a sum is lost": lambda p, q, r, s: _right(p[:, :-1], q[:, :-1], r[:-1], s[:-1]),
    "the imaginary part of B is rounded to bf16": lambda p, q, r, s: _right(p, q, r, s.bfloat16().double()),
}


def test_a_program_of_the_parts_is_right() -> None:
    backend = Planted("parts", Mutant("right", whole(_parts(_right)), {"": LINE}))
    assert mutant_study.caught(mutant_study.judge(), backend, LINE) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    backend = Planted("mutant", Mutant(name, whole(_parts(MUTANTS[name])), {"": LINE}))
    caught = mutant_study.caught(mutant_study.judge(), backend, LINE)
    assert caught is not None
    assert caught.tier not in {"", "exception"}, caught.outcome.reason


def test_three_products_in_place_of_four_are_caught() -> None:
    backend = Planted("three", Mutant("three", whole(_parts(_in_three)), {"": LINE}))
    caught = mutant_study.caught(mutant_study.judge(), backend, LINE)
    assert caught is not None


@pytest.mark.parametrize("backend", [TritonBackend(), CppBackend()], ids=lambda backend: backend.name)
def test_the_templates_have_none(backend: TritonBackend) -> None:
    refusal = backend.supports(Problem.parse(LINE))
    assert refusal is not None
    assert refusal.reason.code == "complex"


def test_a_complex_product_is_four_real_ones() -> None:
    real, pairs = work(Problem.parse("mm:f32:nn:16x32x64")), work(Problem.parse("complex_mm:f32:nn:16x32x64"))
    assert (pairs.flops, pairs.bytes) == (4 * real.flops, 2 * real.bytes)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("complex_mm:f32:nn:3x4x5:a.offset", "begins at a whole pair"),
        ("complex_mm:f32:nn:3x4x5:m.dynamic", "has fixed sizes"),
        ("complex_addmm:f32:nn:3x4x5:bias-m1", "takes no bias-m1.*write bias, bias-1n or bias-mn"),
        ("complex_mm:bf16:nn:3x4x5", "complex_mm does not take bf16"),
        ("mm:f32:nn:3x4x5:a.conj", "mm does not take a.conj.*complex_mm"),
    ],
)
def test_a_line_that_means_nothing_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ProblemError, match=complaint):
        Problem.parse(line)
