"""The study of the gate on sessions of known noise: no false alarm, and it finds what is there."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from studies import calibrate
from studies.calibrate import AGAINST, CLASSES, PLANTED, STORED, SUITE

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Status
from pytest_gemm.speed.data import Sample, Session, session_text

SECONDS = (0.1e-3, 0.2e-3, 1e-3, 2e-3, 5e-3, 9e-3)  # two cases of each class


def sessions() -> list[Session]:
    """A shared machine: 2% from session to session in both groups, 0.8% in a case, exponential noise in a reading."""
    rng, found = np.random.default_rng(0), []

    def heavy(scale: float) -> float:
        return scale * float(rng.standard_t(4)) / math.sqrt(2)

    for index in range(48):
        machine, samples = heavy(0.02), []
        for number, seconds in enumerate(SECONDS):
            groups = [
                seconds * math.exp(machine + heavy(noise)) * np.exp(rng.exponential(0.01, 30))
                for noise in (0.008, 0.003)
            ]
            samples.append(
                Sample(
                    CaseId("cpp", f"mm:f32:nn:{number + 1}x64x64"),
                    "cpu",
                    Status.PASSED,
                    subject=tuple(groups[0].tolist()),
                    comparator=tuple(groups[1].tolist()),
                    comparator_name="aten",
                )
            )
        found.append(Session("cpu-x", contract="c", index=index, date="2026-01-01", samples=tuple(samples)))
    return found


@pytest.mark.slow
def test_the_gate_is_not_red_and_finds_what_is_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = sessions()
    rare = Sample(CaseId("cpp", "mm:f32:nn:99x64x64"), "cpu", Status.PASSED, subject=(1e-3,))
    some[0] = replace(some[0], samples=(*some[0].samples, rare))
    for session in some:
        (tmp_path / f"{session.index:03}.jsonl").write_text(session_text(session))
    calibrate.main([str(tmp_path), "--runs=4"])
    page = re.sub(" +", " ", capsys.readouterr().out)
    for expected in (
        "6 cases, 48 sessions of the same code on `cpu-x`; 4 runs",
        "Left out for missing estimates: cpp-mm:f32:nn:99x64x64 (1 of 48).",
    ):
        assert expected in page
    assert re.search(r"\| `cpp-mm:f32:nn:1x64x64` \| 0.1\d* ms \|( [\d.]+%? \|){5}", page)
    for rule in (STORED, SUITE, AGAINST):
        # 0 of n: the exact bound is 1 - 0.05^(1/n).
        assert f"| {rule} | 0 | 0.0% (0 of 4) | < {100 * (1 - 0.05 ** (1 / 4)):.1f}% |" in page
        if rule != SUITE:
            rows = re.findall(rf"(?m)^\| {re.escape(rule)} \|((?: [0-9.]+% \|){{{len(PLANTED) + 1}}})$", page)
            assert len(rows) == len(CLASSES)
            for row in rows:
                first, *_, last, printed = [float(share) for share in re.findall("[0-9.]+", row)]
                assert first < 10.0, "2% is tolerated"
                assert last > 90.0, "10% is found"
                assert printed > 80.0, "so is what is printed"


@pytest.mark.slow
def test_what_one_day_stored_judges_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = (
        replace(s, samples=tuple(replace(x, subject=tuple(1.2 * v for v in x.subject)) for x in s.samples))
        for s in sessions()
    )
    for day, some in (("first", sessions()[:12]), ("second", slower)):
        (tmp_path / day).mkdir()
        for session in some:
            (tmp_path / day / f"{session.index:03}.jsonl").write_text(session_text(session))
    calibrate.main([str(tmp_path / "first"), "--runs=2", "--then", str(tmp_path / "second")])
    page = capsys.readouterr().out
    assert "12 sessions of the same code on `cpu-x`, stored, and 48 of another day, judged; 2 runs" in page
    assert re.search(rf"\| {STORED} \| \d \| 100.0% \(2 of 2\)", page)
    with pytest.raises(SystemExit):
        calibrate.main([str(tmp_path / "second"), "--then", str(tmp_path / "first")])
    assert "a run takes 12 of the first day and 20 of the second" in capsys.readouterr().err
