"""Where the time of a run goes, and what its tests took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.core import trace
from pytest_gemm.run import timeline

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


def run(pytester: pytest.Pytester, *options: str, backends: str = "mine") -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    return pytester.runpytest_subprocess(f"--gemm-backends={backends}", *options, timeout=120)


# -- what tests took -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": [1]}', '{"a": "x"}'])
def test_a_file_that_is_damaged_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "durations.json"
    path.write_text(text, encoding="utf-8")
    assert timeline.read(path) == {}
    timeline.record(path, {"a": 1.0, "b": 2.0})
    timeline.record(path, {"a": 3.0})
    assert timeline.read(path) == {"b": 2.0, "a": 3.0}


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    timeline.record(tmp_path / "file" / "durations.json", {"a": 1.0})


# -- the spans -------------------------------------------------------------------------------------------------------


def span(name: str, start: float, seconds: float, kind: str | None = None) -> dict[str, Any]:
    return {"name": name, "kind": name if kind is None else kind, "start": start, "seconds": seconds}


def lanes(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The events of a trace by the name of their lane, each in the order of time."""
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
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


@pytest.mark.usefixtures("kept")
def test_a_span_is_handed_out_once_and_also_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), trace.span("run", problem="mm"):
        _ = 1 / 0
    (found,) = trace.taken()
    assert (found["name"], found["args"], found["seconds"] >= 0) == ("run", {"problem": "mm"}, True)
    assert trace.taken() == []


def test_each_second_of_a_lane_counts_once() -> None:
    inner = [span("compile", 2, 5), span("entire_frame_compile", 3, 3, "compile: Dynamo"), span("a step", 4, 1, "")]
    found = timeline.own_seconds([*inner, span("test[a]", 1, 8, "test"), span("start", 0, 0.5)])
    assert found == {"start": 0.5, "compile: Dynamo": 3.0, "compile": 2.0, "test": 3.0}


def test_a_run_shows_each_part_of_a_case(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--gemm-profile", "--gemm-output=out")
    result.stdout.fnmatch_lines(
        ["*GEMM profile*", "what *seconds *share", "1 process(es), * s in all, within * s", "trace: */trace.json;*"]
    )
    ((name, found),) = lanes(pytester.path / "out").items()
    assert name == "main"
    wanted = {"collect", "import of torch", "operands", "compile", "run", "reference", "eager", "end of the run"}
    assert wanted < {event["name"] for event in found}
    runs = [event for event in found if event["name"] == "run" and event["args"]["problem"] == "mm:f32:nn:8x8x8"]
    facts = {"problem": "mm:f32:nn:8x8x8", "backend": "mine", "candidate": ""}
    assert [event["args"] for event in runs[:2]] == [{**facts, "distribution": name} for name in ("rand", "int-2")]
    tests = [event for event in found if event["name"].startswith("call ")]
    assert len(tests) == 2
    for event in (one for one in found if one["cat"] == "run"):
        assert any(t["ts"] <= event["ts"] and event["ts"] + event["dur"] <= t["ts"] + t["dur"] + 1e3 for t in tests)


def test_the_trace_is_asked_for_and_needs_a_folder(pytester: pytest.Pytester) -> None:
    run(pytester, "--gemm-profile").stdout.fnmatch_lines(["*GEMM profile*", "--gemm-output=DIR keeps the trace"])
    run(pytester, "--gemm-output=out").stdout.no_fnmatch_line("*GEMM profile*")
    assert not list(pytester.path.rglob("trace.json"))


def test_each_worker_has_a_lane_and_one_that_dies_loses_its_last_case(pytester: pytest.Pytester) -> None:
    inline = "--gemm-set=run.inline=yes"
    result = run(pytester, "-n1", "--gemm-profile", "--gemm-output=out", inline, backends="mine,dies")
    result.stdout.fnmatch_lines(["* process(es), * s in all*"])
    found = lanes(pytester.path / "out")
    assert len({name for name in found if name.startswith("gw") and "thread" not in name}) > 1, "another one went on"
    names = [event["name"] for events in found.values() for event in events]
    assert any(name.startswith("call ") and "mine" in name for name in names)
    assert "end of the run" in {event["name"] for event in found["main"]}


@pytest.mark.study
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
