"""The options of pytest as one table: names, defaults and help.  Every pytest run imports this module; it is light.

How the values are read and checked stands in ``settings.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import pytest

# The tools of NVIDIA's compute-sanitizer.
TOOLS: Final = ("memcheck", "racecheck", "initcheck", "synccheck")
# What a run may be told not to fail for.
ALLOWABLE: Final = ("missing", "unjudged", "slower", "no-baseline")
# How a recording may be done.
RECORDING: Final = ("force", "prune")


class Option(NamedTuple):
    """A command line option with its ini key.

    Attributes:
        name: without dashes and prefix, ``backends`` for ``--gemm-backends``.
        default: what holds when neither is given, as text.
        metavar, help: for ``pytest --help``.
        choices: allowed values, when they are few.
        switch: ``--gemm-record`` alone means yes.
        repeat: what a second one on the command line means: the last one counts ("last"), it is an error because
            the option is a list ("error"), or it adds to the first ("append").
    """

    name: str
    default: str
    metavar: str
    help: str
    choices: tuple[str, ...] = ()
    switch: bool = False
    repeat: str = "last"

    @property
    def flag(self) -> str:
        """The command line spelling."""
        return f"--gemm-{self.name}"

    @property
    def ini(self) -> str:
        """The ini spelling."""
        return f"gemm_{self.name.replace('-', '_')}"


CASES: Final = (
    Option("backends", "auto", "LIST", "backends to run [auto: all that can run here]"),
    Option("level", "quick", "LEVEL", "quick, full or exhaustive [quick]", ("quick", "full", "exhaustive")),
    Option("problem", "", "LINES", "only these problems", repeat="error"),
    Option("ops", "", "LIST", "only problems of these ops", repeat="error"),
    Option("distributions", "", "LIST", "input distributions [chosen by the level]", repeat="error"),
    Option("candidates", "", "WHICH", "autotune candidates: one, winner, all, N or a pattern"),
    Option("modes", "", "LIST", "execution modes: eager, static, dynamic, aoti, ...", repeat="error"),
    Option("isa", "", "LIST", "CPU instruction sets to generate for [native]", repeat="error"),
    Option("device", "auto", "DEV", "cpu or cuda [auto: each backend's]", ("auto", "cpu", "cuda")),
    Option("threads", "", "LIST", "CPU threads, one or several numbers or all"),
    Option("seed", "0", "N", "seed of all random values [0]"),
    Option("fuzz", "", "SECONDS", "random problems for so long instead of the suite"),
)
CORRECTNESS: Final = (
    Option("reference", "auto", "KIND", "full, sampled or auto [auto]", ("full", "sampled", "auto")),
    Option("known-failures", "", "FILE", "ledger of known failures, or none [the shipped one]"),
    Option(
        "guard", "none", "KIND", f"pages, or a compute-sanitizer tool: {', '.join(TOOLS)}", ("none", "pages", *TOOLS)
    ),
    Option("timeout", "60", "RUN[,COMPILE]", "limits in seconds, 0: none [60,1800]"),
    Option("allow", "", "LIST", f"do not fail for: {', '.join(ALLOWABLE)}", repeat="error"),
    Option("output", "", "DIR", "folder for records, failures, samples and reports"),
    Option("compile-only", "no", "yes|no", "compile the CUDA kernels of the cases, run nothing", ("yes", "no"), True),
    Option("set", "", "NAME.KEY=VALUE", "a setting of a backend, of run or of speed", repeat="append"),
)
SPEED: Final = (
    Option("shapes", "", "LIST", "sets of shapes, or files of sets, to time", repeat="error"),
    Option("comparator", "aten", "NAME", "backend timed beside each subject, or none [aten]"),
    Option("sessions", "", "N", "timing processes [as many as the gate needs]"),
    Option("baselines", "baselines", "DIR", "folder of the stored baselines [baselines]"),
    Option("record", "no", "HOW", "store baselines: yes, force, prune or force,prune", (), True),
    Option("against", "", "ENV", "compare with another environment, not with baselines"),
    Option("undecided", "90", "PERCENT", "share of the cases that may stay undecided [90]"),
    Option("regret", "0", "N", "time N further candidates of each problem [0]"),
)

OPTIONS: Final = (*CASES, *CORRECTNESS, *SPEED)
BY_NAME: Final = {option.name: option for option in OPTIONS}
_GROUPS: Final = (
    ("gemm: which cases (every gemm option has an ini key, gemm_level = full)", CASES),
    ("gemm: correctness", CORRECTNESS),
    ("gemm: speed", SPEED),
)

# Options of earlier versions, and what to write instead.
RENAMED: Final = {
    "choices": "use --gemm-candidates",
    "missing": "use --gemm-allow=missing to let a named backend be missing",
    "unjudged": "use --gemm-allow=unjudged to let a backend judge no case",
    "gate": "use --gemm-allow=slower to let slower cases pass",
    "no-baseline": "use --gemm-allow=no-baseline to let cases without a baseline pass",
    "undecided-share": "use --gemm-undecided=PERCENT",
    "sanitizer": "use --gemm-guard=TOOL",
    "compile-timeout": "use --gemm-timeout=RUN,COMPILE",
    "run-record": "use --gemm-output=DIR (the record is DIR/run.jsonl)",
    "artifacts": "use --gemm-output=DIR (failures are in DIR/failures)",
    "defects": "use --gemm-output=DIR (the scripts are in DIR/known-failures)",
    "coverage": "use --gemm-output=DIR (the matrix is DIR/coverage.md)",
    "samples": "use --gemm-output=DIR (the samples are in DIR/samples)",
    "report": "use --gemm-output=DIR (the page is DIR/report.html)",
    "summary": "use --gemm-output=DIR (the summary is DIR/summary.md)",
    "force": "use --gemm-record=force",
    "prune": "use --gemm-record=prune",
    "accept": "record without it, then run: pytest-gemm baseline accept CASE --reason TEXT",
    "reason": "record without it, then run: pytest-gemm baseline accept CASE --reason TEXT",
    "triton-space": "use --gemm-set=triton.space=VALUE",
    "cutlass-allow": "use --gemm-set=cutlass.allow=REGEX",
    "cutlass-swizzles": "use --gemm-set=cutlass.swizzles=LIST",
    "cutlass-level": "use --gemm-set=cutlass.level=DIGITS",
    "kernel-cache": "use --gemm-set=cutlass.cache=DIR",
    "arch": "use --gemm-set=cutlass.arch=ARCH",
    "jobs": "use --gemm-set=cutlass.jobs=N",
    "windows": "use --gemm-set=speed.windows=N",
    "wait": "use --gemm-set=speed.wait=SECONDS",
    "supervise": "use --gemm-set=run.supervise=no",
    "doctor": "use the command: pytest-gemm doctor",
    "fingerprint": "use the command: pytest-gemm fingerprint",
}


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    for title, options in _GROUPS:
        group = parser.getgroup(title, title)
        for option in options:
            switch = {"nargs": "?", "const": "yes"} if option.switch else {}
            action = {"action": "append"} if option.repeat == "append" else {}
            group.addoption(
                option.flag, dest=option.ini, metavar=option.metavar, default=None, help=option.help, **switch, **action
            )


def add_ini_keys(parser: pytest.Parser) -> None:
    """Declare the ini keys; not where ``--help`` is shown, which would list every option twice."""
    for option in OPTIONS:
        if option.repeat == "append":
            parser.addini(option.ini, f"lines of {option.flag}", "linelist", [])
        else:
            parser.addini(option.ini, f"default of {option.flag}", default=option.default)


def renamed(word: str) -> str:
    """What to write instead of an option or ini key of an earlier version; "" for any other word."""
    name = word.partition("=")[0].removeprefix("--").replace("_", "-").removeprefix("gemm-")
    return RENAMED.get(name, "")


def is_any_given(config: pytest.Config) -> bool:
    """Whether the command line or the ini file gives one of these options."""
    return any(
        config.getoption(option.ini) is not None or (config.getini(option.ini) or "") != option.default
        for option in OPTIONS
    )


def default_candidates(level: str) -> str:
    """Which candidates are judged where the user names none: "" for each backend's own."""
    return "" if level == "quick" else "all"
