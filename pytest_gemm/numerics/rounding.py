"""Rounding from float64 to an element type, correct to the last bit, and distances in units of it.

``tensor.to(torch.float16)`` of a float64 tensor goes through float32 and rounds twice: ``1 + 2**-11 +
2**-40`` becomes 1.0 although 1.0009765625 is nearer.  An oracle that did the same would call a correct
kernel wrong, so the rounding stands here, on the bits of the float64.
"""

from __future__ import annotations

import torch

from pytest_gemm.problem.dtypes import DType

# Of a float64: bits of the stored significand.
_FRACTION_BITS = 52

# Elements that are worked on at once: the intermediates stay in a core's cache.
_CHUNK = 1 << 15


def round_to(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Round to nearest, ties to even, from float64 to ``dtype``; the result stays in float64.

    Subnormals are kept, the sign of a zero too.  Overflow is part of rounding (IEEE 754-2019, 4.3.1): what
    would need a larger exponent becomes an infinity, or NaN in ``f8e4m3fn`` which has none.  Integer types
    and ``f64`` hold what the oracle gives them, so they return ``x`` itself.

    Args:
        x: a float64 tensor of any shape; it is not written to.
        dtype: the target type.

    Returns:
        A tensor of x's shape, every element representable in ``dtype``.
    """
    assert x.dtype == torch.float64, x.dtype
    if not dtype.is_float or dtype.precision == _FRACTION_BITS + 1:
        return x
    if dtype.name == "f32":
        # One conversion instruction, one rounding; the rest of this function agrees bit for bit (tests).
        return x.to(torch.float32).to(torch.float64)
    result = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    source, target = x.reshape(-1), result.view(-1)
    for first in range(0, source.numel(), _CHUNK):
        target[first : first + _CHUNK] = _round_chunk(source[first : first + _CHUNK], dtype)
    return result


def _round_chunk(source: torch.Tensor, dtype: DType) -> torch.Tensor:
    """The rounding of a contiguous, non-empty vector to a type narrower than f64."""
    # Nearest-even on the bit pattern: add just under half of the last kept bit, plus one if that bit is odd,
    # and cut.  A carry runs into the exponent, which is what rounding up to the next binade means.
    drop = _FRACTION_BITS + 1 - dtype.precision
    bits = source.view(torch.int64)
    rounded_bits = bits >> drop
    rounded_bits &= 1
    rounded_bits += bits
    rounded_bits += (1 << (drop - 1)) - 1
    rounded_bits &= -(1 << drop)
    rounded = rounded_bits.view(torch.float64)

    # The common case needs nothing more; two reductions are cheaper than the corrections.
    size = source.abs()
    smallest, largest = (float(v) for v in torch.aminmax(size))
    if not smallest >= 2.0**dtype.emin:  # also true for NaN, which aminmax passes on
        # Below the smallest normal number the quantum is fixed.  Adding a number whose own quantum is that one
        # makes the float64 addition round for us; the subtraction is exact.
        quantum = 2.0 ** (dtype.emin - dtype.precision + 1)
        shift = 1.5 * 2.0**_FRACTION_BITS * quantum
        tiny = ((source + shift) - shift).copysign_(source)
        rounded = torch.where(size < 2.0**dtype.emin, tiny, rounded)
    if not largest <= dtype.max_finite:  # as above
        limit = torch.full_like(rounded, float("inf") if dtype.has_inf else float("nan")).copysign_(source)
        rounded = torch.where(rounded.abs() > dtype.max_finite, limit, rounded)
        rounded = torch.where(source.isnan(), source, rounded)
    return rounded


def ulp_of(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Distance between neighbours of ``dtype`` in the binade of each element, in float64.

    1 for integer types.  At a power of two the larger of the two distances; subnormals have the quantum of
    the smallest normal number.
    """
    if not dtype.is_float:
        return torch.ones_like(x)
    # frexp gives x = m * 2**e with 0.5 <= m < 1, so the binade's exponent is e - 1.
    exponent = torch.frexp(x)[1].to(torch.float64) - 1.0
    return torch.exp2(exponent.clamp_(dtype.emin, dtype.emax) - (dtype.precision - 1))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ordinals(x: torch.Tensor) -> torch.Tensor:
    """Map floats to int64 so that neighbours differ by one and both zeros are 0."""
    bits = x.contiguous().view(_INTEGERS[x.element_size()])
    low = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    # A negative float is sign and magnitude: its magnitude is bits - low.
    return torch.where(wide < 0, low - wide, wide)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between a and b, counting b: 0 when equal, 1 for neighbours.

    Both zeros are the same number; infinity is the neighbour of the largest finite number; two NaN are 0
    apart, a NaN and a number as far as an int64 goes.  Integers: the absolute difference.

    Args:
        a: a tensor of any floating-point or integer dtype.
        b: a tensor of a's dtype and shape.

    Returns:
        An int64 tensor of the same shape; distances beyond its range saturate.
    """
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    most = torch.iinfo(torch.int64).max
    if not a.dtype.is_floating_point:
        return (a.to(torch.int64) - b.to(torch.int64)).abs()
    first, second = _ordinals(a), _ordinals(b)
    distance = (first - second).abs()
    if a.element_size() == 8:
        # Only the full width of float64 can leave the range.
        apart = (first.to(torch.float64) - second.to(torch.float64)).abs()
        distance = torch.where(apart >= 2.0**62, most, distance)
    a_nan, b_nan = a.isnan(), b.isnan()
    distance = torch.where(a_nan ^ b_nan, most, distance)
    return torch.where(a_nan & b_nan, 0, distance)
