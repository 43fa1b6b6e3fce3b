"""Races: the same call a hundred times, in threads that other work disturbs, has to give the same bits each time.

Where a backend claims it, also of another thread than the one that has compiled, and of two at once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gemm.conformance import matrix

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck

# What is wrong in one call of 50 is seen with a probability of 87%, in one of 20 with 99.4%.
_CALLS: Final = 100


@pytest.mark.gemm(problems=matrix.races, distributions=["rand"])
def test_many_calls_under_load(gemm_case: Case, gemm_check: GemmCheck) -> None:
    gemm_check(dataclasses.replace(gemm_case, calls=_CALLS))


@pytest.mark.gemm(problems=matrix.called_by_threads, distributions=["rand"])
def test_calls_of_other_threads(gemm_case: Case, gemm_check: GemmCheck) -> None:
    case = gemm_check.by_threads(gemm_case)
    for callers in (1, 2):
        gemm_check(dataclasses.replace(case, calls=_CALLS, callers=callers))
