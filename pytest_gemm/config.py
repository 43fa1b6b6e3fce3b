"""pytest's configuration, read once into a frozen :class:`GemmConfig`; nothing below this room sees pytest's.

Every option has a twin in the ini file, ``--gemm-level`` is ``gemm_level``; the command line wins.
"""

from __future__ import annotations

import dataclasses
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gemm import machine
from pytest_gemm.backend import MODES, Backend, Registry, RegistryError
from pytest_gemm.cases import LEVELS
from pytest_gemm.ledger import Ledger, LedgerError
from pytest_gemm.machine import ISAS
from pytest_gemm.problem import OPS, Problem, ProblemError, did_you_mean
from pytest_gemm.sanitizer import TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["OPTIONS", "GemmConfig", "add_options", "read"]


@dataclasses.dataclass(frozen=True)
class Option:
    """A command line option with its ini twin.

    Attributes:
        name: without dashes and prefix, ``backends`` for ``--gemm-backends``.
        default: what holds when neither is given, as text.
        metavar, help: for ``pytest --help``.
        choices: allowed values, when they are few.
        switch: ``--gemm-doctor`` alone means yes.
    """

    name: str
    default: str
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    switch: bool = False

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
    Option(
        "choices",
        "",
        "one|winner|all|N|NAME",
        "which of a backend's autotune candidates are judged: one that follows from the problem's line, the one that "
        "autotuning picks, all, N spread over them, or those of a name (a shell pattern); default: each backend's "
        "own at quick, all from full on",
    ),
    Option(
        "triton-space",
        "default",
        "default|exhaustive",
        "which tiles, stages and warps are Triton candidates: a selection of Inductor's own, or all that it knows",
        ("default", "exhaustive"),
    ),
    Option("problem", "", "LINE", "run just this problem (several: separate by commas), in every test that takes it"),
    Option("ops", "", "LIST", "only problems of these ops, comma separated"),
    Option("fillings", "", "LIST", "only these fillings, comma separated; default: the level's most telling ones"),
    Option("seed", "0", "N", "seed of all values, and of what --gemm-fuzz draws"),
    Option(
        "fuzz",
        "",
        "SECONDS",
        "draw problems until this time is up, shared by the selected backends, instead of running the matrix; "
        "needs Hypothesis",
    ),
    Option(
        "modes",
        "",
        "LIST",
        f"how kernels are reached: {', '.join(MODES)}; default: each backend's own way",
    ),
    Option(
        "isa",
        "",
        "LIST",
        f"instruction sets that cpp generates code for: native, {', '.join(ISAS)}, or all that this CPU executes; "
        "default: native, the CPU's own",
    ),
    Option(
        "guard",
        "none",
        "none|pages",
        "pages: operands and results on the CPU end, then begin, at pages that nobody may touch; in another process",
        ("none", "pages"),
    ),
    Option(
        "sanitizer",
        "none",
        "TOOL",
        f"run below NVIDIA's compute-sanitizer: {', '.join(TOOLS)}",
        ("none", *TOOLS),
    ),
    Option("device", "auto", "DEV", "cpu or cuda; auto: where each backend belongs", ("auto", "cpu", "cuda")),
    Option(
        "threads",
        "",
        "N|LIST",
        "CPU threads of each test process, all: the cores; of several, 1,2,all say, each problem is judged with each; "
        "default: the cores divided by the xdist workers",
    ),
    Option("timeout", "60", "SECONDS", "time limit of one run of a kernel; with -n the worker is replaced, 0: none"),
    Option("compile-timeout", "1800", "SECONDS", "time limit of one compile, 0: none"),
    Option("jobs", "", "N", "compilers at work ahead of the tests; default: the cores"),
    Option("arch", "", "ARCH", "architecture to compile CUDA kernels for, 90a for instance; default: the device's"),
    Option("kernel-cache", "", "DIR", "where compiled CUDA kernels are kept, by content; can be copied to a machine"),
    Option("cutlass-allow", "", "REGEX", "which CUTLASS configurations are candidates; default: those that use TMA"),
    Option("cutlass-swizzles", "1", "LIST", "orders of the tiles that CUTLASS candidates come in: 1, 2, 4, 8"),
    Option("cutlass-level", "", "DIGITS", "instantiation level of CUTLASS's generator, 0000 to 9999"),
    Option(
        "compile-only",
        "no",
        "yes|no",
        "compile what the selected cases need into the kernel cache and run nothing; needs no GPU",
        ("yes", "no"),
        switch=True,
    ),
    Option(
        "supervise",
        "yes",
        "yes|no",
        "watch over the run from another process, so that a kernel that ends pytest leaves a report and a red run",
        ("yes", "no"),
    ),
    Option(
        "unjudged",
        "fail",
        "fail|allow",
        "a run in which a named backend judged no case fails, or may end well",
        ("fail", "allow"),
    ),
    Option(
        "doctor",
        "no",
        "yes|no",
        "say of every backend whether it can run here, what is missing, and try one product; then exit",
        ("yes", "no"),
        switch=True,
    ),
    Option(
        "fingerprint",
        "no",
        "FOLDER|yes|no",
        "ask every backend small products that tell its arithmetic, and hold that to what it declares; then exit.  "
        "With a folder the answers are stored there, by hardware",
        switch=True,
    ),
    Option(
        "reference",
        "auto",
        "full|sampled|auto",
        "what a result is held against: the whole reference, or that of some rows and columns beside checks of all "
        "elements; auto: the latter for large problems",
        ("full", "sampled", "auto"),
    ),
    Option("known-failures", "", "FILE|none", "the ledger of known failures; default: the one that is shipped"),
    Option("run-record", "", "FILE", "write every outcome as a JSON line"),
    Option(
        "coverage",
        "",
        "FILE",
        "write which micro-kernels of the C++ templates were judged with which tails; Markdown, or JSON by the suffix",
    ),
    Option("artifacts", "", "DIR", "keep for each failure a report, a script, an error map, code and tensors"),
    Option("defects", "", "DIR", "write a standalone script for each entry of the ledger that the run meets"),
    # -- speed ---------------------------------------------------------------------------------------
    Option("shapes", "", "LIST", "sets of shapes and files of sets that the speed suite times; default: the level's"),
    Option("comparator", "aten", "NAME", "backend that is timed beside each subject; none: raw times only"),
    Option("sessions", "", "N", "fresh processes that time every case; default: the gate's number, 12 to record"),
    Option("windows", "32", "N", "on a CPU: spans of a session in which each case is timed, 3 or more"),
    Option("regret", "0", "N", "also time N other candidates of each problem: how much does the pick lose?"),
    Option("gate", "fail", "fail|report", "a slower case fails the run, or is only shown", ("fail", "report")),
    Option(
        "no-baseline",
        "fail",
        "fail|show",
        "a case that has no baseline on this hardware fails the run, or is only shown",
        ("fail", "show"),
    ),
    Option("baselines", "baselines", "DIR", "where baselines are kept, relative to the root of the tests"),
    Option(
        "record", "no", "yes|no", "write the baselines of this hardware instead of judging", ("yes", "no"), switch=True
    ),
    Option(
        "force", "no", "yes|no", "record from a changed tree or a disturbed machine too", ("yes", "no"), switch=True
    ),
    Option("accept", "", "LIST", "cases that may be recorded although they got slower, names or patterns"),
    Option("reason", "", "TEXT", "why; kept in the baseline of an accepted case"),
    Option(
        "prune", "no", "yes|no", "with --gemm-record: drop baselines of cases that are gone", ("yes", "no"), switch=True
    ),
    Option(
        "against",
        "",
        "ENV",
        "judge against another environment in alternating processes, not against baselines: an interpreter, a virtual "
        "environment, a wheel, or a folder to import from first",
    ),
    Option("samples", "", "DIR", "keep every reading: a file for each session"),
    Option("report", "", "FILE", "write the speed report as one HTML page"),
    Option("summary", "", "FILE", "append the speed report as Markdown, to a CI job's summary for instance"),
    Option("session", "", "DIR", "for the run itself: be one session, as the request in this folder says"),
)


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
        baselines: folder of the baselines.
        record, force, prune: write baselines; also from a changed tree; and drop those of cases that are gone.
        accept: patterns of cases that may be recorded slower; ``reason``: why.
        against: the other environment, "" for the stored baselines.
        samples: where session files are kept; ``None``: nowhere.
        report, summary: files of the HTML page and of the Markdown.
        session: folder with the request of one session, which this process is to be; ``None``: it is none.
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
    baselines: Path = Path("baselines")
    record: bool = False
    force: bool = False
    prune: bool = False
    accept: tuple[str, ...] = ()
    reason: str = ""
    against: str = ""
    samples: Path | None = None
    report: Path | None = None
    summary: Path | None = None
    session: Path | None = None


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """What a run was asked for.

    Attributes:
        registry: every registered backend.
        backends: the selected ones, in the order given.
        named: whether the user named them (``auto`` otherwise).
        missing: ``fail`` or ``skip``, for a named backend that cannot run here.
        unjudged: ``fail`` or ``allow``, for a run in which a named backend judged no case.
        level: ``quick``, ``full`` or ``exhaustive``.
        problems: problems given by the user; empty: each test's own.
        ops: restrict to these op names; empty: all.
        fillings: restrict to these; empty: the level's.
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
        modes: some of :data:`pytest_gemm.backend.MODES`, in each of which a problem is judged; empty: its own.
        isas: some of :data:`pytest_gemm.machine.ISAS` and "", the CPU's own, for which cpp generates; empty: its own.
        lacking: those that ``all`` asked for and the CPU does not have.
        guard: ``none``, or ``pages`` around operands and results on the CPU.
        timeout, compile_timeout: limits in seconds of a kernel's run and of a compile; 0: none.
        jobs: compilers at work ahead of the tests.
        arch: architecture to compile CUDA kernels for, "" for the device's.
        compile_only: compile what the selected cases need and run nothing.
        doctor: say what can run here, and exit.
        fingerprint: say how each backend computes, and exit; ``fingerprints``: where to store it; ``None``: nowhere.
        options: every option's value as text, by its name, for backends that have options of their own.
        speed: what concerns timing and its gate.
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
    defects: Path | None = None
    coverage: Path | None = None
    modes: tuple[str, ...] = ()
    thread_axis: tuple[int, ...] = ()
    isas: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    guard: str = "none"
    choices: str = ""
    reference: str = "auto"
    fillings: tuple[str, ...] = ()
    fuzz: float = 0.0
    unjudged: str = "fail"
    timeout: float = 60.0
    compile_timeout: float = 1800.0
    jobs: int = 1
    arch: str = ""
    compile_only: bool = False
    doctor: bool = False
    fingerprint: bool = False
    fingerprints: Path | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    speed: SpeedConfig = dataclasses.field(default_factory=SpeedConfig)

    @property
    def screen(self) -> bool:
        """Whether a screen takes the place of the tests."""
        return self.doctor or self.fingerprint

    def rerun_options(self) -> tuple[str, ...]:
        """Options of a rerun: what this run was given and what another one would otherwise choose differently."""
        options = []
        if self.level != "quick":
            options.append(f"--gemm-level={self.level}")
        if self.threads != cores():
            options.append(f"--gemm-threads={self.threads}")
        if self.ledger_given:
            options.append(f"--gemm-known-failures={self.ledger_given}")
        if self.device != "auto":
            options.append(f"--gemm-device={self.device}")
        if self.choices != _choices("", self.level):
            options.append(f"--gemm-choices={self.choices}")
        if self.reference != "auto":
            options.append(f"--gemm-reference={self.reference}")
        if (space := self.options.get("triton-space", "default")) != "default":
            options.append(f"--gemm-triton-space={space}")
        plain = [
            o
            for o in OPTIONS
            if o.name.startswith("cutlass-") or o.name in {"comparator", "windows", "baselines", "against"}
        ]
        given = {option.flag: self.options.get(option.name, option.default) for option in plain}
        options += [f"{o.flag}={given[o.flag]}" for o in plain if given[o.flag] != o.default]
        return tuple(options)

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
        switch = {"nargs": "?", "const": "yes"} if option.switch else {}
        group.addoption(
            option.flag,
            dest=option.ini,
            metavar=option.metavar,
            default=None,
            help=f"{option.help} [{default}]",
            **switch,
        )
        parser.addini(option.ini, f"default of {option.flag}", default=option.default)


def early(config: pytest.Config, name: str) -> str:
    """The value of one option, asked before anything else is read.

    Raises:
        pytest.UsageError: for a value that there is not.
    """
    return _value(config, next(option for option in OPTIONS if option.name == name))


def ledger(config: pytest.Config, default: Path) -> Ledger:
    """The ledger of the run, asked before anything else is read.

    Args:
        config: pytest's.
        default: the one that is used when none is named.
    """
    return _ledger(early(config, "known-failures"), default)


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
    if values["doctor"] == "yes" and workers > 1:
        raise pytest.UsageError("--gemm-doctor asks one backend after the other: leave out -n")
    if values["fingerprint"] != "no":
        if workers > 1:
            raise pytest.UsageError("--gemm-fingerprint asks one backend after the other: leave out -n")
        if values["isa"]:
            raise pytest.UsageError("--gemm-fingerprint asks each backend as it is: leave out --gemm-isa")
        if values["doctor"] == "yes":
            raise pytest.UsageError("--gemm-fingerprint and --gemm-doctor are a screen each: ask for one of them")
    if values["compile-only"] == "yes":
        if workers > 1:
            raise pytest.UsageError("--gemm-compile-only takes all cores by itself: leave out -n, and see --gemm-jobs")
        if not values["arch"] and not has_cuda_device():
            raise pytest.UsageError(
                "--gemm-compile-only: there is no CUDA device here to compile for; say which one is meant, "
                "with --gemm-arch=90a for a Hopper for instance"
            )
    _check_cutlass(values)
    _writable_folder("--gemm-kernel-cache", values["kernel-cache"])  # the backend itself reads it
    backends, named = _backends(values["backends"], registry)
    isas, lacking = _isas(values["isa"], machine.isas(machine.cpu().flags))
    return GemmConfig(
        registry=registry,
        backends=backends,
        named=named,
        missing=values["missing"],
        unjudged=values["unjudged"],
        level=values["level"],
        problems=_problems(values["problem"]),
        ops=_ops(values["ops"]),
        seed=_whole("--gemm-seed", values["seed"], 0),
        device=values["device"],
        threads=(_threads(values["threads"]) or (max(1, cores() // workers),))[0],
        thread_axis=axis if len(axis := _threads(values["threads"])) > 1 else (),
        ledger_given=values["known-failures"],
        ledger=_ledger(values["known-failures"], default_ledger),
        run_record=_writable_file("--gemm-run-record", values["run-record"]),
        artifacts=_writable_folder("--gemm-artifacts", values["artifacts"]),
        defects=_writable_folder("--gemm-defects", values["defects"]),
        coverage=_coverage(values["coverage"]),
        modes=_modes(values["modes"]),
        isas=isas,
        lacking=lacking,
        guard=values["guard"],
        choices=_choices(values["choices"], values["level"]),
        reference=values["reference"],
        fillings=_fillings(values["fillings"]),
        fuzz=_fuzz(values, distributed=bool(getattr(config.option, "numprocesses", None)) or workers > 1),
        timeout=_seconds("--gemm-timeout", values["timeout"]),
        compile_timeout=_seconds("--gemm-compile-timeout", values["compile-timeout"]),
        jobs=_whole("--gemm-jobs", values["jobs"], 1) if values["jobs"] else cores(),
        arch=_arch(values["arch"]),
        compile_only=values["compile-only"] == "yes",
        doctor=values["doctor"] == "yes",
        fingerprint=values["fingerprint"] != "no",
        fingerprints=_writable_folder("--gemm-fingerprint", values["fingerprint"])
        if values["fingerprint"] not in {"no", "yes"}
        else None,
        options=values,
        speed=_speed(values, config.rootpath, registry),
    )


def _speed(values: Mapping[str, str], root: Path, registry: Registry) -> SpeedConfig:
    record, accept = values["record"] == "yes", _list(values["accept"])
    if record and values["against"]:
        raise pytest.UsageError("--gemm-record writes baselines, and --gemm-against does without them: leave one out")
    for flag, given in (
        ("accept", bool(accept)),
        ("prune", values["prune"] == "yes"),
        ("force", values["force"] == "yes"),
    ):
        if given and not record:
            raise pytest.UsageError(f"--gemm-{flag} says how to record: add --gemm-record")
    if values["against"] and values["sessions"] == "1":
        raise pytest.UsageError("--gemm-sessions=1: to tell two environments apart takes 2 sessions of each at least")
    if accept and not values["reason"]:
        raise pytest.UsageError("--gemm-accept needs a --gemm-reason=TEXT, which is kept in the baseline")
    comparator = values["comparator"]
    if comparator not in {"none", *registry.names()}:
        known = ", ".join(registry.names())
        raise pytest.UsageError(f"--gemm-comparator={comparator}: no such backend; known: none, {known}")
    session = Path(values["session"]).absolute() if values["session"] else None
    if session is not None and not (session / "request.json").is_file():
        raise pytest.UsageError(f"--gemm-session={session}: there is no request.json; a run makes it for its sessions")
    return SpeedConfig(
        root=root,
        threads=(_threads(values["threads"]) or (cores(),))[0],
        shapes=_list(values["shapes"]),
        comparator="" if comparator == "none" else comparator,
        sessions=_whole("--gemm-sessions", values["sessions"], 1) if values["sessions"] else 0,
        windows=_whole("--gemm-windows", values["windows"], 3),
        regret=_whole("--gemm-regret", values["regret"], 0),
        gating=values["gate"] == "fail",
        needs_baseline=values["no-baseline"] == "fail",
        baselines=root / values["baselines"],
        record=record,
        force=values["force"] == "yes",
        prune=values["prune"] == "yes",
        accept=accept,
        reason=values["reason"],
        against=values["against"],
        samples=_writable_folder("--gemm-samples", values["samples"]),
        report=_writable_file("--gemm-report", values["report"]),
        summary=_writable_file("--gemm-summary", values["summary"]),
        session=session,
    )


def _threads(text: str) -> tuple[int, ...]:
    """Numbers of CPU threads, each once; () where none is given."""
    found = []
    for part in _list(text):
        if part != "all" and (not re.fullmatch(r"\d+", part) or int(part) < 1):
            raise pytest.UsageError(
                f"--gemm-threads={text}: {part!r} is no number of threads; give a whole number, 1 or more, or all, or "
                "several of them, 1,2,all for instance"
            )
        found.append(cores() if part == "all" else int(part))
    return tuple(dict.fromkeys(found))


def _check_cutlass(values: Mapping[str, str]) -> None:
    """The backend itself reads these, see ``Configurable``."""
    try:
        re.compile(values["cutlass-allow"])
    except re.error as error:
        raise pytest.UsageError(
            f"--gemm-cutlass-allow={values['cutlass-allow']}: not a regular expression: {error}"
        ) from None
    swizzles = _list(values["cutlass-swizzles"])
    if not swizzles or not set(swizzles) <= {"1", "2", "4", "8"}:
        raise pytest.UsageError(f"--gemm-cutlass-swizzles={values['cutlass-swizzles']}: name some of 1, 2, 4, 8")
    if not re.fullmatch(r"\d{0,4}", values["cutlass-level"]):
        raise pytest.UsageError(f"--gemm-cutlass-level={values['cutlass-level']}: give up to four digits, 0000 say")


def _choices(text: str, level: str) -> str:
    if not text:
        return "" if level == "quick" else "all"
    if text.isdigit() and int(text) == 0:
        raise pytest.UsageError("--gemm-choices=0: give one, winner, all, a number from 1 on, or a candidate's name")
    return text


def _seconds(flag: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise pytest.UsageError(f"{flag}={text}: give seconds, 0 for no limit")
    return float(text)


def _arch(text: str) -> str:
    if text and not re.fullmatch(r"\d{2,3}[af]?", text):
        raise pytest.UsageError(f"--gemm-arch={text}: give it as nvcc does without sm_, 90a for instance")
    return text


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


def _fillings(text: str) -> tuple[str, ...]:
    names = _list(text)
    if names:
        from pytest_gemm.fillings import FILLINGS  # imports torch

        for name in names:
            if name not in FILLINGS:
                hint = did_you_mean(name, FILLINGS)
                raise pytest.UsageError(
                    f"--gemm-fillings={text}: unknown filling {name!r}{hint}; known: {', '.join(FILLINGS)}"
                )
    return names


def _fuzz(values: Mapping[str, str], *, distributed: bool) -> float:
    """The time to fuzz, after a look at what does not go with it."""
    text = values["fuzz"]
    if not text:
        return 0.0
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0.0:
        raise pytest.UsageError(f"--gemm-fuzz={text}: give the time in seconds, 60 for instance")
    if find_spec("hypothesis") is None:
        raise pytest.UsageError("--gemm-fuzz needs Hypothesis, which is not installed: pip install hypothesis")
    if distributed:
        raise pytest.UsageError("--gemm-fuzz draws one problem after the other: leave out -n")
    for name, instead in (
        ("problem", "--gemm-ops narrows down what is drawn"),
        ("fillings", "it draws fillings, too"),
        ("compile-only", "what it compiles follows from what it finds"),
        ("isa", "it draws for the CPU's own instruction set"),
    ):
        if values[name] not in {"", "no"}:
            raise pytest.UsageError(f"--gemm-fuzz draws its own problems: leave out --gemm-{name}; {instead}")
    return float(text)


def _modes(text: str) -> tuple[str, ...]:
    names = _list(text)
    for name in names:
        if name not in MODES:
            hint = did_you_mean(name, MODES)
            raise pytest.UsageError(f"--gemm-modes={text}: unknown mode {name!r}{hint}; known: {', '.join(MODES)}")
    return names


def _isas(text: str, here: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instruction sets to generate for, "" being the CPU's own, and those of ``all`` that it lacks.

    Args:
        text: the option's value.
        here: what the CPU executes.
    """
    names = _list(text)
    known = ("native", *ISAS, "all")
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise pytest.UsageError(f"--gemm-isa={text}: unknown level {name!r}{hint}; known: {', '.join(known)}")
        if name in ISAS and name not in here:
            raise pytest.UsageError(
                f"--gemm-isa={text}: this CPU does not execute {name}; it can: {', '.join(('native', *here, 'all'))}"
            )
    wanted = [one for name in names for one in (here if name == "all" else ("" if name == "native" else name,))]
    lacking = tuple(name for name in ISAS if name not in here) if "all" in names else ()
    return tuple(dict.fromkeys(wanted)), lacking


def _ledger(text: str, default: Path) -> Ledger:
    if text == "none":
        return Ledger()
    try:
        return Ledger.load(Path(text) if text else default)
    except LedgerError as error:
        raise pytest.UsageError(f"--gemm-known-failures: {error}") from None


def _coverage(text: str) -> Path | None:
    if text and Path(text).suffix not in {".md", ".json"}:
        raise pytest.UsageError(f"--gemm-coverage={text}: give a file that ends with .md, or with .json for the data")
    return _writable_file("--gemm-coverage", text)


def _writable_file(flag: str, text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise pytest.UsageError(
            f"{flag}={text}: cannot be written ({error.strerror}); name a file in a folder of yours"
        ) from None
    return path


def _writable_folder(flag: str, text: str) -> Path | None:
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
            f"{flag}={text}: cannot be written ({error.strerror}); name a folder of yours"
        ) from None
    return path
