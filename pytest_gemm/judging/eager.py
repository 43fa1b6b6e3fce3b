"""A result beside the one of eager PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from pytest_gemm.judging.verdict import CHUNK, Score, scored, times
from pytest_gemm.numerics.rounding import ulp_distance
from pytest_gemm.numerics.span import Interval

# -- beside eager PyTorch ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EagerComparison:
    """A result beside eager's: different is not worse.

    Attributes:
        bit_equal: the same bits everywhere, whatever NaN it is.
        max_ulps: largest distance in units of the last place; ``None`` if the results cannot be compared.
        differing, total: elements that differ (a zero's sign does not count), all elements.
        eager_ratio: eager's own worst error over the bound: above 1 eager itself is outside.
        note: why they cannot be compared, or "".
    """

    bit_equal: bool
    max_ulps: int | None
    differing: int
    total: int
    eager_ratio: float
    note: str = ""

    def text(self) -> str:
        """In words, for a report."""
        if self.note:
            return self.note
        if self.bit_equal:
            return "bit-equal"
        if not self.differing:
            return "equal but for the sign of zeros"
        one_nan = self.max_ulps == torch.iinfo(torch.int64).max
        far = "NaN on one side" if one_nan else f"at most {self.max_ulps} ulp apart"
        words = f"{far} in {self.differing} of {self.total} elements"
        if self.eager_ratio > 1.0:
            return f"{words}; eager itself is outside the bound ({times(self.eager_ratio)})"
        return f"{words}; eager is at {self.eager_ratio:.2g} of the bound"

    def __str__(self) -> str:
        return self.text()


def beside_eager(
    actual: Sequence[object],
    eager: Sequence[torch.Tensor],
    intervals: Sequence[Interval],
    names: Sequence[str] = ("the tapped value", "the result"),
) -> str:
    """:func:`against_eager` for each of a program's results, in words; ``names`` are those of several."""
    texts = [against_eager(*one).text() for one in zip(actual, eager, intervals, strict=True)]
    if len(texts) == 1:
        return texts[0]
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def comparable(actual: object, other: torch.Tensor) -> bool:
    """Whether the elements of ``actual``, which a backend returned, can be set beside those of ``other``."""
    if not isinstance(actual, torch.Tensor) or actual.layout != torch.strided:
        return False
    return actual.shape == other.shape and actual.dtype == other.dtype


def against_eager(actual: object, eager: torch.Tensor, interval: Interval) -> EagerComparison:
    """Set a result beside eager's, and eager beside the truth.

    Args:
        actual: what the backend returned, whatever that is.
        eager: what eager PyTorch returned for the same operands.
        interval: the truth, as it judged ``actual``.
    """
    if not comparable(actual, eager):
        return EagerComparison(False, None, eager.numel(), eager.numel(), math.nan, "not comparable with eager")
    assert isinstance(actual, torch.Tensor)
    if eager.numel() == 0:
        return EagerComparison(True, 0, 0, 0, 0.0)
    ours, theirs = actual.detach().cpu(), eager.detach().cpu()
    score = Score(ratio=math.nan)
    if theirs.shape == interval.expected.shape:
        score = scored(theirs.to(torch.float64), interval)
    most = differing = 0
    first_flat, second_flat = ours.reshape(-1), theirs.reshape(-1)
    signs = True
    for first in range(0, ours.numel(), CHUNK):
        a, b = first_flat[first : first + CHUNK], second_flat[first : first + CHUNK]
        distance = ulp_distance(a, b)
        most = max(most, int(distance.amax()))
        differing += int((distance != 0).sum())
        signs = signs and (not a.dtype.is_floating_point or torch.equal(torch.signbit(a), torch.signbit(b)))
    return EagerComparison(differing == 0 and signs, most, differing, eager.numel(), score.ratio)
