"""What an op makes of an A that it quantises to 8 bits itself: the codes that a correct kernel may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.problem.dtypes import DTYPES, DType

# Relative error of a scale 255 / (high - low) in f32, of its reciprocal, and of an element that it has multiplied: a
# difference, a quotient and a product or a quotient, one rounding each.
SCALING = 4 * 2.0**-24


class Quantised(NamedTuple):
    """A as the op multiplies it.

    Attributes:
        middle: the mean of the lowest and the highest value that an element may have; (M, K), float64.
        spread: half of their distance, 0 for all but those near the middle of two codes.
    """

    middle: torch.Tensor
    spread: torch.Tensor


def quantised(a: torch.Tensor) -> Quantised:
    """The rows of A in 255 steps from ``low = min(row, 0)`` to ``high = max(row, 0)``, with the code of 0 an integer.

    ``code = clamp(round(a s) + z, -128, 127)`` with ``s = 255 / (high - low)`` and ``z = round(-128 - low s)``; the
    kernel multiplies ``(code - z) / s``.  The error of ``s`` in f32 makes an ``a s`` near a half go either way, and z
    likewise, which decides nothing but what is clamped.  A tie goes either way: kernels differ.

    Args:
        a: (M, K), float64, finite.
    """
    low, high = (
        (a.amin(1, keepdim=True).clamp(max=0.0), a.amax(1, keepdim=True).clamp(min=0.0)) if a.shape[1] else (a, a)
    )
    scale = torch.where(high > low, 255.0 / (high - low), 1.0)
    x, zero = a * scale, -128.0 - low * scale

    def ends(value: torch.Tensor, error: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ceil(value - error - 0.5), torch.floor(value + error + 0.5)

    least, most = ends(x, x.abs() * SCALING)
    first, last = ends(zero, 512 * SCALING)
    least = torch.minimum(torch.maximum(least, -128.0 - last), 127.0 - last)
    most = torch.minimum(torch.maximum(most, -128.0 - first), 127.0 - first)
    return Quantised((least + most) / (2.0 * scale), (most - least) / (2.0 * scale))


def _symmetric(a: torch.Tensor, size: int, dtype: DType) -> Quantised:
    """Blocks of ``size`` elements of a row in 127 steps to either side of 0, which are f32 and kept in ``dtype``.

    ``step = max |a| / 127`` in f32 and ``code = round(a / step)``.  A kernel multiplies by ``1 / step`` or by
    ``127 / max |a|``: three roundings at most, so that an ``a / step`` near a half goes either way, as a tie does.
    What is multiplied is the code times the step as it is kept, in f16 another one than the codes are made by.
    Q8_0: the struct ``block_q8_0`` and ``quantize_row_q8_0_ref`` of ggml.
    """
    blocks = a.unflatten(-1, (-1, size))
    step = round_to(blocks.abs().amax(-1, keepdim=True) / 127.0, DTYPES["f32"])
    kept, x = round_to(step, dtype), blocks / torch.where(step > 0.0, step, 1.0)
    error = x.abs() * SCALING + 0.5
    least, most = torch.ceil(x - error).clamp(-127.0, 127.0), torch.floor(x + error).clamp(-127.0, 127.0)
    return Quantised(((least + most) * (kept / 2.0)).flatten(-2), ((most - least) * (kept / 2.0)).flatten(-2))


# The ways in which an op may quantise A, see :attr:`Problem.a_rule`.
RULES: Final[Mapping[str, Callable[[torch.Tensor], Quantised]]] = {
    "steps": quantised,
    "q8_0": lambda a: _symmetric(a, 32, DTYPES["f16"]),
    "row": lambda a: _symmetric(a, a.shape[-1], DTYPES["f32"]),
}
