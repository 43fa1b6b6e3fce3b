"""How pytest-xdist hands out GEMM tests: what shares an artifact or a reference stays on one worker."""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

from pytest_gemm.config.options import is_any_given
from pytest_gemm.plugin.selection import case_id
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import timeline


@functools.lru_cache(maxsize=1 << 16)  # of the tests of a run, each of which is asked about several times
def scope(nodeid: str) -> str:
    """What a test shares its work with: its problem, at any size when one artifact serves them all.

    Backends are left out, so that they share operands and references.  A test that is not ours is alone.
    """
    case = case_id(nodeid)
    if case is None:
        return nodeid
    problem = Problem.parse(case.problem)
    return problem.at_hints.line


# Rounding error of an empty backlog, in seconds.
_NOTHING: Final = 1e-6
# Seconds of a worker's backlog below which it gets a third test: it asks for the next one before this is there.
_BRIEF: Final = 1.0


def divided(
    ids: Sequence[str], seconds: Mapping[str, float], workers: int, batches: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The unit of work of each test; the tests of a unit run on one worker.

    It is the test's scope, with those that are compiled together.  A unit that alone would take longer than a worker's
    share of the run, and so decide when it ends, is divided by backends: each makes its operands and the reference
    itself.

    Args:
        ids: the tests.
        seconds: that each is expected to take.
        workers: among which they are shared out.
        batches: of scopes that are compiled together.
    """
    units = {nodeid: batches.get(one := scope(nodeid), one) for nodeid in ids}
    whole: defaultdict[str, float] = defaultdict(float)
    for nodeid, unit in units.items():
        whole[unit] += seconds[nodeid]
    share = sum(whole.values()) / workers
    for nodeid, unit in units.items():
        if whole[unit] > share and (case := case_id(nodeid)) is not None:
            units[nodeid] = f"{unit} on {case.backend}"
    return units


def chosen(units: Iterable[tuple[str, float]], backlog: float, share: float) -> str:
    """Which unit of work a worker gets: the longest, or one that it can end within its share of what is left.

    A worker has to know its next test before it begins one.  Behind a long unit it gets a short one: no other worker
    can take that over.

    Args:
        units: with their seconds, the longest first; at least one.
        backlog: seconds of what the worker has not ended.
        share: of a worker of all that is left.
    """
    last = ""
    for unit, seconds in units:
        if backlog < _NOTHING or backlog + seconds <= share:
            return unit
        last = unit
    return last


# -- GPUs ------------------------------------------------------------------------------------------

_DRIVER = Path("/proc/driver/nvidia/gpus")


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev"), driver: Path = _DRIVER) -> list[str]:
    """How CUDA's environment names the GPUs that this process may use; empty where there is none.

    Args:
        environment: ``CUDA_VISIBLE_DEVICES`` of it restricts them, to indices or to names (``GPU-...``, ``MIG-...``).
        devices: folder of the device files; a container has those of its own GPUs only.
        driver: where the driver tells of its GPUs, where there are no device files.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA takes no notice of what comes after the first name that is none.
        first_wrong = next((i for i, name in enumerate(names) if name in {"", "-1"}), len(names))
        return names[:first_wrong]
    count = sum(1 for node in devices.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", node.name))
    count = count or sum(1 for _ in driver.glob("*"))
    return [str(i) for i in range(count)]


def pin(config: pytest.Config, specs: Iterable[Any]) -> str:
    """Give each worker one GPU, in turn, before it is started; one that is replaced hands its GPU on.

    Args:
        config: pytest's, of the controller.
        specs: execnet's, one a worker.

    Returns:
        which worker has which, for the summary; "" where there is one GPU or none to choose from.
    """
    found = gpus(os.environ)
    here = [spec for spec in specs if spec.popen]
    if len(found) < 2 or not is_any_given(config):
        return ""
    for i, spec in enumerate(here):
        spec.env["CUDA_VISIBLE_DEVICES"] = found[i % len(found)]
    workers = {gpu: [spec.id for spec in here[i :: len(found)]] for i, gpu in enumerate(found)}
    return "GPUs: " + "; ".join(f"{gpu} for {' '.join(ids)}" for gpu, ids in workers.items() if ids)


# -- tests -----------------------------------------------------------------------------------------


def scheduler(
    config: pytest.Config,
    log: Any,
    known: Mapping[str, float],
    batches: Callable[[], Mapping[str, str]] = dict,
    *,
    every: bool = False,
) -> object | None:
    """A scheduler for a run that asked for GEMM tests; ``None`` leaves xdist's own.

    It is for plain ``-n``; another ``--dist`` has xdist's own.

    Args:
        config: pytest's, of the controller.
        log: xdist's logger.
        known: what tests took in earlier runs; the longest are begun first.
        batches: says which scopes are compiled together, see :mod:`batches`, when the tests are collected.
        every: every candidate is judged.
    """
    if not is_any_given(config) or str(config.getoption("dist", "no")) != "load":
        return None
    import xdist.scheduler

    base: Any = xdist.scheduler.LoadScopeScheduling

    class GemmScheduling(base):  # type: ignore[misc]  # xdist ships no types
        """xdist's scope scheduling, the longest first; in the order of the level where a failure ends the run."""

        _is_sorted = False

        def schedule(self) -> None:
            """Say what belongs together when all workers have collected."""
            if self.collection is None:
                ids = next(iter(self.registered_collections.values()))
                # A single worker keeps the order of the files.
                several = len(self.nodes) > 1
                alike = dict.fromkeys(ids, timeline.USUAL)
                self._seconds = timeline.expected(known, ids, every=every) if several else alike
                self._units = divided(ids, self._seconds, len(self.nodes), batches())
                self._left, self._is_sorted = sum(self._seconds.values()), False
                self._backlogs: defaultdict[Any, float] = defaultdict(float)
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self._units[nodeid]

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """Subtract the test's expected seconds."""
            seconds = self._seconds[self.registered_collections[node][item_index]]
            self._left -= seconds
            self._backlogs[node] -= seconds
            super().mark_test_complete(node, item_index, duration)

        def _assign_work_unit(self, node: Any) -> None:
            """Give a worker the unit that is its turn: xdist takes the first of the queue."""
            if not (self._is_sorted or self.config.getoption("maxfail")):
                for unit in sorted(self.workqueue, key=self._expected, reverse=True):
                    self.workqueue.move_to_end(unit)
                self._is_sorted = True
            units = ((unit, self._expected(unit)) for unit in self.workqueue)
            turn = chosen(units, self._backlogs[node], self._left / len(self.nodes))
            self._backlogs[node] += self._expected(turn)
            self.workqueue.move_to_end(turn, last=False)
            super()._assign_work_unit(node)

        def _expected(self, unit: str) -> float:
            return sum(self._seconds[nodeid] for nodeid, done in self.workqueue[unit].items() if not done)

        def add_node_collection(self, node: Any, collection: Any) -> None:
            """Ignore workers shut down while collecting, which xdist takes for its own."""
            if node in self.assigned_work:
                super().add_node_collection(node, collection)

        def _reschedule(self, node: Any) -> None:
            """Keep a second test with a worker: it runs one when it knows the next, or that there is none.

            And a third behind short ones.  A replacement that is still collecting gets nothing yet: xdist would lose
            what it assigns to it.
            """
            if node not in self.registered_collections:
                return
            while not node.shutting_down and self.workqueue:
                pending = self._pending_of(self.assigned_work[node])
                if pending > 2 or (pending == 2 and self._backlogs[node] > _BRIEF):
                    return
                self._assign_work_unit(node)
            super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Give a dead worker's tests to others, and say which test it took with it.

            The test is over: xdist would run it again and again.
            """
            self._is_sorted = False  # its units come back
            units = self.assigned_work.get(node, {}).values()
            running = [(unit, nodeid) for unit in units for nodeid, completed in unit.items() if not completed][:1]
            if not running:
                super().remove_node(node)
                return None
            ((unit, nodeid),) = running
            unit[nodeid] = True
            super().remove_node(node)
            return str(nodeid)

    return GemmScheduling(config, log)
