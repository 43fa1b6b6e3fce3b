"""The picture of a speed run: one HTML file that needs nothing else.

Figures are SVG drawn by matplotlib, whose global state is left as it was; their inks are CSS variables, so that one
file suits light and dark.  Colours are those of Okabe and Ito (2008), which colour-blind readers can tell apart, and
wherever a colour means something a word or a shape says it as well.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Verdict
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement
from pytest_gemm.speed.report import rows as rows_module
from pytest_gemm.speed.report import terminal, units
from pytest_gemm.speed.report.rows import Past, Row, Run, Winner

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


# Okabe and Ito's palette without black, and without yellow, which a white page swallows.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY = "#8C8C8C"  # comparators, and cases that stayed
_VERDICT_COLOUR: Mapping[Verdict, str] = {
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

_STYLE: Any = {  # Any: matplotlib's stubs would have the type of a dictionary of all its parameters
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

_WIDTH = 10.0  # of a figure, in inches; 720 CSS pixels


def page(run: Run, title: str) -> str:
    """The report of a run as one HTML document.

    It asks nobody for anything: styles, script and figures are inside, and a content security policy forbids the rest.

    Args:
        run: what is reported; :attr:`Run.history` and :attr:`Run.peaks` may be empty, their figures are left out
            then and the page says so.
        title: of the page, plain text.
    """
    import matplotlib as mpl  # late: half a second that a run without a page does not pay

    with mpl.rc_context():
        mpl.rcdefaults()  # a user's matplotlibrc would change what is measured and drawn
        mpl.rcParams.update(_STYLE)
        return _Page(run).html(title)


# -- figures -------------------------------------------------------------------------------------------------


class _Plot:
    """A matplotlib figure on its way to inline SVG, with the texts that appear under the pointer."""

    def __init__(self, name: str, height: float, width: float = _WIDTH) -> None:
        from matplotlib.figure import Figure

        self.name = name
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self._tips: dict[str, str] = {}

    def tip(self, artist: Artist, text: str) -> None:
        """Show ``text`` while the pointer is on ``artist``."""
        gid = f"tip{len(self._tips)}"
        artist.set_gid(gid)
        self._tips[gid] = text

    def svg(self, label: str) -> str:
        """The figure as an ``<svg>`` element that a screen reader calls ``label``."""
        buffer = io.StringIO()
        self.figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
        text = buffer.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        text = self._ids(text)
        width, height = (f"{float(n):.0f}" for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0])
        head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'
        return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1)

    def _ids(self, text: str) -> str:
        """Ids are unique within a document: those that something refers to get the figure's name, the rest go."""
        text = re.sub(r'<g id="(tip\d+)">', lambda m: f"<g><title>{html.escape(self._tips[m[1]])}</title>", text)
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
        text = re.sub(r' id="([^"]+)"', lambda m: f' id="{self.name}-{m[1]}"' if m[1] in used else "", text)
        text = re.sub(r'(href="#|url\(#)', rf"\g<1>{self.name}-", text)
        return text.replace("xlink:href", "href")


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


def _chunks(items: Sequence[Any], most: int) -> Iterable[Sequence[Any]]:
    """Pieces of nearly one size, none above ``most``: no figure is left with a single row."""
    pieces = math.ceil(len(items) / most)
    size = math.ceil(len(items) / pieces) if pieces else 1
    return (items[i : i + size] for i in range(0, len(items), size))


def _unit(rate: float) -> tuple[float, str]:
    """Scale and prefix of an axis that reaches up to ``rate``."""
    return (1e12, "T") if rate >= 1e12 else (1e9, "G")


def _kind(problem: Problem) -> str:
    """What a figure has in common: op, dtypes, layout."""
    return f"{problem.op.name}:{problem.dtypes}:{problem.layout}"


def _rest(problem: Problem) -> str:
    """What a row of such a figure adds: shape, epilogue, flags."""
    return problem.line.split(":", 3)[3]


def _element(tag: str, text: str, **attributes: str) -> str:
    """An element with escaped text; a trailing underscore of an attribute's name is dropped (``class_``)."""
    given = "".join(f' {k.rstrip("_").replace("_", "-")}="{html.escape(v)}"' for k, v in attributes.items())
    return f"<{tag}{given}>{html.escape(text)}</{tag}>"


def _figure(svg: str, caption: str = "") -> str:
    told = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="scroll">{svg}</div>{told}</figure>'


