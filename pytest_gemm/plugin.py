"""The pytest plugin: options, marker, fixtures and hooks.  Glue only: every decision lives in a lower room."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm import config as gemm_config_room
from pytest_gemm import hookspec, selection
from pytest_gemm import report as text
from pytest_gemm.backend import Registry, RegistryError
from pytest_gemm.config import GemmConfig
from pytest_gemm.session import RunState

if TYPE_CHECKING:
    from pytest_gemm.check import GemmCheck
    from pytest_gemm.judge import Case, Judge

# Allocations between two collections of young objects; a compile makes hundreds of thousands of short-lived ones.
_GC_THRESHOLD = 50_000

_CONFIG = pytest.StashKey[GemmConfig]()
_STATE = pytest.StashKey[RunState]()
_JUDGED = pytest.StashKey[dict[str, Any]]()

MARKER = "gemm(problems, fillings, any_problem): a test over GEMM problems and backends; see pytest_gemm.selection"


# -- start -----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and their ini twins."""
    gemm_config_room.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """The extension hook."""
    pluginmanager.add_hookspecs(hookspec)


@pytest.hookimpl(tryfirst=True)  # before xdist reads its limits
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A crash is a result."""
    from pytest_gemm.distribution import allow_crashes

    allow_crashes(config)


@pytest.hookimpl(trylast=True)  # after every conftest that registers a backend
def pytest_configure(config: pytest.Config) -> None:
    """Read the configuration once."""
    config.addinivalue_line("markers", MARKER)
    registry = Registry()
    register_builtin(registry)
    try:
        config.hook.pytest_gemm_register_backends(registry=registry)
    except RegistryError as error:
        raise pytest.UsageError(f"pytest_gemm_register_backends: {error}") from None
    settings = gemm_config_room.read(config, registry, _workers(config), default_ledger())
    config.stash[_CONFIG] = settings
    config.stash[_STATE] = RunState(settings, narrowed=_is_narrowed(config, settings))
    if not _is_worker(config):
        config.stash[_STATE].open_record()


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
    if "gemm_case" not in metafunc.fixturenames:
        return
    settings = metafunc.config.stash[_CONFIG]
    try:
        request = selection.read_marker(marker)
        found = selection.select(request, settings)
    except selection.MarkerError as error:
        pytest.fail(f"{metafunc.definition.nodeid}: {error}", pytrace=False)
    metafunc.parametrize("gemm_case", found, ids=[pick.id for pick in found], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out the placeholders of marked tests that no problem was selected for."""
    empty = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and "gemm_case" in item.callspec.params
        and not isinstance(item.callspec.params["gemm_case"], selection.Pick)
    ]
    if empty:
        gone = set(empty)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=empty)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``-n`` and a GEMM option given: keep what shares an artifact or a reference on one worker."""
    from pytest_gemm.distribution import scheduler

    return scheduler(config, log)


# -- one test --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gemm_config(pytestconfig: pytest.Config) -> GemmConfig:
    """What the run was asked for, as :class:`pytest_gemm.config.GemmConfig`."""
    return pytestconfig.stash[_CONFIG]


@pytest.fixture(scope="session")
def _gemm_judge(gemm_config: GemmConfig) -> Iterator[Judge]:
    """One judge a process, so that backends share operands and references."""
    import torch

    from pytest_gemm.judge import Judge
    from pytest_gemm.session import eager_is_safe

    torch.set_num_threads(gemm_config.threads)
    # What is loaded by now stays: torch and a compiler are millions of objects that every full collection would visit.
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *before[1:])
    yield Judge(may_run_eager=eager_is_safe(gemm_config.ledger))
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture
def gemm_case(request: pytest.FixtureRequest, gemm_config: GemmConfig) -> Case:
    """The :class:`pytest_gemm.judge.Case` of a test that carries the ``gemm`` marker."""
    pick = getattr(request, "param", None)
    if pick is None:
        pytest.fail("gemm_case needs the marker: @pytest.mark.gemm(problems=[...])", pytrace=False)
    return selection.case_of(pick, gemm_config)


@pytest.fixture
def gemm_check(request: pytest.FixtureRequest, gemm_config: GemmConfig, _gemm_judge: Judge) -> GemmCheck:
    """``gemm_check(case)`` judges a case and ends the test as its outcome says."""
    from pytest_gemm.check import GemmCheck

    node: pytest.Function = request.node
    check = GemmCheck(gemm_config, _gemm_judge, node.originalname, _target(node))
    node.stash[_JUDGED] = check.judged
    return check


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
    made = yield
    judged = item.stash.get(_JUDGED, None)
    if call.when == "call" and judged is not None:
        made.gemm = {**judged, "process": os.environ.get("PYTEST_XDIST_WORKER", "main")}  # type: ignore[attr-defined]  # pytest keeps and ships extra attributes
        item.user_properties += text.junit_properties(judged["outcomes"])  # read again for the teardown's report
    return made


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """A worker that a kernel killed: its case crashed, and xdist starts another worker for the rest."""
    record = selection.crash_record(crashitem)
    if record is not None:
        report.gemm = {"outcomes": [record], "use": {}, "process": "crashed"}  # type: ignore[attr-defined]  # as above


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Words of our own for what pytest would call skipped and xfailed."""
    judged = getattr(report, "gemm", None)
    if judged is None or report.when != "call" or not report.skipped:
        return None
    if hasattr(report, "wasxfail"):
        return "known-failure", "k", "KNOWN-FAILURE"
    return "unsupported", "u", "UNSUPPORTED"


# -- end -------------------------------------------------------------------------------------------


class _Collector:
    """Gathers reports in the process that writes the summary; not registered in xdist's workers."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test judged."""
        judged = getattr(report, "gemm", None)
        if judged is not None:
            self._state.absorb(judged["outcomes"], judged["use"], judged["process"])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start gathering.  Who is missing is asked here: with xdist this process collects nothing."""
    if not _is_worker(session.config):
        session.config.stash[_STATE].missing = selection.missing(session.config.stash[_CONFIG])
        session.config.pluginmanager.register(_Collector(session.config.stash[_STATE]), "gemm-collector")


def pytest_report_header(config: pytest.Config) -> str:
    """What was selected."""
    settings = config.stash[_CONFIG]
    return text.header([b.name for b in settings.backends], settings.level, settings.seed, settings.threads)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A backend that is missing, or a stale ledger entry, turns a green run red."""
    state = session.config.stash[_STATE]
    if (
        not _is_worker(session.config)
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        and state.is_red
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The backend x op table and what belongs to it."""
    state = config.stash[_STATE]
    lines = state.summary()
    if lines:
        terminalreporter.section("GEMM backends")
        for line in lines:
            terminalreporter.write_line(line)
