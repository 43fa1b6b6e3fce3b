"""What a kernel takes: said by its user, or found out by first calls."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import pytest_gemm
from pytest_gemm.tools import first_calls
from pytest_gemm.tools.first_calls import CALLS, FirstCalls, Said
from pytest_gemm.tools.judgement import Judgement
from pytest_gemm.tools.kernel import Kernel
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Thrown

PROBLEM = "mm:f32:nn:17x65x127"


def product(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def square(a: Tensor, b: Tensor) -> Tensor:
    if not a.shape[0] == a.shape[1] == b.shape[1]:
        raise ValueError("square matrices only")
    return product(a, b)


def of_tiles(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] % 128 or b.shape[1] % 16 or a.shape[0] < 128:
        raise ValueError("whole tiles only")
    return product(a, b)


def column(a: Tensor, b: Tensor) -> Tensor:
    assert b.shape[1] == 1, "one column only"
    return product(a, b)


def crashes_but_for_squares(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b)[:, torch.arange(a.shape[1])]


class Model(torch.nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b)


class Plain:
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b)


class Array:
    """What another framework returns."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        held = product(a, b)
        self.__dlpack__, self.__dlpack_device__ = held.__dlpack__, held.__dlpack_device__


def with_sizes(a: Tensor, b: Tensor, c: Tensor, m: int, n: int, k: int) -> None:
    c.copy_(product(a.as_strided((m, k), (k, 1)), b.as_strided((n, k), (k, 1)).mT))


def sizes_first(M: int, N: int, K: int, A: Tensor, B: Tensor, *, tile: int = 3) -> Tensor:  # noqa: N803
    assert (*A.shape, *B.shape, tile) == (M, K, K, N, 3)
    return product(A, B)


def late_bias(a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | float = 0.0) -> Tensor:
    assert out is None
    return (a.double() @ b.double() + bias).to(a.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:  # noqa: A002
    return [late_bias(input, weight.mT, bias=bias)]


def several(*operands: Tensor) -> tuple[Tensor, None]:
    a, b = operands
    return product(a, b), None


def in_place(alpha: float, a: Tensor, b: Tensor, beta: float, c: Tensor) -> None:
    c.copy_(alpha * product(a, b) + beta * c)


def with_workspace(out: Tensor, a: Tensor, b: Tensor, workspace: Tensor) -> None:
    out.copy_(product(a, b) + workspace[: 4 << 20].view(torch.float32)[0])


def takes(function: Callable[..., Any], **said: Any) -> Judgement:
    calls = FirstCalls(Kernel("mine:f", function=function), Said(**said), Inline(CALLS))
    return calls.takes(calls.best())[0]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (square, "(a, b) of square matrices"),
        (lambda a, b: square(a, b.mT), "(a, b of (N, K)) of square matrices"),
        (of_tiles, "(a, b) of multiples of 128, 16, 1"),
        (column, "(a, b) of fixed sizes"),
        (crashes_but_for_squares, "(a, b)"),  # an IndexError is no refusal
        (lambda a, b: product(a.mT, b), "(a of (K, M), b)"),
        (Model, "(a, b)"),
        (Model(), "(a, b)"),
        (Plain, "(a, b)"),
        (Function, "(a, b)"),
        (lambda: product, "(a, b)"),
        (lambda a, b: Array(a, b), "(a, b)"),  # noqa: PLW0108  # a class is a factory
        (lambda a, b: product(a, b).numpy(), "(a, b)"),
        (lambda a, b: np.matmul(a, b) if isinstance(a, np.ndarray) else 1, "(a, b) of NumPy arrays"),
        (several, "(a, b)"),
        (with_sizes, "(a, b of (N, K), out, m, n, k)"),
        (sizes_first, "(m, n, k, a, b)"),
        (late_bias, "(a, b, bias)"),
        (linear, "(a, b of (N, K), bias)"),
        (with_workspace, "(out, a, b, workspace)"),
        (in_place, "(alpha, a, b, beta, out)"),
    ],
)
def test_what_a_kernel_takes_is_found_out(function: Callable[..., Any], arguments: str) -> None:
    found = takes(function, dtypes="f32")
    assert (found.arguments, found.dtypes) == (f"f{arguments}", ["f32"])
    assert found.reads_c is (function is in_place)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: product(a, b) * (4 - a.dim()),  # right in batches
        lambda a, b: np.matmul(a, b) if isinstance(a, np.ndarray) else a @ b * 2,
        lambda a, b: product(a, b) + 1 if a.shape[-1] == b.shape[-2] else product(a.mT, b),
    ],
)
def test_what_is_right_in_another_form_alone_is_judged_in_the_usual_one(wrong: Callable[..., Any]) -> None:
    found = takes(wrong, dtypes="f32")
    assert (found.arguments, found.op) == ("f(a, b)", "mm")


def adds(a: Tensor, b: Tensor, c: Tensor) -> None:
    c += product(a, b)


