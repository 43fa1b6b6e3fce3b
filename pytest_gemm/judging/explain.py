"""Why a result is wrong: the computation that would have given it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Final

import torch

from pytest_gemm.judging.locate import COVER, EDGES, FEW, Wrong, bounding_box
from pytest_gemm.numerics.epilogue import evaluate
from pytest_gemm.numerics.reference import as_added, as_multiplied
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.operands.decoders import decode_k, decode_source, tile_map_period
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.steps import StepKind

# Elements on which hypotheses about values are tried.
_SAMPLE: Final = 64


# -- what: hypotheses, printed only if they reproduce the bad values -------------------------------------


def cause_of(wrong: Wrong, actual: torch.Tensor, whole: bool) -> str:
    """One sentence on what was computed instead; "" if nothing reproduces the bad values."""
    for look in (_nan_cause, _stale, _elsewhere) if whole else (_nan_cause, _stale):
        text = look(wrong)
        if text:
            return text
    sample = _Sample.of(wrong) if _comparable(wrong) else None
    text = (_coded_cause(sample) if sample is not None and whole else "") or _constant(wrong)
    if text:
        return text
    if not _comparable(wrong):
        return ""
    if sample is not None:
        for probe in (_group_cause, _arithmetic_cause, _k_cause, _input_cause):
            text = probe(sample)
            if text:
                return text
    return _precision_cause(wrong, actual) or (_factor_cause(sample) if sample is not None else "")


def _comparable(wrong: Wrong) -> bool:
    """Whether most of the bad values are finite numbers where finite ones are expected."""
    usable = wrong.x[wrong.bad].isfinite() & wrong.interval.value[wrong.bad].isfinite()
    return int(usable.sum()) >= COVER * usable.numel()


def _nan_cause(wrong: Wrong) -> str:
    values, wanted = wrong.x[wrong.bad], wrong.interval.expected[wrong.bad]
    count = values.numel()
    nan = int((values.isnan() & ~wanted.isnan()).sum())
    if nan >= COVER * count:
        if not wrong.operands.finite:
            return "NaN reached elements whose operands are finite, or memory was left unwritten"
        return "NaN where a number belongs: memory that was never written, or a read outside of an operand"
    lost = int((wanted.isnan() & ~values.isnan()).sum())
    if lost >= COVER * count:
        return "a NaN was swallowed: an operand's NaN or Inf must reach the result"
    infinite = int((values.isinf() & wanted.isfinite()).sum())
    if infinite >= COVER * count:
        return "an overflow: some partial sum or intermediate result left its type's range"
    kinds = ((nan, "unexpected NaN"), (lost, "missing NaN"), (infinite, "unexpected infinities"))
    told = [f"{number} {kind}" for number, kind in kinds if number]
    return f"among them {' and '.join(told)}" if told else ""


def _stale(wrong: Wrong) -> str:
    """The answer of an earlier call."""
    for name, other in wrong.others.items():
        if other.shape != wrong.x.shape:
            continue
        theirs = other.detach().to(device="cpu", dtype=torch.float64)[wrong.bad]
        ours = wrong.x[wrong.bad]
        if int((theirs == ours).sum()) >= COVER * ours.numel() and (ours.numel() > 3 or wrong.bad.numel() <= 3):
            if int(ours.unique().numel()) == 1 and ours.numel() > 3:
                continue  # a constant proves nothing
            return f"the bad elements are the answer for {name}: stale data"
    return ""


def _accepts(wrong: Wrong, x: torch.Tensor, where: torch.Tensor | None = None) -> bool:
    """Whether ``x`` would be right (at ``where``)."""
    good = (x >= wrong.interval.lo) & (x <= wrong.interval.hi)
    if where is not None:
        good = good[where]
    return int(good.sum()) >= COVER * good.numel()


def _elsewhere(wrong: Wrong) -> str:
    """Right values at the wrong place: transposed, another batch, shifted rows or columns, swapped tiles."""
    x, interval, bad = wrong.x, wrong.interval, wrong.bad
    m, n = x.shape[-2:]
    if wrong.count < 4 or int(interval.expected.flatten()[: 1 << 16].unique().numel()) < 4:
        return ""
    if min(m, n) > 1:
        turned = x.mT if m == n else x.reshape(*x.shape[:-2], n, m).mT
        if _accepts(wrong, turned):
            return "the result is transposed" if m == n else "the result is laid out as its own transpose"
    if x.dim() == 3:
        for batch in bad.flatten(1).any(1).nonzero().flatten().tolist()[:4]:
            good = ((x[batch] >= interval.lo) & (x[batch] <= interval.hi)).flatten(1)
            fits = good.sum(1) >= COVER * good.shape[1]
            fits[batch] = False
            if bool(fits.any()):
                return f"batch {batch} holds the answer of batch {int(fits.nonzero()[0])}"
        first = int(bad.flatten(1).any(1).nonzero()[0])
        x, bad = x[first], bad[first]
        lo, hi = interval.lo[first], interval.hi[first]
    else:
        lo, hi = interval.lo, interval.hi
    by_line = _moved(x, bad, lo, hi, "row") or _moved(x.mT, bad.mT, lo.mT, hi.mT, "column")
    return by_line or _swapped(x, bad, lo, hi, wrong.tile)


def _moved(x: torch.Tensor, bad: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, name: str) -> str:
    """Whole lines that are right for another line."""
    lines = bad.any(1).nonzero().flatten()
    if x.shape[1] < 4 or x.shape[0] < 2:
        return ""
    picked = lines[:: max(1, len(lines) // 4)][:4].tolist()
    found: list[tuple[int, int]] = []
    for line in picked:
        # A line that is all one value fits anywhere.
        if int(x[line].unique().numel()) < 4:
            continue
        matches = ((x[line] >= lo) & (x[line] <= hi)).to(torch.float32).mean(1)
        other = int(matches.argmax())
        if float(matches[other]) >= COVER and other != line:
            found.append((line, other))
    if not found or len(found) < len(picked):
        return ""
    line, other = found[0]
    size = len(x)
    steps = {(o - i + size // 2) % size - size // 2 for i, o in found}
    if len(found) > 1 and len(steps) == 1:
        step = steps.pop()
        return f"the {name}s are shifted: {name} {line} holds the answer of {name} {other} ({step:+d})"
    if len(found) > 1 and len({o for _, o in found}) == 1:
        return f"every bad {name} holds the answer of {name} {other}"
    return f"{name} {line} holds the answer of {name} {other}"


def _swapped(
    x: torch.Tensor, bad: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, tile: tuple[int, int] | None
) -> str:
    """One tile that holds the answer of another tile of the same grid."""
    m, n = x.shape
    r0, _, c0, _ = bounding_box(bad, 0)
    for rows, columns in ([tile] if tile else []) + [(e, f) for e in EDGES for f in EDGES if e * f >= 64]:
        i, j = r0 // rows * rows, c0 // columns * columns
        if i + rows > m or j + columns > n or (rows == m and columns == n):
            continue
        part = x[i : i + rows, j : j + columns]
        if int(part.unique().numel()) < 4:
            continue
        for p in range(0, m - rows + 1, rows):
            for q in range(0, n - columns + 1, columns):
                if (p, q) == (i, j):
                    continue
                # One element first: most candidates fall here.
                if not bool(lo[p, q] <= part[0, 0] <= hi[p, q]):
                    continue
                fits = (part >= lo[p : p + rows, q : q + columns]) & (part <= hi[p : p + rows, q : q + columns])
                if int(fits.sum()) >= COVER * fits.numel():
                    return f"the {rows}x{columns} tile at ({i}, {j}) holds the answer of the tile at ({p}, {q})"
    return ""


def _constant(wrong: Wrong) -> str:
    values = wrong.x[wrong.bad]
    if values.numel() > 3 and bool((values == values[0]).all()) and bool(values[0].isfinite()):
        if float(values[0]) == 0.0:
            return "every bad element is 0: never computed?"
        return f"every bad element is {float(values[0]):g}"
    return ""


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Some bad elements with everything that went into them, to recompute them in other ways.

    Attributes:
        wrong: the whole result.
        at: where the elements are, one index tensor for each dimension.
        x, value: actual and unrounded expected, (S,).
        tolerance: how near a hypothesis must come: the accepted interval, a few ulp, and the rounding errors of
            a sum of K such products (an interval after a relu has forgotten them).
        a, b: rows of A and columns of B, (S, K), float64; b is not scaled.
        bias, scale: beta * bias and scale as the op applies them, (S,), or ``None``.
        residuals: of BIAS and BINARY passes, each (S,).
    """

    wrong: Wrong
    at: tuple[torch.Tensor, ...]
    x: torch.Tensor
    value: torch.Tensor
    tolerance: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    residuals: list[torch.Tensor]

    @classmethod
    def of(cls, wrong: Wrong) -> _Sample | None:
        """Up to 64 bad finite elements, spread over all of them; ``None`` if fewer than one remains."""
        problem, operands, interval = wrong.problem, wrong.operands, wrong.interval
        usable = wrong.bad & wrong.x.isfinite() & interval.value.isfinite() & (interval.hi - interval.lo).isfinite()
        index = usable.nonzero()
        if not len(index) or problem.step("gated") or problem.has("steps.first") or problem.has("steps.last"):
            return None  # no single product went into an element, or another epilogue into each
        index = index[torch.linspace(0, len(index) - 1, min(_SAMPLE, len(index))).round().long()]
        at = tuple(index.unbind(1))
        rows, columns = _lines(*as_multiplied(operands.problem, operands), at, operands.groups)
        shape = problem.result_shape

        def pick(t: torch.Tensor) -> torch.Tensor:
            return t.detach().cpu().expand(shape)[at].to(torch.float64)

        residuals = []
        addend = as_added(operands.problem, operands)
        left = iter(operands.residuals)
        for step in problem.passes:
            if step.kind is StepKind.BIAS and addend is not None:
                residuals.append(pick(addend))
            elif step.kind is StepKind.BINARY:
                residuals.append(pick(next(left)))
        own = problem.op.addend or problem.op.own_bias
        term = pick(addend) if own and addend is not None else None
        factor = operands.scale
        scale = pick(factor) if factor is not None else None
        x, value = wrong.x[at], interval.value[at]
        lo, hi = interval.lo[at], interval.hi[at]
        u = DTYPES["f64" if problem.dtypes.out.name == "f64" else "f32"].unit_roundoff
        gauge = (rows * columns).abs().sum(1) * abs(problem.alpha)
        gauge = (gauge if scale is None else gauge * scale.abs()) + x.abs()
        tolerance = (hi - lo) + 2 * ulp_of(torch.maximum(x.abs(), value.abs()), problem.result_dtype)
        if operands.quantum == 0.0:
            tolerance += gauge * (problem.shape.k * u)
        return cls(wrong, at, x, value, tolerance, rows, columns, term, scale, residuals)

    def part(self, which: slice) -> _Sample:
        """The same for some of the elements."""
        return dataclasses.replace(
            self,
            at=tuple(i[which] for i in self.at),
            x=self.x[which],
            value=self.value[which],
            tolerance=self.tolerance[which],
            a=self.a[which],
            b=self.b[which],
            bias=None if self.bias is None else self.bias[which],
            scale=None if self.scale is None else self.scale[which],
            residuals=[r[which] for r in self.residuals],
        )

    @property
    def c(self) -> torch.Tensor:
        """The products' sums, (S,)."""
        return (self.a * self.b).sum(1)

    def finish(
        self,
        c: torch.Tensor,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What sums ``c`` (..., S) become, with other factors or another bias than the problem's."""
        problem = self.wrong.problem
        y = c * (problem.alpha if alpha is None else alpha)
        if self.scale is not None:
            y = y * self.scale
        addend = self.bias if bias is None else bias
        factor = problem.beta if beta is None else beta
        if addend is not None and factor != 0.0:
            y = y + addend * factor
        return evaluate(problem, y, self.residuals, problem.passes)

    def explains(self, hypothesis: torch.Tensor) -> bool:
        """Whether values (S,) computed in another way are the bad ones.

        They must come within the tolerance, and explain three quarters of each error: a hypothesis that
        changes nothing is within the tolerance of a small error too.
        """
        return bool(self.explain(hypothesis.unsqueeze(0))[0])

    def explain(self, hypotheses: torch.Tensor) -> torch.Tensor:
        """The same for many, (H, S) -> (H,)."""
        rest = (self.x - hypotheses).abs()
        fits = (rest <= self.tolerance) & (rest <= 0.25 * (self.x - self.value).abs())
        return fits.sum(1) >= COVER * fits.shape[1]


def _lines(
    a: torch.Tensor, b: torch.Tensor, at: tuple[torch.Tensor, ...], groups: tuple[tuple[int, int], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of A and the columns of B that meet in the elements ``at``, each (S, K), float64."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dim() == 2 and b.dim() == 3 and not groups:  # linears: one A for all
        return a[at[1]].to(torch.float64), b.mT[(at[0], at[2])].to(torch.float64)
    rows = a[at[:-1]].to(torch.float64)
    if groups:
        return rows, b.mT[(_group_of(at[0], groups), at[1])].to(torch.float64)
    return rows, (b.mT[(at[0], at[2])] if b.dim() == 3 else b.mT[at[-1]]).to(torch.float64)


def _group_of(rows: torch.Tensor, groups: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The group that each row belongs to: the first whose end lies behind it."""
    return torch.searchsorted(torch.tensor([last for _, last in groups]), rows.contiguous(), right=True)


def _group_cause(s: _Sample) -> str:
    """Rows of a grouped product that met the B of another group."""
    groups = s.wrong.operands.groups
    if len(groups) < 2 or len(s.x) < FEW:
        return ""
    row, column = s.at
    mine = _group_of(row, groups)
    filled = torch.tensor([g for g, (first, last) in enumerate(groups) if last > first])
    at = torch.searchsorted(filled, mine.contiguous())
    b = s.wrong.operands.b.detach().cpu().mT
    others = [(f"the group {'after' if step > 0 else 'before'}", mine + step) for step in (1, -1)]
    others += [("the next group that has rows", filled[(at + 1).clamp(max=len(filled) - 1)])]
    others += [("the last group before that has rows", filled[(at - 1).clamp(min=0)])]
    others += [(f"group {g}", torch.full_like(mine, g)) for g in range(min(len(groups), 8))]
    for name, other in others:
        columns = b[(other.clamp(0, len(groups) - 1), column)].to(torch.float64)
        if s.explains(s.finish((s.a * columns).sum(1))):
            return f"these rows were multiplied by the B of {name}"
    return ""


def _arithmetic_cause(s: _Sample) -> str:
    """The op's own parameters and its epilogue, each left out, doubled or out of order."""
    if len(s.x) < FEW:
        return ""
    for text, values in _variations(s):
        if s.explains(values()):
            return text
    return ""


def _variations(s: _Sample) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    problem, c = s.wrong.problem, s.c
    alpha, beta = problem.alpha, problem.beta
    if s.bias is not None:
        yield "the bias is missing", lambda: s.finish(c, beta=0.0) if beta else s.value
        yield "the bias was added twice", lambda: s.finish(c, beta=2 * beta)
        yield "the bias was subtracted", lambda: s.finish(c, beta=-beta)
        if beta == 0.0:
            yield "beta = 0 was ignored: the bias was added", lambda: s.finish(c, beta=1.0)
        elif beta != 1.0:
            yield "beta was not applied", lambda: s.finish(c, beta=1.0)
        if alpha != 1.0:
            yield "alpha was applied to the bias as well", lambda: s.finish(c, beta=alpha * beta)
            if beta != 1.0:
                yield "alpha and beta were exchanged", lambda: s.finish(c, alpha=beta, beta=alpha)
        yield from _bias_shifts(s)
    if alpha not in {0.0, 1.0}:
        yield "alpha was not applied", lambda: s.finish(c, alpha=1.0)
        yield "alpha was applied twice", lambda: s.finish(c, alpha=alpha * alpha)
    if s.scale is not None:
        scale = s.scale
        yield "the scale was not applied", lambda: s.finish(c / scale)
        yield "the scale was applied twice", lambda: s.finish(c * scale)
        yield "the scale's reciprocal was applied", lambda: s.finish(c / (scale * scale))
        yield from _scale_variations(s, scale)
    passes = problem.passes
    if not passes:
        return
    base = c * alpha if s.scale is None else c * alpha * s.scale
    if s.bias is not None and beta:
        base = base + s.bias * beta
    for skip, step in enumerate(passes):
        if step.kind is StepKind.CAST:
            continue
        kept = passes[:skip] + passes[skip + 1 :]
        before = sum(p.kind in (StepKind.BIAS, StepKind.BINARY) for p in passes[:skip])
        own = step.kind in (StepKind.BIAS, StepKind.BINARY)
        residuals = s.residuals[:before] + s.residuals[before + own :]
        name = "the bias" if step.kind is StepKind.BIAS else f"step {step}"
        yield (
            f"{name} is missing",
            lambda kept=kept, residuals=residuals: evaluate(problem, base, residuals, kept),  # type: ignore[misc]  # bound early on purpose
        )
        if skip:
            order = (*passes[: skip - 1], step, passes[skip - 1], *passes[skip + 1 :])
            swapped = list(s.residuals)
            if own and passes[skip - 1].kind in (StepKind.BIAS, StepKind.BINARY):
                swapped[before - 1], swapped[before] = swapped[before], swapped[before - 1]
            yield (
                f"step {step} came before {passes[skip - 1]}",
                lambda order=order, swapped=swapped: evaluate(problem, base, swapped, order),  # type: ignore[misc]  # as above
            )
        elif s.bias is not None and beta and step.kind is StepKind.UNARY:
            early = evaluate(problem, base - s.bias * beta, [], (step,)) + s.bias * beta
            yield (
                f"step {step} came before the bias",
                lambda early=early: evaluate(problem, early, s.residuals, passes[1:]),  # type: ignore[misc]  # as above
            )


def _scale_variations(s: _Sample, scale: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The scales of A and of B each on its own, and those of rowwise scaling along the other dimension."""
    operands, c = s.wrong.operands, s.c
    if operands.scale_a is None or operands.scale_b is None:
        return
    a, b = (x.detach().cpu().to(torch.float64) for x in (operands.scale_a, operands.scale_b))
    own = {"A": a.expand(s.wrong.x.shape)[s.at], "B": b.expand(s.wrong.x.shape)[s.at]}
    for name, part in own.items():
        yield f"the scale of {name} was not applied", lambda part=part: s.finish(c / part)  # type: ignore[misc]  # bound early on purpose
        yield (
            f"the reciprocal of the scale of {name} was applied",
            lambda part=part: s.finish(c / (part * part)),  # type: ignore[misc]  # as above
        )
    row, column = s.at
    if a.numel() <= 1 or b.numel() <= 1 or int(column.max()) >= a.numel() or int(row.max()) >= b.numel():
        return
    along = {"A": a.flatten()[column], "B": b.flatten()[row]}
    yield (
        "the scales of A's rows and B's columns are exchanged",
        lambda: s.finish(c / scale * b.flatten()[row] * a.flatten()[column]),
    )
    for name, other in along.items():
        line = "columns" if name == "A" else "rows"
        yield (
            f"the scales of {name} run along the {line} of the result",
            lambda name=name, other=other: s.finish(c / own[name] * other),  # type: ignore[misc]  # as above
        )


def _bias_shifts(s: _Sample) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """The bias of a neighbouring column."""
    operands, problem = s.wrong.operands, s.wrong.problem
    if operands.bias is None or operands.bias.shape[-1] != problem.shape.n or problem.shape.n < 3:
        return
    wide = as_added(operands.problem, operands)
    assert wide is not None
    for shift in (1, -1):
        other = wide.roll(-shift, -1).expand(problem.result_shape)[s.at]
        yield (
            f"the bias is shifted: column j has that of column j {'+' if shift > 0 else '-'} 1",
            lambda other=other: s.finish(s.c, bias=other),  # type: ignore[misc]  # as above
        )


def _coded_cause(s: _Sample) -> str:
    """What the distributions that encode positions in their values say: which k, or which element."""
    operands, problem = s.wrong.operands, s.wrong.problem
    if problem.passes:
        return ""
    filled = operands.problem  # with more steps, where the result is a tapped value: they decide the digits
    if operands.distribution == "k-cover":
        found: list[tuple[int, str]] = []
        for n in range(min(4, len(s.x))):
            found += decode_k(filled, int(s.at[-1][n]), 0.0, float(s.x[n] - s.value[n]) / (problem.alpha or 1.0))
        told = [f"k = {k} {what}" for k, what in sorted(set(found))]
        return f"of K = {problem.shape.k}: {', '.join(told[:8])}{', ...' if len(told) > 8 else ''}" if told else ""
    if operands.distribution == "tile-map" and s.bias is None and problem.alpha == 1.0:
        source, period = decode_source(filled, float(s.x[0])), tile_map_period(filled)
        here = tuple(int(i[0]) for i in s.at[-2:])
        if source is not None and source != (here[0] % period[0], here[1] % period[1]):
            whole = period == (problem.shape.m, problem.shape.n)
            return f"the value at {here} is that of {source}" + ("" if whole else f" modulo {period}")
    return ""


def _k_cause(s: _Sample) -> str:
    """Products of a contiguous block of k left out or added twice: the smallest such block."""
    k = s.wrong.problem.shape.k
    # Among some 2 K blocks one fits a few elements by chance, sooner where all products are small integers.
    if k < 1 or len(s.x) < (4 * FEW if s.wrong.operands.quantum else FEW):
        return ""
    sums = torch.cat([torch.zeros(len(s.x), 1, dtype=torch.float64), (s.a * s.b).cumsum(1)], 1)
    total = sums[:, -1]
    few = slice(0, 8)  # most blocks fail on a few elements already
    narrow = s.part(few)
    for size, starts, kind in _blocks(k):
        first = torch.tensor(starts)
        last = (first + size).clamp_(max=k)
        block = sums[:, last] - sums[:, first]
        for verb, sign in (("missing", -1.0), ("counted twice", 1.0)):
            if size >= k > 1 and sign > 0:
                continue  # everything twice is a factor
            changed = narrow.finish((total[few, None] + sign * block[few]).T)
            for candidate in narrow.explain(changed).nonzero().flatten().tolist():
                if s.explains(s.finish(total + sign * block[:, candidate])):
                    return _k_sentence(int(first[candidate]), int(last[candidate]), k, verb, kind)
    return ""


def _blocks(k: int) -> Iterator[tuple[int, list[int], str]]:
    """Blocks of k to try: (size, starts, what they are), from the smallest to the largest."""
    tails: set[int] = set()
    size = 1
    while size <= k:
        yield size, list(range(0, k, size)), ""
        if size > 1 and k % size and (k % size) not in tails:
            # What is left of K after whole blocks: the usual tail.
            tails.add(k % size)
            yield k % size, [k - k % size], ""
        size *= 2
    for slices in (2, 3, 4, 5, 6, 7, 8, 12, 16):
        size = math.ceil(k / slices)
        if size * (slices - 1) < k and size & (size - 1):
            yield size, list(range(0, k, size)), f": slice {{}} of {slices} of K"


def _k_sentence(first: int, last: int, k: int, verb: str, kind: str) -> str:
    if first == 0 and last == k:
        return f"all {k} products are {verb}"
    which = f"k = {first}" if last - first == 1 else f"k in [{first}, {last})"
    size = last - first
    note = kind.format(first // size + 1) if kind else ""
    if last == k:
        note = ": the K-tail" if size < k / 2 else note
    elif not note and size > 1 and k % size == 0 and k // size <= 16:
        note = f": slice {first // size + 1} of {k // size} of K"
    return f"the products with {which} of K = {k} are {verb}{note}"


def _input_cause(s: _Sample) -> str:
    """Inputs that lost bits before they were multiplied, or that did not lose those that they should have."""
    problem, operands = s.wrong.problem, s.wrong.operands
    dtypes = problem.dtypes
    if problem.autocast:
        rows, columns = _lines(operands.a, operands.b, s.at, operands.groups)
        if s.explains(s.finish((rows * columns).sum(1))):
            return f"A and B were not converted to {problem.input_dtype.name} before the product"
    precision = problem.input_dtype.precision if problem.autocast else max(dtypes.a.precision, dtypes.b.precision)
    for dtype, name in ((DTYPES["f32"], "f32"), (TF32, "TF32"), (DTYPES["f16"], "f16"), (DTYPES["bf16"], "bf16")):
        if dtype.precision >= precision:
            continue
        rounded = (round_to(s.a, dtype) * round_to(s.b, dtype)).sum(1)
        if s.explains(s.finish(rounded)):
            return f"A and B were rounded to {name} before the product"
        if dtype.name == "bf16":
            continue
        cut = (_toward_zero(s.a, dtype) * _toward_zero(s.b, dtype)).sum(1)
        if s.explains(s.finish(cut)):
            return f"A and B were truncated to {name} before the product"
    return ""


def _toward_zero(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    step = ulp_of(x, dtype)
    return torch.trunc(x / step) * step


def _precision_cause(wrong: Wrong, actual: torch.Tensor) -> str:
    """Traces of a narrower type or of another rounding in the result as a whole."""
    x, interval, target = wrong.x, wrong.interval, wrong.problem.result_dtype
    finite = x.isfinite() & interval.value.isfinite()
    x, value, expected = x[finite], interval.value[finite], interval.expected[finite]
    if x.numel() < 8 or not target.is_float:
        return ""
    for name in ("bf16", "f16", "f32"):
        dtype = DTYPES[name]
        if dtype.precision >= target.precision:
            continue
        # Of the correct values few fit the narrower type; here all do.
        if torch.equal(round_to(x, dtype), x) and int((round_to(expected, dtype) != expected).sum()) > x.numel() // 4:
            return f"every element of the result is representable in {name}: a detour through {name}"
    off = x != expected
    for name in ("f16", "bf16", "f32"):
        twice = round_to(round_to(value, DTYPES[name]), target)
        blurred = twice != expected
        explained = int((off & (x == twice)).sum()) >= COVER * int(off.sum())
        if int(off.sum()) >= 8 and explained and int(blurred.sum()) >= 8:
            return f"the result is rounded twice, through {name}"
    step = ulp_of(value, target)
    cut = torch.trunc(value / step) * step
    # Each element is either the truncated reference or, where errors of the sum blur it, next to it.
    as_cut, right = int((x == cut).sum()), int((expected == cut).sum())
    if int(off.sum()) >= 8 and as_cut >= COVER * x.numel() and right < 0.9 * x.numel():
        return f"the result is rounded toward zero: a truncating store of {actual.dtype}".replace("torch.", "")
    return ""


def _factor_cause(s: _Sample) -> str:
    """All bad elements off by one factor, or by one summand."""
    usable = s.value.abs() > 4 * s.tolerance
    if int(usable.sum()) < 4:
        return ""
    ratios = s.x[usable] / s.value[usable]
    factor = float(ratios.median())
    if factor != 0.0 and s.explains(s.value * factor):
        return f"the bad elements are {factor:.6g} times what is expected"
    offset = float((s.x - s.value).median())
    if s.explains(s.value + offset):
        return f"the bad elements are too {'large' if offset > 0 else 'small'} by {abs(offset):.6g}"
    return ""
