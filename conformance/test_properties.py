"""Do a kernel's results agree with one another?  Properties that need no reference, see ``judging.properties``.

At ``quick`` these are problems that other tests compile as well.  ``--gemm-fuzz`` checks the properties of every
problem that it generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gemm.conformance import matrix

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck


@pytest.mark.gemm(problems=matrix.related, any_problem=True)
def test_properties(gemm_case: Case, gemm_check: GemmCheck) -> None:
    gemm_check.properties(gemm_case)
