"""Runs of the speed suite with made-up figures, for the tests of its reports."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status, Verdict
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.baseline.entry import Baseline
from pytest_gemm.speed.data import Judgement, Peaks, Sample, Session
from pytest_gemm.speed.report.rows import Run

PEAKS = Peaks({"f16": 790e12, "bf16": 810e12, "f32": 52e12, "i8": 1450e12, "f8e4m3fn": 1500e12}, 4.1e12)
NK = ("11008x4096", "4096x12288", "22016x4096", "4096x4096", "4096x65536")
KINDS = ("mm:f16:nt", "mm:bf16:nt", "mm:f32:nt", "int_mm:i8-i8-i32:nt")
REASONS = {
    Verdict.SAME: Reason("within", "within the tolerance of 1%"),
    Verdict.SLOWER: Reason("slower-confirmed", "slower in the screen and in 5 of 5 new processes"),
    Verdict.FASTER: Reason("faster-confirmed", "faster in the screen and in 5 of 5 new processes"),
    Verdict.UNDECIDED: Reason("underpowered", "a slow-down below 12% could not be seen", "measure with more sessions"),
    Verdict.NO_BASELINE: Reason("no-baseline", "nothing is stored for it on this hardware"),
}


def problems(
    kinds: Sequence[str] = KINDS, shapes: Sequence[str] = NK, rows: Sequence[int] = (16, 64, 256, 1024)
) -> list[str]:
    return [f"{kind}:{m}x{nk}" for kind in kinds for nk in shapes for m in rows]


def example(
    lines: Sequence[str] = tuple(problems(KINDS[:2], NK[:3])),
    backends: Sequence[str] = ("triton", "cutlass"),
    sessions: int = 3,
    seed: int = 0,
) -> Run:
    """A run as a GPU might give it: a roofline, an efficiency for each backend and problem, 0.4% between sessions."""
    rng = random.Random(seed)
    judgements = []
    samples: list[list[Sample]] = [[] for _ in range(sessions)]
    for line in lines:
        problem = Problem.parse(line)
        dtype = roofline.dtype_name(problem)
        best, _ = roofline.limit(roofline.work(problem), dtype, PEAKS) or (0.0, "")
        assert best
        aten = best / rng.uniform(0.6, 0.9)
        for backend in backends:
            case = CaseId(backend, line)
            seconds = aten / rng.lognormvariate(0.0, 0.2) if backend != "aten" else aten
            seconds = max(seconds, best / 0.97)
            figures = []
            for session in samples:
                common = rng.gauss(1.0, 0.003)
                subject, comparator = (s * common * rng.gauss(1.0, 0.002) for s in (seconds, aten))
                figures.append((subject, comparator))
                session.append(
                    Sample(
                        case,
                        "cuda",
                        Status.PASSED,
                        subject=(subject, subject * 1.004),
                        comparator=(comparator, comparator * 1.004),
                        comparator_name="aten",
                        phases={"prepare": 2.0, "judge": 0.3, "time": 0.5},
                    )
                )
            verdict = rng.choices(list(REASONS), (84, 4, 4, 4, 4))[0]
            judgements.append(judged(case, verdict, figures, rng))
    return Run(
        judgements=judgements,
        sessions=[
            Session("nvidia-h200-sm90-700w", contract="5f0c", date="2026-07-01T10:00:00", commit="ab12cd3", samples=s)
            for s in map(tuple, samples)
        ],
        hardware="nvidia-h200-sm90-700w",
        software={"torch": "2.13.0", "triton": "3.6.0", "driver": "570.86"},
        peaks=PEAKS,
        seconds=612.0,
        record="pytest perf --gemm-backends=triton,cutlass --gemm-record",
        delta=0.01,
    )


def judged(case: CaseId, verdict: Verdict, figures: Sequence[tuple[float, float]], rng: random.Random) -> Judgement:
    """A judgement whose change suits its verdict."""
    change = {Verdict.SLOWER: 0.06, Verdict.FASTER: -0.05}.get(verdict, 0.0) + rng.gauss(0, 0.003)
    half = 0.09 if verdict is Verdict.UNDECIDED else rng.uniform(0.004, 0.012)
    seconds = statistics.median(subject for subject, _ in figures)
    known = verdict is not Verdict.NO_BASELINE
    return Judgement(
        case,
        verdict,
        REASONS[verdict],
        change=change if known else None,
        low=change - half if known else None,
        high=change + half if known else None,
        minimum_effect=2 * half if known else None,
        seconds=seconds,
        comparator_seconds=statistics.median(comparator for _, comparator in figures),
        stored_seconds=seconds / (1 + change) if known else None,
        weight=1.0,
        sessions=len(figures) + (5 if verdict in {Verdict.SLOWER, Verdict.FASTER} else 0),
    )


LINE, OTHER = "mm:f16:nt:1024x4096x4096", "mm:f16:nt:16x4096x4096"
CASE = CaseId("triton", LINE)


def measured(figures: Sequence[tuple[float, float | None]], case: CaseId = CASE, **changes: Any) -> list[Sample]:
    """A sample for each (subject, comparator) in seconds."""
    return [
        Sample(
            case,
            "cuda",
            Status.PASSED,
            subject=(subject,),
            comparator=() if comparator is None else (comparator,),
            comparator_name="" if comparator is None else "aten",
            **changes,
        )
        for subject, comparator in figures
    ]


def stored(case: CaseId, subject_us: Sequence[float], **facts: Any) -> Baseline:
    """A baseline of a case by the microseconds of its sessions."""
    known = Baseline(
        backend=case.backend,
        problem=case.problem,
        candidate=case.candidate,
        subject_us=tuple(subject_us),
        spread=0.01,
        contract="5f0c",
        software={},
        commit="ab12cd3",
        date="2026-07-01T10:00:00",
        epochs=(),
    )
    return replace(known, **facts)


def run_of(*cases: Sequence[Sample], verdict: Verdict = Verdict.SAME, **changes: Any) -> Run:
    """A run of these cases, each given by its sample in every session."""
    judgements = [
        Judgement(
            samples[0].case,
            verdict,
            REASONS[verdict],
            seconds=statistics.median(s.estimate for s in samples if s.is_timed) if samples[0].is_timed else None,
            sessions=len(samples),
        )
        for samples in cases
    ]
    sessions = [Session("gpu", samples=tuple(of)) for of in zip(*cases, strict=True)]
    return Run(judgements, sessions, **changes)


# -- the summary

TIMED = measured([(1e-3, 1e-3)])
