"""Rows of a report on speed: what was measured, and who was fastest."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from scipy import special

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status, Verdict
from pytest_gemm.core.units import joules_text, percent, rate_text, seconds_text, signed, three
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline.entry import Baseline
from pytest_gemm.speed.data import Judgement, Peaks, Sample, Session

Mode = Literal["baseline", "against", "none"]

# In the order of interest, with what each means.
VERDICTS: Mapping[Verdict, str] = {
    Verdict.SLOWER: "slower beyond the tolerance, confirmed in new processes. It fails.",
    Verdict.FASTER: "faster beyond the tolerance, confirmed in new processes. Worth recording.",
    Verdict.UNDECIDED: (
        "the measurement cannot tell: too noisy, disturbed, too few sessions, or the machine changed as a whole."
    ),
    Verdict.NO_BASELINE: "nothing is stored for this case on this hardware.",
    Verdict.SAME: "no slow-down beyond the tolerance was seen.",
}


@dataclasses.dataclass
class Run:
    """What a run measured on one device, what follows, and what the reports need of it.

    Attributes:
        judgements: one for each case, in the suite's order.
        sessions: of the head, screening and confirmation.
        hardware: the hardware key.
        software: versions by name.
        peaks: of the machine, as measured; empty where they were not.
        mode: what the time was compared with: stored baselines, another environment, or nothing.
        anchor: what is to be said of the machine as a whole, ``None`` where its comparators stayed.
        notes: further sentences about the run.
        stored: baselines of the cases.
        seconds: wall-clock time of the whole run.
        record: the command that records this run's cases.
        delta: slow-down that is tolerated, as a fraction; 0 where it is not to be shown.
        fatal: verdicts that fail a test.
        undecided_share: of the compared cases, beyond which the run fails for what stays undecided.
        device: ``cpu`` or ``cuda``.
        base: sessions of the other environment.
        base_label: what the user calls that one.
        failed: cases without an estimate, with the sample that has the reason.
        refused: cases that were to be recorded and were not, with the reason.
        lost: why a requested file is not complete, by the option with its value.
    """

    judgements: Sequence[Judgement] = ()
    sessions: list[Session] = dataclasses.field(default_factory=list)
    hardware: str = ""
    software: Mapping[str, str] = dataclasses.field(default_factory=dict)
    peaks: Peaks = dataclasses.field(default_factory=Peaks)
    mode: Mode = "baseline"
    anchor: Reason | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    stored: Mapping[CaseId, Baseline] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    record: str = "pytest perf --gemm-record"
    delta: float = 0.0
    fatal: Collection[Verdict] = ()
    undecided_share: float = 1.0
    device: str = "cpu"
    base: list[Session] = dataclasses.field(default_factory=list)
    base_label: str = ""
    failed: Mapping[CaseId, Sample] = dataclasses.field(default_factory=dict)
    refused: Mapping[CaseId, str] = dataclasses.field(default_factory=dict)
    lost: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def sides(self) -> str:
        """What was timed, and what it was compared with: versions of torch and commits, as far as they are known."""
        head = _versions((self.software, *(s.software for s in self.sessions)), (s.commit for s in self.sessions))
        if self.base:
            base = _versions((s.software for s in self.base), (s.commit for s in self.base))
            return f"{head} against {' '.join(filter(None, (self.base_label, base and f'({base})')))}"
        if self.mode == "baseline" and self.stored:
            known = self.stored.values()
            base = _versions((one.software for one in known), (one.commit for one in known))
            return f"{head} against baselines of {base}"
        return head

    def counts(self) -> dict[Verdict, int]:
        """Cases by verdict, in the order of interest; verdicts that nothing got are left out."""
        counted = Counter(j.verdict for j in self.judgements)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def undecided(self) -> tuple[int, int]:
        """How many of the cases that were compared stayed undecided, and how many were compared."""
        counted = self.counts()
        return counted.get(Verdict.UNDECIDED, 0), len(self.judgements) - counted.get(Verdict.NO_BASELINE, 0)

    @property
    def decided_too_little(self) -> bool:
        """Whether so many of the cases stayed undecided that the run fails for it."""
        undecided, compared = self.undecided
        return self.mode != "none" and undecided > self.undecided_share * compared

    @property
    def failing(self) -> list[str]:
        """What fails the run: counts of cases, with their status or verdict."""
        ended = Counter(sample.status for sample in self.failed.values())
        found = [f"{ended[status]} {status}" for status in Status if status.is_failure and ended[status]]
        if self.mode == "none":
            refused = sum(case.whole not in self.failed for case in self.refused)
            return found + [f"{refused} not recorded"] * bool(refused)
        found += [f"{count} {verdict}" for verdict, count in self.counts().items() if verdict in self.fatal]
        if self.decided_too_little and Verdict.UNDECIDED not in self.fatal:
            share = f"more than --gemm-undecided={100 * self.undecided_share:g} allows"
            undecided, compared = self.undecided
            codes = [j.reason.code for j in self.judgements if j.verdict is Verdict.UNDECIDED]
            is_thin = self.mode == "baseline" and 2 * sum(code in OF_THE_BASELINE for code in codes) > undecided
            remedy = "record more sessions of the baselines" if is_thin else "run again on a quiet machine"
            remedy += ", or allow it with --gemm-undecided=100"
            found.append(f"{undecided} of {compared} compared cases undecided, {share} ({remedy})")
        return found

    # What follows is derived once, from a run that has come to its end.

    @functools.cached_property
    def trusted(self) -> dict[CaseId, dict[int, Sample]]:
        """The timed samples by case and by position of their session.

        Disturbed ones are left out, unless a case has no others: an estimate that is marked is better than none.
        """
        good: dict[CaseId, dict[int, Sample]] = defaultdict(dict)
        doubtful: dict[CaseId, dict[int, Sample]] = defaultdict(dict)
        for position, session in enumerate(self.sessions):
            for sample in session.samples:
                if sample.is_timed:
                    (doubtful if sample.disturbed else good)[sample.case][position] = sample
        return {**doubtful, **good}

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The cases with their rates, shares and speed-ups; those of one problem stand together.

        Problems come in the order of the suite, and so do the backends of a problem.
        """
        place = {problem: i for i, problem in enumerate(dict.fromkeys(j.case.problem for j in self.judgements))}
        ordered = sorted(self.judgements, key=lambda judgement: place[judgement.case.problem])
        return [_row(judgement, self.trusted.get(judgement.case, {}), self.peaks) for judgement in ordered]

    @functools.cached_property
    def winners(self) -> list[Winner]:
        """Who is fastest at each problem, the comparator included, in the order of the suite.

        The lead is taken within sessions: what slows a whole process slows both.  Where all were timed beside one
        comparator it is a quotient of their ratios to that one, the same that the reports show beside each case.  A
        problem with a case whose sessions were all disturbed has no winner.
        """
        of_problem: dict[str, dict[str, Mapping[int, Sample]]] = defaultdict(dict)
        for case, samples in self.trusted.items():
            of_problem[case.problem][entrant(case)] = samples
        problems = dict.fromkeys(j.case.problem for j in self.judgements)
        return [_winner(problem, of_problem[problem]) for problem in problems if problem in of_problem]

    @property
    def contested(self) -> list[Winner]:
        """The winners of the problems at which several were timed."""
        return [winner for winner in self.winners if winner.lead is not None]

    @property
    def leads(self) -> dict[str, list[float]]:
        """The clear winners' leads by entrant, most wins first."""
        leads: dict[str, list[float]] = defaultdict(list)
        for winner in self.winners:
            if winner.lead is not None and winner.clear:
                leads[winner.entrant].append(winner.lead.middle)
        return dict(sorted(leads.items(), key=lambda item: -len(item[1])))

    @property
    def close(self) -> int:
        """How many problems were too close to call."""
        return sum(not winner.clear for winner in self.contested)

    @property
    def means(self) -> list[Mean]:
        """The speed-up of each backend over its comparator, best first."""
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in self.rows:
            if row.speedup:
                found[row.entrant, row.comparator].append(row.speedup.middle)
        means = [
            Mean(*names, statistics.geometric_mean(ratios), min(ratios), max(ratios), len(ratios))
            for names, ratios in found.items()
        ]
        return sorted(means, key=lambda mean: -mean.speedup)


