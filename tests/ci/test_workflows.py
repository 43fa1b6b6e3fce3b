"""The workflows of ``docs/how-to/ci-workflows.md`` and of ``.github/workflows``: valid, and their shell steps run."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import known_cpu
import pytest
from reference_pages import account
from warm_processes import Programs
from workflows import ROOT, Runner, Step, combinations, environment, examples, load

PAGE = ROOT / "docs" / "how-to" / "ci-workflows.md"
EXAMPLES = examples(PAGE)
SHIPPED = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
WORKFLOWS = {**EXAMPLES, **SHIPPED}

CONFTEST = """\
import torch

from kernels import my_matmul

def pytest_gemm_register_backends(registry):
    registry.add_callable("mine", my_matmul)
"""
KERNEL = """\
import torch

def my_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b
"""
ONE = "mm:f32:nn:16x16x16"
TIMED = f"--gemm-sessions=1 --gemm-set=speed.windows=3 --gemm-threads=1 --gemm-problem={ONE} -o pythonpath=."


def git(where: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main", *words]
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def runner(tmp_path: Path, programs: Programs) -> Runner:
    """A runner whose workspace is a repository of one kernel, with the smallest runs as defaults."""
    github = {"event_name": "push", "run_id": "7", "token": "t", "event": {"pull_request": {"base": {"sha": "base"}}}}
    made = Runner(tmp_path, {"github": github}, environment(tmp_path, programs))
    made.defaults(f"-o pythonpath=. --gemm-problem={ONE},linear:f32:nt:16x16x16")
    made.workspace.mkdir()
    (made.workspace / "conftest.py").write_text(CONFTEST)
    (made.workspace / "kernels.py").write_text(KERNEL)
    (made.workspace / ".gitignore").write_text("env/\ngemm-*/\n__pycache__/\n")
    git(made.workspace, "init", "-q")
    git(made.workspace, "add", ".")
    git(made.workspace, "commit", "-qm", "one kernel")
    return made


def output(steps: list[Step]) -> str:
    return "\n".join(f"-- {step.name}: {step.status}\n{step.output}" for step in steps)


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_valid(name: str, tmp_path: Path) -> None:
    """By GitHub's own schema, which check-jsonschema brings."""
    from check_jsonschema import main
    from click.testing import CliRunner

    (tmp_path / "workflow.yml").write_text(WORKFLOWS[name])
    done = CliRunner().invoke(main, ["--builtin-schema", "vendor.github-workflows", str(tmp_path / "workflow.yml")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_asks_for_little_and_pins_what_it_uses(name: str) -> None:
    workflow: dict[str, Any] = load(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"}
    assert name == "gemm" or workflow["concurrency"]["group"]
    assert "secrets." not in WORKFLOWS[name]
    assert "pull_request_target" not in WORKFLOWS[name]
    inputs = set(load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"])
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            uses = step.get("uses", "")
            if uses == "./" or uses.startswith(f"{account()}/pytest-gemm@v"):
                assert set(step.get("with", {})) <= inputs
            elif uses:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", uses)
            assert "${{" not in step.get("run", ""), "an expression in a script can end a command and begin another"


def test_one_action_has_one_version() -> None:
    """A page and files that are updated one by one would drift apart."""
    texts = [*WORKFLOWS.values(), (ROOT / "action.yml").read_text(encoding="utf-8")]
    found = {match for text in texts for match in re.findall(r"uses: (actions/[\w-]+)\S*@(\w+) # (v\S+)", text)}
    assert len({name for name, _, _ in found}) == len(found)


def test_an_empty_repository_needs_fewer_than_fifteen_lines() -> None:
    assert len(EXAMPLES["gemm"].splitlines()) < 15


def test_the_page_has_every_input_and_output() -> None:
    action = load((ROOT / "action.yml").read_text(encoding="utf-8"))
    rows = "\n".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `"))
    for name in (*action["inputs"], *action["outputs"]):
        assert f"`{name}`" in rows


# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.mark.study
@pytest.mark.parametrize("name", ["gemm", "gemm-conformance"])
def test_conformance(runner: Runner, name: str) -> None:
    job = next(iter(load(EXAMPLES[name])["jobs"]))
    steps = runner.job(EXAMPLES[name], job)
    assert runner.steps[-1].outputs["verdict"] == "passed", output(steps)
    assert "torch==2.13.0" in (runner.folder / "pip.log").read_text()
    (runner.workspace / "kernels.py").write_text(KERNEL.replace("a @ b", "a @ b * 1.001"))
    steps = runner.job(EXAMPLES[name], job)
    assert runner.steps[-1].outputs["verdict"] == "failed", output(steps)
    assert runner.steps[-1].status != 0


@pytest.mark.study
def test_base_against_head(runner: Runner) -> None:
    """Both environments are measured, and each has the kernel of its own checkout."""
    runner.defaults(
        "--gemm-sessions=2 --gemm-set=speed.windows=3 --gemm-threads=1 --gemm-undecided=100 "
        f"--gemm-allow=slower --gemm-problem={ONE}"
    )
    for side in ("", "base"):
        runner.checkouts[side] = runner.folder / f"checkout-{side}"
        (runner.checkouts[side] / "gemm").mkdir(parents=True)
        (runner.checkouts[side] / "gemm" / "conftest.py").write_text(CONFTEST)
        mark = f"\nopen({str(runner.folder / f'ran-{side}')!r}, 'w').close()\n"
        (runner.checkouts[side] / "kernels.py").write_text(KERNEL + mark)
    steps = runner.job(EXAMPLES["gemm-speed"], "speed")
    assert runner.steps[-1].outputs["verdict"] == "passed", output(steps)
    assert (runner.folder / "ran-").exists()
    assert (runner.folder / "ran-base").exists()


@pytest.mark.study
def test_recording_becomes_a_pull_request(runner: Runner) -> None:
    runner.defaults(TIMED)
    context = {"inputs": {"accept": "", "reason": ""}}
    text = EXAMPLES["gemm-record"]
    # On a busy machine the run records nothing: this is what it would have written.
    key = runner.workspace / "baselines" / "a-machine"
    key.mkdir(parents=True)
    shutil.copy(ROOT / "baselines" / "amd-epyc-f25m1-avx2-2c" / "cpp.jsonl", key)
    steps = runner.job(text, "record", **context)
    assert runner.steps[-1].status == 0, output(steps)
    assert runner.named("Record").outputs["verdict"] in {"passed", "failed"}, output(steps)
    assert '+{"problem": "linear:' in (runner.workspace / "body.md").read_text(), output(steps)

    git(runner.folder, "init", "-q", "--bare", "origin.git")
    git(runner.workspace, "remote", "add", "origin", str(runner.folder / "origin.git"))
    gh = runner.folder / "bin" / "gh"
    gh.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{runner.folder}/gh.log\n')
    gh.chmod(0o755)
    git(runner.workspace, "clean", "-fdq")
    steps = runner.job(text, "propose", **context)
    assert runner.steps[-1].status == 0, output(steps)
    assert "new/body.md" in (runner.folder / "gh.log").read_text()
    changed = git(runner.folder / "origin.git", "show", "--stat=200", "gemm-baselines-7")
    assert re.search(r"baselines/a-machine/cpp\.jsonl", changed)
    # Nothing new: no pull request.
    (runner.folder / "gh.log").unlink()
    runner.job(text, "propose", **context)
    assert "no baseline has changed" in runner.steps[-1].output
    assert not (runner.folder / "gh.log").exists()


@pytest.mark.study
def test_stored_baselines(runner: Runner) -> None:
    """Red where nothing is stored; not run for a fork."""
    runner.defaults(TIMED)
    steps = runner.job(EXAMPLES["gemm-baselines"], "gate")
    assert runner.steps[-1].outputs["verdict"] == "no-baseline", output(steps)
    event = {"pull_request": {"head": {"repo": {"full_name": "fork/kernels"}}}}
    runner.context["github"] = {"event_name": "pull_request", "repository": "me/kernels", "event": event}
    assert runner.job(EXAMPLES["gemm-baselines"], "gate") == []


@pytest.mark.study
def test_nightly(runner: Runner) -> None:
    known_cpu.copy_to(known_cpu.of_home(Path(runner.environment["XDG_CACHE_HOME"]) / "pytest-gemm"))
    text = EXAMPLES["gemm-nightly"]
    for matrix in combinations(load(text)["jobs"]["suite"]):
        if matrix["name"] == "oldest":
            continue
        if matrix["name"] == "nightly":
            (runner.workspace / "kernels.py").write_text(KERNEL.replace("a @ b", "a @ b * 1.001"))
        runner.job(text, "suite", matrix=matrix)
    steps = runner.job(text, "compare")
    assert runner.named("What the nightly changes").status == 1, output(steps)
    assert "newly wrong" in (runner.folder / "GITHUB_STEP_SUMMARY").read_text()
    assert (runner.folder / "artifacts" / "upgrade").is_dir()


@pytest.mark.study
def test_shards(runner: Runner) -> None:
    """They are one run, and without one of them there is no verdict."""
    text = EXAMPLES["gemm-shards"]
    for matrix in combinations(load(text)["jobs"]["shard"]):
        steps = runner.job(text, "shard", matrix=matrix)
        assert runner.steps[-1].outputs["verdict"] == "passed", output(steps)
    (runner.folder / "GITHUB_STEP_SUMMARY").unlink()
    steps = runner.job(text, "verdict")
    assert runner.named("One run, one verdict").status == 0, output(steps)
    assert "Problems, each on one backend: 2 passed." in (runner.folder / "GITHUB_STEP_SUMMARY").read_text()
    assert (runner.folder / "artifacts" / "gemm-all" / "run.jsonl").is_file()
    for folder in ("artifacts/gemm-shard-2", "workspace/shards", "workspace/gemm-all"):
        shutil.rmtree(runner.folder / folder)
    steps = runner.job(text, "verdict")
    verdict = runner.named("One run, one verdict")
    assert verdict.status == 4, output(steps)
    assert "shard 2/3 is missing" in verdict.output
