"""Workers of pytest-xdist on other machines, ``--tx ssh=...``: what they are, and how their files come back.

The controller asks each machine what it is before it starts the first worker there.  A worker writes the files of
``--gemm-output`` into a folder of its own and sends them with the report of the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pytest

from pytest_gemm import records, selection, xdist
from pytest_gemm.config import CONFIG, has_cuda_device
from pytest_gemm.failures import scripts
from pytest_gemm.outcome import Reason
from pytest_gemm.run.record import Provenance
from pytest_gemm.run.state import RunState
from pytest_gemm.values import cores

# A larger file of a failure stays behind: it would be in the memory of both processes.
_MOST_BYTES: Final = 256 << 20
# What the interpreter of the other machine runs; apart from the worker, which is to import the plugin itself.
_ASK: Final = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "pytest_gemm.remote"], capture_output=True, text=True)
channel.send((done.returncode, done.stdout, done.stderr))
"""
_PIN: Final = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = "


@dataclasses.dataclass(frozen=True)
class Machine:
    """Another machine, as the interpreter there describes it.

    Attributes:
        host: its name.
        cores: that a process there may use.
        gpus: how CUDA's environment names them.
        run: versions and hardware.
    """

    host: str
    cores: int
    gpus: tuple[str, ...]
    run: Provenance

    @classmethod
    def this(cls) -> Machine:
        """The machine of this process."""
        run = Provenance.of((), gpus=has_cuda_device())
        return cls(socket.gethostname(), cores(), tuple(xdist.gpus(os.environ)), run)


def register(config: pytest.Config, state: RunState) -> None:
    """Add the hooks where tests may run on other machines."""
    if hasattr(config, "workerinput"):
        if config.workerinput.get("gemm_machine"):
            config.pluginmanager.register(_Sender(config), "gemm-remote")
    elif str(config.getoption("dist", "no")) != "no":
        config.pluginmanager.register(_Machines(config, state), "gemm-remote")


def machine(node: Any) -> str:
    """Name of the machine of a worker, "" for this one.

    Args:
        node: xdist's controller of the worker.
    """
    return str(getattr(node, "gemm_machine", ""))


# -- the worker ------------------------------------------------------------------------------------------------------


class _Sender:
    """The hooks of a worker whose disk the controller does not see."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._here: Path | None = config.stash[CONFIG].output

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """A timed test needs the processes that time, which the controller has.

        Raises:
            pytest.UsageError: where one was collected.
        """
        if any(map(selection.timed, session.items)):
            text = "--tx: another machine times nothing; run timed tests on each machine by itself"
            self._config.workeroutput["gemm_error"] = text  # type: ignore[attr-defined]  # xdist's
            raise pytest.UsageError(text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the files that the test has written, and forget them."""
        made: Any = yield  # pytest keeps and ships extra attributes
        if self._here is not None:
            if lost := getattr(made, "gemm", {}).get("lost"):
                there = self._config.workerinput["gemm_output"]  # type: ignore[attr-defined]  # xdist's
                made.gemm["lost"] = {name.replace(str(self._here), there): why for name, why in lost.items()}
            if files := dict(map(self._content, filter(Path.is_file, self._here.rglob("*")))):
                made.gemm_files = files
                for path in self._here.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return made  # type: ignore[no-any-return]  # a report

    def _content(self, path: Path) -> tuple[str, bytes | None]:
        """Name and content of a file; ``None`` of one that is too large."""
        assert self._here is not None
        content = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else None
        return path.relative_to(self._here).as_posix(), content

    def pytest_sessionfinish(self) -> None:
        """Say which backends cannot run here."""
        missing = records.plain(selection.missing(self._config.stash[CONFIG]))
        self._config.workeroutput["gemm_missing"] = missing  # type: ignore[attr-defined]  # xdist's

    def pytest_unconfigure(self) -> None:
        """Nothing of the run stays on the worker's disk."""
        if self._here is not None:
            shutil.rmtree(self._here, ignore_errors=True)


# -- the controller --------------------------------------------------------------------------------------------------


