"""``pytest-gemm migrate FILE...``: rewrite problem lines and ledger keys of earlier versions in place.

It reads baselines (``*.jsonl``, ``*.json``), snapshots (``*.tsv``), ledgers, shapes, families and cases (``*.toml``,
with patterns such as ``mm:*:nt:*``), Python sources and Markdown.  A second run changes nothing.  A text whose spelling
depends on a value that it does not hold, such as ``f"{line}+bias"``, stays as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pytest_gemm.problem.errors import SUBJECTS
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.rules import FLAGS
from pytest_gemm.problem.steps import STEPS, StepKind
from pytest_gemm.text import show

_SUFFIXES: Final = (".json", ".jsonl", ".tsv", ".toml", ".py", ".md", ".txt")
_RENAMED: Final = {flag.stream: name for name, flag in FLAGS.items()}
_QUANT: Final = frozenset(name for name, spec in STEPS.items() if spec.kind is StepKind.QUANT)
# Old flags that are words of other meanings too: rewritten alone only where they are given to has() or as flags.
_WORDS: Final = ("self", "tf32", "reduced", "tap", "fork", "again", "square", "unfrozen", "concat", "flat")
_OLD: Final = "|".join(sorted(map(re.escape, _RENAMED), key=len, reverse=True))
_HYPHENED: Final = "|".join(sorted((re.escape(n) for n in _RENAMED if n not in _WORDS), key=len, reverse=True))
_OP: Final = rf"(?:{'|'.join(sorted(OPS, key=len, reverse=True))}|\{{op\}}|[*?])"
_LINE: Final = re.compile(rf"(?<![\w:.-]){_OP}:(?:[\w\-+.:*?]|\[\w+\]|\{{\w*\}})+")
_ALONE: Final = re.compile(rf"(?P<q>[\"'`])(?P<not>!?)(?P<flags>(?:{_OLD})(?:\+(?:{_OLD}))*)(?P=q)")
_GIVEN: Final = re.compile(rf"(?P<before>has\(|flags=\(|flags = \[?)(?P<q>[\"'])(?P<not>!?)(?P<flag>{_OLD})(?P=q)")
_KEYS: Final = ((re.compile(r"\bfilling(?=\s*=)"), "distribution"), (re.compile(r'"fell-back"'), '"fallback"'))


def modern_line(line: str) -> str:
    """The spelling of a line or of a pattern of an earlier version; ``line`` itself where it is none."""
    fields = line.split(":")
    if any(field.partition(".")[0].lstrip("*!") in SUBJECTS and "." in field for field in fields[4:]):
        return line
    if "*" not in line:
        return _modern_fields(line, fields)
    # A pattern has any number of fields: its old tokens show which field is which.
    last = fields[-1]
    if re.search(rf"(?<![\w-])(?:{_OLD})(?![\w-])", last) and len(fields) > 1:
        return ":".join([*fields[:-1], _pattern_of_flags(last)])
    quant = [token for token in last.split("+") if token.strip("*").partition("-")[0] in _QUANT]
    if not quant or len(fields) < 4:
        return line
    kept = "+".join(token for token in last.split("+") if token not in quant)
    field = f"*quant.{'+'.join(quant).strip('*')}{'*' if last.endswith('*') else ''}"
    return ":".join([*fields[:-1], *([kept] if kept else []), field]).replace("*:*", "*")


def _modern_fields(line: str, fields: list[str]) -> str:
    """The spelling of a line with all its fields."""
    if not 5 <= len(fields) <= 6:
        return line
    steps = fields[4].split("+") if fields[4] else []
    quant = [step for step in steps if step.partition("-")[0] in _QUANT]
    epilogue = [step for step in steps if step not in quant]
    flags = fields[5].split("+") if len(fields) == 6 and fields[5] else []
    if not quant and not any(flag in _RENAMED for flag in flags):
        return line
    words = [f"quant.{step}" for step in quant] + [_RENAMED.get(flag, flag) for flag in flags]
    return ":".join([*fields[:4], *(["+".join(epilogue)] if epilogue else []), *_by_subject(words)])


def _by_subject(words: Iterable[str]) -> list[str]:
    """Words with their subjects as fields, in the order of the line; a placeholder is a field of its own."""
    found: dict[str, list[str]] = {}
    for token in words:
        subject, dot, word = token.partition(".")
        found.setdefault(subject if dot else token, []).append(word)
    order = list(FLAGS)
    for subject, own in found.items():
        own.sort(key=lambda word: order.index(f"{subject}.{word}") if f"{subject}.{word}" in order else 0)
    ranked = sorted(found, key=lambda one: SUBJECTS.index(one) if one in SUBJECTS else len(SUBJECTS))
    return [f"{one}.{'+'.join(found[one])}" if found[one] != [""] else one for one in ranked]


def _pattern_of_flags(text: str) -> str:
    """A last field with flags and wildcards: ``*off-b+const-b*`` as ``*b.*offset+constant*``."""
    ends = "*" if text.startswith("*") else "", "*" if text.endswith("*") else ""
    fields = _by_subject(_renamed_pattern(token) for token in text.strip("*").split("+"))
    if ends[0]:
        fields = [_with_earlier_words(field) for field in fields]
    return ends[0] + ":".join(fields) + ends[1]


def _with_earlier_words(field: str) -> str:
    """A field of a pattern with a wildcard where other words of the subject may come first."""
    subject, _, words = field.partition(".")
    first = next((name for name in FLAGS if name.startswith(f"{subject}.")), field).partition(".")[2]
    alone = subject in ("math", "program") or words.partition("+")[0] == first
    return field if alone else f"{subject}.*{words}"


def _renamed_pattern(token: str) -> str:
    matching = {new for old, new in _RENAMED.items() if token.endswith("-") and old.startswith(token)}
    subjects = {name.partition(".")[0] for name in matching}
    return f"{subjects.pop()}.*" if len(subjects) == 1 else _RENAMED.get(token, token)


def modern_flags(text: str) -> str:
    """The spelling of old flags that are joined by ``+``: ``pad-lda+dyn-m`` as ``a.padded:m.dynamic``."""
    return ":".join(_by_subject(_RENAMED[flag] for flag in text.split("+")))


def modern_text(text: str, suffix: str) -> str:
    """A file's text in the present spelling, by the suffix of its name."""
    text = _LINE.sub(lambda found: _trimmed(found[0]), text)
    if suffix in (".py", ".toml", ".md"):
        text = _GIVEN.sub(lambda f: f"{f['before']}{f['q']}{f['not']}{_RENAMED[f['flag']]}{f['q']}", text)
        text = _ALONE.sub(_flags_alone, text)
    if suffix == ".toml":
        for old, new in _KEYS:
            text = old.sub(new, text)
    return text


def _trimmed(line: str) -> str:
    """The line without the punctuation of a sentence that ends with it."""
    bare = line.rstrip(".:?")
    return modern_line(bare) + line[len(bare) :]


def _flags_alone(found: re.Match[str]) -> str:
    flags = found["flags"]
    return found[0] if flags in _WORDS else f"{found['q']}{found['not']}{modern_flags(flags)}{found['q']}"


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file()) if path.is_dir() else [path]
        )
        found += inside
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="FILE", help=f"files, or folders ({' '.join(_SUFFIXES)})"
    )
    parser.add_argument("--check", action="store_true", help="report what would change, write nothing, exit with 1")


def run(args: argparse.Namespace) -> int:
    """Rewrite the files and print how many lines of each have changed."""
    changed = 0
    for path in _files(args.paths):
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
