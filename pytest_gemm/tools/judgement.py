"""What is known of a kernel that was judged, as one screen and as JSON."""

from __future__ import annotations

import dataclasses
import functools
import operator
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
from pytest_gemm.tools.autotuned import Tuned

SCHEMA: Final = 1
"""Version of what ``--json`` prints: a key that is removed or means something else raises it, a new key does not."""

COLUMNS, LINES = 100, 24
"""Of a screen."""
# Lines at the end of a failure that stay: how to run it again, and what else is wrong.
_LAST: Final = 4
# Problems that have to be right before the others are an exception.
_ENOUGH: Final = 3
# Options that allow what some kernels do by design, by the name of the cause.
_MEANT: Final = {
    "small inputs dropped": "--flushes",
    "f16 sums": "--accumulate=f16",
    "bf16 sums": "--accumulate=bf16",
    "TF32 inputs": "--dtypes=f16,bf16",
}
# Multiples that a kernel may be right for alone.
_STEPS: Final = (2, 4, 8, 16, 32, 64, 128, 256)
# Kinds of problems, the most telling ones first.
_EMPTY: Final = (*(f"{name} = 0" for name in "KMN"), "empty results")
_BEYOND: Final = ("more than 65535 matrices", "more than 65535 rows or columns")
_BATCHES: Final = "batches"
_KINDS: Final = (*_EMPTY, *(f"{name} = 1" for name in "KMN"), *_BEYOND, _BATCHES)
# What is wrong with special values, by words of its cause.
_SPECIAL: Final = "NaN and infinities"
_SPECIALS: Final = {
    "small inputs": "subnormal numbers",
    "inf": "infinities",
    "subnormal": "subnormal numbers",
    "zero": "signs of zero",
    "NaN": "NaN",
}
_TAKES: Final = ("op", "dtypes", "device", "batched", "arguments")
_ARITHMETIC: Final = ("accumulate", "tf32", "deterministic", "correctly_rounded")
_PLAIN: Final = ("verdict", "headline", "status", "kernel", "refused", "not_judged", "cut", "calls", "speed", "untimed")


@dataclasses.dataclass(frozen=True)
class Speed:
    """A timed problem.

    Attributes:
        problem: its line.
        seconds, aten_seconds: medians of a call.
        ratio: of the kernel's time to ATen's, the median over interleaved blocks; ``low`` and ``high`` are quartiles.
    """

    problem: str
    seconds: float
    aten_seconds: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        low, ratio, high = (f"{x:.2g}" if x < 0.1 else three(x) for x in (self.low, self.ratio, self.high))
        times = f"{seconds_text(self.seconds)} against {seconds_text(self.aten_seconds)}"
        return f"{ratio}x its time ({low} to {high}) on {self.problem}, {times}"


