"""Products that PyTorch makes of something else: gradients of a linear, convolutions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mutants import Mutant, Plant, Planted, Tensors, whole
from studies import mutant_study

from pytest_gemm.api.request import DEFAULT
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device, Mode
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging import verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.numerics.precision import settings
from pytest_gemm.operands import tensors as factory
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

LINES = (
    "linear_dgrad:bf16:nn:17x33x65", "linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f16:tn:33x24x17:add",
    "linear_wgrad:f32:tn:24x40x33", "conv2d:f32:tt:2x36x24x40:bias+relu", "conv2d:bf16:nt:35x24x40:bias",
    "conv2d:f16:tt:1x24x40",
)  # fmt: skip


def is_right(given: Operands, actual: torch.Tensor, contract: Contract | None = None) -> bool:
    contract = contract or Contract("f32", "eager")
    interval = interval_module.interval(given.problem, given, reference.reference(given.problem, given), contract)
    return verdict.compare(actual, interval, given.problem, given).ok


@pytest.mark.parametrize("line", LINES)
def test_eager_is_right_on_every_distribution(line: str) -> None:
    problem = Problem.parse(line)
    for distribution in distributions_for(problem):
        given = factory.make(problem, distribution, 0)
        assert is_right(given, AtenBackend().prepare(problem, given).run(given)), distribution


@pytest.mark.parametrize("line", LINES[:4])
def test_a_gradient_is_the_one_that_backward_gives(line: str) -> None:
    given = factory.make(Problem.parse(line.replace(":relu", "").replace(":add", "")), "int-2", 0)
    inner = given.problem.op.name == "linear_dgrad"
    gradient = given.a if inner else given.a.mT
    rows = gradient.shape[0]
    x = torch.zeros(rows, given.b.shape[1], dtype=given.a.dtype) if inner else given.b
    weight = given.b if inner else torch.zeros(gradient.shape[1], given.b.shape[1], dtype=given.a.dtype)
    leaf = (x if inner else weight).detach().clone().requires_grad_()
    torch.nn.functional.linear(*((leaf, weight) if inner else (x, leaf))).backward(gradient)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, program.build(given.problem)(**program.args(given.problem, given)))


def test_the_formats_of_an_image_are_those_of_pytorch() -> None:
    for layout, format_ in (("tt", torch.contiguous_format), ("nt", torch.channels_last)):
        given = factory.make(Problem.parse(f"conv2d:f32:{layout}:2x36x24x40"), "int-2", 0)
        assert given.a.mT.unflatten(-1, (6, 6)).is_contiguous(memory_format=format_)


WINDOWS = ["conv2d_3x3:f32:tt:2x35x24x20:bias+relu", "conv2d_3x3:bf16:nt:36x24x20", "conv2d_3x3:f16:nt:2x7x9x11:bias"]


@pytest.mark.parametrize("line", WINDOWS)
def test_a_convolution_of_windows_is_right(line: str) -> None:
    problem = Problem.parse(line)
    found = distributions_for(problem)
    assert "specials" not in found
    case = Case(AtenBackend(), problem, found, 0, Device.CPU)
    outcomes = [one.outcome for one in mutant_study.judge().judge(case)]
    assert {outcome.status for outcome in outcomes} == {Status.PASSED}, outcomes


def _convolved(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    """A convolution of 3x3 and 2x35 pixels, of an image between zeros and filters that are changed first."""

    def run(t: Tensors, _: Problem) -> torch.Tensor:
        image = torch.nn.functional.pad(t["a"].mT.unflatten(-1, (5, 7)).double(), (1, 1, 1, 1))
        image, weight = change(image, t["b"].unflatten(1, (-1, 3, 3)).double())
        made = torch.nn.functional.conv2d(image, weight, t["bias"].double()).relu()
        return made.flatten(-2).mT.to(t["a"].dtype)

    return whole(run)


def _wraps(image: torch.Tensor) -> torch.Tensor:
    """Left of the first column of pixels stands the last one."""
    image = image.clone()
    image[..., 0] = image[..., -2]
    return image


def _without_a_corner(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.clone()
    weight[..., 2, 2] = 0
    return weight


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "a convolution in place of a correlation": lambda image, weight: (image, weight.flip(-1, -2)),
    "rows and columns of the filters exchanged": lambda image, weight: (image, weight.mT),
    "the edge repeated": lambda image, weight: (
        torch.nn.functional.pad(image[..., 1:-1, 1:-1], (1, 1, 1, 1), mode="replicate"), weight
    ),
    "the row before read at the edge": lambda image, weight: (_wraps(image), weight),
    "one corner of the window lost": lambda image, weight: (image, _without_a_corner(weight)),
    "the last channel lost": lambda image, weight: (image[:, :-1], weight[:, :-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, ""])
def test_a_mutant_of_windows_is_caught(name: str) -> None:
    change = WRONG.get(name, lambda image, weight: (image, weight))
    backend = Planted("mutant", Mutant(name, _convolved(change), {"": WINDOWS[0]}))
    caught = mutant_study.caught(mutant_study.judge(), backend, WINDOWS[0])
    if not name:
        assert caught is None
        return
    assert caught is not None
    assert caught.tier not in {"", "exception"}, caught.outcome.reason


def test_cudnn_is_not_asked_for_windows() -> None:
    problem = Problem.parse(WINDOWS[0])
    refusal = AtenBackend().unsupported(problem, "cuda")
    assert refusal is not None
    assert "Winograd" in refusal.reason.text
    assert TritonBackend().options(problem)["max_autotune_conv_backends"] == "TRITON"
    with pytest.raises(ProblemError, match="without pixels, channels or filters"):
        Problem.parse("conv2d_3x3:f32:tt:1x0x4x4")


@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:4x4x4:m.dynamic", "conv2d:f32:nt:4x4x4:m.dynamic"])
def test_sizes_are_fixed(line: str) -> None:
    with pytest.raises(ProblemError, match="has fixed sizes"):
        Problem.parse(line)


def test_who_computes_a_convolution() -> None:
    problem = Problem.parse("conv2d:bf16:nt:2x35x24x40")
    assert "oneDNN" in str(CppBackend().supports(problem))
    assert TritonBackend().supports(problem) is None
    assert TritonBackend().options(problem)["max_autotune_conv_backends"] == "TRITON"


def test_a_convolution_is_not_cut_to_tf32() -> None:
    before = torch.backends.cudnn.allow_tf32
    with settings(Problem.parse("conv2d:f32:nt:4x4x4")):
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.slow
@pytest.mark.parametrize("line", ["linear_dgrad:f32:nn:33x24x40:relu", "linear_wgrad:f32:tn:24x40x33:relu"])
def test_compiled_gradients_are_products_of_pytorch(line: str) -> None:
    problem = Problem.parse(line)
    given = factory.make(problem, "int-2", 0)
    prepared = AtenBackend().prepare(problem, given, DEFAULT.replace(mode=Mode.STATIC))
    assert is_right(given, prepared.run(given), prepared.contract)
    assert any("mm" in name for name in prepared.proof().executed)


@pytest.mark.slow
def test_a_gradient_of_a_constant_weight_is_a_product_of_the_template() -> None:
    problem = Problem.parse("linear_dgrad:f32:nn:33x24x40:relu")
    given = factory.make(problem, "int-2", 0)
    prepared = CppBackend(threads=1).prepare(problem, given)
    assert is_right(given, prepared.run(given), prepared.contract)
    assert not prepared.proof().foreign


@pytest.mark.parametrize("line", ["conv2d_3x3:f32:nt:1x1x1:relu", "conv2d_3x3:bf16:nt:2x4x2x3:relu"])
def test_a_small_result_of_windows_is_not_all_silenced_by_a_relu(line: str) -> None:
    for seed in range(8):
        o = factory.make(Problem.parse(line), "rand", seed)
        assert reference.reference(o.problem, o).c.sum() >= 0
