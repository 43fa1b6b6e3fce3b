"""What a problem leaves room for: how large values may be, and the grids on which sums are exact.

An exact distribution puts every product on a grid on which a sum in the accumulator's precision is exact in any order,
so that a correct kernel has one possible sum.  A random one keeps magnitudes where neither the accumulator nor the
output overflows.  Where an activation saturates, values are scaled by a power of two to where it does not.

Source of the exactness of sums of integers in a float accumulator: Higham (2002), section 2.1 (integers up to 2^p are
exact).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.operands.random_streams import Array, Stream, drawn_shape
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

# The largest factor of a step with a residual, in a power of two.
_GROWTH: Final = {"mul": 4.0, "div": 2.0}
# Zero point of a dynamically quantised A: far from 0, as asymmetric data have it; "half": in 7 bits.
_DYNAMIC_ZERO: Final = {"u8": 121, "i8": -9, "half": 57}

# What zero points of up to 8 make of a code at most: 1 becomes 9, in a power of two.
_ZEROS_GROWTH: Final = 16
# Largest magnitude of what is summed, perhaps after it is squared: 2^17 such squares do not overflow f32.
_SUMMED: Final = 2.0**55
# Wanted magnitude of a product of floats that is cast to an integer: more than the fraction, which is cut off, and not
# so much that the error of an f32 sum hides how it is cut off.
_INTEGER_TARGET: Final = 2.0**12
# The smallest scale of an exact distribution, and the root mean square of its scales.
_SCALE_STEP: Final = 0.125
_SCALE_RMS: Final = 0.576

# The smallest scale of a block of 16 or 32 in an exact distribution, beside 1: in the sum it costs bits.
_MICRO_STEP: Final = 0.5
# The scales of whole tensors beside them.
_WHOLE: Final = (0.5, 0.25)

# Fractional bits to which Hopper's tensor cores align the products of fp8 and the sum (see tensor_core.py): what a sum
# of integers may reach without losing any.
_FP8_BITS: Final = 13


@dataclasses.dataclass(frozen=True)
class Side:
    """A or B as a stack of lines along K: the rows of A, or the columns of B.

    Attributes:
        name: ``a`` or ``b``.
        dtype: element type whose numbers the product multiplies: under ``tf32`` and autocast narrower than the stored.
        shape: ``(matrices, lines, K)``.
        whole: every line is drawn, however many there are.
    """

    name: str
    dtype: DType
    shape: tuple[int, int, int]
    whole: bool = False

    @property
    def drawn(self) -> tuple[int, ...]:
        """How many lines a distribution draws whose lines are alike, in the shape of :attr:`shape`."""
        return self.shape if self.whole else drawn_shape(self.shape)


@dataclasses.dataclass(frozen=True)
class Headroom:
    """The facts of a problem that decide magnitudes, and the random streams of its operands.

    No magnitude depends on M.

    Attributes:
        a, b: the two sides of the product.
        limit: how many quanta a sum of magnitudes may reach: 2^24, 2^53 or 2^31 for f64 and integers, 2^p of a half
            type in which partial sums may be stored.
        room: largest magnitude of the product that nothing behind it overflows.
        adds: number of steps that add an operand.
        target: wanted magnitude of the product, 0 where the epilogue treats all alike.
        zero: A's zero point: what the product subtracts of each element that is stored.
        draw: the stream of random bits with a name.
    """

    problem: Problem
    a: Side
    b: Side
    limit: int
    room: float
    adds: int
    target: float
    zero: int
    draw: Callable[[str], Stream]

    @functools.cached_property
    def quantised(self) -> str:
        """``tensorwise``, ``rowwise`` or ``blocks`` where A and B are fp8 with scales of their own; "" elsewhere.

        The scales carry every power of two, and fp8 only small integers or fractions.
        """
        op = self.problem.op
        return next((s.name for s in self.problem.quant if op.rounds_once), "")

    @property
    def wide(self) -> bool:
        """Whether float32 cannot hold the operands."""
        return "f64" in (self.a.dtype.name, self.b.dtype.name)

    @property
    def real(self) -> type[np.floating[Any]]:
        """The type of number that lines are drawn in."""
        return np.float64 if self.wide else np.float32

    @property
    def all_integer(self) -> bool:
        """Neither side can be scaled by a power of two."""
        return not (self.a.dtype.is_float or self.b.dtype.is_float)

    @property
    def budget(self) -> int:
        """Quanta that products may use up: a share is left for the bias, and three bits for the scales."""
        if self.quantised:
            # Scales and bias come after the sum, and in f32; those of small blocks before it.
            return int(2**_FP8_BITS * (_MICRO_STEP**2 if self.problem.micro_block else 1.0))
        limit = self.limit * 3 // 4 if self.adds else self.limit
        if self.problem.op.weight_scales and not self.problem.op.int8:  # sums of integers are exact before the scales
            limit = int(limit * _SCALE_STEP)
        if self.b.dtype.name == "i4" or self.problem.step("zeros"):
            limit //= _ZEROS_GROWTH
        if self.all_integer:
            limit = min(limit, int(self.room / (2.0 if self.adds else 1.0)))
        return max(limit, 1)

    def whole_scales(self, e: int, *, exact: bool) -> tuple[float, float] | None:
        """Scales of A and of B as a whole where there are some beside those of blocks; they then make up for ``e``."""
        if not self.problem.has_whole_scales:
            return None
        a, b = _WHOLE if exact else np.abs(self.draw("scale-both").binade((2,), False)).tolist()
        return a * 2.0 ** (e - e // 2), b * 2.0 ** (e // 2)

    def both(self, lines: Callable[[Side], Array]) -> tuple[Array, Array | None]:
        """The lines of A and those of B, ``None`` where B is A."""
        return lines(self.a), None if self.problem.b_is_a else lines(self.b)

    def exponent(self, rms: float, bound: float) -> int:
        """Exponent e of the power of two to scale A @ B by.

        Args:
            rms: typical magnitude of an element of A @ B.
            bound: what no element can exceed.
        """
        if self.all_integer:
            return 0
        # Eight standard deviations are never seen (1e-15 per element); a diagonal of A @ A.T is the bound.
        peak = bound if self.problem.b_is_a else min(bound, 8.0 * rms)
        # A difference of logarithms: the quotient may overflow.
        most = math.floor(math.log2(self.room) - math.log2(peak + 2.0 * self.adds * rms))
        e = min(most, round(math.log2(self.target / rms)) if self.target else 0)
        return 2 * (e // 2) if self.problem.b_is_a else e

    def split(self, e: int) -> tuple[int, int]:
        """Exponents for A and for B that make up ``e``; an integer side takes none."""
        if not self.b.dtype.is_float:
            return e, 0
        if not self.a.dtype.is_float:
            return 0, e
        return e - e // 2, e // 2


def narrowest(problem: Problem) -> list[DType]:
    """The element types that the value goes through."""
    return list(problem.value_dtypes)


def saturating_steps(problem: Problem) -> list[Step]:
    """The steps of the epilogue whose result hardly changes any more where their argument is large."""
    return [s for s in problem.epilogue if s.spec.saturates]


def headroom_of(problem: Problem, draw: Callable[[str], Stream] = Stream) -> Headroom:
    """The magnitudes of ``problem``, with its streams where values are drawn.

    Raises:
        Unsupported: when its operands cannot be built.
    """
    op, shape, out = problem.op, problem.shape, problem.dtypes.out
    chain = narrowest(problem)
    for dtype in chain[1:]:
        if not dtype.is_float and dtype.name != "i32":
            # Out of range this is undefined in C, and every compiler answers differently.
            text = f"cast-{dtype.name} has no defined result out of range"
            raise Unsupported("cast-int", text, "cast to i32 or to a float")
    # Residuals of mul reach 3, those of div go down to 1/2.
    factors = [step.numbers[0] if step.name == "scale" else _GROWTH.get(step.name, 1.0) for step in problem.epilogue]
    factors += [problem.result_factor(device) for device in ("cpu", "cuda")]  # the values are the same on both
    growth = math.prod(max(1.0, abs(factor)) for factor in (problem.alpha, *factors))
    room = DTYPES["f32"].max_finite if op.int8 else min(d.max_finite for d in chain)
    if problem.reduction is not None:
        room = min(room, _SUMMED)
    if problem.step("exp") is not None:
        room = math.log(room)
        if not op.int8 and not (problem.dtypes.a.is_float or problem.dtypes.b.is_float):
            text = "exp of an integer product overflows, and integers cannot be scaled down"
            raise Unsupported("exp-of-integers", text)
    # The bounds of a clamp; 1 if both are 0.
    targets = [(max(map(abs, s.numbers)) or 1.0) if s.numbers else s.spec.target for s in saturating_steps(problem)]
    if out.is_float and not all(d.is_float for d in chain):
        targets.append(_INTEGER_TARGET)
    target = min(targets, default=0.0) / growth
    adds = sum(s.kind is StepKind.BIAS or s.name in {"add", "sub"} for s in problem.epilogue)
    batch = 1 if shape.batch is None else shape.batch
    # All groups of a grouped product lie in one matrix of A, of B, or of both.
    rows, columns = (problem.ends if op.ragged == name else getattr(shape, name) for name in "mn")
    one_a = op.several or problem.has("a.broadcast") or op.ragged in {"m", "k"}
    one_b = op.weight or problem.has("b.broadcast") or op.ragged in {"n", "k"}
    of_a, of_b, zero = _multiplied(problem)
    # Elements of four bits are drawn line by line, as their bytes have to be put together.
    a = Side("a", of_a, (1 if one_a else batch, rows, problem.terms), whole=of_a.is_packed)
    b = Side("b", of_b, (1 if one_b else batch, columns, problem.terms), whole=of_b.is_packed)
    limit = {"f64": 2**53, "i32": 2**31 - 1}.get(out.name, 2**24)
    limit = 2**out.precision if problem.has("math.half_partials") or op.summands > 1 else limit
    return Headroom(problem, a, b, limit, room / growth, adds, target, zero, draw)


def _multiplied(problem: Problem) -> tuple[DType, DType, int]:
    """The element types whose numbers the product multiplies, and A's zero point."""
    a, b = ((problem.input_dtype,) * 2) if problem.autocast else (problem.dtypes.a, problem.dtypes.b)
    zero = 0
    if a.name == "i32":  # whose products have to fit their sum
        a = b = DTYPES["i8"]
    if problem.op.coded and b.name == "u8":
        b = DTYPES["i8"]  # what is left of its codes without their zero point has signs
    if problem.op.zero_points:
        static, seven_bits = problem.step("static"), problem.has("a.7bit")
        zero = int(static.numbers[1]) if static else _DYNAMIC_ZERO["half" if seven_bits else a.name]
        if seven_bits:
            a = dataclasses.replace(a, max_finite=127.0)
    if problem.has("math.tf32"):
        a, b = (TF32 if d.name == "f32" else d for d in (a, b))
    return a, b, zero


