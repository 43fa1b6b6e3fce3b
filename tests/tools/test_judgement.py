"""The first words of a judgement, and what its screen says of a kernel that calls ATen."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures import findings
from pytest_gemm.tools.judgement import Judgement

ODD = ["mm:f32:nn:17x65x127", "mm:f32:nn:96x64x64", "mm:f32:nn:64x96x64", "mm:f32:nn:64x64x96"]
WHOLE = ["mm:f32:nn:64x64x64", "mm:f32:nn:128x64x192", "mm:f32:nn:64x128x320", "mm:f32:nn:256x64x64"]


def judgement(right: Iterable[str], wrong: Iterable[str] = (), *, wrong_of: str = "rand", cause: str = "") -> Judgement:
    """A kernel that is right for some lines, and wrong for others with one distribution."""
    outcomes = [Outcome(CaseId("mine", line), "rand", 0, Status.PASSED, kernels=("mine",)) for line in right]
    reason = Reason("outside-bound", "3 of 9 elements outside the bound")
    outcomes += [Outcome(CaseId("mine", x), wrong_of, 0, Status.INCORRECT, reason, cause=cause) for x in wrong]
    what = findings.findings(outcomes)
    return Judgement("k.py:mine", "mm", ["f32", "f16"], "cpu", True, "(a, b)", outcomes=outcomes, findings=what)


@pytest.mark.parametrize(
    ("right", "wrong", "how", "first_words"),
    [
        (WHOLE + ODD, [], {}, "right (8 of 8 problems)"),
        (WHOLE, ODD, {"cause": "N tail"}, "right for multiples of 64 alone: N tail"),
        (WHOLE + ODD[:3], ODD[3:], {"cause": "K tail"}, "incorrect: K tail"),
        (WHOLE, ["mm:f32:nn:8x16x0"], {"cause": "never computed"}, "right but for K = 0: never computed"),
        (
            WHOLE,
            ["mm:f32:nn:1x16x64", "mm:f16:nn:1x64x64"],
            {"cause": "shifted rows"},
            "right but for M = 1: shifted rows",
        ),
        (
            ODD + WHOLE[1:],
            WHOLE[:1],
            {"wrong_of": "specials", "cause": "NaN where inf is due"},
            "right but for infinities",
        ),
        (ODD, WHOLE, {"wrong_of": "specials", "cause": "subnormals flushed"}, "right but for subnormal numbers"),
        ([], WHOLE, {"cause": "K tail"}, "incorrect: K tail"),
        (
            WHOLE,
            ["mm:f32:nn:64x64x64:b.offset", "mm:f16:tn:64x64x64:b.offset"],
            {"cause": "K tail"},
            "right but for b.offset: K tail",
        ),
        (WHOLE, ["mm:f16:nn:64x64x64", "mm:f16:tn:64x65x64"], {"cause": "f16 sums"}, "right but for f16: f16 sums"),
        (WHOLE, ["bmm:f32:nn:3x64x64x64", "bmm:f16:tn:65552x4x2x4"], {}, "right but for batches: wrong values"),
        (WHOLE, ["mm:f32:nn:65552x3x16"], {}, "right but for more than 65535 rows or columns: wrong values"),
        (WHOLE, ["mm:f32:nn:0x3x16", "mm:f32:nn:3x0x16"], {"cause": "crash"}, "right but for empty results: crash"),
    ],
)
def test_the_first_words_say_what_is_right(
    right: list[str], wrong: list[str], how: dict[str, str], first_words: str
) -> None:
    told = judgement(right, wrong, **how)
    assert told.text.startswith(first_words)
    assert told.status == int(bool(wrong))
    assert told.to_dict()["headline"] == told.headline
    assert told.verdict.startswith("incorrect" if wrong else "right")


def test_problems_that_were_left_out_are_counted() -> None:
    told = judgement(WHOLE)
    told.not_judged, told.cut = ODD, "limit 15 s"
    assert told.text.startswith("right so far (4 of 8: limit 15 s)  k.py:mine\n")
    assert "left out: mm:f32:nn:17x65x127, mm:f32:nn:96x64x64, mm:f32:nn:64x96x64 and 1 more: limit 15 s" in told.text
    assert (told.status, told.to_dict()["cut"]) == (0, "limit 15 s")


def test_the_screen_says_where_the_product_is_atens() -> None:
    told = judgement(WHOLE + ODD)
    told.called = dict.fromkeys(ODD, "aten.mm.default")
    assert "\ncalls: aten::mm for M, N or K % 64 > 0\n" in told.text
    told.called = dict.fromkeys(WHOLE + ODD, "aten.mm.default")
    assert "\ncalls: aten::mm\n" in told.text
