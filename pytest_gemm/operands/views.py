"""Views in programs: results stored through a transpose, operands that a program takes out of larger tensors.

Steps such as ``t``, ``perm-1_0_2`` and ``view-4x8x2x33`` compute nothing, so a result is judged where its reference is:
in the product's own M x N (with its batch).  A program takes residuals in its own places and returns its result there;
this module translates both.  Of a residual it always gives a view: the problem line allows no view step that would
copy one.

With the flags ``tail``, ``sliced`` and ``strided`` the argument of a program is a larger tensor, as it is stored, and
the program itself makes A or B of it.  What is not A's or B's is poison.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pytest_gemm.problem.dtypes import DType
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


# -- operands that a program takes out of larger tensors ---------------------------------------------------


def lead(dtype: DType) -> int:
    """Columns on each side of a matrix that is ``sliced``: 16 bytes of them, which TMA can skip."""
    return 128 // dtype.bits


def whole_of(x: torch.Tensor, cut: str, dtype: DType, offset: bool = False, dim: int = 0) -> torch.Tensor:
    """The tensor of which a program makes ``x``, as it is stored; ``x`` itself where it takes that.

    Args:
        x: a tensor in storage that was made for this (``memory.guarded``), in the order in which it is stored.
        cut: see :meth:`Facts.view_of`.
        dtype: of its elements.
        offset: a slice begins one column later.
        dim: the dimension of which ``tail`` drops the first index.
    """
    shape, stride, first = list(x.shape), list(x.stride()), x.storage_offset()
    if cut == "tail":
        shape[dim] += 1
        first -= stride[dim]
    elif cut == "sliced":
        shape[-1] += 2 * lead(dtype)
        first -= lead(dtype) + offset
    elif cut == "strided":
        shape[-1] *= 2
        stride[-1] = 1
    return x.as_strided(shape, stride, first) if cut else x


def given_whole(problem: Problem, name: str, x: torch.Tensor) -> torch.Tensor:
    """Operand ``a`` or ``b``, K x N even where the program takes a weight, as the argument that the program cuts."""
    stored = x.mT if _is_transposed(problem, name) else x
    dtype = problem.dtypes.a if name == "a" else problem.dtypes.b
    return whole_of(stored, problem.view_of(name), dtype, problem.has(f"{name}.offset"))


def cut(problem: Problem, name: str, whole: Any) -> Any:
    """What a program makes of the argument ``a`` or ``b``, a tensor or what stands for one in a trace."""
    kind, columns = problem.view_of(name), lead(problem.dtypes.a if name == "a" else problem.dtypes.b)
    if kind == "tail":
        x = whole[1:]
    elif kind == "sliced":
        later = int(problem.has(f"{name}.offset"))
        x = whole[..., columns + later : later - columns]
    elif kind == "strided":
        x = whole[..., ::2]
    else:
        return whole
    return x.mT if _is_transposed(problem, name) and not (name == "b" and problem.op.weight) else x


def _is_transposed(problem: Problem, name: str) -> bool:
    return problem.layout.a_transposed if name == "a" else problem.layout.b_transposed
