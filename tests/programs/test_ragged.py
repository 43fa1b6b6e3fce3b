"""The forms of grouped_mm beside groups of rows: groups of columns, groups of K, and a matrix of A for each of B."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import is_right, make, refuses_line, says

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem

Pieces = Callable[[Operands, int, int, int], torch.Tensor]


def of_k(o: Operands, _: int, first: int, last: int) -> torch.Tensor:
    return o.a[:, first:last].float() @ o.b[first:last].float()


def of_n(o: Operands, group: int, first: int, last: int) -> torch.Tensor:
    return o.a[group].float() @ o.b[:, first:last].float()


def by_hand(o: Operands, piece: Pieces) -> torch.Tensor:
    pieces = [piece(o, group, *ends) for group, ends in enumerate(o.groups)]
    return (torch.stack(pieces) if piece is of_k else torch.cat(pieces, 1)).to(o.a.dtype)


@pytest.mark.parametrize(
    ("text", "a", "b", "result"),
    [
        ("grouped_mm_k:bf16:tn:4x32x40x64", (32, 256), (256, 40), (4, 32, 40)),
        ("grouped_mm_n:bf16:nt:4x32x40x64", (4, 32, 64), (64, 160), (32, 160)),
        ("grouped_bmm:bf16:nt:4x32x40x64", (4, 32, 64), (4, 64, 40), (4, 32, 40)),
    ],
)
def test_the_shapes_are_those_of_pytorch(
    text: str, a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]
) -> None:
    o = make(text, "int-2")
    assert (tuple(o.a.shape), tuple(o.b.shape), o.problem.result_shape) == (a, b, result)
    prepared = AtenBackend().prepare(o.problem, o)
    assert tuple(prepared.run(o).shape) == result
    assert prepared.proof().executed[0].startswith("aten._grouped_mm")


@pytest.mark.parametrize("text", ["grouped_mm_k:bf16:tn:4x32x40x64:m.dynamic", "grouped_mm_n:f32:nt:2x8x8x8:m.dynamic"])
def test_one_size_is_asked_of_groups_that_are_not_of_rows(text: str) -> None:
    refuses_line(text, r"drop m\.dynamic")


def test_groups_end_at_multiples_of_16_bytes_and_one_of_three_is_empty() -> None:
    for seed in range(10):
        o = make("grouped_mm_k:bf16:tn:4x32x40x64", "int-2", seed)
        sizes = [last - first for first, last in o.groups]
        assert sum(sizes) == 256
        assert 0 in sizes
        assert not any(size % 8 for size in sizes)


@pytest.mark.parametrize(
    "text",
    [
        "grouped_mm_k:bf16:tn:4x32x40x64", "grouped_mm_k:f32:nn:3x17x36x8:relu", "grouped_mm_k:f16:nt:2x9x8x512:bias",
        "grouped_mm_n:bf16:nt:4x33x40x64", "grouped_mm_n:f16:nn:3x8x8x16:bias+gelu",
        "grouped_mm_n:f32:nt:5x3x12x64:add",
        "grouped_bmm:bf16:nn:3x33x64x72", "grouped_bmm:f32:nt:2x5x7x8:mul",
    ],
)  # fmt: skip
def test_eager_and_a_plain_product_are_right(text: str) -> None:
    problem, registry = Problem.parse(text), Registry()
    registry.add_callable("mine", torch.matmul, batched=True)
    for distribution in distributions_for(problem):
        o = factory.make(problem, distribution, 2)
        assert is_right(o, AtenBackend().prepare(problem, o).run(o)), distribution
        result = registry["mine"].prepare(problem, o, DEFAULT).run(o)
        assert isinstance(result, torch.Tensor)
        assert is_right(o, result), distribution


@pytest.mark.parametrize(
    ("text", "piece"), [("grouped_mm_k:bf16:tn:4x32x40x64", of_k), ("grouped_mm_n:bf16:nt:4x32x40x64", of_n)]
)
def test_a_group_that_is_computed_with_another_is_found(text: str, piece: Pieces) -> None:
    o = make(text, "int-2")
    right = by_hand(o, piece)
    assert is_right(o, right)
    filled = [g for g, (first, last) in enumerate(o.groups) if last > first]
    wrong = right.clone()
    if piece is of_k:
        wrong[filled[0]] = right[filled[1]]
    else:
        first, last = o.groups[filled[0]]
        wrong[:, first:last] = (o.a[filled[1]].float() @ o.b[:, first:last].float()).bfloat16()
    assert not is_right(o, wrong)


def test_a_group_without_products_is_zero() -> None:
    """The defect of NVIDIA/cutlass 2674: a group of K = 0 keeps what lay there, or takes its neighbour's."""
    o = make("grouped_mm_k:bf16:tn:4x32x40x64", "int-2")
    right = by_hand(o, of_k)
    (empty,) = (g for g, (first, last) in enumerate(o.groups) if first == last)
    assert not right[empty].any()
    for rubbish in (right[empty - 1], torch.full_like(right[empty], torch.nan)):
        wrong = right.clone()
        wrong[empty] = rubbish
        assert not is_right(o, wrong)


@pytest.mark.parametrize(("text", "words"), [
    ("grouped_mm_k:bf16:nt:4x32x40x65", "rows of A are 260 elements apart"),
    ("grouped_mm_k:bf16:tn:4x33x40x64", "rows of A are 33 elements apart"),
    ("grouped_mm_n:bf16:nn:4x33x41x64", "rows of B are 164 elements apart"), ("grouped_mm_n:bf16:nn:4x33x42x64", ""),
    ("grouped_bmm:bf16:nn:4x33x42x64", "rows of B are 42 elements apart"),
])  # fmt: skip
def test_rows_that_the_operator_does_not_take_are_refused(text: str, words: str) -> None:
    says(AtenBackend().supports(Problem.parse(text)), words)


def test_who_has_a_candidate() -> None:
    for op in ("grouped_mm_k", "grouped_mm_n", "grouped_bmm"):
        problem = Problem.parse(f"{op}:bf16:nt:4x32x64x64")
        assert TritonBackend().supports(problem) is None
        assert "no C++ candidate" in str(CppBackend().supports(problem))
        assert "no NVGEMM candidate" in str(NvgemmBackend().supports(problem))
