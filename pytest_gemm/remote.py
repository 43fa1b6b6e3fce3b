"""Workers of pytest-xdist on other machines, ``--tx ssh=...``: the versions that they need, and who judged where."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from pytest_gemm import records, selection
from pytest_gemm.config import CONFIG, has_cuda_device
from pytest_gemm.outcome import Reason
from pytest_gemm.run.record import Provenance
from pytest_gemm.run.state import RunState


def register(config: pytest.Config, state: RunState) -> None:
    """Add the hooks where tests may run on other machines.

    Raises:
        pytest.UsageError: in a worker whose machine has other versions.
    """
    if (versions := getattr(config, "workerinput", {}).get("gemm_versions")) is not None:
        config.pluginmanager.register(_Worker(config, versions), "gemm-remote")
    elif not hasattr(config, "workerinput") and str(config.getoption("dist", "no")) != "no":
        config.pluginmanager.register(_Controller(state), "gemm-remote")


def machine(node: Any) -> str:
    """Name of the machine of a worker as the user calls it, "" for this one.

    Args:
        node: xdist's controller of the worker.
    """
    spec = node.gateway.spec
    return "" if spec.popen else str(spec.ssh or spec.vagrant_ssh or spec.socket or spec.via).split()[-1]


class _Worker:
    """The hooks of a worker on another machine."""

    def __init__(self, config: pytest.Config, versions: Mapping[str, str]) -> None:
        self._config = config
        self._output: dict[str, Any] = config.workeroutput  # type: ignore[attr-defined]  # xdist's
        run = Provenance.of((), gpus=has_cuda_device())
        for name in sorted(versions.keys() & run.versions.keys()):
            if versions[name] != run.versions[name]:
                raise pytest.UsageError(
                    f"--tx: {name} is {run.versions[name]} there, and {versions[name]} here; "
                    "all machines of a run need the same versions"
                )
        self._output["gemm_cpu"] = run.cpu

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A timed test needs the processes that time, which the controller has.

        Raises:
            pytest.UsageError: where one was collected.
        """
        if any(map(selection.timed, session.items)):
            text = "--tx: another machine times nothing; run timed tests on each machine by itself"
            self._output["gemm_error"] = text
            raise pytest.UsageError(text)

    def pytest_sessionfinish(self) -> None:
        """Say which backends cannot run here."""
        self._output["gemm_missing"] = records.plain(selection.missing(self._config.stash[CONFIG]))


class _Controller:
    """The hooks of the process that hands out the tests."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._count: Counter[tuple[object, ...]] = Counter()
        self._workers: defaultdict[str, list[str]] = defaultdict(list)
        self._is_alone = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Count the workers of each machine, which share its cores."""
        self._count.update(map(_place, specs))
        self._is_alone = not any(spec.popen for spec in specs)
        if self._is_alone:
            self._state.missing = {}  # what is missing here is not missing there

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker how many there are on its machine, and on another one which versions it needs."""
        node.workerinput["gemm_workers"] = self._count[_place(node.gateway.spec)]
        if machine(node):
            node.workerinput["gemm_versions"] = dict(self._state.run.versions)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """A wrong option that only the other machine finds ends the run; each of its workers would find it.

        Raises:
            pytest.UsageError: with the message of the worker.
        """
        if not (host := machine(node)):
            return
        output = getattr(node, "workeroutput", {})
        found = re.search(r"^pytest\.UsageError: (.*)", str(error), re.MULTILINE | re.DOTALL)
        if text := found[1].strip() if found else output.get("gemm_error"):
            raise pytest.UsageError(f"worker {node.gateway.id} on {host}: {text}")
        self._workers[f"{host} ({output.get('gemm_cpu', 'died')})"].append(node.gateway.id)
        if self._is_alone and (missing := output.get("gemm_missing")):
            self._state.missing |= records.typed(missing, dict[str, Reason])

    def pytest_sessionfinish(self) -> None:
        """Say which worker was where."""
        self._state.notes += [f"on {host}: {' '.join(sorted(names))}" for host, names in self._workers.items()]


def _place(spec: Any) -> tuple[object, ...]:
    """What tells one machine from another."""
    return tuple(getattr(spec, name) for name in ("popen", "ssh", "vagrant_ssh", "socket", "via"))
