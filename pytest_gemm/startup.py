"""What happens before a run of GEMM tests is configured: the fork, the compute-sanitizer, the backends."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from pytest_gemm import config as config_module
from pytest_gemm import options, supervisor, values, xdist
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
    given = config_module.settings_given(config)
    if config_module.setting(given, "run", "supervise", config_module.ENGINE["run"]) == "no":
        return None
    child = config.stash[CHILD] = supervisor.start(functools.partial(_explained_without, config))
    return child


def _explained_without(
    config: pytest.Config, outcomes: Sequence[Outcome], words: Words | None, run: Mapping[str, Any]
) -> list[Outcome]:
    """What the ledger says of outcomes, in a process that has read no configuration."""
    ledger = config_module.ledger(config)
    known = words.environment if words else None
    return state_module.explain_for_worker(outcomes, known, ledger, run.get("devices", {}), run.get("threads", 1))[0]


def begin(config: pytest.Config) -> int | None:
    """Run pytest again below a compute-sanitizer where ``--gemm-guard`` names a tool; let workers of xdist crash.

    Raises:
        pytest.UsageError: for an option that makes no sense below such a tool, naming it.
    """
    tool = values.value(config, "guard")
    if tool not in options.TOOLS:
        xdist.allow_crashes(config)
        return None
    if values.value(config, "device") == "cpu":
        raise values.wrong(tool, "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if values.value(config, name) not in {"", "no"}:
            raise values.wrong(tool, f"kernels below it are many times slower: leave out --gemm-{name}")
    given = config.invocation_params
    return sanitizer.run(tool, [str(one) for one in given.args], given.dir)


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


def is_narrowed(config: pytest.Config, settings: GemmConfig) -> bool:
    """Whether the user asked for less than whole suites."""
    selected = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect", "maxfail"))
    return bool(selected or settings.problems or settings.ops or any("::" in arg for arg in config.args))
