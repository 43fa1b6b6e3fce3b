"""Grouped products of fp8 with a scale for each row of each A and each column of each B."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import compared, computed, is_right, make, refuses_line, says, scales

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend, AtenPrepared
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutedsl import CuteDslBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor.bindings import dynamic_dimensions
from pytest_gemm.backends.inductor.torch_compat import torch_release
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args, build

FORMS = ("scaled_grouped_mm", "scaled_grouped_mm_n", "scaled_grouped_mm_k", "scaled_grouped_bmm")
every_form = pytest.mark.parametrize("op", FORMS)


def line(op: str, shape: str = "4x32x48x64", more: str = "") -> str:
    return f"{op}:f8e4m3fn-f8e4m3fn-bf16:nt:{shape}:quant.rowwise{more}"


def by_hand(o: Operands, scales_of: Callable[[int], int] = lambda group: group) -> torch.Tensor:
    """Group by group, of elements that are multiplied by their scales first; ``scales_of`` is another group's."""
    batch, a, b = o.problem.shape.batch or 0, o.a.double(), o.b.double()
    scale_a, scale_b = (scale.double() for scale in scales(o))
    pieces = []
    for group in range(batch):
        first, last = o.groups[group] if o.groups else (0, 0)
        other = scales_of(group)
        if o.problem.op.ragged == "k":
            x, y = a[:, first:last], b[first:last]
            sa, sb = scale_a.reshape(batch, -1)[other], scale_b.reshape(batch, -1)[other]
        elif o.problem.op.ragged == "m":
            x, y, sa, sb = a[first:last], b[group], scale_a[first:last], scale_b[other]
        elif o.problem.op.ragged == "n":
            x, y, sa, sb = a[group], b[:, first:last], scale_a[other], scale_b[first:last]
        else:
            x, y, sa, sb = a[group], b[group], scale_a[other], scale_b[other]
        pieces.append((x * sa[:, None]) @ (y * sb))
    ragged = o.problem.op.ragged
    joined = torch.cat(pieces, 0 if ragged == "m" else 1) if ragged in {"m", "n"} else torch.stack(pieces)
    return joined.bfloat16()


@every_form
def test_each_distribution_finds_a_right_result_right(op: str) -> None:
    problem = Problem.parse(line(op))
    for distribution in distributions_for(problem):
        o = factory.make(problem, distribution, 1)
        if distribution != "specials":  # no scale is taken out of an infinity
            assert is_right(o, by_hand(o)), distribution
        made = computed(o, lambda a, b: a.float() @ b.float())
        assert made.dtype == torch.bfloat16
        assert is_right(o, made), distribution


@every_form
@pytest.mark.parametrize("distribution", ["rand", "int-2"])
def test_scales_of_another_group_are_found(op: str, distribution: str) -> None:
    o = make(line(op), distribution, 1)
    found = compared(o, by_hand(o, lambda group: (group + 1) % 4))
    assert found.mismatch is not None
    if op == "scaled_grouped_mm" and distribution == "rand":  # B alone has scales by group
        assert "were those of the group after" in found.mismatch.text()


@every_form
def test_scales_that_are_left_out_or_exchanged_are_found(op: str) -> None:
    o = make(line(op, "4x32x32x64"), "rand", 2)
    a, b = scales(o)
    changes: tuple[dict[str, Any], ...] = (
        {"scale_a": torch.ones_like(a)},
        {"scale_b": torch.ones_like(b)},
        {"scale_a": b.reshape(a.shape), "scale_b": a.reshape(b.shape)},
    )
    for wrong in changes:
        assert not is_right(o, by_hand(dataclasses.replace(o, **wrong)))


