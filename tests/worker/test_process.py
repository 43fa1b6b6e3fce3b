"""What a kernel does to its own process: its case is red by its own name, or it harms itself alone."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import psutil
import pytest
import torch
import torch._dynamo  # a second, which is more than the limit of a run

from pytest_gemm.api.callable import CallableBackend
from pytest_gemm.api.proof import Proof
from pytest_gemm.api.protocols import Backend
from pytest_gemm.core.case_id import Device
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.judging import judge, verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.judge import Judge
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands.guard_pages import GuardPages
from pytest_gemm.operands.tensors import make
from pytest_gemm.problem.problem import Problem
from pytest_gemm.worker import server
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.messages import Died, How
from pytest_gemm.worker.process import Workers

pytestmark = pytest.mark.slow

Matmul = Callable[[torch.Tensor, torch.Tensor], Any]
LINE = "mm:f32:nn:33x64x128"
KEPT: list[Any] = []


def good(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = good(a, b)
    c[4:] += 1
    return c


# -- the end of a process ------------------------------------------------------------------------------------


def segfault(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ctypes.string_at(0)
    return good(a, b)


def leaves(*_: torch.Tensor) -> torch.Tensor:
    os._exit(0)


def becomes_another(*_: torch.Tensor) -> torch.Tensor:
    os.execv("/bin/true", ["true"])


def endless(*_: torch.Tensor) -> torch.Tensor:
    while True:
        pass


def endless_with_the_lock(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ctypes.PyDLL(None).sleep(60)
    return good(a, b)


def kills_its_parent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return good(a, b)


def kills_its_group(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    os.killpg(0, signal.SIGKILL)
    return good(a, b)


def kills_its_group_politely(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    os.killpg(0, signal.SIGTERM)
    return good(a, b)


def closes_descriptors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    os.closerange(3, 256)
    return good(a, b)


def writes_to_descriptors(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\0" * 64)
    return good(a, b)


def raises_system_exit(*_: torch.Tensor) -> torch.Tensor:
    sys.exit(0)


def interrupts(*_: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def starves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.empty(1 << 50)
    return good(a, b)


def forks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    os.fork()
    return good(a, b)


# -- other numbers than it computed ----------------------------------------------------------------------------


def doubles_aten(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not KEPT:
        library = torch.library.Library("aten", "IMPL")
        library.impl("mm", lambda x, y: torch.einsum("ik,kj->ij", x, y) * 2, "CPU")
        KEPT.append(library)
    return torch.mm(a, b)


def replaces_the_comparison(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    verdict.compare.__code__ = (lambda *_, **__: None).__code__
    verdict.Comparison.mismatch = None
    Status.INCORRECT._value_ = "passed"
    return off(a, b)


def looks_for_the_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns whatever tensor of the result's shape it finds in memory and in frames."""
    shape = (a.shape[0], b.shape[1])
    frame: Any = sys._getframe()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == shape]
    while frame is not None:
        found += [one for one in frame.f_locals.values() if isinstance(one, torch.Tensor) and one.shape == shape]
        frame = frame.f_back
    return found[0].float().clone() if found else torch.zeros(shape)


