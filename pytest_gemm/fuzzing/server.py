"""Judgements in another process, which may die with a kernel: trials of fuzzing, and cases at guard pages.

::

    this process                 keeper                          judge
    asks, reports                forks one judge after another   compiles, runs, compares
          |  a request, as a line of JSON                          |
          |------------------------------------------------------->|
          |<------------------------------- outcomes, line by line |
          |<---- "it died, with this status" --|   (if it does)

All three share one socket.  The keeper has imported torch and has computed nothing, so a new judge costs a fork, not an
interpreter; and it is forked before anybody has asked for a CUDA device, which no child could use any more otherwise.
Being a fork, a judge has every backend that was registered, also a function of a conftest.py that no other interpreter
could import.
What a judge was doing when it died stands in its journal (``isolation.journal``).  Its limits are those of every test.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Backend
from pytest_gemm.case_id import CandidateSelection, CaseId
from pytest_gemm.failures.text import Rerun
from pytest_gemm.isolation.journal import Position, death
from pytest_gemm.isolation.worker import Death, Service, Worker
from pytest_gemm.outcome import Activity, Outcome, Phase, Reason, Status
from pytest_gemm.run import state

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.fuzzing.strategies import Trial
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.ledger.entry import Environment


# The tests that run a trial again, and under whose names the ledger is asked.
PRODUCT: Final = "test_product"
PROPERTY: Final = "test_properties"


class TrialWorker:
    """Judges trials in a process of its own, and starts another one when that is gone.

    Args:
        config: what the run was asked for.
    """

    def __init__(self, config: GemmConfig) -> None:
        self._config = config
        self._keeper = Worker(config, _trial, eager=state.eager_refusal(config.ledger))

    @property
    def deaths(self) -> int:
        """How many processes have ended in the middle of a trial."""
        return self._keeper.deaths

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
        outcomes, end = self._keeper.ask(request)
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

    def close(self) -> None:
        """End the processes."""
        self._keeper.close()


def _trial(service: Service, request: dict[str, Any]) -> Iterator[Outcome]:
    """The outcomes of a trial."""
    from pytest_gemm.fuzzing.strategies import Trial

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
    """The outcomes of a trial, as the ledger leaves them: its problems, then their properties if all is well.

    Args:
        config: of the run.
        judge: judges.
        backend: whose kernels they are.
        trial: what to judge.
        begin: is called with the environment before each problem is judged.
        rerun: how to run it again; with it, what fails is kept in the failures folder of ``--gemm-output``.
    """
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.run.orchestrator import Orchestrator

    device, candidates = config.device_of(backend), CandidateSelection(config.choices)
    well = True

    def explained(test: str, case: Case, judging: Callable[[Orchestrator], Iterable[Judged]]) -> Iterator[Outcome]:
        run, found = Orchestrator(config, judge, test), list[Judged]()
        begin(state.environment(device))
        for one in _with_own_defects(case, lambda: judging(run)):
            found += run.explained(case, [one])[0]
            yield found[-1].outcome
        if rerun is not None and not judge.has_lost(device):
            run.keep(case, found, rerun)

    for problem in trial.problems:
        case = Case(backend, problem, trial.distributions, trial.seed, device, candidates)
        held = state.withheld(config.ledger, case, PRODUCT)
        for outcome in [held] if held else explained(PRODUCT, case, lambda run, case=case: run.judged(case)):  # type: ignore[misc]  # bound early on purpose
            well = well and outcome.status in {Status.PASSED, Status.PRUNED}
            yield outcome
    if well and candidates.by_backend and not judge.has_lost(device):
        case = Case(backend, trial.problems[0], trial.distributions, trial.seed, device, candidates)
        for outcome in explained(PROPERTY, case, lambda run: map(Judged, run.judge.relate(case))):
            if outcome.status is not Status.UNSUPPORTED:  # no property need say anything
                yield outcome


def _with_own_defects(case: Case, judging: Callable[[], Iterable[Judged]]) -> Iterator[Judged]:
    """What is judged; an exception of the harness itself is an outcome, too: fuzzing finds its defects as well."""
    from pytest_gemm.judging.case import Judged

    try:
        yield from judging()
    except Exception as error:  # in the oracle, in a distribution: what a kernel raises has become an outcome
        kind, first = type(error).__name__, next(iter(str(error).splitlines()), "")
        reason = Reason(f"harness-{kind}", f"{kind} in pytest-gemm itself: {first}", "please report it")
        details = traceback.format_exc()[-2000:]
        crash = Outcome(case.id(), case.distributions[0], case.seed, Status.CRASHED, reason, details=details)
        yield Judged(crash)
