"""What a human reads of a speed run: the terminal table, a failure, the Markdown of a CI job.

Pure functions from a :class:`Run` to text; the picture of the same run is ``speed_page``.

An interval over sessions is Student's t on the logarithms of one figure a session.  Readings of one process are not
independent, so they never narrow it, and a case with one session has none.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Verdict
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.report.rows import (
    Mode,
    Past,
    Row,
    Run,
    Winner,
    entrant,
    geomean,
    is_doubtful,
    rows,
    trusted,
    winners,
)
from pytest_gemm.speed.report.units import (
    change_text,
    operations,
    percent_text,
    rate_text,
    ratio_text,
    seconds_text,
    three,
)


def rate_cell(row: Row) -> str:
    """What limits the case decides what is shown: byte/s when it is memory, operations otherwise; ``-`` untimed."""
    if row.flop_rate is None or row.byte_rate is None:
        return "-"
    if row.memory_bound:
        return rate_text(row.byte_rate, "B/s")
    return rate_text(row.flop_rate, operations(row.problem))


def share_cell(row: Row) -> str:
    """The share of the roofline in per cent; ``-`` without peaks, ``cached`` where the memory is no limit."""
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

AGAINST: Mapping[Mode, str] = {"baseline": "vs baseline", "against": "vs base", "none": ""}


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
        legend += "; peak: fraction of the measured roofline, rate in B/s where memory limits it"
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


def comparators(found: Iterable[Row]) -> str:
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
        _Column("peak", [share_cell(row) for row in found], rank=2),
        _Column(f"vs {comparators(found)}", [ratio_text(row.speedup) for row in found], rank=3),
    ]
    if run.mode != "none":
        columns.append(_Column(AGAINST[run.mode], [change_text(row.judgement) for row in found]))
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
        *count_lines(run),
        *([f"anchor shift: {run.anchor}"] if run.anchor else []),
        *_undecided_lines(run),
        *disturbed_lines(run),
        *untimed_lines(run),
        *selection_lines(run),
        *minimum_effect_lines(run),
        *winner_lines(run),
        *mean_lines(run),
        *run.notes,
        *cost_lines(run),
        *_next_lines(run),
        *gate_lines(run),
    ]


def plural(count: int, word: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count} {word}" if count == 1 else f"{count} {many or word + 's'}"


def count_lines(run: Run) -> list[str]:
    """How many cases ended with which verdict."""
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
    lines = [f"no roofline: {run.peaks.disturbed}"] if run.peaks.disturbed else []
    if lost:
        text = f"disturbed and left out: {len(lost)} of {plural(len(timed), 'sample')}, for instance: {lost[0]}"
        if cases := [case for case, samples in trusted(run.sessions).items() if is_doubtful(samples)]:
            text += f"; {plural(len(cases), 'case')} without any other: {_named(cases)}"
        lines.append(text)
    return lines


# Undecided cases of one code whose sentences are shown.
_SENTENCES = 5


# Cases that a line names.
_NAMED = 3


def _named(cases: Sequence[CaseId]) -> str:
    text = ", ".join(map(str, cases[:_NAMED]))
    return text + (f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else "")


def _untimed(run: Run) -> dict[str, list[CaseId]]:
    """Cases of which no session has a figure, by how they ended and why."""
    timed = {s.case for session in run.sessions for s in session.samples if s.is_timed}
    groups: dict[str, list[CaseId]] = defaultdict(list)
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


def selection_lines(run: Run) -> list[str]:
    """Changed choices, and selected ones that are not the fastest."""
    lines = [f"selection changed, {j.case}: {j.selection}" for j in run.judgements if j.selection]
    known = [(j.regret, f"{j.case} against {j.faster}") for j in run.judgements if j.regret is not None]
    costly = sorted((one for one in known if one[0] >= _REGRET), reverse=True)
    if costly:
        worst = "; ".join(f"{percent_text(regret)} in {where}" for regret, where in costly[:_NAMED])
        more = f", and {len(costly) - _NAMED} more" if len(costly) > _NAMED else ""
        lines.append(
            f"the selected candidate takes over {100 * _REGRET:.0f}% longer than the fastest timed candidate "
            f"in {len(costly)} of {plural(len(known), 'case')}: {worst}{more}"
        )
    return lines


# Regret below this is what two runs of autotuning differ by.
_REGRET = 0.05


def minimum_effect_lines(run: Run) -> list[str]:
    """The smallest changes that the gate could detect."""
    found = [(j.minimum_effect, j.case) for j in run.judgements if j.minimum_effect is not None]
    if not found:
        return []
    middle = statistics.median(minimum_effect for minimum_effect, _ in found)
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


def winner_lines(run: Run) -> list[str]:
    """Which backend was the fastest, how often."""
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


def mean_lines(run: Run) -> list[str]:
    """Geometric means by backend."""
    lines = []
    for m in geomean(run):
        text = f"{m.entrant} over {m.comparator}: {three(m.speedup)}x"
        if m.cases > 1:
            text += f", the geometric mean of {m.cases} cases from {three(m.worst)}x to {three(m.best)}x"
        lines.append(text)
    return lines


def cost_lines(run: Run) -> list[str]:
    """Where the time of the run went."""
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


_ACCEPT = "pytest-gemm baseline accept CASE --reason TEXT"


def _next_lines(run: Run) -> list[str]:
    """What to do next."""
    return [line for sentence, command in accept_commands(run) for line in (f"{sentence}:", f"{_INDENT}{command}")]


def accept_commands(run: Run) -> list[tuple[str, str]]:
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
        commands.append(("if a slow-down is meant", f"{run.record} && {_ACCEPT}"))
    return commands


def gate_lines(run: Run) -> list[str]:
    """The last line: how many cases got which verdict, and what fails the run."""
    if run.mode == "none":
        return []

    def what(verdict: Verdict) -> str:
        return (" (fails)" if verdict in run.fatal else " (shown)") if verdict in _POLICY else ""

    told = [f"{count} {verdict}{what(verdict)}" for verdict, count in run.counts().items()]
    undecided, compared = run.undecided
    text = f"gate: {', '.join(told) or 'no case'}"
    if run.decided_too_little:
        share = f"--gemm-undecided={100 * run.undecided_share:g}"
        text += (
            f"; {undecided} of {compared} compared cases stayed undecided, more than {share} allows, so the run fails: "
            "run again on a quiet machine, or allow it with --gemm-undecided=100"
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
        head += f", {percent_text(judgement.change)}{_bounds(judgement)}"
    lines = [
        head,
        _figures_line(judgement, stored, mode),
        f"  {judgement.reason.code}: {judgement.reason.text}",
        _evidence_line(judgement),
    ]
    if judgement.selection:
        lines.append(f"  selection changed: {judgement.selection}")
    if judgement.regret is not None and judgement.regret > 0:
        lines.append(f"  the selected candidate takes {percent_text(judgement.regret)} against {judgement.faster}")
    if judgement.reason.remedy:
        lines.append(f"  remedy: {judgement.reason.remedy}")
    if record and mode == "baseline":
        if judgement.verdict is Verdict.NO_BASELINE:
            lines.append(f"  to record it: {record}")
        elif judgement.verdict is Verdict.SLOWER:
            accept = shlex.join(["pytest-gemm", "baseline", "accept", str(case)])
            lines.append(f"  if it is meant: {record}, then {accept} --reason TEXT")
    lines.append(f"  rerun: {rerun}")
    return "\n".join(line for line in lines if line)


def _bounds(judgement: Judgement) -> str:
    if judgement.low is None or judgement.high is None:
        return ""
    return f" (95% interval {percent_text(judgement.low)} to {percent_text(judgement.high)})"


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
    if judgement.minimum_effect is not None:
        text += f"; a slow-down of {100 * judgement.minimum_effect:.1f}% would have been seen"
    return text
