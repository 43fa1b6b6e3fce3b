"""The ledger of known failures: predicates over cases and machines, each with a reason, in a TOML file.

The cases of an entry still run, unless they can kill the process, and do not fail the run.  An entry whose cases all
pass is an error, so that the ledger does not outlive the defects.  ``docs/known-failures.md`` describes the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from pytest_gemm.ledger import reader
from pytest_gemm.ledger.entry import ANY, Entry, Environment
from pytest_gemm.outcome import Outcome
from pytest_gemm.problem.problem import Problem


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All known failures, in the order of the file; none by default.

    Attributes:
        entries: the entries.
        path: their file, ``None`` for none.
    """

    entries: tuple[Entry, ...] = ()
    path: Path | None = None

    @classmethod
    def load(cls, path: Path, backends: Collection[str] | None = None) -> Ledger:
        """Read a ledger.

        Args:
            path: of the file.
            backends: registered names; ``None``: any name may be meant.

        Raises:
            LedgerError: with file and line, when it cannot be read or an entry makes no sense.
        """
        return cls(reader.read(path, backends), path)

    def match(self, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """The first entry that explains a failed outcome; ``None`` for an unknown failure, or no failure."""
        covering = self.covering(outcome, problem, environment)
        return next((entry for entry in covering if outcome.status in entry.status), None)

    def covering(self, outcome: Outcome, problem: Problem, environment: Environment) -> tuple[Entry, ...]:
        """Every entry that has this outcome's case, whatever its status."""
        return tuple(
            entry
            for entry in self.entries
            if entry.distribution.match(outcome.distribution)
            and entry.candidate.match(*outcome.candidates)
            and entry.mode.match(outcome.mode)
            and entry.guard.match(outcome.case.guard)
            and entry.applies(outcome.backend, problem, outcome.test, environment)
        )

    def applicable(
        self, backend: str, problem: Problem, test: str, environment: Environment, candidate: str = "", mode: str = ""
    ) -> Entry | None:
        """The first entry by which the case, or this candidate of it, can kill the process and must not run.

        An entry with a pattern of candidates does not apply to a case as a whole.
        """
        return next(
            (
                entry
                for entry in self.entries
                if entry.crashes
                and (entry.candidate.match(candidate) if candidate else entry.candidate == ANY)
                and entry.mode.match(mode)
                and entry.applies(backend, problem, test, environment)
            ),
            None,
        )
