"""The HTML page of run records: what is wrong comes first, and nothing of a record writes HTML or asks a network."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import KNOWN, NEW, PASSED, RUN, outcomes, write

from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures.text import folder_name
from pytest_gemm.record.reader import read
from pytest_gemm.report import html as html_page
from pytest_gemm.tools import cli

# The smallest picture: one grey element.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg==")


def html(tmp_path: Path, *runs: Sequence[Outcome], versions: Sequence[str] = ("2.14.0", "2.15.0")) -> str:
    """The page of the command on runs of these outcomes."""
    folders = []
    for number, (some, version) in enumerate(zip(runs, versions, strict=False)):
        provenance = dataclasses.replace(RUN, versions={**RUN.versions, "torch": version})
        folders.append(str(write(tmp_path / f"run{number}", some, provenance).parent))
    file = tmp_path / "page.html"
    assert cli.main(["results", *folders, "--html", str(file), "--title", "A & B"]) == 0
    return file.read_text(encoding="utf-8")


def section(text: str, name: str) -> str:
    """The words of a section, "" where there is none."""
    found = re.search(rf'<section id="{name}">.*?</section>', text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", found[0]).split()) if found else ""


def rows(text: str) -> list[list[str]]:
    """The cells of the table, its head left out."""
    found = re.findall(r'<tr class="sought">(.*?)</tr>', text, flags=re.DOTALL)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)] for row in found]


def test_the_table_counts_problems_by_op_dtypes_and_backend(tmp_path: Path) -> None:
    right_elsewhere = dataclasses.replace(PASSED, case=NEW.case)  # a problem counts under the worst of its cases
    more = dataclasses.replace(PASSED, distribution="rand", ratio=0.75)
    text = html(tmp_path, [PASSED, more, right_elsewhere, NEW, KNOWN])
    assert rows(text) == [["mm", "f16", "cpp", "1", "", "1", "0.75"], ["mm", "f16", "triton", "", "1", "", "0.25"]]
    assert "The largest error of a right result is 0.75 of the bound." in text
    assert "<b>1</b>problems wrong" in text
    assert "<b>1</b>problems known" in text
    assert "Up to 1 is right" in text


def test_new_failures_and_known_ones_are_told_apart(tmp_path: Path) -> None:
    text = html(tmp_path, [PASSED, NEW, KNOWN])
    assert text.index('id="new"') < text.index('id="products"') < text.index('id="known"')
    assert "triton: incorrect: wrong values, cause not recognised" in section(text, "new")
    assert "drops-bias" not in section(text, "new")
    assert "cpp: incorrect: wrong values, cause not recognised, known as drops-bias" in section(text, "known")
    assert "row 3 is wrong" in section(text, "new")
    assert "None." in section(html(tmp_path, [PASSED, KNOWN]), "new")


def test_a_rerun_line_has_what_decides_and_nothing_else(tmp_path: Path) -> None:
    text = section(html(tmp_path, [NEW]), "new")
    line = (
        "pytest tests/mine.py --gemm-backends=triton --gemm-problem=mm:f16:nt:512x768x1024 --gemm-seed=7 "
        "--gemm-level=smoke --gemm-set=cpp.jobs=2"
    )
    assert f"Run it again: {line} Details" in text


def test_a_failure_has_its_error_map_inside(tmp_path: Path) -> None:
    folder = tmp_path / "run0" / "failures" / folder_name(NEW)
    folder.mkdir(parents=True)
    (folder / "error_map.png").write_bytes(PNG)
    text = html(tmp_path, [NEW])
    assert f'<img src="data:image/png;base64,{base64.b64encode(PNG).decode()}"' in text
    assert f"failures/{folder_name(NEW)}" in section(text, "new")


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    right = dataclasses.replace(PASSED, case=NEW.case)
    text = html(tmp_path, [PASSED, right], [PASSED, NEW])
    assert rows(text) == [
        ["mm", "f16", "cpp", "1", "0.25", "1", "", "0.25"],
        ["mm", "f16", "triton", "1", "0.25", "", "1", ""],
    ]
    assert "torch 2.14.0: 0 problems, torch 2.15.0: 1 problem. Reason" in section(text, "new")
    assert "The counts are of torch 2.15.0." in text


@pytest.mark.parametrize(
    ("some", "versions", "labels"),
    [
        (["a", "b"], ["2.14.0", "2.15.0"], ["torch 2.14.0", "torch 2.15.0"]),
        (["a", "b"], ["2.14.0", "2.14.0"], ["a", "b"]),
        (["a/out", "b/out"], ["2.14.0", "2.14.0"], ["run 1", "run 2"]),
    ],
)
def test_a_run_is_called_by_what_tells_it_from_the_others(
    tmp_path: Path, some: list[str], versions: list[str], labels: list[str]
) -> None:
    paths = [
        write(tmp_path / name, [PASSED], dataclasses.replace(RUN, versions={"torch": version}))
        for name, version in zip(some, versions, strict=True)
    ]
    assert html_page._labels(list(map(read, paths))) == labels


def test_a_run_that_did_not_end_is_called_so(tmp_path: Path) -> None:
    text = html_page.page([read(write(tmp_path / "out", [PASSED], ended=False))], "Results")
    assert "The run did not end: cases are missing." in text
    assert "did not end" not in html(tmp_path, [PASSED])


def test_names_and_reasons_cannot_write_html(tmp_path: Path) -> None:
    nasty = '"><script>alert(1)</script>'
    case = dataclasses.replace(NEW.case, backend=nasty, problem=f"mm:f16:{nasty}", candidate=nasty)
    one = dataclasses.replace(NEW, case=case, reason=Reason(nasty, nasty), details=nasty, kernels=(nasty,))
    refused = dataclasses.replace(one, status=Status.UNSUPPORTED, ratio=None)
    text = html(tmp_path, [one, refused], versions=[nasty])
    assert text.count("<script>") == 1
    assert "alert(1)" in section(text, "new")


class Loaded(HTMLParser):
    """Addresses that a page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_page_asks_no_network_and_stays_small(tmp_path: Path) -> None:
    text = html(tmp_path, outcomes(), outcomes(later=True))
    assert all(address.startswith(("#", "data:")) for address in Loaded(text).found)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert len(text.encode()) < 250_000
    assert text == html(tmp_path, outcomes(), outcomes(later=True))
