"""The fixture ``gemm_speed``: what sessions measured of a case becomes the end of its test and a benchmark's rounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement, Peaks, Sample
from pytest_gemm.speed.report import rows, text

if TYPE_CHECKING:
    from pytest_gemm.config import GemmConfig
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck
    from pytest_gemm.speed.replay import Replay
    from pytest_gemm.speed.runner import Measured


class SpeedCheck:
    """Ends a test as its case was measured.

    Args:
        config: of the run.
        check: ends the tests of cases that have no figure.
        measured: by device.
        benchmark: asks for pytest-benchmark's fixture.
        replay: the clock that it reads.
    """

    def __init__(
        self,
        config: GemmConfig,
        check: GemmCheck,
        measured: Sequence[Measured],
        benchmark: Callable[[], Any],
        replay: Replay,
    ) -> None:
        self._config = config
        self._check = check
        self._measured = {one.device: one for one in measured}
        self._benchmark = benchmark
        self._replay = replay
        self.verdicts: list[str] = []

    def __call__(self, case: Case) -> list[Judgement]:
        """The verdicts on a case: one for each choice that was timed.

        Raises:
            pytest's own exceptions: the test fails for a wrong result, a slower case and, unless told otherwise, for
            one without a baseline; it is *unsupported* where the backend refused.
        """
        made = self._measured.get(case.device)
        timed = (case.backend.name, case.problem.line)
        every = made.samples(timed) if made else []
        samples = [sample for sample in every if sample.is_timed]
        failed = made.failed.get(timed) if made else None
        if failed is None and not samples:  # all candidates that were asked for have been left out
            failed = next((sample for sample in every if sample.status is not Status.PASSED), None)
        if made is None or failed is not None or not samples:
            if failed is None:
                pytest.fail(f"{case.problem} on {case.backend.name} was not timed: no session has it", pytrace=False)
            if failed.status is Status.KNOWN_FAILURE:
                self._check(case)  # which finds the entry that forbids to run it, and ends the test
            self._check.finish(case, [_outcome(failed, case.seed)])
            return []
        judged = made.judged(timed)
        self._show(case, made, samples, judged)
        self._check.finish(case, [_outcome(samples[0], case.seed)])
        if made.mode != "record":
            self.verdicts += [str(j.verdict) for j in judged]
        self._end(made, judged)
        return judged

    def _show(self, case: Case, made: Measured, samples: Sequence[Sample], judged: Sequence[Judgement]) -> None:
        """Hand the readings of the case, of its fastest choice, to pytest-benchmark."""
        first = min(samples, key=lambda s: s.estimate).case
        of_it = [s for s in samples if s.case == first]
        readings = [seconds for sample in of_it for seconds in sample.subject]
        judgement = next((j for j in judged if j.case == first), None)
        benchmark = self._benchmark()
        benchmark.group = case.problem.line
        benchmark.extra_info.update(_facts(case.problem, made, of_it, judgement))
        self._replay.load(readings)
        benchmark.pedantic(self._replay.step, rounds=len(readings), iterations=1)

    def _end(self, made: Measured, judged: Sequence[Judgement]) -> None:
        if made.mode == "record":
            refused = [made.refused[j.case] for j in judged if j.case in made.refused]
            if refused:
                pytest.fail("\n".join(refused), pytrace=False)
            return
        texts = [self._failure(made, j) for j in judged if j.verdict in self._config.speed.fatal]
        if texts:
            pytest.fail("\n".join(texts), pytrace=False)

    def _failure(self, made: Measured, judgement: Judgement) -> str:
        line = made.stored.get(judgement.case)
        past = rows.Past(*line.history[-1]) if line is not None else None
        case = judgement.case
        outcome = Outcome(case, "", self._config.seed, Status.PASSED)
        rerun = self._check.rerun.line(outcome)
        mode: Any = "against" if made.mode == "against" else "baseline"
        return text.failure(judgement, rerun, stored=past, mode=mode, record=made.record)


def _outcome(sample: Sample, seed: int) -> Outcome:
    """A sample as the outcome of a case, for the ledger, the run record and JUnit."""
    case = sample.case
    outcome = Outcome(
        case,
        sample.distribution,
        seed,
        sample.status,
        sample.reason,
    )
    return dataclasses.replace(outcome, kernels=sample.kernels, chosen=sample.selected)


def _facts(problem: Problem, made: Measured, samples: Sequence[Sample], judgement: Judgement | None) -> dict[str, Any]:
    """What stands beside the rounds in pytest-benchmark's JSON."""
    work = roofline.work(problem)
    figure = statistics.median(s.estimate for s in samples)
    ratios = [s.comparator_estimate / s.estimate for s in samples if s.comparator_estimate is not None]
    peaks = Peaks.of(made.sessions)
    facts: dict[str, Any] = {
        "backend": samples[0].case.backend,
        "problem": problem.line,
        "choice": ", ".join(samples[0].selected) or samples[0].case.candidate,
        "hardware": made.hardware,
        "sessions": len(samples),
        "estimate_us": figure * 1e6,
        "tflops": work.flops / figure / 1e12,
        "gbs": work.bytes / figure / 1e9,
        "roofline_share": roofline.share(figure, work, roofline.dtype_name(problem), peaks),
        "comparator": samples[0].comparator_name,
        "speed_up": statistics.median(ratios) if ratios else None,
    }
    if latencies := [s.telemetry["end_to_end_us"] for s in samples if "end_to_end_us" in s.telemetry]:
        facts["end_to_end_us"] = statistics.median(latencies)
    if judgement is not None:
        facts |= {
            "verdict": str(judgement.verdict),
            "verdict_code": judgement.reason.code,
            "change": judgement.change,
            "minimum_effect": judgement.minimum_effect,
            "regret": judgement.regret,
            "faster_choice": judgement.faster,
        }
    return facts
