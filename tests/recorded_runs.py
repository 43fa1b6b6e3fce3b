"""Run records with made-up outcomes, for the tests of their pages."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.record import lines as records
from pytest_gemm.record.lines import Head

RUN: Final = Head(
    "2026-11-22 20:00:00 +0000",
    ("pytest", "tests/mine.py", "-k", "mm", "--gemm-backends=cpp", "--gemm-level=smoke", "--gemm-set=cpp.jobs=2", "-q"),
    {"torch": "2.15.0", "python": "3.12.1"},
    cpu="a processor, 8 logical cores",
    threads=8,
)
PASSED: Final = Outcome(
    CaseId("cpp", "mm:f16:nt:512x768x1024"),
    "int-2",
    7,
    Status.PASSED,
    kernels=("cpp_fused_mm_0 (CppMicroGemmFP16-8x48x1)",),
    tier="hard",
    ratio=0.25,
)
NEW: Final = dataclasses.replace(
    PASSED,
    case=CaseId("triton", PASSED.problem),
    status=Status.INCORRECT,
    ratio=40.0,
    reason=Reason("outside-bound", "768 of 393216 elements outside the bound"),
    details="row 3 is wrong\n  in all columns of the last tile",
)
KNOWN: Final = dataclasses.replace(
    NEW,
    case=CaseId("cpp", "mm:f16:nt:8x16x32"),
    status=Status.KNOWN_FAILURE,
    failed_as=Status.INCORRECT,
    known_failure="drops-bias",
)


def outcomes(*, later: bool = False, seed: int = 0) -> list[Outcome]:
    """A run of several ops, types and backends; the ``later`` one has a failure more."""
    rng = random.Random(seed)
    found = []
    for op in ("addmm", "bmm", "linear", "mm"):
        for dtypes in ("bf16", "f16", "f32", "f32-f32-bf16"):
            for backend in ("aten", "cpp", "triton"):
                for m in (1, 17, 64, 1000):
                    line = f"{op}:{dtypes}:nt:{'2x' * (op == 'bmm')}{m}x64x1000"
                    ratio = 1.0 if "16" in dtypes and rng.random() < 0.3 else rng.betavariate(2, 8)
                    found.append(dataclasses.replace(PASSED, case=CaseId(backend, line), ratio=ratio))
    refused = Reason("layout", "A needs contiguous rows", "pass a contiguous A")
    found.append(dataclasses.replace(found[-1], status=Status.UNSUPPORTED, reason=refused, ratio=None))
    return [*found, KNOWN, *([NEW] if later else [])]


def write(folder: Path, some: Iterable[Outcome], run: Head = RUN, *, ended: bool = True) -> Path:
    """The record of a run."""
    totals = {"totals": {"wall_seconds": 12.0, "processes": 3, "notes": ["CUTLASS: 2 kernels"]}}
    lines = [{"run": records.plain(run)}, *map(records.to_record, some), *[totals] * ended]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.jsonl"
    path.write_text("".join(map(records.record_line, lines)), encoding="utf-8")
    return path
