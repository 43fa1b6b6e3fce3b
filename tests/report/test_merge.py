"""Three shards are one run: its record, its summary, its files and its exit status; a wrong set of them is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.tools import cli

CONFTEST = """
    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def off(a, b):
        return mine(a, b) + (a.shape[-2] in (16, {wrong}))

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", mine)
        registry.add_callable("off", off)
        registry.add_callable("narrow", mine, dtypes=["f32"])
"""
TEST = """
    import pytest

    PROBLEMS = ["mm:f32:nn:4x8x8", "mm:bf16:nn:16x8x8", "mm:f32:nn:17x8x8", "bmm:bf16:nn:2x5x8x8", "mm:f32:nn:16x9x8"]

    @pytest.mark.gemm(problems=PROBLEMS)
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)

    @pytest.mark.gemm(problems=PROBLEMS[:2])
    def test_again(gemm_case, gemm_check):
        gemm_check(gemm_case)

    def test_plain():
        pass
"""
# Two entries are stale in some shards; only one of them is in all.
LEDGER = """
[[known-failure]]
id = "rows"
backend = "off"
reason = "it is wrong"
where = { op = "mm", m = "<=16" }

[[known-failure]]
id = "fixed"
backend = "mine"
reason = "it was wrong"
where = { op = "mm" }
"""
OPTIONS = (
    "-p", "no:cacheprovider", "--gemm-backends=mine,off,narrow", "--gemm-known-failures=known.toml",
    "--gemm-distributions=rand", "--gemm-threads=1",
)  # fmt: skip


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.format(wrong=17))
    pytester.makepyfile(test_it=TEST)
    (pytester.path / "known.toml").write_text(LEDGER)
    return pytester


def run(project: pytest.Pytester, output: str, *args: str) -> pytest.RunResult:
    return project.runpytest_inprocess(*OPTIONS, f"--gemm-output={output}", *args)


def summary(lines: list[str]) -> list[str]:
    """What a run says at its end, without seconds and processes."""
    start = next(i for i, line in enumerate(lines) if line.startswith("backend "))
    end = next(i for i, line in enumerate(lines) if " problems judged in " in line)
    return [*lines[start:end], lines[end].partition(" judged in ")[0]]


def page(folder: Path) -> str:
    """The summary for reviewers, without seconds."""
    return re.sub(r"judged in \d+ s", "judged", (folder / "summary.md").read_text())


def record(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run record, without seconds, processes, date and the folder of the output."""
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
    lines[0]["run"].pop("date")
    lines[0]["run"]["command"] = [
        word for word in lines[0]["run"]["command"] if not word.startswith(("--gemm-output", "--gemm-shard", "--junit"))
    ]
    for name in ("wall_seconds", "processes"):
        lines[-1]["totals"].pop(name)
    return lines


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def merge(*words: str | Path) -> int:
    try:
        return cli.main(["merge", *map(str, words)])
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(("wrong", "status"), [(17, 1), pytest.param(16, 14, marks=pytest.mark.study)])
def test_three_shards_are_one_run(
    project: pytest.Pytester, wrong: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    project.makeconftest(CONFTEST.format(wrong=wrong))
    one = run(project, "one")
    assert one.ret == status
    shards = [run(project, f"s{number}", f"--gemm-shard={number}/3") for number in (1, 2, 3)]
    assert sorted(shard.ret for shard in shards) == [0, 0, int(status == 1)]
    capsys.readouterr()
    assert merge("s3", "s1", "s2", "--output=all") == status
    said = capsys.readouterr().out.splitlines()
    assert summary(said) == summary(one.outlines)
    here = project.path
    assert record(here / "all") == record(here / "one")
    assert page(here / "all") == page(here / "one")
    assert files(here / "all" / "failures") == files(here / "one" / "failures") != set()
    # What the summary is of: a failure, a known one, what is unsupported, and the entry that is stale in all shards.
    text = "\n".join(said)
    assert ("incorrect" in page(here / "all")) == (status == 1)
    assert "known failure rows: 2 problem(s)" in text
    assert "narrow does not support 2" in text
    assert "known failure 'fixed' passed everywhere it applied" in text
    assert "'rows' passed everywhere" not in text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_shards_with_workers_are_one_run(project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    one = run(project, "one")
    for number in (1, 2):  # the first one with workers
        run(project, f"s{number}", f"--gemm-shard={number}/2", f"-n{4 - 2 * number}")
    capsys.readouterr()
    assert merge("s1", "s2", "--output=all") == one.ret == 1
    assert summary(capsys.readouterr().out.splitlines()) == summary(one.outlines)
    whole, merged = record(project.path / "one"), record(project.path / "all")
    assert merged[1:] == whole[1:]


# -- the set -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two shards of a run are kept, once a test has made them."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture
def shards(project: pytest.Pytester, two: Path) -> Path:
    """Two shards of a run, in ``s1`` and ``s2``."""
    project.makepyfile(test_it=TEST.replace("PROBLEMS[:2]", "PROBLEMS[:1]"))
    for name in ("s1", "s2"):
        if not (two / name).exists():
            run(project, name, f"--gemm-shard={name[1]}/2", "-k", "plain or 4x8x8")
            shutil.copytree(name, two / name)
        shutil.copytree(two / name, name, dirs_exist_ok=True)
    return project.path


def edit(folder: Path, change: Callable[..., object]) -> None:
    """Change the first and the last line of a record."""
    path = folder / "run.jsonl"
    first, *lines, last = path.read_text().splitlines()
    head, totals = json.loads(first), json.loads(last)
    change(head["run"], totals["totals"])
    path.write_text("\n".join([json.dumps(head), *lines, json.dumps(totals)]) + "\n")


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["s1"], "shard 2/2 is missing, so there is no verdict; run it with --gemm-shard=2/2"),
        (["s1", "s2", "s1"], "s1 and s1: both are shard 1 of 2"),
        (["s1", "s2", "."], ".: has no run.jsonl"),
    ],
)
def test_a_wrong_set_is_refused(
    shards: Path, folders: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(*folders, "--output=all") == 4
    assert words in capsys.readouterr().err
    assert not (shards / "all").exists()


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "s2: is a shard of 3, and s1 is one of 2": lambda head, _: head.update(shards=3),
    "s2: it is of other tests, or they were divided by": lambda _, totals: totals["division"].update(digest="0" * 16),
    "s2: option level is full, and quick in s1": lambda head, _: head["options"].update(level="full"),
    "s2: other backends are selected, or the ledger": lambda head, _: head["terms"].update(entries=["x"]),
    "s2: is a whole run; name folders": lambda head, _: head.update(shard=0, shards=0),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_shard_of_another_run_is_refused(shards: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    edit(shards / "s2", CHANGES[words])
    assert merge("s1", "s2", "--output=all") == 4
    assert words in capsys.readouterr().err


def test_other_versions_are_refused(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shards / "s2" / "run.jsonl"
    first, *lines = path.read_text().splitlines()
    data = json.loads(first)
    data["run"]["versions"]["torch"] = "2.99.0"
    path.write_text("\n".join([json.dumps(data), *lines]) + "\n")
    assert merge("s1", "s2", "--output=all") == 4
    assert "s2: version of torch is 2.99.0, and 2." in capsys.readouterr().err
    shutil.copy(path, shards / "s1" / "run.jsonl")
    edit(shards / "s1", lambda head, _: head.update(shard=1))
    assert merge("s1", "s2", "--output=all") == 4
    assert "the shards ran with torch 2.99.0" in capsys.readouterr().err


def test_a_shard_that_did_not_end_is_refused(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = shards / "s2" / "run.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert merge("s1", "s2", "--output=all") == 4
    assert "s2: the run did not end, so outcomes are missing; run this shard again" in capsys.readouterr().err


def test_an_interrupted_shard_is_the_status_of_the_run(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(shards / "s2", lambda _, totals: totals.update(status=2))
    assert merge("s1", "s2", "--output=all") == 2
    assert "shard 2 of 2 ended early, with pytest's exit status 2" in capsys.readouterr().out


@pytest.mark.usefixtures("shards")
def test_the_output_is_no_shard(capsys: pytest.CaptureFixture[str]) -> None:
    assert merge("s1", "s2", "--output=s1") == 4
    assert "--output=s1: is the folder of a shard" in capsys.readouterr().err


def test_notes_of_some_shards_have_their_number(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(shards / "s1", lambda _, totals: totals.update(notes=["of both", "CUTLASS: 2 kernels"]))
    edit(shards / "s2", lambda _, totals: totals.update(notes=["of both"]))
    assert merge("s1", "s2", "--output=all") == 0
    said = capsys.readouterr().out
    assert said.count("of both") == 1
    assert "shard 1: CUTLASS: 2 kernels" in said


@pytest.mark.parametrize(("failed", "status"), [("s1", 0), ("s2", 0), ("", 14)])
def test_an_entry_is_stale_that_no_shard_saw_fail(shards: Path, failed: str, status: int) -> None:
    for name in ("s1", "s2"):
        use = {"passed": {"fixed": 2}, "failed": {"fixed": int(name == failed)}, "differed": {}}
        edit(shards / name, lambda _, totals, use=use: totals.update(narrowed=False, use=use))
    assert merge("s1", "s2", "--output=all") == status


def test_a_backend_needs_a_judged_case_in_one_shard(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge("s1", "s2", "--output=all") == 0
    for name in ("s1", "s2"):
        edit(shards / name, lambda _, totals: totals["asked"].append("other"))
    capsys.readouterr()
    assert merge("s1", "s2", "--output=all") == 10
    assert "other judged no case" in capsys.readouterr().out
