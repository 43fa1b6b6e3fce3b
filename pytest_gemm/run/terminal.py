"""Every sentence and table that a human reads.  Pure functions from outcomes to text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pytest_gemm.outcome import Outcome, Reason, Seconds, Status
from pytest_gemm.records import ratio_text, status_of
from pytest_gemm.text import table


def header(backends: Sequence[str], level: str, seed: int, threads: Sequence[int]) -> str:
    """The line at the top of a run."""
    count = " and ".join(map(str, threads))
    return f"gemm: backends {', '.join(backends)}; level {level}, seed {seed}, {count} thread(s) a process"


# -- the summary -----------------------------------------------------------------------------------

_ALWAYS = frozenset({Status.PASSED, Status.INCORRECT, Status.FALLBACK, Status.UNSUPPORTED, Status.KNOWN_FAILURE})


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
    lines: list[str] = []
    if outcomes:
        lines += _status_table(outcomes)
        lines += _worst_lines(outcomes)
        lines += _choice_lines(outcomes)
        lines += _pruned_lines(outcomes)
        lines += _unsupported_lines(outcomes)
        lines += _not_run_lines(outcomes)
        lines += _known_lines(outcomes)
    for name, reason in missing.items():
        lines.append(f"{name} did not run: {reason.text}")
        if reason.remedy:
            lines.append(f"  to run it: {reason.remedy}")
    lines += [
        f"known failure {entry!r} passed everywhere it applied: delete it from the ledger" for entry in stale_entries
    ]
    if outcomes:
        lines += _time_lines(outcomes, processes, wall_seconds)
    return lines


def by_problem(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes by (backend with its mode, instruction set and threads, problem line)."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.who, outcome.problem].append(outcome)
    return found


def _status_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Problems by backend, op and status."""
    counts: dict[tuple[str, str], Counter[Status]] = defaultdict(Counter)
    worst: dict[tuple[str, str], float] = {}
    cases: Counter[tuple[str, str]] = Counter()
    for (backend, problem), group in by_problem(outcomes).items():
        row = backend, problem.split(":")[0]
        counts[row][status_of(group)] += 1
        for outcome in group:
            if outcome.ratio is None:
                continue
            cases[row] += 1
            if outcome.status is not Status.KNOWN_FAILURE:
                worst[row] = max(worst.get(row, 0.0), outcome.ratio)
    used = {status for row in counts.values() for status in row} | _ALWAYS
    columns = [status for status in Status if status in used]
    head = ["backend", "op", *map(str, columns), "cases", "worst error/bound"]
    rows = []
    for key in counts:
        numbers = [str(counts[key][status] or ".") for status in columns]
        rows.append([*key, *numbers, str(cases[key]), ratio_text(worst.get(key))])
    totals = [str(sum(row[status] for row in counts.values()) or ".") for status in columns]
    rows.append(["all", "", *totals, str(sum(cases.values())), ratio_text(max(worst.values(), default=None))])
    return [*table(head, rows, range(2, len(head))), "(problems; a problem counts under the worst of its cases)", ""]


def _worst_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The case nearest to its bound for each backend, among those that passed."""
    worst: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.status is Status.PASSED and outcome.ratio is not None:
            known = worst.get(outcome.who)
            if known is None or outcome.ratio > (known.ratio or 0.0):
                worst[outcome.who] = outcome
    return [
        f"{backend}: nearest to its bound {ratio_text(o.ratio)} ({o.tier}) in {o.problem} with {o.distribution}"
        for backend, o in worst.items()
    ]


def _choice_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """How many candidates of each backend were judged."""
    pairs: dict[str, set[tuple[str, str]]] = defaultdict(set)
    kernels: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.ratio is not None:
            pairs[outcome.backend].update((name, outcome.problem) for name in outcome.candidates)
            kernels[outcome.backend].update(outcome.kernels)
    lines = []
    for backend, found in pairs.items():
        names = {name for name, _ in found}
        if names:
            text = f"{len(names)} different candidates and {len(kernels[backend])} kernels judged"
            lines.append(f"{backend}: {text}, {len(found)} with their problems")
    return lines


def pruned_by_cause(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Outcomes of pruned candidates by (backend, code of the reason)."""
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status is Status.PRUNED and outcome.reason:
            found[outcome.backend, outcome.reason.code].append(outcome)
    return found


