"""The backend around the kernel of ``pytest-gemm judge``: what its first calls raise is told as what it is."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.kernel import Kernel, KernelBackend

MM = Problem.parse("mm:f32:nn:4x5x6")
CRASHES = (
    RuntimeError("CUDA error: invalid argument"),
    RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    IndexError("list index out of range"),
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    OSError("libmine.so: cannot open shared object file"),
)
REFUSALS = (ValueError("K must be even"), NotImplementedError(), RuntimeError("expected scalar type Float"))


def raising(error: Exception, call: int, device: str = "cpu") -> KernelBackend:
    """A product that raises in that call, counted from 0."""
    calls = itertools.count()

    def mine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            raise error
        return a @ b

    return KernelBackend("mine", Kernel("a.py:mine", function=mine), ["f32"], devices=(device,))


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("error", [*CRASHES, *REFUSALS], ids=repr)
def test_what_a_kernel_raises_is_a_refusal_or_a_crash_by_its_name(error: Exception, call: int) -> None:
    (found,) = Judge().outcomes(Case(raising(error, call), MM, ("rand",), 0, Device.CPU))
    assert found.reason is not None
    if error in REFUSALS and call == 0:
        assert (found.status, found.reason.code) == (Status.UNSUPPORTED, "refused")
        return
    assert found.status is Status.CRASHED
    phase, memory = ("prepare", "run")[call], "emory" in repr(error)
    assert found.reason.code == ("out-of-memory" if memory else f"{phase}-{type(error).__name__}")
    assert memory or str(error) in found.reason.text


@pytest.mark.parametrize("error", [*CRASHES, *REFUSALS], ids=repr)
def test_on_a_gpu_the_first_call_is_one_that_compiles(error: Exception) -> None:
    """It is made by :class:`CallableBackend`, before there is anything to return."""
    with pytest.raises(Unsupported if error in REFUSALS else type(error)):
        raising(error, 0, "cuda").prepare(MM, tensors.make(MM, "rand", 0, "cpu"))
