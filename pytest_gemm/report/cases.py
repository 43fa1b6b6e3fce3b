"""Two runs joined by case: the sections of the report, each a list of cases with what differs.

A case is a backend's problem, candidate, mode, instruction set, threads and guard; its status is the worst of its
distributions.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import WITHHELD, Outcome, Seconds, Status
from pytest_gemm.core.text import ratio_text
from pytest_gemm.core.units import plural
from pytest_gemm.report.model import distinct, status_of

# -- one case of one run ------------------------------------------------------------------------------------------


class Standing(enum.Enum):
    """What a status means to a user of the kernel."""

    RIGHT = "right"
    WRONG = "wrong"  # whether the ledger explains it or not
    REFUSED = "refused"
    ABSENT = "absent"


_STANDINGS: Final = {
    Status.PASSED: Standing.RIGHT,
    Status.PRUNED: Standing.REFUSED,
    Status.UNSUPPORTED: Standing.REFUSED,
    Status.NOT_RUN: Standing.ABSENT,
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a run says of one case: its outcomes, one for each distribution and test; none where it has no such case."""

    outcomes: Sequence[Outcome] = ()

    @functools.cached_property
    def worst(self) -> Outcome | None:
        """The outcome that decides."""
        status = status_of(self.outcomes)
        return next((one for one in self.outcomes if one.status is status), None)

    @property
    def standing(self) -> Standing:
        """Right, wrong, refused or absent, as a case is that the ledger forbids to run."""
        if self.worst is None or self.worst.code == WITHHELD:
            return Standing.ABSENT
        return _STANDINGS.get(self.worst.status, Standing.WRONG)

    @property
    def words(self) -> str:
        """The status, with the ledger's entry or the code of the reason: ``incorrect (outside-bound)``."""
        if self.worst is None:
            return "-"
        why = self.worst.known_failure or self.worst.code
        return f"{self.worst.status} ({why})" if why else str(self.worst.status)

    @property
    def note(self) -> str:
        """Why it is not right: the sentence of the outcome that decides, with its distribution."""
        if self.worst is None or self.worst.reason is None:
            return ""
        return ": ".join(filter(None, (self.worst.distribution, self.worst.reason.text)))

    @property
    def seconds(self) -> Seconds:
        """Where the time went."""
        return sum((one.seconds for one in self.outcomes), Seconds())

    @functools.cached_property
    def selection(self) -> Mapping[str, str]:
        """What computed the results, without what a release renames: see :func:`kernel`."""
        found = {
            name: dict.fromkeys(text for one in self.outcomes for text in getattr(one, name))
            for name in ("chosen", "configuration", "kernels")
        }
        found["kernels"] = dict.fromkeys(map(kernel, found["kernels"]))
        fused = distinct(self.outcomes, "fused") - {None}
        return {
            **{name: " + ".join(values) for name, values in found.items()},
            "epilogue": "" if not fused else "in the product's kernel" if fused == {True} else "apart",
            "fusions": str(max((one.fusions for one in self.outcomes), default=0)),
        }

    @functools.cached_property
    def digests(self) -> Mapping[tuple[str, str, int], Outcome]:
        """The outcomes that have a digest, by test, distribution and seed."""
        return {(one.test, one.distribution, one.seed): one for one in self.outcomes if one.bits}


# The name of generated code with the candidate in brackets behind it, and what numbers it: a counter or a hash.
_GENERATED: Final = re.compile(r"\w+_fused_\w+ \((?P<candidate>.+)\)(?P<code> \[.*\])?")
_NUMBER: Final = re.compile(r"_(?:\d+|[0-9a-f]{8,})$")


def kernel(name: str) -> str:
    """A kernel's name without what changes from release to release and means nothing.

    Inductor names its code by the operators that it came from and by a counter, CUTLASS's by a hash. Of generated code
    the candidate stays, which the bracket behind the name has; any other name loses a counter or a hash at its end.
    """
    if found := _GENERATED.fullmatch(name):
        return found["candidate"] + (found["code"] or "")
    return _NUMBER.sub("", name)


