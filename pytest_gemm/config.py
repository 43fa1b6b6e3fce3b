"""pytest's configuration, read once into a frozen :class:`GemmConfig`; nothing below this room sees pytest's.

Every option has a twin in the ini file, ``--gemm-level`` is ``gemm_level``; the command line wins.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.backend import Backend, Registry, RegistryError
from pytest_gemm.cases import LEVELS
from pytest_gemm.ledger import Ledger, LedgerError
from pytest_gemm.problem import OPS, Problem, ProblemError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OPTIONS", "GemmConfig", "add_options", "read"]


@dataclasses.dataclass(frozen=True)
class Option:
    """A command line option with its ini twin.

    Attributes:
        name: without dashes and prefix, ``backends`` for ``--gemm-backends``.
        default: what holds when neither is given, as text.
        metavar, help: for ``pytest --help``.
        choices: allowed values, when they are few.
    """

    name: str
    default: str
    metavar: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The command line spelling."""
        return f"--gemm-{self.name}"

    @property
    def ini(self) -> str:
        """The ini spelling."""
        return f"gemm_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("backends", "auto", "LIST", "backends to run, comma separated; auto: every one that can run here"),
    Option(
        "missing",
        "fail",
        "fail|skip",
        "a named backend that cannot run here fails the run, or is only shown",
        ("fail", "skip"),
    ),
    Option("level", "quick", "quick|full|exhaustive", "how much of the matrix", LEVELS),
    Option("problem", "", "LINE", "run just this problem (several: separate by commas), in every test that takes it"),
    Option("ops", "", "LIST", "only problems of these ops, comma separated"),
    Option("seed", "0", "N", "seed of all values"),
    Option("device", "auto", "DEV", "cpu or cuda; auto: where each backend belongs", ("auto", "cpu", "cuda")),
    Option("threads", "", "N", "CPU threads of each test process; default: the cores divided by the xdist workers"),
    Option("known-failures", "", "FILE|none", "the ledger of known failures; default: the one that is shipped"),
    Option("run-record", "", "FILE", "write every outcome as a JSON line"),
    Option("artifacts", "", "DIR", "keep for each failure its report, generated code and tensors"),
)


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """What a run was asked for.

    Attributes:
        registry: every registered backend.
        backends: the selected ones, in the order given.
        named: whether the user named them (``auto`` otherwise).
        missing: ``fail`` or ``skip``, for a named backend that cannot run here.
        level: ``quick``, ``full`` or ``exhaustive``.
        problems: problems given by the user; empty: each test's own.
        ops: restrict to these op names; empty: all.
        seed: of all values.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: CPU threads of this process.
        ledger: the known failures.
        ledger_given: what the user named it, "" for the one that is shipped; a rerun line repeats it.
        run_record, artifacts: where to write; ``None``: nowhere.
    """

    registry: Registry
    backends: tuple[Backend, ...]
    named: bool
    missing: str
    level: str
    problems: tuple[Problem, ...]
    ops: tuple[str, ...]
    seed: int
    device: str
    threads: int
    ledger: Ledger
    ledger_given: str
    run_record: Path | None
    artifacts: Path | None

    def device_of(self, backend: Backend) -> str:
        """Where this backend computes: the device asked for, or the first of its own that is here."""
        if self.device != "auto":
            return self.device
        devices: Sequence[str] = getattr(backend, "devices", ("cpu", "cuda"))
        if "cuda" in devices and ("cpu" not in devices or has_cuda_device()):
            return "cuda"
        return "cpu"


def has_cuda_device() -> bool:
    """Whether the machine has an NVIDIA device node; asked without importing torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_options(parser: pytest.Parser) -> None:
    """Declare the options and their ini twins."""
    group = parser.getgroup("gemm", "GEMM backends")
    for option in OPTIONS:
        default = option.default or "none"
        group.addoption(
            option.flag, dest=option.ini, metavar=option.metavar, default=None, help=f"{option.help} [{default}]"
        )
        parser.addini(option.ini, f"default of {option.flag}", default=option.default)


def _value(config: pytest.Config, option: Option) -> str:
    given = config.getoption(option.ini)
    value = str(config.getini(option.ini) if given is None else given).strip()
    if option.choices and value not in option.choices:
        source = option.flag if given is not None else f"{option.ini} (ini)"
        raise pytest.UsageError(f"{source}={value}: not a value; choose one of {', '.join(option.choices)}")
    return value


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _whole(flag: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise pytest.UsageError(f"{flag}={text}: give a whole number, {least} or more")
    return int(text)


def read(config: pytest.Config, registry: Registry, workers: int, default_ledger: Path) -> GemmConfig:
    """Read and check everything.

    Args:
        config: pytest's.
        registry: with all backends registered.
        workers: number of xdist workers that share this machine's cores, 1 without xdist.
        default_ledger: the ledger that is used when none is named.

    Raises:
        pytest.UsageError: one paragraph that names the option, the value and what would be right.
    """
    values = {option.name: _value(config, option) for option in OPTIONS}
    backends, named = _backends(values["backends"], registry)
    return GemmConfig(
        registry=registry,
        backends=backends,
        named=named,
        missing=values["missing"],
        level=values["level"],
        problems=_problems(values["problem"]),
        ops=_ops(values["ops"]),
        seed=_whole("--gemm-seed", values["seed"], 0),
        device=values["device"],
        threads=_whole("--gemm-threads", values["threads"], 1) if values["threads"] else max(1, cores() // workers),
        ledger_given=values["known-failures"],
        ledger=_ledger(values["known-failures"], default_ledger),
        run_record=_writable_file(values["run-record"]),
        artifacts=_writable_folder(values["artifacts"]),
    )


def _backends(text: str, registry: Registry) -> tuple[tuple[Backend, ...], bool]:
    names = _list(text)
    if not names:
        raise pytest.UsageError(f"--gemm-backends is empty; name some of: auto, {', '.join(registry.names())}")
    if names == ("auto",):
        return tuple(registry), False
    try:
        return tuple(registry[name] for name in names), True
    except RegistryError as error:
        raise pytest.UsageError(f"--gemm-backends={text}: {error}") from None


def _problems(text: str) -> tuple[Problem, ...]:
    try:
        return tuple(Problem.parse(line) for line in _list(text))
    except ProblemError as error:
        raise pytest.UsageError(f"--gemm-problem: {error}") from None


def _ops(text: str) -> tuple[str, ...]:
    names = _list(text)
    for name in names:
        if name not in OPS:
            raise pytest.UsageError(f"--gemm-ops={text}: unknown op {name!r}; known: {', '.join(OPS)}")
    return names


def _ledger(text: str, default: Path) -> Ledger:
    if text == "none":
        return Ledger()
    try:
        return Ledger.load(Path(text) if text else default)
    except LedgerError as error:
        raise pytest.UsageError(f"--gemm-known-failures: {error}") from None


def _writable_file(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise pytest.UsageError(
            f"--gemm-run-record={text}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
    return path


def _writable_folder(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).absolute()
    probe = path / ".pytest-gemm-probe"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise pytest.UsageError(
            f"--gemm-artifacts={text}: cannot be written ({error.strerror}); name a folder of yours"
        ) from None
    return path
