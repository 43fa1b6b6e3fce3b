"""Operands on a second device: the second call is judged, and a kernel that keeps to the first device is found."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import planted_cuda
import pytest
import torch
from oracle import judged, refuses_line

from pytest_gemm.api import protocols
from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device, Mode
from pytest_gemm.core.outcome import Misconduct, Outcome, Status
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import second_device
from pytest_gemm.worker.calls import check_place

LINE = "mm:f32:nn:16x64x64:b.argument:device.second"
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def mine(product: Product) -> CallableBackend:
    return CallableBackend("mine", product, ("f32", "bf16", "f16"))


def outcome(backend: Any, line: str = LINE, device: Device = Device.CPU) -> Outcome:
    """Of one distribution; the first that failed."""
    found = judged(backend, line, "rand", device=device)
    return next((one for one in found if one.status.is_failure), found[0])


@pytest.fixture
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second device is other memory of the CPU."""
    monkeypatch.setattr(second_device, "_SECOND", "cpu")
    monkeypatch.setattr(protocols, "_devices", lambda _: 2)


def test_where_there_is_one_device_the_problem_is_unsupported() -> None:
    found = outcome(mine(torch.matmul))
    assert found.status is Status.UNSUPPORTED
    assert "needs two CUDA devices, and none can be used" in str(found.reason)


def test_a_constant_stays_where_it_is() -> None:
    refuses_line("linear:f32:nt:8x8x8:device.second", "copies arguments, and B is a constant; add b.argument")
    problem = Problem.parse(LINE)
    assert "loaded for one device" in str(AtenBackend().supports(problem, BuildRequest(mode=Mode.AOTI)))


@pytest.mark.usefixtures("_pretended")
def test_a_right_kernel_is_called_with_copies_and_passes() -> None:
    seen: list[tuple[int, torch.Tensor]] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a.data_ptr(), a.clone()))
        return a @ b

    assert outcome(mine(product)).status is Status.PASSED
    (first, before), (second, after), *_ = seen
    assert first != second
    assert torch.equal(before, after)


def right_where_it_was_first(wrong: Product) -> Product:
    """What it has made for the first place it takes for any."""
    known: list[int] = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        known.append(a.data_ptr())
        return a @ b if a.data_ptr() == known[0] else wrong(a, b)

    return product


def writes_to_a(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = a @ b
    a.numpy()[0, 0] += 1.0
    return made


@pytest.mark.usefixtures("_pretended")
@pytest.mark.parametrize(("wrong", "code"), [
    (lambda a, b: torch.zeros_like(a) @ b, "outside-bound"), (writes_to_a, "inputs-written"),
    (lambda a, b: (a @ b).to("meta"), "wrong-device"),
])  # fmt: skip
def test_what_is_wrong_on_the_second_device_is_found(wrong: Product, code: str) -> None:
    found = outcome(mine(right_where_it_was_first(wrong)))
    assert (found.status, found.code) == (Status.INCORRECT, code)


def test_a_result_on_another_device_of_its_kind_is_named() -> None:
    first, second = (SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1))
    results, given = [first], SimpleNamespace(a=second)
    with pytest.raises(Misconduct, match="the result is on cuda:0, the operands on cuda:1"):
        check_place(results, given)  # type: ignore[arg-type]  # tensors of devices that are not here


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize("line", ["mm:bf16:nn:129x136x264:b.argument:device.second", LINE])
@pytest.mark.parametrize("backend", [AtenBackend(), TritonBackend(), mine(torch.matmul)])
def test_kernels_of_pytorch_follow_their_operands(backend: Any, line: str) -> None:
    assert outcome(backend, line, Device.CUDA).status is Status.PASSED


@pytest.mark.gpu
@needs_two
def test_a_result_on_the_first_device_is_named() -> None:
    found = outcome(mine(planted_cuda.on_first), device=Device.CUDA)
    assert (found.status, found.code) == (Status.INCORRECT, "wrong-device")
    assert "the result is on cuda:0, the operands on cuda:1" in str(found.reason)
