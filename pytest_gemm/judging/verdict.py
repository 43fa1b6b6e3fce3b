"""A result against its acceptance interval: whether it is right, and if not, where and in what way.

:func:`compare` decides and, on a mismatch, locates: which elements are bad (a tail, a tile, every 16th column),
and what was computed instead (products of some k missing, no bias, the answer of an earlier call).  The first is a fact
about the set of bad elements; the second is a hypothesis, printed only if it reproduces the bad values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from pytest_gemm.judging.explain import cause_of
from pytest_gemm.judging.locate import COVER, Wrong, described_pattern
from pytest_gemm.numerics.span import Interval
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

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
        if math.isnan(error) or math.isinf(error) or self.code == "zero-sign":
            worst = f"first at {at}: got {self.actual:.9g}, expected {self.expected:.9g}"
        elif self.bound > 0:
            worst = f"worst {error:.3g} at {at}, bound {self.bound:.3g} ({times(self.ratio)}): " + self._values()
        elif self.tier == "exact":
            worst = f"worst {error:.3g} at {at}, where the result is exact: " + self._values()
        else:
            worst = f"worst {error:.3g} at {at}, where only one rounded value is right: " + self._values()
        lines = [self.summary(), f"  {worst}", f"  {self.pattern}"]
        if self.cause:
            lines.append(f"  {self.cause}")
        return "\n".join(lines)

    def _values(self) -> str:
        return f"got {self.actual:.9g}, expected {self.expected:.9g}"


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
    tile: tuple[int, int] | None = None,
    others: Mapping[str, torch.Tensor] | None = None,
    whole: bool = True,
) -> Comparison:
    """Judge a result.

    The sign of a zero is judged where every order of summation gives the same (docs/oracle.md, "The sign of zero"), of
    a result that is right but for that.

    Args:
        actual: what the backend returned, whatever that is.
        interval: what is right.
        problem: what was computed.
        operands: from what.
        tile: the kernel's tile (rows, columns) if known; tried first when bad elements are located.
        others: results of earlier calls by name, to recognise a stale one.
        whole: ``False`` for lines of a larger result: then the place of wrong elements is not described;
            it depends on the lines.
    """
    complaint = complaint_of(actual, problem, operands)
    if complaint is not None:
        total = interval.expected.numel()
        return Comparison(math.inf, 0.0, Mismatch(complaint[0], total, total, pattern=complaint[1]))
    assert isinstance(actual, torch.Tensor)
    x = actual.detach().to(device="cpu", dtype=torch.float64)
    if x.numel() == 0:
        return Comparison(0.0, 1.0)
    score = scored(x, interval)
    share = score.equal / x.numel()
    bad = rejected(x, interval) if score.bad else interval.wrong_zeros(x)
    if not bool(bad.any()):
        return Comparison(score.ratio, share)
    return _reject(actual, x, bad, share, interval, problem, operands, tile, others or {}, whole)


def rejected(x: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Which elements are outside, or zeros of the wrong sign where none is; float64, of the interval's shape."""
    lo, hi = interval.lo, interval.hi
    good = (x >= lo) & (x <= hi)
    good |= x.isnan() & (lo.isnan() | ((lo == -math.inf) & (hi == math.inf)))
    return interval.wrong_zeros(x) if bool(good.all()) else ~good


def ratios(x: torch.Tensor, interval: Interval) -> torch.Tensor:
    """Error over bound of each element, as :attr:`Comparison.ratio` has it of the worst one.

    Args:
        x: a result in float64, of the interval's shape.
        interval: what is right.

    Returns:
        At most 1 iff the element is accepted; infinity for a NaN or an infinity that is not.
    """
    bad = rejected(x, interval)
    found = _ratio(x, interval.lo, interval.hi, interval.expected)
    found = torch.where(bad, found.clamp(min=math.nextafter(1.0, 2.0)), found.clamp(max=1.0))
    return torch.where(bad & ~(x.isfinite() & interval.expected.isfinite()), math.inf, found)


@dataclasses.dataclass
class Score:
    """Counts over a result: elements equal to the rounded reference, elements outside, and the worst ratio."""

    equal: int = 0
    bad: int = 0
    ratio: float = 0.0


def scored(x: torch.Tensor, interval: Interval) -> Score:
    """One walk over a result, in pieces whose intermediates stay in a core's cache."""
    score = Score()
    flat = [t.reshape(-1) for t in (x, interval.lo, interval.hi, interval.expected)]
    for first in range(0, x.numel(), CHUNK):
        _score_chunk(score, *(t[first : first + CHUNK] for t in flat))
    return score


