"""Kernels that do something else when they are timed are red, each by its reason, and honest ones never are."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from cheats import DISHONEST, names

from pytest_gemm.speed.data import read_session

TEST: Final = """
import pytest

@pytest.mark.gemm(problems=["mm:f32:nn:96x96x96"])
def test_speed(gemm_case, gemm_speed):
    gemm_speed(gemm_case)
"""
# To measure the peaks would take seconds, and decides nothing here; nor do the times, so others may use the machine.
CONFTEST: Final = """
from cheats import pytest_gemm_register_backends
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Peaks
from pytest_gemm.speed.timing import cpu


def pytest_configure(config):
    if config.pluginmanager.has_plugin("gemm-speed-worker"):  # the run itself is in the process of the test
        roofline.measure = lambda device, dtypes: Peaks({"f32": 1e15}, 1e15)
        cpu.LOAD_OF_OTHERS = 1e9
"""
ON_CPU: Final = names("cpu", honest=False).split(",")
HONEST_ON_CPU: Final = names("cpu", honest=True).split(",")
ALONE: Final = [name for name, one in DISHONEST.items() if one.alone and "cpu" in one.devices]

BEGIN: Final = ["replay", "half", "cheap-by-stack"]

SHOW: Final = ("--gemm-sessions=1", "--gemm-allow=slower,no-baseline")
RECORD: Final = ("--gemm-sessions=2", "--gemm-record=force")  # however busy the machine is
AGAINST: Final = ("--gemm-sessions=2", "--gemm-allow=slower", f"--gemm-against={sys.executable}")

pytestmark = pytest.mark.slow


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose sessions load the kernels, judge and time."""
    scratch = pytester.mkdir("tmp")  # the lock of the machine lies there
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeini("[pytest]\nfilterwarnings = error\n")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_perf=TEST)
    return pytester


# Kernels that compute the product, and override ATen's while they are judged or timed.
OVERRIDES: Final = """
import time
import warnings
import torch

LIBRARY = torch.library.Library("aten", "IMPL")

def of_numpy(a, b):
    return torch.from_numpy(a.numpy() @ b.numpy())

def waits(a, b):
    time.sleep(0.005)
    return of_numpy(a, b)

def overriding(mm, at):
    calls = []

    def kernel(a, b):
        calls.append(0)
        if len(calls) == at:
            with warnings.catch_warnings(action="ignore"):
                LIBRARY.impl("mm", mm, "CPU")
        return of_numpy(a, b)

    return kernel

def pytest_gemm_register_backends(registry):
    registry.add_callable("breaks", overriding(lambda a, b: of_numpy(a, b) * 1.01, 12), dtypes=("f32",))
    registry.add_callable("slows", overriding(waits, 1), dtypes=("f32",))
    registry.add_callable("plain", lambda a, b: torch.mm(a, b), dtypes=("f32",), batched=False)
"""


def run(project: pytest.Pytester, backends: Sequence[str], *given: str) -> dict[str, tuple[str, str]]:
    """Status and reason code of each backend, as the run record, JUnit and the terminal say alike."""
    common = ("--gemm-set=speed.windows=12", "--gemm-threads=1", "--gemm-undecided=100")
    files = ("--gemm-output=out", "--junit-xml=junit.xml")
    result = project.runpytest_inprocess(*common, *files, f"--gemm-backends={','.join(backends)}", *given)
    lines = map(json.loads, (project.path / "out" / "run.jsonl").read_text().splitlines())
    found = {x["backend"]: (x["status"], (x["reason"] or {"code": ""})["code"]) for x in lines if "backend" in x}
    assert found.keys() == {*backends}, result.stdout.str()
    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    facts = [{x.attrib["name"]: x.attrib["value"] for x in case.iter("property")} for case in cases]
    assert {x["gemm_backend"]: x["gemm_status"] for x in facts} == {name: one[0] for name, one in found.items()}
    red = {name: one for name, one in found.items() if one[0] != "passed"}
    for name, (status, code) in red.items():
        result.stdout.fnmatch_lines([f"{status}: {code} *test_speed[[]{name}-*"])
        if code == "replayed":
            why = f"* on {name}: A had changed before a timed call, and an earlier result came back: *"
            result.stdout.fnmatch_lines([why, "no estimate, incorrect: *"])
    assert result.ret == (1 if red else result.ret)
    return found


