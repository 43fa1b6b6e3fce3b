"""The file of known failures, read with an error that names file, line and key."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_gemm.case_id import MODES
from pytest_gemm.ledger.entry import (
    ANY,
    COMPARISON_HELP,
    SIZES,
    THREADS,
    Comparison,
    Entry,
    Globs,
    LedgerError,
    released,
)
from pytest_gemm.machine.isa import ISA_NAMES
from pytest_gemm.machine.processor import cpu
from pytest_gemm.outcome import Status
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, Step
from pytest_gemm.storage.datafile import TableFile, shown
from pytest_gemm.text import did_you_mean

# -- reading ---------------------------------------------------------------------------------------

_TABLE: Final = "known-failure"
_TEXTS: Final = ("id", "reason", "link")
_GLOBS: Final = ("backend", "test", "distribution", "device", "problem", "choice", "mode", "guard", "isa")
_KEYS: Final = (*_TEXTS, *_GLOBS, "threads", "status", "torch", "where", "crashes")
_SIZE: Final = (0, 2**63 - 1)
_WHERE_GLOBS: Final = ("op", "dtypes", "layout", "epilogue", "flags")
_WHERE_KEYS: Final = (*_WHERE_GLOBS, *SIZES)
_REQUIRED: Final = {
    "id": 'give it a name, for example id = "cpp-bf16-tail"',
    "reason": "say in a sentence what is wrong",
    "backend": 'name whom it concerns, for example backend = "cpp"',
}
_STATUSES: Final = {status.value: status for status in Status if status.is_failure}
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "op": tuple(OPS),
    "layout": tuple(layout.value for layout in Layout),
    "flags": tuple(FLAGS),
    "device": ("cpu", "cuda"),
    "mode": MODES,
    "guard": ("end", "begin"),
}
# Of these a case has one word each, of the others any number.
_SINGLE: Final = frozenset({"backend", "device", "dtypes", "layout", "mode", "guard", "op"})


@functools.cache
def _dtypes() -> tuple[str, ...]:
    """What the dtypes of a problem can be, as its line has them."""
    triples = itertools.product(DTYPES, repeat=3)
    return (*DTYPES, *("-".join(three) for three in triples if any(op.dtypes(*three) for op in OPS.values())))


@functools.cache
def _isas() -> tuple[str, ...]:
    """Names of instruction sets: those that matter to a matrix product, and all that this machine has."""
    return tuple(dict.fromkeys((*ISA_NAMES, *cpu().flags)))


class Reader(TableFile):
    """Turns the text into entries.

    Args:
        path: of the ledger.
        backends: names that there are; ``None``: unknown, and no name of a backend is checked.
    """

    def __init__(self, path: Path, backends: Collection[str] | None) -> None:
        super().__init__(path, _TABLE, LedgerError)
        self.words = {**_WORDS, **({} if backends is None else {"backend": tuple(backends)})}

    def entries(self) -> tuple[Entry, ...]:
        """All entries of the file."""
        found: list[Entry] = []
        lines: dict[str, int] = {}
        for table in self.tables():
            entry = self.entry(table)
            if entry.id in lines:
                raise self.fail(f"id {entry.id!r} stands on line {lines[entry.id]} already", "ids are unique", "id")
            lines[entry.id] = self.line("id")
            found.append(entry)
        return tuple(found)

    # -- values ------------------------------------------------------------------------------------

    def entry(self, table: Mapping[str, Any]) -> Entry:
        """One table as an entry."""
        for key in table:
            if key not in _KEYS:
                hint = did_you_mean(key, _KEYS)
                if key in _WHERE_KEYS:
                    hint = f" (it belongs into where = {{ {key} = ... }})"
                raise self.fail(f"unknown key {key!r}{hint}", f"known: {' '.join(_KEYS)}", key)
        for key, remedy in _REQUIRED.items():
            if key not in table:
                raise self.fail(f"{key} is missing", remedy)
        texts: dict[str, Any] = {key: self.string(table[key], key) for key in _TEXTS if key in table}
        globs: dict[str, Any] = {key: self.globs(table[key], key) for key in _GLOBS if key in table}
        for pattern in globs.get("problem", ANY).patterns:
            self.check_line(pattern)
        crashes = table.get("crashes", False)
        if not isinstance(crashes, bool):
            raise self.fail(f"crashes is {shown(crashes)}", "write true or false", "crashes")
        for key in ("distribution", "status"):
            if crashes and key in table:
                raise self.fail(f"{key} beside crashes = true", f"delete {key}: such a case does not run at all", key)
        status = frozenset({Status.CRASHED}) if crashes else self.status(table.get("status", ["incorrect"]))
        specifier = self.specifier(table["torch"]) if "torch" in table else None
        words, sizes = self.where(table.get("where", {}))
        entry = Entry(
            **texts,
            **globs,
            threads=self.threads(table["threads"]) if "threads" in table else (),
            status=status,
            torch=specifier,
            words=words,
            sizes=sizes,
            crashes=crashes,
            line=self.line(),
        )
        if entry.is_open:  # any failure would be green
            remedy = 'name the backend, or add where = { op = "mm" } for example'
            raise self.fail("the entry matches every case", remedy, "backend")
        return entry

    def string(self, value: Any, *keys: str) -> str:
        """A text that is not empty."""
        if not isinstance(value, str) or (not value.strip() and keys[-1] != "link"):
            raise self.fail(f"{keys[-1]} is {shown(value)}", "write a text between quotes", *keys)
        return value

    def globs(self, value: Any, *keys: str) -> Globs:
        """One glob or a list of them."""
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(v, str) and v for v in values):
            raise self.fail(f"{keys[-1]} is {shown(value)}", "write a pattern between quotes, or a list of them", *keys)
        known = {"dtypes": _dtypes, "isa": _isas}.get(keys[-1], lambda: self.words.get(keys[-1], ()))()
        for pattern in values:
            bare = pattern.removeprefix("!")
            if known and not any(fnmatch.fnmatchcase(word, bare) for word in known):
                hint = did_you_mean(bare, known)
                some = " ".join(known[:_LISTED]) + (" ..." if len(known) > _LISTED else "")
                raise self.fail(f"{keys[-1]} {shown(bare)} matches nothing{hint}", f"known: {some}", *keys)
            if keys[-1] == "epilogue" and re.fullmatch(r"[a-z_]+(-.*)?", bare) and bare.split("-")[0] not in STEPS:
                hint = did_you_mean(bare, STEPS)
                raise self.fail(f"{keys[-1]} {bare!r} matches nothing{hint}", f"known: {' '.join(STEPS)}", *keys)
            if keys[-1] == "epilogue":
                self.check_step(bare, *keys)
        found = Globs(tuple(values))
        if keys[-1] in _SINGLE and known and not any(found.match(word) for word in ("", *known)):
            raise self.fail(f"{keys[-1]} {shown(value)}: what matches is excluded", "delete one of the patterns", *keys)
        return found

    def check_step(self, bare: str, *keys: str) -> None:
        """A step without a wildcard must be one, and in its canonical form, or it never matches."""
        if re.search(r"[*?\[]", bare):
            return
        name, _, text = bare.partition("-")
        try:
            canonical = str(Step(name, text))
        except ProblemError as error:
            raise self.fail(f"epilogue {bare!r}: {error.problem}", error.allowed, *keys) from None
        if canonical != bare:
            raise self.fail(f"epilogue {bare!r} is not canonical", f"write {canonical!r}", *keys)

    def check_line(self, pattern: str) -> None:
        """A problem line without a wildcard must be one, and in its canonical form, or it never matches."""
        bare = pattern.removeprefix("!")
        if re.search(r"[*?\[]", bare):
            # A "*" may stand for several fields, so only those before the first one have their place.
            fixed = re.split(r"[*\[]", bare)[0].split(":")[:-1]
            fields = {"op": OPS, "dtypes": _dtypes(), "layout": self.words["layout"]}
            for (key, known), word in zip(fields.items(), fixed, strict=False):
                if not any(fnmatch.fnmatchcase(name, word) for name in known):
                    problem = f"problem {shown(bare)}: {key} {shown(word)} matches nothing{did_you_mean(word, known)}"
                    raise self.fail(problem, "write for example mm:bf16:*", "problem")
            return
        try:
            canonical = Problem.parse(bare).line
        except ProblemError as error:
            head = str(error).partition("\n")[0]
            raise self.fail(f"problem {bare!r}: {head}", "or use a pattern, for example mm:bf16:*", "problem") from None
        if canonical != bare:
            raise self.fail(f"problem {bare!r} is not canonical", f"write {canonical!r}", "problem")

    def status(self, value: Any) -> frozenset[Status]:
        """The statuses that an entry explains."""
        values = value if isinstance(value, list) else [value]
        for word in values:
            if not isinstance(word, str) or word not in _STATUSES:
                hint = did_you_mean(str(word), _STATUSES)
                raise self.fail(f"unknown status {shown(word)}{hint}", f"known: {' '.join(_STATUSES)}", "status")
        if not values:
            raise self.fail("status is empty", f"name some of: {' '.join(_STATUSES)}", "status")
        return frozenset(_STATUSES[word] for word in values)

    def specifier(self, value: Any) -> SpecifierSet:
        """A version specifier."""
        remedy = 'write for example ">=2.12,<2.14"'
        try:
            found = SpecifierSet(self.string(value, "torch"))
        except InvalidSpecifier:
            raise self.fail(f"torch {shown(value)} is no version range", remedy, "torch") from None
        if not any(released(found, release) for release in _near(found)):
            raise self.fail(f"torch {shown(value)}: no release from {_OLDEST} on is in this range", remedy, "torch")
        return found

    def where(self, table: Any) -> tuple[tuple[tuple[str, Globs], ...], tuple[tuple[str, Comparison], ...]]:
        """The conditions on the machine: globs and comparisons."""
        if not isinstance(table, dict):
            raise self.fail(f"where is {shown(table)}", 'write where = { op = "mm", m = ">=4" }', "where")
        words, sizes = [], []
        for key, value in table.items():
            if key in _WHERE_GLOBS:
                words.append((key, self.globs(value, "where", key)))
            elif key in SIZES:
                sizes += [(key, comparison) for comparison in self.comparisons(value, _SIZE, "where", key)]
            else:
                hint = f" (it belongs beside where: {key} = ...)" if key in _KEYS else did_you_mean(key, _WHERE_KEYS)
                raise self.fail(f"unknown key {key!r} in where{hint}", f"known: {' '.join(_WHERE_KEYS)}", "where", key)
        return tuple(words), tuple(sizes)

    def threads(self, value: Any) -> tuple[Comparison, ...]:
        """Comparisons with a number of threads."""
        return tuple(self.comparisons(value, THREADS, "threads"))

    def comparisons(self, value: Any, limits: tuple[int, int], *keys: str) -> list[Comparison]:
        """The conditions on a number between two limits, of which one at least meets them all."""
        values = value if isinstance(value, list) else [value]
        try:
            # A bare number means equality; a bool is an int in Python only.
            found = [
                Comparison("==", v) if isinstance(v, int) and not isinstance(v, bool) else Comparison.parse(v)
                for v in values
            ]
        except (TypeError, ValueError):
            raise self.fail(f"{keys[-1]} {shown(value)} is no comparison", COMPARISON_HELP, *keys) from None
        if not found:
            raise self.fail(f"{keys[-1]} is empty", COMPARISON_HELP, *keys)
        if not _can_hold(found, *limits):
            what = "number of threads" if keys == ("threads",) else "size"
            raise self.fail(f"{keys[-1]} {shown(value)}: no {what} is that", COMPARISON_HELP, *keys)
        return found


# How many known words a message lists.
_LISTED: Final = 24
# The oldest release of torch that this package supports.
_OLDEST: Final = Version("2.11")


def _near(specifiers: SpecifierSet) -> Iterator[str]:
    """Releases from :data:`_OLDEST` on beside those that the range names: one of them is in it, unless none is."""
    named = [_OLDEST]
    with contextlib.suppress(InvalidVersion):  # "===" takes any text
        named += [Version(one.version.removesuffix(".*")) for one in specifiers]
    for one in named:
        major, minor, micro = (*one.release, 0, 0)[:3]
        for step in ((0, 0, 0), (0, 0, 1), (0, 1, -micro), (1, -minor, -micro), (0, 0, -1), (0, -1, -micro)):
            parts = [max(0, part + by) for part, by in zip((major, minor, micro), step, strict=True)]
            if (release := Version(".".join(map(str, parts)))) >= _OLDEST:
                yield str(release)


def _can_hold(comparisons: Iterable[Comparison], least: int, most: int) -> bool:
    """Whether a number between two limits meets all conditions."""
    conditions = list(comparisons)
    for one in conditions:
        if one.modulus is None:
            low, high = {
                "==": (one.number, one.number),
                ">=": (one.number, most),
                ">": (one.number + 1, most),
                "<=": (least, one.number),
                "<": (least, one.number - 1),
            }.get(one.operator, (least, most))
            least, most = max(least, low), min(most, high)
    # Remainders repeat, and each "!=" leaves out one number more.
    span = min(math.lcm(*(one.modulus or 1 for one in conditions)), 1_000_000) + len(conditions)
    return any(all(one.holds(number) for one in conditions) for number in range(least, min(most, least + span) + 1))
