"""Sessions: a run times nothing itself, starts processes that do, and ends its tests as the gate judges them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import made_up_sessions
import pytest
from speed_runs import stored
from warm_processes import Programs

from pytest_gemm.config.config import SpeedConfig
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Status, Verdict
from pytest_gemm.machine import gpus
from pytest_gemm.machine.gpus import Gpu
from pytest_gemm.run.progress import Display
from pytest_gemm.speed import controller
from pytest_gemm.speed import runner as runner_module
from pytest_gemm.speed.data import Sample, Session, read_session
from pytest_gemm.speed.request import Group, Project, Request
from pytest_gemm.storage import files
from pytest_gemm.tools import cli

_POPEN: Final = subprocess.Popen

# Sessions that compile, judge and time; to measure the peaks would take seconds, and decides nothing here.
TIMED = """
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Peaks


def pytest_configure(config):
    if config.pluginmanager.has_plugin("gemm-speed-worker"):  # the run itself is in the process of the test
        roofline.measure = lambda device, dtypes: Peaks({"f32": 1e15}, 1e15)
"""

BACKENDS = """
import os
import signal


def correct(a, b):
    return a @ b


def wrong(a, b):
    return (a @ b) * 1.01


def dies(a, b):
    if a.shape[-2] == 48:
        os.kill(os.getpid(), signal.SIGKILL)
    return a @ b


def pytest_gemm_register_backends(registry):
    for one in (correct, wrong, dies):
        registry.add_callable(one.__name__, one)
"""

TEST = """
import pytest

@pytest.mark.gemm(problems=[{problems}])
def test_speed(gemm_case, gemm_speed):
    gemm_speed(gemm_case)
"""

LINES = ("mm:f32:nn:32x64x64", "mm:f32:nn:48x64x64", "mm:f32:nn:64x64x64")
CASE = CaseId("triton", LINES[0])


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose sessions make the times up."""
    scratch = pytester.mkdir("tmp")  # the lock of the machine lies there, and these runs time nothing for real
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.makeconftest(BACKENDS + made_up_sessions.CONFTEST)
    monkeypatch.setattr(subprocess, "Popen", made_up_sessions.Process)
    pytester.makepyfile(test_perf=TEST.format(problems=", ".join(map(repr, LINES[:1]))))
    return pytester


