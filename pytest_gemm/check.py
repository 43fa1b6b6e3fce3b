"""The fixture ``gemm_check``: judge a case, consult the ledger, end the test accordingly."""

from __future__ import annotations

import dataclasses
import multiprocessing
import uuid
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from pytest_gemm import report, session
from pytest_gemm.backend import Backend, Caching
from pytest_gemm.config import GemmConfig, cores
from pytest_gemm.judge import Case, Judge, run_once
from pytest_gemm.ledger import LedgerUse
from pytest_gemm.outcome import Outcome, Reason, Status

__all__ = ["GemmCheck"]


class GemmCheck:
    """Judges cases for one test.

    Attributes:
        judged: plain data of all that was judged, for the report: ``outcomes`` and the ledger's ``use``.
    """

    def __init__(self, config: GemmConfig, judge: Judge, test: str, target: str) -> None:
        self._config = config
        self._judge = judge
        self._test = test
        self._target = target
        self._use = LedgerUse()
        self.judged: dict[str, Any] = {"outcomes": [], "use": {}}

    def __call__(self, case: Case) -> list[Outcome]:
        """Judge ``case`` with all its fillings.

        Returns:
            The outcomes, when all passed.

        Raises:
            pytest's own failure, skip or xfail exceptions: the test ends as *failed* when a case failed,
            as *unsupported* when the backend refused, as *known-failure* when the ledger explains
            every failure.
        """
        env = session.environment(case.device)
        held = self._config.ledger.applicable(case.backend.name, case.problem, self._test, env)
        if held is not None:
            reason = Reason("can-crash", f"not run, it can kill the process: {held.reason}")
            outcome = Outcome(case.backend.name, case.problem.line, "", case.seed, Status.KNOWN_FAILURE, reason)
            self._keep([dataclasses.replace(outcome, test=self._test, known_failure=held.id)], LedgerUse())
            pytest.xfail(f"{held.id}: {reason.text}")

        return self._finish(case, list(self._judge.judge(case)))

    def _finish(self, case: Case, judged: list[Outcome]) -> list[Outcome]:
        """Consult the ledger, keep the outcomes and end the test unless all is well."""
        env = session.environment(case.device)
        named = [dataclasses.replace(o, test=self._test) for o in judged]
        outcomes, use = session.explain(named, case.problem, self._config.ledger, env)
        self._keep(outcomes, use)
        self._end(case, outcomes)
        return outcomes

    def user_caches(self, case: Case) -> Backend:
        """A twin of the case's backend that compiles as a user's process does, with every cache on.

        Each call starts with empty caches.  Ends the test as *unsupported* for a backend that keeps none.
        """
        if isinstance(case.backend, Caching):
            return case.backend.with_user_caches(uuid.uuid4().hex)
        reason = Reason("no-caches", f"{case.backend.name} keeps nothing between two compiles")
        self._finish(case, [Outcome(case.backend.name, case.problem.line, "", case.seed, Status.UNSUPPORTED, reason)])
        raise AssertionError("an unsupported case ends its test")

    def run_elsewhere(self, case: Case) -> None:
        """Compile and run a case in a process of its own, for what it leaves in caches on disk."""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(run_once, case, self._config.threads).result()

    def _keep(self, outcomes: list[Outcome], use: LedgerUse) -> None:
        self.judged["outcomes"] += map(report.to_record, outcomes)
        self._use.merge(use.to_dict())
        self.judged["use"] = self._use.to_dict()

    def _end(self, case: Case, outcomes: list[Outcome]) -> None:
        rerun = report.Rerun(self._target, self._rerun_options())
        failed = [o for o in outcomes if o.status.is_failure]
        if self._config.artifacts is not None:
            session.save_artifacts(self._config.artifacts, self._judge.evidence, case, rerun)
        if failed:
            pytest.fail("\n".join(report.failure(o, rerun) for o in failed), pytrace=False)
        known = [o for o in outcomes if o.status is Status.KNOWN_FAILURE]
        if known:
            entries = ", ".join(dict.fromkeys(o.known_failure for o in known))
            pytest.xfail(f"{entries}: {known[0].reason.text if known[0].reason else ''}")
        for outcome in outcomes:
            if outcome.status is Status.UNSUPPORTED:
                pytest.skip(f"unsupported: {outcome.reason}")

    def _rerun_options(self) -> tuple[str, ...]:
        """What the run was given and what another run would otherwise choose differently."""
        options = []
        if self._config.level != "quick":
            options.append(f"--gemm-level={self._config.level}")
        if self._config.threads != cores():
            options.append(f"--gemm-threads={self._config.threads}")
        if self._config.ledger_given:
            options.append(f"--gemm-known-failures={self._config.ledger_given}")
        if self._config.device != "auto":
            options.append(f"--gemm-device={self._config.device}")
        return tuple(options)
