"""The summary of a run: numbers from outcomes here, sentences in ``templates/summary.txt.jinja``."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gemm.core.outcome import Outcome, Reason, Seconds, Status
from pytest_gemm.core.text import table
from pytest_gemm.record.records import status_of

if TYPE_CHECKING:
    import jinja2

# The columns that the table of a run always has.
_ALWAYS = frozenset({Status.PASSED, Status.INCORRECT, Status.FALLBACK, Status.UNSUPPORTED, Status.KNOWN_FAILURE})
# Reasons that the sentence about a backend without a judged case gives.
_WHY_SHOWN = 3


# -- groups of outcomes, for this module, for page.py and for the templates -------------------------------------


def by(outcomes: Iterable[Outcome], *names: str) -> dict[Any, list[Outcome]]:
    """Outcomes in groups that agree in these attributes, in the order in which they came in."""
    key = operator.attrgetter(*names)
    found: dict[Any, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome)].append(outcome)
    return found


def having(outcomes: Iterable[Outcome], *statuses: str) -> list[Outcome]:
    """The outcomes with one of these statuses."""
    return [outcome for outcome in outcomes if outcome.status.value in statuses]


def distinct(outcomes: Iterable[Outcome], name: str) -> set[Any]:
    """The distinct values of an attribute, which may hold one or, as a tuple, several."""
    values = [getattr(outcome, name) for outcome in outcomes]
    return {one for value in values for one in (value if isinstance(value, tuple) else (value,))}


def selected(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """What autotuning selected of several backends' candidates, with the number of problems, most often first."""
    counts = Counter(name for group in by(outcomes, "problem").values() for name in distinct(group, "candidates"))
    return counts.most_common()


def status_counts(outcomes: Iterable[Outcome]) -> Counter[Status]:
    """Number of problems by status; a problem counts under the worst of its cases."""
    return Counter(map(status_of, by(outcomes, "who", "problem").values()))


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of this package, with the functions above as filters."""
    import jinja2  # late: a run that shows nothing does without it

    loader = jinja2.PackageLoader("pytest_gemm.run")
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    counted = {"by": by, "having": having, "distinct": distinct, "selected": selected}
    made.filters |= {**counted, "row": _markdown_row}
    return made.get_template(name)


def _markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\|", str(cell)) for cell in cells) + " |"


# -- the terminal ------------------------------------------------------------------------------------------------


def summary(
    outcomes: Sequence[Outcome],
    *,
    missing: Mapping[str, Reason],
    stale_entries: Sequence[str],
    processes: int,
    wall_seconds: float,
) -> list[str]:
    """The terminal summary.

    Args:
        outcomes: everything that was judged.
        missing: backends that were asked for and could not run, with the reason.
        stale_entries: ids of ledger entries that applied and never failed.
        processes: how many processes judged.
        wall_seconds: duration of the whole run.
    """
    unsupported = by(having(outcomes, "unsupported"), "who", "why")
    text = template("summary.txt.jinja").render(
        outcomes=outcomes,
        table=_status_table(outcomes),
        judged=[outcome for outcome in outcomes if outcome.ratio is not None],
        unsupported=sorted(unsupported.items(), key=lambda item: -len(distinct(item[1], "problem"))),
        missing=missing,
        stale_entries=[*map(stale_text, stale_entries)],
        processes=processes,
        wall_seconds=wall_seconds,
        total=sum((outcome.seconds for outcome in outcomes), Seconds()),
    )
    return text.split("\n")[:-1]


def _status_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Problems by backend, op and status."""
    columns = [status for status in Status if status in _ALWAYS or any(o.status is status for o in outcomes)]
    head = ["backend", "op", *map(str, columns), "cases", "correctly rounded"]
    rows = []
    for (backend, op), group in (*by(outcomes, "who", "op").items(), (("all", ""), outcomes)):
        counts = status_counts(group)
        judged = [outcome for outcome in group if outcome.ratio is not None]
        rows.append([backend, op, *(str(counts[s] or ".") for s in columns), str(len(judged)), nearest(group)])
    return table(head, rows, range(2, len(head)))


def nearest(outcomes: Iterable[Outcome]) -> str:
    """The share of passed cases with every element correctly rounded."""
    passed = [outcome.ratio == 0 for outcome in having(outcomes, "passed") if outcome.ratio is not None]
    return f"{math.floor(100 * sum(passed) / len(passed))}%" if passed else "-"


def stale_text(entry: str) -> str:
    """What is said of a ledger entry that no longer applies."""
    return f"known failure {entry!r} passed everywhere it applied: delete it from the ledger"


def why_unjudged(outcomes: Sequence[Outcome]) -> str:
    """What became of cases of which none was judged: the most frequent reasons."""
    groups = Counter((str(o.status), o.reason.text if o.reason else "no reason") for o in outcomes)
    shown = [f"{count} {status} ({reason})" for (status, reason), count in groups.most_common(_WHY_SHOWN)]
    more = [f"{len(groups) - _WHY_SHOWN} more reason(s)"] if len(groups) > _WHY_SHOWN else []
    return ", ".join(shown + more) or "no test of it asked for a judgement"
