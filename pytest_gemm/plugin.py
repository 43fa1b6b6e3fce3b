"""The pytest plugin: options, marker, fixtures and hooks.  Glue only: every decision lives in a lower room."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm import effect, hookspec, records, selection, supervisor, xdist
from pytest_gemm import options as options_module
from pytest_gemm import settings as settings_module
from pytest_gemm.api.registry import Registry, RegistryError
from pytest_gemm.config import CONFIG, GemmConfig
from pytest_gemm.failures import text
from pytest_gemm.isolation import sanitizer
from pytest_gemm.isolation.journal import Diaries, Diary, Words
from pytest_gemm.isolation.limits import Watch
from pytest_gemm.isolation.termination import STATUS, Termination
from pytest_gemm.ledger.use import LedgerUse
from pytest_gemm.outcome import Outcome, Status
from pytest_gemm.problem.axes import LEVELS
from pytest_gemm.run import precompile, progress
from pytest_gemm.run import state as session
from pytest_gemm.run import terminal as terminal_module
from pytest_gemm.run.state import RunState
from pytest_gemm.speed.replay import Replay
from pytest_gemm.storage import cache
from pytest_gemm.text import described, message, printable

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.run.check import GemmCheck
    from pytest_gemm.run.guarded import GuardedJudge

# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD = 50_000

_CONFIG = CONFIG
_SPEED_WORKER = "gemm-speed-worker"  # speed.request.WORKER, which imports msgspec
_STATE = pytest.StashKey[RunState]()
_JUDGED = pytest.StashKey[dict[str, Any]]()
_WATCH = pytest.StashKey[Watch]()
_TERMINATION = pytest.StashKey[Termination]()
_DIARIES = pytest.StashKey[Diaries]()
_STDERR = pytest.StashKey[int]()
_HEALTHY = pytest.StashKey[bool]()
_HARVEST = pytest.StashKey[list[precompile.Harvest]]()
_MEASURED = pytest.StashKey[Any]()  # a list of pytest_gemm.speed.runner.Measured; that room is not imported in vain
_VERDICTS = pytest.StashKey[list[str]]()
_ELSEWHERE = pytest.StashKey[Any]()  # a pytest_gemm.fuzzing.server.Elsewhere; not imported in vain
_CHILD = pytest.StashKey[supervisor.Child]()
_GUARDED = pytest.StashKey[Any]()  # a pytest_gemm.run.guarded.GuardedJudge, likewise
_FUZZED = pytest.StashKey[list[str]]()
_REPLAY = Replay()

MARKER = "gemm(problems, distributions, any_problem): a test over GEMM problems and backends; see pytest_gemm.selection"


# -- start -----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and their ini twins."""
    options_module.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """The extension hook, and what must be around everything that pytest does."""
    pluginmanager.add_hookspecs(hookspec)
    pluginmanager.register(_Supervision(), "gemm-supervision")


class _Supervision:
    """Another process looks on where kernels are judged in this one, see ``supervisor.py``."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, int | None, int | None]:
        """Fork; and hand the status over to the parent when pytest has come to its end."""
        if not (
            _may_judge(config) and settings_module.early(config, "supervise") == "yes" and supervisor.wanted(config)
        ):
            return (yield)
        child = config.stash[_CHILD] = supervisor.start(functools.partial(_explained_without, config))
        try:
            status = yield
        except pytest.UsageError:
            child.finished(pytest.ExitCode.USAGE_ERROR)
            raise
        child.finished(int(status or 0))
        return status


def _may_judge(config: pytest.Config) -> bool:
    """Whether this may be a run of GEMM tests; the run reports how a worker of speed died."""
    if config.pluginmanager.has_plugin(_SPEED_WORKER):
        return False
    files = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    own = any(file.is_relative_to(default_ledger().parent) for file in files)
    return own or xdist.asked_for(config) or bool(config.hook.pytest_gemm_register_backends.get_hookimpls())


def _explained_without(
    config: pytest.Config, outcomes: Sequence[Outcome], words: Words | None, run: Mapping[str, Any]
) -> list[Outcome]:
    """What the ledger says of outcomes, in a process that has read no configuration."""
    ledger = settings_module.ledger(config, default_ledger())
    known = words.environment if words else None
    return session.explain_elsewhere(outcomes, known, ledger, run.get("devices", {}), run.get("threads", 1))[0]


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, object, object]:
    """Answer a misspelt option of ours, once every conftest has declared its own."""
    result = yield
    settings_module.check_names(parser, args)
    return result


@pytest.hookimpl(tryfirst=True)  # before xdist reads its limits
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """A crash is a result; and with ``--gemm-sanitizer`` the run is another process's."""
    if (tool := settings_module.early(config, "sanitizer")) != "none":
        settings_module.check_sanitizer(config)
        given = config.invocation_params
        return sanitizer.run(tool, [str(one) for one in given.args], given.dir)
    xdist.allow_crashes(config)
    return None


