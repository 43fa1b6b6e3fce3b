"""A kernel that takes the whole problem: what it owns, what PyTorch composes around it, and one kernel of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import exact, judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import CandidateBackend
from pytest_gemm.api.registry import Registry
from pytest_gemm.conformance import matrix
from pytest_gemm.core.outcome import Status
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

DTYPES = ("f32", "bf16", "i8")
Tensors = dict[str, torch.Tensor]
Call = Callable[[], torch.Tensor]


def gemm(a: torch.Tensor, b: torch.Tensor, candidate: str = "") -> torch.Tensor:
    return exact(a, b) + (candidate == "128x64")


def whole(problem: Problem, t: Tensors, candidate: str = "") -> Call | None:
    """A kernel that computes all but silu in f64 and rounds once."""
    if problem.step("silu"):
        return None
    computed, out = program.build(problem, torch.matmul), t.get("out")
    wide = {name: x.double() if x.is_floating_point() else x for name, x in t.items()}
    if problem.group_size:  # a weight is (code - 8) * scale + zero
        scale, zero = wide["quantisation"].repeat_interleave(problem.group_size, 0).unbind(-1)
        weight = (t["b"] - 8.0) * scale.mT + zero.mT
        return lambda: (wide["a"] @ weight.mT).to(t["a"].dtype)
    kind = getattr(torch, problem.dtypes.out.torch_name)

    def kernel() -> torch.Tensor:
        made: torch.Tensor = computed(**wide).to(kind) + (candidate == "128x64")
        return made if out is None else out.copy_(made)

    return kernel


def rounds_twice(_: Problem, t: Tensors) -> Call:
    def kernel() -> torch.Tensor:
        product = (t["a"].double() @ t["b"].mT.double()).to(t["a"].dtype)  # whatever the host's ATen makes of bf16
        return (product + t["bias"]).relu()

    return kernel


@pytest.mark.parametrize(
    ("line", "kernel", "composed"),
    [
        ("addmm:bf16:nn:17x65x127:bias-mn+alpha-0.5+beta-2", "kernel", False),
        ("addmm:f32:nn:17x65x127:bias-m1+alpha-0.5", "kernel", False),
        ("linear:bf16:nt:17x65x127:bias+gelu+mul-n+add", "kernel", False),
        ("mm:f32:nn:17x65x127:a.padded:out.given", "kernel", False),
        ("woq_int4:bf16-i4-bf16:nt:17x64x128:quant.group-32", "whole", False),
        ("mm:bf16:nn:17x65x127:silu", "gemm", True),
        ("bmm:f32:nn:3x17x65x127", "kernel", False),
    ],
)
def test_what_bind_takes_is_the_kernels_own_and_the_rest_is_composed(line: str, kernel: str, composed: bool) -> None:
    outcomes = judged(CallableBackend("mine", gemm, DTYPES, bind=whole), line)
    assert {(o.status, o.composed, o.kernels) for o in outcomes} == {(Status.PASSED, composed, (kernel,))}


@pytest.mark.parametrize(("epilogue", "passes"), [("fused", False), ("eager", True), ("either", True)])
def test_where_it_rounds_is_an_argument(epilogue: Any, passes: bool) -> None:
    registry = Registry()
    registry.add_callable("mine", gemm, bind=rounds_twice, epilogue=epilogue)
    outcomes = judged(registry["mine"], "linear:bf16:nt:17x65x127:bias+relu")
    assert all(o.status is Status.PASSED for o in outcomes) is passes


def test_scales_that_bind_does_not_take_are_no_product() -> None:
    outcomes = judged(
        CallableBackend("mine", gemm, DTYPES, bind=lambda *_: None), "woq_int4:bf16-i4-bf16:nt:17x64x128:quant.group-32"
    )
    assert {(o.status, o.code) for o in outcomes} == {(Status.UNSUPPORTED, "op")}
    assert "a plain product does not decode 4-bit weights" in outcomes[0].why


def test_a_result_in_place_of_a_call_is_said() -> None:
    outcomes = judged(CallableBackend("mine", gemm, bind=lambda _, t: t["a"] @ t["b"]), "mm:f32:nn:17x65x127")
    assert {o.status for o in outcomes} == {Status.CRASHED}
    assert "bind of mine returned Tensor; return a call without arguments, or None" in outcomes[0].why


# -- mistakes of kernels that own an epilogue, as XLA made them in 2026 --------------------------------------------


# What a kernel makes of alpha, of its sums and of beta times the bias.
EPILOGUES: dict[str, Callable[..., torch.Tensor]] = {
    "": lambda alpha, c, bias: alpha * c + bias,
    "alpha on the bias": lambda alpha, c, bias: alpha * (c + bias),
    "bias along rows": lambda alpha, c, bias: alpha * c + (bias[:, None] if c.shape[0] == c.shape[1] else bias),
}


@pytest.mark.parametrize("cause", EPILOGUES)
def test_the_level_quick_shows_and_names_it(cause: str) -> None:
    def kernel(problem: Problem, t: Tensors) -> Call:
        b, beta = t["b"].mT if problem.op.weight else t["b"], problem.beta
        sums, bias = t["a"].double() @ b.double(), t["bias"].double() * beta if beta else torch.zeros(1)
        epilogue = EPILOGUES[cause] if bias.dim() == 1 and len(bias) > 1 else EPILOGUES[""]
        return lambda: epilogue(problem.alpha, sums, bias).to(t["a"].dtype)

    products = [
        one
        for one in matrix.products("quick")
        if one.op.name in {"addmm", "linear"}
        and str(one.dtypes) == "f32"
        and one.step("bias")
        and not (one.chain or one.flags or one.shape.is_empty)
    ]
    mine = CallableBackend("mine", gemm, bind=kernel)
    outcomes = [one for product in products for one in judged(mine, product.line, *distributions_for(product)[:4])]
    assert {one.composed for one in outcomes} == {False}
    causes = {one.cause for one in outcomes if one.status is not Status.PASSED}
    assert cause in causes if cause else not causes


# -- one kernel of several ---------------------------------------------------------------------------------------

TILES = ("64x64", "128x64", "128x128")


@pytest.mark.parametrize("line", ["mm:f32:nn:17x65x127", "linear:bf16:nt:17x65x127:bias"])
@pytest.mark.parametrize("names", [TILES, lambda problem: TILES if problem.shape.m > 1 else TILES[:1]])
def test_a_wrong_candidate_among_right_ones_is_found_by_name(line: str, names: Any) -> None:
    registry = Registry()
    registry.add_callable("mine", gemm, bind=whole, candidates=names)
    outcomes = judged(registry["mine"], line, candidates="all")
    assert {o.candidate for o in outcomes} == {*TILES}
    assert {o.candidate for o in outcomes if o.status is not Status.PASSED} == {"128x64"}
    assert {o.candidate for o in judged(registry["mine"], line, candidates="*x128")} == {"128x128"}
    assert {o.chosen for o in judged(registry["mine"], line)} == {("64x64",)}


def test_a_backend_has_candidates_only_where_some_are_named() -> None:
    assert not isinstance(CallableBackend("mine", gemm), CandidateBackend)
    several = CallableBackend("mine", gemm, candidates=lambda problem: TILES if problem.shape.m > 1 else ())
    assert isinstance(several, CandidateBackend)
    assert {o.code for o in judged(several, "mm:f32:nn:17x65x127", candidates="32x32")} == {"unknown-candidate"}
    assert {o.code for o in judged(several, "mm:f32:nn:1x65x127")} == {"no-candidate"}
