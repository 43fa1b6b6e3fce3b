"""How defects and speed went: ``pytest-gemm trends``, one page of stored run records and baselines."""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gemm.case_id import CaseId
from pytest_gemm.compare import page, runs
from pytest_gemm.speed.baseline.store import Store, hardware_keys
from pytest_gemm.speed.data import by_case
from pytest_gemm.speed.report.templates import render
from pytest_gemm.storage import files

# Runs that have a column in the table of defects, the latest; cases that are drawn on a machine, those that moved most.
_COLUMNS: Final = 16
_CASES: Final = 60
_HEIGHT: Final = 30


class Point(NamedTuple):
    """A time of a case.

    Attributes:
        date: ISO 8601.
        seconds: a call.
        commit: that was measured, "" where unknown.
    """

    date: str
    seconds: float
    commit: str = ""


def trends(records: Sequence[runs.Run], baselines: Path | None, title: str) -> str:
    """One HTML document that loads nothing.

    Args:
        records: the runs, in any order.
        baselines: folder of stored baselines, ``None`` for none.
        title: of the page.
    """
    found = [
        page.Run(one.path, one.record, f"{one.record.run.date[:10]} torch {one.record.run.versions.get('torch', '?')}")
        for one in sorted(records, key=_date)
    ]
    shown = found[-_COLUMNS:]
    failures = sorted(page.failures(shown), key=lambda one: (bool(one.entry), [-n for n in one.counts[::-1]], one.key))
    speed = _speed(records, baselines)
    text = render(
        "trends.html.jinja",
        "pytest_gemm.compare",
        title=title,
        runs=found[::-1],
        tallies=[run.counts(run.outcomes) for run in found[::-1]],
        shown=shown,
        failures=failures,
        speed={key: _courses(some[:_CASES]) for key, some in speed.items()},
        counts={key: len(some) for key, some in speed.items()},
        height=_HEIGHT,
    )
    return text + "\n"


def _date(run: runs.Run) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(run.record.run.date, "%Y-%m-%d %H:%M:%S %z")
    except ValueError:  # a record without its first line
        return datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)


# -- speed -------------------------------------------------------------------------------------------------------


def _speed(records: Iterable[runs.Run], baselines: Path | None) -> dict[str, list[tuple[CaseId, list[Point]]]]:
    """By hardware key the cases with more than one time, the one that moved most since its first time first."""
    found: dict[str, dict[CaseId, set[Point]]] = defaultdict(lambda: defaultdict(set))
    for key in hardware_keys(baselines) if baselines else ():
        for case, one in Store(baselines or Path(), key).load_all().items():
            found[key][case].update(Point(*past) for past in one.history)
    for run in records:
        by_hardware: dict[str, list[Any]] = defaultdict(list)
        for session in run.sessions:
            by_hardware[session.hardware].append(session)
        for key, sessions in by_hardware.items():
            for case, samples in by_case(sessions).items():
                times = [sample.estimate for sample in samples if sample.estimate and not sample.disturbed]
                if times:
                    found[key][case].add(Point(sessions[0].date, statistics.median(times), sessions[0].commit))
    told = {
        key: [(case, sorted(some)) for case, some in cases.items() if len(some) > 1] for key, cases in found.items()
    }
    for some in told.values():
        some.sort(key=lambda item: (-abs(math.log(item[1][-1].seconds / item[1][0].seconds)), item[0]))
    return {key: some for key, some in sorted(told.items()) if some}


def _courses(told: Sequence[tuple[CaseId, Sequence[Point]]]) -> list[dict[str, Any]]:
    """The rows of a machine, on one scale that is at least 5% high."""
    changes = [point.seconds / past[0].seconds - 1 for _, past in told for point in past]
    y = _scale(min(*changes, -0.025), max(*changes, 0.025), _HEIGHT - 4, 4)
    return [_course(case, past, y) for case, past in told]


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: round(begin + (value - low) / (high - low) * (end - begin), 1)


def _course(case: CaseId, past: Sequence[Point], y: Callable[[float], float]) -> dict[str, Any]:
    """The dots of a case: dates across in percent; points of one day stand at even distances."""
    days = [datetime.date.fromisoformat(point.date[:10]).toordinal() for point in past]
    x = _scale(days[0], days[-1], 2, 98) if days[-1] > days[0] else None
    dots = []
    for i, (day, point) in enumerate(zip(days, past, strict=True)):
        change = point.seconds / past[0].seconds - 1
        dots.append(
            {
                "x": x(day) if x else round(2 + 96 * i / (len(past) - 1), 1),
                "y": y(change),
                "tip": f"{point.date[:10]}: {100 * change:+.1f}%, commit {point.commit or 'unknown'}",
            }
        )
    return {
        "case": str(case),
        "dots": dots,
        "zero": y(0),
        "change": 100 * (past[-1].seconds / past[0].seconds - 1),
        "seconds": past[-1].seconds,
        "since": past[0].date[:10],
        "until": past[-1].date[:10],
    }


# -- the command -------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    """Write the page."""
    if not given.records and given.baselines is None:
        raise ValueError("nothing to show: name run records, or --baselines=DIR, or both")
    if given.baselines is not None and not hardware_keys(given.baselines):
        raise ValueError(
            f"--baselines={given.baselines}: holds no baselines; name a folder that --gemm-record has made"
        )
    found = [runs.load(path) for path in given.records]
    files.replace(given.html, trends(found, given.baselines, given.title).encode(errors="backslashreplace"))
    return 0
