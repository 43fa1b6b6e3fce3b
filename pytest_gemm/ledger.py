"""The ledger of known failures: predicates over cases and machines, each with a reason, in a TOML file.

A known failure still runs (unless it can kill the process); it is only not red.  An entry whose cases have all
come to pass is an error, so that the ledger never outlives the defects.  Pure data: reading, matching
and counting, no pytest and no torch.  ``docs/known-failures.md`` describes the file for its writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_gemm.machine.isa import ISA_NAMES, flags_at
from pytest_gemm.machine.processor import cpu
from pytest_gemm.outcome import MODES, FileError, Outcome, Status
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError, did_you_mean
from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import ALL_FLAGS
from pytest_gemm.problem.steps import STEPS, Step
from pytest_gemm.storage.datafile import TableFile, shown

__all__ = ["Comparison", "Entry", "Environment", "Globs", "Ledger", "LedgerError", "LedgerUse"]


class LedgerError(FileError):
    """A ledger that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What an entry may ask about the machine and the installation.

    Attributes:
        torch: version as torch gives it, ``2.13.0+cpu``.
        isa: names of what the hardware has, lower case: ``avx2``, ``avx512_vnni``, ``amx_tile``, ``sm_90``.
        device: where the backend computes, ``cpu`` or ``cuda``.
        threads: CPU threads of PyTorch, 0 where nobody knows.
    """

    torch: str
    isa: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int = 0

    def at(self, isa: str, threads: int = 0) -> Environment:
        """The same machine as a case sees it that has CPU threads of its own, or code for a lower instruction set.

        Args:
            isa: what code was generated for, "" for the machine's own.
            threads: of the case, 0 for those of the run.
        """
        flags = flags_at(self.isa, isa) if isa and self.device == "cpu" else self.isa
        return dataclasses.replace(self, isa=flags, threads=threads or self.threads)


@dataclasses.dataclass(frozen=True)
class Globs:
    """Shell patterns over words, case-sensitive; a leading ``!`` excludes.

    They hold for a set of words when no word matches an excluding pattern and, if there is a pattern that
    does not exclude, some word matches one.
    """

    patterns: tuple[str, ...] = ("*",)

    @property
    def is_open(self) -> bool:
        """Whether the patterns hold for all words."""
        return "*" in self.patterns and not any(p.startswith("!") for p in self.patterns)

    def match(self, *words: str) -> bool:
        """Whether the patterns hold for these words, taken together."""
        included = [p for p in self.patterns if not p.startswith("!")]
        excluded = [p[1:] for p in self.patterns if p.startswith("!")]
        if any(fnmatch.fnmatchcase(word, p) for word in words for p in excluded):
            return False
        return not included or "*" in included or any(fnmatch.fnmatchcase(w, p) for w in words for p in included)


_OPERATORS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_COMPARISON: Final = re.compile(r"\s*(?:%\s*([1-9]\d*)\s*)?(==|!=|<=|>=|<|>)\s*(\d+)\s*")
_COMPARISON_HELP: Final = 'write for example ">=4", "==1" or "%16!=0", or a list of which all must hold'


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A condition on a size or another number: ``>=4``, or ``%16!=0`` (the remainder modulo 16 is not 0)."""

    operator: str
    number: int
    modulus: int | None = None

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Read one condition.

        Raises:
            ValueError: when it is none.
        """
        match = _COMPARISON.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a comparison")
        return cls(match[2], int(match[3]), int(match[1]) if match[1] else None)

    def holds(self, size: int | None) -> bool:
        """Whether ``size`` meets the condition; a size that a problem does not have meets none."""
        if size is None:
            return False
        value = size if self.modulus is None else size % self.modulus
        return _OPERATORS[self.operator](value, self.number)


_ANY: Final = Globs()
_SIZES: Final = ("m", "n", "k", "batch")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One known failure: whom, what and where it strikes, and why.

    Attributes:
        id: what reports call it.
        reason: one sentence for the reader of a report.
        link: an issue or a commit, "" for none.
        backend, test, filling, device, problem: patterns over the names of the case.
        choice: patterns over the names of the candidate that was judged, whoever chose it.
        mode: patterns over the mode; a case in its backend's own way has the mode "", which ``*`` matches.
        guard: the same over the side of guard pages, ``end`` or ``begin``, "" without.
        status: how it fails.
        torch: releases that have it, ``None`` for all.
        isa: patterns over the names of the machine's instruction sets, taken together.
        threads: conditions on the number of CPU threads that a case is judged with; all hold.
        words: patterns over the problem's ``op dtypes layout epilogue flags``.
        sizes: conditions on ``m n k batch``; all hold.
        crashes: it can kill the process, so it must not be run.
        line: where it stands in its file, 1-based.
    """

    id: str
    reason: str
    backend: Globs
    link: str = ""
    test: Globs = _ANY
    filling: Globs = _ANY
    device: Globs = _ANY
    problem: Globs = _ANY
    choice: Globs = _ANY
    mode: Globs = _ANY
    guard: Globs = _ANY
    isa: Globs = _ANY
    threads: tuple[Comparison, ...] = ()
    status: frozenset[Status] = frozenset({Status.INCORRECT})
    torch: SpecifierSet | None = None
    words: tuple[tuple[str, Globs], ...] = ()
    sizes: tuple[tuple[str, Comparison], ...] = ()
    crashes: bool = False
    line: int = 0

    @property
    def is_open(self) -> bool:
        """Whether every case of every run is one of its cases; how it ends is not asked."""
        globs = [value for value in vars(self).values() if isinstance(value, Globs)]
        sizes = [*self.threads, *(comparison for _, comparison in self.sizes)]
        return (
            all(found.is_open for found in (*globs, *(found for _, found in self.words)))
            and all(comparison.holds(size) for comparison in sizes for size in range(_THREADS[1]))
            and _released(self.torch, "0")
            and _released(self.torch, "9999")
        )

    def applies(self, backend: str, problem: Problem, test: str, environment: Environment) -> bool:
        """Whether the entry speaks of this case at all; the filling and how it ends are not asked."""
        return (
            self.backend.match(backend)
            and self.test.match(test)
            and self.problem.match(problem.line)
            and self.device.match(environment.device)
            and self.isa.match(*environment.isa)
            and all(comparison.holds(environment.threads or None) for comparison in self.threads)
            and _released(self.torch, environment.torch)
            and all(globs.match(*_words(problem, key)) for key, globs in self.words)
            and all(comparison.holds(getattr(problem.shape, key)) for key, comparison in self.sizes)
        )


