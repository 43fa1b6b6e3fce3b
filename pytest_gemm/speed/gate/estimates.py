"""Estimates of one session and of several: location, spread, priors learnt from other cases, changes and power."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason
from pytest_gemm.speed.data import Judgement, Sample, Session
from pytest_gemm.speed.gate.policy import POWER, WEIGHTS, Policy
from pytest_gemm.speed.gate.sentences import words

_MAD: Final = 1.4826  # of a normal distribution: sd over median absolute deviation
_MOST_DF: Final = 20.0  # never believe a pooled variance more than this: sessions have heavy tails
FEWEST_CASES: Final = 5  # variances, or raw cases, that make a population
_TWO_SIDED: Final = 1.96  # standard deviations from the mean, beyond which are 5% of a normal distribution
_PREFER: Final = math.log(0.8)  # a weight other than 1 has to lower the variance by this factor


FloatArray: TypeAlias = "NDArray[np.float64]"

Share: TypeAlias = "float | None"
"""What an estimate is of: the subject, with this share of the comparator taken off, or ``None``: the comparator."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one session measured of one case.

    Attributes:
        subject: seconds a call, the session's estimate.
        comparator: the same of the comparator, ``None`` without one.
        disturbed: why it does not count; "" when it does.
        session: number of the session within its group, by which base and head are paired.
    """

    subject: float
    comparator: float | None = None
    disturbed: str = ""
    session: int = 0


Readings: TypeAlias = Mapping[CaseId, Sequence[Reading]]
"""Of several sessions, by case."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a baseline holds for the gate.

    Attributes:
        case: which.
        readings: one for each recording session, in their order.
        first: medians over the sessions of the first epoch; ``None`` where that is this one, and where a slow-down
            was accepted since, for otherwise it would be a drift for ever.
        note: label of what else differs (other software), put behind every sentence; "" for nothing.
    """

    case: CaseId
    readings: tuple[Reading, ...]
    first: Reading | None = None
    note: str = ""


class Prior(NamedTuple):
    """What is known of a case's variance from all cases together.

    Attributes:
        variance: of the log estimate from session to session, 0.0 where nothing is known.
        df: degrees of freedom that this is worth, 0.0 for none.
    """

    variance: float = 0.0
    df: float = 0.0


@dataclasses.dataclass(frozen=True)
class Screened:
    """The result of the first sessions; hand it to the confirmation as it is.

    Attributes:
        judgements: of every case; the ones in ``slower`` and ``faster`` are undecided (``to-confirm``) until confirmed.
        slower: cases that look slower; these have to be confirmed.
        faster: cases that look faster; confirming them is optional, they stay undecided otherwise.
        anchor: the comparators (or, without any, all cases) moved as a whole: one fact about the run; ``None`` when
            they did not.
        move: by how much the comparators' median case moved, as a difference of logarithms.
        learnt: from all cases.
    """

    judgements: Mapping[CaseId, Judgement]
    slower: tuple[CaseId, ...]
    faster: tuple[CaseId, ...]
    anchor: Reason | None
    move: float
    learnt: Learnt

    @property
    def wanted(self) -> tuple[CaseId, ...]:
        """All cases that want confirmation."""
        return self.slower + self.faster


def readings(sessions: Iterable[Session]) -> dict[CaseId, list[Reading]]:
    """The estimates of several sessions of one group by case, in order; disturbed ones are kept and marked.

    The ordinal of a session numbers its readings: a case that one session lacks does not shift the later pairs.
    """
    found: dict[CaseId, list[Reading]] = {}
    for number, session in enumerate(sessions):
        for sample in filter(attrgetter("is_timed"), session.samples):
            reading = Reading(sample.estimate, sample.comparator_estimate, sample.disturbed, number)
            found.setdefault(sample.case, []).append(reading)
    return found


def pair_readings(
    base: Sequence[Session], head: Sequence[Session]
) -> tuple[dict[CaseId, list[Reading]], dict[CaseId, list[Reading]]]:
    """The readings of the sessions of two groups that make pairs, in order.

    Where the two of a pair are interleaved, the head's estimates are the base's times the quotients of the windows
    (``speed.Sample.times``): what a neighbour did to both alike is not in their difference.
    """
    then, now = readings(base), readings(head)
    for number, (one, other) in enumerate(zip(base, head, strict=False)):
        if not (one.is_interleaved and other.is_interleaved):
            continue
        theirs, mine = ({sample.case: sample for sample in session.samples} for session in (one, other))
        compare_windows(now, theirs, mine, number)
    return then, now


def compare_windows(
    now: dict[CaseId, list[Reading]], base: Mapping[CaseId, Sample], head: Mapping[CaseId, Sample], number: int
) -> None:
    """Replace the head's readings number ``number`` by those that compare window by window, of interleaved sessions."""
    for case in base.keys() & head.keys():
        if (times := head[case].times(base[case])) is None:
            continue
        known = base[case].comparator_estimate
        comparator = None if times[1] is None or known is None else known * times[1]
        found = Reading(base[case].estimate * times[0], comparator, head[case].disturbed, number)
        now[case] = [found if r.session == number else r for r in now[case]]


