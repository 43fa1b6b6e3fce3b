"""No token of a line is accepted and ignored: taken away, it changes the program, its tensors or what is compiled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.fuzzing import strategies
from pytest_gemm.operands import dtypes as dtypes_module
from pytest_gemm.operands import tensors as operands
from pytest_gemm.operands.random_streams import Stream
from pytest_gemm.problem.dtypes import DTypes
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.layout import Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, Step, StepKind
from pytest_gemm.programs import program

pytestmark = pytest.mark.slow

# Every step with each kind of parameter that it takes, and chains.
STEP_TOKENS = (
    *(name for name, spec in STEPS.items() if not spec.places and (spec.default or not spec.choices)),
    *(f"{name}-{choice}" for name, spec in STEPS.items() for choice in spec.choices),
    *("alpha-0.5", "beta-2", "beta-0", "leaky_relu-0.1", "clamp-0_6", "scale-0.3", "sum-0.3_5", "group-32"),
    *("static-0.02_0", "requant-0.3_5", "perm-1_0", "perm-2_0_1", "perm-0_2_1", "view-24", "view-72", "t+dense"),
    *("add+relu", "relu+tanh", "relu+cast-f32", "bias+relu", "cast-f32+relu", "gated-silu+mul", "bias+static"),
)
# What an op cannot be without, in one dtype for each way in which it computes.
BASES = {
    "mm": [("f32", ""), ("f32-f32-bf16", "")],
    "addmm": [("f32", "bias"), ("bf16", "bias-m1")],
    "bmm": [("f32", "")],
    "baddbmm": [("f32", "bias-mn")],
    "linear": [("f32", ""), ("bf16", "bias")],
    "linears": [("f32", ""), ("f32", "bias"), ("f32", "relu")],
    "int_mm": [("i8-i8-i32", "")],
    "mixed_mm": [("f16-i8-f16", ""), ("f32-i8-f32", "")],
    "woq_int8": [("bf16-i8-bf16", "")],
    "woq_int4": [("bf16-i4-bf16", "group-32")],
    "woq": [("bf16-i4-bf16", "group-32"), ("f32-i8-f32", "group-32"), ("f32-i4-f32", "group-16+nf4")],
    "da8w4": [("f32-i4-f32", "bias+group-32")],
    "qlinear": [("u8-i8-f32", "static"), ("u8-i8-u8", "dynamic+requant"), ("i8-i8-i8", "static-0.1_3+requant")],
    "da8w8": [("i8-i8-f32", "rowwise"), ("i8-i8-f32", "columnwise")],
    "scaled_mm": [
        ("f8e4m3fn-f8e4m3fn-bf16", "rowwise"),
        ("f8e4m3fn-f8e4m3fn-bf16", "tensorwise"),
        ("f4e2m1fn-f4e2m1fn-bf16", "nv"),
    ],
    "grouped_mm": [("bf16", "")],
}
# As few sizes as every rule about sizes asks for; rows of bf16 and fp8 that grouped_mm and scaled_mm take.
SHAPES = ("4x6x8", "4x8x8", "8x8x16", "8x8x8", "3x4x6x8", "2x4x6x8", "2x4x8x8", "2x8x8x8", "4x16x32", "16x16x16")


def matmul(problem: Problem) -> program.Matmul:
    """A product for any operands; ATen's own kernels refuse some of them, and unaligned ones may end the process."""
    is_scaled = problem.op.name in {"qlinear", "da8w8"} or problem.op.rounds_once
    dtype = torch.float32 if is_scaled else dtypes_module.torch_dtype(problem.dtypes.out)
    return lambda a, b: torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(dtype)


class Calls(TorchDispatchMode):
    """What a program calls, with all that is no value of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {_shown(args)} {_shown(kwargs)}")
        return func(*args, **(kwargs or {}))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return str({key: _shown(one) for key, one in value.items()}) if isinstance(value, dict) else repr(value)


@pytest.fixture(autouse=True)
def _one_stream_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of a stream has the problem's line: without this every token would change the values."""
    monkeypatch.setattr(operands, "_keys", lambda *key: lambda name: Stream("any problem", name, str(key[-1])))