@pytest.fixture
def timing_project(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> pytest.Pytester:
    """A project whose sessions compile, judge and time."""
    monkeypatch.setattr(subprocess, "Popen", _POPEN)
    request.getfixturevalue("warm_sessions")
    project.makeconftest(BACKENDS + TIMED)
    return project


def with_problems(project: pytest.Pytester, *lines: str) -> None:
    project.makepyfile(test_perf=TEST.format(problems=", ".join(map(repr, lines))))


def run(project: pytest.Pytester, *args: str, sessions: int = 2) -> pytest.RunResult:
    """A run in this process; its sessions are processes."""
    common = ("--gemm-set=speed.windows=3", f"--gemm-sessions={sessions}", "--gemm-threads=1")
    return project.runpytest_inprocess(*common, *args)


def kept(folder: Path) -> list[Any]:
    return [read_session(path) for path in sorted(folder.glob("*.jsonl"))]


# -- the command of a session ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.study
def test_a_session_has_the_options_of_conftests_and_none_that_report(timing_project: pytest.Pytester) -> None:
    with (timing_project.path / "conftest.py").open("a") as file:
        file.write(
            "\ndef pytest_addoption(parser):\n"
            "    parser.addoption('--mine', default='0')\n"
            "\ndef pytest_sessionstart(session):\n"
            "    config = session.config\n"
            "    if config.pluginmanager.has_plugin('gemm-speed-worker'):\n"
            "        seen = (config.option.mine, config.option.xmlpath, config.option.maxfail)\n"
            "        config.rootpath.joinpath('seen').write_text(repr(seen))\n"
        )
    given = ("--mine=7", "--junitxml=r.xml", "--maxfail=3", "-k", "speed")
    assert run(timing_project, "--gemm-backends=correct", "--gemm-allow=no-baseline", *given, sessions=1).ret == 0
    assert (timing_project.path / "seen").read_text() == "('7', None, None)"


def test_the_command_that_records_selects_the_same_with_its_own_number_of_sessions() -> None:
    given = ("perf", "-n", "2", "--gemm-sessions", "1", "--gemm-threads=1", "-k", "not f16", "--gemm-sessions=3")
    made = Project("here", command=given).recording
    assert made == "pytest perf -n 2 --gemm-threads=1 -k 'not f16' --gemm-record"


# -- a run -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_readings_of_fresh_processes_become_benchmark_rounds_and_a_wrong_kernel_has_none(
    timing_project: pytest.Pytester,
) -> None:
    record, folder = timing_project.path / "bench.json", timing_project.path / "samples"
    result = run(
        timing_project,
        "--gemm-backends=correct,wrong",
        "--gemm-allow=slower",
        "--gemm-output=.",
        f"--benchmark-json={record}",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(["*GEMM speed on *", f"incorrect: *{LINES[0]} on wrong: *"])
    first, second = ({s.case.backend: s for s in session.samples} for session in kept(folder))
    assert first["correct"].comparator_name == "aten"
    assert not first["wrong"].is_timed
    (bench,) = json.loads(record.read_text())["benchmarks"]
    readings = [*first["correct"].subject, *second["correct"].subject]
    assert bench["stats"]["rounds"] == len(readings)
    assert bench["stats"]["min"] == pytest.approx(min(readings))
    assert bench["stats"]["data"] == pytest.approx(readings)
    facts = bench["extra_info"]
    assert (facts["backend"], facts["problem"], facts["sessions"]) == ("correct", LINES[0], 2)
    assert facts["tflops"] == pytest.approx(2 * 32 * 64 * 64 / (facts["estimate_us"] * 1e-6) / 1e12)
    assert facts["verdict"] == "no-baseline"
    assert bench["group"] == LINES[0]


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["LEAST_MS", "READING_MS"])
def test_an_impossible_time_is_never_stored_nor_allowed(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setenv(bound, "1.5")
    for given in ("--gemm-record", "--gemm-record=force", "--gemm-allow=slower,no-baseline"):
        result = run(project, "--gemm-backends=correct", given, "--gemm-output=out", sessions=5)
        assert result.ret == 1
        result.stdout.fnmatch_lines(
            [f"impossible: *{LINES[0]} on correct: every window of 5 sessions*", "FAILED: 1 impossible"]
        )
    assert not list(project.path.glob("baselines/*/*.jsonl"))
    with pytest.raises(SystemExit, match="4"):
        cli.main(["baseline", "record", "out/samples", "--sessions=5", "--force"])
    assert not list(project.path.glob("baselines/*/*.jsonl"))


@pytest.mark.slow
def test_without_a_baseline_a_run_is_red_unless_it_is_told_to_show(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=correct", sessions=1)
    assert result.ret == 12
    result.stdout.fnmatch_lines([f"*{LINES[0]} on correct: no-baseline*", "*--gemm-record*"])
    result = run(project, "--gemm-backends=correct", "--gemm-allow=no-baseline", sessions=1)
    assert result.ret == 0
    result.assert_outcomes()  # neither passed nor failed: "no-baseline" is a word of its own
    result.stdout.fnmatch_lines(["*1 no-baseline*"])


@pytest.mark.slow
def test_a_reviewer_sees_the_verdict_on_github_and_in_junit(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    junit = project.path / "junit.xml"
    result = run(project, "--gemm-backends=correct", "--gemm-output=out", f"--junit-xml={junit}", sessions=1)
    assert result.ret == 12
    (line,) = (text for text in result.outlines if text.startswith("::error"))
    number = (project.path / "test_perf.py").read_text().partition(LINES[0])[0].count("\n") + 1
    start = f"::error file=test_perf.py,line={number},title=correct%3A no-baseline::{LINES[0]} on correct: no-baseline"
    assert line.startswith(start)
    summary = (project.path / "step.md").read_text()
    assert summary.count("## GEMM speed of correct") == 1
    assert summary.strip() == (project.path / "out" / "summary.md").read_text().strip()
    assert '<property name="gemm_verdict" value="no-baseline"' in junit.read_text()


@pytest.mark.slow
def test_what_was_recorded_is_what_the_next_run_is_judged_by(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(project, "--gemm-backends=correct", "--gemm-record", sessions=5)
    assert result.ret == 0
    (file,) = (project.path / "baselines").glob("*/correct.jsonl")
    assert json.loads(file.read_text())["problem"] == LINES[0]
    monkeypatch.setenv("SUBJECT_MS", "1.3")
    result = run(project, "--gemm-backends=correct", sessions=3)
    assert result.ret == 11
    result.stdout.fnmatch_lines([f"*{LINES[0]} on correct: slower, +*", "*rerun: pytest *--gemm-backends=correct*"])
    # Recording it is not the way out, unless a reason is given.
    before = file.read_text()
    result = run(project, "--gemm-backends=correct", "--gemm-record", sessions=5)
    assert result.ret == 1
    assert file.read_text() == before
    result.stdout.fnmatch_lines(["*to store it: pytest-gemm baseline accept *"])
    # The last recording is meant, wherever its samples are; the one before had another speed.
    monkeypatch.setenv("SUBJECT_MS", "1.6")
    assert run(project, "--gemm-backends=correct", "--gemm-record", "--gemm-output=out", sessions=5).ret == 1
    words = ("baseline", "accept", "correct-*", "--reason=safer", "--sessions=5", "--force")
    assert cli.main(words) == 0
    assert "safer" in file.read_text()
    assert 1500 < json.loads(file.read_text())["median_us"] < 1700


@pytest.mark.slow
def test_the_printed_way_to_accept_a_slow_down_works_where_it_is_printed(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    """As in docs/tutorial/first-gate.md: in a folder below the one that has the baselines, copied as it stands."""
    folder = project.mkdir("gemm")
    (folder / "test_perf.py").write_text(TEST.format(problems=", ".join(map(repr, LINES[:2]))))
    monkeypatch.chdir(folder)
    given = ("test_perf.py", "--gemm-backends=correct", "--gemm-threads=1")
    assert project.runpytest_inprocess(*given, "--gemm-record").ret == 0
    monkeypatch.setenv("SUBJECT_MS", "1.3")
    result = project.runpytest_inprocess(*given)
    assert result.ret == 11
    result.stdout.fnmatch_lines(["FAILED: 2 slower"])
    (at,) = (number for number, line in enumerate(result.outlines) if line.startswith("if a slow-down is meant"))
    printed = result.outlines[at + 1]
    monkeypatch.setenv("PATH", f"{Path(programs.python).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\naccepted correct-mm:") == 2
    (file,) = project.path.rglob("correct.jsonl")
    assert file.parent.parent == project.path / "baselines"
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["epochs"][-1]["reason"], len(one["subject_us"])) for one in kept] == [("why it may be slower", 12)] * 2
    result = project.runpytest_inprocess(*given)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gate: 2 same"])


@pytest.mark.slow
def test_a_process_that_dies_loses_its_case_and_no_other(timing_project: pytest.Pytester) -> None:
    with_problems(timing_project, *LINES)
    folder = timing_project.path / "samples"
    result = run(timing_project, "--gemm-backends=dies", "--gemm-allow=slower", "--gemm-output=.", sessions=1)
    result.assert_outcomes(failed=1, passed=0)
    result.stdout.fnmatch_lines([f"crashed: *{LINES[1]} on dies: the kernel's process died in run: SIGKILL (Killed)*"])
    (session,) = kept(folder)  # of two processes, as one that can be recorded from
    assert session.complete
    assert {s.case.problem for s in session.samples if s.is_timed} == {LINES[0], LINES[2]}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_under_xdist_timing_is_done_by_one_process_for_all(project: pytest.Pytester) -> None:
    with_problems(project, *LINES[::2])
    folder = project.path / "samples"
    result = run(project, "-n2", "--gemm-backends=correct", "--gemm-allow=slower", "--gemm-output=.")
    assert result.ret == 0
    assert len(kept(folder)) == 2
    result.stdout.fnmatch_lines(["*GEMM speed on *", "*2 no-baseline*"])


def another_environment(project: pytest.Pytester) -> Path:
    """One below the project's folder: its interpreter is this one, with a folder to import from."""
    packages = project.mkdir("other") / "lib"
    packages.mkdir()
    python = packages.parent / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return packages


@pytest.mark.slow
@pytest.mark.study
@pytest.mark.parametrize("installed", [True, False])
def test_the_other_environment_runs_its_own_package_where_it_has_one(
    timing_project: pytest.Pytester, installed: bool
) -> None:
    here = timing_project.makepyfile(kernels="")
    there = another_environment(timing_project)
    if installed:
        (there / "kernels.py").touch()
    with (timing_project.path / "conftest.py").open("a") as file:
        file.write(
            "\nimport sys\nimport kernels\n"
            "def pytest_sessionstart(session):\n"
            "    worker = session.config.pluginmanager.get_plugin('gemm-speed-worker')\n"
            "    if worker:\n"
            "        with open('seen', 'a') as file: print(worker.request.group, kernels.__file__, file=file)\n"
        )
    result = run(timing_project, "--gemm-backends=correct", "--gemm-against=other", "--gemm-undecided=100")
    assert result.ret == 0
    seen = set((timing_project.path / "seen").read_text().splitlines())
    base = there / "kernels.py" if installed else here
    assert {line for line in seen if line.startswith("base")} == {f"base {base}"}
    assert f"head {here}" in seen
    note = "*other has no kernels: both sides imported the project's own, so a change of that is not measured*"
    (result.stdout.no_fnmatch_line if installed else lambda line: result.stdout.fnmatch_lines([line]))(note)


@pytest.mark.slow
def test_another_environment_that_is_none_is_a_usage_error(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=correct", "--gemm-against=nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gemm-against=nowhere: name an interpreter or a virtual environment*"])


@pytest.mark.slow
def test_two_environments_are_measured_in_alternation(project: pytest.Pytester) -> None:
    folder = project.path / "samples"
    result = run(project, "--gemm-backends=correct", f"--gemm-against={sys.executable}", "--gemm-output=.")
    assert result.ret == 0
    found = kept(folder)
    assert sorted(s.group for s in found) == ["base", "base", "head", "head"]
    by_date = sorted(found, key=lambda s: s.date)
    assert {s.group for s in by_date[:2]} == {"base", "head"}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_a_baseline_that_is_torn_is_said_before_anything_is_measured(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=correct", "--gemm-record", sessions=5)
    assert result.ret == 0
    (file,) = (project.path / "baselines").glob("*/correct.jsonl")
    file.write_text(file.read_text()[:-20])
    for more in ((), ("-n1",)):
        result = run(project, "--gemm-backends=correct", *more)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "correct.jsonl:1: torn or broken" in result.stderr.str()
        assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_a_store_that_cannot_be_written_is_said_before_anything_is_measured(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.path / "baselines").symlink_to("/sys/kernel")  # where no one makes a folder, not even root
    monkeypatch.setattr(runner_module.Runner, "compile", pytest.fail)
    result = run(project, "--gemm-backends=correct", "--gemm-record")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search("ERROR: speed: .*baselines/.*: cannot be locked: .*; make it writable", result.stderr.str())


@pytest.mark.slow
def test_a_session_on_a_full_disk_ends_the_run_with_one_line(timing_project: pytest.Pytester) -> None:
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))"  # less than the first line of a session
    with (timing_project.path / "conftest.py").open("a") as file:
        file.write(f"\n        import resource, sys\n        sys.dont_write_bytecode = True\n        {full}\n")
    result = run(timing_project, "--gemm-backends=correct", sessions=1)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: speed: *", "ERROR: *File too large"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


def test_a_request_that_cannot_be_written_ends_the_run_with_one_line(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "REQUEST", "none/request.json")
    result = run(project, "--gemm-backends=correct", sessions=1)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: speed: */none/request.json: No such file or directory"])


def test_a_recording_that_cannot_be_kept_for_accept_is_stored_and_said(project: pytest.Pytester) -> None:
    (project.path / "home").write_text("a file has the name of the folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(project.path / "home"))
        result = run(project, "--gemm-backends=correct", "--gemm-record=force")
    assert list((project.path / "baselines").glob("*/correct.jsonl"))
    result.stdout.fnmatch_lines(["*/home/pytest-gemm/last-recording is not complete: Not a directory; the run is red*"])
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
def test_a_run_that_decides_nothing_is_red_unless_that_is_allowed(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(project, "--gemm-backends=correct", "--gemm-record", sessions=5).ret == 0
    monkeypatch.setenv("DISTURBED", "others kept 2 cores busy")
    result = run(project, "--gemm-backends=correct")
    assert result.ret == 13
    result.assert_outcomes()  # no test has failed
    result.stdout.fnmatch_lines(
        [
            "FAILED: 1 of 1 compared cases undecided, more than --gemm-undecided=90 allows (*",
            "*1 undecided in *",
        ]
    )
    for allowed in ("--gemm-undecided=100", "--gemm-allow=slower"):
        assert run(project, "--gemm-backends=correct", allowed).ret == 0
    result = run(project, "--gemm-backends=correct", "--gemm-undecided=0")
    assert result.ret == 13
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{LINES[0]} on correct: undecided*", "FAILED: 1 undecided"])


class Selecting(runner_module.Runner):
    """A runner whose sessions take as long as the last selected candidate: the next of ``selects`` each time."""

    def __init__(self, config: Any, selects: Sequence[str]) -> None:
        self.config, self.project, self.device, self.failed = config, Project("here"), "cuda", {}
        self.selected, self._selects, self.asked = {"head": {}}, iter(selects), 0
        self.compile(Group("head"), [])

    def compile(self, group: Group, _: Sequence[CaseId]) -> None:
        self.asked += 1
        self.selected[group.name] = {CASE: next(self._selects)}

    def sessions(
        self, groups: Sequence[Group], cases: Sequence[CaseId], index: int, label: str, behind: int = 0
    ) -> dict[str, Session]:
        one = self.selected[groups[0].name][CASE]
        subject = ({"old": 1e-5, "bad": 4e-5}[one] * (1.0 + 1e-4 * index),) * 12
        sample = Sample(CASE, "cuda", Status.PASSED, subject=subject, selected=(one,))
        return {"head": Session("here", samples=(sample,))}


@pytest.mark.parametrize(
    ("selects", "verdict", "told"),
    [
        (["bad", "old"], Verdict.SAME, "was old, is bad in 2 of 8 sessions"),
        (["bad", "bad"], Verdict.SLOWER, "was old, is bad"),
        (["old"], Verdict.SAME, ""),
    ],
)
def test_a_selection_that_makes_a_case_slower_has_to_recur(
    selects: list[str], verdict: Verdict, told: str, tmp_path: Path
) -> None:
    # Autotuning on a busy machine takes a slow candidate now and then: nothing in the kernels has changed.
    known = stored(CASE, [10.0 + 1e-3 * i for i in range(8)], selected=("old",), contract="")
    config: Any = SimpleNamespace(speed=SpeedConfig(baselines=tmp_path), options=defaultdict(str))
    runner = Selecting(config, selects)
    measurement = controller._Measurement(runner, [CASE], [Group("head")])
    measurement.made.stored = {CASE: known}
    measurement.judge()
    (judgement,) = measurement.made.judgements
    assert judgement.verdict is verdict, judgement.reason
    assert judgement.selection == told
    assert runner.asked == len(selects)


def lock_of(tmp: Path, name: str) -> Path:
    folder = tmp / f"pytest-gemm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{name}.lock"


_TIMED: Final = ("-m", "pytest", "--gemm-backends=correct", "--gemm-sessions=1", "--gemm-allow=slower")


@pytest.mark.slow
def test_two_runs_of_a_machine_do_not_time_at_once_nor_wait_for_ever(
    project: pytest.Pytester, programs: Programs
) -> None:
    with contextlib.ExitStack() as holding:
        holding.enter_context(files.locked(lock_of(project.path / "tmp", "cpu")))
        result = project.run(programs.python, *_TIMED, "--gemm-set=speed.wait=0.2")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            [f"ERROR: speed: process {os.getpid()} holds * for more than 0.2 s: * raise --gemm-set=speed.wait *"]
        )
        waiting = project.popen(
            [programs.python, *_TIMED], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = b""
        while f"process {os.getpid()} is timing on cpu; waiting for it, 0 of 3600 s (speed.wait)".encode() not in said:
            assert waiting.stdout is not None
            line = waiting.stdout.readline()
            assert line, said
            said += line
        holding.close()
        rest, _ = waiting.communicate()
    assert waiting.returncode == 0, rest
    assert b"GEMM speed on" in rest


def test_two_gpus_are_timed_at_once_and_one_gpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def is_free(name: str) -> bool:
        try:
            with files.locked(lock_of(tmp_path, name), wait=-1.0):
                return True
        except files.LockTimeoutError:
            return False

    monkeypatch.setattr(gpus, "visible_gpu", lambda: Gpu(0, "GPU-a", "NVIDIA H200", "580.1", "9.0"))
    with runner_module.timed_apart("cuda", Display(None)):
        assert (is_free("GPU-a"), is_free("GPU-b"), is_free("cpu")) == (False, True, True)
    assert is_free("GPU-a")
    monkeypatch.setattr(gpus, "visible_gpu", lambda: None)  # without a driver
    with runner_module.timed_apart("cuda", Display(None)):
        assert not is_free("cuda")


@pytest.mark.slow
def test_pages_and_samples_that_cannot_be_written_end_no_run(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(_: Session) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner_module, "session_text", full)
    (project.path / "kept").mkdir()
    for name in ("report.html", "summary.md"):
        (project.path / "kept" / name).symlink_to("/dev/full")
    given = ("--gemm-allow=slower,no-baseline", "--gemm-output=kept")
    result = run(project, "--gemm-backends=correct", *given, sessions=1)
    assert result.ret == 15
    why = "is not complete: No space left on device; the run is red for it"
    result.stdout.fnmatch_lines_random([f"*/kept/{name} {why}" for name in ("report.html", "summary.md", "samples")])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_a_recording_ends_on_a_busy_machine_and_can_be_stored_from_its_good_sessions(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_commit", lambda _: "ab12cd3")
    begun: list[int] = []

    class Disturbed(made_up_sessions.Process):
        def __init__(self, args: Any, **how: Any) -> None:
            if isinstance(args, list) and "pytest_gemm.speed.worker" in args and Request.read(Path(args[-1])).timed:
                begun.append(Request.read(Path(args[-1])).index)
                monkeypatch.setenv("DISTURBED", "others used 0.98 of its cores" if len(begun) > 2 else "")
            super().__init__(args, **how)

    monkeypatch.setattr(subprocess, "Popen", Disturbed)
    result = run(project, "--gemm-backends=correct", "--gemm-record", sessions=8)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert begun == [0, 1, 2, 3, 4]
    said = "*--gemm-record ended after 5 sessions of 8: the machine is busy*"
    result.stderr.fnmatch_lines([said])
    result.stdout.fnmatch_lines(["speed: to record from these: pytest-gemm baseline record --sessions=5"])
    assert cli.main(["baseline", "record", "--force", "--sessions=2"]) == 0
    (file,) = project.path.glob("baselines/*/correct.jsonl")
    assert len(json.loads(file.read_text())["subject_us"]) == 2


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_threads_that_wait_give_up_their_core_where_nothing_is_timed(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    seen: dict[bool, set[str]] = defaultdict(set)

    class Noted(made_up_sessions.Process):
        def __init__(self, args: Any, **how: Any) -> None:
            super().__init__(args, **how)
            if self._is_session:
                timed = Request.read(Path(args[-1])).timed
                seen[timed].add(how["env"].get("OMP_WAIT_POLICY", "none"))

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "Popen", Noted)
    with_problems(project, *(f"mm:f32:nn:{m}x64x64" for m in range(8, 14)))
    with (project.path / "conftest.py").open("a") as file:  # one that imports torch meets it
        file.write(
            "\nimport os, pathlib; pathlib.Path('begun').write_text(os.environ.get('OMP_WAIT_POLICY', 'none'))\n"
        )
    run(project, "--gemm-backends=correct", "--gemm-allow=slower", sessions=1)
    theirs = own.get("OMP_WAIT_POLICY", "none")
    judged = theirs if own else "passive"
    assert seen == {False: {judged}, True: {theirs}}
    assert (project.path / "begun").read_text() == judged


def test_benchmark_only_which_skips_timed_tests_is_refused(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=correct", "--benchmark-only")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--benchmark-only skips every timed test; leave it out*"])


def test_without_scipy_timed_tests_are_refused_before_a_session(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    result = run(project, "--gemm-backends=correct")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*timed tests need the extra speed: scipy is not installed: pip install scipy"])
    record = (
        "import sys; sys.modules['scipy'] = None; from pytest_gemm.tools import cli; "
        "from pytest_gemm.speed.baseline import commands; "
        "commands._record = lambda _: __import__('pytest_gemm.speed.gate.design'); cli.main(['baseline', 'record'])"
    )
    ended = project.run(sys.executable, "-c", record)
    assert ended.ret == cli.USAGE_ERROR
    ended.stderr.fnmatch_lines(["*baseline needs the extra speed: scipy is not installed*"])


@pytest.mark.parametrize(
    ("given", "shown"), [((), False), (("--benchmark-json=b.json",), False), (("--benchmark-sort=min",), True)]
)
def test_tables_of_pytest_benchmark_are_shown_where_they_are_asked_for(
    project: pytest.Pytester, given: tuple[str, ...], shown: bool
) -> None:
    result = run(project, "--gemm-backends=correct", "--gemm-allow=slower", *given, sessions=1)
    assert any("Name (time in" in line for line in result.outlines) == shown
    if "--benchmark-json=b.json" in given:
        assert len(json.loads((project.path / "b.json").read_text())["benchmarks"]) == 1


def test_without_pytest_benchmark_timed_tests_are_judged(project: pytest.Pytester) -> None:
    quiet = ("--gemm-allow=slower", "--gemm-undecided=100")
    result = run(project, "--gemm-backends=correct", *quiet, "-pno:benchmark", sessions=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*GEMM speed on *", "*= 1 no-baseline in *"])
