"""The backend ``inductor``: what ``max-autotune`` selects, proved and judged by its own arithmetic; dynamic sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from pytest_gemm.api.proof import Proof
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import CompiledAten
from pytest_gemm.backends.inductor.artifact import InductorPrepared
from pytest_gemm.backends.inductor.selected import WRITTEN_OUT, SelectedPrepared
from pytest_gemm.backends.max_autotune import MaxAutotuneBackend
from pytest_gemm.core.case_id import Mode
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

# Inductor's benchmark of several candidates; a run of the suite has no warnings that are errors.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def judged(prepared: InductorPrepared, line: str, distribution: str = "int-2") -> None:
    """Run a problem of exact sums and compare with the product in f64."""
    given = tensors.make(Problem.parse(line), distribution, 0)
    result = prepared.run(given)
    product = given.a.double() @ given.b.double()
    if given.bias is not None:
        product = product + given.bias.double()
    if "relu" in line:
        product = product.relu()
    torch.testing.assert_close(result.double(), product, rtol=0.01, atol=0.01)
    assert prepared.proof().objection() is None


# -- options -------------------------------------------------------------------------------------------------


def test_the_options_are_those_of_the_mode() -> None:
    problem = Problem.parse("linear:f32:nt:17x65x127:bias")
    options = MaxAutotuneBackend(threads=1).options(problem)
    assert options["max_autotune"] is True
    assert options["coordinate_descent_tuning"] is True
    assert options["freezing"] is True
    assert "max_autotune_gemm_backends" not in options  # the release's, or the environment's


def test_a_program_that_pytorch_makes_no_graph_of_is_not_taken_for_a_replay() -> None:
    # On the CPU it skips the graph while it compiles, as on CUDA at the first call where an input is written.
    problem = Problem.parse("mm:f32:nt:17x33x65:b.argument:out.given")
    with pytest.raises(Unsupported, match="no CUDA graph"):
        MaxAutotuneBackend().artifact(problem, tensors.make(problem, "rand", 0), BuildRequest(mode=Mode.CUDAGRAPHS))


# -- proofs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "foreign", "library", "kernels", "code"),
    [
        (["CppMicroGemmFP32Vec-8x48x1"], [], (), {"cpp_fused_mm_0": True}, ""),
        # A template that was selected has to have run, and a library that was selected as well.
        (["CppMicroGemmFP32Vec-8x48x1"], [], ("aten.mm.out",), {"cpp_fused_relu_0": False}, "another-candidate"),
        (["mm"], ["mm"], ("aten.mm.out", "extern_kernels.mm"), {}, ""),
        (["mm"], ["mm"], (), {"cpp_fused_mm_0": True}, "another-candidate"),
        ([], [], (), {"cpp_fused_mm_0": True}, "nothing-chosen"),
        ([], [], (), {}, "nothing-generated"),
    ],
)
def test_what_was_selected_has_to_have_run(
    chosen: list[str], foreign: list[str], library: tuple[str, ...], kernels: dict[str, bool], code: str
) -> None:
    """By what was selected, what of it is a library's, and what the program calls and defines."""
    templates = tuple(name for name, is_template in kernels.items() if is_template)
    own = tuple(name for name in chosen if name not in foreign)
    proof = Proof(own, templates, templates, foreign=(*library, *foreign))
    session = SimpleNamespace(chosen=chosen, foreign=foreign)
    compiled = SimpleNamespace(session=session, order=tuple(kernels), kernels=kernels, templates=templates)
    artifact: Any = SimpleNamespace(proof=lambda: proof, library=library, _compiled=compiled)
    found = SelectedPrepared(Problem.parse("mm:f32:nn:8x8x8"), artifact, Contract()).proof()
    objection = found.objection()
    assert (objection.code if objection else "") == code
    if foreign and not code:
        assert found.kernels == ("aten.mm.out (mm)",)


# -- compiled ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backends", "starts", "epilogue"), [("ATEN", "_mkl_linear", "either"), ("CPP", "CppMicro", "fused")]
)
def test_the_contract_follows_what_was_selected(backends: str, starts: str, epilogue: str) -> None:
    line = "linear:f32:nt:17x65x127:bias+relu"
    given = tensors.make(Problem.parse(line), "int-2", 0)
    with inductor_config.patch(max_autotune_gemm_backends=backends):
        prepared = MaxAutotuneBackend(threads=1).prepare(Problem.parse(line), given)
    (chosen,) = prepared.artifact.chosen
    assert chosen.startswith(starts)
    assert prepared.contract.epilogue == epilogue
    judged(prepared, line)


