"""The file of known failures, read with an error that names file, line and key."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from pytest_gemm.core.case_id import MODES, Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.core.text import did_you_mean
from pytest_gemm.ledger.computes import COMPUTES
from pytest_gemm.ledger.entry import SIZES, THREADS, Comparison, Comparisons, Entry, Globs, LedgerError, Releases
from pytest_gemm.machine.isa import ISA_NAMES, LIBRARIES
from pytest_gemm.machine.processor import cpu
from pytest_gemm.machine.software import OLDEST_TORCH
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, Step
from pytest_gemm.storage.datafile import Key, TableFile, WrongValue, is_any, is_text, is_texts, shown

_OLDEST: Final = Version(OLDEST_TORCH)
# How many known words a message lists.
_LISTED: Final = 24
_STATUSES: Final = {status.value: status for status in Status if status.is_failure}
# What the dtypes of a problem can be, as its line has them.
_DTYPES: Final = tuple(dict.fromkeys((*DTYPES, *(line for op in OPS.values() for line in op.dtypes))))
_LAYOUTS: Final = tuple(layout.value for layout in Layout)

Words = Callable[[], Collection[str]]


def read(path: Path, backends: Collection[str] | None) -> tuple[Entry, ...]:
    """The entries of a ledger.

    Args:
        path: of the ledger.
        backends: registered names; ``None``: unknown, and no name of a backend is checked.

    Raises:
        LedgerError: with file and line, when it cannot be read or an entry makes no sense.
    """
    file = TableFile(path, "known-failure", LedgerError)
    keys = {**_KEYS, "backend": _globs(lambda: backends or (), single=True, required=_BACKEND)}
    found: dict[str, Entry] = {}
    lines: dict[str, int] = {}
    for table in file.tables():
        entry = _entry(file, table, keys)
        if entry.id in found:
            raise file.fail(f"id {entry.id!r} stands on line {lines[entry.id]} already", "ids are unique", "id")
        found[entry.id], lines[entry.id] = entry, file.line("id")
    return tuple(found.values())


def _entry(file: TableFile, table: Mapping[str, Any], keys: Mapping[str, Key]) -> Entry:
    into = {key: f" (it belongs into where = {{ {key} = ... }})" for key in _WHERE}
    values = file.read(table, keys, **into)
    where = values.pop("where", {})
    beside = {key: f" (it belongs beside where: {key} = ...)" for key in keys}
    where = file.read(where, _WHERE, "where", **beside)
    if values.get("crashes"):
        for key in {"distribution", "status", "computes", "says", "unstated"} & set(table):
            problem, remedy = f"{key} beside crashes = true", f"delete {key}: such a case does not run at all"
            raise file.fail(problem, remedy, key)
        values["status"] = frozenset({Status.CRASHED})
    if "unstated" in values and {"computes", "says"} & set(table):
        raise file.fail("unstated beside what the entry states", "delete one of them", "unstated")
    plain = {key: values.pop(key) for key in _PLAIN if key in values}
    entry = Entry(**plain, conditions={**values, **where}, line=file.line())
    if entry.is_open:  # any failure would be green
        remedy = 'name the backend, or add where = { op = "mm" } for example'
        raise file.fail("the entry matches every case", remedy, "backend")
    return entry


# -- patterns --------------------------------------------------------------------------------------------------


def _globs(
    known: Words = lambda: (),
    *,
    single: bool = False,
    required: str = "",
    check: Callable[[str], None] | None = None,
    check_all: Callable[[Collection[str]], None] | None = None,
) -> Key:
    """One glob or a list of them.

    Args:
        known: the words, one of which each pattern matches; none: any.
        single: whether a case has one of these words, rather than any number.
        required: as of :class:`Key`.
        check: raises :class:`WrongValue` for a wrong pattern, given without its ``!``.
        check_all: raises it for all patterns together.
    """

    def read(value: Any) -> Globs:
        found = Globs((value,) if isinstance(value, str) else tuple(value))
        words = known()
        for bare in (pattern.removeprefix("!") for pattern in found.patterns):
            if words and not any(fnmatch.fnmatchcase(word, bare) for word in words):
                raise _no_match(bare, words)
            if check is not None:
                check(bare)
        if check_all is not None:
            check_all(found.patterns)
        if single and words and not any(found.match(word) for word in ("", *words)):
            raise WrongValue(f"{shown(value)}: what matches is excluded", "delete one of the patterns")
        return found

    return Key(_is_globs, "write a pattern between quotes, or a list of them", required, read)


def _is_globs(value: Any) -> bool:
    return value != "" and (is_text(value) or (is_texts(value) and "" not in value))


def _no_match(bare: str, known: Collection[str]) -> WrongValue:
    some = " ".join([*known][:_LISTED]) + (" ..." if len(known) > _LISTED else "")
    return WrongValue(f"{shown(bare)} matches nothing{did_you_mean(bare, known)}", f"known: {some}")


@functools.cache
def _isas() -> tuple[str, ...]:
    """Words of an ``isa``: architectures, instruction sets that matter to a matrix product or that this machine has."""
    libraries = (f"{library}:{name}" for library in LIBRARIES for name in ISA_NAMES)
    return tuple(dict.fromkeys(("x86_64", "aarch64", *ISA_NAMES, *cpu().flags, *libraries)))


def _check_positive(patterns: Collection[str]) -> None:
    """Refuse an ``isa`` that only excludes: x86's names are those that every ARM processor lacks."""
    if all(pattern.startswith("!") for pattern in patterns):
        remedy = f'name what it has too, isa = ["x86_64", "{next(iter(patterns), "!avx512*")}"] for example'
        raise WrongValue("every pattern excludes, so that it holds on every other architecture", remedy)


