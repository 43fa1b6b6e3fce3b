"""Layers of current models as problems: one at random, and those that the level ``models`` holds.

``cases/models.toml`` has the models.  A layer is met in each form in which its kind is served, as the part that each of
1, 2, 4 and 8 devices computes, with each number of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from pytest_gemm.problem import axes
from pytest_gemm.problem.axes import unique
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.datafile import document

FILE: Final = Path(__file__).parent / "cases" / "models.toml"
# How many devices share a layer, and among how many the experts are distributed besides.
_DEVICES: Final = (1, 2, 4, 8)
_EXPERT_DEVICES: Final = (1, 4, 16, 64)
# N and K from which on a layer is one of a language model's size.
LARGE: Final = 1024
# The most elements of a weight and products of two numbers, by device: what a case of some seconds can have.
_MOST: Final[Mapping[str, tuple[int, int]]] = {"cpu": (3 << 23, 1 << 32), "cuda": (1 << 28, 1 << 37)}
# The same of experts, which are judged in full.
_MOST_OF_EXPERTS: Final = (1 << 27, 1 << 34)


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model: its layers by kind, and the classes of M that it has; ``None`` for all."""

    help: str
    layers: dict[str, str]
    tokens: list[str] | None = None


class Models(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: the dimension that is divided, by kind; M by class; models.

    ``forms`` has templates of problem lines by the name of a form, for the kinds that are served in them.
    """

    divided: dict[str, str]
    tokens: dict[str, list[int]]
    forms: dict[str, dict[str, str]]
    model: dict[str, Model]


class Part(NamedTuple):
    """What one device computes of a layer: names of the model, the kind, the form and the class of M, and the sizes.

    ``e`` is the number of experts or heads, 1 for another layer; ``devices`` how many share the layer.
    """

    model: str
    kind: str
    form: str
    devices: int
    tokens: str
    template: str
    steps: str
    e: int
    m: int
    n: int
    k: int

    @property
    def facts(self) -> frozenset[tuple[str, ...]]:
        """What a problem of this part covers."""
        op, _, _, shape, *_ = self.template.split(":")
        *_, n, k = map(int, shape.format(e=self.e, m=self.m, n=self.n, k=self.k).split("x"))
        found = {(self.model, self.kind), (self.form, self.kind), (self.form, self.tokens), (str(self.devices),)}
        return frozenset(found | {(op, "large")} if min(n, k) >= LARGE else found)

    def fits(self, device: str) -> bool:
        """Whether a device's case of it takes seconds."""
        weights = self.e * self.n * self.k
        limits = [_MOST[device], *([_MOST_OF_EXPERTS] if self.e > 1 else [])]
        return all(weights <= most and weights * self.m <= work for most, work in limits)

    def problem(self) -> Problem | None:
        """Its problem: without the steps where the op has none of these, ``None`` where it does not take the sizes."""
        for steps in dict.fromkeys((self.steps, "")):
            values = {**self._asdict(), "steps": steps, "act": self.steps.partition("+")[0]}
            (line,) = axes.lines([self.template], {name: [value] for name, value in values.items()})
            with contextlib.suppress(ProblemError):
                return Problem.parse(line)
        return None


@functools.cache
def read() -> Models:
    """The file.

    Raises:
        FileError: where it is not TOML.
        msgspec.ValidationError: where it has another form.
    """
    return msgspec.convert(document(FILE), Models)


@functools.cache
def parts() -> tuple[Part, ...]:
    """Every part of every layer in every form with every M."""
    return tuple(part for name, model in read().model.items() for kind in model.layers for part in _of_kind(name, kind))


def _of_kind(name: str, kind: str) -> Iterator[Part]:
    file, model = read(), read().model[name]
    forms = [form for kinds, group in file.forms.items() if kind in kinds.split() for form in group.items()]
    by = file.divided.get(kind, "")
    for layer, devices in itertools.product(model.layers[kind].split(), _DEVICES if by else (1,)):
        size, _, steps = layer.partition(":")
        *experts, n, k = map(int, size.split("x"))
        sizes = {"e": experts[0] if experts else 1, "n": n, "k": k, "": 0}
        if sizes[by] % devices:
            continue
        sizes[by] //= devices
        if by == "k" and devices > 1:
            steps = ""  # what is added is added to the sum of all devices' parts
        counts = [sizes["e"] // spread for spread in _EXPERT_DEVICES if sizes["e"] >= 2 * spread and by != "e"]
        for (form, line), tokens in itertools.product(forms, model.tokens or file.tokens):
            for m, e in itertools.product(file.tokens[tokens], counts or [sizes["e"]]):
                yield Part(name, kind, form, devices, tokens, line, steps, e, m, sizes["n"], sizes["k"])


def draw(source: random.Random, device: str) -> Problem:
    """One problem at random of those that a device has the time for."""
    while True:
        part = source.choice(parts())
        if part.fits(device) and (problem := part.problem()) is not None:
            return problem


def selection(device: str) -> tuple[Problem, ...]:
    """The problems of the level ``models`` for a device, ``cpu`` or ``cuda``; "" for both."""
    return unique(problem for one in ((device,) if device else _MOST) for problem in chosen(one).values())


@functools.cache
def chosen(device: str) -> Mapping[Part, Problem]:
    """The parts that the level has for a device, and their problems.

    They cover each model with each kind of layer that it has, each form with each kind and each class of M, each
    number of devices, and N and K of :data:`LARGE` in each op, as far as the device has the time.  Parts are taken in
    the order of a hash, those that cover the most first, so that a new model moves few of the others.
    """
    fitting = [(part, part.facts) for part in sorted((one for one in parts() if one.fits(device)), key=_hash)]
    met: set[tuple[str, ...]] = set()
    found: dict[Part, Problem] = {}
    for least in (4, 3, 2, 1):
        for part, facts in fitting:
            if len(facts - met) >= least and (problem := part.problem()) is not None:
                met |= facts
                found[part] = problem
    return found


def _hash(part: Part) -> bytes:
    return hashlib.sha256(repr(part).encode()).digest()
