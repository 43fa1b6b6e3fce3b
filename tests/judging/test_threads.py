"""CPU threads as an axis; operands whose batch lies in the middle, and products of a matrix with itself."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable

import pytest
import torch
from oracle import computed, interval, judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Availability
from pytest_gemm.api.request import BuildRequest, Capability, honours
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor.compilation import CompileSpec
from pytest_gemm.backends.inductor.compiled import constant_tensors
from pytest_gemm.backends.inductor.torch_compat import torch_release
from pytest_gemm.config.values import cores, threads
from pytest_gemm.core.case_id import CaseId, Device, Mode
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures import findings
from pytest_gemm.failures.text import Rerun
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.ledger.entry import Comparison, Comparisons, Entry, Globs
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.plugin import selection
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.record import lines as records
from pytest_gemm.run import known as known_module

MM = Problem.parse("mm:f32:nn:8x9x10")


@pytest.mark.parametrize(("text", "expected"), [
    ("", ()), ("3", ((3, 0),)), ("all", ((cores(), 0),)), (f"1,all,{cores()},999", ((1, 0), (cores(), 0), (999, 0))),
    ("400/2,2/400,4/4,all/999", ((400, 2), (2, 400), (4, 0), (cores(), 999))),
])  # fmt: skip
def test_threads_are_numbers_or_all_of_them(text: str, expected: tuple[tuple[int, int], ...]) -> None:
    assert threads(text) == tuple(dict.fromkeys(expected))


@pytest.mark.parametrize("text", ["0", "1,many", "-2", "1.5", "4/", "/2", "4/0", "4/2/1"])
def test_what_is_no_number_of_threads_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole number, 1 or more, or all"):
        threads(text)


def test_a_case_is_run_with_its_own_threads_and_nobody_else_is() -> None:
    seen = []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return a @ b

    mine = CallableBackend("mine", matmul, frozenset({"f32"}), True, None, True)
    before = torch.get_num_threads()
    more = before + 3  # than there are cores, perhaps
    for one in Judge().judge(Case(mine, MM, ("int-2", "rand"), 0, Device.CPU, threads=more)):
        assert (one.outcome.status, one.outcome.case.threads) == (Status.PASSED, more)
        assert torch.get_num_threads() == before
    assert set(seen) == {more}
    assert torch.get_num_threads() == before


@dataclasses.dataclass
class Blocks:
    """A product that is divided into one block of rows for each thread that it was prepared with."""

    in_turn: bool
    name: str = "blocks"
    devices = ("cpu",)
    contract: Contract = dataclasses.field(default_factory=lambda: Contract(epilogue="eager"))
    blocks: int = 0

    def availability(self, device: str) -> Availability:
        return Availability()

    def supports(self, problem: Problem, request: BuildRequest | None = None) -> None:
        """All."""

    def prepare(self, problem: Problem, operands: Operands, request: BuildRequest | None = None) -> Blocks:
        return dataclasses.replace(self, blocks=torch.get_num_threads())

    def run(self, operands: Operands) -> torch.Tensor:
        """Each thread of the run computes its block; ``in_turn``: and what is left, as ``omp for`` does."""
        c, here = torch.full(operands.problem.result_shape, math.nan), torch.get_num_threads()
        for block, (rows, out) in enumerate(zip(operands.a.chunk(self.blocks), c.chunk(self.blocks), strict=True)):
            if self.in_turn or block < here:
                out.copy_(rows @ operands.b)
        return c

    def proof(self) -> Proof:
        return Proof(executed=("blocks",), provable=False)


@pytest.mark.parametrize(("in_turn", "compiled", "run", "status"), [
    (False, 4, 4, "passed"), (False, 4, 0, "passed"), (False, 4, 2, "incorrect"), (False, 2, 4, "passed"),
    (True, 4, 2, "passed"),
])  # fmt: skip
def test_blocks_that_no_thread_computes_are_found_with_fewer_threads_than_it_was_compiled_for(
    in_turn: bool, compiled: int, run: int, status: str
) -> None:
    before = torch.get_num_threads()
    outcomes = judged(Blocks(in_turn), MM.line, "int-2", "rand", threads=compiled, run_threads=run)
    assert {outcome.status for outcome in outcomes} == {Status(status)}, outcomes
    assert torch.get_num_threads() == before


def of_first_thread(_: int) -> Callable[..., torch.Tensor]:
    """Keeps something in the thread that calls it first, which others do not have."""
    kept = threading.local()
    kept.factor = 1.0
    return lambda a, b: (a @ b) * getattr(kept, "factor", 0.5)


def of_one_workspace(callers: int) -> Callable[..., torch.Tensor]:
    """Is wrong while another thread is in it, for whom it waits where there is one."""
    free, other = threading.Lock(), threading.Event()

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not free.acquire(blocking=False):
            other.set()
            return 2 * (a @ b)
        if callers == 2 and threading.active_count() > 2:
            other.wait(10.0)
        free.release()
        return a @ b

    return matmul


def of_its_thread(_: int) -> Callable[..., torch.Tensor]:
    own = threading.get_ident()

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != own:
            raise RuntimeError("made in another thread")
        return a @ b

    return matmul


def right(_: int) -> Callable[..., torch.Tensor]:
    return torch.matmul


@pytest.mark.parametrize(
    ("made", "callers", "status", "says"),
    [
        (
            of_first_thread,
            1,
            "incorrect",
            "other bits in one of 3 calls under load of another thread (72 of 72 elements)",
        ),
        (of_first_thread, 2, "incorrect", "other bits in one of 3 calls under load of 2 threads at once"),
        (of_one_workspace, 1, "passed", ""),
        (of_one_workspace, 2, "incorrect", "other bits in one of 3 calls under load of 2 threads at once"),
        (of_its_thread, 1, "crashed", "RuntimeError in run again: made in another thread"),
        (right, 1, "passed", ""),
        (right, 2, "passed", ""),
    ],
)
@pytest.mark.parametrize("packs", [False, True])
def test_other_threads_that_call_a_kernel_get_what_the_first_one_does(
    made: Callable[[int], Callable[..., torch.Tensor]], callers: int, status: str, says: str, packs: bool
) -> None:
    pack = torch.clone if packs else None
    mine = CallableBackend("mine", made(callers), frozenset({"f32"}), pack=pack, concurrent=True)
    assert honours(mine, Capability.THREADS)
    outcomes = judged(mine, MM.line, "rand", calls=3, callers=callers)
    last = outcomes[-1]
    assert last.status is Status(status), outcomes
    assert says in str(last.reason)


def statuses_of_cpp(line: str, compiled: int, run: int) -> set[Status]:
    found = judged(CppBackend(), line, "int-2", "rand", threads=compiled, run_threads=run)
    return {outcome.status for outcome in found}


@pytest.mark.slow
@pytest.mark.skipif(torch_release() < (2, 13), reason="a known failure there: cpp-fewer-threads")
@pytest.mark.parametrize(("compiled", "run"), [(4, 2), (2, 4), (cores(), 1)])
def test_a_template_is_right_with_other_threads_than_it_was_compiled_for(compiled: int, run: int) -> None:
    assert statuses_of_cpp("mm:f32:nn:128x128x64", compiled, run) == {Status.PASSED}


@pytest.mark.slow
@pytest.mark.skipif(cores() == 1, reason="needs two cores: one thread has all blocks")
def test_a_template_whose_threads_each_take_a_block_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of torch 2.11, which leaves out the blocks of the threads that are missing."""
    from torch._inductor.codegen import cpp_gemm_template

    if torch_release() < (2, 13):
        pytest.skip("the template of this release is the mutant")
    loop = "#pragma omp for schedule(static, 1)\n        for (int64_t tid = 0; tid < {{num_threads}}; tid++) {"
    name, text = next((n, t) for n, t in vars(cpp_gemm_template).items() if isinstance(t, str) and loop in t)
    mutant = text.replace(loop, "{ const int64_t tid = omp_get_thread_num();")
    monkeypatch.setattr(cpp_gemm_template, name, mutant)
    assert statuses_of_cpp("mm:f32:nn:256x128x64", cores(), 0) == {Status.PASSED}
    assert statuses_of_cpp("mm:f32:nn:256x128x64", cores(), 1) == {Status.INCORRECT}


