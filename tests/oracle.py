"""What tests share: the operands of a line, what its program computes, whether that is right, what the judge says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gemm.core.case_id import CandidateSelection, Device
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.judging import verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import as_allowed
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program


def make(line: str, distribution: str = "rand", seed: int = 0) -> Operands:
    return tensors.make(Problem.parse(line), distribution, seed)


def scales(o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of A and of B, which are there."""
    assert o.scale_a is not None
    assert o.scale_b is not None
    return o.scale_a, o.scale_b


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float64, rounded once: right whatever the host's libraries make of narrow types.

    int32 of integers; float32 of fp8, whose program goes on with the scales.
    """
    kind = a.dtype if a.dtype.is_floating_point else torch.int32
    return (a.double() @ b.double()).to(torch.float32 if kind.itemsize == 1 else kind)


def computed(
    o: Operands, product: Callable[..., torch.Tensor] | None = exact, /, **changed: torch.Tensor
) -> torch.Tensor:
    """The problem's program in eager PyTorch, with an exact product or another one in it, or of other tensors.

    Of several linears all results, as they are judged.  ``None`` for PyTorch's own product.
    """
    result: torch.Tensor = program.build(o.problem, product)(**(program.args(o.problem, o) | changed))
    if o.problem.several:
        (result,) = program.gathered(o.problem, tuple(result))
    return result


def on_meta(o: Operands) -> torch.Tensor:
    """The result of the problem's program by PyTorch's own checks of shapes, without a device."""
    tensors = {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name, x in program.args(o.problem, o).items()
    }
    result: torch.Tensor = program.build(o.problem)(**tensors)
    return result


def interval(o: Operands, contract: Contract | None = None) -> interval_module.Interval:
    """What is right by a contract; without one by that of eager PyTorch."""
    contract = contract or as_allowed(Contract(epilogue="eager"), o.problem)
    return interval_module.interval(o.problem, o, reference.reference(o.problem, o), contract)


def compared(o: Operands, actual: torch.Tensor, contract: Contract | None = None) -> verdict.Comparison:
    return verdict.compare(actual, interval(o, contract), o.problem, o)


def is_right(o: Operands, actual: torch.Tensor, contract: Contract | None = None) -> bool:
    return compared(o, actual, contract).ok


def judged(
    backend: Any,
    line: str,
    *distributions: str,
    judge: Judge | None = None,
    seed: int = 0,
    device: Device = Device.CPU,
    candidates: str = "",
    **axes: Any,
) -> list[Outcome]:
    """What becomes of a problem on a backend, by default with each distribution that it has."""
    problem, selection = Problem.parse(line), CandidateSelection(candidates)
    case = Case(backend, problem, distributions or distributions_for(problem), seed, device, selection, **axes)
    return (judge or Judge()).outcomes(case)


def refuses_line(line: str, words: str) -> None:
    """The line is no problem, for a reason that matches."""
    with pytest.raises(ProblemError, match=words):
        Problem.parse(line)


def says(refusal: object, words: str) -> None:
    """A refusal has these words; without words there is none."""
    assert (refusal is None) == (not words)
    assert words in str(refusal or "")
