"""The table of PyTorch's own test families: every line of it is a problem of the suite, and the page is the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm.conformance import families

PAGE = Path(__file__).parents[2] / "docs" / "results" / "pytorch-cpu-select-algorithm.md"


@pytest.mark.slow
def test_every_family_is_covered_by_problems_of_the_matrix() -> None:
    assert families.complaints(families.load()) == []


@pytest.mark.slow
def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == families.page(families.load()), "pytest-gemm families"


@pytest.mark.slow
def test_a_table_that_has_rotted_says_where() -> None:
    def complaint(lines: tuple[str, ...] = (), awaiting: tuple[str, ...] = ()) -> list[str]:
        return families.complaints([families.Family("test_it", "asks", 1, lines=lines, awaiting=awaiting)])

    assert complaint(lines=("mm:f32:nn:1x1x1",)) == []
    assert complaint() == ["test_it: no line covers it"]
    assert complaint(lines=("mm:f32:nn:1x1x123457",)) == ["test_it: mm:f32:nn:1x1x123457 is in no level of the matrix"]
    assert "unknown op 'qm'" in complaint(lines=("qm:f32:nn:1x1x1",))[0]
    assert complaint(awaiting=("mm:f32:nn:1x1x1",)) == ["test_it: mm:f32:nn:1x1x1 has come: move it to lines"]
    assert complaint(awaiting=("qm:f32:nn:1x1x1",)) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[[family]]\ntest = "a"\nchecks = "b"\ncases = 1\nlinse = []\n',
            r"families.toml:5: unknown key 'linse' \(did you mean 'lines'\?\)",
        ),
        ('[[family]]\ntest = "a"\nchecks = "b"\ncases = 1\n' * 2, r"families.toml:6: two functions are called a"),
        ('[[family]]\ntest = "a"\nchecks = "b"\ncases = "1"\n', r"families.toml:4: cases is '1'; write a number"),
    ],
)
def test_a_file_that_is_wrong_is_told_so(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "families.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        families.load(path)
