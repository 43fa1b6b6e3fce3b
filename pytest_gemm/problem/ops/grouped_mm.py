"""grouped_mm: products of uneven sizes that lie side by side in one matrix, in the four forms that PyTorch has.

- grouped_mm: groups of the rows of A, each with a B of its own.
- grouped_mm_n: groups of the columns of B, each with an A of its own.
- grouped_mm_k: groups of K; each has a result of its own, of zeros where the group is empty.
- grouped_bmm: a matrix of A for each of B, without groups.

``scaled_grouped_mm`` and the other forms multiply fp8, with a scale for each row of each A and each column of each B;
of rows, and of a matrix of A for each of B, with scales of blocks too, and of rows MXFP8, MXFP4 and NVFP4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import FLOATS, OUTPUTS, Complaints, Matmul, Op, Problem, Tensor, Tensors, dtype_of
from pytest_gemm.problem.ops.quantised import check_formats, of_blocks, recipes, scales_of


def pair(ragged: str, a: Tensor, b: Tensor, group: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The factors of a group: of the dimension ``ragged`` it has ``first`` to ``last``."""
    at = slice(first, last)
    if ragged == "k":
        return a[:, at], b[at]
    return (a[at], b[group]) if ragged == "m" else (a[group], b[:, at])


def joined(torch: Any, ragged: str, pieces: list[Tensor]) -> Tensor:
    """The result that the products of all groups make."""
    return torch.stack(pieces) if ragged == "k" else torch.cat(pieces, -2 if ragged == "m" else -1)


