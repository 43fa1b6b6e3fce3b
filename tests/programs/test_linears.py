"""Several linears of one input: what a line means, what is right, and that one template computed them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mutants import Mutant, Planted, whole
from oracle import computed, exact, is_right, judged, make

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Status
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.speed.roofline import work


def wrong(given: Operands, actual: torch.Tensor) -> bool:
    return not is_right(given, actual, Contract("f32", "either"))


@pytest.mark.parametrize("text", [
    "linears:f64:nt:3x4x5x6", "linears:f64:nt:3x4x5x6:bias+relu:bias.last:steps.first",
    "linears:f64:tt:2x4x5x6:bias+gated-silu+add", "linears:f64:nt:2x4x5x6:bias+add:a.padded+3d:b.offset:bias.first",
    "linears:f64:nt:2x4x5x6:gated-gelu+mul:a.3d:out.2d",
])  # fmt: skip
def test_the_program_is_what_a_user_writes_and_lies_in_the_interval(text: str) -> None:
    given = make(text)
    p, count = given.problem, given.problem.shape.batch or 0
    assert Problem.parse(str(p)) == p
    found = []
    for index in range(count):
        y = given.a @ given.b[index]
        if given.bias is not None and not (p.has("bias.last") and index == 0) and not (p.has("bias.first") and index):
            y = y + given.bias[index]
        if p.step("relu") and index == 0:
            y = y.relu()
        if p.step("add") and p.several:
            y = y + given.residuals[0][index]
        found.append(y)
    expected = torch.stack(found)
    if (gate := p.step("gated")) is not None:
        gated = (F.silu if gate.text == "silu" else F.gelu)(found[0]) * found[1]
        expected = gated + given.residuals[0] if p.step("add") else gated * given.residuals[0]
    actual = computed(given, None)
    assert actual.shape == p.result_shape
    torch.testing.assert_close(actual, expected)
    assert not wrong(given, actual)


SILU = "linears:f32:nt:2x17x65x97:bias+gated-silu"
PLAIN = "linears:bf16:nt:3x16x32x52:bias+relu:bias.first:steps.last"


@pytest.mark.parametrize(("text", "changed"), [
    (SILU, lambda t: {"b1": t["b0"]}), (PLAIN, lambda t: {"b2": t["b1"]}), (PLAIN, lambda t: {"bias1": t["bias0"]}),
    (PLAIN, lambda t: {"bias0": torch.zeros_like(t["bias0"])}),
])  # fmt: skip
def test_weights_and_biases_of_other_products_are_found_out(
    text: str, changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    given = make(text)
    assert not wrong(given, computed(given))
    assert wrong(given, computed(given, **changed(program.args(given.problem, given))))


def test_a_step_that_another_product_has_too_is_found_out() -> None:
    given = make(PLAIN)
    assert wrong(given, computed(given).relu())


@pytest.mark.parametrize("text", ["linears:f16:nt:2x17x65x97:gated-relu", PLAIN, SILU])
def test_an_exact_product_is_right_on_every_kind_of_values(text: str) -> None:
    outcomes = judged(CallableBackend("mine", exact), text)
    assert {outcome.status for outcome in outcomes} == {Status.PASSED}, outcomes


def test_a_function_computes_one_product_after_the_other_and_their_number_is_checked() -> None:
    registry, shapes = Registry(), []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return a @ b

    registry.add_callable("mine", matmul, batched=False)
    (outcome,) = judged(registry["mine"], "linears:f32:nt:3x16x8x12:bias:a.3d", "rand")
    assert outcome.status is Status.PASSED
    assert set(shapes) == {((16, 12), (12, 8))}

    bare = "linears:f32:nt:3x16x8x12"
    two = Mutant("", whole(lambda t, _: tuple(t["a"] @ t[f"b{index}"].mT for index in range(2))), {"": bare})
    (outcome,) = judged(Planted("short", two), bare, "rand")
    assert outcome.reason is not None
    assert (outcome.reason.code, "2 results" in outcome.reason.text) == ("wrong-outputs", True)


def test_each_weight_begins_where_a_tensor_of_its_own_would() -> None:
    given = make("linears:bf16:nt:3x4x5x7:bias")
    first = given.b[0].storage_offset()
    assert all((given.b[i].storage_offset() - first) * 2 % 64 == 0 for i in range(3))
    assert given.guards_intact()


def test_one_input_is_read_once() -> None:
    found = work(Problem.parse("linears:f32:nt:3x10x20x30"))
    assert (found.flops, found.bytes) == (2 * 3 * 10 * 20 * 30, 4 * (10 * 30 + 3 * 20 * 30 + 3 * 10 * 20))


@pytest.mark.compiler
def test_a_package_has_its_own_candidates_and_nothing_is_compiled_for_their_list() -> None:
    problem = Problem.parse("linears:f32:nt:2x17x33x48")  # with a fixed M, which MKL would compute outside of a package
    packaged = CppBackend(threads=2)
    names = packaged.candidates(problem, factory.make(problem, "rand", 0), BuildRequest(mode=Mode.AOTI)).names
    assert all(",grouped" in name for name in names)
    assert any(name.startswith(f"{names[0]},") for name in names)
    assert packaged.log.compiles == 0


@pytest.mark.slow
def test_the_grouped_template_computes_them_and_singles_are_no_proof() -> None:
    problem = Problem.parse("linears:f32:nt:2x17x33x48:bias+gated-silu:bias.last:m.dynamic")
    backend = CppBackend(threads=2)
    outcomes = judged(backend, problem.line, "int-2", "rand", candidates="winner")
    assert [o.status for o in outcomes] == [Status.PASSED, Status.PASSED], outcomes
    assert ",grouped)" in outcomes[0].kernels[0]
    assert backend.log.compiles == 1  # both weights are bound again

    given = factory.make(problem, "rand", 0)
    pick, *others = backend.candidates(problem, given).names
    assert outcomes[0].chosen == (pick,)
    assert all(re.fullmatch(r"CppMicroGemm\w+-\d+x\d+x1,grouped(,threads=\d)?", name) for name in (pick, *others))
    other = others[0].removesuffix(",grouped")  # the micro-kernel's own name will do
    (outcome,) = judged(backend, problem.line, "rand", candidates=other)
    assert (outcome.status, outcome.chosen) == (Status.PASSED, (others[0],))
    (code,) = outcome.configuration
    assert code.startswith(f"{other}:")
    assert code.endswith(",grouped=2")

    class Singles(CppBackend):
        def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, object]:
            return {**super().options(problem, request), "cpp.enable_grouped_gemm_template": False}

    (outcome,) = judged(Singles(threads=2), problem.line, "rand")
    assert outcome.status is Status.FALLBACK
    assert outcome.code == "other-template"
