"""The pairs of facts that the suite covers."""

from __future__ import annotations

import itertools

import pytest
from studies import pairs

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.problem import Problem


def pair(first: str, second: str) -> pairs.Pair:
    """Of two facts, ``op bmm``."""
    facets = ((one.partition(" ")[0], one.partition(" ")[2]) for one in (first, second))
    return frozenset(facets)


def test_the_facts_of_a_problem() -> None:
    found = pairs.facts(Problem.parse("addmm:f32:nn:18x65x127:bias-m1+alpha-0.5+relu+mul:a.offset:b.padded:m.dynamic"))
    assert set(found) == {
        ("op", "addmm"), ("dtypes", "f32"), ("layout", "nn"), ("operands", "a.offset"), ("operands", "b.padded"),
        ("step", "factor"), ("step", "unary"), ("step", "residual"), ("bias", "m1"), ("dynamic", "m"),
    }  # fmt: skip
    assert ("operands", "none") in pairs.facts(Problem.parse("mm:f32:nn:18x65x127"))


@pytest.mark.slow
@pytest.mark.study
def test_a_pair_can_be_had_where_the_parser_and_the_rules_take_it() -> None:
    found = pairs.feasible()
    assert pair("op bmm", "operands a.offset") in found
    assert pair("step factor", "step unary") in found
    assert pair("bias m1", "dynamic m") in found
    assert pair("op mm", "operands a.broadcast") not in found  # no batch
    assert pair("operands b.constant", "dynamic n") not in found  # a constant has its size
    assert pair("dtypes i8", "mode eager") in found
    for wanted, problem in found.items():
        assert {fact for fact in wanted if fact[0] != "mode"} <= set(pairs.facts(problem))


@pytest.mark.slow
@pytest.mark.study
def test_the_full_level_covers_nearly_all_pairs() -> None:
    left = pairs.missing(matrix.products("full"))
    share = 1 - len(left) / len(pairs.feasible())
    named = "\n".join(problem.line for problem in itertools.islice(left.values(), 20))
    assert share >= 0.95, (
        f"{share:.1%}; python tests/studies/pairs.py --additions has what is missing, such as\n{named}"
    )


@pytest.mark.slow
@pytest.mark.study
def test_additions_have_what_is_left_out() -> None:
    problems = matrix.products("full")
    fewer = [one for one in problems if not (one.op.name == "bmm" and any(word == "a.offset" for word in one.flags))]
    added = pairs.additions(fewer)
    assert any(one.op.name == "bmm" and one.has("a.offset") for one in added)
    assert not pairs.missing([*fewer, *added])
