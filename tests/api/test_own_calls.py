"""A function of Python is believed to have computed a problem where it was called, and only of what it computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import exact, judged

from pytest_gemm.api.callable import CallableBackend, CallablePrepared
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.record.reader import Run
from pytest_gemm.report import terminal

LINEAR = "linear:f32:nt:17x65x127:bias"


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return exact(a, b)


def fused(t: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.linear(t["a"], t["b"], t["bias"])


class Forgotten(CallablePrepared):
    """Takes PyTorch's product where the library was meant."""

    def bind(self, operands: Any) -> Callable[[], torch.Tensor]:
        return functools.partial(fused, self.arguments(operands))


class FallsBack(CallablePrepared):
    """The library refuses the problem, and the class computes it without a word."""

    def bind(self, operands: Any) -> Callable[[], torch.Tensor]:
        def refuses(t: dict[str, torch.Tensor]) -> torch.Tensor:
            raise NotImplementedError

        own, t = self.own(refuses), self.arguments(operands)

        def call() -> torch.Tensor:
            try:
                return own(t)  # type: ignore[no-any-return]
            except NotImplementedError:
                return fused(t)

        return call


class Backend(CallableBackend):
    kind: type[CallablePrepared] = CallablePrepared

    def prepare(self, problem: Problem, operands: Any, request: Any = None) -> CallablePrepared:
        return self.kind(self, problem)


def of(kind: type[CallablePrepared], line: str) -> list[Outcome]:
    backend = Backend("mine", gemm)
    backend.kind = kind
    return judged(backend, line)


@pytest.mark.parametrize("kind", [Forgotten, FallsBack])
def test_a_right_result_without_a_call_of_the_library_is_a_fallback(kind: type[CallablePrepared]) -> None:
    outcomes = of(kind, LINEAR)
    assert {(o.status, o.code) for o in outcomes} == {(Status.FALLBACK, "nothing-called")}
    assert "the run returned without a call of gemm" in outcomes[0].why
    assert "self.own" in outcomes[0].why


@pytest.mark.parametrize(
    ("kind", "line", "composed", "kernel"),
    [
        (CallablePrepared, "mm:f32:nt:17x65x127", False, "gemm"),
        (CallablePrepared, "mm:f32:nn:17x65x127:a.sliced", False, "gemm"),
        (CallablePrepared, "linears:bf16:nt:2x17x65x97", False, "gemm"),
        (CallablePrepared, LINEAR, True, "gemm"),
        (CallablePrepared, "mm:f32:nn:17x65x127:relu", True, "gemm"),
        (CallablePrepared, "mm:f32-f32-bf16:nn:17x65x127", True, "gemm"),  # operands are cast
        (CallablePrepared, "mm_plus_mm:f32:nn:17x33x64", True, "gemm"),
        (CallablePrepared, "grouped_mm:bf16:nt:3x8x24x64", True, "gemm"),
    ],
)
def test_an_outcome_says_what_eager_pytorch_computed(
    kind: type[CallablePrepared], line: str, composed: bool, kernel: str
) -> None:
    outcomes = of(kind, line)
    assert {(o.status, o.composed, o.kernels) for o in outcomes} == {(Status.PASSED, composed, (kernel,))}


def linear(a: torch.Tensor, b: torch.Tensor, bias: Any, activation: Any) -> torch.Tensor:
    """A kernel that adds the bias and applies relu to its sums, which are f64."""
    x: torch.Tensor = a.double() @ b.double() + (0 if bias is None else bias)
    return (x if activation is None else x.relu()).to(a.dtype)


def without_bias(a: torch.Tensor, b: torch.Tensor, _: Any, activation: Any) -> torch.Tensor:
    return linear(a, b, None, activation)


def relu_first(a: torch.Tensor, b: torch.Tensor, bias: Any, activation: Any) -> torch.Tensor:
    return (linear(a, b, None, activation).double() + (0 if bias is None else bias)).to(a.dtype)