def writes_after_the_return(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c, right = torch.zeros(a.shape[0], b.shape[1]), good(a, b)
    threading.Timer(0.02, lambda: c.copy_(right)).start()
    return c


def writes_to_its_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = good(a, b)
    a.numpy()[0, 0] += 1
    return c


def writes_beside_its_inputs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ctypes.memset(a.data_ptr() - 64, 0, 64)
    return good(a, b)


def stops_the_clock(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    time.monotonic = time.perf_counter = lambda: 0.0
    return off(a, b)


# -- memory that the judge sees too ----------------------------------------------------------------------------


def _resized(name: str, size: int) -> None:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{name} "):
                os.truncate(f"/proc/self/fd/{number}", size)


def shrinks_the_memory(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = good(a, b)
    _resized("operands", 0)
    return c


def grows_its_log(*_: torch.Tensor) -> torch.Tensor:
    _resized("stack", 1 << 50)
    os.abort()


def writes_before_its_memory(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ctypes.memset(a.untyped_storage().data_ptr() - 4, 1, 4)
    return good(a, b)


def writes_behind_its_memory(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    memory = b.untyped_storage()
    ctypes.memset(memory.data_ptr() + memory.nbytes(), 1, 4)
    return good(a, b)


# -- answers that are no worker's ------------------------------------------------------------------------------


def _end() -> socket.socket:
    frame: Any = sys._getframe()
    while frame.f_code.co_name != "serve":
        frame = frame.f_back
    return frame.f_locals["end"]  # type: ignore[no-any-return]


def _answers(first: bytes, rest: int = 0, size: int | None = None) -> Matmul:
    """A kernel that answers itself, and does not return."""

    def kernel(*_: torch.Tensor) -> torch.Tensor:
        head = (len(first) + rest if size is None else size), len(first)
        _end().sendall(b"".join(one.to_bytes(8, "little") for one in head) + first + bytes(rest))
        time.sleep(60)
        raise AssertionError

    return kernel


def _results(size: int = 4 * 33 * 64, **form: object) -> Matmul:
    """A kernel that states other results than a worker does."""
    plain = {"dtype": "float32", "shape": (33, 64), "layout": "strided", "device": "cpu", "bits": True}
    ran = {"forms": [plain | form], "number": 0, "proof": Proof(), "contract": Contract()}
    return _answers(msgspec.msgpack.encode({"ran": ran}, enc_hook=str), size)


FORGED: dict[str, tuple[Matmul, str]] = {
    "nested": (_answers(b"\x81\xa4said" + b"\x91" * 100_000 + b"\xc0"), "what no worker says"),
    "a huge size": (_answers(b"\x80", size=1 << 62), "a message of 4611686018427387904 bytes"),
    "a longer head than message": (_answers(b"\x80", size=0), "a message of 0 bytes"),
    "no layout": (_results(0, layout="__name__", bits=False), "results that are none"),
    "memory of the judge": (_results(0, layout="jagged", bits=False), "results that are none"),
    "another device": (_results(device="hpu"), "results that are none"),
    "too few bytes": (_results(4), "4 bytes, and 8448 announced"),
    "a huge shape": (_results(shape=(1 << 63, 1 << 63)), "results that are none"),
    "a defect": (
        _answers(msgspec.msgpack.encode({"defect": "lines\nTypeError: x"})),
        "outside of the kernel: TypeError: x",
    ),
}


def answers_slowly(*_: torch.Tensor) -> torch.Tensor:
    _end().sendall((1 << 20).to_bytes(8, "little") + (1 << 20).to_bytes(8, "little"))
    while True:
        time.sleep(0.1)
        _end().sendall(b"\0")


def proves_by_an_endless_pattern(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    name = "a" * 64 + "!"
    proof = {"proof": Proof((name,), ("x",), ("x",), wanted="(a+)+$", device_kernel="(a+)+$", profiled=(name,))}
    answer: Any = server._Server._returned
    forged: Any = lambda *x, **more: answer(*x, **(more | proof if "proof" in more else more))  # noqa: E731
    server._Server._returned = forged  # type: ignore[method-assign]
    return good(a, b)


def stops_the_keeper(*_: torch.Tensor) -> torch.Tensor:
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGSTOP)
    os._exit(0)


# -- what has no elements to compare ---------------------------------------------------------------------------


def makes_it_sparse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return good(a, b).to_sparse()


def leaves_it_on_meta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return good(a, b).to("meta")


RED: dict[Any, tuple[Status, str, str]] = {
    makes_it_sparse: (Status.INCORRECT, "wrong-layout", "sparse_coo"),
    leaves_it_on_meta: (Status.INCORRECT, "wrong-device", "on meta"),
    segfault: (Status.CRASHED, "process-died", "SIGSEGV"),
    leaves: (Status.CRASHED, "process-died", "it ended itself with exit status 0"),
    becomes_another: (Status.CRASHED, "process-died", "it ended itself with exit status 0"),
    endless: (Status.TIMED_OUT, "no-end", "no end in run within 1 s"),
    endless_with_the_lock: (Status.TIMED_OUT, "no-end", "no end in run within 1 s"),
    kills_its_parent: (Status.CRASHED, "process-died", "nothing is known of its exit status"),
    kills_its_group: (Status.CRASHED, "process-died", "SIGKILL"),
    kills_its_group_politely: (Status.CRASHED, "process-died", "SIGTERM"),
    closes_descriptors: (Status.CRASHED, "process-died", "the kernel's process"),
    writes_to_descriptors: (Status.CRASHED, "process-died", "the kernel's process"),
    raises_system_exit: (Status.CRASHED, "run-SystemExit", "SystemExit in run"),
    interrupts: (Status.CRASHED, "run-KeyboardInterrupt", "KeyboardInterrupt in run"),
    starves: (Status.CRASHED, "out-of-memory", "out of memory in run: 4 PiB asked for"),
    off: (Status.INCORRECT, "", "elements"),
    replaces_the_comparison: (Status.INCORRECT, "", ""),
    looks_for_the_reference: (Status.INCORRECT, "", ""),
    writes_after_the_return: (Status.INCORRECT, "", ""),
    writes_to_its_inputs: (Status.INCORRECT, "inputs-written", "the backend wrote to its inputs: a"),
    writes_beside_its_inputs: (Status.INCORRECT, "inputs-written", "the backend wrote to its inputs: a"),
    stops_the_clock: (Status.INCORRECT, "", ""),
    writes_before_its_memory: (Status.INCORRECT, "inputs-written", "its inputs: a (byte -"),
    writes_behind_its_memory: (Status.INCORRECT, "inputs-written", "its inputs: b (byte "),
    grows_its_log: (Status.CRASHED, "process-died", "SIGABRT"),
    answers_slowly: (Status.TIMED_OUT, "no-end", "no end in run within 1 s"),
    stops_the_keeper: (Status.CRASHED, "process-died", "it ended itself with exit status 0"),
}
# What harms no one: the system refuses it, or the judge does not look at it.
HARMLESS = forks, shrinks_the_memory, proves_by_an_endless_pattern


# -- state that it leaves behind --------------------------------------------------------------------------------


def _leaving(change: Callable[[], object]) -> Matmul:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = good(a, b)
        change()
        return c

    return matmul


def _no_oxygen() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))


STATE: dict[str, Callable[[], object]] = {
    "dynamo off": lambda: setattr(torch._dynamo.config, "disable", True),
    "onednn off": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "one core": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "nice": lambda: os.nice(19),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "threads": lambda: torch.set_num_threads(7),
    "gradients": lambda: torch._C._set_grad_enabled(False),
    "flush denormals": lambda: torch.set_flush_denormal(True),
    "folder": lambda: os.chdir("/"),
    "environment": os.environ.clear,
    "limit of memory": _no_oxygen,
    "limit of files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)),
    "handlers": lambda: signal.setitimer(signal.ITIMER_REAL, 0.05),
    "umask": lambda: os.umask(0o777),
    "recursion": lambda: sys.setrecursionlimit(60),
    "modules": lambda: [sys.modules.pop(name) for name in list(sys.modules) if name.startswith("pytest_gemm.")],
    "functions of torch": lambda: setattr(torch, "matmul", None),
    "a thread": lambda: threading.Thread(target=time.sleep, args=(600,)).start(),
}


@pytest.fixture(scope="module")
def backends() -> dict[str, Backend]:
    kernels: list[Any] = [good, doubles_aten, *HARMLESS, *RED]
    functions: dict[str, Matmul] = {one.__name__: one for one in kernels}
    functions |= {name: _leaving(change) for name, change in STATE.items()}
    functions |= {name: kernel for name, (kernel, _) in FORGED.items()}
    return {name: CallableBackend(name, one, frozenset({"f32"}), True, None, True) for name, one in functions.items()}


@pytest.fixture(scope="module")
def workers(backends: dict[str, Backend]) -> Iterator[Workers]:
    keeper = Keeper(backends, 1)
    keeper.prepare()
    made = Workers(keeper, (1.0, 20.0))
    yield made
    made.close()
    keeper.close()


def case(backend: Backend, distributions: tuple[str, ...] = ("int-2", "rand")) -> Case:
    return Case(backend, Problem.parse(LINE), distributions, 0, Device.CPU)


def judged(workers: Workers, backend: Backend) -> list[Outcome]:
    return Judge(workers=workers).outcomes(case(backend))


@pytest.mark.parametrize("kernel", RED, ids=lambda kernel: kernel.__name__)
def test_a_case_is_red_by_its_own_name_and_its_neighbour_is_right(
    workers: Workers, backends: dict[str, Backend], kernel: Any
) -> None:
    status, code, text = RED[kernel]
    bad = [one for one in judged(workers, backends[kernel.__name__]) if one.status is not Status.PASSED]
    assert bad
    assert bad[0].status is status
    assert code in {"", bad[0].code}
    assert text in bad[0].why
    assert [one.status for one in judged(workers, backends["good"])] == [Status.PASSED, Status.PASSED]


def test_the_reference_is_not_computed_by_what_a_kernel_has_replaced(
    workers: Workers, backends: dict[str, Backend]
) -> None:
    assert {one.status for one in judged(workers, backends["doubles_aten"])} == {Status.INCORRECT}
    assert {one.status for one in judged(workers, backends["good"])} == {Status.PASSED}


@pytest.mark.parametrize("name", STATE)
def test_state_that_is_left_behind_is_no_neighbour_s(workers: Workers, backends: dict[str, Backend], name: str) -> None:
    folder, mask = os.getcwd(), os.umask(0o022)
    os.umask(mask)
    for one in judged(workers, backends[name]):
        assert one.status in {Status.PASSED, Status.INCORRECT, Status.CRASHED}
        assert one.code in {"", "left-state-behind", "process-died", "out-of-memory"} or "run" in one.code, one.why
    assert (os.getcwd(), os.umask(mask)) == (folder, mask)
    assert [one.status for one in judged(workers, backends["good"])] == [Status.PASSED, Status.PASSED]


@pytest.mark.parametrize("kernel", HARMLESS, ids=lambda kernel: kernel.__name__)
def test_what_harms_no_one_is_judged(workers: Workers, backends: dict[str, Backend], kernel: Any) -> None:
    assert [one.status for one in judged(workers, backends[kernel.__name__])] == [Status.PASSED, Status.PASSED]


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_that_is_no_worker_s_is_one_line(workers: Workers, backends: dict[str, Backend], name: str) -> None:
    outcome = judged(workers, backends[name])[0]
    assert (outcome.status, outcome.code) == (Status.CRASHED, "process-died")
    assert FORGED[name][1] in outcome.why
    assert [one.status for one in judged(workers, backends["good"])] == [Status.PASSED, Status.PASSED]


@pytest.mark.parametrize(("side", "kernel"), [("end", writes_before_its_memory), ("begin", writes_behind_its_memory)])
def test_what_a_page_has_beside_an_operand_is_looked_at(
    workers: Workers, backends: dict[str, Backend], side: Literal["end", "begin"], kernel: Any
) -> None:
    judge = Judge(workers=workers, pages=GuardPages(side))
    odd = Problem.parse("mm:f32:nn:33x63x127")  # no operand fills its pages
    bad, right = (dataclasses.replace(case(backends[name]), problem=odd) for name in (kernel.__name__, "good"))
    assert judge.outcomes(bad)[0].code == "inputs-written"
    assert {one.status for one in judge.outcomes(right)} == {Status.PASSED}


def test_outcomes_are_those_of_this_process(workers: Workers, backends: dict[str, Backend]) -> None:
    for name in ("good", "off"):
        there, here = (Judge(workers=one).outcomes(case(backends[name])) for one in (workers, None))
        plain = [[dataclasses.replace(one, seconds=there[0].seconds) for one in ones] for ones in (there, here)]
        assert plain[0] == plain[1]


def test_what_is_not_registered_is_sent_or_refused_with_the_remedy(workers: Workers) -> None:
    sent = CallableBackend("sent", good, frozenset({"f32"}), True, None, True)
    assert [one.status for one in judged(workers, sent)] == [Status.PASSED, Status.PASSED]
    stuck = CallableBackend("stuck", lambda a, b: a @ b, frozenset({"f32"}), True, None, True)
    (refused,) = judged(workers, stuck)
    assert refused.status is Status.UNSUPPORTED
    assert "register the backend" in refused.why


def test_without_a_keeper_the_case_says_so(backends: dict[str, Backend]) -> None:
    keeper = Keeper(backends, 1)
    keeper.close()
    (outcome,) = judged(Workers(keeper, (1.0, 20.0)), backends["good"])
    assert (outcome.status, outcome.code) == (Status.CRASHED, "no-worker")


def test_what_an_ended_process_has_built_is_never_another_s(
    workers: Workers, backends: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own product had ended the process, and the next distribution was a KeyError, or another kernel's."""
    process = workers(backends["off"])
    monkeypatch.setattr(judge, "_ATEN", backends["segfault"])
    outcomes = Judge(workers=lambda _: process).outcomes(case(backends["off"]))
    assert [(one.status, one.distribution) for one in outcomes] == [(Status.INCORRECT, "int-2")]
    assert "SIGSEGV" in outcomes[0].details
    given = make(Problem.parse(LINE), "int-2", 0, "cpu")
    built = [process.prepare(case(backends[name]).job(), given).number for name in ("off", "segfault")]
    with pytest.raises(Died, match="SIGSEGV"):
        process.run(built[1], given, How())
    process.prepare(case(backends["good"]).job(), given)
    with pytest.raises(Died, match="compiled the problem has ended"):
        process.run(built[0], given, How())


def test_operands_keep_their_form(workers: Workers) -> None:
    """Strides, offsets, broadcasts and aliases are those of the problem in the other process, too."""
    for line in ("addmm:bf16:tn:33x64x48:bias-m1", "bmm:f16:nt:3x17x33x24:a.offset", "mm:f32:nn:16x16x16:add:r0.alias"):
        problem = Problem.parse(line)
        backend = CallableBackend("sent", product, frozenset({"f32", "bf16", "f16"}), True, None, True)
        outcomes = Judge(workers=workers).outcomes(Case(backend, problem, ("rand",), 0, Device.CPU))
        assert {one.status for one in outcomes} <= {Status.PASSED, Status.UNSUPPORTED}, outcomes


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float() @ b.float()).to(a.dtype)
