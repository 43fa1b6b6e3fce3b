"""The ledger of known failures: predicates over cases and machines, each with a reason, in a TOML file.

The cases of an entry still run, unless they can kill the process, and do not fail the run.  An entry whose cases all
pass is an error, so that the ledger does not outlive the defects.  ``docs/how-to/known-failures.md`` describes the
file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.ledger import reader
from pytest_gemm.ledger.computes import COMPUTES
from pytest_gemm.ledger.entry import Entry, Environment, Globs, facts
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.lines import Use, merge_use

_ANY: Final = Globs()
# Facts of a case that its problem and its backend do not decide.
_ELSEWHERE: Final = frozenset({"test", "device", "isa", "torch", "threads", "run_threads"})


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All known failures, in the order of the file; none by default.

    Attributes:
        entries: the entries.
        path: their file, ``None`` for none.
    """

    entries: tuple[Entry, ...] = ()
    path: Path | None = None
    # The case that was asked about last, and its entries whatever the outcome: outcomes of a case come together.
    _last: list[Any] = dataclasses.field(default_factory=list, repr=False, compare=False)

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
        return next((entry for entry in covering if entry.explains(outcome)), None)

    def covering(self, outcome: Outcome, problem: Problem, environment: Environment) -> tuple[Entry, ...]:
        """Every entry that has this outcome's case, whatever its status."""
        known = _known(outcome)
        case = (outcome.backend, problem, outcome.test, environment)
        if self._last[:1] != [case]:
            of_case = facts(*case)
            self._last[:] = [case, tuple(entry for entry in self.entries if entry.applies(of_case))]
        return tuple(entry for entry in self._last[1] if entry.applies(known))

    def statements(self, outcome: Outcome, problem: Problem) -> tuple[str, ...]:
        """The names of :data:`COMPUTES` that entries state of such a wrong result, on whatever machine."""
        of_case = facts(outcome.backend, problem, "", Environment(""))
        known = _known(outcome) | {name: values for name, values in of_case.items() if name not in _ELSEWHERE}
        stated = [entry.computes for entry in self.entries if not entry.computes.is_open and entry.applies(known)]
        return tuple(name for name in COMPUTES if any(one.match(name) for one in stated))

    def applicable(
        self, backend: str, problem: Problem, test: str, environment: Environment, candidate: str = "", mode: str = ""
    ) -> Entry | None:
        """The first entry by which the case, or this candidate of it, can kill the process and must not run.

        An entry with a pattern of candidates does not apply to a case as a whole.
        """
        known = {**facts(backend, problem, test, environment), "mode": (mode,)}
        for entry in self.entries:
            candidates = entry.conditions.get("candidate", _ANY)
            fits = candidates.match(candidate) if candidate else candidates.is_open
            if entry.crashes and fits and entry.applies(known):
                return entry
        return None

    def note(self, use: Use, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """Count an outcome for every entry that has its case, and return the first that explains it.

        Args:
            use: what is counted so far.
            outcome: as judged, before the ledger changes its status.
            problem: the outcome's problem.
            environment: where it ran.
        """
        for entry in self.covering(outcome, problem, environment):
            if entry.explains(outcome):
                merge_use(use, {"failed": {entry.id: 1}})
            elif outcome.status.is_failure or outcome.status is Status.PASSED:
                merge_use(use, {"differed" if outcome.status.is_failure else "passed": {entry.id: 1}})
        return self.match(outcome, problem, environment)


def _known(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    """The facts of an outcome that entries have conditions on."""
    return {
        "distribution": (outcome.distribution,),
        "candidate": tuple(outcome.candidates),
        "configuration": outcome.configuration,
        "mode": (outcome.mode,),
        "guard": (outcome.case.guard,),
    }
