"""What a problem leaves room for: how large values may be, and the grids on which sums are exact.

An exact distribution puts every product on a grid on which a sum in the accumulator's precision is exact in any order,
so that a correct kernel has one possible sum.  A random one keeps magnitudes where neither the accumulator nor the
output overflows.  Where an activation saturates, values are scaled by a power of two to where it does not.

Source of the exactness of sums of integers in a float accumulator: Higham (2002), section 2.1 (integers up to 2^p are
exact).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pytest_gemm.operands.random_streams import Array, Stream, drawn_stack
from pytest_gemm.outcome import Unsupported
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

# Zero point of a dynamically quantised A: far from 0, as asymmetric data have it; "half": in 7 bits.
_DYNAMIC_ZERO: Final = {"u8": 121, "i8": -9, "half": 57}


@dataclasses.dataclass(frozen=True)
class Headroom:
    """The facts of a problem that decide magnitudes.  None of them depends on M.

    Attributes:
        k: number of products in a sum.
        a, b: element types whose numbers the product multiplies: under ``tf32`` and autocast narrower than the stored.
        a_shape, b_shape: ``(matrices, lines, K)``: a line is a row of A or a column of B.
        limit: how many quanta a sum of magnitudes may reach: 2^24, 2^53 or 2^31 for f64 and integers, 2^p of a half
            type in which partial sums may be stored.
        room: largest magnitude of the product that nothing behind it overflows.
        adds: number of steps that add an operand.
        target: wanted magnitude of the product, 0 where the epilogue treats all alike.
        b_is_a: B is A transposed.
        scaled: B has scales for each column.
        whole: every line is drawn, however many there are.
        int8: A and B are 8-bit integers whose product is scaled.
        zero: A's zero point: what the product subtracts of each element that is stored.
        quantised: ``tensorwise`` or ``rowwise`` where A and B are fp8 with scales of their own: the scales carry every
            power of two, and fp8 only small integers or fractions.  "" elsewhere.
    """

    problem: Problem
    k: int
    a: DType
    b: DType
    a_shape: tuple[int, int, int]
    b_shape: tuple[int, int, int]
    limit: int
    room: float
    adds: int
    target: float
    b_is_a: bool
    scaled: bool
    quantised: str = ""
    whole: bool = False
    int8: bool = False
    zero: int = 0

    @property
    def a_drawn(self) -> tuple[int, int, int]:
        """How many lines of A a distribution draws whose lines are alike, in the shape of :attr:`a_shape`."""
        return self.a_shape if self.whole else drawn_stack(self.a_shape)

    @property
    def b_drawn(self) -> tuple[int, int, int]:
        """The same of B."""
        return self.b_shape if self.whole else drawn_stack(self.b_shape)

    @property
    def wide(self) -> bool:
        """Whether float32 cannot hold the operands."""
        return "f64" in (self.a.name, self.b.name)

    @property
    def all_integer(self) -> bool:
        """Neither side can be scaled by a power of two."""
        return not (self.a.is_float or self.b.is_float)

    def exponent(self, rms: float, bound: float) -> int:
        """Exponent e of the power of two to scale A @ B by.

        Args:
            rms: typical magnitude of an element of A @ B.
            bound: what no element can exceed.
        """
        if self.all_integer:
            return 0
        # Eight standard deviations are never seen (1e-15 per element); a diagonal of A @ A.T is the bound.
        peak = bound if self.b_is_a else min(bound, 8.0 * rms)
        # A difference of logarithms: the quotient may overflow.
        most = math.floor(math.log2(self.room) - math.log2(peak + 2.0 * self.adds * rms))
        e = min(most, round(math.log2(self.target / rms)) if self.target else 0)
        return 2 * (e // 2) if self.b_is_a else e

    def split(self, e: int) -> tuple[int, int]:
        """Exponents for A and for B that make up ``e``; an integer side takes none."""
        if not self.b.is_float:
            return e, 0
        if not self.a.is_float:
            return 0, e
        return e - e // 2, e // 2


def narrowest(problem: Problem) -> list[DType]:
    """The element types that the value goes through."""
    return [problem.value_dtype] + [s.dtype for s in problem.epilogue if s.kind is StepKind.CAST]


def saturating_steps(problem: Problem) -> list[Step]:
    """The steps of the epilogue whose result hardly changes any more where their argument is large."""
    return [s for s in problem.epilogue if s.spec.saturates]


def headroom_of(problem: Problem) -> Headroom:
    """The magnitudes of ``problem``.

    Raises:
        Unsupported: when its operands cannot be built.
    """
    op = problem.op
    chain = narrowest(problem)
    for dtype in chain[1:]:
        if not dtype.is_float and dtype.name != "i32":
            # Out of range this is undefined in C, and every compiler answers differently.
            text = f"cast-{dtype.name} has no defined result out of range"
            raise Unsupported("cast-int", text, "cast to i32 or to a float")
    growth = max(1.0, abs(problem.alpha))
    for step in problem.epilogue:
        if step.name == "scale":
            growth *= max(1.0, abs(step.numbers[0]))
        # Residuals of mul reach 3, those of div go down to 1/2.
        growth *= {"mul": 4.0, "div": 2.0}.get(step.name, 1.0)
    room = DTYPES["f32"].max_finite if op.int8 else min(d.max_finite for d in chain)
    if problem.step("exp") is not None:
        room = math.log(room)
    target = 0.0
    for step in saturating_steps(problem):
        # The bounds of a clamp; 1 if both are 0.
        wanted = (max(map(abs, step.numbers)) or 1.0) if step.numbers else step.spec.target
        target = min(target or wanted, wanted)
    if problem.step("exp") is not None and not op.int8 and not (problem.dtypes.a.is_float or problem.dtypes.b.is_float):
        raise Unsupported("exp-of-integers", "exp of an integer product overflows, and integers cannot be scaled down")
    shape = problem.shape
    batch = 1 if shape.batch is None else shape.batch
    matrices_b = 1 if op.weight or problem.has("b.broadcast") else batch
    # All groups of a grouped product lie in one matrix.
    matrices_a, rows = (1, batch * shape.m) if problem.grouped else (batch, shape.m)
    matrices_a = 1 if op.several else matrices_a
    a, b = ((problem.input_dtype,) * 2) if problem.autocast else (problem.dtypes.a, problem.dtypes.b)
    zero = 0
    if op.zero_points:
        if problem.has("a.7bit"):
            a = dataclasses.replace(a, max_finite=127.0)
        static = problem.step("static")
        zero = int(static.numbers[1]) if static else _DYNAMIC_ZERO["half" if problem.has("a.7bit") else a.name]
    if problem.has("math.tf32"):
        a, b = (TF32 if d.name == "f32" else d for d in (a, b))
    out = problem.dtypes.out
    return Headroom(
        problem,
        shape.k,
        a,
        b,
        (1 if problem.has("a.broadcast") else matrices_a, rows, shape.k),
        (matrices_b, shape.n, shape.k),
        2**out.precision
        if problem.has("math.half_partials")
        else {"f64": 2**53, "i32": 2**31 - 1}.get(out.name, 2**24),
        room / growth,
        sum(s.kind is StepKind.BIAS or s.name in {"add", "sub"} for s in problem.epilogue),
        target / growth,
        problem.b_is_a,
        op.weight_scales,
        next((s.name for s in problem.epilogue if op.rounds_once and s.name in op.scales), ""),
        int8=op.int8,
        zero=zero,
    )


@dataclasses.dataclass
class Drawn:
    """What a distribution decided.

    Attributes:
        a, b: lines of A and B, float32 or float64, exactly representable after rounding to their dtype;
            ``b`` is ``None`` where B is A.
        level: typical magnitude of the product, scales included.
        quantum: grid of products and bias, 0.0 for none.
        spare: what the bias may reach, in quanta (exact distributions).
        scale: scales of B's columns, or of B as a whole.
        positive: bias and residuals keep to positive values.
        scale_a: scales of A's rows, or of A as a whole.
        base_quantum: grid of the products before any scale; 0.0 where it is the quantum.
        units: powers of two that the elements of A and those of B are multiples of; 0.0 where there is none.
        magnitude_bound: what no sum of magnitudes of products exceeds, in quanta (exact distributions).
    """

    a: Array
    b: Array | None
    level: float
    quantum: float = 0.0
    spare: float = 0.0
    scale: Array | None = None
    positive: bool = False
    scale_a: Array | None = None
    base_quantum: float = 0.0
    units: tuple[float, float] = (0.0, 0.0)
    magnitude_bound: float = math.inf


Draw = Callable[[str], Stream]


def scaled_lines(lines: Array, e: int) -> Array:
    """``lines * 2^e``, exact."""
    return lines if e == 0 else np.asarray(lines * lines.dtype.type(2.0**e))


def _exact_scale(headroom: Headroom, draw: Draw) -> Array | None:
    """Scales 1, 1/2, 1/4, 1/8 for the columns of B: exact, and a neighbour's differs more often than not."""
    if not headroom.scaled:
        return None
    return draw("scale").look_up((headroom.b_shape[1],), np.array([1, 0.5, 0.25, 0.125], dtype=np.float32), 8)


