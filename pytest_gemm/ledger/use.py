"""What the ledger explained in a run, and which entries are stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pytest_gemm.ledger.entry import Entry, Environment
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.problem import Problem


class LedgerUse:
    """How often each entry applied in a run; the counts of xdist workers are merged.

    Attributes:
        failed: outcomes that an entry explains, by id.
        differed: outcomes of its cases that failed with another status.
        passed: outcomes of its cases that passed.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.differed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def note(self, ledger: Ledger, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """Count an outcome for every entry that has its case, and return the first that explains it.

        Args:
            ledger: the entries.
            outcome: as judged, before the ledger changes its status.
            problem: the outcome's problem.
            environment: where it ran.
        """
        explained = None
        for entry in ledger.covering(outcome, problem, environment):
            if outcome.status in entry.status:
                self.failed[entry.id] += 1
                explained = explained or entry
            elif outcome.status.is_failure:
                self.differed[entry.id] += 1
            elif outcome.status is Status.PASSED:
                self.passed[entry.id] += 1
        return explained

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Plain data for another process; :meth:`merge` reads it."""
        return {name: dict(getattr(self, name)) for name in ("failed", "differed", "passed")}

    def merge(self, other: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of another process, as :meth:`to_dict` gave them."""
        for name in ("failed", "differed", "passed"):
            getattr(self, name).update(other.get(name, {}))

    def stale(self, ledger: Ledger) -> tuple[Entry, ...]:
        """Entries with at least one outcome, of which all passed: they are to be deleted.

        Only a run of the whole level shows this: a narrowed one may have left out the cases that fail.
        """
        return tuple(
            entry
            for entry in ledger.entries
            if self.passed[entry.id] and not self.failed[entry.id] and not self.differed[entry.id]
        )
