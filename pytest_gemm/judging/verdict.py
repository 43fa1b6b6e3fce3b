"""A result against its acceptance interval: whether it is right, and if not, where and in what way.

:func:`compare` decides and, on a mismatch, locates: which elements are bad (a tail, a tile, every 16th column),
and what was computed instead (products of some k missing, no bias, the answer of an earlier call).  The first is a fact
about the set of bad elements; the second is a hypothesis, printed only if it reproduces the bad values.

:func:`beside_eager` reports how a result differs from the one of eager PyTorch.  It decides nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from pytest_gemm.judging.explain import cause_of
from pytest_gemm.judging.locate import TAILS, Wrong, described_pattern, inside, mostly, place_of
from pytest_gemm.judging.recompute import ALONE
from pytest_gemm.numerics.interval import Interval
from pytest_gemm.numerics.rounding import ulp_distance
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

# The limit of a float's excess is 1: a rejected element never counts as "1x" or less.
_ABOVE_ONE: Final = math.nextafter(1.0, 2.0)
# From here on a distance in ulp says no more than that two results are different.
_MOST_ULP: Final = 1000
# Elements that are judged at once: their intermediates fit in a core's cache.
CHUNK: Final = 1 << 15


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A wrong result, described.

    Attributes:
        code: stable, for machines: ``wrong-type``, ``wrong-layout``, ``wrong-shape``, ``wrong-dtype``,
            ``wrong-device``, ``nan``, ``missing-nan``, ``infinite``, ``outside-bound`` or ``zero-sign``.
        count, total: bad elements, all elements.
        index: of the worst element; ``()`` if the result could not be compared by element.
        actual, expected: its value, and the correctly rounded reference.
        bound: how far from ``expected`` it might have been; 0 where the result must be exact.
        ratio: its error over that bound, infinity where the bound is 0.
        tier: of the oracle, as in ``oracle.Interval``.
        pattern: one sentence: where the bad elements are.
        cause: one sentence: what seems to have been computed instead; "" if nothing fits.
        name: of the cause, short and stable, or of the place; "" where neither is certain.
        scope: what ``total`` counts.
    """

    code: str
    count: int
    total: int
    index: tuple[int, ...] = ()
    actual: float = math.nan
    expected: float = math.nan
    bound: float = 0.0
    ratio: float = math.inf
    tier: str = ""
    pattern: str = ""
    cause: str = ""
    name: str = ""
    scope: str = "elements"

    def summary(self) -> str:
        """The first line: what, in one sentence."""
        if not self.index and self.code.startswith("wrong-"):
            return self.pattern
        what = {
            "nan": "are NaN",
            "missing-nan": "are numbers where NaN is expected",
            "infinite": "are infinite where a number is expected",
            "zero-sign": "are zeros of the wrong sign",
        }.get(self.code, "differ from the exact result" if self.tier == "exact" else "outside the bound")
        return f"{self.count} of {self.total} {self.scope} {what}"

    def text(self) -> str:
        """All lines: what, where and how far, and the likely cause."""
        if not self.index:
            return self.summary()
        at = self.index[0] if len(self.index) == 1 else self.index
        error = abs(self.actual - self.expected)
        worst = f"worst {error:.3g} at {at}, "
        if not math.isfinite(error) or self.code == "zero-sign":
            worst = f"first at {at}"
        elif self.bound > 0:
            worst += f"bound {self.bound:.3g} ({times(self.ratio)})"
        elif self.tier == "exact":
            worst += "where the result is exact"
        else:
            worst += "where only one rounded value is right"
        lines = [self.summary(), f"  {worst}: got {self.actual:.9g}, expected {self.expected:.9g}", f"  {self.pattern}"]
        return "\n".join([*lines, f"  {self.cause}"] if self.cause else lines)


