"""The truth about a problem: a reference in wider arithmetic, and what a correct kernel may return.

Two steps, because one is expensive and shared while the other depends on who is judged:

* :func:`reference` computes the product and its gauge in float64, once for a problem and its operands;
* :func:`interval` turns it into the elementwise acceptance interval of one ``backend.Contract``:
  with a pre-rounding error of at most D, a result is right iff ``RNE_T(c - D) <= actual <= RNE_T(c + D)``.

Rounding is monotone, so this is tighter than adding ``u_T |c|`` and needs no tolerance.  Written so throughout:
``c`` is the product A @ B, ``G = |A| @ |B|`` and ``g = sqrt((A*A) @ (B*B))`` its gauges, ``u`` a unit roundoff,
``T`` a dtype to which something is rounded, K the number of products in a sum.

Literature: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed. (2002), sections 3.1 and 4.2; Jeannerod
and Rump, SIAM J. Matrix Anal. Appl. 34 (2013), for ``K u G`` without higher-order terms in any order; Higham and
Mary, SIAM J. Sci. Comput. 41 (2019), for the ``sqrt(K)`` of zero-mean data; Fasi, Higham, Mikaitis and Pranesh,
PeerJ Comput. Sci. 7 (2021), for tensor cores.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.epilogue import apply, around, as_f32, cast, step_span, times, undefined_at
from pytest_gemm.numerics.error import Bounding, Tier, error_of, undecided
from pytest_gemm.numerics.quantised import da8w8, qlinear
from pytest_gemm.numerics.reference import Reference, addend_of, scale_of, widened, with_addend
from pytest_gemm.numerics.rounding import round_to
from pytest_gemm.numerics.signs import Signs, met
from pytest_gemm.numerics.span import Arithmetic, Interval, Span, union, wrap_int32
from pytest_gemm.problem.dtypes import DTYPES, DType
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step, StepKind

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands


def intervals(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> tuple[Interval, ...]:
    """:func:`interval` for each of :attr:`Problem.outputs`; of ``again`` for the first alone."""
    outputs = problem.outputs[:1] if problem.has("program.chained") else problem.outputs
    return tuple(interval(output, operands, reference, contract) for output in outputs)


def interval(problem: Problem, operands: Operands, reference: Reference, contract: Contract) -> Interval:
    """What a kernel under ``contract`` may return as its only result.

    Args:
        problem: what was computed.
        operands: its operands; ``quantum`` opens the exact tier, ``zero_mean`` the statistical one.
        reference: of the same problem and operands.
        contract: the arithmetic that the backend declares.
    """
    given = Bounding(problem, operands, reference, contract)
    if problem.has("steps.first") or problem.has("steps.last"):
        return _of_one(given)
    if problem.op.fused_steps:
        return qlinear(given)
    if problem.op.int8:
        value = with_addend(problem, operands, reference.c, addend_of(problem, operands))
        return _through(given, *da8w8(given), value)
    return dataclasses.replace(_interval(given), _signs=lambda: _signs_of(given))


def _interval(given: Bounding, signs: Signs | None = None) -> Interval:
    """:func:`interval` of all other products; ``signs`` follows every pass, ``None`` for none."""
    problem, operands, reference = given.problem, given.operands, given.reference
    tier: Tier
    integers = problem.dtypes.out.name == "i32"
    free = None
    if integers:
        value = wrap_int32(reference.c)
        tier = "exact"
        span = Span(value, value)
    else:
        value = with_addend(problem, operands, reference.c, addend_of(problem, operands))
        span, tier = _product_span(given, value)
        free = undecided(given)
    if signs is not None:
        signs.begin(problem, operands, reference, span, value)
    return _through(given, span, tier, value, free, signs)


def _through(
    given: Bounding,
    span: Span,
    tier: Tier,
    start: torch.Tensor,
    free: torch.Tensor | None = None,
    signs: Signs | None = None,
) -> Interval:
    """From the product to the result, through every pass.

    Args:
        given: whose result it is.
        span: the enclosure of the product with what the op itself does to it.
        tier: what bounds it.
        start: the same without any error.
        free: elements about which nothing can be said; ``None`` for none.
        signs: follows every pass; ``None`` where the signs of zeros are not asked for.
    """
    problem, operands, contract = given.problem, given.operands, given.contract
    integers = problem.dtypes.out.name == "i32"
    value = start
    dtype = problem.dtypes.out
    residuals = iter(operands.residuals)
    for index, step in enumerate(problem.passes):
        if step.kind is StepKind.JOIN:
            value, span, unsaid = _joined(step, value, span, Arithmetic(_working(dtype), contract.epilogue), dtype)
            free = unsaid if free is None else unsaid | free[0] | free[1]
            if signs is not None:
                signs.follow(step, span, span, None)
            continue
        r = met(step, problem, operands, residuals)
        undefined = undefined_at(step, span, r)
        if undefined is not None:
            free = undefined if free is None else free | undefined
        value = apply(step, value, r)
        if step.kind is StepKind.CAST:
            passing = contract.epilogue != "eager" and index < len(problem.passes) - 1
            span = cast(span, dtype, step.dtype, passing)
            dtype = step.dtype
            if signs is not None:
                signs.follow(step, span, span, None)
            continue
        absorbed = index == 0 and step.kind is StepKind.BIAS and contract.epilogue != "eager" and not integers
        if absorbed and tier != "exact":
            assert r is not None
            # A compiler may turn product-plus-bias into one addmm whose partial sums start at the bias.
            theta = contract.theta(problem.shape.k, 1, out=problem.dtypes.out) - contract.input_error
            span = span.widen(r.abs() * theta)
        arithmetic = Arithmetic(_working(dtype), contract.epilogue)
        before = span
        span = step_span(step, before, r, arithmetic, dtype)
        if step.kind is StepKind.BIAS and problem.autocast and contract.epilogue != "eager":
            assert operands.bias is not None
            # As with a cast on the way: fused code may add the bias as it is.
            span = union(span, step_span(step, before, widened(operands.bias), arithmetic, dtype))
        span = arithmetic.stored(span, dtype)
        if signs is not None:
            signs.follow(step, before, span, r)

    target = problem.result_dtype
    last = span.round(target)
    lo, hi = last.lo, last.hi
    if free is not None:
        lo = torch.where(free, -math.inf, lo)
        hi = torch.where(free, math.inf, hi)
    # Where nothing widened the value its rounding is already there; ``lo`` may have been opened since.
    expected = last.lo if span.lo is value else round_to(value, target)
    return Interval(lo, hi, expected, value, start, tier, (span.lo, span.hi))


def _signs_of(given: Bounding) -> Signs:
    """The signs that results may have: the interval is computed once more, and they are followed through it."""
    signs = Signs()
    _interval(given, signs)
    return signs


def _working(dtype: DType) -> DType:
    """The type of one operation of an epilogue on values of ``dtype``."""
    return DTYPES["f64" if dtype.name == "f64" else "f32"]


def _of_one(given: Bounding) -> Interval:
    """Results of ``linears`` of which one has gone through the steps, and the others have not."""
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    flags = tuple(f for f in problem.flags if f not in {"steps.first", "steps.last"})
    plain = dataclasses.replace(problem, epilogue=_own_steps(problem), flags=flags)
    bare = interval(plain, operands, reference, contract)
    done = interval(dataclasses.replace(problem, flags=flags), operands, reference, contract)
    one = torch.tensor([problem.is_one_of("steps", i) for i in range(problem.several)]).reshape(-1, 1, 1)

    def pick(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(one, a, b)

    tier: Tier = next(t for t in ("statistical", "hard", "exact") if t in {bare.tier, done.tier})
    (done_lo, done_hi), (bare_lo, bare_hi) = done._before, bare._before
    return Interval(
        pick(done.lo, bare.lo),
        pick(done.hi, bare.hi),
        pick(done.expected, bare.expected),
        pick(done.value, bare.value),
        bare.product,
        tier,
        (pick(done_lo, bare_lo), pick(done_hi, bare_hi)),
    )


def _own_steps(problem: Problem) -> tuple[Step, ...]:
    """The epilogue without its passes."""
    return tuple(step for step in problem.epilogue if step not in problem.passes)


def _joined(
    step: Step, value: torch.Tensor, span: Span, arithmetic: Arithmetic, dtype: DType
) -> tuple[torch.Tensor, Span, torch.Tensor]:
    """The activation of the first product times the second: its value, its enclosure, and where nothing can be said.

    The two ranges are independent, so the product's ends are among the four products of their ends.  Where some of
    these are NaN (0 * Inf) and others not, it depends on roundings whether the result is one.
    """
    gate = Step(step.text)

    def of(x: Span, index: int) -> Span:
        lo = x.lo[index]
        return Span(lo, lo if x.thin else x.hi[index])

    first, second = of(span, 0), of(span, 1)
    undefined = undefined_at(gate, first, None)
    first = arithmetic.stored(step_span(gate, first, None, arithmetic, dtype), dtype)
    value = apply(gate, value[0], None) * value[1]
    if first.thin and second.thin:
        lo = first.lo * second.lo
        product = Span(lo, lo)
        free = torch.zeros_like(lo, dtype=torch.bool)
    else:
        ends = torch.stack([a * b for a in (first.lo, first.hi) for b in (second.lo, second.hi)])
        product = Span(ends.amin(0), ends.amax(0))
        free = ends.isnan().any(0) & ~ends.isnan().all(0)
    if undefined is not None:
        free = free | undefined
    return value, arithmetic.stored(arithmetic.basic(product), dtype), free


def _product_span(given: Bounding, value: torch.Tensor) -> tuple[Span, Tier]:
    """The product with its own bias and scale, before any pass, and the tier that bounds it."""
    problem, operands, reference, contract = given.problem, given.operands, given.reference, given.contract
    out = problem.dtypes.out
    addend = addend_of(problem, operands)
    scale = scale_of(operands)
    span, tier = _sum_span(given, addend, value)
    # Autocast's rounding of the bias is a cast on the way, too, and fused code may leave it out.
    unrounded = None
    if problem.autocast and contract.epilogue != "eager":
        unrounded = addend_of(problem, operands, stored=True)
    if unrounded is not None:
        as_it_is = with_addend(problem, operands, reference.c, unrounded)
        span = union(span, _sum_span(given, unrounded, as_it_is)[0])
    plain = addend is None and scale is None and problem.alpha == 1.0
    if contract.epilogue == "fused" or (plain and not problem.passes):
        return span, tier  # without any further step the last rounding is the only one in every contract
    if plain or problem.op.rounds_once:
        return Arithmetic(out, contract.epilogue).stored(span, out), tier
    # Eager kernels are free to round the product to a tensor of the output's dtype before they scale it or add to it
    # (a plain callable does, and so do some paths of ATen and oneDNN), or to do it all in the accumulator.
    alone, _ = error_of(given, None, None, reference.c)
    parts = (Span(reference.c, reference.c) if alone is None else around(reference.c, alone)).hull(out)
    # A product with a factor is rounded to f32 before it is rounded to a half type: near a tie that makes a difference.
    basic = Arithmetic(DTYPES["f64" if out.name == "f64" else "f32"], contract.epilogue).basic
    if scale is not None:
        parts = times(parts, scale).hull(out)
    if problem.alpha != 1.0:
        alpha = problem.alpha if out.name == "f64" else as_f32(problem.alpha)
        parts = basic(times(parts, torch.tensor(alpha, dtype=torch.float64))).hull(out)
    if addend is not None:
        term = Span(addend, addend)
        if unrounded is not None:
            term = union(term, Span(unrounded, unrounded))
        term = (term if problem.beta == 1.0 else basic(term)).hull(out)
        if problem.shape.k == 0:
            # ATen scales the bias alone there, by a beta that it rounds to the tensor's dtype first.
            beta = float(round_to(torch.tensor(problem.beta, dtype=torch.float64), out))
            other = Span(x := addend * (beta / problem.beta), x).widen(x.abs() * 2.0**-51).hull(out)
            term = Span(torch.minimum(term.lo, other.lo), torch.maximum(term.hi, other.hi))
        parts = Span(parts.lo + term.lo, parts.hi + term.hi)
    merged = Span(torch.minimum(span.lo, parts.lo), torch.maximum(span.hi, parts.hi))
    if torch.equal(merged.lo, merged.hi):
        merged = Span(merged.lo, merged.lo)
    return Arithmetic(out, contract.epilogue).stored(merged, out), tier


def _sum_span(
    given: Bounding,
    addend: torch.Tensor | None,
    value: torch.Tensor,
) -> tuple[Span, Tier]:
    """``value``, the product with ``addend`` and scale, and what its sum may be off; the tier that says so."""
    error, tier = error_of(given, addend, scale_of(given.operands), value)
    return (Span(value, value) if error is None else around(value, error)), tier
