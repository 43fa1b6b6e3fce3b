"""Some wrong elements computed in other ways: which mistake gives the very values that are there.

A hypothesis is a sentence, and the values that the wrong elements would have if it were true.  It counts only if
it reproduces them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_gemm.judging.locate import COVER, FEW, Wrong, mostly
from pytest_gemm.numerics.epilogue import evaluate
from pytest_gemm.numerics.reference import as_added, widened
from pytest_gemm.numerics.rounding import round_to, ulp_of
from pytest_gemm.problem.dtypes import DTYPES, TF32, DType
from pytest_gemm.problem.steps import Step, StepKind

# Distributions of which each element of the result shows a few k only.
FEW_K: Final = frozenset({"k-cover", "one-hot", "tile-map"})
# Ends the text of a cause that is not that of right elements, though it would show there.
ALONE: Final = ", in these elements alone"
# Elements on which hypotheses are tried; most ranges of k fail on a few of them already.
_SAMPLE: Final = 64
_NARROW: Final = 8
# Roundings of one sum that are done again.
_STEPS: Final = 1 << 12
# Share of a sample that sums in a half type have to explain: in another order a few are rounded to another number.
_MOST: Final = 0.9
# Elements of A or B that are copied in another order.
_COPIED: Final = 1 << 22


class Cause(NamedTuple):
    """What was computed instead.

    Attributes:
        name: short and stable, one of ``causes.toml``; "" for what has none.
        text: one sentence; "" where nothing is known.
    """

    name: str
    text: str


# Names and sentences, each with the values (S,) that a sample's elements would have.
Hypotheses: TypeAlias = Iterator[tuple[str, str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Sample:
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
    def of(cls, wrong: Wrong, *, good: bool = False) -> Sample | None:
        """Bad (or good) finite elements, spread over all of them; ``None`` for too few."""
        problem, operands, interval = wrong.problem, wrong.operands, wrong.interval
        width = interval.hi - interval.lo
        index = ((wrong.bad ^ good) & wrong.x.isfinite() & interval.value.isfinite() & width.isfinite()).nonzero()
        one_of_several = problem.has("steps.first") or problem.has("steps.last") or problem.op.outside
        one_of_several |= problem.reduction is not None
        several_went_in = problem.op.ragged in {"n", "k"} or problem.step("gated")
        if len(index) < FEW or several_went_in or one_of_several:
            return None  # no single product went into an element, or another epilogue into each
        index = index[_spread(len(index), _SAMPLE)]
        at = tuple(index.unbind(1))
        a, b = _lines(*wrong.multiplied, at, operands.groups)

        def chosen(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().cpu().expand(problem.result_shape)[at].to(torch.float64)

        added, scale = as_added(operands.problem, operands), chosen(operands.scale)
        left = iter(operands.residuals)
        residual = {StepKind.BIAS: lambda: chosen(added), StepKind.BINARY: lambda: chosen(next(left))}
        steps = tuple((step, residual.get(step.kind, lambda: None)()) for step in problem.passes)
        x, value = wrong.x[at], interval.value[at]
        tolerance = width[at] + 2 * ulp_of(torch.maximum(x.abs(), value.abs()), problem.result_dtype)
        if operands.quantum == 0.0 or problem.has("out.alias"):  # what is written over A is multiplied again
            u = DTYPES["f64" if problem.dtypes.out.name == "f64" else "f32"].unit_roundoff
            gauge = (a * b).abs().sum(1) * abs(problem.alpha) * (1.0 if scale is None else scale.abs()) + x.abs()
            tolerance += gauge * (problem.terms * u)
        bias = chosen(added) if problem.op.addend or problem.op.own_bias else None
        return cls(wrong, at, x, value, a, b, problem.alpha, problem.beta, bias, scale, steps, tolerance)

    def few(self) -> Sample:
        """Some of these elements."""
        some = _spread(len(self.x), _NARROW)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {name: x[some] for name, x in own.items() if isinstance(x, Tensor)}
        changes["at"] = tuple(x[some] for x in self.at)
        changes["steps"] = tuple((step, None if x is None else x[some]) for step, x in self.steps)
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def sums(self) -> Tensor:
        """The products' sums, (S,)."""
        return (self.a * self.b).sum(1)

    @functools.cached_property
    def running_sums(self) -> Tensor:
        """The sums of the first 0 .. K products, (K + 1, S)."""
        return F.pad((self.a * self.b).cumsum(1), (1, 0)).mT

    def partial_sums(self, size: int) -> Tensor:
        """The sums of parts of K, (P, S)."""
        k = self.a.shape[1]
        return self.running_sums[[*range(0, k, size), k]].diff(dim=0)

    def without(self, first: int | Tensor, last: int | Tensor, sign: float = -1.0) -> Tensor:
        """The elements without the products of k in [first, last), or with these twice; of tensors (H,) all, (H, S)."""
        return self.result(self.sums + sign * (self.running_sums[last] - self.running_sums[first]))

    def result(self, sums: Tensor | None = None, **changes: Any) -> Tensor:
        """What the elements become with other values of some attributes, or with other ``sums`` (..., S)."""
        s = dataclasses.replace(self, **changes)
        y = (s.sums if sums is None else sums) * s.alpha
        if s.scale is not None:
            y = y * s.scale
        if s.bias is not None and s.beta != 0.0:
            y = y + s.bias * s.beta
        return evaluate(s.wrong.problem, y, s.steps)

    def explained(self, *hypotheses: Callable[[Sample], Hypotheses]) -> Iterator[Cause]:
        """The hypotheses that reproduce the bad values."""
        for some in hypotheses:
            for name, text, values in some(self):
                if bool(self.fits(values[None], _MOST if name in {"f16 sums", "bf16 sums"} else COVER)[0]):
                    yield Cause(name, text)

    def agrees(self, values: Tensor) -> bool:
        """Whether values (S,) computed in another way are the actual ones."""
        return mostly((values - self.x).abs() <= self.tolerance)

    def fits(self, hypotheses: Tensor, cover: float = COVER) -> Tensor:
        """Whether values (H, S) computed in other ways are the bad ones, (H,).

        They must come within the tolerance, and explain three quarters of each error: a hypothesis that
        changes nothing is within the tolerance of a small error too.
        """
        rest = (self.x - hypotheses).abs()
        fits = (rest <= self.tolerance) & (rest <= 0.25 * (self.x - self.value).abs())
        return fits.sum(1) >= cover * fits.shape[1]


