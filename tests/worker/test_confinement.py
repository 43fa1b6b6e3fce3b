"""A confined kernel: what it tries outside of its folder fails, and it computes all the same."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import judged

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.core.outcome import Status
from pytest_gemm.judging.judge import Judge
from pytest_gemm.worker import confinement
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(confinement.lacks()), reason=f"no confinement here: {confinement.lacks()}"),
]
TARGET = Path(tempfile.gettempdir()) / f"confined-{os.getpid()}"
JUDGE = os.getpid()


def _memory() -> None:
    with open(f"/proc/{JUDGE}/mem", "r+b"):
        pass


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
