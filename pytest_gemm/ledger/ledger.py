"""The ledger of known failures: predicates over cases and machines, each with a reason, in a TOML file.

A known failure still runs (unless it can kill the process); it is only not red.  An entry whose cases have all
come to pass is an error, so that the ledger never outlives the defects.  Pure data: reading, matching
and counting, no pytest and no torch.  ``docs/known-failures.md`` describes the file for its writers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from pytest_gemm.ledger.entry import ANY, Entry, Environment
from pytest_gemm.ledger.reader import Reader
from pytest_gemm.outcome import Outcome
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All known failures, in the order of the file; an empty one knows none.

    Attributes:
        entries: the entries.
        path: the file that they came from, ``None`` for none.
    """

    entries: tuple[Entry, ...] = ()
    path: Path | None = None

    @classmethod
    def load(cls, path: Path, backends: Collection[str] | None = None) -> Ledger:
        """Read a ledger.

        Args:
            path: of the file.
            backends: names that a pattern may mean; ``None``: any.

        Raises:
            LedgerError: with file and line, when it cannot be read or an entry makes no sense.
        """
        return cls(Reader(path, backends).entries(), path)

    def match(self, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """The first entry that explains a failed outcome; ``None`` for one that nobody knows, or no failure."""
        covering = self.covering(outcome, problem, environment)
        return next((entry for entry in covering if outcome.status in entry.status), None)

    def covering(self, outcome: Outcome, problem: Problem, environment: Environment) -> tuple[Entry, ...]:
        """Every entry that speaks of this outcome's case, however it ended."""
        return tuple(
            entry
            for entry in self.entries
            if entry.distribution.match(outcome.distribution)
            and entry.choice.match(*outcome.candidates)
            and entry.mode.match(outcome.mode)
            and entry.guard.match(outcome.case.guard)
            and entry.applies(outcome.backend, problem, outcome.test, environment)
        )

    def applicable(
        self, backend: str, problem: Problem, test: str, environment: Environment, choice: str = "", mode: str = ""
    ) -> Entry | None:
        """The first entry that forbids to run the case, or this candidate of it, because it can kill the process.

        An entry about candidates says nothing of a case as a whole.
        """
        return next(
            (
                entry
                for entry in self.entries
                if entry.crashes
                and (entry.choice.match(choice) if choice else entry.choice == ANY)
                and entry.mode.match(mode)
                and entry.applies(backend, problem, test, environment)
            ),
            None,
        )
