"""Kernels of a CUDA device in a process of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker.device import Pool
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Workers

# Asking PyTorch for a device would start CUDA here, and what is forked later could not use it.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs a CUDA device")]

LINE = "mm:f32:nn:17x64x128"


def good(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b) + 1


def writes_input(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = torch.mm(a, b)
    a.data.zero_()
    return made


def out_of_bounds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    index = torch.full((1,), 1 << 40, device="cuda")
    return torch.mm(a, b) + torch.zeros(1, device="cuda")[index]


def late(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    made = torch.mm(a, b)
    KEPT.append(made)
    for one in KEPT[:-1]:
        one.zero_()
    return made


def doubles_aten(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    LIBRARY.append(torch.library.Library("aten", "IMPL"))
    LIBRARY[-1].impl("mm", lambda x, y: torch.einsum("ik,kj->ij", x, y) * 2, "CUDA")
    return torch.mm(a, b)


KEPT: list[torch.Tensor] = []
LIBRARY: list[Any] = []
RED: dict[Any, tuple[Status, str]] = {
    off: (Status.INCORRECT, ""),
    writes_input: (Status.INCORRECT, "inputs-written"),
    out_of_bounds: (Status.CRASHED, "cuda-error"),
    late: (Status.INCORRECT, "result-rewritten"),
    doubles_aten: (Status.INCORRECT, ""),
}


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    made = [CallableBackend(one.__name__, one, ("f32",)) for one in (good, *RED)]
    return {one.name: one for one in made}


@pytest.fixture(scope="module")
def workers(backends: dict[str, Backend]) -> Iterator[Workers]:
    keeper = Keeper(backends, 1)
    keeper.prepare()
    made = Workers(keeper, (20.0, 60.0))
    yield made
    made.close()
    keeper.close()


def judged(workers: Workers, backend: Backend, line: str = LINE) -> list[Outcome]:
    return Judge(workers=workers).outcomes(Case(backend, Problem.parse(line), ("int-2", "rand"), 0, Device.CUDA))


@pytest.mark.parametrize("kernel", RED, ids=lambda kernel: kernel.__name__)
def test_a_case_is_red_by_its_own_name_and_its_neighbour_is_right(
    workers: Workers, backends: dict[str, Backend], kernel: Any
) -> None:
    status, code = RED[kernel]
    bad = [one for one in judged(workers, backends[kernel.__name__]) if one.status is not Status.PASSED]
    assert bad
    assert bad[0].status is status
    assert code in {"", bad[0].code}, bad[0].why
    assert {one.status for one in judged(workers, backends["good"])} == {Status.PASSED}


def test_large_operands_and_results(workers: Workers, backends: dict[str, Backend]) -> None:
    for line in ("mm:f32:nn:4096x4096x4096", LINE, "mm:f32:nn:8192x8192x64"):
        assert {one.status for one in judged(workers, backends["good"], line)} == {Status.PASSED}


def test_what_cannot_be_shared_goes_through_the_cpu(
    workers: Workers, backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cuIpcGetMemHandle fails with CUDA error 801")

    workers.close()
    workers._processes.clear()
    monkeypatch.setattr(Pool, "take", refuse)
    with pytest.warns(
        UserWarning, match="go through the memory of the CPU: cuIpcGetMemHandle fails with CUDA error 801"
    ):
        assert {one.status for one in judged(workers, backends["good"])} == {Status.PASSED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same of another process
        assert "inputs-written" in {one.code for one in judged(workers, backends["writes_input"])}
        assert {one.status for one in judged(workers, backends["good"])} == {Status.PASSED}
