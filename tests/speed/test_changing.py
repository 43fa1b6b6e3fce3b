"""Operands that change between timed calls, and the results that are told from others."""

from __future__ import annotations

import time

import pytest
import torch

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.operands.tensors import Operands, make
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed.timing import changing, clock, paired
from pytest_gemm.speed.timing.changing import Changing

LINES = (
    "mm:f32:nn:33x48x40",
    "mm:bf16:tt:16x24x72",
    "bmm:f32:nn:3x8x16x32",
    "int_mm:i8-i8-i32:nt:32x16x64",
)


def sets_of(line: str) -> list[Operands]:
    given = make(Problem.parse(line), "rand" if ":i8" not in line else "int-2", 0)
    return [given, given.clone()]


def product(given: Operands) -> torch.Tensor:
    return (given.a.double() @ given.b.double()).float()


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("line", LINES)
def test_a_becomes_what_the_judge_makes_of_it_and_is_restored(line: str, count: int) -> None:
    sets = sets_of(line)
    before, tried = sets[0].a.clone(), Changing(sets, count)
    for _ in range(3):
        tried.move()
        tried.write(5)
        again = sets_of(line)[0]
        changing.change(again, changing.Doubt(tried._seed, count, 5, is_kept=False))
        assert all(torch.equal(one.a, again.a) for one in sets)
        assert not torch.equal(again.a, before)
        tried.restore()
        assert all(torch.equal(one.a, before) for one in sets)
    tried = Changing(sets)
    tried.move()
    memories, contents = tried.memory()
    memories[1][:] = contents[7]
    tried.write(0)
    assert torch.equal(sets[1].a, before)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("line", LINES)
def test_right_results_leave_no_doubt_and_kept_ones_do(line: str, count: int) -> None:
    sets = sets_of(line)
    tried = Changing(sets, count)
    for _ in range(5):
        tried.move()
        first = product(sets[0])
        for content in (0, 3, 0, 4):
            tried.write(content)
            tried.see(product(sets[0]), content)
    assert tried.doubt is None
    tried.see(first, 4)
    assert tried.doubt is not None
    assert tried.doubt.is_kept


@pytest.mark.parametrize("line", ["mm:f32:nn:33x48x40", "mm:bf16:tt:160x24x72", "bmm:f32:nn:3x8x16x32"])
def test_of_several_strips_each_half_of_the_rows_has_one(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # nothing comes late
    sets = sets_of(line)
    half = sets[0].a.shape[-2] // 2
    for rows in (slice(0, half), slice(half, None)):
        for _ in range(20):
            tried = Changing(sets, 4)
            tried.move()
            earlier = product(sets[0])
            tried.see(earlier, 0)
            tried.write(3)
            result = product(sets[0])
            result[..., rows, :] = earlier[..., rows, :]
            tried.see(result, 3)
            assert tried.doubt is not None
            tried.restore()


def test_what_is_wrong_beside_the_strip_is_a_doubt_and_what_comes_late_is_misconduct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sets = sets_of(LINES[0])
    tried = Changing(sets)
    tried.move()
    tried.see(product(sets[0]), 0)
    tried.see(product(sets[0]) * 2, 0)
    assert tried.doubt is not None
    assert not tried.doubt.is_kept
    late = Changing(sets)
    late.see(product(sets[0]), 0)
    result = torch.zeros_like(product(sets[0]))
    monkeypatch.setattr(time, "sleep", lambda _: result.copy_(product(sets[0])))
    with pytest.raises(Misconduct, match="after the call had returned"):
        late.see(result, 0)


def test_a_replaced_clock_and_a_replaced_method_are_named_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock.seal(paired)
    right = paired.measure
    monkeypatch.setattr(paired, "measure", lambda *_, **__: None)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert clock.restored() == ["time.perf_counter", "pytest_gemm.speed.timing.paired.measure"]
    assert paired.measure is right
    assert clock.restored() == []