def not_caught(found: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """The dishonest kernels that are green, or red for another reason."""
    return {x: one for x, one in found.items() if one[0] != "incorrect" or one[1] not in DISHONEST[x].codes}


@pytest.mark.usefixtures("warm_sessions")
@pytest.mark.parametrize(("backends", "given"), [(ON_CPU, SHOW), (BEGIN, AGAINST)], ids=["show", "against"])
def test_a_kernel_that_cheats_the_timer_is_incorrect_for_its_own_reason(
    project: pytest.Pytester, backends: Sequence[str], given: Sequence[str]
) -> None:
    assert not_caught(run(project, backends, *given)) == {}
    assert not list(project.path.glob("baselines/*/*.jsonl"))


@pytest.mark.usefixtures("warm_sessions")
@pytest.mark.parametrize("name", ALONE)
def test_a_kernel_that_works_on_the_timers_process_is_incorrect(project: pytest.Pytester, name: str) -> None:
    assert not_caught(run(project, [name], *SHOW, "--gemm-sessions=4")) == {}  # the machine may be busy in one


@pytest.mark.usefixtures("warm_sessions")
def test_threads_of_what_is_timed_wait_as_they_do_for_a_user(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)  # the run that this test belongs to has set it
    assert run(project, ["waits-as-found"], *SHOW) == {"waits-as-found": ("passed", "")}


@pytest.mark.usefixtures("warm_sessions")
def test_a_kernel_that_begins_to_cheat_after_its_baseline_was_recorded_is_incorrect(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as honest:
        honest.setenv("CHEATS_HONEST", "1")
        assert {*run(project, BEGIN, *RECORD).values()} == {("passed", "")}
    assert list(project.path.glob("baselines/*/replay.jsonl"))
    assert not_caught(run(project, BEGIN, "--gemm-sessions=1", "--gemm-allow=slower")) == {}


@pytest.mark.usefixtures("warm_sessions")
@pytest.mark.parametrize(
    ("backends", "given"),
    [
        pytest.param(HONEST_ON_CPU, SHOW, id="show"),
        # What a busy machine makes slower is confirmed, by 12 pairs of sessions.
        pytest.param(HONEST_ON_CPU[::4], AGAINST, id="against", marks=pytest.mark.study),
    ],
)
def test_no_honest_kernel_with_caches_threads_or_tuning_of_its_own_is_red(
    project: pytest.Pytester, backends: Sequence[str], given: Sequence[str]
) -> None:
    assert len(HONEST_ON_CPU) >= 15
    found = run(project, backends, *given)
    assert {name: one for name, one in found.items() if one != ("passed", "")} == {}


@pytest.mark.usefixtures("warm_sessions")
def test_a_kernel_that_overrides_aten_harms_no_neighbour_and_gains_nothing_by_it(project: pytest.Pytester) -> None:
    project.makeconftest(CONFTEST.replace("from cheats import pytest_gemm_register_backends", OVERRIDES))
    names = ["breaks", "slows", "plain"]
    assert run(project, names, *SHOW) == dict.fromkeys(names, ("passed", ""))
    session = read_session(project.path / "out" / "samples" / "cpu-head-000.jsonl")
    samples = {sample.case.backend: sample for sample in session.samples}
    assert max(samples["plain"].comparator) < 0.005, "the neighbour's comparator waits for nothing"
    said = "the comparator took [0-9.]+ ms beside it, and [0-9.]+ us in a process of its own"
    assert re.search(said, samples["slows"].disturbed)
    (row,) = (line for line in (project.path / "out" / "summary.md").read_text().splitlines() if "`slows`" in line)
    assert not re.search("[0-9]x", row.partition("`slows`")[2]), "no factor"
