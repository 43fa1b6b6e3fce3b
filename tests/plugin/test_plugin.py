"""The plugin as its users meet it: every option, every kind of wrong input, every way a case can end."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gemm.config import options
from pytest_gemm.judging import sampled
from pytest_gemm.plugin import selection

pytestmark = pytest.mark.slow

PRODUCT = """
    import pytest

    @pytest.mark.gemm(problems=[{problems}], any_problem=True)
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""

MINE = """
    import torch

    def mine(a, b):
        return (a.float() @ b.float()).to(a.dtype)

    def off(a, b):
        c = mine(a, b)
        c[..., 4:, :] += 1
        return c

    def crash(a, b):
        raise RuntimeError("out of registers")

    def pytest_gemm_register_backends(registry):
        registry.add_callable("mine", mine)
        registry.add_callable("off", off)
        registry.add_callable("crash", crash)
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A stranger's repository: a conftest that registers callables, and one test."""
    pytester.makeconftest(MINE)
    pytester.makepyfile(
        test_it=PRODUCT.format(problems="'mm:f32:nn:8x16x32', 'mm:bf16:nt:17x33x65', 'int_mm:i8-i8-i32:nt:17x16x16'")
    )
    return pytester


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *args)


def records(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert "run" in lines[0]
    return [line for line in lines if "backend" in line]


# -- what is selected ------------------------------------------------------------------------------


def test_a_good_callable_passes_and_a_refusal_is_not_a_skip(project: pytest.Pytester) -> None:
    result = run(project, "--gemm-backends=mine", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*mm:f32:nn:8x16x32*PASSED*",
            "*int_mm*UNSUPPORTED*",
            "mine  *mm *2 *",
            "mine does not support 1: *registered without i8*",
        ]
    )
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["unsupported"]) == (2, 1)
    assert "skipped" not in outcomes


def test_problem_runs_just_that_even_when_no_test_lists_it_and_a_test_with_its_own_list_is_left_out_quietly(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(test_own=PRODUCT.format(problems="'mm:f32:nn:8x16x32'").replace(", any_problem=True", ""))
    result = run(project, "--gemm-backends=mine", "--gemm-problem=mm:f32:nn:5x6x7:relu", "-v")
    assert result.ret == 0
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*test_product[[]mine-mm:f32:nn:5x6x7:relu]*"])


def test_ini_twins_and_the_command_line_wins(project: pytest.Pytester) -> None:
    project.makeini("[pytest]\ngemm_backends = mine\ngemm_seed = 7\ngemm_ops = mm\n")
    result = run(project)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["gemm: backends mine; level quick, seed 7,*"])
    run(project, "--gemm-seed=8").stdout.fnmatch_lines(["gemm: *seed 8,*"])


def test_the_level_decides_the_number_of_distributions(project: pytest.Pytester) -> None:
    quick, full = project.path / "quick" / "run.jsonl", project.path / "full" / "run.jsonl"
    case = ("--gemm-backends=mine", "--gemm-problem=mm:f32:nn:8x16x32")
    run(project, *case, "--gemm-output=quick")
    run(project, *case, "--gemm-level=full", "--gemm-output=full")
    assert len(records(quick)) == 4
    assert len(records(full)) == 6
    assert len({r["distribution"] for r in records(full)}) == 6
    run(project, *case, "--gemm-level=models", "--gemm-output=models")
    found = [r["distribution"] for r in records(project.path / "models" / "run.jsonl")]
    assert (len(found), found[1]) == (2, "rand")  # one that is exact, and one that rounds


LONG = "mm:f32:nn:40x30x2"


@pytest.mark.parametrize(("options", "by_sample"), [
    ((), True), (("--gemm-level=full",), False), (("--gemm-reference=full",), False),
    ((f"--gemm-problem={LONG}",), False),
])  # fmt: skip
def test_quick_judges_a_long_result_of_its_own_by_sample(
    pytester: pytest.Pytester, options: tuple[str, ...], by_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "_QUICK", 1000)  # tests/judging/test_sampled.py has the real limit
    pytester.makeconftest(MINE)
    own, of_level = PRODUCT.format(problems=f"'{LONG}'"), PRODUCT.format(problems="").replace("[]", "chosen")
    pytester.makepyfile(test_own=own, test_of_level=f"def chosen(level):\n    return ['{LONG}']\n{dedent(of_level)}")
    run(pytester, "--gemm-backends=mine", "--gemm-distributions=rand", "--gemm-output=.", "-v", *options)
    said = [(record["status"], bool(record["sampled"])) for record in records(pytester.path / "run.jsonl")]
    assert said == [("passed", by_sample), ("passed", False)]  # test_of_level comes before test_own


