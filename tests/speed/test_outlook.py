"""How long the timing of a device takes, and how far it is."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gemm.case_id import CaseId
from pytest_gemm.config import SpeedConfig
from pytest_gemm.outcome import Status
from pytest_gemm.run.progress import Display, Pace
from pytest_gemm.speed import outlook as outlook_module
from pytest_gemm.speed import worker
from pytest_gemm.speed.data import Sample
from pytest_gemm.speed.outlook import COMPILE, SESSION, Outlook
from pytest_gemm.speed.request import LEFT

CASES = (("aten", "mm:f32:nn:8x8x8"), ("cpp", "mm:f32:nn:8x8x8"))


class Lines(Display):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


class Planned:
    """An outlook with a clock of its own, on sessions that are measured by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now = 0.0
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(outlook_module, "Pace", lambda steps, known: Pace(steps, known, clock=lambda: self.now))
        self.display = Lines()

    def begin(self, sessions: int, *, compiles: bool = True, open_end: bool = False) -> Outlook:
        config: Any = SimpleNamespace(speed=SpeedConfig(), options=defaultdict(str))
        self.display.lines.clear()
        self.now = 0.0
        made = Outlook(config, "cpu", CASES, 1)
        made.plan(sessions, unit="session", compiles=compiles, open_end=open_end, display=self.display)
        return made


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    return Planned(monkeypatch, tmp_path)


def samples(*seconds: float) -> list[Sample]:
    return [
        Sample(CaseId(*case), "cpu", Status.PASSED, phases={"judge": one / 2, "time": one / 2})
        for case, one in zip(CASES, seconds, strict=True)
    ]


def test_without_records_the_first_readings_say_how_long_it_takes(planned: Planned) -> None:
    outlook = planned.begin(4)
    assert outlook.left(COMPILE, None, planned.display) == ""
    planned.now = 30.0
    outlook.compiled(30.0, samples(10.0, 20.0))
    assert outlook.left(SESSION, None, planned.display) == ""
    planned.now = 40.0
    assert outlook.left(SESSION, 30.0, planned.display) == "; about 3 min left"  # 30 + 3 * 40
    assert planned.display.lines == ["speed: 4 sessions of 2 cases take about 3 min, by its first samples"]
    outlook.left(SESSION, 20.0, planned.display)
    assert len(planned.display.lines) == 1


def test_the_next_run_says_it_at_once_and_counts_down(planned: Planned) -> None:
    outlook = planned.begin(2)
    outlook.compiled(30.0, samples(10.0, 20.0))
    for _ in range(2):
        outlook.session(100.0, samples(30.0, 50.0))
    outlook.record()
    again = planned.begin(2, open_end=True)
    said = "speed: 2 sessions of 2 cases take at most 4 min, by earlier runs on this machine"
    assert planned.display.lines == [f"{said}; a case that seems slower takes more"]
    planned.now = 30.0
    again.compiled(30.0, samples(10.0, 20.0))
    planned.now = 80.0
    assert again.left(SESSION, None, planned.display) == "; about 3 min left"  # 50 + 100
    again.session(100.0, samples(30.0, 50.0))
    again.session(100.0, samples(30.0, 50.0))
    again.more(3, CASES[:1])  # which are confirmed: 20 s of a session and 30 s of the case
    assert again.left(SESSION, None, planned.display) == "; about 3 min left"
    assert again.left(COMPILE, None, planned.display) == ""  # candidates are selected again


def test_a_short_run_has_no_estimate(planned: Planned) -> None:
    outlook = planned.begin(2, compiles=False)
    outlook.session(2.0, samples(0.5, 0.5))
    outlook.session(2.0, samples(0.5, 0.5))
    outlook.record()
    planned.begin(2, compiles=False)
    assert planned.display.lines == []


@pytest.mark.parametrize(
    ("timed", "judged", "left"),
    [
        ([], 0, None),
        ([(2.0, 2), (0.0, 0)], 2, 2 * 7.0 - 2.0),  # 1 s a window, and after 6 s there is no further one
        ([(0.2, 2), (0.2, 2)], 2, 2 * 3.2 - 0.4),  # 0.1 s a window, 32 windows
        ([(0.2, 2)], 1, 2 * 3.2 - 0.2),  # one has not been judged yet
        ([(60.0, 3)], 2, 0.0),
    ],
)
def test_a_session_leaves_word_of_how_long_its_other_windows_take(
    tmp_path: Path, timed: list[tuple[float, int]], judged: int, left: float | None
) -> None:
    works = [SimpleNamespace(phases={"time": seconds}, windows=[None] * count) for seconds, count in timed]
    meter: Any = SimpleNamespace(
        _works=works,
        _begun=judged,
        windows=32,
        folder=tmp_path,
        plan=SimpleNamespace(max_seconds=6.0),
        request=SimpleNamespace(cases=CASES),
    )
    worker.Meter._leave_word(meter)
    if left is None:
        assert not (tmp_path / LEFT).exists()
    else:
        assert float((tmp_path / LEFT).read_text(encoding="utf-8")) == pytest.approx(left)
