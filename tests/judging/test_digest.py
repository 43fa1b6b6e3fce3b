"""Digests of results and operands: equal for what a user calls the same result, in the outcome of every judged case."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging import results as results_module


def digest(*results: torch.Tensor) -> str:
    return results_module.digest_of(results)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int8], ids=str
)
def test_strides_do_not_count_and_one_element_does(dtype: torch.dtype) -> None:
    x = torch.arange(60.0).reshape(5, 12).to(dtype)
    assert digest(x) == digest(x.float().t().contiguous().to(dtype).t())
    other = x.clone()
    other[4, 11] = 1
    assert digest(x) != digest(other)


def test_every_nan_is_the_same_and_the_sign_of_zero_is_not() -> None:
    words = torch.tensor([[0x7FC00000, 0], [-1, 0]], dtype=torch.int32).view(torch.float32)
    assert digest(words[:1]) == digest(words[1:])
    assert digest(torch.zeros(2)) != digest(-torch.zeros(2))
    assert digest(torch.ones(2).double()) != digest(torch.ones(2).double() + 2.0**-40)
    assert digest(torch.tensor([math.nan, 1.0])) != digest(torch.tensor([1.0, math.nan]))


def test_one_element_and_none_of_any_stride() -> None:
    assert digest(torch.ones(4).as_strided((1, 1), (3, 2))) == digest(torch.ones(1, 1))
    assert digest(torch.empty(0, 8)) == digest()


def test_of_a_large_result_the_digest_reads_some_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "_DIGESTED", 200)
    x = torch.arange(200.0).reshape(4, 50)  # 800 bytes: every fourth column
    read, unread = x.clone(), x.clone()
    read[3, 48], unread[3, 49] = -1, -1
    assert digest(x) == digest(unread)
    assert digest(x) != digest(read)


def outcome(seed: int = 0, factor: float = 1.0, *, deterministic: bool = True) -> Outcome:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).float() * factor

    backend = CallableBackend("mine", matmul, frozenset({"f32"}), False, None, deterministic)
    return judged(backend, "mm:f32:nn:8x16x32", "rand", seed=seed)[0]


def test_an_outcome_has_the_digests_of_its_results_and_operands() -> None:
    first, again, other = outcome(), outcome(), outcome(seed=1)
    assert first.status is Status.PASSED
    assert (first.bits, first.operands) == (again.bits, again.operands)
    assert len(first.bits) == len(first.operands) == 16
    assert first.bits != other.bits
    assert first.operands != other.operands


def test_a_wrong_result_of_the_same_operands_has_another_digest() -> None:
    right, wrong = outcome(), outcome(factor=2.0)
    assert wrong.status is Status.INCORRECT
    assert wrong.operands == right.operands
    assert wrong.bits not in {"", right.bits}


def test_a_backend_that_is_not_deterministic_has_no_digest() -> None:
    assert outcome(deterministic=False).bits == ""
