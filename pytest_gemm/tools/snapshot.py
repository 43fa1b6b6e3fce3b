"""Which micro-kernel and which blocking Inductor selects for which problem, as files that can be compared.

    pytest-gemm snapshot write baselines                  all levels, this torch
    pytest-gemm snapshot diff baselines/torch-2.12 baselines/torch-2.13
    pytest-gemm snapshot show baselines/torch-2.13

The C++ templates have one candidate for a problem, which a heuristic selects by instruction set, size, dtype and number
of threads.  The selection is read without compiling or running anything, so every machine can list it for every
instruction set.  A new release that selects otherwise, or has no candidate any more, shows in a diff.

A file is a table with tabs: lines ``# name value`` with what the selections depend on, then one sorted line a problem::

    linear:bf16:nt:64x512x512:bias  CppMicroGemmAMX-32x32x32  1x1x16/1x1x16

The last column is how the product is split over threads, then over caches: M x N x K in register blocks.  It is ``-``
where that is decided when the kernel runs.  Instead of a micro-kernel stand ``refused`` (a selection without a
candidate), ``library:NAME`` (it has a library's product only, although ATen is no candidate), ``none`` (nothing is
selected: a decomposition) or ``error:TYPE`` (the lowering fails).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gemm.machine.isa import ISAS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage import files
from pytest_gemm.storage.errors import FileError
from pytest_gemm.text import did_you_mean, show, table

if TYPE_CHECKING:
    from pytest_gemm.api.request import BuildRequest
    from pytest_gemm.backends.cpp.backend import CppBackend


# What has to be equal for two files to be compared: the heuristic reads it.
_PINNED: Final = ("threads", "l1d_cache_size", "l2_cache_size")
_FACTS: Final = ("torch", "backend", "isa", *_PINNED)
_MOST_THREADS: Final = 1024
# How the names of micro-kernels begin, those of the C++ templates alone.
_KERNEL: Final = "CppMicro"
_REWRITE: Final = "write it again, or resolve the merge"


class SnapshotError(FileError):
    """A snapshot that cannot be read, or two that cannot be compared."""


class Selection(NamedTuple):
    """What was selected for one problem.

    Attributes:
        kernel: micro-kernel and register blocking, ``CppMicroGemmFP32Vec-8x48x1``; several are joined by ``+``.
            ``none``, ``refused``, ``library:NAME`` or ``error:TYPE`` where there is none.
        blocking: over threads and caches, ``1x1x16/1x1x16``; ``-`` where it is decided when the kernel runs.
    """

    kernel: str
    blocking: str = "-"

    @property
    def is_kernel(self) -> bool:
        """Whether there is a C++ kernel for the problem."""
        return self.kernel.startswith(_KERNEL)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The selections of one release at one instruction set.

    Attributes:
        facts: what they depend on: ``torch``, ``backend``, ``isa``, ``threads``, sizes of the caches in bytes.
        selections: by problem line.
    """

    facts: Mapping[str, str]
    selections: Mapping[str, Selection]

    def text(self) -> str:
        """The file's text."""
        head = [f"# {name} {self.facts[name]}" for name in _FACTS if name in self.facts]
        return (
            "\n".join([*head, *("\t".join((line, *found)) for line, found in sorted(self.selections.items()))]) + "\n"
        )

    @property
    def place(self) -> Path:
        """Where it belongs in a folder of snapshots: ``torch-2.13/cpp-avx512.tsv``."""
        release = ".".join(self.facts["torch"].split(".")[:2])
        return Path(f"torch-{release}") / f"{self.facts['backend']}-{self.facts['isa']}.tsv"

    def __str__(self) -> str:
        return f"torch {self.facts['torch']} {self.facts['backend']} {self.facts['isa']}"

    @property
    def counts(self) -> str:
        """How many problems it has, in words."""
        kernels = sum(found.is_kernel for found in self.selections.values())
        return f"{len(self.selections)} problems, {kernels} with a C++ kernel"


