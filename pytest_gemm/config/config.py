"""pytest's configuration, read once into a frozen :class:`GemmConfig`; no package below this module sees pytest's.

The table of options is in ``options.toml``.  A field that holds the value of an option names it, with its parser.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.api import settings as api_settings
from pytest_gemm.api.ops import OpRegistry
from pytest_gemm.api.protocols import Backend
from pytest_gemm.api.registry import Registry, RegistryError
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.api.settings import Setting, settings_of
from pytest_gemm.api.shipped import shipped
from pytest_gemm.backends.builtin import BUILTIN
from pytest_gemm.config import values
from pytest_gemm.config.options import BY_NAME, CONFLICTS, OPTIONS, suite, suites
from pytest_gemm.config.values import Given, Parser, cores
from pytest_gemm.core.case_id import MODES, Device
from pytest_gemm.core.outcome import Verdict
from pytest_gemm.core.text import described, did_you_mean, shown
from pytest_gemm.ledger.ledger import Ledger
from pytest_gemm.machine import isa, processor, software
from pytest_gemm.machine.machines import Machine
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import APART, QUICK
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.problem import Problem
from pytest_gemm.storage import cache
from pytest_gemm.storage.errors import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


SPEED_WORKER: Final = "gemm-speed-worker"
"""Name of pytest's plugin in a process that times; a conftest may look for it."""


