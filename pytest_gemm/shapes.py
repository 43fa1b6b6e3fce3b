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

Every key that is none of the first five is an axis.  A set without axes is a list of lines in ``problems``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.cases import LEVELS, Cases, unique
from pytest_gemm.problem import Problem, ProblemError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ShapeError", "ShapeSet", "read", "select"]

_DEVICES: Final = ("cpu", "cuda")
_OWN: Final = frozenset({"name", "help", "device", "level", "problem", "problems"})


class ShapeError(ValueError):
    """A shapes file that cannot be used, or a set that nobody has, with what would be right."""


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
        ShapeError: naming the file, the set and the key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShapeError(f"{path}: {error}") from None
    if set(data) != {"set"} or not isinstance(data["set"], list):
        raise ShapeError(f"{path}: a shapes file consists of [[set]] tables; found {', '.join(data) or 'nothing'}")
    found = tuple(_set(path, number, table) for number, table in enumerate(data["set"], 1))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ShapeError(f"{path}: two sets are called {name!r}")
    return found


def _set(path: Path, number: int, table: dict[str, Any]) -> ShapeSet:
    where = f"{path}, set {table.get('name', number)!r}"
    if not re.fullmatch(r"[a-z0-9-]+", str(table.get("name", ""))):
        raise ShapeError(f"{where}: a set needs a name of lower-case letters, digits and dashes")
    devices = table.get("device", list(_DEVICES))
    devices = [devices] if isinstance(devices, str) else devices
    if not devices or not set(devices) <= set(_DEVICES):
        raise ShapeError(f"{where}: device is {devices}; it is cpu, cuda or both")
    level = table.get("level", "quick")
    if level not in LEVELS:
        raise ShapeError(f"{where}: level is {level!r}; it is one of {', '.join(LEVELS)}")
    if ("problem" in table) == ("problems" in table):
        raise ShapeError(f"{where}: give either 'problem', a template with axes, or 'problems', a list of lines")
    axes = {key: value for key, value in table.items() if key not in _OWN}
    for key, value in axes.items():
        if not isinstance(value, list) or not value:
            raise ShapeError(f"{where}: the axis {key} is {value!r}; it is a list of values")
    try:
        if "problems" in table:
            if axes:
                raise ShapeError(f"{where}: {', '.join(axes)} would cross nothing: 'problems' is a list of lines")
            problems = unique(Problem.parse(line) for line in table["problems"])
        else:
            problems = Cases().combine(**axes).problems(table["problem"])
    except KeyError as error:
        raise ShapeError(f"{where}: the template asks for {error}, and there is no such axis") from None
    except (ProblemError, TypeError) as error:
        raise ShapeError(f"{where}: {error}") from None
    return ShapeSet(table["name"], str(table.get("help", "")), tuple(devices), level, problems)


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
        elif (root / name).is_file():
            # A set that says for which device it is meant is not run on the other one.
            chosen += [one for one in read(root / name) if device in one.devices]
        else:
            known = [one.name for one in sets]
            hint = did_you_mean(name, known)
            raise ShapeError(f"{name!r} is no set{hint} and no file; sets are {', '.join(known)}")
    return _problems(chosen)


def _problems(sets: Iterable[ShapeSet]) -> tuple[Problem, ...]:
    return unique(problem for one in sets for problem in one.problems)
