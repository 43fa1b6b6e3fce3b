"""JAX's matrix products on the CPU, each with its epilogue as one program of XLA, as the backend ``jax``.

Requirements: jax
Run: PYTHONPATH=examples pytest -p jax_backend --pyargs pytest_gemm.conformance --gemm-backends=jax

``xla_program.py`` has the program.  On a CPU subnormal numbers count as zeros
(https://docs.jax.dev/en/latest/notebooks/Common_Gotchas_in_JAX.html): the contract says so.

Operands are handed over by DLPack, which JAX takes of compact tensors alone: a strided one is copied first.  JAX
computes while Python goes on: a result is waited for.
"""

from __future__ import annotations

from typing import Any

from xla_program import XlaPrepared, product

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.dlpack import hand_over, take_back


def pack(one: Any) -> Any:
    """An array of JAX, which a user makes once of a weight."""
    from jax import numpy as jnp

    return hand_over(one, jnp.from_dlpack, compact=True)


def matmul(a: Any, y: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import jax

    made = product(pack(a), y)
    return take_back(made.astype(y.dtype) if a.is_floating_point() else made, a, wait=jax.block_until_ready)


class JaxBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def prepare(self, problem: Any, operands: Any, request: Any = None) -> Any:
        """Import JAX and start XLA, which sets environment variables and draws random numbers."""
        import jax

        jax.devices("cpu")
        return XlaPrepared(self, problem)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes = ("f32", "bf16", "f16", "i8")
    registry.add(JaxBackend("jax", matmul, dtypes, distributions=("jax", "jaxlib"), flushes=True, pack=pack))
