"""The mutants: one TOML file for each backend.

A ``[[mutant]]`` has a ``name``, the ``file`` below ``torch/_inductor``, the text ``old`` that becomes ``new``, and what
it ``imitates``, a kind of regression.  ``after`` is a text before it, where ``old`` stands more than once.  ``null`` is
the reason why it changes nothing: a control.  ``equivalent`` is the reason why no result can show it, and ``survives``
why the suite does not find it all the same.  ``also`` lists further changes that belong to it, and ``elsewhere`` the
same change as other releases have it: tables with ``file``, ``old``, ``new`` and ``after``; what they leave out is the
mutant's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pytest_gemm.storage.datafile import Key, TableFile, is_text
from pytest_gemm.storage.errors import FileError
from template_mutants.patches import NotInReleaseError, Patch, changed, folder

FOLDER: Final = Path(__file__).parent
BACKENDS: Final = ("cpp", "triton", "cutlass")
_COMMENTS: Final[Mapping[str, str]] = {"cpp": "/*", "triton": "#", "cutlass": "/*"}
_CHANGES: Final = "write a list of tables with file, old, new and after"
_TEXT: Final = "write a text between quotes"


def _are_changes(value: object) -> bool:
    """Whether a value is a list of changes."""
    keys = {"file", "old", "new", "after"}
    return isinstance(value, list) and all(isinstance(one, dict) and one.keys() <= keys for one in value)


_KEYS: Final = {
    "name": Key(is_text, _TEXT, "name the mutant"),
    "file": Key(is_text, _TEXT, "name the file below torch/_inductor"),
    "old": Key(is_text, _TEXT, "write the text that is changed"),
    "new": Key(is_text, _TEXT, "write what stands in its place"),
    "imitates": Key(is_text, _TEXT, "say what kind of regression it is"),
    "after": Key(is_text, _TEXT),
    "null": Key(is_text, _TEXT),
    "equivalent": Key(is_text, _TEXT),
    "survives": Key(is_text, _TEXT),
    "also": Key(_are_changes, _CHANGES),
    "elsewhere": Key(_are_changes, _CHANGES),
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mutant; see the module's docstring.

    Attributes:
        backend: whose templates it changes.
        patch: the change.
        imitates: what kind of regression it is.
        null: why it changes nothing, "" for one that does.
        equivalent: why no result can show it, "" for one that can be killed.
        survives: why the suite does not find it, for the report.
        others: further changes that belong to it.
        elsewhere: the change as other releases have it.
    """

    backend: str
    patch: Patch
    imitates: str
    null: str = ""
    equivalent: str = ""
    survives: str = ""
    others: tuple[Patch, ...] = ()
    elsewhere: tuple[Patch, ...] = ()

    @property
    def name(self) -> str:
        return self.patch.name

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All its changes."""
        return (self.patch, *self.others)

    @property
    def digest(self) -> str:
        """Of its text: an answer of an earlier run holds as long as it is the same."""
        return hashlib.sha256(repr(self.patches).encode()).hexdigest()[:12]


def load(backend: str) -> tuple[Mutant, ...]:
    """The mutants of a backend's templates.

    Raises:
        FileError: for a file that is not TOML, an unknown key, a wrong value, or a name that stands twice.
    """
    file = TableFile(FOLDER / f"{backend}.toml", "mutant", FileError)
    found: dict[str, Mutant] = {}
    for table in file.tables():
        values = file.read(table, _KEYS)
        own = {key: values[key] for key in ("name", "file", "old", "new")}
        patch = Patch(**own, after=values.get("after", ""), comment=_COMMENTS[backend])
        if patch.name in found:
            raise file.fail(f"two mutants are called {patch.name}", "names are unique", "name")
        changes = {
            key: tuple(dataclasses.replace(patch, **one) for one in values.get(key, []))
            for key in ("also", "elsewhere")
        }
        texts = {key: values.get(key, "") for key in ("imitates", "null", "equivalent", "survives")}
        found[patch.name] = Mutant(backend, patch, **texts, others=changes["also"], elsewhere=changes["elsewhere"])
    return tuple(found.values())


def in_release(mutants: Iterable[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """The mutants whose text is in the installed release, and those whose text is not.

    Raises:
        SyntaxError: where a mutated module is no Python.
    """
    there: list[Mutant] = []
    missing: list[Mutant] = []
    for mutant in mutants:
        ways = (mutant, *(dataclasses.replace(mutant, patch=patch) for patch in mutant.elsewhere))
        found = next(filter(_applies, ways), None)
        (missing if found is None else there).append(found or mutant)
    return there, missing


def _applies(mutant: Mutant) -> bool:
    """Whether its text is in the installed release."""
    by_file: dict[str, list[Patch]] = defaultdict(list)
    for patch in mutant.patches:
        by_file[patch.file].append(patch)
    for file, patches in by_file.items():
        path = folder() / file
        try:
            text = changed(path.read_text(encoding="utf-8"), patches)
        except (FileNotFoundError, NotInReleaseError):
            return False
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    return True
