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
from pytest_gemm.core.units import plural
from pytest_gemm.failures.findings import Finding, findings
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.machine import software
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Shape
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
    *("17x65x127", "64x64x1000", "31x1x1000", "8x16x0", "0x16x8", "16x0x8", "128x128x128", "130x258x514"),
)
_FEW: Final = ("32x48x64", "1x48x64", "17x65x127", "64x64x1000")
_LARGE: Final = ("256x512x1000", "512x512x512")
_STRIDED: Final = ("32x48x64", "17x65x127")
_BATCHED: Final = ("2x16x32x64", "3x17x65x127")
# Sizes of first calls, with three different dimensions: small ones, and what a kernel of large tiles takes.
_FIRST: Final = ((32, 64, 128), (128, 256, 512))
_FLOATS: Final = ("f32", "f16", "bf16", "f64")
_DTYPES: Final = (*_FLOATS, "i8")
_HALVES: Final = ("f16", "bf16")
# Names of parameters that a function writes its result to, and of those that it adds.
_OUT: Final = {"out", "output", "c", "y", "result", "res", "dst", "d"}
_BIAS: Final = {"bias", "input", "c"}
_DISTRIBUTIONS: Final = 4
# Seconds after which no further problem is begun, and how many ends of the worker end the judging.
_BUDGET: Final = 15.0
_DEATHS: Final = 3
# Multiplications of a problem that is judged several times.
_QUICK: Final = 1 << 22
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
        limit: seconds of a call, after which the worker is ended.
    """

    op: str = ""
    dtypes: tuple[str, ...] = ()
    device: str = ""
    problem: str = ""
    seed: int = 0
    limit: float = 10.0


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
    dtypes: tuple[str, ...]
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
        seconds: of the whole, until ``first`` verdict and until ``judged``.
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
        if any(one.status.is_failure for one in self.outcomes):
            return 1
        return 0 if self.passed else 10

    @property
    def verdict(self) -> str:
        """``right``, ``not judged``, or the title of the first finding."""
        return self.findings[0].title if self.findings else {0: "right", 10: "not judged"}.get(self.status, "wrong")

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints; docs/reference/judge.md describes it."""
        told = {name: plain(getattr(self, name)) for name in ("kernel", "takes", "refused", "not_judged")}
        told["arithmetic"] = {n: getattr(self, n) for n in ("accumulate", "tf32", "deterministic")}
        told["arithmetic"]["correctly_rounded"] = self._rounded
        cases = Counter(str(one.status) for one in self.outcomes)
        groups = [
            {"title": f.title, "condition": f.condition, "cases": len(f.outcomes), "simplest": to_record(f.simplest)}
            for f in self.findings
        ]
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "status": self.status,
            **told,
            "cases": dict(cases),
            "findings": groups,
            "speed": plain(self.speed),
            "untimed": self.untimed,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "versions": software.software("cuda" if self.takes.device == "cuda" else "cpu"),
            "outcomes": [to_record(one) for one in self.outcomes],
        }

    @property
    def _rounded(self) -> float | None:
        ratios = [one.ratio for one in self.passed if one.ratio is not None]
        return ratios.count(0.0) / len(ratios) if ratios else None

    @property
    def text(self) -> str:
        """The screen."""
        lines = [f"{self.verdict}  {self.kernel}"]
        for one in self.findings[:1]:
            simplest = one.simplest
            values = f"{simplest.distribution}, seed {simplest.seed}" if simplest.distribution else "its first call"
            reason = simplest.reason.text if simplest.reason else ""
            details = simplest.details.removeprefix(reason).split("\n")
            details = [line for line in details if line.strip() and f"{os.sep}pytest_gemm{os.sep}" not in line]
            lines += ["", f"{one.title}: {len(one.outcomes)} of {len(self._judged)} cases"]
            lines += [f"  where: {one.condition}"] if one.condition else []
            lines += [f"  simplest: {simplest.problem}, {values}"]
            lines += [f"  {line.strip()}" for line in [reason, *details[:4]]]
        for one in self.findings[1:3]:
            lines += [f"also {one.title}: {plural(len(one.outcomes), 'case')}, simplest {one.simplest.problem}"]
        lines += [f"also {len(self.findings) - 3} more findings"] if len(self.findings) > 3 else []
        takes, problems = self.takes, dict.fromkeys(one.problem for one in self._judged)
        batch = " and in batches" if takes.batched else ""
        facts = {
            "takes": f"{takes.arguments} as {takes.op}{batch}; {' '.join(takes.dtypes)}; on {takes.device}",
            "judged": f"{plural(len(problems), 'problem')}, {plural(len(self._judged), 'case')}: {_extent(problems)}"
            if problems
            else "",
            "refused": "; ".join(f"{_few(lines)}: {why}" for why, lines in self.refused.items()),
            "no time for": _few(self.not_judged),
            "arithmetic": self._arithmetic(),
            "against ATen": "; ".join(map(_speed_text, self.speed)) or f"not timed: {self.untimed}",
            "seconds": ", ".join(f"{value:.1f} {name}" for name, value in self.seconds.items()),
        }
        for name, value in facts.items():
            if value:
                wrapped = textwrap.wrap(f"{name}: {value}", _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
                lines += ["", *wrapped][0 if name == "takes" else 1 :][: 4 if name == "takes" else 3]
        lines = [line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3]}..." for line in lines]
        return "\n".join([*lines[: _LINES - 1], f"next: {self._next()}"])

    def __repr__(self) -> str:
        return self.text

    @property
    def _judged(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.was_judged]

    def _arithmetic(self) -> str:
        if not self.passed and not self.accumulate:
            return ""
        if not any(Problem.parse(one.problem).dtypes.out.is_float for one in self.passed):
            told = []
        elif not self.accumulate:
            told = ["no declared one explains every result"]
        elif self.status:
            told = [f"what failed passes with {'inputs as TF32 and ' * self.tf32}partial sums in {self.accumulate}"]
        else:
            told = [f"as accurate as partial sums in {self.accumulate}"]
        rounded = self._rounded
        told += [] if rounded is None else [f"every element correctly rounded in {rounded:.0%} of the passed cases"]
        return "; ".join([*told, "deterministic" if self.deterministic else "other bits in each call"])

    def _next(self) -> str:
        if self.findings:
            line = self.findings[0].simplest.problem
            return f"pytest-gemm judge {shlex.quote(self.kernel)} --problem={shlex.quote(line)}"
        if not self.passed:
            return "say what it takes: --op, --dtypes, --device"
        name = self.kernel.rpartition(":")[2]
        return f"register it, then pytest --pyargs pytest_gemm.conformance --gemm-backends={name}"


