"""The options of pytest: names, help and types."""

from __future__ import annotations

import dataclasses
import re
from typing import Final

import pytest

from pytest_gemm.case_id import MODES
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.text import did_you_mean

# Characters of a value that a message repeats.
_SHOWN = 200
# The most threads or processes that may be asked for; more is taken for a typing error.
MANY = 1024
# Of a whole number; Python reads no more than a few thousand.
DIGITS = 30
# Seconds: thirty years.  More is a number that clocks and locks do not take.
LONGEST = 1e9


# The tools of NVIDIA's compute-sanitizer.
TOOLS: Final = ("memcheck", "racecheck", "initcheck", "synccheck")


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
        "distributions",
        "",
        "LIST",
        "only these distributions, comma separated; default: the level's most telling ones",
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
)
OPTIONS = (*_RUN, *SPEED)


def wrong(flag: str, text: str, says: str) -> pytest.UsageError:
    """The error for a value; ``flag`` is for a text that does not know where it was given."""
    return pytest.UsageError(f"{getattr(text, 'source', flag)}={shown(text)}: {says}")


def shown(text: str) -> str:
    """A value for a message: what cannot be printed is escaped, and of a long one the middle is left out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN // 2]}...{line[-_SHOWN // 4 :]}"


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


def named_choices(text: str, level: str) -> str:
    """Which candidates of a backend are judged: one, winner or all."""
    if not text:
        return "" if level == "quick" else "all"
    words = ("one", "winner", "all")
    number = re.fullmatch(r"[0-9]{1,18}", text) and int(text) > 0
    looks_so = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) or text.isnumeric()
    if not number and (looks_so or (text not in words and (hint := did_you_mean(text.lower(), words)))):
        hint = "" if looks_so else hint
        says = f"give one, winner, all, a number from 1 on, or a candidate's name{hint}"
        raise wrong("--gemm-choices", text, says)
    return str(text)
