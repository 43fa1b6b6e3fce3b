"""The spans of all processes of a run: a trace that Perfetto opens, and the table of where the time went."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.text import table

TEST: Final = "test"
"""The kind of the span of a test; what no span below it covers is pytest's and the plugin's own."""
WAIT: Final = "wait"
"""The kind of the spans in which a worker has no test."""
# What the table calls the time of a test, and that of a process, which no span below covers.
_REST: Final = {TEST: "pytest, fixtures, reports", "compile": "compile: the rest", "": "between tests"}

Span = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Used:
    """What a process has used, at its end.

    Attributes:
        cpu: seconds of CPU time, of the process and of those that it started and that have ended.
        memory: bytes; what several processes share counts for each in equal parts.
        threads: of the process.
    """

    cpu: float
    memory: int
    threads: int


def used() -> Used:
    """What this process has used; 0 for what the system does not say."""
    times, found = os.times(), {"Pss": 0, "Threads": 0}
    for name in ("smaps_rollup", "status"):
        with contextlib.suppress(OSError):
            lines = Path("/proc/self", name).read_text(encoding="utf-8").splitlines()
            facts = (line.partition(":") for line in lines)
            found |= {key: int(text.split()[0]) for key, _, text in facts if key in found}
    return Used(sum(times[:4]), found["Pss"] << 10, found["Threads"])


@dataclasses.dataclass
class Profile:
    """What the processes of a run sent.

    Attributes:
        spans: by process, ``main`` or a worker's name.
        used: what processes have used, likewise.
        died: the processes that ended before they had sent all.
        end: when the last test had ended.
    """

    spans: dict[str, list[Span]] = dataclasses.field(default_factory=dict)
    used: dict[str, Used] = dataclasses.field(default_factory=dict)
    died: set[str] = dataclasses.field(default_factory=set)
    end: float = 0.0

    def absorb(self, process: str, spans: Iterable[Span]) -> None:
        """Take in what a process sent."""
        self.spans.setdefault(process, []).extend(spans)

    def close(self, end: float) -> None:
        """The tests have ended: what a worker did not send since its last test it waited."""
        self.end = end
        for process in self.judging:
            last = max(map(_end, self.spans[process]))
            if process not in self.died and end > last and process != "main":
                tail = {"name": WAIT, "kind": WAIT, "start": last, "seconds": end - last, "thread": 0, "args": {}}
                self.spans[process].append(tail)

    @property
    def judging(self) -> list[str]:
        """The processes that run tests, in their order: the workers, where there are some."""
        return sorted(self.spans.keys() - {"main"} or self.spans, key=_order)

    def write(self, path: Path) -> None:
        """Write the trace: JSON of Chrome's trace format, a lane for each process.

        Raises:
            OSError: when it cannot be written.
        """
        lanes = {(name, span["thread"]) for name, spans in self.spans.items() for span in spans}
        numbers = {lane: i for i, lane in enumerate(sorted(lanes, key=lambda lane: (*_order(lane[0]), lane[1])))}
        begin = min((span["start"] for spans in self.spans.values() for span in spans), default=0.0)
        events: list[dict[str, Any]] = [_named(0, "process_name", name="pytest-gemm")]
        for (name, thread), number in numbers.items():
            lane = {"main": "controller" if len(self.spans) > 1 else "main"}.get(name, name)
            events.append(_named(number, "thread_name", name=f"{lane}, thread {thread}" if thread else lane))
            events.append(_named(number, "thread_sort_index", sort_index=number))
        for name, spans in self.spans.items():
            for span in sorted(spans, key=_begin):
                where = {"pid": 1, "tid": numbers[name, span["thread"]], "ph": "X"}
                times = {"ts": round((span["start"] - begin) * 1e6, 3), "dur": round(span["seconds"] * 1e6, 3)}
                what = {"name": span["name"], "cat": span["kind"] or "step", "args": span["args"]}
                events.append({**what, **where, **times})
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": begin}})
        path.write_text(text, encoding="utf-8")

    def seconds(self) -> dict[str, float]:
        """Seconds by kind over the lanes that ran tests, each second once."""
        found: defaultdict[str, float] = defaultdict(float)
        for name in self.judging:
            for kind, seconds in _own(self.spans[name]):
                found[_REST.get(kind, kind)] += seconds
        return found

    def lines(self, cores: int) -> list[str]:
        """The table of where the time went, and what the processes used of a machine with so many cores."""
        found, lanes = self.seconds(), self.judging
        total = sum(found.values())
        if not total:
            return ["no process sent a span"]
        largest = sorted(found.items(), key=lambda one: -one[1])
        rows = [(kind, f"{seconds:.1f}", f"{seconds / total:.1%}") for kind, seconds in largest]
        lines = table(("what", "seconds", "share"), rows, (1, 2))
        if lanes == ["main"]:
            lines.append(f"one process, {total:.1f} s")
        else:
            waited = f"workers waited {found.get(WAIT, 0.0) / total:.0%} of the time"
            lines.append(f"{len(lanes)} workers, {total:.1f} s in all; {waited}")
        return [*lines, *self._course(), *self._usage(cores)]

    def _course(self) -> list[str]:
        """When tests began and ended, and which was the longest."""
        tests = [span for name in self.judging for span in self.spans[name] if span["kind"] == TEST]
        if not tests:
            return []
        begin = min(span["start"] for spans in self.spans.values() for span in spans)
        first, last = min(span["start"] for span in tests) - begin, max(map(_end, tests)) - begin
        over = max(_end(span) for spans in self.spans.values() for span in spans) - begin
        longest = max(tests, key=lambda span: float(span["seconds"]))
        ends = f"tests from {first:.1f} s to {last:.1f} s, the end of the run at {over:.1f} s"
        return [f"{ends}; the longest took {longest['seconds']:.1f} s: {longest['name']}"]

    def _usage(self, cores: int) -> list[str]:
        """CPU time, memory and threads of the processes that ran tests."""
        those = [self.used[name] for name in self.judging if name in self.used]
        if not those:
            return []
        seconds = self.end - min(span["start"] for spans in self.spans.values() for span in spans)
        cpu, memory = sum(one.cpu for one in those), [one.memory / 1e6 for one in those]
        share = cpu / max(1e-9, seconds * cores)
        lines = [
            f"CPU time {cpu:.1f} s, {share:.0%} of {cores} cores; {max(one.threads for one in those)} threads at most"
        ]
        if len(those) > 1:
            lines.append(
                f"memory of a worker at its end: {max(memory):.0f} MB at most, {sum(memory) / 1e3:.1f} GB in all"
            )
        return lines


def _named(lane: int, what: str, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": lane, "args": args}


def _begin(span: Span) -> tuple[float, float]:
    return span["start"], -span["seconds"]


def _end(span: Span) -> float:
    end: float = span["start"] + span["seconds"]
    return end


def _order(process: str) -> tuple[int, str]:
    """The controller, then the workers by their numbers."""
    return len(process) if process != "main" else 0, process


def _own(spans: Sequence[Span]) -> Iterator[tuple[str, float]]:
    """Kind and seconds of each span of a lane without what lies in the spans below it, and of what none covers.

    A span without a kind counts as the one that it lies in.
    """
    mine = sorted((span for span in spans if span["thread"] == 0), key=_begin)
    if not mine:
        return
    covered = mine[0]["start"]  # up to here
    above: list[tuple[str, float]] = []  # kind and end, the innermost last

    def closed(until: float) -> Iterator[tuple[str, float]]:
        nonlocal covered
        while above and above[-1][1] <= until:
            kind, end = above.pop()
            yield kind, max(0.0, end - covered)
            covered = max(covered, end)
        yield above[-1][0] if above else "", max(0.0, until - covered)
        covered = max(covered, until)

    for span in mine:
        yield from closed(span["start"])
        kind = span["kind"] or (above[-1][0] if above else "")
        above.append((kind, min(_end(span), above[-1][1]) if above else _end(span)))
    yield from closed(max(map(_end, mine)))