@pytest.mark.slow
def test_a_kernel_that_adds_to_its_result_is_judged_as_one_that_does_or_does_not() -> None:
    with pytest.raises(
        ValueError, match=r"adds .* adds to what out holds: give --beta=1 if it should, --beta=0 if not"
    ):
        pytest_gemm.check(adds, problem=PROBLEM)
    added = pytest_gemm.check(adds, problem="addmm:f32:nn:17x65x127:bias-mn", beta=1)
    assert (added.verdict, added.arguments) == ("right", "adds(a, b, out += a b)")
    assert pytest_gemm.check(adds, problem=PROBLEM, beta=0).verdict == "incorrect: stray NaN"
    multiplied = pytest_gemm.check(in_place, problem=PROBLEM)
    assert (multiplied.verdict, multiplied.status) == ("right but for NaN in C (beta = 0 multiplies it)", 1)


def in_half(a: Tensor, b: Tensor) -> Tensor:
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for k in range(a.shape[1]):
        c += a[:, k : k + 1].half() * b[k : k + 1].half()
    return c.to(a.dtype)


@pytest.mark.slow
def test_arithmetic_that_is_said_is_that_which_is_right() -> None:
    problem = "mm:f16:nn:17x33x300"
    assert pytest_gemm.check(in_half, problem=problem, dtypes="f16").status == 1
    found = pytest_gemm.check(in_half, problem=problem, dtypes="f16", accumulate="f16")
    assert (found.verdict, found.options) == ("right", ["--accumulate=f16"])


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ({"multiple_of": "0"}, r"--multiple-of=0: give one number above 0, or three for M, N and K: 128,128,16"),
        ({"multiple_of": (8, 8)}, r"--multiple-of=8,8: give one number"),
        ({"sizes": "512x512"}, r"--sizes=512x512: give M x N x K, one or several"),
        ({"a": "KxN"}, r"--a=KxN: give MxK or KxM"),
        ({"beta": 2}, r"--beta=2: give 0 or 1"),
        ({"epilogue": "none"}, r"--epilogue=none: give fused or eager or either"),
        ({"deterministic": "maybe"}, r"--deterministic=maybe: give yes or no"),
    ],
)
def test_a_wrong_option_says_what_is_right(said: dict[str, Any], right: str) -> None:
    with pytest.raises(ValueError, match=right):
        Said(**said)


def test_sizes_are_numbers_or_the_text_of_an_option() -> None:
    assert Said(multiple_of=16) == Said(multiple_of="16,16,16") == Said(multiple_of=(16, 16, 16))
    assert Said(sizes=[(8, 16, 24)]) == Said(sizes="8x16x24")
    fixed = takes(lambda a, b: product(a, b).reshape(8, 16) if a.shape[1] == 24 else 1, sizes="8x16x24", dtypes="f32")
    assert fixed.arguments.endswith("(a, b) of fixed sizes")
    weight = takes(lambda a, b: product(a, b.mT), sizes="16x24x24", dtypes="f32")  # the shape of B says nothing
    assert weight.arguments == "f(a, b of (N, K)) of fixed sizes"


def test_reasons_of_first_calls_are_told_once_the_furthest_first() -> None:
    def picky(a: Tensor, _: Tensor) -> Tensor:
        raise TypeError("no such type") if a.dtype == torch.float16 else RuntimeError(f"too many rows: {len(a)}")

    with pytest.raises(ValueError, match=r"^mine:f: it takes a, b, x, y, z: give a function of A and B, perhaps bias"):
        takes(lambda a, b, x, y, z: None)  # noqa: ARG005
    with pytest.raises(ValueError, match="no first call worked: RuntimeError: too many rows") as raised:
        takes(picky, dtypes="f16,bf16")
    assert "(a, b) of bf16); TypeError: no such type (" in str(raised.value)
    assert (str(raised.value).count("too many rows"), str(raised.value).count("--square")) == (1, 1)


@pytest.mark.parametrize(("imported", "devices"), [(True, ["cuda", "cpu"]), (False, ["cpu", "cuda"])])
def test_what_imports_triton_is_called_on_a_gpu_first(
    imported: bool, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of one line, ``from a_library import matmul``, does not name Triton itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_calls, "begin", mock.Mock())
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert first_calls.parameters(None, Kernel("glue:product", function=product))[2] == devices


def test_each_device_has_its_own_time_for_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on the wrong device take long where a kernel is imported and compiled in them."""
    asked, clock = [], iter(range(0, 10**6, 100))

    class Worker:
        deaths = 0

        def call(self, _: Any, name: str, *given: Any) -> Any:
            if name == "parameters":
                return ["a", "b"], [], ["cpu", "cuda"]
            asked.append(given[3])
            if given[3] == "cpu":
                raise Thrown("ValueError", "cannot be accessed (cpu tensor?)", "", None, None)
            return 0, "f32", 1.0, ""

    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    best = FirstCalls(Kernel("glue:product"), Said(), Worker()).best()  # type: ignore[arg-type]  # what is used of it
    assert (best.device, asked) == ("cuda", ["cpu", "cuda"])
