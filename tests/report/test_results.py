"""A run record as a page: nothing of the record is lost, and a broken one is named."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from recorded_runs import write

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.record import lines as records
from pytest_gemm.record.lines import Head
from pytest_gemm.record.reader import Run
from pytest_gemm.report import markdown as results
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
OUTCOMES = [
    PASSED,
    dataclasses.replace(PASSED, distribution="rand", ratio=0.5, tier="statistical"),
    dataclasses.replace(
        PASSED,
        case=CaseId("triton", "mm:f32:nn:1x1x1:math.tf32"),
        kernels=("triton_tem_fused_mm_0 (other)",),
        chosen=("other",),
        ratio=0.125,
    ),
    Outcome(
        CaseId("triton", "mm:f16:nt:8x8x8", candidate="triton_mm_big"),
        "",
        0,
        Status.PRUNED,
        Reason("out-of-resources", "needs 262144 bytes of shared memory"),
    ),
    Outcome(CaseId("triton", "mm:f64:nn:8x8x8"), "", 0, Status.UNSUPPORTED, Reason("dtype", "no f64 here")),
    dataclasses.replace(
        PASSED,
        case=CaseId("cutlass", PASSED.problem),
        status=Status.KNOWN_FAILURE,
        known_failure="drops-bias",
        reason=Reason("all", "wrong"),
    ),
    dataclasses.replace(PASSED, case=CaseId("cutlass", "mm:f16:nn:1x2x3"), status=Status.INCORRECT, ratio=7.0),
]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write(tmp_path, OUTCOMES, Head.of(["--gemm-backends=triton"], gpus=False))


def row(page: str, *cells: str) -> list[str]:
    """The one table row that begins with these cells."""
    rows = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
    assert len(rows) == 1, page
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def test_the_page_counts_what_the_record_holds(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["results", str(record), "--title", "Mine"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Mine\n")
    assert "`pytest --gemm-backends=triton`" in page
    assert "7 outcomes, 12 s, 3 process(es)" in page
    assert "CUTLASS: 2 kernels" in page
    # passed, incorrect, known, pruned, unsupported; then problems, cases, choices, kernels
    assert row(page, "triton", "2")[1:] == ["2", "", "", "1", "1", "2", "3", "2", "1"]
    assert row(page, "cutlass", "")[1:] == ["", "1", "1", "", "", "2", "2", "1", "1"]
    assert row(page, "triton", "f16") == ["triton", "f16", "0.25", "0.5"]
    assert row(page, "triton", "f32 math.tf32") == ["triton", "f32 math.tf32", "0.125", ""]
    assert row(page, "triton", "out-of-resources")[2:4] == ["1", "triton_mm_big"]
    assert row(page, "cutlass", "drops-bias")[2] == "1"
    assert row(page, "cutlass", "incorrect")[2] == "1"
    assert row(page, "triton", "unsupported: no f64 here")[2] == "1"


def test_the_page_says_which_epilogues_another_kernel_did() -> None:
    apart = dataclasses.replace(
        PASSED, case=CaseId("cpp", "linear:f32:nt:4x8x8:bias+relu+t+add:program.multi_output"), fused=False
    )
    fused = [
        dataclasses.replace(apart, case=CaseId("cpp", f"linear:f32:nt:{m}x8x8:relu"), fused=True, fusions=m)
        for m in (1, 2)
    ]
    page = results.page([Run(outcomes=[apart, *fused, PASSED])], "Mine")
    assert f"| cpp | linear | bias+relu+t+add program.multi_output | 1 | 1 | 0 | `{apart.problem}` |" in page
    assert "| cpp | linear | relu | 2 |  | 1 2 |  |" in page
    assert "## Epilogues" not in results.page([Run(outcomes=[PASSED])], "Mine")


def test_a_run_that_was_killed_says_so(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write_text("\n".join(record.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    cli.main(["results", str(record)])
    assert "7 outcomes, did not end" in capsys.readouterr().out


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
    assert f"run.jsonl: line 10 is no line of a run record: {says}" in capsys.readouterr().err


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


def test_half_a_line_at_the_end_is_left_out_and_said(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(changed()[:-9])
    assert cli.main(["results", str(record)]) == 0
    page = capsys.readouterr().out
    assert "7 outcomes" in page
    assert "* the last line is torn and was left out" in page


def test_what_a_terminal_cannot_show_is_escaped(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write(changed(status="crashed", backend="c\ud800pp", problem="mm", fused=False))
    assert cli.main(["results", str(record)]) == 0
    assert "c\\ud800pp" in capsys.readouterr().out
    page = record.with_suffix(".html")
    assert cli.main(["results", str(record), f"--html={page}"]) == 0
    assert "c\\ud800pp" in page.read_text(encoding="utf-8")