class _Machines:
    """The hooks of the process that hands out the tests.

    Args:
        config: pytest's.
        state: of the run.
    """

    def __init__(self, config: pytest.Config, state: RunState) -> None:
        self._config, self._state, self._settings = config, state, config.stash[CONFIG]
        self._known: dict[tuple[object, ...], Machine] = {}
        self._machines: dict[str, Machine] = {}
        self._workers: dict[str, list[str]] = {}
        self._count: Counter[tuple[object, ...]] = Counter()
        self._own, self._judging = Provenance(), list[Provenance]()
        self._is_alone = False

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self) -> Generator[None]:
        """Start the workers; a machine that does not answer ends the run."""
        import execnet

        try:
            yield
        except (execnet.HostNotFound, OSError) as error:
            text = f"--tx: a machine cannot be reached, or has no such Python ({error}); ssh says above why"
            raise pytest.UsageError(text) from None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Run the tests; where a worker died and its machine does not answer any more, the run ends."""
        import execnet

        try:
            return (yield)
        except execnet.HostNotFound as error:
            said = f"{error} is gone, and with it what its workers had not judged; run again without it"
            raise pytest.exit.Exception(said, returncode=int(pytest.ExitCode.TESTS_FAILED)) from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Count the workers of each machine, which share its cores."""
        self._own = self._state.run
        self._count.update(map(_place, specs))
        self._is_alone = not any(spec.popen for spec in specs)
        self._judging = [] if self._is_alone else [self._own]
        if self._is_alone:
            self._state.missing = {}  # what is missing here is not missing there

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of another machine where it is, and how many there are.

        Raises:
            pytest.UsageError: where that machine cannot run the tests, or would judge something else.
        """
        spec = node.gateway.spec
        node.workerinput["gemm_workers"] = count = self._count[_place(spec)]
        if spec.popen:
            return
        machine = self._known.get(key := (*_place(spec), spec.python, spec.chdir))
        if machine is None:
            machine = self._known[key] = self._ask(node)
        node.gemm_machine = node.workerinput["gemm_machine"] = machine.host
        node.workerinput["gemm_output"] = str(self._settings.output or "")
        self._workers.setdefault(machine.host, []).append(node.gateway.id)
        if len(machine.gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in spec.env:
            # In the specification too: a worker that replaces this one is made by it.
            gpu = machine.gpus[(len(self._workers[machine.host]) - 1) % len(machine.gpus)]
            spec.env["CUDA_VISIBLE_DEVICES"] = gpu
            node.gateway.remote_exec(f"{_PIN}{gpu!r}").waitclose()
        if machine.host not in self._machines:
            self._machines[machine.host] = machine
            self._note(machine, max(1, machine.cores // count))

    def _ask(self, node: Any) -> Machine:
        """What a machine is, by the interpreter that its workers have."""
        spec = node.gateway.spec
        status, said, error = node.gateway.remote_exec(_ASK).receive()
        where = f"--tx {spec._spec.removeprefix('execmodel=main_thread_only//')}"
        if status:
            last = error.strip().rpartition("\n")[2]
            raise pytest.UsageError(
                f"{where}: its Python cannot import pytest-gemm ({last}); install the packages of this environment "
                "there, and name that interpreter with //python=PATH"
            )
        machine = records.typed(json.loads(said), Machine)
        ours, theirs = self._own.versions, machine.run.versions
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                raise pytest.UsageError(
                    f"{where}: {name} is {theirs[name]} there, and {ours[name]} here; "
                    "all machines of a run need the same versions"
                )
        name = str(spec.ssh or spec.vagrant_ssh or machine.host).split()[-1]  # as the user calls it
        return dataclasses.replace(machine, host=name)

    def _note(self, machine: Machine, threads: int) -> None:
        """Name the machine in the head of the record."""
        settings = self._settings
        threads = settings.threads if settings.options["threads"] else threads
        self._judging.append(dataclasses.replace(machine.run, threads=threads))
        run = Provenance.joined(self._judging)
        self._state.open_record(
            self._state.record, dataclasses.replace(run, date=self._own.date, command=self._own.command)
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """A wrong option that only the other machine finds ends the run; each of its workers would find it.

        Raises:
            pytest.UsageError: with the message of the worker.
        """
        host, output = machine(node), getattr(node, "workeroutput", {})
        found = re.search(r"^pytest\.UsageError: (.*)", str(error), re.MULTILINE | re.DOTALL)
        text = found[1].strip() if found else output.get("gemm_error")
        if host and text:
            raise pytest.UsageError(f"worker {node.gateway.id} on {host}: {text}")
        if self._is_alone and (missing := output.get("gemm_missing")):
            self._state.missing |= records.typed(missing, dict[str, Reason])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the files that a worker has sent."""
        sent: dict[str, bytes | None] = report.__dict__.pop("gemm_files", {})
        output = self._settings.output
        if not sent or output is None:
            return
        for name in [name for name in sent if name.startswith("known-failures/") and name.endswith(".py")]:
            beside = str(PurePosixPath(name).with_suffix(".pt"))
            if not scripts.is_smaller((sent[name] or b"").decode(), output / name):
                del sent[name]
                sent.pop(beside, None)
            elif beside not in sent:
                (output / beside).unlink(missing_ok=True)
        for name, content in sent.items():
            path = output / name
            if content is None:
                self._state.lose({str(path): f"its {_MOST_BYTES >> 20} MiB or more are not sent by another machine"})
                continue
            with self._state.writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def pytest_sessionfinish(self) -> None:
        """Say which worker was where."""
        for host, names in self._workers.items():
            cpu = self._machines[host].run.cpu
            self._state.notes.append(f"on {host} ({cpu}): {' '.join(names)}")


def _place(spec: Any) -> tuple[object, ...]:
    """What tells one machine from another."""
    return tuple(getattr(spec, name) for name in ("popen", "ssh", "vagrant_ssh", "socket", "via"))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = json.dumps(records.plain(Machine.this()))
    sys.stdout.write(found)
