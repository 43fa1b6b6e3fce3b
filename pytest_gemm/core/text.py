"""Text of foreign origin, made fit for a terminal and a file; tables; hints for a word that is nearly right."""

from __future__ import annotations

import difflib
import html
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int], *, markdown: bool = False
) -> list[str]:
    """The lines of a table.

    Args:
        head: titles of the columns.
        rows: cells, as text.
        right: numbers of the columns that are aligned to the right.
        markdown: for Markdown; cells must not hold an unescaped ``|``.
    """
    from tabulate import tabulate

    numbers = set(right)
    aligned = ["right" if i in numbers else "left" for i in range(len(head))]
    if markdown:
        text = tabulate(list(rows), head, "pipe", colalign=aligned, disable_numparse=True)
    else:  # tabulate pads the head of a plain table
        text = tabulate([head, *rows], tablefmt="plain", colalign=aligned, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


def escaped(text: object) -> str:
    """Text that Markdown and its HTML leave as it is, also within a table."""
    safe = html.escape(str(text), quote=False)
    return " ".join(re.sub(r"[\\`*_\[\]|~]", r"\\\g<0>", safe).split())


def code_cell(text: str) -> str:
    """Code within a cell of a Markdown table."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


# Words of other libraries, by which their users ask for what has another name here.
_ALSO = {
    **dict.fromkeys(("matmul", "gemm", "sgemm", "dot"), "mm"),
    **dict.fromkeys(("batch_matmul", "batched_mm", "batched_gemm"), "bmm"),
    **dict.fromkeys(("fp32", "float32", "float"), "f32"),
    **dict.fromkeys(("fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("fp64", "float64", "double"), "f64"),
    **{"bfloat16": "bf16", "int8": "i8", "uint8": "u8", "int32": "i32", "gpu": "cuda"},
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint in brackets for a word that is nearly one of ``known``, or another word for it; "" where none is near."""
    names = list(known)
    close = [_ALSO[word]] if _ALSO.get(word) in names else difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def show(text: str) -> None:
    """Print a text; what the terminal cannot show, and half a surrogate pair, is shown as an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


# Characters of a user's value that a message repeats.
_SHOWN = 200


def shown(text: str) -> str:
    """A user's value for a message: what cannot be printed is escaped, and the middle of a long one is left out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 2]}...{line[-_SHOWN // 4 :]}"


# Characters of a foreign text that are kept, and of an outcome's details.
_MOST = 4000
DETAILS = 20_000


def printable(text: object, most: int = _MOST) -> str:
    """Foreign text that a terminal, a file and another process can be given.

    Newlines and tabs stay.  Every other character that is not printable is shown as its escape: control characters,
    terminal escapes, lone surrogates.  A long text is cut.

    Args:
        text: of a backend; what is no ``str`` is shown as one.
        most: characters of it that are kept.
    """
    if not isinstance(text, str):
        text = _asked(str, text)
    found = str.__getitem__(text, slice(most))  # a plain str, also of a subclass that overrides its methods
    if (left := str.__len__(text) - most) > 0:
        found += f"... ({left} more characters)"
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in found)


def one_line(text: object, most: int = _MOST) -> str:
    """The same for a name or a sentence, of which a newline would make two."""
    return printable(text, most).replace("\n", "\\n").replace("\t", "\\t")


def _asked(function: Callable[[Any], object], foreign: Any) -> str:
    """What a function of a foreign object says; the name of the exception where it raises one."""
    try:
        said = function(foreign)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"<{function.__name__}() of it raised {kind_of(error)}>"
    return said if isinstance(said, str) else ""


def message(error: BaseException, most: int = _MOST) -> str:
    """The message of an exception, :func:`printable`; of one whose ``__str__`` raises it says that."""
    return printable(_asked(str, error), most)


def kind_of(error: BaseException) -> str:
    """The name of an exception's class, in :func:`one_line`."""
    return one_line(type.__dict__["__name__"].__get__(type(error)), 100)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and all that it was raised from or wraps, each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]


def described(error: BaseException) -> str:
    """An exception in one line, :func:`printable`: its class, and the first line of its message."""
    return ": ".join(filter(None, (kind_of(error), first_line(error))))


def line_with(text: str, pattern: str) -> str:
    """The first line that has the pattern, or the first with anything in it; at most 200 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(pattern, line)), lines[0] if lines else "no message")[:200]


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that says something, :func:`printable`; "" where none does."""
    return next((line for line in message(error).splitlines() if line.strip()), "")


def ratio_text(ratio: float | None) -> str:
    """An error/bound ratio for a table."""
    if ratio is None:
        return "-"
    return f"{ratio:.3g}" if math.isfinite(ratio) else "inf"