def join(outcomes: Iterable[Outcome]) -> dict[CaseId, Facts]:
    """What a run says, by case."""
    found: dict[CaseId, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        found[one.case].append(one)
    return {case: Facts(some) for case, some in found.items()}


# -- what differs -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """A case in a section.

    Attributes:
        case: which.
        what: what differs, in words that many cases share.
        note: what is of this case alone.
    """

    case: CaseId
    what: str
    note: str = ""

    @property
    def family(self) -> tuple[str, str, str, str]:
        """Backend, op, data types and what differs: cases that agree in these are shown as one line."""
        op, dtypes, *_ = [*self.case.problem.split(":"), ""]
        return self.case.who, op, dtypes, self.what


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        title: in a few words.
        help: what its cases are, one sentence.
        rows: one for each case.
        notes: what the section does not show, and why.
        is_bad: whether a case in it makes the comparison fail.
    """

    title: str
    help: str
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    is_bad: bool = False

    @property
    def families(self) -> list[list[Row]]:
        """The rows in groups that agree in :attr:`Row.family`, the largest first."""
        found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in self.rows:
            found[row.family].append(row)
        return sorted(found.values(), key=lambda rows: (-len(rows), rows[0].family))


_Changes = Mapping[CaseId, tuple[Facts, Facts]]


def sections(before: Mapping[CaseId, Facts], after: Mapping[CaseId, Facts]) -> list[Section]:
    """All sections."""
    none = Facts()
    ordered = sorted(before.keys() | after.keys(), key=_by_size)
    changes = {case: (before.get(case, none), after.get(case, none)) for case in ordered}

    def moved(*standings: tuple[Standing, Standing]) -> list[Row]:
        """The cases that went from one standing to another; what is right has no note of its own."""
        return [
            Row(case, f"{old.words} -> {new.words}", new.note or old.note)
            for case, (old, new) in changes.items()
            if (old.standing, new.standing) in standings and old.words != new.words
        ]

    right, wrong, refused, absent = Standing
    in_both = {case: pair for case, pair in changes.items() if all(one.standing is not absent for one in pair)}
    return [
        Section(
            "newly wrong",
            "Cases that were not wrong before and are now, known failures included.",
            moved((right, wrong), (refused, wrong)),
            is_bad=True,
        ),
        Section("newly right", "Cases that were wrong.", moved((wrong, right))),
        Section("newly refused", "Cases that ran.", moved((right, refused), (wrong, refused))),
        Section("newly supported", "Cases that were refused.", moved((refused, right))),
        Section(
            "explained otherwise",
            "Cases that are wrong or refused in both runs, with another status, ledger entry or reason.",
            moved((wrong, wrong), (refused, refused)),
        ),
        Section(
            "only in one run",
            "Cases of one run only.",
            _single(changes),
        ),
        _kernels(in_both),
        _bits(in_both),
    ]


def _by_size(case: CaseId) -> list[str | int]:
    """For sorting by numbers where names have them: words and numbers in turn."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(case))]


def _single(changes: _Changes) -> list[Row]:
    rows = []
    for case, (old, new) in changes.items():
        if (old.standing is Standing.ABSENT) != (new.standing is Standing.ABSENT):
            when, there, other = ("before", old, new) if new.standing is Standing.ABSENT else ("after", new, old)
            rows.append(Row(case, f"{when} only: {there.words}", other.note))
    return rows


def _kernels(changes: _Changes) -> Section:
    """Cases that both runs computed, with another candidate, blocking, kernel or fusion."""
    rows = []
    for case, (old, new) in changes.items():
        parts = [_selected(name, old.selection, new.selection) for name in differing(old, new)]
        if parts and old.selection["kernels"] and new.selection["kernels"]:
            rows.append(Row(case, "; ".join(parts)))
    return Section("other kernels", "Cases that another candidate, blocking, kernel or fusion computed.", rows)


def differing(old: Facts, new: Facts) -> list[str]:
    """Which parts of the selection differ; of candidate, blocking and kernels, which go together, the first one."""
    names = [name for name in old.selection if old.selection[name] != new.selection[name]]
    kernels = [name for name in names if name in {"chosen", "configuration", "kernels"}]
    return [*kernels[:1], *(name for name in names if name not in kernels)]


def _selected(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What differs, without the fields in which a blocking agrees."""
    a, b = old[name], new[name]
    if name == "configuration":
        fields = list(zip(*(re.split("[:,]", text) for text in (a, b)), strict=False))
        a, b = (",".join(pair[side] for pair in fields if pair[0] != pair[1]) or (a, b)[side] for side in (0, 1))
    title = {"chosen": "candidate", "configuration": "blocking"}.get(name, name)
    return f"{title} {a or '-'} -> {b or '-'}"


def _bits(changes: _Changes) -> Section:
    """Cases that are right in both runs with other bits."""
    rows, compared, operands = [], 0, 0
    for case, (old, new) in changes.items():
        if old.standing is not Standing.RIGHT or new.standing is not Standing.RIGHT:
            continue
        pairs = [(old.digests[key], new.digests[key]) for key in old.digests.keys() & new.digests.keys()]
        same = [(a, b) for a, b in pairs if a.operands == b.operands]
        compared += bool(same)
        operands += bool(pairs) and not same
        if others := sorted(((a, b) for a, b in same if a.bits != b.bits), key=lambda ab: ab[0].distribution):
            a, b = max(others, key=lambda ab: ab[1].ratio or 0.0)
            ratios = f"{ratio_text(a.ratio)} -> {ratio_text(b.ratio)} of the bound"
            names = ", ".join(dict.fromkeys(a.distribution for a, _ in others))
            rows.append(Row(case, "another kernel" if differing(old, new) else "the same kernel", f"{names}; {ratios}"))
    notes = [f"Compared: {plural(compared, 'case')} right in both runs."] if compared else []
    if operands:
        notes.append(f"Not compared: {plural(operands, 'case')} with other operands.")
    if not (compared or operands):
        notes.append("Not compared: no case that is right in both runs has digests of the same distribution and seed.")
    help_ = "Cases that are right in both runs, from the same operands, with other bits."
    return Section("other bits", help_, rows, notes)
