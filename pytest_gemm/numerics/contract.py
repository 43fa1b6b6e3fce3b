"""The contract: the arithmetic that a backend declares for a problem."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal, NamedTuple

from pytest_gemm.problem.dtypes import DTYPES, DType

# Significand bits of the reference: no operand needs more.
_BITS: Final = 53


class Sums(NamedTuple):
    """The type of partial sums.

    Attributes:
        u: unit roundoff.
        precision: significand bits; of integers those of the float64 that computes their reference.
        smallest: the smallest number above 0; 0 where nothing underflows.
        largest: the largest finite number.
    """

    u: float
    precision: int
    smallest: float
    largest: float


def smallest_of(dtype: DType) -> float:
    """The smallest subnormal of a float type."""
    return 2.0 ** (dtype.emin - dtype.precision + 1)


@dataclasses.dataclass(frozen=True)
class Contract:
    """The arithmetic that a backend declares for a problem; results are judged by exactly this.

    Attributes:
        accumulate: type of the partial sums: ``f64``, ``f32``, ``f16``, ``bf16`` or ``i32``.
        epilogue: ``fused``: every step in the accumulator's type, one rounding at the end;
            ``eager``: rounded to the tensor's dtype after every operation; ``either``: the backend
            cannot tell in advance, a result within either is right.
        rounds_at: index of the pass before which a ``fused`` kernel rounds its value to the product's dtype once
            more, as templates of Triton do from torch 2.13 on; 0 is the first pass.  ``None`` for no such rounding.
        slices: number of split-K slices S, 1 for none.
        partials: dtype in which split-K partials are stored: ``f32`` or the output's.
        input_error: relative error of each input product that reduced-precision inputs cause
            (2^-10 for TF32 rounded to nearest, 2^-9 truncated, 3 * 2^-16 for bf16x3).
        input_bits: with an input error, the significand bits that an input keeps (11 for TF32): operands that need no
            more are multiplied exactly.  0 where none is known to be.
        input_smallest: with an input error, the smallest number that is kept of an input, 2^-136 for TF32: what is
            below it is lost, which a huge number on the other side multiplies.  0.0 where nothing is.
        alignment_bits, chunk: for tensor cores that truncate: f and L of Fasi et al. (2021); terms of one
            chunk of L are aligned to f fractional bits.  0 for ordinary IEEE additions.
        promote_every: with tensor cores: the number of products P after which their sum is added to one in f32 and
            begins anew, as CUTLASS and Triton do with fp8, whose f is small.  0: they hold the whole sum.
        flushes: subnormal numbers of f32 count as zeros, in operands and results (FTZ and DAZ of a CPU).
        or_scalar: with tensor cores: a library chooses the kernel and may take one of ordinary additions instead.
        deterministic: the same call again gives the same bits.
    """

    accumulate: Literal["f64", "f32", "f16", "bf16", "i32"] = "f32"
    epilogue: Literal["fused", "eager", "either"] = "fused"
    rounds_at: int | None = None
    slices: int = 1
    partials: Literal["f32", "out"] = "f32"
    input_error: float = 0.0
    input_bits: int = 0
    input_smallest: float = 0.0
    alignment_bits: int = 0
    chunk: int = 0
    promote_every: int = 0
    deterministic: bool = True
    or_scalar: bool = False
    flushes: bool = False

    @property
    def sums(self) -> Sums:
        """The accumulator's type."""
        dtype = DTYPES[self.accumulate]
        if not dtype.is_float:
            return Sums(0.0, 53, 0.0, math.inf)
        return Sums(dtype.unit_roundoff, dtype.precision, smallest_of(dtype), dtype.max_finite)

    @property
    def lost(self) -> float:
        """What an operation may lose to underflow, at most: the smallest number, or the smallest that is kept."""
        return max(self.sums.smallest, 2.0 ** DTYPES["f32"].emin) if self.flushes else self.sums.smallest

    def run(self, k: int) -> int:
        """How many of ``k`` products a tensor core adds before its sum is promoted: all, or P."""
        return min(k, self.promote_every) if self.promote_every else k

    def promotions(self, k: int) -> int:
        """How many sums of a tensor core are added up in f32: ceil(K / P), 0 where it holds the whole sum."""
        return math.ceil(k / self.promote_every) if self.promote_every else 0

    @property
    def narrow_partials(self) -> bool:
        """Whether there are partial sums that may be stored in the output's dtype; a single one is the result."""
        return self.partials == "out" and self.slices > 1

    def theta(self, k: int, extra_terms: int = 0, *, out: DType | None = None) -> float:
        """Factor of the gauge ``|A| @ |B|`` that bounds the error of the sum, in any order.

        IEEE additions: (K + S - 1 + extra) u (Higham, 2002, section 3.1; Jeannerod and Rump, 2013,
        for the form without O(u^2)).  Truncating tensor cores: each chunk cuts L terms at 2^-f of the largest one and
        the result to the bits that are kept, of which fp8 has f: ceil(K / L) (L 2^-f + max(2^-f, 2^-23)).  Promoted
        every P products: the same for P of them, as the parts' own gauges add up to G, and ceil(K / P) 2^-24 for adding
        them.  The slices of K are added in IEEE arithmetic.  The larger of both where a library may take either.

        Partial sums p_1 .. p_S stored in the output's type, whose roundoff is v, add S v: storing them costs v |p_s|
        each, v G together, and each of the S - 1 additions stores a sum, which costs v G at most.

        Args:
            k: number of products in a sum.
            extra_terms: further terms that enter the same accumulator (a bias).
            out: the output's dtype, where the contract has ``narrow_partials``.
        """
        if self.accumulate == "i32":
            return 0.0
        rest = self.input_error
        if self.narrow_partials:
            assert out is not None
            rest += self.slices * out.unit_roundoff
        scalar = (k + self.slices - 1 + extra_terms) * self.sums.u
        if not self.alignment_bits:
            return scalar + rest
        theta = self.truncated(k) + (self.slices - 1 + extra_terms) * 2.0**-24
        return (max(theta, scalar) if self.or_scalar else theta) + rest

    def unconverted(self, half: DType) -> Contract:
        """The contract where A and B need not be converted to a half type: off by u each, together by 2u + u^2."""
        u = half.unit_roundoff
        return dataclasses.replace(self, input_error=u * (2.0 + u), input_bits=half.precision)

    def truncated(self, k: int) -> float:
        """What a tensor core cuts off a sum of ``k`` products, as a part of :meth:`theta`."""
        cut = 2.0**-self.alignment_bits
        steps = math.ceil(self.run(k) / self.chunk) * (self.chunk * cut + max(cut, 2.0**-23))
        return steps + self.promotions(k) * 2.0**-24

    def wider(self, other: Contract, k: int) -> str:
        """Look for what another contract allows and this one does not, in a sum of ``k`` products.

        Returns:
            the first field of ``other`` that is wider or that no arithmetic has (0 slices, NaN); "" for none.
        """
        own, sums, cuts = self.sums, other.sums, other.alignment_bits >= self.alignment_bits > 0
        is_either, steps = self.epilogue == "either", other.promote_every
        fits = {
            "accumulate": sums.u <= own.u and sums.smallest <= own.smallest and sums.largest >= own.largest,
            "epilogue": is_either or other.epilogue == self.epilogue,
            "rounds_at": is_either or other.rounds_at == self.rounds_at,
            "slices": 1 <= other.slices <= self.slices,
            "partials": other.partials in {"f32", self.partials},
            "input_error": 0.0 <= other.input_error <= self.input_error,
            "input_bits": not other.input_error or self.input_bits <= other.input_bits <= _BITS,
            "input_smallest": 0.0 <= other.input_smallest <= self.input_smallest,
            # Ordinary additions may lose more than a tensor core does.
            "alignment_bits": cuts or (other.alignment_bits == 0 and (self.or_scalar or not self.alignment_bits)),
            "promote_every": steps >= 0 and not (cuts and self.promote_every and not 0 < steps <= self.promote_every),
            "chunk": other.chunk >= cuts and not (cuts and other.truncated(k) > self.truncated(k)),
            "or_scalar": self.or_scalar or not (cuts and other.or_scalar),
            "deterministic": other.deterministic or not self.deterministic,
            "flushes": self.flushes or not other.flushes,
        }
        return next((name for name, is_so in fits.items() if not is_so), "")