@pytest.mark.parametrize(("library", "skips"), [((), True), (("aten.bmm.out",), False)])
def test_what_inductor_writes_out_may_skip_the_conversions_of_autocast(library: tuple[str, ...], skips: bool) -> None:
    """No rule has to foresee it: on CUDA the mode writes out a product of one row, whatever its other sizes."""
    spec = SimpleNamespace(request=SimpleNamespace(device="cpu"))
    artifact: Any = SimpleNamespace(chosen=(), library=library, spec=spec)
    contract = MaxAutotuneBackend().contract(Problem.parse("bmm:f32-f32-f16:nt:3x5x64x64"), artifact)
    assert (contract.input_error > 0) is skips


@pytest.mark.slow
def test_a_product_that_inductor_writes_out_is_proved_by_its_kernel() -> None:
    line = "mm:f32:nn:5x7x1"
    made = MaxAutotuneBackend(threads=1)
    prepared = made.prepare(Problem.parse(line), tensors.make(Problem.parse(line), "int-2", 0))
    judged(prepared, line)
    assert prepared.proof().chosen == (WRITTEN_OUT,)


@pytest.mark.slow
def test_a_compile_for_other_weights_leaves_the_operand_that_is_written_over() -> None:
    line = "mm:f32:nn:33x66x66:out.given+alias"
    problem = Problem.parse(line)
    with inductor_config.patch(max_autotune_gemm_backends="ATEN"):  # MKL packs the weight
        prepared = MaxAutotuneBackend(threads=1).prepare(problem, tensors.make(problem, "int-2", 0))
        other = tensors.make(problem, "rand", 1)
        expected = other.a @ other.b
        torch.testing.assert_close(prepared.run(other), expected)


@pytest.mark.slow
def test_all_are_benchmarked_against_one_another_and_other_weights_are_no_reason_to_do_so_again() -> None:
    line = "linear:f32:nt:17x49x65:bias:m.dynamic"  # oneDNN packs its weight: it cannot be bound again
    made = MaxAutotuneBackend(threads=1)
    prepared = made.prepare(Problem.parse(line), tensors.make(Problem.parse(line), "int-2", 0))
    judged(prepared, line)
    assert len(prepared.timings) == 2
    first = prepared.artifact.chosen
    prepared.artifact.rebind_reason = prepared.artifact.rebind_reason or "for this test"
    prepared.artifact._contents = {name: torch.zeros(1) for name in ("b", "bias")}
    judged(prepared, line, "int-1")
    assert made.log.compiles >= 2
    assert prepared.artifact.chosen == first
    assert not prepared.timings


# -- dynamic sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mm:f32:nn:17x65x127:n.dynamic", "n.dynamic is about the sizes of an argument, and B is a constant"),
        ("linear:f32:nt:17x65x127:batch.dynamic", "batch.dynamic needs a batch"),
        ("bmm:f32:nn:3x17x65x127:b.constant:batch.dynamic", "batch.dynamic is about the sizes of arguments"),
        ("mm:f32:nn:17x64x64:add:b.argument:r0.alias:k.dynamic", "k.dynamic and r0.alias contradict each other"),
        ("mm:f32:nn:17x65x127:view-1105:b.argument:n.dynamic", "view-1105 has fixed sizes, and n.dynamic any N"),
        ("qlinear:u8-i8-f32:nt:17x64x64:quant.static-0.02_7:k.dynamic", "qlinear does not take k.dynamic"),
    ],
)
def test_what_contradicts_a_dynamic_size(line: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message.replace(".", r"\.")):
        Problem.parse(line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        (
            Mode.STATIC,
            [
                f"bmm:f32:nn:{shape}:m.dynamic:n.dynamic:k.dynamic:batch.dynamic"
                for shape in ("3x17x65x127", "2x5x8x300")
            ],
        ),
        (Mode.STATIC, [f"linear:f32:nt:{batch}x17x65x127:bias:batch.dynamic" for batch in (2, 6)]),
        (Mode.STATIC, [f"mm:f32:tt:17x65x{k}:a.padded:b.padded+argument:k.dynamic" for k in (2, 127, 1000)]),
        (Mode.DYNAMIC, [f"linear:f32:nt:{m}x33x40:bias:m.dynamic" for m in (17, 96)]),
    ],
)
def test_one_artifact_serves_every_size(mode: Mode, lines: list[str]) -> None:
    made = CompiledAten(threads=1)
    for line in lines:
        problem = Problem.parse(line)
        given = tensors.make(problem, "int-2", 0)
        result = made.prepare(problem, given, BuildRequest(mode=mode)).run(given)
        product = given.a.double() @ given.b.double()
        torch.testing.assert_close(result.double(), product if given.bias is None else product + given.bias.double())
    assert made.log.compiles == 1
