"""Enclosures: of a gate that joins two products, and of a mixture of experts, through gate, second product and sum."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final

import torch

from pytest_gemm.numerics.epilogue import Arithmetic, Span, apply, step_span, undefined_at
from pytest_gemm.numerics.product import Bounding, Product, either, error_of, spread_of, statistics_apply
from pytest_gemm.numerics.reference import Reference, by_group, routes, widened
from pytest_gemm.operands.magnitudes import Grid
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.steps import Step

_GATE: Final = Step("silu")


def gated_span(
    step: Step, first: Span, second: Span, arithmetic: Arithmetic, dtype: DType
) -> tuple[Span, torch.Tensor | None]:
    """An activation of one value times another one, and where everything is accepted; ``None`` for nowhere.

    The two ranges are independent, so the product's ends are among the four products of their ends.  Where some of
    these are NaN (0 * Inf) and others not, it depends on roundings whether the result is one.
    """
    undefined = undefined_at(step, first, None)
    first = arithmetic.stored(step_span(step, first, None, arithmetic, dtype), dtype)
    if first.thin and second.thin:
        product = Span.of(first.lo * second.lo)
    else:
        ends = torch.stack([a * b for a in (first.lo, first.hi) for b in (second.lo, second.hi)])
        product = Span(ends.amin(0), ends.amax(0))
        undefined = either(undefined, ends.isnan().any(0) & ~ends.isnan().all(0))
    return arithmetic.stored(arithmetic.basic(product), dtype), undefined


def experts_product(given: Bounding) -> Product:
    """The result of ``experts`` before it is rounded.

    Behind each product, the gate's two operations and the weight of a choice, a kernel may round to the result's dtype
    or keep f32; the sum over a token's experts is one in f32.  So a gated value may be off by r, and the second product
    by D + E: D is the error of its own sum, at the gauge of the largest gated values, and E = r @ |W|.  The second
    weights are random signs times magnitudes, independent of all that r depends on: ``lambda sqrt((r*r) @ (W*W))``
    bounds E for all elements at once (Hoeffding), where lambda is that of the statistical bound.  It holds for any r.
    """
    problem, operands = given.problem, given.operands
    out, down, weights = problem.dtypes.out, operands.down, operands.weights
    assert down is not None
    assert weights is not None
    order, groups = routes(problem, operands)
    arithmetic, u = Arithmetic(DTYPES["f32"], "either"), DTYPES["f32"].unit_roundoff

    def total(x: torch.Tensor) -> torch.Tensor:
        """The sum over the experts of each token of what is sorted by expert."""
        return x[order.argsort()].reshape(problem.shape.m, problem.choices, x.shape[-1]).sum(1)

    c = given.reference.c
    first = arithmetic.stored(Span.of(c, error_of(given, c, None, None, 1.0)[0]), out)
    gates, ups = first.map(lambda x: x.chunk(2, -1)[0]), first.map(lambda x: x.chunk(2, -1)[1])
    gated, undefined = gated_span(_GATE, gates, ups, arithmetic, out)
    gate, up = c.chunk(2, -1)
    value = apply(_GATE, gate, None) * up
    # A NaN makes a row of NaN; of infinities it depends on roundings.
    is_open, is_nan = ~(gated.lo.isfinite() & gated.hi.isfinite()), gated.lo.isnan() & gated.hi.isnan()
    if undefined is not None:
        is_open, is_nan = is_open | undefined, is_nan & ~undefined
    is_open, is_nan = (x.any(-1, keepdim=True) for x in (is_open, is_nan))
    value, lo, hi = (torch.where(is_open, 0.0, x) for x in (value, gated.lo, gated.hi))
    r = torch.maximum(hi - value, value - lo)

    w, multiply = widened(down).mT, functools.partial(by_group, groups=groups)
    inner = problem.resized({"k": problem.shape.n // 2})
    # Whatever the first product was drawn from, the second weights are random.
    own = dataclasses.replace(operands, **{**vars(Grid()), "zero_mean": True})
    slack = multiply(r, w.abs())
    if statistics_apply(inner, own):
        slack = torch.minimum(slack, multiply(r.square(), w.square()).sqrt_().mul_(spread_of(inner)))
    made = multiply(value, w)
    reference = Reference(made, inner.terms * 2.0**-53, slack, value.abs() + r, w, multiply)
    error, tier = error_of(Bounding(inner, own, reference, given.contract), made, None, None, 1.0)
    factor = widened(weights).flatten()[order, None]
    span = arithmetic.stored(Span.of(made, error), out)
    parts = arithmetic.stored(arithmetic.basic(span.map(lambda x: x * factor)), out)
    nan = total(is_nan.double()) > 0.0
    value = torch.where(nan, math.nan, total(made * factor))
    # The sum of k numbers costs k - 1 roundings.
    span = parts.map(total).widen(total(parts.size) * (problem.choices * u))
    span = span.map(lambda x: torch.where(nan, math.nan, x))
    return Product(value, span, tier, (total(is_open.double()) > 0.0) & ~nan)
