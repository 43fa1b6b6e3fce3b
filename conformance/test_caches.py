"""New weights through warm caches: a compiler that remembers must not answer with the old ones.

A user compiles with every cache of PyTorch on.  The other tests turn those off, because they compile
once for many fillings; here they are on, and the same problem is compiled twice with different weights.
To a cache it does not matter which candidate was compiled, so ``--gemm-choices`` is not asked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.conformance import matrix

if TYPE_CHECKING:
    from pytest_gemm.check import GemmCheck
    from pytest_gemm.judge import Case


@pytest.mark.gemm(problems=matrix.recompiled, fillings=["rand"])
def test_new_weights_in_one_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = dataclasses.replace(gemm_case, backend=gemm_check.user_caches(gemm_case), choices="")
    gemm_check(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)


@pytest.mark.gemm(problems=matrix.recompiled_elsewhere, fillings=["rand"])
def test_new_weights_in_another_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = dataclasses.replace(gemm_case, backend=gemm_check.user_caches(gemm_case), choices="")
    gemm_check.run_elsewhere(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)
