"""What a human reads of a speed run: the terminal table, a failure, the Markdown of a CI job.

Pure functions from a :class:`Run` to text; the picture of the same run is ``speed_page``.

An interval over sessions is Student's t on the logarithms of one figure a session.  Readings of one process are not
independent, so they never narrow it, and a case with one session has none.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import shlex
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from scipy import special

from pytest_gemm import roofline
from pytest_gemm.outcome import Reason
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import CaseKey, Ceilings, Judgement, Sample, Session, Verdict

__all__ = [
    "VERDICTS",
    "Interval",
    "Mean",
    "Mode",
    "Past",
    "Row",
    "Run",
    "Winner",
    "change_text",
    "failure",
    "geomean",
    "interval",
    "markdown",
    "rate_text",
    "rows",
    "seconds_text",
    "summary",
    "table",
    "winners",
]

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


class Past(NamedTuple):
    """A stored baseline of a case.

    Attributes:
        date: ISO 8601.
        seconds: median over the sessions of the subject's figure, seconds a call.
        commit: that was measured, "" where unknown.
    """

    date: str
    seconds: float
    commit: str


@dataclasses.dataclass(frozen=True)
class Run:
    """All that the reports need to know of a run.

    Attributes:
        judgements: one for each case, in the suite's order.
        sessions: of the head, screening and confirmation.
        hardware: the hardware key.
        software: versions by name.
        ceilings: of the machine, as measured; empty where they were not.
        mode: what the time was compared with: stored baselines, another environment, or nothing.
        anchor: what is to be said of the machine as a whole, ``None`` where its comparators stayed.
        notes: further sentences about the run.
        history: earlier baselines of a case, oldest first; the last one is what it was compared with.
        seconds: wall-clock time of the whole run.
        harness_seconds: the part of it that is neither compiling, judging nor timing a case.
        record: the command that records this run's cases.
        delta: slow-down that is tolerated, as a fraction; 0 where it is not to be shown.
        fatal: verdicts that fail a test.
        undecided_share: of the compared cases, beyond which the run fails for what stays undecided.
    """

    judgements: Sequence[Judgement]
    sessions: Sequence[Session] = ()
    hardware: str = ""
    software: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ceilings: Ceilings = dataclasses.field(default_factory=Ceilings)
    mode: Mode = "baseline"
    anchor: Reason | None = None
    notes: Sequence[str] = ()
    history: Mapping[CaseKey, Sequence[Past]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    harness_seconds: float = 0.0
    record: str = "pytest perf --gemm-record"
    delta: float = 0.0
    fatal: Collection[Verdict] = ()
    undecided_share: float = 1.0

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


@dataclasses.dataclass(frozen=True)
class Interval:
    """A ratio of times with its 95% interval over sessions.

    Attributes:
        middle: geometric mean over the sessions.
        low, high: ends of the interval, ``None`` with fewer than two sessions.
        sessions: how many figures it rests on.
    """

    middle: float
    low: float | None = None
    high: float | None = None
    sessions: int = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """A case with everything that is derived from its figures.

    Attributes:
        judgement: what the gate says.
        problem: the parsed problem.
        flop_rate: FLOP/s (operations, for integers); ``None`` untimed.
        byte_rate: byte/s of operands read once and results written once; ``None`` untimed.
        intensity: FLOP per byte.
        memory_bound: whether the roofline limits it by bandwidth; ``None`` without ceilings.
        attainable: the roofline's FLOP/s at this intensity, ``None`` without ceilings.
        share: part of the roofline that was reached; above 1 where the operands stay in cache.
        comparator: name of the comparator, "" without one.
        speedup: time of the comparator over time of the subject; ``None`` without one.
        doubtful: every session was disturbed: the time is shown, and nothing is derived from it.
    """

    judgement: Judgement
    problem: Problem
    flop_rate: float | None
    byte_rate: float | None
    intensity: float
    memory_bound: bool | None
    attainable: float | None
    share: float | None
    comparator: str
    speedup: Interval | None
    doubtful: bool = False

    @property
    def entrant(self) -> str:
        """The backend, with the choice where one was asked for."""
        return entrant(self.judgement.case)


@dataclasses.dataclass(frozen=True)
class Winner:
    """The fastest of a problem.

    Attributes:
        problem: the problem line.
        entrant: backend (with its choice), or the comparator.
        seconds: its time, median over the sessions.
        runner_up: the second, "" where nobody else was timed.
        lead: time of the runner-up over the winner's, ``None`` where nobody else was timed.
        clear: whether the interval against each of the others excludes a tie; with a single session, which gives no
            interval, whether the lead is at least 2%.  Never where a case has disturbed sessions only.
        seconds_by: time by entrant, fastest first.
    """

    problem: str
    entrant: str
    seconds: float
    runner_up: str
    lead: Interval | None
    clear: bool
    seconds_by: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Mean:
    """The speed-up of a backend over its comparator.

    Attributes:
        entrant: backend, with its choice where one was asked for.
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


