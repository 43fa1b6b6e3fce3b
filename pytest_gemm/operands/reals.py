"""Input distributions of real values: uniform, positive, small, large, of wide range, and with special values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from pytest_gemm.operands.integers import least
from pytest_gemm.operands.magnitudes import Drawn, Headroom, Side, narrowest, powers_of_two, scale_pair, scaled_lines
from pytest_gemm.operands.random_streams import Array, Stream
from pytest_gemm.problem.steps import StepKind

# The powers of two of A and B by the typical magnitude of a product and what it cannot exceed.
Exponents = Callable[[float, float], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Values:
    """How a random distribution draws a floating side: values in [-1, 1], their mean square and their mean."""

    draw: Callable[[Stream, tuple[int, ...], bool], Array]
    square: float
    mean: float = 0.0


UNIFORM: Final = _Values(lambda s, shape, wide: s.uniform(shape, wide), 1 / 3)
POSITIVE: Final = _Values(lambda s, shape, wide: np.abs(s.uniform(shape, wide)), 1 / 3, 0.5)
_BINADE: Final = _Values(lambda s, shape, wide: s.binade(shape, wide), 7 / 12)


def _scales(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales of full significands in [0.5, 1)."""
    return np.abs(stream.binade(shape, False))


def _narrow_scales(stream: Stream, shape: tuple[int, ...]) -> Array:
    """The same in the four significand bits of an fp8 scale."""
    return np.maximum(np.round(_scales(stream, shape) * 16.0), 8.0).astype(np.float32) / np.float32(16.0)


# Powers of two of both scales of a product in fp8, whose numbers of four bits lie between 2^-6 and 448.
_NV_RANGE: Final = 8


def _random_quantised(
    headroom: Headroom,
    values: _Values,
    lifts: tuple[int, int] = (0, 0),
    exponent: Callable[[float, float], int] | None = None,
) -> Drawn:
    """Random fp8 with random scales of full significands.

    Args:
        headroom: of a quantised problem.
        values: how elements are drawn.
        lifts: the powers of two of the elements of A and of B.
        exponent: ``exponent(rms, bound)`` is the exponent that the scales add to the product; by default the one
            that fits.
    """
    if lifts == (0, 0):  # four bits have few values below 1
        lifts = (headroom.a.dtype.emax,) * 2 if headroom.a.dtype.is_packed else lifts
    k, lift = max(headroom.problem.terms, 1), sum(lifts)
    rms = 0.76**2 * max(math.sqrt(k) * values.square, k * values.mean**2) * 2.0**lift
    e = (exponent or headroom.exponent)(rms, k * 2.0**lift)

    def lines(side: Side) -> Array:
        drawn = values.draw(headroom.draw(side.name), side.drawn, headroom.wide)
        return scaled_lines(drawn, lifts[side.name == "b"])

    problem = headroom.problem
    wholes = headroom.whole_scales(e, exact=False)
    if problem.step("nv"):
        e = max(-_NV_RANGE, min(e, _NV_RANGE))
    draw = {"mx": powers_of_two, "nv": _narrow_scales}.get(headroom.quantised, _scales)
    scales = scale_pair(headroom, draw, 0 if wholes else e)
    return Drawn(*headroom.both(lines), rms * 2.0**e, 0.0, *scales, wholes=wholes, positive=values.mean > 0)