def _few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _extent(lines: Iterable[str]) -> str:
    """What problem lines have in common, and their layouts and sizes."""
    problems = list(map(Problem.parse, lines))
    words = [(one.op.name, str(one.dtypes), str(one.layout)) for one in problems]
    axes = [dict.fromkeys(part) for part in zip(*words, strict=True)]
    sizes = sorted((p.shape for p in problems), key=_volume)
    full = [one for one in sizes if _volume(one)] or sizes
    empty = f", {len(sizes) - len(full)} empty" if len(full) < len(sizes) else ""
    extent = f"{full[0]} to {full[-1]}{empty}" if len(sizes) > 1 else str(sizes[0])
    return "; ".join([*map(" ".join, axes), extent])


def _volume(shape: Shape) -> int:
    return shape.m * shape.n * shape.k


def _speed_text(one: Speed) -> str:
    unit, factor = ("ms", 1e3) if one.seconds >= 1e-3 else ("us", 1e6)
    faster = "faster" if one.ratio < 1 else "slower"
    shown, *spread = (1 / x if one.ratio < 1 else x for x in (one.ratio, one.low, one.high))
    text = f"{shown:.2f}x {faster} ({min(spread):.2f} to {max(spread):.2f}) on {one.problem}"
    if one.disturbed and max(spread) > _UNCLEAR * min(spread):
        return f"unclear on {one.problem}, the machine is busy: {min(spread):.2g}x to {max(spread):.2g}x {faster}"
    text += f", {one.seconds * factor:.3g} {unit} against {one.aten_seconds * factor:.3g} {unit}"
    return f"{text} (disturbed)" if one.disturbed else text


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
    if unknown := [name for name in dtypes if name not in _DTYPES]:
        raise ValueError(f"--dtypes={given.dtypes}: unknown {unknown[0]!r}; known: {' '.join(_DTYPES)}")
    if given.time_limit <= 0:
        raise ValueError(f"--time-limit={given.time_limit:g}: give seconds above 0")
    problem = Problem.parse(given.problem).line if given.problem else ""
    asked = Asked(given.op, dtypes, given.device, problem, given.seed, given.time_limit)
    with _worker(asked.limit) as worker:
        started = psutil.Process().create_time()
        found = judgement(Kernel(given.kernel, signature=given.signature), asked, worker, started, _progress)
    show((json.dumps(found.to_dict()) if given.json else found.text) + "\n")
    return found.status


