"""A user's operator inside of a compiled program: judged, proved by its name, and named in what it leaves behind."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import judged
from torch._inductor import config

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.protocols import unsupported
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.in_graph import GraphBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.problem.problem import Problem

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_op.py"
LINE = "addmm:f32:nt:17x32x60:bias+alpha-0.5+gelu+add"


@pytest.fixture(scope="module")
def operator() -> Any:
    return runpy.run_path(str(EXAMPLE))["operator"]


@torch.library.custom_op("tests_of_graphs::cut", mutates_args=())
def cut(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    k = a.shape[-1] // 8 * 8
    return (a[..., :k] @ b[..., :k, :]).contiguous()


@cut.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def in_graph(matmul: Any, graph: str, line: str = LINE, mode: Mode = Mode.STATIC) -> Outcome:
    backend = GraphBackend("mine", matmul, ("f32",), graph=graph)
    (outcome,) = judged(backend, line, "rand", mode=mode)
    return outcome


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        (LINE, Mode.STATIC),
        ("linear:f32:nt:2x8x16x36:bias+relu", Mode.DYNAMIC),
        ("mm:f32:nn:0x8x16", Mode.STATIC),
        ("mm:f32:nn:17x32x60", Mode.AOTI),
    ],
)
def test_an_operator_is_right_in_a_program_and_proved_by_its_name(operator: Any, line: str, mode: Mode) -> None:
    # A package's programs are long, and what headers they precompile no other program has.
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with config.patch(quick if mode is Mode.AOTI else {}):
        outcome = in_graph(operator, "example::matmul", line, mode)
    assert (outcome.status, outcome.reason) == (Status.PASSED, None)
    assert outcome.kernels[:1] == ("example.matmul.default",)
    if line == LINE:
        assert outcome.kernels[1:] == ("cpp_fused_add_gelu_mul_0",)  # what Inductor has fused around it


def test_a_wrong_operator_is_found_and_its_cause_named() -> None:
    outcome = in_graph(cut, "tests_of_graphs::cut")
    assert (outcome.status, outcome.cause) == (Status.INCORRECT, "K tail")


@pytest.mark.parametrize(
    ("matmul", "words"),
    [
        (torch.matmul, "the product was computed by"),
        (lambda a, b: (a[:, :, None] * b).sum(1), "the run returned without a call of example::matmul"),
    ],
)
def test_a_program_without_the_operator_is_a_fallback(matmul: Any, words: str) -> None:
    outcome = in_graph(matmul, "example::matmul")
    assert outcome.status is Status.FALLBACK
    assert outcome.reason is not None
    assert words in outcome.reason.text


def test_what_is_no_plain_product_and_a_function_without_a_name_are_unsupported(operator: Any) -> None:
    static = BuildRequest(mode=Mode.STATIC)
    named = GraphBackend("mine", operator, ("f32",), graph="example::matmul")
    for backend, line in (
        (named, "mm_plus_mm:f32:nn:17x33x64"),
        (CallableBackend("other", operator, ("f32",)), "mm:f32:nn:8x8x8"),
    ):
        assert unsupported(backend, Problem.parse(line), static) is not None
    with pytest.raises(ValueError, match=r"backend 'mine': graph is ''; give a name"):
        GraphBackend("mine", operator)
