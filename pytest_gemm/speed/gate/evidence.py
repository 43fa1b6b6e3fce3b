"""The evidence for a change of speed: ratios, intervals and p-values."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from scipy import optimize, special

from pytest_gemm.case_id import CaseId
from pytest_gemm.speed.gate.estimates import (
    Prior,
    Reading,
    disturbed_share,
    location,
    paired,
    pooled,
)
from pytest_gemm.speed.gate.policy import POWER, Policy

# -- what is known of a case -------------------------------------------------------------------------------------


def _misses(sessions: int) -> int:
    """How many sessions need not repeat a slow-down: of those beyond four one in four, for some may be bad."""
    return max(0, sessions - 4) // 4


class View(NamedTuple):
    """A change by one figure: its estimate, standard error, degrees of freedom, and the change in each session."""

    estimate: float
    error: float
    df: float
    changes: tuple[float, ...]

    def p_slower(self, limit: float) -> float:
        """p-value of "at most ``limit`` slower"."""
        return float(special.stdtr(self.df, (limit - self.estimate) / self.error))

    def p_faster(self, limit: float) -> float:
        """p-value of "at most ``limit`` faster"."""
        return self.mirrored().p_slower(limit)

    def mirrored(self) -> View:
        """The same with slower and faster exchanged."""
        return View(-self.estimate, self.error, self.df, tuple(-c for c in self.changes))

    def recurs(self, limit: float) -> bool:
        """Whether the sessions are beyond the limit, but for a few; see :func:`_misses`."""
        return sum(c <= limit for c in self.changes) <= _misses(len(self.changes))

    def interval(self) -> tuple[float, float]:
        """95% interval of the estimate."""
        half = float(special.stdtrit(self.df, 0.975)) * self.error
        return self.estimate - half, self.estimate + half


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that a verdict on one case rests on.

    Attributes:
        case: which.
        weight: of ``main``.
        main, raw, ratio, comparator: the change by the chosen figure, by time alone, by the ratio alone, and of the
            comparator; the last two are ``None`` without a comparator.
        since_first: how much slower the baseline is than the first epoch, by weight; empty without one.
        sessions: that count.
        seconds, comparator_seconds, stored_seconds: medians.
        minimum_effect: the smallest slow-down that this policy sees, as a fraction.
        note: label that every sentence ends with.
        is_far: too few sessions were undisturbed, and each is far beyond what it is compared with.
    """

    case: CaseId
    weight: float
    main: View
    raw: View
    ratio: View | None
    comparator: View | None
    since_first: Mapping[float, float]
    sessions: int
    seconds: float
    comparator_seconds: float | None
    stored_seconds: float
    minimum_effect: float
    note: str = ""
    is_far: bool = False


def by_pairs(changes: Sequence[float], prior: Prior, policy: Policy) -> View:
    """The change by the differences of neighbouring sessions of base and head."""
    pairs = location(changes, policy.floor)
    variance, df = pooled(prior, pairs)
    error = math.sqrt(max(variance, policy.floor**2) * disturbed_share(pairs.sessions))
    return View(pairs.centre, error, df, tuple(changes))


def smallest(
    scale: float, df: float, stored: int, screen_sessions: int, confirm_sessions: int, policy: Policy
) -> float:
    """The slow-down that passes screen and confirmation with a probability of 95%, as a fraction.

    Args:
        scale: from session to session, of the log figure.
        df: degrees of freedom of the scale.
        stored: sessions of the baseline, 0 for pairs.
        screen_sessions: of the screen.
        confirm_sessions: of the confirmation, at its last look.
        policy: levels and limit; one case is taken to be confirmed.
    """
    if not math.isfinite(scale):
        return math.inf
    level = policy.confirm_level / len(policy.looks(confirm_sessions))
    beyond = _needed(df, stored, screen_sessions, confirm_sessions, policy.screen_level, level)
    return math.expm1(min(math.log1p(policy.delta) + beyond * scale, 5.0))


@functools.lru_cache(maxsize=1024)
def _needed(
    df: float, stored: int, screen_sessions: int, confirm_sessions: int, screen_level: float, confirm_level: float
) -> float:
    """How many scales beyond the tolerated slow-down are found with a power of 95%.

    The screen is independent of the confirmation; of the latter's two rules, test and recurrence, the harder counts.
    """
    then = disturbed_share(stored) if stored else 0.0
    screening = math.sqrt(disturbed_share(screen_sessions) + then)
    confirming = math.sqrt(disturbed_share(confirm_sessions) + then)
    single = math.sqrt(1.0 + then)
    needed_screen = float(special.stdtrit(df, 1 - screen_level))
    needed_confirm = float(special.stdtrit(df, 1 - confirm_level))

    def power(scales: float) -> float:
        passes = float(special.stdtr(df, scales / screening - needed_screen))
        tested = float(special.stdtr(df, scales / confirming - needed_confirm))
        missed = float(special.stdtr(df, -scales / single))
        recurs = float(special.bdtr(_misses(confirm_sessions), confirm_sessions, missed))
        return passes * min(tested, recurs)

    most = 1000.0
    if power(most) < POWER:
        return most
    return float(optimize.brentq(lambda scales: power(scales) - POWER, 0.0, most, xtol=1e-6))


def median_comparator(some: Sequence[Reading]) -> float | None:
    """Median time of the comparator, in seconds."""
    return statistics.median(r.comparator or math.nan for r in some) if paired(some) else None


def is_far(changes: Iterable[float], policy: Policy) -> bool:
    """Whether all of the changes are so large that no disturbance explains them; see docs/gate.md."""
    return all(change > math.log1p(policy.far) for change in changes)


def fewest(sessions: int) -> int:
    """Sessions that must be usable out of those asked for: more than half."""
    return sessions // 2 + 1


class Claim(NamedTuple):
    """One null hypothesis of a case: the figures that all have to reject it, with their limits.

    ``alone`` is the figure that would have sufficed if the anchor had not moved.
    """

    code: str
    needed: tuple[tuple[View, float], ...]
    alone: tuple[View, float] | None

    @property
    def p_value(self) -> float:
        """Of the union of the null hypotheses: the largest."""
        return max(view.p_slower(limit) for view, limit in self.needed)

    @property
    def recurs(self) -> bool:
        """Whether every view shows the change in most sessions."""
        return all(view.recurs(limit) for view, limit in self.needed)


def claims_of(e: Evidence, policy: Policy, move: float, *, both: bool, mirrored: bool = False) -> list[Claim]:
    """What can make the case slower (or faster): a change beyond delta, and a drift since the first epoch.

    A figure that does not take all of the comparator off is as slow as the machine: that much is added to its limit.
    """
    sign = -1.0 if mirrored else 1.0

    def turned(view: View) -> View:
        return view.mirrored() if mirrored else view

    def claim(code: str, limit: float, since: Callable[[float], float]) -> Claim:
        if both and e.ratio:
            ratio = (turned(e.ratio), limit - since(1.0))
            return Claim(code, (ratio, (turned(e.raw), limit - since(0.0))), ratio)
        lift = (1 - e.weight) * max(0.0, sign * move)
        return Claim(code, ((turned(e.main), limit + lift - since(e.weight)),), None)

    found = [claim("delta", math.log1p(policy.delta), lambda _: 0.0)]
    needed = {1.0, 0.0} if both and e.ratio else {e.weight}
    if not mirrored and needed <= e.since_first.keys():
        found.append(claim("drift", math.log1p(policy.drift), e.since_first.__getitem__))
    return found
