"""A GEMM in cuTile Python on CUDA as the backend ``cutile``; judged on an H200.

Requirements: cuda-tile==1.7.0 with tileiras, ptxas and nvvm of CUDA 13.4 or newer (cuda-tile[tileiras]); driver r580
Run: PYTHONPATH=examples pytest -p cutile_backend --pyargs pytest_gemm.conformance --gemm-backends=cutile

https://docs.nvidia.com/cuda/cutile-python/generated/cuda.tile.mma.html: f16 and bf16 are multiplied into f32, f32 into
f32 and, as a type of its own, tf32 into f32; f64 into f64, 8-bit integers into int32.  So f32 is not TF32.  A tile
beyond the edge is filled with zeros (``padding_mode``); ``astype`` rounds to nearest once.  fp8 has no scales here.
The package's page says that tileiras 13.2 has no Hopper; tileiras 13.5 compiles this kernel for sm_90.  A tileiras on
PATH takes its tools from CUDA_HOME: with that of CUDA 13.0 each kernel ends with "Return code 5".  Unset it, or give
the toolkit that tileiras is from; the package nvidia-cuda-tileiras does not read it.
"""

from __future__ import annotations

import functools
from typing import Any

from pytest_gemm.backends.on_cuda import CudaCallableBackend

TILE = 64, 64, 32


@functools.cache
def kernel() -> Any:
    """The kernel: a tile of C a block."""
    from cuda import tile as ct

    def product(a, b, c, tm, tn, tk):
        i, j, zero = ct.bid(0), ct.bid(1), ct.PaddingMode.ZERO
        kind = ct.int32 if c.dtype == ct.int32 else ct.float64 if c.dtype == ct.float64 else ct.float32
        sums = ct.zeros((tm, tn), dtype=kind)
        for k in range(ct.num_tiles(a, axis=1, shape=(tm, tk))):
            x = ct.load(a, index=(i, k), shape=(tm, tk), padding_mode=zero)
            y = ct.load(b, index=(k, j), shape=(tk, tn), padding_mode=zero)
            sums = ct.mma(x, y, sums)
        ct.store(c, index=(i, j), tile=ct.astype(sums, c.dtype))

    product.__annotations__ = dict.fromkeys(("tm", "tn", "tk"), ct.Constant[int])
    return ct.kernel(product)


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices; strides are the kernel's arguments."""
    import torch
    from cuda import tile as ct

    (m, _), n = a.shape, b.shape[1]
    c = torch.zeros(m, n, dtype=a.dtype if a.is_floating_point() else torch.int32, device=a.device)
    if c.numel() and a.numel():
        grid = (-(-m // TILE[0]), -(-n // TILE[1]), 1)
        ct.launch(torch.cuda.current_stream(), grid, kernel(), (a, b, c, *TILE))
    return c


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs, dtypes = ("cuda-tile",), ("f64", "f32", "bf16", "f16", "i8")
    how: dict[str, Any] = {"distributions": needs, "imports": ("cuda.tile",), "batched": False}
    registry.add(CudaCallableBackend("cutile", matmul, dtypes, **how))
