"""A confined kernel: what it tries outside of its folder fails, and it computes all the same."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from oracle import judged

import pytest_gemm
from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.tools import cli
from pytest_gemm.worker import confinement
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(confinement.lacks()), reason=f"no confinement here: {confinement.lacks()}"),
]
TARGET = Path(tempfile.gettempdir()) / f"confined-{os.getpid()}"
JUDGE = os.getpid()
LIBC = ctypes.CDLL(None, use_errno=True)


def _memory() -> None:
    with open(f"/proc/{JUDGE}/mem", "r+b"):
        pass


@pytest.fixture(scope="module", autouse=True)
def _listening() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{TARGET}")
        listener.listen()
        yield


def _called(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def _connect() -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(f"\0{TARGET}")


TRIES: dict[str, Callable[[], object]] = {
    "a file": lambda: TARGET.write_text("x"),
    "a file of the judge": lambda: Path(__file__).open("a").close(),
    "removal": lambda: os.unlink(__file__),
    "a folder": lambda: os.mkdir(f"{TARGET}-folder"),
    "the network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "datagrams": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close(),
    "a signal": lambda: os.kill(JUDGE, signal.SIGCONT),
    "a signal to its parent": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "memory of the judge": _memory,
    "limits of the judge": lambda: resource.prlimit(
        JUDGE, resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE)
    ),
    "priority of the judge": lambda: os.setpriority(os.PRIO_PROCESS, JUDGE, os.getpriority(os.PRIO_PROCESS, JUDGE)),
    "priority of the user": lambda: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0)),
    "a socket of others": _connect,
    "a socket without connections": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).close(),
    "a pair of these": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "shared memory": lambda: _called("shmget", 0, 4096, 0o600),
    "semaphores": lambda: _called("semget", 0, 1, 0o600),
    "a queue": lambda: _called("msgget", 0, 0o600),
    "a queue by name": lambda: _called("mq_open", f"/{TARGET.name}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None),
    "a key": lambda: _called("syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -4, 0),
}


def trying(what: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        try:
            TRIES[what]()
        except PermissionError:
            with tempfile.NamedTemporaryFile() as own:
                own.write(b"x")
            return a @ b
        return torch.zeros_like(a @ b)

    return kernel


@pytest.mark.parametrize("confined", [True, False])
def test_a_confined_kernel_has_no_rights_outside_of_its_folder(confined: bool) -> None:
    backends = {
        name: CallableBackend(name, trying(name), frozenset({"f32"}), True, None, True)
        for name in TRIES
        if confined or name in {"the network", "a signal"}  # what does no harm
    }
    keeper = Keeper(dict(backends), 1, confined=confined)
    workers = Workers(keeper, (10.0, 60.0))
    expected = Status.PASSED if confined else Status.INCORRECT
    try:
        for backend in backends.values():
            (outcome,) = judged(backend, "mm:f32:nn:9x16x8", "int-2", judge=Judge(workers=workers))
            assert outcome.status is expected, backend.name
    finally:
        workers.close()
        keeper.close()
    assert not TARGET.exists()


def test_a_confined_kernel_binds_its_own_thread_alone() -> None:
    def binds(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        os.sched_setscheduler(JUDGE, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(JUDGE, cores[:1])
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(0, cores[:1])
        is_own = os.sched_getscheduler(0) == os.SCHED_BATCH and [*os.sched_getaffinity(0)] == cores[:1]
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)
        return a @ b * is_own

    cores = [*os.sched_getaffinity(0)]
    backend = CallableBackend("binds", binds, frozenset({"f32"}), True, None, True)
    keeper = Keeper({"binds": backend}, 1, confined=True)
    with contextlib.closing(keeper), contextlib.closing(Workers(keeper, (10.0, 60.0))) as workers:
        (outcome,) = judged(backend, "mm:f32:nn:9x16x8", "int-2", judge=Judge(workers=workers))
    now = os.sched_getscheduler(0), [*os.sched_getaffinity(0)]
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.sched_setaffinity(0, cores)
    assert (outcome.status, *now) == (Status.PASSED, os.SCHED_OTHER, cores)


def test_its_folder_goes_with_a_judge_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    judge = os.fork()
    if judge == 0:
        with contextlib.suppress(BaseException):
            backend = CallableBackend("right", torch.matmul, frozenset({"f32"}), True, None, True)
            workers = Workers(Keeper({"right": backend}, 1, confined=True), (10.0, 60.0))
            judged(backend, "mm:f32:nn:9x16x8", "int-2", judge=Judge(workers=workers))
            (tmp_path / "seen").write_text(" ".join(os.listdir(tmp_path)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(judge, 0)
    assert "pytest-gemm-" in (tmp_path / "seen").read_text()
    until = time.monotonic() + 20.0
    while len(os.listdir(tmp_path)) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert os.listdir(tmp_path) == ["seen"]


def writes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(PermissionError):
        TARGET.write_text("x")
    return a @ b


def test_the_command_and_check_confine_a_kernel_where_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # for the pickled function
    one = {"problem": "mm:f32:nn:17x65x127", "dtypes": ["f32"]}
    assert pytest_gemm.check(writes, confined=True, **one).ok
    assert not TARGET.exists()
    with pytest.raises(ValueError, match="confined=True: this function is called in this process"):
        pytest_gemm.check(lambda a, b: a @ b, confined=True, **one)
    (tmp_path / "mine.py").write_text(f"def matmul(a, b):\n    open({str(TARGET)!r}, 'w')\n    return a @ b\n")
    command = ["judge", f"{tmp_path}/mine.py:matmul", "--problem=mm:f32:nn:17x65x127", "--dtypes=f32"]
    assert cli.main(command) == 0
    TARGET.unlink()
    with pytest.raises(SystemExit):
        cli.main([*command, "--confined"])
    assert "PermissionError" in capsys.readouterr().err
    assert not TARGET.exists()


@pytest.mark.study
def test_generated_code_is_compiled_and_judged_and_nothing_is_left(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pytester.mkdir("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    suite = ("--pyargs", "pytest_gemm.conformance.test_products", "--gemm-problem=mm:f32:nt:33x64x128")
    result = pytester.runpytest_subprocess(
        *suite, "--gemm-backends=cpp,aten", "--gemm-set=run.confined=yes", timeout=300
    )
    result.assert_outcomes(passed=2)
    assert not list(folder.glob("pytest-gemm-*"))


def test_where_it_cannot_be_had_it_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("--gemm-backends=aten", "--gemm-set=run.confined=yes")
    result = pytester.runpytest_inprocess(*both, "--gemm-set=run.inline=yes")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gemm-set=run.confined=yes: kernels run in pytest's own process*"])
    monkeypatch.setattr(confinement, "_version", lambda: -1)
    result = pytester.runpytest_inprocess(*both)
    result.stderr.fnmatch_lines(["*--gemm-set=run.confined=yes: this kernel has no Landlock*"])
