"""Backends with planted bugs, and correct ones beside them: what the harness must catch, and must not.

Every one can be registered through the public hook, as a stranger's would be.  A mutant names the problems in which its
bug can show, and the ones among them where it cannot: there it is an equivalent mutant, and the reason stands
beside it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fnmatch
import functools
import gc
import hashlib
import math
import os
import platform
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.registry import Registry
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Matmul = Callable[[Tensor, Tensor], Any]
# A problem's program over the tensors of ``program.args``.
Run = Callable[[Tensors], Any]
# Makes one for a problem; what it remembers from run to run lives as long as one prepared problem.
Plant = Callable[[Problem], Run]

# Sizes of a tile, of a block of K and of a vector in the bugs that speak of one.  No K of the study is a multiple of
# the block, so that each has a tail.
TILE = 16
BLOCK = 48
VECTOR = 16
SLICES = 4

# Random numbers of the kernels' own: those of the process are not theirs to use up.
DICE = torch.Generator()
DICE.seed()

# -- the problems ------------------------------------------------------------------------------------

KS = (256, 1000, 8200)
FLOATS = ("f32", "bf16", "f16")

# The plain product in each dtype.  20 x 40 has tails in both directions.
PLAIN = {
    "f32": "mm:f32:nn:20x40x{k}",
    "bf16": "mm:bf16:nn:20x40x{k}",
    "f16": "mm:f16:nn:20x40x{k}",
    "i8": "int_mm:i8-i8-i32:nn:20x40x{k}",
    "fp8": "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:20x40x{k}:quant.rowwise",
}
ALL = tuple(PLAIN)


def plain(*dtypes: str) -> dict[str, str]:
    return {dtype: PLAIN[dtype] for dtype in dtypes or ALL}


def lines(template: str, *dtypes: str) -> dict[str, str]:
    """One template for float dtypes; ``{d}`` is the dtype."""
    return {dtype: template.replace("{d}", dtype) for dtype in dtypes or FLOATS}


def only(problems: dict[str, str], *dtypes: str) -> dict[str, str]:
    return {dtype: problems[dtype] for dtype in dtypes}


# With the layout in which B is stored as N x K, and with gaps and offsets.
TRANSPOSED = {dtype: line.replace(":nn:", ":nt:") for dtype, line in PLAIN.items()}
PADDED_A = {dtype: f"{line}:a.padded" for dtype, line in PLAIN.items()}
PADDED_B = {dtype: f"{line}:b.padded" for dtype, line in TRANSPOSED.items()}
OFFSET_A = {dtype: f"{line}:a.offset" for dtype, line in PLAIN.items()}
COLUMN_MAJOR_A = {dtype: line.replace(":nn:", ":tn:") for dtype, line in PLAIN.items() if dtype != "fp8"}
SQUARE = {dtype: line.replace("20x40", "40x40") for dtype, line in PLAIN.items()}
BIAS = lines("linear:{d}:nt:20x40x{k}:bias")
BIAS_SQUARE = lines("linear:{d}:nt:40x40x{k}:bias")
BIAS_RELU = lines("linear:{d}:nt:20x40x{k}:bias+relu")
RELU = lines("mm:{d}:nn:20x40x{k}:relu")
GELU = lines("linear:{d}:nt:20x40x{k}:bias+gelu")
RESIDUAL = lines("mm:{d}:nn:20x40x{k}:add+relu")
ADDMM = lines("addmm:{d}:nn:20x40x{k}:bias+alpha-0.5+beta-2")
BETA_ZERO = lines("addmm:{d}:nn:20x40x{k}:bias+beta-0")
BATCHED = lines("bmm:{d}:nn:3x20x40x{k}")
GROUPED = lines("grouped_mm:{d}:nt:4x20x40x{k}")
WEIGHT_ONLY = lines("woq_int8:{d}-i8-{d}:nt:20x40x{k}")
MIXED = lines("mixed_mm:{d}-i8-{d}:nn:20x40x{k}")
AUTOCAST = {"bf16": "mm:f32-f32-bf16:nn:20x40x{k}", "f16": "mm:f32-f32-f16:nn:20x40x{k}"}
F64 = {"f64": "mm:f64:nn:20x40x{k}"}
FP8 = plain("fp8")
FP8_SQUARE = {"fp8": SQUARE["fp8"]}
FP8_PAIR = {"fp8": "scaled_mm:f8e4m3fn-f8e5m2-bf16:nt:20x40x{k}:quant.rowwise"}
FP8_BLOCKS = {
    "fp8": PLAIN["fp8"].replace("rowwise", "blocks-1_1"),
    "fp8 squares": "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:150x300x520:quant.blocks",
}
FP8_TENSORWISE = {"fp8": PLAIN["fp8"].replace("rowwise", "tensorwise")}
OFFSET_B = lines("bmm:{d}:nn:3x20x40x{k}:b.offset")
# What the program takes out of a larger tensor: a row, a column or a matrix off its beginning; every second element.
CUT_A = lines("mm:{d}:nn:20x40x{k}:a.sliced") | {"fp8": f"{PLAIN['fp8']}:a.sliced"}
CUT_B = lines("bmm:{d}:nn:3x20x40x{k}:b.tail") | {"i8": f"{TRANSPOSED['i8']}:b.sliced"}
GIVEN_OUT = lines("mm:{d}:nn:20x40x{k}:out.given+padded") | {"i8": f"{PLAIN['i8']}:out.copied+padded"}
WIDENED = {d: f"mm:{d}-{d}-f32:nn:20x40x{{k}}" for d in ("bf16", "f16")}
UNSIGNED = {"u8": "int_mm:u8-i8-i32:nt:20x40x{k}"}
EXPANDED = lines("addmm:{d}:nn:20x40x{k}:bias-xn+beta-2")
WITHOUT_DIMENSIONS = lines("addmm:{d}:nn:20x40x{k}:bias-0+alpha-0.5")
STRIDED = lines("addmm:{d}:tn:20x40x{k}:bias:a.strided")
MULTI_OUTPUT = lines("mm:{d}:nn:20x40x{k}:relu:program.multi_output")
AGAIN = lines("mm:{d}:nn:20x64x64:program.chained", "f32", "bf16")
GATED = lines("linears:{d}:nt:2x20x40x{k}:bias+gated-silu", "f32", "bf16")
INT4 = {
    "bf16": "woq_int4:bf16-i4-bf16:nt:20x64x256:quant.group-32",
    "f32": "woq_int4:f32-i4-f32:nt:20x64x1024:quant.group-64",
}
CODES = {
    "u8": "qlinear:u8-i8-u8:nt:20x40x250:bias:quant.static+requant-0.01_100:a.7bit",
    "i8": "qlinear:u8-i8-i8:nt:31x64x144:bias+add:quant.static+requant-0.5_-5",
}
CODES_OF_FLOAT = {"u8": "qlinear:u8-i8-f32:nt:20x40x250:bias:quant.static:a.7bit"}

# Bugs for which the size does not matter.
SMALL = {dtype: line.format(k=256) for dtype, line in PLAIN.items() if dtype in {"f32", "bf16"}}
SMALL_F32 = only(SMALL, "f32")
# Results of more than a MiB.
MIB = {"f32": "mm:f32:nn:512x520x40", "bf16": "mm:bf16:nn:1032x520x40"}
SMALL_BIAS = {"f32": BIAS["f32"].format(k=256)}

# Bugs that begin at a size: problems of conformance/cases, of level quick unless a comment says otherwise.
TALL = {
    "f32": "mm:f32:nn:65601x5x3",
    "bf16": "linear:bf16:nt:65601x4x8:bias",
    "f16": "addmm:f16:nn:65601x3x5:bias-mn:b.argument",
}
TALLEST = {"f32": "mm:f32:nn:2200001x4x3"}  # full
WIDE = {"f32": "mm:f32:nn:3x65601x5:b.argument"}
LONG = {
    "f32": "mm:f32:nn:5x3x65601",
    "bf16": "linear:bf16:nt:97x193x65601:bias",
    "f16": "addmm:f16:nn:5x2x65601:bias+alpha-0.5+beta-2",
}
NARROW = {"f32": LONG["f32"], "f16": "linear:f16:nt:33x1x4099"}
LONG_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x65608"}
LONGER_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x270344"}  # full
LONGEST_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x540680"}  # full
MANY = {"f32": "baddbmm:f32:nn:65601x2x3x5:bias-mn", "bf16": "bmm:bf16:nt:131x9x8x16"}
DEEP = {"f32": "linear:f32:nt:6x17x65x96:bias+relu+add:a.4d", "f16": "linear:f16:nt:66x3x17x33:bias:a.4d"}
# Judged by sample, and in no level: each element is looked at, but only some lines are compared with the reference.
LARGE = {"f32": "mm:f32:nn:4099x2053x1025"}

# -- arithmetic --------------------------------------------------------------------------------------


def working(a: Tensor) -> torch.dtype:
    """What sums are kept in: float64 holds those of integers, and of float64."""
    return torch.float32 if a.dtype.is_floating_point and a.dtype != torch.float64 else torch.float64


def exact(a: Tensor, b: Tensor) -> Tensor:
    """The product in float32, or wider, before any store."""
    return torch.matmul(a.to(working(a)), b.to(working(a)))


def store(c: Tensor, a: Tensor) -> Tensor:
    """In the dtype of the product: int32 of int8, float32 of fp8, whose program goes on with the scales."""
    if not a.dtype.is_floating_point:
        return c.to(torch.int32)
    return c if a.element_size() == 1 else c.to(a.dtype)


def right(a: Tensor, b: Tensor) -> Tensor:
    return store(exact(a, b), a)


def pieces(a: Tensor, b: Tensor, count: int = SLICES) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` slices of K."""
    yield from zip(a.tensor_split(count, -1), b.tensor_split(count, -2), strict=True)


