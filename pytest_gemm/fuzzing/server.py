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
What a judge was doing when it died stands in its diary (``watch.py``), and its limits are those of every test.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pytest_gemm.api.protocols import Backend
from pytest_gemm.case_id import CaseId
from pytest_gemm.failures.text import Rerun
from pytest_gemm.isolation.journal import Words, death
from pytest_gemm.isolation.worker import Death, Keeper, Service
from pytest_gemm.outcome import Activity, Outcome, Phase, Reason, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import state

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.fuzzing.strategies import Trial
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.ledger.entry import Environment


# The tests that run a trial again, and under whose names the ledger is asked.
PRODUCT: Final = "test_product"
PROPERTY: Final = "test_properties"


class Elsewhere:
    """Judges trials in a process of its own, and starts another one when that is gone.

    Args:
        config: what the run was asked for.
    """

    def __init__(self, config: GemmConfig) -> None:
        self._config = config
        self._keeper = Keeper(config, _trial, eager=state.eager_is_safe(config.ledger))

    @property
    def deaths(self) -> int:
        """How many processes have ended in the middle of a trial."""
        return self._keeper.deaths

    def judge(self, backend: Backend, trial: Trial, rerun: Rerun | None = None) -> list[Outcome]:
        """The outcomes of a trial, as the ledger leaves them; the last one may be the death of the process.

        Args:
            backend: whose kernels they are.
            trial: what to judge.
            rerun: how to run it again; with it, what fails is kept in the folder of ``--gemm-artifacts``.

        Raises:
            RuntimeError: when there is nobody any more to judge.
        """
        request: dict[str, object] = {"backend": backend.name, "trial": trial.to_text()}
        if rerun is not None:
            request["rerun"] = dataclasses.astuple(rerun)
        outcomes, end = self._keeper.ask(request)
        return outcomes if end is None else [*outcomes, self._dead(backend, trial, end)]

    def _dead(self, backend: Backend, trial: Trial, end: Death) -> Outcome:
        """How the case ended that a process died with."""
        harness = Activity(CaseId(backend.name, trial.problems[0].line), Phase.HARNESS, seed=trial.seed)
        words = end.words or Words(activity=harness)
        outcome = death(words, end.status)
        details = "\n".join(filter(None, (outcome.details, end.said)))
        outcome = dataclasses.replace(outcome, test=PRODUCT, details=details)
        device = self._config.device_of(backend)
        env = state.environment_elsewhere(words.environment, device, self._config.threads)
        return state.explain([outcome], Problem.parse(outcome.problem), self._config.ledger, env)[0][0]

    def close(self) -> None:
        """End the processes."""
        self._keeper.close()


def _trial(service: Service, request: dict[str, Any]) -> Iterator[Outcome]:
    """The outcomes of a trial."""
    from pytest_gemm.fuzzing.strategies import Trial

    config, judge = service.config, service.judge
    backend, trial = config.registry[request["backend"]], Trial.from_text(request["trial"])
    keep = functools.partial(_keep_evidence, config, judge, request.get("rerun"))
    return judged(config, judge, backend, trial, service.diary.open_call, keep)


def _keep_evidence(config: GemmConfig, judge: Judge, rerun: list[Any] | None, case: Case) -> None:
    """Write what failed of a case to the folder of artifacts, where that is wanted and can be done."""
    if config.artifacts is None or rerun is None or judge.has_lost(case.device):
        return
    from pytest_gemm.failures import artifacts

    test, options = rerun
    artifacts.save(config.artifacts, judge.evidence, case, Rerun(test, tuple(options)))


def judged(
    config: GemmConfig,
    judge: Judge,
    backend: Backend,
    trial: Trial,
    begin: Callable[[Environment], object] = lambda _: None,
    judged_case: Callable[[Case], object] = lambda _: None,
) -> Iterator[Outcome]:
    """The outcomes of a trial, as the ledger leaves them: its problems, then their properties if all is well.

    An exception of the harness itself is an outcome, too: fuzzing finds its defects as well.

    Args:
        config: what the run was asked for.
        judge: judges.
        backend: whose kernels they are.
        trial: what to judge.
        begin: is told of every problem where it is judged.
        judged_case: is told of every problem that has been judged, while the judge has its evidence.
    """
    from pytest_gemm.judging.case import Case

    device = config.device_of(backend)
    env = state.environment(device)

    def held(case: Case, choice: str = "") -> Outcome | None:
        return state.withheld(config.ledger, case, PRODUCT, choice)

    def explained(problem: Problem, test: str, judging: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
        try:
            for outcome in judging():
                yield state.explain([dataclasses.replace(outcome, test=test)], problem, config.ledger, env)[0][0]
        except Exception as error:  # in the oracle, in a distribution: what a kernel raises has become an outcome
            kind, first = type(error).__name__, next(iter(str(error).splitlines()), "")
            reason = Reason(f"harness-{kind}", f"{kind} in pytest-gemm itself: {first}", "please report it")
            crash = Outcome(
                CaseId(backend.name, problem.line), trial.distributions[0], trial.seed, Status.CRASHED, reason
            )
            yield dataclasses.replace(crash, test=test, details=traceback.format_exc()[-2000:])

    well = True
    for problem in trial.problems:
        begin(env)
        case = Case(backend, problem, trial.distributions, trial.seed, device, config.choices)
        if (withheld := held(case)) is not None:
            well = False
            yield withheld
            continue
        judging = functools.partial(judge.judge, case, withheld=functools.partial(held, case))
        for outcome in explained(problem, PRODUCT, judging):
            well = well and outcome.status in {Status.PASSED, Status.PRUNED}
            yield outcome
        judged_case(case)
    if well and config.choices in {"", "one", "winner"} and not judge.has_lost(device):
        problem = trial.problems[0]
        case = Case(backend, problem, trial.distributions, trial.seed, device, config.choices)
        begin(env)
        for outcome in explained(problem, PROPERTY, functools.partial(judge.relate, case)):
            if outcome.status is not Status.UNSUPPORTED:  # no property need say anything
                yield outcome
        judged_case(case)
