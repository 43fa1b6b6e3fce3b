"""Where an annotation belongs: the line of a test, or of the function that is judged."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a file: ``line`` is 0 for the file as a whole."""

    file: str
    line: int = 0

    def within(self, folder: Path) -> str:
        """The file as a path within a folder, with ``/``; "" where it lies elsewhere, or is none."""
        file = Path(self.file).resolve()
        return file.relative_to(folder).as_posix() if file.is_relative_to(folder) and file.is_file() else ""


def of_case(nodeid: str, problem: str, root: Path) -> Place:
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


def of_backends(backends: Iterable[Any]) -> dict[str, Place]:
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