OF_THE_BASELINE: Final = frozenset({"thin-baseline", "underpowered"})
"""Codes of what stays undecided because of the stored sessions: running again does not change it, recording does."""


def _versions(software: Iterable[Mapping[str, str]], commits: Iterable[str]) -> str:
    """Each torch and commit once: ``torch 2.13.0+cpu, commit ab12cd3``."""
    torches = [f"torch {one}" for one in sorted({some["torch"] for some in software if "torch" in some})]
    return ", ".join([*torches, *(f"commit {one}" for one in sorted({*commits} - {""}))]) or "an unknown torch"


def operations(problem: Problem) -> str:
    """The unit of the problem's rate: ``FLOP/s``, or ``OP/s`` for integers."""
    return "FLOP/s" if problem.input_dtype.is_float else "OP/s"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio of times with its 95% interval over sessions.

    Attributes:
        middle: geometric mean over the sessions.
        low, high: ends of the interval, ``None`` with fewer than two sessions.
    """

    middle: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """``1.23x ±1.2%``; the half width is relative, and absent with a single session."""
        text = f"{three(self.middle)}x"
        if self.high is None:
            return text
        half = self.high / self.middle - 1
        if half >= 10:  # two sessions that disagree: t of one degree of freedom is 12.7
            return f"{text} ±>999%"
        return f"{text} ±{percent(half, 1 if 100 * half < 99.95 else 0)}"


def interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of one ratio a session, with Student's 95% interval on the logarithms.

    Args:
        ratios: positive, one for each session; at least one.
    """
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    middle = statistics.fmean(logs)
    if n < 2:
        return Interval(math.exp(middle))
    half = float(special.stdtrit(n - 1, 0.975)) * statistics.stdev(logs) / math.sqrt(n)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@dataclasses.dataclass(frozen=True)
