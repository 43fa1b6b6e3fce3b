"""Data types of PyTorch for those of a problem."""

from __future__ import annotations

import torch

from pytest_gemm.problem.dtypes import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of ``dtype``."""
    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found