@dataclasses.dataclass(kw_only=True)
class Grid:
    """On which grid products lie, where sums of them are exact.

    Attributes:
        quantum: > 0: every product ``a * b`` (times its scale) and every bias element is an integer multiple
            of it, so sums are exact in an accumulator of p bits if ``sum |a||b| + |bias| <= 2^p * quantum``, which
            holds for p = 24 (53 for f64, 31 for integers).  0.0: no grid.
        base_quantum: the same for the products before any scale; it is the quantum where there are no scales.
        units: powers of two that the elements of A and those of B are multiples of; 0.0 where there is no grid.
        magnitude_bound: what no sum of magnitudes ``sum |a||b|`` (times its scale) exceeds, in quanta;
            infinite without a grid.
    """

    quantum: float = 0.0
    base_quantum: float = 0.0
    units: tuple[float, float] = (0.0, 0.0)
    magnitude_bound: float = math.inf


@dataclasses.dataclass
class Drawn(Grid):
    """What a distribution decided.

    Attributes:
        a, b: lines of A and B, float32 or float64, exactly representable after rounding to their dtype;
            ``b`` is ``None`` where B is A.
        level: typical magnitude of the product, scales included.
        spare: what the bias may reach, in quanta (exact distributions).
        scale_a: scales of A's rows, or of A as a whole.
        scale_b: scales of B's columns, or of B as a whole, or of its groups.
        zero_b: zero points of its groups.
        quantisation: scales and zeros of the groups of a 4-bit weight.
        wholes: scales of A and of B as a whole, beside those of blocks.
        positive: bias and residuals keep to positive values.
    """

    a: Array
    b: Array | None
    level: float
    spare: float = 0.0
    scale_a: Array | None = None
    scale_b: Array | None = None
    zero_b: Array | None = None
    quantisation: Array | None = None
    wholes: tuple[float, float] | None = None
    positive: bool = False