def has_cuda_device() -> bool:
    """Whether the machine has an NVIDIA device node; asked without importing torch."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def test_target(path: Path, name: str, here: Path) -> str:
    """How to name a test on pytest's command line in the folder ``here``.

    Args:
        path: its file.
        name: its function.
        here: where pytest is started.
    """
    if path.is_relative_to(here) and "site-packages" not in path.parts:  # a virtual environment may lie in the folder
        return f"{path.relative_to(here).as_posix()}::{name}"
    if (folder := next((one for one in suites() if path.is_relative_to(one)), None)) is not None:
        return f"--pyargs pytest_gemm.{folder.name}.{path.stem}::{name}"
    return f"{path}::{name}"


def _option(name: str, parse: Parser = str) -> Any:
    """A field that is the parsed value of an option."""

    def default() -> object:
        return parse(BY_NAME[name].default)

    return dataclasses.field(default_factory=default, metadata={"option": name, "parse": parse})


_ALLOWABLE: Final = values.names("word", ("missing", "unjudged", "slower", "no-baseline"))


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
        allow: what does not fail the run, ``slower`` and ``no-baseline`` among it.
        undecided_share: of the compared cases, beyond which the run fails for what stays undecided.
        baselines: folder of the baselines.
        record, force: write baselines; also from a changed tree.
        against: the other environment, "" for the stored baselines.
        wait: seconds to wait for another run that times on the same device; 0: no limit.
        samples: where session files are kept; ``None``: nowhere.  A recording run always keeps them.
    """

    root: Path = Path()
    threads: int = 1
    shapes: tuple[str, ...] = ()
    comparator: str = "aten"
    sessions: int = _option("sessions", values.whole(1, 10_000))
    windows: int = 32
    allow: tuple[str, ...] = _option("allow", _ALLOWABLE)
    undecided_share: float = _option("undecided", values.share)
    baselines: Path = Path("baselines")
    record: bool = False
    force: bool = False
    against: str = _option("against")
    wait: float = 3600.0
    samples: Path | None = None

    @property
    def gating(self) -> bool:
        """Whether a slower case fails the run."""
        return "slower" not in self.allow

    @property
    def fatal(self) -> frozenset[Verdict]:
        """The verdicts that fail a test."""
        if not self.gating:
            return frozenset()
        fails = {Verdict.NO_BASELINE: "no-baseline" not in self.allow, Verdict.UNDECIDED: self.undecided_share == 0.0}
        return frozenset({Verdict.SLOWER, *(verdict for verdict, is_fatal in fails.items() if is_fatal)})


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """What a run was asked for.

    Attributes:
        registry: every registered backend.
        backends: the selected ones, in the order given.
        named: whether the user named them (``auto`` otherwise).
        level: ``smoke``, ``quick``, ``full``, ``exhaustive``, ``huge`` or ``models``.
        problems: problems given by the user; empty: each test's own.
        ops: restrict to these op names; empty: all.
        distributions: restrict to these; empty: the level's.
        candidates: ``one``, ``winner``, ``half``, ``all``, a number, or a pattern of candidates' names; "": not given.
        modes: some of ``case_id.MODES``, in each of which a problem is judged; empty: its own.
        isa: some of ``machine.isa.ISAS`` and "", the CPU's own, and those of ``all`` that the CPU does not have.
        device: ``auto``, ``cpu`` or ``cuda``.
        thread_counts: the numbers of CPU threads that were given, to compile with and to run with (0: the same).
        threads: CPU threads of this process.
        seed: of all values.
        shard: K and N where only the tests of shard K of N are run; ``None``: all.
        inline: whether kernels run in pytest's own process.
        confined: whether the kernels' process has no rights outside of its folder.
        most_bytes: limit of the files of failures; 0: none.
        fuzz: how long to draw problems, in seconds; 0: not at all.
        reference: ``full``, ``sampled`` or ``auto``.
        ledger: the known failures.
        guard: ``none``, or ``pages`` around operands and results on the CPU.
        limits: in seconds of a kernel's run and of a compile; 0: none.
        allow: what does not fail the run.
        output: folder of all files of the run; ``None``: none is written.
        compile_only: compile what the selected cases need and run nothing.
        stream: ``default``, or ``side`` to judge on a CUDA stream of its own.
        machine: as on which code is compiled; ``None``: this one.
        options: every option's value as text, by its name.
        settings: what ``--gemm-set`` gives, as text, by ``NAME.KEY``.
        typed: names of the options, and of the settings, that the command line changes.
        loading: what a rerun repeats of the command so that it loads the same backends, see ``effect.loading``.
        speed: what concerns timing and its gate.
    """

    registry: Registry
    backends: tuple[Backend, ...] = ()
    named: bool = False
    level: str = _option("level")
    problems: tuple[Problem, ...] = _option("problem", values.problems)
    ops: tuple[str, ...] = _option("ops", values.names("op", OPS))
    distributions: tuple[str, ...] = ()
    candidates: str = _option("candidates", values.candidates)
    modes: tuple[str, ...] = _option("modes", values.names("mode", MODES))
    isa: tuple[tuple[str, ...], tuple[str, ...]] = _option(
        "isa", lambda text: values.isas(text, isa.isas(processor.cpu().flags))
    )
    device: str = _option("device")
    thread_counts: tuple[tuple[int, int], ...] = _option("threads", values.threads)
    threads: int = 1
    seed: int = _option("seed", values.whole(0))
    shard: tuple[int, int] | None = _option("shard", values.shard)
    inline: bool = False
    confined: bool = False
    most_bytes: int = 0
    fuzz: float = _option("fuzz", values.fuzz)
    reference: str = _option("reference")
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    guard: str = _option("guard")
    limits: tuple[float, float] = _option("timeout", values.limits)
    allow: tuple[str, ...] = _option("allow", _ALLOWABLE)
    output: Path | None = _option("output", api_settings.folder)
    compile_only: bool = _option("compile-only", values.is_yes)
    stream: str = "default"
    machine: Machine | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    loading: tuple[str, ...] = ()
    speed: SpeedConfig = dataclasses.field(default_factory=SpeedConfig)

    @property
    def wanted_candidates(self) -> str:
        """Which candidates are judged, as ``candidates`` and the level have it; "": each backend's own."""
        by_level = {"full": "half", **dict.fromkeys(("smoke", "quick", *APART), "")}
        return self.candidates or by_level.get(self.level, "all")

    def judged_by(self, *, of_level: bool) -> str:
        """``reference``; ``quick`` in place of ``auto`` for a problem that the level smoke or quick has chosen."""
        is_short = of_level and self.level in {"smoke", "quick"} and not self.problems
        return "quick" if self.reference == "auto" and is_short else self.reference

    @property
    def isas(self) -> tuple[str, ...]:
        """Instruction sets, "" for the CPU's own, for which cpp generates; empty: its own."""
        return (self.machine.isa,) if self.machine and self.machine.isa else self.isa[0]

    @property
    def notes(self) -> list[str]:
        """What a report says of the options: the instruction sets of ``all`` that the CPU does not have."""
        lacking = ", ".join(self.isa[1])
        return [f"--gemm-isa=all left out what this CPU does not execute: {lacking}"] if lacking else []

    @property
    def thread_axis(self) -> tuple[tuple[int, int], ...]:
        """The numbers of threads with each of which a problem on the CPU is judged; empty: ``threads``."""
        counts = self.thread_counts
        return counts if len(counts) > 1 or any(run for _, run in counts) else ()

    def file(self, name: str) -> Path | None:
        """A file or folder of ``--gemm-output``; ``None`` where it was not given."""
        return self.output / name if self.output else None

    @property
    def artifacts(self) -> Path | None:
        """Folder of the files of failures."""
        return self.file("failures")

    @property
    def jobs(self) -> int:
        """Compilers at a time ahead of the tests: as a selected backend is set, or one for each core."""
        return max((getattr(backend, "compilers", 0) for backend in self.backends), default=0) or cores()

    @property
    def arch(self) -> str:
        """Architecture to compile ahead for, as a selected backend is set; "" for the device's."""
        return next(filter(None, (str(getattr(backend, "architecture", "")) for backend in self.backends)), "")

    @property
    def deciding(self) -> dict[str, str]:
        """The options and settings that decide what is judged and how, as text."""
        idle = {"output", "shard", "run.inline", "run.files"}
        return {
            name: text
            for name, text in {**self.options, **self.settings}.items()
            if name not in idle and not name.endswith((".cache", ".jobs", ".wait"))
        }

    @property
    def generates(self) -> bool:
        """Whether a selected backend generates code for the CPU."""
        return any(honours(backend, Capability.ISA) for backend in self.backends)

    @property
    def devices(self) -> dict[str, str]:
        """Where each selected backend computes, by its name."""
        return {backend.name: self.device_of(backend) for backend in self.backends}

    def machine_of(self, backend: Backend) -> Machine | None:
        """As which machine this backend compiles; ``None``: as this one, or nothing."""
        machine, on_cpu = self.machine, self.device_of(backend) == Device.CPU
        fits = machine is not None and bool(machine.threads) == on_cpu and honours(backend, Capability.MACHINE)
        return machine if fits else None

    def device_of(self, backend: Backend) -> Device:
        """Where this backend computes: the device asked for, or the first of its own that is here."""
        if self.device != "auto":
            return Device(self.device)
        devices: Sequence[str] = getattr(backend, "devices", ("cpu", "cuda"))
        if "cuda" in devices and ("cpu" not in devices or has_cuda_device()):
            return Device.CUDA
        return Device.CPU


