"""The study of the gate on sessions of known noise: the others cry wolf, the gate does not and finds what is there."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from studies import calibrate
from studies.calibrate import AGAINST, CLASSES, PLANTED, STORED, SUITE, Study

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Status
from pytest_gemm.speed.data import Sample, Session, session_text

pytestmark = pytest.mark.slow

SECONDS = (0.1e-3, 0.2e-3, 1e-3, 2e-3, 5e-3, 9e-3)  # two cases of each class


def sessions(count: int = 48, *, seed: int = 0, copies: int = 2) -> list[Session]:
    """A shared machine: 2% from session to session in both groups, 0.8% in a case, exponential noise in a reading."""
    rng, found = np.random.default_rng(seed), []

    def heavy(scale: float) -> float:
        return scale * float(rng.standard_t(4)) / math.sqrt(2)

    for index in range(count):
        machine, samples = heavy(0.02), []
        for number, seconds in enumerate(SECONDS * copies):
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


def write(folder: Path, some: list[Session]) -> Path:
    for number, session in enumerate(some):
        (folder / f"{number:03}.jsonl").write_text(session_text(session))
    return folder


@pytest.fixture(scope="module")
def study() -> Study:
    return calibrate.calibrate(sessions(), runs=16)


def power(study: Study, rule: str, change: float) -> float:
    score = study.scores[rule]
    return sum(score.found[change, k] for k in CLASSES) / sum(score.planted[change, k] for k in CLASSES)


def test_the_gate_is_not_red_and_the_others_are(study: Study) -> None:
    for rule in (STORED, SUITE, AGAINST):
        assert study.scores[rule].red == 0
        assert study.scores[rule].undecided <= 0.05 * study.scores[rule].judged
    # Readings of one process are not independent: half of the runs, for in the other half the machine was faster.
    assert study.scores["U test"].red >= 8
    assert study.scores["mean:5%"].red >= 1
    assert study.scores[SUITE].judged == 16 * 200


@pytest.mark.parametrize("rule", [STORED, AGAINST])
def test_the_gate_finds_what_is_planted(study: Study, rule: str) -> None:
    assert power(study, rule, 0.10) > 0.97
    assert power(study, rule, 0.02) < 0.05  # that much is tolerated
    shares = [power(study, rule, change) for change in PLANTED]
    assert shares == sorted(shares)


def test_the_bound_of_no_red_run_is_the_rule_of_three(study: Study) -> None:
    # 0 of n: the exact bound is 1 - 0.05^(1/n).
    assert study.scores[STORED].red_bound == pytest.approx(1 - 0.05 ** (1 / 16))
    assert dataclasses.replace(study.scores[STORED], runs=300).red_bound < 0.01


def test_the_same_seed_draws_the_same_runs() -> None:
    some = sessions(32, copies=1)
    one, two, other = (calibrate.calibrate(some, runs=2, seed=seed) for seed in (1, 1, 2))
    assert one == two
    assert one.cases != other.cases


def test_the_page_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = sessions(copies=1)
    rare = Sample(CaseId("cpp", "mm:f32:nn:99x64x64"), "cpu", Status.PASSED, subject=(1e-3,))
    some[0] = replace(some[0], samples=(*some[0].samples, rare))
    folder = tmp_path / "sessions"
    folder.mkdir()
    calibrate.main([str(write(folder, some)), "--runs=2"])
    page = re.sub(" +", " ", capsys.readouterr().out)
    for expected in (
        "6 cases, 48 sessions of the same code on `cpu-x`; 2 runs",
        "Left out for missing estimates: cpp-mm:f32:nn:99x64x64 (1 of 48).",
        "| gate, stored baseline | 0 | 0.0% (0 of 2) | < 77.6% |",
        "### < 0.3 ms (2 cases)",
        "| `cpp-mm:f32:nn:1x64x64` | 0.1",
    ):
        assert expected in page


def test_too_few_pairs_leave_base_against_head_out() -> None:
    study = calibrate.calibrate(sessions(31, copies=1), runs=1, stored=10)
    assert AGAINST not in study.scores
    assert "it needs 16 pairs and has 15" in calibrate.page(study)


@pytest.mark.parametrize(
    ("contracts", "message"),
    [
        ("", "needs sessions of one hardware key, contract and device, and has set()"),
        ("ccc", "3 sessions are too few: a run takes 32 (12 stored"),
        ("cd", "needs sessions of one hardware key, contract and device"),
    ],
)
def test_sessions_that_make_no_study_are_refused(
    contracts: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [replace(one, contract=c) for one, c in zip(sessions(len(contracts), copies=1), contracts, strict=True)]
    with pytest.raises(SystemExit):
        calibrate.main([str(write(tmp_path, some))])
    assert message in capsys.readouterr().err
