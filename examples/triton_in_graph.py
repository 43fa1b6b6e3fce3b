"""A user's Triton kernel inside of ``torch.compile``: the backend ``triton-in-graph``.

Requirements: triton and an NVIDIA GPU
Run: PYTHONPATH=examples pytest -p triton_in_graph --pyargs pytest_gemm.conformance --gemm-backends=triton-in-graph
and with --gemm-modes=static in a compiled program
"""

import torch
import triton
import triton.language as tl

from pytest_gemm.backends.in_graph import GraphBackend


@triton.jit
def example_mm(a, b, c, m, n, k, am, ak, bk, bn, tile: tl.constexpr):
    """A square tile of C; what lies beyond an edge is masked."""
    i, j = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1) * tile + tl.arange(0, tile)
    sums = tl.full((tile, tile), 0.0, tl.float32)
    for start in range(0, k, tile):
        p = start + tl.arange(0, tile)
        x = tl.load(a + i[:, None] * am + p[None, :] * ak, mask=(i[:, None] < m) & (p[None, :] < k), other=0.0)
        y = tl.load(b + p[:, None] * bk + j[None, :] * bn, mask=(p[:, None] < k) & (j[None, :] < n), other=0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")  # and not TF32
    tl.store(c + i[:, None] * n + j[None, :], sums.to(c.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))


@torch.library.triton_op("example::triton_mm", mutates_args=())
def operator(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An operator into which a compiler can look: the launch becomes part of the program."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    if m and n:
        grid = triton.cdiv(m, 32), triton.cdiv(n, 32)
        torch.library.wrap_triton(example_mm)[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), 32)
    return c


def matmul(a, b):
    """The product of two matrices."""
    return operator(a, b)


def pytest_gemm_register_backends(registry):
    """Register the backend; the name of the kernel is looked for in the compiled program."""
    dtypes = ("f32", "f16", "bf16")
    registry.add(GraphBackend("triton-in-graph", matmul, dtypes, False, graph="example_mm", devices=("cuda",)))
