"""The commands that the documents show: each line of a code block, and each code span, that is a whole command."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from pytest_gemm.tools import cli

ROOT: Final = Path(__file__).resolve().parent.parent
KINDS: Final = ("tutorial", "how-to", "reference", "explanation")

_PROGRAMS: Final = ("pytest", "pytest-gemm", "python", "python3", "pip", "tox", "git", "twine", "mkdocs")
_FIRST: Final = re.compile(
    rf"(?:[A-Z_]+=\S* )*(?:(?:[\w./-]*/)?(?:{'|'.join(_PROGRAMS)})(?=\s|$)|(?:bash |sh )?\.ci/\w+)"
)
# From here on the rest of a block is one script.
_SCRIPT: Final = re.compile(r"for \w+ in |\w+\(\) \{")
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Languages of fenced blocks whose lines are a shell's.
_SHELLS: Final = ("", "console", "bash", "sh", "shell", "text")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        text: as a shell takes it, continued lines as one, without the comment at its end.
        page: relative to the repository.
        line: of the page, from 1.
        span: it stands in a sentence or a table.
    """

    text: str
    page: str
    line: int
    span: bool = False


def pages() -> list[Path]:
    """README, CONTRIBUTING and the four kinds of pages."""
    folders = (ROOT / "docs" / kind for kind in KINDS)
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for one in folders for page in sorted(one.glob("*.md"))),
    ]


def commands() -> list[Command]:
    """Every command of every page, in their order."""
    return [
        one for page in pages() for one in commands_of(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
    ]


def commands_of(text: str, page: str = "") -> list[Command]:
    """The commands of one page."""
    found = []
    for number, language, block in _parts(text):
        if language is None:
            found += [Command(span, page, number, span=True) for span in _SPAN.findall(block) if _FIRST.match(span)]
        elif language in _SHELLS:
            found += [Command(command, page, number + offset) for offset, command in _of_block(block.split("\n"))]
    return [one for one in found if not is_name(one)]


class _Asking(cli.Parser):
    """A parser whose errors can be read."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def is_name(command: Command) -> bool:
    """Whether a span does not show a command but names one: of what is named, an argument is missing."""
    words = command.text.split()
    if not command.span:
        return False
    if len(words) == 1:
        return words[0] in _PROGRAMS
    if words[0] != "pytest-gemm" or "--help" in words[2:]:
        return False
    if words[1] not in cli.COMMANDS:
        return words[1].isupper()
    parser = _Asking()
    parser.fill(cli.COMMANDS[words[1]])
    try:
        parser.parse_args(words[2:])
    except ValueError as error:
        return "required" in str(error) or "expected" in str(error)
    return False


def _parts(text: str) -> Iterator[tuple[int, str | None, str]]:
    """First line, language and text of each block of code; lines of prose one by one, their language None."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        start = at
        if fence := re.match(r"\s*(```+|~~~+)\s*([\w-]*)", line):
            at += 1
            while at < len(lines) and not lines[at].lstrip().startswith(fence[1]):
                at += 1
            yield start + 2, fence[2], "\n".join(lines[start + 1 : at])
            at += 1
        elif line.startswith("    "):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            yield start + 1, "", "\n".join(lines[start:at])
        else:
            at += 1
            yield start + 1, None, line


def _of_block(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The commands of a block with their lines; where a line has a prompt, those with one only."""
    prompts = any(line.lstrip().startswith("$ ") for line in lines)
    at = 0
    while at < len(lines):
        start, line = at, lines[at].strip()
        at += 1
        if prompts and not line.startswith("$ "):
            continue
        line = line.removeprefix("$ ")
        if _SCRIPT.match(line):
            yield start, textwrap.dedent("\n".join([lines[start].replace("$ ", "", prompts), *lines[at:]])).strip()
            return
        while line.endswith("\\") and at < len(lines):
            line = line[:-1] + lines[at].strip()
            at += 1
        if _FIRST.match(line):
            yield start, without_comment(line)


def without_comment(line: str) -> str:
    """A command without a comment behind it, however it quotes."""
    for found in re.finditer(r"\s+#", line):
        try:
            shlex.split(line[: found.start()])
        except ValueError:  # inside quotes
            continue
        return line[: found.start()]
    return line.rstrip()
