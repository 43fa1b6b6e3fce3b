"""Why a result is wrong: the computation that would have given it.

A hypothesis is a sentence, and the values that the wrong elements would have if it were true.  It is reported only if
it reproduces them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pytest_gemm.judging import coded
from pytest_gemm.judging.locate import COVER, EDGES, FEW, Wrong, bounding_box, inside, mostly
from pytest_gemm.numerics.epilogue import evaluate
from pytest_gemm.numerics.reference import as_added, as_multiplied, widened
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.operands.integers import decode_source, digit_plan, tile_map_period
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.steps import Step, StepKind

# Distributions of which each element of the result shows a few k only.
_FEW_K: Final = frozenset({"k-cover", "one-hot", "tile-map"})
# Stands for a NaN where right ones count.
_NAN: Final = 1e300
# Elements on which hypotheses about values are tried.
_SAMPLE: Final = 64


class Cause(NamedTuple):
    """What was computed instead.

    Attributes:
        name: short and stable, one of ``causes.toml``; "" for what has none.
        text: one sentence; "" where nothing is known.
    """

    name: str
    text: str


# Names and sentences, each with the values (S,) that a sample's elements would have.
Hypotheses = Iterator[tuple[str, str, Tensor]]
NOTHING: Final = Cause("", "")


def cause_of(wrong: Wrong, actual: Tensor, whole: bool) -> Cause:
    """What was computed instead; ``NOTHING`` if nothing reproduces the bad values."""
    return next((cause for cause in _causes(wrong, actual, whole) if cause.text), NOTHING)


def _causes(wrong: Wrong, actual: Tensor, whole: bool) -> Iterator[Cause]:
    """Causes from the most to the least certain, ``NOTHING`` among them."""
    if whole and not wrong.operands.finite:
        yield _elsewhere(wrong)
    yield _special(wrong)
    yield _stale(wrong)
    finite = wrong.values.isfinite() & wrong.interval.value[wrong.bad].isfinite()
    # NaN among the operands reach some elements whatever was computed; the others tell what that was.
    comparable = mostly(finite) if wrong.operands.finite else int(finite.sum()) >= max(FEW, len(finite) / 2)
    sample = _Sample.of(wrong) if comparable else None
    # What recomputes the very values comes first: zeros and transposes may be what is left of a missing product.
    zeros = bool((wrong.values == 0).all())
    if sample is not None and not zeros:
        for hypotheses in (coded.of_codes, _groups, _parameters, _steps):
            yield from sample.explained(hypotheses(sample))
    if whole:
        yield _elsewhere(wrong)
    # Zeros fit much, above all behind a relu; where each element shows few k, they may be what is left without these.
    if zeros and (wrong.operands.distribution not in _FEW_K or bool(wrong.bad.all())):
        yield _constant(wrong)
    if sample is not None:
        yield from sample.explained(_ranges_of_k(sample))
    yield _constant(wrong)
    if not comparable:
        yield _some_special(wrong)
        return
    if sample is not None:
        yield from sample.explained(_inputs(sample))
    yield _precision(wrong, actual)
    if sample is not None:
        yield from sample.explained(_narrow_sums(sample))
        if whole:
            yield _decoded(sample)
        yield from sample.explained(_factors(sample))
    yield _some_special(wrong)


# -- the result as a whole -------------------------------------------------------------------------------


def _special(wrong: Wrong) -> Cause:
    """NaN and infinities."""
    stray = Cause(
        "stray NaN", "NaN where a number belongs: memory that was never written, or a read outside of an operand"
    )
    spread = Cause("NaN spread", "NaN reached elements whose operands are finite, or memory was left unwritten")
    causes = {
        "nan": stray if wrong.operands.finite else spread,
        "missing-nan": Cause("NaN swallowed", "a NaN was swallowed: an operand's NaN or Inf must reach the result"),
        "infinite": Cause("overflow", "an overflow: some partial sum or intermediate result left its type's range"),
    }
    for code, which in wrong.specials.items():
        if mostly(which):
            # Infinities of either sign add up to NaN too, here and there; memory is not read or written in such a way.
            lines = wrong.bad.reshape(-1, wrong.bad.shape[-1])
            is_grid = torch.equal(lines, lines.any(1, keepdim=True) & lines.any(0))
            return causes[code] if code != "nan" or is_grid else Cause("", causes[code].text)
    return NOTHING


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
    bad = wrong.bad
    m, n = x.shape[-2:]
    if len(wrong.values) < FEW or len(wrong.interval.expected.flatten()[: 1 << 16].unique()) < FEW:
        return NOTHING
    if min(m, n) > 1 and mostly(inside(x.reshape(*x.shape[:-2], n, m).mT, lo, hi)):
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
        for p in range(0, m - rows + 1, rows):
            for q in range(0, n - columns + 1, columns):
                # One element first: most tiles fall here.
                if (p, q) == (i, j) or not bool(lo[p, q] <= part[0, 0] <= hi[p, q]):
                    continue
                there = slice(p, p + rows), slice(q, q + columns)
                if mostly(inside(part, lo[there], hi[there])):
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
    good = wrong.x[~wrong.bad & (wrong.x != 0)].abs()
    most = float(wrong.expected.abs().nan_to_num(0.0).amax())
    if len(good) >= FEW and most < float(good.amin()):
        return Cause("small results dropped", f"results up to {most:.3g} became 0, and none that is larger")
    # Rows of one product each are 0 too where that product is missing, and small numbers where they are dropped.
    name = "" if wrong.operands.distribution == "one-hot" or most < 2.0**-14 else "never computed"
    return Cause(name, "every bad element is 0: never computed?")


def _precision(wrong: Wrong, actual: Tensor) -> Cause:
    """Traces of a narrower type or of another rounding in the result as a whole."""
    interval, target = wrong.interval, wrong.problem.result_dtype
    finite = wrong.x.isfinite() & interval.value.isfinite()
    x, value, expected = wrong.x[finite], interval.value[finite], interval.expected[finite]
    width = (interval.hi - interval.lo)[finite]
    if len(x) < 8 or not target.is_float:
        return NOTHING
    for name in ("bf16", "f16", "f32"):
        dtype = DTYPES[name]
        # Of the correct values few fit the narrower type; here all do.
        narrower = dtype.precision < target.precision and torch.equal(round_to(x, dtype), x)
        # What is rounded on its way is near the right value: small integers of another computation fit any type.
        near = narrower and mostly((x - value).abs() <= width + ulp_of(torch.maximum(x.abs(), value.abs()), dtype))
        if near and int((round_to(expected, dtype) != expected).sum()) > len(x) // 4:
            text = f"every element of the result is representable in {name}: a detour through {name}"
            return Cause(f"rounded through {name}", text)
    off = x != expected
    if int(off.sum()) < 8:
        return NOTHING
    for name in ("f16", "bf16", "f32"):
        twice = round_to(round_to(value, DTYPES[name]), target)
        if int((twice != expected).sum()) >= 8 and mostly((x == twice)[off]):
            return Cause(f"rounded through {name}", f"the result is rounded twice, through {name}")
    cut = _toward_zero(value, target)
    # Each element is either the truncated reference or, where errors of the sum blur it, next to it.
    if mostly(x == cut) and int((expected == cut).sum()) < 0.9 * len(x):
        text = f"the result is rounded toward zero: a truncating store of {actual.dtype}".replace("torch.", "")
        return Cause("truncating store", text)
    if interval.tier == "exact" and mostly(((x - value).abs() < ulp_of(value, target))[off]):
        return Cause("wrong rounding", "the bad elements are the farther one of the two numbers around the exact value")
    return NOTHING


def _toward_zero(x: Tensor, dtype: DType) -> Tensor:
    step = ulp_of(x, dtype)
    return torch.trunc(x / step) * step


# -- a sample of the wrong elements ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Some bad elements with everything that went into them, to recompute them in other ways.

    Attributes:
        wrong: the whole result.
        at: where the elements are, one index tensor for each dimension.
        x, value: actual and unrounded expected, (S,).
        a, b: rows of A and columns of B, (S, K), float64; b is not scaled.
        alpha, beta: of the problem.
        bias, scale: as the op applies them, (S,), or ``None``.
        steps: the passes of the epilogue, each with its residual (S,).
        tolerance: how near a hypothesis must come: the accepted interval, a few ulp, and the rounding errors of
            a sum of K such products (an interval after a relu has forgotten them).
    """

    wrong: Wrong
    at: tuple[Tensor, ...]
    x: Tensor
    value: Tensor
    a: Tensor
    b: Tensor
    alpha: float
    beta: float
    bias: Tensor | None
    scale: Tensor | None
    steps: tuple[tuple[Step, Tensor | None], ...]
    tolerance: Tensor

    @classmethod
    def of(cls, wrong: Wrong, *, good: bool = False) -> _Sample | None:
        """Up to 64 bad (or good) finite elements, spread over all of them; ``None`` if fewer than one remains."""
        problem, operands, interval = wrong.problem, wrong.operands, wrong.interval
        usable = (
            (wrong.bad ^ good) & wrong.x.isfinite() & interval.value.isfinite() & (interval.hi - interval.lo).isfinite()
        )
        index = usable.nonzero()
        one_of_several = problem.has("steps.first") or problem.has("steps.last")
        if not len(index) or problem.op.ragged in {"n", "k"} or problem.step("gated") or one_of_several:
            return None  # no single product went into an element, or another epilogue into each
        index = index[torch.linspace(0, len(index) - 1, min(_SAMPLE, len(index))).round().long()]
        at = tuple(index.unbind(1))
        a, b = _lines(*as_multiplied(operands.problem, operands), at, operands.groups)

        def chosen(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().cpu().expand(problem.result_shape)[at].to(torch.float64)

        added, scale = as_added(operands.problem, operands), chosen(operands.scale)
        left = iter(operands.residuals)
        residual = {StepKind.BIAS: lambda: chosen(added), StepKind.BINARY: lambda: chosen(next(left))}
        steps = tuple((step, residual.get(step.kind, lambda: None)()) for step in problem.passes)
        x, value = wrong.x[at], interval.value[at]
        tolerance = (interval.hi[at] - interval.lo[at]) + 2 * ulp_of(
            torch.maximum(x.abs(), value.abs()), problem.result_dtype
        )
        if operands.quantum == 0.0:
            u = DTYPES["f64" if problem.dtypes.out.name == "f64" else "f32"].unit_roundoff
            gauge = (a * b).abs().sum(1) * abs(problem.alpha) * (1.0 if scale is None else scale.abs()) + x.abs()
            tolerance += gauge * (problem.terms * u)
        bias = chosen(added) if problem.op.addend or problem.op.own_bias else None
        return cls(wrong, at, x, value, a, b, problem.alpha, problem.beta, bias, scale, steps, tolerance)

    def part(self, which: slice) -> _Sample:
        """The same for some of the elements."""

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            return value[which] if isinstance(value, Tensor) else value

        return dataclasses.replace(self, **{f.name: cut(getattr(self, f.name)) for f in dataclasses.fields(self)})

    @functools.cached_property
    def sums(self) -> Tensor:
        """The products' sums, (S,)."""
        return (self.a * self.b).sum(1)

    @functools.cached_property
    def good(self) -> _Sample | None:
        """A sample of the right elements; ``None`` without one."""
        return _Sample.of(self.wrong, good=True)

    @functools.cached_property
    def running_sums(self) -> Tensor:
        """The sums of the first 0 .. K products, (S, K + 1)."""
        return torch.cat([torch.zeros(len(self.x), 1, dtype=torch.float64), (self.a * self.b).cumsum(1)], 1)

    def spares_the_good(self, first: int, last: int, sign: float) -> bool:
        """Whether right elements stay right without some k, on data of which each element shows a few k only."""
        if self.wrong.operands.distribution not in _FEW_K:
            return True  # where all k show, only some tiles may lack products
        if (good := self.good) is None:
            return True
        part = good.running_sums[:, last] - good.running_sums[:, first]
        return mostly((good.result(good.sums + sign * part) - good.x).abs() <= good.tolerance)

    def result(self, sums: Tensor | None = None, **changes: Any) -> Tensor:
        """What the elements become with other values of some attributes, or with other ``sums`` (..., S)."""
        s = dataclasses.replace(self, **changes)
        y = (s.sums if sums is None else sums) * s.alpha
        if s.scale is not None:
            y = y * s.scale
        if s.bias is not None and s.beta != 0.0:
            y = y + s.bias * s.beta
        return evaluate(s.wrong.problem, y, s.steps)

    def explained(self, hypotheses: Hypotheses) -> Iterator[Cause]:
        """The hypotheses that reproduce the bad values."""
        return (Cause(name, text) for name, text, values in hypotheses if bool(self.fits(values[None])[0]))

    def fits(self, hypotheses: Tensor) -> Tensor:
        """Whether values (H, S) computed in other ways are the bad ones, (H,).

        They must come within the tolerance, and explain three quarters of each error: a hypothesis that
        changes nothing is within the tolerance of a small error too.
        """
        rest = (self.x - hypotheses).abs()
        fits = (rest <= self.tolerance) & (rest <= 0.25 * (self.x - self.value).abs())
        return fits.sum(1) >= COVER * fits.shape[1]


def _lines(a: Tensor, b: Tensor, at: tuple[Tensor, ...], groups: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """The rows of A and the columns of B that meet in the elements ``at``, each (S, K), float64."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if groups:
        rows, columns = a[at[0]], b.mT[_group_of(at[0], groups), at[1]]
    elif b.dim() == 3:  # of linears there is one A for all
        rows, columns = a[at[1] if a.dim() == 2 else at[:-1]], b.mT[at[0], at[2]]
    else:
        rows, columns = a[at[:-1]], b.mT[at[-1]]
    return rows.to(torch.float64), columns.to(torch.float64)


def _group_of(rows: Tensor, groups: tuple[tuple[int, int], ...]) -> Tensor:
    """The group that each row belongs to: the first whose end lies behind it."""
    return torch.searchsorted(torch.tensor([last for _, last in groups]), rows.contiguous(), right=True)


# -- hypotheses ------------------------------------------------------------------------------------------


def _groups(s: _Sample) -> Hypotheses:
    """Rows of a grouped product, or of a batch, that met the B of another one."""
    groups, b = s.wrong.operands.groups, s.wrong.operands.b.detach().cpu().mT
    if len(s.x) < FEW:
        return
    if not groups and b.dim() == 3 and len(s.at) == 3 and len(b) > 1:
        others = {"batch 0": 0 * s.at[0], "the batch before": s.at[0] - 1, "the batch after": s.at[0] + 1}
        for name, batch in others.items():
            text = f"these batches were multiplied by the B of {name}"
            yield "wrong batch", text, s.result(b=b[batch % len(b), s.at[2]].to(torch.float64))
    if len(groups) < 2:
        return
    row, column = s.at
    mine = _group_of(row, groups)
    others = {
        "the group after": mine + 1,
        "the group before": mine - 1,
        **{f"group {g}": torch.full_like(mine, g) for g in range(min(len(groups), 8))},
    }
    for name, other in others.items():
        columns = b[other.clamp(0, len(groups) - 1), column].to(torch.float64)
        yield "wrong group", f"these rows were multiplied by the B of {name}", s.result(b=columns)


def _parameters(s: _Sample) -> Hypotheses:
    """The op's own parameters, each left out, doubled or exchanged."""
    if len(s.x) < FEW:
        return
    alpha, beta = s.alpha, s.beta
    if s.bias is not None:
        if beta == 0.0:
            yield "beta ignored", "beta = 0 was ignored: the bias was added", s.result(beta=1.0)
        else:
            yield "bias missing", "the bias is missing", s.result(beta=0.0)
            yield "bias added twice", "the bias was added twice", s.result(beta=2 * beta)
            yield "bias subtracted", "the bias was subtracted", s.result(beta=-beta)
            yield "beta ignored", "beta was not applied", s.result(beta=1.0)
        yield "alpha on the bias", "alpha was applied to the bias as well", s.result(beta=alpha * beta)
        if alpha != beta:
            yield "alpha and beta exchanged", "alpha and beta were exchanged", s.result(alpha=beta, beta=alpha)
        yield from _of_other_columns(s, "bias", as_added(s.wrong.operands.problem, s.wrong.operands))
    if alpha != 0.0:
        yield "alpha ignored", "alpha was not applied", s.result(alpha=1.0)
        yield "alpha applied twice", "alpha was applied twice", s.result(alpha=alpha * alpha)
    if s.scale is not None:
        yield "scale ignored", "the scale was not applied", s.result(scale=None)
        yield "scale applied twice", "the scale was applied twice", s.result(scale=s.scale * s.scale)
        yield "reciprocal scale", "the scale's reciprocal was applied", s.result(scale=1.0 / s.scale)
        yield from _exchanged_scales(s)
        yield from _of_other_columns(s, "scale", s.wrong.operands.scale)


def _of_other_columns(s: _Sample, field: str, wide: Tensor | None) -> Hypotheses:
    """The bias or the scale of a neighbouring column; the scale of the first one, or of the one as far from the end."""
    n, rows = s.wrong.problem.shape.n, s.at[-2]
    if wide is not None and wide.dim() and wide.shape[-1] == n > int(rows.max()) and wide.numel() == n > 1:
        along = wide.flatten()[rows].to(torch.float64)
        name = "bias along rows" if field == "bias" else "scales transposed"
        yield name, f"row i has the {field} of column i", s.result(**{field: along})
    if wide is None or not wide.dim() or wide.shape[-1] != n or n < 3:
        return
    are, name = {"bias": ("the bias is", "shifted bias"), "scale": ("the scales are", "shifted scales")}[field]
    shifted = f"{are} shifted: column j has that of column j"
    others = [(name, f"{shifted} + 1", wide.roll(-1, -1)), (name, f"{shifted} - 1", wide.roll(1, -1))]
    others.append((f"{field} of column 0", f"every column has the {field} of column 0", wide[..., :1]))
    if field == "scale":
        others.append(("scales reversed", "the scales of the columns are in reverse order", wide.flip(-1)))
    for name, sentence, other in others:
        yield name, sentence, s.result(**{field: other.expand(s.wrong.problem.result_shape)[s.at]})


def _exchanged_scales(s: _Sample) -> Hypotheses:
    """The scales of A and of B each on its own, those of another group, and those of rows along the other dimension."""
    operands, groups = s.wrong.operands, s.wrong.problem.shape.batch
    if operands.scale_a is None or operands.scale_b is None or s.wrong.problem.micro_block:
        return

    def with_other(field: str, scales: Tensor) -> Tensor:
        changed: dict[str, Any] = {field: scales}
        scale = dataclasses.replace(operands, **changed).scale
        assert scale is not None
        return s.result(scale=scale.expand(s.wrong.problem.result_shape)[s.at])

    a, b = widened(operands.scale_a), widened(operands.scale_b)
    for name, field, own in (("A", "scale_a", a), ("B", "scale_b", b)):
        yield "scale ignored", f"the scale of {name} was not applied", with_other(field, torch.ones_like(own))
        yield "reciprocal scale", f"the reciprocal of the scale of {name} was applied", with_other(field, 1.0 / own)
        yield "scale applied twice", f"the scale of {name} was applied twice", with_other(field, own * own)
        first = own.flatten()[0].expand_as(own)
        yield "scale of row 0", f"all lines of {name} have the scale of the first one", with_other(field, first)
        if groups is not None and own.dim() == 2:  # otherwise of rows that are divided into groups themselves
            for shift, which in ((-1, "after"), (1, "before")):
                text = f"the scales of {name} were those of the group {which}"
                yield "wrong group", text, with_other(field, own.roll(shift, 0))
    if groups is not None or min(a.numel(), b.numel()) <= 1:
        return
    row, column = s.at
    if int(column.max()) < a.numel() and int(row.max()) < b.numel():
        a, b = a.flatten() * s.wrong.problem.result_factor(operands.device), b.flatten()
        yield (
            "scales exchanged",
            "the scales of A's rows and B's columns are exchanged",
            s.result(scale=a[column] * b[row]),
        )
        yield (
            "scales transposed",
            "the scales of A run along the columns of the result",
            s.result(scale=a[column] * b[column]),
        )
        yield "scales transposed", "the scales of B run along the rows of the result", s.result(scale=a[row] * b[row])


def _steps(s: _Sample) -> Hypotheses:
    """The steps of the epilogue, each left out or before the one that it follows."""
    if len(s.x) < FEW:
        return
    for i, one in enumerate(s.steps):
        step = one[0]
        if step.kind is StepKind.CAST:
            continue
        kind = "bias" if step.kind is StepKind.BIAS else step.name
        what = "the bias" if kind == "bias" else f"step {step}"
        yield f"{kind} missing", f"{what} is missing", s.result(steps=s.steps[:i] + s.steps[i + 1 :])
        if i:
            before = s.steps[i - 1]
            order = (*s.steps[: i - 1], one, before, *s.steps[i + 1 :])
            yield "steps out of order", f"step {step} came before {before[0]}", s.result(steps=order)
        elif s.bias is not None and s.beta and step.kind is StepKind.UNARY:
            early = s.result(bias=None, steps=(one,)) + s.bias * s.beta
            later = s.result(early, alpha=1.0, scale=None, bias=None, steps=s.steps[1:])
            yield "steps out of order", f"step {step} came before the bias", later


def _ranges_of_k(s: _Sample) -> Hypotheses:
    """Products of a contiguous range of k left out or added twice: the smallest such range."""
    k, exact = s.wrong.problem.shape.k, s.wrong.operands.quantum > 0
    if k < 1 or len(s.x) < FEW:
        return
    sums, total = s.running_sums, s.sums
    if exact and int((s.a * s.b != 0).sum(1).amax()) <= 2:
        yield from _lone_products(s)
        return
    # Among some 10 K ranges one fits a few elements by chance, sooner where all products are small integers.
    if len(s.x) < (4 * FEW if exact else FEW):
        return
    few = slice(0, 8)  # most ranges fail on a few elements already
    narrow = s.part(few)
    for first, last in _ranges(k):
        part = sums[few][:, last] - sums[few][:, first]
        for twice, sign in ((False, -1.0), (True, 1.0)):
            for i in narrow.fits(narrow.result((total[few, None] + sign * part).T)).nonzero().flatten().tolist():
                low, high = int(first[i]), int(last[i])
                # Everything twice is a factor, and without any product a plain result is 0.
                everything = twice or bool((s.x == 0).all()) or s.wrong.operands.distribution in _FEW_K
                if (low, high) != (0, k) or not everything:
                    changed = s.result(total + sign * (sums[:, high] - sums[:, low]))
                    name, text = _of_k(low, high, k, twice=twice)
                    # In k-cover columns of zeros lack whole blocks, and a k twice may be another k that is missing.
                    if s.wrong.operands.distribution == "k-cover":
                        digits, overlap = digit_plan(s.wrong.operands.problem)
                        name = "" if overlap > 1 and high - low <= digits else name
                        text = "" if name == "block of K" and bool((s.x == 0).all()) else text
                    if s.spares_the_good(low, high, sign) and text:
                        yield name, text, changed


def _ranges(k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ranges of k to try, [first, last): the ones at an end, of all lengths; then blocks and slices by their size."""
    every = torch.arange(1, k + 1)
    yield k - every, every * 0 + k  # tails, the shortest first
    yield every * 0, every  # heads
    if k > 2:
        yield k - 1 - every[:-1], every[:-1] * 0 + k - 1  # tails without the last k
    sizes = {1 << power for power in range(k.bit_length())} | {math.ceil(k / n) for n in range(2, 17)}
    for size in sorted(sizes):
        first = torch.arange(0, k, size)
        yield first, (first + size).clamp_(max=k)
    for n in range(2, 17):  # slices whose lengths differ by one
        edges = torch.tensor([k // n * i + min(i, k % n) for i in range(n + 1)])
        yield edges[:-1], edges[1:]


def _lone_products(s: _Sample) -> Hypotheses:
    """Elements of one or two products that are not zero: which are missing, as far as these few k can tell.

    A row with a single 1 tells of its k alone; all other rows together bound the range.
    """
    k, wrong, products = s.wrong.problem.shape.k, s.wrong, s.a * s.b
    rows = wrong.bad.reshape(-1, *wrong.bad.shape[-2:]).any(0).any(1).nonzero().flatten()
    if int(rows[-1]) == wrong.bad.shape[-2] - 1 and len(rows) < wrong.bad.shape[-2]:
        return  # the last rows of the result may be what is missing
    for is_last in (True, False):
        at = ((products.flip(1) if is_last else products) != 0).to(torch.int8).argmax(1)
        at = k - 1 - at if is_last else at
        gone = s.result(s.sums - products.gather(1, at[:, None])[:, 0])
        low, high = int(at.min()), int(at.max())
        if not bool(s.fits(gone[None])[0]) or not s.spares_the_good(low, high + 1, -1.0):
            continue
        seen = (wrong.operands.a.detach().cpu().to(torch.float64).reshape(-1, k) != 0).any(0).nonzero().flatten()
        below, above = seen[seen < low], seen[seen > high]
        fewest, most = int(below.max()) + 1 if len(below) else 0, int(above.min()) if len(above) else k
        span = f"k = {low}" if low == high else f"k in [{low}, {high}]"
        text = f"the products with {span} of K = {k} are missing, at most those of [{fewest}, {most})"
        slices = (edge for n in range(2, 9) for i in range(n) for edge in _slices(k, n, i))
        sliced = any(
            fewest <= first <= low and high < last <= most and 2 * (high - low) >= last - first
            for first, last in slices
        )
        # A short range at the end is a tail, though small slices may end there as well.
        sliced = sliced and not (most >= k - 1 and high - low < k / 5)
        kind = "slice of K" if sliced else "K tail" if most == k else "K head" if fewest == 0 else ""
        yield kind, text, gone


def _of_k(first: int, last: int, k: int, *, twice: bool) -> tuple[str, str]:
    """Name and sentence of a range of k whose products are missing, or added twice."""
    size, verb = last - first, "counted twice" if twice else "missing"
    if size == k:
        return "never computed", f"all {k} products are {verb}"
    slices = (n for n in range(2, 17) for i in range(n) if (first, last) in _slices(k, n, i))
    n, i = next(((n, first * n // (k - 1) if k > 1 else 0) for n in slices), (0, 0))
    which = f"k = {first}" if size == 1 else f"k in [{first}, {last})"
    # What is left of K after whole blocks is a tail, though it may be the last of several slices too.
    is_rest = any(size == k % (1 << power) for power in range(1, 9))
    if last >= k - 1 and size < k / 2 and (is_rest or not n or n > 8 or size <= 16):
        kind, note = "K tail", ": the K-tail" if last == k else ": the K-tail without the last k"
    elif n and size > 1:
        kind, note = "slice of K", f": slice {i + 1} of {n} of K"
    else:
        kind, note = (
            ("K head", "") if first == 0 and size < k / 2 else ("K tail", "") if last == k else ("block of K", "")
        )
    return kind + (" twice" if twice else ""), f"the products with {which} of K = {k} are {verb}{note}"


def _slices(k: int, n: int, i: int) -> set[tuple[int, int]]:
    """Slice i of n of K: of lengths that differ by one, or of one length with a shorter last slice."""
    size = math.ceil(k / n)
    even = k // n * i + min(i, k % n)
    return {(even, even + k // n + (i < k % n)), (size * i, min(size * (i + 1), k))}


def _inputs(s: _Sample) -> Hypotheses:
    """Inputs that lost bits before they were multiplied, or that did not lose those that they should have."""
    problem, operands = s.wrong.problem, s.wrong.operands
    precision = max(problem.dtypes.a.precision, problem.dtypes.b.precision)
    if problem.autocast:
        precision = problem.input_dtype.precision
        a, b = _lines(operands.a, operands.b, s.at, operands.groups)
        text = f"A and B were not converted to {problem.input_dtype.name} before the product"
        yield "inputs not converted", text, s.result(a=a, b=b)
    if len(s.x) < FEW:
        return
    yield from _integers(s)
    for limit in (2.0**-126, 2.0**-14, 2.0**-6, 1e-6):
        kept = (torch.where(x.abs() < limit, 0.0, x) for x in (s.a, s.b))
        text = f"elements of A and B below {limit:.3g} counted as 0"
        yield "small inputs dropped", text, s.result(**dict(zip("ab", kept, strict=True)))
    eleven = [s.result(a=round_to(s.a, dtype), b=round_to(s.b, dtype)) for dtype in (TF32, DTYPES["f16"])]
    if precision > TF32.precision and bool(s.fits(torch.stack(eleven)).all()):
        yield "TF32 or f16 inputs", "A and B were rounded to 11 bits before the product, as in TF32 and f16", eleven[0]
    for dtype, name in ((DTYPES["f32"], "f32"), (TF32, "TF32"), (DTYPES["f16"], "f16"), (DTYPES["bf16"], "bf16")):
        for verb, narrow in (("rounded", round_to), ("truncated", _toward_zero)):
            if dtype.precision < precision and (verb, name) != ("truncated", "bf16"):
                sentence = f"A and B were {verb} to {name} before the product"
                yield f"{name} inputs", sentence, s.result(a=narrow(s.a, dtype), b=narrow(s.b, dtype))


def _integers(s: _Sample) -> Hypotheses:
    """Operands of 8 bits that were read as of the other sign, clipped, or centred elsewhere."""
    dtypes = s.wrong.problem.dtypes
    for field, dtype, own in (("a", dtypes.a, s.a), ("b", dtypes.b, s.b)):
        if dtype.name in {"i8", "u8"} and bool((own == own.round()).all()) and float(own.abs().amax()) <= 255:
            signs = [("unsigned", torch.where(own < 0, own + 256, own)), ("signed", own - 256 * (own > 127))]
            for name, other in signs:
                text = f"{field.upper()} was read as {name}"
                yield f"read as {name}", text, s.result(**{field: other})
            for step in (1.0, -1.0):
                text = f"the zero point of {field.upper()} is off by one"
                yield "zero point off by one", text, s.result(**{field: own + step})
    if dtypes.a.name == dtypes.b.name == "i8":
        clipped = s.result(a=s.a.clamp(min=-127), b=s.b.clamp(min=-127))
        yield "-128 clipped", "-128 counted as -127", clipped


def _narrow_sums(s: _Sample) -> Hypotheses:
    """Products, or partial sums of equal parts of K, that were rounded to a half type before they were added."""
    products, k = s.a * s.b, s.wrong.problem.shape.k
    if len(s.x) < FEW:
        return
    if s.wrong.operands.quantum and int((products != 0).sum(1).amax()) <= 2:
        return
    for name in ("f16", "bf16"):
        dtype = DTYPES[name]
        yield f"{name} products", f"each product was rounded to {name}", s.result(round_to(products, dtype).sum(1))
        for count in {size for size in (16, 32, 64) if size < k} | {math.ceil(k / n) for n in (2, 4, 8) if n < k}:
            parts = [round_to(part.sum(1), dtype) for part in products.split(count, 1)]
            text = f"partial sums of {count} products were rounded to {name}"
            yield f"{name} sums", text, s.result(torch.stack(parts).sum(0))
            if count in {16, 32}:
                held = torch.zeros(len(s.x), dtype=torch.float64)
                for part in products.split(count, 1):
                    held = round_to(held + part.sum(1), dtype)
                yield f"{name} sums", f"the sum was held in {name}", s.result(held)


def _factors(s: _Sample) -> Hypotheses:
    """All bad elements off by one factor, or by one summand."""
    usable = s.value.abs() > 4 * s.tolerance
    if int(usable.sum()) < 4 * FEW or len(s.value[usable].unique()) < FEW:
        return  # anything can be made to fit a few numbers
    factor = float((s.x[usable] / s.value[usable]).median())
    if factor != 0.0:
        times = f"{factor:.6g}" if abs(factor - 1.0) > 1e-4 else f"1 {'+-'[factor < 1.0]} {abs(factor - 1.0):.2g}"
        yield "constant factor", f"the bad elements are {times} times what is expected", s.value * factor
    offset = float((s.x - s.value).median())
    yield (
        "constant offset",
        f"the bad elements are too {'large' if offset > 0 else 'small'} by {abs(offset):.6g}",
        s.value + offset,
    )


def _decoded(s: _Sample) -> Cause:
    """With the distribution that encodes positions in its values: which element."""
    operands, problem = s.wrong.operands, s.wrong.problem
    if problem.passes or s.scale is not None:
        return NOTHING
    filled = operands.problem  # with more steps, where the result is an intermediate value: they decide the digits
    if operands.distribution == "tile-map" and s.bias is None and problem.alpha == 1.0:
        sources, period = [decode_source(filled, float(x)) for x in s.x], tile_map_period(filled)
        places = [(int(i) % period[0], int(j) % period[1]) for i, j in zip(*s.at[-2:], strict=True)]
        pairs = [(here, there) for here, there in zip(places, sources, strict=True) if there not in {None, here}]
        if len(pairs) == len(places):
            whole = period == (problem.shape.m, problem.shape.n)
            text = f"the value at {pairs[0][0]} is that of {pairs[0][1]}" + ("" if whole else f" modulo {period}")
            return Cause("misplaced elements" if len(s.x) >= FEW else "", text)
    return NOTHING