CONFIG = pytest.StashKey[GemmConfig]()
"""Where a run keeps what it was asked for."""


# -- --gemm-set ----------------------------------------------------------------------------------------------


# Settings of the engine; those of a backend are declared in its class.
ENGINE: Final[Mapping[str, Mapping[str, Setting]]] = {
    "run": {
        "inline": Setting("no", "yes|no", "kernels run in pytest's process", api_settings.one_of("yes", "no")),
        "confined": Setting("no", "yes|no", "kernels write to no file and no socket", api_settings.one_of("yes", "no")),
        "together": Setting("yes", "yes|no", "compile in batches; smoke: no", api_settings.one_of("yes", "no")),
        "files": Setting("64", "MB", "limit of the files of failures; 0: all files of all", values.whole(0, 1_000_000)),
        "stream": Setting("default", "default|side", "CUDA stream of a run", api_settings.one_of("default", "side")),
        "machine": Setting("", "NAME", "compile as on this machine; default: this one", values.machine),
    },
    "speed": {
        "windows": Setting("32", "N", "spans of a CPU session in which each case is timed", values.whole(3, 1000)),
        "wait": Setting("3600", "SECONDS", "limit of the wait for another run that times here", values.seconds),
    },
}


def settings_given(config: pytest.Config) -> dict[str, Given]:
    """The texts of ``--gemm-set``, by ``NAME.KEY``; the command line wins over the ini file.

    Raises:
        pytest.UsageError: for one that is not spelled NAME.KEY=VALUE.
    """
    option = BY_NAME["set"]
    given = [Given(line.strip(), f"{option.ini} (ini)") for line in config.getini(option.ini)]
    given += [Given(line.strip(), option.flag) for line in config.getoption(option.ini) or ()]
    found = {}
    for text in given:
        values.check_printable(text)
        match = re.fullmatch(r"([\w-]+\.[\w-]+)=(.*)", text)
        if match is None:
            raise values.wrong(text, "give it as NAME.KEY=VALUE, cutlass.jobs=2 for instance")
        found[match[1]] = Given(match[2], f"{text.source}={match[1]}")
    return found


