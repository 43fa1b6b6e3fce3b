"""The fields of a problem line as text: where each token stands, and what is wrong with one."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

# The fields of a line; ``flags`` are the words of all subjects but quant.
FIELDS: Final = ("op", "dtypes", "layout", "shape", "epilogue", "quant", "flags")
# What words are about, in the order of a canonical line.
SUBJECTS: Final = (
    *("quant", "math", "a", "b", "r0", "bias", "steps", "out"),
    *("m", "n", "k", "batch", "program", "groups"),
)
GRAMMAR: Final = "op:dtypes:layout:shape[:epilogue][:subject.word+word]..."
_SUBJECT: Final = re.compile(r"([a-z_][a-z0-9_]*)\.")
# What joins the tokens of a field; op and layout are one token, the other fields have "+".
_SEPARATORS: Final = {"op": ":", "dtypes": "-", "layout": ":", "shape": "x"}


class Token(NamedTuple):
    """A token of a line: its text, with the subject in front where it is a flag, and its column."""

    text: str
    column: int


class ProblemError(ValueError):
    """A problem line that cannot be read, or that contradicts itself.

    The message is one paragraph for a user: it names the field and the token, points at the character,
    and says what would be right.

    Attributes:
        field: which field is wrong, one of :data:`FIELDS`.
        problem: what is wrong; ``allowed``: what would be right.
        index: which token of the field is wrong, from 0; ``offset``: which character of it.
        line: the whole line as given; "" where only a part of it is known.
    """

    def __init__(self, field: str, problem: str, allowed: str, index: int = 0, offset: int = 0, line: str = "") -> None:
        super().__init__(field, problem, allowed, index, offset, line)
        self.field = field
        self.problem = problem
        self.allowed = allowed
        self.index = index
        self.offset = offset
        self.line = line

    @property
    def column(self) -> int:
        """0-based offset of the offending character in ``line``; found when it is asked for."""
        tokens = split(self.line)[self.field]
        end = len(self.line)
        return min(tokens[self.index].column + self.offset, end) if self.index < len(tokens) else end

    def __str__(self) -> str:
        shown = "".join(c if c.isprintable() else "?" for c in self.line)
        pointer = f"\n  {shown}\n  {' ' * self.column}^" if self.line else ""
        return f"{self.field}: {self.problem}; {self.allowed}{pointer}"

    def on(self, line: str) -> ProblemError:
        """The same complaint about the same token of another text, the one that the user typed."""
        return ProblemError(self.field, self.problem, self.allowed, self.index, self.offset, line)

    def at(self, field: str, index: int) -> ProblemError:
        """The same complaint about another token."""
        return ProblemError(field, self.problem, self.allowed, index, self.offset, self.line)


def split(line: str) -> dict[str, list[Token]]:
    """The tokens of a line by field.  A part of the line that is in no place of its own is a flag without a subject."""
    found: dict[str, list[Token]] = {field: [] for field in FIELDS}
    column = 0
    for place, part in enumerate(line.split(":")):
        subject = _SUBJECT.match(part) if place >= 4 else None
        prefix = subject[0] if subject else ""
        field = "quant" if prefix == "quant." else "flags" if prefix or place > 4 else FIELDS[place]
        at = column + len(prefix)
        for word in part[len(prefix) :].split(_SEPARATORS.get(field, "+")) if part or place < 4 else ():
            found[field].append(Token(prefix + word if field == "flags" else word, at))
            at += len(word) + 1
        column += len(part) + 1
    return found
