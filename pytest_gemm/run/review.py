"""What a reviewer reads of a run: Markdown for the summary of a job or a comment, and annotations.

The Markdown is made from outcomes, so a run and its record give the same one.  Its text is
``templates/review.md.jinja``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.core.text import escaped, printable
from pytest_gemm.record.record import Provenance
from pytest_gemm.record.records import from_record, ratio_text
from pytest_gemm.run import github
from pytest_gemm.run.github import Annotation
from pytest_gemm.run.terminal import by, distinct, having, nearest, status_counts, template

TITLE: Final = "GEMM correctness"
# Rows of a table: of failures that are open, of those that are folded, and of any other table.
_OPEN: Final = 10
_FOLDED: Final = 40
_OTHERS: Final = 20
# Lines of an annotation between what failed and how to run it again.
_LINES: Final = 3
# Characters of a reason.
_REASON: Final = 240


# -- Markdown ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What the Markdown is made from.

    Attributes:
        outcomes: everything that was judged.
        red: what turned it red without being a test's failure.
        provenance: what ran, and where.
        seconds: how long, ``None`` where the run did not end.
    """

    outcomes: Sequence[Outcome]
    red: Sequence[str]
    provenance: Sequence[Provenance]
    seconds: float | None = None


def markdown(run: Run, title: str) -> str:
    """A few lines, a table of counts and one of failures; the rest is folded.

    It has less than 65,536 characters, which is as long as a comment on GitHub can be.
    """
    failed = _spread([group for group in by(run.outcomes, "who", "problem").values() if _failures(group)])
    known = by(having(run.outcomes, "known-failure"), "known_failure")
    left = [o for o in having(run.outcomes, "unsupported", "not-run", "pruned") if o.reason]
    counts = status_counts(run.outcomes)
    return (
        template("review.md.jinja")
        .render(
            title=title,
            run=run,
            counts=[f"{counts[status]} {status}" for status in Status if counts[status]],
            table=_counts(run.outcomes),
            failed=[_row(_failures(group)) for group in failed],
            first=_OPEN,
            folded=_OPEN + _FOLDED,
            most=_OTHERS,
            known=sorted(known.items()),
            left=sorted(by(left, "who", "status.value", "reason.text").items(), key=lambda item: -len(item[1])),
            facts=list(dict.fromkeys(", ".join(_facts(one)) for one in run.provenance)),
            short=lambda text: escaped(printable(text, _REASON)),
            code=_code,
            judged=[outcome for outcome in run.outcomes if outcome.ratio is not None],
        )
        .strip()
        + "\n"
    )


def _failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.status.is_failure]


def _spread(groups: Sequence[list[Outcome]]) -> list[list[Outcome]]:
    """First one of each kind of failure, then the second ones, and so on."""
    ranked: list[tuple[int, list[Outcome]]] = []
    seen: dict[tuple[str, Status, str], int] = {}
    for group in groups:
        worst = _failures(group)[0]
        kind = (worst.who, worst.status, worst.code)
        seen[kind] = seen.get(kind, -1) + 1
        ranked.append((seen[kind], group))
    return [group for _, group in sorted(ranked, key=lambda pair: pair[0])]


def _row(failures: Sequence[Outcome]) -> list[str]:
    """A failed problem on a backend: where, how, why, how far beyond the bound."""
    worst = max(failures, key=lambda one: (one.ratio is not None, one.ratio or 0.0))
    distributions = " ".join(sorted(filter(None, distinct(failures, "distribution"))))
    why = escaped(printable(worst.reason.text if worst.reason else "", _REASON))
    return [_code(worst.problem), _code(worst.who), str(worst.status), why, distributions, ratio_text(worst.ratio)]


def _counts(outcomes: Sequence[Outcome]) -> list[list[object]]:
    """Problems by backend, op and status; by backend alone where that would be long."""
    used = [status for status in Status if any(outcome.status is status for outcome in outcomes)]
    groups: Mapping[Any, list[Outcome]] = by(outcomes, "who", "op")
    if len(groups) > _OTHERS:
        groups = {(who, "all"): group for who, group in by(outcomes, "who").items()}
    rows: list[list[object]] = [["backend", "op", *used, "correctly rounded"]]
    for (who, op), group in list(groups.items())[: 2 * _OTHERS]:
        counts = status_counts(group)
        rows.append([_code(who), op, *(counts[status] or "" for status in used), nearest(group)])
    return rows


def _facts(provenance: Provenance) -> list[str]:
    versions = [f"{name} {version}" for name, version in sorted(provenance.versions.items())]
    return [*versions, provenance.cpu, *provenance.gpus]


def _code(text: str) -> str:
    """Code within a table cell; problem lines hold neither bars nor backquotes, names of backends might."""
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"


# -- annotations -----------------------------------------------------------------------------------------------


def failure(
    nodeid: str,
    said: str,
    outcomes: Sequence[Mapping[str, Any]],
    verdicts: Sequence[str],
    root: Path,
    backends: Mapping[str, github.Place],
) -> Annotation | None:
    """The annotation of a test that failed; ``None`` for a test that is not of a case.

    Args:
        nodeid: of the test.
        said: the text of its failure.
        outcomes: records of what it judged.
        verdicts: of the gate.
        root: folder that the id begins at.
        backends: where backends are defined, by their names.
    """
    judged = list(map(from_record, outcomes))
    if not judged:
        return None
    wrong = _failures(judged)
    worst = (wrong or judged)[0]
    ended = str(worst.status) if wrong else next(iter(verdicts), "failed")
    lines = said.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(worst.problem)), None)
    block = [] if first is None else lines[first : first + 1 + _LINES]
    block = block or [f"{worst.problem} on {worst.who}: {ended}"]
    reruns = [line for line in lines if line.startswith("  rerun: ")]
    where = (github.place_of_case(nodeid, worst.problem, root), backends.get(worst.backend))
    text = "\n".join(dict.fromkeys(line.strip() for line in block + reruns[:1]))
    return Annotation("error", f"{worst.who}: {ended}", text, where, (worst.who, ended, worst.code))