class Row:
    """A case with everything that is derived from its estimates.

    Attributes:
        judgement: of the gate.
        problem: the parsed problem.
        flop_rate: FLOP/s (operations, for integers); ``None`` untimed.
        byte_rate: byte/s of operands read once and results written once; ``None`` untimed.
        memory_bound: whether the roofline limits it by bandwidth; ``None`` without them.
        attainable: the roofline's FLOP/s at this intensity, ``None`` without them.
        share: part of the roofline that was reached; above 1 where the operands stay in cache.
        comparator: name of the comparator, "" without one.
        speedup: time of the comparator over time of the subject; ``None`` without one.
        doubtful: every session was disturbed: the time is shown, and nothing is derived from it.
        joule: energy of a call, the median over the sessions; ``None`` where the device does not tell.
        limits: what held the clock of the device, each with the largest share of a session's readings; "" for nothing.
    """

    judgement: Judgement
    problem: Problem
    flop_rate: float | None
    byte_rate: float | None
    memory_bound: bool | None
    attainable: float | None
    share: float | None
    comparator: str
    speedup: Interval | None
    doubtful: bool = False
    joule: float | None = None
    limits: str = ""

    @property
    def entrant(self) -> str:
        """The backend, with the candidate where one was asked for."""
        return entrant(self.judgement.case)

    @property
    def time(self) -> str:
        """The time, with a question mark where all sessions were disturbed."""
        return seconds_text(self.judgement.seconds) + "?" * self.doubtful

    @property
    def rate(self) -> str:
        """What limits the case decides what is shown: byte/s when it is memory, operations otherwise."""
        if self.flop_rate is None or self.byte_rate is None:
            return "-"
        if self.memory_bound:
            return rate_text(self.byte_rate, "B/s")
        return rate_text(self.flop_rate, operations(self.problem))

    @property
    def peak(self) -> str:
        """The share of the roofline; ``-`` without peaks, ``cached`` where the memory is no limit."""
        if self.share is None:
            return "-"
        return "cached" if self.memory_bound and self.share > roofline.MARGIN else percent(self.share, 0)


