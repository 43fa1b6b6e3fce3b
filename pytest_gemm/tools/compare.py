"""Two run records, joined by case: ``pytest-gemm compare BEFORE AFTER``.

A case is a backend's problem, candidate, mode, instruction set, threads and guard; its status is the worst of its
distributions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from pytest_gemm import records
from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.run import record
from pytest_gemm.text import show, table


def run(given: argparse.Namespace) -> int:
    """Print the cases that differ; returns 1 where there are any."""
    before, after = (statuses(record.read(path).outcomes) for path in (given.before, given.after))
    found = differences(before, after)
    rows = [[case.who, case.problem, case.candidate, *words] for case, words in found.items()]
    head = ("backend", "problem", "candidate", "before", "after")
    lines = [*table(head, rows, (), markdown=given.markdown), ""] if rows else []
    show("\n".join([*lines, f"{len(found)} of {len(before.keys() | after.keys())} case(s) differ"]) + "\n")
    return int(bool(found))


def statuses(outcomes: Iterable[Outcome]) -> dict[CaseId, tuple[Status, str]]:
    """The status of each case, the worst of its distributions, with its ledger entry or the code of its reason."""
    found: dict[CaseId, list[Outcome]] = {}
    for one in outcomes:
        found.setdefault(one.case, []).append(one)

    def worst(some: list[Outcome]) -> tuple[Status, str]:
        status = records.status_of(some)
        one = next(one for one in some if one.status is status)
        return status, one.known_failure or (one.reason.code if one.reason else "")

    return {case: worst(some) for case, some in found.items()}


def differences(
    before: Mapping[CaseId, tuple[Status, str]], after: Mapping[CaseId, tuple[Status, str]]
) -> dict[CaseId, tuple[str, str]]:
    """The cases whose status or reason differs, as words; ``-`` where a run does not have the case."""

    def words(found: tuple[Status, str] | None) -> str:
        if found is None:
            return "-"
        status, told = found
        return f"{status} ({told})" if told else str(status)

    cases = sorted(before.keys() | after.keys())
    return {c: (words(before.get(c)), words(after.get(c))) for c in cases if before.get(c) != after.get(c)}
