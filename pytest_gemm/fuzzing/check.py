"""The fixture ``gemm_fuzz``: fuzz a backend, show what comes, and end the test with what is new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm import effect, records
from pytest_gemm.api.protocols import Backend
from pytest_gemm.case_id import CandidateSelection
from pytest_gemm.config import GemmConfig
from pytest_gemm.failures import artifacts
from pytest_gemm.failures import text as text_module
from pytest_gemm.fuzzing import fuzzer as fuzz
from pytest_gemm.fuzzing.server import PRODUCT, PROPERTY, TrialWorker
from pytest_gemm.fuzzing.strategies import Trial
from pytest_gemm.operands import tensors
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run.terminal import Display

_MODULES = {PRODUCT: "test_products", PROPERTY: "test_properties"}


class FuzzCheck:
    """Fuzzes for one test.

    Args:
        config: what the run was asked for.
        elsewhere: judges.
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
        elsewhere: TrialWorker,
        display: Display,
        uncaptured: Callable[[], AbstractContextManager[None]],
        here: Path,
    ) -> None:
        self._config = config
        self._elsewhere = elsewhere
        self._display = display
        self._uncaptured = uncaptured
        self._here = here
        self.judged: dict[str, Any] = {"outcomes": [], "use": {}, "lost": {}}
        self.lines: list[str] = []

    def __call__(self, backend: Backend, seconds: float) -> None:
        """Fuzz ``backend`` for ``seconds``.

        Raises:
            pytest's own failure: with every defect, each in its smallest form and with its rerun line.
        """
        fuzzer = fuzz.Fuzzer(
            backend,
            self._config.device_of(backend),
            lambda trial: self._elsewhere.judge(backend, trial),
            seed_=self._config.seed,
            ops=self._config.ops,
            store=fuzz.database(),
            tell=self._tell,
        )
        try:
            fuzzer.run(seconds)
        finally:  # what was found by then, also after Ctrl-C
            found = fuzzer.findings
            self.lines += fuzz.summary(found)
            outcomes = [dataclasses.replace(d.outcome, test=d.outcome.test or PRODUCT) for d in found.defects]
            self.judged["outcomes"] += map(records.to_record, outcomes)
        self._save(backend, found.defects)
        if not set(found.cases) - {Status.UNSUPPORTED} and "unjudged" not in self._config.allow:
            text = f"fuzzing judged no case of {backend.name}: it takes no problem that was drawn"
            pytest.fail(f"{text}; --gemm-allow=unjudged accepts that", pytrace=False)
        if found.defects:
            pytest.fail("\n".join(fuzz.failure(defect, self.rerun) for defect in found.defects), pytrace=False)

    def _save(self, backend: Backend, defects: Iterable[fuzz.Defect]) -> None:
        """What ``--gemm-output`` asks for, of each in its smallest form, which is judged once more for it."""
        folder = self._config.artifacts
        if folder is None:
            return
        for defect in defects:
            trial, rerun, deaths = defect.trial, self.rerun(defect), self._elsewhere.deaths
            outcomes = self._elsewhere.judge(backend, trial, rerun)
            if self._elsewhere.deaths > deaths:  # nothing is left of the result: what the process was given is
                self._save_dead(folder, backend, trial, outcomes[-1], rerun)
            elif not any(outcome.status.is_failure for outcome in outcomes):
                self.lines.append(f"  {trial.problems[0].line}: passed when it was run again for its artifacts")

    def _save_dead(self, folder: Path, backend: Backend, trial: Trial, last: Outcome, rerun: text_module.Rerun) -> None:
        """The same of a case that its process has died with."""
        from pytest_gemm.judging.case import Case, Evidence, Judged

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
                self._display.progress(
                    f"fuzzing {found.backend}: {found.trials} trials, {sum(found.cases.values())} cases, "
                    f"{len(found.defects)} defects"
                )

    def rerun(self, defect: fuzz.Defect) -> text_module.Rerun:
        """How to run a defect's trial again: its problems in one process, with its distributions in their order."""
        test = defect.outcome.test or PRODUCT
        options = effect.rerun_options(self._config, defect.outcome.backend, timed=False)
        if test == PRODUCT:
            options = (*options, f"--gemm-distributions={','.join(defect.trial.distributions)}")
        return text_module.Rerun(_target(test, self._here), options)


def _target(test: str, here: Path) -> str:
    """How to name a test of the conformance suite on pytest's command line."""
    spec = find_spec("pytest_gemm.conformance")
    assert spec is not None, "the conformance suite is part of the package"
    assert spec.origin is not None
    path = Path(spec.origin).parent / f"{_MODULES[test]}.py"
    if path.is_relative_to(here) and "site-packages" not in path.parts:
        return f"{path.relative_to(here).as_posix()}::{test}"
    return f"--pyargs pytest_gemm.conformance.{_MODULES[test]}::{test}"
