"""Sentences that a user reads: texts of three words or more in code and templates, docstrings left out.

``python tests/sentences.py`` writes them to ``tests/plugin/sentences.txt``, which a test compares with the code, so
that each new or changed sentence is read in a review.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SNAPSHOT: Final = ROOT / "tests" / "plugin" / "sentences.txt"
PACKAGES: Final = ("pytest_gemm", "backends", "conformance", "perf")

# Words that plain technical English does without.
DIALECT: Final = re.compile(
    r"\b(nobody|whoever|whom|in vain|speaks? of|told of|strangers?|guilty|innocent|blamed?|accus\w+|needless|twins?"
    r"|liars?|honest|fillings?|rivals?|restless|thereof|lest|alas|beforehand)\b",
    re.IGNORECASE,
)


def _text(node: ast.expr) -> str:
    """A literal, with ``{}`` for what a format puts in; "" for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join("{}" if isinstance(part, ast.FormattedValue) else _text(part) for part in node.values)
    return ""


def _literals(node: ast.AST) -> Iterator[str]:
    """Literals below a node; a docstring is none, and the parts of a format are one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.Constant | ast.JoinedStr):
            yield _text(child)
        else:
            yield from _literals(child)


def _values(text: str) -> Iterator[str]:
    """The texts of a TOML file that stand on a line of their own."""
    for line in text.splitlines():
        if found := re.fullmatch(r'\w+ = "(.*)"', line):
            yield found[1]


def _template(text: str) -> Iterator[str]:
    """The lines of a template, without its comments, statements and markup, with ``{}`` for what it puts in."""
    text = re.sub(r"{#.*?#}|{%.*?%}", " ", re.sub(r"{{.*?}}", "{}", text, flags=re.DOTALL), flags=re.DOTALL)
    yield from (part.strip() for part in re.split(r"\n|<[^>]*>", text))


def sentences(path: Path) -> list[str]:
    """The sentences of a module, a table of texts, or a template, one line each, sorted."""
    text = path.read_text(encoding="utf-8")
    texts = {".toml": _values, ".jinja": _template}.get(path.suffix, lambda code: _literals(ast.parse(code)))(text)
    found = {" ".join(one.split()) for one in texts}
    return sorted(text for text in found if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text)


def modules() -> list[Path]:
    """All modules of the packages, and the tables of texts of the backends and of the gate."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted([*found, *(ROOT / "backends").rglob("*.toml"), *(ROOT / "pytest_gemm").rglob("*.toml")])


def snapshot() -> str:
    """All sentences, by module."""
    templates = sorted(ROOT.glob("pytest_gemm/**/*.jinja"))
    by_module = {path.relative_to(ROOT).as_posix(): sentences(path) for path in [*modules(), *templates]}
    parts = ["\n".join((f"# {name}", *found)) for name, found in by_module.items() if found]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
