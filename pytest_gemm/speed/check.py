"""The fixture ``gemm_speed``: what sessions measured of a case becomes the end of its test and a benchmark's rounds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.speed.data import Judgement, Sample
from pytest_gemm.speed.report import text
from pytest_gemm.speed.report.rows import Row, Run

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig
    from pytest_gemm.judging.case import Case
    from pytest_gemm.run.check import GemmCheck


def hide_tables(config: pytest.Config) -> None:
    """Leave out pytest-benchmark's tables of timed cases, which this plugin shows, unless an option asks for them.

    What it stores stays the same, and so do its tables where it has timed other tests too.
    """
    shown: Any = getattr(config, "_benchmarksession", None)
    asked = any(map(_DISPLAYING.match, (*config.getini("addopts"), *map(str, config.invocation_params.args))))
    if shown is not None and not asked and all("verdict_code" in one.extra_info for one in shown.benchmarks):
        shown.quiet = True


_DISPLAYING: Final = re.compile("--benchmark-(?!json|save|autosave|storage)")


class Replay:
    """A clock by which pytest-benchmark shows what was measured in other processes.

    :meth:`clock` is the benchmark's timer, and :meth:`step` its target, which takes as long as the next reading.
    """

    def __init__(self, readings: Sequence[float]) -> None:
        self._now = 0.0
        self._readings: Iterator[float] = iter(readings)

    def clock(self) -> float:
        """Seconds since the first step."""
        return self._now

    def step(self) -> None:
        """Let the time of one reading pass."""
        self._now += next(self._readings, 0.0)


@dataclasses.dataclass
class SpeedCheck:
    """Ends a test as its case was measured.

    Attributes:
        config: of the run.
        check: ends the tests of cases that have no estimate.
        measured: what each device measured.
        benchmark: pytest-benchmark's fixture, which reads the given clock; ``None`` where it shows nothing.
        verdicts: on the cases of the test.
    """

    config: GemmConfig
    check: GemmCheck
    measured: Sequence[Run]
    benchmark: Callable[[Callable[[], float]], Any] | None
    verdicts: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, case: Case) -> list[Judgement]:
        """The verdicts on a case: one for each candidate that was timed.

        Raises:
            pytest's own exceptions: the test fails for a wrong result, a slower case and, unless told otherwise, for
            one without a baseline; it is *unsupported* where the backend does not support it.
        """
        made = next((one for one in self.measured if one.device == case.device), None)
        this = CaseId(case.backend.name, case.problem.line)
        every = [s for session in made.sessions for s in session.samples if s.case.whole == this] if made else []
        samples = [sample for sample in every if sample.is_timed]
        failed = made.failed.get(this) if made else None
        if failed is None and not samples:  # all requested candidates have been left out
            failed = next((sample for sample in every if sample.status is not Status.PASSED), None)
        if failed is not None:
            if failed.status is Status.KNOWN_FAILURE:
                self.check(case)  # which finds the entry that forbids to run it, and ends the test
            self.check.finish(case, [_outcome(failed, case.seed)])
            return []
        if made is None or not samples:
            pytest.fail(f"{case.problem} on {case.backend.name} was not timed: no session has it", pytrace=False)
        judged = [judgement for judgement in made.judgements if judgement.case.whole == this]
        self._show(made, samples)
        self.check.finish(case, [_outcome(samples[0], case.seed)])
        if made.mode == "none":
            texts = [made.refused[j.case] for j in judged if j.case in made.refused]
        else:
            self.verdicts += [str(j.verdict) for j in judged]
            texts = [self._failure(made, j) for j in judged if j.verdict in self.config.speed.fatal]
        if texts:
            pytest.fail("\n".join(texts), pytrace=False)
        return judged

    def _show(self, made: Run, samples: Sequence[Sample]) -> None:
        """Hand the readings of the case, of its fastest candidate, to pytest-benchmark."""
        if self.benchmark is None:
            return
        first = min(samples, key=lambda s: s.estimate).case
        of_it = [s for s in samples if s.case == first]
        readings = [seconds for sample in of_it for seconds in sample.subject]
        replay = Replay(readings)
        benchmark = self.benchmark(replay.clock)
        benchmark.group = first.problem
        benchmark.extra_info.update(_facts(made, next(row for row in made.rows if row.judgement.case == first), of_it))
        benchmark.pedantic(replay.step, rounds=len(readings), iterations=1)

    def _failure(self, made: Run, judgement: Judgement) -> str:
        rerun = self.check.rerun.line(Outcome(judgement.case, "", self.config.seed, Status.PASSED))
        self.check.judged.rerun = self.check.judged.rerun or rerun  # that of the first text
        return text.failure(made, judgement, rerun)


def _outcome(sample: Sample, seed: int) -> Outcome:
    """A sample as the outcome of a case, for the ledger, the run record and JUnit."""
    outcome = Outcome(sample.case, sample.distribution, seed, sample.status, sample.reason)
    return dataclasses.replace(outcome, kernels=sample.kernels, chosen=sample.selected)


def _facts(made: Run, row: Row, samples: Sequence[Sample]) -> dict[str, Any]:
    """What stands beside the rounds in pytest-benchmark's JSON."""
    judgement = row.judgement
    return {
        "backend": judgement.case.backend,
        "problem": judgement.case.problem,
        "choice": ", ".join(samples[0].selected) or judgement.case.candidate,
        "hardware": made.hardware,
        "sessions": len(samples),
        "estimate_us": None if judgement.seconds is None else judgement.seconds * 1e6,
        "tflops": None if row.flop_rate is None else row.flop_rate / 1e12,
        "gbs": None if row.byte_rate is None else row.byte_rate / 1e9,
        "roofline_share": row.share,
        "joule": row.joule,
        "comparator": row.comparator,
        "speed_up": None if row.speedup is None else row.speedup.middle,
        "verdict": str(judgement.verdict),
        "verdict_code": judgement.reason.code,
        **{name: getattr(judgement, name) for name in ("change", "low", "high", "minimum_effect")},
    }
