"""PyTorch's own tests of the C++ templates beside this suite's.

    python tests/studies/families.py > docs/results/pytorch-cpu-select-algorithm.md

The table is ``pytorch_families.toml``: each test function of ``test_cpu_select_algorithm.py`` with the problems that
check the same here.  ``tests/conformance/test_families.py`` checks that each problem is in the suite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines

from pytest_gemm.problem.axes import LEVELS


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One test function of PyTorch's; ``pytorch_families.toml`` describes the fields."""

    test: str
    checks: str
    cases: int
    lines: tuple[str, ...]
    dynamic: int = 0
    options: str = ""
    note: str = ""


FAMILIES = lines.read("pytorch_families.toml", Family)


def complaints() -> list[str]:
    """What is wrong with the table, a sentence each; empty when every line is a problem of the suite."""
    return [one for family in FAMILIES for one in lines.complaints(family.test, family.lines, *LEVELS)]


def page() -> str:
    """The table as Markdown."""
    return lines.page("families.md.jinja", families=FAMILIES)


if __name__ == "__main__":
    raise SystemExit(lines.printed(page(), complaints()))
