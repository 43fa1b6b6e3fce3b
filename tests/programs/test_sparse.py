"""sparse_linear: a weight with two zeros in four, whose packed form lacks them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from mutants import Mutant, Planted, corrupted, exact, product, store
from studies import mutant_study
from torch import Tensor
from torch.sparse import _semi_structured_conversions as conversions

from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.cpp.backend import CppBackend
from pytest_gemm.backends.max_autotune import MaxAutotuneBackend
from pytest_gemm.backends.triton import TritonBackend
from pytest_gemm.core.case_id import Device, Mode
from pytest_gemm.operands import tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs.program import args
from pytest_gemm.tools.cli import main

LINE = "sparse_linear:f16:nt:33x64x128:bias"
PROBLEM = Problem.parse(LINE)


def weight(distribution: str) -> Tensor:
    return args(PROBLEM, tensors.make(PROBLEM, distribution, 0))["b"]


@pytest.mark.parametrize("distribution", distributions_for(PROBLEM))
def test_a_weight_can_be_packed(distribution: str) -> None:
    dense = weight(distribution).contiguous()
    packed, places = conversions.sparse_semi_structured_from_dense_cutlass(dense)
    assert packed.shape == (64, 64)
    assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(packed, places), dense)


def test_all_ways_to_keep_two_of_four_are_there() -> None:
    kept = (weight("rand").reshape(-1, 4) != 0).int().tolist()
    ways = Counter(tuple(group) for group in kept)
    assert len([way for way in ways if sum(way) == 2]) == 6
    assert min(count for way, count in ways.items() if sum(way) == 2) > len(kept) / 12
    assert torch.equal(weight("rand"), args(PROBLEM, tensors.make(PROBLEM.resized({"m": 7}), "rand", 0))["b"])


def test_an_infinity_beside_a_zero_that_is_left_out_is_not_asked() -> None:
    assert {"int-2", "rand", "one-hot"} <= set(distributions_for(PROBLEM))
    assert not {"specials", "k-cover", "tile-map"} & set(distributions_for(PROBLEM))


def _pairs(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], Problem], None]:
    """The weight as it is with other places of what is kept."""

    def spoil(t: dict[str, Tensor], _: Problem) -> None:
        t["b"] = change(t["b"].unflatten(1, (-1, 4))).flatten(1)

    return spoil


def _first_two(groups: Tensor) -> Tensor:
    """What is kept stands at the first two places of each four."""
    order = torch.argsort((groups == 0).to(torch.int8), dim=-1, stable=True)
    return groups.gather(-1, order)


def _half_of_k(a: Tensor, b: Tensor) -> Tensor:
    """K is taken for its half, which is what the packed weight has."""
    return store(exact(a[:, : a.shape[1] // 2], b[: b.shape[0] // 2]), a)


MUTANTS = {
    "the places are not read": corrupted(_pairs(_first_two)),
    "the places of the group before": corrupted(_pairs(lambda groups: groups.roll(1, 1))),
    "the last of four is lost": corrupted(
        _pairs(lambda groups: groups * torch.tensor([1, 1, 1, 0], dtype=groups.dtype))
    ),
    "half of K": product(_half_of_k),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    caught = mutant_study.caught(mutant_study.judge(), Planted("mutant", Mutant(name, MUTANTS[name], {"": LINE})), LINE)
    assert caught is not None
    assert caught.tier not in {"", "exception"}, caught.outcome.reason


def test_a_right_product_is_not() -> None:
    backend = Planted("right", Mutant("", corrupted(lambda *_: None), {"": LINE}))
    assert mutant_study.caught(mutant_study.judge(), backend, LINE) is None


def test_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = AtenBackend().unsupported(PROBLEM, Device.CPU)
    assert on_cpu is not None
    assert on_cpu.reason.text == "PyTorch multiplies 2:4 sparse weights on CUDA only"
    for backend in (TritonBackend(), CppBackend(), MaxAutotuneBackend()):
        assert backend.supports(PROBLEM) is not None
    assert AtenBackend().supports(PROBLEM, BuildRequest(mode=Mode.STATIC)) is not None
    assert AtenBackend().supports(PROBLEM) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    assert AtenBackend().unsupported(PROBLEM, Device.CUDA) is None
    odd = AtenBackend().unsupported(Problem.parse("sparse_linear:f16:nt:33x40x128"), Device.CUDA)
    assert odd is not None
    assert "multiples of 16" in odd.reason.text
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    lacking = AtenBackend().unsupported(PROBLEM, Device.CUDA)
    assert lacking is not None
    assert lacking.reason.code == "no-cusparselt"


def test_the_program_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", LINE]) == 0
    assert "packed = torch.sparse.semi_structured.to_sparse_semi_structured(" in capsys.readouterr().out


def test_k_is_a_number_of_groups() -> None:
    with pytest.raises(ProblemError, match="no whole number of groups of 4"):
        Problem.parse("sparse_linear:f16:nt:3x16x18")
