"""JAX's products on CUDA, each with its epilogue as one program of XLA, as ``jax-gpu``; products judged on an H200.

Requirements: jax[cuda13] (jax>=0.7, jax-cuda13-plugin, jax-cuda13-pjrt); torch for CUDA
Run: PYTHONPATH=examples pytest -p jax_gpu_backend --pyargs pytest_gemm.conformance --gemm-backends=jax-gpu

``xla_program.py`` has the program, in f32 with one rounding at the end, and names the kernels that were fused.  On a
GPU f32 is TF32 by default and f32 with ``HIGHEST`` (https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision),
which the example asks for.  XLA leaves the kernel to cuBLASLt or to Triton, and may slice K.  Two defects of its
cuBLASLt epilogues lie in such programs: https://github.com/openxla/xla/issues/46110 (a factor that is folded over a
bias) and https://github.com/openxla/xla/issues/46897 (a bias along the other axis).  There are no scales here, and so
no fp8.

Operands are shared through DLPack, which JAX takes of compact tensors alone: a strided one is copied first, and so is
one at an address that is no multiple of 16 bytes.  JAX 0.11.2 takes it on a GPU, and the product raises.
"""

from __future__ import annotations

import os
from typing import Any

from xla_program import XlaPrepared, product

from pytest_gemm.api.dlpack import hand_over, take_back
from pytest_gemm.backends.on_cuda import CudaCallableBackend


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import jax
    from jax import numpy as jnp

    x, y = (hand_over(one, jnp.from_dlpack, compact=True, align=16) for one in (a, b))
    made = product(x, y)
    return take_back(made.astype(x.dtype) if a.is_floating_point() else made, a, wait=jax.block_until_ready)


class JaxGpuBackend(CudaCallableBackend):
    """The backend."""

    def prepare(self, problem: Any, operands: Any, request: Any = None) -> Any:
        """Start XLA, which else takes three quarters of the device's memory, and draws random numbers."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        jax.devices("cuda")
        prepared = XlaPrepared(self, problem)
        prepared.run(operands)
        return prepared


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes, needs = ("f32", "bf16", "f16", "i8"), ("jax", "jaxlib", "jax-cuda13-plugin")
    registry.add(JaxGpuBackend("jax-gpu", matmul, dtypes, distributions=needs, library=True))
