"""Which cases have their kernels compiled together: their tests follow each other, on one worker of pytest-xdist."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gemm.api.protocols import Together, unsupported
from pytest_gemm.api.request import DEFAULT
from pytest_gemm.config.config import GemmConfig, workers
from pytest_gemm.core.case_id import CandidateSelection, CaseId
from pytest_gemm.plugin import selection, xdist
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import known
from pytest_gemm.storage import files

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case

# Problems of a batch at most: with more of them little is gained, and their results come late.
_MOST: Final = 32
# Elements of A, B and result of a problem beyond which it is alone: those of a batch are in memory together.
_LARGE: Final = 1 << 24


def batches(cases: Iterable[CaseId], settings: GemmConfig, count: int) -> dict[str, str]:
    """The batch of each problem that is compiled with others, by lines; a batch has the name of its first one.

    Micro-kernels are of types, so problems of the same types come together.  Backends are asked what they support, for
    which some import torch; where one has no answer, the problem's own test shows it.

    Args:
        cases: of the run.
        settings: of the run.
        count: of the workers, which share the batches out.
    """
    wanted = settings.settings.get("run.together", "no" if settings.level == "smoke" else "yes") == "yes"
    if not (wanted and CandidateSelection(settings.wanted_candidates).by_backend) or settings.compile_only:
        return {}
    found: set[tuple[str, str]] = set()
    for case in cases:
        if isinstance(backend := settings.registry[case.backend], Together):
            problem = Problem.parse(case.problem)
            with contextlib.suppress(Exception):
                if _fits(problem) and unsupported(backend, problem, DEFAULT) is None:
                    found.add((str(problem.dtypes), problem.at_hints.line))
    lines = [line for _, line in sorted(found)]
    parts = count * max(2, -(-len(lines) // (count * _MOST)))  # as many for each worker
    ends = [len(lines) * part // parts for part in range(parts + 1)]
    return {line: lines[begin] for begin, end in itertools.pairwise(ends) for line in lines[begin:end]}


def _fits(problem: Problem) -> bool:
    """Whether it is small, and has no size 0: what a compiler refuses costs its batch another compile."""
    shape = problem.shape
    batch, m, n, k = shape.batch or 1, shape.m, shape.n, shape.k
    return m * n * k > 0 and batch * (m * k + k * n + m * n) <= _LARGE


class Batches:
    """The hooks of a process that runs tests, and what they share.

    Args:
        settings: of the run.
        folder: where a worker of pytest-xdist tells the controller; ``None`` without.
    """

    def __init__(self, settings: GemmConfig, folder: Path | None) -> None:
        self._settings, self._folder = settings, folder
        self._batches: dict[str, str] = {}
        self._alike: dict[str, list[pytest.Function]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Bring the tests of a batch to where the first of them is."""
        cases = (one.case for one in map(selection.parameter_of, items) if one is not None)
        if config.option.collectonly or (self._folder is None and workers(config) > 1):
            return
        self._batches = batches(cases, self._settings, workers(config))
        if self._folder is not None:
            files.leave(self._folder, "batches", self._batches)
        places: dict[str, int] = {}
        for place, item in enumerate(items):
            places.setdefault(self._unit(item), place)
        items.sort(key=lambda item: places[self._unit(item)])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which tests are left."""
        groups: defaultdict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
        kept = {*self._batches.values()}
        for item in session.items:
            parameter, unit = selection.parameter_of(item), self._unit(item)
            if parameter is None or unit not in kept or selection.timed(item):
                continue
            backend = self._settings.registry[parameter.case.backend]
            if isinstance(item, pytest.Function) and isinstance(backend, Together):
                alike = groups[unit, parameter.case.who]
                alike.append(item)
                self._alike[item.nodeid] = alike

    def _unit(self, item: pytest.Item) -> str:
        scope = xdist.scope(item.nodeid)
        return self._batches.get(scope, scope)

    def announced(self, item: pytest.Function) -> list[Case]:
        """The cases that are compiled with that of a test, where it is the first of them; otherwise none."""
        found, alike = [], self._alike.get(item.nodeid, [])
        for one in alike if len(alike) > 1 else ():
            parameter = selection.parameter_of(one)
            assert parameter is not None
            case = selection.case_of(parameter, self._settings)
            if known.withheld(self._settings.ledger, case, one.originalname) is None:
                found.append(case)
        alike.clear()
        return found
