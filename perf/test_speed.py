"""How fast is the product?  Every shape of the level, against the baseline of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # collecting must not import torch
    from pytest_gemm.judging.case import Case
    from pytest_gemm.speed.check import SpeedCheck


@pytest.mark.gemm(shapes=Path(__file__).with_name("shapes.toml"), any_problem=True)
def test_speed(gemm_case: Case, gemm_speed: SpeedCheck) -> None:
    gemm_speed(gemm_case)