@dataclasses.dataclass(frozen=True)
class Winner:
    """The fastest of a problem.

    Attributes:
        problem: the problem line.
        entrant: backend (with its candidate), or the comparator.
        lead: time of the second over the winner's, ``None`` where no other was timed.
        clear: whether the interval against each of the others excludes a tie; with a single session, which gives no
            interval, whether the lead is at least 2%.  Never where a case has disturbed sessions only.
        seconds_by: time by entrant, median over the sessions, fastest first.
    """

    problem: str
    entrant: str
    lead: Interval | None
    clear: bool
    seconds_by: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Mean:
    """The speed-up of a backend over its comparator.

    Attributes:
        entrant: backend, with its candidate where one was asked for.
        comparator: name of the comparator.
        speedup: geometric mean over the cases; above 1 is faster than the comparator.
        worst, best: of the cases.
        cases: how many.
    """

    entrant: str
    comparator: str
    speedup: float
    worst: float
    best: float
    cases: int


# -- from sessions to rows -------------------------------------------------------------------------------------


def entrant(case: CaseId) -> str:
    """Who competes: the backend, with the candidate where one was asked for."""
    return case.backend + (f"@{case.candidate}" if case.candidate else "")


def is_doubtful(samples: Mapping[int, Sample]) -> bool:
    """Whether the case has no estimates but disturbed ones, see :attr:`Run.trusted`."""
    return any(sample.disturbed for sample in samples.values())


def _row(judgement: Judgement, samples: Mapping[int, Sample], peaks: Peaks) -> Row:
    problem = Problem.parse(judgement.case.problem)
    work, seconds, doubtful = roofline.work(problem), judgement.seconds, is_doubtful(samples)
    least, bound = roofline.limit(work, roofline.dtype_name(problem), peaks) or (None, None)
    paired = [] if doubtful else [(s.comparator_estimate, s.estimate) for s in samples.values()]
    ratios = [theirs / ours for theirs, ours in paired if theirs is not None]
    telemetry = [sample.telemetry for sample in samples.values()]
    joules = [some["joule"] for some in telemetry if "joule" in some]
    limits = {name: max(some.get(name, 0.0) for some in telemetry) for some in telemetry for name in some}
    return Row(
        judgement=judgement,
        problem=problem,
        flop_rate=work.flops / seconds if seconds else None,
        byte_rate=work.bytes / seconds if seconds else None,
        memory_bound=None if bound is None else bound == "memory",
        attainable=work.flops / least if least else None,
        share=least / seconds if least and seconds and not doubtful else None,
        comparator=next((s.comparator_name for s in samples.values() if s.comparator_name), ""),
        speedup=interval(ratios) if ratios else None,
        doubtful=doubtful,
        joule=statistics.median(joules) if joules else None,
        limits=", ".join(
            f"{name.removesuffix('_share').replace('_', ' ')} {percent(share, 0)}"
            for name, share in limits.items()
            if name.endswith("_share")
        ),
    )


# One estimate a session, by entrant and position of the session.
_Estimates = dict[str, dict[int, float]]


def _seconds(entrants: Mapping[str, Mapping[int, Sample]]) -> _Estimates:
    """Seconds of each entrant.

    A comparator that is measured beside several backends has one estimate a session as well, their median, unless it
    is a backend of the run with estimates of its own.
    """
    found = {who: {position: s.estimate for position, s in samples.items()} for who, samples in entrants.items()}
    beside: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for samples in entrants.values():
        for position, sample in samples.items():
            if sample.comparator_estimate is not None:
                beside[sample.comparator_name][position].append(sample.comparator_estimate)
    for name, readings in beside.items():
        found.setdefault(name, {position: statistics.median(seconds) for position, seconds in readings.items()})
    return found


def _in_common(entrants: Mapping[str, Mapping[int, Sample]]) -> _Estimates | None:
    """Time of each entrant over that of the comparator in the same windows; ``None`` where not all have the same one.

    The comparator's own windows, where it is a backend of the run, saw other states of the machine than those in which
    it was timed beside another one.
    """
    every = [sample for samples in entrants.values() for sample in samples.values()]
    names = {sample.comparator_name for sample in every if sample.comparator}
    if len(names) != 1:
        return None
    (name,) = names
    found: _Estimates = {name: {position: 1.0 for samples in entrants.values() for position in samples}}
    for who, samples in entrants.items():
        if who != name:
            beside = {position: (s.estimate, s.comparator_estimate) for position, s in samples.items()}
            found[who] = {position: ours / theirs for position, (ours, theirs) in beside.items() if theirs is not None}
    return found if all(found[who].keys() >= samples.keys() for who, samples in entrants.items()) else None


