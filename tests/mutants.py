"""Backends with planted bugs, and correct ones beside them: what the harness must catch, and must not.

Every one can be registered through the public hook, as a stranger's would be.  A mutant names the problems in which its
bug can show, and the ones among them where it cannot: there it is an equivalent mutant, and the reason stands
beside it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fnmatch
import gc
import hashlib
import itertools
import math
import os
import platform
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.judging import explain
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import views
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build
from pytest_gemm.storage.datafile import document

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
Matmul = Callable[[Tensor, Tensor], Any]
# A problem's program over the tensors of ``program.args``.
Run = Callable[[Tensors], Any]
# Makes one for a problem; what it remembers from run to run lives as long as one prepared problem.
Plant = Callable[[Problem], Run]
Change = Callable[[Tensor], Tensor]
# What a program keeps from run to run.
Memory = dict[Any, Any]
# The indices of each part of K, given K.
Parts = Callable[[int], Iterable[slice | Tensor]]
# Names of mutants: the bug, and the program with it.
Bugs = dict[str, tuple[str, Plant]]
# Patterns of problem lines, and why a bug cannot show there.
Reasons = tuple[tuple[str, str], ...]

# Sizes of a tile, of a block of K and of a vector in the bugs that speak of one.  No K of the study is a multiple of
# the block, so that each has a tail.
TILE = 16
BLOCK = 48
VECTOR = 16
SLICES = 4

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

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
_MM, _FLOATS, _F32, _I8, FP8 = plain(), plain(*FLOATS), plain("f32"), plain("i8"), plain("fp8")
_HALVES, _BROAD, _ROUNDED = plain("bf16", "f16"), plain("f32", "bf16"), plain("bf16", "f16", "fp8")
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
OUT_BY_COLUMNS = lines("mm:{d}:nn:20x40x{k}:out.given+transposed")
# C = alpha A B + beta C in place, and a result that is written over A.
ADDEND = lines("addmm:{d}:nn:20x40x{k}:bias-mn+alpha-0.5+beta-2:out.given+addend")
OVER_A = lines("mm:{d}:nn:20x40x40:out.given+alias")
OFFSET_BIAS = lines("linear:{d}:nt:20x400x{k}:bias:bias.offset")
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
# Of level quick, with a short last group; of level full.
WOQ = {
    "i4": "woq:bf16-i4-bf16:nt:17x65x202:quant.group-32+zeros",
    "u8": "woq:f16-u8-f16:nt:17x65x200:quant.group-64+zeros",
}
Q8_0 = {"i8": "woq:f32-i8-f32:nt:17x65x128:quant.group-32+inside-q8_0"}
NF4 = {"i4": "woq:bf16-i4-bf16:nt:17x65x128:quant.group-64+nf4"}
BIAS_CODES = {"u8": "qlinear:u8-i8-f32:nt:17x65x127:bias:quant.static-0.02_7+bias_codes:a.7bit"}
HALF_WEIGHT = {"f32": "mixed_mm:f32-f16-f32:nt:17x65x127"}
ABSMAX = {"f32": "da8w8:i8-i8-f32:nt:17x65x127:quant.rowwise+absmax"}
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

# Bugs that begin at a size: problems of conformance/cases, of level full.
TALL = {
    "f32": "mm:f32:nn:65601x5x3",
    "bf16": "linear:bf16:nt:65601x4x8:bias",
    "f16": "addmm:f16:nn:65601x3x5:bias-mn:b.argument",
}
TALLEST = {"f32": "mm:f32:nn:2200001x4x3"}
WIDE = {"f32": "mm:f32:nn:3x65601x5:b.argument"}
LONG = {
    "f32": "mm:f32:nn:5x3x65601",
    "bf16": "linear:bf16:nt:97x193x65601:bias",
    "f16": "addmm:f16:nn:5x2x65601:bias+alpha-0.5+beta-2",
}
NARROW = {"f32": LONG["f32"], "f16": "linear:f16:nt:33x1x4099"}
LONG_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x65608"}
LONGER_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x270344"}
LONGEST_INT8 = {"i8": "int_mm:i8-i8-i32:nt:17x16x540680"}
MANY = {"f32": "baddbmm:f32:nn:65601x2x3x5:bias-mn", "bf16": "bmm:bf16:nt:131x9x8x16"}
DEEP = {"f32": "linear:f32:nt:6x17x65x96:bias+relu+add:a.4d", "f16": "linear:f16:nt:66x3x17x33:bias:a.4d"}
# Judged by sample, and in no level: each element is looked at, but only some lines are compared with the reference.
LARGE = {"f32": "mm:f32:nn:4099x2053x1025"}

# -- mutants and controls ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A product of its own arithmetic.

    Attributes:
        what: one sentence.
        plant: the program.
        lines: problems by dtype, with ``{k}`` for K.
    """

    what: str
    plant: Plant
    lines: dict[str, str] = dataclasses.field(default_factory=plain)

    def problems(self, ks: tuple[int, ...] = KS) -> Iterator[tuple[str, int, str]]:
        """``(dtype, K, line)`` of all problems: a template at each K, a line that has its own K once."""
        for dtype, template in self.lines.items():
            for k in ks if "{k}" in template else (Problem.parse(template).shape.k,):
                yield dtype, k, template.format(k=k)


@dataclasses.dataclass(frozen=True)
class Control(Entry):
    """A right product.

    Attributes:
        contract: what it declares beyond ordinary sums.
    """

    contract: Contract = dataclasses.field(default_factory=Contract)


@dataclasses.dataclass(frozen=True)
class Mutant(Entry):
    """A planted bug.

    Attributes:
        code: reason code of the outcome that catches it, where one is expected.
        equivalent: problems in which the bug cannot show: pattern of a line, and why it changes no result that the
            contract rules out.
        claims: contract and proof beyond a plain callable's: names of kernels.
    """

    code: str = ""
    equivalent: Reasons = ()
    claims: Proof | None = None

    def problems(self, ks: tuple[int, ...] = KS) -> Iterator[tuple[str, int, str]]:
        """Those in which the bug can show."""
        for dtype, k, line in super().problems(ks):
            if not any(fnmatch.fnmatchcase(line, pattern) for pattern, _ in self.equivalent):
                yield dtype, k, line


MUTANTS: dict[str, Mutant] = {}
_Wrong = TypeVar("_Wrong", bound=Callable[..., Any])


def mutant(
    shape: Callable[[Any], Plant], lines: dict[str, str] | None = None, code: str = "", equivalent: Reasons = ()
) -> Callable[[_Wrong], _Wrong]:
    """Plant what is decorated, by one of the shapes below: its name and its docstring say what the bug is."""

    def planted(wrong: _Wrong) -> _Wrong:
        what = str(wrong.__doc__).partition("\n")[0].removesuffix(".")
        if not what.startswith(("A's ", "B's ", "NaN ")):
            what = what[0].lower() + what[1:]
        name = wrong.__name__.replace("_", "-")
        MUTANTS[name] = Mutant(what, shape(wrong), plain() if lines is None else lines, code, equivalent)
        return wrong

    return planted


_NO_MINUS_ZERO = tuple(
    (f"*:{d}:*", "a sum that begins with 0 is never -0, and no result here underflows") for d in ("f32", "bf16")
)
_NO_SUBNORMAL_BF16 = (("*:bf16:*", "nothing is promised of subnormal bf16: VDPBF16PS and TDPBF16PS count them as 0"),)


def hidden(why: str) -> Reasons:
    """For bugs that 8 or 11 bits do not show."""
    return tuple((f"*{dtype}*", why) for dtype in ("bf16", ":f16"))


_ANY_ORDER = (
    ("int_mm:*", "integers add up to the same in any order"),
    *hidden("the order of float32 sums hardly ever shows in 8 or 11 bits"),
)


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