def _spread(count: int, most: int) -> Tensor:
    """Places of so many of ``count`` elements, spread over all of them."""
    return torch.linspace(0, count - 1, min(most, count)).round().long()


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
    found = torch.searchsorted(torch.tensor([last for _, last in groups]), rows.contiguous(), right=True)
    return found.clamp(max=len(groups) - 1)  # rows that no group owns are zero


# -- other operands and parameters -----------------------------------------------------------------------


def groups(s: Sample) -> Hypotheses:
    """Rows of a grouped product, or of a batch, that met the B of another one."""
    given = s.wrong.operands
    ends = given.groups
    if not ends and not (given.b.dim() == len(s.at) == 3):
        return
    b = s.wrong.multiplied[1].detach().cpu().mT
    name, what = ("group", "rows") if ends else ("batch", "batches")
    mine = _group_of(s.at[0], ends) if ends else s.at[0]
    for which, other in ((f"{name} 0", 0 * mine), (f"the {name} before", mine - 1), (f"the {name} after", mine + 1)):
        text = f"these {what} were multiplied by the B of {which}"
        yield f"wrong {name}", text, s.result(b=b[other % len(b), s.at[-1]].to(torch.float64))


def parameters(s: Sample) -> Hypotheses:
    """The op's own parameters, each left out, doubled, exchanged or of another place."""
    alpha, beta = s.alpha, s.beta
    yield from _overwritten(s)
    if s.bias is not None:
        if beta:
            yield "bias missing", "the bias is missing", s.result(beta=0.0)
            yield "bias added twice", "the bias was added twice", s.result(beta=2 * beta)
        yield "beta ignored", f"beta = {beta:g} was not applied", s.result(beta=1.0)
        yield "alpha on the bias", "alpha was applied to the bias as well", s.result(beta=alpha * beta)
        yield "alpha and beta exchanged", "alpha and beta were exchanged", s.result(alpha=beta, beta=alpha)
        yield from _other_bias(s)
    yield "alpha ignored", f"alpha = {alpha:g} was not applied", s.result(alpha=1.0)
    if s.scale is not None:
        yield "scale ignored", "the scale was not applied", s.result(scale=None)
        yield from _other_scales(s)


