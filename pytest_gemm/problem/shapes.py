"""Problems from a data file: what the speed suite times, and what users add to it.

A shapes file is TOML.  Each ``[[set]]`` has a template of problem lines and axes that are crossed to fill it::

    [[set]]
    name = "decode"
    help = "one token at a time"
    device = "cpu"                          # cpu, cuda, or both as a list (the default)
    level = "quick"                         # from which --gemm-level on; default quick
    problem = "linear:{dtype}:nt:{m}x{nk}"
    dtype = ["f32", "bf16"]
    m = [1, 4, 16]
    nk = ["4096x4096", "11008x4096"]        # N x K

Every key that is none of the first five is an axis, whose values take the place of its name in braces; braces mean
nothing else.  A set without axes is a list of lines in ``problems``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from pytest_gemm.problem.axes import LEVELS, Cases, TemplateError, unique
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import TableFile, shown
from pytest_gemm.storage.errors import FileError
from pytest_gemm.text import did_you_mean

_DEVICES: Final = ("cpu", "cuda")
_OWN: Final = frozenset({"name", "help", "device", "level", "problem", "problems"})


# So many problems of one set were meant otherwise.
_MOST: Final = 100_000


class ShapeError(FileError):
    """A shapes file that cannot be used, or the name of a set that does not exist, with what would be right."""


@dataclasses.dataclass(frozen=True)
class ShapeSet:
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


@functools.lru_cache(maxsize=16)
def read(path: Path) -> tuple[ShapeSet, ...]:
    """All sets of a file.

    Raises:
        ShapeError: naming the file, the line and the key.
    """
    file = TableFile(path, "set", ShapeError)
    found: dict[str, ShapeSet] = {}
    for table in file.tables():
        one = _set(file, table)
        if one.name in found:
            raise file.fail(f"two sets are called {one.name!r}", "names are unique", "name")
        found[one.name] = one
    if not found:
        raise ShapeError(path, 0, "has no sets", "a shapes file consists of [[set]] tables")
    return tuple(found.values())


def _set(file: TableFile, table: Mapping[str, Any]) -> ShapeSet:
    def fail(key: str, remedy: str) -> NoReturn:
        raise file.fail(f"{key} is {shown(table[key])}", remedy, key)

    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9-]+", name):
        problem = "name is missing" if name is None else f"name is {shown(name)}"
        raise file.fail(problem, "a set needs a name of lower-case letters, digits and dashes", "name")
    if not isinstance(table.get("help", ""), str):
        fail("help", "write a text between quotes")
    devices = table.get("device", list(_DEVICES))
    devices = devices if isinstance(devices, list) else [devices]
    if not devices or not all(one in _DEVICES for one in devices):
        fail("device", 'it is "cpu", "cuda" or both')
    level = table.get("level", "quick")
    if level not in LEVELS:
        fail("level", f"it is one of {', '.join(LEVELS)}")
    if ("problem" in table) == ("problems" in table):
        remedy = "give either 'problem', a template with axes, or 'problems', a list of lines"
        raise file.fail("it has both" if "problem" in table else "it has no problems", remedy, "problem")
    key = "problem" if "problem" in table else "problems"
    lines = table[key] if key == "problems" else _lines(file, table)
    if not isinstance(lines, list) or not lines or not all(isinstance(line, str) for line in lines):
        fail(key, "write a list of problem lines")
    unknown = [other for other in table if other not in _OWN]
    if key == "problems" and unknown:
        hint = did_you_mean(unknown[0], _OWN)
        raise file.fail(f"unknown key {shown(unknown[0])}{hint}", "axes need a template, 'problem'", unknown[0])
    try:
        problems = unique(map(Problem.parse, lines))
    except ProblemError as error:
        head = str(error).partition("\n")[0]
        raise file.fail(f"problem {shown(error.line)}: {head}", "correct the line", key) from None
    return ShapeSet(name, table.get("help", ""), tuple(devices), level, problems)


def _lines(file: TableFile, table: Mapping[str, Any]) -> list[str]:
    """The problem lines of a template and its axes."""
    template = table["problem"]
    if not isinstance(template, str):
        raise file.fail(f"problem is {shown(template)}", "write a problem line with axes in braces", "problem")
    axes = {key: value for key, value in table.items() if key not in _OWN}
    for key, value in axes.items():
        if not isinstance(value, list) or not value or not all(map(_is_plain, value)):
            remedy = "an axis is a list of texts and numbers"
            raise file.fail(f"the axis {shown(key)} is {shown(value)}", remedy, key)
        if f"{{{key}}}" not in template:
            hint = did_you_mean(key, _OWN)
            raise file.fail(f"the template has no {{{key}}}{hint}", "delete this axis, or use it", key)
    if math.prod(map(len, axes.values())) > _MOST:
        raise file.fail(f"the axes make more than {_MOST} problems", "divide the set, or shorten its axes", "problem")
    points = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    try:
        return Cases(points).lines(template)
    except TemplateError as error:
        raise file.fail(str(error), f"axes of this set: {', '.join(axes) or 'none'}", "problem") from None


def _is_plain(value: object) -> bool:
    """Whether a value of an axis is a text, or a number that can stand in a problem line."""
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
    sets = read(shipped)
    if not wanted:
        depth = LEVELS.index(level)
        return _problems(one for one in sets if device in one.devices and LEVELS.index(one.level) <= depth)
    chosen: list[ShapeSet] = []
    for name in wanted:
        if any(one.name == name for one in sets):
            chosen += [one for one in sets if one.name == name]
        elif (root / name).exists() or "." in name:
            # A set that says for which device it is meant is not run on the other one.
            chosen += [one for one in read(root / name) if device in one.devices]
        else:
            known = [one.name for one in sets]
            hint = did_you_mean(name, known)
            raise ShapeError(name, 0, f"no set{hint} and no file", f"sets are {', '.join(known)}")
    return _problems(chosen)


def _problems(sets: Iterable[ShapeSet]) -> tuple[Problem, ...]:
    return unique(problem for one in sets for problem in one.problems)
