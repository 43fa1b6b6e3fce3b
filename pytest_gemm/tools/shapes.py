"""``pytest-gemm shapes MODULE:FACTORY``: the products that a model executes, as a shapes file.

The factory takes no arguments and returns the model, a module or another callable, which is then called without
arguments; or a tuple of the model and of its calls, prefill and decoding for instance: each is a tuple of arguments, or
a dict of them by keyword.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Final

from pytest_gemm.core.text import described, one_line, show
from pytest_gemm.storage import files

if TYPE_CHECKING:  # torch is imported where a model is run
    from torch.fx import Node

    from pytest_gemm.problem.problem import Problem
    from pytest_gemm.tools.capture import Capture

# Parts of paths of code that is not the user's.
_OTHERS: Final = (
    f"{os.sep}torch{os.sep}",
    f"{os.sep}pytest_gemm{os.sep}",
    "<frozen",
    pkgutil.__file__,
    importlib.__file__,
)


class ModelError(ValueError):
    """A model that is not there, or whose code raises; the message names it and says where."""


def run(given: argparse.Namespace) -> int:
    """Write the shapes file, and say on stderr what is in it and what is not.

    Raises:
        ModelError: for a model that cannot be run, and one without a product that a problem line has.
    """
    from pytest_gemm.tools.capture import Capture

    capture = Capture()
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the file
        _called(given.model, capture)
    found, others = _sorted(capture.graph.nodes)
    sys.stderr.write(_summary(given.model, found, others))
    if not found:
        raise ModelError(f"{given.model}: it executes no product that a problem line has")
    text = _file(given.model, found)
    if given.output is None:
        show(text)
    else:
        files.replace(given.output, text.encode())
    return 0


# -- the user's code ---------------------------------------------------------------------------------------------------


def _called(name: str, capture: Capture) -> None:
    """Make the model and run each call of it."""
    place, _, factory = name.rpartition(":")
    path = Path(place)
    if not place or not factory:
        raise ModelError(f"{name}: write MODULE:FACTORY, models:llama or path/to/models.py:llama for instance")
    if (is_file := path.suffix == ".py") and not path.is_file():
        raise ModelError(f"{name}: there is no file {place}")
    sys.path.insert(0, str(path.absolute().parent if is_file else Path.cwd()))
    try:
        made = pkgutil.resolve_name(f"{path.stem if is_file else place}:{factory}")()
        model, *calls = made if isinstance(made, tuple) else (made, ())
        if callable(model) and calls and all(isinstance(one, (tuple, dict)) for one in calls):
            for one in calls:
                capture.run(model, *((one, {}) if isinstance(one, tuple) else ((), one)))
            return
    except (Exception, SystemExit) as error:
        frames = [one for one in extract_tb(error.__traceback__) if not any(part in one.filename for part in _OTHERS)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise ModelError(f"{name} raised {one_line(described(error))}{where}") from None
    kinds = ", ".join(type(one).__name__ for one in (model, *calls))
    right = "return the model, or a tuple of it and of each call: a tuple of arguments, or a dict of them by keyword"
    raise ModelError(f"{name} returned {kinds}; {right}")


# -- what it executed --------------------------------------------------------------------------------------------------


def _sorted(calls: Iterable[Node]) -> tuple[dict[Problem, int], dict[tuple[str, str], list[int | None]]]:
    """How often each problem was executed, largest share first; of the other products the operations, by reason."""
    from pytest_gemm.tools.products import flops_of, problem_of

    found: collections.Counter[Problem] = collections.Counter()
    others: dict[tuple[str, str], list[int | None]] = {}
    for call in (call for call in calls if call.op == "call_function"):
        problem = problem_of(call)
        if not isinstance(problem, str):
            found[problem] += 1
        elif problem:
            others.setdefault((str(call.target), problem), []).append(flops_of(call))
    return dict(sorted(found.items(), key=lambda one: -one[0].shape.flops * one[1])), others


def _file(name: str, found: Mapping[Problem, int]) -> str:
    total = sum(problem.shape.flops * count for problem, count in found.items()) or 1
    own = re.sub(r"[^a-z0-9_-]+", "-", name.rpartition(":")[2].lower()).lstrip("-_") or "model"
    lines = [f"# Written by: pytest-gemm shapes {one_line(name)}", "[[set]]", f'name = "{own}"', "problems = ["]
    for problem, count in found.items():
        share = problem.shape.flops * count / total
        lines.append(f'    "{problem}",  # {count} times, {share:.1%} of the multiplications')
    return "\n".join([*lines, "]\n"])


def _summary(name: str, found: Mapping[Problem, int], others: Mapping[tuple[str, str], Sequence[int | None]]) -> str:
    """How many products and lines there are, and each operator without a line, with its count and the reason."""
    own = sum(problem.shape.flops * count for problem, count in found.items())
    total = own + sum(flops or 0 for each in others.values() for flops in each) or 1
    head = f"{sum(found.values())} products, {len(found)} lines, {own / total:.1%} of the multiplications counted"
    lines = [f"{one_line(name)}: {head}"]
    for (operator, reason), each in others.items():
        share = "not counted" if None in each else f"{sum(map(int, filter(None, each))) / total:.1%}"
        lines.append(f"  left out: {len(each)} times {operator} ({share}): {reason}")
    return "\n".join(lines) + "\n"
