"""PyTorch's precision switches: what they are while a problem runs, whatever the user has set, and afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.numerics import precision, tensor_core
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem

MATMUL: Any = torch.backends.cuda.matmul
ONEDNN: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import
EVERYTHING: Any = torch.backends

PLAIN, TF32, REDUCED = map(
    Problem.parse, ("mm:f32:nn:8x8x8", "mm:f32:nn:8x8x8:math.tf32", "mm:f16:nn:8x8x8:math.half_partials")
)


def state() -> dict[str, Any]:
    """Everything that decides the precision of a product, as PyTorch reports it."""
    found = {
        "cuda": MATMUL.fp32_precision,
        "onednn": ONEDNN.fp32_precision,
        "f16": (MATMUL.allow_fp16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction_split_k),
        "bf16": (MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_bf16_reduced_precision_reduction_split_k),
        "f16 sums": MATMUL.allow_fp16_accumulation,
    }
    return {**found, "old": _told(torch.get_float32_matmul_precision), "guard": _told(lambda: MATMUL.allow_tf32)}


def _told(ask: Callable[[], Any]) -> Any:
    """The answer; PyTorch gives none where its old and its new switch contradict each other."""
    try:
        return ask()
    except RuntimeError:
        return "contradiction"


def _default() -> None:
    """PyTorch as it starts."""


def _old_switch() -> None:
    torch.set_float32_matmul_precision("medium")


def _new_switch() -> None:
    MATMUL.fp32_precision = "tf32"  # and the old one contradicts it


def _everywhere() -> None:
    EVERYTHING.fp32_precision = "tf32"


def _halves() -> None:
    MATMUL.allow_fp16_reduced_precision_reduction = (False, False)
    MATMUL.allow_bf16_reduced_precision_reduction = True
    MATMUL.allow_fp16_accumulation = True


USERS = (_default, _old_switch, _new_switch, _everywhere, _halves)


@pytest.fixture(params=USERS, ids=lambda user: user.__name__.strip("_"))
def _user(request: pytest.FixtureRequest) -> Iterator[None]:
    """Somebody who has set something; all of it is taken back."""
    request.param()
    yield
    EVERYTHING.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = ONEDNN.fp32_precision = "none"
    MATMUL.allow_fp16_reduced_precision_reduction = MATMUL.allow_bf16_reduced_precision_reduction = True
    MATMUL.allow_fp16_accumulation = False


@pytest.mark.usefixtures("_user")
@pytest.mark.parametrize("problem", [PLAIN, TF32, REDUCED], ids=str)
def test_less_precision_is_allowed_by_a_flag_only_and_the_user_gets_his_settings_back(problem: Problem) -> None:
    before = state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with precision.settings(problem):
            inside = state()
    tf32, reduced = problem is TF32, problem is REDUCED
    assert inside == {
        "cuda": "tf32" if tf32 else "ieee",
        "onednn": "tf32" if tf32 else "ieee",
        "old": "high" if tf32 else "highest",
        "guard": tf32,
        "f16": (reduced, True),
        "bf16": (reduced, True),
        "f16 sums": False,
    }
    assert state() == before


@pytest.mark.usefixtures("_user")
@pytest.mark.parametrize("problem", [PLAIN, TF32, REDUCED], ids=str)
def test_a_users_function_runs_under_the_settings(problem: Problem) -> None:
    seen = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((MATMUL.fp32_precision, MATMUL.allow_bf16_reduced_precision_reduction))
        return a @ b

    registry = Registry()
    registry.add_callable("mine", matmul)
    given = tensors.make(problem, "rand", 1)
    registry["mine"].prepare(problem, given, DEFAULT).run(given)
    assert seen == [("tf32" if problem is TF32 else "ieee", problem is REDUCED)]


@pytest.mark.usefixtures("_user")
def test_eager_products_run_under_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original: Callable[..., torch.Tensor] = torch.mm

    def watched(*args: torch.Tensor) -> torch.Tensor:
        seen.append(MATMUL.fp32_precision)
        return original(*args)

    monkeypatch.setattr(torch, "mm", watched)
    for problem in (PLAIN, TF32):
        given = tensors.make(problem, "rand", 1)
        AtenBackend().prepare(problem, given).run(given)
    assert seen == ["ieee", "tf32"]


@pytest.mark.compiler
def test_a_compiled_program_does_not_ask_what_the_user_has_set() -> None:
    """Dynamo guards on the switches: a program would compile again, or raise where they contradict each other."""
    backend = CppBackend(threads=1)
    for line in ("linear:f32:nt:20x33x40:bias", "linear:f32:nt:20x33x40:bias:math.tf32"):
        problem = Problem.parse(line)
        given = tensors.make(problem, "rand", 1)
        prepared = backend.prepare(problem, given)
        before = prepared.run(given)
        MATMUL.fp32_precision = "tf32"
        try:
            after = prepared.run(given)
        finally:
            MATMUL.fp32_precision = "none"
        assert torch.equal(before, after)
    assert backend.log.compiles == 2


# -- what is claimed ---------------------------------------------------------------------------------


@pytest.mark.compiler
def test_tf32_is_claimed_with_the_flag_only() -> None:
    for backend in (AtenBackend(), CppBackend(threads=1)):
        for problem in (PLAIN, TF32):
            given = tensors.make(problem, "rand", 1)
            contract = backend.prepare(problem, given).contract
            wanted = (2.0**-9, 11) if problem is TF32 else (0.0, 0)
            assert (contract.input_error, contract.input_bits) == wanted, backend.name


@pytest.fixture(params=[(8, 0), (9, 0), (12, 0)], ids=["sm_80", "sm_90", "sm_120"])
def major(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: request.param)
    return int(request.param[0])


def test_a_tensor_cores_tf32_has_its_own_alignment(major: int) -> None:
    rows = {8: (24, 4), 9: (25, 8)}
    claimed = tensor_core.contract(TF32)
    assert (claimed.alignment_bits, claimed.chunk) == rows.get(major, (24, 4))
    assert (claimed.input_error, claimed.input_bits) == (2.0**-9, 11)
    # A kernel may leave the tensor core alone: the bound covers ordinary sums of products that keep all bits too.
    assert claimed.theta(1000) >= 1000 * 2.0**-24 + 2.0**-9
    assert tensor_core.contract(PLAIN) == Contract("f32")


@pytest.mark.usefixtures("major")
def test_partial_sums_in_half_are_claimed_for_a_library_only() -> None:
    long = Problem.parse("mm:bf16:nn:8x8x4096:math.half_partials")
    library = tensor_core.contract(long, library=True)
    assert (library.partials, library.slices) == ("out", 128)
    assert library.narrow_partials
    assert not tensor_core.contract(long).narrow_partials
    plain = Problem.parse("mm:bf16:nn:8x8x4096")
    assert not tensor_core.contract(plain, library=True).narrow_partials
    # A short sum is not cut into slices shorter than an instruction's K.
    assert tensor_core.contract(Problem.parse("mm:bf16:nn:8x8x48:math.half_partials"), library=True).slices == 3


def test_partial_sums_in_half_cost_one_roundoff_each() -> None:
    plain = Contract("f32", slices=4)
    narrow = Contract("f32", slices=4, partials="out")
    out = Problem.parse("mm:bf16:nn:1x1x1").dtypes.out
    assert narrow.theta(100, out=out) == plain.theta(100) + 4 * 2.0**-8
    # One slice is the whole sum, and what is stored is the result.
    assert Contract("f32", partials="out").theta(100, out=out) == Contract("f32").theta(100)
