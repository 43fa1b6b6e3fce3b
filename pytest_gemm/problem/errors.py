"""The fields of a problem line as text: where each token stands, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

# The fields of an error; ``flags`` are the words of all subjects but quant.
FIELDS: Final = ("op", "dtypes", "layout", "shape", "epilogue", "flags")
# What words are about, in the order of a canonical line.
SUBJECTS: Final = ("quant", "math", "a", "b", "r0", "bias", "steps", "out", "m", "program")
GRAMMAR: Final = "op:dtypes:layout:shape[:epilogue][:subject.word+word]..."
_SUBJECT: Final = re.compile(r"([a-z_][a-z0-9_]*)\.")


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a line: its text, with the subject in front where it has one, and its column."""

    text: str
    column: int


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a line.

    Attributes:
        required: op, dtypes, layout and shape; "" for a missing one.
        tokens: of the steps with the quantisation parameters, and of the flags, in the order in which a problem holds
            them: scales, epilogue, requantisation.
        quant: the tokens of the field ``quant``.
    """

    required: tuple[str, str, str, str]
    tokens: dict[str, tuple[Token, ...]]
    quant: frozenset[str]

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps with the quantisation parameters."""
        return tuple(token.text for token in self.tokens["epilogue"])

    @property
    def flags(self) -> tuple[str, ...]:
        """Words of all subjects but quant, each with its subject."""
        return tuple(token.text for token in self.tokens["flags"])


class ProblemError(ValueError):
    """A problem line that cannot be read, or that contradicts itself.

    The message is one paragraph for a user: it names the field and the token, points at the character,
    and says what would be right.

    Attributes:
        line: the whole line as given.
        field: which field is wrong, one of :data:`FIELDS`.
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


def split(line: str) -> Fields:
    """The fields of a line.

    Raises:
        ProblemError: for an epilogue that is not behind the shape, and for an unknown subject; its line is empty.
    """
    fields, errors = _split(line)
    for error in errors:
        raise error
    return fields


def _split(line: str) -> tuple[Fields, list[ProblemError]]:
    parts = line.split(":")
    op, dtypes, layout, shape = (*parts[:4], "", "", "", "")[:4]
    epilogue: list[Token] = []
    quant: list[Token] = []
    flags: list[Token] = []
    errors: list[ProblemError] = []
    column = sum(len(part) + 1 for part in parts[:4])
    for place, part in enumerate(parts[4:]):
        found = _SUBJECT.match(part)
        subject = found[1] if found else ""
        target = epilogue if not subject else quant if subject == "quant" else flags
        if subject and subject not in SUBJECTS:
            errors.append(_wrong("flags", f"unknown subject {subject!r}", f"known: {' '.join(SUBJECTS)}", len(flags)))
        if part and not subject and place:
            allowed = f"it comes behind the shape: {GRAMMAR}"
            errors.append(_wrong("epilogue", f"{part!r} is out of place", allowed, len(epilogue)))
        prefix = f"{subject}." if subject else ""
        at = column + len(prefix)
        for word in part[len(prefix) :].split("+") if part else ():
            target.append(Token(prefix + word if target is flags else word, at))
            at += len(word) + 1
        column += len(part) + 1
    last = [token for token in quant if token.text.startswith("requant")]
    steps = (*(token for token in quant if token not in last), *epilogue, *last)
    tokens = {"epilogue": steps, "flags": tuple(flags)}
    return Fields((op, dtypes, layout, shape), tokens, frozenset(token.text for token in quant)), errors


def _wrong(field: str, problem: str, allowed: str, index: int) -> ProblemError:
    return ProblemError("", field, problem, allowed, index)


def _column(line: str, field: str, index: int, offset: int) -> int:
    """Where in ``line`` a token of a field begins; where the field ought to be if it is missing."""
    parts = line.split(":")
    place = FIELDS.index(field)
    if place >= 4:
        tokens = _split(line)[0].tokens[field]
        return min(tokens[index].column + offset, len(line)) if index < len(tokens) else len(line)
    if place >= len(parts):
        return len(line)
    start = sum(len(part) + 1 for part in parts[:place])
    words = parts[place].split({"dtypes": "-", "shape": "x"}.get(field, "+"))
    if index >= len(words):
        return start
    return min(start + sum(len(word) + 1 for word in words[:index]) + offset, len(line))
