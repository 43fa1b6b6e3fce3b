"""The fixture ``gemm_check``: judge a case, consult the ledger, end the test accordingly."""

from __future__ import annotations

import contextlib
import dataclasses
import unittest
import uuid
from collections.abc import Iterable, Iterator, Sequence

import pytest

from pytest_gemm.api.request import Capability, honours
from pytest_gemm.config import effect
from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import Misconduct, Outcome, Reason, Status
from pytest_gemm.core.text import described
from pytest_gemm.failures import findings, text
from pytest_gemm.judging.case import Case, Evidence, Judged
from pytest_gemm.judging.judge import Judge, run_once
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import Use, merge_use
from pytest_gemm.record.writer import OfTest
from pytest_gemm.run.guarded import GuardedJudge
from pytest_gemm.run.orchestrator import Orchestrator
from pytest_gemm.worker.messages import Died, Thrown
from pytest_gemm.worker.process import Workers


@dataclasses.dataclass
class GemmCheck:
    """Judges cases for one test.

    Attributes:
        config: what the run was asked for.
        judge: judges.
        test: name of the test function.
        target: the test, as pytest's command line names it.
        workers: the processes of the kernels; ``None`` where kernels run in this one.
        guarded: judges with guard pages, where ``--gemm-guard`` asks for it.
        timed: the test is timed, too.
        judged: what the test judged so far.
    """

    config: GemmConfig
    judge: Judge
    test: str
    target: str
    workers: Workers | None = None
    guarded: GuardedJudge | None = None
    timed: bool = False
    judged: OfTest = dataclasses.field(default_factory=OfTest)

    def __post_init__(self) -> None:
        self._run = Orchestrator(self.config, self.judge, self.test)
        self._backend = ""
        self._warm = ""

    def __call__(self, case: Case) -> list[Outcome]:
        """Judge ``case`` with all its distributions.

        Returns:
            The outcomes, when all passed.

        Raises:
            pytest's own failure, skip or xfail exceptions: the test ends as *failed* when a case failed,
            as *unsupported* when the backend refused, as *known-failure* when the ledger explains
            every failure.
        """
        self._backend = case.backend.name
        held = self._run.withheld(case)
        if held is not None:
            held = dataclasses.replace(held, test=self.test)
            self._keep([held], {})
            if self.config.output is not None and case.distributions:
                given = tensors.make(case.problem, case.distributions[0], case.seed, case.device)
                self._save(case, [Judged(held, Evidence(given))])
            pytest.xfail(f"{held.known_failure}: {held.reason}")
        with _foreign(case):
            judgements = list(self._run.judged(case) if self.guarded is None else self.guarded.judge(case))
            judgements = self._run.repeated(case, judgements)
        return self._finish(case, judgements)

    def finish(self, case: Case, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Consult the ledger, keep the outcomes and end the test unless all is well."""
        self._backend = case.backend.name
        return self._finish(case, list(map(Judged, outcomes)))

    def _finish(self, case: Case, found: list[Judged]) -> list[Outcome]:
        found, use = self._run.explained(case, found)
        outcomes = [judged.outcome for judged in found]
        self._keep(outcomes, use)
        with _foreign(case):
            self._save(case, found)
        self._end(outcomes)
        return outcomes

    def user_caches(self, case: Case) -> Case:
        """The case as a user's process compiles it, with every cache on.

        Each call starts with empty caches.  Ends the test as *unsupported* for a backend that keeps none.
        """
        self._claims(case, Capability.USER_CACHES, "no-caches", "cache tests need a backend that compiles")
        self._warm = "here"
        return dataclasses.replace(case, user_caches=uuid.uuid4().hex, candidates=CandidateSelection())

    def by_threads(self, case: Case) -> Case:
        """The case of a backend that claims ``Capability.THREADS``; ends the test as *unsupported* for another one."""
        text = f"{case.backend.name} does not claim that several threads may call it"
        self._claims(case, Capability.THREADS, "no-threads", text)
        return case

    def _claims(self, case: Case, capability: Capability, code: str, text: str) -> None:
        if not honours(case.backend, capability):
            self.finish(case, [Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, Reason(code, text))])
            raise AssertionError("an unsupported case ends its test")

    def run_in_worker(self, case: Case) -> None:
        """Compile and run a case in a process of its own, for what it leaves in caches on disk.

        A process that dies, or an exception in it, ends the test as a crashed case.
        """
        if self._run.withheld(case) is not None:
            return  # judging it will say so
        self._warm = "elsewhere"
        if self.workers is None:
            reason = Reason("no-process", "kernels run in pytest's process, and this test needs two")
            self.finish(case, [Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, reason)])
            return
        with contextlib.closing(self.workers.alone()) as worker:
            try:
                run_once(worker, case)
                return
            except Died as error:
                reason, details = error.reason, error.details
            except Misconduct as error:
                reason, details = error.reason, ""
            except Thrown as error:
                text = f"{error.kind} in the process that ran it first: {error.line}"
                reason, details = Reason(f"worker-process-{error.kind}", text), error.details
        crash = Outcome(case.id(), case.distributions[0], case.seed, Status.CRASHED, reason, details=details)
        self.finish(case, [crash])

    def run_before(self, case: Case, problems: Iterable[Problem]) -> None:
        """Compile and run other problems where this one will run, for what they leave in a compiler's memory.

        They are not judged, and what fails among them has tests of its own.
        """
        self._warm = "others"
        for problem in problems:
            other = dataclasses.replace(case, problem=problem)
            if self._run.withheld(other) is None:
                with contextlib.suppress(Thrown, Died, Misconduct):
                    run_once(self.judge.worker_of(case.backend), other)

    def _keep(self, outcomes: list[Outcome], use: Use) -> None:
        self.judged.outcomes += outcomes
        merge_use(self.judged.use, use)

    @property
    def rerun(self) -> text.Rerun:
        """How to run this test again, on the backend that it has last judged."""
        return text.Rerun(self.target, effect.rerun_options(self.config, self._backend, timed=self.timed))

    def _end(self, outcomes: list[Outcome]) -> None:
        rerun = self.rerun
        failed = [o for o in outcomes if o.status.is_failure]
        if failed:
            found = findings.findings(outcomes)
            self.judged.rerun = rerun.line(found[0].simplest)
            pytest.fail("\n".join(findings.text(one, rerun.line(one.simplest)) for one in found), pytrace=False)
        known = [o for o in outcomes if o.status is Status.KNOWN_FAILURE]
        if known:
            entries = ", ".join(dict.fromkeys(o.known_failure for o in known))
            pytest.xfail(f"{entries}: {known[0].reason.text if known[0].reason else ''}")
        if any(o.status is Status.PASSED for o in outcomes):
            return
        left_out = {Status.UNSUPPORTED: "unsupported", Status.NOT_RUN: "not run", Status.PRUNED: "pruned"}
        for outcome in outcomes:
            if outcome.status in left_out:
                candidate = f"{outcome.candidate}: " if outcome.status is Status.PRUNED else ""
                pytest.skip(f"{left_out[outcome.status]}: {candidate}{outcome.reason}")

    def _save(self, case: Case, found: Sequence[Judged]) -> None:
        """Write the files of those that failed, known failures included."""
        self.judged.lost.update(self._run.keep(case, found, self.rerun, self._warm))


@contextlib.contextmanager
def _foreign(case: Case) -> Iterator[None]:
    """The block calls a backend, which cannot end the test: a skip, an exit and the like become errors of the test."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, (pytest.exit.Exception, unittest.SkipTest)):
            raise
        raise RuntimeError(f"the code of {case.backend.name} raised {described(error)}") from None
