"""What a speed run says: nothing is hidden, figures have their intervals, and every line fits."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from scipy import stats
from speed_runs import CASE, LINE, OTHER, PEAKS, REASONS, TIMED, example, measured, problems, run_of, stored

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Reason, Status, Verdict
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Judgement, Peaks, Sample, Session
from pytest_gemm.speed.report import rows as rows_module
from pytest_gemm.speed.report import text as reports
from pytest_gemm.speed.report.page import page
from pytest_gemm.speed.report.rows import Run

# -- the table


@pytest.mark.parametrize("mode", ["baseline", "against", "none"])
def test_every_case_has_a_line(mode: rows_module.Mode) -> None:
    odd = "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:1024x65536x4096:bias+leaky_relu-0.1:quant.rowwise:a.padded+offset"
    run = dataclasses.replace(example([*problems(), odd]), mode=mode)
    lines = reports.table(run)
    body = lines[3 : 3 + len(run.judgements)]
    for judgement, line in zip(run.judgements, body, strict=True):
        assert judgement.case.backend in line
        assert line.startswith(f"{judgement.case.problem} ")
        assert line.endswith(str(judgement.verdict)) == (mode != "none")


@pytest.mark.parametrize("how", ["baseline", "against", "first"])
def test_the_reports_name_what_was_timed_and_what_it_was_compared_with(how: str) -> None:
    run = dataclasses.replace(
        run_of(TIMED), software={"torch": "2.13.0+cpu"}, mode="against" if how == "against" else "baseline"
    )
    run.sessions[:] = [replace(one, commit="ab12cd3+dirty") for one in run.sessions]
    named = "torch 2.13.0+cpu, commit ab12cd3+dirty"
    if how == "baseline":
        run.stored = {TIMED[0].case: stored(TIMED[0].case, [1e3], software={"torch": "2.12.0"}, commit="99")}
        named += " against baselines of torch 2.12.0, commit 99"
    elif how == "against":
        run.base, run.base_label = [Session("gpu", software={"torch": "2.11.0"})], "../old"
        named += " against ../old (torch 2.11.0)"
    assert reports.table(run)[0] == named
    assert reports.markdown(run, "Speed").startswith("## Speed: torch 2.13.0")
    assert f"<h1>Speed: {named}</h1>" in page(run, "Speed")


@pytest.mark.parametrize(
    ("line", "peaks", "rate"),
    [
        (LINE, PEAKS, "34.4 TFLOP/s"),
        (OTHER, PEAKS, "33.8 GB/s"),
        (OTHER, Peaks(), "537 GFLOP/s"),
        ("int_mm:i8-i8-i32:nt:1024x4096x4096", PEAKS, "34.4 TOP/s"),
    ],
)
def test_the_rate_is_of_what_limits_the_case(line: str, peaks: Peaks, rate: str) -> None:
    (row,) = run_of(measured([(1e-3, None)], CaseId("triton", line)), peaks=peaks).rows
    assert row.rate == rate
    assert (row.share is None) == (not peaks.flops)


def test_energy_and_what_held_the_clock_stand_beside_the_time_where_a_device_tells() -> None:
    told = [{"joule": joule, "sw_power_cap_share": share} for joule, share in ((0.030, 0.5), (0.032, 0.75))]
    hot = [sample for some in told for sample in measured([(1e-3, None)], telemetry=some)]
    cool = measured([(1e-3, None)] * 2, CaseId("triton", OTHER))
    run = run_of(hot, cool)
    head, *body = reports.table(run)[2:5]
    assert re.search(r"time +energy +clock held by", head)
    assert re.search(r"1.00 ms +31.0 mJ +sw power cap 75%", body[0])
    assert re.search(r"1.00 ms +- +-", body[1])
    assert all(text in page(run, "Speed") for text in ("31.0 mJ", "sw power cap 75%", "<dt>energy</dt>"))
    assert "energy" not in "\n".join([*reports.table(run_of(cool)), page(run_of(cool), "Speed")])


# -- intervals, winners, means


def test_an_interval_is_students_over_sessions_and_disturbed_ones_do_not_count() -> None:
    ratios = [1.1, 1.2, 1.15, 1.3]
    samples = measured([(1e-3, ratio * 1e-3) for ratio in ratios])
    noisy = measured([(1e-3, 9e-3)], disturbed="load")
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 3, statistics.fmean(logs), stats.sem(logs))
    speedup = run_of(samples + noisy).rows[0].speedup
    assert speedup is not None
    assert (speedup.low, speedup.high) == pytest.approx((math.exp(low), math.exp(high)))
    (only,) = run_of(noisy, peaks=PEAKS).rows
    assert (only.doubtful, only.speedup, only.share) == (True, None, None)


def test_what_was_disturbed_is_said_and_nothing_is_derived_from_it() -> None:
    load = "others used 0.90 cores that it waited for"
    good, noisy = measured([(1e-3, 2e-3)] * 2), measured([(26e-3, 1e-3)] * 2, CaseId("cutlass", LINE), disturbed=load)
    run = run_of(good, noisy, verdict=Verdict.NO_BASELINE, peaks=Peaks(disturbed="nothing was calm"))
    lines = reports.table(run)
    assert "  26.0 ms?  " in next(line for line in lines if "cutlass" in line)
    assert any(line.endswith("; ?: disturbed in every session") for line in lines)
    told = f"2 of 4 samples dropped, for instance: {load}; 1 case with no other sample: cutlass-{LINE}"
    assert told in lines
    assert "no roofline: nothing was calm" in lines
    assert "fastest of 1 problem: too close to call 1" in lines
    assert [mean.entrant for mean in run.means] == ["triton"]
    assert "2 of 4 samples dropped" in reports.markdown(run, "speed")


def test_who_is_fastest_and_the_ratio_beside_a_case_are_one_estimate() -> None:
    """A comparator that is a backend of the run, too, is timed in windows of its own, here in disturbed ones."""
    slower = measured([(1e-3, ratio * 1e-3) for ratio in (0.55, 0.56, 0.54)])
    own = measured([(seconds, None) for seconds in (26e-3, 25e-3, 27e-3)], CaseId("aten", LINE))
    run = run_of(slower, own, verdict=Verdict.NO_BASELINE)
    (found,) = run.winners
    assert (found.entrant, found.clear) == ("aten", True)
    assert found.lead is not None
    assert found.lead.middle == pytest.approx(1 / 0.55, rel=0.01)
    lines = reports.summary(run)
    assert "fastest of 1 problem: aten 1 (by 1.82x)" in lines
    assert "triton over aten: 0.55x" in lines


@pytest.mark.parametrize(
    ("line", "seconds", "cell"),
    [
        (OTHER, 1.0, "10%"),
        (OTHER, 0.1, "100%"),
        (OTHER, 0.1 / 1.25, "125%"),
        (OTHER, 0.1 / 114.51, "cached"),
        (LINE, 0.1 / 1.4, "140%"),  # PyTorch, of which the rate is, may be bad at a type
    ],
)
def test_a_memory_that_is_no_limit_has_no_share(line: str, seconds: float, cell: str) -> None:
    problem = Problem.parse(line)
    least, _ = roofline.limit(roofline.work(problem), "f16", PEAKS) or (0.0, "")
    assert least
    (row,) = run_of(measured([(10 * least * seconds, None)], CaseId("triton", line)), peaks=PEAKS).rows
    assert row.peak == cell


# Relative to a run-wide disturbance of each session, which slows all alike.
SESSIONS = (1.0, 1.3, 0.9)


@pytest.mark.parametrize(
    ("seconds", "sessions", "winner", "runner_up", "clear"),
    [
        ({"triton": 1.0, "cutlass": 1.2, "aten": 1.5}, SESSIONS, "triton", "cutlass", True),
        ({"triton": 1.2, "cutlass": 1.3, "aten": 1.0}, SESSIONS, "aten", "triton", True),
        ({"triton": 1.0, "cutlass": 1.0001, "aten": 1.5}, SESSIONS, "triton", "cutlass", False),
        ({"triton": 1.0, "cutlass": 1.03, "aten": 1.5}, SESSIONS[:1], "triton", "cutlass", True),
        ({"triton": 1.0, "cutlass": 1.01, "aten": 1.5}, SESSIONS[:1], "triton", "cutlass", False),
    ],
)
def test_the_winner_is_clear_when_its_lead_within_sessions_is(
    seconds: dict[str, float], sessions: Sequence[float], winner: str, runner_up: str, clear: bool
) -> None:
    jitter = {"triton": (1.0, 1.0, 1.0), "cutlass": (1.0, 1.004, 0.997)}
    cases = [
        measured(
            [(common * seconds[name] * jitter[name][i], common * seconds["aten"]) for i, common in enumerate(sessions)],
            CaseId(name, LINE),
        )
        for name in jitter
    ]
    (found,) = run_of(*cases).winners
    assert (found.entrant, found.clear) == (winner, clear)
    assert list(found.seconds_by) == sorted(seconds, key=lambda name: seconds[name])
    assert found.lead is not None
    assert found.lead.middle == pytest.approx(seconds[runner_up] / seconds[winner], rel=0.01)
    told = reports.summary(run_of(*cases))
    assert any(line.startswith("fastest of 1 problem: " + (winner if clear else "too close")) for line in told)
    assert any("without an interval" in line for line in told) == (len(sessions) == 1)


def test_the_mean_speed_up_is_geometric() -> None:
    run = run_of(measured([(1.0, 4.0)]), measured([(1.0, 0.25)], CaseId("triton", OTHER)))
    (mean,) = run.means
    assert (mean.entrant, mean.comparator, mean.cases) == ("triton", "aten", 2)
    assert (mean.speedup, mean.worst, mean.best) == pytest.approx((1.0, 0.25, 4.0))
    told = "triton over aten: 1.00x, the geometric mean of 2 cases from 0.25x to 4.00x"
    assert told in reports.summary(run)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (run_of(TIMED, anchor=Reason("anchor-shift", "aten moved by 4%")), "anchor shift: aten moved by 4%"),
        (run_of(TIMED, notes=["the clock was locked"]), "the clock was locked"),
        (run_of(TIMED, mode="none"), "1 case timed, compared with nothing"),
        (run_of(TIMED, mode="against"), "1 case against the base environment: 1 same"),
        (run_of(TIMED, verdict=Verdict.UNDECIDED), "undecided, underpowered: 1 case"),
        (
            run_of(TIMED, verdict=Verdict.UNDECIDED),
            f"  {CASE}: a slow-down below 12% could not be seen (measure with more sessions)",
        ),
        (
            run_of([replace(TIMED[0], status=Status.INCORRECT, reason=Reason("nan", "NaN at (0, 0)"))]),
            f"no estimate, incorrect: NaN at (0, 0): {CASE}",
        ),
        (
            run_of(measured([(1e-3, 1e-3)], phases={"prepare": 20.0, "time": 2.0}), seconds=30.0),
            "30 s, 1 process: prepare 20 s, time 2 s",
        ),
        (Run([]), "0 cases against stored baselines"),
    ],
)
def test_the_summary_hides_nothing(run: Run, told: str) -> None:
    assert told in reports.table(run)
    assert reports.markdown(run, "speed")


@pytest.mark.parametrize(
    ("verdict", "mode", "told"),
    [
        (Verdict.NO_BASELINE, "baseline", ["to record the 1 without a baseline:", "  pytest perf --gemm-record"]),
        (Verdict.FASTER, "baseline", ["to record the 1 faster:", "  pytest perf --gemm-record"]),
        (
            Verdict.SLOWER,
            "baseline",
            [
                "if a slow-down is meant, run:",
                f"  pytest perf --gemm-record; pytest-gemm baseline accept {CASE} --reason 'why it may be slower'",
            ],
        ),
        (
            Verdict.UNDECIDED,
            "baseline",
            [
                "to record the 1 whose baseline shows large slow-downs only:",
                "  pytest perf --gemm-record --gemm-sessions=24",
            ],
        ),
        (Verdict.SAME, "baseline", []),
        (Verdict.SLOWER, "against", []),
    ],
)
def test_the_summary_says_what_to_do(verdict: Verdict, mode: rows_module.Mode, told: list[str]) -> None:
    lines = reports.summary(run_of(TIMED, verdict=verdict, mode=mode))
    assert [line for line in lines if "record" in line or "is meant" in line] == told


def test_what_only_more_sessions_of_the_baseline_decide_is_not_to_be_run_again() -> None:
    run = run_of(TIMED, verdict=Verdict.UNDECIDED, undecided_share=0.9)
    assert reports.summary(run)[-1].endswith(
        "(record more sessions of the baselines, or allow it with --gemm-undecided=100)"
    )


IMPOSSIBLE = Sample(CaseId("cpp", LINE), "cpu", Status.IMPOSSIBLE, Reason("above-ceiling", "too fast"))


@pytest.mark.parametrize(
    ("verdicts", "changes", "told", "red"),
    [
        ("same same", {}, "gate: 2 same", False),
        ("slower same no-baseline", {"fatal": {Verdict.SLOWER}}, "FAILED: 1 slower", False),
        ("slower same no-baseline", {}, "gate: 1 slower, 1 no-baseline, 1 same", False),
        (
            "slower no-baseline",
            {"fatal": {Verdict.SLOWER, Verdict.NO_BASELINE}, "failed": {("cpp", LINE): IMPOSSIBLE}},
            "FAILED: 1 impossible, 1 slower, 1 no-baseline",
            False,
        ),
        ("undecided same", {"fatal": {Verdict.UNDECIDED}, "undecided_share": 1.0}, "FAILED: 1 undecided", False),
        (
            "undecided undecided no-baseline",
            {},
            (
                "FAILED: 2 of 2 compared cases undecided, more than --gemm-undecided=90 allows (run again on a quiet "
                "machine, or allow it with --gemm-undecided=100)"
            ),
            True,
        ),
        ("undecided undecided", {"undecided_share": 1.0}, "gate: 2 undecided", False),
        ("undecided", {"mode": "none"}, "", False),
        ("no-baseline", {"undecided_share": 1.0}, "gate: 1 no-baseline", False),
    ],
)
def test_the_summary_ends_with_the_verdicts_and_what_fails(
    verdicts: str, changes: dict[str, Any], told: str, red: bool
) -> None:
    words = [Verdict(word) for word in verdicts.split()]
    run = run_of(*(measured([(1e-3, 1e-3)], CaseId("triton", line)) for line in problems()[: len(words)]))
    judgements = [dataclasses.replace(j, verdict=word) for j, word in zip(run.judgements, words, strict=True)]
    run = dataclasses.replace(run, judgements=judgements, **{"undecided_share": 0.9, **changes})
    assert run.decided_too_little == red
    last = reports.summary(run)[-1]
    assert last == told or (not told and not last.startswith("gate:"))


# -- a failure

SLOWER = Judgement(
    CASE,
    Verdict.SLOWER,
    Reason("slower-confirmed", "slower in the screen and in 5 of 5 new processes"),
    change=0.053,
    low=0.041,
    high=0.065,
    minimum_effect=0.021,
    seconds=123.4e-6,
    comparator_seconds=130e-6,
    stored_seconds=117.2e-6,
    weight=1.0,
    sessions=6,
    selection="was a, is b",
)


def test_a_failure_says_what_how_much_against_what_how_sure_and_how_to_rerun() -> None:
    text = reports.failure(Run(stored={CASE: stored(CASE, [117.2])}), SLOWER, "pytest rerun")
    assert text.splitlines() == [
        f"{LINE} on triton: slower, +5.3% (95% interval +4.1% to +6.5%)",
        "  now 123 us, was 117 us: baseline of 2026-07-01, commit ab12cd3; comparator 130 us",
        "  slower-confirmed: slower in the screen and in 5 of 5 new processes",
        "  from 6 processes, judged by time relative to the comparator; a slow-down of 2.1% would have been seen",
        "  selection changed: was a, is b",
        (
            f"  if it is meant: pytest perf --gemm-record; pytest-gemm baseline accept {CASE} --reason "
            "'why it may be slower'"
        ),
        "  rerun: pytest rerun",
    ]


def test_a_missing_baseline_says_how_to_record_it() -> None:
    missing = Judgement(CASE, Verdict.NO_BASELINE, REASONS[Verdict.NO_BASELINE], seconds=1e-3, sessions=1)
    assert reports.failure(Run(), missing, "pytest rerun").splitlines() == [
        f"{LINE} on triton: no-baseline",
        "  now 1.00 ms",
        "  no-baseline: nothing is stored for it on this hardware",
        "  from 1 process",
        "  to record it: pytest perf --gemm-record",
        "  rerun: pytest rerun",
    ]


# -- Markdown


def test_markdown_has_what_moved_first_and_folds_the_rest() -> None:
    run = example()
    text = reports.markdown(run, "Speed")
    open_part = text[: text.index("<details>")]
    moved = [j for j in run.judgements if j.verdict in {Verdict.SLOWER, Verdict.FASTER, Verdict.UNDECIDED}]
    assert len(moved) > 2
    assert [line.split("|")[3].strip(" *") for line in open_part.splitlines() if line.startswith("| `")] == sorted(
        (str(j.verdict) for j in moved), key=["slower", "faster", "undecided"].index
    )
    whole = re.sub(" +", " ", text[text.index(f"All {len(run.judgements)} cases") :])
    assert all(f"| `{j.case.problem}` | `{j.case.backend}` | {j.verdict} |" in whole for j in run.judgements)
    assert text.count("<details>") == text.count("</details>") == 1


def test_markdown_survives_what_names_and_reasons_hold() -> None:
    nasty = "was `a|b`,\nis <b>_c_</b>"
    case = CaseId("mine", LINE, "a|b`c")
    run = run_of(measured([(1e-3, 1e-3)], case), verdict=Verdict.UNDECIDED, notes=[nasty])
    told = [dataclasses.replace(j, reason=Reason("odd", nasty)) for j in run.judgements]
    text = reports.markdown(dataclasses.replace(run, judgements=told), "<b>|</b>")
    assert "<b>" not in text
    columns = 0
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert columns in {0, cells} or not cells
        columns = cells
