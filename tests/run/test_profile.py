"""Where the time of a run goes: spans, how they reach the controller, the trace and the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm import trace
from pytest_gemm.run.profile import Profile, Used

CONFTEST = """
    import os, time

    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def dies(a, b):
        time.sleep(0.2)
        os._exit(0)

    def pytest_gemm_register_backends(registry):
        for function in (mine, dies):
            registry.add_callable(function.__name__, function)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:16x16x32", "mm:f32:nn:8x8x8"], distributions=["rand", "int-2"])
    def test_made(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


def span(name: str, start: float, seconds: float, kind: str | None = None, thread: int = 0) -> dict[str, Any]:
    kind = name if kind is None else kind
    return {"name": name, "kind": kind, "start": start, "seconds": seconds, "thread": thread, "args": {}}


def run(pytester: pytest.Pytester, *options: str, backends: str = "mine") -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    return pytester.runpytest_subprocess(f"--gemm-backends={backends}", *options, timeout=120)


def lanes(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a trace by the name of their lane, each in the order of time."""
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


@pytest.fixture
def kept() -> Iterator[None]:
    trace.begin()
    yield
    trace.stop()


def test_nothing_is_kept_where_nothing_is_asked_for() -> None:
    with trace.span("run", problem="mm"):
        trace.add("compile", trace.now())
    assert trace.taken() == []


@pytest.mark.usefixtures("kept")
def test_a_span_is_handed_out_once_and_also_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), trace.span("run", problem="mm"):
        _ = 1 / 0
    (found,) = trace.taken()
    assert (found["name"], found["args"], found["seconds"] >= 0) == ("run", {"problem": "mm"}, True)
    assert trace.taken() == []


def test_each_second_of_a_lane_counts_once() -> None:
    profile = Profile()
    inner = [span("compile", 2, 5), span("entire_frame_compile", 3, 3, "compile: Dynamo"), span("a step", 4, 1, "")]
    elsewhere = span("compile", 0, 50, thread=1)
    profile.absorb("main", [*inner, span("test[a]", 1, 8, "test"), span("start", 0, 0.5), elsewhere])
    found = {kind: seconds for kind, seconds in profile.seconds().items() if seconds}
    rest = {"pytest, fixtures, reports": 3.0, "compile: the rest": 2.0, "between tests": 0.5}
    assert found == {"start": 0.5, "compile: Dynamo": 3.0, **rest}
    assert sum(found.values()) == 9.0


def test_the_controller_does_not_count_and_a_worker_waits_for_the_end_of_the_run() -> None:
    profile = Profile(died={"gw2"})
    profile.absorb("main", [span("start", 0, 10)])
    profile.absorb("gw0", [span("test[a]", 0, 10, "test")])
    for name in ("gw10", "gw1", "gw2"):  # which had no test, and died
        profile.absorb(name, [span("start", 0, 5)])
    profile.close(10.0)
    assert profile.judging == ["gw0", "gw1", "gw2", "gw10"]
    assert profile.seconds()["wait"] == 10.0
    profile.used["gw0"] = Used(cpu=8.0, memory=3 * 10**8, threads=5)
    profile.used["gw2"] = Used(cpu=2.0, memory=2 * 10**8, threads=4)
    assert profile.lines(2)[-4:] == [
        "4 workers, 35.0 s in all; workers waited 29% of the time",
        "tests from 0.0 s to 10.0 s, the end of the run at 10.0 s; the longest took 10.0 s: test[a]",
        "CPU time 10.0 s, 50% of 2 cores; 5 threads at most",
        "memory of a worker at its end: 300 MB at most, 0.5 GB in all",
    ]


def test_a_run_shows_each_part_of_a_case(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--gemm-profile", "--gemm-output=out")
    result.stdout.fnmatch_lines(
        ["*GEMM profile*", "what *seconds *share", "one process, * s", "tests from *", "CPU *", "trace: */trace.json;*"]
    )
    ((name, found),) = lanes(pytester.path / "out").items()
    assert name == "main"
    assert {"start", "collect", "operands", "compile", "run", "reference", "eager"} < {event["name"] for event in found}
    runs = [event for event in found if event["name"] == "run" and event["args"]["problem"] == "mm:f32:nn:8x8x8"]
    facts = {"problem": "mm:f32:nn:8x8x8", "backend": "mine", "candidate": "", "status": "passed"}
    assert [event["args"] for event in runs[:2]] == [{**facts, "distribution": name} for name in ("rand", "int-2")]
    tests = [event for event in found if event["cat"] == "test"]
    assert len(tests) == 2
    inside = [event for event in found if event["cat"] == "run"]
    for event in inside:
        assert any(t["ts"] <= event["ts"] and event["ts"] + event["dur"] <= t["ts"] + t["dur"] + 1 for t in tests)


def test_without_a_folder_the_table_says_how_to_keep_the_trace(pytester: pytest.Pytester) -> None:
    run(pytester, "--gemm-profile").stdout.fnmatch_lines(["*GEMM profile*", "--gemm-output=DIR keeps the trace"])
    assert not list(pytester.path.rglob("trace.json"))


def test_a_run_that_asks_for_none_has_none(pytester: pytest.Pytester) -> None:
    run(pytester, "--gemm-output=out").stdout.no_fnmatch_line("*GEMM profile*")
    assert not list(pytester.path.rglob("trace.json"))


def test_each_worker_has_a_lane_and_one_that_dies_loses_its_last_case(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-n1", "--gemm-profile", "--gemm-output=out", backends="mine,dies")
    result.stdout.fnmatch_lines(["* workers, * s in all; workers waited *% of the time"])
    found = lanes(pytester.path / "out")
    assert list(found)[:2] == ["controller", "gw0"]
    assert len(found) > 2, "another worker went on"
    judged = [event["name"] for events in found.values() for event in events if event["cat"] == "test"]
    assert [name for name in judged if "mine" in name], judged
    assert any(event["name"] == "wait" for event in found["gw0"])
    names = [event["name"] for event in found["controller"]]
    assert names == ["start", "start and collection of the workers", "tests", "end of the run"]


def test_a_compile_has_the_steps_that_pytorch_times(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=TEST)
    options = ("--gemm-backends=cpp", "--gemm-problem=mm:f32:nn:16x16x32", "--gemm-profile", "--gemm-output=out")
    pytester.runpytest_subprocess(*options, timeout=300).assert_outcomes(passed=1)
    found = lanes(pytester.path / "out")["main"]
    (compiled,) = [event for event in found if event["name"] == "compile"]
    steps = [event for event in found if event["cat"].startswith("compile: ")]
    assert {"compile: Dynamo", "compile: lowering", "compile: code generation"} <= {event["cat"] for event in steps}
    for event in steps:
        assert compiled["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= compiled["ts"] + compiled["dur"] + 1
