"""pytest's configuration, read once into a frozen :class:`GemmConfig`; no package below this module sees pytest's.

The table of options is in ``options.py``; here is how each value is parsed.  Every option has a key in the ini file,
``--gemm-level`` is ``gemm_level``; the command line wins.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm import values
from pytest_gemm.api import settings as api_settings
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.api.settings import Setting, SettingError, settings_of
from pytest_gemm.case_id import MODES
from pytest_gemm.config import SPEED_WORKER, GemmConfig, SpeedConfig, cores, has_cuda_device
from pytest_gemm.ledger.entry import LedgerError
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa, processor
from pytest_gemm.options import ALLOWABLE, BY_NAME, OPTIONS, default_candidates
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage import cache
from pytest_gemm.text import did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gemm.api.protocols import Backend
    from pytest_gemm.api.registry import Registry

# Options whose value follows from its text alone; the others are parsed below, where more is known.
_PARSERS: Final[Mapping[str, values.Parser]] = {
    "level": str,
    "problem": values.problems,
    "ops": values.names("op", OPS),
    "candidates": values.candidates,
    "modes": values.names("mode", MODES),
    "isa": lambda text: values.isas(text, isa.isas(processor.cpu().flags)),
    "device": str,
    "threads": values.threads,
    "seed": values.whole(0),
    "fuzz": values.fuzz,
    "reference": str,
    "guard": str,
    "timeout": values.limits,
    "allow": values.names("word", ALLOWABLE),
    "output": values.folder,
    "compile-only": values.is_yes,
    "sessions": values.whole(1, 10_000),
    "record": values.record,
    "undecided": values.share,
    "regret": values.whole(0, 10_000),
}


# -- --gemm-set ----------------------------------------------------------------------------------------------


def _windows(text: str) -> int:
    return int(values.whole(3, 10_000)(values.Given.of(text, "speed.windows")))


def _wait(text: str) -> float:
    if not values.is_number(text) or float(text) > values.LONGEST:
        raise ValueError(f"give seconds, 0 for no limit, {values.LONGEST:.0f} at most")
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


def settings_given(config: pytest.Config) -> dict[str, dict[str, values.Given]]:
    """The texts of ``--gemm-set``, by namespace and key; the command line wins over the ini file.

    Raises:
        pytest.UsageError: for one that is not spelled NAME.KEY=VALUE.
    """
    option = BY_NAME["set"]
    found: dict[str, dict[str, values.Given]] = {}
    for source, lines in (
        (f"{option.ini} (ini)", config.getini(option.ini)),
        (option.flag, config.getoption(option.ini) or ()),
    ):
        for line in lines:
            given = values.Given.of(line.strip(), source)
            values.check_printable(given)
            match = re.fullmatch(r"([\w-]+)\.([\w-]+)=(.*)", given)
            if match is None:
                raise values.wrong(given, "give it as NAME.KEY=VALUE, cutlass.level=2 for instance")
            found.setdefault(match[1], {})[match[2]] = values.Given.of(match[3], source)
    return found


def engine_setting(given: Mapping[str, Mapping[str, values.Given]], name: str, key: str) -> Any:
    """The value of a setting of the engine."""
    text = given.get(name, {}).get(key)
    setting = ENGINE[name][key]
    try:
        return setting.parse(setting.default if text is None else text)
    except (ValueError, pytest.UsageError) as error:
        says = str(error).partition(": ")[2] or str(error)
        assert text is not None
        raise pytest.UsageError(f"{text.source}={name}.{key}={shown(text)}: {says}") from None


def _configure_backends(given: Mapping[str, Mapping[str, values.Given]], registry: Registry) -> None:
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
            text = next(iter(texts.values()), values.Given.of("", "--gemm-set"))
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
    text = values.value(config, "known-failures")
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
    tool = values.value(config, "guard")
    if values.value(config, "device") == "cpu":
        raise values.wrong(tool, "it watches kernels of a GPU: leave out --gemm-device=cpu")
    for name in ("record", "against"):
        if values.value(config, name) not in {"", "no"}:
            raise values.wrong(tool, f"kernels below it are many times slower: leave out --gemm-{name}")


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
    values.check_ini_names(config)
    texts = {option.name: values.value(config, option.name) for option in OPTIONS if option.repeat != "append"}
    settings = settings_given(config)
    found = {name: parse(texts[name]) for name, parse in _PARSERS.items()}
    _configure_backends(settings, registry)
    distributed = bool(getattr(config.option, "numprocesses", None)) or workers > 1
    _check_together(texts, distributed=distributed, workers=workers)
    backends, named = _backends(texts["backends"], registry)
    if found["problem"] and found["ops"] and not any(p.op.name in found["ops"] for p in found["problem"]):
        raise values.wrong(texts["ops"], f"excludes all of --gemm-problem={shown(texts['problem'])}")
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
    config: pytest.Config, texts: Mapping[str, str], settings: Mapping[str, Mapping[str, values.Given]]
) -> frozenset[str]:
    """What the command line changes; nothing in a worker or a session, which repeat what has been checked."""
    if hasattr(config, "workerinput") or config.pluginmanager.has_plugin(SPEED_WORKER):
        return frozenset()
    # The default of comparator is a backend, which may be the only one that is timed.
    changed = [name for name, text in texts.items() if text != BY_NAME[name].default or name == "comparator"]
    typed = {name for name in changed if values.typed_values(config, BY_NAME[name])}
    flag = BY_NAME["set"].flag
    return frozenset(
        {*typed, *(f"{n}.{key}" for n, keys in settings.items() for key, text in keys.items() if text.source == flag)}
    )


def _check_together(texts: Mapping[str, values.Given], *, distributed: bool, workers: int) -> None:
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
    texts: Mapping[str, values.Given],
    found: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, values.Given]],
    root: Path,
    registry: Registry,
    output: Path | None,
) -> SpeedConfig:
    comparator, names = texts["comparator"], ("none", *registry.names())
    if comparator not in names:
        hint = did_you_mean(comparator, names)
        raise values.wrong(comparator, f"no such backend{hint}; known: {', '.join(names)}")
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


def _shapes(text: values.Given, root: Path) -> tuple[str, ...]:
    """Names of sets and files; files are read now, so that a wrong one ends the run before it begins.

    A name may be that of a set in the file of a test's own marker, which is known when the test is collected.
    """
    names = values.parts_of(text)
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


def _backends(text: values.Given, registry: Registry) -> tuple[tuple[Backend, ...], bool]:
    names = values.names("backend", ("auto", *registry.names()))(text)
    if names == ("auto",):
        return tuple(registry), False
    if "auto" in names:
        raise values.wrong(text, "auto stands for all that can run here: give auto alone, or names")
    return tuple(registry[name] for name in names), True


def _distributions(text: values.Given, problems: Sequence[Problem]) -> tuple[str, ...]:
    if not text:
        return ()
    from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for  # imports torch

    names: tuple[str, ...] = values.names("distribution", DISTRIBUTIONS)(text)
    for problem in problems:
        if not (apply := distributions_for(problem)) or not set(names) & set(apply):
            says = f"does not apply to --gemm-problem={problem.line}; what applies: {', '.join(apply) or 'none'}"
            raise values.wrong(text, says)
    return names