def _values(tensor: torch.Tensor) -> list[Any]:
    """The values of a tensor, or the bytes of one that has no values for torch."""
    found: list[Any] = (tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor).tolist()
    return found


@functools.cache
def observed(line: str, seed: int = 0) -> tuple[Any, ...]:
    """All that a backend is given for a problem, and all that its program does; () where it has no operands."""
    problem = Problem.parse(line)
    request = (
        problem.constant_b,
        problem.frozen,
        *(problem.has(flag) for flag in FLAGS if flag.endswith((".dynamic", ".unknown")) or flag.startswith("math.")),
        problem.has("program.v2") or problem.has("program.pt2e"),  # what multiplies, and it is replaced here
    )
    try:
        given = operands.make(problem, "rand", seed)
    except Unsupported:
        return ()
    tensors = program.args(problem, given)
    bases = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    seen = tuple(
        (name, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, bases.index(base), _values(tensor))
        for (name, tensor), base in zip(tensors.items(), bases, strict=True)
    )
    with Calls() as calls:
        made = program.build(problem, matmul(problem))(**tensors)
    results = [(tuple(r.shape), r.stride(), r.dtype) for r in (made if isinstance(made, tuple) else (made,))]
    return (*request, repr(seen), tuple(calls.seen), results)


def problems(op: str, tokens: tuple[str, ...], flag_sets: tuple[tuple[str, ...], ...]) -> Iterator[Problem]:
    """The problems of an op that have one of these steps and flags, each in the first of the shapes that they fit."""
    for (dtypes, own), token, flags in itertools.product(BASES[op], tokens, flag_sets):
        steps = [Step.parse(name) for name in "+".join(filter(None, (own, token))).split("+") if name]
        quant = tuple(step for step in steps if step.kind is StepKind.QUANT)
        epilogue = tuple(step for step in steps if step not in quant)
        for layout, shape in itertools.product(OPS[op].layouts[:2], SHAPES):
            size = Shape.parse(shape.split("x"))
            try:
                yield Problem(OPS[op], DTypes.parse(dtypes.split("-")), layout, size, epilogue, flags, quant)
            except ProblemError:
                continue
            break


def shorter(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem without each of its tokens, where that is one; the rest in every spelling of it."""
    for step in problem.steps:
        epilogue, quant = (
            tuple(one for one in steps if one is not step) for steps in (problem.epilogue, problem.quant)
        )
        yield from _made(str(step), problem, epilogue=epilogue, quant=quant)
    for flag in problem.flags:
        yield from _made(flag, problem, flags=tuple(other for other in problem.flags if other != flag))


def _made(token: str, problem: Problem, **changes: Any) -> Iterator[tuple[str, Problem]]:
    try:
        yield token, dataclasses.replace(problem, **changes)
    except ProblemError:
        return


def ignored(found: Iterator[Problem]) -> list[str]:
    return [
        f"{token} of {problem}"
        for problem in dict.fromkeys(found)
        for token, rest in shorter(problem)
        # What has one row, column or matrix may be dense however it lies.
        if not (token == "dense" and 1 in problem.result_shape)
        # Two groups may end at one place by chance, crowded or not, though not with each seed.
        and all(observed(problem.line, seed) == observed(rest.line, seed) != () for seed in range(8))
    ]


@pytest.mark.parametrize("op", BASES)
def test_no_step_and_no_flag_is_ignored(op: str) -> None:
    flags = tuple((flag,) for flag in FLAGS)
    assert not ignored(itertools.chain(problems(op, STEP_TOKENS, ((),)), problems(op, ("relu",), flags)))


@given(strategies.problems(work=1 << 9))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_token_of_a_drawn_problem_is_ignored(problem: Problem) -> None:
    assert Problem.parse(problem.line) == problem
    assert not ignored(iter([problem]))


def test_a_batch_of_none_is_observed_as_any_other() -> None:
    line = "scaled_grouped_mm_k:f8e4m3fn-f8e4m3fn-bf16:nt:0x1x1x1:relu:quant.rowwise"
    assert observed(line)
