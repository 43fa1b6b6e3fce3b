"""Fuzzing in a test: judge each trial in a process that may die of it, show what comes, and fail with what is new.

::

    this process                 keeper                          judge
    asks, reports                forks one judge after another   compiles, runs, compares
          |  a request, as a line of JSON                          |
          |------------------------------------------------------->|
          |<------------------------------- outcomes, line by line |
          |<---- "it died, with this status" --|   (if it does)

All three share one socket, see ``isolation.worker``.  The keeper has imported torch and has computed nothing, so a new
judge costs a fork, not an interpreter.  It is forked before this process asks for a CUDA device, which no child could
use any more otherwise.  Being a fork, a judge has every backend that was registered, also a function of a conftest.py
that no other interpreter could import.  What a judge was doing when it died stands in its journal
(``isolation.journal``).  Its limits are those of every test.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm import effect, records
from pytest_gemm.api.protocols import Backend
from pytest_gemm.config import GemmConfig, suite, test_target
from pytest_gemm.core.case_id import CandidateSelection, CaseId
from pytest_gemm.core.outcome import Activity, Outcome, Phase, Reason, Status
from pytest_gemm.failures.text import Rerun
from pytest_gemm.fuzzing import fuzzer as fuzz
from pytest_gemm.fuzzing.fuzzer import PRODUCT
from pytest_gemm.fuzzing.strategies import Trial
from pytest_gemm.isolation.journal import Position, death
from pytest_gemm.isolation.worker import Death, Service, Worker
from pytest_gemm.problem.axes import HUGE
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import state
from pytest_gemm.run.progress import Display

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.ledger.entry import Environment
    from pytest_gemm.run.orchestrator import Orchestrator


class TrialWorker(Worker):
    """Judges trials in a process of its own, and starts another one when that is gone.

    Args:
        config: of the run.
    """

    def __init__(self, config: GemmConfig) -> None:
        super().__init__(config, _trial, eager=state.eager_refusal(config.ledger))
        self._config = config

    def judge(self, backend: Backend, trial: Trial, rerun: Rerun | None = None) -> list[Outcome]:
        """The outcomes of a trial, as the ledger leaves them; the last one may be the death of the process.

        Args:
            backend: whose kernels they are.
            trial: what to judge.
            rerun: how to run it again; with it, what fails is kept in the failures folder of ``--gemm-output``.

        Raises:
            RuntimeError: when no process is left that can judge.
        """
        request: dict[str, object] = {"backend": backend.name, "trial": trial.to_text()}
        if rerun is not None:
            request["rerun"] = dataclasses.astuple(rerun)
        outcomes, end = self.ask(request)
        return outcomes if end is None else [*outcomes, self._dead(backend, trial, end)]

    def _dead(self, backend: Backend, trial: Trial, end: Death) -> Outcome:
        """How the case ended that a process died with."""
        harness = Activity(CaseId(backend.name, trial.problems[0].line), Phase.HARNESS, seed=trial.seed)
        position = end.position or Position(activity=harness)
        outcome = death(position, end.status)
        details = "\n".join(filter(None, (outcome.details, end.said)))
        outcome = dataclasses.replace(outcome, test=PRODUCT, details=details)
        devices = {backend.name: self._config.device_of(backend)}
        given = (position.environment, self._config.ledger, devices, self._config.threads)
        return state.explain_for_worker([outcome], *given)[0][0]


def _trial(service: Service, request: dict[str, Any]) -> Iterator[Outcome]:
    """The outcomes of a trial."""
    backend, trial = service.config.registry[request["backend"]], Trial.from_text(request["trial"])
    rerun = Rerun(request["rerun"][0], tuple(request["rerun"][1])) if "rerun" in request else None
    return judged(service.config, service.judge, backend, trial, service.journal.open_call, rerun)


def judged(
    config: GemmConfig,
    judge: Judge,
    backend: Backend,
    trial: Trial,
    begin: Callable[[Environment], object] = lambda _: None,
    rerun: Rerun | None = None,
) -> Iterator[Outcome]:
    """The outcomes of a trial, as the ledger leaves them: one problem after the other.

    Args:
        config: of the run.
        judge: judges.
        backend: whose kernels they are.
        trial: what to judge.
        begin: is called with the environment before each problem is judged.
        rerun: how to run it again; with it, what fails is kept in the failures folder of ``--gemm-output``.
    """
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.orchestrator import Orchestrator

    device, candidates = config.device_of(backend), CandidateSelection(config.wanted_candidates)
    cases = [Case(backend, problem, trial.distributions, trial.seed, device, candidates) for problem in trial.problems]
    run = Orchestrator(config, judge, PRODUCT)
    for case in cases:
        if (held := run.withheld(case)) is not None:
            yield held
            continue
        found: list[Judged] = []
        begin(state.environment(device))
        for one in _with_own_defects(case, run):
            found += run.explained(case, [one])[0]
            yield found[-1].outcome
        if rerun is not None and not judge.has_lost(device):
            run.keep(case, found, rerun)


def _with_own_defects(case: Case, run: Orchestrator) -> Iterator[Judged]:
    """What is judged; an exception of the harness itself is an outcome, too: fuzzing finds its defects as well."""
    from pytest_gemm.judging.case import Judged

    try:
        yield from run.judged(case)
    except Exception as error:  # in the oracle, in a distribution: what a kernel raises has become an outcome
        kind, first = type(error).__name__, next(iter(str(error).splitlines()), "")
        reason = Reason(f"harness-{kind}", f"{kind} in pytest-gemm itself: {first}", "please report it")
        details = traceback.format_exc()[-2000:]
        crash = Outcome(case.id(), case.distributions[0], case.seed, Status.CRASHED, reason, details=details)
        yield Judged(crash)


class FuzzCheck:
    """Fuzzes for one test.

    Args:
        config: what the run was asked for.
        worker: judges.
        display: where progress is shown.
        uncaptured: a block in which the terminal can be written to.
        here: folder that the command of a rerun is typed in.

    Attributes:
        judged: plain data of the defects, for the report and the run record.
        lines: for the summary of the run.
    """

    def __init__(
        self,
        config: GemmConfig,
        worker: TrialWorker,
        display: Display,
        uncaptured: Callable[[], AbstractContextManager[None]],
        here: Path,
    ) -> None:
        self._config = config
        self._worker = worker
        self._display = display
        self._uncaptured = uncaptured
        self._here = here
        self._seconds = self._until = 0.0
        self.judged: dict[str, Any] = {"outcomes": [], "use": {}, "lost": {}}
        self.lines: list[str] = []

    def __call__(self, backend: Backend, seconds: float) -> None:
        """Fuzz ``backend`` for ``seconds``.

        Raises:
            pytest's own failure: with every defect, each in its smallest form and with its rerun line.
        """
        self._seconds, self._until = seconds, time.monotonic() + seconds
        fuzzer = fuzz.Fuzzer(
            backend,
            self._config.device_of(backend),
            lambda trial: self._worker.judge(backend, trial),
            seed_=self._config.seed,
            ops=self._config.ops,
            huge=self._config.level == HUGE,
            store=fuzz.database(),
            tell=self._tell,
        )
        try:
            fuzzer.run(seconds)
        finally:  # what was found by then, also after Ctrl-C
            with self._uncaptured():
                self._display.clear()
            found = fuzzer.findings
            self.lines += fuzz.summary(found)
            outcomes = [dataclasses.replace(d.outcome, test=d.outcome.test or PRODUCT) for d in found.defects]
            self.judged["outcomes"] += map(records.to_record, outcomes)
        self._save(backend, found.defects)
        if not set(found.cases) - {Status.UNSUPPORTED} and "unjudged" not in self._config.allow:
            text = f"fuzzing judged no case of {backend.name}: it supports no problem that was drawn"
            pytest.fail(f"{text}; --gemm-allow=unjudged accepts that", pytrace=False)
        if found.defects:
            pytest.fail("\n".join(fuzz.failure(defect, self.rerun) for defect in found.defects), pytrace=False)

    def _save(self, backend: Backend, defects: Iterable[fuzz.Defect]) -> None:
        """What ``--gemm-output`` asks for, of each in its smallest form, which is judged once more for it."""
        folder = self._config.artifacts
        if folder is None:
            return
        for defect in defects:
            trial, rerun, deaths = defect.trial, self.rerun(defect), self._worker.deaths
            outcomes = self._worker.judge(backend, trial, rerun)
            if self._worker.deaths > deaths:  # nothing is left of the result: what the process was given is
                self._save_dead(folder, backend, trial, outcomes[-1], rerun)
            elif not any(outcome.status.is_failure for outcome in outcomes):
                self.lines.append(f"  {trial.problems[0].line}: passed when it was run again for its artifacts")

    def _save_dead(self, folder: Path, backend: Backend, trial: Trial, last: Outcome, rerun: Rerun) -> None:
        """The same of a case that its process has died with."""
        from pytest_gemm.failures import artifacts
        from pytest_gemm.judging.case import Case, Evidence, Judged
        from pytest_gemm.operands import tensors

        problem, distribution = Problem.parse(last.problem), last.distribution or trial.distributions[0]
        device, candidates = self._config.device_of(backend), CandidateSelection(last.candidate)
        case = Case(backend, problem, (distribution,), trial.seed, device, candidates)
        evidence = Evidence(tensors.make(problem, distribution, trial.seed, case.device))
        self.judged["lost"][str(folder)] = artifacts.save(folder, [Judged(last, evidence)], case, rerun)

    def _tell(self, found: fuzz.Findings, defect: fuzz.Defect | None) -> None:
        with self._uncaptured():
            if defect is not None:
                self._display.line(fuzz.found_line(defect))
            else:
                left = self._until - time.monotonic()
                rest = f"{left:.0f} s of {self._seconds:g} s left" if left > 0 else "its time is up"
                self._display.progress(
                    f"fuzzing {found.backend}: {found.trials} trials, {sum(found.cases.values())} cases, "
                    f"{len(found.defects)} defects; {rest}"
                )

    def rerun(self, defect: fuzz.Defect) -> Rerun:
        """How to run a defect's trial again: its problems in one process, with its distributions in their order."""
        options = effect.rerun_options(self._config, defect.outcome.backend, timed=False)
        options = (*options, f"--gemm-distributions={','.join(defect.trial.distributions)}")
        return Rerun(test_target(suite("conformance") / "test_products.py", PRODUCT, self._here), options)