# -- figures -------------------------------------------------------------------------------------------------


def interval(ratios: Sequence[float]) -> Interval:
    """Geometric mean of one ratio a session, with Student's 95% interval on the logarithms.

    Args:
        ratios: positive, one for each session; at least one.
    """
    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    middle = statistics.fmean(logs)
    if n < 2:
        return Interval(math.exp(middle), sessions=n)
    half = float(special.stdtrit(n - 1, 0.975)) * statistics.stdev(logs) / math.sqrt(n)
    return Interval(math.exp(middle), math.exp(middle - half), math.exp(middle + half), n)


def entrant(case: CaseKey) -> str:
    """Who competes: the backend, with the choice where one was asked for."""
    return case.backend + (f"@{case.choice}" if case.choice else "")


def _trusted(sessions: Iterable[Session]) -> dict[CaseKey, dict[int, Sample]]:
    """The timed samples by case and by position of their session.

    Disturbed ones are left out, unless a case has no others: a doubtful figure, whose verdict says so, beats none.
    """
    good: dict[CaseKey, dict[int, Sample]] = defaultdict(dict)
    doubtful: dict[CaseKey, dict[int, Sample]] = defaultdict(dict)
    for position, session in enumerate(sessions):
        for sample in session.samples:
            if sample.is_timed:
                (doubtful if sample.disturbed else good)[sample.case][position] = sample
    return {**doubtful, **good}


def _is_doubtful(samples: Mapping[int, Sample]) -> bool:
    """Whether the case has no figures but disturbed ones, see :func:`_trusted`."""
    return any(sample.disturbed for sample in samples.values())


def rows(run: Run) -> list[Row]:
    """The cases with their rates, shares and speed-ups; those of one problem stand together.

    Problems come in the order of the suite, and so do the backends of a problem.
    """
    samples = _trusted(run.sessions)
    order: dict[str, list[Judgement]] = {}
    for judgement in run.judgements:
        order.setdefault(judgement.case.problem, []).append(judgement)
    return [
        _row(judgement, samples.get(judgement.case, {}), run.ceilings)
        for judgement in itertools.chain.from_iterable(order.values())
    ]


def _row(judgement: Judgement, samples: Mapping[int, Sample], ceilings: Ceilings) -> Row:
    problem = Problem.parse(judgement.case.problem)
    work = roofline.work(problem)
    dtype = roofline.dtype_name(problem)
    least = roofline.attainable_seconds(work, dtype, ceilings)
    limit = roofline.bound(work, dtype, ceilings)
    seconds = judgement.seconds
    doubtful = _is_doubtful(samples)
    paired = [] if doubtful else [(s.comparator_figure, s.figure) for s in samples.values()]
    ratios = [theirs / ours for theirs, ours in paired if theirs is not None]
    return Row(
        judgement=judgement,
        problem=problem,
        flop_rate=work.flops / seconds if seconds else None,
        byte_rate=work.bytes / seconds if seconds else None,
        intensity=work.intensity,
        memory_bound=None if limit is None else limit == "memory",
        attainable=work.flops / least if least else None,
        share=least / seconds if least and seconds and not doubtful else None,
        comparator=next((s.comparator_name for s in samples.values() if s.comparator_name), ""),
        speedup=interval(ratios) if ratios else None,
        doubtful=doubtful,
    )


def winners(run: Run) -> list[Winner]:
    """Who is fastest at each problem, the comparator included, in the order of the suite.

    The lead is taken within sessions: what slows a whole process slows both.  Where all were timed beside one
    comparator it is a quotient of their ratios to that one, the same that the reports show beside each case.  A problem
    with a case whose sessions were all disturbed has no winner.
    """
    of_problem: dict[str, dict[str, Mapping[int, Sample]]] = {}
    for case, samples in _trusted(run.sessions).items():
        of_problem.setdefault(case.problem, {})[entrant(case)] = samples
    return [
        _winner(problem, of_problem[problem])
        for problem in dict.fromkeys(j.case.problem for j in run.judgements)
        if problem in of_problem
    ]


# One figure a session, by entrant and position of the session.
_Figures = dict[str, dict[int, float]]


