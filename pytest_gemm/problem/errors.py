"""What is wrong with a problem line, and where."""

from __future__ import annotations

from typing import Final


class ProblemError(ValueError):
    """A problem line that cannot be read, or that contradicts itself.

    The message is one paragraph for a user: it names the field and the token, points at the character,
    and says what would be right.

    Attributes:
        line: the whole line as given.
        field: which field is wrong: ``op``, ``dtypes``, ``layout``, ``shape``, ``epilogue``, ``flags``.
        problem: what is wrong; ``allowed``: what would be right.
        index: which token of the field is wrong, from 0; ``offset``: which character of it.
        column: 0-based offset of the offending character in ``line``.
    """

    def __init__(self, line: str, field: str, problem: str, allowed: str, index: int = 0, offset: int = 0) -> None:
        self.line = line
        self.field = field
        self.problem = problem
        self.allowed = allowed
        self.index = index
        self.offset = offset
        self.column = _column(line, field, index, offset)
        shown = "".join(c if c.isprintable() else "?" for c in line)
        pointer = f"\n  {shown}\n  {' ' * self.column}^" if line else ""
        super().__init__(f"{field}: {problem}; {allowed}{pointer}")

    def on(self, line: str) -> ProblemError:
        """The same complaint about the same token of another text, the one that the user typed."""
        return ProblemError(line, self.field, self.problem, self.allowed, self.index, self.offset)


def _column(line: str, field: str, index: int, offset: int) -> int:
    """Where in ``line`` a token of a field begins; where the field ought to be if it is missing."""
    parts = line.split(":")
    place = FIELDS.index(field)
    if place >= len(parts):
        return len(line)
    start = sum(len(part) + 1 for part in parts[:place])
    tokens = parts[place].split({"dtypes": "-", "shape": "x"}.get(field, "+"))
    if index >= len(tokens):
        return start
    return min(start + sum(len(token) + 1 for token in tokens[:index]) + offset, len(line))


FIELDS: Final = ("op", "dtypes", "layout", "shape", "epilogue", "flags")