def times(ratio: float) -> str:
    """A factor as text."""
    return f"{ratio:.3g}x" if ratio < 1e4 else f"{ratio:.1e}x"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The verdict on one result.

    Attributes:
        ratio: the worst error over what is allowed.  Both are measured from the correctly rounded reference
            towards the side on which the element lies, so a ratio is 0 for that very value, at most 1 iff the element
            is accepted, and infinite for any other value where the interval is a single number.
        correctly_rounded: share of the elements equal to the correctly rounded reference; 1 for an empty output.
        mismatch: what is wrong; ``None`` for a right result.
    """

    ratio: float
    correctly_rounded: float
    mismatch: Mismatch | None = None

    @property
    def ok(self) -> bool:
        """Whether the result is right."""
        return self.mismatch is None

    @property
    def is_comparable(self) -> bool:
        """Whether the result has elements to be set beside others: it has the right type, device and shape."""
        return self.mismatch is None or not self.mismatch.code.startswith("wrong-")


def compare(
    actual: object,
    interval: Interval,
    problem: Problem,
    operands: Operands,
    *,
    others: Mapping[str, Tensor] | None = None,
    whole: bool = True,
) -> Comparison:
    """Judge a result.

    The sign of a zero is judged where every order of summation gives the same (docs/explanation/oracle.md, "The sign of
    zero"), of a result that is right otherwise.

    Args:
        actual: what the backend returned, whatever that is.
        interval: what is right.
        problem: what was computed.
        operands: from what.
        others: results of earlier calls by name, to recognise a stale one.
        whole: ``False`` for lines of a larger result: then the place of wrong elements is not described;
            it depends on the lines.
    """
    if (incomparable := not_comparable(actual, problem, operands)) is not None:
        return incomparable
    assert isinstance(actual, Tensor)
    x = actual.detach().to(device="cpu", dtype=torch.float64)
    if x.numel() == 0:
        return Comparison(0.0, 1.0)
    right, outside, worst = scored(x, interval)
    share = right / x.numel()
    bad = rejected(x, interval) if outside else interval.wrong_zeros(x)
    if not bool(bad.any()):
        return Comparison(worst, share)
    mismatch = _mismatch(Wrong(x, bad, interval, problem, operands, others or {}), actual, whole)
    return Comparison(mismatch.ratio, share, mismatch)


def _accepted(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Which elements lie in an interval, or are NaN where it belongs or where nothing is known; bool."""
    return inside(x, lo, hi) | x.isnan() & (lo.isnan() | ((lo == -math.inf) & (hi == math.inf)))


def rejected(x: Tensor, interval: Interval) -> Tensor:
    """Which elements are outside, or zeros of the wrong sign where none is; float64, of the interval's shape."""
    good = _accepted(x, interval.lo, interval.hi)
    return interval.wrong_zeros(x) if bool(good.all()) else ~good


def ratios(x: Tensor, interval: Interval) -> Tensor:
    """Error over bound of each element, as :attr:`Comparison.ratio` has it of the worst one.

    Args:
        x: a result in float64, of the interval's shape.
        interval: what is right.

    Returns:
        At most 1 iff the element is accepted; infinity for a NaN or an infinity that is not.
    """
    return _limited(x, interval.lo, interval.hi, interval.expected, rejected(x, interval))


def _limited(x: Tensor, lo: Tensor, hi: Tensor, expected: Tensor, bad: Tensor) -> Tensor:
    """The ratios of elements of which ``bad`` are rejected."""
    found = _ratio(x, lo, hi, expected)
    found = torch.where(bad, found.clamp(min=_ABOVE_ONE), found.clamp(max=1.0))
    return torch.where(bad & ~(x.isfinite() & expected.isfinite()), math.inf, found)


def scored(x: Tensor, interval: Interval) -> tuple[int, int, float]:
    """How many elements equal the rounded reference, how many are outside, and the worst ratio.

    One walk over a result, in pieces whose intermediates stay in a core's cache.
    """
    right, outside, worst = 0, 0, 0.0
    whole = (x, interval.lo, interval.hi, interval.expected)
    for part, lo, hi, expected in zip(*(t.reshape(-1).split(CHUNK) for t in whole), strict=True):
        equal = part == expected
        if bool((equal & inside(part, lo, hi)).all()):
            right += part.numel()
            continue
        bad = ~_accepted(part, lo, hi)
        right += int((equal | (part.isnan() & expected.isnan())).sum())
        outside += int(bad.sum())
        worst = max(worst, float(_limited(part, lo, hi, expected, bad).amax()))
    return right, outside, worst


def _ratio(x: Tensor, lo: Tensor, hi: Tensor, expected: Tensor) -> Tensor:
    """Error over allowance, from the middle value: expected, or the nearest accepted one under ``eager`` rounding."""
    middle = torch.minimum(torch.maximum(expected, lo), hi)
    error = x - middle
    ratio = error / torch.where(error > 0, hi, lo).sub_(middle)
    # Numerator and denominator have one sign, but a zero denominator may be -0.  Zero over zero is the very
    # value; differences of infinities or NaN are for the pattern checks.
    return ratio.abs_().nan_to_num_(nan=0.0, posinf=math.inf)


def complaint_of(actual: object, problem: Problem, operands: Operands) -> tuple[str, str] | None:
    """Why the result cannot even be compared: (code, sentence)."""
    if not isinstance(actual, Tensor):
        return "wrong-type", f"the result is a {type(actual).__name__}, not a tensor"
    if actual.layout != torch.strided:
        return "wrong-layout", f"the result is a {str(actual.layout).removeprefix('torch.')} tensor, not a strided one"
    if tuple(actual.shape) != problem.judged_shape:
        return "wrong-shape", f"the result has shape {tuple(actual.shape)}, expected {problem.judged_shape}"
    wanted = torch_dtype(problem.result_dtype)
    if actual.dtype != wanted:
        got = str(actual.dtype).removeprefix("torch.")
        return "wrong-dtype", f"the result is {got}, expected {problem.result_dtype.torch_name}"
    if actual.device.type != torch.device(operands.device).type:
        return "wrong-device", f"the result is on {actual.device}, the operands on {operands.device}"
    return None


def not_comparable(actual: object, problem: Problem, operands: Operands) -> Comparison | None:
    """The verdict on what cannot even be compared; ``None`` for what can."""
    complaint = complaint_of(actual, problem, operands)
    if complaint is None:
        return None
    total = math.prod(problem.judged_shape)
    return Comparison(math.inf, 0.0, Mismatch(complaint[0], total, total, pattern=complaint[1]))


def _mismatch(view: Wrong, actual: Tensor, whole: bool) -> Mismatch:
    """Describe a wrong result."""
    values, wanted, lo, hi = view.values, view.expected, view.interval.lo[view.bad], view.interval.hi[view.bad]
    zeros = inside(values, lo, hi)  # of the wrong sign
    ratio = _ratio(values, lo, hi, wanted)
    ratio = torch.where(values.isnan() | wanted.isnan() | view.specials["infinite"] | zeros, math.inf, ratio)
    # Infinite ratios (a bound of 0) are told apart by the error itself.
    error = (values - wanted).abs()
    order = torch.where(ratio.isinf(), error.nan_to_num(nan=math.inf), -1.0) if bool(ratio.isinf().any()) else ratio
    worst = int(order.argmax())
    value, expected, least, most = (float(t[worst]) for t in (values, wanted, lo, hi))
    middle = min(max(expected, least), most)
    bound = most - middle if value > middle else middle - least
    special = [code for code, which in view.specials.items() if mostly(which)]
    code = special[0] if special else "zero-sign" if bool(zeros.any()) else "outside-bound"
    bound, most_over = bound if math.isfinite(bound) else 0.0, max(float(ratio[worst]), _ABOVE_ONE)
    index, tier = tuple(view.bad.nonzero()[worst].tolist()), view.interval.tier
    pattern = described_pattern(view) if whole else ""
    name, cause = ("", "") if code == "zero-sign" else cause_of(view, actual, whole)
    place = place_of(pattern)
    # Products of K that a tail of M or N alone lacks; special values hide part of the place.
    if cause.endswith(ALONE) and (place in TAILS or not view.operands.finite):
        name = place if view.operands.finite else ""
    # In these the place tells of k, and NaN show at places of their own.
    elif view.operands.finite and view.operands.distribution not in {"one-hot", "k-cover"}:
        name = name or place
    total = view.x.numel()
    return Mismatch(code, len(values), total, index, value, expected, bound, most_over, tier, pattern, cause, name)


# -- beside eager PyTorch --------------------------------------------------------------------------------


def beside_eager(
    actual: Sequence[object],
    eager: Sequence[Tensor],
    intervals: Sequence[Interval],
    names: Sequence[str] = ("the intermediate value", "the result"),
    bound: str = "the bound",
) -> str:
    """Each of a program's results beside eager's, in words: different is not worse.

    Args:
        actual: what the backend returned, whatever that is.
        eager: what eager PyTorch returned for the same operands.
        intervals: what is right, as they judged ``actual``.
        names: of the results, where there are several.
        bound: what eager is held to, in words.
    """
    texts = [_beside(*one, bound) for one in zip(actual, eager, intervals, strict=True)]
    named = [f"{name} {text}" for name, text in zip(names, texts, strict=False)]
    return "; ".join(named if len(texts) > 1 else texts)


def comparable(actual: object, other: Tensor) -> bool:
    """Whether the elements of ``actual``, which a backend returned, can be set beside those of ``other``."""
    if not isinstance(actual, Tensor) or actual.layout != torch.strided:
        return False
    return actual.shape == other.shape and actual.dtype == other.dtype


def _beside(actual: object, eager: Tensor, interval: Interval, bound: str) -> str:
    """A result beside eager's, whatever NaN there are; eager's own worst error over the bound where they differ."""
    if not comparable(actual, eager):
        return "not comparable with eager"
    assert isinstance(actual, Tensor)
    most = differing = 0
    same_signs = True
    theirs = eager.detach().cpu()
    for a, b in zip(*(t.reshape(-1).split(CHUNK) for t in (actual.detach().cpu(), theirs)), strict=True):
        if not a.numel():
            continue
        distance = ulp_distance(a, b)
        most = max(most, int(distance.amax()))
        differing += int((distance != 0).sum())
        same_signs &= torch.equal(a.float().signbit(), b.float().signbit())  # torch has no signbit of fp8
    if not differing:
        return "bit-equal" if same_signs else "equal but for the sign of zeros"
    nan = most == torch.iinfo(torch.int64).max
    far = "NaN on one side" if nan else "different" if most > _MOST_ULP else f"at most {most} ulp apart"
    words = f"{far} in {differing} of {theirs.numel()} elements"
    fits = theirs.shape == interval.expected.shape
    ratio = scored(theirs.to(torch.float64), interval)[2] if fits else math.nan
    if ratio > 1.0:
        return f"{words}; eager itself is outside {bound} ({times(ratio)})"
    return f"{words}; eager is at {ratio:.2g} of {bound}"
