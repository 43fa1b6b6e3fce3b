"""``pytest-gemm judge``: one kernel, right or wrong, with which arithmetic and how fast, on one screen.

What the kernel takes is found out by first calls.  Then it is judged by problems of its form, the simplest first, and
timed beside ATen.  A worker process runs all of it; this one never imports the user's file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import psutil

from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.config.values import cores
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Status, Unsupported
from pytest_gemm.core.text import show
from pytest_gemm.core.units import plural, seconds_text, three
from pytest_gemm.failures import findings as grouping
from pytest_gemm.failures.findings import Finding
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.machine import software
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import plain, to_record
from pytest_gemm.speed import bench
from pytest_gemm.speed.timing import paired
from pytest_gemm.tools import kernel as kernels
from pytest_gemm.tools.kernel import Form, Kernel, KernelBackend
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.keeper import Keeper, cuda_has_started
from pytest_gemm.worker.messages import Died, Thrown
from pytest_gemm.worker.process import Process

T = TypeVar("T")

SCHEMA: Final = 1
"""Version of what ``--json`` prints: a key that is removed or means something else raises it, a new key does not."""

OPS: Final = ("mm", "addmm", "linear", "bmm", "int_mm")
# Sizes, M x N x K: simple ones, then each dimension 1, odd, and not a multiple of a tile; empty ones; larger ones.
_SIZES: Final = (
    *("16x16x16", "32x48x64", "32x48x65", "32x65x64", "33x48x64", "1x48x64", "32x1x64", "32x48x1", "1x1x1", "3x5x17"),
    *("17x65x127", "64x64x1000", "31x1x1004", "8x16x0", "0x16x8", "16x0x8", "128x128x128", "130x258x514"),
)
_FEW: Final = ("32x48x64", "1x48x64", "17x65x127", "64x64x1000")
_LARGE: Final = ("256x512x1000", "512x512x512")
_BATCHED: Final = ("2x16x32x64", "3x17x65x127")
# Sizes of first calls, with three different dimensions: small ones, and what a kernel of large tiles takes.
_FIRST: Final = ((32, 64, 128), (128, 256, 512))
# Types that are tried: f64, which a kernel that converts to f32 inside takes by accident, where no other one works.
_FLOATS: Final = ("f32", "f16", "bf16")
_DTYPES: Final = (*_FLOATS, "f64", "i8")
# Names of parameters that a function writes its result to, and of those that it adds.
_OUT: Final = {"out", "output", "c", "y", "result", "res", "dst", "d"}
_BIAS: Final = {"bias", "input", "c"}
_DISTRIBUTIONS: Final = 4
# Seconds after which no further problem is begun, and how many ends of the worker end the judging.
_BUDGET: Final = 15.0
_DEATHS: Final = 3
# Operations of a problem that is judged several times.
_QUICK: Final = 1 << 23
_PLAN: Final = paired.Plan(warm_seconds=0.05, max_seconds=1.5, retakes=2)
_COLUMNS, _LINES = 100, 24
# Quartiles of a disturbed ratio that lie further apart say nothing.
_UNCLEAR: Final = 1.5


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options.

    Attributes:
        op, dtypes, device: what the kernel takes; "" or empty to find out.
        problem: the only problem line; "" for all of the kernel's form.
        seed: of all values.
        limit: seconds of a call, after which the worker is ended; ``None``: 10, and 90 of a first call, which may
            compile.

    Raises:
        ValueError: for an unknown dtype, a limit that is not above 0, or a line that is no problem.
    """

    op: str = ""
    dtypes: Sequence[str] = ()
    device: str = ""
    problem: str = ""
    seed: int = 0
    limit: float | None = None

    def __post_init__(self) -> None:
        """Check what a user writes."""
        if unknown := [name for name in self.dtypes if name not in _DTYPES]:
            raise ValueError(f"--dtypes={','.join(self.dtypes)}: unknown {unknown[0]!r}; known: {' '.join(_DTYPES)}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"--time-limit={self.limit:g}: give seconds above 0")
        if self.problem:
            Problem.parse(self.problem)

    @property
    def limits(self) -> tuple[float, float]:
        """Seconds of a call, and of a first one."""
        return (10.0, 90.0) if self.limit is None else (self.limit, self.limit)


@dataclasses.dataclass(frozen=True)
class Takes:
    """What a kernel takes, by its first calls.

    Attributes:
        op: of the problems.
        dtypes: as in a problem line.
        device: where.
        batched: 3-D tensors too.
        arguments: its positional ones.
    """

    op: str
    dtypes: Sequence[str]
    device: str
    batched: bool
    arguments: str


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
        takes: what it takes.
        outcomes: of every case, with the words of ``run.jsonl``.
        findings: its failures by cause.
        refused: what it does not take, by the reason.
        not_judged: problem lines for which there was no time, and why.
        accumulate: partial sums that explain every result; "" where none does.
        tf32: only if inputs of f32 may be rounded to TF32.
        deterministic: the same call gave the same bits.
        speed: of some problems.
        untimed: why there is none.
        seconds: of the whole, until ``first verdict`` and until ``judged``.
    """

    kernel: str
    takes: Takes
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

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints; docs/reference/judge.md describes it."""
        arithmetic = {name: getattr(self, name) for name in ("accumulate", "tf32", "deterministic")}
        return {
            "schema": SCHEMA,
            **{name: plain(getattr(self, name)) for name in ("verdict", "status", "kernel", "takes", "refused")},
            **{name: plain(getattr(self, name)) for name in ("not_judged", "speed", "untimed")},
            "arithmetic": {**arithmetic, "correctly_rounded": self._rounded},
            "cases": dict(Counter(str(one.status) for one in self.outcomes)),
            "findings": [
                {"title": one.title, "condition": one.condition, "cases": len(one.outcomes)}
                | {"simplest": to_record(one.simplest)}
                for one in self.findings
            ],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "versions": software.software("cuda" if self.takes.device == "cuda" else "cpu"),
            "outcomes": [to_record(one) for one in self.outcomes],
        }

    @property
    def _rounded(self) -> float | None:
        """The share of the passed cases of which every element is correctly rounded."""
        ratios = [one.ratio for one in self.passed if one.ratio is not None]
        return ratios.count(0.0) / len(ratios) if ratios else None

    @property
    def text(self) -> str:
        """The screen."""
        lines, takes = [f"{self.verdict}  {self.kernel}", ""], self.takes
        if self.findings:
            first, *others = self.findings
            rerun = ["pytest-gemm", "judge", self.kernel, f"--problem={first.simplest.problem}"]
            lines += grouping.text(first, shlex.join(rerun)).splitlines()
            for one in others[:2]:
                lines += [f"also {one.title}: {plural(len(one.outcomes), 'case')}, simplest {one.simplest.problem}"]
            lines += [f"also {plural(len(others) - 2, 'more finding')}"] if len(others) > 2 else []
            lines += [""]
        judged = [one for one in self.outcomes if one.was_judged]
        problems = [Problem.parse(line) for line in dict.fromkeys(one.problem for one in judged)]
        shapes = [str(one.shape) for one in sorted(problems, key=lambda one: one.shape.flops)]
        layouts = " ".join(dict.fromkeys(str(one.layout) for one in problems))
        counts = f"{plural(len(problems), 'problem')}, {plural(len(judged), 'case')}; {layouts}"
        batches = " and in batches" * (takes.batched and takes.op != "bmm")
        facts = {
            "takes": f"{takes.arguments} as {takes.op}{batches}; {' '.join(takes.dtypes)}; on {takes.device}",
            "judged": f"{counts}; {shapes[0]} to {shapes[-1]}" if shapes else "",
            "refused": "; ".join(f"{_first_of(names)}: {why}" for why, names in self.refused.items()),
            "no time for": _first_of(self.not_judged),
            "arithmetic": self._arithmetic(),
            "against ATen": "; ".join(map(str, self.speed)) or f"not timed: {self.untimed}",
            "seconds": ", ".join(f"{value:.1f} {name}" for name, value in self.seconds.items()),
        }
        lines += [f"{name}: {value}" for name, value in facts.items() if value]
        if not self.passed and not self.findings:
            lines += ["next: say what it takes: --op, --dtypes, --device"]
        elif not self.findings:
            name = self.kernel.rpartition(":")[2]
            lines += [f"next: register it, then pytest --pyargs pytest_gemm.conformance --gemm-backends={name}"]
        return "\n".join([short for line in lines for short in _wrapped(line)][:_LINES])

    def __repr__(self) -> str:
        return self.text

    def _arithmetic(self) -> str:
        """What is known of the sums and of the rounding; "" where nothing passed."""
        rounded, told = self._rounded, []
        if self.accumulate and self.findings:
            told = [f"what failed passes with {'inputs as TF32 and ' * self.tf32}partial sums in {self.accumulate}"]
        elif self.accumulate:
            told = [f"as accurate as partial sums in {self.accumulate}"]
        told += [] if rounded is None else [f"every element correctly rounded in {rounded:.0%} of the passed cases"]
        return "; ".join([*told, "deterministic" if self.deterministic else "other bits in each call"] if told else [])


def _wrapped(line: str) -> list[str]:
    """A line in at most three of the width of a screen."""
    indent = "    " if line.startswith(" ") else "  "
    return textwrap.wrap(line, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False, max_lines=3) or [""]


def _first_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- the command ---------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    """Judge a kernel and show what is known of it.

    Raises:
        ValueError: for a kernel that is not there, cannot be imported, or does not say what it takes.
    """
    where, _, function = given.kernel.rpartition(":")
    if not where or not function:
        raise ValueError(f"{given.kernel!r} names no function: give FILE.py:FUNCTION, MODULE:FUNCTION or LIB.so:SYMBOL")
    if where.endswith((".py", ".so")) and not Path(where).is_file():
        raise ValueError(f"{where}: there is no such file")
    kernels.c_parameters(given.signature)
    dtypes = tuple(filter(None, (given.dtypes or "").split(",")))
    asked = Asked(given.op, dtypes, given.device, given.problem or "", given.seed, given.time_limit)
    with _worker(asked.limits) as worker:
        started = psutil.Process().create_time()
        found = _Judging(Kernel(given.kernel, signature=given.signature), asked, worker, started, _progress).found()
    show((json.dumps(found.to_dict()) if given.json else found.text) + "\n")
    return found.status


def check(function: Callable[..., Any], **options: Any) -> Judgement:
    """As ``pytest_gemm.check``."""
    where, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    seen: Any = sys.modules.get(where or "")
    for part in name.split("."):
        seen = getattr(seen, part, None)
    asked = Asked(**options)
    if seen is function and sys.platform == "linux" and not cuda_has_started():
        with _worker(asked.limits) as worker:
            return _Judging(Kernel(f"{where}:{name}"), asked, worker).found()
    return _Judging(Kernel(name or type(function).__name__, function=function), asked, Inline(_CALLS)).found()


_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    **bench.CALLS,
    **{one.__name__: one for one in (kernels.parameters, kernels.first_call)},
}


