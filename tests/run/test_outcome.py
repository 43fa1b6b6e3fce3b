"""Foreign texts: what a backend says may be anything, and what is reported of it is printable."""

from __future__ import annotations

import json

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.core.text import first_line, kind_of, message, printable


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class Odd(str):
    def __len__(self) -> int:
        raise RuntimeError

    def splitlines(self, *args: object) -> list[str]:
        raise RuntimeError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain words, ü, 算", "plain words, ü, 算"),
        ("two\n\tlines", "two\n\tlines"),
        ("\ud800", "\\ud800"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\x00b\rc\x85d\u2028e\u202ef", "a\\x00b\\rc\\x85d\\u2028e\\u202ef"),
        (None, "None"),
        (Mute(), "<str() of it raised RuntimeError>"),
    ],
)
def test_foreign_text_becomes_printable(given: object, expected: str) -> None:
    shown = printable(given)
    assert shown == expected
    assert type(shown) is str
    assert printable(shown) == shown


def test_a_text_of_a_class_of_its_own_is_read_as_a_plain_one() -> None:
    assert type(printable(Odd("odd"))) is str
    assert first_line(ValueError(Odd("odd"))) == "odd"


def test_a_long_text_is_cut() -> None:
    shown = printable("x" * 100_000_000)
    assert len(shown) < 5000
    assert shown.endswith("(99996000 more characters)")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Mute(), "<str() of it raised RuntimeError>"),
        (Leaving(), "<str() of it raised SystemExit>"),
        (ValueError("\n\n \x1bsecond\nthird"), " \\x1bsecond"),
        (ValueError(), ""),
    ],
)
def test_an_exception_without_a_proper_message_has_a_first_line(error: Exception, expected: str) -> None:
    assert first_line(error) == expected


def test_only_ctrl_c_passes_through_a_message() -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        message(Interrupted())


def test_the_name_of_a_class_is_foreign_text_too() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]  # as odd as it can be
            raise RuntimeError

    assert kind_of(type("a\x1bb\n::error::c", (Exception,), {})()) == "a\\x1bb\\n::error::c"
    assert kind_of(Meta("Odd", (Exception,), {})()) == "Odd"


def test_what_an_outcome_says_can_be_sent_anywhere() -> None:
    reason = Reason("\ud800\n", "\x1b[2J\n::error::", "\x07")
    outcome = Outcome(
        CaseId("b", "mm:f32:nn:1x1x1"), "rand", 0, Status.CRASHED, reason, ("k\ud800\n",), details="d\x1b\n"
    )
    texts = [outcome.reason.code, str(outcome.reason), *outcome.kernels, outcome.details] if outcome.reason else []
    assert texts == ["\\ud800\\n", "\\x1b[2J\\n::error:: (\\x07)", "k\\ud800\\n", "d\\x1b\n"]
    assert "".join(texts).encode()
    assert json.dumps(texts)
