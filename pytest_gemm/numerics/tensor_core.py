"""The arithmetic of NVIDIA's tensor cores, as a contract that a backend declares for a product on CUDA."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.problem import Problem

# Compute capability (major) -> alignment bits f and chunk L for f16 and bf16 inputs with a float32 accumulator: the
# terms of a chunk and the accumulator are aligned to f fractional bits and truncated (Fasi et al., 2021, for Volta to
# Ampere; the Hopper row is held against measurements on an H200, see docs/results).  A device that is not in
# the table gets the loosest row.
_HALF: Final[dict[int, tuple[int, int]]] = {8: (24, 8), 9: (25, 16)}
_LOOSEST: Final = (24, 8)
# The same for TF32, whose significands are as long as those of f16.
_TF32: Final[dict[int, tuple[int, int]]] = {8: (24, 4), 9: (25, 8)}
_LOOSEST_TF32: Final = (24, 4)
# The same for fp8: Ada and Hopper keep 13 fractional bits of the products, and of the sum between two instructions (the
# accumulation of "about 14 bits" that DeepSeek-V3's report describes, section 3.5.2); 32 products an instruction.
_FP8: Final = (13, 32)
# Without fast accumulation CUTLASS adds the sum of four such instructions to one in f32 (mma_promotion_interval), and
# cuBLAS is taken to do the same.
_PROMOTION: Final = 128
# The longest run of a template: the largest block of K in Inductor's configurations.
_LONGEST: Final = 256
# cuBLAS slices K for few, long sums: cuBLASLt 13.1 on an H200 took 128 slices for 2 x 17 x 16384 in f16 and stored them
# in f16.  Not seen: more slices than these, or shorter ones than an instruction's K.
_SLICES: Final = 128
_SLICE: Final = 16


def contract(problem: Problem, *, library: bool = False, promote_every: int = _PROMOTION) -> Contract:
    """The sum of products of ``problem`` on the current CUDA device, under ``precision.settings(problem)``.

    f16 and bf16 are multiplied by tensor cores into float32; with ``math.half_partials`` a library may store its
    partial sums in them.  f32 goes to tensor cores with ``math.tf32`` only, and need not; f64 is added in IEEE
    arithmetic by them too.  int8 into int32 is exact.  fp8 is added in few bits: those of the tensor core with
    ``math.fast_accumulate``, and without it only up to the next promotion.  A library promotes fp8 with scales of
    blocks at each block.

    Args:
        problem: what is computed.
        library: whether the kernel is a library's to choose (cuBLAS), which may also be one without tensor cores (a
            GEMV) or one that slices K: then the larger of both bounds holds.
        promote_every: of fp8 without ``math.fast_accumulate``: how many products a tensor core adds before its sum
            goes to f32.
    """
    from pytest_gemm.numerics.precision import TF32_BITS, TF32_ERROR, as_allowed

    name = problem.dtypes.out.name  # an integer side of a mixed product is converted to it first
    slices = max(1, min(_SLICES, -(-problem.shape.k // _SLICE))) if library else 1
    if problem.scale_blocks and not library:
        # Inductor's template multiplies the elements by their scales in f32, and these products as TF32.
        bits, chunk = _LOOSEST_TF32
        found = Contract("f32", alignment_bits=bits, chunk=chunk, or_scalar=True)
        return dataclasses.replace(found, input_error=TF32_ERROR, input_bits=TF32_BITS)
    if problem.op.rounds_once:
        # Of block-scaled formats nothing is known of Blackwell's sums but that they stay in the tensor core.
        bits, chunk = _FP8
        every = 0 if problem.has("math.fast_accumulate") or problem.micro_block else promote_every
        return Contract("f32", slices=slices, alignment_bits=bits, chunk=chunk, promote_every=every)
    if name == "i32":
        return Contract("i32")
    if name == "f64":
        return Contract("f64", slices=slices)
    tf32 = problem.has("math.tf32")
    if problem.input_dtype.name == "f32" and not tf32:
        return Contract("f32", slices=slices)
    import torch

    rows, loosest = (_TF32, _LOOSEST_TF32) if tf32 else (_HALF, _LOOSEST)
    # ROCm numbers AMD's GPUs as if they were NVIDIA's: none of them is in the table.
    major = torch.cuda.get_device_capability()[0] if torch.version.hip is None else 0
    bits, chunk = rows.get(major, loosest)
    partials: Literal["f32", "out"] = "out" if library and problem.has("math.half_partials") else "f32"
    found = Contract("f32", slices=slices, partials=partials, alignment_bits=bits, chunk=chunk)
    return as_allowed(dataclasses.replace(found, or_scalar=library or tf32), problem)


def widest(problem: Problem, device: str) -> tuple[Contract, ...]:
    """Contracts that bound what a kernel may state of which none is registered.

    Sums in f32, in any order and slices, rounded anywhere; on CUDA also those of tensor cores.  Inputs lose what the
    problem allows: TF32 by its flag, conversions to the half type under autocast, to bf16 of a weight that is decoded.
    """
    from pytest_gemm.numerics.precision import as_allowed

    out, bf16 = problem.dtypes.out, DTYPES["bf16"]
    sums = [as_allowed(Contract("f32", slices=max(1, problem.terms)), problem)]
    if device == "cuda":
        sums += [contract(problem, library=library, promote_every=_LONGEST) for library in (True, False)]
    half = out if problem.autocast else bf16 if problem.group_size else None
    bounds = []
    for stated in sums:
        slices = stated.slices if stated.narrow_partials else max(stated.slices, problem.terms)
        bound = dataclasses.replace(stated, slices=slices, epilogue="either", deterministic=False, or_scalar=True)
        bounds.append(bound if half is None else bound.unconverted(half))
    return tuple(bounds)
