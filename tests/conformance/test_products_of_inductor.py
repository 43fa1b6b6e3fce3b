"""The table of what makes products in Inductor: complete for the installed torch, and true to the matrix."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from studies import products
from studies.products import PRODUCTS

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status

_PAGE = Path(__file__).parents[2] / "docs" / "results" / "inductor-products.md"


def test_the_installed_torch_has_nothing_that_is_not_in_the_table() -> None:
    version = products.release()
    if not Version("2.13") <= version < Version("2.16"):
        pytest.skip(f"the table is about torch 2.13 to 2.15, and this is {version}")
    assert not products.unknown(PRODUCTS, products.installed(products.source()), version)


def test_the_source_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "new.py").write_text(
        "class CppNewTemplate(CppTemplate):\n    pass\n"
        "new_template = TritonTemplate(name='new', source=r'')\n"
        "aten_new: Any = select_algorithm.ExternKernelChoice(torch.new, None)\n"
        "@register_lowering(aten.new, type_promotion_kind=None)\ndef tuned_new(x):\n    pass\n",
        encoding="utf-8",
    )
    (tmp_path / "other.py").write_text(
        "template = Template()\n@register_lowering(aten.other)\ndef f(): ...\n", encoding="utf-8"
    )
    assert set(products.installed(tmp_path)) == {"CppNewTemplate", "new_template", "aten_new", "aten.new", "template"}


def test_a_name_that_came_or_went_is_said() -> None:
    names = {name for one in PRODUCTS for name in one.names}
    here = {name for one in PRODUCTS for name in one.names if one.releases(name) in {"", ">=2.14", ">=2.15"}}
    assert not products.unknown(PRODUCTS, here, Version("2.15.0"))
    assert products.unknown(PRODUCTS, {*here, "new_template"}, Version("2.15.0")) == [
        "new_template is not in the table"
    ]
    (gone,) = products.unknown(PRODUCTS, here - {"mm_template"}, Version("2.15.0"))
    assert "mm_template: torch 2.15.0 lacks it" in gone
    assert products.unknown(PRODUCTS, names, Version("2.13.0"))


def test_every_line_is_in_the_matrix() -> None:
    assert not products.complaints()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
def test_a_hopper_has_a_line_for_each_triton_candidate() -> None:
    """Which template a line meets is seen in the candidates that it has, on a GPU that is not there."""
    version = products.release()
    asked = [
        one for one in PRODUCTS
        if one.backend == "triton" and one.candidate and SpecifierSet(one.releases(one.names[0])).contains(version)
    ]  # fmt: skip
    lines = [line for one in asked for line in one.lines]
    script = Path(__file__).parents[1] / "pretended_hopper.py"
    done = subprocess.run([sys.executable, script, *lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    for one in asked:
        for line in one.lines:
            assert fnmatch.filter(names[line], one.candidate), (line, one.candidate)


def outcome(line: str, *chosen: str, status: Status = Status.PASSED) -> Outcome:
    return Outcome(CaseId("triton", line), "int-2", 0, status, chosen=chosen)


def test_what_a_run_has_not_proved_is_said() -> None:
    names = {"triton_mm-*", "triton_mm_persistent_tma-*", "triton_bmm-*"}
    mm, tma, bmm = (one for one in PRODUCTS if one.candidate in names)
    seen = [
        outcome(mm.lines[0], "triton_mm-16x16x16,s1,w1"),
        outcome(tma.lines[0], "triton_mm-64x64x64,s2,w4"),
        outcome(bmm.lines[0], "triton_bmm-64x64x64,s2,w4", status=Status.INCORRECT),
    ]
    cutlass = msgspec.structs.replace(mm, backend="cutlass")
    assert products.unproved([mm, tma, bmm, cutlass], seen, Version("2.15.0")) == [
        "persistent_tma_mm_template: no line was computed by triton_mm_persistent_tma-*",
        "bmm_template: no line was computed by triton_bmm-*",
    ]
    assert not products.unproved([msgspec.structs.replace(tma, torch=">=2.15")], seen, Version("2.14.1"))


def test_the_page_is_made_of_the_table() -> None:
    assert _PAGE.read_text(encoding="utf-8") == products.page()
