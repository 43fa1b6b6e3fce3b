"""Properties between two results: correct kernels have them, and each is violated by a kernel that lies in that way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_gemm.api.callable import CallablePrepared
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.registry import Registry
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.case_id import Device, Mode
from pytest_gemm.judging import properties
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.problem import Problem

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LINES = (
    "mm:f32:nn:17x33x65",
    "mm:bf16:nt:17x33x64:relu",
    "linear:f16:nt:2x9x33x65:bias+gelu+mul:a.padded",
    "linear:f32:nt:16x33x65:bias:m.dynamic",
    "bmm:f16:tn:3x8x17x33",
    "addmm:f64:nn:9x17x33:bias-m1+alpha-0.5+beta-2",
    "grouped_mm:bf16:nt:3x8x24x64",
    "mm:f32-f32-bf16:tt:9x17x33",
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def related(backend: Backend, line: str) -> list[Outcome]:
    return list(Judge().relate(Case(backend, Problem.parse(line), (), 3, Device.CPU)))


def plain(matmul: Matmul) -> Backend:
    registry = Registry()
    registry.add_callable("mine", matmul)
    return registry["mine"]


@pytest.mark.parametrize("line", LINES)
def test_a_correct_backend_violates_nothing(line: str) -> None:
    outcomes = related(AtenBackend(), line)
    assert len(outcomes) == len(properties.applicable(Problem.parse(line))) >= 4
    assert {o.status for o in outcomes} == {Status.PASSED}, [o.reason for o in outcomes if o.reason]


def test_every_property_is_asked_of_some_problem_of_these() -> None:
    asked = {p.name for line in LINES for p in properties.applicable(Problem.parse(line))}
    assert asked == {p.name for p in properties.PROPERTIES}


def rounds_down(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.floor(product(a, b) * 2.0**16) * 2.0**-16


def loses_what_is_small(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = product(a, b)
    return torch.where(c.abs() < 0.5, 0.0, c)


def starts_at_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b) + 1.0


def doubles_one_k(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a, b) + product(a[..., 3:4], b[..., 3:4, :])


def masks_by_zero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What lies in the next row, or column, is multiplied by 0."""
    c = product(a, b)
    return c + 0.0 * c.roll(1, -2) + 0.0 * c.roll(1, -1)


def _forgetful() -> Matmul:
    turns = itertools.count()
    return lambda a, b: product(a, b) + (1.0 if next(turns) % 7 == 6 else 0.0)


def first_row_is_special(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The first row and column are summed in another order, as a tail may be: no error."""
    c, half = product(a, b), a.shape[-1] // 2
    other = (a[..., :half] @ b[..., :half, :]) + (a[..., half:] @ b[..., half:, :])
    c[..., 0, :] = other[..., 0, :]
    c[..., 0] = other[..., 0]
    return c


@pytest.mark.parametrize(
    ("matmul", "caught"),
    [
        (rounds_down, {"negated-a"}),
        (loses_what_is_small, {"scaled-a"}),
        (starts_at_one, {"zero-a", "k-in-two"}),
        (doubles_one_k, {"k-order"}),
        (masks_by_zero, {"nan-row", "inf-row", "nan-column"}),
        (_forgetful(), {"ten-runs"}),
    ],
)
def test_a_violation_is_an_incorrect_outcome_by_its_name(matmul: Matmul, caught: set[str]) -> None:
    outcomes = related(plain(matmul), "mm:f32:nn:17x33x65")
    failed = {o.reason.code.removeprefix("property-") for o in outcomes if o.status is Status.INCORRECT and o.reason}
    assert caught <= failed


def test_an_order_that_nobody_promises_is_told_and_is_no_error() -> None:
    outcomes = related(plain(first_row_is_special), "mm:f32:nn:17x33x65")
    told = [o.details for o in outcomes if o.details]
    assert {o.status for o in outcomes} == {Status.PASSED}
    assert len(told) == 2
    assert all("no error" in text for text in told)


def test_what_raises_is_a_crash_and_what_is_refused_is_unsupported() -> None:
    def raises(_a: torch.Tensor, _b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of registers")

    crashes = related(plain(raises), "mm:f32:nn:17x33x65")
    assert {o.status for o in crashes} == {Status.CRASHED}
    for line in ("mm:f64:nn:4x4x4", "mm:f32:nn:0x4x4"):  # not registered; nothing to relate
        assert [o.status for o in related(plain(product), line)] == [Status.UNSUPPORTED]


def test_the_judge_asks_them_one_after_the_other() -> None:
    asked: Iterator[Outcome] = Judge().relate(Case(AtenBackend(), Problem.parse("mm:f32:nn:4x4x4"), (), 0, Device.CPU))
    assert next(asked).status is Status.PASSED


def test_what_somebody_else_computed_has_no_property_of_the_backend_s(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = Proof(("mine",), ("mine",), ("mine",), foreign=("aten.mm",))
    monkeypatch.setattr(CallablePrepared, "proof", lambda _: proof)
    assert {o.status for o in related(plain(product), "mm:f32:nn:4x5x6")} == {Status.FALLBACK}


def test_a_property_is_asked_in_the_mode_that_its_outcome_names() -> None:
    mm = Problem.parse("mm:f32:nn:4x5x6")
    (outcome,) = Judge().relate(Case(AtenBackend(), mm, (), 0, Device.CPU, mode=Mode.CUDAGRAPHS))
    assert (outcome.status, outcome.mode) == (Status.UNSUPPORTED, "cudagraphs")
