"""The gate: from sessions to verdicts.  Pure statistics over ``speed``'s data.

No clock, no file, no torch: what is decided here can be tabled and replayed.  ``docs/gate.md`` derives the rules and
shows what they are worth; ``calibrate`` repeats that study on a machine's own sessions.

Inside, all changes are differences of natural logarithms; :class:`Policy` and ``speed.Judgement``
speak of fractions (0.02 is 2%).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from scipy import special

from pytest_gemm.outcome import Reason
from pytest_gemm.speed import CaseKey, Judgement, Sample, Session, Verdict, by_case

__all__ = [
    "Policy",
    "Prior",
    "Reading",
    "Screened",
    "Stored",
    "anchor_shift",
    "annotate",
    "by_looks",
    "compare_windows",
    "confirm",
    "confirm_pair",
    "detectable",
    "moved",
    "pair_readings",
    "readings",
    "regret",
    "screen",
    "screen_pair",
]

WEIGHTS: Final = (1.0, 0.5, 0.0)
"""Shares of the comparator that may be taken off, the default first."""

_POWER: Final = 0.95
_MAD: Final = 1.4826  # of a normal distribution: sd over median absolute deviation
_MOST_DF: Final = 20.0  # never believe a pooled variance more than this: sessions have heavy tails
_FEWEST_CASES: Final = 5  # variances, or raw cases, that make a population
_PREFER: Final = math.log(0.8)  # a weight other than 1 has to lower the variance by this factor


@dataclasses.dataclass(frozen=True)
class Policy:
    """What the gate tolerates and how sure it has to be.  All changes are fractions: 0.02 is 2%.

    Attributes:
        delta: slow-down that is tolerated; the null hypothesis is "at most this".
        screen_sessions: processes that look at every case.
        confirm_sessions: further processes that look at the cases that the screen picked out, in all.
        first_look: after so many of these, or pairs, what is clear already is settled and only the rest goes on.
        screen_pairs, confirm_pairs: the same for base against head; a pair is one process of each.
        screen_level: level of the screen's test, a case.
        confirm_level: level of the confirmation, over all cases that are confirmed (Holm), shared by its two looks.
        floor: least session-to-session standard deviation of the log figure that is believed.
        too_noisy: a case whose smallest detectable slow-down is above this stays undecided.
        anchor_shift: move of the comparators' median case from which on they are no anchor any more.
        guard: a slow-down beyond this in every session is red whatever the noise model says.
        far: a slow-down beyond this, from the slowest stored session to the fastest new one, is red although the new
            sessions were disturbed.
        drift: tolerated slow-down since the first epoch.
        fewest_stored: sessions that a baseline needs to be tested against.

    Raises:
        ValueError: for a value that no test can be made with; the message names it.
    """

    delta: float = 0.02
    screen_sessions: int = 4
    confirm_sessions: int = 16
    first_look: int = 6
    screen_pairs: int = 4
    confirm_pairs: int = 12
    screen_level: float = 0.30
    confirm_level: float = 0.02
    floor: float = 0.003
    too_noisy: float = 0.10
    anchor_shift: float = 0.03
    guard: float = 0.15
    far: float = 3.0
    drift: float = 0.05
    fewest_stored: int = 5

    def __post_init__(self) -> None:
        for name in ("screen_level", "confirm_level"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{name} is {getattr(self, name)}; a level lies between 0 and 0.5")
        for name in ("delta", "floor", "too_noisy", "anchor_shift", "guard", "drift"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a fraction between 0 and 1 (2% is 0.02)")
        if not self.guard < self.far < math.inf:
            raise ValueError(f"far is {self.far}; it is a fraction above guard, {self.guard} (300% is 3.0)")
        for name, least in (
            ("screen_sessions", 1),  # the baseline knows the spread
            ("confirm_sessions", 3),
            ("screen_pairs", 2),  # pairs are the only source of the spread
            ("confirm_pairs", 3),
            ("first_look", 3),
            ("fewest_stored", 4),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes at least {least}")

    def looks(self, sessions: int) -> tuple[int, ...]:
        """After how many sessions, or pairs, of a confirmation of ``sessions`` it is judged.

        Twice, unless the second look would see hardly more than the first.
        """
        return (self.first_look, sessions) if sessions >= 1.5 * self.first_look else (sessions,)

    @classmethod
    def for_device(cls, device: str) -> Policy:
        """The default of a device, ``cpu`` or ``cuda``.

        Raises:
            ValueError: for any other device.
        """
        if device == "cpu":
            return cls()
        if device == "cuda":
            return cls(
                delta=0.01,
                screen_sessions=1,
                confirm_sessions=5,
                screen_pairs=3,
                confirm_pairs=8,
                screen_level=0.10,
                confirm_level=0.01,
                anchor_shift=0.01,
            )
        raise ValueError(f"there is no speed policy for device {device!r}; known are cpu and cuda")


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one session says of one case.

    Attributes:
        subject: seconds a call, the session's figure.
        comparator: the same of the comparator, ``None`` without one.
        disturbed: why it does not count; "" when it does.
        session: number of the session within its arm, by which base and head are paired; ``None``: by position.
    """

    subject: float
    comparator: float | None = None
    disturbed: str = ""
    session: int | None = None


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

    case: CaseKey
    readings: tuple[Reading, ...]
    first: Reading | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Prior:
    """What the cases together say of a case's variance.

    Attributes:
        variance: of the log figure from session to session, 0.0 where nothing is known.
        df: degrees of freedom that this is worth, 0.0 for none.
    """

    variance: float = 0.0
    df: float = 0.0


@dataclasses.dataclass(frozen=True)
class Screened:
    """What the first sessions say; hand it to the confirmation as it is.

    Attributes:
        judgements: of every case; the ones in ``slower`` and ``faster`` are undecided (``to-confirm``) until confirmed.
        slower: cases that look slower; these have to be confirmed.
        faster: cases that look faster; confirming them is optional, they stay undecided otherwise.
        anchor: the comparators (or, without any, all cases) moved as a whole: one fact about the run; ``None`` when
            they did not.
        move: by how much the comparators' median case moved, as a difference of logarithms.
        raw_moved: cases without a comparator cannot be told from the machine.
        weights: share of the comparator that is taken off, by case.
        priors: of the variance, by weight.
        of_comparators: of the variance of the comparators' own time.
    """

    judgements: Mapping[CaseKey, Judgement]
    slower: tuple[CaseKey, ...] = ()
    faster: tuple[CaseKey, ...] = ()
    anchor: Reason | None = None
    move: float = 0.0
    raw_moved: bool = False
    weights: Mapping[CaseKey, float] = dataclasses.field(default_factory=dict)
    priors: Mapping[float, Prior] = dataclasses.field(default_factory=dict)
    of_comparators: Prior = Prior()

    @property
    def wanted(self) -> tuple[CaseKey, ...]:
        """All cases that want confirmation."""
        return self.slower + self.faster


def readings(sessions: Iterable[Session]) -> dict[CaseKey, list[Reading]]:
    """The figures of several sessions of one arm by case, in order; disturbed ones are kept and say so.

    The ordinal of a session numbers its readings: a case that one session lacks does not shift the later pairs.
    """
    found: dict[CaseKey, list[Reading]] = {}
    for number, session in enumerate(sessions):
        for case, samples in by_case([session]).items():
            for sample in samples:
                reading = Reading(sample.figure, sample.comparator_figure, sample.disturbed, number)
                found.setdefault(case, []).append(reading)
    return found


