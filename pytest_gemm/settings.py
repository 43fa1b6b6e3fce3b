"""pytest's configuration, read once into a frozen :class:`GemmConfig`; nothing below this room sees pytest's.

Every option has a variant in the ini file, ``--gemm-level`` is ``gemm_level``; the command line wins.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.registry import Registry
from pytest_gemm.case_id import MODES
from pytest_gemm.config import GemmConfig, SpeedConfig, cores, has_cuda_device
from pytest_gemm.ledger.entry import LedgerError
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa, processor
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.options import DIGITS, LONGEST, MANY, OPTIONS, Option, named_choices, shown, wrong
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Given(str):
    """The text of an option's value, which knows where it was given.

    Attributes:
        source: the option as it was spelled, ``--gemm-seed`` or ``gemm_seed (ini)``.
    """

    __slots__ = ("source",)
    source: str


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
        raise wrong("", given["sanitizer"], "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if given[name] not in {"", "no"}:
            raise wrong("", given["sanitizer"], f"kernels below it are many times slower: leave out --gemm-{name}")


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
        raise wrong(source, text, "there is a character in it that cannot be printed")
    if option.switch and typed not in {None, "yes"} and option.flag in config.invocation_params.args:
        raise pytest.UsageError(
            f"{source} {shown(text)}: a value stands behind '=', {source}={option.metavar}; or put the option last"
        )
    if option.choices and text not in option.choices:
        hint = did_you_mean(text.lower(), option.choices)
        raise wrong(source, text, f"not a value{hint}; choose one of {', '.join(option.choices)}")
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
            raise wrong(flag, text, "one of the values between the commas is empty")
        if parts.count(part) > 1:
            raise wrong(flag, text, f"{shown(part)} is given twice")
    return parts


def _whole(flag: str, text: str, least: int, most: int = 10**18) -> int:
    if not re.fullmatch(r"[0-9]+", text) or (len(text) <= DIGITS and int(text) < least):
        raise wrong(flag, text, f"give a whole number, {least} or more")
    if len(text) > DIGITS or int(text) > most:
        raise wrong(flag, text, f"give {most} at most")
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
    distributions = _distributions(values["distributions"], problems)
    if problems and ops and not any(problem.op.name in ops for problem in problems):
        raise wrong("--gemm-ops", values["ops"], f"excludes all of --gemm-problem={shown(values['problem'])}")
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
        choices=named_choices(values["choices"], values["level"]),
        reference=values["reference"],
        distributions=distributions,
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
    """Whether the command line of a user changes an option; a worker repeats what has been answered."""
    repeats = hasattr(config, "workerinput")
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
                raise wrong(f"--gemm-{name}", values[name], f"--gemm-{places[path]} names this file too")
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
        raise wrong("--gemm-reason", values["reason"], "it is the reason of cases: name them with --gemm-accept=LIST")
    comparator = values["comparator"]
    names = ("none", *registry.names())
    if comparator not in names:
        hint = did_you_mean(comparator, names)
        raise wrong("--gemm-comparator", comparator, f"no such backend{hint}; known: {', '.join(names)}")
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
        raise wrong(flag, text, "give a percentage from 0 to 100")
    return float(text) / 100


def most_threads() -> int:
    """Threads or processes that may be asked for: more than any machine uses, fewer than it refuses to start."""
    return max(MANY, 4 * cores())


def _threads(text: str) -> tuple[int, ...]:
    """Numbers of CPU threads, each once; () where none is given."""
    found = []
    for part in _list(text, "--gemm-threads"):
        if part != "all" and (not re.fullmatch(r"[0-9]+", part) or not part.strip("0")):
            raise wrong(
                "--gemm-threads",
                text,
                f"{shown(part)!r} is no number of threads; give a whole number, 1 or more, or all, or "
                "several of them, 1,2,all for instance",
            )
        if part != "all" and (len(part) > DIGITS or int(part) > most_threads()):
            raise wrong("--gemm-threads", text, f"give {most_threads()} at most")
        found.append(cores() if part == "all" else int(part))
    return tuple(dict.fromkeys(found))


def _check_cutlass(values: Mapping[str, str]) -> None:
    """The backend itself reads these, see ``api.settings``."""
    try:
        re.compile(values["cutlass-allow"])
    except (re.error, OverflowError, RecursionError) as error:
        raise wrong("--gemm-cutlass-allow", values["cutlass-allow"], f"not a regular expression: {error}") from None
    swizzles = _list(values["cutlass-swizzles"], "--gemm-cutlass-swizzles")
    if not swizzles or not set(swizzles) <= {"1", "2", "4", "8"}:
        raise wrong("--gemm-cutlass-swizzles", values["cutlass-swizzles"], "name some of 1, 2, 4, 8")
    if not re.fullmatch(r"[0-9]{0,4}", values["cutlass-level"]):
        raise wrong("--gemm-cutlass-level", values["cutlass-level"], "give up to four digits, 0000 say")


def _seconds(flag: str, text: str, least: float = 0.0) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not least <= float(text) <= LONGEST:
        zero = "0 for no limit, " if least == 0.0 else ""
        raise wrong(flag, text, f"give seconds, {zero}{LONGEST:.0f} at most")
    return float(text)


def _arch(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]{1,2}[af]?", text):
        raise wrong("--gemm-arch", text, "give it as nvcc does without sm_, 90a for instance")
    return str(text)


def _backends(text: str, registry: Registry) -> tuple[tuple[Backend, ...], bool]:
    names = _names("--gemm-backends", text, "backend", ("auto", *registry.names()))
    if names == ("auto",):
        return tuple(registry), False
    if "auto" in names:
        raise wrong("--gemm-backends", text, "auto stands for all that can run here: give auto alone, or names")
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
            raise wrong(flag, text, f"unknown {what} {shown(name)!r}{hint}; known: {', '.join(known)}")
    return names


def _ops(text: str) -> tuple[str, ...]:
    return _names("--gemm-ops", text, "op", tuple(OPS))


def _distributions(text: str, problems: Sequence[Problem]) -> tuple[str, ...]:
    if not text:
        return ()
    from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for  # imports torch

    names = _names("--gemm-distributions", text, "distribution", tuple(DISTRIBUTIONS))
    for problem in problems:
        if not (apply := distributions_for(problem)) or not set(names) & set(apply):
            says = f"does not apply to --gemm-problem={problem.line}; what applies: {', '.join(apply) or 'none'}"
            raise wrong("--gemm-distributions", text, says)
    return names


def _fuzz(values: Mapping[str, str], *, distributed: bool) -> float:
    """The time to fuzz, after a look at what does not go with it."""
    text = values["fuzz"]
    if not text:
        return 0.0
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) or not 0.0 < float(text) <= LONGEST:
        raise wrong("--gemm-fuzz", text, "give the time in seconds, 60 for instance")
    if find_spec("hypothesis") is None:
        raise pytest.UsageError("--gemm-fuzz needs Hypothesis, which is not installed: pip install hypothesis")
    if distributed:
        raise pytest.UsageError("--gemm-fuzz draws one problem after the other: leave out -n")
    for name, instead in (
        ("problem", "--gemm-ops narrows down what is drawn"),
        ("distributions", "it draws distributions, too"),
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
            raise wrong("--gemm-isa", text, f"this CPU does not execute {name}; it can: {can}")
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
        raise wrong("--gemm-coverage", text, "give a file that ends with .md, or with .json for the data")
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
        raise wrong(flag, text, f"cannot be written ({error.strerror}); name a file in a folder of yours") from None
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
        raise wrong(flag, text, f"cannot be written ({error.strerror}); name a folder of yours") from None
    return path
