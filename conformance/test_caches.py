"""Warm caches: an answer for another weight or program must not come from a cache.

A user compiles with every cache of PyTorch on.  The other tests turn those off, because they compile
once for many distributions; here they are on.  To a cache it does not matter which candidate was compiled, so
``--gemm-candidates`` is not asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import unique
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import StepKind

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck


@pytest.mark.gemm(problems=matrix.recompiled, distributions=["rand"])
def test_new_weights_in_one_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = gemm_check.user_caches(gemm_case)
    gemm_check(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)


@pytest.mark.gemm(problems=matrix.recompiled_in_another_process, distributions=["rand"])
def test_new_weights_in_another_process(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = gemm_check.user_caches(gemm_case)
    gemm_check.run_in_worker(dataclasses.replace(user, seed=user.seed + 1))
    gemm_check(user)


# Sums of one sign show how they are held.
@pytest.mark.gemm(problems=matrix.same_operands, distributions=["rand-positive"])
def test_after_others_with_the_same_operands(gemm_case: Case, gemm_check: GemmCheck) -> None:
    user = gemm_check.user_caches(gemm_case)
    gemm_check.run_before(user, others_with_the_operands_of(user.problem))
    gemm_check(user)


def others_with_the_operands_of(problem: Problem) -> tuple[Problem, ...]:
    """Programs that take the operands of this one and compute something else.

    Another accuracy or another output of fp8, a product without its factors or without its last step, an operand that
    is another one as well or is not: a cache whose key covers the operands alone would answer one with the other.
    """
    kept = tuple(step for step in problem.epilogue if step.name not in {"alpha", "beta"})
    asked = [dataclasses.replace(problem, epilogue=kept)]
    if problem.op.name == "scaled_mm":
        flags = tuple({*problem.flags} ^ {"math.fast_accumulate"})
        asked.append(dataclasses.replace(problem, flags=flags))
        out = DTYPES["f16" if problem.dtypes.out.name == "bf16" else "bf16"]
        asked.append(dataclasses.replace(problem, dtypes=dataclasses.replace(problem.dtypes, out=out)))
    elif problem.passes and problem.passes[-1].kind is not StepKind.BINARY:
        asked.append(problem.without(problem.epilogue.index(problem.passes[-1])))
    own = tuple(flag for flag in problem.flags if flag not in {"b.alias", "b.alias_t", "r0.alias"})
    with contextlib.suppress(ProblemError):  # there is no residual that A could be, or A has another shape
        flags = own if own != problem.flags else (*own, "r0.alias")
        asked.append(dataclasses.replace(problem, flags=flags))
    return tuple(other for other in unique(asked) if other != problem)
