"""How rows are divided into groups, rows of no group, labels and counts in place of ends, scales of blocks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from oracle import compared, computed, exact, is_right, judged, make, refuses_line, scales

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args
from pytest_gemm.run.known import eager_refusal
from pytest_gemm.speed.data import Peaks
from pytest_gemm.speed.roofline import floor, work

Tensors = Mapping[str, torch.Tensor]

ROWS = "grouped_mm:bf16:nt:8x17x24x64:groups."
CALLS = itertools.count()
MASKED = "grouped_bmm:bf16:nt:4x33x24x64:groups.masked"


def sizes(line: str, seed: int) -> list[int]:
    return [last - first for first, last in make(line, "int-2", seed).groups]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_divided_as_the_flag_says(seed: int) -> None:
    crowded = sorted(sizes(f"{ROWS}crowded", seed))
    assert (sum(crowded), crowded[-2] <= 3) == (136, True)
    single = sorted(sizes(f"{ROWS}single", seed))
    assert (sum(single), single[-2] <= 1) == (136, True)
    sparse = sizes(f"{ROWS}sparse", seed)
    assert (sum(sparse), sparse.count(0) >= 6) == (136, True)
    aligned = sizes("grouped_mm:bf16:nt:8x48x24x64:groups.aligned", seed)
    assert (sum(aligned), any(size % 128 for size in aligned)) == (384, False)
    unowned = sizes(f"{ROWS}crowded+unowned", seed)
    assert 136 - 136 // 8 <= sum(unowned) < 136


def test_places_of_groups_are_random() -> None:
    largest = {max(range(8), key=sizes(f"{ROWS}crowded", seed).__getitem__) for seed in range(20)}
    assert len(largest) > 3


def test_a_label_is_the_group_of_a_row_and_minus_one_that_of_none() -> None:
    o = make(f"{ROWS}unowned+labels")
    assert o.labels is not None
    wanted = torch.full((136,), -1, dtype=torch.int32)
    for group, (first, last) in enumerate(o.groups):
        wanted[first:last] = group
    assert torch.equal(o.labels, wanted)
    assert list(args(o.problem, o)) == ["a", "b", "labels"]


def test_rows_of_no_group_hold_nan_and_those_of_groups_none() -> None:
    o = make(f"{ROWS}unowned")
    assert torch.equal(o.a.isnan().all(1), o.a.isnan().any(1))
    assert int(o.a.isnan().any(1).sum()) == 136 - o.groups[-1][1]
    assert o.finite
    masked = make("bmm:f32:tn:4x33x24x64:groups.masked")
    assert masked.counts is not None
    assert {0, 33} <= set(masked.counts.tolist())
    assert torch.equal((~masked.a.isnan().any(2)).sum(1), masked.counts)


@pytest.mark.parametrize("line", [
    "grouped_mm:bf16:nt:8x17x24x64:bias+gelu:groups.unowned",
    f"{ROWS}crowded+unowned+zeroed", f"{ROWS}sparse+unowned+zeroed+labels", f"{ROWS}single+labels",
    MASKED, "bmm:f32:tt:3x17x24x65:relu:groups.masked", "grouped_mm:f32:nn:5x7x12x36:bias+gelu:groups.unowned+zeroed",
])  # fmt: skip
def test_an_exact_product_is_right_with_each_distribution(line: str) -> None:
    (outcome, *others) = beside_eager(exact, line)
    assert {one.status for one in (outcome, *others)} == {Status.PASSED}, outcome
    assert outcome.eager
    for distribution in distributions_for(Problem.parse(line))[:3]:
        o = make(line, distribution)
        if not o.problem.is_partial:
            assert is_right(o, computed(o)), distribution


def beside_eager(matmul: Callable[..., torch.Tensor], line: str, bind: Any = None) -> list[Outcome]:
    backend = CallableBackend("mine", matmul, ("f32", "bf16"), bind=bind)
    return judged(backend, line, judge=Judge(eager_refusal(Ledger())))


def of_labels(spoil: Callable[[torch.Tensor, Tensors], torch.Tensor]) -> Any:
    """A kernel that is given a label for each row, and what it does with its result."""

    def bind(_: Problem, t: Tensors) -> Callable[[], torch.Tensor]:
        def kernel() -> torch.Tensor:
            c = torch.stack(
                [row.float() @ t["b"][label].float() for row, label in zip(t["a"], t["labels"], strict=True)]
            )
            return spoil(c, t).to(torch.bfloat16)

        return kernel

    return bind


def junk(c: torch.Tensor, t: Tensors) -> torch.Tensor:
    """What lies in rows of no group is another number in each call."""
    return torch.where((t["labels"] < 0)[:, None], float(next(CALLS)), c)


def test_of_rows_of_no_group_nothing_is_asked_unless_the_program_masks_them() -> None:
    kept = beside_eager(torch.matmul, f"{ROWS}unowned+labels", of_labels(junk))
    assert {one.status for one in kept} == {Status.PASSED}, kept
    (outcome, *_) = beside_eager(torch.matmul, f"{ROWS}unowned+zeroed+labels", of_labels(junk))
    assert outcome.status is Status.INCORRECT
    assert "every bad element is in a row that no group owns" in outcome.details


def test_eager_that_rounds_before_gelu_is_held_to_a_fused_kernels_bound() -> None:
    def gelu(c: torch.Tensor, t: Tensors) -> torch.Tensor:
        return torch.where((t["labels"] < 0)[:, None], math.nan, torch.nn.functional.gelu(c))

    line = "grouped_mm:bf16:nt:8x17x96x128:gelu:groups.crowded+unowned+zeroed+labels"
    (outcome,) = (one for one in beside_eager(torch.matmul, line, of_labels(gelu)) if one.distribution == "rand")
    assert outcome.code == "nan"
    assert "eager itself is outside the bound of a fused epilogue, which rounds once (" in outcome.eager


def test_a_kernel_that_is_wrong_in_rows_of_groups_is_found_beside_rows_of_none() -> None:
    def column(c: torch.Tensor, _: Tensors) -> torch.Tensor:
        c[:, 0] += 1.0
        return c

    (outcome, *_) = beside_eager(torch.matmul, f"{ROWS}unowned+labels", of_labels(column))
    assert outcome.status is Status.INCORRECT
    assert "holds the answer" not in outcome.details  # of a row of no group, which may be anything


def test_a_mask_that_multiplies_leaves_nan() -> None:
    o = make(MASKED)
    assert o.counts is not None
    c = exact(o.a, o.b) * (torch.arange(33) < o.counts[:, None])[..., None]
    found = compared(o, c)
    assert found.mismatch is not None
    assert found.mismatch.code == "nan"


@pytest.mark.parametrize("least", [0, 1])
def test_a_tile_that_is_counted_for_an_empty_group_is_found(least: int) -> None:
    """Tiles are dealt out group by group.  With one for an empty group the last tile is never reached."""
    o = make(f"{ROWS}sparse")
    counts = [-(-(last - first) // 16) for first, last in o.groups]
    tiles = [(g, t) for g, count in enumerate(counts) for t in range(max(least, count))]
    c = torch.full((136, 24), torch.nan)
    for group, tile in tiles[: sum(counts)]:
        first, last = o.groups[group]
        rows = slice(first + 16 * tile, min(first + 16 * (tile + 1), last))
        c[rows] = o.a[rows].float() @ o.b[group].float()
    assert is_right(o, c.bfloat16()) == (least == 0)


@pytest.mark.parametrize(("line", "words"), [
    ("grouped_mm:bf16:nt:1x17x24x64:groups.sparse", "is about several groups, not 1"),
    ("grouped_mm:bf16:nt:3x17x24x64:groups.aligned", "multiples of 128, not 51"),
    ("grouped_mm:bf16:nt:4x17x24x64:groups.zeroed", "needs groups.unowned"),
    ("grouped_mm:bf16:nt:4x17x24x64:t:groups.unowned", "which t moves"),
    ("grouped_mm:bf16:nt:1x1x24x64:groups.unowned", "1 of 1 rows"),
    ("mm:bf16:nt:17x24x64:groups.labels", "mm does not take groups.labels"),
    ("scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:4x33x96x128:quant.mx", "tiles of 128 rows"),
    ("scaled_grouped_mm:f4e2m1fn-f4e2m1fn-bf16:nt:4x32x96x128:quant.nv-2", "no scales for whole tensors"),
    ("scaled_grouped_mm:f8e4m3fn-f8e4m3fn-bf16:nt:4x33x96x128:quant.blocks-128_1", "scales of single rows"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(line: str, words: str) -> None:
    refuses_line(line, words)


# -- scales of blocks --------------------------------------------------------------------------------


FP8 = "f8e4m3fn-f8e4m3fn-bf16:nt"
SCALED = [
    f"scaled_grouped_mm:{FP8}:8x16x144x272:quant.blocks:groups.crowded+unowned+zeroed",
    f"scaled_grouped_mm:{FP8}:4x33x40x256:quant.blocks-1_1",
    f"scaled_grouped_mm:{FP8}:4x64x96x128:quant.mx",
    "scaled_grouped_mm:f4e2m1fn-f4e2m1fn-bf16:nt:4x64x96x128:quant.nv",
    f"scaled_grouped_bmm:{FP8}:4x33x144x256:quant.blocks:groups.masked",
    f"scaled_grouped_bmm:{FP8}:3x33x48x256:quant.rowwise:groups.masked",
]


@pytest.mark.parametrize("line", SCALED)
def test_each_group_has_scales_of_its_own(line: str) -> None:
    for distribution in distributions_for(Problem.parse(line)):
        o = make(line, distribution, 1)
        assert is_right(o, computed(o, lambda a, b: a.float() @ b.float())), distribution
        if distribution == "rand":
            other = dataclasses.replace(o, scale_b=scales(o)[1].roll(-1, 0))
            assert not is_right(o, computed(other, lambda a, b: a.float() @ b.float()))


@pytest.mark.parametrize("line", SCALED[:2])
def test_scales_of_blocks_are_those_of_each_groups_elements(line: str) -> None:
    o = make(line)
    a, b = (x.double() for x in scales(o))
    width = 1 if line.endswith("1_1") else 128
    group = next(g for g, (first, last) in enumerate(o.groups) if last > first + 1)
    row, column = o.groups[group][0] + 1, 37
    k = torch.arange(o.problem.shape.k)
    wanted = (o.a[row].double() * a[row, k // 128]) @ (
        o.b[group, :, column].double() * b[group, k // 128, column // width]
    )
    made = computed(o, lambda x, y: x.double() @ y.double())
    torch.testing.assert_close(made[row, column].double(), wanted, rtol=2**-8, atol=0.0)


def test_a_kernel_with_scales_of_blocks_is_judged_and_a_shipped_backend_says_why_not() -> None:
    def bind(_: Problem, t: Tensors) -> Callable[[], torch.Tensor]:
        def kernel() -> torch.Tensor:
            a, b = (t[name].float() for name in "ab")
            a = a * t["scale_a"].repeat_interleave(128, -1)[..., : a.shape[-1]]
            scale = t["scale_b"].repeat_interleave(128, -2).repeat_interleave(128, -1)
            c = a @ (b * scale[..., : b.shape[-2], : b.shape[-1]])
            return c.masked_fill(torch.arange(33)[:, None] >= t["counts"][:, None, None], 0.0).bfloat16()

        return kernel

    outcomes = beside_eager(torch.matmul, SCALED[4], bind)
    assert {one.status for one in outcomes} == {Status.PASSED}, outcomes
    assert AtenBackend().supports(Problem.parse(SCALED[4])) is not None


def test_what_a_kernel_may_skip_is_no_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked kernel computes the rows that count alone: at least those of one matrix."""
    monkeypatch.setattr("pytest_gemm.speed.roofline.cache_bytes", lambda _: 1 << 20)
    peaks, shape = Peaks({"bf16": 1e12}, 1e9), "8x512x1024x1024"
    floors = [floor(Problem.parse(f"bmm:bf16:nt:{shape}{more}"), peaks, "cpu") for more in ("", ":groups.masked")]
    assert floors[1].computing == floors[0].computing / 8
    assert floors[0].reading > floors[1].reading == 0.0
    labels = work(Problem.parse(f"grouped_mm:bf16:nt:{shape}:groups.labels")).bytes
    assert labels - work(Problem.parse(f"grouped_mm:bf16:nt:{shape}")).bytes == 4 * (8 * 512 - 8)


def test_the_bytes_of_scales_are_those_of_all_groups() -> None:
    line = f"scaled_grouped_mm:{FP8}:4x32x256x512:quant.{{}}"
    rows, blocks = (work(Problem.parse(line.format(one))).bytes for one in ("rowwise", "blocks"))
    assert blocks - rows == 4 * ((128 * 4 + 4 * 4 * 2) - (128 + 4 * 256))