def _seconds(entrants: Mapping[str, Mapping[int, Sample]]) -> _Figures:
    """Seconds of each entrant.

    A comparator that is measured beside several backends has one figure a session as well, their median, unless it is a
    backend of the run with figures of its own.
    """
    found = {who: {position: s.figure for position, s in samples.items()} for who, samples in entrants.items()}
    beside: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for samples in entrants.values():
        for position, sample in samples.items():
            if sample.comparator_figure is not None:
                beside[sample.comparator_name][position].append(sample.comparator_figure)
    for name, readings in beside.items():
        found.setdefault(name, {position: statistics.median(seconds) for position, seconds in readings.items()})
    return found


def _in_common(entrants: Mapping[str, Mapping[int, Sample]]) -> _Figures | None:
    """Time of each entrant over that of the comparator in the same windows; ``None`` where not all have the same one.

    The comparator's own windows, where it is a backend of the run, saw other states of the machine than those in which
    it was timed beside another one.
    """
    names = {s.comparator_name for samples in entrants.values() for s in samples.values() if s.comparator}
    if len(names) != 1:
        return None
    (name,) = names
    found: _Figures = {name: {position: 1.0 for samples in entrants.values() for position in samples}}
    for who, samples in entrants.items():
        if who == name:
            continue
        beside = {position: (s.figure, s.comparator_figure) for position, s in samples.items()}
        found[who] = {position: ours / theirs for position, (ours, theirs) in beside.items() if theirs is not None}
        if len(found[who]) < len(samples):
            return None
    return found


def _winner(problem: str, entrants: Mapping[str, Mapping[int, Sample]]) -> Winner:
    seconds = {who: statistics.median(found.values()) for who, found in _seconds(entrants).items()}
    figures = _in_common(entrants) or _seconds(entrants)
    medians = {who: statistics.median(found.values()) for who, found in figures.items()}
    ranked = sorted(medians, key=lambda who: medians[who])
    first, others = ranked[0], ranked[1:]
    leads = []
    for other in others:
        common = figures[first].keys() & figures[other].keys()
        ratios = [figures[other][session] / figures[first][session] for session in sorted(common)]
        leads.append(interval(ratios) if ratios else Interval(medians[other] / medians[first], sessions=0))
    return Winner(
        problem=problem,
        entrant=first,
        seconds=seconds[first],
        runner_up=others[0] if others else "",
        lead=leads[0] if leads else None,
        clear=bool(leads) and all(map(_is_clear, leads)) and not any(map(_is_doubtful, entrants.values())),
        seconds_by={who: seconds[who] for who in ranked},
    )


def _is_clear(lead: Interval) -> bool:
    return lead.middle >= _SINGLE if lead.low is None else lead.low > 1


# The lead that a single session has to show: three times the 0.7% by which paired ratios of fresh processes differ on
# an idle GPU, the only machine that is screened with one session.
_SINGLE = 1.02


def geomean(run: Run) -> list[Mean]:
    """The speed-up of each backend over its comparator, best first."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows(run):
        if row.speedup:
            found[row.entrant, row.comparator].append(row.speedup.middle)
    means = [
        Mean(entrant, comparator, statistics.geometric_mean(ratios), min(ratios), max(ratios), len(ratios))
        for (entrant, comparator), ratios in found.items()
    ]
    return sorted(means, key=lambda mean: -mean.speedup)


# -- numbers as text -----------------------------------------------------------------------------------------

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
# Matrix rates are quoted in TFLOP/s however high they are.
_RATES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def three(value: float) -> str:
    """A positive number with three significant digits and no exponent: 1.23, 12.3, 123, 1230."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> tuple[str, str]:
    # 0.9995: what would be rounded to 1000 of a unit is shown as 1.00 of the next.
    unit, name = next(((u, n) for u, n in units if value >= 0.9995 * u), units[-1])
    return three(value / unit), name


def seconds_text(seconds: float | None) -> str:
    """A time with three digits and its unit: ``12.3 us``; ``-`` for none."""
    if seconds is None:
        return "-"
    return " ".join(_scaled(seconds, _TIMES))


def rate_text(rate: float, unit: str) -> str:
    """A rate with three digits, prefix and unit: ``612 TFLOP/s``."""
    number, prefix = _scaled(rate, _RATES)
    return f"{number} {prefix}{unit}"


def operations(problem: Problem) -> str:
    """The unit of the problem's rate: ``FLOP/s``, or ``OP/s`` for integers."""
    return "FLOP/s" if problem.input_dtype.is_float else "OP/s"


def _signed(fraction: float) -> str:
    text = f"{100 * fraction:+.1f}"
    return "+0.0" if text == "-0.0" else text


def _percent(fraction: float) -> str:
    return f"{_signed(fraction)}%"


def change_text(judgement: Judgement) -> str:
    """The change with its interval: ``+5.1% [+3.2, +7.0]``; ``-`` where nothing was compared."""
    if judgement.change is None:
        return "-"
    text = _percent(judgement.change)
    if judgement.low is not None and judgement.high is not None:
        text += f" [{_signed(judgement.low)}, {_signed(judgement.high)}]"
    return text


