"""The report of a speed run as one HTML file that loads nothing: a template, and the data that it shows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_gemm.outcome import Verdict
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.report import figures, terminal, units
from pytest_gemm.speed.report.figures import VERDICT_COLOURS, Entrants, chunks, kind_of
from pytest_gemm.speed.report.rows import VERDICTS, Row, Run, Winner, geomean, rows, winners

_FOREST_ROWS: Final = 50
_BAR_SHAPES: Final = 20
_HISTORIES: Final = 48
_LEAST_CELLS: Final = 2
# Speed-ups at which the colour changes: symmetric about 1 on a logarithmic scale, finest where it matters.
_EDGES: Final = (0.5, 0.67, 0.8, 0.91, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)


def page(run: Run, title: str) -> str:
    """The report of a run as one HTML document.

    Styles, script and figures are inside, and a content security policy forbids to load anything else.

    Args:
        run: what is reported; :attr:`Run.history` and :attr:`Run.peaks` may be empty, their figures are left out
            then and the page says so.
        title: of the page, plain text.
    """
    import jinja2  # late: half a second with matplotlib that a run without a page does not pay
    import matplotlib as mpl

    loader = jinja2.PackageLoader("pytest_gemm.speed.report")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    with mpl.rc_context():
        mpl.rcdefaults()  # a user's matplotlibrc would change what is measured and drawn
        mpl.rcParams.update(figures.STYLE)
        return environment.get_template("page.html.jinja").render(_context(run, title)) + "\n"


def _context(run: Run, title: str) -> dict[str, Any]:
    """All values of the template."""
    found = rows(run)
    fastest = winners(run)
    problems = {row.problem.line: row.problem for row in found}
    subjects = list(dict.fromkeys(row.entrant for row in found))
    entrants = Entrants(subjects, itertools.chain.from_iterable(w.seconds_by for w in fastest))
    comparators = {row.comparator for row in found if row.comparator}
    comparator = comparators.pop() if len(comparators) == 1 else "the comparator"
    attainable = {row.problem.line: row.attainable for row in found if row.attainable}
    by_kind: dict[str, list[Winner]] = defaultdict(list)
    by_dtype: dict[str, list[Winner]] = defaultdict(list)
    for winner in fastest:
        problem = problems[winner.problem]
        by_kind[kind_of(problem)].append(winner)
        dtype = roofline.dtype_name(problem)
        if roofline.peak_rate(dtype, run.peaks) and run.peaks.bandwidth:
            by_dtype[dtype].append(winner)
    bars = [
        figures.bars(kind, piece, problems, attainable, entrants, f"bars-{number}-{i}")
        for number, (kind, group) in enumerate(by_kind.items())
        for i, piece in enumerate(chunks(group, _BAR_SHAPES))
    ]
    rooflines = [
        figures.rooflines(dict(piece), problems, run.peaks, entrants, f"roofline-{i}")
        for i, piece in enumerate(chunks(list(by_dtype.items()), 4))
    ]
    context = {
        "run": run,
        "title": title,
        "facts": _facts(run),
        "tiles": _tiles(run, len(found)),
        "notes": [*terminal.disturbed_lines(run), *run.notes],
        "gated": run.mode != "none",
        "colours": {str(verdict): colour for verdict, colour in VERDICT_COLOURS.items()},
        "entrants": entrants,
        "comparator": comparator,
        "has_roofline": bool(attainable),
        "bars": bars,
        "rooflines": rooflines,
        "untimed": terminal.untimed_lines(run),
        "verdict_words": {str(verdict): text for verdict, text in VERDICTS.items()},
        **_verdicts(run, found),
        **_standings(run, fastest, entrants),
        **_speedups(found),
        **_histories(run, found),
        **_table(run, found, comparator),
    }
    sections = (
        ("verdicts", "Verdicts", run.mode != "none"),
        ("winners", "Who wins where", fastest),
        ("speedup", "Speed-up over the comparator", any(row.speedup for row in found)),
        ("roofline", "Roofline", True),
        ("history", "History", context["history"]),
        ("cases", "All cases", True),
        ("method", "How to read this", True),
    )
    return {**context, "sections": [(name, heading) for name, heading, is_shown in sections if is_shown]}


def _facts(run: Run) -> dict[str, str]:
    """Where, with what and when."""
    sessions = run.sessions
    compared = {"baseline": "stored baselines", "against": "the base environment", "none": "nothing"}
    return {
        "hardware": run.hardware,
        "software": ", ".join(f"{name} {version}" for name, version in run.software.items()),
        "date": min((s.date for s in sessions if s.date), default="").replace("T", " "),
        "commit": ", ".join(dict.fromkeys(s.commit for s in sessions if s.commit)),
        "timing contract": ", ".join(dict.fromkeys(s.contract for s in sessions if s.contract)),
        "compared with": compared[run.mode],
        "processes": str(len(sessions)) if sessions else "",
        "took": f"{run.seconds:.0f} s, {run.harness_seconds:.0f} s of it the harness" if run.seconds else "",
    }


def _tiles(run: Run, cases: int) -> list[tuple[str, str, int, str]]:
    counts = run.counts()
    told = [(VERDICT_COLOURS[v], text, counts.get(v, 0), str(v)) for v, text in VERDICTS.items()]
    return [("var(--ink)", "", cases, "case" if cases == 1 else "cases"), *(told if run.mode != "none" else ())]


def _verdicts(run: Run, found: Sequence[Row]) -> dict[str, Any]:
    """The forest plots, the largest slow-down first."""
    compared = sorted((row.judgement for row in found if row.judgement.change is not None), key=_slow_down_first)
    why = Counter(f"{row.judgement.verdict}: {row.judgement.reason.text}" for row in found)

    def forests(judgements: Sequence[Judgement], name: str) -> list[str]:
        pieces = enumerate(chunks(judgements, _FOREST_ROWS)) if run.mode != "none" else ()
        return [figures.forest(piece, run.delta, f"forest-{name}-{i}") for i, piece in pieces]

    same = [j for j in compared if j.verdict is Verdict.SAME]
    return {
        "compared": bool(compared),
        "why_nothing": [f"{terminal.plural(count, 'case')} {text}" for text, count in why.items()],
        "moved": forests([j for j in compared if j.verdict is not Verdict.SAME], "moved"),
        "same": forests(same, "same"),
        "same_title": f"{terminal.plural(len(same), 'case')} that stayed",
    }


def _slow_down_first(judgement: Judgement) -> float:
    return -(judgement.change or 0.0)


def _standings(run: Run, fastest: Iterable[Winner], entrants: Entrants) -> dict[str, Any]:
    """Wins and mean speed-ups by backend."""
    leads, close = terminal.wins(fastest)
    means = {mean.entrant: mean for mean in geomean(run)}
    contested = close + sum(map(len, leads.values()))

    def cells(entrant: str) -> list[str]:
        won, mean = leads.get(entrant, []), means.get(entrant)
        wins = [
            f"{len(won)} of {contested}" if contested else "",
            f"{statistics.geometric_mean(won):.2f}x" if won else "",
        ]
        if mean is None:
            return [*wins, "", "", ""]
        return [*wins, f"{mean.speedup:.2f}x", f"{mean.worst:.2f}x to {mean.best:.2f}x", str(mean.cases)]

    told = f"{terminal.plural(close, 'problem')} too close to call: the interval of a lead includes a tie. "
    return {"standings": {entrant: cells(entrant) for entrant in entrants.names}, "too_close": told if close else ""}


# -- speed-ups -----------------------------------------------------------------------------------------------


def _speedups(found: Iterable[Row]) -> dict[str, Any]:
    """Speed-ups as tables of M by N x K: a grid of numbers is a table, which can be read aloud and copied."""
    grids: dict[str, dict[str, dict[tuple[str, str], Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in found:
        if row.speedup:
            shape = row.problem.shape
            m = f"{shape.batch}x{shape.m}" if shape.batch is not None else str(shape.m)
            kind = ":".join([kind_of(row.problem), *row.problem.line.split(":")[4:]])
            grids[kind][row.entrant][m, f"{shape.n}x{shape.k}"] = row
    shown = {kind: by for kind, by in grids.items() if any(len(cells) >= _LEAST_CELLS for cells in by.values())}
    left = sum(len(cells) for kind, by in grids.items() if kind not in shown for cells in by.values())
    told = f" {terminal.plural(left, 'case')} of too few shapes for a grid: see the table of all cases."
    edges = ["", *(f"{edge:g}" for edge in _EDGES)]
    return {
        "grids": {kind: [_heat_map(e, cells) for e, cells in by.items()] for kind, by in shown.items()},
        "scale": [(_heat_style(i), text) for i, text in enumerate(edges)] if shown else [],
        "left_out": told if left else "",
    }


def _heat_map(entrant: str, cells: Mapping[tuple[str, str], Row]) -> dict[str, Any]:
    """A table of M by N x K with the speed-up in each cell."""
    across = sorted({nk for _, nk in cells}, key=_sizes)

    def cell(row: Row | None) -> dict[str, str] | None:
        if row is None or row.speedup is None:
            return None
        ratio = row.speedup.middle
        tip = f"{row.judgement.case}: {units.ratio_text(row.speedup)} over {row.comparator}"
        return {"text": f"{ratio:.2f}", "style": _heat_style(sum(ratio >= edge for edge in _EDGES)), "tip": tip}

    downs = sorted({m for m, _ in cells}, key=_sizes)
    lines = [(down, [cell(cells.get((down, nk))) for nk in across]) for down in downs]
    return {"entrant": entrant, "across": across, "lines": lines}


def _heat_style(index: int) -> str:
    """Colours of a cell: the diverging map RdBu of ColorBrewer, white between the two middle edges."""
    import matplotlib as mpl

    red, green, blue = (round(255 * part) for part in mpl.colormaps["RdBu"].resampled(len(_EDGES) + 1)(index)[:3])
    # Relative luminance by Rec. 709 without its gamma: enough to choose between black and white.
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 128
    return f"background:rgb({red},{green},{blue});color:{'#111' if light else '#fff'}"


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


# -- history -------------------------------------------------------------------------------------------------


def _histories(run: Run, found: Iterable[Row]) -> dict[str, Any]:
    told = [(row.judgement, past) for row in found if (past := list(run.history.get(row.judgement.case, ())))]
    told.sort(key=lambda item: -abs(math.log((item[0].seconds or item[1][-1].seconds) / item[1][0].seconds)))
    shown = told[:_HISTORIES]
    problems = {row.problem.line: row.problem for row in found}
    dates = [session.date for session in run.sessions]
    pieces = enumerate(chunks(shown, 24))
    return {
        "history": [figures.sparks(piece, problems, dates, f"history-{i}") for i, piece in pieces],
        "histories_shown": f" {len(shown)} of {len(told)} cases are shown." if len(told) > len(shown) else "",
    }


# -- the table -----------------------------------------------------------------------------------------------


def _table(run: Run, found: Iterable[Row], comparator: str) -> dict[str, Any]:
    """The heads of the columns, and the rows; numbers come with the value that they are sorted by."""
    gated = run.mode != "none"
    heads = [("problem", False), ("backend", False), *([("verdict", False)] if gated else [])]
    heads += [("time", True), ("rate", True), ("peak", True), (f"vs {comparator}", True)]
    heads += [("change, 95% interval", True), ("detectable", True)] if gated else []
    ran: dict[object, dict[str, None]] = defaultdict(dict)
    for session in run.sessions:
        for sample in session.samples:
            ran[sample.case].update(dict.fromkeys(sample.selected or sample.kernels))

    def numbers(row: Row) -> list[tuple[str, str]]:
        judgement = row.judgement
        cells: list[tuple[str, float | None]] = [
            (terminal.time_cell(row), judgement.seconds),
            (terminal.rate_cell(row), row.flop_rate),
            (terminal.share_cell(row), row.share),
            (units.ratio_text(row.speedup), row.speedup.middle if row.speedup else None),
        ]
        if gated:
            least = judgement.minimum_effect
            cells.append((units.change_text(judgement), judgement.change))
            cells.append(("-" if least is None else f"{100 * least:.1f}%", least))
        return [(text, "" if value is None else f"{value:.9g}") for text, value in cells]

    table = []
    for row in found:
        judgement = row.judgement
        why = f"{judgement.reason.code}: {judgement.reason}"
        table.append(
            {
                "problem": row.problem.line,
                "entrant": row.entrant,
                "verdict": str(judgement.verdict),
                "numbers": numbers(row),
                "ran": ", ".join(ran[judgement.case]),
                "why": f"{why}; {judgement.selection}" if judgement.selection else why,
            }
        )
    return {"heads": [*heads, ("selected candidate or kernel", False), ("why", False)], "table": table}
