"""The columns and probes of the fingerprint, and the bench that computes sums of planted products."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_gemm.api.protocols import Backend, CandidateBackend, Prepared
from pytest_gemm.problem.dtypes import TF32
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import document

if TYPE_CHECKING:
    import torch

    from pytest_gemm.operands.tensors import Operands

Array = npt.NDArray[Any]
# Products of a sum: their place or places along K, the values of A, and those of B.
Term = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """One problem with all of its probes, and a column of the table.

    Attributes:
        name: heads the column.
        line: the problem; a compile.
        long: only what takes many products: where K is cut, how partial sums are stored, how the error grows.
        rare: on backends that compile, only from ``--gemm-level=full`` on.
        aux: two further problems, for one row and for an epilogue; compiles, too.
    """

    name: str
    line: str
    long: bool = False
    rare: bool = False
    aux: bool = False

    @property
    def problem(self) -> Problem:
        """The problem of :attr:`line`."""
        return Problem.parse(self.line)

    @property
    def one_row(self) -> Problem:
        """The same product for a single row of A."""
        return self.problem.with_m(1)

    @property
    def clamped(self) -> Problem:
        """The same product through two activations; the result tells which of them swallowed a NaN."""
        return Problem.parse(f"{self.line}:clamp-1_6+relu")


_DATA: Final = document(Path(__file__).with_name("fingerprint.toml"))
COLUMNS: Final = tuple(Column(name, **facts) for name, facts in _DATA["columns"].items())
# The rows of the table, in order, with the sentences about remarkable values.
PROBES: Final[Mapping[str, Any]] = _DATA["probes"]


@dataclasses.dataclass
class Print:
    """What was found of one column.

    Attributes:
        column, problem: which.
        refusal: why the backend does not support it; "" when it does.
        kernels: what computed it.
        traits: probe -> value, in the order of :data:`PROBES`; a probe that does not apply is left out.
        remarks: sentences about what is surprising and allowed.
        findings: sentences about what the backend's contract does not allow.
        products: how many products were computed; ``seconds``: the time with all compiles.
    """

    column: str
    problem: str
    refusal: str = ""
    kernels: tuple[str, ...] = ()
    traits: dict[str, str] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)
    findings: list[str] = dataclasses.field(default_factory=list)
    products: int = 0
    seconds: float = 0.0


def columns_for(backend: Backend, level: str) -> tuple[Column, ...]:
    """The columns of a backend at a level: at ``quick`` one that compiles skips the rare columns."""
    sparing = level == "quick" and isinstance(backend, CandidateBackend)
    return tuple(
        dataclasses.replace(column, aux=column.aux and (not sparing or column.name == "f16"))
        for column in COLUMNS
        if not (sparing and column.rare)
    )


# -- numbers that the operands can hold --------------------------------------------------------------------


class Scale(NamedTuple):
    """Exponents of the products of a probe: of the big ones, and of the smallest that may matter.

    The result's dtype holds ``2^low``.
    """

    top: int
    low: int

    @property
    def span(self) -> int:
        """log2 of the big over the small."""
        return self.top - self.low


def halves(exponent: int) -> tuple[float, float]:
    """Two powers of two whose product is 2^exponent, as alike as can be."""
    return 2.0 ** (exponent - exponent // 2), 2.0 ** (exponent // 2)


def power(place: int | slice, factor: float, exponent: int) -> Term:
    """The product ``factor * 2^exponent``; the factor is A's."""
    left, right = halves(exponent)
    return place, factor * left, right


# -- a problem with planted values ---------------------------------------------------------------------------


class Bench:
    """A prepared problem, and operands of its geometry to plant values in.

    Attributes:
        problem: what is computed; ``m``, ``n``, ``k``: its shape.
        given: the dtype that A and B are stored in; ``read``: the one that is multiplied at the least.
        out: the dtype of the result.
        wide: exponents that leave room for everything; ``narrow``: for sums that are held in float16.
        products: how many were computed.
        uneven: some sum had other bits at another place of the result.
    """

    def __init__(self, prepared: Prepared, template: Operands) -> None:
        self.prepared = prepared
        self.problem = template.problem
        shape, dtypes = self.problem.shape, self.problem.dtypes
        self.m, self.n, self.k = shape.m, shape.n, shape.k
        self.given, self.out = dtypes.a, dtypes.out
        self.read = TF32 if self.problem.has("math.tf32") else self.given
        self.wide, self.narrow = Scale(40, -40), Scale(15, -40)
        if self.given.bits == 8:  # with subnormals, or the span of exponents does not reach
            self.wide, self.narrow = Scale(16, -18), Scale(15, -18)
        elif self.given.name == "f16":
            self.wide, self.narrow = Scale(30, -14), Scale(15, -24)  # a result of subnormals is exact as well
        self.products = 0
        self.uneven = False
        self._template = template

    def product(self, a: Array, b: Array) -> Array:
        """A (M, K) times B (K, N) as the backend computes it, in float64; scales are 1.

        Values must be representable in the operands' dtypes.  Every call gets operands in new memory: an artifact may
        hold on to a constant that it knows by its address.
        """
        import torch

        given = self._template
        scales = {name: getattr(given, name) for name in ("scale_a", "scale_b")}
        changes: dict[str, Any] = {n: torch.ones_like(scale) for n, scale in scales.items() if scale is not None}
        self.products += 1
        planted = dataclasses.replace(given, a=_planted(given.a, a), b=_planted(given.b, b), buffers=(), **changes)
        found = self.prepared.run(planted)
        assert isinstance(found, torch.Tensor)
        result: Array = found.detach().cpu().to(torch.float64).numpy()
        return result

    def sums(self, cases: Sequence[Sequence[Term]]) -> Array:
        """One sum of products over K for each case; what no term of it names is zero, and a later term counts."""
        a, b = np.zeros((2, len(cases), self.k))
        for row, terms in enumerate(cases):
            for places, left, right in terms:
                a[row, places], b[row, places] = left, right
        return self.dots(a, b)

    def dots(self, a: Array, b: Array) -> Array:
        """The sums of a[r] * b[r] over K, for rows r of two (R, K) arrays; each stands on the result's diagonal.

        The rows are repeated until the matrices are full, so that one sum is seen at several places.
        """
        side = max(1, min(self.m, self.n) // 2)  # the others may lie in the tail of a tile, with another order
        found = []
        for first in range(0, len(a), side):
            left, right = a[first : first + side], b[first : first + side]
            full = np.resize(left, (self.m, self.k)), np.resize(right, (self.n, self.k)).T
            diagonal = self.product(*full).diagonal()
            again = np.resize(diagonal[: len(left)], len(diagonal))
            self.uneven |= not all_alike(diagonal, again)
            found.append(diagonal[: len(left)])
        return np.concatenate(found)


def all_alike(x: Array, y: Array) -> bool:
    """Equal bits, where any NaN is any other."""
    return bool(np.all((x == y) & (np.signbit(x) == np.signbit(y)) | np.isnan(x) & np.isnan(y)))


def _planted(like: torch.Tensor, values: Array) -> torch.Tensor:
    """A tensor of the geometry of ``like`` in new memory, poison around it, with these values."""
    import torch

    storage = like.untyped_storage().clone()
    found = torch.empty(0, dtype=like.dtype, device=like.device)
    found.set_(storage, like.storage_offset(), like.size(), like.stride())
    source = torch.from_numpy(np.ascontiguousarray(values))
    # The values are exact in every type on the way; fp8 is converted from f32 only.
    if like.element_size() == 1:
        source = source.to(torch.float32)
    found.copy_(source.to(like.dtype))
    return found