# Names of pruned candidates that a line gives.
_DROPPED_SHOWN = 3


def _pruned_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Candidates that were pruned, by cause."""
    lines = []
    for (backend, code), group in pruned_by_cause(outcomes).items():
        names = list(dict.fromkeys(o.candidate for o in group))
        shown = ", ".join(names[:_DROPPED_SHOWN]) + (", ..." if len(names) > _DROPPED_SHOWN else "")
        text = group[0].reason.text if group[0].reason else ""
        lines.append(f"{backend} pruned {len(group)} ({len(names)} different) for {code}: {shown}: {text}")
    return lines


_REASONS_SHOWN = 12
# Reasons that the sentence about a backend without a judged case gives.
_WHY_SHOWN = 3
# Code of the reason of a case that the ledger forbids to run.
WITHHELD = "can-crash"


def _unsupported_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Why problems were refused, grouped by the sentence."""
    groups: dict[tuple[str, str], set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.status is Status.UNSUPPORTED and outcome.reason:
            groups[outcome.who, str(outcome.reason)].add(outcome.problem)
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{backend} does not support {len(problems)}: {reason}"
        for (backend, reason), problems in ranked[:_REASONS_SHOWN]
    ]
    if len(ranked) > _REASONS_SHOWN:
        lines.append(f"and {len(ranked) - _REASONS_SHOWN} more reasons; the run record has them all")
    return lines


def is_judged(outcome: Outcome) -> bool:
    """Whether a case was run and its result judged; not what was refused, pruned, left out or withheld."""
    if outcome.status is Status.KNOWN_FAILURE:
        return outcome.reason is None or outcome.reason.code != WITHHELD
    return outcome.status not in {Status.UNSUPPORTED, Status.PRUNED, Status.NOT_RUN}


def why_unjudged(outcomes: Sequence[Outcome]) -> str:
    """What became of cases of which none was judged: the most frequent reasons."""
    groups = Counter((str(o.status), o.reason.text if o.reason else "no reason") for o in outcomes)
    shown = [f"{count} {status} ({reason})" for (status, reason), count in groups.most_common(_WHY_SHOWN)]
    more = [f"{len(groups) - _WHY_SHOWN} more reason(s)"] if len(groups) > _WHY_SHOWN else []
    return ", ".join(shown + more) or "no test of it asked for a judgement"


def _not_run_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Why problems were left out, grouped by the sentence."""
    groups: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.status is Status.NOT_RUN:
            groups[str(outcome.reason or "no reason")].add((outcome.backend, outcome.problem))
    return [f"not run, {len(problems)}: {reason}" for reason, problems in groups.items()]


def _known_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Which known failures were met, and in how many problems."""
    groups: dict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.status is Status.KNOWN_FAILURE:
            groups[outcome.known_failure].add(outcome.problem)
    return [f"known failure {entry}: {len(problems)} problem(s)" for entry, problems in groups.items()]


def _time_lines(outcomes: Sequence[Outcome], processes: int, wall_seconds: float) -> list[str]:
    """Where the time went."""
    total = sum((o.seconds for o in outcomes), Seconds())
    judged = [o for o in outcomes if o.ratio is not None]
    problems = len({(o.backend, o.problem) for o in judged})
    text = (
        f"{len(judged)} cases of {problems} problems judged in {wall_seconds:.0f} s by {processes} process(es): "
        f"compile {total.compile:.1f} s, run {total.run:.1f} s, reference and comparison {total.reference:.1f} s"
    )
    return [text]