def random(headroom: Headroom, values: _Values, exponents: Exponents | None = None) -> Drawn:
    """Random lines; ``exponents(rms, bound)`` gives the powers of two of A and B, by default what fits."""
    if headroom.quantised:
        return _random_quantised(headroom, values)
    k, positive = max(headroom.problem.terms, 1), values.mean > 0
    most = 255 if headroom.problem.op.int8 else 128
    if headroom.all_integer and not headroom.problem.op.int8:
        # An int32 product that is cast to a narrow float: eight standard deviations must fit.
        most = max(1, min(128, int(math.sqrt(3 * headroom.room / (8 * math.sqrt(k))) / (2 if headroom.adds else 1))))
    squares, tops, means = [], [], []
    for dtype in (headroom.a.dtype, headroom.b.dtype):
        top = 1.0 if dtype.is_float else 255.0 if dtype.name == "u8" else float(min(most, -least(dtype)))
        squares.append(values.square if dtype.is_float else top**2 / 3)
        means.append(values.mean if dtype.is_float else top / 2 if dtype.name == "u8" or positive else 0.0)
        tops.append(top)
    factor = (0.76 if headroom.b.dtype.name == "i4" else 0.76 * 2.0**-7) if headroom.problem.op.weight_scales else 1.0
    rms = factor * max(math.sqrt(k * squares[0] * squares[1]), k * means[0] * means[1])
    bound = factor * k * tops[0] * tops[1]
    powers = exponents(rms, bound) if exponents else headroom.split(headroom.exponent(rms, bound))

    def lines(side: Side) -> Array:
        stream, dtype = headroom.draw(side.name), side.dtype
        if dtype.is_float:
            return scaled_lines(values.draw(stream, side.drawn, headroom.wide), powers[side.name == "b"])
        # Integers of the full range, or of magnitude up to ``most``.
        low = 0 if positive else -min(most, -least(dtype))
        return stream.look_up(side.drawn, np.arange(low, min(most, int(dtype.max_finite)) + 1, dtype=headroom.real))

    drawn = Drawn(*headroom.both(lines), rms * 2.0 ** sum(powers), positive=positive)
    if headroom.problem.op.weight_scales:
        # Weights of 8 bits have scales of about 2^-7 of the weight's range.
        drawn.scale_b = _scales(headroom.draw("scale"), (headroom.b.shape[1],)) * np.float32(2.0**-7)
    if headroom.all_integer:
        drawn.quantum, drawn.spare = 1.0, headroom.limit - bound
        drawn.units, drawn.magnitude_bound = (1.0, 1.0), bound
    return drawn


def rand_small(headroom: Headroom) -> Drawn:
    """Products as small as they may be while every product and partial sum stays a multiple of 2^-126.

    With p significand bits in [0.5, 1) * 2^s, a product is a multiple of 2^(2s - 2p): s = -38 for f32 and -54 for
    bf16 leave nothing that hardware which flushes subnormals could flush.  An f16 result is about 2^-9; those
    of its elements that cancel are subnormal.  So is A in f16, at 2^-20: every product of f16 is a normal float32, so
    nothing excuses a kernel that flushes its inputs.
    """
    a, b = headroom.a.dtype, headroom.b.dtype
    if headroom.quantised:
        # Subnormals of fp8, which no kernel may flush; the scales bring the product back to about 1.
        return _random_quantised(headroom, _BINADE, (a.emin, b.emin), lambda rms, _bound: -round(math.log2(rms)))
    names = {d.name for d in (*narrowest(headroom.problem), a, b)}

    def exponents(rms: float, _bound: float) -> tuple[int, int]:
        if "f16" in names:
            e = -9 - round(math.log2(rms))
            if a.name == b.name == "f16" and not headroom.problem.b_is_a:
                return -20, min(e + 20, 15)
            ea, eb = headroom.split(e)
            return max(ea, -13), max(eb, -13)
        each = -54 if names <= {"bf16", "i8", "u8"} else -38 if "f64" not in names or len(names) > 1 else -200
        return (each if a.is_float else 0), (each if b.is_float else 0)

    return random(headroom, _BINADE, exponents)


