"""``pytest-gemm compare``: two run records, joined by case."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm import records
from pytest_gemm.case_id import CaseId
from pytest_gemm.outcome import Outcome, Reason, Status
from pytest_gemm.run.record import Provenance
from pytest_gemm.tools import cli

CASES = [CaseId("cpp", f"mm:f32:nn:{m}x8x8") for m in (1, 2, 3)]
WRONG = Reason("rows", "every row is wrong")


def written(path: Path, *outcomes: Outcome) -> Path:
    lines = [{"run": records.plain(Provenance.of([], gpus=False))}, *map(records.to_record, outcomes)]
    path.write_text("".join(map(records.record_line, lines)), encoding="utf-8")
    return path


def test_cases_whose_worst_status_differs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passed = [Outcome(case, "rand", 0, Status.PASSED) for case in CASES]
    wrong = Outcome(CASES[1], "ones", 0, Status.INCORRECT, WRONG)
    before = written(tmp_path / "before.jsonl", *passed[:2])
    after = written(tmp_path / "after.jsonl", *passed[:2], wrong, passed[2])
    assert cli.main(["compare", str(before), str(after)]) == 1
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["cpp", CASES[1].problem, "passed  incorrect (rows)"] in [[a, b, c.strip()] for a, b, c in lines[1:3]]
    assert lines[2][1:] == [CASES[2].problem, "-       passed"]
    assert lines[-1] == ["2", "of", "3 case(s) differ"]
    assert cli.main(["compare", str(before), str(before)]) == 0
    assert capsys.readouterr().out == "0 of 2 case(s) differ\n"
