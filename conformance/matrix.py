"""Which problems the suite consists of, by level.

Everything of ``quick`` is in ``full``, and so on; ``huge`` and ``models`` stand apart.  What ``quick`` has is chosen
from ``full`` by what it finds, see ``cases/quick.toml``.

The problems are data: a file for each family in ``cases/``, see ``docs/how-to/adding-a-case.md``.  No problem is left
out because some backend does not support it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from pytest_gemm.api import ops
from pytest_gemm.api.protocols import Backend
from pytest_gemm.conformance import models
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import APART, LEVELS, QUICK, unique
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import parts

CASES = Path(__file__).with_name("cases")
# Files beside those of plain products: lists of values, the tests that ask for more than the right product, and models.
_OTHERS = ("axes", "caches", "models", "races")


def families() -> tuple[str, ...]:
    """Names of the families of plain products, that of ``quick`` first: its problems are sorted by what they find."""
    found = (path.stem for path in CASES.glob("*.toml") if path.stem not in _OTHERS)
    return tuple(sorted(found, key=lambda name: (name != "quick", name)))


def family(name: str, level: str, *sets: str, device: str = "") -> tuple[Problem, ...]:
    """The problems of a family up to a level.

    Args:
        name: of a file in ``cases/`` without its suffix.
        level: as ``--gemm-level``.
        sets: names of the sets that are wanted; none: all.
        device: that the sets are meant for; "": any.
    """
    found = [one for one in shapes.read(CASES / f"{name}.toml", level) if not device or device in one.devices]
    return unique(problem for one in found if not sets or one.name in sets for problem in one.problems)


def products(level: str, device: str = "", backend: Backend | None = None) -> tuple[Problem, ...]:
    """Every problem of a level that a plain product can be, those of registered ops too.

    Args:
        level: as ``--gemm-level``.
        device: that they are meant for; "": any.
        backend: of whose registration each part is called by one of them; ``None``: of none.
    """
    found = (*_own(level, device), *ops.cases(level, device))
    more = () if backend is None else parts.calling(backend, level, found, lambda other: _own(other, device))
    return unique((*found, *more))


@functools.cache
def _own(level: str, device: str) -> tuple[Problem, ...]:
    own = (problem for name in families() for problem in family(name, level, device=device))
    return (*own, *(models.selection(device) if level == "models" else ()))


def autotuned(level: str, device: str = "") -> tuple[Problem, ...]:
    """Problems of ``inductor`` where no backends are named: a share of those of quick, and from ``full`` on all."""
    sets = ("autotuned", "autotuned-on-gpu") if level == QUICK else ()
    return () if level in {LEVELS[0], *APART} else family("quick", QUICK, *sets, device=device)


def recompiled(level: str) -> tuple[Problem, ...]:
    """Compiled a second time with other weights through warm caches."""
    return family("caches", level, "new-weights", "new-weights-full")


def recompiled_in_another_process(level: str) -> tuple[Problem, ...]:
    """The same with the first compile in a process of its own."""
    return family("caches", level, "new-weights-in-another-process", "new-weights-full")


def same_operands(level: str) -> tuple[Problem, ...]:
    """Compiled after other programs that take the same operands."""
    return family("caches", level, "same-operands", "same-operands-full")


def races(level: str, device: str = "") -> tuple[Problem, ...]:
    """Called many times under load."""
    return family("races", level, device=device)


def called_by_threads(level: str) -> tuple[Problem, ...]:
    """Called by another thread, and by two at once."""
    return family("races", level, "threads")
