"""A function on CUDA as a backend: its contract, and what is made once for a timed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_gemm.api import protocols
from pytest_gemm.api.callable import plain
from pytest_gemm.backends.on_cuda import CudaCallableBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.numerics import tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem

LINEAR = Problem.parse("linear:f32:nt:17x64x128:bias")


class Packing(CudaCallableBackend):
    """A library with a linear of its own, whose weight is packed."""

    packs = 0

    def bind(self, problem: Problem, tensors: dict[str, Any]) -> Callable[[], Any] | None:
        if problem.op.name != "linear":
            return None
        self.packs += 1
        packed = tensors["b"].mT.contiguous()
        return lambda: torch.addmm(tensors["bias"], tensors["a"], packed)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract of a GPU without one."""
    monkeypatch.setattr(tensor_core, "contract", lambda *_, library: Contract("f32", slices=4 if library else 1))


@pytest.mark.usefixtures("sums")
def test_a_program_of_the_library_is_rounded_once_and_the_product_after_each_step() -> None:
    backend = Packing("packing", torch.matmul, deterministic=False)
    found, other = (
        backend.prepare(problem, tensors.make(problem, "rand", 0, Device.CPU)).contract
        for problem in (LINEAR, Problem.parse("mm:f32:nn:8x8x8"))
    )
    assert (found.epilogue, other.epilogue) == ("fused", "eager")
    assert (found.deterministic, found.slices) == (False, 1)
    assert Packing("packing", torch.matmul, library=True).contract(LINEAR).slices == 4


@pytest.mark.usefixtures("sums")
def test_a_timed_call_has_its_weight_packed_before() -> None:
    backend = Packing("packing", torch.matmul)
    operands = tensors.make(LINEAR, "rand", 0, Device.CPU)
    prepared = backend.prepare(LINEAR, operands)
    expected = torch.nn.functional.linear(operands.a, operands.b.mT, operands.bias)
    assert backend.packs == 1  # the call in which a library compiles
    for runs in (2, 3):
        torch.testing.assert_close(prepared.run(operands), expected)
        assert backend.packs == runs
    with protocols.timed(prepared, operands) as call:
        before = backend.packs
        for _ in range(3):
            call()
        assert backend.packs == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("linear:f32:nt:17x64x128:bias+relu", True),
        ("linear:f32:nt:3x17x64x128", False),
        ("bmm:f32:nn:3x17x64x128", True),
        ("mm:f32:nn:17x64x128:a.padded", False),
        ("mm:f16-f16-f32:nn:17x64x128", False),
    ],
)
def test_a_plain_program_is_the_op_on_matrices(line: str, expected: bool) -> None:
    assert plain(Problem.parse(line)) is expected
