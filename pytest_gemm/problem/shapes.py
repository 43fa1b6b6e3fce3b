"""Sets of problems in a data file: the cases of the suites, and what users add to them.

A file is TOML.  Each ``[[set]]`` has a template of problem lines and axes that are crossed to fill it::

    [[set]]
    name = "decode"
    help = "one token at a time"
    device = "cpu"                          # cpu, cuda, or both as a list (the default)
    level = "quick"                         # from which --gemm-level on; default quick
    problem = "linear:{dtype}:nt:{m}x{nk}"
    dtype = ["f32", "bf16"]
    m = [1, "4..16"]                        # 4 to 16
    nk = ["4096x4096", "11008x4096"]        # N x K

Every key that is not one of :data:`_KEYS` is an axis.  Its values replace its name in braces; braces mean nothing else.
In place of ``problem``, ``problems`` is a list of templates, each crossed with the axes that it names, or of lines
without axes.  With ``draw`` nothing is crossed: so many lines are made, whose sizes are drawn, see
:mod:`~pytest_gemm.problem.draw`.  A ``level`` at the head of the file is that of its sets that have none.
``docs/how-to/adding-a-case.md`` describes the other keys.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.problem import axes
from pytest_gemm.problem.axes import APART, LEVELS, QUICK, TemplateError, Value, unique
from pytest_gemm.problem.draw import DrawError, Point, drawn, size_range
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import Key, TableFile, is_any, is_text, is_texts, shown
from pytest_gemm.storage.errors import FileError

_DEVICES: Final = ("cpu", "cuda")
# A set with more problems is a mistake.
_MOST: Final = 100_000
# The file beside a file of sets whose lists an axis names as "@list".
_SHARED: Final = "axes.toml"


class ShapeError(FileError):
    """A file of sets that cannot be used, or the name of a set that does not exist, with what would be right."""


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", value) is not None


def _are_devices(value: Any) -> bool:
    return value != [] and all(one in _DEVICES for one in (value if isinstance(value, list) else [value]))


_NAME: Final = "a set needs a name of lower-case letters, digits and dashes"
_KEYS: Final[Mapping[str, Key]] = {
    "name": Key(_is_name, _NAME, required=_NAME),
    "help": Key(is_text, "write a text between quotes"),
    "device": Key(_are_devices, 'it is "cpu", "cuda" or both'),
    "level": Key(lambda value: value in (*LEVELS, *APART), f"it is one of {', '.join((*LEVELS, *APART))}"),
    "problem": Key(is_text, "write a problem line with axes in braces"),
    "problems": Key(is_texts, "write a list of problem lines"),
    "exclude": Key(is_texts, "write a list of patterns of problem lines"),
    "spread": Key(is_texts, "write a list of axes"),
    "draw": Key(lambda value: isinstance(value, dict), 'write a table such as { lines = 256, m = "1..1023" }'),
}
_LINES: Final = f"write how many lines are drawn, up to {_MOST}"
_DRAW: Final[Mapping[str, Key]] = {
    "lines": Key(lambda value: isinstance(value, int) and 1 <= value <= _MOST, _LINES, required=_LINES),
    "most": Key(lambda value: isinstance(value, int), "write the largest product that the sizes of a line may have"),
    "seed": Key(is_text, "write a text between quotes: another one is another draw"),
}
_SIZES: Final = Key(is_any, 'write "LOW..HIGH", or "LOW..HIGH/STEP" for multiples of STEP', read=size_range)


@dataclasses.dataclass(frozen=True)
class ProblemSet:
    """A named set of problems.

    Attributes:
        name: what ``--gemm-shapes`` takes.
        help: one sentence.
        devices: for which devices its sizes are meant.
        level: from which level on it belongs to a run that names no sets.
        problems: each once, in the order of the file.
    """

    name: str
    help: str
    devices: tuple[str, ...]
    level: str
    problems: tuple[Problem, ...]


# What has been read: a level has the sets of those below it.
_READ: Final[dict[tuple[Path, str], ProblemSet]] = {}


@functools.lru_cache(maxsize=256)
def read(path: Path, level: str = LEVELS[-1]) -> tuple[ProblemSet, ...]:
    """The sets of a file, up to a level, or those of one of :data:`~pytest_gemm.problem.axes.APART`.

    Raises:
        ShapeError: naming the file, the line and the key.
    """
    file = TableFile(path, "set", ShapeError, head=["level"])
    levels = (level,) if level in APART else LEVELS[: LEVELS.index(level) + 1]
    found: dict[str, ProblemSet | None] = {}
    for table in file.tables():
        name = file.read({key: value for key, value in table.items() if key in _KEYS}, _KEYS)["name"]
        if name in found:
            raise file.fail(f"two sets are called {name!r}", "names are unique", "name")
        found[name] = _read_once(file, table) if table.get("level", QUICK) in levels else None
    if not found:
        raise ShapeError(path, 0, "has no sets", "a file of problems consists of [[set]] tables")
    return tuple(one for one in found.values() if one is not None)


def forget() -> None:
    """Read files again that have been read."""
    read.cache_clear()
    _READ.clear()


def _read_once(file: TableFile, table: Mapping[str, Any]) -> ProblemSet:
    key = (file.path, table["name"])
    if key not in _READ:
        _READ[key] = _set(file, table)
    return _READ[key]


def _set(file: TableFile, table: Mapping[str, Any]) -> ProblemSet:
    if "problem" not in table and "problems" not in table:
        _misspelt(file, table)
    if ("problem" in table) == ("problems" in table):
        remedy = "give either 'problem', a template with axes, or 'problems', a list of lines"
        raise file.fail("it has both" if "problem" in table else "it has no problems", remedy, "problem")
    key = "problem" if "problem" in table else "problems"
    try:
        problems = unique(map(Problem.parse, _lines(file, table, key)))
    except ProblemError as error:
        head = str(error).partition("\n")[0]
        raise file.fail(f"problem {shown(error.line)}: {head}", "correct the line", key) from None
    device = table.get("device", list(_DEVICES))
    devices = tuple(device) if isinstance(device, list) else (device,)
    return ProblemSet(table["name"], table.get("help", ""), devices, table.get("level", QUICK), problems)


def _misspelt(file: TableFile, names: Iterable[str]) -> None:
    """Answer a key that is nearly one of those known; every other one is an axis."""
    for name in names:
        if name not in _KEYS and (hint := did_you_mean(name, _KEYS)):
            raise file.fail(f"unknown key {name!r}{hint}", f"known: {' '.join(_KEYS)}; others are axes", name)


def _lines(file: TableFile, table: Mapping[str, Any], key: str) -> list[str]:
    """The problem lines of the templates and axes of a set."""
    templates = [table[key]] if key == "problem" else table[key]
    found: axes.Axes = {name: _values(file, name, value) for name, value in table.items() if name not in _KEYS}
    if "draw" in table:
        found = {"draw": _drawn(file, table, found)}
    for name, values in found.items():
        if unused := [one for one in axes.names(name, values) if not any(f"{{{one}}}" in line for line in templates)]:
            _misspelt(file, [name])
            raise file.fail(f"no template has {{{unused[0]}}}", "delete this axis, or use it", name)
    for name in table.get("spread", ()):
        if name not in found:
            hint = did_you_mean(name, found)
            raise file.fail(f"spread has {shown(name)}, which is no axis{hint}", "name an axis", "spread")
    if math.prod(map(len, found.values())) > _MOST:
        raise file.fail(f"the axes make more than {_MOST} problems", "divide the set, or shorten its axes", "problem")
    try:
        lines = axes.lines(templates, found, table.get("spread", ()))
    except TemplateError as error:
        known = [one for name, values in found.items() for one in sorted(axes.names(name, values))]
        raise file.fail(str(error), f"axes of this set: {', '.join(known) or 'none'}", key) from None
    return _without(file, lines, table.get("exclude", ()))


def _drawn(file: TableFile, table: Mapping[str, Any], others: axes.Axes) -> list[Point]:
    """The values of the axes in each line of a set with ``draw``: the keys that are not in ``_DRAW`` have sizes."""
    given = file.read(table["draw"], {**dict.fromkeys(table["draw"], _SIZES), **_DRAW}, "draw")
    sizes = {axis: values for axis, values in given.items() if axis not in _DRAW}
    if not sizes:
        raise file.fail("draw has no sizes", 'write m = "1..1023" in it for instance', "draw")
    if "spread" in table:
        raise file.fail("a set with draw has spread", "delete it: every axis of such a set is spread", "spread")
    seed = f"{table['name']} {given.get('seed', '')}"
    try:
        return drawn(given["lines"], sizes, others, given.get("most", math.inf), seed)
    except DrawError as error:
        raise file.fail(str(error), "raise most, or shorten the ranges", "draw", "most") from None


def _without(file: TableFile, lines: list[str], patterns: Iterable[str]) -> list[str]:
    """The lines that match no pattern; each pattern matches a line."""
    for pattern in patterns:
        kept = [line for line in lines if not fnmatch.fnmatchcase(line, pattern)]
        if len(kept) == len(lines):
            raise file.fail(f"exclude {shown(pattern)} matches no line", "delete it, or correct it", "exclude")
        lines = kept
    return lines


def _values(file: TableFile, axis: str, values: Any) -> list[Value]:
    """The values of an axis, with lists that are named and ranges in their places."""
    if not isinstance(values, list) or not values or not all(map(_is_value, values)):
        _misspelt(file, [axis])
        remedy = "an axis is a list of texts, numbers and tables of them"
        raise file.fail(f"the axis {shown(axis)} is {shown(values)}", remedy, axis)
    found: list[Value] = []
    for one in values:
        if isinstance(one, str) and one.startswith("@"):
            shared = _shared(file.path.with_name(_SHARED))
            if one[1:] not in shared:
                hint = did_you_mean(one[1:], shared)
                raise file.fail(f"the axis {shown(axis)}: no list {shown(one)}{hint}", f"see {_SHARED}", axis)
            found += shared[one[1:]]
        elif isinstance(one, str) and (ends := re.fullmatch(r"(\d{1,6})\.\.(\d{1,6})", one)):
            found += range(int(ends[1]), int(ends[2]) + 1)
        else:
            found.append(one)
    return found


@functools.cache
def _shared(path: Path) -> Mapping[str, list[Value]]:
    """The named lists of ``axes.toml``; none where the file does not exist."""
    if not path.exists():
        return {}
    file = TableFile(path, "set", ShapeError)
    for name, values in (found := file.document()).items():
        if not isinstance(values, list) or not all(map(_is_plain, values)):
            raise ShapeError(path, file.place(name), f"{name} is {shown(values)}", "write a list of texts and numbers")
    return found


def _is_value(value: object) -> bool:
    """Whether an axis may have this value: a plain one, or a table of plain ones."""
    return _is_plain(value) or (isinstance(value, dict) and bool(value) and all(map(_is_plain, value.values())))


def _is_plain(value: object) -> bool:
    """Whether a value is a text, or a number that can stand in a problem line."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def select(shipped: Path, wanted: Sequence[str], level: str, device: str, root: Path) -> tuple[Problem, ...]:
    """The problems of a run on a device.

    Args:
        shipped: the suite's own file.
        wanted: names of its sets and paths of other files; empty: the sets of the level that are meant for the device.
        level: as ``--gemm-level``.
        device: ``cpu`` or ``cuda``.
        root: where relative paths begin.

    Raises:
        ShapeError: for a name that is neither a set nor a file.
    """
    if not wanted:
        return _problems(one for one in read(shipped, level) if device in one.devices)
    sets = {one.name: one for one in read(shipped)}
    chosen: list[ProblemSet] = []
    for name in wanted:
        if name in sets:
            chosen.append(sets[name])
        elif (root / name).exists() or "." in name:
            # A set that says for which device it is meant is not run on the other one.
            chosen += [one for one in read(root / name) if device in one.devices]
        else:
            hint = did_you_mean(name, sets)
            raise ShapeError(name, 0, f"no set{hint} and no file", f"sets are {', '.join(sets)}")
    return _problems(chosen)


def _problems(sets: Iterable[ProblemSet]) -> tuple[Problem, ...]:
    return unique(problem for one in sets for problem in one.problems)
