"""grouped_mm: rows in uneven groups, each with a B of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from oracle import compared, make, refuses_line, says

from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend, AtenPrepared
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.cutedsl import CuteDslBackend
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor.bindings import dynamic_dimensions
from pytest_gemm.backends.nvgemm import NvgemmBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status, Unsupported
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run.known import eager_refusal

Groups = tuple[tuple[int, int], ...]


def by_hand(o: factory.Operands) -> torch.Tensor:
    """Row by row, in float64."""
    assert o.offs is not None
    ends = o.offs.tolist()
    owner = [next(g for g, end in enumerate(ends) if row < end) for row in range(o.a.shape[0])]
    return torch.stack([o.a[row].double() @ o.b[group].double() for row, group in enumerate(owner)])


@pytest.mark.parametrize(("text", "words"), [
    ("grouped_mm:bf16:nt:64x96x128", "needs a batch"), ("grouped_mm:bf16:tn:4x64x96x128", "cannot be tn"),
    ("grouped_mm:bf16:nt:4x64x64x64:b.alias_t", "grouped_mm does not take b.alias_t"),
    ("grouped_mm:bf16:nt:4x64x96x128:a.broadcast", "does not take a.broadcast"),
])  # fmt: skip
def test_a_line_that_makes_no_groups_is_refused(text: str, words: str) -> None:
    refuses_line(text, words)


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


def test_the_same_seed_cuts_the_same_groups() -> None:
    first, second = (make("grouped_mm:f16:nn:4x20x16x64", "rand", 3) for _ in range(2))
    assert first.groups == second.groups


@pytest.mark.parametrize(
    "text", ["grouped_mm:f32:nt:5x7x12x36", "grouped_mm:f64:nn:3x4x6x8", "grouped_mm:bf16:nn:2x0x16x8"]
)
def test_the_reference_is_the_product_of_each_group(text: str) -> None:
    o = make(text, "int-2")
    reference = reference_module.reference(o.problem, o)
    expected = by_hand(o) if o.a.shape[0] else torch.zeros(0, o.problem.shape.n, dtype=torch.float64)
    assert torch.equal(reference.c, expected)
    assert reference.big.shape == reference.c.shape
    assert (reference.big >= reference.c.abs()).all()


@pytest.mark.parametrize("text", [
    "grouped_mm:bf16:nt:4x33x40x64", "grouped_mm:bf16:nn:3x17x100x64:relu", "grouped_mm:f16:nt:2x40x7x1000:bias+gelu",
    "grouped_mm:f32:nt:6x5x33x64:a.padded+offset:b.broadcast", "grouped_mm:bf16:nn:3x16x40x0:a.padded",
    "grouped_mm:f32:nn:4x31x0x8:b.padded",
])  # fmt: skip
def test_eager_on_a_cpu_is_right(text: str) -> None:
    problem = Problem.parse(text)
    backend = AtenBackend()
    refusal = backend.supports(problem)
    if "nn:3x17x100" in text or problem.shape.k * problem.shape.n == 0:
        assert refusal is not None  # rows of B are 100 long; rows of nothing and a gap are 9 apart
        return
    assert refusal is None
    for distribution in distributions_for(problem):
        o = factory.make(problem, distribution, 2)
        prepared = backend.prepare(problem, o)
        verdict = compared(o, prepared.run(o))
        assert verdict.ok, (distribution, verdict.mismatch)
        assert prepared.proof().executed[0].startswith("aten._grouped_mm")


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
    case = Case(registry["mine"], Problem.parse("grouped_mm:f64:nt:3x20x12x36"), ("rand",), 0, Device.CPU)
    (outcome, *_) = Judge(eager_refusal(Ledger())).outcomes(case)
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


@pytest.mark.parametrize(("text", "words"), [
    ("grouped_mm:bf16:nt:4x64x96x100", "rows of A are 100 elements apart"),
    ("grouped_mm:bf16:nn:4x64x100x64", "rows of B are 100 elements apart"), ("grouped_mm:f32:nn:4x64x100x64", ""),
    ("grouped_mm:bf16:nt:4x64x100x64", ""), ("grouped_mm:bf16:nt:4x64x96x0", "rows of A are 1 elements apart"),
    ("grouped_mm:f64:nt:4x64x96x64", "not f64"),
])  # fmt: skip
def test_rows_that_the_operator_does_not_take_are_refused(text: str, words: str) -> None:
    says(AtenBackend().supports(Problem.parse(text)), words)


def test_what_is_refused_is_what_torch_refuses() -> None:
    """Each refusal for a row's length is an exception of torch, and what is claimed is none."""
    for k, n, layout in ((100, 96, "nt"), (64, 100, "nn"), (64, 100, "nt"), (72, 8, "nn")):
        for flags in ("", ":a.padded", ":b.padded"):
            problem = Problem.parse(f"grouped_mm:bf16:{layout}:3x8x{n}x{k}{flags}")
            o = factory.make(problem, "rand", 0)
            refused = AtenBackend().supports(problem) is not None
            try:
                AtenPrepared(problem).run(o)
                failed = False
            except RuntimeError:
                failed = True
            assert failed == refused, problem


def test_unaligned_bases_are_refused_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    o = dataclasses.replace(make("grouped_mm:bf16:nt:4x64x96x64:a.offset"), device=Device.CUDA)
    with pytest.raises(Unsupported, match="16 bytes"):
        AtenBackend().prepare(o.problem, o)


def test_rows_are_the_first_dimension_of_an_artifact_for_any_m() -> None:
    problem = Problem.parse("grouped_mm:bf16:nt:4x64x96x64:add:m.dynamic")
    assert dynamic_dimensions(problem) == {"a": {0: "m"}, "r0": {0: "m"}}


def test_one_kernel_for_all_groups_slices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    own, library = (
        AtenBackend().prepare((o := dataclasses.replace(make(text), device=Device.CUDA)).problem, o).contract
        for text in ("grouped_mm:bf16:nt:4x64x96x1024", "grouped_mm:f16:nt:4x64x96x1024")
    )
    assert own.slices == 1
    assert not own.or_scalar
    assert library.slices > 1


@pytest.mark.parametrize(("backend", "text", "words"), [
    (TritonBackend(), "grouped_mm:bf16:nt:4x64x96x128:relu", ""),
    (TritonBackend(), "grouped_mm:f16:nt:4x64x96x128", "bf16 only"),
    (TritonBackend(), "grouped_mm:bf16:nt:4x64x96x100", "elements apart"),
    (TritonBackend(), "grouped_mm:bf16:nt:4x64x96x128:b.offset", "TMA"),
    (CutlassBackend(), "grouped_mm:bf16:nt:4x64x96x128", "no CUTLASS candidate"),
    (CuteDslBackend(), "grouped_mm:bf16:nt:4x64x96x128", "Blackwell"),
    (NvgemmBackend(), "grouped_mm:bf16:nn:4x64x96x128", "column-major"),
    (CppBackend(), "grouped_mm:bf16:nt:4x64x96x128", "no C++ candidate"),
], ids=lambda x: getattr(x, "name", None))  # fmt: skip
def test_a_backend_claims_what_its_lowering_offers(
    backend: TritonBackend | CutlassBackend | CuteDslBackend | NvgemmBackend | CppBackend, text: str, words: str
) -> None:
    says(backend.supports(Problem.parse(text)), words)
