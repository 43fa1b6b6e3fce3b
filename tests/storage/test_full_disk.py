"""A file that cannot be written: the run goes on, says so once at its end, and is red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gemm.tools import cli
from pytest_gemm.verdict import Red

pytestmark = pytest.mark.slow

CONFTEST = """
    def off(a, b):
        return a @ b + 1

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", lambda a, b: a @ b)
        registry.add_callable("off", off)
"""
TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x16x32", "mm:f32:nn:8x16x64"])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""
FULL = Path("/dev/full")
WORKERS = pytest.mark.parametrize("more", [(), ("-n", "2")], ids=["alone", "workers"])


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TEST)
    return pytester


def said_once(result: pytest.RunResult, option: str, why: str, status: int = Red.FILE) -> None:
    """One line about the file, and nothing else about the error."""
    assert result.ret == status
    text = result.stdout.str() + result.stderr.str()
    assert text.count(f"{option} is not complete: ") == 1
    assert f"{option} is not complete: {why}" in text
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text


@pytest.mark.usefixtures("warm_workers")
@WORKERS
def test_a_run_record_on_a_full_disk(project: pytest.Pytester, more: tuple[str, ...]) -> None:
    (project.path / "run.jsonl").symlink_to(FULL)
    result = project.runpytest("--gemm-backends=mine", "--gemm-output=.", *more)
    result.assert_outcomes(passed=2)
    said_once(result, str(project.path / "run.jsonl"), "No space left on device")


def test_a_run_record_on_a_disk_that_fills_up_can_be_read_as_far_as_it_goes(
    project: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    # The limit holds for every file, that of shared memory, too; without the first line the bytecode of modules, which
    # all runs share, is cut.
    limit = "import resource, sys\nsys.dont_write_bytecode = True\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
    # The first line is as long as torch has files.
    limit += "from pytest_gemm.machine import software\nsoftware.inductor = dict\n"
    source = (project.path / "conftest.py").read_text()
    (project.path / "conftest.py").write_text(limit + source)
    options = ("-p", "no:cacheprovider", "--gemm-backends=mine", "--gemm-output=.", "--gemm-set=run.inline=yes")
    result = project.runpytest_subprocess(*options)
    result.assert_outcomes(passed=2)
    path = project.path / "run.jsonl"
    said_once(result, str(path), "File too large")
    *whole, torn = path.read_text().splitlines()
    assert path.stat().st_size == 6000
    assert all(json.loads(line) for line in whole)
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(torn)
    assert cli.main(["results", str(path)]) == 0
    said = capsys.readouterr()
    assert "did not end" in said.out
    assert "a run did not end" in said.out


def test_artifacts_on_a_full_disk(project: pytest.Pytester) -> None:
    planted = 'raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")'
    plant = f"\n\ndef full(*_):\n    {planted}\n\nimport torch\ntorch.save = full\n"
    with (project.path / "conftest.py").open("a") as file:
        file.write(plant)
    result = project.runpytest_subprocess("--gemm-backends=mine,off", "--gemm-output=kept")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["incorrect: * on off: *"])
    said_once(result, str(project.path / "kept" / "failures"), "", pytest.ExitCode.TESTS_FAILED)
    assert len(list((project.path / "kept" / "failures").glob("*/report.txt"))) >= 2, "what can be written is"
