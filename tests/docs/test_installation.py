"""Until pytest-gemm is on a package index every page and workflow installs it from the repository, in one form."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from reference_pages import account

from pytest_gemm import __version__

ROOT: Final = Path(__file__).parents[2]
FORM: Final = f'"pytest-gemm @ git+https://github.com/{account()}/pytest-gemm"'
# What pip would look up in an index: the name alone, with an extra, or with a version.
NAME: Final = re.compile(r"""(?<![\w./@+-])pytest-gemm(?:\[[\w,]+\])?(?:[=<>~!]=?[\w.*]+)?(?=["'`\s]|$)""")
INSTALL: Final = re.compile(r'\bpip"? install\b(.*)')


def installed(text: str) -> list[str]:
    """What the commands in a text install as pytest-gemm."""
    found = []
    for match in INSTALL.finditer(text):
        command = match[1].replace("pytest-gemm[speed] @", "pytest-gemm @")
        rest = command.replace(FORM, "")
        found += [FORM] * command.count(FORM) + NAME.findall(rest)
        found += re.findall(r"\S*git\+\S*pytest-gemm\S*", rest)
    return found


def test_no_page_installs_what_no_index_has() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.yml", "*.toml", "*.ini"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = {
        (path, text)
        for path in listed.stdout.split()
        if path not in {"CHANGELOG.md", "CONTRIBUTING.md"}
        for text in installed((ROOT / path).read_text(encoding="utf-8"))
    }
    assert found
    is_released = f"## {__version__} (unreleased)" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    wrong = {(path, text) for path, text in found if (text == FORM) is is_released}
    assert not wrong, "see CONTRIBUTING.md, Release"