def ratio_text(ratio: Interval | None) -> str:
    """A ratio with its interval: ``1.23x ±1.2%``; the half width is relative, and absent with a single session."""
    if ratio is None:
        return "-"
    text = f"{three(ratio.middle)}x"
    if ratio.high is None:
        return text
    return f"{text} ±{_three_percent(ratio.high / ratio.middle - 1)}"


def _three_percent(fraction: float) -> str:
    percent = 100 * fraction
    if percent >= 1000:  # two sessions that disagree: t of one degree of freedom is 12.7
        return ">999%"
    return f"{percent:.1f}%" if percent < 99.95 else f"{percent:.0f}%"


def rate_cell(row: Row) -> str:
    """What limits the case decides what is shown: byte/s when it is memory, operations otherwise; ``-`` untimed."""
    if row.flop_rate is None or row.byte_rate is None:
        return "-"
    if row.memory_bound:
        return rate_text(row.byte_rate, "B/s")
    return rate_text(row.flop_rate, operations(row.problem))


def share_cell(row: Row) -> str:
    """The share of the roofline in per cent; ``-`` without ceilings, ``cached`` where the memory is no limit."""
    if row.share is None:
        return "-"
    return "cached" if row.memory_bound and row.share > roofline.MARGIN else f"{100 * row.share:.0f}%"


def time_cell(row: Row) -> str:
    """The time, with a question mark where all sessions were disturbed."""
    return seconds_text(row.judgement.seconds) + "?" * row.doubtful


# -- the terminal --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Column:
    """A column of the terminal table; one of a higher rank goes first when the width does not suffice."""

    title: str
    cells: list[str]
    rank: int = 0
    left: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    def line(self, index: int | None) -> str:
        text = self.title if index is None else self.cells[index]
        return text.ljust(self.width) if self.left else text.rjust(self.width)


# A shortened problem line keeps at least so many characters.
_LEAST_PROBLEM = 26

_AGAINST: Mapping[Mode, str] = {"baseline": "vs baseline", "against": "vs base", "none": ""}


def table(run: Run, width: int = 120) -> list[str]:
    """The terminal report: a line for each case, then the summary.

    Args:
        run: what is reported.
        width: of the terminal in characters.  Problem lines are shortened in the middle and columns left out, the
            least important first, where they do not fit.
    """
    found = rows(run)
    if not found:
        return ["no case was timed", *summary(run)]
    first = {w.problem: w.entrant for w in winners(run) if w.clear}
    lines = _fitted(_columns(run, found, first), width)
    legend = "time: median over sessions"
    if any(row.share is not None for row in found):
        legend += "; roof: share of the measured roofline, rate in B/s where memory limits it"
    if any(share_cell(row) == "cached" for row in found):
        legend += "; cached: faster than the memory, for the operands stayed in a cache"
    if any(row.doubtful for row in found):
        legend += "; ?: disturbed in every session"
    if first:
        legend += "; *: fastest, beyond its interval or, from one session, by 2%"
    return [*lines, *textwrap.wrap(legend, width), "", *_wrapped(summary(run), width)]


def _wrapped(lines: Iterable[str], width: int) -> Iterable[str]:
    """Lines of at most ``width`` characters; commands, which are indented by two, stay in one piece."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    for line in lines:
        yield from [line] if line.startswith(f"{_INDENT}pytest ") else wrapper.wrap(line)


def _comparators(found: Iterable[Row]) -> str:
    """The comparator's name, or the word where there are several."""
    names = {row.comparator for row in found if row.comparator}
    return names.pop() if len(names) == 1 else "comparator"


def _columns(run: Run, found: Sequence[Row], first: Mapping[str, str]) -> list[_Column]:
    def starred(row: Row) -> str:
        return row.entrant + ("*" if first.get(row.problem.line) == row.entrant else "")

    columns = [
        _Column("problem", [row.problem.line for row in found], left=True),
        _Column("backend", [starred(row) for row in found], left=True),
        _Column("time", [time_cell(row) for row in found]),
        _Column("rate", [rate_cell(row) for row in found], rank=1),
        _Column("roof", [share_cell(row) for row in found], rank=2),
        _Column(f"vs {_comparators(found)}", [ratio_text(row.speedup) for row in found], rank=3),
    ]
    if run.mode != "none":
        columns.append(_Column(_AGAINST[run.mode], [change_text(row.judgement) for row in found]))
        columns.append(_Column("verdict", [str(row.judgement.verdict) for row in found], left=True))
    return [c for c in columns if c.rank == 0 or any(cell != "-" for cell in c.cells)]


