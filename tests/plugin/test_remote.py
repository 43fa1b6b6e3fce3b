"""Workers on other machines: an ``ssh`` that starts them here, in another folder with another home."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gemm import remote
from pytest_gemm.config import CONFIG
from pytest_gemm.run.record import Provenance, read
from pytest_gemm.run.state import RunState

SSH = """#!/bin/sh
for command; do :; done
cd "$THERE" && HOME="$THERE" exec sh -c "$command"
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
def there(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the other machine's workers start."""
    programs = pytester.mkdir("programs")
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    there = pytester.mkdir("there")
    for folder in (pytester.path, there):
        (folder / "conftest.py").write_text(BACKEND)
    (there / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("THERE", str(there))
    return there


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    spec = f"ssh=lab//python={sys.executable}//chdir=."
    given = ("--pyargs", "pytest_gemm.conformance", "-d", f"--tx={spec}", "-p", "no:cacheprovider", *arguments)
    return pytester.runpytest_subprocess(*given, timeout=300)


@pytest.mark.slow
def test_a_run_on_two_machines_is_one_run(pytester: pytest.Pytester, there: Path) -> None:
    (there / "deadly").touch()
    problems = (f"--gemm-problem={','.join(LINES)}", "--gemm-distributions=rand")
    result = run(pytester, "--tx=popen", "--gemm-backends=mine", *problems, "-ktest_product", "--gemm-output=out")
    shown = result.stdout.str()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    record = read(pytester.path / "out/run.jsonl")
    assert {outcome.problem for outcome in record.outcomes} == set(LINES)
    assert record.totals is not None
    assert any(note.startswith("on lab (") for note in record.totals.notes)
    # Each wrong result has its files here, whichever machine judged it, and none is left there.
    wrong = {(one.problem, one.distribution) for one in record.outcomes if str(one.status) == "incorrect"}
    reports = [*pytester.path.glob("out/failures/*/report.txt")]
    assert len(reports) == len(wrong) == len(LINES) - 1
    assert not (there / "out").exists()
    if "crashed" in shown:  # the other machine had that problem
        assert "mm:f32:nn:4x4x24 on mine: crashed: the test process on lab died in the test" in shown


@pytest.mark.slow
def test_a_run_on_another_machine_alone(pytester: pytest.Pytester, there: Path) -> None:
    (there / "deadly").touch()
    result = run(pytester, "--gemm-backends=mine,triton", f"--gemm-problem={LINES[1]}", "-ktest_product")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*mm:f32:nn:4x4x24 on mine: crashed: the test process on lab died in the test*"])


@pytest.mark.slow
def test_what_only_the_other_machine_refuses(pytester: pytest.Pytester, there: Path) -> None:
    (there / "conftest.py").write_text("")
    result = run(pytester, "--tx=popen", "--gemm-backends=mine", f"--gemm-problem={LINES[0]}", "-ktest_product")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: worker gw0 on lab: --gemm-backends=mine: unknown backend 'mine'*"])


# -- before the first worker is started ------------------------------------------------------------------------------


class Gateway:
    """Of a machine that says this of itself."""

    def __init__(self, name: str, spec: Any, said: tuple[int, str, str]) -> None:
        self.id, self.spec, self.said = name, spec, said
        self.ran: list[str] = []

    def remote_exec(self, source: str) -> "Gateway":
        self.ran.append(source)
        return self

    def receive(self) -> tuple[int, str, str]:
        return self.said

    def waitclose(self) -> None:
        pass


def spec_of(host: str = "lab") -> Any:
    return SimpleNamespace(
        **dict.fromkeys(("popen", "vagrant_ssh", "socket", "via", "python", "chdir")),
        ssh=host,
        env={},
        _spec=f"ssh={host}",
    )


def machines(pytester: pytest.Pytester, specs: list[Any], **versions: str) -> tuple[Any, RunState]:
    config = pytester.parseconfigure("-d", "--tx=popen", "--gemm-backends=aten")
    state = RunState(run=Provenance(versions=versions, cpu="ours", threads=1))
    hooks: Any = remote._Machines(config, state)
    assert config.stash[CONFIG].threads
    hooks.pytest_xdist_setupnodes(specs)
    return hooks, state


def node_of(spec: Any, said: tuple[int, str, str], name: str = "gw0") -> Any:
    return SimpleNamespace(gateway=Gateway(name, spec, said), workerinput={})


def machine(gpus: int = 0, **versions: str) -> tuple[int, str, str]:
    run = {"cpu": "theirs", "versions": versions}
    return 0, json.dumps({"host": "vm", "cores": 8, "gpus": [str(i) for i in range(gpus)], "run": run}), ""


def test_a_machine_with_another_torch_is_refused(pytester: pytest.Pytester) -> None:
    spec = spec_of()
    hooks, _ = machines(pytester, [spec], torch="2.13.0", nvcc="13.0")
    with pytest.raises(pytest.UsageError, match=r"--tx ssh=lab: torch is 2.12.0 there, and 2.13.0 here"):
        hooks.pytest_configure_node(node_of(spec, machine(torch="2.12.0")))


def test_a_machine_without_the_package_is_refused(pytester: pytest.Pytester) -> None:
    spec = spec_of()
    hooks, _ = machines(pytester, [spec])
    with pytest.raises(pytest.UsageError, match=r"cannot import pytest-gemm \(No module named .*name that interpreter"):
        hooks.pytest_configure_node(node_of(spec, (1, "", "Traceback\nNo module named pytest_gemm\n")))


def test_workers_share_the_cores_and_the_gpus_of_their_own_machine(pytester: pytest.Pytester) -> None:
    here = spec_of()
    here.popen, here.ssh = True, None
    specs = [here, *(spec_of() for _ in range(3)), spec_of("other")]
    hooks, state = machines(pytester, specs)
    nodes = [node_of(spec, machine(gpus=2), f"gw{i}") for i, spec in enumerate(specs)]
    for node in nodes:
        hooks.pytest_configure_node(node)
    assert [node.workerinput["gemm_workers"] for node in nodes] == [1, 3, 3, 3, 1]
    assert [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs] == [None, "0", "1", "0", "0"]
    assert "os.environ['CUDA_VISIBLE_DEVICES'] = '1'" in nodes[2].gateway.ran[-1]
    # One machine is asked once, and the record names all processors.
    assert sum("pytest_gemm.remote" in source for node in nodes for source in node.gateway.ran) == 2
    assert (state.run.cpu, state.run.threads) == ("ours, theirs", 0)


def test_the_smaller_script_of_a_known_defect_is_kept(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfigure("-d", "--tx=popen", "--gemm-backends=aten", "--gemm-output=out")
    hooks: Any = remote._Machines(config, RunState())
    for line in ("mm:f32:nn:4x4x40", "mm:f32:nn:4x4x41", "mm:f32:nn:4x4x39"):
        files = {"known-failures/one.py": f'"""{line} on cpp"""'.encode(), "known-failures/one.pt": line.encode()}
        hooks.pytest_runtest_logreport(SimpleNamespace(gemm_files=files))
        if line.endswith("41"):
            assert Path("out/known-failures/one.pt").read_text() == "mm:f32:nn:4x4x40"
    assert Path("out/known-failures/one.pt").read_text() == "mm:f32:nn:4x4x39"
