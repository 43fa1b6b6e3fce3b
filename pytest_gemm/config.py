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

from pytest_gemm import effect
from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.registry import Registry
from pytest_gemm.isolation.sanitizer import TOOLS
from pytest_gemm.ledger.entry import LedgerError
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa, processor
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.outcome import MODES
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.errors import ProblemError, did_you_mean
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.speed.data import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["OPTIONS", "SPEED", "GemmConfig", "add_options", "check_names", "check_sanitizer", "read", "shown"]

# Characters of a value that a message repeats.
_SHOWN = 200
# The most threads or processes that may be asked for; more is taken for a typing error.
_MANY = 1024
# Of a whole number; Python reads no more than a few thousand.
_DIGITS = 30
# Seconds: thirty years.  More is a number that clocks and locks do not take.
_LONGEST = 1e9


@dataclasses.dataclass(frozen=True)
class Option:
    """A command line option with its ini twin.

    Attributes:
        name: without dashes and prefix, ``backends`` for ``--gemm-backends``.
        default: what holds when neither is given, as text.
        metavar, help: for ``pytest --help``.
        choices: allowed values, when they are few.
        switch: ``--gemm-doctor`` alone means yes.
        adds_up: a list of which a user who gives the option twice means both.
    """

    name: str
    default: str
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    switch: bool = False
    adds_up: bool = False

    @property
    def flag(self) -> str:
        """The command line spelling."""
        return f"--gemm-{self.name}"

    @property
    def ini(self) -> str:
        """The ini spelling."""
        return f"gemm_{self.name.replace('-', '_')}"


_RUN = (
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
    Option(
        "problem",
        "",
        "LINE",
        "run just this problem (several: separate by commas), in every test that takes it",
        adds_up=True,
    ),
    Option("ops", "", "LIST", "only problems of these ops, comma separated", adds_up=True),
    Option(
        "fillings",
        "",
        "LIST",
        "only these fillings, comma separated; default: the level's most telling ones",
        adds_up=True,
    ),
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
        adds_up=True,
    ),
    Option(
        "isa",
        "",
        "LIST",
        f"instruction sets that cpp generates code for: native, {', '.join(ISAS)}, or all that this CPU executes; "
        "default: native, the CPU's own",
        adds_up=True,
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
)
# Those of timed tests.
SPEED = (
    Option(
        "shapes",
        "",
        "LIST",
        "sets of shapes and files of sets that the speed suite times; default: the level's",
        adds_up=True,
    ),
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
    Option(
        "undecided",
        "show",
        "fail|show",
        "a case that the measurement cannot decide fails the run, or is only shown",
        ("fail", "show"),
    ),
    Option(
        "undecided-share",
        "90",
        "PERCENT",
        "the run fails when more than this share of the cases that were compared stay undecided; 100: never",
    ),
    Option("baselines", "baselines", "DIR", "where baselines are kept, relative to the root of the tests"),
    Option(
        "record", "no", "yes|no", "write the baselines of this hardware instead of judging", ("yes", "no"), switch=True
    ),
    Option(
        "force", "no", "yes|no", "record from a changed tree or a disturbed machine too", ("yes", "no"), switch=True
    ),
    Option(
        "accept", "", "LIST", "cases that may be recorded although they got slower, names or patterns", adds_up=True
    ),
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
    Option("wait", "3600", "SECONDS", "how long to wait for another run that times on the same device, 0: no limit"),
    Option("samples", "", "DIR", "keep every reading: a file for each session"),
    Option("report", "", "FILE", "write the speed report as one HTML page"),
    Option("summary", "", "FILE", "append the speed report as Markdown, to a CI job's summary for instance"),
    Option("session", "", "DIR", "for the run itself: be one session, as the request in this folder says"),
)
OPTIONS = (*_RUN, *SPEED)


class Given(str):
    """The text of an option's value, which knows where it was given.

    Attributes:
        source: the option as it was spelled, ``--gemm-seed`` or ``gemm_seed (ini)``.
    """

    __slots__ = ("source",)
    source: str


def _wrong(flag: str, text: str, says: str) -> pytest.UsageError:
    """The error for a value; ``flag`` is for a text that does not know where it was given."""
    return pytest.UsageError(f"{getattr(text, 'source', flag)}={shown(text)}: {says}")


