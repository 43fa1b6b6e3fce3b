"""Workers on other machines: an ``ssh`` that starts them here, in another folder with another home."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gemm import remote
from pytest_gemm.run.record import Provenance, read
from pytest_gemm.run.state import RunState

SSH = """#!/bin/sh
for command; do :; done
cd "$ELSEWHERE" && HOME="$ELSEWHERE" exec sh -c "$command"
"""
# Wrong for K above 32.  A file in the folder where it runs has it die on the other machine alone.
BACKEND = """
import os, pathlib

def matmul(a, b):
    if pathlib.Path("deadly").exists() and a.shape[-1] == 24:
        os.kill(os.getpid(), 9)
    return a[..., :32] @ b[..., :32, :]

def pytest_gemm_register_backends(registry):
    registry.add_callable("mine", matmul)
"""
LINES = ("mm:f32:nn:4x4x40", "mm:f32:nn:4x4x24", "mm:f32:nn:4x4x41", "mm:f32:nn:4x4x42")


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the other machine's workers start."""
    programs = pytester.mkdir("programs")
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    there = pytester.mkdir("elsewhere")
    for folder in (pytester.path, there):
        (folder / "conftest.py").write_text(BACKEND)
    (there / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ELSEWHERE", str(there))
    return there


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    spec = f"ssh=farm//python={sys.executable}//chdir=."
    given = ("--pyargs", "pytest_gemm.conformance", "-d", f"--tx={spec}", "-p", "no:cacheprovider", *arguments)
    return pytester.runpytest_subprocess(*given, timeout=300)


@pytest.mark.slow
def test_a_run_on_two_machines_is_one_run(pytester: pytest.Pytester, elsewhere: Path) -> None:
    (elsewhere / "deadly").touch()
    problems = (f"--gemm-problem={','.join(LINES)}", "--gemm-distributions=rand")
    result = run(pytester, "--tx=popen", "--gemm-backends=mine", *problems, "-ktest_product", "--gemm-output=out")
    shown = result.stdout.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    record = read(pytester.path / "out/run.jsonl")
    assert {outcome.problem for outcome in record.outcomes} == set(LINES)
    assert record.totals is not None
    assert any(note.startswith("on farm (") for note in record.totals.notes)
    # Each failure has its files on the machine that judged it.
    failed = {(one.problem, one.distribution) for one in record.outcomes if one.status.is_failure}
    reports = [*pytester.path.glob("out/failures/*/report.txt"), *elsewhere.glob("out/failures/*/report.txt")]
    assert len(reports) == len(failed) == len(LINES)
    if "crashed" in shown:  # the other machine had that problem
        assert "mm:f32:nn:4x4x24 on mine: crashed: the kernel's process died in run" in shown


@pytest.mark.slow
def test_a_run_on_another_machine_alone(pytester: pytest.Pytester, elsewhere: Path) -> None:
    (elsewhere / "deadly").touch()
    result = run(pytester, "--gemm-backends=mine,triton", f"--gemm-problem={LINES[1]}", "-ktest_product")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*mm:f32:nn:4x4x24 on mine: crashed: the test process on farm died in the test*"])


@pytest.mark.slow
def test_what_only_the_other_machine_refuses(pytester: pytest.Pytester, elsewhere: Path) -> None:
    (elsewhere / "conftest.py").write_text("")
    result = run(pytester, "--tx=popen", "--gemm-backends=mine", f"--gemm-problem={LINES[0]}", "-ktest_product")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: worker gw0 on farm: --gemm-backends=mine: unknown backend 'mine'*"])


# -- without another machine -----------------------------------------------------------------------------------------


def spec_of(host: str | None) -> Any:
    others = dict.fromkeys(("vagrant_ssh", "socket", "via"))
    return SimpleNamespace(**others, ssh=host and f"-p 2222 {host}", popen=host is None)


def node_of(spec: Any, name: str = "gw0") -> Any:
    return SimpleNamespace(gateway=SimpleNamespace(id=name, spec=spec), workerinput={}, workeroutput={})


def test_a_machine_with_another_torch_is_refused() -> None:
    config: Any = SimpleNamespace(workerinput={"gemm_versions": {"torch": "2.12.0", "nvcc": "13.0"}}, workeroutput={})
    config.pluginmanager = SimpleNamespace(register=None)
    torch = metadata.version("torch")
    with pytest.raises(pytest.UsageError, match=f"--tx: torch is {re.escape(torch)} there, and 2.12.0 here"):
        remote.register(config, RunState())


def test_workers_share_the_cores_of_their_own_machine_and_the_summary_names_it() -> None:
    state = RunState(run=Provenance(versions={"torch": "2.13.0"}))
    hooks = remote._Controller(state)
    specs = [spec_of(None), *(spec_of("farm") for _ in range(3)), spec_of("other")]
    hooks.pytest_xdist_setupnodes(specs)
    nodes = [node_of(spec, f"gw{i}") for i, spec in enumerate(specs)]
    for node in nodes:
        hooks.pytest_configure_node(node)
    assert [node.workerinput["gemm_workers"] for node in nodes] == [1, 3, 3, 3, 1]
    assert ["gemm_versions" in node.workerinput for node in nodes] == [False, True, True, True, True]
    for node in nodes:
        node.workeroutput["gemm_cpu"] = "theirs"
        hooks.pytest_testnodedown(node, None)
    hooks.pytest_sessionfinish()
    assert state.notes == ["on farm (theirs): gw1 gw2 gw3", "on other (theirs): gw4"]
