"""Problem lines from templates and axes."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytest_gemm.problem.problem import Problem

LEVELS: Final = ("smoke", "quick", "full", "exhaustive")
"""Each contains those before it."""
QUICK: Final = "quick"
"""The level of a run, and of a set that names none."""
APART: Final = ("huge", "models")
"""Levels of their own: what needs gigabytes, and layers of current models.  None contains another one."""

# A text, a number, or a table of several, which vary together.
Value = str | int | float | Mapping[str, str | int | float]
Axes = Mapping[str, Sequence[Value]]


class TemplateError(ValueError):
    """A template with a name in braces that is no axis."""


def lines(templates: Iterable[str], axes: Axes, spread: Iterable[str] = ()) -> list[str]:
    """The templates filled with every combination of the axes that they name, each line once.

    Args:
        templates: problem lines with names of axes in braces.  Empty trailing fields, and a ``+`` at either end of a
            field, are dropped.
        axes: values by name.  A table among them gives several names a value at once.
        spread: axes of which each combination of the others gets one value, see :func:`points`.

    Raises:
        TemplateError: for a name in braces that is no axis.
    """
    found: dict[str, None] = {}
    for template in templates:
        named = set(re.findall(r"\{([^{}]*)\}", template))
        own = {name: values for name, values in axes.items() if named & names(name, values)}
        found |= dict.fromkeys(_fill(template, point) for point in points(own, [one for one in spread if one in own]))
    return list(found)


def names(axis: str, values: Sequence[Value]) -> set[str]:
    """What an axis gives a value to: its name, or the keys of its tables."""
    return {name for one in values for name in (one if isinstance(one, Mapping) else (axis,))}


def points(axes: Axes, spread: Sequence[str] = ()) -> Iterator[dict[str, str | int | float]]:
    """The cross product of the axes.

    An axis of ``spread`` is not crossed: each point gets one of its values, the one whose hash with the point is the
    largest.  So a point keeps its value when another axis gains a value, and moves only to a value that is new.
    """
    crossed = {name: values for name, values in axes.items() if name not in spread}
    for values in itertools.product(*crossed.values()):
        point: dict[str, str | int | float] = {}
        for name, value in zip(crossed, values, strict=True):
            point |= value if isinstance(value, Mapping) else {name: value}
        text = repr(sorted(point.items()))
        for name in spread:
            value = max(axes[name], key=lambda one: hashlib.sha256(f"{text} {one}".encode()).digest())
            point |= value if isinstance(value, Mapping) else {name: value}
        yield point


def _fill(template: str, point: Mapping[str, str | int | float]) -> str:
    """The template with the point's values; nothing of ``str.format`` but plain names."""

    def value(name: re.Match[str]) -> str:
        if name[1] not in point:
            raise TemplateError(f"the template has {name[0]}, which is no axis")
        return str(point[name[1]])

    filled = re.sub(r"\{([^{}]*)\}", value, template)
    return re.sub(r":\++|\++(?=:|$)", lambda found: ":" if found[0][0] == ":" else "", filled).rstrip(":")


def unique(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Each problem once, by its canonical line, in order of first mention."""
    return tuple({p.line: p for p in problems}.values())
