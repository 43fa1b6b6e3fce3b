"""Guard pages: where operands lie, who is named when a kernel leaves them; and what compute-sanitizer says."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planted_memory import honest, reads_on

from pytest_gemm import fence, operands, program, report, sanitizer
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.fence import Fence
from pytest_gemm.guarded import GuardedJudge
from pytest_gemm.judge import Case, Judge
from pytest_gemm.outcome import Outcome, Reason, Status
from pytest_gemm.plain import CallableBackend
from pytest_gemm.problem import Problem

LINES = (
    "mm:f32:nn:8x16x32",
    "linear:bf16:nt:17x65x127:bias+add:pad-lda+off-a",
    "bmm:f16:tn:3x8x9x10::bcast-b",
    "mm:bf16:nt:16x16x16:add:self+res-a",
    "mm:f32:nn:0x16x16",
)


@pytest.mark.parametrize("side", fence.SIDES)
@pytest.mark.parametrize("line", LINES)
def test_operands_at_pages_are_the_same_and_touch_the_page(line: str, side: fence.Side) -> None:
    problem = Problem.parse(line)
    given = operands.make(problem, "rand", 0)
    placed = Fence(side).place(given)
    old, new = (program.args(problem, one) for one in (given, placed))
    assert all(old[n].stride() == new[n].stride() and torch.equal(old[n], new[n]) for n in old)
    for buffer in placed.buffers:
        if buffer.view.numel():
            end = buffer.storage.data_ptr() + buffer.storage.nbytes
            assert (end if side == "end" else buffer.storage.data_ptr()) % mmap.PAGESIZE == 0
    assert not placed.changed(placed.digest())


def test_only_what_is_named_is_moved_and_results_are_too_while_it_runs() -> None:
    problem = Problem.parse("mm:f32:nn:8x16x32")
    given = operands.make(problem, "rand", 0)
    placed = Fence("end", frozenset({"b", "out"})).place(given)
    assert placed.a is given.buffers[0].view or placed.a.data_ptr() == given.a.data_ptr()
    assert placed.b.data_ptr() != given.b.data_ptr()
    prepared = AtenBackend().prepare(problem, placed)
    with Fence("end").running():
        made = prepared.run(placed)
    assert (made.data_ptr() + made.nbytes) % mmap.PAGESIZE == 0
    assert torch.equal(made, prepared.run(given))
    assert [o.status for o in Judge(fence=Fence("end")).judge(Case(AtenBackend(), problem, ("rand",), 0, "cpu"))] == [
        Status.PASSED
    ]


@pytest.fixture
def guarded() -> Iterator[GuardedJudge]:
    judge = GuardedJudge(threads=1, limit=120.0)
    yield judge
    judge.close()


def plain(matmul: object, name: str = "mine") -> CallableBackend:
    return CallableBackend(name, matmul, frozenset({"f32"}), True, None, True)  # type: ignore[arg-type]  # a function


def test_who_reads_past_an_operand_is_one_crashed_case_that_names_it(guarded: GuardedJudge) -> None:
    problem = Problem.parse("mm:f32:nn:8x16x32")
    end, begin = guarded.judge(Case(plain(reads_on), problem, ("rand",), 0, "cpu"))
    assert (end.status, end.guard, end.kernels) == (Status.CRASHED, "end", ("reads_on",))
    assert end.reason is not None
    assert end.reason.code == "page-guard"
    assert end.reason.text == "reads_on touches memory past the end of a: SIGSEGV at a guard page"
    assert (begin.status, begin.guard) == (Status.PASSED, "begin")
    assert report.failure(end, report.Rerun("x")).endswith("--gemm-guard=pages")
    # The process that is left goes on with the next case.
    honest_ones = guarded.judge(Case(plain(honest, "other"), problem, ("rand",), 0, "cpu"))
    assert [(o.status, o.guard) for o in honest_ones] == [(Status.PASSED, "end"), (Status.PASSED, "begin")]


def test_what_cannot_be_judged_at_pages_is_refused(guarded: GuardedJudge) -> None:
    problem = Problem.parse("mm:f32:nn:8x16x32")
    for case, code in (
        (Case(plain(lambda a, b: a @ b), problem, ("rand",), 0, "cpu"), "guard-process"),
        (Case(AtenBackend(), problem, ("rand",), 0, "cuda"), "guard-device"),
    ):
        (outcome,) = guarded.judge(case)
        assert (outcome.status, outcome.reason and outcome.reason.code) == (Status.UNSUPPORTED, code)


LOG = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at triton_mm_kernel+0x1f0 in cxy.py:41
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f5e00000400 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at 0x1f0 in /src/k.cu:41:void triton_mm_kernel(float*)
========= ERROR SUMMARY: 2 errors
"""


def test_the_sanitizer_s_log_is_counted_by_kernel() -> None:
    assert sanitizer.findings([LOG, "========= ERROR SUMMARY: 0 errors\n"]) == {
        ("Invalid __global__ read of size 4 bytes", "triton_mm_kernel"): 2
    }


def test_the_sanitizer_runs_pytest_below_it_and_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'log=$(echo "$@" | sed "s/.*--log-file \\([^ ]*\\)%p.log.*/\\1/")\n'
        'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > "$(dirname $0)/called"\n'
        f"cat > ${{log}}1.log <<'EOF'\n{LOG}\nEOF\nexit 86\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert sanitizer.run("memcheck", ["conformance", "--gemm-sanitizer=memcheck"], tmp_path) == 1
    assert "2 x Invalid __global__ read of size 4 bytes in triton_mm_kernel" in capsys.readouterr().out
    called = (tmp_path / "called").read_text()
    assert called.startswith("1 --tool memcheck ")
    assert "--report-api-errors no" in called  # a library may ask the driver for an entry that it lacks
    assert called.rstrip().endswith("-m pytest conformance --gemm-sanitizer=memcheck --gemm-sanitizer=none")


def test_no_sanitizer_is_a_usage_error() -> None:
    with pytest.raises(pytest.UsageError, match="compute-sanitizer is neither on PATH nor"):
        sanitizer.find({"PATH": "/nowhere"})


def test_a_guarded_crash_is_read_again_from_its_record() -> None:
    made = Outcome("mine", "mm:f32:nn:8x16x32", "rand", 0, Status.CRASHED, Reason("page-guard", "x"), guard="end")
    assert report.from_record(report.to_record(made)) == made
