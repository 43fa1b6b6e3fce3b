"""What the tests of a run took."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gemm.run import timeline


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": [1]}', '{"a": "x"}'])
def test_a_file_that_is_damaged_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "durations.json"
    path.write_text(text, encoding="utf-8")
    assert timeline.read(path) == {}
    timeline.record(path, {"a": 1.0, "b": 2.0})
    timeline.record(path, {"a": 3.0})
    assert timeline.read(path) == {"b": 2.0, "a": 3.0}


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    timeline.record(tmp_path / "file" / "durations.json", {"a": 1.0})
