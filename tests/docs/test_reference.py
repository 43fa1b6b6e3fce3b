"""Generated tables are what the code gives, and the page of the API has all that is public."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reference_pages import BLOCKS, COMMAND, FOLDER, addressed, pages, rewritten, with_addresses

from pytest_gemm import api
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS

_SEEN = ("chosen", "generated", "executed")  # a code is made of each


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_the_generated_tables_are_those_of_the_code(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == rewritten(page), f"{path.name} is not what the code gives; rewrite it: {COMMAND}"


def test_every_address_of_the_repository_has_the_account_of_pyproject() -> None:
    found = with_addresses()
    assert {"pyproject.toml", "ci-workflows.md", "first-backend.md"} <= {path.name for path in found}
    other = [path.name for path, text in found.items() if text != addressed(text)]
    assert not other, f"rewrite them: {COMMAND}"


def test_every_message_of_the_page_of_troubles_is_one_of_the_code() -> None:
    page = (FOLDER.parent / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^    (.+)$", page, re.MULTILINE)
    folders = (FOLDER.parents[1] / name for name in ("pytest_gemm", "backends"))
    source = "".join(path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.rglob("*.py")))
    assert len(messages) > 10
    assert [part for message in messages for part in message.split("...") if part.strip() not in source] == []


def test_every_table_stands_on_one_page() -> None:
    text = "".join(pages().values())
    assert {name: text.count(f"<!-- generated: {name} -->") for name in BLOCKS} == dict.fromkeys(BLOCKS, 1)


def test_the_page_of_the_api_has_every_module_of_it() -> None:
    page = (FOLDER / "api.md").read_text(encoding="utf-8")
    modules = [f"::: {module.name}\n" for module in pkgutil.iter_modules(api.__path__, "pytest_gemm.api.")]
    assert [module for module in modules if module not in page] == []


@pytest.mark.parametrize("words", [OPS, STEPS, FLAGS], ids=["ops", "steps", "flags"])
def test_every_word_has_a_meaning(words: Mapping[str, Any]) -> None:
    assert [name for name, word in words.items() if not word.help] == []


def test_the_codes_of_the_page_of_statuses_are_those_of_the_code() -> None:
    page = (FOLDER / "statuses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:`[a-z-]+`)? ?\| (`[a-z-]+`(?:, `[a-z-]+`)*)", page, re.MULTILINE)
    codes = {code for row in rows for code in re.findall(r"[a-z-]+", row)} - {f"nothing-{one}" for one in _SEEN}
    source = "".join(path.read_text(encoding="utf-8") for path in (FOLDER.parents[1] / "pytest_gemm").rglob("*.py"))
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f'"{code}"' not in source] == []