def _score_chunk(score: Score, x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> None:
    count = x.numel()
    equal = int((x == expected).sum())
    good = (x >= lo) & (x <= hi)
    accepted = int(good.sum())
    if equal == accepted == count:
        score.equal += count
        return
    if accepted < count:
        # NaN where it belongs, and where nothing can be said.
        nan = x.isnan()
        good |= nan & (lo.isnan() | ((lo == -math.inf) & (hi == math.inf)))
        equal += int((nan & expected.isnan()).sum())
        accepted = int(good.sum())
    score.equal += equal
    score.bad += count - accepted
    worst = float(_ratio(x, lo, hi, expected).amax())
    if accepted == count:
        worst = min(worst, 1.0)
    elif not bool(x[~good].isfinite().all()):
        worst = math.inf  # a NaN or an infinity has no distance
    else:
        worst = max(worst, math.nextafter(1.0, 2.0))
    score.ratio = max(score.ratio, worst)


def _ratio(x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Error over allowance, from the middle value: expected, or the nearest accepted one under ``eager`` rounding."""
    middle = torch.minimum(torch.maximum(expected, lo), hi)
    error = x - middle
    ratio = error / torch.where(error > 0, hi, lo).sub_(middle)
    # Numerator and denominator have one sign, but a zero denominator may be -0.  Zero over zero is the very
    # value; differences of infinities or NaN are for the pattern checks.
    return ratio.abs_().nan_to_num_(nan=0.0, posinf=math.inf)


def complaint_of(actual: object, problem: Problem, operands: Operands) -> tuple[str, str] | None:
    """Why the result cannot even be compared: (code, sentence)."""
    if not isinstance(actual, torch.Tensor):
        return "wrong-type", f"the result is a {type(actual).__name__}, not a tensor"
    if actual.layout != torch.strided:
        return "wrong-layout", f"the result is a {str(actual.layout).removeprefix('torch.')} tensor, not a strided one"
    if tuple(actual.shape) != problem.result_shape:
        return "wrong-shape", f"the result has shape {tuple(actual.shape)}, expected {problem.result_shape}"
    wanted = torch_dtype(problem.result_dtype)
    if actual.dtype != wanted:
        got = str(actual.dtype).removeprefix("torch.")
        return "wrong-dtype", f"the result is {got}, expected {problem.result_dtype.torch_name}"
    if actual.device.type != torch.device(operands.device).type:
        return "wrong-device", f"the result is on {actual.device}, the operands on {operands.device}"
    return None


def _reject(
    actual: torch.Tensor,
    x: torch.Tensor,
    bad: torch.Tensor,
    share: float,
    interval: Interval,
    problem: Problem,
    operands: Operands,
    tile: tuple[int, int] | None,
    others: Mapping[str, torch.Tensor],
    whole: bool,
) -> Comparison:
    """Describe a wrong result."""
    where = bad.nonzero()
    values, wanted = x[bad], interval.expected[bad]
    lo, hi = interval.lo[bad], interval.hi[bad]
    count = values.numel()
    nan, lacking = values.isnan(), wanted.isnan()
    infinite = values.isinf() & wanted.isfinite()
    zeros = (values >= lo) & (values <= hi)  # of the wrong sign
    ratio = _ratio(values, lo, hi, wanted)
    ratio = torch.where(nan | lacking | infinite | zeros, math.inf, ratio)
    # Infinite ratios (a bound of 0) are told apart by the error itself.
    error = (values - wanted).abs()
    order = torch.where(ratio.isinf(), error.nan_to_num(nan=math.inf), -1.0) if bool(ratio.isinf().any()) else ratio
    worst = int(order.argmax())
    # The limit of a float's excess is 1: a rejected element never counts as "1x" or less.
    worst_ratio = max(float(ratio[worst]), math.nextafter(1.0, 2.0))
    middle = min(max(float(wanted[worst]), float(lo[worst])), float(hi[worst]))
    upwards = float(values[worst]) > middle
    bound = float(hi[worst]) - middle if upwards else middle - float(lo[worst])
    if int(nan.sum()) >= COVER * count:
        code = "nan"
    elif int(lacking.sum()) >= COVER * count:
        code = "missing-nan"
    elif int(infinite.sum()) >= COVER * count:
        code = "infinite"
    elif bool(zeros.any()):
        code = "zero-sign"
    else:
        code = "outside-bound"
    view = Wrong(x, bad, interval, problem, operands, tile, others)
    mismatch = Mismatch(
        code=code,
        count=count,
        total=x.numel(),
        index=tuple(where[worst].tolist()),
        actual=float(values[worst]),
        expected=float(wanted[worst]),
        bound=bound if math.isfinite(bound) else 0.0,
        ratio=worst_ratio,
        tier=interval.tier,
        pattern=described_pattern(view) if whole else "",
        cause="" if code == "zero-sign" else cause_of(view, actual, whole),
    )
    return Comparison(worst_ratio, share, mismatch)
