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
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from pytest_gemm.api.protocols import Backend
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.config.options import suite
from pytest_gemm.config.values import cores
from pytest_gemm.core.case_id import CaseId, Device
from pytest_gemm.core.outcome import Activity, Misconduct, Outcome, Phase, Status, Unsupported
from pytest_gemm.core.text import show
from pytest_gemm.failures import findings as grouping
from pytest_gemm.judging import repeated
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import known
from pytest_gemm.speed.kept import Kept
from pytest_gemm.speed.timing import paired
from pytest_gemm.tools.design import problems_for
from pytest_gemm.tools.first_calls import CALLS, DEATHS, TRIED, FirstCalls, Said
from pytest_gemm.tools.judgement import Judgement, Speed
from pytest_gemm.tools.kernel import Kernel, KernelBackend
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.keeper import Keeper, cuda_has_started
from pytest_gemm.worker.messages import Died, How, Thrown
from pytest_gemm.worker.process import Process

_DISTRIBUTIONS: Final = 4
# Seconds after which no further problem is begun.
_BUDGET: Final = 15.0
# Operations of a problem that is judged several times.
_QUICK: Final = 1 << 23
# Ends of causes that a lower precision is, and how many problems have to be right under it, those that are worst.
_OF_PRECISION: Final = (" inputs", " products", " sums")
_WORST: Final = 10
_PLAN: Final = paired.Plan(warm_seconds=0.05, max_seconds=1.5, retakes=2)


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
    kernel, started = Kernel(given.kernel, signature=given.signature), psutil.Process().create_time()
    options = given.op, given.dtypes, given.device, given.problem, given.seed, given.time_limit
    found = _Judging(kernel, *options, started=started).found()
    show((json.dumps(found.to_dict()) if given.json else found.text) + "\n")
    return found.status


