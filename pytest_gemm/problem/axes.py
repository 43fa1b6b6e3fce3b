"""Cases from axes: combine, expand, filter; then problems with stable ids.

The shape of it is that of WebGPU's conformance suite: a list of *points* (plain dictionaries) that grows
axis by axis.  Nonsense is filtered, what a backend merely cannot do is not: it answers for itself.

Example::

    Cases().combine(dtype=["f32", "bf16"], m=[1, 17, 32]).combine(n=[64, 65]).expand(
        "k", lambda p: [1000] if p["m"] == 1 else [64, 1000]
    ).problems("mm:{dtype}:nn:{m}x{n}x{k}")
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pytest_gemm.problem.problem import Problem

# A point's values are whatever its axes hold; only the template looks at them.
Point = Mapping[str, Any]

LEVELS = ("quick", "full", "exhaustive")


class TemplateError(ValueError):
    """A template with a name in braces that is no axis."""


class Cases:
    """An immutable list of points; every method returns a new one.

    Args:
        points: where to start, by default one point with no axis.
    """

    def __init__(self, points: Iterable[Point] = ({},)) -> None:
        self._points = tuple(points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def combine(self, **axes: Iterable[Any]) -> Cases:
        """Cross every point with every combination of the given axes.

        Raises:
            ValueError: when an axis is there already.
        """
        names = list(axes)
        for name in names:
            if self._points and name in self._points[0]:
                raise ValueError(f"axis {name!r} is there already")
        products = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
        return Cases({**point, **more} for point in self._points for more in products)

    def expand(self, name: str, values: Callable[[Point], Iterable[Any]]) -> Cases:
        """Add an axis whose values depend on the point; a point with no value is dropped."""
        return Cases({**point, name: value} for point in self._points for value in values(point))

    def filter(self, keep: Callable[[Point], bool]) -> Cases:
        """Keep the points that make sense."""
        return Cases(point for point in self._points if keep(point))

    def __add__(self, other: Cases) -> Cases:
        return Cases((*self._points, *other))

    def problems(self, template: str) -> tuple[Problem, ...]:
        """The points as problems, first mention first, each once.

        Args:
            template: a problem line with the axes in braces; trailing empty fields are dropped.

        Raises:
            TemplateError: for a name in braces that is no axis.
        """
        return unique(map(Problem.parse, self.lines(template)))

    def lines(self, template: str) -> list[str]:
        """The same as text, each line once."""
        return list(dict.fromkeys(_fill(template, point).rstrip(":") for point in self._points))


def _fill(template: str, point: Point) -> str:
    """The template with the point's values; nothing of ``str.format`` but plain names."""

    def value(name: re.Match[str]) -> str:
        if name[1] not in point:
            raise TemplateError(f"the template asks for {name[0]}, and there is no such axis")
        return str(point[name[1]])

    return re.sub(r"\{([^{}]*)\}", value, template)


def unique(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Each problem once, by its canonical line, in order of first mention."""
    return tuple({p.line: p for p in problems}.values())