def read(path: Path) -> Snapshot:
    """Read a file.

    Raises:
        SnapshotError: with file and line, when it is no snapshot.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SnapshotError(path, 0, f"cannot be read ({why})", "name a file that `snapshot write` made") from None
    facts: dict[str, str] = {}
    selections: dict[str, Selection] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("# "):
            name, _, facts[name] = line[2:].partition(" ")
            continue
        cells = line.split("\t")
        if len(cells) != 3 or not all(cells):
            raise SnapshotError(path, number, "is no line of a snapshot", _REWRITE)
        if cells[0] in selections:
            raise SnapshotError(path, number, f"{cells[0]} stands there twice", _REWRITE)
        selections[cells[0]] = Selection(*cells[1:])
    if missing := [name for name in _FACTS if name not in facts]:
        raise SnapshotError(path, 0, f"has no {' and no '.join(missing)}", "write it again")
    return Snapshot(facts, selections)


# -- differences ---------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """How the selection of a problem changed; the values are the words of reports, the gravest first."""

    LOST = "lost"
    CHANGED = "kernel changed"
    BLOCKING = "blocking changed"
    GAINED = "gained"
    NEW = "new problem"
    GONE = "problem gone"

    @property
    def is_news(self) -> bool:
        """Whether the release selects otherwise; the rest is a matter of which problems were listed."""
        return self not in {Kind.NEW, Kind.GONE}


class Change(NamedTuple):
    """One problem whose line differs between two snapshots; ``None``: one of them does not have it."""

    kind: Kind
    problem: str
    old: Selection | None
    new: Selection | None

    @property
    def sides(self) -> tuple[str, str]:
        """The old and the new selection, as text."""
        parts = 2 if self.kind is Kind.BLOCKING else 1
        before, after = (" ".join(found[:parts]) if found else "-" for found in (self.old, self.new))
        return before, after


def compare(old: Snapshot, new: Snapshot) -> list[Change]:
    """What changed, the gravest kind first, each by problem.

    Raises:
        ValueError: when the selections of the two depend on different numbers of threads or sizes of caches.
    """
    for name in _PINNED:
        if old.facts[name] != new.facts[name]:
            raise ValueError(
                f"{name} is {old.facts[name]} in one and {new.facts[name]} in the other: selections depend on it"
            )
    found = []
    for line in sorted({*old.selections, *new.selections}):
        before, after = old.selections.get(line), new.selections.get(line)
        if before != after:
            found.append(Change(_kind(before, after), line, before, after))
    return sorted(found, key=lambda change: list(Kind).index(change.kind))


def _kind(old: Selection | None, new: Selection | None) -> Kind:
    if old is None:
        return Kind.NEW
    if new is None:
        return Kind.GONE
    if old.is_kernel != new.is_kernel:
        return Kind.LOST if old.is_kernel else Kind.GAINED
    return Kind.BLOCKING if old.kernel == new.kernel else Kind.CHANGED


# -- listing -------------------------------------------------------------------------------------------------


def take(backend: CppBackend, problems: Iterable[Problem], isa: str, threads: int) -> Snapshot:
    """List the selection of every problem at an instruction set; nothing is compiled, and none of it runs.

    Args:
        backend: made for listing, and for that number of threads.
        problems: whether or not the backend supports them.
        isa: one of ``machine.isa.ISAS``, whether or not this CPU executes it.
        threads: of a program.
    """
    import torch

    from pytest_gemm.api.request import BuildRequest
    from pytest_gemm.backends.inductor import cpu_isa, torch_compat

    request = BuildRequest(isa=isa)
    facts = {"torch": torch.__version__, "backend": backend.name, "isa": isa, "threads": str(threads)}
    facts |= {name: str(size) for name, size in cpu_isa.LISTED_CACHES.items()}
    selections: dict[str, Selection] = {}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # of problems that a device has not, PyTorch logs every one with its stack
    try:
        for problem in problems:
            if (found := _selection(backend, problem, request)) is not None:
                selections[problem.line] = found
            if len(selections) % _RESET_EVERY == 0:
                torch_compat.forget_programs()
    finally:
        logging.disable(disabled)
    return Snapshot(facts, selections)


# So many lists are made before what Dynamo keeps of them is let go.
_RESET_EVERY: Final = 100


def _selection(backend: CppBackend, problem: Problem, request: BuildRequest) -> Selection | None:
    """The selection of one problem, ``None`` for one whose operands cannot be made."""
    import warnings

    from pytest_gemm.operands import tensors
    from pytest_gemm.operands.distributions import distributions_for
    from pytest_gemm.outcome import Unsupported

    distributions = distributions_for(problem)
    if not distributions:
        return None
    try:
        given = tensors.make(problem, distributions[0], 0, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiler's own are no news here
            found, refused = backend.selected(problem, given, request)
    except Unsupported:
        return None
    except Exception as error:  # of Inductor: what it does with the problem is what is listed
        inner = getattr(error, "inner_exception", None) or error
        return Selection(f"error:{type(inner).__name__}")
    if not found:
        return Selection("refused" if refused else "none")
    blockings = dict.fromkeys(blocking or "-" for _, blocking in found)
    names = (name if name.startswith(_KERNEL) else f"library:{name}" for name, _ in found)
    return Selection("+".join(names), "+".join(blockings))


def _problems(entry: str, level: str, ops: Sequence[str]) -> list[Problem]:
    """The problems that a function of a level returns, named as ``package.module:function``.

    Raises:
        ValueError: when there is no such function, or what it returns are no problems.
    """
    name, _, function = entry.partition(":")
    try:
        made: Callable[[str], Iterable[Problem | str]] = getattr(importlib.import_module(name), function)
        found = [one if isinstance(one, Problem) else Problem.parse(one) for one in made(level)]
    except (ImportError, AttributeError, TypeError, ProblemError) as error:
        raise ValueError(
            f"--problems={entry}: {error}; name a function of a level as package.module:function"
        ) from None
    problems = [problem for problem in dict.fromkeys(found) if not ops or problem.op.name in ops]
    if not problems:
        raise ValueError(f"--problems={entry}: has no problem of --level={level} and --ops={','.join(ops)}")
    return problems


# -- the command line -------------------------------------------------------------------------------------------


def _write(given: argparse.Namespace) -> tuple[list[str], int]:
    from pytest_gemm.backends.cpp.backend import CppBackend

    problems = _problems(given.problems, given.level, given.ops)
    backend = CppBackend(threads=given.threads, listing=True)
    lines = []
    for isa in given.isa or ISAS:
        made = take(backend, problems, isa, given.threads)
        path = given.dir / made.place
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, made.text().encode())
        lines.append(f"{path}: {made.counts}")
    return lines, 0


def _show(given: argparse.Namespace) -> tuple[list[str], int]:
    lines = []
    for path in _files(given.path).values():
        found = read(path)
        lines.append(f"{path}: torch {found.facts['torch']}, {found.facts['threads']} threads, {found.counts}")
        counted = Counter(one.kernel for one in found.selections.values())
        lines += [
            f"  {count:>5}  {kernel}" for kernel, count in sorted(counted.items(), key=lambda kv: (-kv[1], kv[0]))
        ]
    return lines, 0


def _files(path: Path) -> dict[Path, Path]:
    """A file, or those of a folder by their names in it.

    Raises:
        SnapshotError: when there are none.
    """
    found = [path] if path.is_file() else sorted(path.rglob("*.tsv"))
    if not found:
        raise SnapshotError(path, 0, "has no snapshots", "name a file or a folder that `snapshot write` made")
    return {one.relative_to(path): one for one in found}


def _pairs(old: Path, new: Path) -> list[tuple[Path, Path]]:
    """The files to compare: two files, or those of one name in two folders.

    Raises:
        SnapshotError: when no name is in both.
    """
    if old.is_file() or new.is_file():
        return [(old, new)]
    ours, theirs = _files(old), _files(new)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise SnapshotError(new, 0, f"has no file of a name that {old} has", "name two folders of releases")
    return [(ours[name], theirs[name]) for name in common]


def _diff(given: argparse.Namespace) -> tuple[list[str], int]:
    lines, news = [], 0
    for before, after in _pairs(given.old, given.new):
        old, new = read(before), read(after)
        try:
            changes = compare(old, new)
        except ValueError as error:
            raise SnapshotError(after, 0, str(error), "write both with the same --threads") from None
        news += sum(change.kind.is_news for change in changes)
        counted = Counter(change.kind for change in changes)
        tally = ", ".join(f"{counted[kind]} {kind.value}" for kind in Kind if counted[kind]) or "no difference"
        if given.markdown:
            rows = [(one.kind.value, f"`{one.problem}`", *one.sides) for one in changes]
            shown = [*table(("what", "problem", "before", "after"), rows, (), markdown=True), ""] if rows else []
            lines += [f"### {old} -> {new}", "", f"{tally}.", "", *shown]
        else:
            lines.append(f"{old} -> {new}: {tally}")
            lines += [f"  {one.kind.value:<16} {one.problem}: {' -> '.join(one.sides)}" for one in changes]
    return lines, int(bool(news))


def isas(text: str) -> list[str]:
    """The type of ``--isa``."""
    return _names(text, "level", ISAS)


def ops(text: str) -> list[str]:
    """The type of ``--ops``."""
    return _names(text, "op", OPS)


def _names(text: str, what: str, known: Iterable[str]) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    for name in found:
        if name not in known:
            hint = did_you_mean(name, known)
            raise argparse.ArgumentTypeError(f"no such {what}: {name}{hint}; known: {', '.join(known)}")
    return found


def threads(text: str) -> int:
    """The type of ``--threads``."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more, {_MOST_THREADS} at most")
    return int(text)


def run(given: argparse.Namespace) -> int:
    """Run one task; returns 1 where ``diff`` finds that a release selects otherwise."""
    lines, status = {"write": _write, "show": _show, "diff": _diff}[given.task](given)
    show("\n".join(lines) + "\n")
    return int(status)
