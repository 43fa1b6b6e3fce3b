"""A file that is wrong."""

from __future__ import annotations

from pathlib import Path


class FileError(ValueError):
    """A file of the user's that cannot be used; the message names file and line, and says what to do.

    Attributes:
        path: the file as it was named.
        line: 1-based line number, 0 where the file as a whole is meant.
    """

    def __init__(self, path: Path | str, line: int, problem: str, remedy: str) -> None:
        self.path = path
        self.line = line
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: {problem}; {remedy}")
