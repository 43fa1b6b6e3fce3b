"""A run record as a page: nothing of the record is lost, and a broken one is named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from recorded_runs import write

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.record import lines as records
from pytest_gemm.record.lines import Head
from pytest_gemm.tools import cli

PASSED = Outcome(
    CaseId("triton", "mm:f16:nt:512x768x1024"),
    "int-2",
    0,
    Status.PASSED,
    kernels=("triton_tem_fused_mm_0 (triton_mm-64x32x128,s4,w8)",),
    chosen=("triton_mm-64x32x128,s4,w8",),
    tier="hard",
    ratio=0.25,
)
OUTCOMES = [PASSED, dataclasses.replace(PASSED, case=CaseId("triton", "mm:f32:nn:1x1x1:math.tf32"))]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write(tmp_path, OUTCOMES, Head.of(["--gemm-backends=triton"], gpus=False))


def test_a_run_that_was_killed_says_so(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write_text("\n".join(record.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    cli.main(["results", str(record)])
    assert "- a run did not end\n" in capsys.readouterr().out


def changed(**facts: object) -> str:
    """The line of an outcome with other values than its own."""
    return json.dumps({**records.to_record(PASSED), **facts}) + "\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("\n", "Expecting value"),
        ("{}\n", "case: Object missing required field `backend`"),
        (f"{99999 * '['}\n", "maximum recursion depth"),
        (changed(status="fine"), "status: Invalid enum value 'fine'"),
        (changed(ratio="big"), "ratio: Expected `float | null`, got `str`"),
        (changed(ratio=math.nan), "NaN is no number of JSON"),
        ('{"run": {"gpus": [1]}}\n', "gpus[0]: Expected `str`, got `int`"),
    ],
)
def test_a_line_that_is_none_is_named(record: Path, line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(line)
    with pytest.raises(SystemExit) as ended:
        cli.main(["results", str(record)])
    assert ended.value.code == 4
    assert f"run.jsonl: line 5 is no line of a run record: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it has no line of a run record"),
        (b"\xff\n", "is not UTF-8"),
        (None, "has no run.jsonl; name a run record"),
    ],
)
def test_a_file_that_is_no_record_is_named(
    tmp_path: Path, content: bytes | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["results", str(path)])
    assert ended.value.code == 4
    assert f"run.jsonl: {says}" in capsys.readouterr().err


def test_half_a_line_at_the_end_is_of_a_run_that_did_not_end(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(changed()[:-9])
    assert cli.main(["results", str(record)]) == 0
    page = capsys.readouterr().out
    assert "2 passed" in page
    assert "- a run did not end\n" in page


def test_what_a_terminal_cannot_show_is_escaped(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(changed(status="crashed", backend="c\ud800pp", problem="mm", fused=False))
    assert cli.main(["results", str(record)]) == 0
    assert "c\\ud800pp" in capsys.readouterr().out
    page = record.with_suffix(".html")
    assert cli.main(["results", str(record), f"--html={page}"]) == 0
    assert "c\\ud800pp" in page.read_text(encoding="utf-8")
