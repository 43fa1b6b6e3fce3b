"""The figures of the speed report: SVG drawn by matplotlib, whose global state is left as it was.

Text and grid have CSS variables for colours, so that one file suits light and dark.  Other colours are those of Okabe
and Ito (2008), which colour-blind readers can tell apart; wherever a colour has a meaning a word or a shape has it too.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from pytest_gemm.outcome import Verdict
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement, Peaks
from pytest_gemm.speed.report import rows as rows_module
from pytest_gemm.speed.report import units
from pytest_gemm.speed.report.rows import Past, Winner

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# Okabe and Ito's palette without black, and without yellow, which a white page swallows.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#8C8C8C"  # comparators, and cases that stayed
VERDICT_COLOURS: Mapping[Verdict, str] = {
    Verdict.SLOWER: "#D55E00",
    Verdict.FASTER: "#0072B2",
    Verdict.UNDECIDED: "#E69F00",
    Verdict.NO_BASELINE: "#CC79A7",
    Verdict.SAME: _GREY,
}
_VERDICT_MARKER: Mapping[Verdict, str] = {
    Verdict.SLOWER: ">",
    Verdict.FASTER: "<",
    Verdict.UNDECIDED: "D",
    Verdict.NO_BASELINE: "s",
    Verdict.SAME: "o",
}
_MARKERS = ("o", "^", "s", "D", "v", "P")

# Colours that no palette has: the finished SVG has CSS variables in their place.
_INK, _MUTED, _GRID = "#0a0b0c", "#6a6b6c", "#dadbdc"
_VARIABLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--grid)"}

STYLE: Any = {  # Any: matplotlib's stubs would have the type of a dictionary of all its parameters
    "svg.fonttype": "none",  # text stays text: small, selectable, in the reader's own font
    "svg.hashsalt": "pytest-gemm",  # the same run gives the same bytes
    "font.size": 9,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}

_FOREST_REACH = 0.3  # changes and intervals beyond it end at the edge; the pointer and the table have the numbers
_INTEGERS = frozenset({"i8", "u8", "i4", "i32"})
_WIDTH = 10.0  # of a figure, in inches; 720 CSS pixels


class Plot:
    """A matplotlib figure on its way to inline SVG, with the texts that appear under the pointer."""

    def __init__(self, name: str, height: float) -> None:
        from matplotlib.figure import Figure

        self.name = name
        self.figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        self._tips: dict[str, str] = {}

    def tip(self, artist: Artist, text: str) -> None:
        """Show ``text`` while the pointer is on ``artist``."""
        gid = f"tip{len(self._tips)}"
        artist.set_gid(gid)
        self._tips[gid] = text

    def svg(self, label: str) -> str:
        """The figure as an ``<svg>`` element that a screen reader calls ``label``.

        Ids are unique within a document: those that something refers to get the figure's name, the others are dropped.
        """
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        root = ElementTree.fromstring(buffer.getvalue())
        used = set(re.findall(rb'(?:href="#|url\(#)([^")]+)', buffer.getvalue()))
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
            given = {key.rpartition("}")[2]: _renamed(value, self.name) for key, value in element.attrib.items()}
            identity = given.pop("id", "")
            if identity.encode() in used:
                given["id"] = f"{self.name}-{identity}"
            elif identity in self._tips:
                title = ElementTree.Element("title")
                title.text = self._tips[identity]
                element.insert(0, title)
            element.attrib.clear()
            element.attrib.update(given)
        for metadata in root.findall("metadata"):
            root.remove(metadata)
        box = " ".join(f"{float(number):.0f}" for number in root.attrib["viewBox"].split())
        root.attrib.clear()
        root.attrib.update({"viewBox": box, "role": "img", "aria-label": label})
        return ElementTree.tostring(root, encoding="unicode")


def _renamed(value: str, name: str) -> str:
    """An attribute with the figure's name in its references, and with CSS variables."""
    value = re.sub(r"^#(?![0-9a-f]{6}$)|(?<=url\(#)", lambda found: f"{found[0]}{name}-", value)
    value = re.sub(r"'DejaVu Sans'[^;]*", "var(--font)", value)
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    return value


def _bare(axes: Axes, axis: Literal["both", "x"]) -> None:
    """Grid across one axis only, and no frame."""
    axes.grid(visible=True, axis=axis)
    axes.spines[:].set_visible(False)


