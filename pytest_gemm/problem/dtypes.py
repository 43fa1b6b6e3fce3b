"""Data types of operands and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.problem.errors import ProblemError


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type under PyTorch's own abbreviation.

    Attributes:
        name: the abbreviation, ``bf16``.
        torch_name: attribute of the ``torch`` module, ``bfloat16``.
        bits: storage width of an element in bits.
        precision: significand bits with the hidden one (0 for integers).
        emin: exponent of the smallest normal number, ``2**emin`` (0 for integers).
        emax: exponent of the largest binade (0 for integers).
        max_finite: largest finite magnitude; for integers the largest value.
        has_inf: whether overflow becomes infinity (``False``: NaN or saturation).
    """

    name: str
    torch_name: str
    bits: int
    precision: int
    emin: int
    emax: int
    max_finite: float
    has_inf: bool = True

    @property
    def is_float(self) -> bool:
        """Whether values have a significand and an exponent."""
        return self.precision > 0

    @property
    def is_packed(self) -> bool:
        """Whether torch's own type holds two values in a byte."""
        return self.is_float and self.bits == 4

    @property
    def unit_roundoff(self) -> float:
        """Relative rounding error bound u = 2^-p of round-to-nearest (Higham, 2002, section 2.1)."""
        return 2.0**-self.precision if self.is_float else 0.0


DTYPES: Final[Mapping[str, DType]] = {
    d.name: d
    for d in (
        DType("f64", "float64", 64, 53, -1022, 1023, 1.7976931348623157e308),
        DType("f32", "float32", 32, 24, -126, 127, 3.4028234663852886e38),
        DType("f16", "float16", 16, 11, -14, 15, 65504.0),
        DType("bf16", "bfloat16", 16, 8, -126, 127, 3.3895313892515355e38),
        DType("f8e4m3fn", "float8_e4m3fn", 8, 4, -6, 8, 448.0, has_inf=False),
        DType("f8e5m2", "float8_e5m2", 8, 3, -14, 15, 57344.0),
        # Two in a byte, the first one in its low half; no infinity and no NaN.
        DType("f4e2m1fn", "float4_e2m1fn_x2", 4, 2, 0, 2, 6.0, has_inf=False),
        DType("i8", "int8", 8, 0, 0, 0, 127.0, has_inf=False),
        DType("u8", "uint8", 8, 0, 0, 0, 255.0, has_inf=False),
        DType("i32", "int32", 32, 0, 0, 0, 2147483647.0, has_inf=False),
        # Two 4-bit values packed in a byte; the package operands owns the nibble order.
        DType("i4", "uint8", 4, 0, 0, 0, 7.0, has_inf=False),
    )
}


# The f32 that tensor cores keep of an input: no dtype of a tensor, so not in the table.
TF32: Final = DType("tf32", "float32", 32, 11, -126, 127, 3.4011621342146535e38)
# Powers of two, which are scales only.
E8M0: Final = DType("e8m0fnu", "float8_e8m0fnu", 8, 1, -127, 127, 2.0**127, has_inf=False)


@dataclasses.dataclass(frozen=True)
class DTypes:
    """The element types of A, B and the product, before any ``cast`` in the epilogue."""

    a: DType
    b: DType
    out: DType

    @classmethod
    def parse(cls, names: Sequence[str]) -> DTypes:
        """The data types of A, B and the product by their names, or of one name for all three.

        Raises:
            ProblemError: for a name that is none, and for another number of them.
        """
        for index, name in enumerate(names):
            if name not in DTYPES:
                problem = f"unknown dtype {name!r}{did_you_mean(name, DTYPES)}"
                raise ProblemError("dtypes", problem, f"known: {' '.join(DTYPES)}", index)
        if len(names) not in (1, 3):
            raise ProblemError("dtypes", f"{len(names)} names", "give one for all, or a-b-out")
        return cls(DTYPES[names[0]], DTYPES[names[len(names) // 2]], DTYPES[names[-1]])

    def __str__(self) -> str:
        if self.a == self.b == self.out:
            return self.a.name
        return f"{self.a.name}-{self.b.name}-{self.out.name}"