def setting(given: Mapping[str, Given], owner: str, key: str, declared: Mapping[str, Setting]) -> Any:
    """The value of a setting of the engine or of a backend: as given, or its default."""
    text = given.get(f"{owner}.{key}")
    return declared[key].parse(declared[key].default) if text is None else values.parsed(text, declared[key].parse)


def _apply_settings(given: Mapping[str, Given], registry: Registry) -> dict[str, dict[str, Any]]:
    """The values of all settings by owner and key; each backend is handed its own, and an unknown one is refused."""
    for name, text in given.items():
        if (owner := name.partition(".")[0]) in registry.shipped():
            values.parsed(Given(owner, text.source), registry.__getitem__)
    declared = {**ENGINE, **{backend.name: settings_of(backend) for backend in registry if settings_of(backend)}}
    known = [f"{owner}.{key}" for owner, keys in declared.items() for key in keys]
    for name, text in given.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise values.wrong(text, f"there is no setting {name!r}{hint}; known: {', '.join(known)}")
    found = {owner: {key: setting(given, owner, key, keys) for key in keys} for owner, keys in declared.items()}
    for owner in found.keys() - ENGINE.keys():
        configurable: Any = registry[owner]
        with _foreign(f"configure() of {owner}"):
            configurable.configure(found[owner])
    return found


# -- the whole -----------------------------------------------------------------------------------------------


def workers(config: pytest.Config) -> int:
    """xdist's workers, which share the cores; 1 without xdist.  An option tells the controller."""
    if hasattr(config, "workerinput"):
        return int(config.workerinput["workercount"])
    if str(getattr(config.option, "dist", "no")) == "no":
        return 1
    from xdist.workermanage import parse_tx_spec_config

    return max(1, len(parse_tx_spec_config(config)))


def ledger(config: pytest.Config, registry: Registry) -> Ledger:
    """The ledger of the run.

    Args:
        config: pytest's.
        registry: of the backends that its entries may name.

    Raises:
        pytest.UsageError: when it cannot be read.
    """
    text = values.value(config, "known-failures")
    if text == "none":
        return Ledger()
    default = suite("conformance") / "known_failures.toml"
    return values.parsed(text, lambda path: Ledger.load(Path(path) if path else default, registry.names()))


@contextlib.contextmanager
def _foreign(what: str) -> Iterator[None]:
    """The block calls a user's code: whatever it raises is a usage error with its place."""
    try:
        yield
    except (KeyboardInterrupt, pytest.UsageError):
        raise
    except BaseException as error:
        own, frames = str(Path(__file__).parents[1]), traceback.extract_tb(error.__traceback__)
        last = next((one for one in reversed(frames) if not one.filename.startswith(own)), frames[-1])
        said = f": {error}" if isinstance(error, (RegistryError, FileError)) else f" raised {described(error)}"
        raise pytest.UsageError(f"{what}{said}\n  {last.filename}:{last.lineno}, in {last.name}") from None


