"""``pytest-gemm judge``: one kernel, right or wrong, with which arithmetic and how fast, on one screen.

What the kernel takes is found out by first calls.  Then it is judged by problems of its form, the simplest first, and
timed beside ATen.  A worker process runs all of it; this one never imports the user's file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import torch

from pytest_gemm.config.options import suite
from pytest_gemm.config.values import cores
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Activity, Outcome, Phase, Reason, Status
from pytest_gemm.core.text import did_you_mean, show
from pytest_gemm.core.units import plural, seconds_text
from pytest_gemm.failures import findings as grouping
from pytest_gemm.judging import repeated
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem import shapes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import known
from pytest_gemm.tools import autotuned, beside_aten, progress
from pytest_gemm.tools.autotuned import Tuned
from pytest_gemm.tools.design import Design, distributions
from pytest_gemm.tools.first_calls import CALLS, DEATHS, FirstCalls, Said
from pytest_gemm.tools.judgement import Judgement, Speed
from pytest_gemm.tools.kernel import Kernel, KernelBackend, check_name
from pytest_gemm.worker.confinement import lacks
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.keeper import Keeper, cuda_has_started
from pytest_gemm.worker.process import Process

# Seconds of a call, unless a user gives others.
LIMIT: Final = 10.0
# Seconds after which the command begins no further problem, and where Triton compiles kernels for them.
BUDGET: Final = 25.0
COMPILING: Final = 40.0
# How many times as long a busy machine may take, unless a user gives a budget.
_PATIENCE: Final = 3.0
# Calls of a problem; seconds of one from which on larger ones are expected to be slow, and operations that take no
# longer than the call; operations from which on it is computed by as many threads as there are.
_CALLS: Final = 8
_SLOW: Final = 0.05
_LIGHT: Final = 1 << 17
_THREADED: Final = 1 << 24
# Problems after which an autotuned kernel's other configurations are judged, for there may be no time for all.
_BEFORE_TURNS: Final = 8
# Distributions that tell the precision.
_FIRST: Final = 4
# Operations of a problem that is judged several times.
_QUICK: Final = 1 << 23
# Lines of a failure, the last ones, and beginnings of lines that CUDA adds to every error.
_DETAILS: Final = 8
_OF_CUDA: Final = ("Search for `cuda", "CUDA kernel errors might", "For debugging consider", "Compile with `TORCH_USE")
# Codes of wrong values, which a lower precision may explain.
_OF_VALUES: Final = {"outside-bound", "nan", "missing-nan", "infinite", "zero-sign"}
# Ends of causes that a lower precision is, and how many problems have to be right under it, those that are worst.
_OF_PRECISION: Final = (" inputs", " products", " sums")
_WORST: Final = 10


def run(given: argparse.Namespace) -> int:
    """Judge a kernel and show what is known of it.

    Raises:
        ValueError: for a kernel that is not there, cannot be imported, or does not say what it takes.
    """
    check_name(given.kernel)
    kernel, started = Kernel(given.kernel, signature=given.signature), psutil.Process().create_time()
    options = {"problem": given.problem, "seed": given.seed, "limit": given.time_limit, "budget": _budget(given.budget)}
    judging = _Judging(kernel, _said(vars(given)), **options, confined=given.confined, started=started)
    torch.set_num_threads(1)  # this process waits for the kernel's in turns, and its own sums are small
    with progress.shown(judging.doing):
        judgement = judging.judgement()
    show((json.dumps(judgement.to_dict()) if given.json else judgement.text) + "\n")
    return judgement.status


def check(function: Callable[..., Any], **options: Any) -> Judgement:
    """As ``pytest_gemm.check``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    kernel, said = Kernel(":".join(filter(None, (module, name))), function=function), _said(options)
    others = {"budget": math.inf} | {key: value for key, value in options.items() if not hasattr(said, key)}
    own = ("problem", "seed", "limit", "budget", "confined")
    if unknown := [key for key in others if key not in own]:
        names = [*own, *(field.name for field in dataclasses.fields(Said))]
        hint = did_you_mean(unknown[0], names)
        raise TypeError(f"check() has no option {unknown[0]}={others[unknown[0]]!r}{hint}; it has {', '.join(names)}")
    judging = _Judging(kernel, said, **others)
    inline = sys.platform != "linux" or cuda_has_started()
    try:
        pickle.dumps(function)
    except Exception:  # pickle raises whatever an object's own methods do
        inline = True  # no other process can find it
    return judging.judgement(inline=inline)


