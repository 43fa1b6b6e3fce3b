"""What a kernel's process states of its arithmetic: no wrong kernel passes by it, and a right one may promise more."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Workers

pytestmark = pytest.mark.slow
Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PACKS: dict[object, torch.Tensor] = {}


def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def stating(factor: float, **fields: Any) -> Matmul:
    """A product times a factor, which changes the contract in its process."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        frame: Any = sys._getframe()
        while not isinstance(getattr(frame.f_locals.get("self"), "contract", None), Contract):
            frame = frame.f_back
        prepared = frame.f_locals["self"]
        prepared.contract = dataclasses.replace(prepared.contract, **fields)
        return right(a, b) * factor

    return kernel


def stale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return right(a, PACKS.setdefault(b.data_ptr(), b.clone()))


def function(matmul: Matmul, kind: type[CallableBackend] = CallableBackend, **more: Any) -> CallableBackend:
    return kind("mine", matmul, ("f32",), **more)


class Frozen(CallableBackend):
    """A function whose process says that B is part of what was compiled."""

    def prepare(self, *given: Any) -> Any:
        prepared: Any = super().prepare(*given)
        prepared.constant_b = True
        return prepared


class Packing:
    """A backend that registers no contract, and whose compile keeps packs of B by a key."""

    name = "packing"

    def __init__(self, key: Callable[[torch.Tensor], object], **stated: Any) -> None:
        self.key, self.stated = key, Contract(**stated)

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Any, request: object = None) -> None:
        return None

    def prepare(self, problem: Any, operands: Any, request: object = None) -> Any:
        pack, proof = PACKS.setdefault(self.key(operands.b), operands.b.clone()), Proof(("packed",), provable=False)
        run = lambda given: right(given.a, pack)  # noqa: E731  # an attribute
        return SimpleNamespace(contract=self.stated, constant_b=True, run=run, proof=lambda: proof)


class Registering(Packing):
    """The same, which registers what it states."""

    def contracts(self, *_: object) -> tuple[Contract, ...]:
        return (self.stated,)


def content(b: torch.Tensor) -> object:
    return b.numpy().tobytes()


def outcomes(backends: dict[str, Any]) -> dict[str, str]:
    """What is wrong with each, "" for nothing."""
    with contextlib.closing(Keeper({one: backends[one] for one in backends}, 1)) as keeper:
        said = {}
        for name, backend in backends.items():
            with contextlib.closing(Workers(keeper, (10.0, 60.0))) as workers:
                found = judged(backend, "mm:f32:nn:33x64x128", "rand", judge=Judge(workers=workers))
            wrong = [str(one.reason) for one in found if one.status is not Status.PASSED]
            assert all(one.status in {Status.PASSED, Status.INCORRECT} for one in found), (name, wrong)
            said[name] = "".join(wrong)
    return said


REFUSED: dict[str, dict[str, Any]] = {
    "input_error=0.01, and 0.0": {"input_error": 1e-2},
    "input_error=inf, and 0.0": {"input_error": math.inf},
    "input_error=nan, and 0.0": {"input_error": math.nan},
    "input_error=-1.0, and 0.0": {"input_error": -1.0},
    "input_smallest=1.0, and 0.0": {"input_smallest": 1.0},
    "accumulate='bf16', and 'f32'": {"accumulate": "bf16"},
    "slices=100000, and 1": {"slices": 100000},
    "slices=0, and 1": {"slices": 0},
    "partials='out', and 'f32'": {"partials": "out"},
    "alignment_bits=3, and 0": {"alignment_bits": 3, "chunk": 8},
    "alignment_bits=8, and 0": {"alignment_bits": 8, "chunk": 0},
    "alignment_bits=-2000, and 0": {"alignment_bits": -2000, "chunk": 1},
    "chunk=-1, and 0": {"chunk": -1},
    "promote_every=-7, and 0": {"promote_every": -7},
    "epilogue='either', and 'eager'": {"epilogue": "either"},
    "rounds_at=0, and None": {"rounds_at": 0},
    "deterministic=False, and True": {"deterministic": False},
    "flushes=True, and False": {"flushes": True},
}


def test_less_than_is_registered_is_refused_by_its_field() -> None:
    said = outcomes({what: function(stating(1.002, **fields)) for what, fields in REFUSED.items()})
    for what, reason in said.items():
        assert reason.startswith(f"the kernel's process states {what} is registered"), (what, reason)


def test_more_than_is_registered_is_taken_and_a_backend_that_registers_nothing_has_slices() -> None:
    coarse = {"input_error": 2.0**-9, "input_bits": 11}
    right_ones = {
        "as registered": function(right),
        "a narrower sum": function(stating(1.0, accumulate="f64")),
        "registered as not deterministic": function(stating(1.0), deterministic=False),
        "slices": Packing(content, slices=16, epilogue="either", deterministic=False),
        "eager": Packing(content, epilogue="eager"),
        "registered in its class": Registering(content, accumulate="f16", **coarse),
    }
    assert outcomes(right_ones) == dict.fromkeys(right_ones, "")
    said = outcomes({"no tf32": Packing(content, **coarse), "f16": Packing(content, accumulate="f16")})
    assert ["input_error" in said["no tf32"], "accumulate='f16', and 'f32' is" in said["f16"]] == [True, True]


def test_what_its_process_says_of_b_hides_no_stale_weight() -> None:
    said = outcomes({
        "function": function(stale),
        "says frozen": function(stale, Frozen),
        "says frozen, by address": Packing(lambda b: b.data_ptr()),
        "right": function(right, Frozen),
        "packed": Packing(content),
    })  # fmt: skip
    assert [name for name, reason in said.items() if "that of the weight before" in reason] == [*said][:3]
    assert said["right"] == said["packed"] == ""
