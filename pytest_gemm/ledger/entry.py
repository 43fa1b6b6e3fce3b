"""One known failure: which cases it explains, on which machines and versions."""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_gemm.machine.isa import flags_at
from pytest_gemm.outcome import Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage.errors import FileError


class LedgerError(FileError):
    """A ledger that cannot be read."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """The facts of machine and installation that entries have conditions on.

    Attributes:
        torch: version as torch gives it, ``2.13.0+cpu``.
        isa: names of what the hardware has, lower case: ``avx2``, ``avx512_vnni``, ``amx_tile``, ``sm_90``.
        device: where the backend computes, ``cpu`` or ``cuda``.
        threads: CPU threads of PyTorch, 0 where unknown.
    """

    torch: str
    isa: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int = 0

    def at(self, isa: str, threads: int = 0) -> Environment:
        """The environment of a case with its own number of CPU threads, or code for a lower instruction set.

        Args:
            isa: what code was generated for, "" for the machine's own.
            threads: of the case, 0 for those of the run.
        """
        flags = flags_at(self.isa, isa) if isa and self.device == "cpu" else self.isa
        return dataclasses.replace(self, isa=flags, threads=threads or self.threads)


@dataclasses.dataclass(frozen=True)
class Globs:
    """Shell patterns over words, case-sensitive; a leading ``!`` excludes.

    They hold for a set of words when no word matches an excluding pattern and, if there is a pattern that
    does not exclude, some word matches one.
    """

    patterns: tuple[str, ...] = ("*",)

    @property
    def is_open(self) -> bool:
        """Whether the patterns hold for all words."""
        return "*" in self.patterns and not any(p.startswith("!") for p in self.patterns)

    def match(self, *words: str) -> bool:
        """Whether the patterns hold for these words, taken together."""
        included = [p for p in self.patterns if not p.startswith("!")]
        excluded = [p[1:] for p in self.patterns if p.startswith("!")]
        if any(fnmatch.fnmatchcase(word, p) for word in words for p in excluded):
            return False
        return not included or "*" in included or any(fnmatch.fnmatchcase(w, p) for w in words for p in included)


_OPERATORS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_COMPARISON: Final = re.compile(r"\s*(?:%\s*([1-9]\d*)\s*)?(==|!=|<=|>=|<|>)\s*(\d+)\s*")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A condition on a size or another number: ``>=4``, or ``%16!=0`` (the remainder modulo 16 is not 0)."""

    operator: str
    number: int
    modulus: int | None = None

    @classmethod
    def parse(cls, text: str) -> Comparison:
        """Parse one condition.

        Raises:
            ValueError: when the text is no condition.
        """
        match = _COMPARISON.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a comparison")
        return cls(match[2], int(match[3]), int(match[1]) if match[1] else None)

    def holds(self, size: int | None) -> bool:
        """Whether ``size`` meets the condition; a size that a problem does not have meets none."""
        if size is None:
            return False
        value = size if self.modulus is None else size % self.modulus
        return _OPERATORS[self.operator](value, self.number)


ANY: Final = Globs()
SIZES: Final = ("m", "n", "k", "batch")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One known failure: its cases, its machines and its reason.

    Attributes:
        id: its name in reports.
        reason: one sentence for the reader of a report.
        link: an issue or a commit, "" for none.
        backend, test, distribution, device, problem: patterns over the names of the case.
        candidate: patterns over the names of the candidates that were judged.
        mode: patterns over the mode; the backend's own mode is "", which ``*`` matches.
        guard: the same over the side of guard pages, ``end`` or ``begin``, "" without.
        status: how it fails.
        torch: releases that have it, ``None`` for all.
        isa: patterns over the names of the machine's instruction sets, taken together.
        threads: conditions on the number of CPU threads that a case is judged with; all hold.
        words: patterns over the problem's ``op dtypes layout epilogue flags``.
        sizes: conditions on ``m n k batch``; all hold.
        crashes: its cases can kill the process and are not run.
        line: 1-based line in its file.
    """

    id: str
    reason: str
    backend: Globs
    link: str = ""
    test: Globs = ANY
    distribution: Globs = ANY
    device: Globs = ANY
    problem: Globs = ANY
    candidate: Globs = ANY
    mode: Globs = ANY
    guard: Globs = ANY
    isa: Globs = ANY
    threads: tuple[Comparison, ...] = ()
    status: frozenset[Status] = frozenset({Status.INCORRECT})
    torch: SpecifierSet | None = None
    words: tuple[tuple[str, Globs], ...] = ()
    sizes: tuple[tuple[str, Comparison], ...] = ()
    crashes: bool = False
    line: int = 0

    @property
    def is_open(self) -> bool:
        """Whether every case of every run is one of its cases, whatever their status."""
        globs = [value for value in vars(self).values() if isinstance(value, Globs)]
        sizes = [*self.threads, *(comparison for _, comparison in self.sizes)]
        return (
            all(found.is_open for found in (*globs, *(found for _, found in self.words)))
            and all(comparison.holds(size) for comparison in sizes for size in range(THREADS[1]))
            and released(self.torch, "0")
            and released(self.torch, "9999")
        )

    def applies(self, backend: str, problem: Problem, test: str, environment: Environment) -> bool:
        """Whether a case is one of the entry's, whatever its distribution and status."""
        return (
            self.backend.match(backend)
            and self.test.match(test)
            and self.problem.match(problem.line)
            and self.device.match(environment.device)
            and self.isa.match(*environment.isa)
            and all(comparison.holds(environment.threads or None) for comparison in self.threads)
            and released(self.torch, environment.torch)
            and all(globs.match(*_words(problem, key)) for key, globs in self.words)
            and all(comparison.holds(getattr(problem.shape, key)) for key, comparison in self.sizes)
        )


def _words(problem: Problem, key: str) -> tuple[str, ...]:
    """The words that a pattern of the ``where`` table is matched with."""
    return {
        "op": (problem.op.name,),
        "dtypes": (str(problem.dtypes),),
        "layout": (str(problem.layout),),
        "epilogue": tuple(map(str, problem.steps)),
        "flags": problem.flags,
    }[key]


def released(specifier: SpecifierSet | None, version: str) -> bool:
    """Whether a torch version is in a range.

    A nightly or source build counts as the release that it leads to: ``2.14.0.dev20260101`` and
    ``2.14.0a0+gitabc`` are 2.14.0, so that ``<2.14`` ends with the branch that has the fix.
    """
    if specifier is None:
        return True
    try:
        return specifier.contains(Version(version).base_version, prereleases=True)
    except InvalidVersion:
        return False


# Possible numbers of threads: a condition that none of them meets is a mistake.
THREADS: Final = (1, 4096)