@pytest.mark.parametrize(
    ("case", "who", "option"),
    [
        (CaseId("cpp", MM.line), "cpp", "--gemm-threads=1"),  # those of the run
        (CaseId("cpp", MM.line, threads=4, run_threads=2), "cpp@4/2t", "--gemm-threads=4/2"),
        (CaseId("cpp", MM.line, mode=Mode.AOTI, threads=7), "cpp@aoti@7t", "--gemm-threads=7"),
        (CaseId("cpp", MM.line, mode=Mode.CPP_WRAPPER), "cpp@cpp-wrapper", "--gemm-modes=cpp-wrapper"),
    ],
)
def test_threads_and_mode_show_in_id_report_rerun_line_and_record(case: CaseId, who: str, option: str) -> None:
    assert str(case) == f"{who}-{MM.line}"
    assert selection.case_id(f"conformance/test_it.py::test_product[{case}]") == case
    odd = Outcome(case, "rand", 0, Status.INCORRECT)
    text = findings.text(findings.Finding([odd]), Rerun("test_it.py", ("--gemm-threads=1",)).line(odd))
    assert f"incorrect: {MM.line} on {who}: " in text
    assert text.count(option.split("=", maxsplit=1)[0]) == text.count(option) == 1
    assert records.from_record(records.to_record(odd)) == odd
    assert selection.case_id(f"x[cpp@2u-{MM.line}]") is None