def _registered(config: pytest.Config) -> Registry:
    """All backends: those that come with the package, whose modules import no torch, the user's, and installed ones.

    The user's operations are registered before.
    """
    with _foreign("pytest_gemm_register_ops"):
        config.hook.pytest_gemm_register_ops(registry=OpRegistry())
    registry = Registry()
    for backend in BUILTIN:
        registry.add(backend())
    with _foreign("pytest_gemm_register_backends"):
        config.hook.pytest_gemm_register_backends(registry=registry)
    registry.ship(shipped())
    return registry


def read(config: pytest.Config) -> GemmConfig:
    """Register the backends, give them their settings, read and check everything.

    Raises:
        pytest.UsageError: one paragraph that names the option, the value and what would be right.
    """
    if old := software.old_torch():
        raise pytest.UsageError(old)
    registry = _registered(config)
    values.check_ini_names(config)
    texts = {option.name: values.value(config, option.name) for option in OPTIONS if option.repeat != "append"}
    given = settings_given(config)
    found, speed = _parsed(GemmConfig, texts), _parsed(SpeedConfig, texts)
    recording = texts["record"] != "no"
    backends, named = _backends(texts["backends"], registry, config)
    comparator = _comparator(texts["comparator"], registry, config)
    settings = _apply_settings(given, registry)
    _check_together(texts, config)
    if (folder := config.rootpath / texts["baselines"]).exists() and not folder.is_dir():
        raise values.wrong(texts["baselines"], "is no folder; name the one of the baselines")
    if found["problems"] and found["ops"] and not any(p.op.name in found["ops"] for p in found["problems"]):
        raise values.wrong(texts["ops"], f"excludes all of --gemm-problem={shown(texts['problem'])}")
    threads, output = [count for count, _ in found["thread_counts"][:1]], found["output"]
    made = GemmConfig(
        registry,
        backends,
        named,
        **found,
        distributions=_distributions(texts["distributions"], found["problems"]),
        threads=(*threads, max(1, cores() // workers(config)))[0],
        ledger=ledger(config, registry),
        stream=settings["run"]["stream"],
        machine=_machine(settings["run"]["machine"], texts),
        inline=settings["run"]["inline"] == "yes",
        confined=settings["run"]["confined"] == "yes",
        most_bytes=settings["run"]["files"] << 20,
        options={name: str(text) for name, text in texts.items()},
        settings={name: str(text) for name, text in given.items()},
        typed=_typed_names(config, texts, given),
        speed=SpeedConfig(
            root=config.rootpath,
            threads=(*threads, cores())[0],
            shapes=_shapes(texts["shapes"], config.rootpath),
            comparator=comparator,
            baselines=config.rootpath / texts["baselines"],
            record=recording,
            force=texts["record"] == "force",
            # What a recording measured is kept, so that "pytest-gemm baseline accept" can store a slower case later.
            samples=output / "samples" if output else (cache.own_recording() if recording else None),
            **speed,
            **settings["speed"],
        ),
    )
    if made.compile_only and not made.arch and not has_cuda_device():
        raise pytest.UsageError(
            "--gemm-compile-only: there is no CUDA device here to compile for; name its architecture, "
            "--gemm-set=cutlass.arch=90a for a Hopper for instance"
        )
    return made


def _parsed(kind: type[GemmConfig | SpeedConfig], texts: Mapping[str, Given]) -> dict[str, Any]:
    """The fields that are values of options."""
    fields = [field for field in dataclasses.fields(kind) if field.metadata]
    return {field.name: values.parsed(texts[field.metadata["option"]], field.metadata["parse"]) for field in fields}


def _typed_names(config: pytest.Config, texts: Mapping[str, str], given: Mapping[str, Given]) -> frozenset[str]:
    """What the command line changes; nothing in a worker or a session, which repeat what has been checked."""
    if hasattr(config, "workerinput") or config.pluginmanager.has_plugin(SPEED_WORKER):
        return frozenset()
    # The default of comparator is a backend, which may be the only one that is timed.
    changed = [name for name, text in texts.items() if text != BY_NAME[name].default or name == "comparator"]
    typed = {name for name in changed if values.typed_values(config, BY_NAME[name])}
    return frozenset(typed | {name for name, text in given.items() if text.source.startswith(BY_NAME["set"].flag)})


def _check_together(texts: Mapping[str, Given], config: pytest.Config) -> None:
    """Refuse options that contradict each other."""
    on = {name for name, text in texts.items() if text not in {"", "no"}}
    if "fuzz" in on and (hasattr(config, "workerinput") or str(getattr(config.option, "dist", "no")) != "no"):
        raise pytest.UsageError("--gemm-fuzz draws one problem after the other: leave out -n and --tx")
    for name, others in CONFLICTS.items():
        for other, message in others.items():
            if {name, other} <= on:
                raise pytest.UsageError(message)
    if "compile-only" in on and workers(config) > 1:
        raise pytest.UsageError("--gemm-compile-only takes all cores by itself: leave out -n, and see cutlass.jobs")
    if texts["against"] and texts["sessions"] == "1":
        raise pytest.UsageError("--gemm-sessions=1: to tell two environments apart takes 2 sessions of each at least")


def _machine(machine: Machine | None, texts: Mapping[str, Given]) -> Machine | None:
    for name in ("isa", "threads"):
        if machine is not None and machine.threads and texts[name] != BY_NAME[name].default:
            raise values.wrong(texts[name], f"run.machine={machine.name} has its own: leave out one of them")
    return machine


def _comparator(text: Given, registry: Registry, config: pytest.Config) -> str:
    names = ("none", *registry.names())
    if text not in names:
        known = f"known: {', '.join(names)}; {_registering(config)}"
        raise values.wrong(text, f"no such backend{did_you_mean(text, names)}; {known}")
    return "" if text == "none" else values.parsed(text, registry.__getitem__).name


def _shapes(text: Given, root: Path) -> tuple[str, ...]:
    """Names of sets and files; files are read now, so that a wrong one ends the run before it begins.

    A name may be that of a set in the file of a test's own marker, which is known when the test is collected.
    """
    names = values.parsed(text, values.parts_of)
    if paths := [name for name in names if "." in name or (root / name).exists()]:
        values.parsed(text, lambda _: shapes.select(suite("perf") / "shapes.toml", paths, QUICK, "cpu", root))
    return names


def _registering(config: pytest.Config) -> str:
    """Where backends of the user were looked for, for the message on one that is unknown."""
    files = [getattr(one.plugin, "__file__", "") for one in config.hook.pytest_gemm_register_backends.get_hookimpls()]
    if found := ", ".join(filter(None, files)):
        return f"pytest_gemm_register_backends was called in {found}"
    here = config.invocation_params.dir
    paths = [path for one in config.args if (path := Path(here, one.partition("::")[0]).resolve()).exists()]
    folders = dict.fromkeys(str(path if path.is_dir() else path.parent) for path in paths or [here])
    return f"no conftest.py in {', '.join(folders)} or above has the hook pytest_gemm_register_backends(registry)"


def _backends(text: Given, registry: Registry, config: pytest.Config) -> tuple[tuple[Backend, ...], bool]:
    parse = values.names("backend", ("auto", *registry.names()), lambda: _registering(config))
    names = values.parsed(text, parse)
    if names == ("auto",):
        return tuple(one for one in registry if not getattr(one, "on_request", False)), False
    if "auto" in names:
        raise values.wrong(text, "auto stands for all that can run here: give auto alone, or names")
    return values.parsed(text, lambda _: tuple(map(registry.named, names))), True


def _distributions(text: Given, problems: Sequence[Problem]) -> tuple[str, ...]:
    if not text:
        return ()
    from pytest_gemm.operands.distributions import DISTRIBUTIONS, distributions_for  # imports torch

    names = values.parsed(text, values.names("distribution", DISTRIBUTIONS))
    for problem in problems:
        if not set(names) & set(apply := distributions_for(problem)):
            message = f"does not apply to --gemm-problem={problem.line}; what applies: {', '.join(apply) or 'none'}"
            raise values.wrong(text, message)
    return names
