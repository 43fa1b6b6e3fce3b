"""Tables of text, in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int], *, markdown: bool) -> list[str]:
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
