"""Changes of Inductor's source text at its import, and the marks that prove that a changed place was used.

A place in a template is marked by a comment with the mutant's name in the generated code.  A place in Python is marked
by a call in front of its statement.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

ROOT: Final = "torch._inductor"
# The file with the patches of a process, and the file that names the marks it passes.
FILE: Final = "TEMPLATE_MUTANTS"
LOG: Final = "TEMPLATE_MUTANTS_LOG"
# How a mark begins, in generated text.
MARK: Final = "template_mutant_"
_CALL: Final = "__template_mutant__"
_TEMPLATES: Final = "kernel/templates/"


class NotInReleaseError(Exception):
    """The text that a mutant changes is not in this release."""


def folder() -> Path:
    """Where the installed sources of Inductor are; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "_inductor"


@dataclasses.dataclass(frozen=True)
class Patch:
    """A change of one file.

    Attributes:
        name: of the mutant.
        file: below ``torch/_inductor``.
        old: the text that is changed.
        new: what stands in its place.
        after: a text that precedes it, "" where it is the only one of its kind.
        comment: how a comment of the generated language begins.
    """

    name: str
    file: str
    old: str
    new: str
    after: str = ""
    comment: str = "#"

    def start(self, source: str) -> int:
        """Where the text begins.

        Raises:
            NotInReleaseError: where it is not there.
            ValueError: where it stands twice, and nothing says which one is meant.
        """
        begin = source.find(self.after)
        found = source.find(self.old, begin + len(self.after)) if begin >= 0 else -1
        if found < 0:
            raise NotInReleaseError(self.name)
        if not self.after and source.find(self.old, found + 1) >= 0:
            raise ValueError(f"{self.name}: {self.old!r} is not unique in {self.file}: give a text that precedes it")
        return found

    def is_in(self, source: str) -> bool:
        """Whether its text is there."""
        try:
            self.start(source)
        except NotInReleaseError:
            return False
        return True

    def is_text(self) -> bool:
        """Whether it changes a template's text, in the installed release, and so every program that shows its mark."""
        source = (folder() / self.file).read_text(encoding="utf-8")
        return self.file.endswith(".jinja") or _text_around(source, self.start(source)) is not None


# -- the text ------------------------------------------------------------------------------------------------------


def changed(source: str, patches: Iterable[Patch], *, only_marks: bool = False) -> str:
    """The source of a file with its patches, or with their marks alone."""
    edits: list[tuple[int, int, str]] = []
    for patch in patches:
        start = patch.start(source)
        edits.append(_mark(source, patch, start))
        if not only_marks:
            edits.append((start, start + len(patch.old), patch.new))
    for start, end, text in sorted(edits, reverse=True):
        source = source[:start] + text + source[end:]
    return source


def _mark(source: str, patch: Patch, start: int) -> tuple[int, int, str]:
    """The insertion that marks a place."""
    whole = patch.file.endswith(".jinja")
    text = (0, len(source)) if whole else _text_around(source, start)
    if text:
        return _comment(source, patch, start, text)
    place, indent = _statement(source, start)
    return place, place, f'{indent}{_CALL}("{patch.name}")\n'


def _comment(source: str, patch: Patch, start: int, text: tuple[int, int]) -> tuple[int, int, str]:
    """A comment in generated code: before the line in C++, behind it in Python, and outside Jinja's brackets."""
    if patch.comment != "#":
        begin = max(source.rfind("\n", 0, start) + 1, text[0])
        for opening, closing in (("{{", "}}"), ("{%", "%}")):
            last = source.rfind(opening, text[0], begin)
            if last > source.rfind(closing, text[0], begin):
                begin = last
        begin += len(source[begin:]) - len(source[begin:].lstrip(" "))
        return begin, begin, f"/*{MARK}{patch.name}*/"
    line = source.rfind("\n", 0, start) + 1
    if source[line:start].strip() in {"", "{%", "{%-"} and source[line:].lstrip().startswith("{%"):
        return line - 1, line - 1, f"  # {MARK}{patch.name}"  # in front of a condition, not in its branch
    end = source.find("\n", start + len(patch.old))
    for opening, closing in (("{{", "}}"), ("{%", "%}")):
        last = source.rfind(opening, text[0], end)
        if last > source.rfind(closing, text[0], end):
            end = source.find("\n", source.find(closing, end))
    return end, end, f"  # {MARK}{patch.name}"


