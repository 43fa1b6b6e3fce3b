"""tinygrad's generated kernels on the CPU (clang) as the backend ``tinygrad``.

Requirements: tinygrad, and clang 15 or later for bf16
Run: PYTHONPATH=examples pytest -p tinygrad_backend --pyargs pytest_gemm.conformance --gemm-backends=tinygrad

matmul multiplies in the type of its operands, and its ``dtype`` is that of the accumulation
(https://docs.tinygrad.org/tensor/ops/#tinygrad.Tensor.matmul).  So operands are converted first, in the generated
kernel: i8 and u8 to int32, bf16 and f16 to f32, which is rounded once at the end.  f32 and f64 keep their type.  NaN
and subnormal numbers are those of C.  Operands are read where they lie, a strided one is copied first.
"""

from __future__ import annotations

import shutil
from typing import Any

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import Availability


def given(one: Any) -> Any:
    """A tensor of tinygrad in the memory of PyTorch's."""
    import torch
    from tinygrad import Tensor, dtypes

    kinds = {torch.bfloat16: dtypes.bfloat16, torch.float16: dtypes.half, torch.float64: dtypes.double}
    kinds |= {torch.int8: dtypes.char, torch.uint8: dtypes.uchar, torch.float32: dtypes.float}
    shape, kind = tuple(one.shape), kinds[one.dtype]
    if not one.numel():  # from_blob takes no empty buffer
        return Tensor.zeros(shape, dtype=kind, device="CPU")
    return Tensor.from_blob(one.data_ptr(), shape, dtype=kind, device="CPU")


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import torch
    from tinygrad import dtypes

    a, b = a.contiguous(), b.contiguous()
    sums = dtypes.float if a.is_floating_point() else dtypes.int
    sums = dtypes.double if a.dtype is torch.float64 else sums
    product = given(a).cast(sums).matmul(given(b).cast(sums))
    if a.dtype is torch.bfloat16:  # numpy has no bf16
        return torch.from_numpy(product.cast(dtypes.bfloat16).bitcast(dtypes.short).numpy()).view(torch.bfloat16)
    return torch.from_numpy((product.cast(dtypes.half) if a.dtype is torch.float16 else product).numpy())


class TinygradBackend(CallableBackend):
    """The backend."""

    devices = ("cpu",)

    def availability(self, device: str) -> Availability:
        """With clang, which no distribution of Python brings."""
        if shutil.which("clang") is None:
            return Availability.lacking("no-clang", "clang is not installed", "apt install clang")
        return super().availability(device)

    def prepare(self, problem: Any, operands: Any, request: Any = None) -> Any:
        """Import the library and have it look for devices, which sets an environment variable."""
        from tinygrad import Device

        Device.DEFAULT  # noqa: B018
        return super().prepare(problem, operands)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    dtypes = ("f32", "f64", "bf16", "f16", "u8", "i8")
    registry.add(TinygradBackend("tinygrad", matmul, dtypes, distributions=("tinygrad",)))
