"""The pytest plugin: options, the marker and the fixtures.

pytest loads this module in every run, also in those that test no GEMM.  So it imports next to nothing: the hooks are in
``hooks.py``, which is imported where an option or ini key is given, a backend is registered, one of the suites is
named, or a test that uses a fixture of these is collected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gemm.config import options
from pytest_gemm.machine import processor
from pytest_gemm.plugin import hookspec

if TYPE_CHECKING:
    from pytest_gemm.config.config import GemmConfig
    from pytest_gemm.judging.case import Case
    from pytest_gemm.judging.judge import Judge
    from pytest_gemm.plugin.hooks import GemmRun
    from pytest_gemm.run.check import GemmCheck

# Name of the plugin that holds the hooks.
RUN = "gemm-run"
_STARTED = pytest.StashKey[bool]()
MARKER = "gemm(problems, distributions, any_problem): a test over GEMM problems and backends"
_FIXTURES = frozenset({"gemm_case", "gemm_check", "gemm_speed", "gemm_fuzz", "gemm_config"})
# A test's parameter that looks like a case, "aten-mm:f32:nn:8x8x8".
_CASE = re.compile(r"\[[\w@-]+-\w+:[\w-]+:\w\w:")


# -- start -------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    options.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that register backends and ops."""
    pluginmanager.add_hookspecs(hookspec)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Declare the ini keys; answer a misspelt option, once every conftest has declared its own."""
    if not early_config.known_args_namespace.help:
        options.add_ini_keys(parser)
    if is_given := any(arg.startswith("--gemm") for arg in args):
        processor.wait_passively()  # a conftest may import torch
    result = yield
    if is_given:
        from pytest_gemm.config import values

        values.check_names(parser, args)
    return result


def is_used(config: pytest.Config) -> bool:
    """Whether this is a run of GEMM tests, as far as can be known before the collection."""
    if config.pluginmanager.has_plugin("gemm-speed-worker") or options.is_any_given(config):
        return True
    hooks = config.hook.pytest_gemm_register_backends, config.hook.pytest_gemm_register_ops
    if any(hook.get_hookimpls() for hook in hooks):
        return True
    files = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    return any(file.is_relative_to(suite.resolve()) for suite in options.suites() for file in files)


@pytest.hookimpl(trylast=True)  # after every conftest that registers a backend
def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; read the configuration where it is needed."""
    config.addinivalue_line("markers", MARKER)
    if not config.option.help and is_used(config):
        run_of(config)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember it for hooks that come later."""
    session.config.stash[_STARTED] = True


def run_of(config: pytest.Config) -> GemmRun:
    """The plugin that holds the hooks, which is made when it is first asked for."""
    found: GemmRun | None = config.pluginmanager.get_plugin(RUN)
    if found is None:
        from pytest_gemm.plugin.hooks import GemmRun

        found = GemmRun(config)
        config.pluginmanager.register(found, RUN)
        if config.stash.get(_STARTED, False):
            found.pytest_sessionstart()
            found.pytest_collection()
    return found


# -- where a GEMM test is met --------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a marked test its cases: every selected backend times every selected problem."""
    if _FIXTURES.intersection(metafunc.fixturenames):
        run_of(metafunc.config).generate_tests(metafunc)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """With xdist the controller knows the names of the tests only."""
    if node.config.pluginmanager.has_plugin(RUN) or any(map(_CASE.search, ids)):
        run_of(node.config).collected_by(ids)


# -- fixtures ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gemm_config(pytestconfig: pytest.Config) -> GemmConfig:
    """What the run was asked for, as ``config.GemmConfig``."""
    return run_of(pytestconfig).settings


@pytest.fixture(scope="session")
def _gemm_judge(pytestconfig: pytest.Config) -> Iterator[Judge]:
    """One judge a process, so that backends share operands and references."""
    with run_of(pytestconfig).judge() as judge:
        yield judge


@pytest.fixture
def gemm_case(request: pytest.FixtureRequest) -> Case:
    """The ``judging.case.Case`` of a test that carries the ``gemm`` marker."""
    return run_of(request.config).case(request)


@pytest.fixture
def gemm_check(request: pytest.FixtureRequest, _gemm_judge: Judge) -> Iterator[GemmCheck]:
    """``gemm_check(case)`` judges a case and ends the test as its outcome says."""
    with run_of(request.config).check(request.node, _gemm_judge) as check:
        yield check


@pytest.fixture
def gemm_speed(request: pytest.FixtureRequest, gemm_check: GemmCheck) -> Callable[[Case], object]:
    """``gemm_speed(case)`` ends the test as the gate judges what fresh processes measured of the case.

    The readings appear as the rounds of pytest-benchmark's ``benchmark``.
    """
    return run_of(request.config).speed_check(request, gemm_check)


@pytest.fixture
def gemm_fuzz(request: pytest.FixtureRequest) -> Callable[[], None]:
    """``gemm_fuzz()`` fuzzes one backend for its share of ``--gemm-fuzz``; the test fails with what is new."""
    return run_of(request.config).fuzz_check(request)
