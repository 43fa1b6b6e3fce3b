"""How far a wait is, and how long it still takes."""

from __future__ import annotations

import pytest

from pytest_gemm.run import progress
from pytest_gemm.run.progress import Display, Pace


class Terminal:
    """What a display needs of pytest's terminal reporter."""

    def __init__(self, isatty: bool) -> None:
        self.isatty = isatty
        self.lines: list[str] = []
        self.rewritten: list[str] = []

    def ensure_newline(self) -> None: ...

    def write_line(self, text: str) -> None:
        self.lines.append(text)

    def rewrite(self, text: str, erase: bool) -> None:
        self.rewritten.append(text)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("isatty", "options", "lines", "rewritten"),
    [
        (False, {}, ["at 0", "at 30", "done"], []),
        (False, {"since": 0.0}, ["at 30", "done"], []),
        (False, {"quiet": True}, ["done"], []),
        (True, {}, ["done"], [f"at {second}" for second in range(60)] + [""]),
        (True, {"since": 0.0}, ["done"], [f"at {second}" for second in range(60)] + [""]),
        (True, {"quiet": True}, ["done"], []),
    ],
)
def test_progress_is_one_line_on_a_terminal_and_a_line_in_30_s_elsewhere_and_none_where_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, isatty: bool, options: dict[str, float], lines: list[str], rewritten: list[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("pytest_gemm.run.progress.time.monotonic", clock)
    terminal = Terminal(isatty)
    display = Display(terminal, **options)  # type: ignore[arg-type]  # each has its own type
    for second in range(60):
        clock.now = float(second)
        display.progress(f"at {second}")
    display.line("done")
    assert terminal.lines == lines
    assert terminal.rewritten == rewritten


def test_nothing_is_written_where_there_is_no_terminal() -> None:
    display = Display(None)
    display.line("a line")
    display.progress("at work")


SESSION = ("session", "session a", "session b")


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ({}, None),
        ({"session": 1.0}, None),  # less than half of it
        ({"session": 1.0, "session a": 2.0, "session b": 4.0}, 21.0),
        ({"session": 1.0, "session a": 2.0}, 15.0),  # the other one is like it
        ({"session": 1.0, "session a": 2.0, "compile b": 50.0}, 15.0),
    ],
)
def test_what_is_left_by_what_is_known(known: dict[str, float], left: float | None) -> None:
    assert Pace([SESSION] * 3, known, Clock()).left() == left


def test_what_is_left_goes_down_and_follows_what_steps_took() -> None:
    clock = Clock()
    pace = Pace([SESSION] * 3, {"session": 1.0, "session a": 2.0, "session b": 4.0}, clock)
    clock.now = 4.0
    assert pace.left() == 17.0
    clock.now = 30.0
    assert pace.left() == 14.0  # it has taken longer than expected; no more than the others is certain
    pace.end({"session": 10.0, "session a": 10.0, "session b": 10.0})
    assert pace.left() == 60.0
    pace.end({})
    pace.add([["session", "session a"]])
    assert pace.left() == 50.0
    pace.end({})
    pace.end({})
    assert pace.left() == 0.0


def test_what_a_step_says_of_its_own_rest_is_taken_for_those_like_it() -> None:
    clock = Clock()
    pace = Pace([SESSION] * 3, {}, clock)
    clock.now = 5.0
    assert pace.left() is None
    assert pace.left(live=15.0) == 15.0 + 2 * 20.0
    assert Pace([SESSION, ("other",)], {}, clock).left(live=15.0) is None


def test_a_step_of_one_name_is_like_those_with_its_first_word() -> None:
    pace = Pace([["aten f16"], ["aten f32"], ["cpp f16"]], {}, Clock())
    assert pace.left() is None
    pace.end({"aten f16": 3.0})
    assert pace.left() is None  # nothing is known of the other backend
    assert Pace([["aten f16"], ["aten f32"]], {"aten f64": 3.0}, Clock()).left() == 6.0


@pytest.mark.parametrize(("seconds", "text"), [(None, ""), (31.0, "; about 40 s left"), (100.0, "; about 2 min left")])
def test_the_words(seconds: float | None, text: str) -> None:
    assert progress.left(seconds) == text
