"""What is compiled before a problem with the same operands."""

from __future__ import annotations

import pytest

from pytest_gemm.conformance.test_caches import others_with_the_operands_of
from pytest_gemm.problem.problem import Problem


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
