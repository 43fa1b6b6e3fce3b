"""The options of a run, as one frozen value."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.registry import Registry
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.outcome import Verdict
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class SpeedConfig:
    """What a run was asked for about speed.

    Attributes:
        root: of the tests; relative paths of shapes begin here.
        threads: CPU threads of what is timed: as given, or all cores, however many workers share the tests.
        shapes: sets and files to time; empty: the level's.
        comparator: backend that is timed beside each subject, "" for none.
        sessions: processes that time every case; 0: as many as the gate or a recording needs.
        windows: spans of a session in which each case is timed, on a CPU.
        regret: other candidates of each problem to time.
        gating: whether a slower case fails the run.
        needs_baseline: whether a case without a baseline does.
        needs_decision: whether an undecided case does.
        undecided_share: of the compared cases, beyond which the run fails for what stays undecided.
        baselines: folder of the baselines.
        record, force, prune: write baselines; also from a changed tree; and drop those of cases that are gone.
        against: the other environment, "" for the stored baselines.
        wait: seconds to wait for another run that times on the same device; 0: no limit.
        samples: where session files are kept; ``None``: nowhere.  A recording run always keeps them.
        report, summary: files of the HTML page and of the Markdown.
    """

    root: Path = Path()
    threads: int = 1
    shapes: tuple[str, ...] = ()
    comparator: str = "aten"
    sessions: int = 0
    windows: int = 32
    regret: int = 0
    gating: bool = True
    needs_baseline: bool = True
    needs_decision: bool = False
    undecided_share: float = 0.9
    baselines: Path = Path("baselines")
    record: bool = False
    force: bool = False
    prune: bool = False
    against: str = ""
    wait: float = 3600.0
    samples: Path | None = None
    report: Path | None = None
    summary: Path | None = None

    @property
    def fatal(self) -> frozenset[Verdict]:
        """The verdicts that fail a test."""
        if not self.gating:
            return frozenset()
        asked = {Verdict.NO_BASELINE: self.needs_baseline, Verdict.UNDECIDED: self.needs_decision}
        return frozenset({Verdict.SLOWER, *(verdict for verdict, fails in asked.items() if fails)})


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """What a run was asked for.

    Attributes:
        registry: every registered backend.
        backends: the selected ones, in the order given.
        named: whether the user named them (``auto`` otherwise).
        allow: what does not fail the run, some of ``options.ALLOWABLE``.
        level: ``quick``, ``full`` or ``exhaustive``.
        problems: problems given by the user; empty: each test's own.
        ops: restrict to these op names; empty: all.
        distributions: restrict to these; empty: the level's.
        seed: of all values.
        fuzz: how long to draw problems, in seconds; 0: not at all.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: CPU threads of this process.
        thread_axis: the numbers of threads with each of which a problem on the CPU is judged; empty: ``threads``.
        ledger: the known failures.
        ledger_given: what the user named it, "" for the one that is shipped; a rerun line repeats it.
        run_record, artifacts, defects, coverage: where to write; ``None``: nowhere.
        choices: ``one``, ``winner``, ``all``, a number, or a pattern of candidates' names; "": each backend's own.
        reference: ``full``, ``sampled`` or ``auto``.
        modes: some of ``case_id.MODES``, in each of which a problem is judged; empty: its own.
        isas: some of ``machine.isa.ISAS`` and "", the CPU's own, for which cpp generates; empty: its own.
        lacking: those that ``all`` asked for and the CPU does not have.
        guard: ``none``, or ``pages`` around operands and results on the CPU.
        timeout, compile_timeout: limits in seconds of a kernel's run and of a compile; 0: none.
        compile_only: compile what the selected cases need and run nothing.
        options: every option's value as text, by its name.
        settings: what ``--gemm-set`` gives, as text, by ``NAME.KEY``.
        typed: names of the options, and of the settings, that the command line changes.
        speed: what concerns timing and its gate.
    """

    registry: Registry
    backends: tuple[Backend, ...]
    named: bool
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
    defects: Path | None = None
    coverage: Path | None = None
    modes: tuple[str, ...] = ()
    thread_axis: tuple[int, ...] = ()
    isas: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    guard: str = "none"
    choices: str = ""
    reference: str = "auto"
    distributions: tuple[str, ...] = ()
    fuzz: float = 0.0
    allow: frozenset[str] = frozenset()
    timeout: float = 60.0
    compile_timeout: float = 1800.0
    compile_only: bool = False
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    speed: SpeedConfig = dataclasses.field(default_factory=SpeedConfig)

    @property
    def jobs(self) -> int:
        """Compilers at a time ahead of the tests: as a selected backend is set, or one for each core."""
        return max((getattr(backend, "compilers", 0) for backend in self.backends), default=0) or cores()

    @property
    def arch(self) -> str:
        """Architecture to compile ahead for, as a selected backend is set; "" for the device's."""
        return next(filter(None, (str(getattr(backend, "architecture", "")) for backend in self.backends)), "")

    @property
    def devices(self) -> dict[str, str]:
        """Where each selected backend computes, by its name."""
        return {backend.name: self.device_of(backend) for backend in self.backends}

    def device_of(self, backend: Backend) -> str:
        """Where this backend computes: the device asked for, or the first of its own that is here."""
        if self.device != "auto":
            return self.device
        devices: Sequence[str] = getattr(backend, "devices", ("cpu", "cuda"))
        if "cuda" in devices and ("cpu" not in devices or has_cuda_device()):
            return "cuda"
        return "cpu"


SPEED_WORKER = "gemm-speed-worker"
"""Name of pytest's plugin in a process that times; a conftest may look for it."""

CONFIG = pytest.StashKey[GemmConfig]()
"""Where a run keeps what it was asked for."""


def has_cuda_device() -> bool:
    """Whether the machine has an NVIDIA device node; asked without importing torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
