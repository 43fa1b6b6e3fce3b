"""What a process has done before a case: other programs with the same operands, and the same program at another M."""

from __future__ import annotations

import pytest
import torch
from mutants import Mutant, Planted, Run, Tensors, correct
from studies import mutant_study
from torch import Tensor

from pytest_gemm.conformance import matrix
from pytest_gemm.conformance.test_caches import others_with_the_operands_of
from pytest_gemm.problem.problem import HINTS, Problem


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("bmm:f32:nt:3x33x33x17:b.alias_t", ["bmm:f32:nt:3x33x33x17"]),
        ("mm:bf16:nn:33x64x64:add:r0.alias", ["mm:bf16:nn:33x64x64:add"]),
        ("mm:bf16:nn:33x64x64:add", ["mm:bf16:nn:33x64x64:add:r0.alias"]),
        ("mm:bf16:nn:33x64x65:add", []),  # A has another shape than the result
        ("linear:bf16:nt:17x64x127:bias+relu", ["linear:bf16:nt:17x64x127:bias"]),
    ],
)
def test_programs_with_the_same_operands_differ_in_what_is_an_alias_too(line: str, others: list[str]) -> None:
    assert [other.line for other in others_with_the_operands_of(Problem.parse(line))] == others


def tuned_at(m: int | None) -> dict[int, str]:
    """Where a kernel is caught whose grid and tail of 16 rows are those of one M: this one, or the first that it meets.

    Returns:
        the reason's code of each M of quick that is caught.
    """
    tuned = [m] if m else []

    def plant(problem: Problem) -> Run:
        tuned.append(problem.shape.m)
        tiles, tail = -(-tuned[0] // 16), tuned[0] % 16 or 16

        def run(t: Tensors) -> Tensor:
            made: Tensor = correct(t, problem).clone()
            is_written = torch.arange(len(made)) % 16 < tail
            is_written |= torch.arange(len(made)) < (len(made) - 1) // 16 * 16
            made[~is_written] = torch.nan
            made[tiles * 16 :] = torch.nan
            return made

        return run

    found = {}
    for problem in matrix.family("dynamic", "full", "rows"):
        if problem.op.name == "mm" and problem.dtypes.a.name == "f32":
            backend = Planted("tuned", Mutant("tuned at one M", plant, {"": problem.line}))
            if caught := mutant_study.caught(mutant_study.judge(), backend, problem.line):
                found[problem.shape.m] = caught.outcome.code
    return found


def test_what_is_right_at_the_m_of_the_tuning_alone_is_caught_at_smaller_and_larger_ones() -> None:
    assert tuned_at(HINTS["m"]) == dict.fromkeys((16, 32, 48, 63, 128, 1000), "nan")  # a tail of 13 rows, 4 tiles
    assert tuned_at(None) == dict.fromkeys((2, 3, 7, 16, 32, 48, 63, 128, 1000), "nan")  # of 33: 1 row, 3 tiles
