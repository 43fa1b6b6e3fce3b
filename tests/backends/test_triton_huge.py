"""Triton's templates without their offsets of 64 bits: the judge finds it."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import admission

WIDE, NARROW = "INDEX_DTYPE : tl.constexpr = tl.int64", "INDEX_DTYPE : tl.constexpr = tl.int32"


def judged(line: str, folder: str, *, is_mutant: bool) -> tuple[set[Status], bool]:
    """The statuses of a problem, and whether its template had offsets of 64 bits.

    In a process of its own: a kernel that writes at a wrong address takes the device with it.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    from torch._inductor.async_compile import AsyncCompile

    compiled, texts = AsyncCompile.triton, []

    def triton(self: Any, name: str, text: str, *args: Any, **kwargs: Any) -> Any:
        texts.append(text)
        return compiled(self, name, text.replace(WIDE, NARROW) if is_mutant else text, *args, **kwargs)

    AsyncCompile.triton = triton  # the process is this test's
    case = Case(TritonBackend(), Problem.parse(line), ("int-1",), 0, Device.CUDA)
    return {outcome.status for outcome in Judge().outcomes(case)}, any(WIDE in text for text in texts)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: Triton compiles for one")
@pytest.mark.parametrize("line", ["mm:f16:nn:46352x46360x32", "bmm:bf16:nt:8209x512x512x64"])
@pytest.mark.parametrize("is_mutant", [False, True])
def test_a_template_without_its_offsets_of_64_bits_is_caught(tmp_path: Path, line: str, is_mutant: bool) -> None:
    need = admission.needed(Case(TritonBackend(), Problem.parse(line), ("int-1",), 0, Device.CUDA))
    if need > (free := admission.free("cuda")):
        pytest.skip(f"needs {need >> 30} GiB of the device's memory, and {free >> 30} GiB are free")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            statuses, was_wide = pool.submit(judged, line, str(tmp_path), is_mutant=is_mutant).result()
        except BrokenProcessPool:
            statuses, was_wide = {Status.CRASHED}, True
    if not was_wide:
        pytest.skip("this release of PyTorch has no offsets of 64 bits in its templates")
    if is_mutant:
        assert statuses & {Status.INCORRECT, Status.CRASHED}
    else:
        assert statuses == {Status.PASSED}
