"""A run record as a page: nothing of the record is lost, and a broken one is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_gemm import report, results
from pytest_gemm.outcome import Outcome, Reason, Status

PASSED = Outcome(
    "triton",
    "mm:f16:nt:512x768x1024",
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
    dataclasses.replace(PASSED, filling="rand", ratio=0.5, tier="statistical"),
    dataclasses.replace(
        PASSED,
        problem="mm:f32:nn:1x1x1::tf32",
        kernels=("triton_tem_fused_mm_0 (other)",),
        chosen=("other",),
        ratio=0.125,
    ),
    Outcome(
        "triton",
        "mm:f16:nt:8x8x8",
        "",
        0,
        Status.DROPPED,
        Reason("out-of-resources", "needs 262144 bytes of shared memory"),
        choice="triton_mm_big",
    ),
    Outcome("triton", "mm:f64:nn:8x8x8", "", 0, Status.UNSUPPORTED, Reason("dtype", "no f64 here")),
    dataclasses.replace(
        PASSED,
        backend="cutlass",
        status=Status.KNOWN_FAILURE,
        known_failure="drops-bias",
        reason=Reason("all", "wrong"),
    ),
    dataclasses.replace(PASSED, backend="cutlass", problem="mm:f16:nn:1x2x3", status=Status.INCORRECT, ratio=7.0),
]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    lines = [
        results.provenance(["--gemm-backends=triton"], gpus=False),
        *map(report.to_record, OUTCOMES),
        {"totals": {"wall_seconds": 12.0, "processes": 3, "notes": ["CUTLASS: 2 kernels"]}},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(map(report.record_line, lines)), encoding="utf-8")
    return path


def row(page: str, *cells: str) -> list[str]:
    """The one table row that begins with these cells."""
    rows = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(cells)} |")]
    assert len(rows) == 1, page
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def test_the_page_counts_what_the_record_holds(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main([str(record), "--title", "Mine"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Mine\n")
    assert "`pytest --gemm-backends=triton`" in page
    assert "7 outcomes, 12 s, 3 process(es)" in page
    assert "CUTLASS: 2 kernels" in page
    # passed, incorrect, dropped, unsupported, known; then problems, cases, choices, kernels
    assert row(page, "triton", "2")[1:] == ["2", "", "1", "1", "", "2", "3", "2", "1"]
    assert row(page, "cutlass", "")[1:] == ["", "1", "", "", "1", "2", "2", "1", "1"]
    assert row(page, "triton", "f16") == ["triton", "f16", "0.25", "0.5"]
    assert row(page, "triton", "f32 tf32") == ["triton", "f32 tf32", "0.125", ""]
    assert row(page, "triton", "out-of-resources")[2:4] == ["1", "triton_mm_big"]
    assert row(page, "cutlass", "drops-bias")[2:5] == ["known-failure", "all", "1"]
    assert row(page, "cutlass", "not known")[2] == "incorrect"
    assert row(page, "triton", "unsupported: no f64 here")[2] == "1"


def test_the_page_says_which_epilogues_another_kernel_did() -> None:
    apart = dataclasses.replace(PASSED, backend="cpp", problem="linear:f32:nt:4x8x8:bias+relu+t+add:tap", fused=False)
    fused = [dataclasses.replace(apart, problem=f"linear:f32:nt:{m}x8x8:relu", fused=True, fusions=m) for m in (1, 2)]
    page = results.page([results.Record({}, [apart, *fused, PASSED], {})], "Mine")
    assert f"| cpp | linear | bias+relu+t+add tap | 1 | 1 | 0 | `{apart.problem}` |" in page
    assert "| cpp | linear | relu | 2 |  | 1 2 |  |" in page
    assert "## Epilogues" not in results.page([results.Record({}, [PASSED], {})], "Mine")


def test_a_run_that_was_killed_says_so(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write_text("\n".join(record.read_text(encoding="utf-8").splitlines()[:-1]), encoding="utf-8")
    results.main([str(record)])
    assert "7 outcomes, did not end" in capsys.readouterr().out


def test_a_line_that_is_none_is_named(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record.open("a", encoding="utf-8") as file:
        file.write('{"backend": "tri\n')
    with pytest.raises(SystemExit):
        results.main([str(record)])
    assert "run.jsonl: line 10 is no line of a run record" in capsys.readouterr().err


def test_the_head_of_a_record_names_what_ran_on_what(record: Path) -> None:
    run = json.loads(record.read_text(encoding="utf-8").splitlines()[0])["run"]
    assert run["versions"]["torch"]
    assert run["versions"]["pytest-gemm"]
    assert run["command"] == ["pytest", "--gemm-backends=triton"]
    assert run["cpu"]
