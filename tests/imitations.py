"""Imitations of defects that GEMM stacks have had: programs with the same defect, for ``studies/history.toml``.

What a GPU did with its tiles is done with tensors, as little as makes the same elements wrong.  Limits of 2^31 and 2^32
are small ones here.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, Final

import torch
from mutants import Plant, Tensors, afterwards, changed, corrupted, exact, product, store, whole
from torch import Tensor

from pytest_gemm.judging.imitations import saturated
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
    """A is shifted by 128 to u8, and pairs of products are added in 16 bits."""
    return (saturated(a.double() + 128, b.double()) - 128 * b.double().sum(0)).int()


def _nan_of_the_row_behind(a: Tensor, b: Tensor) -> Tensor:
    """The last block of 32 products reads on into the next row; its zeros in B do not make NaN harmless."""
    beyond = torch.zeros(len(a), 1)
    beyond[:-1] = (a[1:, : -a.shape[1] % 32].float() * 0.0).sum(1, keepdim=True)
    return store(exact(a, b) + beyond, a)


def _result_without_gaps(t: Tensors, problem: Problem) -> Tensor:
    out = t["out"]
    made = build(problem)(**{**t, "out": torch.empty_like(out, memory_format=torch.contiguous_format)})
    out.as_strided(made.shape, (made.shape[1], 1)).copy_(made)
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
    "row-of-a-tile-lost-in-one-of-50-calls": _row_lost_rarely(),
}
