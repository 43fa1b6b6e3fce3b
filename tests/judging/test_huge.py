"""Results and operands of gigabytes: which lines are judged, and that offsets of 32 bits are found."""

from __future__ import annotations

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
import torch

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging import lines, sampled
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.run import admission

EAGER = Contract(epilogue="eager")


@pytest.mark.parametrize(
    ("line", "dim", "expected"),
    [
        # The first row whose offset in the result is beyond 2^31 bytes, 2^31 elements and 2^32 elements.
        ("mm:f32:nn:40000000x256x8", -2, {2**21, 2**23, 2**24}),
        ("mm:bf16:nt:32768x131072x1024", -2, {2**13, 2**14, 2**15 - 1}),
        # Of A, whose rows are the longer ones; of B's columns, which are rows in memory.
        ("int_mm:i8-i8-i32:nt:2097160x16x2064", -2, {math.ceil(2**31 / 2064), math.ceil(2**32 / 2064)}),
        ("mm:f16:nt:64x53696x40008", -1, {math.ceil(2**31 / 40008), math.ceil(2**31 / 80016)}),
        # Of matrices.
        ("bmm:f32:nn:8209x512x512x1", -3, {2**11, 2**13}),
        # Numbers of lines themselves.
        ("mm:f32:nn:9530399x4x4", -2, {2**16 - 1, 2**16, 2**19, 2**21, 2**23}),
        ("bmm:bf16:nn:65601x16x32x16", -3, {65535, 65536}),
    ],
)
def test_the_lines_hold_those_at_which_an_offset_leaves_32_bits(line: str, dim: int, expected: set[int]) -> None:
    problem = Problem.parse(line)
    boundaries = lines.boundaries_of(problem, dim)
    assert set(boundaries) >= expected
    size = problem.result_shape[dim]
    assert set(lines.lines_of(size, "some", boundaries).tolist()) >= {*boundaries, 0, size - 1}


def test_a_small_problem_has_no_such_lines() -> None:
    problem = Problem.parse("bmm:f32:nn:3x1000x500x64")
    assert [lines.boundaries_of(problem, dim) for dim in (-3, -2, -1)] == [[], [], []]


# -- parts of lines --------------------------------------------------------------------------------------


@pytest.fixture
def few_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of results that a test can afford are cut as those of huge ones are."""
    monkeypatch.setattr(lines, "_ELEMENTS", 1 << 12)
    monkeypatch.setattr("pytest_gemm.operands.integers.LARGE", 0)


PARTS = [
    "mm:f32:nn:300x260x96",
    "mm:bf16:tt:300x260x96:add",
    "bmm:f32:nn:70x40x30x16",
    "baddbmm:f32:nt:70x40x30x16:bias-mn",
]
PARTS += ["addmm:f32:nn:300x260x96:bias-m1", "woq_int4:bf16-i4-bf16:nt:64x96x64:quant.group-32"]
PARTS += ["woq:f32-u8-f32:nt:300x260x96:quant.group-64+zeros", "grouped_mm:f32:nn:7x90x260x96"]


@pytest.mark.usefixtures("few_elements")
@pytest.mark.parametrize("line", PARTS)
@pytest.mark.parametrize("distribution", ["int-1", "rand"])
def test_what_is_cut_out_of_a_right_result_is_right(line: str, distribution: str) -> None:
    problem = Problem.parse(line)
    given = tensors.make(problem, distribution, 0)
    made = program.build(problem)(**program.args(problem, given))
    found = sampled.Sample(given).judge(problem, made, EAGER)
    assert found.comparison.mismatch is None, found.comparison.mismatch
    assert " (in " in found.note


@pytest.mark.usefixtures("few_elements")
@pytest.mark.parametrize("line", ["mm:f32:nn:300x260x96", "bmm:f32:nn:70x40x30x16", "grouped_mm:f32:nn:7x90x260x96"])
@pytest.mark.parametrize("at", ["first", "last", "unseen"])
def test_one_wrong_element_is_found_wherever_it_is(line: str, at: str) -> None:
    problem = Problem.parse(line)
    given = tensors.make(problem, "int-1", 0)
    c = program.build(problem)(**program.args(problem, given))
    place = {"first": 0, "last": c.numel() - 1, "unseen": c.numel() * 5 // 9}[at]
    c.view(-1)[place] += 1.0
    mismatch = sampled.Sample(given).judge(problem, c, EAGER).comparison.mismatch
    assert mismatch is not None
    assert mismatch.index == tuple(int(i) for i in torch.unravel_index(torch.tensor(place), c.shape))


@pytest.mark.slow
@pytest.mark.parametrize("line", ["mm:f32:nn:2200000x4x4", "mm:bf16:nn:300000x4x64", "bmm:f32:nn:8209x512x16x1"])
def test_no_row_is_that_of_a_power_of_two_before(line: str) -> None:
    """A row that is read at an offset without its upper bits is another row."""
    a = tensors.make(Problem.parse(line), "rand", 0).a
    a = a.reshape(-1, a.shape[-1])
    for bits in range(10, (len(a) - 1).bit_length()):
        assert not bool((a[1 << bits :] == a[: -(1 << bits)]).all(-1).any()), bits


# -- offsets of 32 bits ----------------------------------------------------------------------------------

# More than 2^31 elements of A; a wrong offset is negative, which a bounds check takes for outside.
KERNEL = """
#include <stdint.h>
void product(const int8_t* a, const int8_t* b, int32_t* c, int64_t m, int64_t n, int64_t k) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      OFFSET at = (OFFSET)((uint64_t)i * (uint64_t)k);
      int32_t sum = 0;
      if (at >= 0)
        for (int64_t x = 0; x < k; ++x) sum += (int32_t)a[at + x] * b[j * k + x];
      c[i * n + j] = sum;
    }
}
"""
TALL = "int_mm:i8-i8-i32:nt:2080903x2x1032"


@pytest.mark.slow
@pytest.mark.study
def test_a_kernel_with_offsets_of_32_bits_is_caught(tmp_path: Path) -> None:
    """And one with offsets of 64 bits is not; both have the same operands, which take longest to make."""
    problem, judge = Problem.parse(TALL), Judge()
    (tmp_path / "product.c").write_text(KERNEL)
    for offset, status in (("int32_t", Status.INCORRECT), ("int64_t", Status.PASSED)):
        case = Case(_with_offsets(offset, tmp_path), problem, ("int-1",), 0, Device.CPU)
        if (need := admission.needed(case)) > (free := admission.free("cpu")):
            pytest.skip(f"needs {need >> 30} GiB of memory, and {free >> 30} GiB are free")
        (outcome, *_) = judge.outcomes(case)
        assert outcome.status is status, outcome
        if status is Status.INCORRECT:
            assert f"row >= {2**31 // 1032 + 1}" in outcome.details


def _with_offsets(offset: str, folder: Path) -> CallableBackend:
    command = ["cc", "-O3", "-march=native", f"-DOFFSET={offset}", "-shared", "-fPIC", "product.c", "-o", offset]
    subprocess.run(command, cwd=folder, check=True)
    kernel = ctypes.CDLL(str(folder / offset)).product

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[1]
        c = torch.empty(m, n, dtype=torch.int32)
        sizes = (ctypes.c_int64(size) for size in (m, n, k))
        kernel(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)), *sizes)
        return c

    return CallableBackend(offset, matmul, frozenset({"i8"}), False, None, True)