def _words(problem: Problem, key: str) -> tuple[str, ...]:
    """The words that a pattern of the ``where`` table is held against."""
    return {
        "op": (problem.op.name,),
        "dtypes": (str(problem.dtypes),),
        "layout": (str(problem.layout),),
        "epilogue": tuple(map(str, problem.epilogue)),
        "flags": problem.flags,
    }[key]


def _released(specifier: SpecifierSet | None, version: str) -> bool:
    """Whether a torch version is meant.

    A nightly or source build counts as the release that it leads to: ``2.14.0.dev20260101`` and
    ``2.14.0a0+gitabc`` are 2.14.0, so that ``<2.14`` ends with the branch that has the fix.
    """
    if specifier is None:
        return True
    try:
        return specifier.contains(Version(version).base_version, prereleases=True)
    except InvalidVersion:
        return False


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
        return cls(_Reader(path, backends).entries(), path)

    def match(self, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """The first entry that explains a failed outcome; ``None`` for one that nobody knows, or no failure."""
        covering = self.covering(outcome, problem, environment)
        return next((entry for entry in covering if outcome.status in entry.status), None)

    def covering(self, outcome: Outcome, problem: Problem, environment: Environment) -> tuple[Entry, ...]:
        """Every entry that speaks of this outcome's case, however it ended."""
        return tuple(
            entry
            for entry in self.entries
            if entry.filling.match(outcome.filling)
            and entry.choice.match(*((outcome.choice,) if outcome.choice else outcome.chosen))
            and entry.mode.match(outcome.mode)
            and entry.guard.match(outcome.guard)
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
                and (entry.choice.match(choice) if choice else entry.choice == _ANY)
                and entry.mode.match(mode)
                and entry.applies(backend, problem, test, environment)
            ),
            None,
        )


class LedgerUse:
    """How often each entry was needed in a run; mergeable, so that xdist workers can send theirs.

    Attributes:
        failed: outcomes that an entry explains, by id.
        differed: outcomes that it speaks of and that failed in another way than it says.
        passed: outcomes that it speaks of and that passed.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()
        self.differed: Counter[str] = Counter()
        self.passed: Counter[str] = Counter()

    def note(self, ledger: Ledger, outcome: Outcome, problem: Problem, environment: Environment) -> Entry | None:
        """Count an outcome for every entry that speaks of it, and return the one that explains it.

        Args:
            ledger: the entries.
            outcome: as judged, before the ledger changed anything of it.
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
        """Entries that spoke of at least one outcome and of which all passed: they are to be deleted.

        Only a run of the whole level can tell; one that was narrowed down may have left out the cases that fail.
        """
        return tuple(
            entry
            for entry in ledger.entries
            if self.passed[entry.id] and not self.failed[entry.id] and not self.differed[entry.id]
        )


