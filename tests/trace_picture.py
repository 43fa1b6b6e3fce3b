"""Draw traces of ``--gemm-profile`` below each other, on one scale of time: a lane a worker.

python tests/trace_picture.py OUT.svg TITLE=trace.json [TITLE=trace.json ...]
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# What a kind of span is drawn as; the first prefix that fits, and the last one for every other kind.
GROUPS: Mapping[str, tuple[str, str]] = {
    "start and collection": ("start collect", "#9aa5b1"),
    "imports": ("import start_of_CUDA", "#b07cc6"),
    "compilers": ("compile:_C++ compile:_Triton", "#d9822b"),
    "Dynamo, lowering, code": ("compile step", "#e8c547"),
    "operands, run, reference": ("operands run eager reference", "#3f8f6b"),
    "pytest": ("test", "#5b8db8"),
    "waiting": ("wait", "#ffffff"),
}
WIDTH, LANE, LEFT, HEAD = 900, 4, 8, 24


def group(kind: str) -> str:
    """The group of a kind of span."""
    name = kind.replace(" ", "_")
    if kind.startswith("start of"):
        return "imports"
    return next((one for one, (prefixes, _) in GROUPS.items() if name.startswith(tuple(prefixes.split()))), "pytest")


def innermost(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, str]]:
    """Begin, end and kind of the pieces of a lane, each of the innermost span; microseconds."""
    points = sorted((at, end, i) for i, one in enumerate(spans) for at, end in _ends(one))
    open_spans: list[int] = []
    before = 0.0
    for at, begins, i in points:
        if open_spans and at > before:
            yield before, at, str(spans[open_spans[-1]]["cat"])
        if begins:
            open_spans.append(i)
        else:
            open_spans.remove(i)
        before = at


def _ends(span: Mapping[str, Any]) -> tuple[tuple[float, int], tuple[float, int]]:
    return (span["ts"], 1), (span["ts"] + span["dur"], 0)


def lanes(trace: Path) -> tuple[list[dict[int, Counter[str]]], float]:
    """For each worker what it did in each tenth of a second, and the seconds of the run."""
    events = [one for one in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if one["ph"] == "X"]
    began = min(one["ts"] for one in events)
    workers: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for one in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        workers[one["tid"]].append(one)
    found = []
    for worker in sorted(workers):
        if not any(one["cat"] == "test" for one in workers[worker]):  # the controller, or a thread beside another
            continue
        parts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for begin, end, kind in innermost(workers[worker]):
            for tenth in range(int((begin - began) / 1e5), int((end - began) / 1e5) + 1):
                low, high = max(begin - began, tenth * 1e5), min(end - began, (tenth + 1) * 1e5)
                parts[tenth][group(kind)] += int(max(0.0, high - low))
        found.append(dict(parts))
    return found, (max(one["ts"] + one["dur"] for one in events) - began) / 1e6


def picture(panels: Mapping[str, Path]) -> str:
    """The drawing."""
    drawn = {title: lanes(trace) for title, trace in panels.items()}
    longest = max(seconds for _, seconds in drawn.values())
    scale, paths, texts, top = (WIDTH - 2 * LEFT) / longest, defaultdict[str, list[str]](list), [], 30
    for title, (workers, seconds) in drawn.items():
        texts.append(f'<text x="{LEFT}" y="{top + 16}">{escape(title)}: {seconds:.0f} s</text>')
        top += HEAD
        for worker in workers:
            for begin, end, name in _runs(worker):
                x, width = LEFT + begin * scale / 10, (end - begin) * scale / 10
                paths[name].append(f"M{x:.1f} {top}h{width:.1f}v{LANE - 0.6}h-{width:.1f}z")
            top += LANE
        top += 6
    texts += [
        f'<text x="{LEFT + second * scale:.0f}" y="{top + 12}" fill="#666">{second} s</text>'
        for second in range(0, int(longest) + 1, 10)
    ]
    x = LEFT
    for name, (_, color) in GROUPS.items():
        texts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}" stroke="#999" stroke-width=".5"/>')
        texts.append(f'<text x="{x + 16}" y="18">{name}</text>')
        x += 34 + 7 * len(name)
    fills = "".join(f'<path fill="{GROUPS[name][1]}" d="{"".join(parts)}"/>' for name, parts in paths.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 20}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(texts)}{fills}</svg>\n'
    )


def _runs(worker: Mapping[int, Counter[str]]) -> Iterator[tuple[int, int, str]]:
    """Tenths of a second from, to, and what a worker mostly did in them."""
    begin, name = 0, ""
    for tenth in range(max(worker) + 2):
        now = worker[tenth].most_common(1)[0][0] if worker.get(tenth) else ""
        if now != name:
            if name and name != "waiting":
                yield begin, tenth, name
            begin, name = tenth, now


def main() -> int:
    """Write the picture."""
    out, *given = sys.argv[1:]
    panels = dict(one.split("=", 1) for one in given)
    Path(out).write_text(picture({title: Path(trace) for title, trace in panels.items()}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
