"""The imitation ``block-scales-by-rows`` against the tiles of the template, walked one after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_gemm.api.proof import Proof
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.problem.steps import BLOCK_K

LINE = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:130x256x256:quant.blocks"
DISTRIBUTIONS = ("int-2", "rand")
UNKNOWN = 7.0


def tiled(scales: Tensor, rows: int, k: int, tile: tuple[int, int], *, squares: bool) -> Tensor:
    """The scale of each element, as a program of Triton loads, broadcasts and reshapes it for each tile."""
    tall, deep = tile
    memory = torch.cat([scales.as_strided((scales.untyped_storage().nbytes() // 4 - scales.storage_offset(),), (1,))])
    per_row, across, found = -(-k // BLOCK_K), -(-deep // BLOCK_K), torch.empty(rows, k)
    for pid in range(-(-rows // tall)):
        for step in range(-(-k // deep)):
            high = -(-tall // BLOCK_K) if squares else tall
            row, column = pid * high + torch.arange(high), step * across + torch.arange(across)
            at = row[:, None] * per_row + column
            inside = (row[:, None] < (-(-rows // BLOCK_K) if squares else rows)) & (column < per_row)
            loaded = torch.where(at < len(memory), memory[at.clamp(max=len(memory) - 1)], UNKNOWN)
            loaded = torch.where(inside, loaded, 1.0)
            wide = (min(tall, BLOCK_K),) * squares + (min(deep, BLOCK_K),)
            block = loaded[(..., *[None] * len(wide))].expand(*loaded.shape, *wide).reshape(tall, deep)
            place = (slice(pid * tall, (pid + 1) * tall), slice(step * deep, (step + 1) * deep))
            found[place] = block[: rows - pid * tall, : k - step * deep]
    return found


def in_tf32(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def template(given: Operands, tile: tuple[int, int, int], *, first_release: bool) -> Tensor:
    """What triton_main_loop_scaled_mm gives; the first release decides by A's recipe how it reads B's scales."""
    (m, n, k), (tall, wide, deep) = (given.problem.shape.m, given.problem.shape.n, given.problem.shape.k), tile
    assert given.scale_a is not None
    assert given.scale_b is not None
    by_a, by_b = (blocks > 1 for blocks in given.problem.scale_blocks or ())
    a = given.a.float() * tiled(given.scale_a, m, k, (tall, deep), squares=by_a)
    b = given.b.float().mT * tiled(given.scale_b.mT, n, k, (wide, deep), squares=by_a if first_release else by_b)
    return (in_tf32(a) @ in_tf32(b).mT).to(torch.bfloat16)


def epilogue(given: Operands) -> Tensor:
    """What triton_scaled_mm_device_tma_epilogue_scaling gives: the scale of one square is that of row 0."""
    assert given.scale_a is not None
    assert given.scale_b is not None
    by_a = torch.full((given.problem.shape.m, 1), float("nan"))
    by_a[0] = given.scale_a[0]
    return ((given.a.float() @ given.b.float()) * by_a * given.scale_b).to(torch.bfloat16)


def last_block(given: Operands) -> Tensor:
    """A template in which only the last block of K counts: an entry for any wrong result once hid it."""
    assert given.scale_a is not None
    assert given.scale_b is not None
    a = given.a[:, -BLOCK_K:].float() * given.scale_a[:, -1:]
    b = given.b[-BLOCK_K:].float() * given.scale_b[-1:].repeat_interleave(BLOCK_K, 1)
    return (a @ b).to(torch.bfloat16)


def judged(
    line: str, kernel: Any, tile: tuple[int, int, int], reference: str, place: str = "main_loop"
) -> list[Outcome]:
    """The failures of a kernel of the template that scales in this place, with such a tile in its name."""
    name = f"triton_scaled_mm_device_tma_{place}_scaling-{'x'.join(map(str, tile))},s5,w4"
    prepared = SimpleNamespace(
        run=kernel, contract=Contract(), proof=lambda: Proof(executed=("k",), generated=("k",), chosen=(name,))
    )
    backend: Any = SimpleNamespace(
        name="tiles", supports=lambda *_: None, prepare=lambda *_: prepared, devices=("cpu",), capabilities=frozenset()
    )
    judge = Judge(reference=reference, statements=lambda *_: ("block-scales-by-rows",))
    found = judge.outcomes(Case(backend, Problem.parse(line), DISTRIBUTIONS, 0, Device.CPU))
    return [outcome for outcome in found if outcome.status.is_failure]


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("reference", ["full", "sampled"])
@pytest.mark.parametrize("first_release", [False, True])
@pytest.mark.parametrize("tile", [(64, 32, 256), (128, 64, 64)])
@pytest.mark.parametrize("blocks", ["", "-1_1", "-128_1"])
def test_what_the_template_reads(blocks: str, tile: tuple[int, int, int], first_release: bool, reference: str) -> None:
    found = judged(LINE + blocks, lambda given: template(given, tile, first_release=first_release), tile, reference)
    assert found
    assert {(outcome.code, outcome.imitates) for outcome in found} <= {
        (code, ("block-scales-by-rows",)) for code in ("outside-bound", "nan", "inf")
    }


@pytest.mark.parametrize("reference", ["full", "sampled"])
def test_another_tile_or_another_defect_is_another_answer(reference: str) -> None:
    tile = (64, 32, 256)
    for kernel in (last_block, lambda given: template(given, (64, 64, 64), first_release=False)):
        found = judged(LINE, kernel, tile, reference)
        assert len(found) == len(DISTRIBUTIONS)
        assert not any(outcome.imitates for outcome in found)


@pytest.mark.parametrize("reference", ["full", "sampled"])
def test_one_square_read_as_a_scale_a_row(reference: str) -> None:
    line, tile = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:128x144x128:quant.blocks-128_1", (64, 32, 64)
    found = judged(line, epilogue, tile, reference, "epilogue")
    assert {(outcome.code, outcome.imitates) for outcome in found} == {("nan", ("block-scales-by-rows",))}
    assert not any(outcome.imitates for outcome in judged(line, epilogue, tile, reference))  # the other template
    twice = judged(line, lambda given: 2 * epilogue(given), tile, reference, "epilogue")
    assert twice
    assert not any(outcome.imitates for outcome in twice)
