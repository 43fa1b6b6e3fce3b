"""``pytest-gemm list``: what a level holds."""

from __future__ import annotations

import pytest

from pytest_gemm.conformance import matrix
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


def test_an_op_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["list", "--op=bmn"])
    assert ended.value.code == 4
    assert "argument --op: invalid choice: 'bmn'" in capsys.readouterr().err