# -- reading ---------------------------------------------------------------------------------------

_TABLE: Final = "known-failure"
_TEXTS: Final = ("id", "reason", "link")
_GLOBS: Final = ("backend", "test", "filling", "device", "problem", "choice", "mode", "guard", "isa")
_KEYS: Final = (*_TEXTS, *_GLOBS, "threads", "status", "torch", "where", "crashes")
# Numbers of threads and sizes that there can be: a condition that none of them meets was meant otherwise.
_THREADS: Final = (1, 4096)
_SIZE: Final = (0, 2**63 - 1)
_WHERE_GLOBS: Final = ("op", "dtypes", "layout", "epilogue", "flags")
_WHERE_KEYS: Final = (*_WHERE_GLOBS, *_SIZES)
_REQUIRED: Final = {
    "id": 'give it a name, for example id = "cpp-bf16-tail"',
    "reason": "say in a sentence what is wrong",
    "backend": 'name whom it concerns, for example backend = "cpp"',
}
_STATUSES: Final = {status.value: status for status in Status if status.is_failure}
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "op": tuple(OPS),
    "layout": tuple(layout.value for layout in Layout),
    "flags": tuple(ALL_FLAGS),
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


class _Reader(TableFile):
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
        for pattern in globs.get("problem", _ANY).patterns:
            self.check_line(pattern)
        crashes = table.get("crashes", False)
        if not isinstance(crashes, bool):
            raise self.fail(f"crashes is {shown(crashes)}", "write true or false", "crashes")
        for key in ("filling", "status"):
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
        if not isinstance(value, str) or (not value.strip() and keys[-1] != "link"):
            raise self.fail(f"{keys[-1]} is {shown(value)}", "write a text between quotes", *keys)
        return value

    def globs(self, value: Any, *keys: str) -> Globs:
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
        values = value if isinstance(value, list) else [value]
        for word in values:
            if not isinstance(word, str) or word not in _STATUSES:
                hint = did_you_mean(str(word), _STATUSES)
                raise self.fail(f"unknown status {shown(word)}{hint}", f"known: {' '.join(_STATUSES)}", "status")
        if not values:
            raise self.fail("status is empty", f"name some of: {' '.join(_STATUSES)}", "status")
        return frozenset(_STATUSES[word] for word in values)

    def specifier(self, value: Any) -> SpecifierSet:
        remedy = 'write for example ">=2.12,<2.14"'
        try:
            found = SpecifierSet(self.string(value, "torch"))
        except InvalidSpecifier:
            raise self.fail(f"torch {shown(value)} is no version range", remedy, "torch") from None
        if not any(_released(found, release) for release in _near(found)):
            raise self.fail(f"torch {shown(value)}: no release from {_OLDEST} on is in this range", remedy, "torch")
        return found

    def where(self, table: Any) -> tuple[tuple[tuple[str, Globs], ...], tuple[tuple[str, Comparison], ...]]:
        if not isinstance(table, dict):
            raise self.fail(f"where is {shown(table)}", 'write where = { op = "mm", m = ">=4" }', "where")
        words, sizes = [], []
        for key, value in table.items():
            if key in _WHERE_GLOBS:
                words.append((key, self.globs(value, "where", key)))
            elif key in _SIZES:
                sizes += [(key, comparison) for comparison in self.comparisons(value, _SIZE, "where", key)]
            else:
                hint = f" (it belongs beside where: {key} = ...)" if key in _KEYS else did_you_mean(key, _WHERE_KEYS)
                raise self.fail(f"unknown key {key!r} in where{hint}", f"known: {' '.join(_WHERE_KEYS)}", "where", key)
        return tuple(words), tuple(sizes)

    def threads(self, value: Any) -> tuple[Comparison, ...]:
        return tuple(self.comparisons(value, _THREADS, "threads"))

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
            raise self.fail(f"{keys[-1]} {shown(value)} is no comparison", _COMPARISON_HELP, *keys) from None
        if not found:
            raise self.fail(f"{keys[-1]} is empty", _COMPARISON_HELP, *keys)
        if not _can_hold(found, *limits):
            what = "number of threads" if keys == ("threads",) else "size"
            raise self.fail(f"{keys[-1]} {shown(value)}: no {what} is that", _COMPARISON_HELP, *keys)
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
