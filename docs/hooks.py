"""Hooks of MkDocs: the home page is README.md, and a link that leads out of ``docs/`` leads to the repository."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^ {4,}|^\t")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The repository's address, which pyproject.toml alone has, and the pages of the folders that the menu names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url, config.repo_name = project["urls"]["Source"], "GitHub"
    config.nav = [_expanded(entry) for entry in config.nav or ()]
    return config


def _expanded(entry: Any) -> Any:
    """A folder as a section: its README first, then its pages by name; those of defects by what they are about."""
    if not isinstance(entry, dict):
        return entry
    ((title, target),) = entry.items()
    if not isinstance(target, str) or not (folder := ROOT / "docs" / target).is_dir():
        return entry
    pages = sorted(folder.rglob("*.md"), key=lambda page: (page.name != "README.md", page.as_posix()))
    if target != "defects":
        return {title: [page.relative_to(ROOT / "docs").as_posix() for page in pages]}
    often = Counter(page.stem.partition("-")[0] for page in pages if page.parent.name == "reports")
    found: dict[str, list[Any]] = {"": []} | {name: [] for name in often if often[name] > 1} | {"Other": []}
    for page in pages:
        path, (about, _, what) = page.relative_to(ROOT / "docs").as_posix(), page.stem.partition("-")
        section = {"libraries": "Libraries", "defects": ""}.get(
            page.parent.name, about if often[about] > 1 else "Other"
        )
        text = ": ".join(word.replace("-", " ") for word in (about, what) if word and word != section)
        found.setdefault(section, []).append(path if page.name == "README.md" else {text: path})
    return {title: [*found.pop(""), *({name: some} for name, some in found.items())]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The home page: README.md as it is."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Docstrings are reStructuredText, which mkdocstrings takes for Markdown: roles and ``::`` go."""
    if page.file.src_uri != "reference/api.md":
        return html
    return re.sub(r":\w+:<code>~?(?:[\w.]*\.)?", "<code>", html).replace("::</p>", ":</p>")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with links that the site can follow."""
    home = page.file.src_uri == "index.md"
    folder = PurePosixPath("." if home else f"docs/{page.file.src_uri}").parent

    def link(match: re.Match[str]) -> str:
        target = normpath(str(folder / match[2]))
        if (not home and target.startswith("docs/")) or files.get_file_from_path(match[2]):
            return match[0]
        if not (ROOT / target).exists():
            return match[0]  # a broken link: MkDocs names it
        return f"{match[1]}{config.repo_url}/blob/main/{target}{match[3]}"

    def row(line: str) -> str:
        # GitHub wants a bar in a cell escaped everywhere, Python-Markdown not in code.
        return re.sub(r"`[^`]*`", lambda match: match[0].replace("\\|", "|"), line) if line.startswith("|") else line

    return "\n".join(line if CODE.match(line) else LINK.sub(link, row(line)) for line in markdown.split("\n"))
