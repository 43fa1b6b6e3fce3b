"""What several calls with the same operands show: a race, memory that nothing has written, or neither."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator

import mutants
import pytest
import torch
from mutants import Control, Planted
from torch import Tensor

import pytest_gemm
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome
from pytest_gemm.judging import repeated
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem

LINE = "mm:f32:nn:33x70x200"


def failures(matmul: mutants.Matmul, line: str = LINE) -> list[Outcome]:
    problem, backend = Problem.parse(line), Planted("wrong", Control("wrong", mutants.product(matmul), {"": line}))
    case = Case(backend, problem, distributions_for(problem)[:4], 0, Device.CPU)
    found = [one for one in Judge().outcomes(case) if one.status.is_failure]
    assert found
    return found


def by_call(wrong: Callable[[int, Tensor, Tensor], Tensor]) -> mutants.Matmul:
    """A product that is wrong in a way that its number of calls decides, as chance decides of a race."""
    calls = itertools.count()
    return lambda a, b: wrong(next(calls), a, b)


def of_rows(call: int, a: Tensor, b: Tensor) -> Tensor:
    c = mutants.right(a, b)
    c[torch.randint(len(c), (3,), generator=torch.Generator().manual_seed(call))] = 0
    return c


def of_a_slice(call: int, a: Tensor, b: Tensor) -> Tensor:
    kept = torch.arange(a.shape[1]) // 25 != call * 5 % 8
    return mutants.right(a[:, kept], b[kept])


def every_other(call: int, a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[1] // (1 + call % 2)
    return mutants.right(a[:, :k], b[:k])


def of_a_factor(call: int, a: Tensor, b: Tensor) -> Tensor:
    return mutants.store(mutants.exact(a, b) * (2 + call), a)


def lost_update(call: int, a: Tensor, b: Tensor) -> Tensor:
    """Threads add their part to the result without a lock; which of them is the last one, changes."""
    c, turns = mutants.empty_sum(a, b), [threading.Event() for _ in range(4)]

    def add(number: int, part: Tensor) -> None:
        before = c.clone()
        turns[number].wait()
        c.copy_(before + part)

    parts = [mutants.exact(x, y) for x, y in mutants.blocks(a, b, 50)]
    threads = [threading.Thread(target=add, args=one) for one in enumerate(parts)]
    for thread in threads:
        thread.start()
    for i in range(4):
        turns[(i + call) % 4].set()
        threads[(i + call) % 4].join()
    return mutants.store(c, a)


@pytest.mark.parametrize("wrong", [of_rows, of_a_slice, every_other, of_a_factor, lost_update])
@pytest.mark.parametrize("line", [LINE, "int_mm:i8-i8-i32:nn:33x70x200", "mm:bf16:nt:33x70x200"])
def test_a_race_is_called_one(wrong: Callable[[int, Tensor, Tensor], Tensor], line: str) -> None:
    for one in failures(by_call(wrong), line):
        assert one.cause == repeated.RACE.name, one.details
        assert "products" not in one.details


def test_what_each_call_gets_wrong_alike_keeps_its_cause() -> None:
    """Sums may be added in another order in each call."""

    def tail(call: int, a: Tensor, b: Tensor) -> Tensor:
        order = torch.randperm(192, generator=torch.Generator().manual_seed(call))
        return sum((mutants.exact(a[:, k], b[k]) for k in order.split(16)), mutants.empty_sum(a, b))

    assert {one.cause for one in failures(by_call(tail))} <= {"K tail", ""}


@pytest.fixture
def _glibc() -> Iterator[None]:
    """Fresh memory is no zeros in the first call either, where a result could be right by chance."""
    library, m_perturb = ctypes.CDLL(None), -6
    if not hasattr(library, "mallopt"):
        pytest.skip("the C library cannot fill what it allocates")
    library.mallopt(m_perturb, 0x42 ^ 0xFF)  # bytes of 0x42 are a large number in each type
    yield
    library.mallopt(m_perturb, 0)


def accumulator(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(a.shape[0], b.shape[1], dtype=torch.float64)
    return mutants.store(c.add_(mutants.exact(a, b)), a)


def tail_of_a_workspace(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(a.shape[0], b.shape[1], dtype=torch.float64)
    c[:, :64] = mutants.exact(a, b)[:, :64]
    return mutants.store(c, a)


def padding(a: Tensor, b: Tensor) -> Tensor:
    packed = torch.empty(224, b.shape[1], dtype=torch.float64)
    packed[: len(b)] = b
    return mutants.store(torch.nn.functional.pad(a.double(), (0, 24), value=1.0) @ packed, a)


@pytest.mark.usefixtures("_glibc")
@pytest.mark.parametrize("wrong", [accumulator, tail_of_a_workspace, padding])
@pytest.mark.parametrize("line", [LINE, "int_mm:i8-i8-i32:nn:33x70x200", "mm:f16:nt:33x70x200"])
def test_unwritten_memory_is_named_whatever_it_held(wrong: mutants.Matmul, line: str) -> None:
    names = {one.cause for one in failures(wrong, line)}
    assert names <= {*repeated.NAMES, "stray NaN", "NaN spread"}  # a block that is handed on is not always filled
    assert repeated.UNWRITTEN.name in names


def noise(a: Tensor, b: Tensor) -> Tensor:
    """A race of small errors, which lie within the bounds of inputs as TF32."""
    wrong = torch.rand(a.shape[0], b.shape[1], generator=torch.Generator().manual_seed(next(NUMBERS)))
    return mutants.store(mutants.exact(a, b) * (1 + 1e-4 * wrong), a)


NUMBERS = itertools.count()


def test_the_screen_says_nothing_that_presumes_equal_calls() -> None:
    text = pytest_gemm.check(noise, problem=LINE, dtypes=("f32",), device="cpu").text
    assert text.startswith(f"incorrect: {repeated.RACE.name}")
    assert "; deterministic" not in text
    assert "would be right for" not in text