def _overwritten(s: Sample) -> Hypotheses:
    """C in place: the addend, or A, read again where something of the result stood already."""
    k, wrong = s.a.shape[1], s.wrong
    if wrong.problem.has("out.alias"):
        result = wrong.x[s.at[:-1]]
        for wide in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128):
            written = torch.arange(k) < (s.at[-1] // wide * wide)[:, None]
            text = f"A was read where columns of the result stood already, in blocks of {wide}"
            yield "A read after the write", text, s.result(a=torch.where(written, result, s.a))
    if s.bias is None or not wrong.problem.has("out.addend") or k == 0:
        return
    edges = {count: [*range(0, k, max(1, -(-k // count))), k] for count in (2, 4, 8)}
    parts = {f"of {n} parts of K": s.running_sums[at].diff(dim=0).unbind() for n, at in edges.items()}
    first = round_to(s.result(beta=0.0), wrong.problem.result_dtype)
    for which, stood, sums in (
        ("of the product", first, (s.sums,)),
        ("of an earlier pass", s.bias, (s.sums, s.sums)),
        *((which, s.bias, sums) for which, sums in parts.items()),
    ):
        c = stood
        for part in sums:
            c = round_to(s.result(part, bias=c), wrong.problem.result_dtype)
        yield "addend read after the write", f"the addend was read where the result {which} stood already", c


def _other_bias(s: Sample) -> Hypotheses:
    """The bias of another column."""
    n, rows = s.wrong.problem.shape.n, s.at[-2]
    bias = as_added(s.wrong.operands.problem, s.wrong.operands)
    if bias is None or not bias.dim() or bias.shape[-1] != n or n < FEW:
        return
    if bias.numel() == n > int(rows.max()):
        yield "bias along rows", "row i has the bias of column i", s.result(bias=bias.flatten()[rows])
    for name, text, other in (
        ("shifted bias", "the bias is shifted: column j has that of column j + 1", bias.roll(-1, -1)),
        ("shifted bias", "the bias is shifted: column j has that of column j - 1", bias.roll(1, -1)),
        ("bias of column 0", "every column has the bias of column 0", bias[..., :1]),
    ):
        yield name, text, s.result(bias=other.expand(s.wrong.problem.result_shape)[s.at])


def _other_scales(s: Sample) -> Hypotheses:
    """The scales of A or of B changed, and those of rows along the other dimension."""
    operands = s.wrong.operands
    for name, field, given in (("A", "scale_a", operands.scale_a), ("B", "scale_b", operands.scale_b)):
        if given is None:
            continue
        own, shifted = widened(given), f"the scales of {name} are shifted: each line has that of the"
        others = [("after", -1), ("before", 1)] * (operands.groups != () and own.dim() == 2)
        for kind, text, scales in (
            *(
                ("wrong group", f"the scales of {name} were those of the group {at}", own.roll(i, 0))
                for at, i in others
            ),
            ("scale ignored", f"the scale of {name} was not applied", torch.ones_like(own)),
            ("reciprocal scale", f"the reciprocal of the scale of {name} was applied", 1.0 / own),
            ("scale applied twice", f"the scale of {name} was applied twice", own * own),
            ("scale of row 0", f"all lines of {name} have the scale of the first one", 0 * own + own.flatten()[0]),
            ("shifted scales", f"{shifted} next one", own.flatten().roll(-1).view_as(own)),
            ("shifted scales", f"{shifted} previous one", own.flatten().roll(1).view_as(own)),
        ):
            changes: dict[str, Any] = {field: scales}
            scale = dataclasses.replace(operands, **changes).scale
            if scale is not None:
                yield kind, text, s.result(scale=scale.expand(s.wrong.problem.result_shape)[s.at])
    if operands.scale_a is None or operands.scale_b is None or s.wrong.problem.shape.batch is not None:
        return
    a, b = (widened(scale).flatten() for scale in (operands.scale_a, operands.scale_b))
    row, column = s.at
    if int(column.max()) < len(a) and int(row.max()) < len(b):
        a = a * s.wrong.problem.result_factor(operands.device)
        for kind, text, i, j in (
            ("scales exchanged", "the scales of A's rows and B's columns are exchanged", column, row),
            ("scales transposed", "the scales of A run along the columns of the result", column, column),
        ):
            yield kind, text, s.result(scale=a[i] * b[j])


def steps(s: Sample) -> Hypotheses:
    """The steps of the epilogue, each left out or before the one that it follows."""
    for i, one in enumerate(s.steps):
        step = one[0]
        kind, what = ("bias", "the bias") if step.kind is StepKind.BIAS else (step.name, f"step {step}")
        yield f"{kind} missing", f"{what} is missing", s.result(steps=s.steps[:i] + s.steps[i + 1 :])
        if i:
            before = s.steps[i - 1]
            order = (*s.steps[: i - 1], one, before, *s.steps[i + 1 :])
            yield "steps out of order", f"step {step} came before {before[0]}", s.result(steps=order)
        elif s.bias is not None and s.beta and step.kind is StepKind.UNARY:
            early = s.result(bias=None, steps=(one,)) + s.bias * s.beta
            later = s.result(early, alpha=1.0, scale=None, bias=None, steps=s.steps[1:])
            yield "steps out of order", f"step {step} came before the bias", later


# -- ranges of k -----------------------------------------------------------------------------------------


def ranges_of_k(s: Sample) -> Hypotheses:
    """Products of a contiguous range of k left out or added twice: the smallest such range."""
    k, operands, zeros = s.wrong.problem.shape.k, s.wrong.operands, bool((s.x == 0).all())
    # Among some 10 K ranges one fits a few elements by chance, sooner where all products are small integers.
    if operands.quantum > 0 and len(s.x) < 4 * FEW:
        return
    narrow, is_sparse = s.few(), operands.distribution in FEW_K
    right = functools.cache(lambda: Sample.of(s.wrong, good=True))
    # Where few k show, many ranges fit: the shortest end of K first.
    for kind, n, first, last in sorted(_ranges(k), key=lambda one: is_sparse and one[1] > 0):
        for sign, verb in ((-1.0, "missing"), (1.0, "counted twice")):
            for i in narrow.fits(narrow.without(first, last, sign)).nonzero().flatten().tolist():
                low, high = int(first[i]), int(last[i])
                size = high - low
                # Everything twice is a factor, and without any product a plain result is 0.
                if size == k and (sign > 0 or is_sparse or zeros):
                    continue
                # In k-cover columns of zeros lack whole blocks, and a k twice may be another k that is missing.
                if kind == "block of K" and sign < 0 and operands.distribution == "k-cover":
                    continue
                alone = (good := right()) is not None and not good.agrees(good.without(low, high, sign))
                if alone and is_sparse:  # where all k show, only some tiles may lack products
                    continue
                name = "never computed" if size == k else kind + " twice" * (sign > 0)
                which = f"k = {low}" if size == 1 else f"k in [{low}, {high})"
                is_vague = is_sparse and (sign > 0 or operands.distribution != "k-cover")
                which += ", or others that look alike," * is_vague
                which = f"all {k} products" if size == k else f"the products with {which} of K = {k}"
                note = f": slice {round(low * n / k) + 1} of {n} of K" if n else ": the K-tail" * (kind == "K tail")
                yield name, f"{which} are {verb}{note}{ALONE * alone}", s.without(low, high, sign)


def _ranges(k: int) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Ranges of k to try, [first, last), with their name and the number of slices: the likeliest name comes first."""
    every, rests = torch.arange(1, k + 1), {k % (1 << power) for power in range(1, 9)}
    for n in range(2, min(k, 16) + 1):
        size, edges = math.ceil(k / n), [k // n * i + min(i, k % n) for i in range(n + 1)]
        slices = [*itertools.pairwise(edges), *((first, min(first + size, k)) for first in range(0, k, size))]
        # What is left of K after whole blocks is a tail, though it may be the last of several slices too.
        ends = {(i, j) for i, j in slices if j >= k - 1 and (n > 8 or j - i <= 16 or j - i in rests)}
        kept = torch.tensor([one for one in slices if one not in ends], dtype=torch.int64)
        first, last = kept.reshape(-1, 2).unbind(1)
        yield "slice of K", n, first, last
    yield "K tail", 0, k - every, every * 0 + k
    yield "K head", 0, every * 0, every
    yield "K tail", 0, k - 1 - every[1:-1], every[1:-1] * 0 + k - 1  # without the last k
    for power in range(k.bit_length()):
        first = torch.arange(0, k, 1 << power)
        yield "block of K", 0, first, (first + (1 << power)).clamp_(max=k)


# -- values of less precision ----------------------------------------------------------------------------


def toward_zero(x: Tensor, dtype: DType) -> Tensor:
    """Numbers that are cut, not rounded, to a type."""
    step = ulp_of(x, dtype)
    return torch.trunc(x / step) * step


def inputs(s: Sample) -> Hypotheses:
    """Inputs that lost bits before they were multiplied, or that were read as other ones."""
    problem = s.wrong.problem
    types = (problem.input_dtype,) if problem.autocast else (problem.dtypes.a, problem.dtypes.b)
    precision = max(dtype.precision for dtype in types)
    yield from _integers(s)
    for limit in (2.0**-126, 2.0**-14, 2.0**-6, 1e-6):
        a, b = (torch.where(x.abs() < limit, 0.0, x) for x in (s.a, s.b))
        yield "small inputs dropped", f"elements of A and B below {limit:.3g} counted as 0", s.result(a=a, b=b)
    eleven = [s.result(a=round_to(s.a, dtype), b=round_to(s.b, dtype)) for dtype in (TF32, DTYPES["f16"])]
    if precision > TF32.precision and bool(s.fits(torch.stack(eleven)).all()):
        yield "TF32 or f16 inputs", "A and B were rounded to 11 bits before the product, as in TF32 and f16", eleven[0]
    for dtype, name in ((DTYPES["f32"], "f32"), (TF32, "TF32"), (DTYPES["f16"], "f16"), (DTYPES["bf16"], "bf16")):
        for verb, narrow in (("rounded", round_to), ("truncated", toward_zero)):
            if dtype.precision < precision and (verb, name) != ("truncated", "bf16"):
                text = f"A and B were {verb} to {name} before the product"
                yield f"{name} inputs", text, s.result(a=narrow(s.a, dtype), b=narrow(s.b, dtype))


def _integers(s: Sample) -> Hypotheses:
    """Operands of 8 bits that were read as of the other sign, clipped, or centred elsewhere."""
    dtypes = s.wrong.problem.dtypes
    for name, dtype, own in (("A", dtypes.a, s.a), ("B", dtypes.b, s.b)):
        if dtype.name in {"i8", "u8"} and bool(((own == own.round()) & (own.abs() <= 255)).all()):
            for kind, text, other in (
                ("read as unsigned", f"{name} was read as unsigned", torch.where(own < 0, own + 256, own)),
                ("read as signed", f"{name} was read as signed", own - 256 * (own > 127)),
                ("zero point off by one", f"the zero point of {name} is off by one", own + 1),
                ("zero point off by one", f"the zero point of {name} is off by one", own - 1),
            ):
                yield kind, text, s.result(a=other) if name == "A" else s.result(b=other)
    if dtypes.a.name == dtypes.b.name == "i8":
        clipped = s.result(a=s.a.clamp(min=-127), b=s.b.clamp(min=-127))
        yield "-128 clipped", "-128 counted as -127", clipped


def transposed_operands(s: Sample) -> Hypotheses:
    """A or B whose elements were taken in the order of its transpose."""
    a, b = s.wrong.multiplied
    if max(a.numel(), b.numel()) > _COPIED:
        return
    for name, own in (("A", a), ("B", b)):
        for other in (own.mT.reshape(own.shape), own.reshape(own.mT.shape).mT):
            given = (other, b) if name == "A" else (a, other)
            rows, columns = _lines(*given, s.at, s.wrong.operands.groups)
            yield "transposed operand", f"{name} was read as its transpose", s.result(a=rows, b=columns)


def _sizes(k: int) -> list[int]:
    """Parts of K that a kernel may add up apart: blocks of a power of two, and slices that are multiples of one."""
    blocks = {1 << power for power in range(10)}
    slices = {math.ceil(k / n / block) * block for n in range(2, 17) for block in (1, 8, 16, 32, 64)}
    return sorted(size for size in blocks | slices if size < k)


def _held(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension, one term after the other, kept in a narrow type."""
    total = torch.zeros_like(terms[0], dtype=dtype)
    for term in terms.float():
        total = (total + term).to(dtype)
    return total


def narrow_sums(s: Sample) -> Hypotheses:
    """Products, partial sums of parts of K, or the sum itself, that were rounded to a half type."""
    products, k = s.a * s.b, s.wrong.problem.shape.k
    is_sparse = s.wrong.operands.quantum > 0 and bool(((products != 0).sum(1) <= 2).all())
    if not k or is_sparse:
        return
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        for size in _sizes(k):
            parts = s.partial_sums(size)
            rounded = parts.to(dtype)
            what = f"partial sums of {size} products were" if size > 1 else "each product was"
            kind = "sums" if size > 1 else "products"
            yield f"{name} {kind}", f"{what} rounded to {name}", s.result(rounded.double().sum(0))
            held = _held(torch.stack([parts, rounded], 1), dtype) if len(parts) <= _STEPS else ()
            for sums, text in zip(held, (f"the sum was held in {name}", f"{what} added in {name}"), strict=False):
                yield f"{name} sums", text, s.result(sums.double())
        for lanes in (4, 8, 16) if k <= _STEPS else ():
            each = _held(F.pad(products, (0, -k % lanes)).unflatten(1, (-1, lanes)).transpose(0, 1), dtype)
            yield f"{name} sums", f"{lanes} sums were held in {name}", s.result(_held(each.mT, dtype).double())
    with np.errstate(over="ignore", invalid="ignore"):
        one_by_one = np.add.accumulate((s.a.half() * s.b.half()).numpy(), axis=1)[:, -1]
    yield "f16 sums", "all was multiplied and added in f16", s.result(torch.from_numpy(one_by_one).double())


def integer_sums(s: Sample) -> Hypotheses:
    """Sums of integers that left their type, or that were kept in f32."""
    problem, products = s.wrong.problem, s.a * s.b
    if problem.dtypes.a.is_float or problem.dtypes.b.is_float or not problem.terms:
        return
    for bits in range(8, 33):
        name, half = f"i{bits} wrap" if bits in {8, 16, 32} else "overflow", 2.0 ** (bits - 1)
        for size in (problem.terms, *(_sizes(problem.terms) if bits in {8, 16} else ())):
            parts = s.partial_sums(size)
            which = "the sum" if size == problem.terms else f"each sum of {size} products"
            wrapped = ((parts + half) % (2 * half) - half).sum(0)
            yield name, f"{which} wrapped around in {bits} bits", s.result(wrapped)
            cut = parts.clamp(-half, half - 1).sum(0)
            yield "saturated", f"{which} was cut off at the limits of {bits} bits", s.result(cut)
    x = s.wrong.x[s.wrong.x.abs() > 2.0**24]
    steps = x / ulp_of(x, DTYPES["f32"])
    # All large results are numbers of f32, as one in 2^n of n integers is by chance, and some need all of its bits.
    is_of_f32 = len(x) >= 4 * FEW and bool((steps == steps.round()).all()) and float((steps % 2).mean()) >= 0.25
    if is_of_f32 and not problem.result_dtype.is_float:
        error = problem.terms * DTYPES["f32"].unit_roundoff * products.abs().sum(1)
        yield "f32 sums", "sums beyond 2^24 were kept in f32", torch.where((s.x - s.value).abs() <= error, s.x, s.value)


def factors(s: Sample) -> Hypotheses:
    """All bad elements off by one factor."""
    usable = s.value.abs() > 4 * s.tolerance
    if int(usable.sum()) >= 4 * FEW and len(s.value[usable].unique()) >= FEW:  # anything fits a few numbers
        factor = float((s.x[usable] / s.value[usable]).median())
        if factor:
            times = f"{factor:.6g}" if abs(factor - 1.0) > 1e-4 else f"1 {'+-'[factor < 1.0]} {abs(factor - 1.0):.2g}"
            yield "constant factor", f"the bad elements are {times} times what is expected", s.value * factor