def _fitted(columns: Sequence[_Column], width: int) -> list[str]:
    """The lines of the table, with its head."""
    problem, kept = columns[0], list(columns[1:])
    least = min(problem.width, _LEAST_PROBLEM)
    while True:
        room = width - sum(2 + column.width for column in kept)
        cells = _shortened(problem.cells, max(room, least))
        optional = max(kept, key=lambda column: column.rank)
        if not optional.rank or (room >= least and len(set(cells)) == len(set(problem.cells))):
            break
        kept.remove(optional)
    problem = _Column(problem.title, cells, left=True)
    return ["  ".join(c.line(i) for c in (problem, *kept)).rstrip() for i in (None, *range(len(cells)))]


def _shortened(lines: Sequence[str], room: int) -> list[str]:
    """Lines without their middle where they are too long, cut where they stay distinct if there is such a place."""
    kept = room - 2
    cuts = sorted(range(kept), key=lambda head: abs(head - kept // 2))  # the op stands in front, the shape behind
    tried = ([x if len(x) <= room else f"{x[:cut]}..{x[len(x) - (kept - cut) :]}" for x in lines] for cut in cuts)
    return max(itertools.islice(tried, _CUTS), key=lambda found: len(set(found)))


# Places of a cut that are tried.
_CUTS = 16


def summary(run: Run) -> list[str]:
    """The lines below the table: verdicts, the machine, who wins, what is left to do, what it cost."""
    return [
        *_count_lines(run),
        *([f"anchor shift: {run.anchor}"] if run.anchor else []),
        *_undecided_lines(run),
        *disturbed_lines(run),
        *untimed_lines(run),
        *_selection_lines(run),
        *_detectable_lines(run),
        *_winner_lines(run),
        *_mean_lines(run),
        *run.notes,
        *_cost_lines(run),
        *_next_lines(run),
        *_gate_lines(run),
    ]


def plural(count: int, word: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


def _count_lines(run: Run) -> list[str]:
    cases = plural(len(run.judgements), "case")
    if run.mode == "none":
        return [f"{cases} timed, compared with nothing"]
    against = {"baseline": "stored baselines", "against": "the base environment", "none": ""}[run.mode]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items())
    return [f"{cases} against {against}: {counts}" if counts else f"{cases} against {against}"]


def _undecided_lines(run: Run) -> list[str]:
    """The undecided cases by code, with their sentences."""
    groups: dict[str, list[Judgement]] = defaultdict(list)
    for judgement in run.judgements:
        if judgement.verdict is Verdict.UNDECIDED:
            groups[judgement.reason.code].append(judgement)
    lines = []
    for code, group in groups.items():
        lines.append(f"undecided, {code}: {plural(len(group), 'case')}")
        lines += [f"{_INDENT}{j.case}: {j.reason}" for j in group[:_SENTENCES]]
        if len(group) > _SENTENCES:
            lines.append(f"{_INDENT}and {len(group) - _SENTENCES} more")
    return lines


_INDENT = "  "


def disturbed_lines(run: Run) -> list[str]:
    """What was left out because the machine was not quiet, and what could not be measured for the same reason."""
    timed = [sample for session in run.sessions for sample in session.samples if sample.is_timed]
    lost = [sample.disturbed for sample in timed if sample.disturbed]
    lines = [f"no roofline: {run.ceilings.disturbed}"] if run.ceilings.disturbed else []
    if lost:
        text = f"disturbed and left out: {len(lost)} of {plural(len(timed), 'sample')}, for instance: {lost[0]}"
        if cases := [case for case, samples in _trusted(run.sessions).items() if _is_doubtful(samples)]:
            text += f"; {plural(len(cases), 'case')} without any other: {_named(cases)}"
        lines.append(text)
    return lines


# Undecided cases of one code whose sentences are shown.
_SENTENCES = 5


# Cases that a line names.
_NAMED = 3


def _named(cases: Sequence[CaseKey]) -> str:
    text = ", ".join(map(str, cases[:_NAMED]))
    return text + (f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else "")


def _untimed(run: Run) -> dict[str, list[CaseKey]]:
    """Cases of which no session has a figure, by how they ended and why."""
    timed = {s.case for session in run.sessions for s in session.samples if s.is_timed}
    groups: dict[str, list[CaseKey]] = defaultdict(list)
    seen = set()
    for sample in itertools.chain.from_iterable(session.samples for session in run.sessions):
        if sample.case not in timed and sample.case not in seen:
            seen.add(sample.case)
            why = f": {sample.reason}" if sample.reason else ""
            groups[f"{sample.status}{why}"].append(sample.case)
    return groups


def untimed_lines(run: Run) -> list[str]:
    """Cases without a figure, by how they ended."""
    return [f"not timed, {why}: {_named(cases)}" for why, cases in _untimed(run).items()]


def _selection_lines(run: Run) -> list[str]:
    """Changed choices, and picked ones that are not the fastest."""
    lines = [f"selection changed, {j.case}: {j.selection}" for j in run.judgements if j.selection]
    known = [(j.regret, f"{j.case} against {j.faster}") for j in run.judgements if j.regret is not None]
    costly = sorted((one for one in known if one[0] >= _REGRET), reverse=True)
    if costly:
        worst = "; ".join(f"{_percent(regret)} in {where}" for regret, where in costly[:_NAMED])
        more = f", and {len(costly) - _NAMED} more" if len(costly) > _NAMED else ""
        lines.append(
            f"the picked choice takes over {100 * _REGRET:.0f}% longer than the fastest timed candidate "
            f"in {len(costly)} of {plural(len(known), 'case')}: {worst}{more}"
        )
    return lines


# Regret below this is what two runs of autotuning differ by.
_REGRET = 0.05


def _detectable_lines(run: Run) -> list[str]:
    found = [(j.detectable, j.case) for j in run.judgements if j.detectable is not None]
    if not found:
        return []
    middle = statistics.median(detectable for detectable, _ in found)
    worst, case = max(found)
    median, least = f"{100 * middle:.1f}%", f"{100 * worst:.1f}% in {case}"
    return [f"smallest slow-down that would have been seen (power 95%): median case {median}, worst {least}"]


def wins(found: Iterable[Winner]) -> tuple[dict[str, list[float]], int]:
    """The clear winners' leads by entrant, most wins first, and how many problems were too close to call.

    Problems that only one was timed at are in neither.
    """
    leads: dict[str, list[float]] = defaultdict(list)
    close = 0
    for winner in found:
        if winner.lead is None:
            continue
        if winner.clear:
            leads[winner.entrant].append(winner.lead.middle)
        else:
            close += 1
    return dict(sorted(leads.items(), key=lambda item: -len(item[1]))), close


def _winner_lines(run: Run) -> list[str]:
    found = winners(run)
    leads, close = wins(found)
    if not leads and not close:
        return []
    parts = [f"{who} {len(won)} (by {three(statistics.geometric_mean(won))}x)" for who, won in leads.items()]
    if close:
        parts.append(f"too close to call {close}")
    total = close + sum(map(len, leads.values()))
    text = f"fastest of {plural(total, 'problem')}: {', '.join(parts)}"
    single = sum(w.lead is not None and w.lead.low is None for w in found)
    return [text + (f"; {single} from one session, without an interval" if single else "")]


def _mean_lines(run: Run) -> list[str]:
    lines = []
    for m in geomean(run):
        text = f"{m.entrant} over {m.comparator}: {three(m.speedup)}x"
        if m.cases > 1:
            text += f", the geometric mean of {m.cases} cases from {three(m.worst)}x to {three(m.best)}x"
        lines.append(text)
    return lines


def _cost_lines(run: Run) -> list[str]:
    if not run.seconds:
        return []
    phases: Counter[str] = Counter()
    for sample in itertools.chain.from_iterable(session.samples for session in run.sessions):
        phases.update(sample.phases)
    parts = [f"{name} {seconds:.0f} s" for name, seconds in phases.items()]
    if run.harness_seconds:
        parts.append(f"harness {run.harness_seconds:.0f} s ({100 * run.harness_seconds / run.seconds:.0f}%)")
    text = f"{run.seconds:.0f} s, {plural(len(run.sessions), 'process', 'processes')}"
    return [f"{text}: {', '.join(parts)}" if parts else text]


_ACCEPT = "--gemm-accept=CASE --gemm-reason=TEXT"


def _next_lines(run: Run) -> list[str]:
    """What to do next."""
    return [line for sentence, command in _commands(run) for line in (f"{sentence}:", f"{_INDENT}{command}")]


def _commands(run: Run) -> list[tuple[str, str]]:
    """What can be done about the verdicts, with the command that does it."""
    counts = run.counts()
    new, faster, slower = (counts.get(v, 0) for v in (Verdict.NO_BASELINE, Verdict.FASTER, Verdict.SLOWER))
    thin = sum(j.reason.code == "thin-baseline" for j in run.judgements)
    commands = []
    if run.mode == "baseline" and (new or thin or faster):
        what = [f"{new} without a baseline"] * bool(new) + [f"{thin} with a thin one"] * bool(thin)
        what += [f"{faster} faster"] * bool(faster)
        commands.append((f"to record the {' and the '.join(what)}", run.record))
    if run.mode == "baseline" and slower:
        commands.append(("if a slow-down is meant", f"{run.record} {_ACCEPT}"))
    return commands


def _gate_lines(run: Run) -> list[str]:
    """The last line: how many cases got which verdict, and what fails the run."""
    if run.mode == "none":
        return []

    def what(verdict: Verdict) -> str:
        return (" (fails)" if verdict in run.fatal else " (shown)") if verdict in _POLICY else ""

    told = [f"{count} {verdict}{what(verdict)}" for verdict, count in run.counts().items()]
    undecided, compared = run.undecided
    text = f"gate: {', '.join(told) or 'no case'}"
    if run.decided_too_little:
        share = f"--gemm-undecided-share={100 * run.undecided_share:g}"
        text += (
            f"; {undecided} of {compared} compared cases stayed undecided, more than {share} allows, so the run fails: "
            "run again on a quiet machine, or allow it with --gemm-undecided-share=100"
        )
    elif run.undecided_share < 1:
        text += f"; the run fails when more than {100 * run.undecided_share:g}% of the compared cases are undecided"
    return [text]


# Verdicts that may fail a run.
_POLICY: Final = (Verdict.SLOWER, Verdict.UNDECIDED, Verdict.NO_BASELINE)


# -- a failure -----------------------------------------------------------------------------------------------


def failure(
    judgement: Judgement, rerun: str, *, stored: Past | None = None, mode: Mode = "baseline", record: str = ""
) -> str:
    """What pytest shows for a case that fails: what, how much, against what, how it was confirmed, how to rerun.

    Args:
        judgement: ``slower`` or ``no-baseline``, or whatever else the policy makes fail.
        rerun: the command that runs just this case again.
        stored: the baseline that it was compared with, for its date and commit.
        mode: what it was compared with.
        record: the command that records baselines, "" to leave that line out.
    """
    case = judgement.case
    head = f"{case.problem} on {entrant(case)}: {judgement.verdict}"
    if judgement.change is not None:
        head += f", {_percent(judgement.change)}{_bounds(judgement)}"
    lines = [
        head,
        _figures_line(judgement, stored, mode),
        f"  {judgement.reason.code}: {judgement.reason.text}",
        _evidence_line(judgement),
    ]
    if judgement.selection:
        lines.append(f"  selection changed: {judgement.selection}")
    if judgement.regret is not None and judgement.regret > 0:
        lines.append(f"  the picked choice takes {_percent(judgement.regret)} against {judgement.faster}")
    if judgement.reason.remedy:
        lines.append(f"  remedy: {judgement.reason.remedy}")
    if record and mode == "baseline":
        if judgement.verdict is Verdict.NO_BASELINE:
            lines.append(f"  to record it: {record}")
        elif judgement.verdict is Verdict.SLOWER:
            accept = shlex.quote(f"--gemm-accept={case}")
            lines.append(f"  if it is meant: {record} {accept} --gemm-reason=TEXT")
    lines.append(f"  rerun: {rerun}")
    return "\n".join(line for line in lines if line)


def _bounds(judgement: Judgement) -> str:
    if judgement.low is None or judgement.high is None:
        return ""
    return f" (95% interval {_percent(judgement.low)} to {_percent(judgement.high)})"


def _figures_line(judgement: Judgement, stored: Past | None, mode: Mode) -> str:
    """Time now and then, and where the earlier one comes from."""
    if judgement.seconds is None:
        return ""
    text = f"  now {seconds_text(judgement.seconds)}"
    then = judgement.stored_seconds if judgement.stored_seconds is not None else (stored.seconds if stored else None)
    if then is not None:
        text += f", was {seconds_text(then)}"
        if mode == "against":
            text += " in the base environment"
        elif stored:
            text += f": baseline of {stored.date[:10]}" + (f", commit {stored.commit}" if stored.commit else "")
    if judgement.comparator_seconds is not None:
        text += f"; comparator {seconds_text(judgement.comparator_seconds)}"
    return text


def _weight_text(weight: float) -> str:
    if weight <= 0:
        return "raw time"
    return "time relative to the comparator" if weight >= 1 else f"time, {100 * weight:.0f}% relative to the comparator"


def _evidence_line(judgement: Judgement) -> str:
    if not judgement.sessions:
        return ""
    text = f"  from {plural(judgement.sessions, 'process', 'processes')}"
    if judgement.change is not None:
        text += f", judged by {_weight_text(judgement.weight)}"
    if judgement.detectable is not None:
        text += f"; a slow-down of {100 * judgement.detectable:.1f}% would have been seen"
    return text


# -- Markdown ------------------------------------------------------------------------------------------------


def markdown(run: Run, title: str) -> str:
    """The summary of a CI job: counts, what moved, and the rest folded.

    Args:
        run: what is reported.
        title: of the page, plain text.
    """
    found = rows(run)
    moved = sorted(
        (row for row in found if row.judgement.verdict in _SHOWN), key=lambda row: _rank(row.judgement.verdict)
    )
    lines = [f"## {_escaped(title)}", "", *_facts(run), ""]
    lines += _count_table(run)
    if run.anchor:
        lines += [f"**Anchor shift**: {_escaped(str(run.anchor))}", ""]
    if moved:
        lines += ["### Changed or undecided", "", *_markdown_table(run, moved, reason=True), ""]
    lines += _winner_table(run)
    told = [
        *disturbed_lines(run),
        *untimed_lines(run),
        *_selection_lines(run),
        *_detectable_lines(run),
        *_winner_lines(run),
    ]
    told += [*_mean_lines(run), *run.notes, *_cost_lines(run), *_gate_lines(run)]
    lines += [*(f"- {_escaped(line)}" for line in told), ""] if told else []
    for sentence, command in _commands(run):
        lines += [f"{sentence}:", "", f"    {command}", ""]
    if found:
        body = _markdown_table(run, found, reason=False)
        lines += _folded(f"All {plural(len(found), 'case')}", body)
    return "\n".join(lines).rstrip() + "\n"


_SHOWN = frozenset({Verdict.SLOWER, Verdict.FASTER, Verdict.UNDECIDED})


def _rank(verdict: Verdict) -> int:
    return list(VERDICTS).index(verdict)


def _escaped(text: str) -> str:
    """Text that Markdown and its HTML leave as it is, also within a table."""
    escaped = html.escape(text, quote=False)
    for character in "\\`*_[]|~":
        escaped = escaped.replace(character, f"\\{character}")
    return " ".join(escaped.split())


def _code(text: str) -> str:
    """Code within a table cell; problem lines hold neither bars nor backquotes, names of choices might."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


def _cells(head: Sequence[str], body: Iterable[Sequence[str]], right: int) -> list[str]:
    """A Markdown table whose columns from ``right`` on are numbers."""
    rule = "|" + "".join("---|" if i < right else "---:|" for i in range(len(head)))
    return ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in body)]


def _facts(run: Run) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in run.software.items())
    return [_escaped(" · ".join(part for part in (run.hardware, software, _commit_text(run)) if part))]


def _commit_text(run: Run) -> str:
    commits = dict.fromkeys(session.commit for session in run.sessions if session.commit)
    return f"commit {', '.join(commits)}" if commits else ""


def _count_table(run: Run) -> list[str]:
    if run.mode == "none":
        return [*_count_lines(run), ""]
    counts = run.counts()
    head = ["cases", *(str(verdict) for verdict in VERDICTS)]
    body = [str(len(run.judgements)), *(str(counts.get(verdict, 0)) for verdict in VERDICTS)]
    return [*_cells(head, [body], right=0), ""]


def _markdown_table(run: Run, found: Sequence[Row], *, reason: bool) -> list[str]:
    compared = run.mode != "none"
    head = ["problem", "backend", *(["verdict"] if compared else [])]
    right = len(head)
    head += ["time", "rate", "roof", f"vs {_escaped(_comparators(found))}"]
    head += [_AGAINST[run.mode]] if compared else []
    head += ["why"] if reason else []
    body = []
    for row in found:
        judgement = row.judgement
        cells = [_code(row.problem.line), _code(row.entrant)]
        cells += [f"**{judgement.verdict}**" if reason else str(judgement.verdict)] if compared else []
        cells += [time_cell(row), rate_cell(row), share_cell(row), ratio_text(row.speedup)]
        cells += [change_text(judgement)] if compared else []
        cells += [_escaped(f"{judgement.reason.code}: {judgement.reason}")] if reason else []
        body.append(cells)
    lines = _cells(head, body, right)
    if reason:
        lines[1] = lines[1][: -len("---:|")] + "---|"
    return lines


def _winner_table(run: Run) -> list[str]:
    contested = [winner for winner in winners(run) if winner.lead is not None]
    if not contested:
        return []
    body = [
        [
            _code(w.problem),
            _code(w.entrant) if w.clear else f"{_code(w.entrant)} (too close to call)",
            seconds_text(w.seconds),
            _code(w.runner_up),
            ratio_text(w.lead),
        ]
        for w in contested
    ]
    lines = _cells(["problem", "fastest", "time", "second", "lead"], body, right=2)
    return _folded(f"Who is fastest: {plural(len(contested), 'problem')}", lines)


def _folded(title: str, body: Iterable[str]) -> list[str]:
    return [f"<details><summary>{_escaped(title)}</summary>", "", *body, "", "</details>", ""]
