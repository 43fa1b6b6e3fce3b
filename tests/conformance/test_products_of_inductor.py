"""The table of what makes products in Inductor: complete for the installed torch, and true to the matrix."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pytest_gemm.conformance import products

_PAGE = Path(__file__).parents[2] / "docs" / "results" / "inductor-products.md"
_TABLE = products.load()


def test_the_installed_torch_has_nothing_that_is_not_in_the_table() -> None:
    version = products.release()
    if not Version("2.13") <= version < Version("2.16"):
        pytest.skip(f"the table is about torch 2.13 to 2.15, and this is {version}")
    assert not products.unknown(_TABLE, products.installed(products.source()), version)


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
    names = {name for one in _TABLE for name in one.names}
    here = {name for one in _TABLE for name in one.names if one.releases(name) in {"", ">=2.14", ">=2.15"}}
    assert not products.unknown(_TABLE, here, Version("2.15.0"))
    assert products.unknown(_TABLE, {*here, "new_template"}, Version("2.15.0")) == ["new_template is not in the table"]
    (gone,) = products.unknown(_TABLE, here - {"mm_template"}, Version("2.15.0"))
    assert "mm_template: torch 2.15.0 lacks it" in gone
    assert products.unknown(_TABLE, names, Version("2.13.0"))


def test_every_line_is_in_the_matrix() -> None:
    assert not products.complaints(_TABLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lines": (), "why": ""}, "nothing says why"),
        ({"lines": ("mm:f32:nn:1x2x5",)}, "in no level"),
        ({"lines": ("mm:f32:nn:17x65x127:b.constant",)}, "is spelled mm:f32:nn:17x65x127"),
        ({"lines": ("mm:f32",)}, "shape"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(change: dict[str, Any], words: str) -> None:
    (complaint,) = products.complaints([dataclasses.replace(_TABLE[0], **change)])
    assert words in complaint


def test_the_page_is_made_of_the_table() -> None:
    assert _PAGE.read_text(encoding="utf-8") == products.page(_TABLE)
