"""Failures grouped by cause: one bug is one finding, with the condition that separates and the simplest problem."""

from __future__ import annotations

import dataclasses
import time

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures import findings

WRONG = Reason("outside-bound", "5 of 9 elements outside the bound")


def outcome(problem: str, cause: str | None = None, values: str = "rand", who: str = "mine") -> Outcome:
    """A pass, or with a cause, which may be "", a wrong result."""
    status, reason = (Status.PASSED, None) if cause is None else (Status.INCORRECT, WRONG)
    return Outcome(CaseId(who, problem), values, 0, status, reason, ("kernel",), cause=cause or "")


def line(k: int, n: int = 64, m: int = 33) -> str:
    return f"mm:f32:nn:{m}x{n}x{k}"


TAIL_KS = (31, 127, 132, 250)
HARD = "addmm:bf16:nn:1x48x31:bias-m1+alpha-0.5+relu:m.dynamic"
TAILS = [*(line(k) for k in TAIL_KS), HARD]
WHOLE = [line(k, m=m) for k in (8, 64, 129, 256) for m in (16, 33)]


def test_one_bug_is_one_finding_with_its_condition_and_the_simplest_problem_first() -> None:
    run = [outcome(one) for one in WHOLE]
    run += [outcome(one, "K tail" if one != HARD else "", values) for one in TAILS for values in ("rand", "int-2")]
    (one,) = findings.findings(run)
    assert (one.title, one.who, one.simplest.problem) == ("incorrect: K tail", "mine", line(31))
    assert one.condition == "K % 8 > 1: 5 of 5 failures, 0 of 8 passes"
    shown = findings.text(one, "pytest this").splitlines()
    assert shown[0].startswith("incorrect: K tail: mm:f32:nn:33x64x31 on mine: 5 of 9 elements")
    assert shown[-1] == "  rerun: pytest this"
    assert any("in all 5 problems" in line and HARD not in line for line in shown)
    assert any("distributions rand and int-2" in line for line in shown)


def test_two_bugs_stay_two_and_an_unexplained_one_joins_by_its_condition() -> None:
    run = [outcome(one) for one in WHOLE] + [outcome(one, "K tail") for one in TAILS]
    run += [outcome(line(8, n), "bias missing") for n in (1, 17, 49, 65)]
    run += [outcome(line(251), ""), outcome(line(16, 64, 17), "")]
    found = findings.findings(run)
    assert [(one.title, len(one.problems)) for one in found] == [
        ("incorrect: K tail", 6), ("incorrect: bias missing", 4), ("incorrect: wrong values, cause not recognised", 1)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["K tail", ""])
def test_the_sign_of_zero_is_no_headline_where_something_else_is_wrong(name: str) -> None:
    run = [outcome(line(k, n), "sign of zero", each) for k in (8, 16) for n in (17, 33) for each in ("rand", "int-2")]
    run += [outcome(line(8, n), name, "rand-2") for n in (17, 33, 65)] + [outcome(line(k), None) for k in (64, 128)]
    found = findings.findings(run)
    assert found[0].title == f"incorrect: {name or 'wrong values, cause not recognised'}"
    assert all(one.title == "incorrect: sign of zero" for one in found[1:])
    assert findings.findings(run[:8])[0].title == "incorrect: sign of zero"


def test_a_race_is_the_headline_of_what_single_calls_show() -> None:
    run = [outcome(line(k), name) for k in TAIL_KS for name in ("K tail", "constant factor", "race or leftover state")]
    (one,) = findings.findings(run + [outcome(line(k), "K tail", "int-2") for k in TAIL_KS])
    assert one.title == "incorrect: race or leftover state"
    assert "K tail" not in findings.text(one, "pytest this")


def test_two_backends_are_two_findings_and_exceptions_are_told_apart() -> None:
    run = [outcome(line(31), "K tail", who=who) for who in ("mine", "yours")]
    crash = dataclasses.replace(outcome(line(8)), status=Status.CRASHED)
    run += [
        dataclasses.replace(crash, case=CaseId("mine", line(k)), reason=Reason("ValueError", text))
        for k, text in ((8, "no room for 8"), (16, "no room for 16"), (32, "not aligned"))
    ]
    assert sorted((one.who, one.title, len(one.problems)) for one in findings.findings(run)) == [
        ("mine", "crashed: ValueError", 1), ("mine", "crashed: ValueError", 2),
        ("mine", "incorrect: K tail", 1), ("yours", "incorrect: K tail", 1),
    ]  # fmt: skip


def test_what_does_not_separate_is_no_condition() -> None:
    run = [outcome(line(k, n), "k dropped" if (k + n) % 3 else None) for k in range(8, 20) for n in range(8, 20)]
    (one,) = findings.findings(run)
    assert not one.condition


def test_thousands_of_outcomes_take_less_than_a_second() -> None:
    run = [outcome(line(k, n), None if k % 8 == 0 else "") for k in range(1, 61) for n in range(1, 81)]
    start = time.process_time()
    (one,) = findings.findings(run)
    assert one.condition.startswith("K % 8 > 0: ")
    assert time.process_time() - start < 3
