"""Rows and columns of a large result that the oracle judges, and how they are chosen.

A line is judged with all of its elements where their reference costs less than a second or so.  Of a huge result only
some columns of a row, some rows of a column and some matrices of a batch are taken.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pytest_gemm.core.case_id import Device
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

# Of M rows an M-th of 64 is judged, between these limits; of N columns likewise.
_SHARE: Final = 64
_FEWEST: Final = 16
_MOST: Final = 256
# The same where a dimension is cut because its lines in full would cost too much.
_CUT: Final = 4096
# Elements of a result, or of an operand, that are converted to float64 for the reference; and products in it.
_ELEMENTS: Final = 1 << 25
_WORK: Final = 1 << 36
_EDGES: Final = (16, 32, 64, 128, 256)
# Offsets that a type ends at: signed and unsigned integers of 32 bits.
_LIMITS: Final = (1 << 31, 1 << 32)
# The least number of lines whose number itself may be too large for a type: a signed integer of 16 bits.
_SHORT: Final = 15
# Elements from which PyTorch's own kernels for lists of indices, which may be what is under test, are not used.
_INDEXED: Final = (1 << 31) - 1


def generator(key: str) -> torch.Generator:
    """Random numbers that follow from a text."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


def lines_of(size: int, key: str, boundaries: Sequence[int] = (), count: int = 0) -> Tensor:
    """Which of ``size`` rows (or columns, or matrices) are judged: sorted indices.

    Both ends, the boundaries, both sides of a tile's edge for tiles of 16 to 256 at the first, a middle and the last
    one, and of the rest one at random of each equal stretch, so that no block that is longer than a stretch is missed.

    Args:
        size: how many there are.
        key: of the random ones.
        boundaries: lines that have to be among them.
        count: how many, about; 0: a 64th, between 16 and 256.
    """
    wanted = min(size, count or max(_FEWEST, min(_MOST, size // _SHARE)))
    if wanted == size:
        return torch.arange(size)
    edges = [0, size - 1, *boundaries]
    for tile in reversed(_EDGES):
        for edge in (size // tile * tile, size // 2 // tile * tile, tile):
            edges += [edge - 1, edge]
    found = dict.fromkeys(e for e in edges if 0 <= e < size)
    chosen = list(found)[: wanted // 3]
    rest = wanted - len(chosen)
    bounds = torch.arange(rest + 1) * size // rest
    spread = bounds[:-1] + (torch.rand(rest, generator=generator(key), dtype=torch.float64) * bounds.diff()).long()
    lines: Tensor = torch.cat([torch.tensor(chosen, dtype=torch.int64), spread]).unique()
    return lines


def boundaries_of(problem: Problem, dim: int) -> list[int]:
    """Lines at which a number or an offset leaves a type: the last one before, the one in which it does, the next.

    The offsets are those of a line's first element in the result and in A or B, in elements and in bytes.

    Args:
        problem: what was computed.
        dim: of the result: -3 for the matrices of a batch, -2 for rows, -1 for columns.
    """
    shape, dtypes, layout = problem.shape, problem.dtypes, problem.layout
    m, n, k = shape.m, shape.n, shape.k
    a, b, c = (dtype.bits // 8 or 1 for dtype in (dtypes.a, dtypes.b, problem.result_dtype))
    strides = {
        -3: ((m * n, c), (m * k, a), (k * n, b)),
        -2: ((n, c), (1 if layout.a_transposed else k, a)),
        -1: ((k if layout.b_transposed else 1, b),),
    }
    found = [
        limit // (stride * unit) + beside
        for (stride, size), limit in itertools.product(strides[dim], _LIMITS)
        for unit, beside in itertools.product((1, size), (-1, 0, 1))
        if stride > 0
    ]
    found += [(1 << bits) + beside for bits in range(_SHORT, 32) for beside in (-1, 0)]
    length = dict(zip((-1, -2, -3), reversed(problem.result_shape), strict=False)).get(dim, 1)
    return [line for line in dict.fromkeys(found) if 0 < line < length]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Rows or columns of a result.

    Attributes:
        whole: the operands of the result.
        dim: of the result: -2 for rows, -1 for columns.
        index: which, sorted, by dimension: those of ``dim``, and behind them of others that are not complete.
    """

    whole: Operands
    dim: int
    index: Mapping[int, Tensor]

    @property
    def name(self) -> str:
        """``rows`` or ``columns``."""
        return "rows" if self.dim == -2 else "columns"

    @property
    def count(self) -> int:
        """How many lines."""
        return len(self.index[self.dim])

    @property
    def complete(self) -> bool:
        """Whether these are all elements of the lines."""
        return len(self.index) == 1

    def text(self) -> str:
        """``256 of 32768 rows, in 4096 of 131072 columns``."""
        shape = self.whole.problem.result_shape
        words = {-3: "matrices", -2: "rows", -1: "columns"}
        counts = {dim: f"{len(index)} of {shape[dim]} {words[dim]}" for dim, index in self.index.items()}
        own = counts.pop(self.dim)
        return f"{own} (in {' and '.join(counts.values())})" if counts else own

    def of(self, x: Tensor) -> Tensor:
        """These lines of a tensor of the result's shape, or of one that is broadcast to it; on the CPU."""
        return _selected(x, self.index)

    def shape(self, problem: Problem) -> Problem:
        """The problem whose result these lines are."""
        names = {-3: "batch", -2: "m", -1: "n"}
        sizes = {names[dim]: len(index) for dim, index in self.index.items()}
        if "m" in sizes and problem.op.ragged:
            sizes["m"] //= problem.shape.batch or 1
        shape = dataclasses.replace(problem.shape, **sizes)
        # Where operands lie and what they share has been decided; arithmetic has not.
        flags = tuple(f for f in problem.flags if f.startswith("math."))
        steps = tuple(s for s in problem.epilogue if s.kind is not StepKind.VIEW)
        quant = tuple(Step("blocks", "1_1") if step.name == "blocks" else step for step in problem.quant)
        return dataclasses.replace(problem, shape=shape, epilogue=steps, flags=flags, quant=quant)

    @functools.cached_property
    def operands(self) -> Operands:
        """The operands of these lines, on the CPU."""
        whole, index = self.whole, self.index
        # With a line for each column of B, of groups.
        by_columns = {"quantisation", *(("scale_b", "zero_b") if whole.problem.op.coded else ())}
        broadcast, sides = {"bias", "scale_a", "scale_b"} - by_columns, {"a": whole.a, "b": whole.b}
        if blocks := whole.problem.scale_blocks:  # each line has scales of its own, those of its block
            assert whole.scale_a is not None
            assert whole.scale_b is not None
            sides["scale_a"] = whole.scale_a.repeat_interleave(blocks[0], 0)[: whole.problem.shape.m]
            sides["scale_b"] = whole.scale_b.repeat_interleave(blocks[1], 1)[:, : whole.problem.shape.n]
        found: dict[str, Any] = {n: self.of(x) for n, x in whole.tensors.items() if n in broadcast - sides.keys()}
        for name, x in sides.items():
            own = -2 if name.endswith("a") else -1
            found[name] = _selected(x, {dim: index[dim] for dim in (own, -3) if dim in index})
        if -1 in index:
            found |= {n: _selected(x, {-2: index[-1]}) for n, x in whole.tensors.items() if n in by_columns}
        if whole.offs is not None:
            ends = whole.offs.cpu()
            found["offs"] = torch.searchsorted(index[-2], ends, out_int32=True) if -2 in index else ends
        found |= {"problem": self.shape(whole.problem), "residuals": tuple(map(self.of, whole.residuals))}
        return dataclasses.replace(whole, device=Device.CPU, buffers=(), **found)

    @functools.cached_property
    def reference(self) -> reference_module.Reference:
        """The product of these lines."""
        return reference_module.reference(self.operands.problem, self.operands)

    def interval(self, output: Problem, contract: Contract) -> interval_module.Interval:
        """What these lines of one of the program's results may be."""
        return interval_module.interval(self.shape(output), self.operands, self.reference, contract)

    def judge(self, output: Problem, actual: Tensor, contract: Contract, others: Mapping[str, Tensor]) -> LinesVerdict:
        """Compare these lines of a result; the index of the worst element is that of the whole."""
        mine, interval = self.of(actual), self.interval(output, contract)
        cut = {name: self.of(x) for name, x in others.items() if x.shape == actual.shape}
        found = verdict.compare(mine, interval, self.shape(output), self.operands, others=cut, whole=False)
        bad = torch.zeros(0)
        if found.mismatch is not None:
            bad = verdict.rejected(mine.to(torch.float64), interval)
            place = list(found.mismatch.index)
            for dim, index in self.index.items():
                place[dim] = int(index[place[dim]])
            found = dataclasses.replace(found, mismatch=dataclasses.replace(found.mismatch, index=tuple(place)))
        return LinesVerdict(self, interval, mine, found, bad)


def _selected(x: Tensor, index: Mapping[int, Tensor]) -> Tensor:
    """The lines of each dimension that ``x`` has, and has not broadcast; on the CPU."""
    x = x.detach()
    dtype = x.dtype
    if x.element_size() == 1 and x.is_floating_point():  # what torch can do with fp8 differs by device
        x = x.view(torch.uint8)
    for dim, lines in index.items():
        if x.dim() < -dim or x.shape[dim] == 1:
            continue
        if x.numel() > _INDEXED:
            x = torch.stack([x.select(dim, line) for line in lines.tolist()], dim)
        else:
            x = torch.index_select(x, dim, lines.to(x.device))
    return x.view(dtype).cpu()


@dataclasses.dataclass(frozen=True)
class LinesVerdict:
    """Lines, what they may be, what they are, and the verdict.

    Attributes:
        bad: which elements are wrong; empty where none is.
    """

    lines: Lines
    interval: interval_module.Interval
    actual: Tensor
    comparison: verdict.Comparison
    bad: Tensor

    def mark(self, rows: Tensor, columns: Tensor) -> None:
        """Set the places of wrong elements in bool tensors of the result's rows, ([P,] M), and columns, (N,)."""
        index = self.lines.index
        sizes = dict(zip((-1, -2, -3), (len(columns), *reversed(rows.shape)), strict=False))
        places = {dim: index.get(dim, torch.arange(size)) for dim, size in sizes.items()}
        grid = torch.meshgrid(*(places[dim] for dim in sorted(places)[:-1]), indexing="ij")
        rows[grid] |= self.bad.any(-1)
        columns[places[-1]] |= of_any_batch(self.bad.any(-2))


def of_any_batch(x: Tensor) -> Tensor:
    """Which lines are marked in any matrix of a batch; of ([B,] L), (L,)."""
    return x.reshape(-1, x.shape[-1]).any(0)


# -- which -----------------------------------------------------------------------------------------------


def chosen(operands: Operands, key: str) -> tuple[Lines, ...]:
    """The rows and the columns of a result that are judged; the rows alone where these are all elements."""
    rows, columns = (_cut(operands, dim, key) for dim in (-2, -1))
    whole = rows.complete and rows.count == operands.problem.result_shape[-2]
    return (rows,) if whole else (rows, columns)


def _cut(operands: Operands, dim: int, key: str) -> Lines:
    """Rows or columns, of as many matrices and with as many of their elements as can be afforded."""
    problem = operands.problem
    shape, k = dict(zip((-1, -2, -3), reversed(problem.result_shape), strict=False)), problem.shape.k
    found = {dim: _divided(problem, dim, lines_of(shape[dim], f"{key} {dim}", boundaries_of(problem, dim)))}
    groups = (problem.shape.batch or 1) if problem.op.ragged else 1  # each line meets the B of all

    def size(d: int) -> int:
        return len(found[d]) if d in found else shape.get(d, 1)

    across = -1 if dim == -2 else -2
    for other in (-3, across):
        most = size(across) * max(size(dim), k) * groups
        most = max(most, k * size(dim)) if other == -3 else most
        excess = max(size(-3) * most / _ELEMENTS, math.prod(map(size, (-1, -2, -3))) * k / _WORK)
        if excess > 1.0 and other in shape:
            count = max(_FEWEST, min(_CUT, int(size(other) / excess)))
            some = lines_of(shape[other], f"{key} {other}", boundaries_of(problem, other), count)
            found[other] = _divided(problem, other, some)
    return Lines(operands, dim, found)


def around(operands: Operands, suspects: Tensor, most: int) -> Iterator[Lines]:
    """Rows that are suspected, in blocks of columns that can be afforded.

    Args:
        operands: of the result.
        suspects: bool, of the result's shape without N.
        most: rows and matrices of a batch that are taken.
    """
    problem, index = operands.problem, {}
    n, k = problem.shape.n, problem.shape.k
    if suspects.dim() > 1 and len(suspects) > most:
        index[-3] = _some(suspects.any(-1), most)
        suspects = suspects[index[-3]]
    rows = _divided(problem, -2, _some(of_any_batch(suspects), most))
    matrices = len(suspects) if suspects.dim() > 1 else 1
    wide = max(1, _ELEMENTS // (matrices * max(k, len(rows))))
    for first in range(0, n, wide):
        columns = {} if wide >= n else {-1: torch.arange(first, min(first + wide, n))}
        yield Lines(operands, -2, {-2: rows, **index, **columns})


def _divided(problem: Problem, dim: int, lines: Tensor) -> Tensor:
    """The lines; rows of groups as often as the number of groups divides, the last one several times."""
    missing = -len(lines) % (problem.shape.batch or 1) if problem.op.ragged and dim == -2 else 0
    return torch.cat([lines, lines[-1:].repeat(missing)])


def _some(marked: Tensor, most: int) -> Tensor:
    """Indices of the marked elements, of more than ``most`` at equal distances."""
    found = marked.nonzero().flatten()
    return found[torch.linspace(0, len(found) - 1, min(most, len(found))).round().long()]
