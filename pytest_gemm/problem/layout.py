"""Layouts and extents of the two operands."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from pytest_gemm.problem.errors import ProblemError


class Layout(enum.Enum):
    """Whether A and B are row-major (``n``) or transposed views of row-major storage (``t``).

    The first letter is for A (``n``: M x K row-major), the second of B (``n``: K x N row-major;
    ``t``: an N x K row-major weight seen as K x N, which is what ``torch.nn.Linear`` stores).
    """

    NN = "nn"
    NT = "nt"
    TN = "tn"
    TT = "tt"

    @property
    def a_transposed(self) -> bool:
        """A is a view of K x M storage."""
        return self.value[0] == "t"

    @property
    def b_transposed(self) -> bool:
        """B is a view of N x K storage."""
        return self.value[1] == "t"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Shape:
    """``MxNxK``, batch first: C[M, N] = A[M, K] @ B[K, N], ``batch`` times.

    ``batch`` is ``None`` for a plain product.  For ``linear`` it is the leading dimension of a 3-D
    input, for ``linears`` the number of weights that one A of M rows meets.  For ``grouped_mm`` it is the number of
    groups, and M their mean size: A has ``batch * M`` rows, each group of them a B of its own, and the groups are as
    uneven as the operands make them.
    """

    m: int
    n: int
    k: int
    batch: int | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Shape:
        """The extents M, N, K, or batch, M, N, K.

        Raises:
            ProblemError: for a text that is no size, and for another number of them.
        """
        for index, text in enumerate(texts):
            if not (text.isascii() and text.isdigit()):
                raise ProblemError("shape", f"{text!r} is not a size", "write MxNxK or BxMxNxK, each 0 or more", index)
        if len(texts) not in (3, 4):
            raise ProblemError("shape", f"{len(texts)} sizes", "write MxNxK, or BxMxNxK with a batch")
        *batch, m, n, k = map(int, texts)
        return cls(m, n, k, *batch)

    def __str__(self) -> str:
        dims = (self.m, self.n, self.k) if self.batch is None else (self.batch, self.m, self.n, self.k)
        return "x".join(map(str, dims))

    @property
    def is_empty(self) -> bool:
        """Whether the output has no element (K = 0 alone leaves an output of zeros)."""
        return 0 in (self.m, self.n) or self.batch == 0

    @property
    def flops(self) -> int:
        """Operations of the product alone: 2 M N K, times the batch."""
        return 2 * self.m * self.n * self.k * (1 if self.batch is None else self.batch)
