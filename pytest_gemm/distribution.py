"""How pytest-xdist hands out GEMM tests: what shares an artifact or a reference stays on one worker."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gemm.config import OPTIONS
from pytest_gemm.selection import split_id

__all__ = ["scheduler", "scope"]


def scope(nodeid: str) -> str:
    """What a test shares its work with: its problem, at any M when one artifact serves them all.

    Backends are left out, so that they share operands and references.  A test that is not ours is alone.
    """
    found = split_id(nodeid)
    if found is None:
        return nodeid
    _, problem = found
    return (problem.with_m(0) if problem.has("dyn-m") else problem).line


def scheduler(config: pytest.Config, log: Any) -> object | None:
    """A scheduler for a run that asked for GEMM tests with plain ``-n``; ``None`` leaves xdist's own.

    Args:
        config: pytest's, of the controller.
        log: xdist's logger.
    """
    asked = any(config.getoption(option.ini) is not None for option in OPTIONS)
    if not asked or config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class GemmScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
        """xdist's scope scheduling with our scopes."""

        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    return GemmScheduling(config, log)