def scaled_lines(lines: Array, e: int) -> Array:
    """``lines * 2^e``, exact."""
    return lines if e == 0 else np.asarray(lines * lines.dtype.type(2.0**e))


def scale_shapes(headroom: Headroom) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the scales of A's rows and B's columns, or of their blocks."""
    rows, columns = headroom.a.shape[1], headroom.b.shape[1]
    batch = headroom.problem.shape.batch
    each_b = () if batch is None else (batch,)
    each_a = () if headroom.problem.op.ragged == "m" else each_b
    if blocks := headroom.problem.scale_blocks:
        k = -(-headroom.problem.terms // headroom.problem.block_size)
        return (*each_a, -(-rows // blocks[0]), k), (*each_b, k, -(-columns // blocks[1]))
    if block := headroom.problem.micro_block:
        k = headroom.problem.terms // block
        return (*each_a, rows, k), (*each_b, columns, k)
    if batch is not None:  # of all groups; each has its own where K is divided
        ragged = headroom.problem.op.ragged
        of_a = {"m": (rows,), "k": (batch * rows,)}.get(ragged, (batch, rows))
        of_b = {"n": (columns,), "k": (batch * columns,)}.get(ragged, (batch, columns))
        return of_a, of_b
    return (rows, 1), (1, columns)


def scale_pair(headroom: Headroom, draw: Callable[[Stream, tuple[int, ...]], Array], e: int) -> tuple[Array, Array]:
    """Scales of A and of B in the shapes that ``torch._scaled_mm`` takes: (M, 1) and (1, N), two scalars, or of blocks.

    Args:
        headroom: of a quantised problem.
        draw: draws scales of the given shape.
        e: exponent of the power of two that both scales together are multiplied by.
    """
    if headroom.quantised == "tensorwise":
        a, b = map(np.asarray, draw(headroom.draw("scale-both"), (2,)))  # the same for every M
    else:
        of_a, of_b = scale_shapes(headroom)
        a, b = draw(headroom.draw("scale-a"), of_a), draw(headroom.draw("scale"), of_b)
    return scaled_lines(a, e - e // 2), scaled_lines(b, e // 2)


def _halves(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales of small blocks, 1/2 and 1."""
    return stream.look_up(shape, np.array([_MICRO_STEP, 1.0], dtype=np.float32), 8)


