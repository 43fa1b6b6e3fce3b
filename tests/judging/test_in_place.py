"""Results in given memory: C in place, a result over A, and tensors with strides that a kernel itself writes."""

from __future__ import annotations

import functools
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings
from oracle import judged
from warm_processes import Programs

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends import rules
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Status
from pytest_gemm.failures import repro
from pytest_gemm.fuzzing import strategies
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands import tensors
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.speed import bench
from pytest_gemm.speed.timing import paired
from pytest_gemm.worker.inline import Inline
from pytest_gemm.worker.messages import Job

ADDEND = "addmm:f32:nn:17x33x65:bias-mn+alpha-0.5+beta-2:out.given+addend"
OVER_A = "mm:f32:nn:17x65x65:out.given+alias"
STRIDED = [
    "mm:f32:nn:17x33x65:out.given", "mm:bf16:nn:17x33x65:out.given+padded+offset",
    "mm:f32:nt:17x33x65:out.copied+padded",
    "bmm:f32:nn:3x17x33x65:out.given+transposed", "linear:f32:nt:17x33x65:bias:bias.offset",
    "baddbmm:f16:nn:3x17x33x65:bias-mn+beta-2:out.given+padded+offset+addend", "bmm:f32:tn:3x17x65x65:out.given+alias",
    ADDEND, ADDEND.replace("beta-2", "beta-0"), ADDEND.replace("given", "given+transposed"), OVER_A,
]  # fmt: skip
Tensors = dict[str, torch.Tensor]


def right(problem: Problem, t: Tensors) -> torch.Tensor:
    """What the whole problem is, in f64 and rounded once."""
    b = t["b"].mT if problem.op.weight else t["b"]
    c = problem.alpha * (t["a"].double() @ b.double())
    addend = t["out"] if problem.has("out.addend") else t.get("bias")
    if addend is not None and problem.beta:
        c = c + problem.beta * addend.double()
    return c.to(t["a"].dtype)


def writes(problem: Problem, t: Tensors) -> torch.Tensor:
    c = right(problem, t)
    out = t["a"] if problem.has("out.alias") else t.get("out")
    return c if out is None else out.copy_(c)


def returns_its_own(problem: Problem, t: Tensors) -> torch.Tensor:
    writes(problem, t)
    return right(problem, t)


def as_if_contiguous(problem: Problem, t: Tensors) -> torch.Tensor:
    """As an allocation of the kernel's own would lie (aiter 5385)."""
    c = right(problem, t)
    t["out"].as_strided(c.shape, c.stride(), t["out"].storage_offset()).copy_(c)
    return t["out"]


def owner(kernel: Callable[[Problem, Tensors], torch.Tensor]) -> CallableBackend:
    """A kernel that takes the whole problem."""
    return CallableBackend("mine", torch.matmul, bind=lambda problem, t: functools.partial(kernel, problem, t))


DISTRIBUTIONS = ("int-2", "rand", "specials")


@pytest.mark.parametrize("line", STRIDED)
def test_a_kernel_gets_the_given_tensor_and_writes_it(line: str) -> None:
    outcomes = judged(owner(writes), line, *DISTRIBUTIONS)
    assert {(o.status, o.composed) for o in outcomes} == {(Status.PASSED, False)}


@pytest.mark.parametrize(("kernel", "line", "code"), [
    (returns_its_own, STRIDED[1], "wrong-place"), (returns_its_own, ADDEND, "wrong-place"),
    (as_if_contiguous, STRIDED[1], "written-beside"),
])  # fmt: skip
def test_a_given_tensor_is_the_one_that_is_written_and_returned(kernel: Any, line: str, code: str) -> None:
    assert {(o.status, o.code) for o in judged(owner(kernel), line, *DISTRIBUTIONS)} == {(Status.INCORRECT, code)}