def shown(text: str) -> str:
    """A value for a message: what cannot be printed is escaped, and of a long one the middle is left out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 2]}...{line[-_SHOWN // 4 :]}"


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
        accept: patterns of cases that may be recorded slower; ``reason``: why.
        against: the other environment, "" for the stored baselines.
        wait: seconds to wait for another run that times on the same device; 0: no limit.
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
    needs_decision: bool = False
    undecided_share: float = 0.9
    baselines: Path = Path("baselines")
    record: bool = False
    force: bool = False
    prune: bool = False
    accept: tuple[str, ...] = ()
    reason: str = ""
    against: str = ""
    wait: float = 3600.0
    samples: Path | None = None
    report: Path | None = None
    summary: Path | None = None
    session: Path | None = None

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
        modes: some of ``backend.MODES``, in each of which a problem is judged; empty: its own.
        isas: some of ``machine.isa.ISAS`` and "", the CPU's own, for which cpp generates; empty: its own.
        lacking: those that ``all`` asked for and the CPU does not have.
        guard: ``none``, or ``pages`` around operands and results on the CPU.
        timeout, compile_timeout: limits in seconds of a kernel's run and of a compile; 0: none.
        jobs: compilers at work ahead of the tests.
        arch: architecture to compile CUDA kernels for, "" for the device's.
        compile_only: compile what the selected cases need and run nothing.
        doctor: say what can run here, and exit.
        fingerprint: say how each backend computes, and exit; ``fingerprints``: where to store it; ``None``: nowhere.
        options: every option's value as text, by its name, for backends that have options of their own.
        typed: names of the options that the command line gives another value than their default.
        read_by: names of the options that each backend reads itself; filled when the backends are configured.
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
    typed: frozenset[str] = frozenset()
    read_by: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    speed: SpeedConfig = dataclasses.field(default_factory=SpeedConfig)

    def asked_for(self, kind: str) -> bool:
        """Whether this is a run of its own kind: ``doctor``, ``fingerprint``, ``compile-only`` or ``fuzz``."""
        return self.options.get(kind, "") not in {"", "no"}

    @property
    def screen(self) -> bool:
        """Whether a screen takes the place of the tests."""
        return self.doctor or self.fingerprint

    def rerun_options(self, backend: str = "", *, timed: bool = True) -> tuple[str, ...]:
        """Options of a rerun: what this run was given and what another one would otherwise choose differently.

        Args:
            backend: the one that is run again, without the options that have no effect on it; "": any.
            timed: whether it is timed again, which needs the options of speed.
        """
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
        speed = {"comparator", "windows", "against" if self.speed.against else "baselines"} if timed else set()
        plain = [o for o in OPTIONS if o.name.startswith("cutlass-") or o.name in speed]
        given = {option.flag: self.options.get(option.name, option.default) for option in plain}
        options += [f"{o.flag}={given[o.flag]}" for o in plain if given[o.flag] != o.default]
        if backend:
            again = self.registry[backend]
            named = [(option, option.partition("=")[0].removeprefix("--gemm-")) for option in options]
            options = [option for option, name in named if effect.applies(name, self, again)]
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
    return _ledger(early(config, "known-failures"), default, None)


def check_sanitizer(config: pytest.Config) -> None:
    """Refuse what makes no sense below ``--gemm-sanitizer``.

    Raises:
        pytest.UsageError: naming the option to leave out.
    """
    names = {"sanitizer", "device", "record", "against"}
    given = {option.name: _value(config, option) for option in OPTIONS if option.name in names}
    if given["device"] == "cpu":
        raise _wrong("", given["sanitizer"], "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if given[name] not in {"", "no"}:
            raise _wrong("", given["sanitizer"], f"kernels below it are many times slower: leave out --gemm-{name}")


def check_names(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Answer an undeclared option that looks like one of these, before argparse does.

    Raises:
        pytest.UsageError: naming it and the option that was probably meant.
    """
    if not any(arg.startswith("--gemm") for arg in args):
        return
    for word in parser.parse_known_and_unknown_args(list(args))[1]:
        flag = word.partition("=")[0]
        if flag.startswith("--gemm"):
            hint = did_you_mean(flag, [option.flag for option in OPTIONS])
            raise pytest.UsageError(f"{shown(word)}: there is no option {shown(flag)}{hint}; pytest --help lists them")


