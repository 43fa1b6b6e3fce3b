"""A kernel that drops the rest of a dimension behind its tile meets a problem that has one, in every op and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest
import torch
from oracle import judged

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
# Where no backend takes a tail: the codes of the rules by which eager ATen, on a CPU and on CUDA, refuses it; by
# "grammar" no problem line has one, because K consists of groups.
REFUSED = {
    ("da8w4", "k"): {"grammar"},
    ("woq", "k"): {"grammar"},  # of Q8_0 and NF4
    ("woq_int4", "k"): {"grammar"},
    ("woq_int4", "n"): {"int4-shape"},
    ("grouped_mm", "k"): {"alignment"},
    ("grouped_mm_n", "k"): {"alignment"},
    ("grouped_bmm", "k"): {"alignment"},
    ("scaled_grouped_mm", "n"): {"op", "scaled-mm-shape", "scales"},
    ("scaled_grouped_mm", "k"): {"alignment"},
    ("scaled_grouped_mm_n", "n"): {"op", "scaled-mm-shape"},
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
    return int(getattr(problem.shape, dimension)) % TILE != 0


@functools.cache
def by_kind(level: str) -> dict[tuple[str, str], list[Problem]]:
    found = defaultdict(list)
    for problem in matrix.products(level):
        found[problem.op.name, str(problem.dtypes)].append(problem)
    return found


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


@pytest.mark.parametrize("kind", by_kind("quick"), ids=":".join)
@pytest.mark.parametrize("dimension", ["m", "n", "k"])
def test_the_quick_level_has_a_tail_that_a_backend_takes(kind: tuple[str, str], dimension: str) -> None:
    problems = by_kind("quick")[kind]
    if any(has_tail(p, dimension) and None in refusals(p) for p in problems):
        return
    assert (kind[0], dimension) in REFUSED
    codes: set[str] = set()
    for problem in with_tail(problems, dimension):
        said = list(refusals(problem))
        assert None not in said, problem
        codes |= {refused.reason.code for refused in said[:2] if refused is not None}
    assert (codes or {"grammar"}) == REFUSED[kind[0], dimension]


def test_the_smoke_level_has_a_tail_of_k_for_each_of_its_ops() -> None:
    ops = {problem.op.name for problem in matrix.products("smoke")}
    tails = {p.op.name for p in matrix.products("smoke") if has_tail(p, "k") and None in refusals(p)}
    assert ops - tails == {op for op, dimension in REFUSED if dimension == "k"} & ops


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("op", sorted({problem.op.name for problem in matrix.products("smoke")}))
def test_a_kernel_that_drops_the_rest_of_k_is_caught_at_smoke(op: str) -> None:
    backend = CallableBackend("tailless", without_tail, dtypes=DTYPES)
    problems = [p for p in matrix.products("smoke") if p.op.name == op and backend.supports(p) is None]
    if (op, "k") in REFUSED or not problems:
        return
    judge = Judge(lambda *_: "PyTorch's own kernel of woq_int8 reads beyond a tail")
    assert Status.INCORRECT in {one.status for p in problems for one in judged(backend, p.line, judge=judge)}
