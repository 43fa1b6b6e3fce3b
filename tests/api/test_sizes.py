"""A registered function that takes some sizes alone."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.problem.problem import Problem


def of_16(a: Any, b: Any) -> Any:
    if any(size % 16 for size in (a.shape[-2], *b.shape[-2:])):
        raise RuntimeError("would write beside the result")
    return a @ b


def test_it_is_called_for_no_others_and_the_run_asks_for_some_that_it_takes() -> None:
    backend = CallableBackend("mine", of_16, dtypes=["f32"], multiple_of=(16, 16, 16))
    refusal = backend.supports(Problem.parse("mm:f32:nn:16x17x32"))
    assert str(refusal) == "mine takes multiples of 16 x 16 x 16 (M x N x K)"
    lines = [line for part in backend.promised_parts() for line in part.lines]
    assert lines
    assert all(backend.supports(Problem.parse(line)) is None for line in lines)
    halves = Problem.parse("mm_plus_mm:f32:nn:16x16x16")  # whose products have K = 8
    (found,) = Judge().outcomes(Case(backend, halves, ("rand",), 0, Device.CPU))
    assert (found.status.value, found.reason and found.reason.text[:23]) == ("unsupported", "mine takes multiples of")
    square = CallableBackend("mine", of_16, dtypes=["f32"], square=True, multiple_of=(16, 24, 8))
    assert square.promised_parts()[0].lines == ("mm:f32:nn:144x144x144", "bmm:f32:nn:3x48x48x48")
    assert "square" in str(square.supports(Problem.parse("mm:f32:nn:48x48x96")))
    with pytest.raises(ValueError, match=r"multiple_of is 0; give a number above 0, or three of M, N and K"):
        CallableBackend("mine", of_16, multiple_of=0)
