"""Why a result is wrong: the computation that would have given it.

A hypothesis is a sentence, and the values that the wrong elements would have if it were true.  It is reported only if
it reproduces them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from pytest_gemm.judging import coded, recompute
from pytest_gemm.judging.locate import COVER, EDGES, FEW, Wrong, bounding_box, inside, mostly
from pytest_gemm.judging.recompute import FEW_K, Cause, Hypotheses, Sample, toward_zero
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.problem.dtypes import DTYPES

# Stands for a NaN where right ones count.
_NAN: Final = 1e300
NOTHING: Final = Cause("", "")


def cause_of(wrong: Wrong, actual: Tensor, whole: bool) -> Cause:
    """What was computed instead; ``NOTHING`` if nothing reproduces the bad values."""
    return next((cause for cause in _causes(wrong, actual, whole) if cause.text), NOTHING)


def _causes(wrong: Wrong, actual: Tensor, whole: bool) -> Iterator[Cause]:
    """Causes from the most to the least certain, ``NOTHING`` among them."""
    # NaN among the operands reach some elements whatever was computed; the others tell what that was.
    has_nan = not wrong.operands.finite
    if whole and has_nan:
        yield _elsewhere(wrong)
    yield _special(wrong)
    yield _stale(wrong)
    finite = wrong.values.isfinite() & wrong.interval.value[wrong.bad].isfinite()
    comparable = int(finite.sum()) >= max(FEW, len(finite) / 2) if has_nan else mostly(finite)
    sample = Sample.of(wrong) if comparable else None

    def recomputed(*hypotheses: Callable[[Sample], Hypotheses]) -> Iterator[Cause]:
        return iter(()) if sample is None else sample.explained(*hypotheses)

    # What recomputes the very values comes first: zeros and transposes may be what is left of a missing product.
    zeros = bool((wrong.values == 0).all())
    if not zeros:
        own = (coded.of_codes, recompute.groups, recompute.parameters, recompute.steps, recompute.integer_sums)
        yield from recomputed(*own)
    if whole and not has_nan:
        yield _elsewhere(wrong)
    # Zeros fit much, above all behind a relu; where each element shows few k, they may be what is left without these.
    if zeros and (wrong.operands.distribution not in FEW_K or bool(wrong.bad.all())):
        yield _constant(wrong)
    yield from recomputed(recompute.ranges_of_k)
    yield _constant(wrong)
    yield from recomputed(recompute.inputs)
    if comparable:
        yield _precision(wrong, actual)
    yield from recomputed(recompute.narrow_sums, recompute.transposed_operands)
    if whole and wrong.operands.distribution == "tile-map":
        yield _misplaced(wrong)
    yield from recomputed(recompute.factors)
    yield _some_special(wrong)


# -- the result as a whole -------------------------------------------------------------------------------


def _special(wrong: Wrong) -> Cause:
    """NaN and infinities."""
    # Infinities of either sign add up to NaN too, here and there; memory is not read or written in such a way.
    lines = wrong.bad.reshape(-1, wrong.bad.shape[-1])
    is_grid = torch.equal(lines, lines.any(1, keepdim=True) & lines.any(0))
    name, text = "NaN spread", "NaN reached elements whose operands are finite, or memory was left unwritten"
    if wrong.operands.finite:
        name, text = "stray NaN", "NaN where a number belongs: memory never written, or a read outside of an operand"
    causes = {
        "nan": Cause(name if is_grid else "", text),
        "missing-nan": Cause("NaN swallowed", "a NaN was swallowed: an operand's NaN or Inf must reach the result"),
        "infinite": Cause("overflow", "an overflow: some partial sum or intermediate result left its type's range"),
    }
    return next((causes[code] for code, which in wrong.specials.items() if mostly(which)), NOTHING)


def _some_special(wrong: Wrong) -> Cause:
    """How many NaN and infinities there are among other bad elements."""
    kinds = ("unexpected NaN", "missing NaN", "unexpected infinities")
    counts = [int(which.sum()) for which in wrong.specials.values()]
    some = [f"{count} {kind}" for count, kind in zip(counts, kinds, strict=True) if count]
    return Cause("", f"among them {' and '.join(some)}") if some else NOTHING


def _stale(wrong: Wrong) -> Cause:
    """The answer of an earlier call."""
    ours = wrong.values
    few = len(ours) <= 3
    for name, other in wrong.others.items():
        if other.shape != wrong.x.shape or (few and wrong.bad.numel() > 3):
            continue
        theirs = other.detach().to(device="cpu", dtype=torch.float64)[wrong.bad]
        if mostly(theirs == ours) and (few or len(ours.unique()) > 1):  # a constant proves nothing
            return Cause("stale data", f"the bad elements are the answer for {name}: stale data")
        rest, lo, hi = ours - theirs, wrong.interval.lo[wrong.bad], wrong.interval.hi[wrong.bad]
        if not few and mostly(theirs != 0) and mostly(inside(rest, lo, hi)):
            return Cause("added to an earlier result", f"the answer for {name} was added to the bad elements")
    return NOTHING


def _elsewhere(wrong: Wrong) -> Cause:
    """Right values at the wrong place: transposed, another batch, shifted rows or columns, swapped tiles."""
    # A NaN at its place is as right as a number.
    x, lo, hi = (t.nan_to_num(_NAN, math.inf, -math.inf) for t in (wrong.x, wrong.interval.lo, wrong.interval.hi))
    lo = torch.where((lo == -math.inf) & (hi == math.inf), math.inf, lo)  # where everything is right nothing is known
    bad = wrong.bad
    m, n = x.shape[-2:]
    if len(wrong.values) < FEW or len(wrong.interval.expected.flatten()[: 1 << 16].unique()) < FEW:
        return NOTHING
    others = (x.reshape(*x.shape[:-2], n, m).mT, x.mT.reshape(x.shape))
    is_symmetric = m == n and torch.equal(lo, lo.mT)  # A @ A.T is its own transpose
    if min(m, n) > 1 and not is_symmetric and any(mostly(inside(other, lo, hi)) for other in others):
        return Cause("transposed", "the result is " + ("transposed" if m == n else "laid out as its own transpose"))
    if x.dim() == 3:
        batches = bad.flatten(1).any(1).nonzero().flatten().tolist()
        for batch in batches[:4]:
            good = inside(x[batch], lo, hi).flatten(1)
            fits = good.sum(1) >= COVER * good.shape[1]
            fits[batch] = False
            if bool(fits.any()):
                return Cause("wrong batch", f"batch {batch} holds the answer of batch {int(fits.nonzero()[0])}")
        x, bad, lo, hi = (t[batches[0]] for t in (x, bad, lo, hi))
    by_row, by_column = _moved(x, bad, lo, hi, "row"), _moved(x.mT, bad.mT, lo.mT, hi.mT, "column")
    return next((one for one in (by_row, by_column) if one.text), None) or _swapped(x, bad, lo, hi)


def _moved(x: Tensor, bad: Tensor, lo: Tensor, hi: Tensor, name: str) -> Cause:
    """Whole lines that are right for another line."""
    lines = bad.any(1).nonzero().flatten()
    size = len(x)
    if x.shape[1] < FEW or size < 2:
        return NOTHING
    chosen = lines[:: max(1, len(lines) // 4)][:4].tolist()
    found: list[tuple[int, int]] = []
    for line in chosen:
        matches = inside(x[line], lo, hi).to(torch.float32).mean(1)
        other = int(matches.argmax())
        # A line that is all one value fits anywhere.
        if len(x[line].unique()) < FEW or float(matches[other]) < COVER or other == line:
            return NOTHING
        found.append((line, other))
    line, other = found[0]
    steps = {(o - i + size // 2) % size - size // 2 for i, o in found}
    if len(found) > 1 and len(steps) == 1 and 2 * len(lines) > size:
        text = f"the {name}s are shifted: {name} {line} holds the answer of {name} {other} ({steps.pop():+d})"
        return Cause(f"shifted {name}s", text)
    subject = f"every bad {name}" if len(found) > 1 and len({o for _, o in found}) == 1 else f"{name} {line}"
    return Cause(f"wrong {name}", f"{subject} holds the answer of {name} {other}")


def _swapped(x: Tensor, bad: Tensor, lo: Tensor, hi: Tensor) -> Cause:
    """One tile that holds the answer of another tile of the same grid."""
    m, n = x.shape
    r0, _, c0, _ = bounding_box(bad, 0)
    for rows, columns in itertools.product(EDGES, EDGES):
        i, j = r0 // rows * rows, c0 // columns * columns
        if rows * columns < 64 or i + rows > m or j + columns > n or (rows == m and columns == n):
            continue
        part = x[i : i + rows, j : j + columns]
        if len(part.unique()) < FEW:
            continue
        # One element first: most tiles fall here.
        corners = slice(None, m - rows + 1, rows), slice(None, n - columns + 1, columns)
        for row, column in inside(part[0, 0], lo[corners], hi[corners]).nonzero().tolist():
            p, q = row * rows, column * columns
            there = slice(p, p + rows), slice(q, q + columns)
            if (p, q) != (i, j) and mostly(inside(part, lo[there], hi[there])):
                text = f"the {rows}x{columns} tile at ({i}, {j}) holds the answer of the tile at ({p}, {q})"
                return Cause("wrong tile", text)
    return NOTHING


def _constant(wrong: Wrong) -> Cause:
    values = wrong.values
    limit = wrong.problem.result_dtype.max_finite
    if len(values) > 3 and mostly((values.abs() == limit) & (wrong.expected.abs() > limit)):
        return Cause("saturated", f"an overflow became the largest number of {wrong.problem.result_dtype.name}")
    if len(values) <= 3 or not bool((values == values[0]).all()) or not bool(values[0].isfinite()):
        return NOTHING
    value = float(values[0])
    if value:
        return NOTHING if len(wrong.expected.unique()) < FEW else Cause("one value", f"every bad element is {value:g}")
    # Rows of one product each are 0 too where that product is missing, and small numbers where they are dropped.
    most = float(wrong.expected.abs().nan_to_num(0.0).amax())
    is_clear = wrong.operands.distribution != "one-hot" and most >= 2.0**-14
    return Cause("never computed" if is_clear else "", "every bad element is 0: never computed?")


def _precision(wrong: Wrong, actual: Tensor) -> Cause:
    """Traces of a narrower type or of another rounding in the result as a whole."""
    interval, target = wrong.interval, wrong.problem.result_dtype
    finite = wrong.x.isfinite() & interval.value.isfinite()
    x, value, expected = wrong.x[finite], interval.value[finite], interval.expected[finite]
    off = x != expected
    if int(off.sum()) < 8 or not target.is_float:
        return NOTHING
    for name in ("f16", "bf16", "f32"):
        twice, thrice = (round_to(round_to(start, DTYPES[name]), target) for start in (value, expected))
        if int((twice != expected).sum()) >= 8 and mostly(((x == twice) | (x == thrice))[off]):
            return Cause(f"rounded through {name}", f"the result is rounded twice: a detour through {name}")
    cut = toward_zero(value, target)
    # Each element is either the truncated reference or, where errors of the sum blur it, next to it.
    if mostly(x == cut) and int((expected == cut).sum()) < 0.9 * len(x):
        text = f"the result is rounded toward zero: a truncating store of {actual.dtype}".replace("torch.", "")
        return Cause("truncating store", text)
    if interval.tier == "exact" and mostly(((x - value).abs() < ulp_of(value, target))[off]):
        return Cause("wrong rounding", "the bad elements are the farther one of the two numbers around the exact value")
    return NOTHING


def _misplaced(wrong: Wrong) -> Cause:
    """With the distribution whose results are all different: where the values belong."""
    values, places = wrong.interval.expected.flatten().sort()
    found = torch.searchsorted(values, wrong.values).clamp(max=len(values) - 1)
    if len(found) < FEW or not torch.equal(values[found], wrong.values):
        return NOTHING
    here, there = wrong.bad.nonzero()[0], torch.stack(torch.unravel_index(places[found[0]], wrong.x.shape))
    text = f"the value at {tuple(here.tolist())} is that of {tuple(there.tolist())}"
    return Cause("misplaced elements", text)
