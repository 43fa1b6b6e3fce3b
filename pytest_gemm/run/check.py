"""The fixture ``gemm_check``: judge a case, consult the ledger, end the test accordingly."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import unittest
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from pytest_gemm import effect, records
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.config import GemmConfig
from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.core.text import described, first_line, kind_of, message
from pytest_gemm.failures import text
from pytest_gemm.isolation.journal import Journal
from pytest_gemm.judging.case import Case, Evidence, Judged
from pytest_gemm.judging.judge import Judge, run_once
from pytest_gemm.ledger.ledger import LedgerUse
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import state
from pytest_gemm.run.guarded import GuardedJudge
from pytest_gemm.run.orchestrator import Orchestrator
from pytest_gemm.worker.messages import Thrown


@dataclasses.dataclass
class GemmCheck:
    """Judges cases for one test.

    Attributes:
        config: what the run was asked for.
        judge: judges.
        journal: what this process writes down.
        test: name of the test function.
        target: the test, as pytest's command line names it.
        guarded: judges with guard pages, where ``--gemm-guard`` asks for it.
        timed: the test is timed, too.
        judged: plain data of all that was judged, for the report: ``outcomes``, the ledger's ``use``, and what
            was ``lost``: why a file could not be written, by the option that asks for it.
    """

    config: GemmConfig
    judge: Judge
    journal: Journal
    test: str
    target: str
    guarded: GuardedJudge | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        self.judged: dict[str, Any] = {"outcomes": [], "use": {}, "lost": {}}
        self._run = Orchestrator(self.config, self.judge, self.test)
        self._use = LedgerUse()
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
            self._keep([held], LedgerUse())
            if self.config.output is not None and case.distributions:
                given = tensors.make(case.problem, case.distributions[0], case.seed, case.device)
                self._save(case, [Judged(held, Evidence(given))])
            pytest.xfail(f"{held.known_failure}: {held.reason}")
        with _foreign(case):
            found = self._judged(case)
        return self._finish(case, found)

    def _judged(self, case: Case) -> list[Judged]:
        """The outcomes of a case: those that processes judged which ended with this test, then the rest."""
        earlier = self.journal.open_call(state.environment_of(case))
        found = list(map(Judged, earlier.outcomes))
        if earlier.complete:
            return found
        if self.guarded is not None:
            found = [self._guarded_evidence(case, outcome) for outcome in self.guarded.judge(case)]
        else:
            for judged in self._run.judged(case, earlier.candidates):
                found.append(judged)
                self.journal.judged(judged.outcome)
                if self.judge.has_lost(case.device):
                    self.journal.leave()
        self.journal.close_call()
        return found

    @staticmethod
    def _guarded_evidence(case: Case, outcome: Outcome) -> Judged:
        """The outcome of another process, which keeps what it saw; the operands can be made again."""
        if not outcome.status.is_failure:
            return Judged(outcome)
        distribution = outcome.distribution or case.distributions[0]
        return Judged(outcome, Evidence(tensors.make(case.problem, distribution, case.seed)))

    def finish(self, case: Case, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Consult the ledger, keep the outcomes and end the test unless all is well."""
        self._backend = case.backend.name
        return self._finish(case, list(map(Judged, outcomes)))

    def _finish(self, case: Case, found: list[Judged]) -> list[Outcome]:
        found, use = self._run.explained(case, found)
        outcomes = [judged.outcome for judged in found]
        self._keep(outcomes, use)
        if not self.judge.has_lost(case.device):
            with _foreign(case):
                self._save(case, found)
        self._end(outcomes)
        return outcomes

    def user_caches(self, case: Case) -> Case:
        """The case as a user's process compiles it, with every cache on.

        Each call starts with empty caches.  Ends the test as *unsupported* for a backend that keeps none.
        """
        if honours(case.backend, Capability.USER_CACHES):
            self._warm = "here"
            return dataclasses.replace(case, user_caches=uuid.uuid4().hex, candidates=CandidateSelection())
        reason = Reason("no-caches", f"{case.backend.name} keeps nothing between two compiles")
        self.finish(case, [Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, reason)])
        raise AssertionError("an unsupported case ends its test")

    def run_in_worker(self, case: Case) -> None:
        """Compile and run a case in a process of its own, for what it leaves in caches on disk.

        A process that dies, or an exception in it, ends the test as a crashed case.
        """
        if self._run.withheld(case) is not None:
            return  # judging it will say so
        self._warm = "elsewhere"
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(run_once, case, self.config.threads).result()
        except BrokenProcessPool:
            reason = Reason("process-died", "the process that compiled and ran it first has died")
            details = ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a backend, in the other process; its traceback has been kept as text
            kind = kind_of(error)
            line, details = first_line(error), message(error.__cause__ or error)[-2000:]
            if isinstance(error, Thrown):
                kind, line, details = error.kind, error.line, error.details
            reason = Reason(f"worker-process-{kind}", f"{kind} in the process that ran it first: {line}")
        else:
            return
        crash = Outcome(case.id(), case.distributions[0], case.seed, Status.CRASHED, reason, details=details)
        self.finish(case, [crash])

    def run_before(self, case: Case, problems: Iterable[Problem]) -> None:
        """Compile and run other problems in this process, for what they leave in a compiler's memory.

        They are not judged, and what fails among them has tests of its own.
        """
        self._warm = "others"
        for problem in problems:
            other = dataclasses.replace(case, problem=problem)
            if self._run.withheld(other) is None:
                try:
                    run_once(other, self.config.threads)
                except KeyboardInterrupt:
                    raise
                except BaseException:  # of a compiler under test
                    pass

    def _keep(self, outcomes: list[Outcome], use: LedgerUse) -> None:
        self.judged["outcomes"] += map(records.to_record, outcomes)
        self._use.merge(use.to_dict())
        self.judged["use"] = self._use.to_dict()

    @property
    def rerun(self) -> text.Rerun:
        """How to run this test again, on the backend that it has last judged."""
        return text.Rerun(self.target, effect.rerun_options(self.config, self._backend, timed=self.timed))

    def _end(self, outcomes: list[Outcome]) -> None:
        rerun = self.rerun
        failed = [o for o in outcomes if o.status.is_failure]
        if failed:
            pytest.fail(text.failures(failed, rerun), pytrace=False)
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
        self.judged["lost"].update(self._run.keep(case, found, self.rerun, self._warm))


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