@contextlib.contextmanager
def _worker(limits: tuple[float, float]) -> Iterator[Process]:
    keeper = Keeper({}, cores(), (), _CALLS)
    worker = Process(keeper, limits)
    try:
        yield worker
    finally:
        worker.close()
        keeper.close()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")


def _readable(one: Outcome) -> Outcome:
    """An outcome without this package's frames in its details, and with the remedy of this command."""
    kept = [line for line in one.details.splitlines() if f"{os.sep}pytest_gemm{os.sep}" not in line]
    remedy = "--time-limit=SECONDS gives it more" if one.status is Status.TIMED_OUT else ""
    reason = one.reason and dataclasses.replace(one.reason, remedy=remedy)
    return dataclasses.replace(one, details="\n".join(kept), reason=reason)


# -- what it takes -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """A first call.

    Attributes:
        form, device, size, dtype: what was given.
        said: the dtype of a product, else what was wrong.
        died: how the process has ended in it.
    """

    form: Form
    device: str
    size: tuple[int, ...]
    dtype: str
    said: str
    died: Died | None = None

    @property
    def is_right(self) -> bool:
        """Whether it returned what a product of the dtype is: the same, i32 of i8, f32 of a half but in a linear."""
        wide = self.dtype in {"f16", "bf16"} and self.said == "f32" and _op(self.form) != "linear"
        return wide or self.said == ("i32" if self.dtype == "i8" else self.dtype)

    @property
    def rank(self) -> int:
        """How well it went: 0 right, 1 a product in a wider type, 2 anything returned, 3 died, 4 refused."""
        given, said = DTYPES[self.dtype], DTYPES.get(self.said)
        if self.is_right:
            return 0
        if said is not None and said.is_float and said.bits > given.bits:
            return 1
        return 2 if said is not None or self.said.startswith("returned") else 3 if self.died is not None else 4

    @property
    def types(self) -> str:
        """The dtypes of a problem line."""
        result = self.said if self.is_right else "i32" if self.dtype == "i8" else self.dtype
        return self.dtype if result == self.dtype else f"{self.dtype}-{self.dtype}-{result}"

    @property
    def refusal(self) -> str:
        """Why it is not judged."""
        return f"returned {self.said}" if self.said in DTYPES else self.said


def _why(error: Died | Thrown) -> str:
    return f"{error.kind}: {error.line}" if isinstance(error, Thrown) else error.reason.text


def _forms(names: Sequence[str], op: str) -> list[Form]:
    """The forms that parameters may have and that compute an op, the likeliest first.

    Raises:
        ValueError: where there are too many parameters.
    """
    last, first, out = ("a", "b", "bias"), ("bias", "a", "b"), ("a", "b", "out")
    roles: list[tuple[str, ...]] = [("a", "b")]
    if len(names) == 3:
        roles = [first] if names[0] in _BIAS else [out, last] if names[2] in _OUT else [last, out]
    elif not names:
        roles = [last, first, *roles]
    elif len(names) != 2:
        raise ValueError(f"a kernel takes a and b, and perhaps bias or out; this one takes {', '.join(names)}")
    weights = (True, False) if len(names) > 1 and names[1] in {"w", "weight"} else (False, True)
    forms = [Form(*one) for one in itertools.product(roles, weights, (False, True))]
    return [form for form in forms if op in {"", "bmm", "int_mm", _op(form)}]


def _op(form: Form) -> str:
    return "linear" if form.weight else "addmm" if "bias" in form.roles else "mm"


def _problems(takes: Takes, form: Form) -> list[Problem]:
    """Problems of a form: the simplest first, the largest last."""
    bias = ":bias" if "bias" in form.roles else ""
    own, strided = ("nt", ("tt",)) if form.weight else ("nn", ("nt", "tn", "tt"))
    first, *others = takes.dtypes
    is_batch = takes.op == "bmm"

    def lines(dtype: str, sizes: Iterable[str], layout: str = own) -> list[str]:
        op = "int_mm" if dtype.startswith("i8") else "mm" if form.weight and not bias and "-" in dtype else _op(form)
        return [] if is_batch else [f"{op}:{dtype}:{layout}:{size}{bias}" for size in sizes]

    found = lines(first, _SIZES)
    found += [line for layout in strided for line in lines(first, _FEW[::2], layout)]
    found += [line for dtype in others for line in lines(dtype, _FEW)]
    if takes.batched:
        sizes = (*_BATCHED, *(f"2x{size}" for size in _SIZES)) if is_batch else _BATCHED
        found += [f"bmm:{dtype}:{own}:{size}" for dtype in takes.dtypes if dtype[0] != "i" for size in sizes]
    found += lines(first, _LARGE)
    problems = []
    for line in found:
        with contextlib.suppress(ProblemError):  # an op has its own rules, as int_mm of a transposed A
            problems.append(Problem.parse(line))
    return problems


# -- judging -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Judging:
    """Finds out what a kernel takes, judges it and times it.

    Attributes:
        kernel: without its form.
        asked: what is known of it.
        worker: where it is called.
        started: since when seconds count, by ``time.time()``.
        tell: is told what is done.
    """

    kernel: Kernel
    asked: Asked
    worker: Process | Inline
    started: float = dataclasses.field(default_factory=time.time)
    tell: Callable[[str], None] = lambda _: None

    def found(self) -> Judgement:
        """All that is found out of the kernel.

        Raises:
            ValueError: when its first calls do not show what it takes.
        """
        self.tell("first calls")
        first = self._first()
        found = self._takes(first)
        kernel = dataclasses.replace(self.kernel, form=first.form)
        name, own = kernel.short.replace(".", "-"), [dtype.partition("-")[0] for dtype in found.takes.dtypes]
        backend = KernelBackend(name, kernel, own, devices=(first.device,))
        line = self.asked.problem
        problems = [Problem.parse(line)] if line else _problems(found.takes, first.form)
        if first.died is None:
            self._judge_all(found, backend, problems)
        else:  # it has no end, or ends its process, in any call
            problem = problems[0].resized(dict(zip("mnk", first.size[-3:], strict=True)))
            status = Status.TIMED_OUT if first.died.limit else Status.CRASHED
            one = Outcome(CaseId(name, problem.line), "ones", self.asked.seed, status, first.died.reason)
            found.outcomes = [_readable(dataclasses.replace(one, details=first.died.details, kernels=(name,)))]
            found.not_judged = [one.line for one in problems]
        found.seconds.setdefault("first verdict", time.time() - self.started)
        found.seconds["judged"] = time.time() - self.started
        found.findings = grouping.findings(found.outcomes)
        self.tell("arithmetic and speed")
        self._arithmetic(found, backend)
        self._speed(found, backend)
        found.seconds["in all"] = time.time() - self.started
        self.tell("")
        return found

    def _first(self) -> _Call:
        """The first right call, or else the first of those that went best.

        Raises:
            ValueError: when none has returned anything.
        """
        try:
            names = self._ask(list[str], "parameters", self.kernel)
        except (Died, Thrown) as error:
            raise ValueError(f"{self.kernel.name}: {_why(error)}") from None
        asked, made = self.asked, list[_Call]()
        sizes = [size for size in _FIRST if asked.op != "bmm"] + [(2, *size) for size in _FIRST]
        dtypes = asked.dtypes or (("i8",) if asked.op == "int_mm" else _DTYPES)
        both = ("cuda", "cpu") if self.kernel.is_for_gpus else ("cpu", "cuda")
        devices = (asked.device,) if asked.device else both
        for device, size, dtype, form in itertools.product(devices, sizes, dtypes, _forms(names, asked.op)):
            made.append(self._call(form, device, size, dtype))
            died = made[-1].died
            if made[-1].rank <= 1 or (died is not None and (died.limit or self.worker.deaths >= _DEATHS)):
                break
        if made and (best := min(made, key=lambda one: one.rank)).rank <= 3:
            return best
        said = "; ".join(dict.fromkeys(f"{one.said} ({one.form} of {one.dtype})" for one in made[:3]))
        text = f"{self.kernel.name} ({', '.join(names) or 'unknown parameters'}): no first call worked: {said}"
        triton = "; a Triton kernel needs a GPU, or TRITON_INTERPRET=1" if "driver" in said else ""
        raise ValueError(f"{text}. Say what it takes: --op={'|'.join(OPS)}, --dtypes, --device=cpu|cuda{triton}")

    def _takes(self, first: _Call) -> Judgement:
        """What it takes in the form of a first call, and what it has refused."""
        form, own = first.form, first.dtype
        more = () if first.died is not None else self.asked.dtypes or (() if own == "i8" else _FLOATS)
        others = {dtype: self._call(form, first.device, first.size, dtype) for dtype in more if dtype != own}
        is_batch = len(first.size) == 4
        if first.died is None and not is_batch and "bias" not in form.roles and self.asked.op in {"", "bmm"}:
            others["bmm"] = self._call(form, first.device, (2, *first.size), own)
        refused: dict[str, list[str]] = {}
        for name, one in others.items():
            if not one.is_right:
                refused.setdefault(one.refusal, []).append(name)
        types = [first.types, *(one.types for name, one in others.items() if name != "bmm" and one.is_right)]
        batched = is_batch or ("bmm" in others and others["bmm"].is_right)
        op = "bmm" if is_batch else "int_mm" if own == "i8" else _op(form)
        takes = Takes(op, types, first.device, batched, f"{self.kernel.short}{form}")
        return Judgement(self.kernel.name, takes, refused=refused)

    def _call(self, form: Form, device: str, size: tuple[int, ...], dtype: str) -> _Call:
        kernel = dataclasses.replace(self.kernel, form=form)
        try:
            return _Call(form, device, size, dtype, self._ask(str, "first_call", kernel, dtype, size, device))
        except (Died, Thrown) as error:
            return _Call(form, device, size, dtype, _why(error), error if isinstance(error, Died) else None)

    def _ask(self, kind: type[T], question: str, *more: object) -> T:
        with self.worker.watch(Activity(CaseId("judge", ""), Phase.COMPILE)):
            return self.worker.call(kind, question, *more)

    def _judge_all(self, found: Judgement, backend: KernelBackend, problems: Sequence[Problem]) -> None:
        """Judge problems, until they have taken too long or the worker has ended too often."""
        begun, deaths = time.monotonic(), self.worker.deaths
        for number, problem in enumerate(problems):
            late = time.monotonic() - begun > _BUDGET
            hangs = any(one.status is Status.TIMED_OUT for one in found.outcomes)
            if late or hangs or self.worker.deaths - deaths >= _DEATHS:
                found.not_judged.append(problem.line)
                continue
            self.tell(f"{number + 1} of {len(problems)}: {problem.line}")
            outcomes = self._outcomes(backend, problem)
            if any(one.code == "not-deterministic" for one in outcomes):
                found.deterministic, backend.deterministic = False, False
                outcomes = self._outcomes(backend, problem)
            found.seconds.setdefault("first verdict", time.time() - self.started)
            found.outcomes += map(_readable, outcomes)
            for one in outcomes:
                if one.status is Status.UNSUPPORTED and one.reason is not None:
                    found.refused.setdefault(one.reason.text, []).append(one.problem)

    def _outcomes(self, backend: KernelBackend, problem: Problem) -> list[Outcome]:
        distributions = distributions_for(problem)[:_DISTRIBUTIONS]
        # One thread: several wait for one another where the cores are busy.
        case = Case(backend, problem, distributions, self.asked.seed, Device(backend.devices[0]), threads=1)
        made = Judge(lambda *_: "not compared", workers=lambda _: self.worker).outcomes(case)
        return [dataclasses.replace(one, eager="", case=dataclasses.replace(one.case, threads=0)) for one in made]

    def _arithmetic(self, found: Judgement, backend: KernelBackend) -> None:
        """The most accurate partial sums with which all is right: of what has failed, or of some long sums."""
        failed = [one for one in found.outcomes if one.status.is_failure]
        if any(one.status is not Status.INCORRECT for one in failed):
            return  # a crash is no arithmetic
        lines = dict.fromkeys(one.problem for one in failed or found.passed)
        problems = [one for one in map(Problem.parse, lines) if one.dtypes.out.is_float]
        quick = [one for one in problems if one.shape.flops <= _QUICK] or problems
        tried = quick[:3] if failed else sorted(quick, key=lambda one: one.shape.k)[-3:]
        sums: Sequence[Literal["f64", "f32", "f16"]] = ("f64", "f32", "f16")
        for accumulate, tf32 in itertools.product(sums, (False, True) if failed else (False,)):
            other = dataclasses.replace(backend, accumulate=accumulate)
            with contextlib.suppress(ProblemError):  # TF32 is of f32 alone
                flags = ("math.tf32",) * tf32
                cases = [dataclasses.replace(one, flags=(*one.flags, *flags)) for one in tried]
                if cases and all(o.status is Status.PASSED for one in cases for o in self._outcomes(other, one)):
                    found.accumulate, found.tf32 = accumulate, tf32
                    return

    def _speed(self, found: Judgement, backend: KernelBackend) -> None:
        """Time the two largest problems of the first dtype that are right and not slow."""
        if not found.ok:
            found.untimed = "it is not right" if found.findings else "nothing was judged"
            return
        quick = {one.problem for one in found.passed if one.seconds.run < self.asked.limits[0] / 100}
        problems = [one for one in map(Problem.parse, quick) if str(one.dtypes) == found.takes.dtypes[0]]
        for problem in sorted(problems, key=lambda one: one.shape.flops)[-2:]:
            with contextlib.suppress(Unsupported, Misconduct, Died, Thrown):  # of ATen too
                found.speed.append(self._timed(backend, problem))
        found.untimed = "" if found.speed else "each call takes too long, or ATen does not take these problems"

    def _timed(self, backend: KernelBackend, problem: Problem) -> Speed:
        """Time the kernel beside ATen, in interleaved blocks of one process."""
        worker, device = self.worker, Device(backend.devices[0])
        case = Case(backend, problem, (), self.asked.seed, device)
        aten = dataclasses.replace(case, backend=AtenBackend())
        given = tensors.make(problem, "rand", self.asked.seed, device)
        with worker.watch(Activity(case.id(), Phase.TIME)):
            numbers = [worker.prepare(one.job(), given).number for one in (case, aten)]
            worker.call(type(None), "keep", *numbers, given=given)
            readings = worker.call(paired.Readings, "window", numbers[0], _PLAN)
            worker.call(type(None), "drop", numbers[0])
        blocks = range(0, len(readings.subject), 2)
        ratios = [sum(readings.subject[i : i + 2]) / sum(readings.comparator[i : i + 2]) for i in blocks]
        low, middle, high = statistics.quantiles(ratios, n=4)
        own, atens = map(statistics.median, (readings.subject, readings.comparator))
        return Speed(problem.line, own, atens, middle, low, high, readings.disturbed)