# -- location and spread -----------------------------------------------------------------------------------------


class Location(NamedTuple):
    """Median and squared scale of some sessions' estimates, and the degrees of freedom of the latter."""

    centre: float
    variance: float
    df: float
    sessions: int


# What the square of 1.4826 MAD of so many normal values is on average (of its logarithm, against that of a chi-square
# with as many degrees of freedom); 1 - 0.5/n beyond.  Simulated; tests/speed/test_gate.py repeats it.
_MAD_BIAS: Final = {3: 0.608, 4: 0.706, 5: 0.868, 6: 0.855}


def location(values: Sequence[float], floor: float) -> Location:
    """Centre; squared scale from the median absolute deviation.

    The centre is the median, and from five values on the median of all means of two (J. L. Hodges and E. L. Lehmann,
    1963, doi:10.1214/aoms/1177704172), of which one bad session in five moves it little and which varies less.

    From three values on that is 1.4826 MAD, mended for its bias in small samples, and worth 0.75 floor(n/2) + 0.275
    degrees of freedom: its logarithm varies as much as that of a chi-square with so many, for normal and for t(4)
    sessions nearly alike (docs/explanation/gate.md).  It is worth less than half of a standard deviation's, but one bad
    session does not matter.
    """
    count = len(values)
    middle = statistics.median(values)
    sums = [a + b for i, a in enumerate(values) for b in values[i:]]  # of two, each value with itself too
    centre = middle if count < _FEW else statistics.median(sums) / 2
    if count >= 3:
        mad = _MAD * statistics.median(abs(v - middle) for v in values)
        variance = mad * mad / _MAD_BIAS.get(count, 1 - 0.5 / count)
        df = 0.75 * (count // 2) + 0.275
    elif count == 2:
        variance, df = (values[0] - values[1]) ** 2 / 2, 1.0
    else:
        variance, df = 0.0, 0.0
    return Location(centre, max(variance, floor * floor), df, count)


# From so many values on the centre is Hodges and Lehmann's.
_FEW: Final = 5


def _variance(values: Collection[float]) -> float:
    """Sample variance, in floating point: the exact one of ``statistics`` takes thirty times as long."""
    mean = statistics.fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def disturbed_share(count: int) -> float:
    """Variance of the centre of ``count`` sessions in units of the squared scale (docs/explanation/gate.md).

    A median's is 1.2 to 1.6 over the count for normal and for t(4) sessions, the other centre's 1.05 to 1.37.  Two
    count as one, for one of them decides (:meth:`View.slowest`).
    """
    return 1.0 if count <= 2 else (1.5 if count < _FEW else 1.25) / count


def _prior(spreads: Sequence[Location]) -> Prior:
    """Empirical Bayes over cases: log variances scatter by more than chance; the rest is how much they differ.

    Moments of log s^2 with the inverse trigamma function: G. K. Smyth, "Linear models and empirical Bayes methods for
    assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol. Biol. 3 (2004), section 6.2.
    """
    known = [s for s in spreads if s.df > 0]
    if len(known) < FEWEST_CASES:
        return Prior()
    centred = [math.log(s.variance) - float(special.digamma(s.df / 2)) + math.log(s.df / 2) for s in known]
    chance = statistics.fmean(_trigamma(s.df / 2) for s in known)
    excess = _variance(centred) - chance
    df = _MOST_DF if excess <= 0 else min(2 * _inverse_trigamma(excess), _MOST_DF)
    mean = statistics.fmean(centred)
    return Prior(math.exp(mean + float(special.digamma(df / 2)) - math.log(df / 2)), df)


@functools.lru_cache(maxsize=256)
def _trigamma(x: float) -> float:
    """Variance of the logarithm of a gamma variable of shape ``x``."""
    return float(special.polygamma(1, x))


def _inverse_trigamma(value: float) -> float:
    """The argument at which the trigamma function has the value."""
    # trigamma(y) lies between 1/y and 1/y + 1/y^2, so y between 1/value and 1/value + 1.
    low, high = 1 / value, 1 / value + 1
    return float(optimize.brentq(lambda y: _trigamma(y) - value, low, high, xtol=1e-12, rtol=1e-12))


def pooled(prior: Prior, *spreads: Location) -> tuple[float, float]:
    """Mean of the variances, weighted by their degrees of freedom, and the sum of these, which is not zero."""
    df = prior.df + sum(s.df for s in spreads)
    return (prior.df * prior.variance + sum(s.df * s.variance for s in spreads)) / df, df


# -- the estimate of a case --------------------------------------------------------------------------------------


def undisturbed(some: Iterable[Reading]) -> list[Reading]:
    """Readings that were not disturbed."""
    return [r for r in some if not r.disturbed]


def paired(some: Iterable[Reading]) -> bool:
    """Whether every reading has its comparator."""
    return all(r.comparator is not None for r in some)


def logs(some: Iterable[Reading], share: Share) -> list[float]:
    """log(subject) - share log(comparator), or log(comparator)."""
    if share is None:
        return [math.log(r.comparator or math.nan) for r in some]
    if share == 0:
        return [math.log(r.subject) for r in some]
    return [math.log(r.subject) - share * math.log(r.comparator or math.nan) for r in some]


def choose(spreads: Spreads) -> dict[CaseId, float]:
    """The weight of each case: the one of the least variance, but 1 unless another is clearly better.

    A variance from a dozen sessions is off by a factor of two, so each case's gain is shrunk to the mean gain of all
    cases, by how much of the scatter of the gains is not chance.
    """
    beside = {case: by_weight for case, by_weight in spreads.items() if 1.0 in by_weight}
    if not beside:
        return dict.fromkeys(spreads, 0.0)
    # Both variances come from the same sessions, so their errors partly cancel: one's worth of chance, not two.
    chance = statistics.fmean(_trigamma(by_weight[1.0].df / 2) for by_weight in beside.values())
    best = dict.fromkeys(beside, (0.0, 1.0))
    for w in WEIGHTS[1:]:
        gains = {case: math.log(by_weight[w].variance / by_weight[1.0].variance) for case, by_weight in beside.items()}
        mean = statistics.fmean(gains.values())
        scatter = _variance(gains.values()) if len(gains) > 1 else 0.0
        share = max(0.0, scatter - chance) / scatter if scatter > 0 else 0.0
        best = {case: min(best[case], (mean + share * (gain - mean), w)) for case, gain in gains.items()}
    chosen = {case: w if gain < _PREFER else 1.0 for case, (gain, w) in best.items()}
    return dict.fromkeys(spreads, 0.0) | chosen


Spreads: TypeAlias = Mapping[CaseId, Mapping[Share, Location]]


class Learnt(NamedTuple):
    """Spreads by case and share, the share chosen for each case, the common variance by share."""

    at: Spreads
    weights: Mapping[CaseId, float]
    priors: Mapping[Share, Prior]


def spreads(values: Callable[[Share], Sequence[float]], floor: float, *, has_comparator: bool) -> dict[Share, Location]:
    """Location and spread of a case's estimates, by share."""
    return {w: location(values(w), floor) for w in ((*WEIGHTS, None) if has_comparator else (0.0,))}


def learn(at: Spreads) -> Learnt:
    """The common variances and the weights, from the spreads of all cases."""
    priors = {w: _prior([by[w] for by in at.values() if w in by]) for w in (*WEIGHTS, None)}
    comparators = priors[None]
    if comparators.df:
        # The machine's state is in the comparators' own time, which all cases of a session share: many of them carry
        # no more information on its spread than one.
        known = statistics.median(by[None].df for by in at.values() if None in by)
        priors[None] = Prior(comparators.variance, min(comparators.df, known))
    return Learnt(at, choose(at), priors)


# -- a change, and the power to see one --------------------------------------------------------------------------


def _misses(sessions: int) -> int:
    """How many sessions need not repeat a slow-down: of those beyond four one in four, for some may be bad."""
    return max(0, sessions - 4) // 4


class View(NamedTuple):
    """A change by one estimate: its estimate, standard error, degrees of freedom, and the change in each session."""

    estimate: float
    error: float
    df: float
    changes: tuple[float, ...]

    def p_slower(self, limit: float) -> float:
        """p-value of "at most ``limit`` slower"."""
        return float(special.stdtr(self.df, (limit - self.estimate) / self.error))

    def mirrored(self) -> View:
        """The same with slower and faster exchanged."""
        return View(-self.estimate, self.error, self.df, tuple(-c for c in self.changes))

    def slowest(self) -> View:
        """Of two sessions the slower, for the other may be a stray that hides a slow-down; else the view itself."""
        return self._replace(estimate=max(self.changes)) if takes_slowest(len(self.changes)) else self

    def recurs(self, limit: float) -> bool:
        """Whether all sessions but a few are beyond the limit; see :func:`_misses`."""
        return sum(c <= limit for c in self.changes) <= _misses(len(self.changes))

    def interval(self) -> tuple[float, float]:
        """95% interval of the estimate."""
        half = float(special.stdtrit(self.df, 0.975)) * self.error
        return self.estimate - half, self.estimate + half

    def __str__(self) -> str:
        """The estimate with its interval, in percent."""
        low, high = self.interval()
        return f"{words(self.estimate)} [{100 * math.expm1(low):+.1f}%, {100 * math.expm1(high):+.1f}%]"


def change(values: Sequence[float], then: Location | None, prior: Prior, policy: Policy, *, own_spread: bool) -> View:
    """The change of a case's estimates.

    With ``own_spread`` the estimates' own spread is pooled with the baseline's, and counts alone (moderated) if that
    is larger: a head that became noisy must not be judged by the quiet of the baseline.

    Args:
        values: logarithms, or their differences within pairs.
        then: of the stored sessions; ``None`` for pairs.
        prior: of the variance.
        policy: for the least spread that is believed.
        own_spread: ``False``: the spread is known from the baseline alone.
    """
    now = location(values, policy.floor)
    own_spread = own_spread and now.df > 0
    variance, df = pooled(prior, *([then] if then else []), *([now] if own_spread else []))
    if own_spread:
        variance = max(variance, pooled(prior, now)[0])
    share = disturbed_share(now.sessions) + (disturbed_share(then.sessions) if then else 0.0)
    centre = then.centre if then else 0.0
    error = math.sqrt(max(variance, policy.floor**2) * share)
    return View(now.centre - centre, error, df, tuple(x - centre for x in values))


def smallest(spread: Location, share: Share, learnt: Learnt, policy: Policy, *, is_paired: bool = False) -> float:
    """The slow-down that passes screen and confirmation with a probability of 95%, as a fraction.

    Args:
        spread: of the log estimate from session to session.
        share: of the comparator that is taken off; the rest moves with the machine from day to day.
        learnt: from all cases.
        policy: levels and limit; at most ``policy.beside`` other cases are taken to be confirmed beside it.
        is_paired: the spread is of differences within pairs; otherwise of the sessions of a baseline.
    """
    variance, df = pooled(learnt.priors[share], spread)
    scale = math.sqrt(max(variance, policy.floor**2))
    of_day = math.hypot(1.0, 1.0 - (share or 0.0)) * math.hypot(policy.day, policy.of_session * scale)
    stored, day = (0, 0.0) if is_paired else (spread.sessions, of_day)
    beyond = _needed(scale, df, stored, day, min(policy.beside, max(0, len(learnt.at) - 1)), policy)
    return math.expm1(min(math.log1p(policy.delta) + beyond, 5.0))


def confirmed_by(weight: float, learnt: Learnt, stored: int, policy: Policy) -> tuple[float, ...]:
    """The shares by which a case with a comparator is likely to be confirmed, each of which has to show a slow-down.

    By time and as a ratio where comparators that are what they were are taken for moved in more than 5% of the
    confirmations; otherwise by the case's own.  Without ``stored`` sessions it is of pairs.
    """
    confirm = (policy.sessions if stored else policy.pairs)[1]
    share = disturbed_share(confirm) + (disturbed_share(stored) if stored else 0.0)
    spread = math.hypot(math.sqrt(learnt.priors[None].variance * share), policy.day if stored else 0.0)
    return (0.0, 1.0) if _TWO_SIDED * spread > math.log1p(policy.anchor_shift) else (weight,)


# Of a normal distribution, equally likely each.
_QUANTILES: Final = special.ndtri((np.arange(32) + 0.5) / 32)


@functools.lru_cache(maxsize=4096)
def _needed(scale: float, df: float, stored: int, day: float, beside: int, policy: Policy) -> float:
    """How far beyond the tolerated slow-down, as a logarithm, is found with a power of 95%.

    Screen and confirmation share the error of the baseline and the day, and are independent otherwise; of the
    confirmation's two rules, test and recurrence, the harder counts.  Some sessions are strays to the fast side; of a
    pair either may be one.  Without ``stored`` sessions it is of pairs.
    """
    screen, confirm = policy.sessions if stored else policy.pairs
    stray = policy.stray if stored else 1 - (1 - policy.stray) ** 2
    then = disturbed_share(stored) if stored else 0.0
    common = _QUANTILES * math.hypot(scale * math.sqrt(then), day)
    screen_limit = scale * float(special.stdtrit(df, 1 - policy.screen_level))
    confirm_level = policy.confirm_level / len(policy.looks(confirm)) / (1 + beside)
    confirm_limit = scale * float(special.stdtrit(df, 1 - confirm_level)) * math.sqrt(disturbed_share(confirm) + then)

    def below(distance: FloatArray, lost: float) -> FloatArray:
        """Probability that one misses a limit from which it is so far, when a share ``lost`` are strays."""
        usual, strays = (special.stdtr(df, -(distance - off) / scale) for off in (0.0, policy.stray_by))
        return (1 - lost) * usual + lost * strays

    @functools.cache
    def power(beyond: float) -> float:
        change = beyond + common
        if takes_slowest(screen) and stored:
            passes = 1 - below(change - screen_limit * math.sqrt(1.0 + then), stray) ** screen
        else:
            share = disturbed_share(screen)
            lost = 1 - float(special.bdtr((screen - 1) // 2, screen, stray))  # beyond these the median is a stray
            passes = 1 - below((change - screen_limit * math.sqrt(share + then)) / math.sqrt(share), lost)
        tested = special.stdtr(df, (change - confirm_limit) / (scale * math.sqrt(disturbed_share(confirm))))
        recurs = special.bdtr(_misses(confirm), confirm, below(change, stray))
        return float(np.mean(passes * np.minimum(tested, recurs)))

    def missing(beyond: float) -> float:  # nearly a straight line, unlike the power itself
        return float(special.logit(POWER) - special.logit(min(max(1e-9, power(beyond)), 1 - 1e-9)))

    least, most, end = 0.0, 4.0 * scale, 1000.0 * scale
    while power(most) < POWER:
        if most >= end:
            return end
        least, most = most, min(4.0 * most, end)
    return float(optimize.brentq(missing, least, most, xtol=1e-6))


def takes_slowest(sessions: int) -> bool:
    """Whether the slowest of a screen's sessions decides: of two, of which one may have been a stray."""
    return sessions == 2


def median_comparator(some: Sequence[Reading]) -> float | None:
    """Median time of the comparator, in seconds."""
    return statistics.median(r.comparator or math.nan for r in some) if paired(some) else None


def is_far(changes: Iterable[float], policy: Policy) -> bool:
    """Whether all of the changes are so large that no disturbance explains them; see docs/explanation/gate.md."""
    return all(change > math.log1p(policy.far) for change in changes)


def fewest(sessions: int) -> int:
    """Sessions that must be usable out of those asked for: more than half, but one of two."""
    return 1 if takes_slowest(sessions) else sessions // 2 + 1
