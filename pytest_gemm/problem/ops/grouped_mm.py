"""grouped_mm: the rows of A belong to groups, each with a B of its own."""

from __future__ import annotations

from typing import Any, Final

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import FLOATS, OUTPUTS, Matmul, Op, Problem, Tensor, Tensors


def _by_group(torch: Any, _: Problem, t: Tensors, matmul: Matmul) -> Tensor:
    """The rows of each group times that group's B; ``matmul`` is not called for a group without rows."""
    a, b = t["a"], t["b"]
    pieces, first = [a.new_empty((0, b.shape[-1]))], 0
    for group, last in enumerate(t["offs"].tolist()):
        if last > first:
            pieces.append(matmul(a[first:last], b[group]))
        first = last
    return torch.cat(pieces)


OP: Final = Op(
    "grouped_mm",
    "always",
    FLOATS,
    lambda torch, _, t: torch.nn.functional.grouped_mm(t["a"], t["b"], offs=t["offs"]),
    _by_group,
    constant_b=False,
    grouped=True,
    layouts=(Layout.NN, Layout.NT),
    flags=("b.broadcast", "b.argument", *OUTPUTS),
)