# -- how a case ends -------------------------------------------------------------------------------


def test_an_incorrect_result_answers_what_where_how_far_and_how_to_rerun_and_junit_says_it_too(
    project: pytest.Pytester,
) -> None:
    path = project.path / "junit.xml"
    options = ("--gemm-problem=mm:f32:nn:8x16x32", "--gemm-seed=3", f"--junit-xml={path}")
    result = run(project, "--gemm-backends=off", *options)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "incorrect: *: mm:f32:nn:8x16x32 on off: 64 of 128 elements*",
            "*row >= 4*",
            "*kernel off; distributions *, seed 3",
            "*rerun: pytest test_it.py::test_product --gemm-backends=off --gemm-problem=mm:f32:nn:8x16x32*-seed=3*",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "pytest_gemm/" not in result.stdout.str()
    found = {p.get("name"): p.get("value") for p in ET.parse(path).iter("property")}
    assert found["gemm_backend"] == found["gemm_kernel"] == "off"
    assert (found["gemm_status"], found["gemm_code"]) == ("incorrect", "outside-bound")
    assert "of 128 elements" in (found["gemm_reason"] or "")
    assert float(found["gemm_error_over_bound"] or "nan") > 1.0


def test_a_rerun_line_names_the_suite_as_a_module_where_the_virtual_environment_lies_in_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Path("/project")
    package = here / ".venv/lib/python3.12/site-packages/pytest_gemm"
    monkeypatch.setattr(options, "suite", package.joinpath)
    item: Any = SimpleNamespace(
        path=package / "conformance" / "test_products.py",
        config=SimpleNamespace(invocation_params=SimpleNamespace(dir=here)),
        originalname="test_product",
    )
    assert selection.target(item) == "--pyargs pytest_gemm.conformance.test_products::test_product"
    item.path = here / "test_it.py"
    assert selection.target(item) == "test_it.py::test_product"


def test_an_exception_is_one_crashed_case_and_the_run_goes_on(project: pytest.Pytester) -> None:
    record = project.path / "run.jsonl"
    result = run(project, "--gemm-backends=crash,mine", "--gemm-ops=mm", "--gemm-output=.")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "crashed: RuntimeError in run: * on crash: out of registers",
            "  kernel crash; distributions int-2, rand, k-cover and specials, seed 0",
            "*rerun: pytest *",
        ]
    )
    assert result.stdout.str().count('raise RuntimeError("out of registers")') == 1  # one finding
    by_backend = {(r["backend"], r["status"]) for r in records(record)}
    assert by_backend == {("crash", "crashed"), ("mine", "passed")}


# -- wrong input -----------------------------------------------------------------------------------


def test_gemm_case_without_the_marker_says_so(project: pytest.Pytester) -> None:
    project.makepyfile(test_it="def test_product(gemm_case):\n    pass\n")
    result = run(project, "--gemm-backends=mine")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*gemm_case needs the marker*"])


# -- backends that cannot run here -----------------------------------------------------------------

ABSENT = """
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.core.outcome import Reason

    class Absent:
        name = "absent"
        devices = ("cpu",)
        def availability(self, device):
            return Availability(Reason("no-board", "there is no board", "plug in the board"))
        def supports(self, problem, request=None): ...
        def prepare(self, problem, operands, request=None): ...

    def pytest_gemm_register_backends(registry):
        registry.add(Absent())
"""


def test_auto_leaves_out_what_cannot_run(project: pytest.Pytester) -> None:
    project.makeconftest(ABSENT)
    project.makepyfile(test_it=PRODUCT.format(problems="'int_mm:i8-i8-i32:nt:32x16x16'"))
    result = run(project)
    assert result.ret == 0
    assert "absent" not in "".join(line for line in result.outlines if "did not run" in line)


# -- with others -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_workers")
def test_two_workers_divide_the_cores_and_their_outcomes_are_put_together(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_threads="""
        def test_threads(gemm_check, gemm_config):
            import pytest_gemm.config.values
            import torch
            assert gemm_config.threads == torch.get_num_threads() == max(1, pytest_gemm.config.values.cores() // 2)
        """
    )
    record = project.path / "run.jsonl"
    result = run(project, "-n2", "--gemm-backends=mine,off", "--gemm-ops=mm", "--gemm-output=.")
    result.assert_outcomes(passed=2 + 1, failed=2)
    result.stdout.fnmatch_lines(["mine *mm *2 *", "off *mm *2 *", "*4 problems judged*"])
    assert len({(r["backend"], r["problem"]) for r in records(record)}) == 4
