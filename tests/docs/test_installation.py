"""Until pytest-gemm is on a package index pages install it from a clone, and workflows from the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from documents import commands_of
from reference_pages import account

from pytest_gemm import __version__

ROOT: Final = Path(__file__).parents[2]
FORM: Final = f'"pytest-gemm @ git+https://github.com/{account()}/pytest-gemm"'
CLONE: Final = "../pytest-gemm"
# What pip would look up in an index: the name alone, with an extra, or with a version.
NAME: Final = re.compile(r"""(?<![\w./@+-])pytest-gemm(?:\[[\w,]+\])?(?:[=<>~!]=?[\w.*]+)?(?=["'`\s]|$)""")
INSTALL: Final = re.compile(r'\bpip"? install\b(.*)')


def installed(text: str) -> list[str]:
    """What the commands in a text install as pytest-gemm."""
    found = []
    for match in INSTALL.finditer(text):
        command = match[1].replace("pytest-gemm[speed]", "pytest-gemm")
        rest = command.replace(FORM, "").replace(CLONE, "")
        found += [FORM] * command.count(FORM) + [CLONE] * command.count(CLONE) + NAME.findall(rest)
        found += re.findall(r"\S*git\+\S*pytest-gemm\S*", rest)
    return found


def pages() -> list[str]:
    """Each file that may show an installation, but those that are about releases."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.yml", "*.toml", "*.ini"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [path for path in listed.stdout.split() if path not in {"CHANGELOG.md", "CONTRIBUTING.md"}]


def test_no_page_installs_what_no_index_has() -> None:
    found = {(path, text) for path in pages() for text in installed((ROOT / path).read_text(encoding="utf-8"))}
    assert {text for _, text in found} >= {FORM, CLONE}
    is_released = f"## {__version__} (unreleased)" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    wrong = {(path, text) for path, text in found if (text in {FORM, CLONE}) is is_released}
    assert not wrong, "see CONTRIBUTING.md, Release"


def test_the_command_of_the_release_lets_every_page_install_from_the_index(tmp_path: Path) -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (command,) = [one.text for one in commands_of(contributing) if "ls-files" in one.text]
    for path in pages():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    done = subprocess.run(f"git init -q && git add -f . && {command}", shell=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    found = {text for path in pages() for text in installed((tmp_path / path).read_text(encoding="utf-8"))}
    assert found == {"pytest-gemm"}
    assert "\n    pip install pytest-gemm\n" in (tmp_path / "README.md").read_text(encoding="utf-8")
