"""MLX's matrix products on the CPU as the backend ``mlx``.

Requirements: mlx[cpu]
Run: PYTHONPATH=examples pytest -p mlx_backend --pyargs pytest_gemm.conformance --gemm-backends=mlx

matmul takes floats and returns their type; of the sum's type nothing is said
(https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.matmul.html), so it is f32, or f64 for f64.
quantized_matmul has codes q, scales s and biases b of groups, and multiplies by s * q + b
(https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).  An i8 weight has the codes
w + 128 and the bias -128 * s, which is exact: the two roundings of the formula are 2^-16 of s * w at most in f32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.numerics.contract import Contract

GROUP = 32


def given(one: Any) -> Any:
    """An array of MLX, which copies."""
    import mlx.core as mx
    import torch

    return mx.array(one.numpy(), dtype=mx.float64) if one.dtype is torch.float64 else mx.array(one.contiguous())


def taken(one: Any) -> Any:
    """A tensor of PyTorch in the memory of MLX's array."""
    import mlx.core as mx
    import torch

    mx.eval(one)
    return torch.from_dlpack(one) if one.size else torch.from_dlpack(mx.zeros(1, one.dtype)).new_empty(one.shape)


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import mlx.core as mx

    return taken(mx.matmul(given(a), given(b), stream=mx.cpu))


class MlxBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def bind(self, p: Any, t: Any) -> Any:
        """Convert the weight, and return quantized_matmul; of other problems the product alone is called."""
        import mlx.core as mx

        if p.op.name != "woq_int8" or p.shape.k % GROUP or p.epilogue or p.flags:
            return None
        codes = mx.array((t["b"].numpy() ^ -128).view("uint32"))
        scale = mx.repeat(mx.reshape(given(t["scale"]), (-1, 1)), p.shape.k // GROUP, 1)
        bias = scale * mx.array(-128, dtype=scale.dtype)
        weight = codes, scale, bias, True, GROUP, 8
        return lambda: taken(mx.quantized_matmul(given(t["a"]), *weight, stream=mx.cpu))

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """A weight is decoded first."""
        error = (2.0**-16 if problem.dtypes.a.name == "f32" else 2.0**-8) if own else 0.0
        return dataclasses.replace(super().contract(problem, own=own), input_error=error)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs: dict[str, Any] = {"distributions": ("mlx", "mlx-cpu"), "imports": ("mlx.core",)}
    registry.add(MlxBackend("mlx", matmul, ("f32", "f64", "bf16", "f16"), **needs))
