"""The product with what the op itself does to it: its value, what a correct kernel may return, and what bounds that."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pytest_gemm.numerics.epilogue import cast, in_dtype
from pytest_gemm.numerics.error import Bounding, enclosed, enclosed_product, undecided
from pytest_gemm.numerics.reference import addend_of, largest_of, widened, with_addend
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.numerics.span import Arithmetic, Span, Tier, powers_of_two, wrap_int32
from pytest_gemm.problem.dtypes import DTYPES

_F32 = DTYPES["f32"]


class Product(NamedTuple):
    """The product with its own bias and scale, before any pass.

    Attributes:
        value: without any error, float64.
        span: its enclosure.
        tier: what bounds it.
        free: elements about which nothing can be said; ``None`` for none.
    """

    value: torch.Tensor
    span: Span
    tier: Tier
    free: torch.Tensor | None = None


def product_of(given: Bounding) -> Product:
    """The product of a problem under a contract."""
    op = given.problem.op
    if op.fused_steps:
        return _qlinear(given)
    if op.int8:
        return _da8w8(given)
    if given.problem.dtypes.out.name == "i32":
        value = wrap_int32(given.reference.c)
        return Product(value, Span.of(value), "exact")
    return _float_product(given)


def _float_product(given: Bounding) -> Product:
    problem, contract, addend, value = given.problem, given.contract, given.addend, given.value
    out = problem.dtypes.out
    arithmetic = Arithmetic(DTYPES["f64"] if out.name == "f64" else _F32, contract.epilogue)
    span, tier = enclosed(given, value, addend)
    # Autocast's rounding of the bias is a cast on the way, too, and fused code may leave it out.
    unrounded = None
    if problem.autocast and contract.epilogue != "eager":
        unrounded = addend_of(problem, given.operands, stored=True)
    if unrounded is not None:
        as_it_is = with_addend(problem, given.reference.c, given.scale, unrounded)
        span = span.union(enclosed(given, as_it_is, unrounded)[0])
    plain = addend is None and given.scale is None and problem.alpha == 1.0
    # Without any further step the last rounding is the only one in every contract.
    if contract.epilogue != "fused" and not (plain and not problem.passes):
        if not (plain or problem.op.rounds_once):
            span = span.cover(_in_parts(given, unrounded, arithmetic))
            span = Span.of(span.lo) if torch.equal(span.lo, span.hi) else span
        span = arithmetic.stored(span, out)
    return Product(value, span, tier, undecided(given))


def _in_parts(given: Bounding, unrounded: torch.Tensor | None, arithmetic: Arithmetic) -> Span:
    """The product as eager code may compute it: rounded to the output's dtype before it is scaled or added to.

    A plain callable does so, and so do some paths of ATen and oneDNN; others do it all in the accumulator.
    """
    problem, out = given.problem, given.problem.dtypes.out
    parts = enclosed_product(given).hull(out)
    if given.scale is not None:
        scale = given.scale
        parts = parts.turned(lambda x: x * scale).hull(out)
    # A product with a factor is rounded to f32 before it is rounded to a half type: near a tie that makes a difference.
    if problem.alpha != 1.0:
        alpha = problem.alpha if out.name == "f64" else in_dtype(problem.alpha)
        parts = arithmetic.basic(parts.times(alpha)).hull(out)
    addend = given.addend
    if addend is None:
        return parts
    term = Span.of(addend)
    if unrounded is not None:
        term = term.union(Span.of(unrounded))
    term = (term if problem.beta == 1.0 else arithmetic.basic(term)).hull(out)
    if problem.shape.k == 0:
        # ATen scales the bias alone there, by a beta that it rounds to the tensor's dtype first.
        x = addend * (in_dtype(problem.beta, out) / problem.beta)
        term = term.cover(Span.of(x).widen(x.abs() * 2.0**-51).hull(out))
    return parts.plus(term)


def _qlinear(given: Bounding) -> Product:
    """``onednn::qlinear_pointwise``: one kernel, in f32 from the int32 sum on, with one rounding at its end.

    The sum s of what is stored, ``s = (A + z) @ B``, is exact in int32 up to K = 65793.  The zero point z is taken off
    as an integer, ``c = s - z t`` with B's column sums t, or as Inductor does it, in f32:
    ``fl(fl(s) x) - fl(t x z)``, where x is the product of A's and B's scales.  The first term has three roundings (of
    the sum, the scales' product, the product), the second no more than three (t is exact below 2^24), the difference
    one: with ``(1 + u)^3 - 1 < 4 u`` an error of ``4 u x (|s| + |z t|)`` before the last.  An integer compensation has
    less, since ``|c| <= |s| + |z t|``.  Nothing is lost where the scales are powers of two and s, z t and c stay within
    2^24.
    """
    operands, c, scale = given.operands, given.reference.c, given.scale
    arithmetic = Arithmetic(_F32, "fused")
    static = given.problem.step("static")
    own = operands.scale_a if static is None else torch.tensor(static.numbers[0])
    assert scale is not None
    assert own is not None
    assert operands.scale_b is not None
    correction = operands.zero * widened(operands.b).sum(-2)
    value = c * scale
    exact = max(map(largest_of, (c + correction, correction, c))) <= 2.0**24
    exact = exact and powers_of_two(widened(operands.scale_b), widened(own))
    span = Span.of(value)
    if not exact:
        size = ((c + correction).abs() + correction.abs()) * scale.abs()
        span = arithmetic.basic(Span.of(value, size * (4 * _F32.unit_roundoff)))
    if operands.bias is not None:
        bias = widened(operands.bias)
        value, span = value + bias, arithmetic.basic(span.map(lambda x: x + bias))
    return Product(value, span, "exact" if exact else "hard")


def _da8w8(given: Bounding) -> Product:
    """An int32 product that is converted and multiplied by A's and by B's scales, with the bias.

    The integers are exact.  Each step of the program is rounded to its type (bf16 where out is, else f32; the last one
    to f16 where out is): *eager* does so for certain and in the program's order, other contracts may at each of them,
    and Inductor's pattern multiplies by B's scales first, behind oneDNN's or the template's product.
    """
    operands, out, mode = given.operands, given.problem.dtypes.out, given.contract.epilogue
    own = out if out.name == "bf16" else _F32
    arithmetic = Arithmetic(_F32, mode)
    assert operands.scale_a is not None
    assert operands.scale_b is not None
    a, b = widened(operands.scale_a), widened(operands.scale_b)
    first = cast(Span.of(wrap_int32(given.reference.c)), DTYPES["i32"], own, mode != "eager")

    def scaled(span: Span, scale: torch.Tensor) -> Span:
        return arithmetic.basic(span.turned(lambda x: x * scale))

    def one_by_one(*scales: torch.Tensor) -> Span:
        span = first
        for scale in scales:
            span = arithmetic.stored(scaled(span, scale), own)
        return span

    span = one_by_one(a, b)
    if mode != "eager":
        # The program's factors as one are rounded once.
        span = span.union(one_by_one(b, a)).union(scaled(first, round_to(a * b, _F32)))
    if operands.bias is not None:
        bias = widened(operands.bias)
        span = arithmetic.stored(arithmetic.basic(span.map(lambda x: x + bias)), own)
    if own != out:
        span = arithmetic.stored(span, out)
    return Product(given.value, span, "exact" if span.thin else "hard")