def pair_readings(
    base: Sequence[Session], head: Sequence[Session]
) -> tuple[dict[CaseKey, list[Reading]], dict[CaseKey, list[Reading]]]:
    """The readings of the sessions of two arms that make pairs, in order.

    Where the two of a pair took turns, the head's figures are the base's times the quotients of the windows
    (``speed.Sample.times``): what a neighbour did to both alike is not in their difference.
    """
    then, now = readings(base), readings(head)
    for number, (one, other) in enumerate(zip(base, head, strict=False)):
        if not (one.took_turns and other.took_turns):
            continue
        theirs, mine = ({sample.case: sample for sample in session.samples} for session in (one, other))
        compare_windows(now, theirs, mine, number)
    return then, now


def compare_windows(
    now: dict[CaseKey, list[Reading]], base: Mapping[CaseKey, Sample], head: Mapping[CaseKey, Sample], number: int
) -> None:
    """Put what the windows say in the place of the head's readings number ``number``, where the two took turns."""
    for case in base.keys() & head.keys():
        if (found := _in_turns(base[case], head[case], number)) is not None:
            now[case] = [found if r.session == number else r for r in now[case]]


def _in_turns(base: Sample, head: Sample, number: int) -> Reading | None:
    """The head's reading beside the base's, window by window; ``None`` where that cannot be said."""
    times = head.times(base)
    if times is None:
        return None
    subject, comparator = times
    beside = None if comparator is None or base.comparator_figure is None else base.comparator_figure * comparator
    return Reading(base.figure * subject, beside, head.disturbed, number)


# -- location and spread -----------------------------------------------------------------------------------------


class _Location(NamedTuple):
    """Median and squared scale of some sessions' figures, and the degrees of freedom of the latter."""

    centre: float
    variance: float
    df: float
    sessions: int


# What the square of 1.4826 MAD of so many normal values is on average (of its logarithm, against that of a chi-square
# with as many degrees of freedom); 1 - 0.5/n beyond.  Simulated; tests/test_gate.py repeats it.
_MAD_BIAS: Final = {3: 0.608, 4: 0.706, 5: 0.868, 6: 0.855}


