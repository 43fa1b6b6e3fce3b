"""The backend ``vendor``: replace ``matmul`` by a call of your kernel."""

import torch

from pytest_gemm.api.callable import CallableBackend


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A (M, K) or (B, M, K) times B (K, N) or (B, K, N), in their type, with sums in f32."""
    return torch.einsum("...mk,...kn->...mn", a, b)


def backend() -> CallableBackend:
    """What the entry point in pyproject.toml names."""
    return CallableBackend("vendor", matmul, dtypes=("f32", "bf16", "f16"))