def _check_ini_names(config: pytest.Config) -> None:
    """pytest itself only warns of an undeclared key."""
    unknown: Iterable[str] = getattr(config, "_get_unknown_ini_keys", set)()  # of pytest 8 and 9
    for key in sorted(unknown):
        if key.startswith(("gemm_", "gemm-")):
            hint = did_you_mean(key, [option.ini for option in OPTIONS])
            raise pytest.UsageError(f"{shown(key)} (ini): there is no such key{hint}; pytest --help lists them")


def _typed(config: pytest.Config, option: Option) -> list[str]:
    """The values that the command line gives an option, "" where the next word is one; not those of ``addopts``."""
    words = list(map(str, config.invocation_params.args))
    return [
        word.partition("=")[2] if word != option.flag else ("" if option.switch else after)
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == option.flag
    ]


def _value(config: pytest.Config, option: Option) -> Given:
    """What an option was given, checked as far as that goes without knowing what it means.

    An empty value in the ini file stands for the default, so that ``-o gemm_ops=`` undoes one.
    """
    typed = config.getoption(option.ini)
    raw = config.getini(option.ini) if typed is None else typed
    source = option.flag if typed is not None else f"{option.ini} (ini)"
    if not isinstance(raw, str):
        raise pytest.UsageError(f"{source}={shown(str(raw))}: give a text; a list is one with commas in it")
    # The lines of a value in an ini file are one.
    text = Given(raw.strip() if typed is not None else " ".join(raw.split("\n")).strip() or option.default)
    text.source = source
    if typed is not None and not text:
        default = f", which is {option.default} then" if option.default else ""
        raise pytest.UsageError(f"{source}= is empty: give {option.metavar}, or leave the option out{default}")
    if not text.isprintable():
        raise _wrong(source, text, "there is a character in it that cannot be printed")
    if option.switch and typed not in {None, "yes"} and option.flag in config.invocation_params.args:
        raise pytest.UsageError(
            f"{source} {shown(text)}: a value stands behind '=', {source}={option.metavar}; or put the option last"
        )
    if option.choices and text not in option.choices:
        hint = did_you_mean(text.lower(), option.choices)
        raise _wrong(source, text, f"not a value{hint}; choose one of {', '.join(option.choices)}")
    if option.adds_up and len(values := dict.fromkeys(_typed(config, option))) > 1:
        both = " and ".join(map(shown, values))
        raise pytest.UsageError(f"{source} is given twice, {both}: give it once, with commas between the values")
    return text


def _list(text: str, flag: str = "") -> tuple[str, ...]:
    """The parts of a list; () for an empty one.

    Raises:
        pytest.UsageError: for a part that is empty, as an unset variable of a shell makes it, or stands twice.
    """
    parts = tuple(part.strip() for part in text.split(",")) if text else ()
    for part in parts:
        if not part:
            raise _wrong(flag, text, "one of the values between the commas is empty")
        if parts.count(part) > 1:
            raise _wrong(flag, text, f"{shown(part)} is given twice")
    return parts