def _location(values: Sequence[float], floor: float) -> _Location:
    """Centre; squared scale from the median absolute deviation.

    The centre is the median, and from five values on the median of all means of two (J. L. Hodges and E. L. Lehmann,
    1963, doi:10.1214/aoms/1177704172), of which one bad session in five moves it little and which varies less.

    From three values on that is 1.4826 MAD, mended for its bias in small samples, and worth 0.75 floor(n/2) + 0.275
    degrees of freedom: its logarithm varies as much as that of a chi-square with so many, for normal and for t(4)
    sessions nearly alike (docs/gate.md).  It is worth less than half of a standard deviation's, but one bad session
    does not matter.
    """
    count = len(values)
    middle = statistics.median(values)
    centre = middle if count < _FEW else _hodges_lehmann(values)
    if count >= 3:
        mad = _MAD * statistics.median(abs(v - middle) for v in values)
        variance = mad * mad / _MAD_BIAS.get(count, 1 - 0.5 / count)
        df = 0.75 * (count // 2) + 0.275
    elif count == 2:
        variance, df = (values[0] - values[1]) ** 2 / 2, 1.0
    else:
        variance, df = 0.0, 0.0
    return _Location(centre, max(variance, floor * floor), df, count)


# From so many values on the centre is Hodges and Lehmann's.
_FEW: Final = 5


def _hodges_lehmann(values: Sequence[float]) -> float:
    """The median of the means of all pairs of values, each value with itself too."""
    return statistics.median((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))


def _variance(values: Collection[float]) -> float:
    """Sample variance, in floating point: the exact one of ``statistics`` takes thirty times as long."""
    mean = statistics.fmean(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def _share(count: int) -> float:
    """Variance of the centre of ``count`` sessions in units of the squared scale; simulated in docs/gate.md.

    A median's is 1.2 to 1.6 over the count for normal and for t(4) sessions, the other centre's 1.05 to 1.37.
    """
    return 1.0 if count == 1 else (1.5 if count < _FEW else 1.25) / count


def _prior(spreads: Sequence[_Location]) -> Prior:
    """Empirical Bayes over cases: log variances scatter by more than chance; the rest is how much they differ.

    Moments of log s^2 with the inverse trigamma function: G. K. Smyth, "Linear models and empirical Bayes methods for
    assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol. Biol. 3 (2004), section 6.2.
    """
    known = [s for s in spreads if s.df > 0]
    if len(known) < _FEWEST_CASES:
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
    """The argument at which the trigamma function has the value: Newton's method on its reciprocal."""
    y = 0.5 + 1 / value  # trigamma(y) lies between 1/y and 1/(y - 1/2): this starts on the convex side
    for _ in range(50):
        trigamma = float(special.polygamma(1, y))
        step = trigamma * (1 - trigamma / value) / float(special.polygamma(2, y))
        y += step
        if abs(step) < 1e-8 * y:
            break
    return y


def _pooled(prior: Prior, *spreads: _Location) -> tuple[float, float]:
    """Mean of the variances, weighted by their degrees of freedom, and the sum of these."""
    df = prior.df + sum(s.df for s in spreads)
    if df == 0:
        return math.inf, 1.0
    return (prior.df * prior.variance + sum(s.df * s.variance for s in spreads)) / df, df


# -- the figure of a case ----------------------------------------------------------------------------------------


def _usable(some: Iterable[Reading]) -> list[Reading]:
    return [r for r in some if not r.disturbed]


def _paired(some: Iterable[Reading]) -> bool:
    """Whether every reading has its comparator."""
    return all(r.comparator is not None for r in some)


def _figures(some: Iterable[Reading], weight: float) -> list[float]:
    """log(subject) - weight log(comparator)."""
    if weight == 0:
        return [math.log(r.subject) for r in some]
    return [math.log(r.subject) - weight * math.log(r.comparator or math.nan) for r in some]


def _of_comparator(some: Iterable[Reading]) -> list[float]:
    return [math.log(r.comparator or math.nan) for r in some]


def _choose(spreads: Mapping[CaseKey, Mapping[float, _Location]]) -> dict[CaseKey, float]:
    """The weight of each case: the one of the least variance, but 1 unless another is clearly better.

    A variance from a dozen sessions is off by a factor of two, so each case's gain is shrunk to the mean gain of all
    cases, by how much of the scatter of the gains is not chance.
    """
    gains: dict[float, dict[CaseKey, float]] = {w: {} for w in WEIGHTS[1:]}
    for case, by_weight in spreads.items():
        if 1.0 in by_weight:
            for w, found in gains.items():
                found[case] = math.log(by_weight[w].variance / by_weight[1.0].variance)
    for found in gains.values():
        if not found:
            continue
        mean = statistics.fmean(found.values())
        # Both variances come from the same sessions, so their errors partly cancel: one's worth of chance, not two.
        chance = statistics.fmean(_trigamma(spreads[c][1.0].df / 2) for c in found)
        scatter = _variance(found.values()) if len(found) > 1 else 0.0
        share = max(0.0, scatter - chance) / scatter if scatter > 0 else 0.0
        for case, gain in found.items():
            found[case] = mean + share * (gain - mean)
    chosen: dict[CaseKey, float] = {}
    for case, by_weight in spreads.items():
        if 1.0 not in by_weight:
            chosen[case] = 0.0
            continue
        gain, best = min((found[case], w) for w, found in gains.items())
        chosen[case] = best if gain < _PREFER else 1.0
    return chosen


class _Learnt(NamedTuple):
    """What the stored sessions say: spreads by weight, the weight chosen, the common variance by weight."""

    at: dict[CaseKey, dict[float, _Location]]
    comparator: dict[CaseKey, _Location]
    weights: Mapping[CaseKey, float]
    priors: Mapping[float, Prior]
    of_comparators: Prior


def _spreads(some: Sequence[Reading], floor: float) -> dict[float, _Location]:
    return {w: _location(_figures(some, w), floor) for w in (WEIGHTS if _paired(some) else (0.0,))}


def _common(at: Mapping[CaseKey, Mapping[float, _Location]]) -> dict[float, Prior]:
    """The prior by weight."""
    return {w: _prior([by[w] for by in at.values() if w in by]) for w in WEIGHTS}


def _prior_of_comparators(spreads: Sequence[_Location]) -> Prior:
    """The prior of the comparators' own time.

    The machine's state is in it, which all cases of a session share: many of them know no more of its spread than one.
    """
    prior = _prior(spreads)
    return Prior(prior.variance, min(prior.df, statistics.median(s.df for s in spreads))) if prior.df else prior


def _learn(stored: Mapping[CaseKey, Stored], policy: Policy, known: Screened | None = None) -> _Learnt:
    """The stored sessions' spreads; with ``known``, only of its wanted cases, and what it says of all of them."""
    at: dict[CaseKey, dict[float, _Location]] = {}
    comparator: dict[CaseKey, _Location] = {}
    for case in known.wanted if known else stored:
        usable = _usable(stored[case].readings)
        if len(usable) < policy.fewest_stored:
            continue
        at[case] = _spreads(usable, policy.floor)
        if _paired(usable):
            comparator[case] = _location(_of_comparator(usable), policy.floor)
    if known:
        return _Learnt(at, comparator, known.weights, known.priors, known.of_comparators)
    of_comparators = _prior_of_comparators(list(comparator.values()))
    return _Learnt(at, comparator, _choose(at), _common(at), of_comparators)


# -- what is known of a case -------------------------------------------------------------------------------------


def _misses(sessions: int) -> int:
    """How many sessions need not repeat a slow-down: of those beyond four one in four, for some may be bad."""
    return max(0, sessions - 4) // 4


class _View(NamedTuple):
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

    def mirrored(self) -> _View:
        """The same with slower and faster exchanged."""
        return _View(-self.estimate, self.error, self.df, tuple(-c for c in self.changes))

    def recurs(self, limit: float) -> bool:
        """Whether the sessions are beyond the limit, but for a few; see :func:`_misses`."""
        return sum(c <= limit for c in self.changes) <= _misses(len(self.changes))

    def interval(self) -> tuple[float, float]:
        """95% interval of the estimate."""
        half = float(special.stdtrit(self.df, 0.975)) * self.error
        return self.estimate - half, self.estimate + half


@dataclasses.dataclass(frozen=True)
class _Evidence:
    """All that a verdict on one case rests on.

    Attributes:
        case: which.
        weight: of ``main``.
        main, raw, ratio, comparator: the change by the chosen figure, by time alone, by the ratio alone, and of the
            comparator; the last two are ``None`` without a comparator.
        since_first: how much slower the baseline is than the first epoch, by weight; empty without one.
        sessions: that count.
        seconds, comparator_seconds, stored_seconds: medians.
        detectable: the smallest slow-down that this policy sees, as a fraction.
        note: label that every sentence ends with.
    """

    case: CaseKey
    weight: float
    main: _View
    raw: _View
    ratio: _View | None
    comparator: _View | None
    since_first: Mapping[float, float]
    sessions: int
    seconds: float
    comparator_seconds: float | None
    stored_seconds: float
    detectable: float
    note: str


def _against_stored(now: Sequence[float], then: _Location, prior: Prior, policy: Policy, *, confirming: bool) -> _View:
    """The change of the figures ``now`` against the stored ones.

    The screen knows the spread from the baseline alone.  The confirmation pools its own with it, and takes its own
    (moderated) if that is larger: a head that became noisy must not be judged by the calm of the baseline.
    """
    head = _location(now, policy.floor)
    if confirming and head.df:
        variance, df = _pooled(prior, then, head)
        variance = max(variance, _pooled(prior, head)[0])
    else:
        variance, df = _pooled(prior, then)
    error = math.sqrt(max(variance, policy.floor**2) * (_share(head.sessions) + _share(then.sessions)))
    return _View(head.centre - then.centre, error, df, tuple(x - then.centre for x in now))


def _by_pairs(changes: Sequence[float], prior: Prior, policy: Policy) -> _View:
    """The change by the differences of neighbouring sessions of base and head."""
    pairs = _location(changes, policy.floor)
    variance, df = _pooled(prior, pairs)
    error = math.sqrt(max(variance, policy.floor**2) * _share(pairs.sessions))
    return _View(pairs.centre, error, df, tuple(changes))


def _smallest(
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
    """How many scales beyond the tolerated slow-down are found with a power of 95%, by bisection.

    The screen is independent of the confirmation; of the latter's two rules, test and recurrence, the harder counts.
    """
    then = _share(stored) if stored else 0.0
    screening = math.sqrt(_share(screen_sessions) + then)
    confirming = math.sqrt(_share(confirm_sessions) + then)
    single = math.sqrt(1.0 + then)
    needed_screen = float(special.stdtrit(df, 1 - screen_level))
    needed_confirm = float(special.stdtrit(df, 1 - confirm_level))

    def power(scales: float) -> float:
        passes = float(special.stdtr(df, scales / screening - needed_screen))
        tested = float(special.stdtr(df, scales / confirming - needed_confirm))
        missed = float(special.stdtr(df, -scales / single))
        recurs = float(special.bdtr(_misses(confirm_sessions), confirm_sessions, missed))
        return passes * min(tested, recurs)

    low, high = 0.0, 1000.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= _POWER else (middle, high)
    return high


def detectable(stored: Mapping[CaseKey, Stored], policy: Policy) -> dict[CaseKey, float]:
    """The smallest slow-down of each case that screen and confirmation find with a power of 95%, as a fraction.

    A case with fewer usable sessions than ``policy.fewest_stored`` is left out.
    """
    learnt = _learn(stored, policy)
    return {case: _detectable(case, learnt, policy) for case in learnt.at}


def _detectable(case: CaseKey, learnt: _Learnt, policy: Policy) -> float:
    weight = learnt.weights[case]
    then = learnt.at[case][weight]
    variance, df = _pooled(learnt.priors[weight], then)
    scale = math.sqrt(max(variance, policy.floor**2))
    return _smallest(scale, df, then.sessions, policy.screen_sessions, policy.confirm_sessions, policy)


def _gather(stored: Stored, head: Sequence[Reading], learnt: _Learnt, policy: Policy, *, confirming: bool) -> _Evidence:
    """The evidence on a case that has enough of everything."""
    case, then = stored.case, learnt.at[stored.case]
    known = _usable(stored.readings)
    has_comparator = _paired(head) and 1.0 in then
    weight = learnt.weights[case] if has_comparator else 0.0

    def view(w: float) -> _View:
        return _against_stored(_figures(head, w), then[w], learnt.priors[w], policy, confirming=confirming)

    first = stored.first
    since_first = {}
    if first is not None:
        since_first = {w: then[w].centre - _figures([first], w)[0] for w in then if not w or first.comparator}
    comparator = None
    if has_comparator:
        comparator = _against_stored(
            _of_comparator(head),
            learnt.comparator[case],
            learnt.of_comparators,
            policy,
            confirming=confirming,
        )
    return _Evidence(
        case=case,
        weight=weight,
        main=view(weight),
        raw=view(0.0),
        ratio=view(1.0) if has_comparator else None,
        comparator=comparator,
        since_first=since_first,
        sessions=len(head),
        seconds=statistics.median(r.subject for r in head),
        comparator_seconds=_median_comparator(head),
        stored_seconds=statistics.median(r.subject for r in known),
        detectable=_detectable(case, learnt, policy),
        note=stored.note,
    )


def _median_comparator(some: Sequence[Reading]) -> float | None:
    return statistics.median(r.comparator or math.nan for r in some) if _paired(some) else None


# -- the anchor --------------------------------------------------------------------------------------------------


class _Anchor(NamedTuple):
    """How the machine, or what stands for it, moved."""

    reason: Reason | None
    move: float
    raw_moved: bool


def _anchor(evidence: Iterable[_Evidence], policy: Policy) -> _Anchor:
    """Whether the comparators' median case moved, and whether the cases without one moved alike.

    By the estimate alone, not by its significance: to take a calm anchor for a moved one costs power, to take a
    moved one for calm makes a run red for nothing.
    """
    evidence = list(evidence)
    moves = [e.comparator.estimate for e in evidence if e.comparator]
    raw = [e.raw.estimate for e in evidence if not e.comparator]
    limit = math.log1p(policy.anchor_shift)
    middle = statistics.median(raw) if raw else 0.0
    if moves:
        move = statistics.median(moves)
        if abs(move) <= limit:
            return _Anchor(None, move, raw_moved=False)
        along = sum(m * move > 0 for m in moves)
        reason = Reason(
            "anchor-shift",
            f"the comparators' median case is {_words(move)} than in the baseline ({along} of {len(moves)} moved that "
            "way): what is slower must be so both by time alone and as a ratio",
            "the machine or the comparator changed; record anew when that is meant to stay",
        )
        return _Anchor(reason, move, raw_moved=middle * move > 0 and abs(middle - move) <= limit)
    if len(raw) >= _FEWEST_CASES and abs(middle) > limit:
        alike = sum(abs(m - middle) <= limit for m in raw)
        if alike >= 0.75 * len(raw):
            reason = Reason(
                "anchor-shift",
                f"all cases moved alike: {alike} of {len(raw)} are about {_words(middle)} than in the baseline, and "
                "there is no comparator that could tell the machine from the code",
                "time a comparator, or run base against head",
            )
            return _Anchor(reason, middle, raw_moved=True)
    return _Anchor(None, 0.0, raw_moved=False)


def anchor_shift(
    stored: Mapping[CaseKey, Stored], head: Mapping[CaseKey, Sequence[Reading]], policy: Policy
) -> Reason | None:
    """Whether the comparators as a whole moved since the baseline: one fact about the run, not one a case."""
    learnt = _learn(stored, policy)
    return _anchor(_all(stored, head, learnt, policy), policy).reason


def _all(
    stored: Mapping[CaseKey, Stored], head: Mapping[CaseKey, Sequence[Reading]], learnt: _Learnt, policy: Policy
) -> list[_Evidence]:
    """The evidence of the screen on all cases that have enough."""
    found = []
    for case, some in head.items():
        usable = _usable(some)
        if case in learnt.at and len(usable) >= _fewest(policy.screen_sessions):
            found.append(_gather(stored[case], usable, learnt, policy, confirming=False))
    return found


# -- words -------------------------------------------------------------------------------------------------------


def _percent(change: float) -> str:
    return f"{100 * change:.1f}%"


def _words(log_change: float) -> str:
    """A difference of logarithms of times in words: ``5.0% slower``."""
    change = math.expm1(log_change)
    return f"{_percent(abs(change))} {'slower' if change >= 0 else 'faster'}"


def _interval(view: _View) -> str:
    low, high = view.interval()
    return f"{_words(view.estimate)} [{100 * math.expm1(low):+.1f}%, {100 * math.expm1(high):+.1f}%]"


def _many(count: int, unit: str) -> str:
    return f"{count} {unit}" + ("" if count == 1 else "s")


def _judged(e: _Evidence, verdict: Verdict, reason: Reason, *, by: _View | None = None, before: int = 0) -> Judgement:
    """The judgement with all its fields; ``by`` is the figure that is shown, ``before`` the screen's sessions."""
    view = by or e.main
    weight = e.weight
    if by is not None and by is e.raw:
        weight = 0.0
    elif by is not None and by is e.ratio:
        weight = 1.0
    low, high = view.interval()
    if e.note:
        reason = dataclasses.replace(reason, text=f"{reason.text}; {e.note}")
    return Judgement(
        case=e.case,
        verdict=verdict,
        reason=reason,
        change=math.expm1(view.estimate),
        low=math.expm1(low),
        high=math.expm1(high),
        detectable=e.detectable if math.isfinite(e.detectable) else None,
        seconds=e.seconds,
        comparator_seconds=e.comparator_seconds,
        stored_seconds=e.stored_seconds,
        weight=weight,
        sessions=before + e.sessions,
    )


def _fewest(sessions: int) -> int:
    """Sessions that must be usable out of those asked for: more than half."""
    return sessions // 2 + 1


def _without(
    case: CaseKey, head: Sequence[Reading], needed: int, unit: str, *, shown: Judgement | None = None
) -> Judgement:
    """The judgement on a case with too few usable sessions; ``shown`` is what the screen said of it."""
    lost = [r for r in head if r.disturbed]
    usable = len(head) - len(lost)
    if lost:
        reason = Reason(
            "disturbed",
            f"{len(lost)} of {_many(len(head), unit)} disturbed ({lost[0].disturbed}); it takes {needed} calm ones",
            "run again when the machine is quiet",
        )
    else:
        reason = Reason(
            "too-few", f"a figure in {_many(usable, unit)}; it takes {needed}", "see why the other sessions have none"
        )
    if shown:
        return dataclasses.replace(shown, verdict=Verdict.UNDECIDED, reason=reason, sessions=shown.sessions + usable)
    seconds = statistics.median(r.subject for r in head) if head else None
    return Judgement(case, Verdict.UNDECIDED, reason, seconds=seconds, sessions=usable)


def _no_baseline(case: CaseKey, head: Sequence[Reading], against: str) -> Judgement:
    usable = _usable(head) or list(head)
    return Judgement(
        case,
        Verdict.NO_BASELINE,
        Reason("no-baseline", f"there is nothing to compare with: {against}"),
        seconds=statistics.median(r.subject for r in usable) if usable else None,
        comparator_seconds=_median_comparator(usable) if usable else None,
        sessions=len(usable),
    )


# -- the screen --------------------------------------------------------------------------------------------------


def _beyond_guard(e: _Evidence, policy: Policy, move: float) -> bool:
    """Whether every session is beyond the guard by time and by ratio.

    Without a comparator, what the machine lost stands in for it.
    """
    limit = math.log1p(policy.guard)
    lift = 0.0 if e.ratio else max(0.0, move)
    views = [e.raw, e.ratio] if e.ratio else [e.raw]
    return all(c - lift > limit for v in views for c in v.changes)


def _far(changes: Iterable[float], policy: Policy) -> bool:
    """Whether all of the changes are so large that no disturbance explains them; see docs/gate.md."""
    return all(change > math.log1p(policy.far) for change in changes)


def _although_disturbed(
    stored: Stored, head: Sequence[Reading], learnt: _Learnt, policy: Policy, needed: int, *, confirming: bool
) -> _Evidence | None:
    """The evidence of all sessions, for a case that too few calm ones are left of and that is :func:`_far` slower.

    That is each new session against the slowest stored one, by time and as a ratio.  Without a comparator the load
    and the code cannot be told apart.
    """
    then = _usable(stored.readings)
    if len(head) < needed or not (_paired(head) and _paired(then)):
        return None
    changes = [x - max(_figures(then, w)) for w in (0.0, 1.0) for x in _figures(head, w)]
    return _gather(stored, head, learnt, policy, confirming=confirming) if _far(changes, policy) else None


def _judged_far(e: _Evidence, policy: Policy, unit: str, *, before: int = 0) -> Judgement:
    """The judgement on a case that :func:`_far` holds of, in the screen and in the confirmation."""
    shown = e.ratio or e.raw
    text = (
        f"{_interval(shown)} over {_many(e.sessions, unit)}; most were disturbed, and yet each was more than "
        f"{1 + policy.far:g} times as slow as what it is compared with"
    )
    return _judged(e, Verdict.SLOWER, Reason("far", text), by=shown, before=before)


class _Claim(NamedTuple):
    """One null hypothesis of a case: the figures that all have to reject it, with their limits.

    ``alone`` is the figure that would have sufficed if the anchor had not moved.
    """

    code: str
    needed: tuple[tuple[_View, float], ...]
    alone: tuple[_View, float] | None

    @property
    def p_value(self) -> float:
        """Of the union of the null hypotheses: the largest."""
        return max(view.p_slower(limit) for view, limit in self.needed)

    @property
    def recurs(self) -> bool:
        return all(view.recurs(limit) for view, limit in self.needed)


def _claims(e: _Evidence, policy: Policy, move: float, *, both: bool, mirrored: bool = False) -> list[_Claim]:
    """What can make the case slower (or faster): a change beyond delta, and a drift since the first epoch.

    A figure that does not take all of the comparator off is as slow as the machine: that much is added to its limit.
    """
    sign = -1.0 if mirrored else 1.0

    def turned(view: _View) -> _View:
        return view.mirrored() if mirrored else view

    def claim(code: str, limit: float, since: Callable[[float], float]) -> _Claim:
        if both and e.ratio:
            ratio = (turned(e.ratio), limit - since(1.0))
            return _Claim(code, (ratio, (turned(e.raw), limit - since(0.0))), ratio)
        lift = (1 - e.weight) * max(0.0, sign * move)
        return _Claim(code, ((turned(e.main), limit + lift - since(e.weight)),), None)

    found = [claim("delta", math.log1p(policy.delta), lambda _: 0.0)]
    needed = {1.0, 0.0} if both and e.ratio else {e.weight}
    if not mirrored and needed <= e.since_first.keys():
        found.append(claim("drift", math.log1p(policy.drift), e.since_first.__getitem__))
    return found


def _screened(e: _Evidence, policy: Policy, anchor: _Anchor, *, both: bool, unit: str) -> tuple[Judgement, str]:
    """The screen's judgement on a case, and ``slower`` or ``faster`` when it wants confirmation."""
    shown = e.ratio if both and e.ratio else e.main
    seen = f"{_interval(shown)} over {_many(e.sessions, unit)}"
    if _beyond_guard(e, policy, anchor.move):
        return _unconfirmed(e, shown, unit), "slower"
    if anchor.raw_moved and not e.ratio:
        reason = Reason(
            "anchor-shift",
            f"{seen}; without a comparator that cannot be told from the machine, {_words(anchor.move)} as a whole",
            "give the case a comparator, or run base against head",
        )
        return _judged(e, Verdict.UNDECIDED, reason, by=shown), ""
    for direction, mirrored in (("slower", False), ("faster", True)):
        claims = _claims(e, policy, anchor.move, both=both, mirrored=mirrored)
        if any(c.p_value < policy.screen_level for c in claims):
            return _unconfirmed(e, shown, unit), direction
        if any(c.alone and c.alone[0].p_slower(c.alone[1]) < policy.screen_level for c in claims):
            return _judged(e, Verdict.UNDECIDED, _moved(e, unit), by=shown), ""
    if e.detectable > policy.too_noisy:
        return _judged(e, Verdict.UNDECIDED, _too_noisy(e, policy, seen), by=shown), ""
    text = f"{seen}; {_percent(e.detectable)} slower would have been seen"
    return _judged(e, Verdict.SAME, Reason("within", text), by=shown), ""


def _unconfirmed(e: _Evidence, shown: _View, unit: str) -> Judgement:
    seen = f"{_interval(shown)} over {_many(e.sessions, unit)}"
    reason = Reason("to-confirm", f"{seen}: has to be confirmed", "let the confirmation run")
    return _judged(e, Verdict.UNDECIDED, reason, by=shown)


def _moved(e: _Evidence, unit: str) -> Reason:
    """Why a ratio that moved says nothing: the time did not move with it, so it was the comparator."""
    ratio = _interval(e.ratio) if e.ratio else ""
    comparator = _words(e.comparator.estimate) if e.comparator else ""
    return Reason(
        "anchor-shift",
        f"as a ratio {ratio}, by time alone {_interval(e.raw)} over {_many(e.sessions, unit)}: the comparator is "
        f"{comparator}",
        "record anew, or run base against head",
    )


def _too_noisy(e: _Evidence, policy: Policy, seen: str) -> Reason:
    least = f"less than {_percent(e.detectable)}" if math.isfinite(e.detectable) else "anything"
    return Reason(
        "too-noisy",
        f"{seen}; {least} slower would go unseen, and {_percent(policy.too_noisy)} is the most that may",
        "record more sessions, or on a quieter machine",
    )


def screen(stored: Mapping[CaseKey, Stored], head: Mapping[CaseKey, Sequence[Reading]], policy: Policy) -> Screened:
    """Judge the first sessions of the head against what is stored.

    A case is handed on when the t-test of "at most ``policy.delta`` slower" fails at ``policy.screen_level``: median of
    the sessions against median of the stored ones, with the spread of the baseline.
    """
    learnt, needed = _learn(stored, policy), _fewest(policy.screen_sessions)
    evidence = {e.case: e for e in _all(stored, head, learnt, policy)}
    anchor = _anchor(evidence.values(), policy)
    judgements: dict[CaseKey, Judgement] = {}
    wanted: dict[str, list[CaseKey]] = {"slower": [], "faster": []}
    for case, some in head.items():
        if case in evidence:
            judgements[case], direction = _screened(
                evidence[case], policy, anchor, both=anchor.reason is not None, unit="session"
            )
            if direction:
                wanted[direction].append(case)
        elif case not in stored or not stored[case].readings:
            judgements[case] = _no_baseline(case, some, "no baseline is stored for this case")
        elif case not in learnt.at:
            judgements[case] = _thin(case, stored[case], some, policy)
        elif far := _although_disturbed(stored[case], some, learnt, policy, needed, confirming=False):
            judgements[case] = _unconfirmed(far, far.ratio or far.raw, "session")
            wanted["slower"].append(case)
        else:
            judgements[case] = _without(case, some, needed, "session")
    return Screened(
        judgements=judgements,
        slower=tuple(wanted["slower"]),
        faster=tuple(wanted["faster"]),
        anchor=anchor.reason,
        move=anchor.move,
        raw_moved=anchor.raw_moved,
        weights=learnt.weights,
        priors=learnt.priors,
        of_comparators=learnt.of_comparators,
    )


def _thin(case: CaseKey, stored: Stored, head: Sequence[Reading], policy: Policy) -> Judgement:
    usable = len(_usable(stored.readings))
    reason = Reason(
        "thin-baseline",
        f"the baseline has {_many(usable, 'usable session')}; it takes {policy.fewest_stored}",
        "record it anew, with more sessions",
    )
    return dataclasses.replace(
        _no_baseline(case, head, ""),
        verdict=Verdict.UNDECIDED,
        reason=reason,
        stored_seconds=statistics.median(r.subject for r in stored.readings),
    )


# -- the confirmation --------------------------------------------------------------------------------------------


def _holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses fall by S. Holm's procedure (1979): the smallest against level/m, the next level/(m-1) ..."""
    falls = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


def _explained(e: _Evidence, policy: Policy, *, mirrored: bool) -> bool:
    """Whether this case's comparator moved so that the ratio looks slower (or faster): beyond delta, at 5%."""
    if e.comparator is None or e.weight == 0:
        return False
    view = e.comparator if mirrored else e.comparator.mirrored()
    limit = math.log1p(policy.delta)
    return view.estimate > limit and view.p_slower(0.0) < 0.05


def _confirmed(
    evidence: Sequence[_Evidence],
    screened: Screened,
    policy: Policy,
    unit: str,
    *,
    mirrored: bool,
    same_machine: bool,
    level: float,
    last: bool,
) -> dict[CaseKey, Judgement]:
    """The judgements on one direction's cases, by the confirmation alone.

    Args:
        evidence: of the cases to be confirmed that have enough sessions.
        screened: what the screen said.
        policy: the levels and limits.
        unit: ``session`` or ``pair``.
        mirrored: look for faster.
        same_machine: base and head alternate on it, so that no case is as slow as the machine became.
        level: of this look.
        last: no further sessions follow; otherwise a case that is not clear yet keeps the screen's judgement.
    """
    moves = [e.comparator.estimate for e in evidence if e.comparator]
    now = statistics.median(moves) if len(moves) >= _FEWEST_CASES else 0.0
    # A few pairs of a restless machine look like a shift; only what the confirmation itself sees counts there.
    earlier = 0.0 if same_machine else screened.move
    shifted = max(abs(now), abs(earlier)) > math.log1p(policy.anchor_shift)
    both = {e.case: shifted or _explained(e, policy, mirrored=mirrored) for e in evidence}
    move = 0.0 if same_machine else min(earlier, now) if mirrored else max(earlier, now)
    claims = [(e, c) for e in evidence for c in _claims(e, policy, move, both=both[e.case], mirrored=mirrored)]
    fallen: dict[CaseKey, list[_Claim]] = {}
    for (e, c), falls in zip(claims, _holm([c.p_value for _, c in claims], level), strict=True):
        if falls and c.recurs:
            fallen.setdefault(e.case, []).append(c)
    # What would have fallen if the anchor had stayed: the same procedure on the figure alone.
    alone = [(e, *(c.alone or c.needed[0])) for e, c in claims]
    fallen_alone = {
        e.case
        for (e, view, limit), falls in zip(alone, _holm([v.p_slower(x) for _, v, x in alone], level), strict=True)
        if falls and view.recurs(limit)
    }
    found: dict[CaseKey, Judgement] = {}
    for e in evidence:
        shown = e.ratio if both[e.case] and e.ratio else e.main
        seen = f"{_interval(shown)} over {_many(e.sessions, f'further {unit}')}"
        if fallen.get(e.case):
            verdict, reason = _fallen(e, fallen[e.case], policy, seen, unit, mirrored=mirrored)
        elif not mirrored and _beyond_guard(e, policy, move):
            verdict = Verdict.SLOWER
            text = f"{seen}, beyond the guard of {_percent(policy.guard)} in each, whatever the noise"
            reason = Reason("guard", text)
        elif not last and _is_open(shown.mirrored() if mirrored else shown):
            continue
        elif both[e.case] and e.case in fallen_alone:
            verdict, reason = Verdict.UNDECIDED, _moved(e, unit)
        else:
            verdict, reason = _not_confirmed(e, shown, policy, seen, mirrored=mirrored)
        before = screened.judgements[e.case].sessions
        found[e.case] = _judged(e, verdict, reason, by=shown, before=before)
    return found


# A change that is not above zero at this level will not be found beyond the limit by the last look either.
_HOPELESS: Final = 0.25


def _is_open(view: _View) -> bool:
    """Whether further sessions may still show the change."""
    return view.p_slower(0.0) < _HOPELESS


def _fallen(
    e: _Evidence, claims: Sequence[_Claim], policy: Policy, seen: str, unit: str, *, mirrored: bool
) -> tuple[Verdict, Reason]:
    """Slower, faster, or drifted."""
    first = claims[0]
    view, limit = first.needed[0]
    beyond = sum(c > limit for c in view.changes)
    often = f"in {beyond} of {_many(len(view.changes), unit)} (p {first.p_value:.1g})"
    if first.code == "drift":
        total = _words(view.estimate + math.log1p(policy.drift) - limit)
        text = f"{total} than in the first epoch, beyond the {_percent(policy.drift)} of drift {often}; {seen}"
        return Verdict.SLOWER, Reason("drift", text)
    text = f"{seen}, by more than {_percent(policy.delta)} {often}"
    if len(first.needed) > 1:
        text += f"; by time alone {_interval(e.raw)}"
    if mirrored:
        return Verdict.FASTER, Reason("faster-confirmed", text, "record it, so that it is kept")
    return Verdict.SLOWER, Reason("slower-confirmed", text)


def _not_confirmed(e: _Evidence, shown: _View, policy: Policy, seen: str, *, mirrored: bool) -> tuple[Verdict, Reason]:
    """Same when the suspicion went away, undecided when it did not."""
    if e.detectable > policy.too_noisy:
        return Verdict.UNDECIDED, _too_noisy(e, policy, seen)
    view = shown.mirrored() if mirrored else shown
    limit = math.log1p(policy.delta)
    if view.estimate > limit and view.interval()[0] > 0:
        text = f"{seen}: it may be more than the tolerated {_percent(policy.delta)}, but not surely"
        return Verdict.UNDECIDED, Reason("not-confirmed", text, "run again with more sessions")
    return Verdict.SAME, Reason("not-confirmed", f"{seen}: what the screen saw did not recur")


def _conclude(
    screened: Screened,
    gather: Callable[[CaseKey], _Evidence | Judgement],
    policy: Policy,
    unit: str,
    *,
    same_machine: bool,
    level: float,
    last: bool,
) -> dict[CaseKey, Judgement]:
    """All judgements: those of the screen, replaced by the confirmation's for the cases that ``gather`` knows."""
    judgements = dict(screened.judgements)
    for cases, mirrored in ((screened.slower, False), (screened.faster, True)):
        known = []
        for case in cases:
            one = gather(case)
            if isinstance(one, Judgement):
                judgements[case] = one
            else:
                known.append(one)
        judgements.update(
            _confirmed(
                known,
                screened,
                policy,
                unit,
                mirrored=mirrored,
                same_machine=same_machine,
                level=level,
                last=last,
            )
        )
    return judgements


def by_looks(
    screened: Screened,
    policy: Policy,
    sessions: int,
    look: Callable[[tuple[CaseKey, ...], int, Screened, bool], dict[CaseKey, Judgement]],
) -> dict[CaseKey, Judgement]:
    """The judgements of a confirmation that is looked at as often as :meth:`Policy.looks` says.

    Args:
        screened: what the screen said.
        policy: of the gate.
        sessions: of the whole confirmation, or pairs.
        look: takes the cases that are open, after how many sessions, the screen's word on these cases, and whether it
            is the last look; measures what is missing and returns what :func:`confirm` or :func:`confirm_pair` says.
    """
    judgements = dict(screened.judgements)
    counts = policy.looks(sessions)
    for count in counts:
        if not screened.wanted:
            break
        last = count == counts[-1]
        found = look(screened.wanted, count, screened, last)
        judgements.update((case, found[case]) for case in screened.wanted)
        still = {case for case in screened.wanted if found[case] == screened.judgements[case]}
        screened = dataclasses.replace(
            screened,
            slower=tuple(case for case in screened.slower if case in still),
            faster=tuple(case for case in screened.faster if case in still),
        )
    return judgements


def confirm(
    stored: Mapping[CaseKey, Stored],
    head: Mapping[CaseKey, Sequence[Reading]],
    screened: Screened,
    policy: Policy,
    *,
    last: bool = True,
) -> dict[CaseKey, Judgement]:
    """Judge all cases: the wanted ones by ``head``, the sessions of the confirmation alone, the others as screened.

    Slower is what the t-test says over all confirmed cases (Holm, ``policy.confirm_level`` divided by the looks) *and*
    the sessions repeat, but for a few.  Faster by the mirrored rule.  A wanted case that ``head`` lacks stays to be
    confirmed, and unless this is the last look so does one that further sessions may decide.
    """
    learnt = _learn(stored, policy, screened)
    looks = policy.looks(policy.confirm_sessions)

    def gather(case: CaseKey) -> _Evidence | Judgement:
        if case not in head:
            return screened.judgements[case]
        usable, needed = _usable(head[case]), _fewest(looks[-1] if last else looks[0])
        if len(usable) < needed:
            shown = screened.judgements[case]
            if far := _although_disturbed(stored[case], head[case], learnt, policy, needed, confirming=True):
                return _judged_far(far, policy, "further session", before=shown.sessions)
            return _without(case, head[case], needed, "further session", shown=shown)
        return _gather(stored[case], usable, learnt, policy, confirming=True)

    level = policy.confirm_level / len(looks)
    return _conclude(screened, gather, policy, "session", same_machine=False, level=level, last=last)


# -- base against head -------------------------------------------------------------------------------------------


def _couples(base: Sequence[Reading], head: Sequence[Reading]) -> list[tuple[Reading, Reading]]:
    """Neighbouring sessions of base and head, by their number, or by position where they have none."""

    def numbered(some: Sequence[Reading]) -> dict[int, Reading]:
        return {position if r.session is None else r.session: r for position, r in enumerate(some)}

    left, right = numbered(base), numbered(head)
    return [(left[n], right[n]) for n in sorted(left.keys() & right.keys())]


def _whole(couples: Iterable[tuple[Reading, Reading]]) -> list[tuple[Reading, Reading]]:
    """The pairs of which neither is disturbed."""
    return [(b, h) for b, h in couples if not b.disturbed and not h.disturbed]


def _differences(couples: Sequence[tuple[Reading, Reading]], weight: float) -> list[float]:
    before, after = zip(*couples, strict=True)
    return [h - b for b, h in zip(_figures(before, weight), _figures(after, weight), strict=True)]


def _both_paired(couples: Sequence[tuple[Reading, Reading]]) -> bool:
    return all(_paired(couple) for couple in couples)


def _comparator_changes(couples: Sequence[tuple[Reading, Reading]]) -> list[float]:
    before, after = zip(*couples, strict=True)
    return [h - b for b, h in zip(_of_comparator(before), _of_comparator(after), strict=True)]


def _comparator_view(couples: Sequence[tuple[Reading, Reading]], prior: Prior, policy: Policy) -> _View | None:
    """How head's comparator differs from base's; ``None`` without one."""
    return _by_pairs(_comparator_changes(couples), prior, policy) if _both_paired(couples) else None


def _gather_pairs(
    case: CaseKey,
    couples: Sequence[tuple[Reading, Reading]],
    weight: float,
    priors: Mapping[float, Prior],
    policy: Policy,
    *,
    comparator: _View | None,
    differs: bool,
) -> _Evidence:
    """The evidence on a case that has enough pairs; ``differs``: head's comparator is not base's, so there is none."""
    has_comparator = _both_paired(couples) and not differs
    weight = weight if has_comparator else 0.0

    def view(w: float) -> _View:
        return _by_pairs(_differences(couples, w), priors[w], policy)

    spread = _location(_differences(couples, weight), policy.floor)
    variance, df = _pooled(priors[weight], spread)
    scale = math.sqrt(max(variance, policy.floor**2))
    before, after = zip(*couples, strict=True)
    return _Evidence(
        case=case,
        weight=weight,
        main=view(weight),
        raw=view(0.0),
        ratio=view(1.0) if has_comparator else None,
        comparator=comparator,
        since_first={},
        sessions=len(couples),
        seconds=statistics.median(r.subject for r in after),
        comparator_seconds=_median_comparator(after),
        stored_seconds=statistics.median(r.subject for r in before),
        detectable=_smallest(scale, df, 0, policy.screen_pairs, policy.confirm_pairs, policy),
        note=_RAW_NOTE if differs else "",
    )


def _pairs_although_disturbed(
    case: CaseKey,
    couples: Sequence[tuple[Reading, Reading]],
    priors: Mapping[float, Prior],
    policy: Policy,
    needed: int,
) -> _Evidence | None:
    """As :func:`_although_disturbed`; the two of a pair meet the same load, so it does without a comparator."""
    if len(couples) < needed:
        return None
    weights = (0.0, 1.0) if _both_paired(couples) else (0.0,)
    if not _far(itertools.chain.from_iterable(_differences(couples, w) for w in weights), policy):
        return None
    return _gather_pairs(case, couples, weights[-1], priors, policy, comparator=None, differs=False)


_RAW_NOTE: Final = "by time alone, for the comparator differs between base and head"


def screen_pair(
    base: Mapping[CaseKey, Sequence[Reading]], head: Mapping[CaseKey, Sequence[Reading]], policy: Policy
) -> Screened:
    """Judge the first pairs of sessions of two environments that ran in alternation.

    The figure is the difference within a pair, which the state of the machine is not in.  Its spread chooses the weight
    (a spread knows nothing of the location, so this does not favour a verdict).  A comparator that itself differs
    between the environments is left out, case by case or, when its median case moved, altogether.
    """
    needed = max(2, _fewest(policy.screen_pairs))
    couples = {c: _whole(_couples(base[c], some)) for c, some in head.items() if c in base}
    couples = {c: some for c, some in couples.items() if len(some) >= needed}
    at = {
        c: {w: _location(_differences(some, w), policy.floor) for w in (WEIGHTS if _both_paired(some) else (0.0,))}
        for c, some in couples.items()
    }
    priors = _common(at)
    compared = {c: some for c, some in couples.items() if _both_paired(some)}
    spreads = [_location(_comparator_changes(some), policy.floor) for some in compared.values()]
    of_comparators = _prior_of_comparators(spreads)
    comparators = {c: _comparator_view(some, of_comparators, policy) for c, some in compared.items()}
    whole = _median_case(compared, of_comparators, policy)
    reason = None
    if whole and _differs(whole, policy):
        reason = Reason(
            "anchor-shift",
            f"head's comparators are {_interval(whole)} against base's (median case): all is judged by time alone",
        )
    weights = _choose(at)
    judgements: dict[CaseKey, Judgement] = {}
    wanted: dict[str, list[CaseKey]] = {"slower": [], "faster": []}
    still = _Anchor(None, 0.0, raw_moved=False)  # the machine is the same for both
    for case, some in head.items():
        if case in couples:
            comparator = comparators.get(case)
            differs = comparator is not None and (reason is not None or _differs(comparator, policy))
            evidence = _gather_pairs(
                case, couples[case], weights[case], priors, policy, comparator=comparator, differs=differs
            )
            judgements[case], direction = _screened(evidence, policy, still, both=False, unit="pair")
            if direction:
                wanted[direction].append(case)
        elif not base.get(case):
            judgements[case] = _no_baseline(case, some, "the base did not run this case")
        elif far := _pairs_although_disturbed(case, _couples(base[case], some), priors, policy, needed):
            judgements[case] = _unconfirmed(far, far.ratio or far.raw, "pair")
            wanted["slower"].append(case)
            weights[case] = far.weight
        else:
            judgements[case] = _without(case, _merged(base[case], some), needed, "pair")
    move = whole.estimate if whole else 0.0
    return Screened(
        judgements=judgements,
        slower=tuple(wanted["slower"]),
        faster=tuple(wanted["faster"]),
        anchor=reason,
        move=move,
        weights=weights,
        priors=priors,
        of_comparators=of_comparators,
    )


def _median_case(
    couples: Mapping[CaseKey, Sequence[tuple[Reading, Reading]]], prior: Prior, policy: Policy
) -> _View | None:
    """How head's comparators as a whole differ from base's: the median case of each pair; ``None`` without any.

    What the machine does within a pair is in all its cases, so the pairs are what varies, not the cases.
    """
    by_pair: dict[int, list[float]] = {}
    for some in couples.values():
        for position, (before, after) in enumerate(some):
            change = math.log((after.comparator or math.nan) / (before.comparator or math.nan))
            number = position if after.session is None else after.session
            by_pair.setdefault(number, []).append(change)
    if len(by_pair) < 2:
        return None
    return _by_pairs([statistics.median(some) for some in by_pair.values()], prior, policy)


def _differs(comparator: _View, policy: Policy) -> bool:
    """Whether one case's comparator differs between base and head: beyond the shift, at 5% on either side."""
    limit = math.log1p(policy.anchor_shift)
    return abs(comparator.estimate) > limit and min(comparator.p_slower(0.0), comparator.p_faster(0.0)) < 0.025


def _merged(base: Sequence[Reading], head: Sequence[Reading]) -> list[Reading]:
    """Head's readings, disturbed where base's are."""
    return [
        dataclasses.replace(h, disturbed=h.disturbed or (f"base: {b.disturbed}" if b.disturbed else ""))
        for b, h in _couples(base, head)
    ]


def confirm_pair(
    base: Mapping[CaseKey, Sequence[Reading]],
    head: Mapping[CaseKey, Sequence[Reading]],
    screened: Screened,
    policy: Policy,
    *,
    last: bool = True,
) -> dict[CaseKey, Judgement]:
    """Judge all cases: the wanted ones by the pairs of the confirmation alone, the others as screened.

    The rule is that of :func:`confirm`, on the differences within pairs.  Weight and common variance are the screen's.
    """
    looks = policy.looks(policy.confirm_pairs)

    def gather(case: CaseKey) -> _Evidence | Judgement:
        if case not in head or case not in base:
            return screened.judgements[case]
        every, needed = _couples(base[case], head[case]), _fewest(looks[-1] if last else looks[0])
        couples = _whole(every)
        if len(couples) < needed:
            shown = screened.judgements[case]
            if far := _pairs_although_disturbed(case, every, screened.priors, policy, needed):
                return _judged_far(far, policy, "further pair", before=shown.sessions)
            return _without(case, _merged(base[case], head[case]), needed, "further pair", shown=shown)
        comparator = _comparator_view(couples, screened.of_comparators, policy)
        differs = comparator is not None and (screened.anchor is not None or _differs(comparator, policy))
        return _gather_pairs(
            case,
            couples,
            screened.weights[case],
            screened.priors,
            policy,
            comparator=comparator,
            differs=differs,
        )

    level = policy.confirm_level / len(looks)
    return _conclude(screened, gather, policy, "pair", same_machine=True, level=level, last=last)


# -- notes beside the verdict ------------------------------------------------------------------------------------


def regret(sample: Sample) -> float | None:
    """How much longer the picked candidate takes than the fastest rival, as a fraction; 0.0 when it is the fastest.

    Median over the blocks of the differences of logarithms, each of the subject's visits in a block against the rival's
    in the same block.  ``None`` without rivals, or where the visits cannot be brought into blocks.
    """
    losses = _losses(sample).values()
    return max(0.0, *losses) if losses else None


def _losses(sample: Sample) -> dict[str, float]:
    """How much longer than each rival the picked candidate takes, as a fraction; negative for a slower rival."""
    found = {}
    for name, seconds in sample.rivals.items():
        if name in sample.picked or not seconds or len(sample.subject) % len(seconds):
            continue
        visits = len(sample.subject) // len(seconds)
        blocks = [
            statistics.fmean(math.log(s) for s in sample.subject[i * visits : (i + 1) * visits]) - math.log(rival)
            for i, rival in enumerate(seconds)
        ]
        found[name] = math.expm1(statistics.median(blocks))
    return found


def moved(before: Mapping[CaseKey, tuple[str, ...]], sessions: Iterable[Session]) -> list[CaseKey]:
    """Cases for which another candidate was picked than before, in any of the sessions.

    Args:
        before: what was picked then, by case.
        sessions: of now.
    """
    return [
        case
        for case, some in by_case(sessions).items()
        if before.get(case) and any(s.picked and set(s.picked) != set(before[case]) for s in some)
    ]


def annotate(
    judgements: Mapping[CaseKey, Judgement], before: Mapping[CaseKey, tuple[str, ...]], sessions: Iterable[Session]
) -> dict[CaseKey, Judgement]:
    """The judgements with ``selection``, ``regret`` and ``faster`` filled from the head's samples.

    These are notes, no verdicts.

    Args:
        judgements: of the head.
        before: what was picked in the baseline, or in the base environment.
        sessions: of the head.
    """
    samples = by_case(sessions)
    found = {}
    for case, judgement in judgements.items():
        some = samples.get(case, [])
        losses: dict[str, list[float]] = {}
        for sample in some:
            for name, loss in _losses(sample).items():
                losses.setdefault(name, []).append(loss)
        medians = {name: statistics.median(those) for name, those in losses.items()}
        fastest = max(medians, key=medians.__getitem__, default="")
        found[case] = dataclasses.replace(
            judgement,
            selection=_selection(before.get(case, ()), [s.picked for s in some], medians),
            regret=max(0.0, medians[fastest]) if fastest else None,
            faster=fastest if fastest and medians[fastest] > 0.0 else "",
        )
    return found


def _selection(before: tuple[str, ...], now: Sequence[tuple[str, ...]], losses: Mapping[str, float]) -> str:
    """What was picked and what is now, with how many sessions say so where they disagree; "" for no change.

    Where the earlier pick was timed beside the one of now, it says what the change makes.
    """
    counts = Counter(picked for picked in now if picked)
    changed = {picked: count for picked, count in counts.items() if set(picked) != set(before)}
    if not before or not changed:
        return ""
    total = sum(counts.values())
    parts = [
        "+".join(picked) + (f" in {count} of {total} sessions" if count < total else "")
        for picked, count in changed.items()
    ]
    text = f"was {'+'.join(before)}, is {', '.join(parts)}"
    timed = [losses[name] for name in before if name in losses]
    if not timed:
        return text
    loss = max(timed)
    return f"{text}, which takes {_percent(abs(loss))} {'longer' if loss >= 0 else 'less'} than it in the same blocks"
