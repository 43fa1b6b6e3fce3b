"""Kernels on a second CUDA stream: one that is launched elsewhere is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.judge import Judge

LINES = ["mm:bf16:nn:64x96x128", "linear:f16:nt:64x96x128:bias+relu"]
needs_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_current(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def on_default(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return a @ b


def outcomes(backend: CallableBackend | TritonBackend, line: str, stream: str) -> list[Outcome]:
    return judged(backend, line, "int-1", "rand", judge=Judge(stream=stream), device=Device.CUDA)


@pytest.mark.gpu
@needs_a_device
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("matmul", "stream", "is_found"), [
    (on_current, "default", False), (on_default, "default", False), (on_current, "side", False),
    (on_default, "side", True),
])  # fmt: skip
def test_a_kernel_on_the_default_stream_is_found(
    line: str, matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], stream: str, is_found: bool
) -> None:
    mine = CallableBackend("mine", matmul, frozenset({"f16", "bf16"}), False, None, True)
    # The kernel races with the operands: on an H100 one of two distributions was late enough, or both.
    assert (Status.INCORRECT in {outcome.status for outcome in outcomes(mine, line, stream)}) is is_found


@pytest.mark.gpu
@pytest.mark.slow
@needs_a_device
@pytest.mark.parametrize("line", LINES)
def test_triton_s_kernels_run_on_the_current_stream(line: str) -> None:
    assert {outcome.status for outcome in outcomes(TritonBackend(), line, "side")} == {Status.PASSED}


def test_a_stream_is_nothing_to_a_cpu(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess("--gemm-backends=cpp", "--gemm-device=cpu", "--gemm-set=run.stream=side")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*run.stream=*has no effect: no selected backend (cpp) computes on a CUDA device*"])
