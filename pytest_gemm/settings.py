"""pytest's configuration, read once into a frozen :class:`GemmConfig`; no package below this module sees pytest's.

The table of options is in ``options.py``; here is how each value is parsed.  Every option has a key in the ini file,
``--gemm-level`` is ``gemm_level``; the command line wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.api import settings as api_settings
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.api.settings import Setting, SettingError, settings_of
from pytest_gemm.case_id import MODES
from pytest_gemm.config import SPEED_WORKER, GemmConfig, SpeedConfig, cores, has_cuda_device
from pytest_gemm.ledger.entry import LedgerError
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa, processor
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.options import ALLOWABLE, BY_NAME, OPTIONS, RECORDING, Option, default_candidates, renamed
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage import cache
from pytest_gemm.text import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gemm.api.protocols import Backend
    from pytest_gemm.api.registry import Registry

# The most threads or processes that may be asked for; more is taken for a typing error.
MANY: Final = 1024
# Of a whole number; Python reads no more than a few thousand.
_DIGITS: Final = 30
# Seconds: thirty years.  More is a number that clocks and locks do not take.
_LONGEST: Final = 1e9


class Given(str):
    """The text of an option's value, which knows where it was given.

    Attributes:
        source: the option as it was spelled, ``--gemm-seed`` or ``gemm_seed (ini)``.
    """

    __slots__ = ("source",)
    source: str

    @classmethod
    def of(cls, text: str, source: str) -> Given:
        """A text with its source."""
        given = cls(text)
        given.source = source
        return given


def wrong(text: Given, says: str) -> pytest.UsageError:
    """The error for a value."""
    return pytest.UsageError(f"{text.source}={shown(text)}: {says}")


# -- names of options --------------------------------------------------------------------------------------


def check_names(parser: pytest.Parser, args: Sequence[str]) -> None:
    """Answer an undeclared option that looks like one of these, before argparse does.

    Raises:
        pytest.UsageError: naming it and the option that was probably meant.
    """
    for word in parser.parse_known_and_unknown_args(list(args))[1]:
        flag = word.partition("=")[0]
        if flag.startswith("--gemm"):
            raise _unknown(word, flag, "option", [option.flag for option in OPTIONS])


def check_ini_names(config: pytest.Config) -> None:
    """Refuse an unknown key of the ini file; pytest itself only warns."""
    unknown: Iterable[str] = getattr(config, "_get_unknown_ini_keys", set)()  # of pytest 8 and 9
    for key in sorted(unknown):
        if key.startswith(("gemm_", "gemm-")):
            raise _unknown(f"{key} (ini)", key, "key", [option.ini for option in OPTIONS])


def _unknown(word: str, name: str, kind: str, known: Sequence[str]) -> pytest.UsageError:
    if remedy := renamed(name):
        return pytest.UsageError(f"{shown(name)}{' (ini)' * (kind == 'key')} was renamed; {remedy}")
    hint = did_you_mean(name, known)
    return pytest.UsageError(f"{shown(word)}: there is no {kind} {shown(name)}{hint}; pytest --help lists them")


# -- one value ---------------------------------------------------------------------------------------------


def _typed(config: pytest.Config, option: Option) -> list[str]:
    """The values that the command line gives an option, "" where the next word is one; not those of ``addopts``."""
    words = list(map(str, config.invocation_params.args))
    return [
        word.partition("=")[2] if word != option.flag else ("" if option.switch else after)
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] == option.flag
    ]


def value(config: pytest.Config, name: str) -> Given:
    """The text of an option, checked as far as that goes without knowing what it means.

    An empty value in the ini file stands for the default, so that ``-o gemm_ops=`` undoes one.

    Raises:
        pytest.UsageError: for an empty or unprintable text, and for one that the option does not take.
    """
    option = BY_NAME[name]
    typed = config.getoption(option.ini)
    raw = config.getini(option.ini) if typed is None else typed
    source = option.flag if typed is not None else f"{option.ini} (ini)"
    if not isinstance(raw, str):
        raise pytest.UsageError(f"{source}={shown(str(raw))}: give a text; a list is one with commas in it")
    # The lines of a value in an ini file are one.
    text = Given.of(raw.strip() if typed is not None else " ".join(raw.split("\n")).strip() or option.default, source)
    if typed is not None and not text:
        default = f", which is {option.default} then" if option.default else ""
        raise pytest.UsageError(f"{source}= is empty: give {option.metavar}, or leave the option out{default}")
    _check_printable(text)
    if option.switch and typed not in {None, "yes"} and option.flag in config.invocation_params.args:
        raise pytest.UsageError(
            f"{source} {shown(text)}: a value stands behind '=', {source}={option.metavar}; or put the option last"
        )
    if option.choices and text not in option.choices:
        hint = did_you_mean(text.lower(), option.choices)
        raise wrong(text, f"not a value{hint}; choose one of {', '.join(option.choices)}")
    if option.repeat == "error" and len(values := dict.fromkeys(_typed(config, option))) > 1:
        both = " and ".join(map(shown, values))
        raise pytest.UsageError(f"{source} is given twice, {both}: give it once, with commas between the values")
    return text


def _check_printable(text: Given) -> None:
    if not text.isprintable():
        raise wrong(text, "there is a character in it that cannot be printed")


# -- parsers: from a text to a value -------------------------------------------------------------------------

Parser = Callable[[Given], Any]


def _list(text: Given) -> tuple[str, ...]:
    """The parts of a list; () for an empty one.

    Raises:
        pytest.UsageError: for a part that is empty, as an unset variable of a shell makes it, or stands twice.
    """
    parts = tuple(part.strip() for part in text.split(",")) if text else ()
    for part in parts:
        if not part:
            raise wrong(text, "one of the values between the commas is empty")
        if parts.count(part) > 1:
            raise wrong(text, f"{shown(part)} is given twice")
    return parts


def _names(what: str, known: Iterable[str]) -> Parser:
    """A parser of a list, each part of it one of those known."""
    known = tuple(known)

    def parse(text: Given) -> tuple[str, ...]:
        names = _list(text)
        for name in names:
            if name not in known:
                hint = did_you_mean(name.lower(), known)
                raise wrong(text, f"unknown {what} {shown(name)!r}{hint}; known: {', '.join(known)}")
        return names

    return parse


def _whole(least: int, most: int = 10**18) -> Parser:
    """A parser of a whole number; 0 of an empty text."""

    def parse(text: Given) -> int:
        if not text:
            return 0
        if not re.fullmatch(r"[0-9]+", text) or (len(text) <= _DIGITS and int(text) < least):
            raise wrong(text, f"give a whole number, {least} or more")
        if len(text) > _DIGITS or int(text) > most:
            raise wrong(text, f"give {most} at most")
        return int(text)

    return parse


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


def _share(text: Given) -> float:
    if not _is_number(text) or float(text) > 100:
        raise wrong(text, "give a percentage from 0 to 100")
    return float(text) / 100


def _limits(text: Given) -> tuple[float, float]:
    """The limits of a run and of a compile, in seconds."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or not all(_is_number(part) and float(part) <= _LONGEST for part in parts):
        raise wrong(text, f"give seconds as RUN or RUN,COMPILE, 0 for no limit, {_LONGEST:.0f} at most")
    run, compile_limit = [*map(float, parts), 1800.0][:2]
    return run, compile_limit


