"""``pytest-gemm shapes MODULE:FACTORY``: the products that a model executes, as a shapes file.

The factory takes no arguments and returns the model, a module or another callable, alone or with the arguments of a
call: ``model``, ``(model, args)`` or ``(model, args, kwargs)``.  A list of tuples in the place of ``args`` is that of
several calls, prefill and decoding for instance.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_gemm.core.text import described, did_you_mean, one_line, show
from pytest_gemm.storage import files

if TYPE_CHECKING:  # torch is imported where a model is run
    from pytest_gemm.problem.problem import Problem
    from pytest_gemm.tools.capture import Call


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
        factory = _factory(given.model)
        model, calls, kwargs = _calls(given.model, _called(given.model, factory))
        for args in calls:
            _called(given.model, functools.partial(capture.run, model, args, kwargs))
    found, others = _sorted(capture.calls)
    text, summary = _file(given.model, found), _summary(given.model, found, others)
    sys.stderr.write(summary)
    if not found:
        raise ModelError(f"{given.model}: it executes no product that a problem line has")
    if given.output is None:
        show(text)
    else:
        files.replace(given.output, text.encode())
    return 0


# -- the user's code ---------------------------------------------------------------------------------------------------


def _called(name: str, function: Callable[[], Any]) -> Any:
    """What a function of the user's returns."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        import torch

        ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), importlib.__file__, "<frozen")
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(ours)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise ModelError(f"{name} raised {one_line(described(error))}{where}") from None


def _factory(name: str) -> Callable[[], Any]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ModelError(f"{name}: write MODULE:FACTORY, models:llama or path/to/models.py:llama for instance")
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise ModelError(f"{name}: there is no file {place}")
    sys.path.insert(0, str(path.absolute().parent if path.suffix == ".py" else Path.cwd()))
    module = _called(place, functools.partial(_imported, place))
    try:
        found = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        names = [own for own, value in vars(module).items() if callable(value)]
        raise ModelError(f"{name}: {place} has no {attribute}{did_you_mean(attribute, names)}") from None
    if not callable(found):
        raise ModelError(f"{name}: {attribute} is {type(found).__name__}; name a function that returns the model")
    return found


def _imported(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py":
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, place
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _calls(name: str, made: Any) -> tuple[Callable[..., Any], Sequence[tuple[Any, ...]], Mapping[str, Any]]:
    """The model, the positional arguments of each call, and those by keyword."""
    parts = made if isinstance(made, tuple) else (made,)
    model, args, kwargs = (*parts, *((), {})[len(parts) - 1 :]) if len(parts) in {1, 2, 3} else (None, (), {})
    calls = args if isinstance(args, list) else [args]
    if not callable(model) or not all(isinstance(one, tuple) for one in calls) or not isinstance(kwargs, Mapping):
        kinds = ", ".join(type(one).__name__ for one in parts)
        right = "return model, (model, args) or (model, args, kwargs), where args is a tuple, or a list of one for each call"
        raise ModelError(f"{name} returned {kinds}; {right}")
    return model, calls, kwargs


# -- what it executed --------------------------------------------------------------------------------------------------


def _sorted(calls: Iterable[Call]) -> tuple[dict[Problem, int], dict[tuple[str, str], list[int | None]]]:
    """How often each problem was executed, largest share first; of the other products the operations, by reason."""
    from pytest_gemm.tools.products import Inexpressible, problem_of

    found: collections.Counter[Problem] = collections.Counter()
    others: dict[tuple[str, str], list[int | None]] = {}
    for call in calls:
        try:
            if (problem := problem_of(call)) is not None:
                found[problem] += 1
        except Inexpressible as error:
            others.setdefault((str(call.func), str(error)), []).append(call.flops)
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
