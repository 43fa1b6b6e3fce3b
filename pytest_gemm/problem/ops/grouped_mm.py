"""grouped_mm: products of uneven sizes that lie side by side in one matrix, in the four forms that PyTorch has.

- grouped_mm: groups of the rows of A, each with a B of its own.
- grouped_mm_n: groups of the columns of B, each with an A of its own.
- grouped_mm_k: groups of K; each has a result of its own, of zeros where the group is empty.
- grouped_bmm: a matrix of A for each of B, without groups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import FLOATS, OUTPUTS, Complaints, Matmul, Op, Problem, Tensor, Tensors

# The place of a group's matrix where it is 3-D, and of its rows or columns where it is 2-D.
_CUTS: Final[Mapping[str, Callable[[Tensor, Tensor, int, slice], tuple[Tensor, Tensor]]]] = {
    "m": lambda a, b, g, at: (a[at], b[g]),
    "n": lambda a, b, g, at: (a[g], b[:, at]),
    "k": lambda a, b, _, at: (a[:, at], b[at]),
}


def pair(ragged: str, a: Tensor, b: Tensor, group: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The factors of a group: of the dimension ``ragged`` it has ``first`` to ``last``."""
    return _CUTS[ragged](a, b, group, slice(first, last))


def joined(torch: Any, ragged: str, pieces: list[Tensor]) -> Tensor:
    """The result that the products of all groups make."""
    return torch.stack(pieces) if ragged == "k" else torch.cat(pieces, -2 if ragged == "m" else -1)


def _by_group(torch: Any, p: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The product of each group; ``matmul`` is not called for an empty one."""
    a, b, pieces = t["a"], t["b"], []
    for group, (first, last) in enumerate(itertools.pairwise([0, *t["offs"].tolist()])):
        x, y = pair(p.op.ragged, a, b, group, first, last)
        pieces.append(matmul(x, y) if last > first else x.new_zeros(x.shape[0], y.shape[1]))
    return joined(torch, p.op.ragged, pieces) if pieces else a.new_zeros(p.result_shape)


def _native(torch: Any, _: Problem, t: Tensors) -> Tensor:
    return torch.nn.functional.grouped_mm(t["a"], t["b"], offs=t.get("offs"))


def _check_fixed(p: Problem) -> Complaints:
    if p.has("m.dynamic"):
        yield "flags", p.flags.index("m.dynamic"), f"{p.op.name} has one size", "drop m.dynamic"


_op: Final = functools.partial(Op, batch="always", native=_native, constant_b=False)
_FLAGS: Final = ("b.argument", *OUTPUTS)
# Where the result has another shape than A, whatever the sizes.
_UNLIKE_A: Final = tuple(flag for flag in _FLAGS if flag != "r0.alias")

OPS: Final = (
    _op(
        "grouped_mm",
        dtypes=FLOATS,
        around=_by_group,
        ragged="m",
        layouts=(Layout.NN, Layout.NT),
        flags=("b.broadcast", *_FLAGS),
    ),
    _op(
        "grouped_mm_n",
        dtypes=FLOATS[1:],
        around=_by_group,
        ragged="n",
        layouts=(Layout.NN, Layout.NT),
        check=_check_fixed,
        flags=("a.broadcast", *_UNLIKE_A),
    ),
    _op("grouped_mm_k", dtypes=FLOATS[1:], around=_by_group, ragged="k", check=_check_fixed, flags=_UNLIKE_A),
    _op("grouped_bmm", dtypes=FLOATS[1:], layouts=(Layout.NN, Layout.NT), flags=("b.broadcast", *_FLAGS)),
)
