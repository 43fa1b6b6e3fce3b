"""How pytest-xdist hands out GEMM tests: what shares an artifact or a reference stays on one worker."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gemm.config import OPTIONS
from pytest_gemm.selection import split_id

__all__ = ["allow_crashes", "scheduler", "scope"]


def scope(nodeid: str) -> str:
    """What a test shares its work with: its problem, at any M when one artifact serves them all.

    Backends are left out, so that they share operands and references.  A test that is not ours is alone.
    """
    found = split_id(nodeid)
    if found is None:
        return nodeid
    _, problem = found
    return (problem.with_m(0) if problem.has("dyn-m") else problem).line


def _asked_for(config: pytest.Config) -> bool:
    """Whether this is a run of GEMM tests: somebody else's run is scheduled as xdist does."""
    return any(config.getoption(option.ini) is not None for option in OPTIONS)


def allow_crashes(config: pytest.Config) -> None:
    """Let any number of workers be replaced, unless the user set a limit: a crash is a result here.

    xdist stops the run after four crashes a worker otherwise, and a backend that crashes in ten cases would keep
    the others from being judged.
    """
    if _asked_for(config) and getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(10**6)


def scheduler(config: pytest.Config, log: Any) -> object | None:
    """A scheduler for a run that asked for GEMM tests with plain ``-n``; ``None`` leaves xdist's own.

    Args:
        config: pytest's, of the controller.
        log: xdist's logger.
    """
    if not _asked_for(config) or config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GemmScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
        """xdist's scope scheduling with our scopes."""

        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Keep more than two tests with a worker: it runs one when it knows the next, or that there is none."""
            while not node.shutting_down and self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
                self._assign_work_unit(node)
            super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Give back a dead worker's tests, without the one that killed it: xdist would run it again and again."""
            for unit in self.assigned_work.get(node, {}).values():
                for nodeid, completed in unit.items():
                    if not completed:
                        unit[nodeid] = True
                        super().remove_node(node)
                        return str(nodeid)
            super().remove_node(node)
            return None

    return GemmScheduling(config, log)