@pytest.hookimpl(trylast=True)  # after every conftest that registers a backend
def pytest_configure(config: pytest.Config) -> None:
    """Read the configuration once."""
    config.addinivalue_line("markers", MARKER)
    registry = Registry()
    register_builtin(registry)
    with _usage("pytest_gemm_register_backends"):
        config.hook.pytest_gemm_register_backends(registry=registry)
    settings = settings_module.read(config, registry, _workers(config), default_ledger())
    for backend in registry:
        with _usage(f"configure() of {backend.name}"):
            settings.read_by[backend.name] = effect.read_by(backend, settings.options)
    effect.check_backends(settings)
    config.stash[_CONFIG] = settings
    config.stash[_WATCH] = _watch(config, settings)
    config.stash[_STATE] = RunState(settings, narrowed=_is_narrowed(config, settings))
    if (child := config.stash.get(_CHILD, None)) is not None:
        child.note(
            options={name: effect.rerun_options(settings, name, timed=False) for name in settings.registry.names()},
            root=str(config.rootpath),
            here=str(config.invocation_params.dir),
            threads=settings.threads,
            devices=settings.devices,
            record=str(settings.run_record or ""),
        )
    if not _is_worker(config) and not config.pluginmanager.has_plugin(_SPEED_WORKER):
        try:
            cache.tidy()
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[_STATE].open_record(config.invocation_params.args)
        config.stash[_TERMINATION] = Termination()


