"""How far a wait is."""

from __future__ import annotations

import pytest

from pytest_gemm.run.progress import Display


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


@pytest.mark.parametrize(
    ("isatty", "options", "lines", "rewritten"),
    [
        (False, {}, ["at 0", "at 30", "done"], []),
        (False, {"quiet": True}, ["done"], []),
        (True, {}, ["done"], [f"at {second}" for second in range(60)] + [""]),
        (True, {"quiet": True}, ["done"], []),
    ],
)
def test_progress_is_one_line_on_a_terminal_and_a_line_in_30_s_elsewhere_and_none_where_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, isatty: bool, options: dict[str, float], lines: list[str], rewritten: list[str]
) -> None:
    seconds = map(float, range(60))
    monkeypatch.setattr("pytest_gemm.run.progress.time.monotonic", lambda: next(seconds))
    terminal = Terminal(isatty)
    display = Display(terminal, **options)  # type: ignore[arg-type]  # each has its own type
    for second in range(60):
        display.progress(f"at {second}")
    display.line("done")
    assert terminal.lines == lines
    assert terminal.rewritten == rewritten
