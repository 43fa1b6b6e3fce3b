"""Several linears of one input: what a line means, what is right, and that one template computed them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import is_right, make, refuses_line

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import DEFAULT, BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.inductor.backend import InductorBackend
from pytest_gemm.core.case_id import CandidateSelection, Device, Mode
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.speed.roofline import work


def wrong(given: Operands, actual: torch.Tensor) -> bool:
    return not is_right(given, actual, Contract("f32", "either"))


def computed(given: Operands) -> torch.Tensor:
    results = program.build(given.problem)(**program.args(given.problem, given))
    (one,) = program.gathered(given.problem, results if isinstance(results, tuple) else (results,))
    assert isinstance(one, torch.Tensor)
    return one


@pytest.mark.parametrize(("text", "words"), [
    ("linears:f32:nt:17x65x97", "needs a batch"), ("linears:f32:nt:1x17x65x97", "two or more"),
    ("linears:f32:nn:2x17x65x97", "cannot be nn"), ("linears:f32:nt:3x17x65x97:gated-silu", "joins two products"),
    ("linear:f32:nt:2x17x65x97:gated-silu", "linear takes no gated; these do: linears"),
    ("linears:f32:nt:2x17x65x97:relu+gated-silu", "gated go first"),
    ("linears:f32:nt:2x17x65x97:gated-tanh", "one of silu gelu"),
    ("linears:f32:nt:2x17x65x97:bias.first", "needs a bias"),
    ("linears:f32:nt:2x17x65x97:relu:steps.first+last", "contradict"),
    ("linears:f32:nt:2x17x65x97:gated-silu:steps.first", "no step of one product"),
    ("linears:f32:nt:2x17x65x97:a.3d", "even M"), ("linears:f32:nt:2x16x65x97:out.2d", "add a.3d"),
    ("linear:f32:nt:16x65x97:a.3d", "use linears"), ("mm:f32:nn:16x16x16:a.batch_middle", "use bmm"),
    ("bmm:f32:nn:3x16x16x16:b.broadcast+batch_middle", "contradict"), ("mm:f32:nn:16x16x8:b.alias", "write 16x16x16"),
    ("bmm:f32:nt:3x16x16x16:b.alias", "nn or tt"), ("mm:f32:nn:16x16x16:b.argument+parameter", "drop b.argument"),
])  # fmt: skip
def test_a_line_that_contradicts_itself_is_refused(text: str, words: str) -> None:
    refuses_line(text, words)


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
    actual = computed(given)
    assert actual.shape == p.result_shape
    torch.testing.assert_close(actual, expected)
    assert not wrong(given, actual)


SILU = "linears:f32:nt:2x17x65x97:bias+gated-silu"
PLAIN = "linears:bf16:nt:3x16x32x52:bias+relu:bias.first:steps.last"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("text", "spoil"),
    [
        (SILU, lambda t: {**t, "b0": t["b1"], "b1": t["b0"]}),
        (SILU, lambda t: {**t, "bias1": t["bias0"]}),
        (SILU, lambda t: {**t, "b1": t["b0"]}),
        (PLAIN, lambda t: {**t, "b2": t["b1"]}),
        (PLAIN, lambda t: {k: v for k, v in t.items() if k != "bias0"}),
        (PLAIN, lambda t: {**t, "bias1": t["bias0"]}),
    ],
)
def test_weights_and_biases_of_other_products_are_found_out(text: str, spoil: Callable[[Tensors], Tensors]) -> None:
    given = make(text)
    assert not wrong(given, computed(given))
    results = program.build(given.problem)(**spoil(program.args(given.problem, given)))
    (actual,) = program.gathered(given.problem, results if isinstance(results, tuple) else (results,))
    assert wrong(given, actual)


def test_a_step_that_another_product_has_too_is_found_out() -> None:
    given = make(PLAIN)
    assert wrong(given, computed(given).relu())


@pytest.mark.parametrize("distribution", ["specials", "rand-wide", "rand-large", "int-2"])
@pytest.mark.parametrize("text", ["linears:f16:nt:2x17x65x97:gated-relu", PLAIN, SILU])
def test_eager_is_right_on_every_kind_of_values(text: str, distribution: str) -> None:
    problem = Problem.parse(text)
    if distribution not in distributions_for(problem):
        return
    (outcome,) = Judge().outcomes(Case(AtenBackend(), problem, (distribution,), 0, Device.CPU))
    assert outcome.status is Status.PASSED, outcome.details


def test_a_function_computes_one_product_after_the_other_and_their_number_is_checked() -> None:
    registry, shapes = Registry(), []

    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return a @ b

    registry.add_callable("mine", matmul, batched=False)
    problem = Problem.parse("linears:f32:nt:3x16x8x12:bias:a.3d")
    (outcome,) = Judge().outcomes(Case(registry["mine"], problem, ("rand",), 0, Device.CPU))
    assert outcome.status is Status.PASSED
    assert set(shapes) == {((16, 12), (12, 8))}

    class Forgets:
        contract = Contract("f32", "eager")

        def run(self, operands: Operands) -> tuple[torch.Tensor, ...]:
            return tuple(operands.a @ b for b in operands.b[:2])

        def proof(self) -> Proof:
            return Proof(provable=False)

    class Short(type(registry["mine"])):  # type: ignore[misc]  # a backend like the other
        def prepare(self, problem: Problem, operands: Operands, request: object = None) -> Forgets:
            return Forgets()

    short = Short("short", matmul, frozenset({"f32"}), True, None, True)
    bare = dataclasses.replace(problem, flags=(), epilogue=())
    (outcome,) = Judge().outcomes(Case(short, bare, ("rand",), 0, Device.CPU))
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


def test_what_is_put_together_is_claimed_and_the_rest_has_its_reason() -> None:
    cpp = CppBackend()

    def code(text: str, mode: str = "") -> str:
        refusal = cpp.supports(Problem.parse(text), BuildRequest(mode=Mode(mode)))
        return "" if refusal is None else refusal.reason.code

    bf16 = "" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "isa"
    assert code("linears:f32:nt:2x16x32x52:gated-silu:m.dynamic") == ""
    assert code("linears:f32:nt:2x16x32x52:gated-silu") == "mkl-linear"
    assert code("linears:f32:nt:2x16x32x52:gated-silu", "aoti") == code("linears:f32:nt:2x16x32x52", "dynamic") == ""
    assert code("linears:bf16:nt:2x16x32x52") == code("linears:f32-f32-bf16:nt:2x16x32x52:bias") == bf16
    assert code("linears:f32:nt:2x16x32x52:b.argument:m.dynamic") == "weight-not-constant"
    assert code("mm:f32:nn:16x32x52:b.parameter") == "weight-not-constant"
    assert code("mm:f32:nn:16x32x52:b.parameter", "aoti") == ""
    assert (
        code("bmm:f32:nn:3x16x32x52:b.constant+parameter") == code("bmm:f32:nn:3x16x32x52:b.constant", "dynamic") == ""
    )
    assert code("bmm:f32:nn:3x16x32x52:b.constant+parameter", "dynamic") == "dynamic-nk"
    assert code("bmm:f32:nn:3x16x32x52:b.batch_middle") == ""
    assert code("bmm:f32:nn:3x16x32x52:a.batch_middle") == "a-strided"


@pytest.mark.parametrize(
    ("dtype", "level", "code"),
    [("f16", "avx512_vnni", "isa"), ("f16", "amx", ""), ("bf16", "avx2", "isa"), ("bf16", "avx512", "")],
)
def test_half_types_are_put_together_from_the_level_on_at_which_onednn_computes_them(
    monkeypatch: pytest.MonkeyPatch, dtype: str, level: str, code: str
) -> None:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: True)
    problem = Problem.parse(f"linears:{dtype}:nt:2x16x32x52")
    refusal = InductorBackend.supports(CppBackend(), problem, BuildRequest(isa=level))  # whatever this CPU executes
    assert (refusal.reason.code if refusal else "") == code


@pytest.mark.compiler
def test_a_package_has_its_own_candidates_and_nothing_is_compiled_for_their_list() -> None:
    problem = Problem.parse("linears:f32:nt:2x17x33x48")  # with a fixed M, which MKL would compute outside of a package
    packaged = CppBackend(threads=2)
    names = packaged.candidates(problem, factory.make(problem, "rand", 0), BuildRequest(mode=Mode.AOTI)).names
    assert all(",grouped" in name for name in names)
    assert f"{names[0]},cache=2.2.8" in names
    assert packaged.log.compiles == 0


@pytest.mark.slow
def test_the_grouped_template_computes_them_and_singles_are_no_proof() -> None:
    problem = Problem.parse("linears:f32:nt:2x17x33x48:bias+gated-silu:bias.last:m.dynamic")
    backend = CppBackend(threads=2)
    outcomes = Judge().outcomes(Case(backend, problem, ("int-2", "rand"), 0, Device.CPU))
    assert [o.status for o in outcomes] == [Status.PASSED, Status.PASSED], outcomes
    assert ",grouped)" in outcomes[0].kernels[0]
    assert backend.log.compiles == 1  # both weights are bound again

    given = factory.make(problem, "rand", 0)
    pick, *others = backend.candidates(problem, given).names
    assert outcomes[0].chosen == (pick,)
    assert all(re.fullmatch(r"CppMicroGemm\w+-\d+x\d+x1,grouped", name) for name in (pick, *others))
    other = others[0].removesuffix(",grouped")  # the micro-kernel's own name will do
    (outcome,) = Judge().outcomes(Case(backend, problem, ("rand",), 0, Device.CPU, CandidateSelection(other)))
    assert (outcome.status, outcome.chosen) == (Status.PASSED, (others[0],))
    (code,) = outcome.configuration
    assert code.startswith(f"{other}:")
    assert code.endswith(",grouped=2")

    class Singles(CppBackend):
        def options(self, problem: Problem, request: BuildRequest = DEFAULT) -> dict[str, object]:
            return {**super().options(problem, request), "cpp.enable_grouped_gemm_template": False}

    (outcome,) = Judge().outcomes(Case(Singles(threads=2), problem, ("rand",), 0, Device.CPU))
    assert outcome.status is Status.FALLBACK
    assert outcome.code == "other-template"