@contextlib.contextmanager
def _usage(what: str) -> Iterator[None]:
    """The block calls a user's code at start-up: whatever it raises is a usage error with its place."""
    try:
        yield
    except (KeyboardInterrupt, pytest.UsageError):
        raise
    except RegistryError as error:
        raise pytest.UsageError(f"{what}: {error}") from None
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise pytest.UsageError(
            f"{what} raised {described(error)}\n  {last.filename}:{last.lineno}, in {last.name}"
        ) from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nobody watches any more, and what was written down for this run alone goes."""
    if _TERMINATION in config.stash:
        config.stash[_TERMINATION].close()
    if _WATCH in config.stash:
        if config.stash[_WATCH].diary.stacks is not None:
            faulthandler.disable()  # it writes into the diary
        config.stash[_WATCH].close()
        config.stash[_WATCH].diary.close()
        del config.stash[_WATCH]
    if _STDERR in config.stash:
        os.close(config.stash[_STDERR])
        del config.stash[_STDERR]
    if _DIARIES in config.stash and _CHILD not in config.stash:
        config.stash[_DIARIES].close()
    for judges in (_ELSEWHERE, _GUARDED):
        if judges in config.stash:
            config.stash[judges].close()
            del config.stash[judges]


def _watch(config: pytest.Config, settings: GemmConfig) -> Watch:
    """The watch of this process.  What a worker leaves behind is read by the process that started it."""
    timed = not (config.getoption("usepdb", False) or config.getoption("trace", False))
    limits = (settings.timeout, settings.compile_timeout) if timed else (0.0, 0.0)
    dumps = config.pluginmanager.has_plugin("faulthandler") and not float(config.getini("faulthandler_timeout") or 0)
    child = config.stash.get(_CHILD, None)
    if _is_worker(config) or child is not None:
        given: Mapping[str, Any] = getattr(config, "workerinput", {})  # xdist's
        folder = Path(given["gemm_diaries"]) if "gemm_diaries" in given else None
        folder = folder if child is None else child.diaries.folder
        diary = Diary(folder, given.get("workerid", supervisor.PROCESS), replaceable=given.get("gemm_replaces", False))
        if diary.stacks is not None and dumps:
            faulthandler.enable(file=diary.stacks, all_threads=False)
        return Watch(*limits, diary, stacks=diary.stacks if dumps else None)
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a process may have none
        config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())  # type: ignore[union-attr]  # before pytest captures it
    fence = config.stash.get(_STDERR, None) if dumps else None
    return Watch(*limits, Diary(), last_call=lambda outcome: _last_call(config, outcome), stacks=fence)


def _last_call(config: pytest.Config, outcome: Outcome) -> None:
    """Report a case that has no end from a process that ends with it; the main thread hangs and capture is on."""
    diary, state = config.stash[_WATCH].diary, config.stash[_STATE]
    words, name = diary.words, selection.test_name(diary.words.test)
    judged = [dataclasses.replace(o, test=name) for o in (*diary.outcomes, outcome)]
    explained, use = _explained(config, judged, words)
    state.absorb(map(records.to_record, explained), use.to_dict(), "main")
    state.narrowed = True  # what was not run may be what a ledger entry speaks of
    running: Any = config.pluginmanager.get_plugin("session")
    ids = [item.nodeid for item in running.items]
    behind = len(ids) - 1 - ids.index(words.test) if words.test in ids else 0
    lines = [
        text.failure(explained[-1], _rerun(config, words.test)),
        *supervisor.end_lines("Nothing else ends it", behind),
        "",
        *state.summary(),
        *state.incomplete(),
    ]
    if _STDERR in config.stash:
        os.write(config.stash[_STDERR], ("\n\n" + "\n".join(lines) + "\n").encode())


def _explained(
    config: pytest.Config, outcomes: Sequence[Outcome], words: Words | None
) -> tuple[list[Outcome], LedgerUse]:
    """What the ledger says of outcomes whose process is gone, as ``GemmCheck`` asks it of the others."""
    settings = config.stash[_CONFIG]
    known = words.environment if words else None
    return session.explain_elsewhere(outcomes, known, settings.ledger, settings.devices, settings.threads)


def _rerun(config: pytest.Config, nodeid: str) -> text.Rerun:
    """How to run a test again of which only the id is known."""
    case = selection.split_id(nodeid)
    options = effect.rerun_options(config.stash[_CONFIG], case[0] if case else "", timed=False)
    return selection.rerun(nodeid, config.rootpath, config.invocation_params.dir, options)


def register_builtin(registry: Registry) -> None:
    """The backends that come with the package; their modules import no torch."""
    from pytest_gemm.backends.builtin import BUILTIN

    for backend in BUILTIN:
        registry.add(backend())


def default_ledger() -> Path:
    """The ledger that is shipped with the conformance suite."""
    spec = find_spec("pytest_gemm.conformance")
    assert spec is not None, "the conformance suite is part of the package"
    assert spec.origin is not None
    return Path(spec.origin).parent / "known_failures.toml"


def _is_narrowed(config: pytest.Config, settings: GemmConfig) -> bool:
    """Whether the user asked for less than whole suites."""
    selected = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect", "maxfail"))
    return bool(selected or settings.problems or settings.ops or any("::" in arg for arg in config.args))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _workers(config: pytest.Config) -> int:
    """xdist's workers, who share the cores; 1 without xdist.  The controller knows them by its option."""
    if _is_worker(config):
        return int(config.workerinput["workercount"])  # type: ignore[attr-defined]  # xdist's
    return int(getattr(config.option, "numprocesses", None) or 1)


