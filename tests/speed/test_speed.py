"""Plain data of speed: lines of JSON and back, and what a killed process leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status
from pytest_gemm.speed.check import Replay
from pytest_gemm.speed.data import (
    Peaks,
    Sample,
    Session,
    SessionError,
    by_case,
    read_session,
    sample_line,
    session_line,
    session_text,
)

SAMPLE = Sample(
    CaseId("cpp", "mm:f32:nn:8x8x8", "tile-a"),
    "cpu",
    Status.PASSED,
    subject=(2e-3, 1e-3, 1.5e-3),
    comparator=(3e-3, 2e-3, 2.5e-3),
    comparator_name="aten",
    calls=3,
    selected=("tile-a",),
    kernels=("k0",),
    telemetry={"others_cores": 0.1},
    phases={"time": 0.2},
)
FAILED = Sample(CaseId("cpp", "mm:f32:nn:4x4x4"), "cpu", Status.CRASHED, Reason("died", "it died", "run it again"))
SESSION = Session(
    "amd-epyc-avx2-4c",
    {"torch": "2.13.0"},
    "abcd",
    "base",
    3,
    "2026-11-21T14:00:00+0000",
    "12ab",
    Peaks({"f32": 1e12}, 2e10),
)


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_a_session_becomes_lines_and_back(tmp_path: Path) -> None:
    lines = (session_line(SESSION), sample_line(SAMPLE), sample_line(FAILED), '{"end": {"seconds": 12.5}}\n')
    read = read_session(written(tmp_path / "s.jsonl", *lines))
    assert read == replace(SESSION, samples=(SAMPLE, FAILED), seconds=12.5)
    assert by_case([read]) == {SAMPLE.case: [SAMPLE]}
    assert read_session(written(tmp_path / "t.jsonl", session_text(read))) == read


def test_the_estimate_is_the_median_over_the_windows() -> None:
    assert SAMPLE.estimate == 1.5e-3
    assert SAMPLE.comparator_estimate == pytest.approx(2.5e-3)
    assert SAMPLE.spread == pytest.approx(1 / 3)
    assert FAILED.comparator_estimate is None
    # Two idle windows and a slow one, in which the comparator was slow too.
    windows = replace(
        SAMPLE,
        subject=(1.0, 1.1, 0.9, 5.0, 5.0, 1.2, 1.2),
        comparator=(2.0, 2.0, 2.0, 9.9, 10.1, 2.4, 2.4),
        windows=(3, 2, 2),
    )
    assert windows.estimate == pytest.approx(1.2)
    assert windows.comparator_estimate == pytest.approx(2.4)


def test_one_window_out_of_step_does_not_move_the_ratio() -> None:
    readings = {"subject": (1.0,) * 4 + (3.0,) * 4 + (1.0,) * 4, "comparator": (2.0,) * 12, "windows": (4, 4, 4)}
    sample = replace(SAMPLE, **readings)
    assert sample.comparator_estimate is not None
    assert sample.comparator_estimate / sample.estimate == pytest.approx(2.0)


def test_a_torn_last_line_is_what_a_killed_process_leaves(tmp_path: Path) -> None:
    torn = sample_line(FAILED)[:30]
    read = read_session(written(tmp_path / "s.jsonl", session_line(SESSION), sample_line(SAMPLE), torn))
    assert read.samples == (SAMPLE,)
    assert not read.complete


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((session_line(SESSION), "{}\n", sample_line(SAMPLE)), r"s\.jsonl:2: not a line of a session"),
        ((session_line(SESSION), sample_line(FAILED)[:30] + "\n"), r"s\.jsonl:2"),
        ((sample_line(SAMPLE),), r"the line about the session is missing"),
        (('{"session": {"hardware": "x", "colour": 3, "peaks": {}}}\n',), r"s\.jsonl:1.*colour"),
    ],
)
def test_any_other_line_that_is_wrong_is_named(tmp_path: Path, lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(SessionError, match=says):
        read_session(written(tmp_path / "s.jsonl", *lines))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"subject": [0.0, 1.0]}, "subject has 0, which is not a time"),
        ({"windows": [1]}, "do not have the same number of readings"),
        ({"comparator": [1.0]}, "do not have the same number of readings"),
        ({"case": {"backend": "cpp"}}, r"missing required field `problem` - at `\$.sample.case`"),
    ],
)
def test_a_sample_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    facts = json.loads(sample_line(SAMPLE))["sample"]
    text = json.dumps({"sample": {**facts, **changes}}) + "\n"
    with pytest.raises(SessionError, match=rf"s\.jsonl:2: not a line of a session: .*{says}"):
        read_session(written(tmp_path / "s.jsonl", session_line(SESSION), text))


def test_recorded_time_passes_reading_by_reading() -> None:
    replay = Replay([0.5, 0.25])
    times = [replay.clock()]
    for _ in range(3):
        replay.step()
        times.append(replay.clock())
    assert times == [0.0, 0.5, 0.75, 0.75]
