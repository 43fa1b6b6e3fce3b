"""Settings of the project's own tests."""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asked_once  # noqa: F401
import known_cpu
import pytest
import warm_processes
from hypothesis import settings
from warm_processes import Programs

import pytest_gemm.plugin.hooks  # noqa: F401  # before an inner run loads it: pytester forgets what is imported later

# Modules ask for a device while they are imported; the driver, started by that, is lost to the forks of tests/worker.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# A deadline would time the examples, and machines that run tests are shared.
settings.register_profile("pytest-gemm", deadline=None)
settings.load_profile("pytest-gemm")


_PROGRAMS = pytest.StashKey[Programs]()
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# Files and a folder with something that takes long to make: the tests of each share a worker that makes it once.  They
# come first, those of many tests before others: test_mutants forks, which costs less as long as a worker is small.
_ONE_WORKER = frozenset(
    {"conformance", "test_commands", "test_compile_ahead", "test_mutants", "test_packaging", "test_speed_page"}
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--studies``."""
    parser.addoption("--studies", action="store_true", help="run the studies, too, which the nightly workflow runs")


@pytest.hookimpl(trylast=True)  # of those that are selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip studies, and keep what is loaded by now out of all garbage collections."""
    shared = _shared(config)
    if shared and any({"programs", "pytester"} & {*getattr(item, "fixturenames", ())} for item in items):
        shared.wake()
    for item in items:
        if item.get_closest_marker("study") and not config.getoption("--studies", default=False):
            item.add_marker(pytest.mark.skip(reason="a study: run it with --studies"))
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Each test with all of its parameters is a unit of work, and so are those files.

    A mark ``xdist_group`` would be lost: xdist 3.8 adds it to an attribute that pytest 9.2 has no more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is typed as Any where it is not installed
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return next((one for one in (path.parent.name, path.stem) if one in _ONE_WORKER), nodeid.partition("[")[0])

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def a_worker_s_share_of_the_cores() -> None:
    """One thread for each of several workers: threads that wait for one another on shared cores cost five times more.

    Before each test, for an inner run in this process takes as many as it has cores.
    """
    if _WORKERS > 1:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def inner_sessions_are_like_a_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session that a test starts believes that it is a worker of the outer one, or that a CI reads it.

    pytest writes longer summaries for a CI, and what a worker inherits would name the outer worker.  The cache is in
    the home that a test has.
    """
    outer = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "XDG_CACHE_HOME")
    for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", *outer):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unexplained(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search for the causes of failures, for tests that ask for none: it takes longer than the judgement."""
    from pytest_gemm.judging import explain, verdict

    monkeypatch.setattr(verdict, "cause_of", lambda *_: explain.NOTHING)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for one another on a shared machine cost more than small products."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One server of warm processes for all workers."""
    if _PROGRAMS not in node.config.stash:
        shared = contextlib.ExitStack()
        node.config.add_cleanup(shared.close)
        folder = Path(shared.enter_context(tempfile.TemporaryDirectory(prefix="warm-")))
        node.config.stash[_PROGRAMS] = shared.enter_context(warm_processes.programs(folder / "bin"))
    node.workerinput["programs"] = str(node.config.stash[_PROGRAMS].folder)


def _shared(config: pytest.Config) -> Programs | None:
    """Those of the controller, in a worker."""
    folder = getattr(config, "workerinput", {}).get("programs")
    return Programs(Path(folder)) if folder else None


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """``pytest``, ``pytest-gemm`` and ``python -m`` that begin where PyTorch is imported."""
    if shared := _shared(request.config):
        yield shared
        return
    with warm_processes.programs(tmp_path_factory.mktemp("warm") / "bin") as found:
        yield found


@pytest.fixture(scope="session")
def whole_libraries() -> None:
    """Loaded before pytester remembers what is."""
    importlib.import_module("whole_libraries")


@pytest.fixture
def pytester(
    whole_libraries: None,  # noqa: ARG001  # before the next one
    pytester: pytest.Pytester,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> pytest.Pytester:
    """pytest's own, whose ``runpytest_subprocess`` begins where PyTorch is imported.

    The runs leave alone what takes long to begin with: Hypothesis, and pytest-benchmark where nothing is timed.
    """
    benchmark = "" if request.path.parent.name == "speed" else "-p no:benchmark"  # it asks git and hg for a name
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-p no:hypothesispytest {benchmark}")

    def command() -> tuple[str, ...]:
        known_cpu.copy_to(known_cpu.of_home())  # in the home that pytester has made
        return request.getfixturevalue("programs").python, "-m", "pytest"

    monkeypatch.setattr(pytester, "_getpytestargs", command)
    return pytester


@pytest.fixture
def warm_workers(
    pytester: pytest.Pytester,  # noqa: ARG001  # it sets PYTEST_ADDOPTS, before
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers of inner runs begin where PyTorch is imported, too."""
    monkeypatch.setattr(sys, "executable", programs.python)


@pytest.fixture
def warm_sessions(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that time begin where PyTorch is imported: for tests to which the times do not matter."""

    class Session(subprocess.Popen):  # type: ignore[type-arg]  # of bytes
        def __init__(self, args: Any, **how: Any) -> None:
            if isinstance(args, list) and args[0] == sys.executable and "pytest_gemm.speed.worker" in args:
                args = [programs.python, *args[1:]]
            super().__init__(args, **how)

    monkeypatch.setattr(subprocess, "Popen", Session)
