"""The Markdown page of a run's speed."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from pytest_gemm.outcome import Verdict
from pytest_gemm.speed.report.rows import VERDICTS, Row, Run, rows, winners
from pytest_gemm.speed.report.terminal import (
    AGAINST,
    accept_commands,
    comparators,
    cost_lines,
    count_lines,
    disturbed_lines,
    gate_lines,
    mean_lines,
    minimum_effect_lines,
    plural,
    rate_cell,
    selection_lines,
    share_cell,
    time_cell,
    untimed_lines,
    winner_lines,
)
from pytest_gemm.speed.report.units import change_text, ratio_text, seconds_text
from pytest_gemm.text import table

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
        *selection_lines(run),
        *minimum_effect_lines(run),
        *winner_lines(run),
    ]
    told += [*mean_lines(run), *run.notes, *cost_lines(run), *gate_lines(run)]
    lines += [*(f"- {_escaped(line)}" for line in told), ""] if told else []
    for sentence, command in accept_commands(run):
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


def _facts(run: Run) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in run.software.items())
    return [_escaped(" · ".join(part for part in (run.hardware, software, _commit_text(run)) if part))]


def _commit_text(run: Run) -> str:
    commits = dict.fromkeys(session.commit for session in run.sessions if session.commit)
    return f"commit {', '.join(commits)}" if commits else ""


def _count_table(run: Run) -> list[str]:
    if run.mode == "none":
        return [*count_lines(run), ""]
    counts = run.counts()
    head = ["cases", *(str(verdict) for verdict in VERDICTS)]
    body = [str(len(run.judgements)), *(str(counts.get(verdict, 0)) for verdict in VERDICTS)]
    return [*table(head, [body], range(len(head)), markdown=True), ""]


def _markdown_table(run: Run, found: Sequence[Row], *, reason: bool) -> list[str]:
    compared = run.mode != "none"
    head = ["problem", "backend", *(["verdict"] if compared else [])]
    right = len(head)
    head += ["time", "rate", "peak", f"vs {_escaped(comparators(found))}"]
    head += [AGAINST[run.mode]] if compared else []
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
    return table(head, body, range(right, len(head) - reason), markdown=True)


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
    lines = table(["problem", "fastest", "time", "second", "lead"], body, (2, 4), markdown=True)
    return _folded(f"Who is fastest: {plural(len(contested), 'problem')}", lines)


def _folded(title: str, body: Iterable[str]) -> list[str]:
    return [f"<details><summary>{_escaped(title)}</summary>", "", *body, "", "</details>", ""]