def _whole(flag: str, text: str, least: int, most: int = 10**18) -> int:
    if not re.fullmatch(r"[0-9]+", text) or (len(text) <= _DIGITS and int(text) < least):
        raise _wrong(flag, text, f"give a whole number, {least} or more")
    if len(text) > _DIGITS or int(text) > most:
        raise _wrong(flag, text, f"give {most} at most")
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
    _check_ini_names(config)
    values: dict[str, str] = {option.name: _value(config, option) for option in OPTIONS}
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
    backends, named = _backends(values["backends"], registry)
    if not named and _typed(config, next(option for option in OPTIONS if option.name == "missing")) == ["fail"]:
        raise pytest.UsageError(
            "--gemm-missing=fail: --gemm-backends=auto takes the backends that can run here and misses none; "
            "name the backends that have to run"
        )
    isas, lacking = _isas(values["isa"], isa.isas(processor.cpu().flags))
    problems, ops = _problems(values["problem"]), _ops(values["ops"])
    fillings = _fillings(values["fillings"], problems)
    if problems and ops and not any(problem.op.name in ops for problem in problems):
        raise _wrong("--gemm-ops", values["ops"], f"excludes all of --gemm-problem={shown(values['problem'])}")
    speed = _speed(values, config.rootpath, registry)
    _check_places(values)
    _writable_folder("--gemm-kernel-cache", values["kernel-cache"])  # the backend itself reads it
    return GemmConfig(
        registry=registry,
        backends=backends,
        named=named,
        missing=values["missing"],
        unjudged=values["unjudged"],
        level=values["level"],
        problems=problems,
        ops=ops,
        seed=_whole("--gemm-seed", values["seed"], 0),
        device=values["device"],
        threads=(_threads(values["threads"]) or (max(1, cores() // workers),))[0],
        thread_axis=axis if len(axis := _threads(values["threads"])) > 1 else (),
        ledger_given=values["known-failures"],
        ledger=_ledger(values["known-failures"], default_ledger, registry),
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
        fillings=fillings,
        fuzz=_fuzz(values, distributed=bool(getattr(config.option, "numprocesses", None)) or workers > 1),
        timeout=_seconds("--gemm-timeout", values["timeout"]),
        compile_timeout=_seconds("--gemm-compile-timeout", values["compile-timeout"]),
        jobs=_whole("--gemm-jobs", values["jobs"], 1, most_threads()) if values["jobs"] else cores(),
        arch=_arch(values["arch"]),
        compile_only=values["compile-only"] == "yes",
        doctor=values["doctor"] == "yes",
        fingerprint=values["fingerprint"] != "no",
        fingerprints=_writable_folder("--gemm-fingerprint", values["fingerprint"])
        if values["fingerprint"] not in {"no", "yes"}
        else None,
        options={name: str(value) for name, value in values.items()},
        typed=frozenset(option.name for option in OPTIONS if _is_typed(config, option, values[option.name])),
        speed=speed,
    )


def _is_typed(config: pytest.Config, option: Option, value: str) -> bool:
    """Whether the command line of a user changes an option; a worker or a session repeats what has been answered."""
    repeats = hasattr(config, "workerinput") or config.getoption("gemm_session")
    # Its default is a backend, which may be the only one that is timed.
    changes = value != option.default or option.name == "comparator"
    return not repeats and changes and bool(_typed(config, option))


def _check_places(values: Mapping[str, str]) -> None:
    """Refuse that one file is written for two options, or written over what another one reads."""
    places: dict[Path, str] = {}
    for name in ("known-failures", "run-record", "coverage", "report", "summary"):
        if values[name] and (name, values[name]) != ("known-failures", "none"):
            path = Path(values[name]).absolute()
            if path in places:
                raise _wrong(f"--gemm-{name}", values[name], f"--gemm-{places[path]} names this file too")
            places[path] = name


def _speed(values: Mapping[str, str], root: Path, registry: Registry) -> SpeedConfig:
    record, accept = values["record"] == "yes", _list(values["accept"], "--gemm-accept")
    if record and values["against"]:
        raise pytest.UsageError("--gemm-record writes baselines, and --gemm-against does without them: leave one out")
    if values["shapes"] and values["problem"]:
        raise pytest.UsageError("--gemm-problem takes the place of the shapes: leave out --gemm-shapes")
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
    if values["reason"] and not accept:
        raise _wrong("--gemm-reason", values["reason"], "it is the reason of cases: name them with --gemm-accept=LIST")
    comparator = values["comparator"]
    names = ("none", *registry.names())
    if comparator not in names:
        hint = did_you_mean(comparator, names)
        raise _wrong("--gemm-comparator", comparator, f"no such backend{hint}; known: {', '.join(names)}")
    session = Path(values["session"]).absolute() if values["session"] else None
    if session is not None and not (session / "request.json").is_file():
        raise _wrong("--gemm-session", values["session"], "there is no request.json; a run makes it for its sessions")
    return SpeedConfig(
        root=root,
        threads=(_threads(values["threads"]) or (cores(),))[0],
        shapes=_shapes(values["shapes"], root),
        comparator="" if comparator == "none" else str(comparator),
        sessions=_whole("--gemm-sessions", values["sessions"], 1, 10_000) if values["sessions"] else 0,
        windows=_whole("--gemm-windows", values["windows"], 3, 10_000),
        regret=_whole("--gemm-regret", values["regret"], 0, 10_000),
        gating=values["gate"] == "fail",
        needs_baseline=values["no-baseline"] == "fail",
        needs_decision=values["undecided"] == "fail",
        undecided_share=_share("--gemm-undecided-share", values["undecided-share"]),
        baselines=root / values["baselines"],
        record=record,
        force=values["force"] == "yes",
        prune=values["prune"] == "yes",
        accept=accept,
        reason=str(values["reason"]),
        against=str(values["against"]),
        wait=_seconds("--gemm-wait", values["wait"]),
        samples=_writable_folder("--gemm-samples", values["samples"]),
        report=_writable_file("--gemm-report", values["report"]),
        summary=_writable_file("--gemm-summary", values["summary"]),
        session=session,
    )


def _shapes(text: str, root: Path) -> tuple[str, ...]:
    """Names of sets and files; files are read now, so that a wrong one ends the run before it begins.

    A name may be that of a set in the file of a test's own marker, which is known when the test is collected.
    """
    names = _list(text, "--gemm-shapes")
    paths = [name for name in names if "." in name or (root / name).exists()]
    if paths:
        spec = find_spec("pytest_gemm.perf")
        assert spec is not None, "the speed suite is part of the package"
        assert spec.origin is not None
        try:
            shapes.select(Path(spec.origin).parent / "shapes.toml", paths, LEVELS[0], "cpu", root)
        except shapes.ShapeError as error:
            raise pytest.UsageError(f"--gemm-shapes: {error}") from None
    return names


def _share(flag: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or float(text) > 100:
        raise _wrong(flag, text, "give a percentage from 0 to 100")
    return float(text) / 100


def most_threads() -> int:
    """Threads or processes that may be asked for: more than any machine uses, fewer than it refuses to start."""
    return max(_MANY, 4 * cores())


def _threads(text: str) -> tuple[int, ...]:
    """Numbers of CPU threads, each once; () where none is given."""
    found = []
    for part in _list(text, "--gemm-threads"):
        if part != "all" and (not re.fullmatch(r"[0-9]+", part) or not part.strip("0")):
            raise _wrong(
                "--gemm-threads",
                text,
                f"{shown(part)!r} is no number of threads; give a whole number, 1 or more, or all, or "
                "several of them, 1,2,all for instance",
            )
        if part != "all" and (len(part) > _DIGITS or int(part) > most_threads()):
            raise _wrong("--gemm-threads", text, f"give {most_threads()} at most")
        found.append(cores() if part == "all" else int(part))
    return tuple(dict.fromkeys(found))


def _check_cutlass(values: Mapping[str, str]) -> None:
    """The backend itself reads these, see ``Configurable``."""
    try:
        re.compile(values["cutlass-allow"])
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong("--gemm-cutlass-allow", values["cutlass-allow"], f"not a regular expression: {error}") from None
    swizzles = _list(values["cutlass-swizzles"], "--gemm-cutlass-swizzles")
    if not swizzles or not set(swizzles) <= {"1", "2", "4", "8"}:
        raise _wrong("--gemm-cutlass-swizzles", values["cutlass-swizzles"], "name some of 1, 2, 4, 8")
    if not re.fullmatch(r"[0-9]{0,4}", values["cutlass-level"]):
        raise _wrong("--gemm-cutlass-level", values["cutlass-level"], "give up to four digits, 0000 say")


def _choices(text: str, level: str) -> str:
    if not text:
        return "" if level == "quick" else "all"
    words = ("one", "winner", "all")
    number = re.fullmatch(r"[0-9]{1,18}", text) and int(text) > 0
    looks_so = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) or text.isnumeric()
    if not number and (looks_so or (text not in words and (hint := did_you_mean(text.lower(), words)))):
        hint = "" if looks_so else hint
        says = f"give one, winner, all, a number from 1 on, or a candidate's name{hint}"
        raise _wrong("--gemm-choices", text, says)
    return str(text)


def _seconds(flag: str, text: str, least: float = 0.0) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not least <= float(text) <= _LONGEST:
        zero = "0 for no limit, " if least == 0.0 else ""
        raise _wrong(flag, text, f"give seconds, {zero}{_LONGEST:.0f} at most")
    return float(text)


def _arch(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]{1,2}[af]?", text):
        raise _wrong("--gemm-arch", text, "give it as nvcc does without sm_, 90a for instance")
    return str(text)


def _backends(text: str, registry: Registry) -> tuple[tuple[Backend, ...], bool]:
    names = _names("--gemm-backends", text, "backend", ("auto", *registry.names()))
    if names == ("auto",):
        return tuple(registry), False
    if "auto" in names:
        raise _wrong("--gemm-backends", text, "auto stands for all that can run here: give auto alone, or names")
    return tuple(registry[name] for name in names), True


def _problems(text: str) -> tuple[Problem, ...]:
    try:
        return tuple(dict.fromkeys(Problem.parse(line) for line in _list(text, "--gemm-problem")))
    except ProblemError as error:
        raise pytest.UsageError(f"{getattr(text, 'source', '--gemm-problem')}: {error}") from None


def _names(flag: str, text: str, what: str, known: Sequence[str]) -> tuple[str, ...]:
    """The parts of a list, each one of those known."""
    names = _list(text, flag)
    for name in names:
        if name not in known:
            hint = did_you_mean(name.lower(), known)
            raise _wrong(flag, text, f"unknown {what} {shown(name)!r}{hint}; known: {', '.join(known)}")
    return names


def _ops(text: str) -> tuple[str, ...]:
    return _names("--gemm-ops", text, "op", tuple(OPS))


def _fillings(text: str, problems: Sequence[Problem]) -> tuple[str, ...]:
    if not text:
        return ()
    from pytest_gemm.operands.distributions import FILLINGS, fillings_for  # imports torch

    names = _names("--gemm-fillings", text, "filling", tuple(FILLINGS))
    for problem in problems:
        if not (apply := fillings_for(problem)) or not set(names) & set(apply):
            says = f"does not apply to --gemm-problem={problem.line}; what applies: {', '.join(apply) or 'none'}"
            raise _wrong("--gemm-fillings", text, says)
    return names


def _fuzz(values: Mapping[str, str], *, distributed: bool) -> float:
    """The time to fuzz, after a look at what does not go with it."""
    text = values["fuzz"]
    if not text:
        return 0.0
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not 0.0 < float(text) <= _LONGEST:
        raise _wrong("--gemm-fuzz", text, "give the time in seconds, 60 for instance")
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
    return _names("--gemm-modes", text, "mode", MODES)


def _isas(text: str, here: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instruction sets to generate for, "" being the CPU's own, and those of ``all`` that it lacks.

    Args:
        text: the option's value.
        here: what the CPU executes.
    """
    names = _names("--gemm-isa", text, "level", ("native", *ISAS, "all"))
    for name in names:
        if name in ISAS and name not in here:
            can = ", ".join(("native", *here, "all"))
            raise _wrong("--gemm-isa", text, f"this CPU does not execute {name}; it can: {can}")
    wanted = [one for name in names for one in (here if name == "all" else ("" if name == "native" else name,))]
    lacking = tuple(name for name in ISAS if name not in here) if "all" in names else ()
    return tuple(dict.fromkeys(wanted)), lacking


def _ledger(text: str, default: Path, registry: Registry | None) -> Ledger:
    if text == "none":
        return Ledger()
    try:
        return Ledger.load(Path(text) if text else default, None if registry is None else registry.names())
    except LedgerError as error:
        raise pytest.UsageError(f"{getattr(text, 'source', '--gemm-known-failures')}: {error}") from None


def _coverage(text: str) -> Path | None:
    if text and Path(text).suffix not in {".md", ".json"}:
        raise _wrong("--gemm-coverage", text, "give a file that ends with .md, or with .json for the data")
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
        raise _wrong(flag, text, f"cannot be written ({error.strerror}); name a file in a folder of yours") from None
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
        raise _wrong(flag, text, f"cannot be written ({error.strerror}); name a folder of yours") from None
    return path