# -- collection ------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a marked test its cases: every selected backend times every selected problem."""
    marker = metafunc.definition.get_closest_marker("gemm")
    settings = metafunc.config.stash[_CONFIG]
    if "gemm_fuzz" in metafunc.fixturenames:
        names = [backend.name for backend in selection.available(settings)] if settings.fuzz else []
        metafunc.parametrize("gemm_fuzz", names, indirect=True)
    if "gemm_case" not in metafunc.fixturenames:
        return
    if settings.fuzz:
        metafunc.parametrize("gemm_case", [], indirect=True)
        return
    try:
        request = selection.read_marker(marker)
        found = selection.select(request, settings)
    except selection.MarkerError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: {error}", pytrace=False)
    metafunc.parametrize("gemm_case", found, ids=[pick.id for pick in found], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> object | None:
    """With ``--gemm-doctor`` or ``--gemm-fingerprint`` a screen instead of tests."""
    settings = session.config.stash[_CONFIG]
    if not settings.screen:
        return None
    from pytest_gemm.tools import doctor, fingerprint_report

    terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal.ensure_newline()
    screen = doctor.report if settings.doctor else fingerprint_report.report
    session.config.stash[_HEALTHY] = screen(settings, terminal.write_line)
    session.items = []
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Choose what runs; and a timed test counts as a benchmark where ``--benchmark-only`` looks for these."""
    _choose(config, items)
    # The fixture is asked for late, so the tests of a function do not have it among their names by themselves.
    names = {id(found): found for item in items if _timed(item) and "benchmark" not in (found := _names(item))}
    for found in names.values():
        found.append("benchmark")
    try:
        return (yield)
    finally:
        for found in names.values():
            found.remove("benchmark")


def _names(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    return item.fixturenames


def _choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the placeholders of marked tests that no problem was selected for."""
    kept = [item for item in items if not _is_placeholder(item)]
    if config.stash[_CONFIG].fuzz:
        kept = [item for item in kept if "gemm_fuzz" in getattr(item, "fixturenames", ())]
        if items and not kept and selection.available(config.stash[_CONFIG]):
            raise pytest.UsageError(
                "--gemm-fuzz: none of these tests fuzzes; name conformance/test_fuzz.py, "
                "or --pyargs pytest_gemm.conformance where the package is installed"
            )
    if gone := set(items) - set(kept):
        items[:] = kept
        config.hook.pytest_deselected(items=list(gone))
    for item in items:
        if _timed(item) is not None:  # pytest-benchmark reads the clock that plays what was measured elsewhere
            item.add_marker(pytest.mark.benchmark(timer=_REPLAY.clock))
    if _is_worker(config) and (timed_items := [case for case in map(_timed, items) if case is not None]):
        from pytest_gemm.speed import controller

        controller.offer(_exchange(config), timed_items)


def _is_placeholder(item: pytest.Item) -> bool:
    """Whether pytest made it up for a marked test that no problem was selected for."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    params = item.callspec.params
    if "gemm_fuzz" in params and not isinstance(params["gemm_fuzz"], str):
        return True
    return "gemm_case" in params and not isinstance(params["gemm_case"], selection.Pick)


def _timed(item: pytest.Item) -> tuple[str, str, str] | None:
    """Backend, problem line and function of a test whose case is timed, ``None`` of any other."""
    if not isinstance(item, pytest.Function) or "gemm_speed" not in item.fixturenames:
        return None
    pick = _picked(item)
    return (pick.backend, pick.problem.line, item.originalname) if pick is not None else None


def _picked(item: pytest.Item) -> selection.Pick | None:
    """The backend and the problem that a test is for."""
    callspec = getattr(item, "callspec", None)
    pick = callspec.params.get("gemm_case") if callspec is not None else None
    return pick if isinstance(pick, selection.Pick) else None


# -- ahead of the tests ------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Without xdist: compile ahead what the collected tests need, and time.  With it the controller does, see below."""
    config = session.config
    settings = config.stash[_CONFIG]
    if (child := config.stash.get(_CHILD, None)) is not None:
        child.note(collected=len(session.items))
    if _is_worker(config) or settings.screen:
        return
    ids = [item.nodeid for item in session.items]
    timed = [case for case in map(_timed, session.items) if case is not None]
    _check_cases(config, ids, len(timed))
    if not config.option.collectonly:
        _compile_ahead(config, ids)
        _measure(config, timed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """With xdist: the first worker to have collected names all tests.  The others wait, and so does the first."""
    if (child := node.config.stash.get(_CHILD, None)) is not None:
        child.note(collected=len(ids))
    if _MEASURED not in node.config.stash and (folder := node.workerinput.get("gemm_speed")):
        from pytest_gemm.speed import controller

        timed = controller.offered(Path(folder))
        _check_cases(node.config, ids, len(timed))
        _compile_ahead(node.config, ids)
        _measure(node.config, timed)
        controller.share(Path(folder), node.config.stash[_MEASURED])
    else:
        _compile_ahead(node.config, ids)


def _check_cases(config: pytest.Config, ids: Sequence[str], timed: int) -> None:
    """Refuse an option that no collected test heeds, unless tests are missing for a reason that the run gives."""
    if not config.stash[_STATE].missing:
        cases = sum(selection.split_id(one) is not None for one in ids)
        effect.check_cases(config.stash[_CONFIG], tests=len(ids), cases=cases, timed=timed)


def _measure(config: pytest.Config, timed: Sequence[tuple[str, str, str]]) -> None:
    """Have sessions time the cases before the first test asks for them."""
    config.stash[_MEASURED] = []
    settings = config.stash[_CONFIG]
    if not timed or settings.compile_only:
        return
    from pytest_gemm.speed import controller
    from pytest_gemm.speed.request import Project

    whole = not config.stash[_STATE].narrowed and settings.level == LEVELS[-1] and not settings.speed.shapes
    config.stash[_STATE].narrowed = True  # a few shapes do not show that an entry of the ledger is stale
    project = Project.of(config, {f"{backend} {line}": test for backend, line, test in timed})
    cases = [(backend, line) for backend, line, _ in timed]
    display = progress.Display(config.pluginmanager.get_plugin("terminalreporter"))
    config.stash[_MEASURED] = measured = controller.measure(settings, cases, project, display, whole=whole)
    state = config.stash[_STATE]
    state.undecided = any(controller.as_run(made, settings.speed).decided_too_little for made in measured)
    for made in measured:
        state.lose(made.lost)


def _exchange(config: pytest.Config) -> Path:
    """In a worker of xdist: the folder in which the controller leaves what was measured."""
    return Path(config.workerinput["gemm_speed"])  # type: ignore[attr-defined]  # xdist's


def _compile_ahead(config: pytest.Config, ids: Iterable[str]) -> None:
    settings = config.stash[_CONFIG]
    if _HARVEST in config.stash:
        return
    found = (selection.split_id(nodeid) for nodeid in ids)
    cases = [case for case in found if case is not None and case[0] in settings.registry.names()]
    display = progress.Display(config.pluginmanager.get_plugin("terminalreporter"))
    if settings.compile_only:
        for reason in selection.without_part(settings):
            display.line(reason.text)
    config.stash[_HARVEST] = precompile.run(settings, cases, display)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With ``--gemm-compile-only`` nothing runs."""
    return True if session.config.stash[_CONFIG].compile_only else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker that ends says what it had to compile itself."""
    counts = getattr(node, "workeroutput", {}).get("gemm_kernels", {})
    for backend in node.config.stash[_CONFIG].backends:
        if isinstance(backend, precompile.Compiling):
            backend.store.counts.add(counts.get(backend.name, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``-n`` and a GEMM option given: keep what shares an artifact or a reference on one worker."""
    return xdist.scheduler(config, log, config.stash.get(_DIARIES, None))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Several GPUs are shared out among the workers; what they leave behind when they die has a place."""
    child = config.stash.get(_CHILD, None)
    config.stash[_DIARIES] = Diaries() if child is None else child.diaries
    note = xdist.pin(config, specs)
    if note:
        config.stash[_STATE].notes.append(note)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of this machine where to keep its diary, and whether another one would take its test over."""
    if node.gateway.spec.popen and _DIARIES in node.config.stash:
        node.workerinput["gemm_diaries"] = node.workerinput["gemm_speed"] = str(node.config.stash[_DIARIES].folder)
        node.workerinput["gemm_replaces"] = xdist.replaces_workers(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_enter_pdb(config: pytest.Config) -> None:
    """Somebody looks around in a case: that has no limit."""
    config.stash[_WATCH].lift()


# -- one test --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gemm_config(pytestconfig: pytest.Config) -> GemmConfig:
    """What the run was asked for, as ``config.GemmConfig``."""
    return pytestconfig.stash[_CONFIG]


@pytest.fixture(scope="session")
def _gemm_judge(pytestconfig: pytest.Config, gemm_config: GemmConfig) -> Iterator[Judge]:
    """One judge a process, so that backends share operands and references."""
    import torch

    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.run.state import eager_refusal

    torch.set_num_threads(gemm_config.threads)
    # What is loaded by now stays: torch and a compiler are millions of objects that every full collection would visit.
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    yield Judge(eager_refusal(gemm_config.ledger), pytestconfig.stash[_WATCH], gemm_config.reference)
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture
def gemm_case(request: pytest.FixtureRequest, gemm_config: GemmConfig) -> Case:
    """The ``judge.Case`` of a test that carries the ``gemm`` marker."""
    pick = getattr(request, "param", None)
    if pick is None:
        pytest.fail("gemm_case needs the marker: @pytest.mark.gemm(problems=[...])", pytrace=False)
    try:
        return selection.case_of(pick, gemm_config)
    except selection.MarkerError as error:
        pytest.fail(f"{request.node.nodeid}: {error}", pytrace=False)


@pytest.fixture(scope="session")
def _gemm_guarded(pytestconfig: pytest.Config) -> GuardedJudge | None:
    """With ``--gemm-guard=pages``: who judges in a process that may die."""
    return pytestconfig.stash.get(_GUARDED, None)


@pytest.fixture
def gemm_check(
    request: pytest.FixtureRequest, gemm_config: GemmConfig, _gemm_judge: Judge, _gemm_guarded: GuardedJudge | None
) -> Iterator[GemmCheck]:
    """``gemm_check(case)`` judges a case and ends the test as its outcome says."""
    from pytest_gemm.run.check import GemmCheck

    node: pytest.Function = request.node
    watch = node.config.stash[_WATCH]
    watch.diary.begin(node.nodeid)
    check = GemmCheck(
        *(gemm_config, _gemm_judge, watch.diary, node.originalname, _target(node), _gemm_guarded),
        timed="gemm_speed" in node.fixturenames,
    )
    node.stash[_JUDGED] = check.judged
    yield check
    watch.rest()
    watch.diary.end()


@pytest.fixture
def gemm_speed(
    request: pytest.FixtureRequest,
    gemm_config: GemmConfig,
    gemm_check: GemmCheck,
) -> Callable[[Case], object]:
    """``gemm_speed(case)`` ends the test as the gate judges what fresh processes measured of the case.

    The readings appear as the rounds of pytest-benchmark's ``benchmark``.
    """
    from pytest_gemm.speed import controller
    from pytest_gemm.speed.check import SpeedCheck

    config = request.config
    if _is_worker(config) and _MEASURED not in config.stash:
        config.stash[_MEASURED] = controller.shared(_exchange(config))
    # Asked for when there are rounds: a benchmark that is asked for and not used is an error to pytest-benchmark.
    benchmark = functools.partial(request.getfixturevalue, "benchmark")
    check = SpeedCheck(gemm_config, gemm_check, config.stash[_MEASURED], benchmark, _REPLAY)
    request.node.stash[_VERDICTS] = check.verdicts
    return check


@pytest.fixture
def gemm_fuzz(request: pytest.FixtureRequest, gemm_config: GemmConfig) -> Callable[[], None]:
    """``gemm_fuzz()`` fuzzes one backend for its share of ``--gemm-fuzz``; the test fails with what is new."""
    from pytest_gemm.fuzzing.check import FuzzCheck

    config = request.config
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    uncaptured = capture.global_and_fixture_disabled if capture else contextlib.nullcontext
    display = progress.Display(config.pluginmanager.get_plugin("terminalreporter"))
    check = FuzzCheck(gemm_config, config.stash[_ELSEWHERE], display, uncaptured, config.invocation_params.dir)
    request.node.stash[_JUDGED] = check.judged
    share = gemm_config.fuzz / len(selection.available(gemm_config))

    def fuzz() -> None:
        try:
            check(gemm_config.registry[request.param], share)
        finally:
            config.stash.setdefault(_FUZZED, []).extend(check.lines)

    return fuzz


def _target(item: pytest.Function) -> str:
    """How to name this test on pytest's command line."""
    path = item.path
    here = item.config.invocation_params.dir
    name = item.originalname
    if path.is_relative_to(here):
        return f"{path.relative_to(here).as_posix()}::{name}"
    return (
        f"--pyargs {item.module.__name__}::{name}"
        if item.module.__name__.startswith("pytest_gemm.")
        else f"{path}::{name}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what was judged to the report: attributes of plain data travel through xdist."""
    made: Any = yield  # pytest keeps and ships extra attributes
    if call.when == "setup" and (case := _picked(item)) is not None:
        made.gemm_asked = case.backend
    judged = item.stash.get(_JUDGED, None)
    if judged is not None and made.failed:
        shown = made.longreprtext
        if (said := printable(shown, len(shown))) != shown:  # a worker could not send it
            made.longrepr = said
    if call.when == "call" and judged is not None:
        process, verdicts = os.environ.get("PYTEST_XDIST_WORKER", "main"), item.stash.get(_VERDICTS, [])
        made.gemm = {**judged, "process": process, "verdicts": verdicts}
        own = [(name, value) for name, value in item.user_properties if not name.startswith("gemm_")]
        # In place, for it is read again for the teardown's report; and without those of an attempt before this one.
        item.user_properties[:] = [*own, *records.junit_properties(judged["outcomes"])]
    return made  # type: ignore[no-any-return]  # a report


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """A test that ended with its worker, and that no other one goes on with: its last case crashed."""
    made: Any = report  # pytest keeps and ships extra attributes
    config: pytest.Config = made.node.config
    diaries, process = config.stash.get(_DIARIES, None), made.node.gateway.id
    words = diaries.words(process) if diaries else None
    earlier = diaries.outcomes(crashitem) if diaries else ()
    outcomes = selection.crashed(crashitem, words, earlier, xdist.exit_status(made.node))
    if not outcomes:
        return
    judged, use = _explained(config, outcomes, words)
    made.gemm = {"outcomes": [*map(records.to_record, judged)], "use": use.to_dict(), "process": process}
    made.when = "call"
    failed = [o for o in judged if o.status.is_failure]
    if failed:
        made.longrepr = "\n".join(text.failure(o, _rerun(config, crashitem)) for o in failed)
    else:
        known = next(o for o in judged if o.known_failure)
        made.outcome, made.wasxfail = "skipped", f"{known.known_failure}: {known.reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Words of our own for what pytest would call skipped and xfailed."""
    judged = getattr(report, "gemm", None)
    if judged is None or report.when != "call" or not (report.passed or report.skipped):
        return None
    if report.passed:
        verdicts = judged.get("verdicts", ())
        words = {"undecided": ("undecided", "?", "UNDECIDED"), "no-baseline": ("no-baseline", "b", "NO-BASELINE")}
        return next((words[verdict] for verdict in words if verdict in verdicts), None)
    ended = {record["status"] for record in judged["outcomes"]}
    xfailed = hasattr(report, "wasxfail")
    own = [Status.KNOWN_FAILURE] if xfailed else [Status.NOT_RUN, Status.PRUNED, Status.UNSUPPORTED]
    found = next((str(status) for status in own if str(status) in ended), "")  # "": a skip of the user's
    return (found, found[0], found.upper()) if found else None


@pytest.hookimpl(tryfirst=True)  # before xdist sends it
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Make the words of a warning printable: a kernel may have said them, and a worker has to send them."""
    said = message(warning_message.message) if isinstance(warning_message.message, Warning) else ""
    if said and said != str(warning_message.message):
        warning_message.message = pytest.PytestWarning(said)


# -- end -------------------------------------------------------------------------------------------


class _Collector:
    """Gathers reports in the process that writes the summary; not registered in xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Let the parent know which test runs."""
        if (child := self._config.stash.get(_CHILD, None)) is not None:
            child.note(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test judged."""
        state = self._config.stash[_STATE]
        if (child := self._config.stash.get(_CHILD, None)) is not None:
            child.noted(report)
        if asked := getattr(report, "gemm_asked", ""):
            state.asked.add(asked)
        judged = getattr(report, "gemm", None)
        if judged is not None and str(report.outcome) == "rerun":  # pytest-rerunfailures: another attempt follows
            state.reruns += 1
        elif judged is not None:
            state.absorb(judged["outcomes"], judged["use"], judged["process"])
            state.lose(judged.get("lost", {}))
            if diaries := self._config.stash.get(_DIARIES, None):
                diaries.unfinished.discard(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start gathering.  Who is missing is asked here: with xdist this process collects nothing."""
    settings = session.config.stash[_CONFIG]
    if settings.fuzz and not settings.screen and not session.config.option.collectonly:
        from pytest_gemm.fuzzing.server import Elsewhere

        session.config.stash[_STATE].narrowed = True  # a drawn case does not show that an entry of the ledger is stale
        session.config.stash[_ELSEWHERE] = Elsewhere(settings)  # before a backend is asked whether it is available
    if settings.guard == "pages" and _judges_here(session.config):
        from pytest_gemm.run.guarded import GuardedJudge

        session.config.stash[_GUARDED] = GuardedJudge(settings)  # likewise
    if not _is_worker(session.config) and not settings.screen:
        session.config.stash[_STATE].missing = selection.missing(session.config.stash[_CONFIG])
        session.config.pluginmanager.register(_Collector(session.config), "gemm-collector")


def _judges_here(config: pytest.Config) -> bool:
    """Whether tests of cases run in this process: it is no controller of workers and no screen."""
    settings = config.stash[_CONFIG]
    runs = not settings.screen and not config.option.collectonly
    return runs and (_is_worker(config) or str(config.getoption("dist", "no")) == "no")


def pytest_report_header(config: pytest.Config) -> str:
    """What was selected."""
    settings = config.stash[_CONFIG]
    threads = settings.thread_axis or (settings.threads,)
    return terminal_module.header([b.name for b in settings.backends], settings.level, settings.seed, threads)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A backend that is missing, or a stale ledger entry, turns a green run red."""
    state = session.config.stash[_STATE]
    compiling = [b for b in session.config.stash[_CONFIG].backends if isinstance(b, precompile.Compiling)]
    harvest = session.config.stash.get(_HARVEST, [])
    if _is_worker(session.config):
        counts = {backend.name: dataclasses.asdict(backend.store.counts) for backend in compiling}
        session.config.workeroutput["gemm_kernels"] = counts  # type: ignore[attr-defined]  # xdist's
    else:
        state.notes += precompile.notes(harvest, {backend.name: backend.store.counts for backend in compiling})
        if session.config.stash[_TERMINATION].received:
            session.exitstatus = STATUS
        _absorb_unfinished(session.config)
        state.close_record()
        if (matrix := session.config.stash[_CONFIG].coverage) is not None:
            from pytest_gemm.tools import coverage  # with torch, for what Inductor has registered

            with state.writing("--gemm-coverage", matrix):
                coverage.write(matrix, state.outcomes)
    if session.config.stash[_CONFIG].compile_only and exitstatus == pytest.ExitCode.OK:
        complete = all(one.complete for one in harvest)
        session.exitstatus = exitstatus = pytest.ExitCode.OK if complete else pytest.ExitCode.TESTS_FAILED
    if session.config.stash[_CONFIG].screen:
        healthy = session.config.stash.get(_HEALTHY, False)
        session.exitstatus = pytest.ExitCode.OK if healthy else pytest.ExitCode.TESTS_FAILED
        return
    if (
        not _is_worker(session.config)
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        and state.is_red
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _absorb_unfinished(config: pytest.Config) -> None:
    """Take in the tests in which a process died, where the run has ended before another one was through with them."""
    diaries = config.stash.get(_DIARIES, None)
    if diaries is None:
        return
    for test in sorted(diaries.unfinished):
        judged, use = _explained(config, diaries.outcomes(test), None)
        config.stash[_STATE].absorb(map(records.to_record, judged), use.to_dict(), "main")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The backend x op table and what belongs to it."""
    if config.stash.get(_MEASURED, None):
        _show_speed(config, terminalreporter)
    state = config.stash[_STATE]
    lines = [line for harvest in config.stash.get(_HARVEST, []) for line in precompile.table(harvest)]
    lines = lines if config.stash[_CONFIG].compile_only else []
    if config.stash[_CONFIG].fuzz:
        fuzzed: list[str] = config.stash.get(_FUZZED, [])
        lines += fuzzed
        lines += [f"{name} cannot run: {reason}" for name, reason in state.missing.items()]
    elif not config.stash.get(_MEASURED, None) or any(o.tier or o.status is not Status.PASSED for o in state.outcomes):
        lines += state.summary()
    lines += state.incomplete()
    if lines:
        terminalreporter.section("GEMM backends")
        for line in lines:
            terminalreporter.write_line(line)
    running: Any = config.pluginmanager.get_plugin("session")
    if state.lost and running.exitstatus == pytest.ExitCode.OK:  # a page that was written just now, for instance
        running.exitstatus = pytest.ExitCode.TESTS_FAILED


def _show_speed(config: pytest.Config, reporter: Any) -> None:
    """The table of each device, and the pages that were asked for."""
    from pytest_gemm.speed import controller
    from pytest_gemm.speed.report import markdown, page
    from pytest_gemm.speed.report import terminal as terminal_module

    settings, state = config.stash[_CONFIG], config.stash[_STATE]
    runs = [controller.as_run(made, settings.speed) for made in config.stash[_MEASURED] if made.sessions]
    for run in runs:
        reporter.section(f"GEMM speed on {run.hardware}")
        for line in terminal_module.table(run):
            reporter.write_line(line)
    title = f"GEMM speed of {', '.join(backend.name for backend in settings.backends)}"
    if settings.speed.summary is not None:
        path = settings.speed.summary
        with state.writing("--gemm-summary", path), path.open("a", encoding="utf-8") as file:
            file.writelines(markdown.markdown(run, title) + "\n" for run in runs)
    if settings.speed.report is not None and runs:
        for run in runs:
            path = settings.speed.report
            if len(runs) > 1:  # a page is about one machine
                path = path.with_stem(f"{path.stem}-{run.hardware}")
            with state.writing("--gemm-report", path):
                path.write_text(page.page(run, title), encoding="utf-8")
                reporter.write_line(f"speed report: {path}")
