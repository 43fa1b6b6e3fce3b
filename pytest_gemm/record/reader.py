"""A run: what a record holds, read from its file or gathered while the run goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.record.lines import Head, Totals, from_record, typed


@dataclasses.dataclass
class Run:
    """One run.

    Attributes:
        head: the first line.
        outcomes: in their order.
        totals: the last line.
        ended: whether there is a last line, and no half one behind it.
        path: of the record, ``None`` where it was not read from a file.
    """

    head: Head = dataclasses.field(default_factory=Head)
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    totals: Totals = dataclasses.field(default_factory=Totals)
    ended: bool = True
    path: Path | None = None


def read(path: Path) -> Run:
    """The run of a record, or of the folder of its ``--gemm-output``.

    Raises:
        ValueError: for anything else, with the file and, as of :func:`load`, the line.
    """
    file = path / "run.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"{path}: has no run.jsonl; name a run record, or the folder of a run's --gemm-output")
    try:
        return dataclasses.replace(load(file.read_text(encoding="utf-8")), path=file)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file}: is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def load(text: str) -> Run:
    """The run of a record's text; a run that was killed has no totals, and may have half a line at its end.

    Raises:
        ValueError: for a line that does not belong in a record, with its number and the key.
    """
    head, run = None, Run(ended=False)
    *lines, rest = text.split("\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            data = typed(json.loads(line, parse_constant=_not_json), dict[str, Any])
            if "run" in data:
                head = typed(data["run"], Head)
            elif "totals" in data:
                run.totals, run.ended = typed(data["totals"], Totals), True
            else:
                run.outcomes.append(from_record(data))
        except (ValueError, RecursionError) as error:  # noqa: PERF203  # it names the line
            if isinstance(error, json.JSONDecodeError) and number > len(lines):
                run.ended = False
                break
            raise ValueError(f"line {number} is no line of a run record: {error}") from None
    if head is None and not run.outcomes:
        raise ValueError("it has no line of a run record")
    return dataclasses.replace(run, head=head or Head())