def rounds_twice(a: torch.Tensor, b: torch.Tensor, bias: Any, activation: Any) -> torch.Tensor:
    x: torch.Tensor = linear(a, b, None, None) + bias
    return x if activation is None else x.relu()


def of_linear(function: Callable[..., torch.Tensor], line: str) -> list[Outcome]:
    backend = CallableBackend("mine", gemm, linear=function, activations=("relu",))
    return judged(backend, line)


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ("linear:bf16:nt:17x65x127:bias+relu", True),
        ("addmm:f32:nn:17x65x127:bias:a.padded", True),
        ("bmm:f32:nn:3x17x65x127:relu", True),
        ("mm:bf16:nn:17x65x127:bias+relu:b.offset", True),
        ("mm:f32:nn:17x65x127", False),  # the plain product
        ("linear:bf16:nt:17x65x127:bias+gelu", False),
        ("addmm:f32:nn:17x65x127:bias-m1", False),
        ("addmm:f32:nn:17x65x127:bias+beta-2", False),
        ("linear:f32:nt:3x17x65x127:bias", False),
        ("linear:f32-f32-bf16:nt:17x65x127:bias", False),
        ("mm:f32:nn:17x65x127:relu:program.multi_output", False),
    ],
)
def test_linear_computes_a_bias_and_an_activation_alone(line: str, is_own: bool) -> None:
    outcomes = of_linear(linear, line)
    assert {o.status for o in outcomes} == {Status.PASSED}
    assert {o.kernels for o in outcomes} == {("linear" if is_own else "gemm",)}
    assert {o.composed for o in outcomes} == {not is_own and line != "mm:f32:nn:17x65x127"}


@pytest.mark.parametrize(
    ("wrong", "line", "said"),
    [
        (without_bias, "linear:bf16:nt:17x65x127:bias+relu", "the bias is missing"),
        (relu_first, "mm:f32:nn:17x65x127:bias+relu", "step relu came before"),
        (rounds_twice, "linear:bf16:nt:17x65x127:bias+relu", ""),
    ],
)
def test_a_wrong_linear_is_caught(wrong: Callable[..., torch.Tensor], line: str, said: str) -> None:
    caught = [o for o in of_linear(wrong, line) if o.status is Status.INCORRECT]
    assert caught
    assert any(said in o.details for o in caught)


def test_an_activation_needs_a_function_and_a_known_name() -> None:
    with pytest.raises(ValueError, match="give linear= too"):
        CallableBackend("mine", gemm, activations=("relu",))
    with pytest.raises(ValueError, match=r"unknown activation 'rellu'.*did you mean 'relu'"):
        CallableBackend("mine", gemm, linear=linear, activations=("rellu",))


def test_of_nothing_to_multiply_no_call_is_asked() -> None:
    assert {o.status for o in of(CallablePrepared, "grouped_mm:bf16:nt:4x0x32x64")} == {Status.PASSED}


def of_bias(problem: Problem, t: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor] | None:
    return functools.partial(fused, t) if problem.step("bias") else None


def test_a_timed_call_is_not_counted() -> None:
    problem, calls = Problem.parse(LINEAR), []

    class Noting(CallablePrepared):
        def own(self, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
            calls.append((function, super().own(function, name)))
            return calls[-1][1]

    given = tensors.make(problem, "rand", 0, "cpu")
    prepared = Noting(CallableBackend("mine", gemm, bind=of_bias), problem)
    prepared.run(given)
    with prepared.timed(given) as call:
        assert torch.equal(call(), fused(prepared.arguments(given)))
    assert [made is function for function, made in calls] == [False, True]


def test_the_summary_counts_both() -> None:
    backend, lines = CallableBackend("mine", gemm, bind=of_bias), (LINEAR, f"{LINEAR[:-4]}relu")
    outcomes = [outcome for line in lines for outcome in judged(backend, line)]
    count = len(outcomes) // 2
    said = terminal.summary(Run(outcomes=outcomes))
    assert f"mine: {count} cases by its own path, {count} composed by eager PyTorch" in said
