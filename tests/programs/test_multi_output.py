"""Programs of two results (``program.multi_output``), judged from end to end: each of them counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

LINE = "mm:f32:nn:20x40x100:relu+gelu:program.multi_output"
Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Spoiled:
    """Eager PyTorch, with something done to its results."""

    spoil: Callable[[Results], Any]
    name: str = "spoiled"

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        return None

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Spoiled:
        self.contract = Contract(epilogue="eager")
        self.problem = problem
        return self

    def run(self, operands: Operands) -> Any:
        return self.spoil(program.build(self.problem)(**program.args(self.problem, operands)))

    def proof(self) -> Proof:
        return Proof(executed=("planted",), provable=False)


def judged(spoil: Callable[[Results], Any], line: str = LINE) -> list[Outcome]:
    return Judge().outcomes(Case(Spoiled(spoil), Problem.parse(line), ("int-2", "rand"), 0, Device.CPU))


def changed(place: int) -> Callable[[Results], Results]:
    def spoil(results: Results) -> Results:
        results[place][3, 7] += 1.0
        return results

    return spoil


@pytest.mark.parametrize("line", [
    LINE, "linear:bf16:nt:2x17x33x64:bias+silu:program.multi_output",
    "addmm:f16:nn:33x64x64:bias+add+relu:r0.alias:program.multi_output",
    "mm:f16:nn:20x40x100:cast-f32+mul:program.multi_output",
    "int_mm:i8-i8-i32:nt:32x64x64:cast-f32+add:program.multi_output",
    "bmm:f32-f32-bf16:nn:3x20x40x100:relu:program.multi_output",
])  # fmt: skip
def test_two_right_results_pass(line: str) -> None:
    outcomes = judged(lambda results: results, line)
    assert [o.status for o in outcomes] == [Status.PASSED] * 2, outcomes
    assert all(o.eager == "the intermediate value bit-equal; the result bit-equal" for o in outcomes)


@pytest.mark.parametrize(("place", "name"), [(0, "the intermediate value"), (1, "the result")])
def test_the_wrong_one_is_named(place: int, name: str) -> None:
    for outcome in judged(changed(place))[:2]:
        assert outcome.status is Status.INCORRECT
        assert outcome.reason is not None
        assert outcome.reason.text.startswith(f"{name}: 1 of 800 elements")
        assert "at (3, 7)" in outcome.details


@pytest.mark.parametrize("spoil", [lambda results: results[1], lambda results: (*results, results[0])])
def test_another_number_of_results_is_no_answer(spoil: Callable[[Results], Any]) -> None:
    assert {o.status for o in judged(spoil)} == {Status.CRASHED}


def test_results_in_the_wrong_order_are_wrong() -> None:
    assert Status.INCORRECT in {o.status for o in judged(lambda results: (results[1], results[0]))}


@pytest.mark.parametrize("place", [0, 1])
def test_each_result_is_the_same_the_second_time(place: int) -> None:
    """In its last bit only, within the bound: one run alone would show nothing."""
    calls = iter(range(100))

    def spoil(results: Results) -> Results:
        x = results[place]
        results[place].copy_(torch.where(x > 0, torch.nextafter(x, x + 1), x) if next(calls) == 2 else x)
        return results

    outcomes = judged(spoil)
    assert outcomes[-1].code == "not-deterministic"
    assert [o.status for o in outcomes[:2]] == [Status.PASSED] * 2
