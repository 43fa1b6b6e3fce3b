"""Guard pages: where operands lie, who is named when a kernel leaves them."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections import Counter

import pytest
import torch
from oracle import judged

from pytest_gemm.backends.aten import AtenBackend, AtenPrepared
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands import guard_pages, tensors
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

LINES = (
    "mm:f32:nn:8x16x32",
    "linear:bf16:nt:17x65x127:bias+add:a.padded+offset",
    "bmm:f16:tn:3x8x9x10:b.broadcast",
    "mm:bf16:nt:16x16x16:add:b.alias_t:r0.alias",
    "mm:f32:nn:0x16x16",
)


@pytest.mark.parametrize("side", guard_pages.SIDES)
@pytest.mark.parametrize("line", LINES)
def test_operands_at_pages_are_the_same_and_touch_the_page(line: str, side: guard_pages.Side) -> None:
    problem = Problem.parse(line)
    given = tensors.make(problem, "rand", 0)
    placed = GuardPages(side).place(given)
    old, new = (program.args(problem, one) for one in (given, placed))
    assert all(old[n].stride() == new[n].stride() and torch.equal(old[n], new[n]) for n in old)
    for buffer in placed.buffers:
        if buffer.view.numel():
            end = buffer.storage.data_ptr() + buffer.storage.nbytes
            assert (end if side == "end" else buffer.storage.data_ptr()) % mmap.PAGESIZE == 0
    assert not placed.changed(placed.digest())


def test_only_what_is_named_is_moved_and_results_are_too_while_it_runs() -> None:
    problem = Problem.parse("mm:f32:nn:8x16x32")
    given = tensors.make(problem, "rand", 0)
    placed = GuardPages("end", frozenset({"b", "out"})).place(given)
    assert placed.a is given.buffers[0].view or placed.a.data_ptr() == given.a.data_ptr()
    assert placed.b.data_ptr() != given.b.data_ptr()
    prepared = AtenBackend().prepare(problem, placed)
    with GuardPages("end").running():
        made = prepared.run(placed)
    assert (made.data_ptr() + made.nbytes) % mmap.PAGESIZE == 0
    assert torch.equal(made, prepared.run(given))
    (outcome,) = judged(AtenBackend(), problem.line, "rand", judge=Judge(pages=GuardPages("end")))
    assert outcome.status is Status.PASSED


CONFTEST = """
    import ctypes
    import os

    def correct(a, b):
        return a @ b

    def reads_on(a, b):
        last = sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True))
        ctypes.string_at(a.data_ptr() + (last + 1) * a.element_size(), 1)
        return a @ b

    def leaves(a, b):
        os._exit(0)

    def pytest_gemm_register_backends(registry):
        registry.add_callable("correct", correct)
        registry.add_callable("reads-on", reads_on)
        registry.add_callable("leaves", leaves)
        registry.add_callable("nameless", lambda a, b: a @ b)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32", "mm:f32:nn:17x65x127"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.study)])
def test_a_kernel_of_a_conftest_that_reads_past_an_operand_is_caught_and_a_correct_one_passes(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    options = ("-p", "no:cacheprovider", "--gemm-guard=pages", "--gemm-output=.", *workers)
    names = "correct,nameless,reads-on,leaves"
    result = pytester.runpytest_inprocess(*options, f"--gemm-backends={names}")
    assert result.ret == 1
    result.assert_outcomes(passed=4, failed=4)
    lines = [json.loads(line) for line in (pytester.path / "run.jsonl").read_text().splitlines()]
    outcomes = [line for line in lines if "backend" in line]
    for name in ("correct", "nameless"):
        # Four distributions, at each end.
        mine = Counter((o["problem"], o["status"], o["guard"]) for o in outcomes if o["backend"] == name)
        assert set(mine.values()) == {4}
        assert {(status, guard) for _, status, guard in mine} == {("passed", "end"), ("passed", "begin")}
    result.stdout.fnmatch_lines_random(
        [
            "crashed: SIGSEGV in run: *on reads-on: reads_on touches memory past the end of a: * at a guard*",
            "  in all 2 problems; further ones: mm:f32:nn:17x65x127",
            "crashed: exit in run: mm:f32:nn:8x16x32 on leaves: *in run: it ended itself with exit *",
            "  rerun: pytest test_it.py::test_product --gemm-backends=reads-on *--gemm-guard=pages",
        ]
    )
    begun = [o["status"] for o in outcomes if o["backend"] == "reads-on" and o["guard"] == "begin"]
    assert begun == ["passed"] * 8  # before the beginning it touches nothing


@pytest.mark.slow
def test_what_pytorchs_own_product_reads_past_too_is_said_to_be_its_fault(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads_on(prepared: AtenPrepared, given: tensors.Operands) -> torch.Tensor:
        ctypes.string_at(given.a.data_ptr() + given.a.numel() * given.a.element_size(), 1)
        return prepared.bind(given)()

    monkeypatch.setattr(AtenPrepared, "run", reads_on)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST.replace(', "mm:f32:nn:17x65x127"', ""))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--gemm-guard=pages", "--gemm-backends=reads-on")
    result.stdout.fnmatch_lines(
        [
            "crashed: PyTorch's own product: touches memory past the end of a: mm:*: reads_on touches memory past *",
            "  PyTorch's own product touches memory past the end of a: SIGSEGV* inherits it if it calls PyTorch's",
        ]
    )
