"""``action.yml``: its steps, run in a folder by ``tests/workflows.py``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import known_cpu
import pytest
from warm_processes import Programs
from workflows import ROOT, Runner, environment, load

CONFTEST = """\
import torch

def my_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b * (1.001 if a.shape[0] == 17 else 1)

def pytest_gemm_register_backends(registry):
    registry.add_callable("mine", my_matmul)
"""
RIGHT, WRONG = "mm:f32:nn:16x16x16", "mm:f32:nn:17x16x16"


@pytest.fixture
def runner(tmp_path: Path, programs: Programs) -> Runner:
    """A runner whose workspace has one kernel."""
    made = Runner(tmp_path, {"github": {"event_name": "pull_request"}}, environment(tmp_path, programs))
    made.workspace.mkdir()
    (made.workspace / "conftest.py").write_text(CONFTEST)
    return made


def used(runner: Runner, **given: str) -> dict[str, str]:
    """Run a job of one step, the action; returns its outputs."""
    lines = "".join(f"          {name.replace('_', '-')}: {value!r}\n" for name, value in given.items())
    runner.job(f"jobs:\n  gemm:\n    steps:\n      - uses: ./\n        with:\n{lines}", "gemm")
    return runner.named("./").outputs


def test_the_action_is_valid() -> None:
    """By GitHub's own schema, which check-jsonschema brings."""
    from check_jsonschema import main
    from click.testing import CliRunner

    done = CliRunner().invoke(main, ["--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")])
    assert done.exit_code == 0, done.output


def test_every_input_is_used_and_every_action_is_pinned() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    action: dict[str, Any] = load(text)
    for name in action["inputs"]:
        assert f"inputs.{name}" in text
    for step in action["runs"]["steps"]:
        assert "inputs." not in step.get("run", ""), "an input in a script can end a command and begin another"
        assert len(step.get("uses", "@" + 40 * "0").rpartition("@")[2]) == 40


@pytest.mark.slow
def test_a_right_kernel_is_green(runner: Runner) -> None:
    found = used(runner, backends="mine", problems=RIGHT, args="-q -k 'mine or other'", output="first")
    assert (found["verdict"], found["exit-code"]) == ("passed", "0"), runner.named("Run pytest").output
    assert found["record"] == str(runner.workspace / "first" / "run.jsonl")
    assert Path(found["record"]).is_file()
    assert (runner.folder / "artifacts" / "first" / "junit.xml").is_file()
    assert runner.named("./").status == 0
    # Nothing was compiled, so there is nothing to save.
    assert "Save compiled kernels" not in [step.name for step in runner.steps]


@pytest.mark.slow
def test_a_wrong_kernel_is_red_and_leaves_its_files(runner: Runner) -> None:
    found = used(runner, backends="mine", problems=f"{RIGHT},{WRONG}", cache="false")
    assert (found["verdict"], found["exit-code"]) == ("failed", "1"), runner.named("Run pytest").output
    assert runner.named("Verdict").status == 1
    assert "pytest-gemm: failed, exit status 1" in runner.named("Verdict").output
    assert list((runner.folder / "artifacts" / "gemm-out" / "failures").rglob("repro.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "status", "verdict"),
    [
        ({"backends": "mime"}, "4", "wrong-input"),
        ({"backends": "mine", "problems": RIGHT, "args": "-k no_such_test"}, "5", "nothing-tested"),
        ({"suite": "missing_folder"}, "4", "wrong-input"),
    ],
)
def test_the_exit_status_says_which_kind_of_red(
    runner: Runner, given: dict[str, str], status: str, verdict: str
) -> None:
    found = used(runner, cache="false", **given)
    assert (found["exit-code"], found["verdict"]) == (status, verdict), runner.named("Run pytest").output
    assert runner.named("Verdict").status == int(status)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache": "yes"}, "cache: yes is neither true nor false"),
        ({"output": "a/b"}, "output: 'a/b' names an artifact too"),
        ({"python": "/usr/bin/false"}, "python: /usr/bin/false has no pytest-gemm; install torch and pytest-gemm"),
        ({"args": '-k "a', "cache": "false"}, 'args: -k "a: close the quotes'),
    ],
)
def test_a_wrong_input_is_named(runner: Runner, given: dict[str, str], message: str) -> None:
    used(runner, **given)
    failed = next(step for step in runner.steps if step.status)
    assert failed.status == 4
    assert f"::error title=pytest-gemm::{message}" in failed.output


@pytest.mark.study
def test_kernels_are_saved_once_and_restored(runner: Runner) -> None:
    """A second job with an empty folder takes them from the cache and saves nothing."""
    known_cpu.copy_to(known_cpu.of_home(Path(runner.environment["XDG_CACHE_HOME"]) / "pytest-gemm"))
    given = {"backends": "cpp", "problems": "mm:f32:nn:16x32x16"}
    used(runner, **given, output="first")
    saved = runner.named("Name what was compiled").outputs
    assert [path.name for path in (runner.folder / "caches").iterdir()] == [saved["key"]]
    assert saved["key"].startswith(saved["prefix"])
    shutil.rmtree(runner.environment["XDG_CACHE_HOME"])
    used(runner, **given, output="second")
    assert runner.named("Restore compiled kernels").outputs["cache-matched-key"] == saved["key"]
    assert "Save compiled kernels" not in [step.name for step in runner.steps]
