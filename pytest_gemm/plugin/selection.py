"""Which cases a test gets: the marker, the options, the backends that can run here.

A test asks with ``@pytest.mark.gemm(...)`` and the fixture ``gemm_case``::

    @pytest.mark.gemm(problems=["mm:f16:nt:512x768x1024"])
    def test_mine(gemm_case, gemm_check):
        gemm_check(gemm_case)

Marker keywords:
    problems: problem lines or :class:`Problem` objects, or a function of the level that returns them; it gets the
        device and the backend, too, where it has parameters ``device`` and ``backend``.
    shapes: a shapes file instead (see ``problem.shapes``), from which ``--gemm-shapes`` chooses.
    distributions: names of distributions; by default the level decides.
    any_problem: the test takes whatever ``--gemm-problem`` names, also what is not in its own list.
    shares: functions like that of ``problems``, by the name of a backend that ``auto`` leaves out: what it gets there.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_gemm.api.protocols import Availability, Backend, Compiling
from pytest_gemm.api.registry import Registry
from pytest_gemm.api.request import Capability, honours
from pytest_gemm.config.config import GemmConfig, test_target
from pytest_gemm.core.case_id import MODES, CandidateSelection, CaseId, Mode
from pytest_gemm.core.outcome import Reason
from pytest_gemm.core.text import described, did_you_mean
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.problem import shapes
from pytest_gemm.problem.axes import APART
from pytest_gemm.problem.errors import ProblemError
from pytest_gemm.problem.problem import Problem

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case


# Code of the reason of a backend that has no part in --gemm-compile-only.
NOTHING_AHEAD: Final = "nothing-ahead"
# Code of the reason of a backend that could not say whether it can run here.
NO_ANSWER: Final = "no-answer"

# How many distributions a problem is judged with, most telling first; None: all that apply.
DISTRIBUTIONS: Final[dict[str, int | None]] = {"smoke": 4, "quick": 4, "full": 6, "exhaustive": None}


# Distributions that the package's own markers name: they exist, and collecting those tests needs no torch.
_KNOWN: Final = frozenset({"rand", "rand-positive"})


class MarkerError(ValueError):
    """A ``gemm`` marker that cannot be used; the message says which keyword and what is right."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a test's marker asks for; see the module's docstring for the fields."""

    problems: Callable[..., Iterable[Problem | str]] | Sequence[Problem | str] = ()
    shapes: Path | None = None
    distributions: tuple[str, ...] = ()
    any_problem: bool = False
    shares: Mapping[str, Callable[..., Iterable[Problem | str]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a test: a case and the distributions of its marker, before anything heavy is made of it."""

    case: CaseId
    distributions: tuple[str, ...] = ()


def read_marker(marker: pytest.Mark | None) -> Request:
    """The request in a marker.

    Raises:
        MarkerError: for an unknown keyword or distribution, positional arguments, or no marker at all.
    """
    if marker is None:
        raise MarkerError("gemm_case needs the marker: @pytest.mark.gemm(problems=[...])")
    if marker.args:
        raise MarkerError("the gemm marker takes keywords only: @pytest.mark.gemm(problems=[...])")
    known = [field.name for field in dataclasses.fields(Request)]
    for name in marker.kwargs:
        if name not in known:
            hint = did_you_mean(name, known)
            raise MarkerError(f"the gemm marker has no keyword {name!r}{hint}; known: {', '.join(known)}")
    kwargs: dict[str, Any] = dict(marker.kwargs)
    for name, value in kwargs.items():
        asks, right = _KEYWORDS[name]
        if not right(value):
            raise MarkerError(f"the gemm marker's {name} is {value!r}; it takes {asks}")
    kwargs["distributions"] = tuple(kwargs.get("distributions", ()))
    if {*kwargs["distributions"]} - _KNOWN:
        from pytest_gemm.operands.distributions import DISTRIBUTIONS as EVERY  # imports torch

        for name in kwargs["distributions"]:
            if name not in EVERY:
                said = f"{name!r}{did_you_mean(name, EVERY)}; known: {', '.join(EVERY)}"
                raise MarkerError(f"the gemm marker has an unknown distribution {said}")
    return Request(**kwargs)


def is_of_level(item: pytest.Item) -> bool:
    """Whether the problems of a test are those of the level: its marker has a function of it."""
    marker = item.get_closest_marker("gemm")
    return marker is not None and callable(marker.kwargs.get("problems"))


def _are(kinds: type | tuple[type, ...]) -> Callable[[object], bool]:
    """Whether a value is a list or a tuple of these."""
    return lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, kinds) for one in value)


# What a keyword of the marker takes, in words and as a question.
_KEYWORDS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "problems": ("a list of lines, or a function of the level", lambda v: callable(v) or _are((str, Problem))(v)),
    "shapes": ("the Path of a shapes file", lambda v: isinstance(v, Path)),
    "distributions": ("a list of names", _are(str)),
    "any_problem": ("True or False", lambda v: isinstance(v, bool)),
    "shares": (
        "functions of the level by name of a backend",
        lambda v: isinstance(v, dict) and all(map(callable, v.values())),
    ),
}


def select(request: Request, config: GemmConfig) -> list[Parameter]:
    """The parameters of a test, problem by problem so that backends of one problem are neighbours.

    Raises:
        MarkerError: when the marker's problems cannot be read.
    """
    asked = {b.name: request for b in config.backends}
    if not config.named:
        asked |= {name: dataclasses.replace(request, problems=share) for name, share in request.shares.items()}
    ready = [b for b in map(config.registry.named, asked) if _state(config, b).ok]
    wanted = {b.name: dict.fromkeys(p.line for p in _problems(asked[b.name], config, b)) for b in ready}
    together = dict.fromkeys(line for lines in wanted.values() for line in lines)
    return [
        Parameter(dataclasses.replace(axes, problem=line), request.distributions)
        for line in together
        for b in ready
        if line in wanted[b.name]
        for axes in _axes(b, config, timed=request.shapes is not None)
    ]


def _axes(backend: Backend, config: GemmConfig, *, timed: bool) -> list[CaseId]:
    """A backend's cases of any problem: by mode, by instruction set where it generates code, by number of threads.

    As on another machine it has that one's.  What is timed is timed in the backend's own way: a baseline is of that.
    """
    if timed:
        return [CaseId(backend.name, "")]
    on_cpu = config.device_of(backend) == "cpu"
    isas = config.isas if on_cpu and honours(backend, Capability.ISA) else ()
    machine = config.machine_of(backend)
    counts = ((machine.threads, 0),) if machine else config.thread_axis if on_cpu else ()
    axes = itertools.product(config.modes or ("",), isas or ("",), counts or ((0, 0),))
    return [
        CaseId(backend.name, "", mode=Mode(mode), isa=isa, threads=compiled, run_threads=run)
        for mode, isa, (compiled, run) in axes
    ]


def available(config: GemmConfig) -> list[Backend]:
    """The selected backends that can run here."""
    return [b for b in config.backends if _state(config, b).ok]


def missing(config: GemmConfig) -> dict[str, Reason]:
    """Why backends that the user named cannot run; with ``auto`` only those that raised instead of an answer."""
    reasons = {b.name: _state(config, b).reason for b in config.backends}
    # Nothing to compile ahead is no lack: plugin says so where it compiles.
    return {
        name: reason
        for name, reason in reasons.items()
        if reason is not None and reason.code != NOTHING_AHEAD and (config.named or reason.code == NO_ANSWER)
    }


def without_part(config: GemmConfig) -> list[Reason]:
    """Why selected backends have no part in ``--gemm-compile-only``; ``auto`` names no backend."""
    reasons = [_state(config, b).reason for b in config.backends if config.named]
    return [reason for reason in reasons if reason is not None and reason.code == NOTHING_AHEAD]


def _state(config: GemmConfig, backend: Backend) -> Availability:
    return _availability(config.registry, backend.name, config.device_of(backend), config.compile_only)


@functools.lru_cache(maxsize=64)
def _availability(registry: Registry, name: str, device: str, compile_only: bool) -> Availability:
    """Asked once a run, however many tests there are."""
    backend = registry[name]
    try:
        if not compile_only:
            answer: object = backend.availability(device)
        elif isinstance(backend, Compiling):
            answer = backend.compiles_ahead()
        else:
            text = f"{name} compiles nothing ahead: its kernels are made when they are run"
            return Availability(Reason(NOTHING_AHEAD, text))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of a backend, which ends nothing by what it raises
        return Availability(Reason(NO_ANSWER, f"availability() of {name} raised {described(error)}"))
    if isinstance(answer, Availability):
        return answer
    return Availability(Reason(NO_ANSWER, f"availability() of {name} returned {type(answer).__name__}"))


def _problems(request: Request, config: GemmConfig, backend: Backend) -> list[Problem]:
    if config.problems and request.any_problem and (config.named or backend.name not in request.shares):
        found: Iterable[Problem] = config.problems
    else:
        found = _own_problems(request, config, backend)
        if config.problems:
            wanted = {p.line for p in config.problems}
            found = [p for p in found if p.line in wanted]
    return [p for p in found if not config.ops or p.op.name in config.ops]


@functools.lru_cache(maxsize=64)
def _called(problems: Callable[..., Iterable[Problem | str]], level: str, **more: Any) -> tuple[Problem | str, ...]:
    """Several tests may share one function."""
    return tuple(problems(level, **more))


def _own_problems(request: Request, config: GemmConfig, backend: Backend) -> list[Problem]:
    problems, device = request.problems, config.device_of(backend)
    try:
        if request.shapes is not None:
            return list(shapes.select(request.shapes, config.speed.shapes, config.level, device, config.speed.root))
    except shapes.ShapeError as error:
        raise MarkerError(f"--gemm-shapes: {error}") from None
    if callable(problems):
        wanted = inspect.signature(problems).parameters
        further = {"device": device, "backend": backend}
        lines: Sequence[Problem | str] = _called(
            problems, config.level, **{name: further[name] for name in further if name in wanted}
        )
    else:
        lines = problems
    try:
        return [p if isinstance(p, Problem) else Problem.parse(p) for p in lines]
    except ProblemError as error:
        raise MarkerError(f"in the gemm marker's problems: {error}") from None


def _of_level(names: tuple[str, ...], level: str) -> tuple[str, ...]:
    """The distributions of a level; a level of ``APART`` has an exact one and one that rounds."""
    if level in APART:
        return tuple(dict.fromkeys((*names[:1], *(name for name in names if name == "rand"))))
    return names[: DISTRIBUTIONS[level]]


def case_of(parameter: Parameter, config: GemmConfig) -> Case:
    """The case of a parameter; from here on torch is needed."""
    from pytest_gemm.judging.case import Case
    from pytest_gemm.operands.distributions import distributions_for

    asked = parameter.case
    backend, problem = config.registry[asked.backend], Problem.parse(asked.problem)
    apply = distributions_for(problem)
    wanted = tuple(name for name in config.distributions if name in apply) or config.distributions
    distributions = parameter.distributions or wanted or _of_level(apply, config.level)
    device = config.device_of(backend)
    case = Case(backend, problem, distributions, config.seed, device, CandidateSelection(config.wanted_candidates))
    axes = {name: getattr(asked, name) for name in ("mode", "isa", "threads", "run_threads")}
    machine = config.machine_of(backend)
    return dataclasses.replace(case, **axes, machine=machine.name if machine else "")


# -- collected tests -------------------------------------------------------------------------------------------


def parameter_of(item: pytest.Item) -> Parameter | None:
    """The parameter of a test over cases, ``None`` of any other."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("gemm_case") if callspec is not None else None
    return found if isinstance(found, Parameter) else None


def is_placeholder(item: pytest.Item) -> bool:
    """Whether pytest made it up for a marked test that no problem was selected for."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = {"gemm_fuzz": str, "gemm_case": Parameter}
    return any(name in params and not isinstance(params[name], kind) for name, kind in kinds.items())


def timed(item: pytest.Item) -> tuple[CaseId, str] | None:
    """Case and function of a test whose case is timed, ``None`` of any other."""
    if not isinstance(item, pytest.Function) or "gemm_speed" not in item.fixturenames:
        return None
    found = parameter_of(item)
    return (found.case, item.originalname) if found is not None else None


def target(item: pytest.Function) -> str:
    """How to name this test on pytest's command line."""
    return test_target(item.path, item.originalname, item.config.invocation_params.dir)


def is_narrowed(config: pytest.Config, settings: GemmConfig) -> bool:
    """Whether the user asked for less than whole suites."""
    selected = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect", "maxfail"))
    return bool(selected or settings.problems or settings.ops or any("::" in arg for arg in config.args))


def names_files(config: pytest.Config) -> bool:
    """Whether the user named files or modules of tests, and no folder or package."""
    return config.args_source is config.ArgsSource.ARGS and all(
        arg.endswith(".py") or arg.rpartition(".")[2].startswith("test_") for arg in config.args
    )


# -- tests of which only the node id is known: those of other processes --------------------------------------------


@functools.lru_cache(maxsize=1 << 16)  # of the tests of a run, each of which is asked about several times
def case_id(nodeid: str) -> CaseId | None:
    """The case in a test's node id, as ``str`` of a :class:`CaseId` has it; ``None`` when there is none."""
    head, _, tail = nodeid.partition("[")[2].removesuffix("]").partition(":")
    name, _, op = head.rpartition("-")
    backend, *axes = name.split("@")
    found: dict[str, Any] = {}
    for axis in axes:
        if axis in ISAS:
            found["isa"] = axis
        elif axis in MODES:
            found["mode"] = Mode(axis)
        elif counts := re.fullmatch(r"(\d+)(?:/(\d+))?t", axis):
            found |= {"threads": int(counts[1]), "run_threads": int(counts[2] or 0)}
        else:
            return None
    try:
        return CaseId(backend, Problem.parse(f"{op}:{tail}").line, **found) if backend else None
    except ProblemError:
        return None