@functools.lru_cache(maxsize=4)
def _tree(source: str) -> tuple[ast.Module, tuple[int, ...]]:
    """The parsed source, and the offset of each line."""
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    return ast.parse(source), tuple(offsets)


def _span(node: Any, offsets: Sequence[int]) -> tuple[int, int]:
    # Columns are counted in bytes; Inductor's sources are ASCII where it matters.
    return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset


def _text_around(source: str, start: int) -> tuple[int, int] | None:
    """The literal of several lines around a place: the text of a template."""
    tree, offsets = _tree(source)
    for node in ast.walk(tree):
        literal = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if literal and getattr(node, "end_lineno", 0) > getattr(node, "lineno", 0):
            begin, end = _span(node, offsets)
            if begin < start < end and source[begin:end].rstrip().endswith(('"""', "'''")):
                return source.find('"""', begin) + 3, end - 3
    return None


def _statement(source: str, start: int) -> tuple[int, str]:
    """Where the innermost statement around a place begins that stands at the beginning of its line."""
    tree, offsets = _tree(source)
    place, indent = 0, ""
    for node in ast.walk(tree):  # from the outside
        if isinstance(node, ast.stmt):
            begin, end = _span(node, offsets)
            line = offsets[node.lineno - 1]
            head = source[line:begin]
            first = source[begin : begin + 4] != "elif"
            if begin <= start < end and not head.strip() and first and line >= place:
                place, indent = line, head
    return place, indent


# -- the import ----------------------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, change: Callable[[str], str]) -> None:
        super().__init__(name, path)
        self._change = change

    def get_code(self, fullname: str) -> CodeType:  # bypasses the bytecode that is stored
        source = self._change(self.get_data(self.path).decode())
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _Then(importlib.machinery.SourceFileLoader):
    """Does something with a module that has been imported."""

    def __init__(self, name: str, path: str, then: Callable[[ModuleType], None]) -> None:
        super().__init__(name, path)
        self._then = then

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Sequence[Patch], only_marks: bool) -> None:
        self._only_marks = only_marks
        self._modules: dict[str, list[Patch]] = {}
        self._templates = [one for one in patches if one.file.startswith(_TEMPLATES)]
        for one in patches:
            if one not in self._templates:
                name = f"{ROOT}.{one.file.removesuffix('.py').replace('/', '.')}"
                self._modules.setdefault(name, []).append(one)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        then: dict[str, Callable[[ModuleType], None]] = {f"{ROOT}.compile_fx": self._import_all}
        if self._templates:
            then[f"{ROOT}.utils"] = self._read_templates
        if fullname not in self._modules and fullname not in then:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin:
            if fullname in then:
                spec.loader = _Then(fullname, spec.origin, then[fullname])
            else:
                mine = self._modules[fullname]
                spec.loader = _Loader(fullname, spec.origin, lambda text: self._changed(text, mine))
        return spec

    def _import_all(self, _last: ModuleType) -> None:
        """All that is changed at once: Dynamo traces Python that runs below a compiled program, this file too."""
        for name in (f"{ROOT}.lowering", *self._modules):
            importlib.import_module(name)
        sys.meta_path.remove(self)

    def _read_templates(self, utils: ModuleType) -> None:
        """Let ``load_template`` read the changed text of a template file."""
        original = utils.load_template

        def load_template(name: str, template_dir: Any) -> str:
            text: str = original(name, template_dir)
            mine = [one for one in self._templates if Path(one.file).name == f"{name}.py.jinja"]
            return self._changed(text, mine) if mine else text

        vars(utils)["load_template"] = load_template

    def _changed(self, source: str, patches: Sequence[Patch]) -> str:
        return changed(source, filter(lambda one: one.is_in(source), patches), only_marks=self._only_marks)


passed: Final[set[str]] = set()
"""Names of the mutants whose statements were executed."""


def _pass(name: str) -> None:
    if name not in passed:
        passed.add(name)
        if log := os.environ.get(LOG):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{name}\n")


def install() -> None:
    """Mutate what this process imports from now on, as the file of patches says."""
    if not (path := os.environ.get(FILE)):
        return
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    vars(builtins)[_CALL] = _pass
    sys.meta_path.insert(0, _Finder([Patch(**one) for one in given["patches"]], given["only_marks"]))


def write(path: Path, patches: Iterable[Patch], *, only_marks: bool = False) -> None:
    """Write the file of patches of a process."""
    text = json.dumps({"only_marks": only_marks, "patches": [dataclasses.asdict(one) for one in patches]})
    path.write_text(text, encoding="utf-8")
