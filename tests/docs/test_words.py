"""Documents, help texts, messages and docstrings are in plain English: none of the words of ``banned_words.txt``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = ("pytest_gemm", "backends", "conformance", "perf")
PAGES: Final = ("tutorial", "how-to", "reference", "explanation")
WORDS: Final = [
    line for line in Path(__file__).with_name("banned_words.txt").read_text().splitlines() if not line.startswith("#")
]
BANNED: Final = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)

FILES: Final = [
    *(path for name in ("README.md", "CONTRIBUTING.md") for path in [ROOT / name]),
    *(path for kind in PAGES for path in (ROOT / "docs" / kind).glob("*.md")),
    *(path for top in PRODUCT for kind in ("py", "toml", "jinja") for path in (ROOT / top).rglob(f"*.{kind}")),
]


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_banned_word(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if BANNED.search(line)]
