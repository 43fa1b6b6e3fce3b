"""The report of a speed run as one HTML file that loads nothing: a template, and the data that it shows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_gemm.core.outcome import Verdict
from pytest_gemm.speed.report import figures
from pytest_gemm.speed.report.figures import kind_of
from pytest_gemm.speed.report.rows import VERDICTS, Run, Winner, columns, comparator_of
from pytest_gemm.speed.report.text import TEMPLATES, lines

_FOREST_ROWS: Final = 50
_BAR_SHAPES: Final = 20


def page(run: Run, title: str) -> str:
    """The report of a run as one HTML document.

    Styles, script and figures are inside, and a content security policy forbids to load anything else.

    Args:
        run: what is reported.
        title: of the page, plain text.
    """
    subjects = list(dict.fromkeys(row.entrant for row in run.rows))
    comparator = comparator_of(run.rows)
    names = dict.fromkeys(itertools.chain(subjects, *(w.seconds_by for w in run.winners)))
    palette = itertools.cycle(figures.PALETTE)
    colours = {name: next(palette) if name in subjects else figures.GREY for name in names}  # comparators are grey
    text = TEMPLATES.render(
        "page.html.jinja",
        run=run,
        title=f"{title}: {run.sides}",
        columns=columns(run, run.rows),
        verdict_words=VERDICTS,
        notes=lines(run, "disturbed", "notes"),
        untimed=lines(run, "untimed"),
        entrants=colours,
        comparator="the comparator" if comparator == "comparator" else comparator,
        means={mean.entrant: mean for mean in run.means},
        statistics=statistics,
        ran=_ran(run),
        **_verdicts(run),
        bars=_bars(run, colours),
    )
    return text + "\n"


def _verdicts(run: Run) -> dict[str, Any]:
    """The forest plots, the largest slow-down first."""
    compared = [row.judgement for row in run.rows if row.judgement.change is not None]
    compared.sort(key=lambda judgement: -(judgement.change or 0.0))
    moved = [j for j in compared if j.verdict is not Verdict.SAME]
    return {
        "why_nothing": Counter(f"{row.judgement.verdict}: {row.judgement.reason.text}" for row in run.rows),
        "moved": [figures.forest(piece, run.delta) for piece in _chunks(moved, _FOREST_ROWS)],
        "same": len(compared) - len(moved),
    }


def _chunks(items: Sequence[Any], most: int) -> Iterable[Sequence[Any]]:
    """Pieces of nearly one size, none above ``most``: no figure is left with a single row."""
    pieces = math.ceil(len(items) / most)
    size = math.ceil(len(items) / pieces) if pieces else 1
    return (items[i : i + size] for i in range(0, len(items), size))


def _bars(run: Run, colours: Mapping[str, str]) -> list[str]:
    """The figures of rates, by op, dtypes and layout."""
    problems = {row.problem.line: row.problem for row in run.rows}
    attainable = {row.problem.line: row.attainable for row in run.rows if row.attainable}
    by_kind: dict[str, list[Winner]] = defaultdict(list)
    for winner in run.winners:
        by_kind[kind_of(problems[winner.problem])].append(winner)
    return [
        figures.bars(piece, problems, attainable, colours)
        for group in by_kind.values()
        for piece in _chunks(group, _BAR_SHAPES)
    ]


def _ran(run: Run) -> dict[object, dict[str, None]]:
    """The selected candidates of each case, or the kernels that ran."""
    ran: dict[object, dict[str, None]] = defaultdict(dict)
    for session in run.sessions:
        for sample in session.samples:
            ran[sample.case].update(dict.fromkeys(sample.selected or sample.kernels))
    return ran
