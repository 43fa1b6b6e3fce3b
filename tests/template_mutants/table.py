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

import msgspec

from pytest_gemm.storage.datafile import document
from template_mutants.patches import NotInReleaseError, Patch, changed, folder

FOLDER: Final = Path(__file__).parent
BACKENDS: Final = ("cpp", "triton", "cutlass")
_COMMENTS: Final[Mapping[str, str]] = {"cpp": "/*", "triton": "#", "cutlass": "/*"}


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file; see the module's docstring."""

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
        FileError: for a file that is not TOML.
        msgspec.ValidationError: for an unknown key or a wrong value.
    """
    (tables,) = document(FOLDER / f"{backend}.toml").values()
    found = []
    for row in msgspec.convert(tables, list[_Row]):
        patch = Patch(row.name, row.file, row.old, row.new, row.after, _COMMENTS[backend])
        also, elsewhere = (
            tuple(dataclasses.replace(patch, **one) for one in changes) for changes in (row.also, row.elsewhere)
        )
        found.append(Mutant(backend, patch, row.imitates, row.null, row.equivalent, row.survives, also, elsewhere))
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
