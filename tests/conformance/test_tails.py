"""A kernel that drops the rest of a dimension behind its tile meets a problem that has one, in every op and class."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
import torch
from oracle import judged
from studies.reach import class_of

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.request import BuildRequest
from pytest_gemm.backends.aten import AtenBackend
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.backends.max_autotune import MaxAutotuneBackend
from pytest_gemm.conformance import matrix
from pytest_gemm.core.outcome import Status, Unsupported
from pytest_gemm.judging.judge import Judge
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

# What is no tail of any tile: kernels vectorise by 8 elements or multiples of it.
TILE = 8
# Where no backend takes a tail in a class of data types: the codes of the rules by which eager ATen, on a CPU and on
# CUDA, refuses it; by "grammar" no problem line has one, because a dimension consists of groups.
REFUSED = {
    ("da8w4", "k"): {"grammar"},
    ("woq_int4", "k"): {"grammar"},
    ("woq_int4", "n"): {"int4-shape"},
    ("grouped_mm", "k"): {"alignment"},
    ("grouped_mm_n", "k"): {"alignment"},
    ("grouped_bmm", "k"): {"alignment"},
    ("scaled_mm", "n"): {"scaled-mm-shape", "scales"},
    ("scaled_mm", "k"): {"grammar"},
    ("scaled_grouped_mm", "m"): {"grammar"},
    ("scaled_grouped_mm", "n"): {"op", "scaled-mm-shape", "scales"},
    ("scaled_grouped_mm", "k"): {"alignment", "grammar"},
    ("scaled_grouped_mm_n", "k"): {"alignment"},
    ("scaled_grouped_mm_k", "n"): {"op", "scaled-mm-shape"},
    ("scaled_grouped_bmm", "n"): {"op", "scaled-mm-shape", "scales"},
    ("scaled_grouped_bmm", "k"): {"alignment"},
}


def without_tail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product that drops the rest of K."""
    k = a.shape[-1] // TILE * TILE
    whole = a.dtype if a.is_floating_point() else torch.int32
    return a[..., :k].to(whole) @ b[..., :k, :].to(whole)


@functools.cache
def backends() -> tuple[object, ...]:
    """Those of the package that name a source of kernels; `inductor` takes what they take."""
    return tuple(make() for make in BUILTIN if make is not MaxAutotuneBackend)


def refusals(problem: Problem) -> Iterator[Unsupported | None]:
    """What each backend says of a problem, on hardware that has all; eager ATen on a CPU and on CUDA comes first."""
    aten = AtenBackend()
    yield from (aten.unsupported(problem, device) for device in ("cpu", "cuda"))
    for backend in backends():
        if not isinstance(backend, AtenBackend):
            yield backend.supports(problem, BuildRequest(isa="amx" if backend.name == "cpp" else ""))  # type: ignore[attr-defined]


def has_tail(problem: Problem, dimension: str) -> bool:
    """Whether it has one that a backend takes; groups of a divided dimension have sizes of all kinds."""
    is_whole = int(getattr(problem.shape, dimension)) % TILE == 0 and problem.op.ragged != dimension
    return not is_whole and None in refusals(problem)


@functools.cache
def by_kind(level: str) -> dict[tuple[str, str], list[Problem]]:
    """The problems of each op and class of data types."""
    kinds = defaultdict(list)
    for problem in matrix.products(level):
        kinds[problem.op.name, class_of(problem.line)].append(problem)
    return kinds


@functools.cache
def tails(level: str, dimension: str) -> frozenset[tuple[str, str]]:
    """Ops and classes of data types of which a level has a tail that a backend takes."""
    return frozenset(kind for kind, some in by_kind(level).items() if any(has_tail(p, dimension) for p in some))


def with_tail(problems: Iterable[Problem], dimension: str) -> Iterator[Problem]:
    """The problems with other sizes, as far as the grammar has them."""
    for problem in problems:
        for more in range(1, TILE):
            size = getattr(problem.shape, dimension) + more
            shape = dataclasses.replace(problem.shape, **{dimension: size})
            try:
                other = dataclasses.replace(problem, shape=shape)
            except ProblemError:
                continue
            if size % TILE:
                yield other


@pytest.mark.parametrize("dimension", ["m", "n", "k"])
def test_the_full_level_has_each_tail_that_a_backend_takes(dimension: str) -> None:
    codes: dict[str, set[str]] = defaultdict(set)
    for kind in by_kind("full").keys() - tails("full", dimension):
        others = list(with_tail(by_kind("full")[kind][:20], dimension))
        said = [list(refusals(other)) for other in others]
        assert not any(None in answers for answers in said), kind
        eager = {answer.reason.code for answers in said for answer in answers[:2] if answer is not None}
        codes[kind[0]] |= eager or {"grammar"}
    assert codes == {op: reasons for (op, size), reasons in REFUSED.items() if size == dimension}


@pytest.mark.parametrize("dimension", ["m", "n", "k"])
def test_the_quick_level_has_a_tail_of_each_op_and_class(dimension: str) -> None:
    assert sorted(tails("full", dimension) - tails("quick", dimension)) == []


def test_the_smoke_level_has_a_tail_of_k_for_each_of_its_ops() -> None:
    ops = {op for op, _ in by_kind("smoke").keys() & tails("full", "k")}
    assert sorted(ops - {op for op, _ in tails("smoke", "k")}) == []


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("op", sorted({problem.op.name for problem in matrix.products("smoke")}))
def test_a_kernel_that_drops_the_rest_of_k_is_caught_at_smoke(op: str) -> None:
    backend = CallableBackend("tailless", without_tail, dtypes=DTYPES)
    problems = [p for p in matrix.products("smoke") if p.op.name == op and backend.supports(p) is None]
    if not problems or not any(op == name for name, _ in tails("full", "k") & by_kind("smoke").keys()):
        return
    judge = Judge(lambda *_: "PyTorch's own kernel of woq_int8 reads beyond a tail")
    assert Status.INCORRECT in {one.status for p in problems for one in judged(backend, p.line, judge=judge)}
