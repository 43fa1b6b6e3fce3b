"""Imitations of defects that GEMM stacks have had: programs with the same defect, for ``studies/history.toml``.

What a GPU did with its tiles is done with tensors, as little as makes the same elements wrong.  Limits of 2^31 and 2^32
are small ones here.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, Final

import torch
from mutants import Plant, Tensors, afterwards, changed, corrupted, exact, product, right, store, whole
from torch import Tensor

from pytest_gemm.judging.imitations import saturated
from pytest_gemm.problem.ops.microscaled import swizzled, tiled
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import build

# What stands for 2^31 elements, and for 2^19 rows.
_LIMIT: Final = 512
_ROWS: Final = 1 << 16


def _tensorwise_as_rowwise(t: Tensors, _: Problem) -> Tensor:
    """Behind the only scale of A and of B lies nothing that was meant: here 1."""
    c = exact(t["a"], t["b"])
    rows, columns = torch.ones(c.shape[0], 1), torch.ones(c.shape[1])
    rows[0], columns[0] = t["scale_a"], t["scale_b"]
    return c * rows * columns


def _column_tail(t: Tensors, _: Problem) -> None:
    """The columns behind the last whole block of 16 have the first one's scale."""
    scale = t["scale"].clone()
    scale[len(scale) // 16 * 16 :] = 2 * scale[0]
    t["scale"] = scale


def _residual_not_permuted(t: Tensors, problem: Problem) -> Tensor:
    view, perm = problem.view_steps
    x = torch.nn.functional.linear(t["a"], t["b"], t["bias"]).view(view.sizes).permute(perm.order(4))
    return x * t["r0"].reshape(view.sizes).permute(perm.order(4))


def _not_unpacked(t: Tensors, _: Problem) -> None:
    """The codes are read in the order in which two blocks of 16 share their bytes."""
    codes = t["b"].unflatten(1, (-1, 2, 16))
    t["b"] = codes.mT.flatten(1).contiguous()


def _pairs_saturate(a: Tensor, b: Tensor) -> Tensor:
    """An i8 A is shifted by 128 to u8, and pairs of products are added in 16 bits."""
    shift = 128 * (a.dtype == torch.int8)
    return (saturated(a.double() + shift, b.double()) - shift * b.double().sum(0)).int()


def _nan_of_the_row_behind(a: Tensor, b: Tensor) -> Tensor:
    """The last block of 32 products reads on behind the row; its zeros in B do not make NaN harmless."""
    beyond, behind = torch.zeros(len(a), 1), a.storage_offset() + a.shape[1]
    after = a.as_strided((len(a) - 1, -a.shape[1] % 32), a.stride(), behind)
    beyond[:-1] = (after.float() * 0.0).sum(1, keepdim=True)
    return store(exact(a, b) + beyond, a)


def _result_without_gaps(t: Tensors, problem: Problem) -> Tensor:
    out = t["out"]
    made = build(problem)(**{**t, "out": torch.empty_like(out, memory_format=torch.contiguous_format)})
    out.as_strided(made.shape, made.stride()).copy_(made)
    return out


def _wrapped(made: Tensor) -> Tensor:
    """Elements from the limit on are stored where the lower bits of their place say; nothing is stored there."""
    flat, stored = made.flatten(), torch.full_like(made.flatten(), torch.nan)
    for first in range(0, len(flat), _LIMIT):
        part = flat[first : first + _LIMIT]
        stored[: len(part)] = part
    return stored.view_as(made)


def _unwritten(made: Tensor) -> Tensor:
    made = made.clone()
    made.view(-1)[_LIMIT:] = 0
    return made


def _empty_group(t: Tensors, problem: Problem) -> Any:
    """The result of a group without products is what lay there: the one before."""
    ends = t["offs"].tolist()
    empty = [g for g, (first, last) in enumerate(itertools.pairwise([0, *ends])) if first == last]
    made = build(problem)(**t).clone()
    made[empty] = made[[g - 1 for g in empty]]
    return made


def _second_starts_anew(t: Tensors, problem: Problem) -> Any:
    calls = itertools.count()
    return build(problem, lambda a, b: store(exact(a, b) * (next(calls) % 2), a))(**t)


def _missing_threads(made: Tensor) -> Tensor:
    """Two of four threads have run: the other blocks of rows are as they were."""
    made = made.clone()
    made[len(made) // 2 :] = torch.nan
    return made


def _tile_lost() -> Plant:
    """A tile lacks half of its products, in each second call."""
    calls = itertools.count()

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        c = exact(a, b)
        if next(calls) % 2:
            half = a.shape[-1] // 2
            c[16:32, 16:32] = exact(a[16:32, :half], b[:half, 16:32])
        return store(c, a)

    return product(matmul)


# -- pairs

# Columns that a kernel writes, and those of its tile.
_WRITTEN: Final = 1 << 16
_TILE: Final = 64
_SLICES: Final = 3


def _alpha_in_first_tile(t: Tensors, problem: Problem) -> Tensor:
    c = exact(t["a"], t["b"])
    c[:_TILE, :_TILE] *= problem.alpha
    return store(c + t["bias"] * problem.beta, t["a"])


def _columns_unwritten(made: Tensor) -> Tensor:
    made = made.clone()
    made[..., _WRITTEN:] = torch.nan
    return made


def _partials_in_result(t: Tensors, problem: Problem) -> Any:
    """Of two slices of K the result has one; the sum beside it is right."""
    half = t["a"].shape[1] // 2
    return store(exact(t["a"][:, :half], t["b"][:half]), t["a"]), build(problem)(**t)[1]


def _residual_overwritten(t: Tensors, problem: Problem) -> Any:
    """The first result takes the place of the residual, which the second one then reads."""
    first, _ = build(problem)(**t)
    return first, build(problem)(**{**t, "r0": first})[1]


def _first_block_zeroes(t: Tensors, problem: Problem) -> Any:
    """The block of the first group clears some columns after the others have added to them."""
    made = build(problem)(**t).clone()
    first = t["a"].clone()
    first[:, problem.group_size :] = 0
    made[:, _TILE:] = build(problem)(**{**t, "a": first})[:, _TILE:]
    return made


def _slices_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Slices of K are rounded up to whole blocks of 128, and begin where they would without: products count twice."""
    k = a.shape[-1]
    size = -(-k // (_SLICES * 128)) * 128
    starts = [k * index // _SLICES for index in range(_SLICES)]
    return store(sum((exact(a[:, i : i + size], b[i : i + size]) for i in starts), torch.zeros(())), a)


def _without_addend_where_empty(t: Tensors, problem: Problem) -> Tensor:
    c = exact(t["a"], t["b"]) * problem.alpha
    return store(c + t["bias"] * problem.beta if problem.shape.k else c, t["a"])


def _zeros_of_next_group_in_tail(zeros: Tensor) -> Tensor:
    """Columns behind the last whole tile have the zero points of the group before."""
    zeros = zeros.clone()
    zeros[len(zeros) // _TILE * _TILE :] = zeros[len(zeros) // _TILE * _TILE :].roll(1, 1)
    return zeros


def _last_columns_repeat(a: Tensor, b: Tensor) -> Tensor:
    """Where N is 8 modulo 16, the last 8 columns hold those before them."""
    c = exact(a, b)
    if c.shape[1] % 16 == 8:
        c[:, -8:] = c[:, -16:-8]
    return store(c, a)


def _scales_in_order(t: Tensors, problem: Problem) -> None:
    """Swizzled scales are read as if they lay by lines and blocks."""
    shape = tiled(problem.shape.m, problem.shape.k // problem.micro_block)
    moved = swizzled(t["scale_a"].view(torch.uint8).reshape(shape).numpy())
    t["scale_a"] = torch.from_numpy(moved).view(t["scale_a"].dtype)


def _one_tile(a: Tensor, b: Tensor) -> Tensor:
    """Of the rows of a group only those of the first tile of 4 are written; the workspace was zero."""
    c = exact(a, b)
    c[4:] = 0.0
    return store(c, a)


# -- states


def _row_lost_rarely() -> Plant:
    """A row of a tile has the sums of the tile behind it, in one of 50 calls, which is none of the first ten."""
    calls, chance = itertools.count(), random.Random(0)
    when = 0

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        nonlocal when
        call = next(calls) % 50
        when = chance.randrange(10, 50) if call == 0 else when
        c = exact(a, b)
        if call == when:
            c[3, 16:32] = c[3, 32:48]
        return store(c, a)

    return product(matmul)


IMITATIONS: Final[dict[str, Plant]] = {
    "tensorwise-as-rowwise": whole(_tensorwise_as_rowwise),
    "woq-column-tail": corrupted(_column_tail),
    "residual-not-permuted": whole(_residual_not_permuted),
    "offset-of-b-dropped": changed(b=lambda b: b.as_strided(b.shape, b.stride(), b.storage_offset() - 1)),
    "factors-lost": whole(lambda t, _: t["bias"] + t["a"] @ t["b"]),
    "codes-not-unpacked": corrupted(_not_unpacked, lambda a, b: exact(a, b).float()),
    "pairs-saturate": product(_pairs_saturate),
    "sums-through-f32": product(lambda a, b: exact(a, b).float().double().to(torch.int32)),
    "nan-of-the-row-behind": product(_nan_of_the_row_behind),
    "bias-times-zero": whole(lambda t, p: store(exact(t["a"], t["b"]) + t["bias"] * p.beta, t["a"])),
    "result-without-gaps": whole(_result_without_gaps),
    "offsets-wrap": afterwards(_wrapped),
    "last-elements-not-written": afterwards(_unwritten),
    "rows-wrap": product(lambda a, b: store(exact(a[torch.arange(len(a)) % _ROWS], b), a)),
    "empty-group-not-written": whole(_empty_group),
    "second-product-starts-anew": whole(_second_starts_anew),
    "scales-of-the-first-block": changed(scale_a=lambda scale: scale[:, :1].expand_as(scale).contiguous()),
    "blocks-of-missing-threads": afterwards(_missing_threads),
    "tile-lost-in-some-calls": _tile_lost(),
    # -- pairs
    "alpha-in-the-first-tile": whole(_alpha_in_first_tile),
    "columns-not-written": afterwards(_columns_unwritten),
    "partials-in-the-result": whole(_partials_in_result),
    "column-addend-along-rows": whole(
        lambda t, _: store(exact(t["a"], t["b"]) + t["bias"].flatten()[: t["b"].shape[1]], t["a"])
    ),
    "residual-overwritten": whole(_residual_overwritten),
    "first-block-zeroes": whole(_first_block_zeroes),
    "slices-overlap": product(_slices_overlap),
    "zeros-for-long-groups": whole(lambda t, p: build(p)(**t) * (p.group_size < 512)),
    "zeros-of-another-group": changed(zero_b=lambda zeros: zeros.roll(1, 1)),
    "addend-lost-without-products": whole(_without_addend_where_empty),
    "zeros-of-another-group-in-the-tail": changed(zero_b=_zeros_of_next_group_in_tail),
    "scale-of-the-first-group": whole(
        lambda t, p: build(p)(**{**t, "quantisation": t["quantisation"][:1].expand_as(t["quantisation"]).contiguous()})
    ),
    "last-columns-repeat": product(_last_columns_repeat),
    "swizzled-scales-in-order": corrupted(_scales_in_order),
    "scales-transposed": changed(scale_a=lambda scale: scale.mT.reshape(scale.shape)),
    "bias-rounded-down": changed(bias=lambda bias: bias.as_strided(bias.shape, bias.stride(), 0)),
    "one-tile-of-a-group": product(_one_tile),
    # -- states
    "row-of-a-tile-lost-in-one-of-50-calls": _row_lost_rarely(),
}

# -- groups


def _masked_by_a_factor(t: Tensors, problem: Problem) -> Any:
    flags = tuple(flag for flag in problem.flags if flag != "groups.zeroed")
    made = build(dataclasses.replace(problem, flags=flags), right)(**t)
    return made * (torch.arange(len(made)) < t["offs"][-1])[:, None]


def _group_rows_wrap(t: Tensors, _: Problem) -> None:
    """The first row of a group is counted in 32 bits, of which five are left here."""
    ends = [0, *t["offs"].tolist()]
    t["a"] = t["a"][torch.cat([torch.arange(last - first) + first % 32 for first, last in itertools.pairwise(ends)])]


IMITATIONS.update(
    {
        "scales-of-the-next-expert": changed(scale_b=lambda scale: scale.roll(-1, 0)),
        "rows-masked-by-a-factor": whole(_masked_by_a_factor),
        "label-of-the-first-row": changed(labels=lambda labels: labels[torch.arange(len(labels)) // 16 * 16]),
        "factor-of-another-type": changed(r0=lambda r: r.view(torch.float16).to(r.dtype)),
        "rows-of-a-group-wrap": corrupted(_group_rows_wrap),
    }
)