def _threads(text: Given) -> tuple[int, ...]:
    """Numbers of CPU threads, each once; () where none is given."""
    most, found = max(MANY, 4 * cores()), []  # more than any machine uses, fewer than it refuses to start
    for part in _list(text):
        if part != "all" and (not re.fullmatch(r"[0-9]+", part) or not part.strip("0")):
            right = "give a whole number, 1 or more, or all, or several of them, 1,2,all for instance"
            raise wrong(text, f"{shown(part)!r} is no number of threads; {right}")
        if part != "all" and (len(part) > _DIGITS or int(part) > most):
            raise wrong(text, f"give {most} at most")
        found.append(cores() if part == "all" else int(part))
    return tuple(dict.fromkeys(found))


def _problems(text: Given) -> tuple[Problem, ...]:
    try:
        return tuple(dict.fromkeys(Problem.parse(line) for line in _list(text)))
    except ProblemError as error:
        raise pytest.UsageError(f"{text.source}: {error}") from None


def _isas(text: Given, here: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instruction sets to generate for, "" being the CPU's own, and those of ``all`` that it lacks.

    Args:
        text: the option's value.
        here: what the CPU executes.
    """
    names = _names("level", ("native", *ISAS, "all"))(text)
    for name in names:
        if name in ISAS and name not in here:
            can = ", ".join(("native", *here, "all"))
            raise wrong(text, f"this CPU does not execute {name}; it can: {can}")
    wanted = [one for name in names for one in (here if name == "all" else ("" if name == "native" else name,))]
    lacking = tuple(name for name in ISAS if name not in here) if "all" in names else ()
    return tuple(dict.fromkeys(wanted)), lacking


def _candidates(text: Given) -> str:
    words = ("one", "winner", "all")
    number = re.fullmatch(r"[0-9]{1,18}", text) and int(text) > 0
    is_numeric = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) or text.isnumeric()
    hint = "" if is_numeric or text in words else did_you_mean(text.lower(), words)
    if text and not number and (is_numeric or hint):
        raise wrong(text, f"give one, winner, all, a number from 1 on, or a candidate's name{hint}")
    return str(text)


def _fuzz(text: Given) -> float:
    """The time to fuzz, in seconds; 0: not at all."""
    if text and (not _is_number(text) or not 0.0 < float(text) <= _LONGEST):
        raise wrong(text, "give the time in seconds, 60 for instance")
    if text and find_spec("hypothesis") is None:
        raise pytest.UsageError("--gemm-fuzz needs Hypothesis, which is not installed: pip install hypothesis")
    return float(text or 0.0)


def _record(text: Given) -> frozenset[str]:
    """How to record: empty for not at all, ``yes``, ``force``, ``prune``."""
    if text in {"yes", "no"}:
        return frozenset({"yes"} if text == "yes" else ())
    parts = _list(text)
    if unknown := [part for part in parts if part not in RECORDING]:
        hint = did_you_mean(unknown[0], ("yes", *RECORDING))
        raise wrong(text, f"not a value{hint}; choose yes, no, force, prune or force,prune")
    return frozenset({"yes", *parts})


def _folder(text: Given) -> Path | None:
    try:
        return api_settings.folder(text)
    except ValueError as error:
        raise wrong(text, str(error)) from None


def _is_yes(text: Given) -> bool:
    return text == "yes"


# Options whose value follows from its text alone; the others are parsed below, where more is known.
_PARSERS: Final[Mapping[str, Parser]] = {
    "level": str,
    "problem": _problems,
    "ops": _names("op", OPS),
    "candidates": _candidates,
    "modes": _names("mode", MODES),
    "isa": lambda text: _isas(text, isa.isas(processor.cpu().flags)),
    "device": str,
    "threads": _threads,
    "seed": _whole(0),
    "fuzz": _fuzz,
    "reference": str,
    "guard": str,
    "timeout": _limits,
    "allow": _names("word", ALLOWABLE),
    "output": _folder,
    "compile-only": _is_yes,
    "sessions": _whole(1, 10_000),
    "record": _record,
    "undecided": _share,
    "regret": _whole(0, 10_000),
}


# -- --gemm-set ----------------------------------------------------------------------------------------------


def _windows(text: str) -> int:
    return int(_whole(3, 10_000)(Given.of(text, "speed.windows")))


def _wait(text: str) -> float:
    if not _is_number(text) or float(text) > _LONGEST:
        raise ValueError(f"give seconds, 0 for no limit, {_LONGEST:.0f} at most")
    return float(text)


# Settings of the engine; those of a backend are declared in its class.
ENGINE: Final[Mapping[str, Mapping[str, Setting]]] = {
    "run": {
        "supervise": Setting(
            "yes",
            "yes|no",
            "watch the run from another process",
            lambda text: api_settings.one_of("yes", "no")(text) == "yes",
        )
    },
    "speed": {
        "windows": Setting("32", "N", "on a CPU: spans of a session in which each case is timed", _windows),
        "wait": Setting("3600", "SECONDS", "how long to wait for another run that times on this device", _wait),
    },
}


def settings_given(config: pytest.Config) -> dict[str, dict[str, Given]]:
    """The texts of ``--gemm-set``, by namespace and key; the command line wins over the ini file.

    Raises:
        pytest.UsageError: for one that is not spelled NAME.KEY=VALUE.
    """
    option = BY_NAME["set"]
    found: dict[str, dict[str, Given]] = {}
    for source, lines in (
        (f"{option.ini} (ini)", config.getini(option.ini)),
        (option.flag, config.getoption(option.ini) or ()),
    ):
        for line in lines:
            given = Given.of(line.strip(), source)
            _check_printable(given)
            match = re.fullmatch(r"([\w-]+)\.([\w-]+)=(.*)", given)
            if match is None:
                raise wrong(given, "give it as NAME.KEY=VALUE, cutlass.level=2 for instance")
            found.setdefault(match[1], {})[match[2]] = Given.of(match[3], source)
    return found


def engine_setting(given: Mapping[str, Mapping[str, Given]], name: str, key: str) -> Any:
    """The value of a setting of the engine."""
    text = given.get(name, {}).get(key)
    setting = ENGINE[name][key]
    try:
        return setting.parse(setting.default if text is None else text)
    except (ValueError, pytest.UsageError) as error:
        says = str(error).partition(": ")[2] or str(error)
        assert text is not None
        raise pytest.UsageError(f"{text.source}={name}.{key}={shown(text)}: {says}") from None


def _configure_backends(given: Mapping[str, Mapping[str, Given]], registry: Registry) -> None:
    """Hand each backend its settings, and refuse what does not exist."""
    declaring = {backend.name: settings_of(backend) for backend in registry if settings_of(backend)}
    known: dict[str, Iterable[str]] = {**ENGINE, **declaring}
    for name, texts in given.items():
        for key, text in texts.items():
            where = f"{text.source}={name}.{key}={shown(text)}"
            if name not in known:
                hint = did_you_mean(name, known)
                raise pytest.UsageError(f"{where}: {name!r} has no settings{hint}; known: {', '.join(known)}")
            if key not in known[name]:
                keys = list(known[name])
                hint = did_you_mean(key, keys)
                raise pytest.UsageError(f"{where}: {name} has no setting {key!r}{hint}; known: {', '.join(keys)}")
    for name, settings in ENGINE.items():
        for key in settings:
            engine_setting(given, name, key)
    for backend in registry:
        texts = given.get(backend.name, {})
        try:
            api_settings.configure(backend, texts)
        except SettingError as error:
            text = next(iter(texts.values()), Given.of("", "--gemm-set"))
            raise pytest.UsageError(f"{getattr(text, 'source', '--gemm-set')}: {error}") from None


# -- the whole -----------------------------------------------------------------------------------------------


def ledger(config: pytest.Config, default: Path, registry: Registry | None = None) -> Ledger:
    """The ledger of the run.

    Args:
        config: pytest's.
        default: the one that is used when none is named.
        registry: of the backends that its entries may name; ``None``: any.

    Raises:
        pytest.UsageError: when it cannot be read.
    """
    text = value(config, "known-failures")
    if text == "none":
        return Ledger()
    try:
        return Ledger.load(Path(text) if text else default, None if registry is None else registry.names())
    except LedgerError as error:
        raise pytest.UsageError(f"{text.source}: {error}") from None


def check_sanitizer(config: pytest.Config) -> None:
    """Refuse what makes no sense below a tool of ``--gemm-guard``.

    Raises:
        pytest.UsageError: naming the option to leave out.
    """
    tool = value(config, "guard")
    if value(config, "device") == "cpu":
        raise wrong(tool, "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if value(config, name) not in {"", "no"}:
            raise wrong(tool, f"kernels below it are many times slower: leave out --gemm-{name}")


def read(config: pytest.Config, registry: Registry, workers: int, default_ledger: Path) -> GemmConfig:
    """Read and check everything.

    Args:
        config: pytest's.
        registry: with all backends registered; they are given their settings.
        workers: number of xdist workers that share this machine's cores, 1 without xdist.
        default_ledger: the ledger that is used when none is named.

    Raises:
        pytest.UsageError: one paragraph that names the option, the value and what would be right.
    """
    check_ini_names(config)
    texts = {option.name: value(config, option.name) for option in OPTIONS if option.repeat != "append"}
    settings = settings_given(config)
    found = {name: parse(texts[name]) for name, parse in _PARSERS.items()}
    _configure_backends(settings, registry)
    distributed = bool(getattr(config.option, "numprocesses", None)) or workers > 1
    _check_together(texts, distributed=distributed, workers=workers)
    backends, named = _backends(texts["backends"], registry)
    if found["problem"] and found["ops"] and not any(p.op.name in found["ops"] for p in found["problem"]):
        raise wrong(texts["ops"], f"excludes all of --gemm-problem={shown(texts['problem'])}")
    is_session, output = config.pluginmanager.has_plugin(SPEED_WORKER), found["output"]
    generates = any(honours(backend, Capability.ISA) for backend in backends)
    level = found["level"]
    made = GemmConfig(
        registry=registry,
        backends=backends,
        named=named,
        allow=frozenset(found["allow"]),
        level=level,
        problems=found["problem"],
        ops=found["ops"],
        seed=found["seed"],
        device=found["device"],
        threads=(found["threads"] or (max(1, cores() // workers),))[0],
        thread_axis=found["threads"] if len(found["threads"]) > 1 else (),
        ledger_given=str(texts["known-failures"]),
        ledger=ledger(config, default_ledger, registry),
        run_record=output / "run.jsonl" if output and not is_session else None,
        artifacts=output / "failures" if output else None,
        defects=output / "known-failures" if output else None,
        coverage=output / "coverage.md" if output and generates and not is_session else None,
        modes=found["modes"],
        isas=found["isa"][0],
        lacking=found["isa"][1],
        guard=found["guard"] if found["guard"] == "pages" else "none",
        choices=found["candidates"] or default_candidates(level),
        reference=found["reference"],
        distributions=_distributions(texts["distributions"], found["problem"]),
        fuzz=found["fuzz"],
        timeout=found["timeout"][0],
        compile_timeout=found["timeout"][1],
        compile_only=found["compile-only"],
        options={name: str(text) for name, text in texts.items()},
        settings={f"{name}.{key}": str(text) for name, keys in settings.items() for key, text in keys.items()},
        typed=_typed_names(config, texts, settings),
        speed=_speed(texts, found, settings, config.rootpath, registry, output),
    )
    if made.compile_only and not made.arch and not has_cuda_device():
        raise pytest.UsageError(
            "--gemm-compile-only: there is no CUDA device here to compile for; name its architecture, "
            "--gemm-set=cutlass.arch=90a for a Hopper for instance"
        )
    return made


def _typed_names(
    config: pytest.Config, texts: Mapping[str, str], settings: Mapping[str, Mapping[str, Given]]
) -> frozenset[str]:
    """What the command line changes; nothing in a worker or a session, which repeat what has been checked."""
    if hasattr(config, "workerinput") or config.pluginmanager.has_plugin(SPEED_WORKER):
        return frozenset()
    # The default of comparator is a backend, which may be the only one that is timed.
    changed = [name for name, text in texts.items() if text != BY_NAME[name].default or name == "comparator"]
    typed = {name for name in changed if _typed(config, BY_NAME[name])}
    flag = BY_NAME["set"].flag
    return frozenset(
        {*typed, *(f"{n}.{key}" for n, keys in settings.items() for key, text in keys.items() if text.source == flag)}
    )


def _check_together(texts: Mapping[str, Given], *, distributed: bool, workers: int) -> None:
    """Refuse options that contradict each other."""
    if texts["fuzz"]:
        if distributed:
            raise pytest.UsageError("--gemm-fuzz draws one problem after the other: leave out -n")
        for name, instead in (
            ("problem", "--gemm-ops narrows down what is drawn"),
            ("distributions", "it draws distributions, too"),
            ("compile-only", "what it compiles follows from what it finds"),
            ("isa", "it draws for the CPU's own instruction set"),
        ):
            if texts[name] not in {"", "no"}:
                raise pytest.UsageError(f"--gemm-fuzz draws its own problems: leave out --gemm-{name}; {instead}")
    if texts["compile-only"] == "yes" and workers > 1:
        raise pytest.UsageError("--gemm-compile-only takes all cores by itself: leave out -n, and see cutlass.jobs")
    if texts["record"] != "no" and texts["against"]:
        raise pytest.UsageError("--gemm-record writes baselines, and --gemm-against does without them: leave one out")
    if texts["shapes"] and texts["problem"]:
        raise pytest.UsageError("--gemm-problem takes the place of the shapes: leave out --gemm-shapes")
    if texts["against"] and texts["sessions"] == "1":
        raise pytest.UsageError("--gemm-sessions=1: to tell two environments apart takes 2 sessions of each at least")


def _speed(
    texts: Mapping[str, Given],
    found: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Given]],
    root: Path,
    registry: Registry,
    output: Path | None,
) -> SpeedConfig:
    comparator, names = texts["comparator"], ("none", *registry.names())
    if comparator not in names:
        hint = did_you_mean(comparator, names)
        raise wrong(comparator, f"no such backend{hint}; known: {', '.join(names)}")
    record: frozenset[str] = found["record"]
    # What a recording has measured is kept, so that "pytest-gemm baseline accept" can store a slower case later.
    kept = output / "samples" if output else (cache.last_recording() if record else None)
    return SpeedConfig(
        root=root,
        threads=(found["threads"] or (cores(),))[0],
        shapes=_shapes(texts["shapes"], root),
        comparator="" if comparator == "none" else str(comparator),
        sessions=found["sessions"],
        windows=engine_setting(settings, "speed", "windows"),
        regret=found["regret"],
        gating="slower" not in found["allow"],
        needs_baseline="no-baseline" not in found["allow"],
        needs_decision=found["undecided"] == 0.0,
        undecided_share=found["undecided"],
        baselines=root / texts["baselines"],
        record=bool(record),
        force="force" in record,
        prune="prune" in record,
        against=str(texts["against"]),
        wait=engine_setting(settings, "speed", "wait"),
        samples=kept,
        report=output / "report.html" if output else None,
        summary=output / "summary.md" if output else None,
    )


def _shapes(text: Given, root: Path) -> tuple[str, ...]:
    """Names of sets and files; files are read now, so that a wrong one ends the run before it begins.

    A name may be that of a set in the file of a test's own marker, which is known when the test is collected.
    """
    names = _list(text)
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


def _backends(text: Given, registry: Registry) -> tuple[tuple[Backend, ...], bool]:
    names = _names("backend", ("auto", *registry.names()))(text)
    if names == ("auto",):
        return tuple(registry), False
    if "auto" in names:
        raise wrong(text, "auto stands for all that can run here: give auto alone, or names")
    return tuple(registry[name] for name in names), True


def _distributions(text: Given, problems: Sequence[Problem]) -> tuple[str, ...]:
    if not text:
        return ()
    from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for  # imports torch

    names: tuple[str, ...] = _names("distribution", DISTRIBUTIONS)(text)
    for problem in problems:
        if not (apply := distributions_for(problem)) or not set(names) & set(apply):
            says = f"does not apply to --gemm-problem={problem.line}; what applies: {', '.join(apply) or 'none'}"
            raise wrong(text, says)
    return names
