"""``flydsl``: why it cannot run, from the machine to the package, and what it would support."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends import flydsl, tensor_core
from pytest_gemm.backends.flydsl import FlydslBackend
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.case_id import Mode
from pytest_gemm.problem.problem import Problem


def refusal() -> str:
    """The code of what keeps the backend from running on ``cuda``, "" where nothing does."""
    reason = FlydslBackend().availability("cuda").reason
    assert reason is None or reason.remedy
    return "" if reason is None else reason.code


def test_it_says_the_first_thing_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusal() == "no-rocm-device"
    assert "computes on cuda" in str(FlydslBackend().availability("cpu").reason)
    monkeypatch.setattr(flydsl, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "hip", None)
    assert refusal() == "no-rocm-torch"
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch_compat, "has_flydsl", lambda: False)
    assert refusal() == "no-flydsl-templates"
    monkeypatch.setattr(torch_compat, "has_flydsl", lambda: True)
    assert refusal() == "no-flydsl"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal() == "no-rocm-device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arch, code in (("gfx942:sramecc+", "gpu"), ("gfx950:sramecc+", "")):
        properties = types.SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda found=properties: found)
        assert refusal() == code


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mm:bf16:nt:33x40x64:relu", ""),
        ("linear:f16:nt:33x40x64", ""),
        ("grouped_mm:bf16:nn:4x64x96x128", ""),
        ("mm:f32:nn:32x32x32", "f16 and bf16"),
        ("mm:bf16:nn:32x32x40", "multiple of 32"),
        ("mm:bf16:nn:32x32x32:m.dynamic", "sizes are fixed"),
        ("addmm:bf16:nn:32x32x32:bias", "no FlyDSL candidate"),
        ("linear:bf16:nt:32x32x32:bias", "without an addend"),
        ("grouped_mm:bf16:nt:4x64x96x128", "row-major"),
        ("grouped_mm:bf16:nn:4x64x40x128", "an N that"),
    ],
)
def test_it_claims_what_the_lowerings_offer(text: str, words: str) -> None:
    found = FlydslBackend().supports(Problem.parse(text))
    assert (found is None) == (not words)
    assert words in str(found or "")


def test_its_kernels_are_called_from_python() -> None:
    for mode in (Mode.AOTI, Mode.CPP_WRAPPER):
        assert "called from Python" in str(
            FlydslBackend().supports(Problem.parse("mm:bf16:nn:32x32x32"), BuildRequest(mode=mode))
        )


def test_an_amd_gpu_has_the_loosest_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm gives gfx950 the number 9.5, which is no Hopper."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 5))
    problem = Problem.parse("mm:bf16:nn:32x32x32")
    hopper = tensor_core.contract(problem)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    amd = FlydslBackend().sum(problem)
    assert amd.alignment_bits < hopper.alignment_bits
    assert amd.chunk < hopper.chunk