def _is_pattern(text: str) -> bool:
    return re.search(r"[*?\[]", text) is not None


def _check_step(bare: str) -> None:
    """A step without a wildcard exists and is in its canonical form, or it never matches."""
    name = bare.partition("-")[0]
    if re.fullmatch(r"[a-z_]+", name) and name not in STEPS:
        raise _no_match(bare, STEPS)
    if not _is_pattern(bare):
        _check_canonical(bare, lambda: str(Step.parse(bare)))


def _check_canonical(bare: str, canonical: Callable[[], str]) -> None:
    try:
        found = canonical()
    except ProblemError as error:
        raise WrongValue(f"{bare!r}: {error.field}: {error.problem}", error.allowed) from None
    if found != bare:
        raise WrongValue(f"{bare!r} is not canonical", f"write {found!r}")


def _check_line(bare: str) -> None:
    """A problem line without a wildcard is one, and in its canonical form, or it never matches."""
    if not _is_pattern(bare):
        return _check_canonical(bare, lambda: Problem.parse(bare).line)
    # A "*" may stand for several fields, so only those before the first one have their place.
    fixed = re.split(r"[*\[]", bare)[0].split(":")[:-1]
    for (field, known), word in zip((("op", OPS), ("dtypes", _DTYPES), ("layout", _LAYOUTS)), fixed, strict=False):
        if not any(fnmatch.fnmatchcase(name, word) for name in known):
            problem = f"{shown(bare)}: {field} {shown(word)} matches nothing{did_you_mean(word, known)}"
            raise WrongValue(problem, "write for example mm:bf16:*")
    return None


# -- conditions on numbers -------------------------------------------------------------------------------------


def _comparisons(least: int, most: int, what: str) -> Key:
    """Conditions on a number between two limits, of which one at least meets them all."""

    def read(value: Any) -> Comparisons:
        try:
            found = tuple(map(_comparison, value if isinstance(value, list) else [value]))
        except (TypeError, ValueError):
            raise WrongValue(f"{shown(value)} is no comparison") from None
        if not found:
            raise WrongValue("is empty")
        if not _can_hold(found, least, most):
            raise WrongValue(f"{shown(value)}: no {what} is that")
        return Comparisons(found)

    remedy = 'write for example ">=4", "==1" or "%16!=0", or a list of which all must hold'
    return Key(is_any, remedy, read=read)


