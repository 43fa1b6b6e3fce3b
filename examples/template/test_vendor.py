"""Your model's sizes; the suite of pytest-gemm has sizes of its own."""

import pytest


@pytest.mark.gemm(problems=["linear:bf16:nt:16x4096x1024:bias+gelu", "mm:f16:nn:100x300x700"])
def test_shapes(gemm_case, gemm_check):
    """Each problem with all of its input distributions."""
    gemm_check(gemm_case)
