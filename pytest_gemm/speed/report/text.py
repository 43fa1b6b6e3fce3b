"""The reports of a speed run as text: the terminal's table, a failure, the Markdown of a CI job.

Pure functions from a :class:`Run` to text; the picture of the same run is ``page``.

An interval over sessions is Student's t on the logarithms of one estimate a session.  Readings of one process are not
independent, so they never narrow it, and a case with one session has none.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Verdict
from pytest_gemm.core.templates import Templates
from pytest_gemm.core.text import code_cell, escaped
from pytest_gemm.core.text import table as text_table
from pytest_gemm.speed.baseline.entry import MICRO, SESSIONS
from pytest_gemm.speed.baseline.store import accept_command
from pytest_gemm.speed.data import Judgement, Sample
from pytest_gemm.speed.report.rows import VERDICTS, Row, Run, columns, entrant, is_doubtful

TEMPLATES: Final = Templates("pytest_gemm.speed.report")

# -- the terminal --------------------------------------------------------------------------------------------


def table(run: Run) -> list[str]:
    """The terminal report: a line for each case, then the summary."""
    if not (found := run.rows):
        return ["no case was timed", *summary(run)]
    first = {(w.problem, w.entrant) for w in run.winners if w.clear}
    shown = columns(run, found)
    order = ("problem", "backend", "time", "energy", "clock", "rate", "peak", "speedup", "change", "verdict")
    cells = {name: [shown[name].text(row) for row in found] for name in order if name in shown}
    for i, row in enumerate(found):
        cells["backend"][i] += "*" * ((row.problem.line, row.entrant) in first)
    legend = "time: median over sessions"
    if any(row.share is not None for row in found):
        legend += "; peak: fraction of the measured roofline, rate in B/s where memory limits it"
    if "energy" in cells:
        legend += "; energy: of the whole GPU, a call"
    if "clock" in cells:
        legend += "; clock held by: share of the readings"
    if "cached" in cells["peak"]:
        legend += "; cached: faster than the memory, for the operands stayed in a cache"
    if any(row.doubtful for row in found):
        legend += "; ?: disturbed in every session"
    if first:
        legend += "; *: fastest, beyond its interval or, from one session, by 2%"
    cells = {name: some for name, some in cells.items() if any(cell != "-" for cell in some)}
    numbers = [i for i, name in enumerate(cells) if shown[name].value]
    body = text_table([shown[name].title for name in cells], [*zip(*cells.values(), strict=True)], numbers)
    return [run.sides, "", *body, legend, "", *summary(run)]


# -- the lines below the table -------------------------------------------------------------------------------

_FINDINGS: Final = ("disturbed", "untimed", "selection", "effects", "winners", "means", "notes", "cost")


def summary(run: Run) -> list[str]:
    """The lines below the table: verdicts, the machine, who wins, what it cost, what is left to do, what fails."""
    return lines(run, "counts", "anchor", "undecided", *_FINDINGS, "next", "gate")


def lines(run: Run, *parts: str) -> list[str]:
    """Some parts of the summary, which are macros of ``templates/lines.txt.jinja``."""
    samples = [sample for session in run.sessions for sample in session.samples]
    by_code: dict[str, list[Judgement]] = defaultdict(list)
    for judgement in run.judgements:
        if judgement.verdict is Verdict.UNDECIDED:
            by_code[judgement.reason.code].append(judgement)
    phases: Counter[str] = Counter()
    for sample in samples:
        phases.update(sample.phases)
    text = TEMPLATES.render(
        "lines.txt.jinja",
        run=run,
        parts=parts,
        by_code=by_code,
        timed=[sample for sample in samples if sample.is_timed],
        doubtful=[case for case, some in run.trusted.items() if is_doubtful(some)],
        untimed_cases=_untimed(run),
        statistics=statistics,
        phases=phases,
        commands=_commands(run),
    )
    return [line for line in text.split("\n") if line.strip()]


def _untimed(run: Run) -> dict[str, list[CaseId]]:
    """Cases of which no session has an estimate, by how they ended and why."""
    first: dict[CaseId, Sample] = {}
    for sample in (s for session in run.sessions for s in session.samples if s.case not in run.trusted):
        first.setdefault(sample.case, sample)
    groups: dict[str, list[CaseId]] = defaultdict(list)
    for case, sample in first.items():
        groups[f"{sample.status}" + (f": {sample.reason}" if sample.reason else "")].append(case)
    return groups


def _commands(run: Run) -> list[tuple[str, str]]:
    """What can be done about the verdicts, with the command that does it."""
    counts = run.counts()
    thin = sum(j.reason.code == "thin-baseline" for j in run.judgements)
    wanted = (
        (counts.get(Verdict.NO_BASELINE, 0), "without a baseline"),
        (thin, "with a thin one"),
        (counts.get(Verdict.FASTER, 0), "faster"),
    )
    what = " and the ".join(f"{count} {words}" for count, words in wanted if count)
    commands = [(f"to record the {what}", run.record)] if what else []
    if weak := sum(j.reason.code == "underpowered" for j in run.judgements):
        sentence = f"to record the {weak} whose baseline shows large slow-downs only"
        commands.append((sentence, f"{run.record} --gemm-sessions={2 * SESSIONS}"))
    if slower := [j.case for j in run.judgements if j.verdict is Verdict.SLOWER]:
        # Not "&&": the recording refuses what got slower, so it fails.
        is_dirty = any(session.commit.endswith("+dirty") for session in run.sessions)
        sentence = "if a slow-down is meant, " + ("commit the change, then run" if is_dirty else "run")
        commands.append((sentence, f"{run.record}; {accept_command(slower)}"))
    return commands if run.mode == "baseline" else []


# -- a failure -----------------------------------------------------------------------------------------------


def failure(run: Run, judgement: Judgement, rerun: str) -> str:
    """What pytest shows for a case that fails: what, how much, against what, how it was confirmed, how to rerun.

    Args:
        run: that has measured it.
        judgement: ``slower`` or ``no-baseline``, or whatever else the policy makes fail.
        rerun: the command that runs just this case again.
    """
    stored, then = run.stored.get(judgement.case), judgement.stored_seconds
    text = TEMPLATES.render(
        "failure.txt.jinja",
        j=judgement,
        entrant=entrant(judgement.case),
        rerun=rerun,
        stored=stored,
        then=stored.median_us * MICRO if then is None and stored else then,
        mode=run.mode,
        record=run.record,
        accept=accept_command([judgement.case]),
    )
    return "\n".join(line for line in text.split("\n") if line.strip())


# -- Markdown ------------------------------------------------------------------------------------------------


def markdown(run: Run, title: str) -> str:
    """The summary of a CI job: counts, what moved, and the rest folded.

    Args:
        run: what is reported.
        title: of the page, plain text.
    """
    moved = [row for verdict in list(VERDICTS)[:3] for row in run.rows if row.judgement.verdict is verdict]
    commits = dict.fromkeys(session.commit for session in run.sessions if session.commit)
    software = ", ".join(f"{name} {version}" for name, version in run.software.items())
    text = TEMPLATES.render(
        "summary.md.jinja",
        run=run,
        title=f"{title}: {run.sides}",
        facts=[run.hardware, software, f"commit {', '.join(commits)}" if commits else ""],
        moved=_markdown_table(run, moved, is_open=True) if moved else "",
        lines=lines(run, "counts", *_FINDINGS, "gate"),
        commands=_commands(run),
        cases=_markdown_table(run, run.rows, is_open=False) if run.rows else "",
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _markdown_table(run: Run, shown: Sequence[Row], *, is_open: bool) -> str:
    """A table of some rows; an open one has the reasons, and has its verdicts in bold."""
    wanted = {name: column for name, column in columns(run, shown).items() if is_open or name != "why"}
    marked: dict[str, Callable[[str], str]] = {"problem": code_cell, "backend": code_cell, "why": escaped}
    if is_open:
        marked["verdict"] = "**{}**".format
    body = [[marked.get(name, str)(column.text(row)) for name, column in wanted.items()] for row in shown]
    numbers = [i for i, column in enumerate(wanted.values()) if column.value]
    head = [escaped(column.title) for column in wanted.values()]
    return "\n".join(text_table(head, body, numbers, markdown=True))