def rand_large(headroom: Headroom) -> Drawn:
    """Sums of magnitudes up to 2^124 (2^400 for f64, whose reference squares them); f16: a result near 65504."""
    a, b = headroom.a.dtype, headroom.b.dtype
    most = 2.0**400 if headroom.wide else 2.0**124

    def exponent_of(rms: float, bound: float) -> int:
        peak = bound
        if headroom.room < most / 2.0**20 and not headroom.problem.b_is_a:
            peak = min(bound, 8.0 * rms)
        return math.floor(math.log2(min(headroom.room, most)) - math.log2(peak + 2.0 * headroom.adds * rms))

    if headroom.quantised:
        # The largest binade but one of fp8, whose products leave the range of f16; the scales say how large the
        # result is.
        return _random_quantised(headroom, _BINADE, (a.emax, b.emax), exponent_of)

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        # Scales of about 2^-7 come after the sum, which must not overflow before them.
        e = exponent_of(rms, bound) - (8 if headroom.problem.op.weight_scales else 0)
        if headroom.problem.b_is_a:
            return e // 2, e // 2
        ea, eb = headroom.split(e)
        if "f16" in (a.name, b.name):
            # One operand at the top of f16's range, the other where the result needs it.
            if a.is_float and b.is_float:
                return 15, min(max(e - 15, -13), 15)
            return (min(ea, 15), 0) if a.is_float else (0, min(eb, 15))
        return ea, eb

    return random(headroom, _BINADE, exponents)


def rand_wide(headroom: Headroom) -> Drawn:
    """Magnitudes uniform in their exponent over 32 binades (8 for fp8, 10 for f16, 64 for f64)."""
    has_half = "f16" in (headroom.a.dtype.name, headroom.b.dtype.name)
    binades = 64 if headroom.wide else 8 if headroom.quantised else 10 if has_half else 32

    def draw(stream: Stream, shape: tuple[int, ...], wide: bool) -> Array:
        values = stream.binade(shape, wide)
        powers = 2.0 ** -np.arange(binades, dtype=np.float64)
        return values * stream.look_up(shape, powers.astype(values.dtype))

    return random(headroom, _Values(draw, 7 / 12 * (4 / 3) / binades))


# What a quantiser divides a row of zeros by, as it has no largest number.
_LEAST_SCALE: Final = np.float32(2.0**-126)
# Of an element type: a number of A, and two of B.  The first product rounds down to the largest finite number of the
# type (f32: is below it), the second one is infinite.
_BF16_EDGES: Final = (139 * 2.0**-6, 235 * 2.0**119, 236 * 2.0**119)
_EDGES: Final = {"f16": (2.375, 27584.0, 27600.0), "bf16": _BF16_EDGES, "f32": _BF16_EDGES}


def _edges(headroom: Headroom) -> tuple[float, ...]:
    """The numbers of :data:`_EDGES` where the product is the result, or with a bias and a relu; else none."""
    problem, name = headroom.problem, headroom.a.dtype.name
    is_result = all(step.kind is StepKind.BIAS or step.name == "relu" for step in problem.passes)
    is_result = is_result and problem.alpha == 1.0 and not problem.prologues("ab") and problem.terms > 2
    return _EDGES.get(name, ()) if is_result and name == headroom.b.dtype.name else ()