@every_form
def test_pytorch_takes_these_shapes(op: str) -> None:
    """Its own check of shapes, which the compiler asks, is there without a device."""
    recipes = () if torch_release() < (2, 14) else (":program.v2",)  # it had no check of shapes before
    for more in ("", ":math.fast_accumulate", ":a.padded:b.padded", *recipes):
        o = make(line(op, more=more))
        tensors = {name: x.to("meta") for name, x in args(o.problem, o).items()}
        if more == ":a.padded:b.padded":
            tensors |= {
                name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                for name, x in args(o.problem, o).items()
            }
        assert build(o.problem)(**tensors).shape == o.problem.result_shape


def test_one_of_the_groups_is_empty_and_they_begin_at_16_bytes() -> None:
    for op in FORMS[:3]:
        sizes = [last - first for first, last in make(line(op)).groups]
        assert 0 in sizes
        assert op == FORMS[0] or not any(size % 16 for size in sizes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line("scaled_grouped_mm").replace(":quant.rowwise", ""), "needs its scales"),
        (line("scaled_grouped_mm").replace("rowwise", "tensorwise"), "takes no tensorwise"),
        (line("scaled_grouped_mm").replace(":nt:", ":nn:"), "cannot be nn"),
        (line("scaled_grouped_mm", more="+result-4"), "scaled_grouped_mm takes no result"),
        (line("scaled_grouped_mm_k", more=":m.dynamic"), "has one size"),
        (line("scaled_grouped_mm").replace("bf16", "f16"), "does not take f8e4m3fn-f8e4m3fn-f16"),
    ],
)
def test_what_pytorch_has_no_form_for_is_no_line(text: str, words: str) -> None:
    refuses_line(text, words)


@pytest.mark.parametrize(("backend", "text", "words"), [
    (TritonBackend(), line("scaled_grouped_mm"), ""), (TritonBackend(), line("scaled_grouped_bmm", "4x32x48x16"), ""),
    (TritonBackend(), line("scaled_grouped_mm_k", more=":b.offset"), "TMA"),
    (TritonBackend(), line("scaled_grouped_mm", "4x32x40x64"), "N=40: _scaled_grouped_mm needs multiples of 16"),
    (TritonBackend(), line("scaled_grouped_mm_n", "4x32x24x64"), ""),
    (TritonBackend(), line("scaled_grouped_mm_k", "4x32x48x6"), "K=24"),
    (TritonBackend(), line("scaled_grouped_mm_k", "4x32x48x64", ":a.padded"), ""),
    (CutlassBackend(), line("scaled_grouped_mm"), "no CUTLASS candidate"),
    (CuteDslBackend(), line("scaled_grouped_mm"), "Blackwell"),
    (NvgemmBackend(), line("scaled_grouped_mm"), "no NVGEMM candidate"),
    (CppBackend(), line("scaled_grouped_mm"), "no C++ candidate"),
])  # fmt: skip
def test_a_backend_claims_what_its_lowering_offers(backend: Backend, text: str, words: str) -> None:
    says(backend.supports(Problem.parse(text), DEFAULT), words)


@every_form
def test_a_cpu_has_no_kernel_and_says_so(op: str) -> None:
    o = make(line(op))
    with pytest.raises(Unsupported, match="on CUDA only"):
        AtenBackend().prepare(o.problem, o)
    with pytest.raises((NotImplementedError, RuntimeError)):  # as PyTorch does
        AtenPrepared(o.problem).run(o)


def test_other_devices_than_hopper_and_blackwell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    o = dataclasses.replace(make(line("scaled_grouped_mm")), device=Device.CUDA)
    for capability, is_refused in (((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert (AtenBackend().unsupported(o.problem, "cuda") is not None) == is_refused
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    contract = AtenBackend().prepare(o.problem, o).contract
    assert contract.promote_every == 128  # one kernel of CUTLASS, which promotes fp8
    assert contract.slices == 1


def test_scales_of_rows_are_as_dynamic_as_rows() -> None:
    problem = Problem.parse(line("scaled_grouped_mm", more=":m.dynamic"))
    assert dynamic_dimensions(problem) == {"a": {0: "m"}, "scale_a": {0: "m"}}
