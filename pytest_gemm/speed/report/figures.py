"""The figures of the pages: matplotlib draws them, as SVG inside of a page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pytest_gemm.core.extras import lacking
from pytest_gemm.core.text import printable
from pytest_gemm.core.units import plural, three
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.report.rows import Winner, entrant, operations

# Okabe and Ito (2008), as in page.css: colours that colour-blind readers can tell apart.
GREY: Final = "#8c8c8c"
PALETTE: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_VERDICTS: Final = {  # colour and marker
    "slower": ("#d55e00", ">"),
    "faster": ("#0072b2", "<"),
    "undecided": ("#e69f00", "D"),
    "no-baseline": ("#cc79a7", "s"),
    "same": (GREY, "o"),
}
# Percent; changes and intervals beyond end at the edge, and the table has the numbers.
_REACH: Final = 30.0
_ROW: Final = 0.22  # inches
_WIDTH: Final = 10.0
# What matplotlib names its groups; the names of what is drawn several times have to stay.
_GROUP_ID: Final = re.compile(r' id="[^"]*_\d+"')


def svg(label: str, height: float, draw: Callable[[Any], None]) -> str:
    """A figure as an element of a page, in which every text is escaped.

    Args:
        label: what it shows, in words; of the figures of a page no two have the same.
        height: in inches.
        draw: gets matplotlib's figure.
    """
    if why := lacking("matplotlib"):
        return f"<p>{html.escape(printable(label))}: no figure, {why}</p>"
    import matplotlib as mpl  # late: a run without a page does without it
    from matplotlib.figure import Figure

    label = printable(label)
    # Texts stay texts, and may hold anything; the same run gives the same bytes.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": label, "text.parse_math": False, "font.size": 8}
    with mpl.rc_context(settings):
        figure, file = Figure(figsize=(_WIDTH, height), layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = _GROUP_ID.sub("", file.getvalue()).replace("xlink:href", "href")
    body = re.split(r"<svg[^>]*>", text, maxsplit=1)[1]
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)  # it would be one of the whole page
    head = f'<svg viewBox="0 0 {_WIDTH * 72:g} {height * 72:g}" role="img" aria-label="{html.escape(label)}">'
    return f'<figure class="scroll">{head}{body}</figure>'


def kind_of(problem: Problem) -> str:
    """What a figure has in common: op, dtypes, layout."""
    return f"{problem.op.name}:{problem.dtypes}:{problem.layout}"


def _rest(problem: Problem) -> str:
    """What a row of such a figure adds: shape, epilogue, flags."""
    return problem.line.split(":", 3)[3]


def _labelled(axes: Any, labels: Sequence[str]) -> None:
    """One row for each label, the first on top."""
    axes.set_yticks(range(len(labels)), [printable(label) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", color="#dde1e6")
    axes.set_axisbelow(True)


def forest(judgements: Sequence[Judgement], delta: float) -> str:
    """Changes with their intervals, in percent; ``delta`` is the tolerated slow-down, 0 for none."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        _labelled(axes, [f"{j.case.problem}  {entrant(j.case)}" for j in judgements])
        ends = [abs(100 * x) for j in judgements for x in (j.low, j.high, j.change) if x is not None]
        reach = min(1.05 * max([*ends, 250 * delta, 1.0]), _REACH)
        axes.axvspan(-100 * delta, 100 * delta, color="#dde1e6", alpha=0.5)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for row, j in enumerate(judgements):
            colour, marker = _VERDICTS[str(j.verdict)]
            if j.low is not None and j.high is not None:
                axes.plot([100 * j.low, 100 * j.high], [row, row], color=colour, linewidth=2)
            if j.minimum_effect is not None:
                axes.plot(100 * j.minimum_effect, row, "|", color=GREY, markersize=9)
            at = min(max(100 * (j.change or 0.0), -reach), reach)
            axes.plot(at, row, marker, color=colour, markersize=5, clip_on=False)
        axes.set_xlim(-reach, reach)
        axes.set_xlabel("change of the time, % (right: slower)")
        for verdict in dict.fromkeys(str(j.verdict) for j in judgements):
            colour, marker = _VERDICTS[verdict]
            axes.plot([], [], marker, color=colour, label=verdict)
        figure.legend(loc="outside upper left", ncols=5, frameon=False)

    label = f"Change of the time: {plural(len(judgements), 'case')} from {judgements[0].case}."
    return svg(label, _ROW * len(judgements) + 0.9, draw)


def bars(
    group: Sequence[Winner],
    problems: Mapping[str, Problem],
    attainable: Mapping[str, float],
    colours: Mapping[str, str],
) -> str:
    """Rates of all entrants by shape; ``attainable`` is the roofline by problem, in operations a second."""
    first = problems[group[0].problem]
    present = [name for name in colours if any(name in w.seconds_by for w in group)]
    flops = [roofline.work(problems[w.problem]).flops for w in group]
    highest = max(f / w.seconds_by[w.entrant] for f, w in zip(flops, group, strict=True))
    scale, prefix = (1e12, "T") if highest >= 1e12 else (1e9, "G")
    unit = f"{prefix}{operations(first)}"
    height = 0.8 / len(present)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        _labelled(axes, [_rest(problems[w.problem]) for w in group])
        for number, name in enumerate(present):
            rows = [row for row, w in enumerate(group) if name in w.seconds_by]
            rates = [flops[row] / group[row].seconds_by[name] / scale for row in rows]
            places = [row - 0.4 + height * (number + 0.5) for row in rows]
            drawn = axes.barh(places, rates, height, color=colours[name], label=printable(name))
            best = [three(x) if group[row].entrant == name else "" for row, x in zip(rows, rates, strict=True)]
            axes.bar_label(drawn, best, padding=2, fontsize=7)
        for row, w in enumerate(group):
            if w.problem in attainable:
                axes.vlines(attainable[w.problem] / scale, row - 0.4, row + 0.4, color="black", linewidth=1.2)
        axes.set_xlabel(f"{unit}, {kind_of(first)}")
        figure.legend(loc="outside upper left", ncols=6, frameon=False)

    where = f"{plural(len(group), 'shape')} of {kind_of(first)} from {_rest(first)}"
    label = f"{unit} of {', '.join(present)} at {where}."
    return svg(label, max(_ROW, 0.11 * len(present)) * len(group) + 0.9, draw)