def _winner(problem: str, entrants: Mapping[str, Mapping[int, Sample]]) -> Winner:
    seconds = {who: statistics.median(found.values()) for who, found in _seconds(entrants).items()}
    estimates = _in_common(entrants) or _seconds(entrants)
    medians = {who: statistics.median(found.values()) for who, found in estimates.items()}
    ranked = sorted(medians, key=lambda who: medians[who])
    first, others = ranked[0], ranked[1:]
    leads = []
    for other in others:
        common = estimates[first].keys() & estimates[other].keys()
        ratios = [estimates[other][session] / estimates[first][session] for session in sorted(common)]
        leads.append(interval(ratios) if ratios else Interval(medians[other] / medians[first]))
    return Winner(
        problem=problem,
        entrant=first,
        lead=leads[0] if leads else None,
        clear=bool(leads) and all(map(_is_clear, leads)) and not any(map(is_doubtful, entrants.values())),
        seconds_by={who: seconds[who] for who in ranked},
    )


def _is_clear(lead: Interval) -> bool:
    return lead.middle >= _SINGLE if lead.low is None else lead.low > 1


# The lead that a single session has to show: three times the 0.7% by which paired ratios of fresh processes differ on
# an idle GPU, the only machine that is screened with one session.
_SINGLE = 1.02


# -- the columns of all tables -------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the tables of cases.

    Attributes:
        title: its head.
        text: of a row's cell; ``-`` where there is nothing.
        value: the number behind the text, by which a page sorts; ``None`` for a column of words.
    """

    title: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | None] | None = None


AGAINST: Mapping[Mode, str] = {"baseline": "vs baseline", "against": "vs base", "none": ""}


def columns(run: Run, found: Iterable[Row]) -> dict[str, Column]:
    """The columns that this run has, by name; each report takes those it shows."""
    all_columns = {
        "problem": Column("problem", lambda row: row.problem.line),
        "backend": Column("backend", lambda row: row.entrant),
        "verdict": Column("verdict", lambda row: str(row.judgement.verdict)),
        "time": Column("time", lambda row: row.time, lambda row: row.judgement.seconds),
        "energy": Column("energy", lambda row: joules_text(row.joule), lambda row: row.joule),
        "clock": Column("clock held by", lambda row: row.limits or "-"),
        "rate": Column("rate", lambda row: row.rate, lambda row: row.flop_rate),
        "peak": Column("peak", lambda row: row.peak, lambda row: row.share),
        "speedup": Column(
            f"vs {comparator_of(found)}",
            lambda row: str(row.speedup or "-"),
            lambda row: row.speedup.middle if row.speedup else None,
        ),
        "change": Column(AGAINST[run.mode], lambda row: change_text(row.judgement), lambda row: row.judgement.change),
        "why": Column("why", lambda row: f"{row.judgement.reason.code}: {row.judgement.reason}"),
    }
    left_out = {"verdict", "change"} if run.mode == "none" else set()
    left_out |= {name for name in ("energy", "clock") if all(all_columns[name].text(row) == "-" for row in run.rows)}
    return {name: column for name, column in all_columns.items() if name not in left_out}


def comparator_of(found: Iterable[Row]) -> str:
    """The comparator's name, or the word where there are several."""
    names = {row.comparator for row in found if row.comparator}
    return names.pop() if len(names) == 1 else "comparator"


def change_text(judgement: Judgement) -> str:
    """The change with its interval: ``+5.1% [+3.2, +7.0]``; ``-`` where nothing was compared."""
    if judgement.change is None:
        return "-"
    text = f"{signed(judgement.change)}%"
    if judgement.low is not None and judgement.high is not None:
        text += f" [{signed(judgement.low)}, {signed(judgement.high)}]"
    return text
