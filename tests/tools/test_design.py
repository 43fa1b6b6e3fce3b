"""The problems that a kernel is judged by, and their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools.design import Design, distributions
from pytest_gemm.tools.first_calls import Said
from pytest_gemm.tools.judgement import Judgement
from pytest_gemm.tools.kernel import Form


def problems(
    refuses: Callable[[Problem], bool] = lambda _: False, form: Form | None = None, op: str = "mm", **said: Any
) -> list[Problem]:
    """The problems that a kernel of f32 and f16 accepts, in their order."""
    judgement = Judgement("k.py:k", op, ["f32", "f16"], "cpu", True, "(a, b)")
    design = Design(judgement, form or Form(), Said(**said))
    accepted = []
    for problem in design:
        if refuses(problem):
            design.refused.add(problem.line)
        else:
            accepted.append(problem)
    return accepted


def _of_length(size: int) -> str:
    bounds = {1: "one", 9: "few", 128: "tile", 513: "tiles"}
    return next((name for bound, name in bounds.items() if size <= bound), "many")


def _facts(problem: Problem) -> set[tuple[str, object]]:
    shape = problem.shape
    facts: dict[str, object] = {"m": _of_length(shape.m), "n": _of_length(shape.n), "k": _of_length(max(shape.k, 2))}
    facts |= {f"{name} tail": getattr(shape, name) % 16 > 0 for name in "mnk"}
    return set((facts | {"layout": str(problem.layout), "dtype": problem.dtypes.a.name}).items())


def test_each_two_facts_meet_in_some_problem() -> None:
    facts = [_facts(one) for one in problems() if not one.shape.is_empty]
    pairs = itertools.combinations(sorted(set().union(*facts), key=str), 2)
    # A length says whether there is a tail.
    wanted = [(x, y) for x, y in pairs if x[0].partition(" ")[0] != y[0].partition(" ")[0]]
    assert len(wanted) > 150
    assert [pair for pair in wanted if not any({*pair} <= each for each in facts)] == []


def test_any_beginning_is_fair() -> None:
    first, later = problems()[:12], problems()[:40]
    assert first[0].line == "mm:f32:nn:64x128x192"
    assert {str(one.layout) for one in first} == {"nn", "nt", "tn", "tt"}
    assert {one.dtypes.a.name for one in first} == {"f32", "f16"}
    assert {0, 1} < {one.shape.k for one in later} | {one.shape.m for one in later}
    assert max(one.shape.k for one in later) > 2048
    assert any(one.shape.batch for one in first)
    assert sum(one.shape.flops for one in problems()) < 4e9


@pytest.mark.parametrize(
    ("refuses", "is_left"),
    [
        (lambda one: str(one.layout) != "nn", lambda one: str(one.layout) == "nn"),
        (lambda one: bool(one.flags), lambda one: not one.flags),
    ],
)
def test_what_is_refused_once_is_left_out(
    refuses: Callable[[Problem], bool], is_left: Callable[[Problem], bool]
) -> None:
    asked: list[Problem] = []

    def noted(problem: Problem) -> bool:
        asked.append(problem)
        return refuses(problem)

    accepted = problems(noted)
    assert len(accepted) > 40
    assert all(map(is_left, accepted))
    # Six places of an operand, each of both, of A and of B; B as A in two ways.
    assert len(asked) - len(accepted) <= 6 * 3 + 2


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ({"multiple_of": (128, 128, 16)}, lambda m, n, k: m % 128 == n % 128 == k % 16 == 0),
        ({"square": True}, lambda m, n, k: m == n == k <= 2056),
        ({"sizes": [(64, 32, 16), (8, 8, 8)]}, lambda *size: size in {(64, 32, 16), (8, 8, 8)}),
    ],
)
def test_sizes_are_those_that_its_user_names(said: dict[str, Any], is_right: Callable[[int, int, int], bool]) -> None:
    shapes = [one.shape for one in problems(**said)]
    assert all(is_right(one.m, one.n, one.k) for one in shapes)
    assert len({(one.m, one.n, one.k) for one in shapes}) > (1 if "sizes" in said else 15)
    if "multiple_of" in said:
        assert any(len({one.m, one.n, one.k}) == 3 for one in shapes)


def test_a_linear_has_its_own_layouts_and_a_bias() -> None:
    linears = problems(form=Form(("a", "b", "bias"), weight=True), op="linear")
    assert {str(one.layout) for one in linears if one.op.name == "linear"} == {"nt", "tt"}
    assert all(one.step("bias") for one in linears if one.op.name == "linear")


def test_the_other_distributions_take_turns() -> None:
    problem = Problem.parse("mm:f32:nn:32x48x64")
    named = [distributions(problem, number) for number in range(9)]
    assert len({names[:4] for names in named}) == 1
    assert {"rand-small", "rand-large", "rand-wide", "tile-map", "one-hot"} <= set().union(*named)
