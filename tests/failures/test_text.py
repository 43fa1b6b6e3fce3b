"""The text of failures: what is the same of several is told once, and a rerun line is one that works."""

from __future__ import annotations

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures import text

RERUN = text.Rerun("test_it.py::test_product")


def crash(why: str, candidate: str, distribution: str) -> Outcome:
    case = CaseId("mine", "mm:f32:nn:8x8x8", candidate)
    reason = Reason("ValueError", f"ValueError in run: {why}")
    details = f"File it.py, line 3\nValueError: {why}"
    return Outcome(case, distribution, 0, Status.CRASHED, reason, (candidate or "kernel",), details=details)


def test_a_traceback_is_told_once_with_all_candidates_and_distributions_that_raise_it() -> None:
    outcomes = [crash("odd", name, values) for name in ("a-1", "b-2") for values in ("int-2", "rand")]
    outcomes.insert(1, crash("even", "c-3", "rand"))
    shown = text.failures(outcomes, RERUN).splitlines()
    assert [line for line in shown if line.startswith("mm")] == [
        "mm:f32:nn:8x8x8 on mine: crashed: ValueError in run: odd",
        "mm:f32:nn:8x8x8 on mine: crashed: ValueError in run: even",
    ]
    assert shown.count("  ValueError: odd") == 1
    assert shown[3:5] == ["  candidates a-1 and b-2", "  kernel a-1, b-2; distributions int-2 and rand, seed 0"]
    assert [line.rpartition("=")[2] for line in shown if "rerun: " in line] == ["a-1", "c-3"]
    assert "  candidate c-3" in shown