def _budget(text: str) -> float | None:
    """The seconds of an option, infinite for ``none``; ``None`` where it is not given."""
    try:
        return None if not text else math.inf if text == "none" else float(text)
    except ValueError:
        raise ValueError(f"--budget={text}: give seconds above 0, or none") from None


def _problems(text: str) -> list[Problem]:
    """The problem of a line, or those of a shapes file.

    Raises:
        ValueError: for what is no line and no file.
    """
    if not text.endswith(".toml"):
        return [Problem.parse(text)]
    if not Path(text).is_file():
        raise ValueError(f"--problem={text}: there is no such file")
    return list(dict.fromkeys(problem for each in shapes.read(Path(text)) for problem in each.problems))


def _said(options: Mapping[str, Any]) -> Said:
    """What is said of a kernel, of options of either kind."""
    names = [field.name for field in dataclasses.fields(Said)]
    return Said(**{name: options[name] for name in names if name in options})


@dataclasses.dataclass
class _Judging:
    """Finds out what a kernel takes, judges it and times it.

    Attributes:
        kernel: without its form.
        said: what its user says of it; what is not said is found out.
        problem: the only problem line; "" for all of the kernel's form.
        seed: of all values.
        budget: seconds after which no further problem is begun; ``None``: :data:`BUDGET`, or :data:`COMPILING`.
        limit: seconds of a call, after which the worker is ended; ``None``: 10, and 15 of a first call, or 90 where
            it may compile.
        confined: its process has no rights outside of a folder of its own, see ``worker.confinement``.
        started: since when seconds count, by ``time.time()``.
        worker: the process of the kernel.
        pytorch: that of PyTorch's own product, which a kernel's module cannot patch.

    Raises:
        ValueError: for a limit that is not above 0, a line that is no problem, and where no process can be confined.
    """

    kernel: Kernel
    said: Said
    problem: str = ""
    seed: int = 0
    limit: float | None = None
    budget: float | None = None
    confined: bool = False
    started: float = dataclasses.field(default_factory=time.time)
    worker: Process | Inline = dataclasses.field(init=False)
    pytorch: Process | Inline = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Check what a user writes."""
        for option, seconds in (("--time-limit", self.limit), ("--budget", self.budget)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{option}={seconds:g}: give seconds above 0")
        if self.confined and (lacking := lacks()):
            raise ValueError(f"--confined: {lacking}")
        self._asked = _problems(self.problem) if self.problem else []
        self._pace, self._count, self._now = 0.0, 0, "first calls"
        self._start: Callable[[], Process] | None = None
        self.is_exact = True

    def doing(self) -> str:
        """What it does now, in words."""
        phase = getattr(getattr(self, "worker", None), "phase", "")  # there is no worker at first
        return f"{plural(self._count, 'problem')} judged, now {self._now}" + f" ({phase})" * bool(phase)

    def judgement(self, *, inline: bool = False) -> Judgement:
        """All that is found out of the kernel, in a process of its own or in this one.

        Raises:
            ValueError: when its first calls do not show what it takes.
        """
        if inline and self.confined:
            remedy = (
                "give one that another process finds by its module and name, on Linux, before CUDA has started here"
            )
            raise ValueError(f"confined=True: this function is called in this process; {remedy}")
        if inline:
            self.worker = self.pytorch = Inline(CALLS)
            return self._judged()
        with contextlib.closing(Keeper({}, cores(), (), CALLS, confined=self.confined, passive=False)) as keeper:
            first = 90.0 if self.kernel.may_compile else 15.0
            self._start = functools.partial(Process, keeper, (self.limit or LIMIT, self.limit or first))
            self.worker, self.pytorch = self._start(), self._start()
            with contextlib.closing(self.worker), contextlib.closing(self.pytorch):
                return self._judged()

    def _judged(self) -> Judgement:
        with self.worker.watch(Activity(CaseId("judge", ""), Phase.COMPILE)):
            calls = FirstCalls(self.kernel, self.said, self.worker)
            first = calls.best()
            judgement, said = calls.takes(first)
        judgement.options = [*judgement.options, *["--confined"] * self.confined]
        kernel = dataclasses.replace(self.kernel, form=first.form)
        name, own = kernel.short.replace(".", "-"), [dtype.partition("-")[0] for dtype in judgement.dtypes]
        backend = KernelBackend(name, kernel, own, devices=(first.device,), **self.said.arithmetic)
        if first.died is None:
            self._leave_to_interpreter(judgement)
        self._design = Design(judgement, first.form, said)
        if first.died is None:
            compiles = self.worker.call(Tuned, "tuned").compiled > 0 and not judgement.interpreted
            self.is_exact = self.budget is not None or compiles
            self.budget = self.budget or (COMPILING if compiles else BUDGET)
            with self._compiling_ahead(judgement, backend) if compiles else contextlib.nullcontext():
                self._judge_all(judgement, backend)
                if self._count < _BEFORE_TURNS:
                    self._judge_configurations(judgement, backend)
            judgement.tuned = self.worker.call(Tuned, "tuned")
        else:  # it has no end, or ends its process, in any call
            problem = next(iter(self._design)).resized(dict(zip("mnk", first.size[-3:], strict=True)))
            status = Status.TIMED_OUT if first.died.limit else Status.CRASHED
            one = Outcome(CaseId(name, problem.line), "ones", self.seed, status, first.died.reason)
            judgement.outcomes = [_readable(dataclasses.replace(one, details=first.died.details, kernels=(name,)))]
        judgement.seconds.setdefault("first verdict", time.time() - self.started)
        judgement.seconds["judged"] = time.time() - self.started
        judgement.findings = grouping.findings(judgement.outcomes)
        self._arithmetic(judgement, backend)
        self._speed(judgement, backend)
        judgement.seconds["in all"] = time.time() - self.started
        return judgement

    # -- whether it is right, with which arithmetic, and how fast

    def _judge_all(self, judgement: Judgement, backend: KernelBackend) -> None:
        """Judge problems, until the budget is spent, a call hangs, or the worker has ended too often."""
        started, budget, deaths = (time.monotonic(), self._busy()), self.budget or BUDGET, self.worker.deaths + DEATHS
        problems = enumerate((self._asked or self._design) if judgement.dtypes else ())
        for number, problem in problems:
            left = budget - self._spent(started)
            slow = self._pace * problem.shape.flops
            if any(one.status is Status.TIMED_OUT for one in judgement.outcomes):
                judgement.cut = "a call hangs"
            elif self.worker.deaths >= deaths:
                judgement.cut = f"it ended its process {DEATHS} times"
            elif left <= 0.0:
                judgement.cut = f"limit {budget:g} s{'' if self.is_exact else ' of computing'}"
            elif _CALLS * slow > left or slow > (self.limit or LIMIT) / 2:
                judgement.cut = judgement.cut or f"a call takes {seconds_text(slow)}"
                judgement.not_judged.append(problem.line)
                continue
            else:
                self._now, before = problem.line, self.worker.deaths
                self._judge_one(judgement, backend, problem, number)
                self._count += 1
                if self.worker.deaths > before:
                    self._design.deadly.add((problem.shape.m, problem.shape.n, problem.shape.k))
                if self._count == _BEFORE_TURNS:
                    self._judge_configurations(judgement, backend)
                continue
            judgement.not_judged += [problem.line, *(one.line for _, one in problems)]
            return

    def _busy(self) -> float:
        """Seconds that this process and the kernel's have computed."""
        with contextlib.suppress(psutil.Error):  # it may have ended just now
            spent = psutil.Process(self.worker.pid).cpu_times() if isinstance(self.worker, Process) else None
            return time.process_time() + (spent.user + spent.system if spent else 0.0)
        return time.process_time()

    def _spent(self, started: tuple[float, float]) -> float:
        """Seconds of the budget that are spent; where none was given a busy machine has three times as long."""
        took = time.monotonic() - started[0]
        return took if self.is_exact else max(self._busy() - started[1], took / _PATIENCE)

    def _judge_one(self, judgement: Judgement, backend: KernelBackend, problem: Problem, number: int) -> None:
        names = distributions_for(problem) if len(self._asked) == 1 else distributions(problem, number)
        outcomes = self._outcomes(backend, problem, names)
        if any(one.code == "not-deterministic" for one in outcomes):
            judgement.deterministic, backend.deterministic = False, False
            outcomes = self._outcomes(backend, problem, names)
        # Where nearly all is zero, or the bound is wide, nothing is asked.
        if not (outcomes := [one for one in outcomes if one.status is not Status.MISTRUSTED]):
            judgement.not_judged.append(problem.line)
            judgement.cut = judgement.cut or "any result would do"
            return
        judgement.deterministic &= all(one.cause not in repeated.NAMES for one in outcomes)
        judgement.seconds.setdefault("first verdict", time.time() - self.started)
        if any(one.status is Status.INCORRECT for one in outcomes):  # of a crash another process knows nothing
            used = self.worker.call(Tuned, "tuned").last
            outcomes = [dataclasses.replace(one, kernels=(*one.kernels, *used)) for one in outcomes]
        judgement.outcomes += map(_readable, outcomes)
        for one in outcomes:
            if products := [name for name in one.kernels if name.startswith("aten.")]:
                judgement.called[one.problem] = products[0]
            if one.status is Status.UNSUPPORTED and one.reason is not None:
                judgement.refused.setdefault(one.reason.text, []).append(one.problem)
            if one.status in {Status.UNSUPPORTED, Status.CRASHED}:  # which may end its process again
                self._design.refused.add(one.problem)
        # Of several calls the shortest: a first one may have to start something.
        ended = [one.seconds.run for one in outcomes if one.status in {Status.PASSED, Status.INCORRECT}]
        if (least := min(ended, default=0.0)) > _SLOW:
            self._pace = max(self._pace, least / max(problem.shape.flops, _LIGHT))

    def _leave_to_interpreter(self, judgement: Judgement) -> None:
        """Leave out the data types in which Triton's interpreter is wrong by itself, where it runs."""
        own = {dtype: dtype.partition("-")[0] for dtype in judgement.dtypes}
        faults = self.worker.call(dict[str, str], "interpreter_faults", list(own.values()))
        judgement.interpreted = bool(faults)
        for dtype, name in own.items():
            if fault := faults.get(name):
                judgement.refused.setdefault(f"Triton's interpreter: {fault}", []).append(name)
                judgement.dtypes = [one for one in judgement.dtypes if one != dtype]

    def _compiling_ahead(self, judgement: Judgement, backend: KernelBackend) -> contextlib.AbstractContextManager[None]:
        """A block beside which the problems' kernels are compiled for a GPU."""
        if backend.devices != ("cuda",) or self._start is None or len(self._asked) == 1:
            return contextlib.nullcontext()
        problems = self._asked or Design(judgement, self._design.form, self._design.said)
        return autotuned.compiling_ahead(self._start, backend, problems)

    def _judge_configurations(self, judgement: Judgement, backend: KernelBackend) -> None:
        """Judge the largest problem with each configuration that has computed nothing yet, and as a first call."""
        passed = [one for one in map(Problem.parse, (o.problem for o in judgement.passed)) if one.shape.flops]
        if not passed or any(one.status.is_failure for one in judgement.outcomes):
            return
        problem, end = max(passed, key=lambda one: one.shape.flops), time.time() + (self.budget or BUDGET) / 2
        for what in autotuned.turns(self.worker):
            if time.time() > end:
                return
            self._now = f"{what} for {problem.line}"
            for one in map(_readable, self._outcomes(backend, problem, distributions_for(problem)[:_FIRST])):
                if one.status.is_failure:
                    remedy = "reset_to_zero= or restore_value= of triton.autotune" if what == autotuned.TUNING else ""
                    reason = one.reason and dataclasses.replace(one.reason, remedy=remedy)
                    one = dataclasses.replace(one, cause=what, reason=reason)  # noqa: PLW2901  # with its cause
                judgement.outcomes.append(one)

    @functools.cached_property
    def _judge(self) -> Judge:
        return Judge(
            lambda *of: known.eager_refusal(self._ledger)(*of),  # noqa: PLW0108  # the ledger is read on a failure
            statements=lambda *of: self._ledger.statements(*of),  # noqa: PLW0108  # see above
            workers=lambda backend: self.worker if isinstance(backend, KernelBackend) else self.pytorch,
            beside=False,
        )

    @functools.cached_property  # a right kernel needs none
    def _ledger(self) -> Ledger:
        return Ledger.load(suite("conformance") / "known_failures.toml")

    def _case(self, backend: KernelBackend, problem: Problem, names: tuple[str, ...]) -> Case:
        """A problem; of a small one with one thread: several wait for one another where the cores are busy."""
        threads = 1 if problem.shape.flops < _THREADED else 0
        return Case(backend, problem, names, self.seed, Device(backend.devices[0]), threads=threads)

    def _outcomes(self, backend: KernelBackend, problem: Problem, names: tuple[str, ...]) -> list[Outcome]:
        case = self._case(backend, problem, names)
        made = self._judge.outcomes(case)
        if any(one.inherited for one in made):
            environment = known.environment_of(case)
            made = [known.inherited(one, problem, self._ledger, environment) for one in made]
        return [dataclasses.replace(one, case=dataclasses.replace(one.case, threads=0)) for one in made]

    def _arithmetic(self, judgement: Judgement, backend: KernelBackend) -> None:
        """The most accurate partial sums with which all is right: of what has failed, or of some long sums."""
        failed = [one for one in judgement.outcomes if one.status.is_failure and not one.inherited]
        causes = {one.cause if one.status is Status.INCORRECT else str(one.status) for one in failed}
        has_misbehaved = any(one.reason is None or one.reason.code not in _OF_VALUES for one in failed)
        if has_misbehaved or any(cause and not cause.endswith(_OF_PRECISION) for cause in causes):
            return  # a crash is no arithmetic, and neither is a K tail
        failed.sort(key=lambda one: -(one.ratio or 0.0))
        lines = dict.fromkeys(one.problem for one in failed or judgement.passed)
        problems = [one for one in map(Problem.parse, lines) if one.dtypes.out.is_float]
        problems = [one for one in problems if one.shape.flops <= _QUICK] or problems
        tried = problems[:_WORST] if failed else sorted(problems, key=lambda one: one.shape.k)[-3:]
        sums: Sequence[Literal["f64", "f32", "f16"]] = ("f64", "f32", "f16")
        for accumulate, tf32 in itertools.product(sums, (False, True) if failed else (False,)):
            other = dataclasses.replace(backend, accumulate=accumulate)
            with contextlib.suppress(ProblemError):  # TF32 is of f32 alone
                flags = ("math.tf32",) * tf32
                cases = [dataclasses.replace(one, flags=(*one.flags, *flags)) for one in tried]
                if cases and all(
                    o.status is Status.PASSED
                    for one in cases
                    for o in self._outcomes(other, one, distributions_for(one)[:_FIRST])
                ):
                    judgement.accumulate, judgement.tf32 = accumulate, tf32
                    return

    def _speed(self, judgement: Judgement, backend: KernelBackend) -> None:
        """Time the two largest problems of the first dtype that are right and not slow."""
        if not judgement.ok:
            judgement.untimed = "it is not right" if judgement.findings or judgement.reads_c else "nothing was judged"
            return
        if judgement.interpreted:
            judgement.untimed = "Triton's interpreter ran it"
            return
        quick = {one.problem for one in judgement.passed if one.seconds.run < (self.limit or LIMIT) / 100}
        problems = [one for one in map(Problem.parse, quick) if str(one.dtypes) == judgement.dtypes[0]]
        self.worker.call(Tuned, "tuned", autotuned.TUNED)
        why = []
        # What is autotuned compiles all of its configurations for each problem.
        for problem in sorted(problems, key=lambda one: one.shape.flops)[-1 if judgement.tuned.configs > 1 else -2 :]:
            case, self._now = self._case(backend, problem, ()), f"timing {problem.line}"
            time_of_it = beside_aten.timed(case, self.worker, self._judge)
            if isinstance(time_of_it, Reason):
                wrong = Outcome(case.id(), "rand", self.seed, Status.INCORRECT, time_of_it, kernels=(backend.name,))
                judgement.outcomes.append(wrong)
                judgement.findings = grouping.findings(judgement.outcomes)
                why.append("it is not right")
            elif problem.line in judgement.called:
                why.append("its product is ATen's")  # but timed calls have shown whether each computes
            elif isinstance(time_of_it, Speed):
                judgement.speed.append(time_of_it)
            else:
                why.append(time_of_it)
        judgement.untimed = "" if judgement.speed else "; ".join(dict.fromkeys(why)) or "each call takes too long"


def _readable(one: Outcome) -> Outcome:
    """An outcome in the words of this command: the user's frames alone, and what gives a call more time."""
    details: list[str] = []
    is_ours = False
    for line in one.details.splitlines():
        if line.lstrip().startswith('File "'):
            is_ours = f"{os.sep}pytest_gemm{os.sep}" in line
        is_ours &= line.startswith(" ")  # with its source and the marks below
        details += [line] * (not is_ours and not line.lstrip().startswith(_OF_CUDA))
    remedy = "--time-limit=SECONDS gives it more" if one.status is Status.TIMED_OUT else ""
    reason = one.reason and dataclasses.replace(one.reason, remedy=remedy)
    cause = one.cause.replace(" in compile", " in a first call")
    return dataclasses.replace(one, details="\n".join(details[-_DETAILS:]), reason=reason, cause=cause)
