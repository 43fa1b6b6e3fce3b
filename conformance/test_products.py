"""Is the product right?  Every problem of the level, each with several distributions on one artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gemm.conformance import matrix

if TYPE_CHECKING:  # collecting thousands of cases must not import torch
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck


@pytest.mark.gemm(problems=matrix.products, any_problem=True, shares={"inductor": matrix.autotuned})
def test_product(gemm_case: Case, gemm_check: GemmCheck) -> None:
    gemm_check(gemm_case)
