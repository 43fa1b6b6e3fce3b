"""Rounding against every number that the small types have, and against known cases of the others."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_gemm.numerics.rounding import round_to, ulp_distance
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES, DType


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.isnan() & b.isnan()) | ((a == b) & (torch.signbit(a) == torch.signbit(b)))


def all_finite(dtype: DType) -> torch.Tensor:
    """Every finite number of a type of at most 16 bits, in order, in float64."""
    integers = torch.int8 if dtype.bits == 8 else torch.int16
    codes = torch.arange(-(1 << (dtype.bits - 1)), 1 << (dtype.bits - 1), dtype=torch.int32).to(integers)
    values = codes.view(torch_dtype(dtype)).to(torch.float32).to(torch.float64)
    finite: torch.Tensor = values[values.isfinite()].unique()
    return finite


@pytest.mark.parametrize("name", ["f16", "bf16", "f8e4m3fn", "f8e5m2"])
def test_every_number_every_midpoint_and_a_hair_beside_it(name: str) -> None:
    dtype = DTYPES[name]
    values = all_finite(dtype)
    assert same(round_to(values, dtype), values).all()
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2  # exact: neighbours of a small type
    up, down = (torch.nextafter(middle, torch.tensor(s * math.inf, dtype=torch.float64)) for s in (1, -1))
    assert (round_to(up, dtype) == high).all()
    assert (round_to(down, dtype) == low).all()
    # Ties go to the neighbour that is an even count of their distance.
    step = high - low
    parity = torch.remainder(low / step, 2) == 0
    assert (round_to(middle, dtype) == torch.where(parity, low, high)).all()


@pytest.mark.parametrize(("name", "x", "expected"), [
    ("f16", 1 + 2**-11 + 2**-40, 1.0009765625),  # tensor.to() gives 1.0
    ("f16", 1 + 2**-11, 1.0), ("bf16", 1 + 2**-8 + 2**-45, 1.0078125), ("f16", 65519.999, 65504.0),
    ("f16", 65520.0, math.inf), ("f16", -65520.0, -math.inf), ("f16", 2.0**-25, 0.0),
    ("f16", 2.0**-25 + 2.0**-60, 2.0**-24), ("f16", -(2.0**-30), -0.0), ("f8e4m3fn", 464.0, 448.0),
    ("f8e4m3fn", 464.01, math.nan), ("f8e4m3fn", math.inf, math.nan), ("f8e5m2", 1e9, math.inf),
    ("f32", 3.4028235677973366e38, math.inf), ("f32", 2.0**-149 * 0.75, 2.0**-149), ("f64", 0.1, 0.1),
    ("i32", 2147483646.0, 2147483646.0), ("bf16", math.nan, math.nan),
])  # fmt: skip
def test_known_roundings(name: str, x: float, expected: float) -> None:
    got = round_to(torch.tensor([x, 1.0], dtype=torch.float64), DTYPES[name])
    assert same(got, torch.tensor([expected, 1.0], dtype=torch.float64)).all()


def test_strided_input_is_rounded_and_left_alone() -> None:
    x = torch.full((4, 6), 1 + 2**-11 + 2**-40, dtype=torch.float64).t()
    before = x.clone()
    assert (round_to(x, DTYPES["f16"]) == 1.0009765625).all()
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 1.0]).to(dtype)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    above = (one.view(integers) + torch.tensor([1, 1, 1, 0], dtype=integers)).view(dtype)
    assert ulp_distance(one, above).tolist() == [1, 1, 1, 0]


def test_distance_crosses_zero_and_knows_nan() -> None:
    tiny = 2.0**-24
    a = torch.tensor([0.0, tiny, math.nan, math.nan, 65504.0], dtype=torch.float16)
    b = torch.tensor([-0.0, -tiny, math.nan, 1.0, math.inf], dtype=torch.float16)
    assert ulp_distance(a, b).tolist() == [0, 2, 0, torch.iinfo(torch.int64).max, 1]


def test_distance_saturates_in_float64() -> None:
    big = torch.tensor([1.7e308], dtype=torch.float64)
    assert ulp_distance(big, -big).item() == torch.iinfo(torch.int64).max


def test_distance_of_integers() -> None:
    a = torch.tensor([-(2**31), 5], dtype=torch.int32)
    b = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
    assert ulp_distance(a, b).tolist() == [2**32 - 1, 2]


@pytest.mark.parametrize("name", ["f16", "bf16", "f8e4m3fn", "f8e5m2"])
def test_a_nan_does_not_change_how_its_neighbours_are_rounded(name: str) -> None:
    quantum = 2.0 ** (DTYPES[name].emin - DTYPES[name].precision + 1)
    x = torch.tensor([0.2 * quantum, 0.7 * quantum, math.nan, math.inf, 1.0 + 2.0**-30], dtype=torch.float64)
    rounded = round_to(x, DTYPES[name])
    assert rounded[[0, 1, 4]].tolist() == [0.0, quantum, 1.0]
    assert rounded[2].isnan()