def eighths(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales 1, 1/2, 1/4 and 1/8 of the columns or groups of a weight."""
    return stream.look_up(shape, np.array([1, 0.5, 0.25, 0.125], dtype=np.float32), 8)


def powers_of_two(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales 1/8, 1/4, 1/2 and, where there are many, 1: a neighbour's differs more often than not."""
    values = [0.125, 0.25, 0.5] if len(shape) == 1 else [0.125, 0.25, 0.5, 1.0]
    return stream.look_up(shape, np.array(values, dtype=np.float32), 8)


def on_grid(headroom: Headroom, a: Array, b: Array | None, rms: float, bound: float, *, only_b: bool = False) -> Drawn:
    """Integer lines, scaled by a power of two into the room there is: fp8 by its scales, other types themselves.

    ``rms`` and ``bound`` are those of A @ B in integers; ``only_b`` leaves A as it is where B can be scaled.  Scales
    are powers of two.
    """
    problem = headroom.problem
    factors, is_micro = 2 if headroom.quantised else int(problem.op.weight_scales), problem.micro_block > 0
    wholes = math.prod(_WHOLE) if problem.has_whole_scales else 1.0
    typical, least = wholes * _SCALE_RMS**factors, wholes * (_MICRO_STEP if is_micro else _SCALE_STEP) ** factors
    e = headroom.exponent(rms * typical, bound)
    level, quantum, spare = rms * 2.0**e * typical, 2.0**e * least, headroom.limit - bound / least
    if headroom.quantised:
        found = headroom.whole_scales(e, exact=True)
        scales = scale_pair(headroom, _halves if is_micro else powers_of_two, 0 if found else e)
        # Small blocks are scaled before the sum.
        base = (1.0 if found else 2.0**e) * _MICRO_STEP**2 if is_micro else 1.0
        return Drawn(a, b, level, spare, *scales, quantum=quantum, base_quantum=base, wholes=found)
    if headroom.problem.op.int8:
        spare = headroom.limit / 4  # the bias comes after the scales, and whatever it costs is in the bound
    ea, eb = (0, e) if only_b and headroom.b.dtype.is_float else headroom.split(e)
    b = None if b is None else scaled_lines(b, eb)
    drawn = Drawn(scaled_lines(a, ea), b, level, spare, quantum=quantum, base_quantum=2.0**e)
    drawn.units, drawn.magnitude_bound = (2.0**ea, 2.0**eb), headroom.limit - spare
    if headroom.problem.op.weight_scales:
        drawn.scale_b = eighths(headroom.draw("scale"), (headroom.b.shape[1],))
    return drawn


def as_is(headroom: Headroom, a: Array, b: Array, level: float, spare: float, bound: float) -> Drawn:
    """Positive integer lines of a distribution that encodes something in the digits of a sum: scales multiply to 1."""
    drawn = Drawn(a, b, level, spare, positive=True, quantum=1.0, units=(1.0, 1.0), magnitude_bound=bound)
    if headroom.quantised == "tensorwise":
        drawn.scale_a, drawn.scale_b = np.asarray(4.0, dtype=np.float32), np.asarray(0.25, dtype=np.float32)
    elif headroom.quantised:
        drawn.scale_a, drawn.scale_b = (np.ones(shape, dtype=np.float32) for shape in scale_shapes(headroom))
        drawn.wholes = (4.0, 0.25) if headroom.problem.has_whole_scales else None
    elif headroom.problem.op.weight_scales:
        drawn.scale_b = np.ones(headroom.b.shape[1], dtype=np.float32)
    return drawn