@dataclasses.dataclass(repr=False)
class Judgement:
    """What is known of a kernel.

    Attributes:
        kernel: its name.
        op, dtypes, device: what it takes, as in a problem line.
        batched: it takes 3-D tensors too.
        arguments: its own.
        options: of the command, which were given and tell how it is judged.
        reads_c: it is right only where its result held no NaN before.
        outcomes: of every case, with the words of ``run.jsonl``.
        findings: its failures by cause.
        refused: what it does not take, by the reason.
        not_judged: problem lines that were left out.
        cut: why they were.
        called: ATen's product that the function called, by problem line.
        interpreted: Triton's interpreter runs it.
        tuned: what has become of the configurations of a kernel of Triton, and how many kernels were compiled.
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
    options: Sequence[str] = ()
    reads_c: bool = False
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    refused: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    not_judged: list[str] = dataclasses.field(default_factory=list)
    cut: str = ""
    called: dict[str, str] = dataclasses.field(default_factory=dict)
    interpreted: bool = False
    tuned: Tuned = dataclasses.field(default_factory=Tuned)
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
        return 1 if self.findings or (self.passed and self.reads_c) else 0 if self.passed else 10

    @property
    def verdict(self) -> str:
        """``right``, ``right so far`` if problems were left out, ``not judged``, or the title of the first finding."""
        right = "right so far" if self.not_judged else "right"
        right = "right but for NaN in C (beta = 0 multiplies it)" if self.reads_c else right
        return self.findings[0].title if self.findings else right if self.passed else "not judged"

    @property
    def judged(self) -> dict[str, bool]:
        """Whether a problem is right, by its line, of those that were judged."""
        judged: dict[str, bool] = {}
        for one in self.outcomes:
            if one.was_judged:
                judged[one.problem] = judged.get(one.problem, True) and not one.status.is_failure
        return judged

    @property
    def headline(self) -> str:
        """The verdict with its count, or first what a wrong kernel is right for."""
        count, left_out = len(self.judged), len(self.not_judged)
        if self.findings:
            exception = "" if self.findings[0].simplest.inherited else self._exception()
            return f"{exception}: {self.verdict.partition(': ')[2] or self.verdict}" if exception else self.verdict
        whole = f"{count} of {count + left_out}: {self.cut}" if left_out else f"{count} of {plural(count, 'problem')}"
        return f"{self.verdict} ({whole})" if self.passed else self.verdict

    def _exception(self) -> str:
        """The kind of problem or value that alone is wrong, as ``right but for K = 0``; "" where there is no such."""
        failed, passed = ([Problem.parse(x) for x, ok in self.judged.items() if ok is side] for side in (False, True))
        passed = [one for one in passed if not one.shape.is_empty]
        if len(passed) < _ENOUGH:
            return ""
        alike = Counter(kind for one in passed for kind in self._kinds(one))
        common = functools.reduce(operator.and_, map(self._kinds, failed))
        # Nothing of a size is right, hardly anything of another kind, and enough others are; one problem shows little.
        most = {one: 0 if one in _KINDS else len(failed) // 8 for one in common}
        common = {one for one in common if alike[one] <= min(most[one], len(passed) - _ENOUGH)}
        common &= {*_EMPTY, *_BEYOND} if len(failed) == 1 else common
        if kinds := [one for one in _KINDS if one in common] or sorted(common):
            return f"right but for {kinds[0]}"
        wrong = [one for one in self.outcomes if one.status.is_failure]
        if {one.distribution for one in wrong} <= {"specials"}:
            causes = " ".join(one.cause for one in wrong)
            return f"right but for {next((words for word, words in _SPECIALS.items() if word in causes), _SPECIAL)}"
        for step in _STEPS:
            with_tails = [{x for x in "MNK" if getattr(one.shape, x.lower()) % step} for one in (*passed, *failed)]
            if len(failed) > 1 and not any(with_tails[: len(passed)]) and all(with_tails[len(passed) :]):
                sizes = set().union(*with_tails)
                return f"right for multiples of {step} {f'in {sizes.pop()} ' * (len(sizes) == 1)}alone"
        return ""

    def _kinds(self, problem: Problem) -> set[str]:
        """Kinds that a problem is one of, in words: by a size, a flag, a batch, or one data type of several."""
        shape, dtype = problem.shape, str(problem.dtypes)
        kinds = {f"{name.upper()} = {size}" for name in "kmn" for size in (0, 1) if getattr(shape, name) == size}
        kinds |= {_EMPTY[-1]} if shape.is_empty else set()
        kinds |= {
            name for name, size in zip(_BEYOND, (shape.batch or 0, max(shape.m, shape.n)), strict=True) if size >> 16
        }
        kinds |= {_BATCHES} if shape.batch is not None and self.op != "bmm" else set()
        return kinds | ({dtype} if len(self.dtypes) > 1 else set()) | {*problem.flags}

    @property
    def calls(self) -> str:
        """ATen's product that the function calls, and in which problems: ``aten::mm for M % 64 > 0``."""
        if not self.called:
            return ""
        names = ", ".join(dict.fromkeys(name.split(".")[1] for name in self.called.values()))
        others = [(line, "") for line in self.judged if line not in self.called]
        theirs = [(line, "") for line in self.called]
        text = f"aten::{names}"
        if not others:
            return text
        if where := grouping.condition(theirs, others).features:
            return f"{text} for {' and '.join(where)}"
        apart = " and ".join(grouping.condition(others, theirs).features)
        return f"{text} in {len(theirs)} of {len(self.judged)} problems" + (f", not for {apart}" if apart else "")

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
            "interpreted": self.interpreted,
            "autotuned": dataclasses.asdict(self.tuned),
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
        judged = [one for one in self.outcomes if one.was_judged]
        problems = [*map(Problem.parse, self.judged)]
        shapes = [str(one.shape) for one in sorted(problems, key=lambda one: one.shape.flops)]
        layouts = " ".join(dict.fromkeys(str(one.layout) for one in problems))
        counts = f"{plural(len(problems), 'problem')}, {plural(len(judged), 'case')}; {layouts}"
        batches = " and in batches" * (self.batched and self.op != "bmm")
        takes = f"{self.arguments} as {self.op}{batches}; {' '.join(self.dtypes)}; on {self.device}"
        takes += ", by Triton's interpreter" * self.interpreted
        facts = {
            "takes": takes,
            "judged": f"{counts}; {shapes[0]} to {shapes[-1]}" if shapes else "",
            "refused": "; ".join(f"{_first_of(names)}: {why}" for why, names in self.refused.items()),
            "left out": self.not_judged and f"{_first_of(self.not_judged)}: {self.cut}",
            "calls": self.calls,
            "autotuned": str(self.tuned) if self.tuned.configs > 1 else "",
            "arithmetic": self._arithmetic() if self.passed or self.accumulate else "",
            "against ATen": "; ".join(map(str, self.speed)) or f"not timed: {self.untimed}",
            "seconds": ", ".join(f"{value:.1f} {name}" for name, value in self.seconds.items()) + self._compiled(),
            "next": "say what it takes: --op, --dtypes, --device" * (self.verdict == "not judged"),
        }
        told = [short for name, value in facts.items() if value for short in _wrapped(f"{name}: {value}")]
        head = [*_wrapped(f"{self.headline}  {self.kernel}"), ""]
        failures = [short for line in self._failures() for short in _wrapped(line)]
        if (room := LINES - len(head) - len(told)) < len(failures):  # of a long one the middle goes
            failures = [*failures[: room - _LAST - 1], "  ...", *failures[-_LAST:]]
        return "\n".join([*head, *failures, *told])

    def __repr__(self) -> str:
        return self.text

    def _failures(self) -> list[str]:
        """The first finding, and a line for each of two more."""
        if not self.findings:
            return []
        first, *others = self.findings
        rerun = shlex.join(["pytest-gemm", "judge", self.kernel, *self.options, f"--problem={first.simplest.problem}"])
        more = [f"also {o.title}: {plural(len(o.outcomes), 'case')}, simplest {o.simplest.problem}" for o in others[:2]]
        if (meant := _MEANT.get(first.cause)) and meant not in self.options:
            rerun += f"\n  if that is meant: {meant}"
        rest = [f"also {plural(len(others) - 2, 'more finding')}"] if len(others) > 2 else []
        return [*grouping.text(first, rerun).splitlines(), *more, *rest, ""]

    def _compiled(self) -> str:
        """How long the kernels of Triton were compiled."""
        spent = sum(one.seconds.compile for one in self.outcomes)
        return f"; {spent:.1f} compiling {plural(self.tuned.compiled, 'kernel')}" if self.tuned.compiled else ""

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
