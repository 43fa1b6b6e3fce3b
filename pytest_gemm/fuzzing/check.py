"""Fuzzing as a test: drawn trials are judged like any case, and each defect is shown in its smallest form."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gemm.api.protocols import Backend
from pytest_gemm.config import effect
from pytest_gemm.config.config import GemmConfig, test_target
from pytest_gemm.config.options import suite
from pytest_gemm.core.case_id import CandidateSelection
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures.text import Rerun
from pytest_gemm.fuzzing import fuzzer as fuzz
from pytest_gemm.fuzzing.fuzzer import PRODUCT
from pytest_gemm.fuzzing.strategies import Trial
from pytest_gemm.record.writer import OfTest
from pytest_gemm.run import known
from pytest_gemm.run.progress import Display

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case, Judged
    from pytest_gemm.run.orchestrator import Orchestrator
    from pytest_gemm.worker.process import Workers

# Trials after which the processes are replaced: a compiler keeps something of every program it has made.
_TRIALS: Final = 300


class Trials:
    """Judges trials; the kernels' processes are replaced now and then.

    Args:
        config: of the run.
        workers: these processes; ``None`` where kernels run in this one.
    """

    def __init__(self, config: GemmConfig, workers: Workers | None) -> None:
        from pytest_gemm.judging.judge import Judge

        eager = known.eager_refusal(config.ledger)
        self._judge = Judge(eager, config.reference, statements=config.ledger.statements, workers=workers)
        self._config, self._workers, self._count = config, workers, 0

    def judge(self, backend: Backend, trial: Trial, rerun: Rerun | None = None) -> list[Outcome]:
        """The outcomes of a trial, as the ledger leaves them: one problem after the other.

        Args:
            backend: whose kernels they are.
            trial: what to judge.
            rerun: how to run it again; with it, what fails is kept in the failures folder of ``--gemm-output``.
        """
        from pytest_gemm.judging.case import Case
        from pytest_gemm.run.orchestrator import Orchestrator

        self._count += 1
        if self._workers is not None and self._count % _TRIALS == 0:
            self._workers.close()
        device, candidates = self._config.device_of(backend), CandidateSelection(self._config.wanted_candidates)
        run, outcomes = Orchestrator(self._config, self._judge, PRODUCT), list[Outcome]()
        for problem in trial.problems:
            case = Case(backend, problem, trial.distributions, trial.seed, device, candidates)
            if (withheld := run.withheld(case)) is not None:
                outcomes.append(withheld)
                continue
            found: list[Judged] = []
            for one in _with_own_defects(case, run):
                found += run.explained(case, [one])[0]
            outcomes += [one.outcome for one in found]
            if rerun is not None:
                run.keep(case, found, rerun)
        return outcomes


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


@dataclasses.dataclass
class FuzzCheck:
    """Fuzzes for one test.

    Attributes:
        config: what the run was asked for.
        trials: judges.
        display: where progress is shown.
        uncaptured: a block in which the terminal can be written to.
        here: folder that the command of a rerun is typed in.
        judged: the defects, for the report and the run record.
        lines: for the summary of the run.
    """

    config: GemmConfig
    trials: Trials
    display: Display
    uncaptured: Callable[[], AbstractContextManager[None]]
    here: Path
    judged: OfTest = dataclasses.field(default_factory=OfTest)
    lines: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, backend: Backend, seconds: float) -> None:
        """Fuzz ``backend`` for ``seconds``.

        Raises:
            pytest's own failure: with every defect, each in its smallest form and with its rerun line.
        """
        until = time.monotonic() + seconds

        def tell(found: fuzz.Findings, defect: fuzz.Defect | None) -> None:
            with self.uncaptured():
                if defect is not None:
                    self.display.line(fuzz.found_line(defect))
                    return
                left = until - time.monotonic()
                rest = f"{left:.0f} s of {seconds:g} s left" if left > 0 else "its time is up"
                counts = f"{found.trials} trials, {sum(found.cases.values())} cases, {len(found.defects)} defects"
                self.display.progress(f"fuzzing {found.backend}: {counts}; {rest}")

        fuzzer = fuzz.Fuzzer(
            backend,
            self.config.device_of(backend),
            lambda trial: self.trials.judge(backend, trial),
            seed=self.config.seed,
            ops=self.config.ops,
            tell=tell,
        )
        found = fuzzer.findings
        try:
            fuzzer.run(seconds)
        finally:  # what was found by then, also after Ctrl-C
            with self.uncaptured():
                self.display.clear()
            self.lines += fuzz.summary(found)
            outcomes = [dataclasses.replace(d.outcome, test=d.outcome.test or PRODUCT) for d in found.defects]
            self.judged.outcomes += outcomes
        if self.config.artifacts is not None:
            self._save(backend, found.defects)
        if not set(found.cases) - {Status.UNSUPPORTED} and "unjudged" not in self.config.allow:
            text = f"fuzzing judged no case of {backend.name}: it supports no problem that was drawn"
            pytest.fail(f"{text}; --gemm-allow=unjudged accepts that", pytrace=False)
        if found.defects:
            reruns = [self.rerun(defect).line(defect.whole) for defect in found.defects]
            self.judged.rerun = reruns[0]
            pytest.fail("\n".join(map(fuzz.failure, found.defects, reruns)), pytrace=False)

    def _save(self, backend: Backend, defects: list[fuzz.Defect]) -> None:
        """Keep the files of each failure in its smallest form, which is judged once more for them."""
        for defect in defects:
            trial = defect.trial
            if not any(one.status.is_failure for one in self.trials.judge(backend, trial, self.rerun(defect))):
                self.lines.append(f"  {trial.problems[0].line}: passed when it was run again for its artifacts")

    def rerun(self, defect: fuzz.Defect) -> Rerun:
        """How to run a defect's trial again: its problems in one process, with its distributions in their order."""
        options = effect.rerun_options(self.config, defect.outcome.backend, timed=False)
        options = (*options, f"--gemm-distributions={','.join(defect.trial.distributions)}")
        return Rerun(test_target(suite("conformance") / "test_products.py", PRODUCT, self.here), options)