def _table(kind: str, head: str, body: str) -> str:
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _chip(colour: str, text: str, kind: str = "chip") -> str:
    """A word with its colour beside it."""
    return f'<span class="{kind}" style="--colour:{colour}">{html.escape(text)}</span>'


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>" if body else ""


class _Page:
    """A run, its derived figures and the colours of its backends while the page is made."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows = rows_module.rows(run)
        self.winners = {w.problem: w for w in rows_module.winners(run)}
        self.problems = {row.problem.line: row.problem for row in self.rows}
        subjects = list(dict.fromkeys(row.entrant for row in self.rows))
        others = dict.fromkeys(itertools.chain.from_iterable(w.seconds_by for w in self.winners.values()))
        self.entrants = subjects + [e for e in others if e not in subjects]
        self.colours = {e: _PALETTE[i % len(_PALETTE)] if e in subjects else _GREY for i, e in enumerate(self.entrants)}
        self.markers = {e: _MARKERS[i % len(_MARKERS)] for i, e in enumerate(self.entrants)}

    # -- the document

    def html(self, title: str) -> str:
        sections = [
            ("verdicts", "Verdicts", self.verdicts()),
            ("winners", "Who wins where", self.who_wins()),
            ("speedup", "Speed-up over the comparator", self.heat_maps()),
            ("roofline", "Roofline", self.roofline()),
            ("history", "History", self.history()),
            ("cases", "All cases", self.cases()),
            ("method", "How to read this", self.method()),
        ]
        sections = [section for section in sections if section[2]]
        links = "".join(f'<a href="#{name}">{html.escape(heading)}</a>' for name, heading, _ in sections)
        body = "".join(f'<section id="{n}"><h2>{html.escape(h)}</h2>{text}</section>' for n, h, text in sections)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"{_element('title', title)}<style>{_CSS}</style></head>\n"
            f"<body><header>{_element('h1', title)}{self.head()}<nav>{links}</nav></header>\n"
            f"<main>{body}</main><script>{_SCRIPT}</script></body></html>\n"
        )

    def head(self) -> str:
        """Where, with what and when; the verdicts counted; what concerns the run as a whole."""
        run = self.run
        sessions = run.sessions
        facts = {
            "hardware": run.hardware,
            "software": ", ".join(f"{name} {version}" for name, version in run.software.items()),
            "date": min((s.date for s in sessions if s.date), default="").replace("T", " "),
            "commit": ", ".join(dict.fromkeys(s.commit for s in sessions if s.commit)),
            "timing contract": ", ".join(dict.fromkeys(s.contract for s in sessions if s.contract)),
            "compared with": {"baseline": "stored baselines", "against": "the base environment", "none": "nothing"}[
                run.mode
            ],
            "processes": str(len(sessions)) if sessions else "",
            "took": f"{run.seconds:.0f} s, {run.harness_seconds:.0f} s of it the harness" if run.seconds else "",
        }
        given = "".join(f"<div>{_element('dt', k)}{_element('dd', v)}</div>" for k, v in facts.items() if v)
        parts = [f"<dl>{given}</dl>", self.tiles()]
        if run.anchor:
            parts.append(f'<p class="banner"><b>Anchor shift.</b> {html.escape(str(run.anchor))}</p>')
        parts += [_element("p", note, class_="note") for note in (*terminal.disturbed_lines(run), *run.notes)]
        return "".join(parts)

    def tiles(self) -> str:
        tile = '<div class="tile" style="--colour:{}" title="{}"><b>{}</b>{}</div>'
        cases = tile.format("var(--ink)", "", len(self.rows), "case" if len(self.rows) == 1 else "cases")
        if self.run.mode == "none":
            return f'<div class="tiles">{cases}</div>'
        counts = self.run.counts()
        told = (
            tile.format(_VERDICT_COLOUR[v], html.escape(text), counts.get(v, 0), v)
            for v, text in rows_module.VERDICTS.items()
        )
        return f'<div class="tiles">{cases}{"".join(told)}</div>'

    # -- verdicts

    def verdicts(self) -> str:
        if self.run.mode == "none":
            return ""
        compared = [row.judgement for row in self.rows if row.judgement.change is not None]
        if not compared:
            why = Counter(f"{row.judgement.verdict}: {row.judgement.reason.text}" for row in self.rows)
            lines = (f"{terminal.plural(count, 'case')} {text}" for text, count in why.items())
            return f"<p>Nothing was compared.</p><ul>{''.join(_element('li', line) for line in lines)}</ul>"
        compared.sort(key=lambda j: -(j.change or 0.0))
        moved = [j for j in compared if j.verdict is not Verdict.SAME]
        same = [j for j in compared if j.verdict is Verdict.SAME]
        told = (
            "Change of the time with its 95% interval: to the right is slower. "
            "The grey mark is the smallest slow-down that the case would have shown."
        )
        if self.run.delta:
            told += f" The band is the tolerance of {100 * self.run.delta:.1f}%."
        parts = [_element("p", told)]
        parts.append(self.forests(moved, "moved") or "<p>No case moved, and none is undecided.</p>")
        parts.append(_folded(f"{terminal.plural(len(same), 'case')} that stayed", self.forests(same, "same")))
        return "".join(parts)

    def forests(self, judgements: Sequence[Judgement], name: str) -> str:
        return "".join(
            self.forest(piece, f"forest-{name}-{i}") for i, piece in enumerate(_chunks(judgements, _FOREST_ROWS))
        )

    def forest(self, judgements: Sequence[Judgement], name: str) -> str:
        plot = _Plot(name, 0.75 + 0.2 * len(judgements))
        axes = plot.figure.subplots()
        ends = [abs(100 * x) for j in judgements for x in (j.low, j.high, j.change) if x is not None]
        reach = min(1.05 * max([*ends, 250 * self.run.delta, 1.0]), 100 * _FOREST_REACH)
        if self.run.delta:
            axes.axvspan(-100 * self.run.delta, 100 * self.run.delta, color=_GRID, alpha=0.5, linewidth=0)
        axes.axvline(0, color=_MUTED, linewidth=1)
        for y, judgement in enumerate(judgements):
            colour = _VERDICT_COLOUR[judgement.verdict]
            change = 100 * (judgement.change or 0.0)
            if judgement.minimum_effect is not None and 100 * judgement.minimum_effect < reach:
                axes.plot([100 * judgement.minimum_effect], [y], marker="|", color=_GREY, markersize=8)
            if judgement.low is not None and judgement.high is not None:
                low, high = (max(-reach, min(reach, 100 * x)) for x in (judgement.low, judgement.high))
                axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
            at = max(-reach, min(reach, change))
            (point,) = axes.plot(
                [at], [y], _VERDICT_MARKER[judgement.verdict], color=colour, markersize=6, clip_on=False
            )
            change_text = units.change_text(judgement)
            plot.tip(point, f"{judgement.case}: {judgement.verdict}, {change_text}. {judgement.reason.text}")
        axes.set_yticks(
            range(len(judgements)), [f"{j.case.problem}  {rows_module.entrant(j.case)}" for j in judgements]
        )
        axes.set_ylim(len(judgements) - 0.4, -0.6)
        axes.set_xlim(-reach, reach)
        axes.set_xlabel("change of the time, % (right: slower)")
        _bare(axes, "x")
        self.verdict_legend(plot, judgements)
        return _figure(plot.svg(f"Forest plot: {_counted(judgements)}, with 95% intervals; the table has the figures."))

    def verdict_legend(self, plot: _Plot, judgements: Iterable[Judgement]) -> None:
        from matplotlib.lines import Line2D

        found = {j.verdict for j in judgements}
        handles = [
            Line2D([], [], color=_VERDICT_COLOUR[v], marker=_VERDICT_MARKER[v], label=str(v), linewidth=2)
            for v in rows_module.VERDICTS
            if v in found
        ]
        plot.figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))

    # -- who wins where

    def who_wins(self) -> str:
        if not self.winners:
            return ""
        told = "Rate of each backend by shape, and its share of the roofline; the figure in bold is the fastest's."
        if any(row.attainable for row in self.rows):
            told += " The upright line is what the roofline allows at that shape."
        parts = [self.standings(), _element("p", told)]
        groups: dict[str, list[Winner]] = defaultdict(list)
        for line, winner in self.winners.items():
            groups[_kind(self.problems[line])].append(winner)
        for number, (kind, group) in enumerate(groups.items()):
            for i, piece in enumerate(_chunks(group, _BAR_SHAPES)):
                parts.append(self.bars(kind, piece, f"bars-{number}-{i}"))
        return "".join(parts)

    def standings(self) -> str:
        """Wins and mean speed-ups by backend."""
        leads, close = terminal.wins(self.winners.values())
        means = {mean.entrant: mean for mean in rows_module.geomean(self.run)}
        contested = close + sum(map(len, leads.values()))
        body = []
        for entrant in self.entrants:
            won = leads.get(entrant, [])
            mean = means.get(entrant)
            lead = f"{statistics.geometric_mean(won):.2f}x" if won else ""
            cells = [f"{len(won)} of {contested}" if contested else "", lead]
            cells += (
                [f"{mean.speedup:.2f}x", f"{mean.worst:.2f}x to {mean.best:.2f}x", str(mean.cases)]
                if mean
                else [""] * 3
            )
            name = f'<th scope="row">{_chip(self.colours[entrant], entrant)}</th>'
            body.append(f"<tr>{name}{''.join(_element('td', c) for c in cells)}</tr>")
        over = self.comparator()
        heads = ["backend", "fastest at", "by, on average", f"mean over {over}", "from, to", "cases"]
        head = "".join(_element("th", text, scope="col") for text in heads)
        told = (
            f"{terminal.plural(close, 'problem')} too close to call: the interval of a lead includes a tie. "
            if close
            else ""
        )
        told += "Means are geometric."
        return _table("plain", head, "".join(body)) + _element("p", told, class_="note")

    def comparator(self) -> str:
        names = {row.comparator for row in self.rows if row.comparator}
        return names.pop() if len(names) == 1 else "the comparator"

    def bars(self, kind: str, group: Sequence[Winner], name: str) -> str:
        attainable = {row.problem.line: row.attainable for row in self.rows if row.attainable}
        shared = any(w.problem in attainable for w in group)
        present = [e for e in self.entrants if any(e in w.seconds_by for w in group)]
        thick = 0.8 / len(present)
        plot = _Plot(name, 0.95 + len(group) * (0.12 * len(present) + 0.12))
        found = plot.figure.subplots(1, 2, sharey=True, squeeze=False, width_ratios=[2, 1])[0] if shared else None
        rates, shares = found if found is not None else (plot.figure.subplots(), None)
        unit = units.operations(self.problems[group[0].problem])
        highest = max(self.flops(w) / w.seconds for w in group)
        scale, prefix = _unit(highest)
        reach = max([highest, *(attainable.get(w.problem) or 0.0 for w in group)])
        for y, winner in enumerate(group):
            flops = self.flops(winner)
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
                (bar,) = rates.barh([at], [rate / scale], height=thick, color=self.colours[entrant])
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
                    (bar,) = shares.barh([at], [100 * rate / limit], height=thick, color=self.colours[entrant])
                    plot.tip(bar, tip)
            if limit:
                rates.plot([limit / scale] * 2, [y - 0.45, y + 0.45], color=_INK, linewidth=1.6, solid_capstyle="butt")
        rates.set_yticks(range(len(group)), [_rest(self.problems[w.problem]) for w in group])
        rates.set_ylim(len(group) - 0.45, -0.55)
        rates.set_xlim(0, 1.1 * reach / scale)
        rates.set_xlabel(f"{prefix}{unit}")
        rates.set_title(kind)
        _bare(rates, "x")
        if shares is not None:
            shares.axvline(100, color=_INK, linewidth=1.6)
            shares.set_xlabel("% of the roofline")
            _bare(shares, "x")
        self.legend(plot, present)
        return _figure(plot.svg(f"Bars: {prefix}{unit} of {', '.join(present)} at {len(group)} shapes of {kind}."))

    def legend(self, plot: _Plot, entrants: Sequence[str], *, markers: bool = False) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Artist] = [
            Line2D([], [], color=self.colours[e], marker=self.markers[e], linestyle="", label=e)
            if markers
            else Patch(color=self.colours[e], label=e)
            for e in entrants
        ]
        plot.figure.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), 6))

    def flops(self, winner: Winner) -> float:
        return roofline.work(self.problems[winner.problem]).flops

    # -- speed-up

    def heat_maps(self) -> str:
        """Speed-ups as tables of M by N x K: a grid of figures is a table, which can be read aloud and copied."""
        grids: dict[str, dict[str, dict[tuple[str, str], Row]]] = defaultdict(lambda: defaultdict(dict))
        for row in self.rows:
            if row.speedup:
                shape = row.problem.shape
                rows = f"{shape.batch}x{shape.m}" if shape.batch is not None else str(shape.m)
                tail = row.problem.line.split(":")[4:]
                kind = ":".join([_kind(row.problem), *tail])
                grids[kind][row.entrant][rows, f"{shape.n}x{shape.k}"] = row
        if not grids:
            return ""
        shown = {kind: by for kind, by in grids.items() if any(len(cells) >= _LEAST_CELLS for cells in by.values())}
        told = f"Time of {self.comparator()} over that of the backend: above 1, in blue, the backend is faster."
        left = sum(len(cells) for kind, by in grids.items() if kind not in shown for cells in by.values())
        if left:
            told += f" {terminal.plural(left, 'case')} of too few shapes for a grid: see the table of all cases."
        parts = [_element("p", told), self.scale() if shown else ""]
        for kind, by in shown.items():
            maps = "".join(_heat_map(entrant, cells) for entrant, cells in by.items())
            parts.append(f'{_element("h3", kind)}<div class="maps">{maps}</div>')
        return "".join(parts)

    def scale(self) -> str:
        """The key to the colours of the heat maps."""
        edges = ["", *(f"{edge:g}" for edge in _EDGES)]
        cells = "".join(f'<span style="{_heat_style(i)}">{html.escape(text)}</span>' for i, text in enumerate(edges))
        return f'<div class="key" aria-hidden="true">{cells}</div>'

    # -- roofline

    def roofline(self) -> str:
        groups: dict[str, list[Winner]] = defaultdict(list)
        for line, winner in self.winners.items():
            name = roofline.dtype_name(self.problems[line])
            if roofline.peak_rate(name, self.run.peaks) and self.run.peaks.bandwidth:
                groups[name].append(winner)
        if not groups:
            return "<p>The peaks of this machine were not measured.</p>"
        told = (
            "Rate against arithmetic intensity: operations for each byte that has to move at least. Lines are the "
            "measured peaks; a point above the slope has its operands in a cache."
        )
        parts = [_element("p", told)]
        for i, piece in enumerate(_chunks(list(groups.items()), 4)):
            parts.append(self.roofs(dict(piece), f"roof-{i}"))
        return "".join(parts)

    def roofs(self, groups: Mapping[str, Sequence[Winner]], name: str) -> str:
        across = min(2, len(groups))
        down = math.ceil(len(groups) / across)
        plot = _Plot(name, 0.5 + 3.6 * down)
        grid = plot.figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        bandwidth = self.run.peaks.bandwidth
        works = {w.problem: roofline.work(self.problems[w.problem]) for ws in groups.values() for w in ws}
        peaks = [peak for dtype in groups if (peak := roofline.peak_rate(dtype, self.run.peaks))]
        intensities = [work.intensity for work in works.values()]
        left = min(*intensities, min(peaks) / bandwidth) / 2
        right = max(*intensities, max(peaks) / bandwidth) * 2
        scale, prefix = _unit(max(peaks))
        present: list[str] = []
        for axes, (dtype, winners) in zip(grid.flat, groups.items(), strict=False):
            peak = roofline.peak_rate(dtype, self.run.peaks) or 0.0
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
                        self.markers[entrant],
                        color=self.colours[entrant],
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
        self.legend(plot, [e for e in self.entrants if e in present], markers=True)
        return _figure(plot.svg(f"Roofline plots of {', '.join(groups)}: rate against arithmetic intensity."))

    # -- history

    def history(self) -> str:
        told = [
            (row.judgement, past) for row in self.rows if (past := list(self.run.history.get(row.judgement.case, ())))
        ]
        if not told:
            return ""
        told.sort(key=lambda item: -abs(math.log((item[0].seconds or item[1][-1].seconds) / item[1][0].seconds)))
        shown = told[:_HISTORIES]
        text = (
            "Time relative to a case's first baseline: each dot is a recorded one, the large mark is this run, in the "
            "colour of its verdict. Cases that moved most since their first baseline come first."
        )
        if len(told) > len(shown):
            text += f" {len(shown)} of {len(told)} cases are shown."
        parts = [_element("p", text)]
        parts += [self.sparks(piece, f"history-{i}") for i, piece in enumerate(_chunks(shown, 24))]
        return "".join(parts[:2]) + _folded("The others", "".join(parts[2:]))

    def sparks(self, told: Sequence[tuple[Judgement, Sequence[Past]]], name: str) -> str:
        """Small multiples within one pair of axes: 24 pairs would take matplotlib seconds."""
        from matplotlib.ticker import MaxNLocator

        across = 4
        down = math.ceil(len(told) / across)
        plot = _Plot(name, 1.15 * down)
        axes = plot.figure.subplots()
        axes.set_axis_off()
        today = max((_day(s.date) for s in self.run.sessions if s.date), default=None)
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
                marker, colour = _VERDICT_MARKER[judgement.verdict], _VERDICT_COLOUR[judgement.verdict]
                (point,) = axes.plot(*([x] for x in now), marker=marker, color=colour, markersize=6)
                since = f"{past[0].date[:10]} ({past[0].commit or 'commit unknown'})"
                plot.tip(point, f"{judgement.case}: {100 * change:+.1f}% since {since}, {judgement.verdict}")
            problem = self.problems[judgement.case.problem]
            heading = f"{rows_module.entrant(judgement.case)}, {_kind(problem)}\n{_rest(problem)}"
            axes.text(x0, y0 + 1.12, heading, va="bottom", fontsize=7.5)
        ends = f"from {date.fromordinal(int(first))} to {date.fromordinal(int(max(days)))}"
        axes.set_xlim(-0.2, across * 1.25 - 0.2)
        axes.set_ylim(-(down - 1) * 1.75 - 0.1, 1.65)
        label = f"Small multiples: time of {len(told)} cases across their baselines, relative to the first."
        return _figure(plot.svg(label), ends)

    # -- the table

    def cases(self) -> str:
        compared = self.run.mode != "none"
        heads = ["problem", "backend", *(["verdict"] if compared else [])]
        heads += ["time", "rate", "roof", f"vs {self.comparator()}"]
        heads += ["change, 95% interval", "seen from"] if compared else []
        heads += ["selected or kernel", "why"]
        ran = self.ran()
        numbers = range(3, len(heads) - 2) if compared else range(2, len(heads) - 2)
        head = "".join(
            f'<th scope="col" aria-sort="none"{" class=number" if i in numbers else ""}>'
            f"<button>{html.escape(heading)}</button></th>"
            for i, heading in enumerate(heads)
        )
        body = "".join(f"<tr>{''.join(self.cells(row, ran, compared=compared))}</tr>" for row in self.rows)
        field = '<input type="search" id="filter" placeholder="bf16 triton slower">'
        tools = f'<p class="tools"><label>Show cases with {field}</label> <output id="shown"></output></p>'
        return tools + _table("cases", head, body)

    def ran(self) -> dict[CaseId, str]:
        """The choices of each case, or its kernels where the backend names no choices."""
        found: dict[CaseId, dict[str, None]] = defaultdict(dict)
        for session in self.run.sessions:
            for sample in session.samples:
                found[sample.case].update(dict.fromkeys(sample.selected or sample.kernels))
        return {case: ", ".join(names) for case, names in found.items()}

    def cells(self, row: Row, ran: Mapping[CaseId, str], *, compared: bool) -> Iterable[str]:
        judgement = row.judgement
        yield f"<td><code>{html.escape(row.problem.line)}</code></td>"
        yield f"<td>{_chip(self.colours[row.entrant], row.entrant)}</td>"
        if compared:
            yield f"<td>{_chip(_VERDICT_COLOUR[judgement.verdict], str(judgement.verdict), 'verdict')}</td>"
        yield _number(terminal.time_cell(row), judgement.seconds)
        yield _number(terminal.rate_cell(row), row.flop_rate)
        yield _number(terminal.share_cell(row), row.share)
        yield _number(units.ratio_text(row.speedup), row.speedup.middle if row.speedup else None)
        if compared:
            seen = "-" if judgement.minimum_effect is None else f"{100 * judgement.minimum_effect:.1f}%"
            yield _number(units.change_text(judgement), judgement.change)
            yield _number(seen, judgement.minimum_effect)
        yield f'<td class="small">{html.escape(ran.get(judgement.case, ""))}</td>'
        why = f"{judgement.reason.code}: {judgement.reason}" + (
            f"; {judgement.selection}" if judgement.selection else ""
        )
        yield _element("td", why, class_="small")

    def method(self) -> str:
        told = "".join(
            f"<dt>{_chip(_VERDICT_COLOUR[v], str(v), 'verdict')}</dt>{_element('dd', text)}"
            for v, text in rows_module.VERDICTS.items()
        )
        words = "".join(f"{_element('dt', k)}{_element('dd', v)}" for k, v in _WORDS.items())
        untimed = "".join(_element("li", line) for line in terminal.untimed_lines(self.run))
        left = f"<h3>Cases without a figure</h3><ul>{untimed}</ul>" if untimed else ""
        return f'{left}<h3>Verdicts</h3><dl class="words">{told}</dl><h3>Columns</h3><dl class="words">{words}</dl>'


_FOREST_ROWS = 50
_FOREST_REACH = 0.3  # changes and intervals beyond it end at the edge; the pointer and the table have their figures
_BAR_SHAPES = 20
_HISTORIES = 48
_LEAST_CELLS = 2
_INTEGERS = frozenset({"i8", "u8", "i4", "i32"})


def _counted(judgements: Iterable[Judgement]) -> str:
    found = [j.verdict for j in judgements]
    return ", ".join(f"{found.count(v)} {v}" for v in rows_module.VERDICTS if v in found)


def _number(text: str, value: float | None) -> str:
    """A cell that is sorted by its value; one without a value comes last."""
    return f'<td class="number" data-value="{"" if value is None else f"{value:.9g}"}">{html.escape(text)}</td>'


# -- heat maps -----------------------------------------------------------------------------------------------

# Speed-ups at which the colour changes: symmetric about 1 on a logarithmic scale, finest where it matters.
_EDGES = (0.5, 0.67, 0.8, 0.91, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)


def _heat_style(index: int) -> str:
    """Colours of a cell: the diverging map RdBu of ColorBrewer, white between the two middle edges."""
    import matplotlib as mpl

    red, green, blue = (round(255 * part) for part in mpl.colormaps["RdBu"].resampled(len(_EDGES) + 1)(index)[:3])
    # Relative luminance by Rec. 709 without its gamma: enough to choose between black and white.
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 128
    return f"background:rgb({red},{green},{blue});color:{'#111' if light else '#fff'}"


def _heat_map(entrant: str, cells: Mapping[tuple[str, str], Row]) -> str:
    """A table of M by N x K with the speed-up in each cell."""
    downs = sorted({m for m, _ in cells}, key=_sizes)
    acrosses = sorted({nk for _, nk in cells}, key=_sizes)
    head = "".join(_element("th", nk, scope="col") for nk in acrosses)
    body = []
    for down in downs:
        line = [_element("th", down, scope="row")]
        for across in acrosses:
            row = cells.get((down, across))
            if row is None or row.speedup is None:
                line.append('<td class="empty"></td>')
                continue
            ratio = row.speedup.middle
            style = _heat_style(sum(ratio >= edge for edge in _EDGES))
            tip = f"{row.judgement.case}: {units.ratio_text(row.speedup)} over {row.comparator}"
            line.append(_element("td", f"{ratio:.2f}", style=style, title=tip))
        body.append(f"<tr>{''.join(line)}</tr>")
    corner = _element("th", "M, N x K", scope="col")
    return (
        f'<div class="scroll"><table class="heat"><caption>{html.escape(entrant)}</caption>'
        f"<thead><tr>{corner}{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


# -- history -------------------------------------------------------------------------------------------------


def _day(text: str) -> float:
    """A date of ISO 8601 as a day number, which is what matplotlib plots."""
    return float(date.fromisoformat(text[:10]).toordinal())


def _course(judgement: Judgement, past: Sequence[Past]) -> list[float]:
    """The times of a case, this run's last."""
    return [p.seconds for p in past] + ([judgement.seconds] if judgement.seconds else [])