def _inner_k(stream: Stream, k: int) -> int:
    """A place along K at random, but not the first, the middle or the last; the first where there is no other."""
    at = 1 + stream.below(k - 3) if k > 3 else 0
    return at + (at >= k // 2 > 0)


def _plain_ks(lines: Array, stream: Stream, tiny: float, count: int) -> list[int]:
    """Up to ``count`` places along K, at random, at which no line has a special value or one up to ``tiny``."""
    special = ~np.isfinite(lines) | ((lines != 0) & (np.abs(lines) <= tiny))
    drawn = dict.fromkeys(_inner_k(stream, lines.shape[-1]) for _ in range(2 * count + 2))
    return [k for k in drawn if not special[..., k].any()][:count]


def _range_shifts(headroom: Headroom, ea: int, eb: int) -> list[int]:
    """Exponents of the powers of two that A is multiplied by and B divided by, of magnitudes 2^ea and 2^eb.

    40 either way where the type has the range.  Where subnormal inputs are kept (f32 and f16,
    docs/explanation/oracle.md), as many as make one side subnormal and leave the other a factor of two below the
    type's largest number.
    """
    a, b = headroom.a.dtype, headroom.b.dtype
    if b.is_float and a.name != b.name:
        return []  # one of them has not the range of the other
    if headroom.problem.autocast and a.name == "f16":
        return []  # compiled code may leave the conversion out, and a subnormal loses more bits by it than u allows
    subnormal = [min(eb - b.emin, a.emax - 1 - ea), -min(ea - a.emin, b.emax - 1 - eb)]
    return {"f16": subnormal, "f32": [40, -40, *subnormal], "bf16": [40, -40], "tf32": [40, -40]}.get(a.name, [])


def _plant(side: Side, lines: Array, stream: Stream, at: list[int], edges: tuple[float, ...], *, tiny: bool) -> None:
    """Put special values into a few lines: NaN first along K, infinity last, others at the first of ``at``.

    The NaN is not in the first line of a matrix: a read beyond the line before meets it.  Lines of -0.0 but for one of
    ``edges``, or with ``tiny`` for the smallest normal number at the last of ``at``, have results at the ends of the
    type's range.  A line of -0.0 and the smallest subnormal travel along: they must not disturb anything either.
    """
    dtype, (_, each, k) = side.dtype, lines.shape
    flat = lines.reshape(-1, k)
    is_half, least = dtype.name == "f16", 2.0**dtype.emin
    known = [(0, math.nan, False), (-1, math.inf, False), *((k // 2, edge, True) for edge in edges)]
    if dtype.bits == 8:
        known += [(k // 2, dtype.max_finite, False), (k // 2, -dtype.max_finite, False)]
    inner = [(least, True)] if tiny and dtype.name in {"f32", "f16"} else []
    inner += [(-0.0, True), (-math.inf, False), (least * 2.0 ** (1 - dtype.precision), is_half)]
    at = at or [_inner_k(stream, k), _inner_k(stream, k)]
    known += [(at[-1 if value == least else 0], value, is_alone) for value, is_alone in inner]
    known = [one for one in known if dtype.has_inf or not math.isinf(one[1])]
    special = min(len(known), len(flat), max(len(flat) // 4, min(each - 1, 2)))
    if not dtype.is_float or not special:
        return
    first = stream.below(len(flat))
    first += first % each == 0 < each - 1
    for index, (place, value, is_alone) in enumerate(known[:special]):
        # Spread over the lines: neighbours in one vector register would hide a leak between them.
        row = (first + index * max(1, len(flat) // special)) % len(flat)
        if is_alone:
            flat[row] = -0.0
        flat[row, place] = value


def _plant_in_b(headroom: Headroom, a: Array, b: Array, shifts: list[int], edges: tuple[float, ...]) -> list[int]:
    """Special values for B, zeros for A's to meet, and the powers of two of ``shifts``.

    Returns:
        Two further k, or fewer, for A's special values: one at which B has a zero, and one at which it has none.
    """
    _plant(headroom.b, b, headroom.draw("b-specials"), [], edges[1:], tiny=bool(edges))
    stream, k = headroom.draw("b-zeros"), b.shape[-1]
    tiny = 2.0**headroom.b.dtype.emin if headroom.a.dtype.has_inf else 0.0
    plain = _plain_ks(b, stream, tiny, 2 + len(shifts))
    for zero in (0, k - 1, *plain[:1]):
        for matrix in b:
            finite = np.flatnonzero(np.isfinite(matrix[:, zero]))
            if len(finite) > (zero == k - 1):
                matrix[finite[stream.below(len(finite))], zero] = 0.0
    for at, shift in zip(plain[2:], shifts, strict=False):
        a[..., at] *= 2.0**shift
        b[..., at] *= 2.0**-shift
    if edges:  # of either sign, and positive in the first row: a relu leaves it
        a[..., k // 2] = edges[0] * (-1.0) ** np.arange(a.shape[1])
    return plain[:2]


def _face_specials(lines: Array, other: Array, stream: Stream) -> None:
    """Put a zero where a NaN or an infinity of ``lines`` meets a line of ``other``; at the last k only of several."""
    for matrix, _, k in np.argwhere(~np.isfinite(lines)).tolist():
        for facing in other[matrix : matrix + 1] if len(other) == len(lines) else other:
            finite = np.flatnonzero(np.isfinite(facing[:, k]))
            if len(finite) > (k == lines.shape[-1] - 1):
                facing[finite[stream.below(len(finite))], k] = 0.0


def specials(headroom: Headroom) -> Drawn:
    """The ``rand`` distribution with special values, each in one row of A or one column of B.

    A NaN and an infinity meet a zero in some line of the other side: the product is NaN, and a kernel that skips zeros
    loses it.  The infinity that is last along K meets none in an only line, of which it would leave NaN.  A's come to
    where B has zeros, as B must not depend on M.

    An infinity never meets a subnormal in one product: the result would tell whether subnormal inputs count as
    zero (Inf * 0 is NaN), and instructions for bf16 dot products (VDPBF16PS, TDPBF16PS) define that they do.

    A line of -0.0 gives zeros of known sign; its scale is the least, which a quantiser gives a row of zeros.  In f16 a
    line whose only number is the smallest subnormal gives results that underflow when they are stored.  In f32 and f16
    one with the smallest normal number alone gives subnormal results, and in bf16 too two columns of B give results on
    both sides of where they become infinite.  In fp8 two lines have the largest number of either sign.  At a few k a
    huge number meets a tiny one (:func:`_range_shifts`); in f64 at every k, as the bound of its reference grows with
    the range within a line.
    """
    problem = headroom.problem
    movable = not (problem.b_is_a or problem.has("r0.alias") or problem.has("program.chained") or problem.op.coded)
    used = [(0, 0)]  # fp8 has its powers of two in the scales

    def exponents(rms: float, bound: float) -> tuple[int, int]:
        ea, eb = headroom.split(headroom.exponent(rms, bound))
        apart = 200 if movable and headroom.a.dtype.name == headroom.b.dtype.name == "f64" else 0
        used.append((ea + apart, eb - apart))
        return used[-1]

    a, b = (dataclasses.replace(side, whole=True) for side in (headroom.a, headroom.b))
    drawn = random(dataclasses.replace(headroom, a=a, b=b), UNIFORM, exponents)
    drawn.a = np.ascontiguousarray(drawn.a)
    at, edges = list[int](), _edges(headroom) if movable else ()
    if drawn.b is not None:
        drawn.b = np.ascontiguousarray(drawn.b)
        at = _plant_in_b(headroom, drawn.a, drawn.b, _range_shifts(headroom, *used[-1]) if movable else [], edges)
    _plant(headroom.a, drawn.a, headroom.draw("a-specials"), at, (), tiny=bool(edges))
    itself = drawn.a.swapaxes(-1, -2) if problem.has("b.alias") else drawn.a  # A @ A, or A @ A.T
    other = itself if drawn.b is None else drawn.b
    _face_specials(other, drawn.a, headroom.draw("a-zeros"))
    tiny = 2.0 ** min(headroom.a.dtype.emin, headroom.b.dtype.emin)
    for one, met in ((drawn.a, other), (other, drawn.a)):
        infinite = np.isinf(met).any(axis=tuple(range(met.ndim - 1)))  # by k
        one[(one != 0) & (np.abs(one) < tiny) & infinite] = 1.0
    if headroom.quantised == "rowwise" and drawn.scale_a is not None and drawn.a.size:
        scales = drawn.scale_a.reshape(-1, drawn.a.shape[1])
        drawn.scale_a = np.where(drawn.a.any(-1), scales, _LEAST_SCALE).reshape(drawn.scale_a.shape)
    return drawn