def test_eager_pytorch_takes_the_addend_in_place_and_loses_an_a_that_it_writes_over() -> None:
    assert {o.status for o in judged(AtenBackend(), ADDEND, *DISTRIBUTIONS)} == {Status.PASSED}
    outcomes = judged(AtenBackend(), OVER_A, *DISTRIBUTIONS)
    assert {o.status for o in outcomes} == {Status.INCORRECT}
    # By the CPU the library clears the result first, or reads A where columns of the result stand.
    assert {o.cause for o in outcomes} & {"never computed", "A read after the write"}


@pytest.mark.parametrize(("line", "strided"), [
    (OVER_A, False), (OVER_A.replace("nn", "tn"), True), ("mm:f32:nn:17x65x65:a.padded:out.given+alias", True),
    ("bmm:f32:nn:3x6x6x6:a.batch_middle:out.given+alias", True), (STRIDED[0], False), (STRIDED[3], True),
    ("mm:f32:nn:1x33x65:out.given+padded+transposed", True), ("mm:f32:nn:1x33x65:out.given+padded", False),
])  # fmt: skip
def test_a_compiled_program_takes_a_contiguous_c_alone(line: str, *, strided: bool) -> None:
    reason = rules.check(("inductor",), Problem.parse(line), DEFAULT)
    assert (reason is not None and reason.reason.code == "out-strided") == strided


@pytest.mark.parametrize(("line", "of"), [(ADDEND, "bias"), (OVER_A, "a")])
def test_every_run_begins_with_the_same_values_and_only_c_is_written(line: str, of: str) -> None:
    given = tensors.make(Problem.parse(line), "rand", 0)
    before, own = given.digest(), getattr(given, of).clone()
    for _ in range(2):
        given.reset_out()
        assert given.out is not None
        assert torch.equal(given.out, own)
        writes(given.problem, program.args(given.problem, given))
        assert not torch.equal(given.out, own)
    assert given.changed(before) == ()
    assert given.guards_intact()


def test_the_last_timed_call_begins_with_c_too() -> None:
    problem = Problem.parse(ADDEND)
    given, worker, backend = tensors.make(problem, "rand", 0), Inline(), AtenBackend()
    number = worker.prepare(Job(backend, problem, DEFAULT), given).number
    bench.keep(worker, number, 0, "aten", given)
    try:
        bench.window(worker, number, paired.Plan(blocks=5, warm_seconds=0.0, max_seconds=0.1), stays=False)
        (last,) = bench.last(worker, number)
    finally:
        bench.drop(worker, number)
    given.reset_out()
    assert torch.allclose(last, right(problem, program.args(problem, given)), rtol=1e-4, atol=1e-4)


def test_the_script_of_a_failure_begins_with_the_values_that_c_had(tmp_path: Path, programs: Programs) -> None:
    problem, backend = Problem.parse(OVER_A), AtenBackend()
    case = Case(backend, problem, ("rand",), 0, Device.CPU)
    (one,) = [one for one in Judge().judge(case) if one.evidence is not None][:1]
    assert one.evidence is not None
    script = repro.script(one.outcome, backend.recipe(problem, one.evidence.operands), one.evidence)
    assert torch.equal(script.tensors["a"], one.evidence.operands.a)
    (tmp_path / "repro.py").write_text(script.text)
    torch.save(script.tensors, tmp_path / "repro.pt")
    command = [programs.python, "-c", "import runpy; runpy.run_path('repro.py', run_name='__main__')"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr


@pytest.mark.parametrize(("op", "flag"), [("addmm", "out.addend"), ("bmm", "out.alias"), ("linear", "bias.offset")])
def test_fuzzing_draws_the_flags_with_what_they_need(op: str, flag: str) -> None:
    unshrunk = settings(max_examples=20_000, phases=[Phase.generate], database=None)
    seed = random.Random(5)  # which soon draws each; any other one does so later
    found = find(strategies.problems(ops=[op]), lambda problem: problem.has(flag), settings=unshrunk, random=seed)
    assert found.has(flag)