def check(function: Callable[..., Any], **options: Any) -> Judgement:
    """As ``pytest_gemm.check``."""
    where, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    seen: Any = sys.modules.get(where or "")
    for part in name.split("."):
        seen = getattr(seen, part, None)
    asked = Asked(**{**options, "dtypes": tuple(options.get("dtypes", ()))})
    if seen is function and sys.platform == "linux" and not cuda_has_started():
        with _worker(asked.limit) as worker:
            return judgement(Kernel(f"{where}:{name}"), asked, worker)
    return judgement(Kernel(name or type(function).__name__, function=function), asked, Inline(_CALLS))


_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    **bench.CALLS,
    **{one.__name__: one for one in (kernels.parameters, kernels.first_call, kernels.has_gpu)},
}


@contextlib.contextmanager
def _worker(limit: float) -> Iterator[Process]:
    keeper = Keeper({}, cores(), (), _CALLS)
    worker = Process(keeper, (limit, limit))
    try:
        yield worker
    finally:
        worker.close()
        keeper.close()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")


def judgement(
    kernel: Kernel,
    asked: Asked,
    worker: Process | Inline,
    started: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Find out what a kernel takes, judge it and time it.

    Args:
        kernel: without its form.
        asked: what is known of it.
        worker: where it is called.
        started: since when seconds count, by ``time.time()``; 0: from now on.
        tell: is told what is done.

    Raises:
        ValueError: when its first calls do not show what it takes.
    """
    started = started or time.time()
    tell("first calls")
    first = _First(kernel, asked, worker)
    kernel, takes, refused = first.takes()
    name = kernel.short.replace(".", "-")
    backend = KernelBackend(name, kernel, [dtype.partition("-")[0] for dtype in takes.dtypes])
    found = Judgement(kernel.name, takes, refused=refused)
    problems = [Problem.parse(asked.problem)] if asked.problem else _problems(takes, kernel.form)
    judging = _Judging(found, backend, worker, asked)
    if first.ended is None:
        judging.all(problems, started, tell)
    else:
        problem = problems[0].resized(dict(zip("mnk", first.size[-3:], strict=True)))
        found.outcomes.append(_ended(name, problem, first.ended, asked.seed))
        found.not_judged = [one.line for one in problems]
        found.seconds["first verdict"] = time.time() - started
    found.seconds["judged"] = time.time() - started
    found.findings = findings(found.outcomes)
    tell("arithmetic and speed")
    judging.arithmetic()
    judging.speed()
    found.seconds["in all"] = time.time() - started
    tell("")
    return found


def _ended(name: str, problem: Problem, error: Died, seed: int) -> Outcome:
    """The outcome of a kernel that has no end, or ends its process, in its first call."""
    status = Status.TIMED_OUT if error.limit else Status.CRASHED
    reason = dataclasses.replace(error.reason, remedy="")
    return Outcome(CaseId(name, problem.line), "", seed, status, reason, details=error.details)


# -- what it takes -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _First:
    """First calls of a kernel.

    Attributes:
        said: what each said: the dtype of a right result, else what was wrong.
        ended: how the process of the only form that can be called has ended in it; ``None`` where it has not.
        size: of that call.
    """

    kernel: Kernel
    asked: Asked
    worker: Process | Inline
    said: dict[str, str] = dataclasses.field(default_factory=dict)
    ended: Died | None = None
    size: tuple[int, ...] = ()

    def takes(self) -> tuple[Kernel, Takes, dict[str, list[str]]]:
        """The kernel in the form that it takes, what it takes, and what it has refused.

        Raises:
            ValueError: when no first call returned anything.
        """
        try:
            names = self._ask(list[str], "parameters", self.kernel)
        except (Died, Thrown) as error:
            raise ValueError(f"{self.kernel.name}: {_why(error)}") from None
        forms = [form for form in _forms(names) if _may_be(self.asked.op, form)]
        kernel, device, size, dtype = self._form(forms, names)
        self.size = size
        form, refused = kernel.form, dict[str, list[str]]()
        dtypes = [dtype]
        if self.ended is not None:
            return kernel, Takes(_op(form), (dtype,), device, False, f"{kernel.short}{form}"), refused
        for other in self.asked.dtypes or (() if dtype.startswith("i8") else _FLOATS):
            if other != dtype.partition("-")[0]:
                said = self._said(kernel, other, size, device)
                if _is_right(other, said, form):
                    dtypes.append(_spelled(other, said))
                else:
                    refused.setdefault(_refusal(said), []).append(other)
        batched = len(size) == 4
        if not batched and "bias" not in form.roles and self.asked.op in {"", "bmm"}:
            first = dtype.partition("-")[0]
            said = self._said(kernel, first, (2, *size), device)
            batched = _is_right(first, said, form)
            if not batched:
                refused.setdefault(_refusal(said), []).append("bmm")
        op = "bmm" if len(size) == 4 else "int_mm" if dtypes[0].startswith("i8") else _op(form)
        return kernel, Takes(op, tuple(dtypes), device, batched, f"{kernel.short}{form}"), refused

    def _form(self, forms: Sequence[Form], names: Sequence[str]) -> tuple[Kernel, str, tuple[int, ...], str]:
        """The first form, device, size and dtype of which a first call is right; else the first that returned."""
        doubtful: tuple[Kernel, str, tuple[int, ...], str] | None = None
        died = doubtful
        sizes = [size for size in _FIRST if self.asked.op != "bmm"] + [(2, *size) for size in _FIRST]
        wanted = self.asked.dtypes or (("i8",) if self.asked.op == "int_mm" else _DTYPES)
        for device in (self.asked.device,) if self.asked.device else ("cpu", "cuda"):
            if device == "cuda" and not self.asked.device and not self._ask(bool, "has_gpu"):
                break
            for size, dtype, form in itertools.product(sizes, wanted, forms):
                kernel = dataclasses.replace(self.kernel, form=form)
                said = self._said(kernel, dtype, size, device)
                if _is_right(dtype, said, form):
                    self.ended = None
                    return kernel, device, size, _spelled(dtype, said)
                triple = "i8-i8-i32" if dtype == "i8" else dtype
                if self.ended is not None:
                    died = died or (kernel, device, size, triple)
                    if self.ended.limit or self.worker.deaths >= _DEATHS:
                        return died
                is_wider = said in DTYPES and DTYPES[said].is_float and DTYPES[said].bits > DTYPES[dtype].bits
                if is_wider:  # judging it says so
                    self.ended = None
                    return kernel, device, size, triple
                if doubtful is None and (said.startswith("returned") or said in DTYPES):
                    doubtful = kernel, device, size, triple
        if doubtful is not None:
            self.ended = None
        if (found := doubtful or died) is not None:
            return found
        said = "; ".join(f"{why} ({what})" for what, why in list(self.said.items())[:3])
        text = f"{self.kernel.name} ({', '.join(names) or 'unknown parameters'}): no first call worked: {said}"
        triton = "; a Triton kernel needs a GPU, or TRITON_INTERPRET=1" if "driver" in said else ""
        raise ValueError(f"{text}. Say what it takes: --op={'|'.join(OPS)}, --dtypes, --device=cpu|cuda{triton}")

    def _said(self, kernel: Kernel, dtype: str, size: tuple[int, ...], device: str) -> str:
        try:
            said = self._ask(str, "first_call", kernel, dtype, size, device)
        except (Died, Thrown) as error:
            said = _why(error)
            self.ended = error if isinstance(error, Died) else self.ended
        self.said.setdefault(f"{kernel.form} of {dtype}", said)
        return said

    def _ask(self, kind: type[T], question: str, *more: object) -> T:
        with self.worker.watch(Activity(CaseId("judge", ""), Phase.RUN)):
            return self.worker.call(kind, question, *more)


def _why(error: Died | Thrown) -> str:
    if isinstance(error, Thrown):
        return f"{error.kind}: {error.line}"
    return error.reason.text + (" (--time-limit=SECONDS gives it more)" if error.limit else "")


def _forms(names: Sequence[str]) -> list[Form]:
    """The forms that parameters may have, the likeliest first.

    Raises:
        ValueError: where there are too many.
    """
    roles: list[tuple[str, ...]]
    a_b, bias, out = ("a", "b"), ("a", "b", "bias"), ("a", "b", "out")
    if not names:
        roles = [bias, ("bias", "a", "b"), a_b]
    elif len(names) == 2:
        roles = [a_b]
    elif len(names) == 3:
        roles = [("bias", "a", "b")] if names[0] in _BIAS else [out, bias] if names[2] in _OUT else [bias, out]
    elif len(names) == 4:
        roles = [("a", "b", "bias", "out"), ("a", "b", "out", "bias")]
    else:
        raise ValueError(f"a kernel takes a and b, and perhaps bias and out; this one takes {', '.join(names)}")
    weights = (True, False) if len(names) > 1 and names[1] in {"w", "weight"} else (False, True)
    return [Form(*one) for one in itertools.product(roles, weights, (False, True))]


def _may_be(op: str, form: Form) -> bool:
    """Whether a form is one of an op that was asked for."""
    has_bias = "bias" in form.roles
    return {"mm": not (has_bias or form.weight), "linear": form.weight, "addmm": has_bias}.get(op, True)


def _is_right(dtype: str, said: str, form: Form) -> bool:
    """Whether a first call has returned what a product of a dtype is: the same, i32 of i8, perhaps f32 of a half."""
    wide = dtype in _HALVES and said == "f32" and _op(form) != "linear"
    return said == ("i32" if dtype == "i8" else dtype) or wide


def _refusal(said: str) -> str:
    return f"returned {said}" if said in DTYPES else said


def _spelled(dtype: str, said: str) -> str:
    return dtype if said == dtype else f"{dtype}-{dtype}-{said}"


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
    found += [line for layout in strided for line in lines(first, _STRIDED, layout)]
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
    """Judges and times a kernel."""

    found: Judgement
    backend: KernelBackend
    worker: Process | Inline
    asked: Asked

    def __post_init__(self) -> None:
        self._judge = Judge(lambda *_: "not compared", workers=lambda _: self.worker)

    def all(self, problems: Sequence[Problem], started: float, tell: Callable[[str], None]) -> None:
        """Judge problems, until they have taken too long or the worker has ended too often."""
        found = self.found
        begun, deaths = time.monotonic(), self.worker.deaths
        for number, problem in enumerate(problems):
            late = time.monotonic() - begun > _BUDGET
            hangs = any(one.status is Status.TIMED_OUT for one in found.outcomes)
            if late or hangs or self.worker.deaths - deaths >= _DEATHS:
                found.not_judged.append(problem.line)
                continue
            tell(f"{number + 1} of {len(problems)}: {problem.line}")
            outcomes = self._outcomes(self.backend, problem)
            if any(one.code == "not-deterministic" for one in outcomes):
                found.deterministic, self.backend.deterministic = False, False
                outcomes = self._outcomes(self.backend, problem)
            found.seconds.setdefault("first verdict", time.time() - started)
            found.outcomes += outcomes
            for one in outcomes:
                if one.status is Status.UNSUPPORTED and one.reason is not None:
                    found.refused.setdefault(one.reason.text, []).append(one.problem)

    def _outcomes(self, backend: KernelBackend, problem: Problem) -> list[Outcome]:
        distributions = distributions_for(problem)[:_DISTRIBUTIONS]
        # One thread: several wait for one another where the cores are busy.
        case = Case(backend, problem, distributions, self.asked.seed, Device(self.found.takes.device), threads=1)
        return [
            dataclasses.replace(one, case=dataclasses.replace(one.case, threads=0))
            for one in self._judge.outcomes(case)
        ]

    def arithmetic(self) -> None:
        """The most accurate partial sums with which all is right: of what has failed, or of some long sums."""
        found = self.found
        wrong = {one.problem: one for one in found.outcomes if one.status is Status.INCORRECT and one.ratio is not None}
        failed = [one for one in found.outcomes if one.status.is_failure]
        if failed and len(wrong) < len({one.problem for one in failed}):
            return  # a crash is no arithmetic
        lines = list(wrong) or [one.problem for one in found.passed]
        problems = [one for one in map(Problem.parse, dict.fromkeys(lines)) if one.dtypes.out.is_float]
        if not problems:
            return
        quick = [one for one in problems if _volume(one.shape) <= _QUICK] or problems
        problems = quick[:3] if wrong else sorted(quick, key=lambda one: one.shape.k)[-3:]
        sums: tuple[Literal["f64", "f32", "f16"], ...] = ("f64", "f32", "f16")
        for accumulate, tf32 in itertools.product(sums, (False, True) if wrong else (False,)):
            if self._passes(dataclasses.replace(self.backend, accumulate=accumulate), problems, tf32):
                found.accumulate, found.tf32 = accumulate, tf32
                return

    def _passes(self, backend: KernelBackend, problems: Iterable[Problem], tf32: bool) -> bool:
        """Whether all problems are right with a declared arithmetic."""
        if tf32:
            try:
                problems = [dataclasses.replace(one, flags=(*one.flags, "math.tf32")) for one in problems]
            except ProblemError:  # of another type than f32
                return False
        return all(one.status is Status.PASSED for problem in problems for one in self._outcomes(backend, problem))

    def speed(self) -> None:
        """Time the two largest problems of the first dtype that are right and not slow."""
        found = self.found
        if found.status:
            found.untimed = "it is not right" if found.status == 1 else "nothing was judged"
            return
        quick = {one.problem for one in found.passed if one.seconds.run < self.asked.limit / 100}
        dtype = found.takes.dtypes[0]
        problems = [one for one in map(Problem.parse, quick) if str(one.dtypes) == dtype and _volume(one.shape)]
        for problem in sorted(problems, key=lambda one: _volume(one.shape))[-2:]:
            with contextlib.suppress(Unsupported, Misconduct, Died, Thrown):  # of ATen too
                found.speed.append(self._timed(problem))
        found.untimed = "" if found.speed else "each call takes too long, or ATen does not take these problems"

    def _timed(self, problem: Problem) -> Speed:
        """Time the kernel beside ATen, in interleaved blocks of one process."""
        worker, device = self.worker, Device(self.found.takes.device)
        case = Case(self.backend, problem, (), self.asked.seed, device)
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