FEWER, SINGLE = {"run_threads": Comparison("<", 4)}, {"threads": Comparison("==", 1)}


@pytest.mark.parametrize(
    ("condition", "threads", "run_threads", "known"),
    [(FEWER, 4, 2, True), (FEWER, 4, 0, False), (SINGLE, 1, 0, True), (SINGLE, 2, 0, False), (SINGLE, 0, 0, False)],
)
def test_an_entry_of_the_ledger_may_speak_of_threads(
    monkeypatch: pytest.MonkeyPatch, condition: dict[str, Comparison], threads: int, run_threads: int, known: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # the run's
    conditions = {name: Comparisons((comparison,)) for name, comparison in condition.items()}
    held = Entry("some", "r", {"backend": Globs(("cpp",)), **conditions}, crashes=True)
    env = known_module.environment("cpu").at("", threads, run_threads)
    assert env.threads == (threads or 3)
    assert (Ledger((held,)).applicable("cpp", MM, "test_product", env) is held) is known


@pytest.mark.parametrize(
    ("text", "a", "b"),
    [
        ("bmm:f32:nn:5x3x4x6:a.batch_middle", (6, 30, 1), (24, 4, 1)),
        ("bmm:f32:nt:5x3x4x6:b.batch_middle", (18, 6, 1), (6, 1, 30)),
        ("bmm:f32:nn:5x3x4x6:a.batch_middle:b.batch_middle", (6, 30, 1), (4, 20, 1)),
        ("bmm:f32:tn:5x3x4x6:a.padded+batch_middle", (11, 1, 55), (24, 4, 1)),
        ("bmm:f32:nn:5x4x4x4:b.alias", (16, 4, 1), (16, 4, 1)),
    ],
)
def test_a_batch_in_the_middle_is_a_permuted_view(text: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    problem = Problem.parse(text)
    for distribution in distributions_for(problem):
        given = factory.make(problem, distribution, 0)
        assert (given.a.stride(), given.b.stride()) == (a, b)
        assert given.guards_intact()
        assert (given.b is given.a) == problem.has("b.alias")
        actual = computed(given).double()
        span = interval(given)
        assert bool((((actual >= span.lo) & (actual <= span.hi)) | (span.lo.isnan() | actual.isnan())).all())


@pytest.mark.parametrize(("mode", "freezing", "text", "expected"), [
    ("aoti", False, "linear:f32:nt:4x5x6:bias:b.parameter", ("b", "bias")),
    ("aoti", True, "linear:f32:nt:4x5x6:bias", ("b", "bias")), ("", False, "linear:f32:nt:4x5x6:bias:b.parameter", ()),
])  # fmt: skip
def test_a_parameter_is_a_constant_of_a_package_frozen_or_not(
    mode: str, freezing: bool, text: str, expected: tuple[str, ...]
) -> None:
    problem = Problem.parse(text)
    assert CppBackend().options(problem)["freezing"] is freezing or mode == ""
    given = factory.make(problem, "rand", 0)
    spec = CompileSpec("CPP", {"freezing": freezing}, "", 1, BuildRequest(mode=Mode(mode)))
    assert constant_tensors(problem, program.args(problem, given), spec) == expected
