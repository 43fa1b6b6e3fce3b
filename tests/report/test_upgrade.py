"""``pytest-gemm compare``: what differs between two runs, and whether the later one is worse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import recorded_runs

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import WITHHELD, Outcome, Reason, Seconds, Status
from pytest_gemm.record.lines import Head
from pytest_gemm.report import cases
from pytest_gemm.tools import cli

# Compares two runs of these outcomes; with options: exit status and what is printed.
Compare: TypeAlias = "Callable[..., tuple[int, str]]"

RUN = Head(
    "2026-11-22 20:00:00 +0000",
    ("pytest", "--gemm-backends=cpp", "--gemm-output=a"),
    {"torch": "2.13.0", "python": "3.11.7"},
    cpu="a processor",
    threads=2,
)
PASSED = Outcome(
    CaseId("cpp", "mm:f32:nn:17x64x64"),
    "rand",
    0,
    Status.PASSED,
    kernels=("cpp_fused_mm_0 (CppMicroGemmFP32Vec-8x48x1)",),
    chosen=("CppMicroGemmFP32Vec-8x48x1",),
    configuration=("CppMicroGemmFP32Vec-8x48x1:f32-f32-f32:17x64x64,kslices=1,threads=1",),
    ratio=0.25,
    bits="aa",
    operands="cc",
    seconds=Seconds(compile=10.0),
)
WRONG = Reason("outside-bound", "9 of 1088 elements outside the bound")
REFUSED = Reason("layout", "A needs contiguous rows")


KNOWN: dict[str, Any] = {"status": Status.KNOWN_FAILURE, "known_failure": "stale"}


def of(m: int, **changes: Any) -> Outcome:
    return dataclasses.replace(PASSED, case=CaseId("cpp", f"mm:f32:nn:{m}x64x64"), **changes)


def wrong(m: int, **changes: Any) -> Outcome:
    return of(m, **{"status": Status.INCORRECT, "reason": WRONG, "bits": "", **changes})


def refused(m: int) -> Outcome:
    case = CaseId("cpp", f"mm:f32:nn:{m}x64x64")
    return Outcome(case, "", 0, Status.UNSUPPORTED, REFUSED)


def written(folder: Path, outcomes: Iterable[Outcome], run: Head = RUN, *, ended: bool = True) -> str:
    return str(recorded_runs.write(folder, outcomes, run, ended=ended).parent)


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    def both(before: Sequence[Outcome], after: Sequence[Outcome], *options: str) -> tuple[int, str]:
        places = [
            written(tmp_path / f"{name}{len(list(tmp_path.iterdir()))}", some)
            for name, some in (("before", before), ("after", after))
        ]
        status = cli.main(["compare", *places, *options])
        return status, capsys.readouterr().out

    return both


def section(text: str, title: str) -> list[str]:
    """The lines of a section, its title first."""
    found = re.search(rf"^{title}: .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[0].splitlines() if found else []


@pytest.mark.parametrize(
    ("title", "before", "after", "words", "status"),
    [
        ("newly wrong", of(1), wrong(1), "passed -> incorrect (outside-bound)", 1),
        ("newly wrong", of(1), wrong(1, **KNOWN), "passed -> known-failure (stale)", 1),
        ("newly wrong", refused(1), wrong(1), "unsupported (layout) -> incorrect (outside-bound)", 1),
        ("newly right", wrong(1, **KNOWN), of(1), "known-failure (stale) -> passed", 0),
        ("newly refused", of(1), refused(1), "passed -> unsupported (layout)", 0),
        ("newly refused", of(1), of(1, status=Status.PRUNED, bits=""), "passed -> pruned", 0),
        ("newly supported", refused(1), of(1), "unsupported (layout) -> passed", 0),
        ("explained otherwise", wrong(1, **KNOWN), wrong(1), "known-failure (stale) -> incorrect (outside-bound)", 0),
        ("explained otherwise", wrong(1), wrong(1, status=Status.CRASHED), "incorrect (outside-bound) -> crashed", 0),
    ],
)
def test_a_case_is_in_one_section_by_what_it_means_to_a_user(
    compare: Compare, title: str, before: Outcome, after: Outcome, words: str, status: int
) -> None:
    ended, text = compare([before, of(2)], [after, of(2)])
    assert ended == status
    assert text.startswith(f"1 {title}\n")
    assert section(text, title)[0] == f"{title}: 1 case"
    assert words in section(text, title)[-1]


def test_a_case_fails_by_the_worst_of_its_distributions(compare: Compare) -> None:
    status, text = compare([of(1), of(1, distribution="ones")], [of(1), wrong(1, distribution="ones")])
    assert status == 1
    assert "(ones: 9 of 1088 elements outside the bound)" in section(text, "newly wrong")[-1]


def test_the_same_run_has_no_difference(compare: Compare) -> None:
    status, text = compare([of(1), wrong(2), refused(3)], [of(1), wrong(2), refused(3)])
    assert status == 0
    assert text.startswith("no difference\n")
    assert section(text, "other bits") == ["other bits: none. Compared: 1 case right in both runs."]


def test_cases_of_one_run_are_no_failure(compare: Compare) -> None:
    left_out = of(3, status=Status.NOT_RUN, reason=Reason("device-lost", "the device is lost"), bits="")
    withheld = wrong(4, **{**KNOWN, "reason": Reason(WITHHELD, "it can kill the process")})
    status, text = compare([of(1), of(3), withheld], [of(1), wrong(2), left_out, of(4)])
    assert status == 0
    found = section(text, "only in one run")[3:]
    assert re.search(r"after only: passed +1  mm:f32:nn:4x64x64 \(rand: it can kill the process\)", found[1])
    assert "after only: incorrect" in found[0]
    assert re.search(r"before only: passed +1  mm:f32:nn:3x64x64 \(rand: the device is lost\)", found[2])


def test_a_section_shows_the_smallest_case_of_each_family(compare: Compare) -> None:
    _, text = compare([of(m) for m in range(2, 31)], [wrong(m) for m in range(2, 31)])
    assert len(section(text, "newly wrong")) == 4
    assert "(outside-bound)     29  mm:f32:nn:2x64x64 (rand: 9 of" in section(text, "newly wrong")[-1]


def test_twelve_families_are_shown(compare: Compare) -> None:
    codes = [Reason(f"reason-{m}", "words") for m in range(30)]
    after = [wrong(m, reason=codes[m // 2]) for m in range(30)]
    _, text = compare([of(m) for m in range(30)], after)
    assert len(section(text, "newly wrong")) == 3 + 12 + 1
    assert section(text, "newly wrong")[-1] == "  and 6 cases of 3 families more"
    assert text.endswith("--html=FILE writes every case.\n")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cpp_fused_addmm_relu_0 (CppMicroGemmFP32Vec-8x48x1)", "CppMicroGemmFP32Vec-8x48x1"),
        ("triton_tem_fused_mm_t_12 (triton_mm-64x64x32,s2,w4)", "triton_mm-64x64x32,s2,w4"),
        ("cutlass_fused__int_mm_b156500a (cutlass3x_sm90,swizzle=1)", "cutlass3x_sm90,swizzle=1"),
        ("cpp_fused_mm_0 (CppMicroGemmAMX-32x32x32) [avx512]", "CppMicroGemmAMX-32x32x32 [avx512]"),
        ("cpp_fused_mm_1", "cpp_fused_mm"),
        ("aten.addmm.default", "aten.addmm.default"),
        ("[nvjet_sm90_tst_8x64_64x16_4x1_v_bz_TNN]", "[nvjet_sm90_tst_8x64_64x16_4x1_v_bz_TNN]"),
    ],
)
def test_a_kernel_is_known_by_what_a_release_does_not_rename(name: str, meant: str) -> None:
    assert cases.kernel(name) == meant


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernels": ("cpp_fused_addmm_7 (CppMicroGemmFP32Vec-8x48x1)",)}, ""),
        (
            {"chosen": ("CppMicroGemmFP32Vec-16x32x1",)},
            "candidate CppMicroGemmFP32Vec-8x48x1 -> CppMicroGemmFP32Vec-16x32x1",
        ),
        (
            {"configuration": ("CppMicroGemmFP32Vec-8x48x1:f32-f32-f32:17x64x64,kslices=2,threads=1",)},
            "blocking kslices=1 -> kslices=2",
        ),
        ({"kernels": ("aten.mm.default",)}, "kernels CppMicroGemmFP32Vec-8x48x1 -> aten.mm.default"),
        (
            {"chosen": ("other",), "kernels": ("cpp_fused_mm_0 (other)",), "fusions": 1},
            "candidate CppMicroGemmFP32Vec-8x48x1 -> other; fusions 0 -> 1  ",
        ),
        ({"fused": True}, "epilogue - -> in the product's kernel"),
        ({"fusions": 2}, "fusions 0 -> 2"),
    ],
)
def test_another_kernel_is_told_by_what_is_meant(compare: Compare, changes: dict[str, Any], words: str) -> None:
    status, text = compare([of(1)], [of(1, **changes)])
    assert status == 0
    assert bool(section(text, "other kernels")) == bool(words)
    assert words in text


def test_other_bits_are_told_of_the_same_operands_only(compare: Compare) -> None:
    before = [of(1), of(2), of(3), of(4, distribution="ones"), of(4)]
    other = ("CppMicroGemmFP32Vec-16x32x1",)
    after = [
        of(1, bits="bb", ratio=0.5),
        of(2, bits="bb", operands="dd"),
        of(3, bits="bb", chosen=other),
        of(4, distribution="ones"),
        of(4, bits="bb"),
    ]
    status, text = compare(before, after)
    assert status == 0
    found = section(text, "other bits")
    assert found[0] == "other bits: 3 cases"
    assert found[2:4] == ["  Compared: 3 cases right in both runs.", "  Not compared: 1 case with other operands."]
    assert re.search(r"the same kernel +2  mm:f32:nn:1x64x64 \(rand; 0.25 -> 0.5 of the bound\)", found[5])
    assert "another kernel" in found[6]


def test_of_a_backend_that_gives_other_bits_each_time_none_are_compared(compare: Compare) -> None:
    status, text = compare([of(1, bits="", operands="")], [of(1)])
    assert status == 0
    assert section(text, "other bits")[0].startswith("other bits: Not compared: no case that is right in both")


# -- the head -----------------------------------------------------------------------------------------------------


def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    after = dataclasses.replace(RUN, **changes)
    places = [written(tmp_path / "a", [PASSED]), written(tmp_path / "b", [PASSED], after)]
    cli.main(["compare", *places])
    return capsys.readouterr().out


def test_the_head_has_the_versions_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(tmp_path, capsys, versions={"torch": "2.15.0", "python": "3.11.7", "triton": "3.9.0"})
    assert re.search(r"^torch +2.13.0 +2.15.0\ntriton +- +3.9.0\n\n", text, re.MULTILINE)
    assert "warning" not in text


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"cpu": "another"}, "The runs are of different hardware"),
        ({"threads": 4}, "The processes of the runs had different numbers of CPU threads"),
        (
            {"command": ("pytest", "--gemm-backends=cpp", "-n", "4", "--gemm-level=full", "--gemm-output", "b")},
            "only before nothing, only after --gemm-level=full.",
        ),
    ],
)
def test_what_is_not_comparable_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], warning: str
) -> None:
    assert warning in told(tmp_path, capsys, **changes)


def test_a_later_run_that_did_not_end_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, cut = written(tmp_path / "a", [PASSED]), written(tmp_path / "b", [PASSED], ended=False)
    assert cli.main(["compare", ended, cut]) == 1
    assert cli.main(["compare", cut, ended]) == 0
    assert capsys.readouterr().out.count("did not end: cases are missing") == 2


def test_the_time_to_compile_is_a_line_of_totals(compare: Compare) -> None:
    _, text = compare([of(1), of(2)], [of(1, seconds=Seconds(compile=30.0))])
    assert re.search(r"^seconds to compile, cases of both +10 +30$", text, re.MULTILINE)


# -- forms of the report ----------------------------------------------------------------------------------------------


def test_markdown_is_tables(compare: Compare) -> None:
    reason = Reason("outside-bound", "all | of <them>")
    status, text = compare([of(1)], [wrong(1, reason=reason)], "--markdown")
    assert status == 1
    assert text.startswith("## 1 newly wrong\n\n|")
    assert "### newly wrong: 1 case\n\nCases that were not wrong" in text
    assert r"`mm:f32:nn:1x64x64` (rand: all \| of &lt;them&gt;) |" in text


def test_the_page_has_every_case_and_loads_nothing(compare: Compare, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    many = range(1, 31)
    reason = Reason("outside-bound", "<script>")
    compare([of(m) for m in many], [wrong(m, reason=reason) for m in many], f"--html={page}")
    text = page.read_text(encoding="utf-8")
    assert all(f"<code>mm:f32:nn:{m}x64x64</code>" in text for m in many)
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
