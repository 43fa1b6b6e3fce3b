"""grouped_mm and its other forms: uneven groups of rows, of columns or of K."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from oracle import compared, computed, is_right, judged, make

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.operands import tensors as factory
from pytest_gemm.run.known import eager_refusal

Groups = tuple[tuple[int, int], ...]


def by_hand(o: factory.Operands) -> torch.Tensor:
    """Row by row, in float64."""
    assert o.offs is not None
    ends = o.offs.tolist()
    owner = [next(g for g, end in enumerate(ends) if row < end) for row in range(o.a.shape[0])]
    return torch.stack([o.a[row].double() @ o.b[group].double() for row, group in enumerate(owner)])


def test_groups_are_uneven_cover_all_rows_and_one_of_three_is_empty() -> None:
    seen = set()
    for seed in range(20):
        for groups in (1, 2, 3, 8):
            o = make(f"grouped_mm:bf16:nt:{groups}x50x16x64", "int-2", seed)
            assert o.a.shape == (groups * 50, 64)
            assert o.b.shape == (groups, 64, 16)
            assert len(o.groups) == groups
            assert o.groups[0][0] == 0
            assert o.groups[-1][1] == groups * 50
            assert all(a[1] == b[0] for a, b in zip(o.groups, o.groups[1:], strict=False))
            sizes = [last - first for first, last in o.groups]
            assert min(sizes) >= 0
            assert groups < 3 or 0 in sizes
            seen.add(tuple(sizes))
    # Another seed cuts elsewhere; and no end is held to a tile's edge.
    assert len([s for s in seen if len(s) == 8]) == 20
    assert any(size % 8 for sizes in seen for size in sizes)


@pytest.mark.parametrize(("line", "unit"), [
    ("grouped_mm_k:bf16:tn:4x32x40x64", 8),
    ("scaled_grouped_mm_n:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise", 16),
    ("scaled_grouped_mm_k:f8e4m3fn-f8e4m3fn-bf16:nt:4x32x48x64:quant.rowwise", 16),
])  # fmt: skip
def test_groups_of_columns_and_of_k_end_at_multiples_of_16_bytes(line: str, unit: int) -> None:
    for seed in range(10):
        o = make(line, "int-2", seed)
        sizes = [last - first for first, last in o.groups]
        assert sum(sizes) == o.problem.ends
        assert 0 in sizes
        assert not any(size % unit for size in sizes)


@pytest.mark.parametrize(("line", "confused"), [
    ("grouped_mm_k:bf16:tn:4x32x40x64", lambda o: computed(o).roll(1, 0)),
    ("grouped_mm_n:bf16:nt:4x32x40x64", lambda o: computed(o, a=o.a.roll(1, 0))),
])  # fmt: skip
def test_a_group_that_is_computed_with_another_is_found(
    line: str, confused: Callable[[factory.Operands], torch.Tensor]
) -> None:
    o = make(line, "int-2")
    assert is_right(o, computed(o))
    assert not is_right(o, confused(o))


def test_a_group_without_products_is_zero() -> None:
    """The defect of NVIDIA/cutlass 2674: a group of K = 0 keeps what lay there, or takes its neighbour's."""
    o = make("grouped_mm_k:bf16:tn:4x32x40x64", "int-2")
    right = computed(o)
    (empty,) = (g for g, (first, last) in enumerate(o.groups) if first == last)
    assert not right[empty].any()
    for rubbish in (right[empty - 1], torch.full_like(right[empty], torch.nan)):
        wrong = right.clone()
        wrong[empty] = rubbish
        assert not is_right(o, wrong)


@pytest.mark.parametrize("text", ["grouped_mm:f32:nt:5x7x12x36", "grouped_mm:bf16:nn:2x0x16x8"])
def test_the_reference_is_the_product_of_each_group(text: str) -> None:
    o = make(text, "int-2")
    reference = reference_module.reference(o.problem, o)
    expected = by_hand(o) if o.a.shape[0] else torch.zeros(0, o.problem.shape.n, dtype=torch.float64)
    assert torch.equal(reference.c, expected)
    assert reference.big.shape == reference.c.shape
    assert (reference.big >= reference.c.abs()).all()


def test_a_plain_product_gets_one_group_after_the_other_and_no_empty_one() -> None:
    shapes: list[tuple[torch.Size, torch.Size]] = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((a.shape, b.shape))
        return a @ b

    registry = Registry()
    registry.add_callable("mine", matmul, batched=False)
    o = make("grouped_mm:f32:nt:4x20x12x36")
    assert registry["mine"].supports(o.problem, DEFAULT) is None
    result = registry["mine"].prepare(o.problem, o, DEFAULT).run(o)
    assert isinstance(result, torch.Tensor)
    assert compared(o, result).ok
    assert [a[0] for a, _ in shapes] == [last - first for first, last in o.groups if last > first]
    assert all(b == (36, 12) for _, b in shapes)


def test_eager_is_not_asked_beside_a_backend_for_what_it_refuses() -> None:
    registry = Registry()
    registry.add_callable("mine", torch.matmul, dtypes=("f64",), accumulate="f64")
    judge = Judge(eager_refusal(Ledger()))
    (outcome, *_) = judged(registry["mine"], "grouped_mm:f64:nt:3x20x12x36", "rand", judge=judge)
    assert outcome.status is Status.PASSED
    assert "_grouped_mm takes f32, bf16 and f16" in outcome.eager


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda groups: range(*groups[2]), "only group 2 of 4, rows 42 to 62, is bad: all of it"),
        (lambda groups: [first for first, last in groups if last > first], "in the first row of its group"),
        (lambda groups: [last - 1 for first, last in groups if last > first], "in the last row of its group"),
        (lambda groups: [*range(*groups[1]), *range(*groups[3])], "2 of 4 groups are bad (1, 3)"),
    ],
)
def test_a_mismatch_is_told_in_groups(rows: Callable[[Groups], Iterable[int]], words: str) -> None:
    o = make("grouped_mm:f32:nt:4x20x24x64", seed=6)
    actual = by_hand(o).float()
    actual[list(rows(o.groups))] += 100.0
    verdict = compared(o, actual)
    assert verdict.mismatch is not None
    assert words in verdict.mismatch.text()
