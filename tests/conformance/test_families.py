"""The table of PyTorch's own test families: every line of it is a problem of the suite, and the page is the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from studies import families

PAGE = Path(__file__).parents[2] / "docs" / "results" / "pytorch-cpu-select-algorithm.md"


@pytest.mark.slow
def test_every_family_is_covered_by_problems_of_the_matrix() -> None:
    assert families.complaints() == []


@pytest.mark.slow
def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == families.page(), families.__doc__