def check(function: Callable[..., Any], **options: Any) -> Judgement:
    """As ``pytest_gemm.check``."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    judging = _Judging(Kernel(":".join(filter(None, (module, name))), function=function), **options)
    inline = sys.platform != "linux" or cuda_has_started()
    try:
        pickle.dumps(function)
    except Exception:  # pickle raises whatever an object's own methods do
        inline = True  # no other process can find it
    return judging.found(inline=inline)


@dataclasses.dataclass
class _Judging:
    """Finds out what a kernel takes, judges it and times it.

    Attributes:
        kernel: without its form.
        op, dtypes, device: what the kernel takes; "" or empty to find out.
        problem: the only problem line; "" for all of the kernel's form.
        seed: of all values.
        limit: seconds of a call, after which the worker is ended; ``None``: 10, and 15 of a first call, or 90 where
            it may compile.
        started: since when seconds count, by ``time.time()``.
        worker: the process of the kernel.
        pytorch: that of PyTorch's own product, which a kernel's module cannot patch.

    Raises:
        ValueError: for an unknown dtype, a limit that is not above 0, or a line that is no problem.
    """

    kernel: Kernel
    op: str = ""
    dtypes: Sequence[str] = ()
    device: str = ""
    problem: str = ""
    seed: int = 0
    limit: float | None = None
    started: float = dataclasses.field(default_factory=time.time)
    worker: Process | Inline = dataclasses.field(init=False)
    pytorch: Process | Inline = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Check what a user writes."""
        if isinstance(self.dtypes, str):  # as the option has them
            self.dtypes = tuple(filter(None, self.dtypes.split(",")))
        if unknown := [name for name in self.dtypes if name not in TRIED]:
            raise ValueError(f"--dtypes={','.join(self.dtypes)}: unknown {unknown[0]!r}; known: {' '.join(TRIED)}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"--time-limit={self.limit:g}: give seconds above 0")
        if self.problem:
            Problem.parse(self.problem)

    def found(self, *, inline: bool = False) -> Judgement:
        """All that is found out of the kernel, in a process of its own or in this one.

        Raises:
            ValueError: when its first calls do not show what it takes.
        """
        if inline:
            self.worker = self.pytorch = Inline(CALLS)
            return self._found()
        with contextlib.closing(Keeper({}, cores(), (), CALLS, passive=False)) as keeper:
            first = 90.0 if self.kernel.may_compile else 15.0
            self.worker, self.pytorch = (Process(keeper, (self.limit or 10.0, self.limit or first)) for _ in range(2))
            with contextlib.closing(self.worker), contextlib.closing(self.pytorch):
                return self._found()

    def _found(self) -> Judgement:
        with self.worker.watch(Activity(CaseId("judge", ""), Phase.COMPILE)):
            calls = FirstCalls(self.kernel, Said(self.op, self.dtypes, self.device), self.worker)
            first = calls.best()
            found = calls.takes(first)
        kernel = dataclasses.replace(self.kernel, form=first.form)
        name, own = kernel.short.replace(".", "-"), [dtype.partition("-")[0] for dtype in found.dtypes]
        backend = KernelBackend(name, kernel, own, devices=(first.device,))
        problems = [Problem.parse(self.problem)] if self.problem else problems_for(found, first.form)
        if first.died is None:
            self._judge_all(found, backend, problems)
        else:  # it has no end, or ends its process, in any call
            problem = problems[0].resized(dict(zip("mnk", first.size[-3:], strict=True)))
            status = Status.TIMED_OUT if first.died.limit else Status.CRASHED
            one = Outcome(CaseId(name, problem.line), "ones", self.seed, status, first.died.reason)
            found.outcomes = [_readable(dataclasses.replace(one, details=first.died.details, kernels=(name,)))]
            found.not_judged = [one.line for one in problems]
        found.seconds.setdefault("first verdict", time.time() - self.started)
        found.seconds["judged"] = time.time() - self.started
        found.findings = grouping.findings(found.outcomes)
        self._arithmetic(found, backend)
        self._speed(found, backend)
        found.seconds["in all"] = time.time() - self.started
        return found

    # -- whether it is right, with which arithmetic, and how fast

    def _judge_all(self, found: Judgement, backend: KernelBackend, problems: Sequence[Problem]) -> None:
        """Judge problems, until they have taken too long or the worker has ended too often."""
        end, deaths = time.monotonic() + _BUDGET, self.worker.deaths + DEATHS
        for number, problem in enumerate(problems):
            hangs = any(one.status is Status.TIMED_OUT for one in found.outcomes)
            if hangs or time.monotonic() > end or self.worker.deaths >= deaths:
                found.not_judged = [one.line for one in problems[number:]]
                return
            outcomes = self._outcomes(backend, problem)
            if any(one.code == "not-deterministic" for one in outcomes):
                found.deterministic, backend.deterministic = False, False
                outcomes = self._outcomes(backend, problem)
            found.deterministic &= all(one.cause not in repeated.NAMES for one in outcomes)
            found.seconds.setdefault("first verdict", time.time() - self.started)
            found.outcomes += map(_readable, outcomes)
            for one in outcomes:
                if one.status is Status.UNSUPPORTED and one.reason is not None:
                    found.refused.setdefault(one.reason.text, []).append(one.problem)

    @functools.cached_property
    def _judge(self) -> Judge:
        def worker(backend: Backend) -> Process | Inline:
            return self.worker if isinstance(backend, KernelBackend) else self.pytorch

        return Judge(
            lambda *of: known.eager_refusal(self._ledger)(*of),  # noqa: PLW0108  # the ledger is read on a failure
            statements=lambda *of: self._ledger.statements(*of),  # noqa: PLW0108  # see above
            workers=worker,
            beside=False,
        )

    @functools.cached_property  # a right kernel needs none
    def _ledger(self) -> Ledger:
        return Ledger.load(suite("conformance") / "known_failures.toml")

    def _outcomes(self, backend: KernelBackend, problem: Problem) -> list[Outcome]:
        distributions = distributions_for(problem)[:_DISTRIBUTIONS]
        # One thread: several wait for one another where the cores are busy.
        case = Case(backend, problem, distributions, self.seed, Device(backend.devices[0]), threads=1)
        made = self._judge.outcomes(case)
        if any(one.inherited for one in made):
            environment = known.environment_of(case)
            made = [known.inherited(one, problem, self._ledger, environment) for one in made]
        return [dataclasses.replace(one, case=dataclasses.replace(one.case, threads=0)) for one in made]

    def _arithmetic(self, found: Judgement, backend: KernelBackend) -> None:
        """The most accurate partial sums with which all is right: of what has failed, or of some long sums."""
        failed = [one for one in found.outcomes if one.status.is_failure and not one.inherited]
        causes = {one.cause if one.status is Status.INCORRECT else str(one.status) for one in failed}
        if any(cause and not cause.endswith(_OF_PRECISION) for cause in causes):
            return  # a crash is no arithmetic, and neither is a K tail
        failed.sort(key=lambda one: -(one.ratio or 0.0))
        lines = dict.fromkeys(one.problem for one in failed or found.passed)
        problems = [one for one in map(Problem.parse, lines) if one.dtypes.out.is_float]
        problems = [one for one in problems if one.shape.flops <= _QUICK] or problems
        tried = problems[:_WORST] if failed else sorted(problems, key=lambda one: one.shape.k)[-3:]
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
        quick = {one.problem for one in found.passed if one.seconds.run < (self.limit or 10.0) / 100}
        problems = [one for one in map(Problem.parse, quick) if str(one.dtypes) == found.dtypes[0]]
        why = [self._timed(found, backend, one) for one in sorted(problems, key=lambda one: one.shape.flops)[-2:]]
        found.findings = grouping.findings(found.outcomes)
        found.untimed = "" if found.speed else "; ".join(dict.fromkeys(why)) or "each call takes too long"

    def _timed(self, found: Judgement, backend: KernelBackend, problem: Problem) -> str:
        """Time the kernel beside ATen, in interleaved blocks of one process.

        Returns:
            Why it was not timed, "" where it was; a kernel that is wrong then has another outcome.
        """
        worker, device = self.worker, Device(backend.devices[0])
        case = Case(backend, problem, ("rand",), self.seed, device)
        aten = dataclasses.replace(case, backend=AtenBackend())
        given = tensors.make(problem, "rand", self.seed, device)
        try:
            with worker.watch(Activity(case.id(), Phase.TIME)):
                number, beside = [worker.prepare(one.job(), given).number for one in (case, aten)]
                kept = Kept(case, worker, number, worker.run(number, given, How(Phase.TIME)))
                kept.keep(beside, given)
            readings = kept.window(_PLAN, is_looked_at=True)
            reason = kept.wrong(self._judge, "rand")
            kept.drop()
        except (Unsupported, Died, Thrown) as error:
            return str(error)
        except Misconduct as error:
            reason = error.reason
        if reason is not None:
            wrong = Outcome(case.id(), "rand", self.seed, Status.INCORRECT, reason, kernels=(backend.name,))
            found.outcomes.append(wrong)
            return "it is not right"
        blocks = range(0, len(readings.subject), 2)
        ratios = [sum(readings.subject[i : i + 2]) / sum(readings.comparator[i : i + 2]) for i in blocks]
        low, middle, high = statistics.quantiles(ratios, n=4)
        own, atens = map(statistics.median, (readings.subject, readings.comparator))
        found.speed.append(Speed(problem.line, own, atens, middle, low, high, readings.disturbed))
        return ""


def _readable(one: Outcome) -> Outcome:
    """An outcome without this package's frames in its details, and with the remedy of this command."""
    kept = [line for line in one.details.splitlines() if f"{os.sep}pytest_gemm{os.sep}" not in line]
    remedy = "--time-limit=SECONDS gives it more" if one.status is Status.TIMED_OUT else ""
    reason = one.reason and dataclasses.replace(one.reason, remedy=remedy)
    return dataclasses.replace(one, details="\n".join(kept), reason=reason)