def _comparison(value: Any) -> Comparison:
    """One condition; a bare number means equality.  A bool is an int in Python only."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Comparison("==", value)
    return Comparison.parse(value)


def _can_hold(conditions: Collection[Comparison], least: int, most: int) -> bool:
    """Whether a number between two limits meets all conditions."""
    # The least one follows a bound.  From there on remainders repeat, and each "!=" leaves out one number more.
    span = min(math.lcm(*(one.modulus or 1 for one in conditions)), 1_000_000) + len(conditions) + 1
    bounds = {least, *(one.number for one in conditions if one.modulus is None and one.number > least)}
    numbers = (number for bound in bounds for number in range(bound, min(most, bound + span) + 1))
    return any(all(one.holds(number) for one in conditions) for number in numbers)


# -- other values ----------------------------------------------------------------------------------------------


def _read_statuses(value: Any) -> frozenset[Status]:
    words = value if isinstance(value, list) else [value]
    for word in words:
        if not isinstance(word, str) or word not in _STATUSES:
            raise WrongValue(f"{shown(word)} is unknown{did_you_mean(str(word), _STATUSES)}")
    if not words:
        raise WrongValue("is empty")
    return frozenset(_STATUSES[word] for word in words)


@functools.cache  # tens of entries have the same few, and to look for a release takes milliseconds
def _read_releases(value: str) -> Releases:
    try:
        found = Releases(SpecifierSet(value))
    except InvalidSpecifier:
        raise WrongValue(f"{shown(value)} is no version range", 'write for example ">=2.12,<2.14"') from None
    releases = (f"{major}.{minor}.{micro}" for major in (2, 3) for minor in range(100) for micro in range(20))
    if not any(found.match(release) for release in releases if Version(release) >= _OLDEST):
        raise WrongValue(f"{shown(value)}: no release from {_OLDEST} on is in this range")
    return found


def _is_filled(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


# -- the keys --------------------------------------------------------------------------------------------------

# The keys that are no conditions.
_PLAIN: Final = ("id", "reason", "link", "status", "computes", "says", "unstated", "sometimes", "crashes")
_TEXT: Final = "write a text between quotes"
_BACKEND: Final = 'name a backend, for example backend = "cpp"'
_KEYS: Final[Mapping[str, Key]] = {
    "id": Key(_is_filled, _TEXT, 'give it a name, for example id = "cpp-bf16-tail"'),
    "reason": Key(_is_filled, _TEXT, "say in a sentence what is wrong"),
    "link": Key(is_text, _TEXT),
    "backend": _globs(required=_BACKEND),
    "test": _globs(),
    "distribution": _globs(),
    "device": _globs(lambda: [device.value for device in Device], single=True),
    "problem": _globs(check=_check_line),
    "candidate": _globs(),
    "configuration": _globs(),
    "mode": _globs(lambda: MODES, single=True),
    "guard": _globs(lambda: ("end", "begin"), single=True),
    "isa": _globs(_isas, check_all=_check_positive),
    "threads": _comparisons(*THREADS, "number of threads"),
    "run_threads": _comparisons(*THREADS, "number of threads"),
    "status": Key(is_any, f"known: {' '.join(_STATUSES)}", read=_read_statuses),
    "computes": _globs(lambda: COMPUTES),
    "says": _globs(),
    "unstated": Key(_is_filled, "say in a sentence why the failure cannot be stated"),
    "sometimes": Key(_is_filled, "say in a sentence where all of its cases pass"),
    "torch": Key(_is_filled, _TEXT, read=_read_releases),
    "where": Key(lambda value: isinstance(value, dict), 'write where = { op = "mm", m = ">=4" }'),
    "crashes": Key(lambda value: isinstance(value, bool), "write true or false"),
}
_WHERE: Final[Mapping[str, Key]] = {
    "op": _globs(lambda: OPS, single=True),
    "dtypes": _globs(lambda: _DTYPES, single=True),
    "layout": _globs(lambda: _LAYOUTS, single=True),
    "epilogue": _globs(check=_check_step),
    "flags": _globs(lambda: FLAGS),
    **{size: _comparisons(0, 2**63 - 1, "size") for size in SIZES},
}