def blocks(a: Tensor, b: Tensor, size: int = BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of K."""
    for part in blocks_of(size)(a.shape[-1]):
        yield a[..., part], b[..., part, :]


def empty_sum(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=dtype or working(a))


# -- parts of K: of how many products, the indices of each part -----------------------------------------


def blocks_of(size: int) -> Parts:
    return lambda k: [slice(first, first + size) for first in range(0, k, size)]


def quarters(k: int) -> list[slice]:
    """The slices of split K."""
    edges = [k // SLICES * i + min(i, k % SLICES) for i in range(SLICES + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def over(parts: Parts, term: Matmul = exact) -> Callable[[Tensor, Tensor], Tensor]:
    """A product that adds up ``term`` over these parts of K."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        terms = (term(a[..., part], b[..., part, :]) for part in parts(a.shape[-1]))
        return store(sum(terms, empty_sum(a, b)), a)

    return matmul


def rounded_to(dtype: torch.dtype) -> Matmul:
    """A term that is stored in ``dtype`` before it is added."""
    return lambda a, b: through(dtype)(exact(a, b))


split_k_slice_dropped = over(lambda k: [part for i, part in enumerate(quarters(k)) if i != 2])


# -- how a bug becomes a backend ---------------------------------------------------------------------


def product(matmul: Matmul) -> Plant:
    """The bug is in the product, everything around it is eager PyTorch."""

    def plant(problem: Problem) -> Run:
        program = build(problem, matmul)
        return lambda tensors: program(**tensors)

    return plant


def summed(wrong: Change) -> Plant:
    """The bug is in what becomes of the finished sums before they are stored."""
    return product(lambda a, b: store(wrong(exact(a, b)), a))


def inputs(wrong: Change) -> Plant:
    """The bug is in what the product reads of both of its inputs."""
    return product(lambda a, b: store(exact(wrong(a), wrong(b)), a))


def reading(a: Change = lambda x: x, b: Change = lambda x: x) -> Plant:
    """The bug is in how the product reads A or B."""
    return product(lambda x, y: right(a(x), b(y)))


def added(parts: Parts, term: Matmul = exact) -> Plant:
    """The bug is in which products are added, and in how each part is."""
    return product(over(parts, term))


def corrupted(spoil: Callable[[Tensors, Problem], None], matmul: Matmul = right) -> Plant:
    """The product is right, of corrupted operands."""

    def plant(problem: Problem) -> Run:
        program = build(problem, matmul)

        def run(tensors: Tensors) -> Any:
            spoil(tensors, problem)
            return program(**tensors)

        return run

    return plant


def changed(**how: Change) -> Plant:
    """The named tensors of the program are changed before it runs."""
    return corrupted(lambda t, _: t.update((name, change(t[name])) for name, change in how.items()))


def changing(name: str) -> Callable[[Change], Plant]:
    """The shape of a bug in how one tensor of the program is read."""
    return lambda change: changed(**{name: change})


def exchanged(*pairs: tuple[str, str]) -> Plant:
    """Tensors of the program stand in each other's place."""

    def spoil(t: Tensors, _problem: Problem) -> None:
        for one, other in pairs:
            t[one], t[other] = t[other], t[one]

    return corrupted(spoil)


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


def then(change: Callable[[Tensors], object]) -> Plant:
    """The result is right; then something happens to the inputs."""

    def run(t: Tensors, problem: Problem) -> Any:
        result = correct(t, problem)
        change(t)
        return result

    return whole(run)


def remembering(with_memory: Callable[[Memory, Tensors, Problem], Any]) -> Plant:
    """A program that keeps something from run to run."""

    def plant(problem: Problem) -> Run:
        memory: Memory = {}
        return lambda tensors: with_memory(memory, tensors, problem)

    return plant


def correct(t: Tensors, problem: Problem) -> Any:
    return build(problem, right)(**t)


def of_ab(t: Tensors) -> Tensor:
    """The product of a program of B as K x N."""
    return right(t["a"], t["b"])


def of_linear(t: Tensors) -> Tensor:
    """The product of a program of B as N x K."""
    return right(t["a"], t["b"].mT)


# -- bugs of the loop over K -------------------------------------------------------------------------


def late_stage(b: Tensor) -> Tensor:
    """The second block of B still is the first one's when it is multiplied."""
    return torch.cat([b[..., :BLOCK, :], b[..., :BLOCK, :], b[..., 2 * BLOCK :, :]], -2)


def last_pair_swapped(b: Tensor) -> Tensor:
    """B is packed in pairs of k, and the last pair is packed the wrong way round."""
    k = b.shape[-2]
    return b[..., [*range(k - 2), k - 1, k - 2], :]


def accumulated_in(dtype: torch.dtype) -> Plant:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        total = empty_sum(a, b, dtype)
        for x, y in blocks(a, b, 16):
            total = (total.float() + exact(x, y).float()).to(dtype)
        return store(total.to(working(a)), a)

    return product(matmul)


def products_in(dtype: torch.dtype) -> Plant:
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        total = empty_sum(a, b)
        for x, y in blocks(a.to(working(a)), b.to(working(a)), 256):
            total = total + (x[..., :, :, None] * y[..., None, :, :]).to(dtype).to(working(a)).sum(-2)
        return store(total, a)

    return product(matmul)


@mutant(product, equivalent=(("int_mm:*", "integers have no NaN"),))
def zeros_skipped(a: Tensor, b: Tensor) -> Tensor:
    """A product with 0 counts as 0, whatever the other factor is: 0 * NaN is lost."""
    x, y = a.to(working(a)), b.to(working(a))
    special = (~x.isfinite()).any(-2) | (~y.isfinite()).any(-1)
    total = exact(x[..., ~special], y[..., ~special, :])
    for k in special.nonzero().flatten().tolist():
        column, row = x[..., :, k, None], y[..., None, k, :]
        total = total + torch.where((column == 0) | (row == 0), 0.0, column * row)
    return store(total, a)


def beyond_k(*, read_a: bool = False, read_b: bool = False) -> Plant:
    """K is rounded up to whole blocks; where an operand is not masked, what lies behind its rows is read."""

    def rows(x: Tensor, more: int, *, is_read: bool) -> Tensor:
        if is_read:
            x = x.as_strided((x.shape[-2], more), (x.stride(-2), 1), x.storage_offset())
        return F.pad(x.to(working(x)), (0, more - x.shape[-1]))

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        more = -(-a.shape[-1] // BLOCK) * BLOCK
        weight = b.mT  # stored as N x K
        return store(exact(rows(a, more, is_read=read_a), rows(weight, more, is_read=read_b).mT), a)

    return product(matmul)


@mutant(added)
def k_doubled(k: int) -> list[slice]:
    """The product in the middle is added twice."""
    return [slice(k), slice(k // 2, k // 2 + 1)]


@mutant(added)
def tail_block_moved_back(k: int) -> list[slice]:
    """The last block begins at K - 48, so that it is full, and its overlap is added twice."""
    return [slice(k // BLOCK * BLOCK), slice(k - BLOCK, k)]


@mutant(added)
def split_k_slice_doubled(k: int) -> list[slice]:
    """One slice of four is added twice."""
    return [*quarters(k), quarters(k)[1]]


# -- bugs of precision -------------------------------------------------------------------------------


def cut_to_tf32(x: Tensor) -> Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def rounded_to_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)


def through(dtype: torch.dtype) -> Change:
    return lambda x: x.to(dtype).to(x.dtype)


@mutant(product, _F32)
def tail_in_tf32(a: Tensor, b: Tensor) -> Tensor:
    """The columns of the last tile are multiplied in TF32."""
    columns = b.shape[-1] // TILE * TILE
    return torch.cat([exact(a, b[..., :columns]), exact(cut_to_tf32(a), cut_to_tf32(b[..., columns:]))], -1)


def in_parts(round_off: Change, terms: tuple[tuple[int, int], ...]) -> Plant:
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


_THREE = ((0, 0), (0, 1), (1, 0))
BF16_X3 = in_parts(through(torch.bfloat16), _THREE)


def fixed_point(bits: int) -> Plant:
    """Rows of A and columns of B as integers of ``bits`` bits below their largest element, as in the Ozaki scheme."""

    def cut(x: Tensor, dim: int) -> Tensor:
        largest = torch.where(x.isfinite(), x, 0.0).abs().amax(dim, keepdim=True).double()
        unit = torch.exp2(torch.frexp(largest)[1].double() - bits)
        return torch.where(x.isfinite(), (x.double() / unit).round() * unit, x.double())

    return product(lambda a, b: torch.matmul(cut(a, -1), cut(b, -2)).to(a.dtype))


@mutant(product, _FLOATS, equivalent=hidden("in float32 its error is far below what 8 or 11 bits show"))
def strassen(a: Tensor, b: Tensor) -> Tensor:
    """One level of Strassen's algorithm, whose error grows with the whole row.

    Seven products, and cancellation between them.
    """
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


def flushed_below(limit: float) -> Change:
    return lambda x: torch.where(x.abs() < limit, torch.zeros_like(x), x)


def f32_sums(a: Tensor, b: Tensor, size: int = 16) -> Tensor:
    """Sums of numbers that float32 cannot add up exactly."""
    return sum((exact(x, y).float() for x, y in blocks(a, b, size)), empty_sum(a, b, torch.float32))


@mutant(corrupted, AUTOCAST)
def autocast_truncates(t: Tensors, problem: Problem) -> None:
    """The cast to the half type truncates."""
    for name in ("a", "b"):
        t[name] = cut_off(t[name].float(), torch_dtype(problem.input_dtype)).float()


# -- bugs of the store -------------------------------------------------------------------------------

_DROPPED = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}


def cut_off(c: Tensor, dtype: torch.dtype, add: Tensor | int = 0) -> Tensor:
    """The bits that ``dtype`` has not are dropped, after something was added to them."""
    bits = (c.contiguous().view(torch.int32) + add) & ~_DROPPED[dtype]
    return torch.where(c.isfinite(), bits.view(torch.float32), c).to(dtype)


@mutant(stored, _ROUNDED)
def rounded_upwards(c: Tensor, dtype: torch.dtype) -> Tensor:
    """The result is rounded towards +Inf."""
    return cut_off(c, dtype, torch.where(c > 0, _DROPPED[dtype], 0).to(torch.int32))


@mutant(stored, _ROUNDED)
def rounded_at_random(c: Tensor, dtype: torch.dtype) -> Tensor:
    """Stochastic rounding."""
    return cut_off(c, dtype, torch.randint(0, _DROPPED[dtype] + 1, c.shape, dtype=torch.int32, generator=DICE))


def stored_through(between: torch.dtype) -> Plant:
    return stored(lambda c, dtype: c.to(between).to(torch.float32).to(dtype))


@mutant(stored, _ROUNDED)
def ties_away(c: Tensor, dtype: torch.dtype) -> Tensor:
    """Ties are rounded away from zero."""
    return cut_off(c, dtype, (_DROPPED[dtype] + 1) // 2)


# -- bugs of tiles and elements ----------------------------------------------------------------------


def put(place: Callable[[Tensor], Any], other: Callable[[Tensor], Tensor | float]) -> Change:
    """What stands at the indices of ``place`` is something else."""

    def wrong(c: Tensor) -> Tensor:
        made = c.clone()
        made[place(c)] = other(c)
        return made

    return wrong


def zero(_c: Tensor) -> float:
    return 0.0


def last_columns(c: Tensor) -> Any:
    """Those of the last tile."""
    return ..., slice(c.shape[-1] // TILE * TILE, None)


def last_tile(c: Tensor) -> Any:
    return ..., slice(c.shape[-2] // TILE * TILE, None), slice(c.shape[-1] // TILE * TILE, None)


_TWO_TILES = (..., slice(TILE), slice(2 * TILE))
_FRAGMENT = (..., slice(8, 16), slice(8, 16))


def unwritten(c: Tensor) -> float:
    return torch.nan if c.dtype.is_floating_point else torch.iinfo(c.dtype).min


def of_largest(change: Change) -> Change:
    """The largest element is changed: one that is zero anyway would prove nothing."""

    def wrong(c: Tensor) -> Tensor:
        flat = c.reshape(-1).clone()
        at = int(torch.where(flat.isfinite(), flat, 0).abs().argmax())
        flat[at] = change(flat[at])
        return flat.view(c.shape)

    return wrong


def neighbour(x: Tensor) -> Tensor:
    """The next number towards zero, of an integer the next one."""
    return torch.nextafter(x, torch.zeros_like(x)) if x.dtype.is_floating_point else x + 1


def rows_before(c: Tensor) -> Tensor:
    return c.roll(1, -2)


def rows_from(first: int, other: Change) -> Plant:
    """The rows from ``first`` on are those of ``other``."""
    place = (..., slice(first, None), slice(None))
    return summed(put(lambda _: place, lambda c: other(c)[place]))


def rows_apart_by_k(a: Tensor) -> Tensor:
    """Gaps between the rows, or a transposed layout, are not seen."""
    return a.as_strided(a.shape, (a.shape[-1], 1))


def columns_apart_by_k(b: Tensor) -> Tensor:
    return b.as_strided(b.shape, (1, b.shape[-2]))


def base_rounded_down(a: Tensor) -> Tensor:
    """A's address is taken to be a multiple of 64 bytes."""
    unit = 64 // a.element_size()
    return a.as_strided(a.shape, a.stride(), a.storage_offset() // unit * unit)


@mutant(summed)
def last_row_repeats(c: Tensor) -> Tensor:
    """A clamped index repeats the row before the last."""
    return torch.cat([c[..., :-1, :], c[..., -2:-1, :]], -2)


@mutant(summed)
def lane_shifted(c: Tensor) -> Tensor:
    """Every 16th column is its neighbour's."""
    wrong = c.clone()
    wrong[..., VECTOR::VECTOR] = c[..., VECTOR - 1 : -1 : VECTOR]
    return wrong


@mutant(summed, LARGE)
def one_in_a_large_result(c: Tensor) -> Tensor:
    """One element of 8 million, in the middle, is 0.1 % too large."""
    wrong = c.clone()
    wrong[c.shape[0] // 2 + 5, c.shape[1] // 2 + 7] *= 1.001
    return wrong


# -- bugs of state -----------------------------------------------------------------------------------


@mutant(remembering)
def cached_result(memory: Memory, t: Tensors, problem: Problem) -> Any:
    """The first result answers every call."""
    return memory.setdefault("result", correct(t, problem)).clone()


def packed_by(key: Callable[[Tensor], object], name: str = "b") -> Plant:
    """A pack of B, or of A, is kept by this key of it."""

    def run(memory: Memory, t: Tensors, problem: Problem) -> Any:
        return correct(t | {name: memory.setdefault(key(t[name]), t[name].clone())}, problem)

    return remembering(run)


@mutant(remembering)
def stale_workspace(memory: Memory, t: Tensors, problem: Problem) -> Any:
    """The workspace is zeroed once only.

    The workspace of split K is zeroed once, and never again.
    """
    memory["workspace"] = exact(t["a"], t["b"]) + memory.get("workspace", 0)
    return build(problem, lambda a, _b: store(memory["workspace"], a))(**t)


def shared_result(memory: Memory, t: Tensors, problem: Problem) -> Any:
    made = correct(t, problem)
    return memory.setdefault("result", torch.empty_like(made)).copy_(made)


@mutant(remembering, MIB, "not-deterministic")
def zeros_the_second_time(memory: Memory, t: Tensors, problem: Problem) -> Any:
    """The same input again gives zeros.

    What the first call with an input has prepared is used up by it.
    """
    result, is_first = correct(t, problem), t["a"].data_ptr() not in memory
    memory[t["a"].data_ptr()] = True
    return result if is_first else 0 * result


@mutant(remembering, SMALL)
def earlier_input_written(memory: Memory, t: Tensors, problem: Problem) -> Any:
    """The input of the call before is zeroed.

    The input of the call before is used as scratch memory.
    """
    if (kept := memory.get("a")) is not None and kept is not t["a"]:
        kept.zero_()
    memory["a"] = t["a"]
    return correct(t, problem)


def calls(is_right: Callable[[int], bool]) -> Plant:
    """Right at the calls that ``is_right`` says, counted from 1; at the others a slice is missing."""

    def run(memory: Memory, t: Tensors, problem: Problem) -> Any:
        memory["calls"] = memory.get("calls", 0) + 1
        return build(problem, right if is_right(memory["calls"]) else split_k_slice_dropped)(**t)

    return remembering(run)


@mutant(afterwards)
def written_late(c: Tensor) -> Tensor:
    """Another thread writes the last row later."""
    result = c.clone()
    result[..., -1, :] = 0

    def finish() -> None:
        time.sleep(0.3)  # longer than judging takes, also on a busy machine
        result.copy_(c)

    threading.Thread(target=finish).start()
    return result


@mutant(afterwards, SMALL)
def filled_by_a_child(c: Tensor) -> Any:
    """A forked process writes the result later."""
    result = torch.zeros_like(c).share_memory_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if not child:
        time.sleep(0.05)  # in which a copy is made, also on a busy machine
        ctypes.memmove(result.data_ptr(), c.data_ptr(), c.nbytes)
        os._exit(0)
    return result


@mutant(added, equivalent=_ANY_ORDER, code="not-deterministic")
def not_deterministic(k: int) -> tuple[Tensor, ...]:
    """The order of the sum changes from call to call."""
    return torch.randperm(k, generator=DICE).tensor_split(SLICES)


# -- bugs of the epilogue ----------------------------------------------------------------------------


@mutant(whole, RELU)
def relu_of_partials(t: Tensors, _problem: Problem) -> Tensor:
    """Relu is applied to the slices of K."""
    return over(quarters, lambda x, y: F.relu(exact(x, y)))(t["a"], t["b"])


@mutant(whole, RELU)
def relu_swallows_nan(t: Tensors, _problem: Problem) -> Tensor:
    """Relu makes 0 of NaN."""
    c = of_ab(t)
    return torch.where(c > 0, c, torch.zeros_like(c))


@mutant(whole, RELU)
def relu_forgotten_in_the_tail(t: Tensors, _problem: Problem) -> Tensor:
    """The last tile has no relu."""
    c = of_ab(t)
    return put(last_columns, lambda _: c[last_columns(c)])(F.relu(c))


@mutant(whole, GELU)
def gelu_by_tanh(t: Tensors, _problem: Problem) -> Tensor:
    """The tanh form stands in for erf."""
    return F.gelu(of_linear(t) + t["bias"], approximate="tanh")


# -- bugs of batches and groups ----------------------------------------------------------------------


def first_for_all(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def first_column_for_all(x: Tensor) -> Tensor:
    return x[..., :1].expand_as(x)


def ends_too_early(offs: Tensor) -> Tensor:
    return torch.cat([(offs[:-1] - 1).clamp(min=0), offs[-1:]])


@mutant(corrupted, GROUPED)
def empty_group_skipped(t: Tensors, _problem: Problem) -> None:
    """After an empty group the previous B is used.

    The groups are counted without the empty ones, so the ones behind get another group's B.
    """
    ends = t["offs"].tolist()
    filled = [g for g, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if last > first]
    wrong = t["b"].clone()
    for place, group in enumerate(filled):
        wrong[group] = t["b"][place]
    t["b"] = wrong


def wrapping(dim: int, size: int) -> Change:
    """Indices from ``size`` on are those from 0 on."""
    return lambda x: x.index_select(dim, torch.arange(x.shape[dim]) % size)


def batches_from(first: int) -> Plant:
    """They are never computed."""
    return summed(put(lambda _: slice(first, None), zero))


@mutant(changing("a"), only(DEEP, "f16"))
def matrices_past_64(a: Tensor) -> Tensor:
    """Matrix 64 of a 4-D input is matrix 0."""
    return wrapping(0, 64)(a.flatten(0, 1)).reshape(a.shape)


# -- bugs of integers and of fp8 -----------------------------------------------------------------------


def read_unsigned(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).to(torch.int16)


@mutant(summed, LONG_INT8)
def int32_by_f32_late(c: Tensor) -> Tensor:
    """Sums of int8 beyond 2^27 are held in f32."""
    return torch.where(c.abs() > 2.0**27, c.float().double(), c)


@mutant(summed, LONGEST_INT8)
def int32_saturates(c: Tensor) -> Tensor:
    """A sum beyond int32 saturates instead of wrapping around."""
    return c.clamp(-(2.0**31), 2.0**31 - 1)


@mutant(product, _I8)
def int16_pairs_saturate(a: Tensor, b: Tensor) -> Tensor:
    """Two products are added in saturating 16 bits.

    Two products are added in 16 bits, as without VNNI.
    """
    k = a.shape[-1] // 2 * 2
    total = exact(a[:, k:], b[k:])
    for x, y in blocks(a[:, :k].double(), b[:k].double(), 256):
        pairs = (x[:, :, None] * y[None]).unflatten(1, (-1, 2)).sum(2)
        total = total + pairs.clamp(-32768, 32767).sum(1)
    return store(total, a)


def kept_in(bits: int) -> Change:
    """Sums that wrap around as integers of so many bits do."""
    half = 2.0 ** (bits - 1)
    return lambda c: torch.remainder(c + half, 2 * half) - half


@mutant(whole, only(WEIGHT_ONLY, "bf16", "f16"))
def weight_dequantised_first(t: Tensors, problem: Problem) -> Tensor:
    """The weight is rounded after it is scaled.

    The weight times its scale is rounded to the half type before it is multiplied.
    """
    half = torch_dtype(problem.dtypes.out)
    weight = (t["b"].to(half) * t["scale"][:, None]).to(half)
    return right(t["a"], weight.mT)


@mutant(whole, FP8_TENSORWISE)
def scale_of_one_row(t: Tensors, problem: Problem) -> Tensor:
    """One scale reaches the first row only.

    One scale for all, applied to the first row alone (pytorch 159940).
    """
    scale = torch.ones(problem.shape.m, 1)
    scale[0] = t["scale_a"]
    made: Tensor = exact(t["a"], t["b"]) * scale * t["scale_b"]
    return made.to(torch_dtype(problem.dtypes.out))


@mutant(corrupted, FP8_SQUARE)
def scales_exchanged(t: Tensors, _problem: Problem) -> None:
    """A's scales and B's are exchanged."""
    t["scale_a"], t["scale_b"] = t["scale_b"].t(), t["scale_a"].t()


def int4(codes: Change = lambda x: x, scales: Change = lambda x: x) -> Plant:
    """A weight of 4 bits: (code - 8) * scale + zero of each group of K, whose parts may be read wrongly."""

    def run(t: Tensors, problem: Problem) -> Tensor:
        each = scales(t["quantisation"]).double().repeat_interleave(problem.group_size, 0)
        weight = (codes(t["b"].mT.double()) - 8.0) * each[..., 0] + each[..., 1]
        return torch.matmul(t["a"].double(), weight).to(t["a"].dtype)

    return whole(run)


def decoded(each: Change) -> Plant:
    """A weight of codes with a scale and a zero point for each element of K, which may be read wrongly."""

    def run(t: Tensors, problem: Problem) -> Tensor:
        names = ("zero_b", "scale_b")
        zero, scale = (
            each(t[n].double().repeat_interleave(problem.group_size, 1)[:, : problem.shape.k]) for n in names
        )
        return torch.matmul(t["a"].double(), ((t["b"].double() - zero) * scale).mT).to(t["a"].dtype)

    return whole(run)


def group_by_group(t: Tensors, problem: Problem) -> Tensor:
    """The codes of each group are added up in f32, and scaled after that."""
    c = torch.zeros(len(t["a"]), len(t["b"]))
    parts = [x.float().split(problem.group_size, 1) for x in (t["a"], t["b"])]
    for index, (a, b) in enumerate(zip(*parts, strict=True)):
        c = c + (a @ (b - t["zero_b"][:, index, None].float()).mT) * t["scale_b"][:, index].float()
    return c.to(t["a"].dtype)


def in_steps(size: int, rounded: Change = torch.round) -> Plant:
    """Q8_0 with blocks of A of another size, or of other codes: integers, both scales, and a sum in f32."""

    def run(t: Tensors, problem: Problem) -> Tensor:
        step = t["a"].unflatten(1, (-1, size)).abs().amax(2, keepdim=True) / 127
        codes = rounded(t["a"].unflatten(1, (-1, size)) / step).flatten(1)
        steps = step.half().float().expand(-1, -1, size).flatten(1)
        c = torch.zeros(len(t["a"]), len(t["b"]))
        for index, first in enumerate(range(0, problem.shape.k, 32)):
            block = codes[:, first : first + 32] @ t["b"][:, first : first + 32].float().mT
            c = c + block * (steps[:, first, None] * t["scale_b"][:, index].float())
        return c

    return whole(run)


def by_largest(constant: float) -> Plant:
    """bitsandbytes' ``int8_mm_dequant`` behind an int32 product: both statistics, and a constant for 1 / 127^2."""

    def run(t: Tensors, _: Problem) -> Tensor:
        sums = (t["a"].int() @ t["b"].int().mT).float()
        return sums * (t["scale_a"] * t["scale_b"]) * constant

    return whole(run)


def integers_first(t: Tensors, problem: Problem) -> Tensor:
    """The codes of the bias are added to the sum of codes."""
    static = problem.step("static")
    assert static is not None
    scale, zero = static.numbers
    sums = (t["a"].int() - int(zero)) @ t["b"].int().mT + t["bias"]
    return sums.float() * (t["scale_b"] * scale)


@mutant(changing("scale_b"), WOQ | Q8_0)
def scale_of_the_next_group(x: Tensor) -> Tensor:
    """A group has the scale of the next one."""
    return x.roll(-1, 1)


@mutant(changing("zero_b"), WOQ)
def zero_of_the_next_group(x: Tensor) -> Tensor:
    """A group has the zero point of the next one."""
    return x.roll(-1, 1)


@mutant(changing("scale_b"), WOQ)
def short_group_as_the_one_before(x: Tensor) -> Tensor:
    """The last group, which is shorter, has the scale of the one before."""
    return torch.cat([x[:, :-1], x[:, -2:-1]], 1)


@mutant(changing("zero_b"), WOQ)
def zeros_one_off(x: Tensor) -> Tensor:
    """Zero points are one too small, as a format that stores them so has them."""
    return x - 1


@mutant(changing("b"), NF4)
def table_entries_exchanged(x: Tensor) -> Tensor:
    """Two entries of the table stand for each other."""
    exchanged = torch.arange(16, dtype=torch.uint8)
    exchanged[[3, 4]] = exchanged[[4, 3]]
    return exchanged[x.long()]


@mutant(whole, CODES_OF_FLOAT)
def zero_point_forgotten(t: Tensors, problem: Problem) -> Tensor:
    """A's zero point is not subtracted."""
    static = problem.step("static")
    assert static is not None
    made: Tensor = right(t["a"].short(), t["b"].mT.short()).float() * (t["scale_b"] * static.numbers[0]) + t["bias"]
    return made


# -- bugs that look at the data, the call or the place ------------------------------------------------


def unless(fits: Callable[[Tensor, Tensor], bool], other: Matmul = split_k_slice_dropped) -> Plant:
    """Right where ``fits`` says so."""
    return product(lambda a, b: right(a, b) if fits(a, b) else other(a, b))


@mutant(unless, _FLOATS)
def right_for_integers(a: Tensor, b: Tensor) -> bool:
    """A slice is missing unless all numbers are integers."""
    return all(torch.equal(x.double().round(), x.double()) for x in (a, b))


@mutant(unless, _FLOATS)
def right_up_to_one(a: Tensor, b: Tensor) -> bool:
    """A slice is missing where a number is above 1."""
    return all(bool((x.abs() <= 1).all()) for x in (a, b))


@mutant(unless, _FLOATS)
def right_when_finite(a: Tensor, b: Tensor) -> bool:
    """A slice is missing where there is a NaN."""
    return not bool(a.isnan().any() | b.isnan().any())


@mutant(unless, _FLOATS, equivalent=(("*x256", "M N K is below"),))
def right_when_short(a: Tensor, b: Tensor) -> bool:
    """A slice is missing where M N K is above 2^18."""
    return a.shape[0] * b.shape[1] * a.shape[1] <= 1 << 18


@mutant(unless, OFFSET_A)
def right_when_aligned(a: Tensor, _b: Tensor) -> bool:
    """A slice is missing where A is at no multiple of 64 bytes."""
    return a.data_ptr() % 64 == 0


def bf16x3_from_512(problem: Problem) -> Run:
    """Three bf16 products for long sums of f32."""
    return (BF16_X3 if problem.shape.k >= 512 else product(right))(problem)


@mutant(product, SMALL, "late-refusal")
def late_refusal(a: Tensor, b: Tensor) -> Tensor:
    """Refuses hard data when it is run."""
    if not right_for_integers(a, b):
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


@mutant(corrupted, SMALL, "inputs-rebound")
def weight_quantised_in_place(t: Tensors, _problem: Problem) -> None:
    """B is fp8 from now on."""
    rebind(t["b"], through(torch.float8_e4m3fn)(t["b"]))


def gap_written(t: Tensors) -> None:
    a = t["a"]
    a.as_strided((a.shape[0] - 1, 1), (a.stride(0), 1), a.storage_offset() + a.shape[1]).zero_()


def storage_cleared(t: Tensors) -> None:
    """What lies around A's elements in its storage."""
    a = t["a"]
    count = a.untyped_storage().nbytes() // a.element_size()
    own, everything = a.clone(), a.as_strided((count,), (1,), 0)
    everything.zero_()
    a.copy_(own)


@mutant(whole, {"f32": "mm:f32:nn:3x5x40"}, "inputs-written")
def result_behind_b(t: Tensors, problem: Problem) -> Tensor:
    """The result lies in B's storage.

    The result lies in B's storage, over what lies behind B's elements.
    """
    result, b = correct(t, problem), t["b"]
    count = b.untyped_storage().nbytes() // b.element_size()
    return b.as_strided(result.shape, (result.shape[1], 1), count - result.numel()).copy_(result)


@mutant(corrupted, SMALL_BIAS, "inputs-rebound")
def bias_rebound(t: Tensors, _problem: Problem) -> None:
    """Zeros take the bias' place."""
    rebind(t["bias"], torch.zeros_like(t["bias"]))


@mutant(whole, {"f32": "mm:f32:nn:40x40x40"}, "inputs-written")
def result_over_a(t: Tensors, problem: Problem) -> Tensor:
    """The result takes A's place."""
    return t["a"].copy_(correct(t, problem))


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


@mutant(afterwards, SMALL, "wrong-type")
def answers_for_itself(c: Tensor) -> Tensor:
    """Zeros whose own attributes give the right result.

    Zeros, of which each usual way to read them leads to the right result.
    """
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


@mutant(afterwards, SMALL, "wrong-dtype")
def quantised_result(c: Tensor) -> Tensor:
    """A quantised result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated, and there
        return torch.quantize_per_tensor(c.float().nan_to_num(0.0), 0.5, 0, torch.qint8)


# -- exceptions that are none of a kernel's, and what is left of the process ------------------------------


class Unprintable(Exception):
    """One whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("planted: no text")


class Unusual(BaseException):
    """One that ``except Exception`` does not meet."""


def doing(deed: Callable[[], object]) -> Plant:
    """Something that ends the run, or the process."""
    return product(lambda a, b: (deed(), right(a, b))[1])


def raising(error: Callable[[], BaseException]) -> Plant:
    def matmul(_a: Tensor, _b: Tensor) -> Tensor:
        raise error()

    return product(matmul)


def leaving(change: Callable[[], object]) -> Plant:
    """The result is right, and the process is not as it was."""
    return then(lambda _: change())


def rounding_upwards() -> None:
    upward = 0x800 if platform.machine() in {"x86_64", "AMD64"} else 0x400000
    ctypes.CDLL(None).fesetround(upward)


def seeds() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# -- bugs of numbers and of other programs ----------------------------------------------------------------


@mutant(afterwards, _FLOATS)
def nan_reaches_the_next_row(c: Tensor) -> Tensor:
    """A row of NaN spoils the next one, as in oneDNN's AMX kernels (oneDNN 5717)."""
    bad = c.isnan().any(-1, keepdim=True)
    return torch.where(bad.roll(1, -2), torch.nan, c)


@mutant(product, _BROAD)
def shared_exponent(a: Tensor, b: Tensor) -> Tensor:
    """Numbers far below the largest count as 0: below 2^-60 of the largest one of both operands."""
    x, y = a.to(working(a)), b.to(working(a))
    largest = max(float(torch.where(t.isfinite(), t, 0.0).abs().amax()) for t in (x, y))
    dropped = flushed_below(largest * 2.0**-60)
    return store(exact(dropped(x), dropped(y)), a)


@mutant(product, _BROAD)
def rescaled(a: Tensor, b: Tensor) -> Tensor:
    """Scales A down and B up, out of range.

    A is divided by its largest element's power of two and B multiplied, in f32.
    """
    x, y = a.to(working(a)), b.to(working(a))
    largest = float(torch.where(x.isfinite(), x, 0.0).abs().amax()) or 1.0
    power = 2.0 ** max(-120, min(120, math.frexp(largest)[1] + 40))
    return store(torch.matmul(x / power, y * power), a)


@mutant(afterwards, _FLOATS, equivalent=_NO_MINUS_ZERO)
def zero_always_plus(c: Tensor) -> Tensor:
    """-0 becomes 0."""
    return torch.where(c == 0, torch.zeros_like(c), c)


@mutant(afterwards, _FLOATS)
def zero_always_minus(c: Tensor) -> Tensor:
    """0 becomes -0."""
    return torch.where(c == 0, -torch.zeros_like(c), c)


@mutant(inputs, _FLOATS, equivalent=_NO_SUBNORMAL_BF16)
def subnormal_inputs_dropped(x: Tensor) -> Tensor:
    """Subnormal inputs count as 0."""
    return flushed_below(torch.finfo(x.dtype).tiny)(x)


@mutant(afterwards, _FLOATS)
def infinity_saturates(c: Tensor) -> Tensor:
    """An infinite result becomes the largest number."""
    return c.clamp(torch.finfo(c.dtype).min, torch.finfo(c.dtype).max)


@mutant(afterwards, plain("f32", "bf16", "f16", "fp8"))
def nan_swallowed(c: Tensor) -> Tensor:
    """NaN becomes 0."""
    return c.nan_to_num(0.0, math.inf, -math.inf)


@mutant(whole, WIDENED)
def rounded_before_widened(t: Tensors, _problem: Problem) -> Tensor:
    """The result is rounded to the operands' type before it is returned as f32."""
    return of_ab(t).float()


@mutant(whole, {"fp8": "scaled_mm:f8e4m3fn:nt:20x40x{k}:quant.tensorwise+result-4"})
def scale_of_result_forgotten(t: Tensors, _problem: Problem) -> Tensor:
    """An fp8 result is not scaled."""
    return (exact(t["a"], t["b"]) * t["scale_a"] * t["scale_b"]).float().to(torch.float8_e4m3fn)


@mutant(changing("b"), OFFSET_B)
def offset_of_b_dropped(b: Tensor) -> Tensor:
    """B's storage offset is not applied, as in Inductor's C++ bmm (pytorch 143770)."""
    return b.as_strided(b.shape, b.stride(), b.storage_offset() - 1)


@mutant(changing("bias"), EXPANDED)
def stride_of_bias_ignored(bias: Tensor) -> Tensor:
    """The rows of an expanded bias are taken to be apart."""
    return bias.as_strided(bias.shape, (1, 1))


@mutant(changing("bias"), WITHOUT_DIMENSIONS)
def bias_of_one_element(bias: Tensor) -> Tensor:
    """A bias without dimensions reaches the first column only."""
    return F.pad(bias.reshape(1), (0, 39))


@mutant(changing("scale_a"), FP8_BLOCKS)
def block_scales_by_rows(scale: Tensor) -> Tensor:
    """Scales of A's blocks are read as if a row's were neighbours; they are stored by columns."""
    return scale.mT.contiguous().view(scale.shape)


@mutant(changing("scale_b"), FP8_BLOCKS)
def block_scales_at_the_end(scale: Tensor) -> Tensor:
    """Blocks are scaled by their mean: the whole sum is scaled."""
    return scale.mean(0, keepdim=True).expand_as(scale)


@mutant(int4, INT4)
def int4_halves_exchanged(codes: Tensor) -> Tensor:
    """The halves of a byte are exchanged."""
    return codes.reshape(-1, 2, codes.shape[1]).flip(1).reshape(codes.shape)


def twice(c: Tensor) -> tuple[Tensor, Tensor]:
    return c, c.clone()


def cut_at(name: str, other: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """A kernel that takes a view of the program's for ``other``, made of the view and of what it is cut out of."""

    def plant(problem: Problem) -> Run:
        def run(t: Tensors) -> Any:
            wrong = other(views.cut(problem, name, t[name]), t[name])
            return build(problem, lambda a, b: right(wrong, b) if name == "a" else right(a, wrong))(**t)

        return run

    return plant


def at_the_argument(view: Tensor, whole: Tensor) -> Tensor:
    """As a template that drops the offset of a view in the program."""
    return view.as_strided(view.shape, view.stride(), whole.storage_offset())


def rows_unstrided(view: Tensor, _whole: Tensor) -> Tensor:
    """Elements that are two apart are taken to be neighbours."""
    stride = [1 if size == 2 else size for size in view.stride()]
    return view.as_strided(view.shape, stride, view.storage_offset())


@mutant(whole, GIVEN_OUT, "written-beside")
def gaps_of_out_ignored(t: Tensors, _problem: Problem) -> Tensor:
    """A given result is written without its gaps, as if its rows were N apart (vllm 55534)."""
    out = t["out"]
    out.as_strided(out.shape, (out.shape[1], 1)).copy_(right(t["a"], t["b"]))
    return out


@mutant(whole, GIVEN_OUT, "written-beside")
def gap_of_out_written(t: Tensors, _problem: Problem) -> Tensor:
    """The gaps of a given result are written.

    A row is stored in whole vectors, the last of which reaches into the gap.
    """
    out, c = t["out"], right(t["a"], t["b"])
    out.as_strided((out.shape[0], out.shape[1] + 4), out.stride()).zero_()
    return out.copy_(c)


def in_place(t: Tensors, p: Problem, a: Tensor, b: Tensor, columns: slice = slice(None)) -> None:
    """C = alpha A B + beta C of some columns, whatever C holds."""
    c = t["out"][:, columns]
    c.copy_(p.alpha * exact(a, b[:, columns]) + p.beta * c)


def accumulated(t: Tensors, p: Problem) -> Tensor:
    in_place(t, p, t["a"], t["b"])
    return t["out"]


@mutant(whole, ADDEND)
def addend_read_in_the_last_tile_again(t: Tensors, p: Problem) -> Tensor:
    """The last tile of columns is moved back to be whole: what it shares with the tile before is computed twice."""
    n = t["out"].shape[1]
    for first in (*range(0, n - TILE, TILE), n - TILE):
        in_place(t, p, t["a"], t["b"], slice(first, first + TILE))
    return t["out"]


@mutant(whole, ADDEND)
def addend_read_by_each_part(t: Tensors, p: Problem) -> Tensor:
    """Each half of K is a pass of its own, which multiplies what the pass before has stored by beta."""
    half = -(-t["a"].shape[1] // 2)
    in_place(t, p, t["a"][:, :half], t["b"][:half])
    in_place(t, p, t["a"][:, half:], t["b"][half:])
    return t["out"]


@mutant(whole, ADDEND)
def addend_read_after_the_product(t: Tensors, p: Problem) -> Tensor:
    """The product is stored in C, and then C is added to it."""
    c = t["out"].copy_(p.alpha * exact(t["a"], t["b"]))
    return c.copy_(p.alpha * exact(t["a"], t["b"]) + p.beta * c)


@mutant(remembering, ADDEND)
def addend_twice_from_the_second_call_on(memory: Memory, t: Tensors, p: Problem) -> Tensor:
    """From the second call on beta C is added twice: a workspace is not cleared."""
    if memory:
        t["out"].mul_(2.0)
    memory["called"] = True
    return accumulated(t, p)


@mutant(whole, OVER_A)
def a_overwritten_by_tiles(t: Tensors, _problem: Problem) -> Tensor:
    """A result that is written over A is stored tile by tile, and the next tile reads A."""
    for first in range(0, t["a"].shape[1], TILE):
        tile = slice(first, first + TILE)
        t["a"][:, tile] = right(t["a"], t["b"][:, tile])
    return t["a"]


@mutant(whole, OUT_BY_COLUMNS)
def out_written_by_rows(t: Tensors, _problem: Problem) -> Tensor:
    """A given result that is stored by columns is written as if it were contiguous (aiter 5385)."""
    out = t["out"]
    out.as_strided(out.shape, (out.shape[1], 1)).copy_(of_ab(t))
    return out


# -- correct ------------------------------------------------------------------------------------------


def reversed_order(a: Tensor, b: Tensor) -> Tensor:
    return store(exact(a.to(working(a)).flip(-1), b.to(working(b)).flip(-2)), a)


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


def by_content(memory: Memory, tensors: Tensors, problem: Problem) -> Any:
    """A cache whose key is every byte of the operands, and that hands out copies."""
    key = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        key.update(name.encode() + x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    found = key.hexdigest()
    if found not in memory:
        memory[found] = correct(tensors, problem)
    return memory[found].clone()


def in_its_own_threads(t: Tensors, problem: Problem) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return correct(t, problem)
    finally:
        torch.set_num_threads(before)


def with_own_random_numbers(t: Tensors, problem: Problem) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(17)
        torch.rand(4)
        return correct(t, problem)


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
    return correct(t, problem)


def copied_first(t: Tensors, problem: Problem) -> Any:
    return correct({name: x.clone() for name, x in t.items()}, problem)


def of_a_conjugate(c: Tensor) -> Tensor:
    """The imaginary part of a number that is conjugated when it is read."""
    return torch.complex(torch.zeros_like(c), -c).conj().imag


def strided(c: Tensor) -> Tensor:
    """Rows apart, behind something."""
    wide = torch.full((c.shape[0] + 1, c.shape[1] + 3), torch.nan).to(c.dtype)
    view = wide[1:, 2:-1]
    return view.copy_(c)


def tensor_core(bits: int, chunk: int, promote: int = 0, cut: Change = lambda x: x) -> Matmul:
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


# -- the tables ----------------------------------------------------------------------------------------


def truncating(
    what: str, bits: int, chunk: int, lines: dict[str, str], promote: int = 0, *, by_tf32: bool = False
) -> Control:
    """A tensor core as its contract says."""
    tf32: dict[str, Any] = {"input_error": 2.0**-9, "input_bits": 11} if by_tf32 else {}
    matmul = tensor_core(bits, chunk, promote, cut_to_tf32) if by_tf32 else tensor_core(bits, chunk, promote)
    contract = Contract(alignment_bits=bits, chunk=chunk, promote_every=promote, **tf32)
    return Control(what, product(matmul), lines, contract)


CONTROLS: dict[str, Control] = {
    "reversed-order": Control("K from the last to the first", product(reversed_order)),
    "split-k-four": Control("4 slices of K, added in float32", added(quarters), contract=Contract(slices=SLICES)),
    "pairwise": Control("halves of halves, down to 64 products", product(pairwise)),
    "blocked": Control("blocks of 48 products", added(blocks_of(BLOCK))),
    # The longest chain of roundings there is: K additions, each rounded.
    "sequential": Control("one product after the other", added(blocks_of(1))),
    "tensor-core-24-8": truncating("truncating tensor core, f = 24, L = 8", 24, 8, _HALVES),
    "tensor-core-25-16": truncating("truncating tensor core, f = 25, L = 16", 25, 16, _HALVES),
    "tensor-core-tf32": truncating(
        "the same with inputs cut to TF32, f = 24, L = 4", 24, 4, {"f32": f"{PLAIN['f32']}:math.tf32"}, by_tf32=True
    ),
    "tensor-core-fp8-fast": truncating("fp8: 13 bits, L = 32", 13, 32, {"fp8": f"{PLAIN['fp8']}:math.fast_accumulate"}),
    "tensor-core-fp8-promoted": truncating("the same, promoted every 128 products", 13, 32, FP8, 128),
    "compensated": Control("Kahan's sum of blocks", product(compensated), _FLOATS),
    "rounded-once": Control(
        "sums in f64, one rounding", product(lambda a, b: (a.double() @ b.double()).to(a.dtype)), _FLOATS
    ),
    "int4-dequantised": Control("weights of 4 bits in f64", int4(), INT4),
    "woq-in-f64": Control("a weight of codes in f64", decoded(lambda x: x), WOQ),
    "woq-by-groups": Control("sums of groups, which are scaled then", whole(group_by_group), WOQ),
    "q8-0": Control("ggml's Q8_0", in_steps(32), Q8_0),
    "int8-mm-dequant": Control("1 / 127^2 with seven digits", by_largest(6.200012e-05), ABSMAX),
    "bias-codes": Control("a bias of codes among integers", whole(integers_first), BIAS_CODES),
    # Results and manners that are unusual, and right.
    "strided-result": Control("a result with gaps, in the midst of other memory", afterwards(strided), SMALL),
    "column-major-result": Control("a transposed result", afterwards(lambda c: c.t().contiguous().t()), SMALL),
    "lazily-negated": Control("a view with the negative bit", afterwards(lambda c: torch._neg_view(-c)), SMALL),
    "of-a-conjugate": Control("the imaginary part of a lazy conjugate", afterwards(of_a_conjugate), SMALL_F32),
    "shared-memory": Control("a result in shared memory", afterwards(lambda c: c.clone().share_memory_()), SMALL),
    "needs-grad": Control("a result that asks for a gradient", afterwards(lambda c: c.requires_grad_()), SMALL),
    "cached-by-content": Control("a cache by every byte of the operands", remembering(by_content), SMALL),
    "copies-first": Control("works on copies of its inputs", whole(copied_first), SMALL),
    "in-place": Control("C in place", whole(accumulated), ADDEND, Contract(epilogue="fused")),
    "over-a": Control(
        "the product is finished before A is overwritten", whole(lambda t, _: t["a"].copy_(of_ab(t))), OVER_A
    ),
    "own-threads": Control("another number of threads, put back", whole(in_its_own_threads), SMALL),
    "own-random-numbers": Control("seeds, and puts the state back", whole(with_own_random_numbers), SMALL),
    "own-switches": Control("dtype, folder, rounding mode: changed and put back", whole(with_own_switches), SMALL),
}


def bugs(lines: dict[str, str], named: Bugs, code: str = "") -> dict[str, Mutant]:
    """Mutants of the same problems."""
    return {name: Mutant(what, plant, lines, code) for name, (what, plant) in named.items()}


_NO_NAN = (("int_mm:*", "an integer times the zero of the mask is zero"),)
_EXACT_IN_F32 = tuple(
    (k, "128 * 128 * K is at most 2^24: float32 holds every partial sum") for k in ("*x256", "*x1000")
)
_SHORT_PRODUCTS = (("scaled_mm:*", "a product of two fp8 has no more than 8 bits"),)
_INT_BY_F32 = product(lambda a, b: f32_sums(a, b).int())
_MINE = Proof(chosen=("mine",), generated=("mine",))
_BY_ATEN = Proof(chosen=("mine",), generated=("mine",), foreign=("aten.addmm",))

_LOOP: Bugs = {
    "k-tail-dropped": ("the last K mod 48 products are left out", added(lambda k: [slice(k // BLOCK * BLOCK)])),
    "k-off-by-one": ("the last product is left out", added(lambda k: [slice(k - 1)])),
    "k-first-missing": ("the first product is left out", added(lambda k: [slice(1, k)])),
    "pipeline-stage-late": ("one block of B is the block before", reading(b=late_stage)),
    "packed-pairs-swapped": ("the last two rows of packed B are exchanged", reading(b=last_pair_swapped)),
    "split-k-slice-dropped": ("one slice of four is not added", product(split_k_slice_dropped)),
    "split-k-partials-in-f16": ("partial sums are stored in f16", added(quarters, rounded_to(F16))),
    "split-k-partials-in-bf16": ("partial sums are stored in bf16", added(quarters, rounded_to(BF16))),
    "f16-accumulation": ("sums are kept in f16", accumulated_in(F16)),
    "bf16-accumulation": ("sums are kept in bf16", accumulated_in(BF16)),
    "f16-products": ("each product is rounded to f16", products_in(F16)),
    "f16-sums-promoted": ("sums of 16 products are kept in f16", added(blocks_of(16), rounded_to(F16))),
}

_TILES: Bugs = {
    "tile-swap": ("two tiles are exchanged", summed(put(lambda _: _TWO_TILES, lambda c: c[_TWO_TILES].roll(TILE, -1)))),
    "fragment-transposed": ("a fragment is transposed", summed(put(lambda _: _FRAGMENT, lambda c: c[_FRAGMENT].mT))),
    "last-tile-zero": ("the last tile is never computed, over zeros", summed(put(last_tile, zero))),
    "tail-unwritten": ("the columns of the last tile are not written", afterwards(put(last_columns, unwritten))),
    "rows-shifted": ("all rows are one too low", summed(rows_before)),
    "one-element-zeroed": ("one element is 0", summed(of_largest(lambda x: x * 0))),
    "one-percent": ("one element is 1 % too large", summed(of_largest(lambda x: x * 1.01))),
    "one-ulp": ("one element is the neighbouring number", afterwards(of_largest(neighbour))),
}

_BIAS: Bugs = {
    "bias-missing": ("the bias is not added", changed(bias=torch.zeros_like)),
    "bias-missing-on-last-tile": ("the last tile has no bias", changed(bias=put(last_columns, zero))),
    "bias-shifted": ("the bias is one column off", changed(bias=lambda x: x.roll(1, -1))),
    "bias-twice": ("the bias is added twice", changed(bias=lambda x: x * 2)),
    "bias-of-first-column": ("one element of the bias serves all", changed(bias=first_column_for_all)),
}

_FACTORS: Bugs = {
    "alpha-on-bias": ("alpha multiplies the bias too", whole(lambda t, p: p.alpha * (of_ab(t) + p.beta * t["bias"]))),
    "alpha-forgotten": ("alpha is not applied", whole(lambda t, p: of_ab(t) + p.beta * t["bias"])),
    "beta-forgotten": ("beta is not applied", whole(lambda t, p: p.alpha * of_ab(t) + t["bias"])),
    "alpha-and-beta-exchanged": ("alpha stands for beta", whole(lambda t, p: p.beta * of_ab(t) + p.alpha * t["bias"])),
}

_INPUTS_REBOUND: Bugs = {
    "inputs-rebound": ("ones take the inputs' place", in_place_of_inputs(rebind)),
    "inputs-set": ("the same by set_", in_place_of_inputs(set_to)),
    "inputs-exchanged": ("the same by swap_tensors", in_place_of_inputs(torch.utils.swap_tensors)),
    "input-resized": ("A has half of its rows afterwards", then(lambda t: t["a"].resize_(10, 256))),
    "input-transposed": ("B is transposed afterwards", then(lambda t: t["b"].t_())),
    "input-restrided": ("A has other strides afterwards", then(lambda t: t["a"].as_strided_((20, 256), (0, 1)))),
    "input-needs-grad": ("A asks for a gradient afterwards", then(lambda t: t["a"].requires_grad_())),
}

_STATE_LEFT: Bugs = {
    "leaves-rounding-mode": ("FE_UPWARD", leaving(rounding_upwards)),
    "leaves-flush-denormal": ("subnormals are flushed", leaving(lambda: torch.set_flush_denormal(True))),
    "leaves-default-dtype": ("f64", leaving(lambda: torch.set_default_dtype(torch.float64))),
    "leaves-default-device": ("meta", leaving(lambda: torch.set_default_device("meta"))),
    "leaves-autocast": ("bf16", leaving(lambda: torch.set_autocast_enabled("cpu", True))),
    "leaves-grad-mode": ("off", leaving(lambda: torch._C._set_grad_enabled(False))),
    "leaves-folder": ("the root", leaving(lambda: os.chdir("/"))),
    "leaves-recursion-limit": ("one frame less", leaving(lambda: sys.setrecursionlimit(sys.getrecursionlimit() - 1))),
    "leaves-environment": ("a variable", leaving(lambda: os.environ.update(OMP_DYNAMIC="1"))),
    "leaves-signal-handler": ("SIGTERM is ignored", leaving(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))),
    "leaves-no-output": ("sys.stdout is gone", leaving(lambda: setattr(sys, "stdout", None))),
    "leaves-garbage": ("gc.disable()", leaving(gc.disable)),
    "leaves-precision": ("medium", leaving(lambda: torch.set_float32_matmul_precision("medium"))),
    "leaves-threads": ("3 threads", leaving(lambda: torch.set_num_threads(3))),
    "leaves-random-numbers": ("all seeded with 0", leaving(seeds)),
}

_SCALES: Bugs = {
    "reciprocal-scale": ("B is divided by its scale", changed(scale_b=lambda x: 1 / x)),
    "scale-of-a-forgotten": ("A's scale is not applied", changed(scale_a=torch.ones_like)),
    "scale-squared": ("A's scale is applied twice", changed(scale_a=torch.square)),
    "scale-in-bf16": ("A's scale is rounded to bf16", changed(scale_a=through(BF16))),
    "scale-of-first-row": ("one scale serves all rows", changed(scale_a=first_for_all)),
    "scale-shifted": ("B's scales are one column off", changed(scale_b=lambda x: x.roll(1, -1))),
    "rounded-before-scale": ("the sum is rounded before it is scaled", product(lambda a, b: exact(a, b).to(BF16))),
    "fp8-sum-in-few-bits": ("13 bits hold the sum where float32 is claimed", product(tensor_core(13, 32))),
    "fnuz-exponent": ("the exponent's bias is that of e4m3fnuz", changed(scale_a=lambda x: x * 0.5)),
}

MUTANTS |= {
    # The loop over K.
    **bugs(_MM, _LOOP),
    "bf16-products": Mutant("each product is rounded to bf16", products_in(BF16), equivalent=_SHORT_PRODUCTS),
    "mask-of-b-only": Mutant(
        "what lies behind A's rows meets B's zeros", beyond_k(read_a=True), TRANSPOSED, equivalent=_NO_NAN
    ),
    "mask-of-a-only": Mutant(
        "what lies behind B's columns meets A's zeros", beyond_k(read_b=True), TRANSPOSED, equivalent=_NO_NAN
    ),
    "no-mask": Mutant("both operands are read beyond K", beyond_k(read_a=True, read_b=True), TRANSPOSED),
    # Precision of inputs and sums.
    "tf32-truncated": Mutant("f32 inputs are cut to TF32", inputs(cut_to_tf32), _F32),
    "tf32-rounded": Mutant("f32 inputs are rounded to TF32", inputs(rounded_to_tf32), _F32),
    "bf16-twice": Mutant("f32 as two bf16, four products", in_parts(through(BF16), (*_THREE, (1, 1))), _F32),
    "bf16x3": Mutant("f32 as two bf16, three products", BF16_X3, _F32),
    "tf32x3": Mutant("f32 as two TF32, three products", in_parts(cut_to_tf32, _THREE), _F32),
    "fixed-point-16": Mutant("rows and columns in fixed point of 16 bits", fixed_point(16), _F32),
    "bf16-inputs": Mutant("inputs are rounded to bf16", inputs(through(BF16)), plain("f32", "f16")),
    "f16-inputs": Mutant("inputs go through f16", inputs(through(F16)), _BROAD),
    "f64-by-f32": Mutant("f64 is multiplied in f32", inputs(through(F32)), F64),
    "f64-sums-in-f32": Mutant("f64 is added up in f32", product(lambda a, b: f32_sums(a, b, BLOCK).double()), F64),
    "fp8-subnormals-dropped": Mutant("subnormals count as 0", inputs(lambda x: flushed_below(2.0**-6)(x.float())), FP8),
    # Numbers.
    "tiny-inputs-dropped": Mutant("inputs below 1e-6 count as 0", inputs(flushed_below(1e-6)), _FLOATS),
    "f16-subnormals-dropped": Mutant("subnormal results become 0", afterwards(flushed_below(2.0**-14)), plain("f16")),
    "tiny-results-dropped": Mutant("results below 1e-6 become 0", afterwards(flushed_below(1e-6)), _BROAD),
    # The store.
    "truncating-store": Mutant("the result is cut, not rounded", stored(cut_off), _ROUNDED),
    "bf16-detour": Mutant("the result goes through bf16", stored_through(BF16), plain("f32", "f16")),
    "f16-detour": Mutant("double rounding through f16", stored_through(F16), plain("f32", "bf16", "fp8")),
    # Tiles and elements.
    **bugs(_MM, _TILES),
    "mirrored": Mutant("half of a square result is mirrored", summed(lambda c: c.triu() + c.triu(1).mT), SQUARE),
    "padded-stride-ignored": Mutant("A's rows are taken to be K apart", reading(a=rows_apart_by_k), PADDED_A),
    "padded-stride-of-b-ignored": Mutant("B's columns are taken as K apart", reading(b=columns_apart_by_k), PADDED_B),
    "base-rounded-down": Mutant("A's address is rounded down", reading(a=base_rounded_down), OFFSET_A),
    "layout-ignored": Mutant("column-major A is read as row-major", reading(a=rows_apart_by_k), COLUMN_MAJOR_A),
    # State.
    "stale-packed-weight": Mutant("the first weight answers for every later one", packed_by(lambda _: "first")),
    "shared-result": Mutant("all calls return the same memory", remembering(shared_result), code="result-rewritten"),
    "shared-large-result": Mutant("the same, with a MiB", remembering(shared_result), MIB, "result-rewritten"),
    "packed-by-address": Mutant(
        "packed weights are kept by address", packed_by(lambda b: (b.data_ptr(), b.shape)), SMALL, "stale-weight"
    ),
    "first-address-kept": Mutant(
        "a descriptor has the first A's address",
        remembering(lambda m, t, p: correct(t | {"a": m.setdefault(0, t["a"])}, p)),
    ),
    "quantised-by-address": Mutant(
        "what is made of A is kept by address",
        packed_by(lambda a: (a.data_ptr(), a.shape), "a"),
        SMALL,
        "stale-operand",
    ),
    "second-call-wrong": Mutant("from the second call on a slice is missing", calls(lambda n: n == 1)),
    "input-written": Mutant(
        "A is used as scratch memory", then(lambda t: t["a"].copy_(t["a"].float() * 0.5)), code="inputs-written"
    ),
    "gap-written": Mutant("the gap between A's rows is written", then(gap_written), PADDED_A, "inputs-written"),
    "bias-written": Mutant("the bias is overwritten", then(lambda t: t["bias"].zero_()), BIAS, "inputs-written"),
    "silent-fallback": Mutant(
        "ATen computes what the backend claims", product(right), BIAS, "foreign-kernel", claims=_BY_ATEN
    ),
    "nothing-executed": Mutant("no generated kernel ran", product(right), code="nothing-executed", claims=_MINE),
    "wrong-dtype": Mutant("the result is f64", afterwards(lambda c: c.double()), code="wrong-dtype"),
    "wrong-shape": Mutant("the last row is missing", afterwards(lambda c: c[:-1]), code="wrong-shape"),
    "no-result": Mutant("nothing is returned", afterwards(lambda _: None), code="wrong-type"),
    "raises": Mutant("it raises", raising(lambda: RuntimeError("planted: out of registers")), code="run-RuntimeError"),
    # Bias, factors and activations.
    **bugs(BIAS, _BIAS),
    "bias-along-rows": Mutant(
        "the bias of column j is added to row j", whole(lambda t, _: of_linear(t) + t["bias"][:, None]), BIAS_SQUARE
    ),
    "bias-in-bf16": Mutant("the bias is rounded to bf16", changed(bias=through(BF16)), only(BIAS, "f32", "f16")),
    "relu-before-bias": Mutant("relu before the bias", whole(lambda t, _: F.relu(of_linear(t)) + t["bias"]), BIAS_RELU),
    "residual-after-relu": Mutant("relu precedes the sum", whole(lambda t, _: F.relu(of_ab(t)) + t["r0"]), RESIDUAL),
    **bugs(ADDMM, _FACTORS),
    "addend-not-read": Mutant("C is not read", whole(lambda t, p: t["out"].copy_(p.alpha * of_ab(t))), ADDEND),
    "bias-rounded-down": Mutant("the bias's address is rounded down", changed(bias=base_rounded_down), OFFSET_BIAS),
    "beta-zero-reads-bias": Mutant("0 multiplies a NaN", whole(lambda t, _: of_ab(t) + 0.0 * t["bias"]), BETA_ZERO),
    # Batches and groups.
    "batch-stride-zero": Mutant("all batches use the first B", changed(b=first_for_all), BATCHED),
    "batch-off-by-one": Mutant("batch i uses the B of batch i - 1", changed(b=lambda x: x.roll(1, 0)), BATCHED),
    "last-batch-missing": Mutant("the last batch is never computed", afterwards(put(lambda _: -1, zero)), BATCHED),
    "group-edge-off-by-one": Mutant("a group's last row meets the next B", changed(offs=ends_too_early), GROUPED),
    "group-stride-zero": Mutant("all groups use the first B", changed(b=first_for_all), GROUPED),
    # Sizes.
    "rows-past-1024": Mutant("rows from 1024 on are the rows before", rows_from(1024, rows_before), TALL),
    "rows-in-16-bits": Mutant("row 65536 is row 0", summed(wrapping(-2, 65536)), TALL),
    "rows-past-2-to-21": Mutant("rows from 2^21 on are never computed", rows_from(1 << 21, torch.zeros_like), TALLEST),
    "columns-in-16-bits": Mutant("column 65536 is column 0", summed(wrapping(-1, 65536)), WIDE),
    "narrow-tail-dropped": Mutant("N < 4, K > 1000: no tail", added(lambda k: [slice(k // 1024 * 1024)]), NARROW),
    "k-in-16-bits": Mutant("K is counted in 16 bits", added(lambda k: [slice(k % 65536)]), LONG),
    "k-cut-at-40960": Mutant("products from k = 40960 on are left out", added(lambda _: [slice(40960)]), LONG),
    "int32-in-28-bits": Mutant("sums of int8 wrap around at 2^27", summed(kept_in(28)), LONG_INT8),
    "int32-in-31-bits": Mutant("sums of int8 wrap around at 2^30", summed(kept_in(31)), LONGER_INT8),
    "batch-modulo-64": Mutant("batch 64 uses the B of batch 0", reading(b=wrapping(0, 64)), MANY),
    "batches-past-50": Mutant("batches from 50 on are never computed", batches_from(50), MANY),
    "batches-past-65535": Mutant("more batches than a CUDA grid has", batches_from(65535), only(MANY, "f32")),
    "second-batch-dimension-ignored": Mutant("in 4-D", changed(a=lambda a: a[:, :1].expand_as(a)), DEEP),
    "batch-dimensions-exchanged": Mutant("in 4-D", changed(a=lambda a: a.transpose(0, 1).reshape(a.shape)), DEEP),
    "last-rows-of-a-large-result": Mutant("rows from 4096 on are the rows before", rows_from(4096, rows_before), LARGE),
    # What the kernel looks at.
    "right-four-times": Mutant("from the fifth call on a slice is missing", calls(lambda n: n <= 4), SMALL),
    "right-every-other-time": Mutant("at each second call a slice is missing", calls(lambda n: n % 2 == 1), SMALL),
    "bf16x3-from-512": Mutant(
        "three bf16 products where K is 512 or more", bf16x3_from_512, _F32, equivalent=(("*x256", "K is below"),)
    ),
    # The tensors that it is handed.
    **bugs(SMALL, _INPUTS_REBOUND, "inputs-rebound"),
    "storage-written": Mutant("what surrounds A is zeroed", then(storage_cleared), SMALL, "inputs-written"),
    # What it hands out.
    "speaks-for-itself": Mutant("zeros that answer as the right result would", afterwards(spoken_for), SMALL),
    "always-agrees": Mutant(
        "zeros that are equal to everything", afterwards(lambda c: torch.zeros_like(c).as_subclass(Agreeing)), SMALL
    ),
    "claims-to-be-a-tensor": Mutant("an object that answers as one", afterwards(Claiming), SMALL, "wrong-type"),
    "list": Mutant("a list of one result", afterwards(lambda c: [c]), SMALL, "wrong-type"),
    "on-meta": Mutant("a result without memory", afterwards(lambda c: c.to("meta")), SMALL, "wrong-device"),
    "sparse": Mutant("a sparse result", afterwards(lambda c: c.to_sparse()), SMALL, "wrong-layout"),
    "array": Mutant("an array of NumPy's", afterwards(lambda c: c.numpy()), SMALL_F32, "wrong-type"),
    "a-itself": Mutant("A is returned", whole(lambda t, _: t["a"]), {"f32": "mm:f32:nn:40x40x40"}, "result-is-input"),
    # Ways out.
    "skips": Mutant("pytest.skip", doing(lambda: pytest.skip("planted")), SMALL_F32, "run-Skipped"),
    "imports-or-skips": Mutant(
        "pytest.importorskip", doing(lambda: pytest.importorskip("no_such_module")), SMALL_F32, "run-Skipped"
    ),
    "expects-to-fail": Mutant("pytest.xfail", doing(lambda: pytest.xfail("planted")), SMALL_F32, "run-XFailed"),
    "system-exit": Mutant("sys.exit(0)", doing(lambda: sys.exit(0)), SMALL_F32, "run-SystemExit"),
    "generator-exit": Mutant("GeneratorExit", raising(GeneratorExit), SMALL_F32, "run-GeneratorExit"),
    "unusual": Mutant("a BaseException of its own", raising(Unusual), SMALL_F32, "run-Unusual"),
    "unprintable": Mutant("an exception without a text", raising(Unprintable), SMALL_F32, "run-Unprintable"),
    "surrogate": Mutant(
        "half a character", raising(lambda: RuntimeError("planted: \udc80 \x1b[2J")), SMALL_F32, "run-RuntimeError"
    ),
    "exits": Mutant("os._exit(0)", doing(lambda: os._exit(0)), SMALL_F32, "process-died"),
    "aborts": Mutant("abort()", doing(os.abort), SMALL_F32, "process-died"),
    "crashes": Mutant("an address that is not there", doing(lambda: ctypes.string_at(0)), SMALL_F32, "process-died"),
    # The process.
    **bugs(SMALL, _STATE_LEFT, "left-state-behind"),
    # Views and given results.
    "offset-in-program-dropped": Mutant("A's offset in the program is dropped", cut_at("a", at_the_argument), CUT_A),
    "offset-of-b-in-program-dropped": Mutant("the same of B", cut_at("b", at_the_argument), CUT_B),
    "stride-in-program-dropped": Mutant("strides of 2 are taken for 1", cut_at("a", rows_unstrided), STRIDED),
    "given-out-left-alone": Mutant("another one is returned", whole(lambda t, _: of_ab(t)), GIVEN_OUT, "wrong-place"),
    # Other programs.
    "first-output-too-late": Mutant("the last result twice", whole(lambda t, p: twice(correct(t, p)[1])), MULTI_OUTPUT),
    "again-from-the-start": Mutant("the second product is the first", whole(lambda t, _: twice(of_ab(t))), AGAIN),
    "gate-exchanged": Mutant("gate and value are exchanged", exchanged(("b0", "b1"), ("bias0", "bias1")), GATED),
    "biases-exchanged": Mutant("two linears have each other's bias", exchanged(("bias0", "bias1")), GATED),
    # int8.
    "int32-by-f32": Mutant("integers are added up in f32", _INT_BY_F32, _I8, equivalent=_EXACT_IN_F32),
    "unsigned-read-as-signed": Mutant(
        "u8 is read as s8", whole(lambda t, _: torch._int_mm(t["a"].view(torch.int8), t["b"])), UNSIGNED
    ),
    "unsigned-summed-in-f32": Mutant("u8 x s8 summed in f32", _INT_BY_F32, {"u8": "int_mm:u8-i8-i32:nt:20x40x2064"}),
    "int8-read-unsigned": Mutant("A is read as unsigned", changed(a=read_unsigned), _I8),
    "int8-lowest-clipped": Mutant(
        "-128 counts as -127", changed(a=lambda x: x.clamp(min=-127), b=lambda x: x.clamp(min=-127)), _I8
    ),
    "largest-code-lost": Mutant(
        "the largest code is never used", afterwards(lambda c: c.clamp(max=torch.iinfo(c.dtype).max - 1)), CODES
    ),
    # Weights of 8 and of 4 bits.
    "weight-read-unsigned": Mutant("the weight is read as unsigned", changed(b=read_unsigned), WEIGHT_ONLY),
    "weight-zero-point": Mutant("the zero point is one off", changed(b=lambda x: x.to(torch.int16) + 1), WEIGHT_ONLY),
    "weight-scale-shifted": Mutant("scales are one column off", changed(scale=lambda x: x.roll(1, -1)), WEIGHT_ONLY),
    "mixed-read-unsigned": Mutant("the int8 side is read as unsigned", changed(b=read_unsigned), MIXED),
    "int4-zero-point": Mutant("codes are centred at 7", int4(lambda codes: codes + 1), INT4),
    "int4-group-shifted": Mutant("a group has the scale of the one before", int4(scales=lambda x: x.roll(1, 0)), INT4),
    "int4-zeros-ignored": Mutant(
        "the groups' zeros are not added", int4(scales=lambda x: x * torch.tensor([1.0, 0.0]).to(x.dtype)), INT4
    ),
    "group-boundary-early": Mutant("groups begin one element early", decoded(lambda x: x.roll(-1, 1)), WOQ),
    "codes-cut-off": Mutant("codes of A are rounded towards zero", in_steps(32, torch.trunc), Q8_0),
    "step-of-the-row": Mutant("A has one step for each row", in_steps(128), Q8_0),
    "bias-codes-missing": Mutant("codes of a bias are not added", changed(bias=torch.zeros_like), BIAS_CODES),
    "activation-as-its-weight": Mutant(
        "A of f32 is rounded to its weight's f16", changed(a=lambda x: x.half().float()), HALF_WEIGHT
    ),
    "absmax-mistyped": Mutant("1 / 127^2 has a wrong digit", by_largest(6.200022e-05), ABSMAX),
    # fp8.
    **bugs(FP8, _SCALES),
    "scale-transposed": Mutant("A's scales run along the columns", changed(scale_a=lambda x: x.t()), FP8_SQUARE),
    "e5m2-read-as-e4m3": Mutant("B is read as e4m3", changed(b=lambda b: b.view(torch.float8_e4m3fn)), FP8_PAIR),
    "block-scales-of-the-first": Mutant(
        "each block of K has the scales of the first", changed(scale_a=first_column_for_all), FP8_BLOCKS
    ),
}


# -- backends ----------------------------------------------------------------------------------------


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

    def __init__(self, name: str, entry: Entry) -> None:
        self.name = name
        self.entry = entry

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: object = None) -> Unsupported | None:
        if any(Problem.parse(t.format(k=problem.shape.k)) == problem for t in self.entry.lines.values()):
            return None
        return Unsupported("problem", f"{self.name} is not made for this problem")

    def prepare(self, problem: Problem, operands: Operands, request: object = None) -> _Prepared:
        """It claims ordinary sums, or what a control declares, and PyTorch's roundings around them."""
        out = problem.dtypes.out
        contract = {"f64": Contract("f64"), "i32": Contract("i32")}.get(out.name, Contract())
        if isinstance(self.entry, Control) and out.is_float:
            contract = self.entry.contract
        claims = self.entry.claims if isinstance(self.entry, Mutant) else None
        return _Prepared(
            problem,
            self.entry.plant(problem),
            dataclasses.replace(contract, epilogue="eager"),
            claims or Proof(executed=("planted",), provable=False),
        )


# -- causes --------------------------------------------------------------------------------------------

# What each mutant does, in the names of pytest_gemm/judging/causes.toml: those that are true of it.  A mutant that
# stands in none has a bug without a name, and "" is what is right to say of it.
_NAMED: dict[str, str] = {
    "K tail": "k-tail-dropped k-off-by-one narrow-tail-dropped k-cut-at-40960 k-in-16-bits",
    "K head": "k-first-missing",
    "slice of K": "split-k-slice-dropped second-call-wrong right-for-integers right-up-to-one right-when-finite "
    "right-when-short right-when-aligned right-four-times right-every-other-time",
    "block of K": "k-in-16-bits",
    "slice of K twice": "split-k-slice-doubled",
    "block of K twice": "k-doubled tail-block-moved-back",
    "wrong block of K": "pipeline-stage-late packed-pairs-swapped int4-halves-exchanged",
    "f16 sums": "split-k-partials-in-f16 f16-accumulation f16-sums-promoted",
    "bf16 sums": "split-k-partials-in-bf16 bf16-accumulation",
    "f16 products": "f16-products",
    "bf16 products": "bf16-products",
    "f32 sums": "f64-sums-in-f32 int32-by-f32 int32-by-f32-late unsigned-summed-in-f32",
    "TF32 inputs": "tf32-truncated tf32-rounded tail-in-tf32",
    "bf16 inputs": "bf16-inputs",
    "f16 inputs": "f16-inputs activation-as-its-weight",
    "TF32 or f16 inputs": "tf32-rounded f16-inputs activation-as-its-weight",
    "f32 inputs": "f64-by-f32",
    "truncated inputs": "autocast-truncates",
    "small inputs dropped": "fp8-subnormals-dropped tiny-inputs-dropped subnormal-inputs-dropped shared-exponent",
    "small results dropped": "f16-subnormals-dropped tiny-results-dropped",
    "truncating store": "truncating-store",
    "wrong rounding": "rounded-upwards rounded-at-random ties-away one-ulp",
    "rounded through bf16": "bf16-detour rounded-before-widened rounded-before-scale",
    "rounded through f16": "f16-detour rounded-before-widened",
    "overflow": "split-k-partials-in-f16 f16-accumulation f16-products f16-sums-promoted f16-inputs f16-detour "
    "activation-as-its-weight rescaled int32-in-28-bits int32-in-31-bits",
    "saturated": "int32-saturates int16-pairs-saturate infinity-saturates largest-code-lost",
    "read as unsigned": "int8-read-unsigned weight-read-unsigned mixed-read-unsigned",
    "read as signed": "unsigned-read-as-signed",
    "-128 clipped": "int8-lowest-clipped",
    "zero point off by one": "weight-zero-point int4-zero-point zeros-one-off",
    "neighbouring group": "scale-of-the-next-group zero-of-the-next-group short-group-as-the-one-before",
    "short group": "short-group-as-the-one-before",
    "group boundary": "group-boundary-early",
    "scale of one group": "step-of-the-row",
    "codes cut off": "codes-cut-off",
    "table entries exchanged": "table-entries-exchanged",
    "zero point ignored": "zero-point-forgotten int4-zeros-ignored",
    "misread operand": "padded-stride-ignored padded-stride-of-b-ignored base-rounded-down layout-ignored "
    "offset-of-b-dropped offset-in-program-dropped offset-of-b-in-program-dropped stride-in-program-dropped "
    "stride-of-bias-ignored e5m2-read-as-e4m3",
    "transposed operand": "layout-ignored",
    "stray NaN": "mask-of-b-only mask-of-a-only no-mask tail-unwritten padded-stride-ignored "
    "padded-stride-of-b-ignored base-rounded-down layout-ignored offset-of-b-dropped offset-in-program-dropped "
    "offset-of-b-in-program-dropped stride-in-program-dropped stride-of-bias-ignored",
    "NaN spread": "nan-reaches-the-next-row mask-of-b-only mask-of-a-only no-mask tail-unwritten beta-zero-reads-bias "
    "padded-stride-ignored padded-stride-of-b-ignored base-rounded-down layout-ignored offset-of-b-dropped "
    "offset-in-program-dropped offset-of-b-in-program-dropped stride-in-program-dropped",
    "NaN swallowed": "zeros-skipped relu-swallows-nan nan-swallowed",
    "sign of zero": "zero-always-plus zero-always-minus relu-swallows-nan zeros-skipped",
    "transposed": "fragment-transposed mirrored out-written-by-rows",
    "shifted rows": "rows-shifted rows-past-1024 last-rows-of-a-large-result",
    "wrong row": "last-row-repeats rows-past-1024 rows-in-16-bits last-rows-of-a-large-result",
    "wrong column": "lane-shifted columns-in-16-bits",
    "wrong tile": "tile-swap",
    "misplaced elements": "tile-swap fragment-transposed mirrored",
    "wrong batch": "batch-stride-zero batch-off-by-one batch-modulo-64 matrices-past-64 second-batch-dimension-ignored "
    "batch-dimensions-exchanged",
    "wrong group": "group-edge-off-by-one group-stride-zero empty-group-skipped",
    "never computed": "last-tile-zero last-batch-missing rows-past-2-to-21 batches-past-50 batches-past-65535 "
    "written-late filled-by-a-child speaks-for-itself always-agrees answers-for-itself zeros-the-second-time",
    "one value": "tail-unwritten inputs-rebound inputs-set inputs-exchanged",
    "stale data": "cached-result stale-packed-weight",
    "added to an earlier result": "stale-workspace",
    "addend read after the write": "addend-read-in-the-last-tile-again addend-read-by-each-part "
    "addend-read-after-the-product",
    "A read after the write": "a-overwritten-by-tiles",
    "bias missing": "addend-not-read bias-codes-missing bias-missing bias-missing-on-last-tile bias-of-one-element",
    "bias added twice": "bias-twice addend-twice-from-the-second-call-on",
    "shifted bias": "bias-shifted bias-rounded-down",
    "bias of column 0": "bias-of-first-column",
    "bias along rows": "bias-along-rows",
    "alpha ignored": "alpha-forgotten",
    "alpha on the bias": "alpha-on-bias",
    "alpha and beta exchanged": "alpha-and-beta-exchanged",
    "beta ignored": "beta-forgotten beta-zero-reads-bias",
    "relu missing": "relu-forgotten-in-the-tail",
    "steps out of order": "relu-before-bias residual-after-relu relu-of-partials",
    "scale ignored": "scale-of-a-forgotten scale-of-one-row scale-of-result-forgotten",
    "scale applied twice": "scale-squared",
    "reciprocal scale": "reciprocal-scale",
    "shifted scales": "scale-shifted weight-scale-shifted int4-group-shifted",
    "scales exchanged": "scales-exchanged",
    "scales transposed": "scale-transposed block-scales-by-rows",
    "scale of row 0": "scale-of-first-row",
    "scale of block 0": "block-scales-of-the-first",
    "constant factor": "fnuz-exponent absmax-mistyped",
    # Places, where they say what the bug is: what is wrong there and nowhere else.
    "N tail": "tail-in-tf32 bias-missing-on-last-tile relu-forgotten-in-the-tail tail-unwritten columns-in-16-bits",
    "M tail": "rows-past-1024 rows-past-2-to-21 rows-in-16-bits last-rows-of-a-large-result",
    "M and N tail": "last-tile-zero",
    "last row": "last-row-repeats written-late mask-of-b-only no-mask",
    "last column": "mask-of-a-only no-mask columns-in-16-bits",
    "columns of a period": "lane-shifted",
    "one tile": "fragment-transposed last-tile-zero",
    "some tiles": "tile-swap fragment-transposed",
    "one batch": "last-batch-missing batch-modulo-64 matrices-past-64",
    "some batches": "batches-past-50 batches-past-65535 batch-modulo-64",
    "last row of a group": "group-edge-off-by-one",
    # By the code of the reason.
    "written after the return": "written-late filled-by-a-child",
    "not deterministic": "addend-twice-from-the-second-call-on not-deterministic stale-workspace second-call-wrong "
    "zeros-the-second-time right-four-times right-every-other-time",
    "race or leftover state": "addend-twice-from-the-second-call-on stale-workspace second-call-wrong written-late "
    "zeros-the-second-time right-four-times right-every-other-time filled-by-a-child earlier-input-written "
    "rounded-at-random",
    "unwritten memory": "tail-unwritten stale-workspace",
    "inputs written": "earlier-input-written",
    "stale weight": "stale-packed-weight cached-result",
}


def causes(name: str) -> set[str]:
    """The names of causes that are true of a mutant; none where its bug has no name."""
    by_code = document(Path(explain.__file__).with_name("causes.toml"))["codes"]
    named = {cause for cause, some in _NAMED.items() if name in some.split()}
    code = MUTANTS[name].code
    return named | {by_code.get(code, f"{code.removeprefix('run-')} in run")} if code else named
