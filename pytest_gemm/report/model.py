"""Outcomes in groups and numbers, as all reports count them."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.templates import Templates
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

# The status of a problem is that of its worst case, by this order.
_SEVERITY: Final = [
    *map(Status, ("crashed", "timed-out", "incorrect", "fallback", "impossible", "mistrusted", "known-failure")),
    *map(Status, ("passed", "pruned", "unsupported", "not-run")),
]


def by(outcomes: Iterable[Outcome], *names: str) -> dict[Any, list[Outcome]]:
    """Outcomes in groups that agree in these attributes, in the order in which they came in."""
    key = operator.attrgetter(*names)
    found: dict[Any, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome)].append(outcome)
    return found


def having(outcomes: Iterable[Outcome], *statuses: str) -> list[Outcome]:
    """The outcomes with one of these statuses."""
    return [outcome for outcome in outcomes if outcome.status.value in statuses]


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that turn a run red."""
    return [outcome for outcome in outcomes if outcome.status.is_failure]


def judged(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that have an error over bound."""
    return [outcome for outcome in outcomes if outcome.ratio is not None]


def statuses(outcomes: Iterable[Outcome]) -> list[Status]:
    """The statuses that outcomes have, in their order."""
    found = {outcome.status for outcome in outcomes}
    return [status for status in Status if status in found]


def distinct(outcomes: Iterable[Outcome], name: str) -> set[Any]:
    """The distinct values of an attribute, which may hold one or, as a tuple, several."""
    values = [getattr(outcome, name) for outcome in outcomes]
    return {one for value in values for one in (value if isinstance(value, tuple) else (value,))}


def selected(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """What autotuning selected of several backends' candidates, with the number of problems, most often first."""
    counts = Counter(name for group in by(outcomes, "problem").values() for name in distinct(group, "candidates"))
    return counts.most_common()


def status_of(outcomes: Iterable[Outcome]) -> Status:
    """The worst status among the outcomes of one problem."""
    return min((outcome.status for outcome in outcomes), key=_SEVERITY.index, default=Status.NOT_RUN)


@functools.cache
def kind(line: str) -> str:
    """Dtypes of a problem with the flags that change its arithmetic; ``?`` for what is no problem of this version."""
    try:
        problem = Problem.parse(line)
    except ProblemError:
        return "?"
    return " ".join([str(problem.dtypes), *(flag for flag in problem.flags if flag.startswith("math."))])


@dataclasses.dataclass(frozen=True)
class Tally:
    """Problems by how they ended, each under the worst of its cases.

    Attributes:
        counts: by status, without those that nothing got.
        judged: how many cases were judged.
        worst: largest error over bound of what passed.
        nearest: share of the passed cases with every element correctly rounded, in percent.
    """

    counts: Mapping[Status, int]
    judged: int
    worst: float | None
    nearest: str

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Tally:
        """Count outcomes."""
        every = list(outcomes)
        counts = Counter(map(status_of, by(every, "who", "problem").values()))
        passed = [one.ratio for one in having(every, "passed") if one.ratio is not None]
        share = f"{math.floor(100 * passed.count(0) / len(passed))}%" if passed else "-"
        return cls({s: counts[s] for s in Status if counts[s]}, len(judged(every)), max(passed, default=None), share)

    @classmethod
    def by_op(cls, outcomes: Sequence[Outcome], most: int) -> dict[tuple[str, str], Tally]:
        """By backend and op; by backend alone where there were more than ``most``."""
        groups = by(outcomes, "who", "op")
        if len(groups) > most:
            groups = {(who, f"{len(distinct(some, 'op'))} ops"): some for who, some in by(outcomes, "who").items()}
        return {key: cls.of(group) for key, group in groups.items()}

    @property
    def right(self) -> int:
        """Problems that passed."""
        return self.counts.get(Status.PASSED, 0)

    @property
    def known(self) -> int:
        """Problems that are wrong as an entry of the ledger says."""
        return self.counts.get(Status.KNOWN_FAILURE, 0)

    @property
    def new(self) -> int:
        """Problems that are wrong, and no entry explains it."""
        return sum(count for status, count in self.counts.items() if status.is_failure)

    @property
    def refused(self) -> int:
        """Problems that are unsupported, pruned or not run."""
        return sum(self.counts.values()) - self.right - self.known - self.new


def _markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", str(cell)) for cell in cells) + " |"


# The pages share the styles of the report on speed.
TEMPLATES: Final = Templates(
    "pytest_gemm.report",
    "pytest_gemm.speed.report",
    by=by,
    having=having,
    distinct=distinct,
    selected=selected,
    row=_markdown_row,
)
