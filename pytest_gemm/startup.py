"""What happens before a run of GEMM tests is configured: the fork, the compute-sanitizer, the backends."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm import options, supervisor, values, xdist
from pytest_gemm import settings as settings_module
from pytest_gemm.api.registry import Registry, RegistryError
from pytest_gemm.config import SPEED_WORKER, GemmConfig
from pytest_gemm.isolation import sanitizer
from pytest_gemm.isolation.journal import Words
from pytest_gemm.outcome import Outcome
from pytest_gemm.run import state as state_module
from pytest_gemm.text import described

CHILD = pytest.StashKey[supervisor.Child]()
"""Where a process that is watched by another one keeps what it tells that one."""


def supervised(config: pytest.Config) -> supervisor.Child | None:
    """Fork where another process is to watch this run; ``None`` where this one goes on unwatched.

    A run reports itself how one of its sessions died.
    """
    if config.pluginmanager.has_plugin(SPEED_WORKER) or not supervisor.wanted(config):
        return None
    given = settings_module.settings_given(config)
    if not settings_module.engine_setting(given, "run", "supervise"):
        return None
    child = config.stash[CHILD] = supervisor.start(functools.partial(_explained_without, config))
    return child


def _explained_without(
    config: pytest.Config, outcomes: Sequence[Outcome], words: Words | None, run: Mapping[str, Any]
) -> list[Outcome]:
    """What the ledger says of outcomes, in a process that has read no configuration."""
    ledger = settings_module.ledger(config, default_ledger())
    known = words.environment if words else None
    return state_module.explain_for_worker(outcomes, known, ledger, run.get("devices", {}), run.get("threads", 1))[0]


def begin(config: pytest.Config) -> int | None:
    """Run pytest again below a compute-sanitizer where ``--gemm-guard`` names a tool; let workers of xdist crash."""
    if (tool := values.value(config, "guard")) in options.TOOLS:
        settings_module.check_sanitizer(config)
        given = config.invocation_params
        return sanitizer.run(tool, [str(one) for one in given.args], given.dir)
    xdist.allow_crashes(config)
    return None


def default_ledger() -> Path:
    """The ledger that is shipped with the conformance suite."""
    spec = find_spec("pytest_gemm.conformance")
    assert spec is not None, "the conformance suite is part of the package"
    assert spec.origin is not None
    return Path(spec.origin).parent / "known_failures.toml"


def register_builtin(registry: Registry) -> None:
    """The backends that come with the package; their modules import no torch."""
    from pytest_gemm.backends.builtin import BUILTIN

    for backend in BUILTIN:
        registry.add(backend())


@contextlib.contextmanager
def usage(what: str) -> Iterator[None]:
    """The block calls a user's code at start-up: whatever it raises is a usage error with its place."""
    try:
        yield
    except (KeyboardInterrupt, pytest.UsageError):
        raise
    except RegistryError as error:
        raise pytest.UsageError(f"{what}: {error}") from None
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise pytest.UsageError(
            f"{what} raised {described(error)}\n  {last.filename}:{last.lineno}, in {last.name}"
        ) from None


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of xdist."""
    return hasattr(config, "workerinput")


def workers(config: pytest.Config) -> int:
    """xdist's workers, which share the cores; 1 without xdist.  The controller knows them by its option."""
    if is_worker(config):
        return int(config.workerinput["workercount"])  # type: ignore[attr-defined]  # xdist's
    return int(getattr(config.option, "numprocesses", None) or 1)


def is_narrowed(config: pytest.Config, settings: GemmConfig) -> bool:
    """Whether the user asked for less than whole suites."""
    selected = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect", "maxfail"))
    return bool(selected or settings.problems or settings.ops or any("::" in arg for arg in config.args))
