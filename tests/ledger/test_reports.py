"""Each entry of the shipped ledger has a thread upstream, or a report in ``docs/defects/reports``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from reference_pages import NEWEST

from pytest_gemm.ledger.entry import Entry
from pytest_gemm.ledger.ledger import Ledger

ROOT: Final = Path(__file__).parents[2]
DEFECTS: Final = ROOT / "docs" / "defects"
REPORTS: Final = sorted((DEFECTS / "reports").glob("*.md"))
MENDED: Final = DEFECTS / "reports" / "mended.md"
ENTRIES: Final = {entry.id: entry for entry in Ledger.load(ROOT / "conformance" / "known_failures.toml").entries}


def named_by(report: Path) -> list[str]:
    """The entries that a report is about."""
    text = report.read_text(encoding="utf-8")
    if report == MENDED:
        return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    (line,) = re.findall(r"^Ledger: (.*?)\. To: ", text, re.MULTILINE)
    return re.findall(r"`([^`]+)`", line)


def has_it(entry: Entry) -> bool:
    """Whether the newest release has the defect; those that it does not have are in mended.md."""
    return entry.applies({"torch": (NEWEST,)})


def test_each_entry_has_a_thread_or_one_report() -> None:
    named = [name for report in REPORTS for name in named_by(report)]
    assert sorted(named) == sorted(entry.id for entry in ENTRIES.values() if not entry.link)


@pytest.mark.parametrize("report", [report for report in REPORTS if report != MENDED], ids=lambda report: report.stem)
def test_a_report_can_be_filed(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert any(has_it(ENTRIES[name]) for name in named_by(report)), "it belongs into mended.md"
    assert re.search(r"^### 🐛 Describe the bug$|^\*\*Describe the bug\*\*$", text, re.MULTILINE)
    assert "### Versions" in text
    assert "**Expected" in text
    assert "**Got**" in text or "\nOutput" in text
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    compile(script, str(report), "exec")
    assert len(script.splitlines()) <= 35


def test_what_is_mended_is_not_in_the_newest_release() -> None:
    assert [name for name in named_by(MENDED) if has_it(ENTRIES[name])] == []


def test_the_table_of_defects_links_each_report_and_links_lead_somewhere() -> None:
    table = (DEFECTS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(reports/([\w-]+\.md)\)", table)) == {report.name for report in REPORTS}
    for report in REPORTS:
        for link in re.findall(r"\]\((\.\./[^)#]+)\)", report.read_text(encoding="utf-8")):
            assert (report.parent / link).resolve().exists(), f"{report.name}: {link}"