# -- the document --------------------------------------------------------------------------------------------

_WORDS = {
    "time": "seconds a call: the least of one process's readings, and the median of that over the processes.",
    "rate": "operations of the product (2 M N K) per second; where memory limits the case, bytes per second instead, "
    "counting each operand read once and the result written once.",
    "roof": "time that the roofline allows, as a share of the time taken. The peaks are measured, by the same "
    "PyTorch. Above 100% the operands stayed in a cache.",
    "vs, over": "time of the comparator over that of the backend, both measured in turn in one process. ± is half of "
    "the 95% interval over processes; with one process there is none.",
    "change, 95% interval": "of the time against what is stored, or against the base environment.",
    "seen from": "the smallest slow-down that this case would have shown, with a power of 95%.",
    "fastest": "a problem has a winner where the interval of the lead over each of the others excludes a tie, or where "
    "a single session shows a lead of 2%.",
}

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_CSS = """
:root {
  --paper: #fff; --ink: #1b1f24; --muted: #59636e; --grid: #dde1e6; --soft: #f5f6f8; --link: #0060a8;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "DejaVu Sans Mono", monospace;
}
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e6e9ed; --muted: #9aa4af; --grid: #333a42; --soft: #1d2127; --link: #7cc0f5; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1160px; padding: 1.5rem 1rem 4rem;
  background: var(--paper); color: var(--ink); font: 15px/1.5 var(--font);
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 75ch; }
a { color: var(--link); }
code { font-family: var(--mono); font-size: .9em; }
nav { margin-top: 1rem; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
header dl {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .5rem 1.5rem; margin: 0 0 1rem;
}
header dt { color: var(--muted); font-size: .8rem; }
header dd { margin: 0; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .6rem; }
.tile { border-left: 5px solid var(--colour); background: var(--soft); padding: .4rem .7rem; color: var(--muted); }
.tile b { display: block; font-size: 1.5rem; line-height: 1.25; color: var(--ink); }
.banner { border: 2px solid #e69f00; padding: .5rem .8rem; max-width: none; }
.note { color: var(--muted); font-size: .9rem; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; min-width: 640px; height: auto; }
figcaption { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; }
details { margin: .8rem 0; }
summary { cursor: pointer; color: var(--link); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem .7rem; border-bottom: 1px solid var(--grid); vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; font-size: .85rem; white-space: nowrap; }
.plain td, .plain thead th + th { text-align: right; }
.cases { font-size: .86rem; width: 100%; }
.cases td { white-space: nowrap; padding: .2rem .6rem; }
.cases .small { color: var(--muted); }
.cases .number { text-align: right; }
thead button { all: unset; cursor: pointer; }
thead button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.chip { white-space: nowrap; }
.chip::before {
  content: ""; display: inline-block; width: .7em; height: .7em; margin-right: .45em; background: var(--colour);
}
.verdict { border-left: .35em solid var(--colour); padding-left: .4em; white-space: nowrap; }
.tools input {
  font: inherit; padding: .2rem .5rem; width: 18rem; max-width: 100%;
  background: var(--soft); color: inherit; border: 1px solid var(--grid);
}
.maps { display: flex; flex-wrap: wrap; gap: .5rem 2rem; }
.maps .scroll { max-width: 100%; }
.heat caption { text-align: left; font-weight: 600; font-size: .9rem; padding: .2rem 0; }
.heat td { text-align: center; min-width: 4.2rem; border: 2px solid var(--paper); padding: .35rem; }
.heat th {
  border: 0; font-weight: 400; font-size: .8rem; color: var(--muted);
  text-align: center; vertical-align: middle; padding: .2rem .4rem;
}
.heat th[scope=row] { text-align: right; }
.heat .empty { background: var(--soft); }
.key { display: flex; font-size: .72rem; margin: .5rem 0; max-width: 36rem; }
.key span { flex: 1; height: 1.4rem; padding-left: .2rem; line-height: 1.4rem; }
.words { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; }
.words dd { margin: 0; max-width: 75ch; }
@media (max-width: 600px) {
  .words { grid-template-columns: 1fr; }
  .words dd { margin-bottom: .5rem; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 11px; }
  nav, .tools { display: none; }
  figure, .heat, tr { break-inside: avoid; }
  figure svg { min-width: 0; }
  .scroll { overflow: visible; }
  .cases { font-size: 7px; }
  .cases thead th, .cases td { padding: .1rem .25rem; font-size: inherit; }
  .cases .small { white-space: normal; overflow-wrap: break-word; min-width: 9rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""

_SCRIPT = """
"use strict";
const table = document.querySelector("table.cases"), body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
const key = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent;
heads.forEach((head, i) => head.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach(other => other.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((a, b) => {
    const x = key(a, i), y = key(b, i);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = a.cells[i].dataset.value === undefined ? x.localeCompare(y, "en", {numeric: true}) : x - y;
    return up ? order : -order;
  });
  body.append(...rows);
}));
const filter = document.getElementById("filter"), shown = document.getElementById("shown");
const show = () => {
  const words = filter.value.toLowerCase().split(/\\s+/);
  let count = 0;
  for (const row of body.rows) {
    const text = [...row.cells].map(cell => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    count += !row.hidden;
  }
  shown.textContent = `${count} of ${body.rows.length}`;
};
filter.addEventListener("input", show);
show();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
"""
