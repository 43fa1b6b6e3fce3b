"""A Helion kernel inside of ``torch.compile``: the backend ``helion``.

Requirements: helion and an NVIDIA GPU
Run: PYTHONPATH=examples pytest -p helion_in_graph --pyargs pytest_gemm.conformance --gemm-backends=helion
and with --gemm-modes=static in a compiled program
"""

import helion
import helion.language as hl
import torch

from pytest_gemm.backends.in_graph import GraphBackend


@helion.kernel(config=helion.Config(block_sizes=[32, 32, 32]), static_shapes=True, dot_precision="ieee")
def example_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tiles of C, each summed in f32."""
    (m, k), n = a.size(), b.size(1)
    c = torch.empty([m, n], dtype=a.dtype, device=a.device)
    for i, j in hl.tile([m, n]):
        sums = hl.zeros([i, j], dtype=torch.float32)
        for p in hl.tile(k):
            sums = torch.addmm(sums, a[i, p], b[p, j])
        c[i, j] = sums
    return c


def matmul(a, b):
    """The product of two matrices; Helion takes no empty ones."""
    return example_mm(a, b) if a.numel() and b.numel() else a.new_zeros(a.shape[0], b.shape[1])


def pytest_gemm_register_backends(registry):
    """Register the backend; Helion calls its kernel ``_helion_example_mm``."""
    dtypes = ("f32", "f16", "bf16")
    registry.add(GraphBackend("helion", matmul, dtypes, False, graph="_helion_example_mm", devices=("cuda",)))
