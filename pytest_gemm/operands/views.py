"""Results that are stored through a transpose: from the product's places to the program's, and back.

Steps such as ``t``, ``perm-1_0_2`` and ``view-4x8x2x33`` compute nothing, so a result is judged where its reference is:
in the product's own M x N (with its batch).  A program takes residuals in its own places and returns its result there;
this module translates both.  Of a residual it always gives a view: the problem line allows no view step that would
copy one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import Step


class WrongShape(ValueError):
    """A result that has another shape than the program's: its elements have no places in the product."""


def forth(x: Any, steps: Iterable[Step]) -> Any:
    """``x``, a tensor of the product's shape or what stands for one in a trace, after these view steps."""
    for step in steps:
        if step.name == "view":
            x = x.reshape(step.sizes)
        elif step.name == "t":
            x = x.transpose(-2, -1)
        elif step.name == "dense":
            x = x.contiguous()
        else:
            x = x.permute(step.order(0))
    return x


def back(x: torch.Tensor, shape: tuple[int, ...], steps: Sequence[Step]) -> torch.Tensor:
    """The tensor of ``shape`` of which these view steps have made ``x``; a view where one can be had."""
    before = itertools.accumulate(steps, lambda old, step: step.moved(old), initial=shape)
    for step, old in reversed(list(zip(steps, before, strict=False))):
        if step.name == "view":
            x = x.reshape(old)
        else:
            order = step.order(len(old))
            x = x.permute([order.index(dim) for dim in range(len(old))])
    return x


def taken(problem: Problem, index: int, residual: torch.Tensor) -> torch.Tensor:
    """A residual as the program takes it: (N,), (M, 1), or of the result's shape after the view steps before its step.

    Args:
        problem: whose program.
        index: which of its residuals.
        residual: of the result's shape in the product's places, as in ``Operands.residuals``.
    """
    step, steps = problem.residuals[index]
    rows, columns = residual.shape[-2:]
    if step.extent == "n":
        return residual.as_strided((columns,), (1,))
    if step.extent == "m1":
        return residual.as_strided((rows, 1), (1, 1))
    if step.extent == "at":
        return residual  # what it was looked up in takes its place
    moved: torch.Tensor = forth(residual, steps)
    return moved


def residual_of(problem: Problem, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """The residual in the product's places for what the program takes: the inverse of :func:`taken`."""
    step, steps = problem.residuals[index]
    return tensor.expand(problem.result_shape) if step.extent else back(tensor, problem.result_shape, steps)


def in_product(problem: Problem, made: tuple[Any, ...]) -> tuple[Any, ...]:
    """A program's results in the product's places.

    What cannot be a result at all (another number of them, no tensor) passes; the judge reports it.

    Raises:
        WrongShape: when a result that has view steps has another shape than asked for.
    """
    outputs = problem.outputs
    if len(made) != len(outputs) or not any(output.view_steps for output in outputs):
        return made
    return tuple(_in_place(*pair) for pair in zip(outputs, made, strict=True))


def _in_place(output: Problem, result: Any) -> Any:
    if not output.view_steps or not isinstance(result, torch.Tensor):
        return result
    if tuple(result.shape) != output.returned_shape:
        text = f"the result has shape {tuple(result.shape)}, expected {output.returned_shape}"
        raise WrongShape(f"{text} ({output.result_shape} after {'+'.join(map(str, output.view_steps))})")
    return back(result, output.result_shape, output.view_steps)
