"""Sizes drawn by rule: each residue and each octave of every dimension, in a given number of lines.

A bug of a kernel often shows at one residue of a size (a tail of a tile), or in one octave of it (the next larger
tile).  A list of sizes has those that its author thought of; of a draw it is known which it has.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from pytest_gemm.problem.axes import Axes
from pytest_gemm.storage.datafile import WrongValue, shown

MODULUS: Final = 256
"""The largest modulus of which a draw takes each residue."""

_T = TypeVar("_T")
Point = dict[str, str | int | float]


class DrawError(ValueError):
    """Sizes that no exchange brings below the limit."""


def size_range(text: object) -> range:
    """The sizes of ``1..1023``, or of ``16..2048/16``: multiples of 16.

    Raises:
        WrongValue: for anything else.
    """
    found = re.fullmatch(r"(\d{1,7})\.\.(\d{1,7})(?:/(\d{1,4}))?", text) if isinstance(text, str) else None
    low, high, step = (int(one or 1) for one in found.groups()) if found else (0, 0, 0)
    if not 1 <= step <= low <= high or low % step:
        raise WrongValue(f"is {shown(text)}")
    return range(low, high + 1, step)


def drawn(count: int, sizes: Mapping[str, range], others: Axes, most: float, seed: str) -> list[Point]:
    """Lines with a value of each axis, the same for the same arguments.

    Each axis is dealt by itself, so any two of them meet by chance.

    Args:
        count: of lines.
        sizes: axes whose values are drawn, see :func:`dealt`.
        others: axes whose values are given: each is in ``count / len`` lines, rounded up or down.
        most: the largest product of the sizes of a line.
        seed: another one is another draw.

    Raises:
        DrawError: where the sizes are too large for ``most``.
    """
    columns = {name: dealt(values, count, f"{seed} {name}") for name, values in sizes.items()}
    points = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    _limit(points, most)
    found: list[Point] = [{**point} for point in points]
    for name, values in others.items():
        for point, value in zip(found, _repeated(values, count, f"{seed} {name}"), strict=True):
            point.update(value if isinstance(value, Mapping) else {name: value})
    return found


def dealt(values: range, count: int, seed: str) -> list[int]:
    """``count`` sizes of a range.

    Of a range of up to ``count`` sizes each is taken equally often.  Of a longer one every residue modulo the largest
    power of two up to ``count`` and :data:`MODULUS` is, in units of the range's step, and hence every residue modulo
    each smaller one; and each size is in the octave that was taken least.  Every other size is a prime where one has
    its residue and octave.
    """
    if len(values) <= count:
        return _repeated(values, count, seed)
    modulus = min(MODULUS, 1 << (count.bit_length() - 1))
    by_residue: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for value in values:
        by_residue[value // values.step % modulus][value.bit_length()].append(value)
    used: Counter[int] = Counter()
    found = []
    for place, residue in enumerate(_shuffled([place % modulus for place in range(count)], seed)):
        octave = min(by_residue[residue], key=lambda one: (used[one], one))
        used[octave] += 1
        pool = _shuffled(by_residue[residue][octave], f"{seed} {place}")
        found.append(next(filter(is_prime, pool), pool[0]) if place % 2 else pool[0])
    return found


def is_prime(value: int) -> bool:
    """Whether a size is a prime."""
    return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))


def _repeated(values: Sequence[_T], count: int, seed: str) -> list[_T]:
    return _shuffled([values[place % len(values)] for place in range(count)], seed)


def _shuffled(values: Sequence[_T], seed: str) -> list[_T]:
    """The values in an order that no release of Python changes."""
    places = sorted(range(len(values)), key=lambda place: hashlib.sha256(f"{seed} {place}".encode()).digest())
    return [values[place] for place in places]


def _limit(points: list[dict[str, int]], most: float) -> None:
    """Exchange sizes between lines until no product is above the limit: each size stays as often as it was.

    Of the exchanges that do so for a line that one is made which leaves the largest product of the two lines.
    """
    products = [math.prod(point.values()) for point in points]
    for one in sorted(range(len(points)), key=products.__getitem__, reverse=True):
        if products[one] <= most:
            continue
        point = points[one]
        exchanges = (
            (max(products[one] // point[name] * size, products[other] // size * point[name]), other, name)
            for other, sizes in enumerate(points)
            for name, size in sizes.items()
        )
        largest, other, name = max((each for each in exchanges if each[0] <= most), default=(0, 0, ""))
        if not largest:
            raise DrawError(f"no exchange of sizes between the lines leaves products of {most} or less")
        point[name], points[other][name] = points[other][name], point[name]
        products[one], products[other] = (math.prod(points[place].values()) for place in (one, other))
