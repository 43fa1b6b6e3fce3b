"""The arithmetic of NVIDIA's tensor cores, as a contract that a backend declares for a product on CUDA."""

from __future__ import annotations

from typing import Final

from pytest_gemm.backend import Contract, Unsupported
from pytest_gemm.problem import Problem

__all__ = ["contract", "not_compact", "unaligned"]

# Compute capability (major) -> alignment bits f and chunk L for f16 and bf16 inputs with a float32 accumulator: the
# terms of a chunk and the accumulator are aligned to f fractional bits and truncated (Fasi et al., 2021, for Volta to
# Ampere; the Hopper row is held against measurements on an H200, see docs/results).  A device that is not in
# the table gets the loosest row.
_HALF: Final[dict[int, tuple[int, int]]] = {8: (24, 8), 9: (25, 16)}
_LOOSEST: Final = (24, 8)


def contract(problem: Problem, *, library: bool = False) -> Contract:
    """The sum of products of ``problem`` on the current CUDA device, with TF32 and reduced-precision reduction off.

    f16 and bf16 are multiplied by tensor cores into float32.  f32 is not given to tensor cores (TF32 is off), and f64
    is added in IEEE arithmetic by them too.  int8 into int32 is exact.

    Args:
        problem: what is computed.
        library: whether the kernel is a library's to choose (cuBLAS), which may also be one without tensor cores (a
            GEMV) or one that slices K: then the larger of both bounds holds.
    """
    name = problem.dtypes.out.name  # an integer side of a mixed product is converted to it first
    slices = 32 if library else 1  # cuBLAS slices K for few, long sums; more slices than this have not been seen
    if name == "i32":
        return Contract("i32")
    if name == "f64":
        return Contract("f64", slices=slices)
    if name == "f32":
        return Contract("f32", slices=slices)
    import torch

    bits, chunk = _HALF.get(torch.cuda.get_device_capability()[0], _LOOSEST)
    return Contract("f32", slices=slices, alignment_bits=bits, chunk=chunk, or_scalar=library)


def unaligned(problem: Problem) -> Unsupported | None:
    """The refusal of operands that TMA cannot load: their rows must begin at multiples of 16 bytes."""
    shape, layout = problem.shape, problem.layout
    m, n, k = shape.m, shape.n, shape.k
    # An integer side of a mixed product is converted before the kernel sees it.
    bits = problem.dtypes.a.bits if problem.op.name == "int_mm" else problem.dtypes.out.bits
    unit = 128 // bits
    rows = {
        "A": (m if layout.a_transposed else k, unit),
        "B": (k if layout.b_transposed else n, unit),
        "the result": (n, 128 // problem.dtypes.out.bits),
    }
    if problem.has("dyn-m") and layout.a_transposed:
        return Unsupported("alignment", "the columns of A are as long as M, which is not known", "use layout nn or nt")
    for name, (length, multiple) in rows.items():
        if length % multiple:
            return Unsupported(
                "alignment", f"rows of {name} are {length} elements long: TMA needs a multiple of {multiple} (16 bytes)"
            )
    for flag in ("off-a", "off-b"):
        if problem.has(flag):
            return Unsupported("alignment", "TMA needs a base address that is a multiple of 16 bytes", f"drop {flag}")
    return None


def not_compact(problem: Problem) -> Unsupported | None:
    """The refusal of operands with gaps or repetitions, which the CuTe DSL's tensors of dynamic shape cannot describe.

    Its ``mark_compact_shape_dynamic`` derives the strides from the shape: a leading dimension that is wider than its
    rows and a batch stride of 0 have none that agree (nvidia-cutlass-dsl 4.6.3 without apache-tvm-ffi).
    """
    for flag in ("pad-lda", "pad-ldb", "bcast-a", "bcast-b"):
        if problem.has(flag):
            return Unsupported("not-compact", "the CuTe DSL describes tensors without gaps only", f"drop {flag}")
    return None