# What zero points of up to 8 make of a code of 4 bits at most: 1 becomes 9, in a power of two.
_INT4_GROWTH: Final = 16
# The smallest scale of _exact_scale, and its root mean square.
_SCALE_STEP: Final = 0.125
_SCALE_RMS: Final = 0.576

# Fractional bits to which Hopper's tensor cores align the products of fp8 and the sum (see tensor_core.py): what a sum
# of integers may reach without losing any.
_FP8_BITS: Final = 13


def scale_pair(headroom: Headroom, draw: Draw, rows: Callable[[Stream, tuple[int, ...]], Array]) -> tuple[Array, Array]:
    """Scales of A and of B in the shapes that ``torch._scaled_mm`` takes: (M, 1) and (1, N), or two scalars.

    Args:
        headroom: of a quantised problem.
        draw: its streams.
        rows: draws scales of the given shape.
    """
    if headroom.quantised == "tensorwise":
        pair = rows(draw("scale-both"), (2,))  # the same for every M
        return np.asarray(pair[0]), np.asarray(pair[1])
    return rows(draw("scale-a"), (headroom.a_shape[1], 1)), rows(draw("scale"), (1, headroom.b_shape[1]))


def powers_of_two(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Scales 1/8, 1/4, 1/2 and, where there are many, 1: a neighbour's differs more often than not."""
    values = [0.125, 0.25, 0.5] if len(shape) == 1 else [0.125, 0.25, 0.5, 1.0]
    return stream.look_up(shape, np.array(values, dtype=np.float32), 8)


def neutral_scales(headroom: Headroom) -> tuple[Array | None, Array | None]:
    """Scales of A and B whose product is 1, for distributions that encode something in the digits of a sum."""
    if headroom.quantised == "tensorwise":
        return np.asarray(4.0, dtype=np.float32), np.asarray(0.25, dtype=np.float32)
    ones = np.ones(headroom.b_shape[1], dtype=np.float32) if headroom.scaled or headroom.quantised else None
    if not headroom.quantised or ones is None:
        return None, ones
    return np.ones((headroom.a_shape[1], 1), dtype=np.float32), ones.reshape(1, -1)


def budget_of(headroom: Headroom) -> int:
    """Quanta that products may use up: a share is left for the bias, and three bits for the scales."""
    if headroom.quantised:
        return 2**_FP8_BITS  # scales and bias come after the sum, and in f32
    limit = headroom.limit * 3 // 4 if headroom.adds else headroom.limit
    if headroom.scaled and not headroom.int8:  # the sums of integers are exact before they are scaled
        limit = int(limit * _SCALE_STEP)
    if headroom.b.name == "i4":
        limit //= _INT4_GROWTH
    if headroom.all_integer:
        limit = min(limit, int(headroom.room / (2.0 if headroom.adds else 1.0)))
    return max(limit, 1)


def on_grid(
    headroom: Headroom, draw: Draw, a: Array, b: Array | None, rms: float, bound: float, *, only_b: bool = False
) -> Drawn:
    """Integer lines, scaled by a power of two into the room there is.

    ``rms`` and ``bound`` are those of A @ B in integers; ``only_b`` leaves A as it is where B can be scaled.
    """
    if headroom.quantised:
        return _on_quantised_grid(headroom, draw, a, b, rms, bound)
    scale = _exact_scale(headroom, draw)
    e = headroom.exponent(rms * (_SCALE_RMS if headroom.scaled else 1.0), bound)
    ea, eb = (0, e) if only_b and headroom.b.is_float else headroom.split(e)
    quantum = 2.0**e * (_SCALE_STEP if headroom.scaled else 1.0)
    spare = headroom.limit - bound / (_SCALE_STEP if headroom.scaled else 1.0)
    if headroom.int8:
        spare = headroom.limit / 4  # the bias comes after the scales, and whatever it costs is in the bound
    return Drawn(
        scaled_lines(a, ea),
        None if b is None else scaled_lines(b, eb),
        rms * 2.0**e * (_SCALE_RMS if headroom.scaled else 1.0),
        quantum,
        spare,
        scale,
        base_quantum=2.0**e,
        units=(2.0**ea, 2.0**eb),
        magnitude_bound=headroom.limit - spare,
    )


def _on_quantised_grid(headroom: Headroom, draw: Draw, a: Array, b: Array | None, rms: float, bound: float) -> Drawn:
    """Integers of fp8 as they are; powers of two in the scales, which bring the product into the room there is."""
    scale_a, scale_b = scale_pair(headroom, draw, powers_of_two)
    e = headroom.exponent(rms * _SCALE_RMS**2, bound)
    quantum = 2.0**e * _SCALE_STEP**2
    return Drawn(
        a,
        b,
        rms * 2.0**e * _SCALE_RMS**2,
        quantum,
        headroom.limit - bound / _SCALE_STEP**2,
        scaled_lines(scale_b, e // 2),
        scale_a=scaled_lines(scale_a, e - e // 2),
        base_quantum=1.0,
    )


def real_of(headroom: Headroom) -> type[np.floating[Any]]:
    """The type of number that lines are drawn in."""
    return np.float64 if headroom.wide else np.float32
