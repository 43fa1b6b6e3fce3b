"""Eager products that PyTorch computes by kernels of its own in Triton."""

from __future__ import annotations

import pytest
import torch

from pytest_gemm.backends.aten import AtenPrepared
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.problem.problem import Problem


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("bmm:bf16:nn:9x33x65x1", True),
        ("bmm:f32:nt:3x64x128x1:a.broadcast", True),
        ("bmm:bf16:nn:9x33x65x2", False),
        ("bmm:bf16:nn:9x0x65x1", False),
        ("bmm:bf16:nn:9x33x65x1:out.given", False),
        ("mm:bf16:nn:33x65x1", False),
    ],
)
def test_an_outer_product_names_its_kernel(line: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "native_operators", lambda: frozenset({"bmm"}))
    kernel = AtenPrepared(Problem.parse(line), "cuda").proof().device_kernel
    assert bool(kernel) == named
    assert not AtenPrepared(Problem.parse(line), "cpu").proof().device_kernel


def test_a_release_without_such_kernels_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "native_operators", frozenset)
    assert not AtenPrepared(Problem.parse("bmm:bf16:nn:9x33x65x1"), "cuda").proof().device_kernel
