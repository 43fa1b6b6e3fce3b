"""Operations that a ``conftest.py`` or a plugin adds, with their cases; docs/how-to/adding-an-op.md is the guide."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Final

from pytest_gemm.api.shipped import RegistryError
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.ops import OPS, Op
from pytest_gemm.problem.problem import Problem

# What an op of the package alone can have: operands and bounds of these are functions of operands/ and numerics/.
_INSIDE: Final = (
    *("scales", "int8", "zero_points", "fused_steps", "rounds_once", "several", "ragged", "quantises_a"),
    *("converts", "weight_scales", "pack", "derived"),
)
# Files with the cases of the ops that are registered in this process.
_CASES: dict[str, Path] = {}


class OpRegistry:
    """What ``pytest_gemm_register_ops`` gets; a new one forgets the ops of a run before it in the same process."""

    def __init__(self) -> None:
        for name in _CASES:
            del OPS[name]
        _CASES.clear()
        shapes.forget()

    def add(self, op: Op, cases: str | os.PathLike[str]) -> None:
        """Register an operation.

        Args:
            op: ``native`` is its program, and ``around``, with a product in float64, the exact result: an element is a
                sum of products of elements of A and B.  They may be moved, left out and added, but not subtracted:
                the bound is what ``around`` makes of absolute values.  With ``addend`` or ``own_bias`` the exact
                product is that of ``around`` without a bias.
            cases: a TOML file of problems, as those of ``conformance/cases``; at least one is of the op.

        Raises:
            RegistryError: when the name is taken or malformed, a program is missing, or the op has what only an op of
                the package can have.
            FileError: when the cases cannot be read, naming file, line and key.
        """
        if not isinstance(op, Op):
            raise RegistryError(f"{type(op).__name__} is no Op: give an object of pytest_gemm.problem.ops.op.Op")
        own = next((name for name in _INSIDE if getattr(op, name)), "")
        for is_wrong, what in (
            (not re.fullmatch("[a-z][a-z0-9_]*", op.name), "its name needs lower-case letters, digits and underscores"),
            (op.name in OPS, "two ops have this name: choose another one"),
            (not callable(op.native), "native is the program: give a function, see docs/how-to/adding-an-op.md"),
            (own != "", f"{own} is of an op of the package alone; leave it out"),
            ("f64" in op.dtypes, "the exact result is in float64, which f64 needs more than; drop f64"),
        ):
            if is_wrong:
                raise RegistryError(f"op {op.name!r}: {what}")
        OPS[op.name], _CASES[op.name] = dataclasses.replace(op, outside=True), Path(cases)
        if not any(one.op.name == op.name for every in shapes.read(Path(cases)) for one in every.problems):
            raise RegistryError(f"op {op.name!r}: {cases} has no problem of it")


def cases(level: str, device: str = "") -> list[Problem]:
    """The problems of a level that come with registered ops, on a device or on any."""
    every = [one for path in _CASES.values() for one in shapes.read(path, level)] if level in LEVELS else []
    return [problem for one in every if not device or device in one.devices for problem in one.problems]
