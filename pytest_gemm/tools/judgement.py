"""What is known of a kernel that was judged, as one screen and as JSON."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.units import plural, seconds_text, three
from pytest_gemm.failures import findings as grouping
from pytest_gemm.failures.findings import Finding
from pytest_gemm.machine import software
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import plain, to_record

SCHEMA: Final = 1
"""Version of what ``--json`` prints: a key that is removed or means something else raises it, a new key does not."""

COLUMNS, LINES = 100, 24
"""Of a screen."""
# Quartiles of a disturbed ratio that lie further apart say nothing.
_UNCLEAR: Final = 1.5
_TAKES: Final = ("op", "dtypes", "device", "batched", "arguments")
_ARITHMETIC: Final = ("accumulate", "tf32", "deterministic", "correctly_rounded")
_PLAIN: Final = ("verdict", "status", "kernel", "refused", "not_judged", "speed", "untimed")


@dataclasses.dataclass(frozen=True)
class Speed:
    """A timed problem.

    Attributes:
        problem: its line.
        seconds, aten_seconds: medians of a call.
        ratio: of the kernel's time to ATen's, the median over interleaved blocks; ``low`` and ``high`` are quartiles.
        disturbed: why the times are not to be trusted; "" when they are.
    """

    problem: str
    seconds: float
    aten_seconds: float
    ratio: float
    low: float
    high: float
    disturbed: str = ""

    def __str__(self) -> str:
        low, ratio, high = map(three, (self.low, self.ratio, self.high))
        if self.disturbed and self.high > _UNCLEAR * self.low:
            return f"unclear on {self.problem}, the machine is busy: {low}x to {high}x its time"
        times = f"{seconds_text(self.seconds)} against {seconds_text(self.aten_seconds)}"
        return f"{ratio}x its time ({low} to {high}) on {self.problem}, {times}{self.disturbed and ' (disturbed)'}"


@dataclasses.dataclass(repr=False)
class Judgement:
    """What is known of a kernel.

    Attributes:
        kernel: its name.
        op, dtypes, device: what it takes, as in a problem line.
        batched: it takes 3-D tensors too.
        arguments: its positional ones.
        outcomes: of every case, with the words of ``run.jsonl``.
        findings: its failures by cause.
        refused: what it does not take, by the reason.
        not_judged: problem lines for which there was no time.
        accumulate: partial sums that explain every result; "" where none does.
        tf32: only if inputs of f32 may be rounded to TF32.
        deterministic: the same call gave the same bits.
        speed: of some problems.
        untimed: why there is none.
        seconds: of the whole, until ``first verdict`` and until ``judged``.
    """

    kernel: str
    op: str
    dtypes: Sequence[str]
    device: str
    batched: bool
    arguments: str
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    refused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    not_judged: list[str] = dataclasses.field(default_factory=list)
    accumulate: str = ""
    tf32: bool = False
    deterministic: bool = True
    speed: list[Speed] = dataclasses.field(default_factory=list)
    untimed: str = ""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether something was judged, and all of it is right."""
        return self.status == 0

    def __bool__(self) -> bool:
        return self.ok

    @property
    def passed(self) -> list[Outcome]:
        """The outcomes that passed."""
        return [one for one in self.outcomes if one.status is Status.PASSED]

    @property
    def status(self) -> int:
        """The exit status: 0 right, 1 wrong, 10 nothing was judged."""
        return 1 if self.findings else 0 if self.passed else 10

    @property
    def verdict(self) -> str:
        """``right``, ``not judged``, or the title of the first finding."""
        return self.findings[0].title if self.findings else "right" if self.passed else "not judged"

    @property
    def correctly_rounded(self) -> float | None:
        """The share of the passed cases of which every element is correctly rounded; ``None`` of no case."""
        ratios = [one.ratio for one in self.passed if one.ratio is not None]
        return ratios.count(0.0) / len(ratios) if ratios else None

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints; docs/reference/judge.md describes it."""
        return {
            "schema": SCHEMA,
            **{name: plain(getattr(self, name)) for name in _PLAIN},
            "takes": {name: getattr(self, name) for name in _TAKES},
            "arithmetic": {name: getattr(self, name) for name in _ARITHMETIC},
            "cases": dict(Counter(str(one.status) for one in self.outcomes)),
            "findings": [
                {"title": one.title, "condition": one.condition, "cases": len(one.outcomes)}
                | {"simplest": to_record(one.simplest)}
                for one in self.findings
            ],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "versions": software.software("cuda" if self.device == "cuda" else "cpu"),
            "outcomes": [to_record(one) for one in self.outcomes],
        }

    @property
    def text(self) -> str:
        """The screen."""
        lines = [f"{self.verdict}  {self.kernel}", "", *self._failures()]
        judged = [one for one in self.outcomes if one.was_judged]
        problems = [Problem.parse(line) for line in dict.fromkeys(one.problem for one in judged)]
        shapes = [str(one.shape) for one in sorted(problems, key=lambda one: one.shape.flops)]
        layouts = " ".join(dict.fromkeys(str(one.layout) for one in problems))
        counts = f"{plural(len(problems), 'problem')}, {plural(len(judged), 'case')}; {layouts}"
        batches = " and in batches" * (self.batched and self.op != "bmm")
        takes = f"{self.arguments} as {self.op}{batches}; {' '.join(self.dtypes)}; on {self.device}"
        facts = {
            "takes": takes,
            "judged": f"{counts}; {shapes[0]} to {shapes[-1]}" if shapes else "",
            "refused": "; ".join(f"{_first_of(names)}: {why}" for why, names in self.refused.items()),
            "no time for": _first_of(self.not_judged),
            "arithmetic": self._arithmetic() if self.passed or self.accumulate else "",
            "against ATen": "; ".join(map(str, self.speed)) or f"not timed: {self.untimed}",
            "seconds": ", ".join(f"{value:.1f} {name}" for name, value in self.seconds.items()),
            "next": "say what it takes: --op, --dtypes, --device" * (self.verdict == "not judged"),
        }
        lines += [f"{name}: {value}" for name, value in facts.items() if value]
        return "\n".join([short for line in lines for short in _wrapped(line)][:LINES])

    def __repr__(self) -> str:
        return self.text

    def _failures(self) -> list[str]:
        """The first finding, and a line for each of two more."""
        if not self.findings:
            return []
        first, *others = self.findings
        rerun = shlex.join(["pytest-gemm", "judge", self.kernel, f"--problem={first.simplest.problem}"])
        more = [f"also {o.title}: {plural(len(o.outcomes), 'case')}, simplest {o.simplest.problem}" for o in others[:2]]
        rest = [f"also {plural(len(others) - 2, 'more finding')}"] if len(others) > 2 else []
        return [*grouping.text(first, rerun).splitlines(), *more, *rest, ""]

    def _arithmetic(self) -> str:
        """What is known of the sums and of the rounding."""
        rounded, told = self.correctly_rounded, []
        if self.accumulate and not all(one.simplest.inherited for one in self.findings):
            sums = f"partial sums in {self.accumulate}" if self.accumulate != "f64" or not self.tf32 else ""
            told = [f"the failures would be right for {' and '.join(filter(None, ('TF32 inputs' * self.tf32, sums)))}"]
        elif self.accumulate:
            told = [f"as accurate as partial sums in {self.accumulate}"]
        told += [] if rounded is None else [f"every element correctly rounded in {rounded:.0%} of the passed cases"]
        return "; ".join([*told, "deterministic" if self.deterministic else "other bits in each call"])


def _wrapped(line: str) -> list[str]:
    """A line in at most three of the width of a screen."""
    indent = "    " if line.startswith(" ") else "  "
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False, max_lines=3) or [""]


def _first_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
