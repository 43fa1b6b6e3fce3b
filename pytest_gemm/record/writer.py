"""A run is gathered, and its record grows at once, so that a crash loses nothing.

Workers of pytest-xdist judge; their outcomes travel as plain data on pytest's reports, and the one process that
reports puts them together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_gemm.core.outcome import Outcome
from pytest_gemm.record.lines import Use, from_record, merge_use, plain, record_line, to_record
from pytest_gemm.record.reader import Run


@dataclasses.dataclass
class OfTest:
    """What one test judged.

    Attributes:
        outcomes: of its cases.
        use: how often each entry of the ledger applied.
        lost: why a file could not be written, by the option that asks for it.
        rerun: the command that runs again what the test failed for; "" where nothing failed.
        process: name of the process.
    """

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    use: Use = dataclasses.field(default_factory=dict)
    lost: dict[str, str] = dataclasses.field(default_factory=dict)
    rerun: str = ""
    process: str = "main"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which travels on a report; :meth:`of` reads it."""
        return {**vars(self), "outcomes": list(map(to_record, self.outcomes))}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> OfTest:
        """From plain data."""
        return cls(**{**data, "outcomes": list(map(from_record, data["outcomes"]))})


class Writer:
    """Gathers one run.

    Attributes:
        run: so far.
        places: of the tests of a shard among all tests, by their ids.
        processes: names of those that judged.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.places: Mapping[str, int] = {}
        self.processes: set[str] = set()
        self._tests: list[str] = []  # of the outcomes
        self._path: Path | None = None
        self._started = time.perf_counter()

    def open(self, path: Path | None) -> None:
        """Start the file with its first line; ``None`` for no file."""
        self._path = path
        self._write(lambda: [{"run": plain(self.run.head)}], "w")

    def add(self, outcomes: Iterable[Outcome], test: str = "") -> None:
        """Take in outcomes of the test with this id."""
        fresh = list(outcomes)
        self.run.outcomes += fresh
        self._tests += [test] * len(fresh)
        if fresh:
            self._write(lambda: map(to_record, fresh))

    def absorb(self, judged: OfTest, test: str) -> None:
        """Take in what the test with this id judged."""
        self.processes.add(judged.process)
        merge_use(self.run.totals.use, judged.use)
        self.lose(judged.lost)
        self.add(judged.outcomes, test)

    def close(self, status: int = 0) -> None:
        """End the file with its totals: a record without them is one of a run that did not end.

        Args:
            status: that pytest has decided.
        """
        totals = self.run.totals
        totals.status, totals.processes = int(status), len(self.processes)
        if self.run.head.shards:  # with xdist the places are known when a worker has ended
            totals.places = tuple(self.places.get(test, totals.division.tests) for test in self._tests)
        totals.wall_seconds = time.perf_counter() - self._started
        self.end()

    def end(self) -> None:
        """End the file with the totals as they are."""
        self._write(lambda: [{"totals": plain(self.run.totals)}])

    def _write(self, records: Callable[[], Iterable[Mapping[str, Any]]], mode: str = "a") -> None:
        """Add lines to the file, unless it has lost some before: behind half a line nothing can be read."""
        path = self._path
        if path is not None and str(path) not in self.run.totals.lost:
            with self.writing(path), path.open(mode, encoding="utf-8") as file:
                file.writelines(map(record_line, records()))

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """A file of ``--gemm-output`` is written in the block; where that fails the run goes on, and ends red."""
        try:
            yield
        except OSError as error:
            self.lose({str(path): error.strerror or str(error)})

    def lose(self, lost: Mapping[str, str]) -> None:
        """Note why files are not complete, by their paths; "" for one that is."""
        for name, why in lost.items():
            if why:
                self.run.totals.lost.setdefault(name, why)
