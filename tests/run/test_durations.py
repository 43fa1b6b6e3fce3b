"""How long a run will take, by what its tests took in earlier ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gemm.run import durations
from pytest_gemm.run.durations import Taken

CONFTEST = """
    import time
    from pytest_gemm.run import durations

    durations.WORTH_A_LINE = 0.5

    def mine(a, b):
        time.sleep(0.3)
        return (a.float() @ b.float()).to(a.dtype)

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", mine)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:16x16x32", "mm:f32:nn:8x8x8"], distributions=["rand"])
    def test_made(gemm_case, gemm_check):
        gemm_check(gemm_case)

    def test_of_a_user():
        pass
"""


def times(*seconds: float, runs: int = 2) -> dict[str, Taken]:
    return {str(i): Taken(took, runs) for i, took in enumerate(seconds)}


@pytest.mark.parametrize(
    ("known", "groups", "workers", "said"),
    [
        (times(30.0, 31.0), ["0", "1"], 1, "about 70 s"),
        (times(30.0, 31.0), ["0", "1"], 2, "about 40 s"),
        (times(30.0, 31.0), ["01"], 2, "about 70 s"),  # which stay on one worker
        (times(30.0, 31.0, runs=1), ["0", "1"], 1, "at most 70 s"),
        (times(30.0), ["0", "1"], 1, "about 60 s"),  # the other one is like it
        (times(30.0), ["0", "1", "2"], 1, ""),
        (times(9.0), ["0"], 1, ""),
        (times(400.0), ["0"], 1, "about 7 min"),
        (times(7200.0), ["0"], 1, "about 2.0 h"),
        ({}, [], 4, ""),
    ],
)
def test_the_estimate(known: dict[str, Taken], groups: list[str], workers: int, said: str) -> None:
    assert durations.estimate(known, groups, workers) == said


def test_what_a_compile_took_does_not_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "durations.json"
    durations.record(path, {"a": 100.0, "b": 1.0})
    assert durations.read(path) == {"a": Taken(100.0, 1), "b": Taken(1.0, 1)}
    durations.record(path, {"a": 10.0})
    durations.record(path, {"a": 20.0})
    assert durations.read(path) == {"b": Taken(1.0, 1), "a": Taken(15.0, 3)}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": [1]}', '{"a": ["x", 1]}'])
def test_a_file_that_is_damaged_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "durations.json"
    path.write_text(text, encoding="utf-8")
    assert durations.read(path) == {}
    durations.record(path, {"a": 1.0})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1.0, 1]}


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    durations.record(tmp_path / "file" / "durations.json", {"a": 1.0})


def test_a_run_says_what_it_will_take(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    options = ("--gemm-backends=mine",)
    pytester.runpytest_subprocess(*options, timeout=120).stdout.no_fnmatch_line("*earlier runs*")
    said = "gemm: the tests take {}, by earlier runs on this machine"
    first = pytester.runpytest_subprocess(*options, "-n1", timeout=120)
    first.stdout.fnmatch_lines(["gemm: backends mine*", said.format("at most 10 s")])
    second = pytester.runpytest_subprocess(*options, timeout=120)
    second.stdout.fnmatch_lines(["gemm: backends mine*", said.format("about 10 s")])
    other = pytester.runpytest_subprocess(*options, "--gemm-level=full", timeout=120)
    other.stdout.no_fnmatch_line("*earlier runs*")
    (pytester.path / "elsewhere").mkdir()
    moved = pytester.runpytest_subprocess(*options, "--rootdir=..", "-n2", "--gemm-set=run.fork=no", timeout=120)
    assert moved.stdout.str().count("earlier runs") == 1
