"""The fixture ``gemm_check``: judge a case, consult the ledger, end the test accordingly."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import unittest
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from pytest_gemm import effect, records
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.config import GemmConfig
from pytest_gemm.failures import artifacts, text
from pytest_gemm.isolation.journal import Diary
from pytest_gemm.judging.case import Case, Evidence
from pytest_gemm.judging.judge import Judge, run_once
from pytest_gemm.ledger.use import LedgerUse
from pytest_gemm.operands import tensors
from pytest_gemm.outcome import Outcome, Reason, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import state
from pytest_gemm.run.guarded import GuardedJudge
from pytest_gemm.text import described, first_line, kind_of, message


class GemmCheck:
    """Judges cases for one test.

    Attributes:
        judged: plain data of all that was judged, for the report: ``outcomes``, the ledger's ``use``, and what
            was ``lost``: why a file could not be written, by the option that asks for it.
    """

    def __init__(
        self,
        config: GemmConfig,
        judge: Judge,
        diary: Diary,
        test: str,
        target: str,
        guarded: GuardedJudge | None = None,
        *,
        timed: bool = False,
    ) -> None:
        self._guarded = guarded
        self._timed = timed
        self._backend = ""
        self._config = config
        self._judge = judge
        self._diary = diary
        self._test = test
        self._target = target
        self._use = LedgerUse()
        self._warm = ""
        self.judged: dict[str, Any] = {"outcomes": [], "use": {}, "lost": {}}

    def __call__(self, case: Case) -> list[Outcome]:
        """Judge ``case`` with all its distributions.

        Returns:
            The outcomes, when all passed.

        Raises:
            pytest's own failure, skip or xfail exceptions: the test ends as *failed* when a case failed,
            as *unsupported* when the backend refused, as *known-failure* when the ledger explains
            every failure.
        """

        def judging(done: frozenset[str]) -> Iterator[Outcome]:
            return self._judge.judge(case, done=done, withheld=lambda choice: self._withheld(case, choice))

        return self._check(case, judging)

    def properties(self, case: Case) -> list[Outcome]:
        """Ask of ``case`` what ``metamorphic`` has; the test ends as it does for a judgement."""

        def judging(done: frozenset[str]) -> Iterator[Outcome]:
            return iter(()) if "" in done else self._judge.relate(case)

        return self._check(case, judging)

    def _check(self, case: Case, judging: Callable[[frozenset[str]], Iterator[Outcome]]) -> list[Outcome]:
        """Judge in this way, unless the ledger forbids to run the case at all, and end the test."""
        self._backend = case.backend.name
        held = self._withheld(case, "")
        if held is not None:
            self._keep([dataclasses.replace(held, test=self._test)], LedgerUse())
            self._save_withheld(case, held)
            pytest.xfail(f"{held.known_failure}: {held.reason}")
        with _foreign(case):
            outcomes = self._judged(case, judging)
        return self.finish(case, outcomes)

    def _withheld(self, case: Case, choice: str) -> Outcome | None:
        """The outcome of a case, or of one candidate of it, that the ledger forbids to run; ``None`` of any other."""
        return state.withheld(self._config.ledger, case, self._test, choice)

    def _judged(self, case: Case, judging: Callable[[frozenset[str]], Iterator[Outcome]]) -> list[Outcome]:
        """The outcomes of a case: those that processes judged which ended with this test, then the rest."""
        earlier = self._diary.open_call(state.environment_of(case))
        outcomes = list(earlier.outcomes)
        if not earlier.complete and self._guarded is not None:
            outcomes = self._guarded.judge(case)
            # The other process keeps what it saw; the operands can be made again.
            failed = [o for o in outcomes if o.status.is_failure]
            made = {
                o.distribution: tensors.make(case.problem, o.distribution or case.distributions[0], case.seed)
                for o in failed
            }
            self._judge.evidence[:] = [(o, Evidence(made[o.distribution])) for o in failed]
            self._diary.close_call()
        elif not earlier.complete:
            for outcome in judging(earlier.choices):
                outcomes.append(outcome)
                self._diary.judged(outcome)
                if self._judge.has_lost(case.device):
                    self._diary.leave()
            self._diary.close_call()
        return outcomes

    def finish(self, case: Case, judged: list[Outcome]) -> list[Outcome]:
        """Consult the ledger, keep the outcomes and end the test unless all is well."""
        self._backend = case.backend.name
        named = [dataclasses.replace(o, test=self._test) for o in judged]
        outcomes, use = state.explain(named, case.problem, self._config.ledger, state.environment_of(case))
        self._keep(outcomes, use)
        self._end(case, outcomes)
        return outcomes

    def user_caches(self, case: Case) -> Case:
        """The case as a user's process compiles it, with every cache on.

        Each call starts with empty caches.  Ends the test as *unsupported* for a backend that keeps none.
        """
        if honours(case.backend, Capability.USER_CACHES):
            self._warm = "here"
            return dataclasses.replace(case, user_caches=uuid.uuid4().hex, choices="")
        reason = Reason("no-caches", f"{case.backend.name} keeps nothing between two compiles")
        self.finish(case, [Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, reason)])
        raise AssertionError("an unsupported case ends its test")

    def run_elsewhere(self, case: Case) -> None:
        """Compile and run a case in a process of its own, for what it leaves in caches on disk.

        A process that dies, or an exception in it, ends the test as a crashed case.
        """
        if self._withheld(case, "") is not None:
            return  # judging it will say so
        self._warm = "elsewhere"
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(run_once, case, self._config.threads).result()
        except BrokenProcessPool:
            reason = Reason("process-died", "the process that compiled and ran it first has died")
            details = ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of a backend, in the other process; its traceback has been kept as text
            kind = kind_of(error)
            reason = Reason(f"elsewhere-{kind}", f"{kind} in the process that ran it first: {first_line(error)}")
            details = message(error.__cause__ or error)[-2000:]
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
            if self._withheld(other, "") is None:
                try:
                    run_once(other, self._config.threads)
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
        return text.Rerun(self._target, effect.rerun_options(self._config, self._backend, timed=self._timed))

    def _end(self, case: Case, outcomes: list[Outcome]) -> None:
        rerun = self.rerun
        failed = [o for o in outcomes if o.status.is_failure]
        if not self._judge.has_lost(case.device):
            with _foreign(case):
                self._save(case, outcomes)
        if failed:
            pytest.fail("\n".join(text.failure(o, rerun) for o in failed), pytrace=False)
        known = [o for o in outcomes if o.status is Status.KNOWN_FAILURE]
        if known:
            entries = ", ".join(dict.fromkeys(o.known_failure for o in known))
            pytest.xfail(f"{entries}: {known[0].reason.text if known[0].reason else ''}")
        if any(o.status is Status.PASSED for o in outcomes):
            return
        for outcome in outcomes:
            if outcome.status is Status.UNSUPPORTED:
                pytest.skip(f"unsupported: {outcome.reason}")
            if outcome.status is Status.NOT_RUN:
                pytest.skip(f"not run: {outcome.reason}")
            if outcome.status is Status.PRUNED:
                pytest.skip(f"pruned: {outcome.candidate}: {outcome.reason}")

    def _save(self, case: Case, outcomes: list[Outcome]) -> None:
        """What was asked for on disk of those that failed, known failures included."""
        known = {_key(outcome): outcome.known_failure for outcome in outcomes}
        failed = [
            (dataclasses.replace(outcome, known_failure=known.get(_key(outcome), "")), evidence)
            for outcome, evidence in self._judge.evidence
        ]
        self._write(failed, case)

    def _save_withheld(self, case: Case, held: Outcome) -> None:
        """The script of a case that the ledger forbids to run; its operands are made for it."""
        folders = self._config.artifacts, self._config.defects
        if folders == (None, None) or not case.distributions:
            return
        evidence = Evidence(tensors.make(case.problem, case.distributions[0], case.seed, case.device))
        self._write([(held, evidence)], case)

    def _write(self, failed: Sequence[tuple[Outcome, Evidence]], case: Case) -> None:
        """The files of outcomes; what cannot be written changes no outcome."""
        lost = []
        if (folder := self._config.artifacts) is not None:
            lost.append((f"--gemm-artifacts={folder}", artifacts.save(folder, failed, case, self.rerun, self._warm)))
        if (folder := self._config.defects) is not None:
            for outcome, evidence in failed:
                if outcome.known_failure:
                    why = artifacts.save_defect(folder, outcome, evidence, case, self._warm)
                    lost.append((f"--gemm-defects={folder}", why))
        self.judged["lost"].update((option, why) for option, why in lost if why)


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


def _key(outcome: Outcome) -> tuple[object, ...]:
    """What tells the outcomes of a case apart."""
    return outcome.candidate, outcome.distribution, outcome.seed, outcome.reason
