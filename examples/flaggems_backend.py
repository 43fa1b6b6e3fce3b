"""FlagGems' Triton mm, addmm, bmm and baddbmm on CUDA as the backend ``flaggems``; judged on an H200.

Requirements: flag-gems==5.0.2 sqlalchemy pyyaml packaging; torch 2.9 to 2.11 for CUDA with its triton (3.5, 3.6)
Run: PYTHONPATH=examples pytest -p flaggems_backend --pyargs pytest_gemm.conformance --gemm-backends=flaggems

FlagGems takes the places of ATen's operators (https://github.com/flagos-ai/FlagGems), so ATen's own rules hold: beta=0
ignores the addend (https://docs.pytorch.org/docs/stable/generated/torch.addmm.html), and any strides are taken.  All
kernels sum in f32 (``tl.zeros(..., dtype=tl.float32)``).  f32 is multiplied without TF32, but by mm on Hopper, where N
and K are multiples of 4: ``input_precision="tf32x3"`` (runtime/backend/_nvidia/hopper/ops/mm.py).  An operand is then
the sum of two TF32 numbers, off by 2^-20 where both are truncated, and the product of the two smaller ones is left out.
The smaller one has no bits below 2^-136, the smallest TF32 number: of a subnormal operand 10 bits are left.
addmm and baddbmm add alpha and beta in f32 and round once.  There is no fp8 here.

A kernel has up to 162 configurations, which FlagGems compiles and times for each shape.  Here each has one, so that a
case is the same kernel in each run.  With a triton above 3.6 a kernel is launched without its constants from its second
call on (utils/libentry.py).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.numerics.contract import Contract

TF32X3 = 3 * 2.0**-20  # two operands, and the product that is left out
SMALLEST = 2.0**-136  # of TF32: an exponent of f32 and 10 bits


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import flag_gems

    return flag_gems.mm(a, b) if a.dim() == 2 else flag_gems.bmm(a, b)


def tile(config: Any) -> tuple[bool, int]:
    """The size of a configuration's tile; those of 64 rows, as wgmma has them, or more come first."""
    sizes = {name[-2:]: size for name, size in config.kwargs.items() if name.startswith(("BLOCK", "TILE"))}
    return sizes.get("_M", 0) < 64, math.prod(sizes.values())


def untuned(*functions: Any) -> None:
    """Leave each kernel of the functions' modules the configuration of the smallest tile, which fits f32 too."""
    for function in functions:
        for kernel in getattr(function, "__globals__", {}).values():
            tuner = getattr(kernel, "fn", None)
            if configs := getattr(tuner, "configs", ()):
                tuner.configs = [min(configs, key=tile)]


def added(problem: Any, a: Any, b: Any, bias: Any) -> Any:
    """The product and its addend in one kernel."""
    import flag_gems

    own = flag_gems.addmm if problem.op.name == "addmm" else flag_gems.baddbmm
    return lambda: own(bias, a, b, beta=problem.beta, alpha=problem.alpha)


class FlagGemsBackend(CudaCallableBackend):
    """The backend."""

    def bind(self, problem: Any, tensors: Any) -> Any:
        """Addmm and baddbmm, where nothing but strides is beside the addend."""
        own = problem.op.addend and not (problem.chain or problem.autocast or problem.widens)
        shaped = all(flag.endswith((".padded", ".offset", ".argument")) for flag in problem.flags)
        return added(problem, **tensors) if own and shaped else None

    def prepare(self, problem: Any, operands: Any, request: Any = DEFAULT) -> Any:
        """Choose the configurations before a kernel is compiled."""
        import flag_gems

        untuned(flag_gems.mm, flag_gems.bmm, flag_gems.addmm, flag_gems.baddbmm)
        return super().prepare(problem, operands, request)

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """That of the tensor cores, and for f32 in three parts that of TF32."""
        found = super().contract(problem, own=own)
        if problem.input_dtype.name != "f32" or problem.op.batched:
            return found
        return dataclasses.replace(
            found, input_error=TF32X3, input_smallest=SMALLEST, alignment_bits=24, chunk=4, or_scalar=True
        )


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes, needs = ("f32", "bf16", "f16"), ("flag-gems", "sqlalchemy")
    registry.add(FlagGemsBackend("flaggems", matmul, dtypes, distributions=needs, imports=("flag_gems",)))
