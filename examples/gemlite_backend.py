"""GemLite's weight-only linears of 8 and 4 bits (Triton) on CUDA as the backend ``gemlite``; judged on an H200.

Requirements: gemlite==0.6.0.post2 (an sdist) tqdm; torch for CUDA with triton>=3.6
Run: PYTHONPATH=examples pytest -p gemlite_backend --pyargs pytest_gemm.conformance --gemm-backends=gemlite

https://github.com/mobiusml/gemlite: ``A16W8`` and ``GemLiteLinearTriton``; the sums are f32 (GEMLITE_ACC_DTYPE).
woq_int8 is scaled behind the sum, in the type of its scales, rounded before and after.  woq_int4 has f32 scales and
zeros; a weight is ``fma(code, scale, zero)``, rounded to A's type: an error of u for each.  Fewer than 64 rows are
sliced along K, up to 16 times, and the slices are added by atomics in the result's type: partial sums in the result's
type, and another order in each run.  K is a multiple of 32.  f32 is left out, since Triton multiplies it as TF32; there
is no fp8 here.  The weight is packed once for a timed call, and anew for each judged run.

Of woq_int8 with slices, f16 and K above 256 are refused: slices of f16 may overflow, 16 of bf16 may lose a 16th of
|A| @ |B|, and 0 is within such a bound.  The kernels of few rows and 4 bits are tuned under ``restore_value``, which
writes A back: they are tuned with a copy.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pytest_gemm.api.callable import plain
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract

NAMES = ("woq_int8", "woq_int4")
WHOLE = 64  # rows from which on K is not sliced


def matmul(a: Any, b: Any) -> Any:
    """No product stands alone: ``supports`` takes the linears only."""
    raise NotImplementedError


def linear(problem: Any, a: Any, b: Any, scale: Any = None, quantisation: Any = None) -> Any:
    """A linear whose weight is packed first."""
    from gemlite.core import TORCH_TO_DTYPE, GemLiteLinearTriton
    from gemlite.helper import A16W8

    n, k = b.shape
    if problem.op.name == "woq_int8":
        packs = A16W8(device=str(a.device), dtype=a.dtype, post_scale=True)
        return functools.partial(packs.from_weights(b.contiguous(), scales=scale.reshape(n, 1)), a)
    scales, zeros = (x.T.float().contiguous() for x in quantisation.unbind(-1))
    kind = TORCH_TO_DTYPE[a.dtype]
    made = GemLiteLinearTriton(
        4, problem.group_size, in_features=k, out_features=n, input_dtype=kind, output_dtype=kind
    )
    # A weight is (code - 8) * scale + zero, and (code - zeros) * scale to the library.
    return functools.partial(made.pack(b.contiguous(), scales, 8.0 - zeros / scales), a)


class GemLiteBackend(CudaCallableBackend):
    """The backend."""

    def bind(self, problem: Any, tensors: Any) -> Any:
        """The linears."""
        return linear(problem, **tensors) if problem.op.name in NAMES else None

    def contract(self, problem: Any, *, own: bool = False) -> Contract:
        """Slices in the result's type; of 8 bits two roundings, of 4 bits one of each weight."""
        found = super().contract(problem, own=own)
        if problem.shape.m < WHOLE:
            found = dataclasses.replace(found, slices=16, partials="out", deterministic=False)
        if problem.op.name == "woq_int8":
            return dataclasses.replace(found, epilogue="eager")
        half = problem.dtypes.out
        return dataclasses.replace(found, input_error=half.unit_roundoff + 2.0**-18, input_bits=half.precision)

    def prepare(self, problem: Any, operands: Any, request: Any = DEFAULT) -> Any:
        """Tune the kernels with a copy of the operands, to which the tuner writes."""
        return super().prepare(problem, operands.clone(), request)

    def supports(self, problem: Any, request: Any = None) -> Unsupported | None:
        """The linears without steps, of whole blocks of 32 along K."""
        if problem.op.name not in NAMES or problem.epilogue or not plain(problem):
            return Unsupported("op", f"the example has {' and '.join(NAMES)} alone", "leave out steps and flags")
        if problem.dtypes.out.name not in self.dtypes:
            return Unsupported("dtype", "Triton multiplies f32 as TF32 here", "write bf16 or f16")
        if problem.shape.k % 32 or problem.shape.is_empty or problem.shape.k == 0:
            return Unsupported("shape", "GemLite takes a K of whole blocks of 32 elements", "give a multiple of 32")
        half, sliced = problem.dtypes.out.name, problem.op.name == "woq_int8" and problem.shape.m < WHOLE
        if sliced and (half == "f16" or problem.shape.k > 256):
            text = f"slices of K={problem.shape.k} are added in {half}, and the bound of that contains 0"
            return Unsupported("half-partials", text, f"write bf16 and K up to 256, or M from {WHOLE} on")
        return super().supports(problem, request or DEFAULT)


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    how: dict[str, Any] = {"distributions": ("gemlite", "triton", "tqdm"), "imports": ("gemlite.helper",)}
    registry.add(GemLiteBackend("gemlite", matmul, ("bf16", "f16"), **how))