def blocks(a: Tensor, b: Tensor, size: int = BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of K."""
    for k in range(0, a.shape[-1], size):
        yield a[..., k : k + size], b[..., k : k + size, :]


def empty_sum(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=dtype or working(a))


# -- how a bug becomes a backend ---------------------------------------------------------------------


def product(matmul: Matmul) -> Plant:
    """The bug is in the product, everything around it is eager PyTorch."""

    def plant(problem: Problem) -> Run:
        program = build(problem, matmul)
        return lambda tensors: program(**tensors)

    return plant


def summed(wrong: Callable[[Tensor], Tensor]) -> Plant:
    """The bug is in what becomes of the finished sums before they are stored."""
    return product(lambda a, b: store(wrong(exact(a, b)), a))


def inputs(wrong: Callable[[Tensor], Tensor]) -> Plant:
    """The bug is in what the product reads of both of its inputs."""
    return product(lambda a, b: store(exact(wrong(a), wrong(b)), a))


def corrupted(spoil: Callable[[Tensors, Problem], None], matmul: Matmul = right) -> Plant:
    """The product is right, of corrupted operands."""

    def plant(problem: Problem) -> Run:
        program = build(problem, matmul)

        def run(tensors: Tensors) -> Any:
            spoil(tensors, problem)
            return program(**tensors)

        return run

    return plant


def afterwards(wrong: Callable[[Tensor], Any]) -> Plant:
    """The bug is in what is handed out."""

    def plant(problem: Problem) -> Run:
        program = build(problem, right)
        return lambda tensors: wrong(program(**tensors))

    return plant


def stored(wrong: Callable[[Tensor, torch.dtype], Tensor]) -> Plant:
    """The bug is in the one rounding from float32 to the dtype of the result."""

    def plant(problem: Problem) -> Run:
        out = torch_dtype(problem.dtypes.out)
        if problem.op.name == "scaled_mm":
            return lambda t: wrong(exact(t["a"], t["b"]) * t["scale_a"] * t["scale_b"], out)
        return product(lambda a, b: wrong(exact(a, b), out))(problem)

    return plant


def whole(run: Callable[[Tensors, Problem], Any]) -> Plant:
    """The bug is in the program around the product."""
    return lambda problem: lambda tensors: run(tensors, problem)


# -- bugs of the loop over K -------------------------------------------------------------------------


def k_tail_dropped(a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[-1] // BLOCK * BLOCK
    return right(a[..., :k], b[..., :k, :])


def k_off_by_one(a: Tensor, b: Tensor) -> Tensor:
    return right(a[..., :-1], b[..., :-1, :])


def k_first_missing(a: Tensor, b: Tensor) -> Tensor:
    return right(a[..., 1:], b[..., 1:, :])


def k_doubled(a: Tensor, b: Tensor) -> Tensor:
    middle = a.shape[-1] // 2
    return store(exact(a, b) + exact(a[..., middle : middle + 1], b[..., middle : middle + 1, :]), a)


def tail_block_moved_back(a: Tensor, b: Tensor) -> Tensor:
    """The last block begins at K - BLOCK, so that it is full, and its overlap is added twice."""
    k = a.shape[-1]
    full = k // BLOCK * BLOCK
    total = exact(a[..., :full], b[..., :full, :]) + exact(a[..., k - BLOCK :], b[..., k - BLOCK :, :])
    return store(total, a)


def pipeline_stage_late(a: Tensor, b: Tensor) -> Tensor:
    """The second block of B still is the first one's when it is multiplied."""
    late = torch.cat([b[..., :BLOCK, :], b[..., :BLOCK, :], b[..., 2 * BLOCK :, :]], -2)
    return right(a, late)


def packed_pairs_swapped(a: Tensor, b: Tensor) -> Tensor:
    """B is packed in pairs of k, and the last pair is packed the wrong way round."""
    order = torch.arange(b.shape[-2])
    order[-2:] = order[-2:].flip(0)
    return right(a, b[..., order, :])


def split_k_slice_dropped(a: Tensor, b: Tensor) -> Tensor:
    return store(sum((exact(x, y) for i, (x, y) in enumerate(pieces(a, b)) if i != 2), empty_sum(a, b)), a)


def split_k_slice_doubled(a: Tensor, b: Tensor) -> Tensor:
    total = sum((exact(x, y) for x, y in pieces(a, b)), empty_sum(a, b))
    x, y = list(pieces(a, b))[1]
    return store(total + exact(x, y), a)


def split_k_partials_in(dtype: torch.dtype) -> Plant:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return store(sum((exact(x, y).to(dtype).to(working(a)) for x, y in pieces(a, b)), empty_sum(a, b)), a)

    return product(matmul)


def accumulated_in(dtype: torch.dtype) -> Plant:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        total = empty_sum(a, b, dtype)
        for x, y in blocks(a, b, 16):
            total = (total.float() + exact(x, y).float()).to(dtype)
        return store(total.to(working(a)), a)

    return product(matmul)


def f16_between(a: Tensor, b: Tensor) -> Tensor:
    total = empty_sum(a, b)
    for x, y in blocks(a, b, 16):
        total = total + exact(x, y).to(torch.float16).to(working(a))
    return store(total, a)


def products_in(dtype: torch.dtype) -> Plant:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        total = empty_sum(a, b)
        for x, y in blocks(a.to(working(a)), b.to(working(a)), 256):
            total = total + (x[..., :, :, None] * y[..., None, :, :]).to(dtype).to(working(a)).sum(-2)
        return store(total, a)

    return product(matmul)


def zeros_skipped(a: Tensor, b: Tensor) -> Tensor:
    """A product with 0 counts as 0, whatever the other factor is: 0 * NaN is lost."""
    x, y = a.to(working(a)), b.to(working(a))
    special = (~x.isfinite()).any(-2) | (~y.isfinite()).any(-1)
    total = exact(x[..., ~special], y[..., ~special, :])
    for k in special.nonzero().flatten().tolist():
        column, row = x[..., :, k, None], y[..., None, k, :]
        total = total + torch.where((column == 0) | (row == 0), 0.0, column * row)
    return store(total, a)


def one_side_masked(a: Tensor, b: Tensor, *, read_a: bool, read_b: bool, rounded_up: int = BLOCK) -> Tensor:
    """K is rounded up to whole blocks; where an operand is not masked, what lies behind its rows is read."""
    k = a.shape[-1]
    more = -(-k // rounded_up) * rounded_up
    weight = b.mT  # stored as N x K

    def behind(x: Tensor) -> Tensor:
        return x.as_strided((x.shape[-2], more), (x.stride(-2), 1), x.storage_offset())

    x = behind(a) if read_a else F.pad(a.to(working(a)), (0, more - k))
    y = behind(weight) if read_b else F.pad(weight.to(working(a)), (0, more - k))
    return store(torch.matmul(x.to(working(a)), y.to(working(a)).mT), a)


# -- bugs of precision -------------------------------------------------------------------------------


def cut_to_tf32(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded_to_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def tail_in_tf32(a: Tensor, b: Tensor) -> Tensor:
    columns = b.shape[-1] // TILE * TILE
    return torch.cat([exact(a, b[..., :columns]), exact(cut_to_tf32(a), cut_to_tf32(b[..., columns:]))], -1)


def in_parts(round_off: Callable[[Tensor], Tensor], terms: tuple[tuple[int, int], ...]) -> Plant:
    """An f32 product as a sum of products of the operands' leading, second (and third) parts."""

    def parts(x: Tensor) -> list[Tensor]:
        first = round_off(x)
        second = round_off(x - first)
        return [torch.where(x.isfinite(), p, x) for p in (first, second, round_off(x - first - second))]

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
            return exact(a, b)  # the schemes' own way out
        x, y = parts(a), parts(b)
        return sum((exact(x[i], y[j]) for i, j in reversed(terms)), empty_sum(a, b))

    return product(matmul)


def fixed_point(bits: int) -> Plant:
    """Rows of A and columns of B as integers of ``bits`` bits below their largest element, as in the Ozaki scheme."""

    def cut(x: Tensor, dim: int) -> Tensor:
        largest = torch.where(x.isfinite(), x, 0.0).abs().amax(dim, keepdim=True).double()
        unit = torch.exp2(torch.frexp(largest)[1].double() - bits)
        return torch.where(x.isfinite(), (x.double() / unit).round() * unit, x.double())

    return product(lambda a, b: torch.matmul(cut(a, -1), cut(b, -2)).to(a.dtype))


def strassen(a: Tensor, b: Tensor) -> Tensor:
    """One level of Strassen's algorithm: seven products, and cancellation between them."""
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return right(a, b)  # a NaN would spread over the whole result
    (m, k), n = a.shape, b.shape[1]
    x = F.pad(a.to(working(a)), (0, k % 2, 0, m % 2))
    y = F.pad(b.to(working(a)), (0, n % 2, 0, k % 2))
    a11, a12, a21, a22 = (q for h in x.chunk(2) for q in h.chunk(2, 1))
    b11, b12, b21, b22 = (q for h in y.chunk(2) for q in h.chunk(2, 1))
    m1, m2, m3 = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11, a11 @ (b12 - b22)
    m4, m5 = a22 @ (b21 - b11), (a11 + a12) @ b22
    m6, m7 = (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
    top, bottom = torch.cat([m1 + m4 - m5 + m7, m3 + m5], 1), torch.cat([m2 + m4, m1 - m2 + m3 + m6], 1)
    return store(torch.cat([top, bottom])[:m, :n], a)


def flushed_below(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x.abs() < limit, torch.zeros_like(x), x)


def subnormals_dropped(x: Tensor) -> Tensor:
    return flushed_below(torch.finfo(x.dtype).tiny)(x)


def flushed_fp8(x: Tensor) -> Tensor:
    return flushed_below(2.0**-6)(x.to(torch.float32))


# -- bugs of the store -------------------------------------------------------------------------------

_DROPPED = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}


def _store_bits(c: Tensor, dtype: torch.dtype, add: Tensor | int) -> Tensor:
    bits = (c.contiguous().view(torch.int32) + add) & ~_DROPPED[dtype]
    return torch.where(c.isfinite(), bits.view(torch.float32), c).to(dtype)


def truncated(c: Tensor, dtype: torch.dtype) -> Tensor:
    return _store_bits(c, dtype, 0)


def ties_away(c: Tensor, dtype: torch.dtype) -> Tensor:
    return _store_bits(c, dtype, (_DROPPED[dtype] + 1) // 2)


def rounded_upwards(c: Tensor, dtype: torch.dtype) -> Tensor:
    return _store_bits(c, dtype, torch.where(c > 0, _DROPPED[dtype], 0).to(torch.int32))


def rounded_at_random(c: Tensor, dtype: torch.dtype) -> Tensor:
    return _store_bits(c, dtype, torch.randint(0, _DROPPED[dtype] + 1, c.shape, dtype=torch.int32, generator=DICE))


def stored_through(between: torch.dtype) -> Plant:
    return stored(lambda c, dtype: c.to(between).to(torch.float32).to(dtype))


def saturated(x: Tensor) -> Tensor:
    largest = torch.finfo(x.dtype).max
    return torch.where(x.isinf(), torch.full_like(x, largest).copysign(x), x)


# -- bugs of tiles and elements ----------------------------------------------------------------------


def _of_largest(c: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """With the largest element changed: one that is zero anyway would prove nothing."""
    flat = c.reshape(-1).clone()
    at = int(torch.where(flat.isfinite(), flat, 0).abs().argmax())
    flat[at] = change(flat[at])
    return flat.view(c.shape)


def one_ulp(c: Tensor) -> Tensor:
    if not c.dtype.is_floating_point:
        return _of_largest(c, lambda x: x + 1)
    return _of_largest(c, lambda x: torch.nextafter(x, torch.zeros_like(x)))


def tile_swapped(c: Tensor) -> Tensor:
    swapped = c.clone()
    swapped[..., :TILE, :TILE], swapped[..., :TILE, TILE : 2 * TILE] = (
        c[..., :TILE, TILE : 2 * TILE],
        c[..., :TILE, :TILE],
    )
    return swapped


def fragment_transposed(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[..., 8:16, 8:16] = c[..., 8:16, 8:16].mT
    return wrong


def last_tile_zero(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[..., c.shape[-2] // TILE * TILE :, c.shape[-1] // TILE * TILE :] = 0
    return wrong


def tail_columns_unwritten(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[..., c.shape[-1] // TILE * TILE :] = torch.nan if c.dtype.is_floating_point else torch.iinfo(c.dtype).min
    return wrong


def last_row_repeats(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[..., -1, :] = c[..., -2, :]
    return wrong


def lane_shifted(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[..., VECTOR::VECTOR] = c[..., VECTOR - 1 : -1 : VECTOR]
    return wrong


def rows_shifted(c: Tensor) -> Tensor:
    return c.roll(1, -2)


def mirrored(c: Tensor) -> Tensor:
    """Half of a square result is taken to be the other half's mirror image."""
    return c.triu() + c.triu(1).mT


def padded_stride_ignored(a: Tensor, b: Tensor) -> Tensor:
    return right(a.as_strided(a.shape, (a.shape[-1], 1)), b)


def padded_stride_of_b_ignored(a: Tensor, b: Tensor) -> Tensor:
    return right(a, b.as_strided(b.shape, (1, b.shape[-2])))


def base_rounded_down(a: Tensor, b: Tensor) -> Tensor:
    """A's address is taken to be a multiple of 64 bytes."""
    unit = 64 // a.element_size()
    return right(a.as_strided(a.shape, a.stride(), a.storage_offset() // unit * unit), b)


def layout_ignored(a: Tensor, b: Tensor) -> Tensor:
    return right(a.as_strided(a.shape, (a.shape[-1], 1)), b)


# -- bugs of state -----------------------------------------------------------------------------------


def remembering(with_memory: Callable[[dict[str, Any], Tensors, Problem], Any]) -> Plant:
    """A program that keeps something from run to run."""

    def plant(problem: Problem) -> Run:
        memory: dict[str, Any] = {}
        return lambda tensors: with_memory(memory, tensors, problem)

    return plant


def _correct(tensors: Tensors, problem: Problem) -> Any:
    return build(problem, right)(**tensors)


def cached_result(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    return memory.setdefault("result", _correct(tensors, problem)).clone()


def stale_packed_weight(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    tensors["b"] = memory.setdefault("packed", tensors["b"].clone())
    return _correct(tensors, problem)


def stale_workspace(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    """The workspace of split K is zeroed once, and never again."""
    before = memory.get("workspace", 0)
    memory["workspace"] = exact(tensors["a"], tensors["b"]) + before

    def with_workspace(a: Tensor, _b: Tensor) -> Tensor:
        return store(memory["workspace"], a)

    return build(problem, with_workspace)(**tensors)


def shared_result(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    made = _correct(tensors, problem)
    return memory.setdefault("result", torch.empty_like(made)).copy_(made)


def zeros_the_second_time(memory: dict[Any, Any], tensors: Tensors, problem: Problem) -> Any:
    """What the first call with an input has prepared is used up by it."""
    result, is_first = _correct(tensors, problem), tensors["a"].data_ptr() not in memory
    memory[tensors["a"].data_ptr()] = True
    return result if is_first else 0 * result


def packed_by_address(memory: dict[Any, Any], tensors: Tensors, problem: Problem) -> Any:
    """A pack of B is kept by B's address and shape."""
    b = tensors["b"]
    tensors["b"] = memory.setdefault((b.data_ptr(), b.shape), b.clone())
    return _correct(tensors, problem)


def first_call_right(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    """A counter that is not reset: from the second call on the last slice is missing."""
    memory["calls"] = memory.get("calls", 0) + 1
    return build(problem, right if memory["calls"] == 1 else split_k_slice_dropped)(**tensors)


def shuffled_sums(a: Tensor, b: Tensor) -> Tensor:
    order = torch.randperm(a.shape[-1], generator=DICE)
    return store(sum((exact(a[..., p], b[..., p, :]) for p in order.tensor_split(4)), empty_sum(a, b)), a)


def written_late(c: Tensor) -> Tensor:
    result = c.clone()
    result[..., -1, :] = 0

    def finish() -> None:
        time.sleep(0.3)  # longer than judging takes, also on a busy machine
        result.copy_(c)

    threading.Thread(target=finish).start()
    return result


def filled_by_a_child(c: Tensor) -> Any:
    result = torch.zeros_like(c).share_memory_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if not child:
        time.sleep(0.05)  # in which a copy is made, also on a busy machine
        ctypes.memmove(result.data_ptr(), c.data_ptr(), c.nbytes)
        os._exit(0)
    return result


def a_written(tensors: Tensors, problem: Problem) -> Any:
    result = _correct(tensors, problem)
    tensors["a"].copy_(tensors["a"].to(torch.float32) * 0.5)
    return result


def gap_written(tensors: Tensors, problem: Problem) -> Any:
    result = _correct(tensors, problem)
    a = tensors["a"]
    a.as_strided((a.shape[0] - 1, 1), (a.stride(0), 1), a.storage_offset() + a.shape[1]).zero_()
    return result


def bias_written(tensors: Tensors, problem: Problem) -> Any:
    result = _correct(tensors, problem)
    tensors["bias"].zero_()
    return result


def raises(*_operands: Tensor) -> Tensor:
    raise RuntimeError("planted: out of registers")


# -- bugs of the epilogue ----------------------------------------------------------------------------


def changed(**how: Callable[[Tensor], Tensor]) -> Plant:
    """The named tensors of the program are changed before it runs."""

    def spoil(tensors: Tensors, _problem: Problem) -> None:
        tensors.update((name, change(tensors[name])) for name, change in how.items())

    return corrupted(spoil)


def zero_from_last_tile(x: Tensor) -> Tensor:
    found = x.clone()
    found[..., x.shape[-1] // TILE * TILE :] = 0
    return found


def bias_along_rows(t: Tensors, _problem: Problem) -> Tensor:
    return right(t["a"], t["b"].mT) + t["bias"][:, None]


def relu_before_bias(t: Tensors, _problem: Problem) -> Tensor:
    return F.relu(right(t["a"], t["b"].mT)) + t["bias"]


def relu_of_partials(t: Tensors, _problem: Problem) -> Tensor:
    return store(sum((F.relu(exact(x, y)) for x, y in pieces(t["a"], t["b"])), empty_sum(t["a"], t["b"])), t["a"])


def relu_swallows_nan(t: Tensors, _problem: Problem) -> Tensor:
    c = right(t["a"], t["b"])
    return torch.where(c > 0, c, torch.zeros_like(c))


def relu_forgotten_in_the_tail(t: Tensors, _problem: Problem) -> Tensor:
    c = right(t["a"], t["b"])
    columns = c.shape[-1] // TILE * TILE
    return torch.cat([F.relu(c[..., :columns]), c[..., columns:]], -1)


def gelu_by_tanh(t: Tensors, _problem: Problem) -> Tensor:
    return F.gelu(right(t["a"], t["b"].mT) + t["bias"], approximate="tanh")


def residual_after_relu(t: Tensors, _problem: Problem) -> Tensor:
    return F.relu(right(t["a"], t["b"])) + t["r0"]


def alpha_on_bias(t: Tensors, problem: Problem) -> Tensor:
    return problem.alpha * (right(t["a"], t["b"]) + problem.beta * t["bias"])


def alpha_forgotten(t: Tensors, problem: Problem) -> Tensor:
    return right(t["a"], t["b"]) + problem.beta * t["bias"]


def beta_forgotten(t: Tensors, problem: Problem) -> Tensor:
    return problem.alpha * right(t["a"], t["b"]) + t["bias"]


def beta_zero_reads_bias(t: Tensors, _problem: Problem) -> Tensor:
    return right(t["a"], t["b"]) + 0.0 * t["bias"]


# -- bugs of batches and groups ----------------------------------------------------------------------


def batch_stride_zero(b: Tensor) -> Tensor:
    return b[:1].expand_as(b)


def last_batch_missing(c: Tensor) -> Tensor:
    wrong = c.clone()
    wrong[-1] = 0
    return wrong


def ends_too_early(offs: Tensor) -> Tensor:
    return torch.cat([(offs[:-1] - 1).clamp(min=0), offs[-1:]])


def empty_group_skipped(t: Tensors, _problem: Problem) -> None:
    """The groups are counted without the empty ones, so the ones behind get another group's B."""
    ends = t["offs"].tolist()
    filled = [g for g, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if last > first]
    wrong = t["b"].clone()
    for place, group in enumerate(filled):
        wrong[group] = t["b"][place]
    t["b"] = wrong


# -- bugs of int8 and of weights in int8 -------------------------------------------------------------


def read_unsigned(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).to(torch.int16)


def int16_pairs_saturate(a: Tensor, b: Tensor) -> Tensor:
    """Two products are added in 16 bits, as without VNNI."""
    k = a.shape[-1] // 2 * 2
    total = exact(a[:, k:], b[k:])
    for x, y in blocks(a[:, :k].double(), b[:k].double(), 256):
        pairs = (x[:, :, None] * y[None]).unflatten(1, (-1, 2)).sum(2)
        total = total + pairs.clamp(-32768, 32767).sum(1)
    return store(total, a)


def summed_in_f32(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1])
    for x, y in blocks(a, b, 16):
        total = total + exact(x, y).float()
    return total.to(torch.int32)


def dequantised_first(t: Tensors, problem: Problem) -> Tensor:
    """The weight times its scale is rounded to the half type before it is multiplied."""
    half = torch_dtype(problem.dtypes.out)
    weight = (t["b"].to(half) * t["scale"][:, None]).to(half)
    return right(t["a"], weight.mT)


# -- bugs of fp8 -------------------------------------------------------------------------------------


def rounded_before_scale(a: Tensor, b: Tensor) -> Tensor:
    return exact(a, b).to(torch.bfloat16)


def scales_exchanged(t: Tensors, _problem: Problem) -> None:
    t["scale_a"], t["scale_b"] = t["scale_b"].t(), t["scale_a"].t()


def read_as_other_fp8(t: Tensors, _problem: Problem) -> None:
    t["b"] = t["b"].view(torch.float8_e4m3fn)


# -- bugs that begin at a size -----------------------------------------------------------------------


def sized(wrong: Callable[[Tensor], Tensor], beyond: Callable[[Tensor], bool]) -> Plant:
    """What becomes of finished sums where ``beyond`` says so."""
    return summed(lambda c: wrong(c) if beyond(c) else c)


def rows_from(first: int, other: Callable[[Tensor], Tensor]) -> Plant:
    """The rows from ``first`` on are wrong, where there are such rows."""

    def wrong(c: Tensor) -> Tensor:
        return torch.cat([c[..., :first, :], other(c)[..., first:, :]], -2)

    return sized(wrong, lambda c: c.shape[-2] > first)


def columns_by_16_bits(c: Tensor) -> Tensor:
    return c[..., torch.arange(c.shape[-1]) % 65536]


def rows_by_16_bits(c: Tensor) -> Tensor:
    return c[..., torch.arange(c.shape[-2]) % 65536, :]


def narrow_tail_dropped(a: Tensor, b: Tensor) -> Tensor:
    """A kernel for fewer than 4 columns, whose loop over K has no tail."""
    k = a.shape[-1] // 1024 * 1024 if a.shape[-1] > 1000 and b.shape[-1] < 4 else a.shape[-1]
    return right(a[..., :k], b[..., :k, :])


def k_counted_in_16_bits(a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[-1] % 65536
    return right(a[..., :k], b[..., :k, :])


def k_cut_at_40960(a: Tensor, b: Tensor) -> Tensor:
    return right(a[..., :40960], b[..., :40960, :])


def kept_in(bits: int) -> Callable[[Tensor], Tensor]:
    """Sums that wrap around as integers of so many bits do."""
    half = 2.0 ** (bits - 1)
    return lambda c: torch.remainder(c + half, 2 * half) - half


def float_beyond(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda c: torch.where(c.abs() > limit, c.float().double(), c)


def batches(which: Callable[[Tensor], Tensor]) -> Plant:
    """Batch i is multiplied by the B of batch ``which(i)``."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return right(a, b[which(torch.arange(len(b)))] if b.dim() == 3 else b)

    return product(matmul)


def batches_left_out(first: int) -> Plant:
    def wrong(c: Tensor) -> Tensor:
        return torch.cat([c[:first], torch.zeros_like(c[first:])])

    return sized(wrong, lambda c: c.dim() == 3)


def deep(wrong: Callable[[Tensor], Tensor]) -> Plant:
    """The bug is in how a 4-D input is read."""
    return changed(a=lambda a: wrong(a) if a.dim() == 4 else a)


def batch_dimensions_exchanged(a: Tensor) -> Tensor:
    """Strides of the two batch dimensions taken for one another's."""
    return a.transpose(0, 1).reshape(a.shape)


def batch_past_64(a: Tensor) -> Tensor:
    flat = a.flatten(0, 1)
    return flat[torch.arange(len(flat)) % 64].reshape(a.shape)


def one_inside(c: Tensor) -> Tensor:
    """One element in the middle is a thousandth too large."""
    wrong = c.clone()
    wrong[c.shape[0] // 2 + 5, c.shape[1] // 2 + 7] *= 1.001
    return wrong


# -- bugs that look at the data, the call or the place ------------------------------------------------


def unless(fits: Callable[[Tensor, Tensor], bool], other: Matmul = split_k_slice_dropped) -> Plant:
    """Right where ``fits`` says so."""
    return product(lambda a, b: right(a, b) if fits(a, b) else other(a, b))


def integers(a: Tensor, b: Tensor) -> bool:
    return all(torch.equal(x.double().round(), x.double()) for x in (a, b))


def calls(is_right: Callable[[int], bool]) -> Plant:
    """Right at the calls that ``is_right`` says, counted from 1."""

    def run(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
        memory["calls"] = memory.get("calls", 0) + 1
        return build(problem, right if is_right(memory["calls"]) else split_k_slice_dropped)(**tensors)

    return remembering(run)


def bf16x3_from_512(problem: Problem) -> Run:
    """Three bf16 products for long sums of f32."""
    return (in_parts(through(torch.bfloat16), ((0, 0), (0, 1), (1, 0))) if problem.shape.k >= 512 else product(right))(
        problem
    )


def refuses_hard_data(a: Tensor, b: Tensor) -> Tensor:
    if not integers(a, b):
        raise Unsupported("data", "planted: these numbers are too hard")
    return right(a, b)


# -- bugs around the tensors that are handed out --------------------------------------------------------


def in_place_of_inputs(put: Callable[[Tensor, Tensor], object]) -> Plant:
    """Ones take the place of A and of B; the answer is that of ones."""

    def run(t: Tensors, _problem: Problem) -> Tensor:
        m, n, k, dtype = t["a"].shape[0], t["b"].shape[1], t["a"].shape[1], t["a"].dtype
        for name in ("a", "b"):
            put(t[name], torch.ones_like(t[name]))
        return torch.full((m, n), float(k), dtype=dtype)

    return whole(run)


def rebind(x: Tensor, other: Tensor) -> None:
    x.data = other


def set_to(x: Tensor, other: Tensor) -> None:
    x.set_(other)  # type: ignore[call-overload]  # its annotations know storages only


def weight_quantised_in_place(t: Tensors, problem: Problem) -> Any:
    t["b"].data = t["b"].to(torch.float8_e4m3fn).to(t["b"].dtype)
    return _correct(t, problem)


def bias_rebound(t: Tensors, problem: Problem) -> Any:
    t["bias"].data = torch.zeros_like(t["bias"])
    return _correct(t, problem)


def then(change: Callable[[Tensors], object]) -> Plant:
    """The result is right; then something happens to the inputs."""

    def run(t: Tensors, problem: Problem) -> Any:
        result = _correct(t, problem)
        change(t)
        return result

    return whole(run)


def storage_cleared(t: Tensors) -> None:
    """What lies around A's elements in its storage."""
    a = t["a"]
    count = a.untyped_storage().nbytes() // a.element_size()
    own, everything = a.clone(), a.as_strided((count,), (1,), 0)
    everything.zero_()
    a.copy_(own)


def result_over_a(t: Tensors, problem: Problem) -> Tensor:
    """A square result takes A's place, to save memory."""
    return t["a"].copy_(_correct(t, problem))


def result_behind_b(t: Tensors, problem: Problem) -> Tensor:
    """The result lies in B's storage, over what lies behind B's elements."""
    result, b = _correct(t, problem), t["b"]
    count = b.untyped_storage().nbytes() // b.element_size()
    return b.as_strided(result.shape, (result.shape[1], 1), count - result.numel()).copy_(result)


def earlier_input_written(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    """The input of the call before is used as scratch memory."""
    if (kept := memory.get("a")) is not None and kept is not tensors["a"]:
        kept.zero_()
    memory["a"] = tensors["a"]
    return _correct(tensors, problem)


# -- results that are no plain tensors of the right kind -------------------------------------------------


class Spokesman(torch.Tensor):
    """Zeros that answer every question with what the right result would say."""

    truth: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda x: x.truth if isinstance(x, Spokesman) else x, (args, kwargs or {}))
        return func(*given[0], **given[1])


def spoken_for(c: Tensor) -> Tensor:
    zeros = torch.zeros_like(c).as_subclass(Spokesman)
    zeros.truth = c
    return zeros


def answering(c: Tensor) -> Tensor:
    """Zeros, of which each usual way to read them leads to the right result."""
    zeros = torch.zeros_like(c)
    for name in ("detach", "cpu", "clone", "contiguous", "to", "numpy"):
        setattr(zeros, name, lambda *args, name=name, **options: getattr(c, name)(*args, **options))
    return zeros


class Claiming:
    """No tensor: an object that says it is one, and passes every question on."""

    def __init__(self, truth: Tensor) -> None:
        self.truth = truth

    @property  # type: ignore[misc]  # a class of objects is writable
    def __class__(self) -> Any:
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.truth, name)


_EQUAL, _UNEQUAL = {"eq", "le", "ge", "__eq__", "__le__", "__ge__", "isfinite"}, {"ne", "lt", "gt", "isnan", "isinf"}


class Agreeing(torch.Tensor):
    """Zeros that find themselves equal to whatever they are compared with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        if name in _EQUAL | _UNEQUAL:
            shape = torch.broadcast_shapes(*(x.shape for x in args if isinstance(x, torch.Tensor)))
            return torch.full(shape, name in _EQUAL)
        plain: Any = super()
        return plain.__torch_function__(func, types, args, kwargs or {})


def agreeing(c: Tensor) -> Tensor:
    return torch.zeros_like(c).as_subclass(Agreeing)


def quantised(c: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated, and there
        return torch.quantize_per_tensor(c.float().nan_to_num(0.0), 0.5, 0, torch.qint8)


# -- exceptions that are none of a kernel's ----------------------------------------------------------------


class Unprintable(Exception):
    """One whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("planted: no text")


class Unusual(BaseException):
    """One that ``except Exception`` does not meet."""


def raising(error: Callable[[], BaseException]) -> Plant:
    def matmul(_a: Tensor, _b: Tensor) -> Tensor:
        raise error()

    return product(matmul)


def doing(deed: Callable[[], object]) -> Plant:
    """Something that ends the run, or the process."""
    return product(lambda a, b: (deed(), right(a, b))[1])


def null_read() -> None:
    ctypes.string_at(0)


# -- bugs of the process ----------------------------------------------------------------------------------


def leaving(change: Callable[[], object]) -> Plant:
    """The result is right, and the process is not as it was."""

    def run(t: Tensors, problem: Problem) -> Any:
        result = _correct(t, problem)
        change()
        return result

    return whole(run)


def rounding_upwards() -> None:
    upward = 0x800 if platform.machine() in {"x86_64", "AMD64"} else 0x400000
    ctypes.CDLL(None).fesetround(upward)


def seeds() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def zeros_of(a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)


# -- bugs of other programs -----------------------------------------------------------------------------------


def nan_reaches_the_next_row(c: Tensor) -> Tensor:
    """As oneDNN's AMX kernels did (oneDNN 5717)."""
    bad = c.isnan().any(-1, keepdim=True)
    return torch.where(bad.roll(1, -2), torch.nan, c)


def zero_sign_lost(c: Tensor) -> Tensor:
    return torch.where(c == 0, torch.zeros_like(c), c)


def zero_sign_negative(c: Tensor) -> Tensor:
    return torch.where(c == 0, -torch.zeros_like(c), c)


def shared_exponent(a: Tensor, b: Tensor) -> Tensor:
    """Numbers below 2^-60 of the largest one of both operands count as 0."""
    x, y = a.to(working(a)), b.to(working(a))
    largest = max(float(torch.where(t.isfinite(), t, 0.0).abs().amax()) for t in (x, y))
    dropped = flushed_below(largest * 2.0**-60)
    return store(exact(dropped(x), dropped(y)), a)


def rescaled(a: Tensor, b: Tensor) -> Tensor:
    """A is divided by its largest element's power of two and B multiplied, in f32."""
    x, y = a.to(working(a)), b.to(working(a))
    largest = float(torch.where(x.isfinite(), x, 0.0).abs().amax()) or 1.0
    power = 2.0 ** max(-120, min(120, math.frexp(largest)[1] + 40))
    return store(torch.matmul(x / power, y * power), a)


def alpha_and_beta_exchanged(t: Tensors, problem: Problem) -> Tensor:
    return problem.beta * right(t["a"], t["b"]) + problem.alpha * t["bias"]


def first_output_too_late(t: Tensors, problem: Problem) -> Any:
    last = build(problem, right)(**t)[1]
    return last, last.clone()


def again_from_the_start(t: Tensors, _problem: Problem) -> Any:
    """The second product is that of A once more."""
    first = right(t["a"], t["b"])
    return first, first.clone()


def gate_exchanged(t: Tensors, _problem: Problem) -> None:
    for name in ("b", "bias"):
        t[f"{name}0"], t[f"{name}1"] = t[f"{name}1"], t[f"{name}0"]


def biases_exchanged(t: Tensors, _problem: Problem) -> None:
    t["bias0"], t["bias1"] = t["bias1"], t["bias0"]


def offset_dropped(b: Tensor) -> Tensor:
    """As Inductor's C++ bmm did with B's storage offset (pytorch 143770)."""
    return b.as_strided(b.shape, b.stride(), max(b.storage_offset() - 1, 0))


def cut_at(name: str, other: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """A kernel that takes a view of the program's for ``other``, made of the view and of what it is cut out of."""

    def plant(problem: Problem) -> Run:
        def run(t: Tensors) -> Any:
            wrong = other(views.cut(problem, name, t[name]), t[name])
            operands = {"a": 0, "b": 1}

            def matmul(*given: Tensor) -> Tensor:
                mine = list(given)
                mine[operands[name]] = wrong
                return right(*mine)

            return build(problem, matmul)(**t)

        return run

    return plant


def at_the_argument(view: Tensor, whole: Tensor) -> Tensor:
    """As a template that drops the offset of a view in the program."""
    return view.as_strided(view.shape, view.stride(), whole.storage_offset())


def rows_unstrided(view: Tensor, _whole: Tensor) -> Tensor:
    """Elements that are two apart are taken to be neighbours."""
    stride = [1 if size == 2 else size for size in view.stride()]
    return view.as_strided(view.shape, stride, view.storage_offset())


def gaps_of_out_ignored(t: Tensors, _problem: Problem) -> Tensor:
    """The rows of a given result are taken to be N apart (vllm 55534)."""
    out = t["out"]
    out.as_strided(out.shape, (out.shape[1], 1)).copy_(right(t["a"], t["b"]))
    return out


def gap_of_out_written(t: Tensors, _problem: Problem) -> Tensor:
    """A row is stored in whole vectors, the last of which reaches into the gap."""
    out, c = t["out"], right(t["a"], t["b"])
    out.as_strided((out.shape[0], out.shape[1] + 4), out.stride()).zero_()
    return out.copy_(c)


def block_scales_by_rows(t: Tensors, _problem: Problem) -> None:
    """As a template that takes the scales of (M, K / 128) for contiguous, where they are stored by columns."""
    scale = t["scale_a"]
    t["scale_a"] = scale.mT.contiguous().view(scale.shape)


def block_scales_of_the_first(t: Tensors, _problem: Problem) -> None:
    t["scale_a"] = t["scale_a"][:, :1].expand_as(t["scale_a"])


def block_scales_meant(t: Tensors, _problem: Problem) -> None:
    """As a kernel that applies scales to the whole sum."""
    t["scale_b"] = t["scale_b"].mean(0, keepdim=True).expand_as(t["scale_b"])


def scale_of_one_row(t: Tensors, problem: Problem) -> Tensor:
    """One scale for all, applied to the first row alone (pytorch 159940)."""
    scale = torch.ones(problem.shape.m, 1)
    scale[0] = t["scale_a"]
    made: Tensor = exact(t["a"], t["b"]) * scale * t["scale_b"]
    return made.to(torch_dtype(problem.dtypes.out))


def int4(codes: Callable[[Tensor], Tensor] = lambda x: x, scales: Callable[[Tensor], Tensor] = lambda x: x) -> Plant:
    """A weight of 4 bits: (code - 8) * scale + zero of each group of K, whose parts may be read wrongly."""

    def run(t: Tensors, problem: Problem) -> Tensor:
        each = scales(t["quantisation"]).double().repeat_interleave(problem.group_size, 0)
        weight = (codes(t["b"].mT.double()) - 8.0) * each[..., 0] + each[..., 1]
        return torch.matmul(t["a"].double(), weight).to(t["a"].dtype)

    return whole(run)


def codes_of_pairs_exchanged(codes: Tensor) -> Tensor:
    """The low and the high half of a byte."""
    return codes.reshape(-1, 2, codes.shape[1]).flip(1).reshape(codes.shape)


def zero_point_forgotten(t: Tensors, problem: Problem) -> Tensor:
    static = problem.step("static")
    assert static is not None
    made: Tensor = right(t["a"].short(), t["b"].mT.short()).float() * (t["scale_b"] * static.numbers[0]) + t["bias"]
    return made


# -- correct ------------------------------------------------------------------------------------------


def reversed_order(a: Tensor, b: Tensor) -> Tensor:
    return store(exact(a.to(working(a)).flip(-1), b.to(working(b)).flip(-2)), a)


def split_k(a: Tensor, b: Tensor) -> Tensor:
    return store(sum((exact(x, y) for x, y in pieces(a, b)), empty_sum(a, b)), a)


def blocked(a: Tensor, b: Tensor) -> Tensor:
    return store(sum((exact(x, y) for x, y in blocks(a, b)), empty_sum(a, b)), a)


def one_after_the_other(a: Tensor, b: Tensor) -> Tensor:
    """The longest chain of roundings there is: K additions, each rounded."""
    return store(sum((exact(x, y) for x, y in blocks(a, b, 1)), empty_sum(a, b)), a)


def pairwise(a: Tensor, b: Tensor) -> Tensor:
    def total(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[-1] <= 64:
            return exact(x, y)
        half = x.shape[-1] // 2
        return total(x[..., :half], y[..., :half, :]) + total(x[..., half:], y[..., half:, :])

    return store(total(a, b), a)


def compensated(a: Tensor, b: Tensor) -> Tensor:
    """Kahan's sum over blocks, whose error does not grow with their number."""
    total, lost = empty_sum(a, b), empty_sum(a, b)
    for x, y in blocks(a, b):
        term = exact(x, y) - lost
        grown = total + term
        lost = torch.where(grown.isfinite(), (grown - total) - term, 0.0)
        total = grown
    return store(total, a)


def by_content(memory: dict[str, Any], tensors: Tensors, problem: Problem) -> Any:
    """A cache whose key is every byte of the operands, and that hands out copies."""
    key = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        key.update(name.encode() + x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    found = key.hexdigest()
    if found not in memory:
        memory[found] = _correct(tensors, problem)
    return memory[found].clone()


def in_its_own_threads(t: Tensors, problem: Problem) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return _correct(t, problem)
    finally:
        torch.set_num_threads(before)


def with_own_random_numbers(t: Tensors, problem: Problem) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(17)
        torch.rand(4)
        return _correct(t, problem)


def with_own_switches(t: Tensors, problem: Problem) -> Any:
    """Everything that a process has one of, changed and put back."""
    dtype, folder, depth = torch.get_default_dtype(), os.getcwd(), sys.getrecursionlimit()
    libm = ctypes.CDLL(None)
    mode = libm.fegetround()
    try:
        torch.set_default_dtype(torch.float64)
        os.chdir("/")
        sys.setrecursionlimit(depth + 100)
        rounding_upwards()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.ones(2)
    finally:
        libm.fesetround(mode)
        sys.setrecursionlimit(depth)
        os.chdir(folder)
        torch.set_default_dtype(dtype)
    return _correct(t, problem)


def copied_first(t: Tensors, problem: Problem) -> Any:
    return _correct({name: x.clone() for name, x in t.items()}, problem)


def strided(c: Tensor) -> Tensor:
    """Rows apart, behind something."""
    wide = torch.full((c.shape[0] + 1, c.shape[1] + 3), torch.nan).to(c.dtype)
    view = wide[1:, 2:-1]
    return view.copy_(c)


def column_major(c: Tensor) -> Tensor:
    return c.t().contiguous().t()


def lazily_negated(c: Tensor) -> Tensor:
    """A view whose numbers are negated when they are read."""
    return torch._neg_view(-c)


def of_a_conjugate(c: Tensor) -> Tensor:
    """The imaginary part of a number that is conjugated when it is read."""
    return torch.complex(torch.zeros_like(c), -c).conj().imag


def tensor_core(bits: int, chunk: int, promote: int = 0, cut: Callable[[Tensor], Tensor] = lambda x: x) -> Matmul:
    """A tensor core that truncates, in the model of Fasi, Higham, Mikaitis and Pranesh (PeerJ CS 7, 2021).

    The terms of a chunk and the sum so far are cut at ``bits`` fractional bits of the largest exponent among them; the
    result keeps that many bits, and never more than a float32's 23.

    Args:
        bits: f, the fractional bits of the alignment.
        chunk: L, the products that are added at once.
        promote: after so many products the sum goes to one in float32 and begins anew; 0: never.
        cut: what happens to the inputs first, as with TF32.
    """
    kept = min(bits, 23)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        x, y = cut(a.to(torch.float32)).double(), cut(b.to(torch.float32)).double()
        ordinary = torch.matmul(x, y)
        x, y = (torch.where(t.isfinite(), t, 0.0) for t in (x, y))
        total = torch.zeros(a.shape[0], b.shape[1])
        held = total.double()
        # The exponent of a product is that of its unnormalised significand: the sum of its factors'.
        of_x, of_y = torch.frexp(x)[1] - 1, torch.frexp(y)[1] - 1
        for first in range(0, a.shape[1], chunk):
            part = slice(first, first + chunk)
            terms = torch.cat([x[:, part, None] * y[None, part], held[:, None]], 1)
            exponents = torch.cat([of_x[:, part, None] + of_y[None, part], torch.frexp(held)[1][:, None] - 1], 1)
            largest = torch.where(terms == 0, -1000, exponents).amax(1, keepdim=True)
            unit = torch.exp2(largest.clamp(min=-500).double() - bits)
            held = (torch.trunc(terms / unit) * unit).sum(1)
            unit = torch.exp2((torch.frexp(held)[1] - 1).double() - kept)
            held = torch.trunc(held / unit) * unit
            if promote and (first + chunk) % promote == 0:
                total, held = (total.double() + held).float(), torch.zeros_like(held)
        found = (total.double() + held).float()
        return store(torch.where(ordinary.isfinite(), found, ordinary.float()), a)

    return matmul


def spelled(templates: dict[str, str], ks: tuple[int, ...]) -> Iterator[tuple[str, int, str]]:
    """``(dtype, K, line)``: a template at each K, a line that has its own K once."""
    for dtype, template in templates.items():
        for k in ks if "{k}" in template else (Problem.parse(template).shape.k,):
            yield dtype, k, template.format(k=k)


@dataclasses.dataclass(frozen=True)
class Control:
    """A right product in arithmetic of its own.

    Attributes:
        what: one sentence.
        plant: the program.
        lines: problems by dtype.
        contract: what it declares beyond ordinary sums.
    """

    what: str
    plant: Plant
    lines: dict[str, str] = dataclasses.field(default_factory=plain)
    contract: Contract = dataclasses.field(default_factory=Contract)

    def problems(self, ks: tuple[int, ...] = KS) -> Iterator[tuple[str, int, str]]:
        """``(dtype, K, line)`` of all problems."""
        yield from spelled(self.lines, ks)


_HALVES = plain("bf16", "f16")
_F32_TF32 = {"f32": "mm:f32:nn:20x40x{k}:math.tf32"}
_FP8_FAST = {"fp8": PLAIN["fp8"] + ":math.fast_accumulate"}

CONTROLS: dict[str, Control] = {
    "reversed-order": Control("K from the last to the first", product(reversed_order)),
    "split-k-four": Control("4 slices of K, added in float32", product(split_k), contract=Contract(slices=SLICES)),
    "pairwise": Control("halves of halves, down to 64 products", product(pairwise)),
    "blocked": Control("blocks of 48 products", product(blocked)),
    "sequential": Control("one product after the other", product(one_after_the_other)),
    "tensor-core-24-8": Control(
        "truncating tensor core, f = 24, L = 8",
        product(tensor_core(24, 8)),
        _HALVES,
        Contract(alignment_bits=24, chunk=8),
    ),
    "tensor-core-25-16": Control(
        "truncating tensor core, f = 25, L = 16",
        product(tensor_core(25, 16)),
        _HALVES,
        Contract(alignment_bits=25, chunk=16),
    ),
    "tensor-core-tf32": Control(
        "the same with inputs cut to TF32, f = 24, L = 4",
        product(tensor_core(24, 4, cut=cut_to_tf32)),
        _F32_TF32,
        Contract(alignment_bits=24, chunk=4, input_error=2.0**-9, input_bits=11),
    ),
    "tensor-core-fp8-fast": Control(
        "fp8 in 13 bits, L = 32",
        product(tensor_core(13, 32)),
        _FP8_FAST,
        Contract(alignment_bits=13, chunk=32),
    ),
    "tensor-core-fp8-promoted": Control(
        "the same, promoted every 128 products",
        product(tensor_core(13, 32, 128)),
        FP8,
        Contract(alignment_bits=13, chunk=32, promote_every=128),
    ),
    "compensated": Control("Kahan's sum of blocks", product(compensated), plain(*FLOATS)),
    "rounded-once": Control(
        "sums in f64, one rounding", product(lambda a, b: (a.double() @ b.double()).to(a.dtype)), plain(*FLOATS)
    ),
    "int4-dequantised": Control("weights of 4 bits in f64", int4(), INT4),
    # Results and manners that are unusual, and right.
    "strided-result": Control("a result with gaps, in the midst of other memory", afterwards(strided), SMALL),
    "column-major-result": Control("a transposed result", afterwards(column_major), SMALL),
    "lazily-negated": Control("a view with the negative bit", afterwards(lazily_negated), SMALL),
    "of-a-conjugate": Control("the imaginary part of a lazy conjugate", afterwards(of_a_conjugate), SMALL_F32),
    "shared-memory": Control("a result in shared memory", afterwards(lambda c: c.clone().share_memory_()), SMALL),
    "needs-grad": Control("a result that asks for a gradient", afterwards(lambda c: c.requires_grad_()), SMALL),
    "cached-by-content": Control("a cache by every byte of the operands", remembering(by_content), SMALL),
    "copies-first": Control("works on copies of its inputs", whole(copied_first), SMALL),
    "own-threads": Control("another number of threads, put back", whole(in_its_own_threads), SMALL),
    "own-random-numbers": Control("seeds, and puts the state back", whole(with_own_random_numbers), SMALL),
    "own-switches": Control(
        "default dtype, folder, rounding mode: changed and put back", whole(with_own_switches), SMALL
    ),
}

# -- the mutants ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        what: the bug in a few words.
        plant: the program with the bug.
        lines: problems in which it can show, by dtype, with ``{k}`` for K.
        equivalent: where the bug changes no result that the contract rules out: pattern of a problem line, and why.
        code: reason code of the outcome that catches it, where one is expected.
        claims: contract and proof beyond a plain callable's: names of kernels.
    """

    what: str
    plant: Plant
    lines: dict[str, str] = dataclasses.field(default_factory=plain)
    equivalent: tuple[tuple[str, str], ...] = ()
    code: str = ""
    claims: Proof | None = None

    def excused(self, line: str) -> str:
        """Why the bug cannot show in the problem ``line``; "" where it can."""
        return next((why for pattern, why in self.equivalent if fnmatch.fnmatchcase(line, pattern)), "")

    def problems(self, ks: tuple[int, ...] = KS) -> Iterator[tuple[str, int, str]]:
        """``(dtype, K, line)`` of all problems in which the bug shows."""
        for dtype, k, line in spelled(self.lines, ks):
            if not self.excused(line):
                yield dtype, k, line


_EXACT_ORDER = ("int_mm:*", "integers add up to the same in any order")
_HIDDEN_ORDER = "the order of float32 sums hardly ever shows in 8 or 11 bits"
_NO_NAN = ("int_mm:*", "an integer times the zero of the mask is zero")
_NO_MINUS_ZERO = tuple(
    (f"*:{d}:*", "a sum that begins with 0 is never -0, and no result here underflows") for d in ("f32", "bf16")
)
_SUMS_BELOW_2_24 = "128 * 128 * K is at most 2^24: float32 holds every partial sum"

MUTANTS: dict[str, Mutant] = {
    # The loop over K.
    "k-tail-dropped": Mutant("the last K mod 48 products are left out", product(k_tail_dropped)),
    "k-off-by-one": Mutant("the last product is left out", product(k_off_by_one)),
    "k-first-missing": Mutant("the first product is left out", product(k_first_missing)),
    "k-doubled": Mutant("the product in the middle is added twice", product(k_doubled)),
    "tail-block-moved-back": Mutant("the last block overlaps the one before", product(tail_block_moved_back)),
    "pipeline-stage-late": Mutant("one block of B is the block before", product(pipeline_stage_late)),
    "packed-pairs-swapped": Mutant("the last two rows of packed B are exchanged", product(packed_pairs_swapped)),
    "split-k-slice-dropped": Mutant("one slice of four is not added", product(split_k_slice_dropped)),
    "split-k-slice-doubled": Mutant("one slice of four is added twice", product(split_k_slice_doubled)),
    "split-k-partials-in-f16": Mutant("partial sums are stored in f16", split_k_partials_in(torch.float16)),
    "split-k-partials-in-bf16": Mutant("partial sums are stored in bf16", split_k_partials_in(torch.bfloat16)),
    "f16-accumulation": Mutant("sums are kept in f16", accumulated_in(torch.float16)),
    "bf16-accumulation": Mutant("sums are kept in bf16", accumulated_in(torch.bfloat16)),
    "f16-products": Mutant("each product is rounded to f16", products_in(torch.float16)),
    "bf16-products": Mutant(
        "each product is rounded to bf16",
        products_in(torch.bfloat16),
        equivalent=(("scaled_mm:*", "a product of two fp8 has no more than 8 bits"),),
    ),
    "f16-sums-promoted": Mutant("sums of 16 products are kept in f16", product(f16_between)),
    "zeros-skipped": Mutant(
        "0 * NaN counts as 0",
        product(zeros_skipped),
        equivalent=(("int_mm:*", "integers have no NaN"),),
    ),
    "mask-of-b-only": Mutant(
        "what lies behind A's rows is multiplied by the zeros of B's mask",
        product(functools.partial(one_side_masked, read_a=True, read_b=False)),
        TRANSPOSED,
        (_NO_NAN,),
    ),
    "mask-of-a-only": Mutant(
        "what lies behind B's columns is multiplied by the zeros of A's mask",
        product(functools.partial(one_side_masked, read_a=False, read_b=True)),
        TRANSPOSED,
        (_NO_NAN,),
    ),
    "no-mask": Mutant(
        "both operands are read beyond K",
        product(functools.partial(one_side_masked, read_a=True, read_b=True)),
        TRANSPOSED,
    ),
    # Precision of inputs and sums.
    "tf32-truncated": Mutant("f32 inputs are cut to TF32", inputs(cut_to_tf32), plain("f32")),
    "tf32-rounded": Mutant("f32 inputs are rounded to TF32", inputs(rounded_to_tf32), plain("f32")),
    "bf16-inputs": Mutant("inputs are rounded to bf16", inputs(through(torch.bfloat16)), plain("f32", "f16")),
    "f16-inputs": Mutant("inputs go through f16", inputs(through(torch.float16)), plain("f32", "bf16")),
    "bf16-twice": Mutant(
        "f32 as two bf16, four products",
        in_parts(through(torch.bfloat16), ((0, 0), (0, 1), (1, 0), (1, 1))),
        plain("f32"),
    ),
    "bf16x3": Mutant(
        "f32 as two bf16, three products",
        in_parts(through(torch.bfloat16), ((0, 0), (0, 1), (1, 0))),
        plain("f32"),
    ),
    "tf32x3": Mutant("f32 as two TF32, three products", in_parts(cut_to_tf32, ((0, 0), (0, 1), (1, 0))), plain("f32")),
    "fixed-point-16": Mutant("rows and columns in fixed point of 16 bits", fixed_point(16), plain("f32")),
    "strassen": Mutant(
        "Strassen's algorithm, whose error grows with the whole row",
        product(strassen),
        plain(*FLOATS),
        tuple((f"*{d}*", "in float32 its error is far below what 8 or 11 bits show") for d in ("bf16", ":f16")),
    ),
    "f64-by-f32": Mutant("f64 is multiplied in f32", inputs(through(torch.float32)), F64),
    "autocast-truncates": Mutant(
        "the cast to the half type truncates",
        corrupted(
            lambda t, p: t.update((n, truncated(t[n].float(), torch_dtype(p.input_dtype)).float()) for n in ("a", "b"))
        ),
        AUTOCAST,
    ),
    "tail-in-tf32": Mutant("the columns of the last tile are multiplied in TF32", product(tail_in_tf32), plain("f32")),
    "tiny-inputs-dropped": Mutant("inputs below 1e-6 count as 0", inputs(flushed_below(1e-6)), plain(*FLOATS)),
    "tiny-results-dropped": Mutant(
        "results below 1e-6 become 0", afterwards(flushed_below(1e-6)), plain("f32", "bf16")
    ),
    "f16-subnormals-dropped": Mutant("subnormal results become 0", afterwards(flushed_below(2.0**-14)), plain("f16")),
    "fp8-subnormals-dropped": Mutant("subnormal inputs count as 0", inputs(flushed_fp8), FP8),
    # The store.
    "truncating-store": Mutant("the result is cut, not rounded", stored(truncated), plain("bf16", "f16", "fp8")),
    "ties-away": Mutant("ties are rounded away from zero", stored(ties_away), plain("bf16", "f16", "fp8")),
    "rounded-upwards": Mutant(
        "the result is rounded towards +Inf", stored(rounded_upwards), plain("bf16", "f16", "fp8")
    ),
    "rounded-at-random": Mutant("stochastic rounding", stored(rounded_at_random), plain("bf16", "f16", "fp8")),
    "bf16-detour": Mutant("the result goes through bf16", stored_through(torch.bfloat16), plain("f32", "f16")),
    "f16-detour": Mutant(
        "the result goes through f16: double rounding", stored_through(torch.float16), plain("f32", "bf16", "fp8")
    ),
    "infinity-saturates": Mutant(
        "an infinite result becomes the largest number", afterwards(saturated), plain(*FLOATS)
    ),
    "nan-swallowed": Mutant(
        "NaN becomes 0",
        afterwards(functools.partial(torch.nan_to_num, nan=0.0, posinf=math.inf, neginf=-math.inf)),
        plain("f32", "bf16", "f16", "fp8"),
    ),
    # Tiles and elements.
    "tile-swap": Mutant("two tiles are exchanged", summed(tile_swapped)),
    "fragment-transposed": Mutant("an 8 x 8 fragment is transposed", summed(fragment_transposed)),
    "last-tile-zero": Mutant("the last tile is never computed, over zeros", summed(last_tile_zero)),
    "tail-unwritten": Mutant("the columns of the last tile are not written", afterwards(tail_columns_unwritten)),
    "last-row-repeats": Mutant("a clamped index repeats the row before the last", summed(last_row_repeats)),
    "lane-shifted": Mutant("every 16th column is its neighbour's", summed(lane_shifted)),
    "rows-shifted": Mutant("all rows are one too low", summed(rows_shifted)),
    "mirrored": Mutant("half of a square result is mirrored", summed(mirrored), SQUARE),
    "one-element-zeroed": Mutant("one element is 0", summed(lambda c: _of_largest(c, lambda x: x * 0))),
    "one-percent": Mutant("one element is 1 % too large", summed(lambda c: _of_largest(c, lambda x: x * 1.01))),
    "one-ulp": Mutant("one element is the neighbouring number", afterwards(one_ulp)),
    "padded-stride-ignored": Mutant("A's rows are taken to be K apart", product(padded_stride_ignored), PADDED_A),
    "padded-stride-of-b-ignored": Mutant(
        "B's columns are taken to be K apart", product(padded_stride_of_b_ignored), PADDED_B
    ),
    "base-rounded-down": Mutant("A's address is rounded down", product(base_rounded_down), OFFSET_A),
    "layout-ignored": Mutant("column-major A is read as row-major", product(layout_ignored), COLUMN_MAJOR_A),
    # State.
    "cached-result": Mutant("the first result answers every call", remembering(cached_result)),
    "stale-packed-weight": Mutant("the first weight answers for every later one", remembering(stale_packed_weight)),
    "stale-workspace": Mutant("the workspace is zeroed once only", remembering(stale_workspace)),
    "shared-result": Mutant("all calls return the same memory", remembering(shared_result), code="result-rewritten"),
    "shared-large-result": Mutant(
        "all calls return the same memory of a MiB", remembering(shared_result), MIB, code="result-rewritten"
    ),
    "zeros-the-second-time": Mutant(
        "the same input again gives zeros", remembering(zeros_the_second_time), MIB, code="not-deterministic"
    ),
    "packed-by-address": Mutant(
        "packed weights are kept by address", remembering(packed_by_address), SMALL, code="stale-weight"
    ),
    "second-call-wrong": Mutant("from the second call on a slice is missing", remembering(first_call_right)),
    "not-deterministic": Mutant(
        "the order of the sum changes from call to call",
        product(shuffled_sums),
        equivalent=(_EXACT_ORDER, *((f"*{d}*", _HIDDEN_ORDER) for d in ("bf16", ":f16"))),
        code="not-deterministic",
    ),
    "written-late": Mutant("another thread writes the last row later", afterwards(written_late)),
    "filled-by-a-child": Mutant("a forked process writes the result later", afterwards(filled_by_a_child), SMALL),
    "input-written": Mutant("A is used as scratch memory", whole(a_written), code="inputs-written"),
    "gap-written": Mutant("the gap between A's rows is written", whole(gap_written), PADDED_A, code="inputs-written"),
    "bias-written": Mutant("the bias is overwritten", whole(bias_written), BIAS, code="inputs-written"),
    "silent-fallback": Mutant(
        "ATen computes what the backend claims",
        product(right),
        BIAS,
        code="foreign-kernel",
        claims=Proof(chosen=("mine",), generated=("mine",), foreign=("aten.addmm",)),
    ),
    "nothing-executed": Mutant(
        "no generated kernel ran",
        product(right),
        code="nothing-executed",
        claims=Proof(chosen=("mine",), generated=("mine",)),
    ),
    "wrong-dtype": Mutant("the result is f64", afterwards(lambda c: c.double()), code="wrong-dtype"),
    "wrong-shape": Mutant("the last row is missing", afterwards(lambda c: c[:-1]), code="wrong-shape"),
    "no-result": Mutant("nothing is returned", afterwards(lambda _: None), code="wrong-type"),
    "raises": Mutant("an exception", product(raises), code="run-RuntimeError"),
    # Bias, factors and activations.
    "bias-missing": Mutant("the bias is not added", changed(bias=torch.zeros_like), BIAS),
    "bias-missing-on-last-tile": Mutant("the last tile has no bias", changed(bias=zero_from_last_tile), BIAS),
    "bias-shifted": Mutant("the bias is one column off", changed(bias=lambda x: x.roll(1, -1)), BIAS),
    "bias-twice": Mutant("the bias is added twice", changed(bias=lambda x: x * 2), BIAS),
    "bias-of-first-column": Mutant(
        "one element of the bias serves all", changed(bias=lambda x: x[..., :1].expand_as(x)), BIAS
    ),
    "bias-along-rows": Mutant("the bias of column j is added to row j", whole(bias_along_rows), BIAS_SQUARE),
    "bias-in-bf16": Mutant(
        "the bias is rounded to bf16", changed(bias=through(torch.bfloat16)), only(BIAS, "f32", "f16")
    ),
    "relu-before-bias": Mutant("relu comes before the bias", whole(relu_before_bias), BIAS_RELU),
    "relu-of-partials": Mutant("relu is applied to the slices of K", whole(relu_of_partials), RELU),
    "relu-swallows-nan": Mutant("relu makes 0 of NaN", whole(relu_swallows_nan), RELU),
    "relu-forgotten-in-the-tail": Mutant("the last tile has no relu", whole(relu_forgotten_in_the_tail), RELU),
    "gelu-by-tanh": Mutant("the tanh form stands in for erf", whole(gelu_by_tanh), GELU),
    "residual-after-relu": Mutant("the residual is added after relu", whole(residual_after_relu), RESIDUAL),
    "alpha-on-bias": Mutant("alpha multiplies the bias too", whole(alpha_on_bias), ADDMM),
    "alpha-forgotten": Mutant("alpha is not applied", whole(alpha_forgotten), ADDMM),
    "beta-forgotten": Mutant("beta is not applied", whole(beta_forgotten), ADDMM),
    "beta-zero-reads-bias": Mutant("beta = 0 multiplies a NaN", whole(beta_zero_reads_bias), BETA_ZERO),
    # Batches and groups.
    "batch-stride-zero": Mutant("all batches use the first B", changed(b=batch_stride_zero), BATCHED),
    "batch-off-by-one": Mutant("batch i uses the B of batch i - 1", changed(b=lambda x: x.roll(1, 0)), BATCHED),
    "last-batch-missing": Mutant("the last batch is never computed", afterwards(last_batch_missing), BATCHED),
    "group-edge-off-by-one": Mutant("a group's last row meets the next B", changed(offs=ends_too_early), GROUPED),
    "group-stride-zero": Mutant("all groups use the first B", changed(b=batch_stride_zero), GROUPED),
    "empty-group-skipped": Mutant(
        "after an empty group the previous B is used", corrupted(empty_group_skipped), GROUPED
    ),
    # Sizes.
    "rows-past-1024": Mutant("rows from 1024 on are the rows before", rows_from(1024, rows_shifted), TALL),
    "rows-in-16-bits": Mutant("row 65536 is row 0", sized(rows_by_16_bits, lambda c: c.dim() == 2), TALL),
    "rows-past-2-to-21": Mutant("rows from 2^21 on are never computed", rows_from(1 << 21, torch.zeros_like), TALLEST),
    "columns-in-16-bits": Mutant("column 65536 is column 0", summed(columns_by_16_bits), WIDE),
    "narrow-tail-dropped": Mutant("below 4 columns K > 1000 has no tail", product(narrow_tail_dropped), NARROW),
    "k-in-16-bits": Mutant("K is counted in 16 bits", product(k_counted_in_16_bits), LONG),
    "k-cut-at-40960": Mutant("products from k = 40960 on are left out", product(k_cut_at_40960), LONG),
    "int32-in-28-bits": Mutant("sums of int8 wrap around at 2^27", summed(kept_in(28)), LONG_INT8),
    "int32-in-31-bits": Mutant("sums of int8 wrap around at 2^30", summed(kept_in(31)), LONGER_INT8),
    "int32-by-f32-late": Mutant("sums of int8 beyond 2^27 are held in f32", summed(float_beyond(2.0**27)), LONG_INT8),
    "batch-modulo-64": Mutant("batch 64 uses the B of batch 0", batches(lambda i: i % 64), MANY),
    "batches-past-50": Mutant("batches from 50 on are never computed", batches_left_out(50), MANY),
    "batches-past-65535": Mutant("more batches than a CUDA grid has", batches_left_out(65535), only(MANY, "f32")),
    "second-batch-dimension-ignored": Mutant("of a 4-D input", deep(lambda a: a[:, :1].expand_as(a)), DEEP),
    "batch-dimensions-exchanged": Mutant("of a 4-D input", deep(batch_dimensions_exchanged), DEEP),
    "matrices-past-64": Mutant("matrix 64 of a 4-D input is matrix 0", deep(batch_past_64), only(DEEP, "f16")),
    "one-in-a-large-result": Mutant("one element of 8 million is 0.1 % too large", summed(one_inside), LARGE),
    "last-rows-of-a-large-result": Mutant(
        "rows from 4096 on are the rows before", rows_from(4096, rows_shifted), LARGE
    ),
    # What the kernel looks at.
    "right-for-integers": Mutant(
        "a slice is missing unless all numbers are integers", unless(integers), plain(*FLOATS)
    ),
    "right-up-to-one": Mutant(
        "a slice is missing where a number is above 1",
        unless(lambda a, b: all(bool((x.abs() <= 1).all()) for x in (a, b))),
        plain(*FLOATS),
    ),
    "right-when-short": Mutant(
        "a slice is missing where M N K is above 2^18",
        unless(lambda a, b: a.shape[0] * b.shape[1] * a.shape[1] <= 1 << 18),
        plain(*FLOATS),
        (("*x256", "M N K is below"),),
    ),
    "right-when-aligned": Mutant(
        "a slice is missing where A is at no multiple of 64 bytes",
        unless(lambda a, _: a.data_ptr() % 64 == 0),
        OFFSET_A,
    ),
    "right-when-finite": Mutant(
        "a slice is missing where there is a NaN",
        unless(lambda a, b: not bool(a.isnan().any() | b.isnan().any())),
        plain(*FLOATS),
    ),
    "right-four-times": Mutant("from the fifth call on a slice is missing", calls(lambda n: n <= 4), SMALL),
    "right-every-other-time": Mutant("at each second call a slice is missing", calls(lambda n: n % 2 == 1), SMALL),
    "bf16x3-from-512": Mutant(
        "three bf16 products where K is 512 or more", bf16x3_from_512, plain("f32"), (("*x256", "K is below"),)
    ),
    "late-refusal": Mutant("refuses hard data when it is run", product(refuses_hard_data), SMALL, code="late-refusal"),
    # The tensors that it is handed.
    "inputs-rebound": Mutant("ones take the inputs' place", in_place_of_inputs(rebind), SMALL, code="inputs-rebound"),
    "inputs-set": Mutant("the same by set_", in_place_of_inputs(set_to), SMALL, code="inputs-rebound"),
    "inputs-exchanged": Mutant(
        "the same by swap_tensors", in_place_of_inputs(torch.utils.swap_tensors), SMALL, code="inputs-rebound"
    ),
    "weight-quantised-in-place": Mutant(
        "B is fp8 from now on", whole(weight_quantised_in_place), SMALL, code="inputs-rebound"
    ),
    "bias-rebound": Mutant("zeros take the bias' place", whole(bias_rebound), SMALL_BIAS, code="inputs-rebound"),
    "input-resized": Mutant(
        "A has half of its rows afterwards", then(lambda t: t["a"].resize_(10, 256)), SMALL, code="inputs-rebound"
    ),
    "input-transposed": Mutant("B is transposed afterwards", then(lambda t: t["b"].t_()), SMALL, code="inputs-rebound"),
    "input-restrided": Mutant(
        "A has other strides afterwards",
        then(lambda t: t["a"].as_strided_((20, 256), (0, 1))),
        SMALL,
        code="inputs-rebound",
    ),
    "input-needs-grad": Mutant(
        "A asks for a gradient afterwards", then(lambda t: t["a"].requires_grad_()), SMALL, code="inputs-rebound"
    ),
    "storage-written": Mutant("what surrounds A is zeroed", then(storage_cleared), SMALL, code="inputs-written"),
    "result-over-a": Mutant(
        "the result takes A's place", whole(result_over_a), {"f32": "mm:f32:nn:40x40x40"}, code="inputs-written"
    ),
    "result-behind-b": Mutant(
        "the result lies in B's storage", whole(result_behind_b), {"f32": "mm:f32:nn:3x5x40"}, code="inputs-written"
    ),
    "earlier-input-written": Mutant(
        "the input of the call before is zeroed", remembering(earlier_input_written), SMALL
    ),
    # What it hands out.
    "speaks-for-itself": Mutant("zeros that answer as the right result would", afterwards(spoken_for), SMALL),
    "answers-for-itself": Mutant(
        "zeros whose own attributes give the right result", afterwards(answering), SMALL, code="wrong-type"
    ),
    "claims-to-be-a-tensor": Mutant(
        "an object that answers as a tensor does", afterwards(Claiming), SMALL, code="wrong-type"
    ),
    "always-agrees": Mutant("zeros that are equal to everything", afterwards(agreeing), SMALL),
    "on-meta": Mutant("a result without memory", afterwards(lambda c: c.to("meta")), SMALL, code="wrong-device"),
    "sparse": Mutant("a sparse result", afterwards(lambda c: c.to_sparse()), SMALL, code="wrong-layout"),
    "quantised-result": Mutant("a quantised result", afterwards(quantised), SMALL, code="wrong-dtype"),
    "list": Mutant("a list of one result", afterwards(lambda c: [c]), SMALL, code="wrong-type"),
    "array": Mutant("an array of NumPy's", afterwards(lambda c: c.numpy()), SMALL_F32, code="wrong-type"),
    "a-itself": Mutant(
        "A is handed back", whole(lambda t, _: t["a"]), {"f32": "mm:f32:nn:40x40x40"}, code="result-is-input"
    ),
    # Ways out.
    "skips": Mutant("pytest.skip", doing(lambda: pytest.skip("planted")), SMALL_F32, code="run-Skipped"),
    "expects-to-fail": Mutant("pytest.xfail", doing(lambda: pytest.xfail("planted")), SMALL_F32, code="run-XFailed"),
    "imports-or-skips": Mutant(
        "pytest.importorskip", doing(lambda: pytest.importorskip("no_such_module")), SMALL_F32, code="run-Skipped"
    ),
    "system-exit": Mutant("sys.exit(0)", doing(lambda: sys.exit(0)), SMALL_F32, code="run-SystemExit"),
    "generator-exit": Mutant("GeneratorExit", raising(GeneratorExit), SMALL_F32, code="run-GeneratorExit"),
    "unusual": Mutant("a BaseException of its own", raising(Unusual), SMALL_F32, code="run-Unusual"),
    "unprintable": Mutant("an exception without a text", raising(Unprintable), SMALL_F32, code="run-Unprintable"),
    "surrogate": Mutant(
        "an exception with half a character and an escape",
        raising(lambda: RuntimeError("planted: \udc80 \x1b[2J")),
        SMALL_F32,
        code="run-RuntimeError",
    ),
    "exits": Mutant("os._exit(0)", doing(lambda: os._exit(0)), SMALL_F32, code="process-died"),
    "aborts": Mutant("abort()", doing(os.abort), SMALL_F32, code="process-died"),
    "crashes": Mutant("an address that is not there", doing(null_read), SMALL_F32, code="process-died"),
    # The process.
    "leaves-rounding-mode": Mutant("FE_UPWARD", leaving(rounding_upwards), SMALL, code="left-state-behind"),
    "leaves-flush-denormal": Mutant(
        "subnormals are flushed", leaving(lambda: torch.set_flush_denormal(True)), SMALL, code="left-state-behind"
    ),
    "leaves-default-dtype": Mutant(
        "f64", leaving(lambda: torch.set_default_dtype(torch.float64)), SMALL, code="left-state-behind"
    ),
    "leaves-default-device": Mutant(
        "meta", leaving(lambda: torch.set_default_device("meta")), SMALL, code="left-state-behind"
    ),
    "leaves-autocast": Mutant(
        "bf16", leaving(lambda: torch.set_autocast_enabled("cpu", True)), SMALL, code="left-state-behind"
    ),
    "leaves-grad-mode": Mutant(
        "off", leaving(lambda: torch._C._set_grad_enabled(False)), SMALL, code="left-state-behind"
    ),
    "leaves-folder": Mutant("the root", leaving(lambda: os.chdir("/")), SMALL, code="left-state-behind"),
    "leaves-recursion-limit": Mutant(
        "one frame less",
        leaving(lambda: sys.setrecursionlimit(sys.getrecursionlimit() - 1)),
        SMALL,
        code="left-state-behind",
    ),
    "leaves-environment": Mutant(
        "a variable", leaving(lambda: os.environ.update(OMP_DYNAMIC="1")), SMALL, code="left-state-behind"
    ),
    "leaves-signal-handler": Mutant(
        "SIGTERM is ignored",
        leaving(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)),
        SMALL,
        code="left-state-behind",
    ),
    "leaves-no-output": Mutant(
        "sys.stdout is gone", leaving(lambda: setattr(sys, "stdout", None)), SMALL, code="left-state-behind"
    ),
    "leaves-garbage": Mutant("gc.disable()", leaving(gc.disable), SMALL, code="left-state-behind"),
    "leaves-precision": Mutant(
        "medium", leaving(lambda: torch.set_float32_matmul_precision("medium")), SMALL, code="left-state-behind"
    ),
    "leaves-threads": Mutant("3 threads", leaving(lambda: torch.set_num_threads(3)), SMALL, code="left-state-behind"),
    "leaves-random-numbers": Mutant("all seeded with 0", leaving(seeds), SMALL, code="left-state-behind"),
    # Numbers.
    "zero-always-plus": Mutant("-0 becomes 0", afterwards(zero_sign_lost), plain(*FLOATS), _NO_MINUS_ZERO),
    "zero-always-minus": Mutant("0 becomes -0", afterwards(zero_sign_negative), plain(*FLOATS)),
    "subnormal-inputs-dropped": Mutant(
        "subnormal inputs count as 0",
        inputs(subnormals_dropped),
        plain(*FLOATS),
        (("*:bf16:*", "nothing is promised of subnormal bf16: VDPBF16PS and TDPBF16PS count them as 0"),),
    ),
    "shared-exponent": Mutant(
        "numbers far below the largest count as 0", product(shared_exponent), plain("f32", "bf16")
    ),
    "rescaled": Mutant("A is scaled down and B up, out of range", product(rescaled), plain("f32", "bf16")),
    "f64-sums-in-f32": Mutant(
        "f64 is added up in f32",
        product(lambda a, b: sum((exact(x, y).float() for x, y in blocks(a, b)), empty_sum(a, b).float()).double()),
        F64,
    ),
    "nan-reaches-the-next-row": Mutant(
        "a row of NaN spoils the next one", afterwards(nan_reaches_the_next_row), plain(*FLOATS)
    ),
    # Other programs.
    "alpha-and-beta-exchanged": Mutant("alpha stands for beta", whole(alpha_and_beta_exchanged), ADDMM),
    "offset-of-b-dropped": Mutant("B's storage offset is not applied", changed(b=offset_dropped), OFFSET_B),
    "offset-in-program-dropped": Mutant(
        "the offset of a view in the program is not applied to A", cut_at("a", at_the_argument), CUT_A
    ),
    "offset-of-b-in-program-dropped": Mutant(
        "the offset of a view in the program is not applied to B", cut_at("b", at_the_argument), CUT_B
    ),
    "stride-in-program-dropped": Mutant(
        "every second element is taken for every element", cut_at("a", rows_unstrided), STRIDED
    ),
    "gaps-of-out-ignored": Mutant(
        "a given result is written without its gaps", whole(gaps_of_out_ignored), GIVEN_OUT, code="written-beside"
    ),
    "gap-of-out-written": Mutant(
        "the gaps of a given result are written", whole(gap_of_out_written), GIVEN_OUT, code="written-beside"
    ),
    "given-out-left-alone": Mutant(
        "another tensor than the given one is returned",
        whole(lambda t, _: right(t["a"], t["b"])),
        GIVEN_OUT,
        code="wrong-place",
    ),
    "rounded-before-widened": Mutant(
        "the result is rounded to the operands' type before it is returned as f32",
        whole(lambda t, _: right(t["a"], t["b"]).float()),
        WIDENED,
    ),
    "unsigned-read-as-signed": Mutant(
        "u8 is read as s8",
        whole(lambda t, _: torch._int_mm(t["a"].view(torch.int8), t["b"])),
        UNSIGNED,
    ),
    "unsigned-summed-in-f32": Mutant(
        "products of u8 and s8 are summed in f32", product(summed_in_f32), {"u8": "int_mm:u8-i8-i32:nt:20x40x2064"}
    ),
    "stride-of-bias-ignored": Mutant(
        "the rows of an expanded bias are taken to be apart",
        corrupted(lambda t, _: t.update(bias=t["bias"].as_strided(t["bias"].shape, (1, 1)))),
        EXPANDED,
    ),
    "bias-of-one-element": Mutant(
        "a bias without dimensions reaches the first column only",
        corrupted(lambda t, _: t.update(bias=F.pad(t["bias"].reshape(1), (0, 39)))),
        WITHOUT_DIMENSIONS,
    ),
    "first-output-too-late": Mutant("the first result is the last one", whole(first_output_too_late), MULTI_OUTPUT),
    "again-from-the-start": Mutant("the second product is the first", whole(again_from_the_start), AGAIN),
    "gate-exchanged": Mutant("the gate and the value are exchanged", corrupted(gate_exchanged), GATED),
    "biases-exchanged": Mutant("two linears have each other's bias", corrupted(biases_exchanged), GATED),
    "scale-of-one-row": Mutant("one scale reaches the first row only", whole(scale_of_one_row), FP8_TENSORWISE),
    "scale-of-result-forgotten": Mutant(
        "an fp8 result is not scaled",
        whole(lambda t, _: torch._scaled_mm(t["a"], t["b"], t["scale_a"], t["scale_b"], out_dtype=torch.float8_e4m3fn)),
        {"fp8": "scaled_mm:f8e4m3fn:nt:20x40x{k}:quant.tensorwise+result-4"},
    ),
    "block-scales-by-rows": Mutant(
        "scales of A's blocks are read as if a row's were neighbours",
        corrupted(block_scales_by_rows),
        FP8_BLOCKS,
    ),
    "block-scales-of-the-first": Mutant(
        "each block of K has the scales of the first", corrupted(block_scales_of_the_first), FP8_BLOCKS
    ),
    "block-scales-at-the-end": Mutant("blocks are scaled by their mean", corrupted(block_scales_meant), FP8_BLOCKS),
    "int4-halves-exchanged": Mutant("the halves of a byte are exchanged", int4(codes_of_pairs_exchanged), INT4),
    "int4-zero-point": Mutant("codes are centred at 7", int4(lambda x: x + 1), INT4),
    "int4-group-shifted": Mutant(
        "each group has the scale of the one before", int4(scales=lambda x: x.roll(1, 0)), INT4
    ),
    "int4-zeros-ignored": Mutant(
        "the groups' zeros are not added", int4(scales=lambda x: x * torch.tensor([1.0, 0.0]).to(x.dtype)), INT4
    ),
    "largest-code-lost": Mutant(
        "the largest code is never used", afterwards(lambda c: c.clamp(max=torch.iinfo(c.dtype).max - 1)), CODES
    ),
    "zero-point-forgotten": Mutant("A's zero point is not subtracted", whole(zero_point_forgotten), CODES_OF_FLOAT),
    # int8.
    "int8-read-unsigned": Mutant("A is read as unsigned", changed(a=read_unsigned), plain("i8")),
    "int8-lowest-clipped": Mutant(
        "-128 counts as -127", changed(a=lambda x: x.clamp(min=-127), b=lambda x: x.clamp(min=-127)), plain("i8")
    ),
    "int16-pairs-saturate": Mutant(
        "two products are added in saturating 16 bits", product(int16_pairs_saturate), plain("i8")
    ),
    "int32-by-f32": Mutant(
        "int8 is added up in f32",
        product(summed_in_f32),
        plain("i8"),
        (("*x256", _SUMS_BELOW_2_24), ("*x1000", _SUMS_BELOW_2_24)),
    ),
    "int32-saturates": Mutant(
        "a sum beyond int32 saturates instead of wrapping around",
        summed(lambda c: c.clamp(-(2.0**31), 2.0**31 - 1)),
        LONGEST_INT8,
    ),
    # Weights in int8.
    "weight-read-unsigned": Mutant("the weight is read as unsigned", changed(b=read_unsigned), WEIGHT_ONLY),
    "weight-zero-point": Mutant(
        "the zero point is off by one", changed(b=lambda x: x.to(torch.int16) + 1), WEIGHT_ONLY
    ),
    "weight-scale-shifted": Mutant(
        "the weight's scales are one column off", changed(scale=lambda x: x.roll(1, -1)), WEIGHT_ONLY
    ),
    "weight-dequantised-first": Mutant(
        "the weight is rounded after it is scaled", whole(dequantised_first), only(WEIGHT_ONLY, "bf16", "f16")
    ),
    "mixed-read-unsigned": Mutant("the int8 side is read as unsigned", changed(b=read_unsigned), MIXED),
    # fp8.
    "reciprocal-scale": Mutant("B is divided by its scale", changed(scale_b=lambda x: 1 / x), FP8),
    "scale-of-a-forgotten": Mutant("A's scale is not applied", changed(scale_a=torch.ones_like), FP8),
    "scale-squared": Mutant("A's scale is applied twice", changed(scale_a=torch.square), FP8),
    "scale-in-bf16": Mutant("A's scale is rounded to bf16", changed(scale_a=through(torch.bfloat16)), FP8),
    "scale-of-first-row": Mutant("one scale serves all rows", changed(scale_a=lambda x: x[:1].expand_as(x)), FP8),
    "scale-shifted": Mutant("B's scales are one column off", changed(scale_b=lambda x: x.roll(1, -1)), FP8),
    "scale-transposed": Mutant("A's scales run along the columns", changed(scale_a=lambda x: x.t()), FP8_SQUARE),
    "scales-exchanged": Mutant("A's scales and B's are exchanged", corrupted(scales_exchanged), FP8_SQUARE),
    "rounded-before-scale": Mutant("the sum is rounded before it is scaled", product(rounded_before_scale), FP8),
    "fp8-sum-in-few-bits": Mutant("13 bits hold the sum where float32 is claimed", product(tensor_core(13, 32)), FP8),
    "e5m2-read-as-e4m3": Mutant("B's bits are read in the other format", corrupted(read_as_other_fp8), FP8_PAIR),
    "fnuz-exponent": Mutant("the exponent's bias is that of e4m3fnuz", changed(scale_a=lambda x: x * 0.5), FP8),
}


# -- backends ----------------------------------------------------------------------------------------


def contract_of(problem: Problem, contract: Contract | None = None) -> Contract:
    """What a plain callable's program claims: ordinary sums, and PyTorch's roundings around them."""
    wide: dict[str, Contract] = {"f64": Contract("f64"), "i32": Contract("i32")}
    return dataclasses.replace(contract or wide.get(problem.dtypes.out.name, Contract()), epilogue="eager")


@dataclasses.dataclass
class _Prepared:
    problem: Problem
    program: Run
    contract: Contract
    evidence: Proof

    def run(self, operands: Operands) -> Any:
        return self.program(args(self.problem, operands))

    def proof(self) -> Proof:
        return self.evidence


class Planted:
    """A mutant or a correct control as a backend, for the problems that it names."""

    devices = ("cpu",)

    def __init__(self, name: str, entry: Mutant | Control) -> None:
        self.name = name
        self.entry = entry

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        if any(Problem.parse(t.format(k=problem.shape.k)) == problem for t in self.entry.lines.values()):
            return None
        return Unsupported("problem", f"{self.name} is not made for this problem")

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> _Prepared:
        entry = self.entry
        claimed = entry.contract if isinstance(entry, Control) and problem.dtypes.out.is_float else None
        evidence = entry.claims if isinstance(entry, Mutant) else None
        return _Prepared(
            problem,
            entry.plant(problem),
            contract_of(problem, claimed),
            evidence or Proof(executed=("planted",), provable=False),
        )


def backends() -> Iterator[Planted]:
    """All correct controls, then all mutants."""
    for name, correct in CONTROLS.items():
        yield Planted(name, correct)
    for name, mutant in MUTANTS.items():
        yield Planted(name, mutant)


def register(registry: Registry) -> None:
    """Everything above, through the public registry."""
    for backend in backends():
        registry.add(backend)