def _by_group(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The product of each group; ``matmul`` is not called for an empty one."""
    a, b, pieces = t["a"], t["b"], []
    like = a.new_zeros(0, dtype=torch.float32 if p.op.scales else a.dtype)
    for group, (first, last) in enumerate(itertools.pairwise([0, *t["offs"].tolist()])):
        x, y = pair(p.op.ragged, a, b, group, first, last)
        pieces.append(matmul(x, y) if last > first else like.new_zeros(x.shape[0], y.shape[1]))
    if p.has("groups.unowned"):
        pieces.append(like.new_full((a.shape[0] - last, p.shape.n), float("nan")))
    return joined(torch, p.op.ragged, pieces) if pieces else like.new_zeros(p.result_shape)


def _native(torch: Any, _: Problem, t: Tensors) -> Tensor:
    return torch.nn.functional.grouped_mm(t["a"], t["b"], offs=t.get("offs"))


def scale_of(p: Problem, scale_a: Tensor, scale_b: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """What multiplies each element of the result: the scale of its row, times that of its column.

    Args:
        p: a problem of a scaled grouped product.
        scale_a: of the rows of each A: (B * M,) where they lie in one matrix or K is divided, otherwise (B, M).
        scale_b: of the columns of each B: (B * N,) or (B, N) likewise.
        groups: [first, last) of each group of rows, or of columns.
    """
    if p.op.ragged in {"", "k"}:
        batch, m, n = p.shape.batch, p.shape.m, p.shape.n
        return scale_a.reshape(batch, m, 1) * scale_b.reshape(batch, 1, n)
    repeats = scale_a.new_tensor([last - first for first, last in groups]).long()
    if p.has("groups.unowned"):
        repeats[-1] += scale_a.shape[0] - groups[-1][1]
    if p.op.ragged == "m":
        return scale_a[:, None] * scale_b.repeat_interleave(repeats, 0)
    return scale_a.repeat_interleave(repeats, 0).mT * scale_b


def _around_scaled(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """fp8 holds neither the sum nor the scaled sum: ``matmul`` gives f32, and the result is rounded once.

    Scales of blocks are multiplied by before the sum.
    """

    def wide(x: Tensor, y: Tensor) -> Tensor:
        return matmul(x, y).to(torch.float32)

    if p.micro_block or p.scale_blocks:
        t = {**t, **dict(zip("ab", of_blocks(torch, p, t, torch.float32), strict=True))}
    c = _by_group(torch, p, t, wide) if p.op.ragged else wide(t["a"], t["b"])
    if p.micro_block or p.scale_blocks:
        return c.to(dtype_of(torch, p))
    groups = list(itertools.pairwise([0, *t["offs"].tolist()])) if p.op.ragged else []
    return (c * scale_of(p, t["scale_a"], t["scale_b"], groups)).to(dtype_of(torch, p))


def _scaled(torch: Any, p: Problem, t: Tensors) -> Tensor:
    if p.has("program.v2"):
        return torch.nn.functional.scaled_grouped_mm(t["a"], t["b"], offs=t.get("offs"), **recipes(torch, p, t))
    given = (t[name] for name in ("a", "b", "scale_a", "scale_b"))
    fast = p.has("math.fast_accumulate")
    return torch._scaled_grouped_mm(*given, t.get("offs"), out_dtype=dtype_of(torch, p), use_fast_accum=fast)


def _check_fixed(p: Problem) -> Complaints:
    if p.op.ragged in {"n", "k"} and p.has("m.dynamic"):
        yield "flags", p.flags.index("m.dynamic"), f"{p.op.name} has one size", "drop m.dynamic"


def _check_blocks(p: Problem) -> Complaints:
    """Scales of small blocks lie in tiles of 128 rows, and each group begins with one."""
    place, step = scales_of(p)
    yield from check_formats(p)
    if p.has_whole_scales:
        yield "quant", place, f"{p.op.name} has no scales for whole tensors", "write nv"
    if p.scale_blocks and p.scale_blocks[0] > 1:
        yield "quant", place, f"{step}: {p.op.name} has scales of single rows of A", "write blocks"
    if p.micro_block and (p.ends % ALIGNMENT or not p.ends):
        text = f"{step} has scales in tiles of {ALIGNMENT} rows, and all groups have {p.ends}"
        yield "shape", 1, text, f"give sizes whose product is a multiple of {ALIGNMENT}"


# DeepGEMM's contiguous layout: each group begins where a tile of this many rows does.
ALIGNMENT: Final = 128

_op: Final = functools.partial(Op, batch="always", native=_native, constant_b=False)
_FLAGS: Final = ("b.argument", *OUTPUTS)
# How what is divided is divided; and which rows of A have no group, or a label in place of an end.
_OF_K: Final = ("groups.crowded", "groups.single", "groups.aligned")  # the results of empty groups are all zeros
_ROUTING: Final = (*_OF_K, "groups.sparse")
_ROWS: Final = (*_ROUTING, "groups.unowned", "groups.zeroed", "groups.labels")
# Where the result has another shape than A, whatever the sizes.
_UNLIKE_A: Final = tuple(flag for flag in _FLAGS if flag != "r0.alias")

_FP8: Final = ("f8e4m3fn-f8e4m3fn-bf16",)
_SCALED: Final = (*_UNLIKE_A, "math.fast_accumulate", "program.v2")

_scaled_op: Final = functools.partial(
    _op,
    dtypes=_FP8,
    native=_scaled,
    around=_around_scaled,
    rounds_once=True,
    layouts=(Layout.NT,),
    scales=("rowwise",),
)

OPS: Final = (
    _op(
        "grouped_mm",
        help="F.grouped_mm: groups of the rows of A, each with a B of its own",
        dtypes=FLOATS,
        around=_by_group,
        ragged="m",
        layouts=(Layout.NN, Layout.NT),
        flags=("b.broadcast", "a.sliced", "b.sliced", *_ROWS, *_FLAGS),
    ),
    _op(
        "grouped_mm_n",
        help="F.grouped_mm: groups of the columns of B, each with an A of its own",
        dtypes=FLOATS[1:],
        around=_by_group,
        ragged="n",
        layouts=(Layout.NN, Layout.NT),
        check=_check_fixed,
        flags=("a.broadcast", *_ROUTING, *_UNLIKE_A),
    ),
    _op(
        "grouped_mm_k",
        help="F.grouped_mm: groups of K, each with a result of its own; zeros where the group is empty",
        dtypes=FLOATS[1:],
        around=_by_group,
        ragged="k",
        check=_check_fixed,
        flags=(*_OF_K, *_UNLIKE_A),
    ),
    _op(
        "grouped_bmm",
        help="F.grouped_mm of a matrix of A for each of B, without groups",
        dtypes=FLOATS[1:],
        layouts=(Layout.NN, Layout.NT),
        flags=("b.broadcast", "groups.masked", *_FLAGS),
    ),
    _scaled_op(
        "scaled_grouped_mm",
        help="torch._scaled_grouped_mm: as grouped_mm, in fp8 with scales of rows or of blocks; MXFP8, MXFP4, NVFP4",
        dtypes=(*_FP8, "f4e2m1fn-f4e2m1fn-bf16"),
        ragged="m",
        scales=("rowwise", "blocks", "mx", "nv"),
        check=_check_blocks,
        flags=(*_ROWS, *_SCALED),
    ),
    *(
        _scaled_op(
            f"scaled_grouped_mm_{ragged}",
            help=f"torch._scaled_grouped_mm: as grouped_mm_{ragged}, in fp8 with scales of rows",
            ragged=ragged,
            check=_check_fixed,
            flags=(*_OF_K, *_SCALED),
        )
        for ragged in "nk"
    ),
    _scaled_op(
        "scaled_grouped_bmm",
        help="torch._scaled_grouped_mm: as grouped_bmm, in fp8 with scales of rows or of blocks",
        scales=("rowwise", "blocks"),
        check=_check_blocks,
        flags=("groups.masked", *_SCALED),
    ),
)