def _logarithmic(axes: Axes) -> None:
    """Both axes logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=30))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def chunks(items: Sequence[Any], most: int) -> Iterable[Sequence[Any]]:
    """Pieces of nearly one size, none above ``most``: no figure is left with a single row."""
    pieces = math.ceil(len(items) / most)
    size = math.ceil(len(items) / pieces) if pieces else 1
    return (items[i : i + size] for i in range(0, len(items), size))


def _unit(rate: float) -> tuple[float, str]:
    """Scale and prefix of an axis that reaches up to ``rate``."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


def kind_of(problem: Problem) -> str:
    """What a figure has in common: op, dtypes, layout."""
    return f"{problem.op.name}:{problem.dtypes}:{problem.layout}"


def _rest(problem: Problem) -> str:
    """What a row of such a figure adds: shape, epilogue, flags."""
    return problem.line.split(":", 3)[3]


class Entrants:
    """The colours and markers of backends and comparators in all figures of a page.

    Args:
        subjects: the backends that were timed, which have colours.
        others: comparators, which are grey.
    """

    def __init__(self, subjects: Sequence[str], others: Iterable[str]) -> None:
        self.names = list(dict.fromkeys([*subjects, *others]))
        self.colours = {e: _PALETTE[i % len(_PALETTE)] if e in subjects else _GREY for i, e in enumerate(self.names)}
        self.markers = {e: _MARKERS[i % len(_MARKERS)] for i, e in enumerate(self.names)}

    def legend(self, plot: Plot, names: Iterable[str], *, markers: bool = False) -> None:
        """Add a legend of these above the figure."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Artist] = [
            Line2D([], [], color=self.colours[e], marker=self.markers[e], linestyle="", label=e)
            if markers
            else Patch(color=self.colours[e], label=e)
            for e in self.names
            if e in names
        ]
        plot.figure.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), 6))


# -- verdicts


def forest(judgements: Sequence[Judgement], delta: float, name: str) -> str:
    """Changes with their intervals; ``delta`` is the tolerated slow-down, 0 for none.  All figures are ``<svg>``."""
    plot = Plot(name, 0.75 + 0.2 * len(judgements))
    axes = plot.figure.subplots()
    ends = [abs(100 * x) for j in judgements for x in (j.low, j.high, j.change) if x is not None]
    reach = min(1.05 * max([*ends, 250 * delta, 1.0]), 100 * _FOREST_REACH)
    if delta:
        axes.axvspan(-100 * delta, 100 * delta, color=_GRID, alpha=0.5, linewidth=0)
    axes.axvline(0, color=_MUTED, linewidth=1)
    for y, judgement in enumerate(judgements):
        colour = VERDICT_COLOURS[judgement.verdict]
        change = 100 * (judgement.change or 0.0)
        if judgement.minimum_effect is not None and 100 * judgement.minimum_effect < reach:
            axes.plot([100 * judgement.minimum_effect], [y], marker="|", color=_GREY, markersize=8)
        if judgement.low is not None and judgement.high is not None:
            low, high = (max(-reach, min(reach, 100 * x)) for x in (judgement.low, judgement.high))
            axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
        at = max(-reach, min(reach, change))
        (point,) = axes.plot([at], [y], _VERDICT_MARKER[judgement.verdict], color=colour, markersize=6, clip_on=False)
        change_text = units.change_text(judgement)
        plot.tip(point, f"{judgement.case}: {judgement.verdict}, {change_text}. {judgement.reason.text}")
    axes.set_yticks(range(len(judgements)), [f"{j.case.problem}  {rows_module.entrant(j.case)}" for j in judgements])
    axes.set_ylim(len(judgements) - 0.4, -0.6)
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("change of the time, % (right: slower)")
    _bare(axes, "x")
    _verdict_legend(plot, judgements)
    return plot.svg(f"Forest plot: {_counted(judgements)}, with 95% intervals; the table has the numbers.")


def _verdict_legend(plot: Plot, judgements: Iterable[Judgement]) -> None:
    from matplotlib.lines import Line2D

    found = {j.verdict for j in judgements}
    handles = [
        Line2D([], [], color=VERDICT_COLOURS[v], marker=_VERDICT_MARKER[v], label=str(v), linewidth=2)
        for v in rows_module.VERDICTS
        if v in found
    ]
    plot.figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))


# -- who wins where


def bars(
    kind: str,
    group: Sequence[Winner],
    problems: Mapping[str, Problem],
    attainable: Mapping[str, float],
    entrants: Entrants,
    name: str,
) -> str:
    """Rates of all entrants by shape, and their roofline fractions where ``attainable`` has the peaks in FLOP/s."""
    shared = any(w.problem in attainable for w in group)
    present = [e for e in entrants.names if any(e in w.seconds_by for w in group)]
    thick = 0.8 / len(present)
    plot = Plot(name, 0.95 + len(group) * (0.12 * len(present) + 0.12))
    found = plot.figure.subplots(1, 2, sharey=True, squeeze=False, width_ratios=[2, 1])[0] if shared else None
    rates, shares = found if found is not None else (plot.figure.subplots(), None)
    unit = units.operations(problems[group[0].problem])
    highest = max(_flops(w, problems) / w.seconds for w in group)
    scale, prefix = _unit(highest)
    reach = max([highest, *(attainable.get(w.problem) or 0.0 for w in group)])
    for y, winner in enumerate(group):
        flops = _flops(winner, problems)
        limit = attainable.get(winner.problem)
        for i, entrant in enumerate(present):
            seconds = winner.seconds_by.get(entrant)
            if seconds is None:
                continue
            at = y + (i - (len(present) - 1) / 2) * thick
            rate = flops / seconds
            tip = f"{entrant}, {winner.problem}: {units.rate_text(rate, unit)}"
            tip += f", {units.seconds_text(seconds)}"
            tip += f", {100 * rate / limit:.0f}% of the roofline" if limit else ""
            (bar,) = rates.barh([at], [rate / scale], height=thick, color=entrants.colours[entrant])
            plot.tip(bar, tip)
            if entrant == winner.entrant:
                # The figure stands behind the roofline's mark where the two would meet.
                beyond = limit if limit and rate <= limit < rate + 0.1 * reach else rate
                rates.annotate(
                    units.three(rate / scale),
                    (beyond / scale, at),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    fontweight="bold",
                )
            if limit and shares is not None:
                (bar,) = shares.barh([at], [100 * rate / limit], height=thick, color=entrants.colours[entrant])
                plot.tip(bar, tip)
        if limit:
            rates.plot([limit / scale] * 2, [y - 0.45, y + 0.45], color=_INK, linewidth=1.6, solid_capstyle="butt")
    rates.set_yticks(range(len(group)), [_rest(problems[w.problem]) for w in group])
    rates.set_ylim(len(group) - 0.45, -0.55)
    rates.set_xlim(0, 1.1 * reach / scale)
    rates.set_xlabel(f"{prefix}{unit}")
    rates.set_title(kind)
    _bare(rates, "x")
    if shares is not None:
        shares.axvline(100, color=_INK, linewidth=1.6)
        shares.set_xlabel("% of the roofline")
        _bare(shares, "x")
    entrants.legend(plot, present)
    return plot.svg(f"Bars: {prefix}{unit} of {', '.join(present)} at {len(group)} shapes of {kind}.")


# -- roofline


def _flops(winner: Winner, problems: Mapping[str, Problem]) -> float:
    return roofline.work(problems[winner.problem]).flops


def rooflines(
    groups: Mapping[str, Sequence[Winner]],
    problems: Mapping[str, Problem],
    measured: Peaks,
    entrants: Entrants,
    name: str,
) -> str:
    """Rate against arithmetic intensity, one pair of axes for each dtype in ``groups``."""
    across = min(2, len(groups))
    down = math.ceil(len(groups) / across)
    plot = Plot(name, 0.5 + 3.6 * down)
    grid = plot.figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    bandwidth = measured.bandwidth
    works = {w.problem: roofline.work(problems[w.problem]) for ws in groups.values() for w in ws}
    peaks = [peak for dtype in groups if (peak := roofline.peak_rate(dtype, measured))]
    intensities = [work.intensity for work in works.values()]
    left = min(*intensities, min(peaks) / bandwidth) / 2
    right = max(*intensities, max(peaks) / bandwidth) * 2
    scale, prefix = _unit(max(peaks))
    present: list[str] = []
    for axes, (dtype, winners) in zip(grid.flat, groups.items(), strict=False):
        peak = roofline.peak_rate(dtype, measured) or 0.0
        knee = peak / bandwidth
        axes.plot(
            [left, knee, right], [left * bandwidth / scale, peak / scale, peak / scale], color=_INK, linewidth=1.4
        )
        axes.annotate(
            f"{units.rate_text(peak, 'OP/s' if dtype in _INTEGERS else 'FLOP/s')}",
            (right, peak / scale),
            (-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        axes.annotate(
            units.rate_text(bandwidth, "B/s"),
            (math.sqrt(left * knee), math.sqrt(left * knee) * bandwidth / scale),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        for winner in winners:
            work = works[winner.problem]
            for entrant, seconds in winner.seconds_by.items():
                rate = work.flops / seconds
                (point,) = axes.plot(
                    [work.intensity],
                    [rate / scale],
                    entrants.markers[entrant],
                    color=entrants.colours[entrant],
                    markersize=5,
                    alpha=0.85,
                    markeredgewidth=0,
                )
                plot.tip(point, f"{entrant}, {winner.problem}: {units.rate_text(rate, 'OP/s')}")
                if entrant not in present:
                    present.append(entrant)
        _logarithmic(axes)
        axes.set_xlim(left, right)
        axes.set_title(dtype)
        _bare(axes, "both")
    for axes in list(grid.flat)[len(groups) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("operations per byte")
    for axes in grid[:, 0]:
        axes.set_ylabel(f"{prefix}FLOP/s, {prefix}OP/s for integers")
    entrants.legend(plot, present, markers=True)
    return plot.svg(f"Roofline plots of {', '.join(groups)}: rate against arithmetic intensity.")


# -- history


def sparks(
    told: Sequence[tuple[Judgement, Sequence[Past]]], problems: Mapping[str, Problem], dates: Iterable[str], name: str
) -> tuple[str, str]:
    """Small multiples of the cases' baselines, and a caption.

    All lie within one pair of axes: 24 pairs would take matplotlib seconds.

    Args:
        told: judgement and baselines of each case, oldest first.
        problems: by line.
        dates: of the run's sessions.
        name: of the figure.
    """
    from matplotlib.ticker import MaxNLocator

    across = 4
    down = math.ceil(len(told) / across)
    plot = Plot(name, 1.15 * down)
    axes = plot.figure.subplots()
    axes.set_axis_off()
    today = max(map(_day, filter(None, dates)), default=None)
    days = [_day(p.date) for _, past in told for p in past] + ([today] if today else [])
    first, span = min(days), max(max(days) - min(days), 1.0)
    changes = [100 * (s / past[0].seconds - 1) for j, past in told for s in _course(j, past)]
    ticks = MaxNLocator(3).tick_values(min([*changes, -1.0]), max([*changes, 1.0]))
    low, height = ticks[0], ticks[-1] - ticks[0]
    for index, (judgement, past) in enumerate(told):
        x0, y0 = index % across * 1.25, -(index // across) * 1.75

        def at(day: float, change: float, x0: float = x0, y0: float = y0) -> tuple[float, float]:
            return x0 + (day - first) / span, y0 + (change - low) / height

        for tick in ticks:
            axes.plot([x0, x0 + 1], [at(first, tick)[1]] * 2, color=_GRID, linewidth=1 + (tick == 0))
            axes.text(
                x0 - 0.03, at(first, tick)[1], f"{tick:+g}%" if tick else "0", ha="right", va="center", fontsize=6.5
            )
        points = [at(_day(p.date), 100 * (p.seconds / past[0].seconds - 1)) for p in past]
        axes.plot(*zip(*points, strict=True), color=_MUTED, linewidth=1.2, marker="o", markersize=3)
        if judgement.seconds:
            change = judgement.seconds / past[0].seconds - 1
            now = at(today or _day(past[-1].date), 100 * change)
            axes.plot(*zip(points[-1], now, strict=True), color=_MUTED, linewidth=1.2, linestyle=":")
            marker, colour = _VERDICT_MARKER[judgement.verdict], VERDICT_COLOURS[judgement.verdict]
            (point,) = axes.plot(*([x] for x in now), marker=marker, color=colour, markersize=6)
            since = f"{past[0].date[:10]} ({past[0].commit or 'commit unknown'})"
            plot.tip(point, f"{judgement.case}: {100 * change:+.1f}% since {since}, {judgement.verdict}")
        problem = problems[judgement.case.problem]
        heading = f"{rows_module.entrant(judgement.case)}, {kind_of(problem)}\n{_rest(problem)}"
        axes.text(x0, y0 + 1.12, heading, va="bottom", fontsize=7.5)
    ends = f"from {date.fromordinal(int(first))} to {date.fromordinal(int(max(days)))}"
    axes.set_xlim(-0.2, across * 1.25 - 0.2)
    axes.set_ylim(-(down - 1) * 1.75 - 0.1, 1.65)
    label = f"Small multiples: time of {len(told)} cases across their baselines, relative to the first."
    return plot.svg(label), ends


def _day(text: str) -> float:
    """A date of ISO 8601 as a day number, which is what matplotlib plots."""
    return float(date.fromisoformat(text[:10]).toordinal())


def _course(judgement: Judgement, past: Sequence[Past]) -> list[float]:
    """The times of a case, this run's last."""
    return [p.seconds for p in past] + ([judgement.seconds] if judgement.seconds else [])


def _counted(judgements: Iterable[Judgement]) -> str:
    found = [j.verdict for j in judgements]
    return ", ".join(f"{found.count(v)} {v}" for v in rows_module.VERDICTS if v in found)
