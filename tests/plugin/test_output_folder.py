"""The folder of ``--gemm-output``: what is in it is of one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm.storage import files

pytestmark = pytest.mark.slow

CONFTEST = """
def pytest_gemm_register_backends(registry):
    registry.add_callable("off", lambda a, b: 2 * (a @ b))
"""
TEST = """
import pytest

@pytest.mark.gemm(problems=["mm:f32:nn:4x5x6", "mm:f32:nn:4x5x7", "mm:f32:nn:4x5x8"])
def test_product(gemm_case, gemm_check):
    gemm_check(gemm_case)
"""


def run(project: pytest.Pytester, problem: str, *more: str) -> pytest.RunResult:
    options = ("--gemm-backends=off", f"--gemm-problem={problem}", "--gemm-distributions=rand", "--gemm-output=out")
    return project.runpytest_inprocess("-p", "no:cacheprovider", *options, *more)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    return pytester


def test_failures_are_those_of_the_last_run_and_a_users_files_stay(project: pytest.Pytester) -> None:
    failures = project.path / "out" / "failures"

    def left() -> set[str]:
        return {path.name.partition("4x5x")[2] or path.name for path in failures.iterdir()}

    own = [failures / "mine" / "report.txt", failures / "notes.txt", failures / "elsewhere"]
    own[0].parent.mkdir(parents=True)
    own[0].write_text("A report of a user's\n")
    own[1].write_text("rerun: no")
    own[2].symlink_to(own[0].parent)
    users = {"mine", "notes.txt", "elsewhere"}
    for problem in ("mm:f32:nn:4x5x6", "mm:f32:nn:4x5x7"):
        assert run(project, problem).ret == 1
        assert left() == {f"{problem[-1]}-rand-0", *users}
    (failures / "off-mm_f32_nn_4x5x7-rand-0" / "my notes").touch()
    assert run(project, "mm:f32:nn:4x5x8", "--collect-only").ret == 0
    assert left() == {"7-rand-0", *users}
    assert run(project, "mm:f32:nn:4x5x8").ret == 1
    assert left() == {"7-rand-0", "8-rand-0", *users}
    assert own[0].read_text() == "A report of a user's\n"


def test_a_folder_without_a_record_is_not_touched(project: pytest.Pytester) -> None:
    assert run(project, "mm:f32:nn:4x5x6").ret == 1
    (project.path / "out" / "run.jsonl").write_text("of a user\n")
    assert run(project, "mm:f32:nn:4x5x7").ret == 1
    assert len(list((project.path / "out" / "failures").iterdir())) == 2


def test_two_runs_at_once_do_not_share_a_folder(project: pytest.Pytester) -> None:
    assert run(project, "mm:f32:nn:4x5x6").ret == 1
    out = Path("out").absolute()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with files.claimed(out):
        result = run(project, "mm:f32:nn:4x5x7")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = f"ERROR: --gemm-output: another run writes to {out}; name another folder, or wait for its end"
    assert result.stderr.str().splitlines() == [said]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert run(project, "mm:f32:nn:4x5x7").ret == 1
