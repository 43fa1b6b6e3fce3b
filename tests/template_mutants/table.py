"""The mutants: one TOML file for each backend.

A ``[[mutant]]`` has a ``name``, the ``file`` below ``torch/_inductor``, the text ``old`` that becomes ``new``, and what
it ``imitates``, a kind of regression.  ``after`` is a text before it, where ``old`` stands more than once.  ``null`` is
the reason why it changes nothing: a control.  ``equivalent`` is the reason why no result can show it, and ``survives``
why the suite does not find it all the same.  ``also`` lists further changes of the file, tables with ``old``, ``new``
and ``after``; a release that has not their text is left as it is there.  ``elsewhere`` lists the same change as other
releases have it: tables with ``file``, ``old``, ``new`` and ``after``; what they leave out is the mutant's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from pytest_gemm.storage.datafile import document
from template_mutants.patches import NotInReleaseError, Patch, changed, folder

FOLDER: Final = Path(__file__).parent
BACKENDS: Final = ("cpp", "triton", "cutlass")
_COMMENTS: Final[Mapping[str, str]] = {"cpp": "/*", "triton": "#", "cutlass": "/*"}


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One mutant; see the module's docstring."""

    name: str
    file: str
    old: str
    new: str
    imitates: str
    after: str = ""
    null: str = ""
    equivalent: str = ""
    survives: str = ""
    also: tuple[dict[str, str], ...] = ()
    elsewhere: tuple[dict[str, str], ...] = ()
    comment: str = "#"

    @property
    def patch(self) -> Patch:
        """Its change, which bears its mark."""
        return Patch(self.name, self.file, self.old, self.new, self.after, self.comment)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All its changes."""
        return (self.patch, *(dataclasses.replace(self.patch, **{"after": "", **one}) for one in self.also))

    @property
    def digest(self) -> str:
        """Of its text: an answer of an earlier run holds as long as it is the same."""
        return hashlib.sha256("".join(map(repr, self.patches)).encode()).hexdigest()[:12]


def load(backend: str) -> tuple[Mutant, ...]:
    """The mutants of a backend's templates.

    Raises:
        FileError: for a file that is not TOML.
        msgspec.ValidationError: for an unknown key or a wrong value.
    """
    (tables,) = document(FOLDER / f"{backend}.toml").values()
    found = [replace(one, comment=_COMMENTS[backend]) for one in msgspec.convert(tables, list[Mutant])]
    assert len({one.name for one in found}) == len(found), "names are unique"
    return tuple(found)


def in_release(mutants: Iterable[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """The mutants whose text is in the installed release, and those whose text is not.

    Raises:
        SyntaxError: where a mutated module is no Python.
    """
    there: list[Mutant] = []
    missing: list[Mutant] = []
    for mutant in mutants:
        ways = (mutant, *(replace(mutant, **changes) for changes in mutant.elsewhere))
        found = next(filter(_applies, ways), None)
        (missing if found is None else there).append(found or mutant)
    return there, missing


def _applies(mutant: Mutant) -> bool:
    """Whether its text is in the installed release."""
    path = folder() / mutant.file
    try:
        source = path.read_text(encoding="utf-8")
        text = changed(source, (mutant.patch, *(one for one in mutant.patches[1:] if one.is_in(source))))
    except (FileNotFoundError, NotInReleaseError):
        return False
    if path.suffix == ".py":
        compile(text, str(path), "exec")
    return True
