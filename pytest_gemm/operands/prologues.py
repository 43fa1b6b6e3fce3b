"""What a program does to A or B before it multiplies them: a prologue, which a template may fuse into its loads.

Prologues are exact, so that the reference is the product of what they give; below the smallest normal number a half of
it may round, as the type of the operand does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from pytest_gemm.operands.magnitudes import Grid
from pytest_gemm.problem.problem import Problem

_LEAST: Final = 0.5
_PROLOGUES: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": torch.relu,
    "floor": lambda x: x.clamp(min=_LEAST),
    # A row of one element would be a product alone, which subnormal numbers decide.
    "tril": lambda x: x.tril(8),
    "halved": lambda x: x * 0.5,
}
# They leave one sign.
_ONE_SIGN: Final = {"relu", "floor"}


def after(problem: Problem, operand: str, x: torch.Tensor) -> torch.Tensor:
    """``x``, which is A or B, after its prologues."""
    for name in problem.prologues(operand):
        x = _PROLOGUES[name](x)
    return x


def are_zero_mean(problem: Problem) -> bool:
    """Whether products of operands of both signs still have both: one factor of each has to keep its own."""
    return _ONE_SIGN.isdisjoint(problem.prologues("a")) or _ONE_SIGN.isdisjoint(problem.prologues("b"))


def regrid(problem: Problem, drawn: Grid) -> None:
    """Put the grid of the products where the prologues have moved it; it is lost where it is not known."""
    for operand, unit in zip("ab", drawn.units, strict=True):
        for name in problem.prologues(operand):
            factor = 0.5 if name == "halved" else 1.0
            if name == "floor":
                factor = min(1.0, _LEAST / unit) if unit else 0.0
                drawn.magnitude_bound = math.inf
            drawn.quantum *= factor
            drawn.base_quantum *= factor
