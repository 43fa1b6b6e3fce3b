"""Data files: read with an error that names file and line, whatever is wrong with them.

Ledgers and files of problems are lists of TOML tables, ``[[name]]``.  :class:`TableFile` holds each against a table of
its keys and finds the line of a key, which no TOML library tells: ``tomllib`` and ``tomlkit`` give values without it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.storage.errors import FileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_LONGEST: Final = 80


def shown(value: object) -> str:
    """A value as the writer of a TOML file knows it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_any(value: object) -> bool:  # noqa: ARG001 -- the signature of Key.right
    """Whether a value is one that ``Key.read`` checks: any."""
    return True


def is_text(value: object) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def is_texts(value: object) -> bool:
    """Whether a value is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


class WrongValue(ValueError):
    """A value that a key does not take.

    Args:
        problem: what is wrong, as it follows the name of the key.
        remedy: what to write; "" for the remedy of the key.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key of a table takes.

    Attributes:
        right: whether a value is of the right kind.
        remedy: what to write in place of a wrong value.
        required: what to write where the key is missing; "" for a key that may be missing.
        read: turns a value into what the program uses.

    Raises:
        WrongValue: by ``read``.
    """

    right: Callable[[Any], bool]
    remedy: str
    required: str = ""
    read: Callable[[Any], Any] = lambda value: value


class TableFile:
    """A TOML file that consists of tables of one name.

    Args:
        path: of the file.
        table: name of its tables.
        error: class of the errors, which are raised for everything that is wrong.
        head: keys that may stand at the head of the file: what a table has that says nothing else.

    Attributes:
        index: of the table that :meth:`tables` gave last, from 0; methods that ask for a line mean its lines.
    """

    def __init__(self, path: Path, table: str, error: type[FileError], head: Collection[str] = ()) -> None:
        self.path = path
        self.head = head
        self.table = table
        self.error = error
        self.index = -1
        self.text = self._read()
        self._lines = self.text.replace("\r\n", "\n").split("\n")

    def _read(self) -> str:
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # a pipe may have no end, and no beginning
                raise self.error(self.path, 0, "is no regular file", "name a TOML file")
            data = self.path.read_bytes()
        except OSError as error:
            raise self.error(self.path, 0, f"cannot be read ({error.strerror})", "name a TOML file") from None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise self.error(self.path, line, "is not UTF-8", "save the file as UTF-8") from None

    def document(self) -> dict[str, Any]:
        """The whole file."""
        try:
            return tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at line (\d+), column \d+\)", str(error))
            line = int(found[1]) if found else len(self.text.splitlines()) or 1
            message = re.sub(r" \(at .*\)\Z", "", str(error))
            raise self.error(self.path, line, f"is not TOML: {message}", "correct the syntax") from None
        except (RecursionError, ValueError) as error:  # nested too deeply, or more digits than Python reads
            raise self.error(self.path, 0, f"cannot be read ({error})", f"write [[{self.table}]] tables") from None

    def tables(self) -> Iterator[Mapping[str, Any]]:
        """Its tables, in their order."""
        document = self.document()
        for key in document:
            if key != self.table and key not in self.head:
                problem = f"unknown table {shown(key)}{did_you_mean(key, [self.table])}"
                raise self.error(self.path, self.place(key), problem, f"entries are [[{self.table}]]")
        found = document.get(self.table, [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            problem = f"{self.table} is not a list of tables"
            raise self.error(self.path, self.place(self.table), problem, f"write [[{self.table}]]")
        common = {key: document[key] for key in self.head if key in document}
        for self.index, one in enumerate(found):
            yield {**common, **one}

    def read(self, table: Mapping[str, Any], keys: Mapping[str, Key], *inside: str, **hints: str) -> dict[str, Any]:
        """The values of the current table, or of a table inside it, by key.

        Args:
            table: what is read.
            keys: what each key takes.
            inside: key of the table, when it stands inside the current one.
            hints: of an unknown key: where it belongs.

        Raises:
            FileError: for an unknown key, a missing one, and a wrong value.
        """
        where = f" in {inside[0]}" if inside else ""
        for name in table:
            if name not in keys:
                hint = hints.get(name) or did_you_mean(name, keys)
                problem = f"unknown key {name!r}{where}{hint}"
                raise self.fail(problem, f"known: {' '.join(keys)}", *inside, name)
        for name, key in keys.items():
            if key.required and name not in table:
                raise self.fail(f"{name} is missing", key.required, *inside)
        return {name: self._value(value, keys[name], *inside, name) for name, value in table.items()}

    def _value(self, value: Any, key: Key, *names: str) -> Any:
        try:
            if not key.right(value):
                raise WrongValue(f"is {shown(value)}")
            return key.read(value)
        except WrongValue as error:
            raise self.fail(f"{names[-1]} {error}", error.remedy or key.remedy, *names) from None

    # -- where something stands ------------------------------------------------------------------------------------

    def place(self, key: str) -> int:
        """1-based number of the first line that begins with a key of the whole file; 0 when none does."""
        return self._find(rf"\s*(\[\[?\s*)?[\"']?{re.escape(key)}\b", range(len(self._lines)))

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Where its tables begin, from 0."""
        header = re.compile(rf"\s*\[\[\s*{re.escape(self.table)}\s*\]\]")
        return [number for number, text in enumerate(self._lines) if header.match(text)]

    def line(self, *keys: str) -> int:
        """1-based line of a key of the current table, or of the table itself, in the usual layout of such files."""
        first, end = [*self._starts, len(self._lines), len(self._lines)][self.index : self.index + 2]
        if not self._starts:  # one list of inline tables
            return self.place(self.table)
        nearest = first + 1
        for key in keys:  # one inside the other
            found = self._find(rf"(^|[\s.{{,])[\"']?{re.escape(key)}[\"']?\s*[=.\]]", range(nearest - 1, end))
            nearest = found or nearest
        return nearest

    def _find(self, pattern: str, lines: range) -> int:
        """The 1-based number of the first of these lines in which the pattern is found; 0 for none."""
        return next((number + 1 for number in lines if re.search(pattern, self._lines[number])), 0)

    def fail(self, problem: str, remedy: str, *keys: str) -> FileError:
        """An error at a key of the current table."""
        return self.error(self.path, self.line(*keys), problem, remedy)


def document(path: Path) -> dict[str, Any]:
    """A TOML file of this package.

    Raises:
        FileError: when it cannot be read, or is not TOML.
    """
    return TableFile(path, "", FileError).document()
