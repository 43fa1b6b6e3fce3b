"""What GitHub Actions shows of a run: annotations, which are commands in the output, and the summary of the job."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

# How many errors GitHub shows of a step.
_SHOWN: Final = 10
_DATA: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY: Final = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A", ":": "%3A", ",": "%2C"})


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a file: ``line`` is 0 for the file as a whole."""

    file: str
    line: int = 0

    def within(self, folder: Path) -> str:
        """The file as a path within a folder, with ``/``; "" where it lies elsewhere, or is none."""
        file = Path(self.file).resolve()
        return file.relative_to(folder).as_posix() if file.is_relative_to(folder) and file.is_file() else ""


@dataclasses.dataclass(frozen=True)
class Annotation:
    """One annotation, which GitHub shows as an error.

    Attributes:
        title: a few words.
        text: the message; it may have several lines.
        places: where it belongs; the first one that lies in the repository counts.
    """

    title: str
    text: str
    places: tuple[Place | None, ...] = ()

    def command(self, repository: Path) -> str:
        """The line of output that GitHub reads; a place outside of the repository is left out."""
        properties: dict[str, object] = {}
        for place in self.places:
            if place is not None and (file := place.within(repository)):
                properties = {"file": file, **({"line": place.line} if place.line else {})}
                break
        properties["title"] = self.title
        given = ",".join(f"{name}={str(value).translate(_PROPERTY)}" for name, value in properties.items())
        return f"::error {given}::{self.text.translate(_DATA)}"


def repository(otherwise: Path) -> Path:
    """The folder that the paths of annotations begin at."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or otherwise).resolve()


def commands(annotations: Sequence[Annotation], root: Path) -> list[str]:
    """The lines for some annotations: as many as GitHub shows, the last one says how many there are more.

    Args:
        annotations: each once, the most important first.
        root: folder of the repository.
    """
    found = list(annotations)
    if len(found) > _SHOWN:
        more = Annotation(f"{len(found) - _SHOWN + 1} more", "The summary of the job lists them.")
        found = [*found[: _SHOWN - 1], more]
    return [one.command(root) for one in found]


def append_summary(markdown: str) -> None:
    """Add to the summary of the job, where GitHub has named its file.

    Raises:
        OSError: when it cannot be written.
    """
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{markdown}\n")


def place_of_case(nodeid: str, problem: str, root: Path) -> Place:
    """Where the problem of a test stands in the test's file, or else the test.

    Args:
        nodeid: of the test.
        problem: its canonical line.
        root: folder that the id begins at.
    """
    file, *_, name = nodeid.partition("[")[0].split("::")
    path = root / file
    quoted = rf"[\"']{re.escape(problem)}[\"']"
    return Place(str(path), _line_with(path, quoted) or _line_with(path, rf"^\s*(async )?def {re.escape(name)}\b"))


def places_of_backends(backends: Iterable[Any]) -> dict[str, Place]:
    """Where the backends that are not of this package are defined, by their names: a function, or else a class."""
    found = {}
    for backend in backends:
        code, kind = getattr(getattr(backend, "matmul", None), "__code__", None), type(backend)
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if code is not None:
            found[backend.name] = Place(code.co_filename, code.co_firstlineno)
        elif file is not None and not kind.__module__.startswith("pytest_gemm."):
            found[backend.name] = Place(file, _line_with(Path(file), rf"^\s*class {re.escape(kind.__name__)}\b"))
    return found


def _line_with(path: Path, pattern: str) -> int:
    """1-based number of the first line with a pattern; 0 where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((number for number, line in enumerate(lines, 1) if re.search(pattern, line)), 0)
