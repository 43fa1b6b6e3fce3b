"""Defects of other days: each is met by a line of the suite, and what imitates it is caught there."""

from __future__ import annotations

from pathlib import Path

import pytest
from imitations import IMITATIONS
from mutants import Mutant, Planted
from studies import history, mutant_study

from pytest_gemm.conformance import matrix
from pytest_gemm.ledger.ledger import Ledger

_BUGS = {bug.id: bug for bug in history.BUGS}
_PAGE = Path(__file__).parents[2] / "docs" / "results" / "history.md"


pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_line_is_in_the_matrix() -> None:
    assert not history.complaints(_BUGS.values())


def test_what_is_met_has_a_level_and_a_proof() -> None:
    met = [bug for bug in _BUGS.values() if bug.lines]
    assert len(met) >= 19
    assert all(bug.level and (bug.imitation or bug.ledger) for bug in met)


def test_every_imitation_is_of_a_defect() -> None:
    assert {bug.imitation for bug in _BUGS.values() if bug.imitation} == set(IMITATIONS)


def test_every_entry_of_the_ledger_is_there() -> None:
    ids = {entry.id for entry in Ledger.load(matrix.CASES.parent / "known_failures.toml").entries}
    assert {name for bug in _BUGS.values() for name in bug.ledger} <= ids


@pytest.mark.parametrize(
    ("name", "line"),
    [pytest.param(bug.id, line, id=f"{bug.id}-{line}") for bug in _BUGS.values() for line in bug.imitated],
)
def test_the_imitation_is_caught(name: str, line: str) -> None:
    bug = _BUGS[name]
    backend = Planted(name, Mutant(bug.wrong, IMITATIONS[bug.imitation], {"": line}))
    caught = mutant_study.caught(mutant_study.judge(), backend, line, calls=bug.calls)
    assert caught is not None
    assert caught.tier not in {"", "exception"}, caught.outcome.reason


def test_the_page_is_made_of_the_table() -> None:
    assert _PAGE.read_text(encoding="utf-8") == history.page()
