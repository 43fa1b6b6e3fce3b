"""With ``--gemm-fuzz=SECONDS``: generated problems.  One test for each backend; no other test runs.

A finding is run again by ``test_products``: its rerun line has the command.
"""

from __future__ import annotations

from collections.abc import Callable


def test_fuzz(gemm_fuzz: Callable[[], None]) -> None:
    gemm_fuzz()
