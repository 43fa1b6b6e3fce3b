"""``pytest-gemm list``: what a level holds, and the pairs that it does not cover."""

from __future__ import annotations

import pytest

from pytest_gemm.conformance import listing, matrix
from pytest_gemm.problem.problem import Problem
from pytest_gemm.tools import cli


def test_every_problem_is_counted_under_its_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    quick = matrix.products("quick")
    assert text.startswith(f"quick: {len(quick)} problems")
    for op in {problem.op.name for problem in quick}:
        assert f"\n{op}: {sum(problem.op.name == op for problem in quick)}\n" in text
    assert cli.main(["list", "--op=baddbmm", "--lines"]) == 0
    lines = capsys.readouterr().out.split()
    assert lines == [problem.line for problem in quick if problem.op.name == "baddbmm"]


def test_combinations_count_each_problem_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--combinations"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert sum(int(row.split()[-1]) for row in rows) == len(matrix.products("quick"))


def test_pairs_that_no_problem_covers_come_with_one_that_would() -> None:
    every = [problem for problem in matrix.products("full") if problem.op.name == "bmm"]
    quick = [problem for problem in matrix.products("quick") if problem.op.name == "bmm"]
    found = listing.uncovered(quick, every)
    assert len(found) > 100
    for pair, problem in found.items():
        assert pair <= set(listing.facts(problem))
        assert not any(pair <= set(listing.facts(other)) for other in quick)
        assert Problem.parse(problem.line) == problem
    added = [*quick, *found.values()]
    assert not listing.uncovered(added, every)
    # A batch that is read a second time through its transpose has no broadcast operand.
    assert frozenset((("flags", "b.alias_t"), ("layout", "nn"))) not in found


def test_an_op_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["list", "--op=bmn"])
    assert ended.value.code == 4
    assert "--op=bmn: no such op (did you mean 'bmm'?)" in capsys.readouterr().err
