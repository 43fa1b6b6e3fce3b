"""``pytest-gemm migrate FILE...``: rewrite problem lines and ledger keys of earlier versions in place.

It reads baselines (``*.jsonl``, ``*.json``), snapshots (``*.tsv``), ledgers, shapes, families and cases (``*.toml``,
with patterns such as ``mm:*:nt:*``), Python sources and Markdown.  A second run changes nothing.  A text whose spelling
depends on a value that it does not hold, such as ``f"{line}+bias"``, stays as it is.
"""

from __future__ import annotations

import argparse
import itertools
import re
from typing import Final

from pytest_gemm.problem.errors import SUBJECTS
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, StepKind
from pytest_gemm.text import show

_SUFFIXES: Final = (".json", ".jsonl", ".tsv", ".toml", ".py", ".md", ".txt")
# A flag's old name is that of its random stream.
_FLAGS: Final = {flag.stream: name for name, flag in FLAGS.items()}
_ORDER: Final = {name: place for place, name in enumerate(FLAGS)}
# Old flags that are words of other meanings too: rewritten alone only where they are given to has() or as flags.
_WORDS: Final = ("self", "tf32", "reduced", "tap", "fork", "again", "square", "unfrozen", "concat", "flat")
_OLD: Final = "|".join(sorted(map(re.escape, _FLAGS), key=len, reverse=True))
_OP: Final = rf"(?:{'|'.join(sorted(OPS, key=len, reverse=True))}|\{{op\}}|[*?])"
_LINE: Final = re.compile(rf"(?<![\w:.-]){_OP}:(?:[\w\-+.:*?]|\[\w+\]|\{{\w*\}})+")
_QUOTED: Final = re.compile(
    rf"(?P<given>has\(|flags=\(|flags = \[?)?"
    rf"(?P<quote>[\"'`])(?P<not>!?)(?P<flags>(?:{_OLD})(?:\+(?:{_OLD}))*)(?P=quote)"
)
_KEYS: Final = ((re.compile(r"\bfilling(?=\s*=)"), "distribution"), (re.compile(r'"fell-back"'), '"fallback"'))


def modern_line(line: str) -> str:
    """The spelling of a line or of a pattern of an earlier version; ``line`` itself where it is none."""
    fields = line.split(":")
    first = 1 if "*" in line else 4  # a pattern has any number of fields
    modern = fields[:first] + [field for old in fields[first:] for field in _modern_field(old)]
    return line if modern == fields else ":".join(filter(None, modern))


def _modern_field(field: str) -> list[str]:
    """The fields of which one has become several: the steps that it keeps, then words by subject.

    In a pattern other tokens may stand where the field has a wildcard: ``*off-b+const-b*`` is
    ``*b.*offset+constant*``.
    """
    if re.match(r"[*!]*\w+\.", field):
        return [field]
    front, back = "*" if field.startswith("*") else "", "*" if field.endswith("*") else ""
    tokens = {token: _modern_word(token) for token in field.strip("*").split("+")}
    words = sorted(filter(None, tokens.values()), key=_place)
    if not words:
        return [field]
    found = ["+".join(token for token, word in tokens.items() if not word)]
    for subject, own in itertools.groupby(words, lambda word: word.partition(".")[0]):
        text = "+".join(word.partition(".")[2] for word in own)
        first = next((name for name in FLAGS if name.startswith(f"{subject}.")), "").partition(".")[2]
        may_follow = front and first and text.partition("+")[0] not in {first, "*"}
        found.append(f"{subject}.{'*' if may_follow else ''}{text}")
    if found[0] and back:
        found[:2] = [f"{found[0]}*{found[1]}"]
    found = [*filter(None, found)]
    return [front + found[0], *found[1:-1], found[-1] + back] if len(found) > 1 else [front + found[0] + back]


def _modern_word(token: str) -> str:
    """The word with its subject that a token has become; "" for a step of the epilogue."""
    name = token.partition("-")[0]
    if name in STEPS and STEPS[name].kind is StepKind.QUANT and "*" not in token:
        return f"quant.{token}"
    if not token.endswith("-"):
        return _FLAGS.get(token, "")
    matching = {name.partition(".")[0] for old, name in _FLAGS.items() if old.startswith(token)}
    return f"{matching.pop()}.*" if len(matching) == 1 else ""


def _place(word: str) -> tuple[int, int]:
    return SUBJECTS.index(word.partition(".")[0]), _ORDER.get(word, 0)


def modern_text(text: str, suffix: str) -> str:
    """A file's text in the present spelling, by the suffix of its name."""
    text = _LINE.sub(_modern_match, text)
    if suffix in (".py", ".toml", ".md"):
        text = _QUOTED.sub(_modern_flags, text)
    if suffix == ".toml":
        for old, new in _KEYS:
            text = old.sub(new, text)
    return text


def _modern_match(found: re.Match[str]) -> str:
    """The line without the punctuation of a sentence that ends with it."""
    bare = found[0].rstrip(".:?")
    return modern_line(bare) + found[0][len(bare) :]


def _modern_flags(found: re.Match[str]) -> str:
    """Flags between quotes, without a line around them."""
    if found["flags"] in _WORDS and not found["given"]:
        return found[0]
    flags = ":".join(_modern_field(found["flags"]))
    return f"{found['given'] or ''}{found['quote']}{found['not']}{flags}{found['quote']}"


def run(args: argparse.Namespace) -> int:
    """Rewrite the files and print how many lines of each have changed."""
    changed = 0
    inside = (sorted(path.rglob("*")) if path.is_dir() else [path] for path in args.paths)
    for path in itertools.chain.from_iterable(inside):
        if path not in args.paths and not (path.suffix in _SUFFIXES and path.is_file()):
            continue
        before = path.read_text(encoding="utf-8")
        after = modern_text(before, path.suffix)
        if after == before:
            continue
        changed += 1
        pairs = zip(before.splitlines(), after.splitlines(), strict=True)
        show(f"{path}: {sum(old != new for old, new in pairs)} lines\n")
        if not args.check:
            path.write_text(after, encoding="utf-8")
    show(f"{changed} files {'would change' if args.check else 'changed'}\n")
    return int(args.check and changed > 0)
