"""Warm caches: a compiler that remembers must not answer with what it remembers of another weight or program.

A user compiles with every cache of PyTorch on.  The other tests turn those off, because they compile
once for many distributions; here they are on.  To a cache it does not matter which candidate was compiled, so
``--gemm-choices`` is not asked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.conformance import matrix

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck


@pytest.mark.gemm(problems=matrix.recompiled, distributions=["rand"])
def test_new_weights_in_one_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = dataclasses.replace(gemm_case, backend=gemm_check.user_caches(gemm_case), choices="")
    gemm_check(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)


@pytest.mark.gemm(problems=matrix.recompiled_elsewhere, distributions=["rand"])
def test_new_weights_in_another_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = dataclasses.replace(gemm_case, backend=gemm_check.user_caches(gemm_case), choices="")
    gemm_check.run_elsewhere(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)


@pytest.mark.gemm(problems=matrix.alike, distributions=["rand-positive"])  # sums of one sign show how they are held
def test_after_others_with_the_same_operands(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = dataclasses.replace(gemm_case, backend=gemm_check.user_caches(gemm_case), choices="")
    gemm_check.run_before(user, matrix.others_with_the_operands_of(user.problem))
    gemm_check(user)
