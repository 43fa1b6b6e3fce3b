"""One known failure: which cases it explains, on which machines and versions."""

from __future__ import annotations

import dataclasses
import fnmatch
import operator
import platform
import re
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.machine.isa import words
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
        level: the instruction set that code is generated for, "" for the one that Inductor takes.
        architecture: as ``platform.machine`` names it.
        device: where the backend computes, ``cpu`` or ``cuda``.
        threads: CPU threads of PyTorch, 0 where unknown.
        run_threads: those of a run, where a program was compiled with other ones; else 0.
    """

    torch: str
    isa: tuple[str, ...] = ()
    level: str = ""
    architecture: str = dataclasses.field(default_factory=platform.machine)
    device: str = "cpu"
    threads: int = 0
    run_threads: int = 0

    def at(self, isa: str, threads: int = 0, run_threads: int = 0) -> Environment:
        """The environment of a case with its own number of CPU threads, or code for a lower instruction set.

        Args:
            isa: what code was generated for, "" for the machine's own.
            threads: of the case, 0 for those of the run.
            run_threads: of the case.
        """
        level = isa if self.device == "cpu" else ""
        return dataclasses.replace(self, level=level, threads=threads or self.threads, run_threads=run_threads)


class Condition(Protocol):
    """What an entry asks of one fact of a case."""

    @property
    def is_open(self) -> bool:
        """Whether it holds for every value."""

    def match(self, *values: str) -> bool:
        """Whether it holds for the values of a fact, taken together."""


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

    def match(self, *values: str) -> bool:
        """Whether the patterns hold for these words, taken together."""
        included = [p for p in self.patterns if not p.startswith("!")]
        excluded = [p[1:] for p in self.patterns if p.startswith("!")]
        if any(fnmatch.fnmatchcase(word, p) for word in values for p in excluded):
            return False
        return not included or "*" in included or any(fnmatch.fnmatchcase(w, p) for w in values for p in included)


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

    def holds(self, size: int) -> bool:
        """Whether ``size`` meets the condition."""
        value = size if self.modulus is None else size % self.modulus
        return _OPERATORS[self.operator](value, self.number)


@dataclasses.dataclass(frozen=True)
class Comparisons:
    """Conditions on a number, of which all hold; a number that a case does not have meets none."""

    conditions: tuple[Comparison, ...]

    @property
    def is_open(self) -> bool:
        """Whether the conditions hold for every possible number of threads, and so for all that are likely."""
        return all(one.holds(number) for one in self.conditions for number in range(THREADS[1]))

    def match(self, *values: str) -> bool:
        """Whether the conditions hold for a number, given as text."""
        return bool(values) and all(one.holds(int(values[0])) for one in self.conditions)


@dataclasses.dataclass(frozen=True)
class Releases:
    """A range of torch versions.

    A nightly or source build counts as the release that it leads to: ``2.14.0.dev20260101`` and
    ``2.14.0a0+gitabc`` are 2.14.0, so that ``<2.14`` ends with the branch that has the fix.
    """

    specifier: SpecifierSet

    @property
    def is_open(self) -> bool:
        """Whether every release is in the range."""
        return self.match("0") and self.match("9999")

    def match(self, *values: str) -> bool:
        """Whether a version is in the range."""
        try:
            return self.specifier.contains(Version(values[0]).base_version, prereleases=True)
        except InvalidVersion:
            return False


SIZES: Final = ("m", "n", "k", "batch")
# Possible numbers of threads: a condition that none of them meets is a mistake.
THREADS: Final = (1, 4096)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One known failure: its cases, its machines and its reason.

    Attributes:
        id: its name in reports.
        reason: one sentence for the reader of a report.
        conditions: what it asks of its cases, by the name of the fact: those of :func:`facts` and, of an outcome,
            ``distribution``, ``candidate`` (the candidates that were judged), ``configuration``, ``mode`` and
            ``guard``, the side of guard pages.  The backend's own mode and no guard pages are "".
        link: an issue or a commit, "" for none.
        status: how it fails.
        computes: what its kernel computes instead, names of ``ledger.computes``: asked of a wrong result.
        says: what the outcome's reason or details say: asked of any other failure, and of a wrong result that was not
            compared, or where no ``computes`` states it.
        unstated: why it states neither, "" where it does or no one has looked.
        sometimes: why all of its cases may pass on a machine that its conditions do not tell apart, "" where none may.
        crashes: its cases can kill the process and are not run.
        line: 1-based line in its file.
    """

    id: str
    reason: str
    conditions: Mapping[str, Condition]
    link: str = ""
    status: frozenset[Status] = frozenset({Status.INCORRECT})
    computes: Globs = Globs()
    says: Globs = Globs()
    unstated: str = ""
    sometimes: str = ""
    crashes: bool = False
    line: int = 0

    @property
    def is_open(self) -> bool:
        """Whether every case of every run is one of its cases, whatever their status."""
        return all(condition.is_open for condition in self.conditions.values())

    def explains(self, outcome: Outcome) -> bool:
        """Whether a failure of one of its cases is the one that it states."""
        if outcome.status not in self.status:
            return False
        is_compared = outcome.imitates is not None or self.says.is_open
        if outcome.status is Status.INCORRECT and not self.computes.is_open and is_compared:
            return self.computes.match(*(outcome.imitates or ()))
        reason = outcome.reason
        return self.says.match(outcome.code, reason.text if reason else "", outcome.details)

    def applies(self, known: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether a case with these facts is one of the entry's; conditions on other facts are not asked."""
        return all(condition.match(*known[name]) for name, condition in self.conditions.items() if name in known)


def facts(backend: str, problem: Problem, test: str, environment: Environment) -> dict[str, tuple[str, ...]]:
    """The facts of a case that entries have conditions on, known before it runs."""
    sizes = {size: getattr(problem.shape, size) for size in SIZES}
    numbers = {**sizes, "threads": environment.threads or None, "run_threads": environment.run_threads or None}
    return {
        "backend": (backend,),
        "test": (test,),
        "problem": (problem.line,),
        "device": (environment.device,),
        "isa": words(environment.isa, environment.level, environment.architecture),
        "torch": (environment.torch,),
        "op": (problem.op.name,),
        "dtypes": (str(problem.dtypes),),
        "layout": (str(problem.layout),),
        "epilogue": tuple(map(str, problem.steps)),
        "flags": problem.flags,
        **{name: () if number is None else (str(number),) for name, number in numbers.items()},
    }
