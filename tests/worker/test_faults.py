"""One bad kernel is one case's status: planted segmentation faults, endless kernels and empty memories.

The faults are real ones of a process of the CPU.  What takes CUDA is in ``planted_cuda.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.numerics import reference
from pytest_gemm.plugin import xdist
from pytest_gemm.worker import faults
from pytest_gemm.worker.calls import check_place

# How the planted backend goes wrong, by M; the second distribution is the one that it cannot stand.
PLANTED = """
    import ctypes
    import dataclasses
    import os
    import signal
    import subprocess
    import time

    from pytest_gemm.api.proof import Proof
    from pytest_gemm.api.protocols import Availability, Candidates
    from pytest_gemm.numerics.contract import Contract

    def segfault():
        ctypes.string_at(0)

    def abort():
        os.abort()

    def leave():
        os._exit(7)

    def endless():
        while True:
            time.sleep(60)

    def endless_with_the_lock():
        ctypes.PyDLL(None).sleep(60)

    def endless_compiler():
        with subprocess.Popen(["sleep", "600"]) as compiler:
            with open("compiler.pid", "w") as file:
                file.write(str(compiler.pid))

    def starve():
        import torch
        torch.empty(1 << 50)

    def starve_in_python():
        raise MemoryError

    def fill_the_cache():
        raise RuntimeError(f"g++ failed\\nfatal error: error writing to x.o: {os.strerror(28)}")

    def write_to_the_cache():
        from pytest_gemm.storage import cache
        os.makedirs(cache.home() / "inductor")

    PLAN = {%s}


    @dataclasses.dataclass
    class Prepared:
        name: str
        fault: object = None
        contract: Contract = Contract(epilogue="eager")
        runs: int = 0

        def run(self, operands):
            self.runs += 1
            if self.fault is not None and self.runs == 2:
                self.fault()
            return operands.a @ operands.b

        def proof(self):
            return Proof((self.name,), ("planted_kernel",), ("planted_kernel",) if self.runs else ())


    class Correct:
        name = "correct"
        devices = ("cpu",)

        def availability(self, device):
            return Availability()

        def supports(self, problem, request=None):
            return None

        def prepare(self, problem, operands, request=None):
            return Prepared("correct")


    class Planted(Correct):
        name = "planted"

        def prepare(self, problem, operands, request=None):
            phase, fault = PLAN.get(problem.shape.m, ("", None))
            if phase == "compile":
                fault()
            return Prepared("planted_choice", fault)


    class Choosing(Correct):
        name = "choosing"

        def candidates(self, problem, operands, request):
            return Candidates(("first", "second", "third", "fourth"))

        def prepare(self, problem, operands, request):
            choice = request.candidate
            phase, fault = PLAN.get(problem.shape.m, ("", None))
            return Prepared(choice, fault if choice == phase else None)


    def pytest_gemm_register_backends(registry):
        registry.add(Correct())
        registry.add(Planted())
        registry.add(Choosing())
"""

TEST = """
    import pytest

    @pytest.mark.gemm(problems=[{problems}])
    def test_product(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""

LIMITS = ("--gemm-timeout=1,3",)


def project(pytester: pytest.Pytester, plan: str, sizes: range) -> pytest.Pytester:
    """A project of products of M rows, of which some go wrong."""
    pytester.makeconftest(PLANTED % plan)
    pytester.makepyfile(test_it=TEST.format(problems=", ".join(f"'mm:f32:nn:{m}x16x32'" for m in sizes)))
    return pytester


def run(pytester: pytest.Pytester, *args: str, backends: str = "planted,correct") -> tuple[Any, list[dict[str, Any]]]:
    """An inner run; its result and the outcomes in its record."""
    record = pytester.path / "run.jsonl"
    options = (f"--gemm-backends={backends}", "--gemm-output=.", "-p", "no:cacheprovider", *LIMITS)
    result = pytester.runpytest_inprocess(*options, *args)
    return result, statuses(record)


def statuses(record: Path) -> list[dict[str, Any]]:
    """The outcomes in a run record."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return [line for line in lines if "status" in line]


def failures(outcomes: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """M, status, reason code and distribution of what did not pass."""
    found = [o for o in outcomes if o["status"] != "passed"]
    return [
        (o["problem"].split(":")[3].split("x")[0], o["status"], o["reason"]["code"], o["distribution"]) for o in found
    ]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param((), marks=pytest.mark.study), ("-n2",)])
def test_each_fault_is_one_case_and_everything_else_is_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    scratch = str(pytester.mkdir("tmp"))
    monkeypatch.setenv("TMPDIR", scratch)
    monkeypatch.setattr(tempfile, "tempdir", scratch)
    project(
        pytester,
        """
        16: ("run", segfault), 24: ("compile", abort), 32: ("run", leave), 40: ("run", endless),
        48: ("compile", endless_compiler), 56: ("run", endless_with_the_lock), 64: ("run", starve),
        72: ("compile", starve_in_python),
        """,
        range(8, 89, 8),
    )
    result, outcomes = run(pytester, *workers)
    assert result.ret == 1
    result.assert_outcomes(passed=11 + 3, failed=8)
    assert len({(o["backend"], o["problem"]) for o in outcomes}) == 2 * 11
    assert all(o["status"] == "passed" for o in outcomes if o["backend"] == "correct")
    second = next(o["distribution"] for o in outcomes if o["distribution"] not in {"int-2", ""})
    assert sorted(failures(outcomes)) == sorted(
        [
            ("16", "crashed", "process-died", second),
            ("24", "crashed", "process-died", "int-2"),
            ("32", "crashed", "process-died", second),
            ("40", "timed-out", "no-end", second),
            ("48", "timed-out", "no-end", "int-2"),
            ("56", "timed-out", "no-end", second),
            ("64", "crashed", "out-of-memory", second),
            ("72", "crashed", "out-of-memory", "int-2"),
        ]
    )
    # What was judged before the fault is not lost, and the kernel has its name.
    for m in (16, 32, 40, 56):
        mine = [o for o in outcomes if o["problem"] == f"mm:f32:nn:{m}x16x32" and o["backend"] == "planted"]
        assert [o["status"] == "passed" for o in mine] == [True, False]
        assert mine[1]["kernels"] == ["planted_kernel (planted_choice)"]
    text = result.stdout.str()
    for words in (
        "crashed: SIGSEGV in run: mm:f32:nn:16x16x32 on planted: the kernel's process died in run: SIGSEGV",
        "in segfault",
        "rerun: pytest test_it.py::test_product --gemm-backends=planted --gemm-problem=mm:f32:nn:16x16x32 ",
        "crashed: SIGABRT in compile: mm:f32:nn:24x16x32 on planted: the kernel's process died in compile: SIGABRT",
        "on planted: the kernel's process died in run: it ended itself with exit status 7",
        "timed-out: no-end: mm:f32:nn:40x16x32 on planted: no end in run within 1 s",
        "remedy: raise --gemm-timeout=RUN if it is only slow",
        "timed-out: no-end: mm:f32:nn:48x16x32 on planted: no end in compile within 3 s",
        "remedy: raise --gemm-timeout=RUN,COMPILE if it is only slow",
        "in all 2 problems; further ones: mm:f32:nn:56x16x32",
        "out of memory in run: 4 PiB asked for, the machine has ",
    ):
        assert words in text
    # The compiler that nobody waits for has been ended too.
    assert not alive(int((pytester.path / "compiler.pid").read_text()))
    assert not list((pytester.path / "tmp").glob("pytest-gemm-*"))


@pytest.mark.slow
def test_the_other_choices_of_the_problem_are_judged_behind_the_fault(pytester: pytest.Pytester) -> None:
    plan = '8: ("second", segfault), 16: ("second", endless)'
    project(pytester, plan, range(8, 17, 8))
    result, outcomes = run(pytester, "--gemm-candidates=all", backends="choosing")
    assert result.ret == 1
    result.assert_outcomes(failed=2)
    for m, bad, status in ((8, "second", "crashed"), (16, "second", "timed-out")):
        mine = [o for o in outcomes if o["problem"] == f"mm:f32:nn:{m}x16x32"]
        for choice in ("first", "second", "third", "fourth"):
            expected = ["passed", status] if choice == bad else ["passed"] * 4
            assert [o["status"] for o in mine if o["candidate"] == choice] == expected
    result.stdout.fnmatch_lines_random(
        [
            "*  candidate second",
            "*  rerun: pytest *--gemm-problem=mm:f32:nn:8x16x32 *--gemm-candidates=second",
        ]
    )


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the compiler's exception, as if the backend had failed."""
    file = pytester.makefile(".txt", cache="")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    project(pytester, '8: ("compile", fill_the_cache), 16: ("compile", write_to_the_cache)', range(8, 17, 8))
    result, outcomes = run(pytester)
    assert [(m, code) for m, _, code, _ in failures(outcomes)] == [("8", "no-room"), ("16", "no-room")]
    result.stdout.fnmatch_lines(
        [
            f"*files cannot be written (caches: {file}/pytest-gemm*): *error writing to x.o: No space left on device",
            f"*files cannot be written (caches: {file}/pytest-gemm*): [[]Errno 20[]] Not a directory: *",
        ]
    )


KNOWN = """
    [[known-failure]]
    id = "falls"
    backend = "planted"
    status = "crashed"
    reason = "it falls over"
    where = { m = "==8" }

    [[known-failure]]
    id = "hangs"
    backend = "planted"
    status = "timed-out"
    test = "test_product"
    device = "cpu"
    isa = "*"
    reason = "it hangs"
    where = { m = "==16" }
"""


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.slow
def test_the_ledger_explains_a_process_that_died_even_with_the_only_worker_s_last_test(
    pytester: pytest.Pytester,
) -> None:
    project(pytester, '16: ("run", endless), 24: ("run", segfault)', range(8, 25, 8))
    ledger = pytester.path / "known.toml"
    ledger.write_text(textwrap.dedent(KNOWN.replace("==8", "==24")))
    result, outcomes = run(pytester, "-n1", f"--gemm-known-failures={ledger}", "-v", backends="planted")
    assert result.ret == 0
    known = [(m, code) for m, status, code, _ in failures(outcomes) if status == "known-failure"]
    assert known == [("16", "no-end"), ("24", "process-died")]
    assert {o["known_failure"] for o in outcomes if o["status"] == "known-failure"} == {"falls", "hangs"}
    result.stdout.fnmatch_lines(["known failure hangs: 1 problem(s)", "known failure falls: 1 problem(s)"])
    result.stdout.fnmatch_lines(["*= 1 passed, 2 known-failure in *"])
    assert result.stdout.str().count("KNOWN-FAILURE test_it.py") == 2


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.slow
def test_a_test_process_that_dies_is_one_red_test_and_the_rest_runs(pytester: pytest.Pytester) -> None:
    project(pytester, "", range(8, 25, 8))
    pytester.makepyfile(
        test_it=TEST.format(problems="'mm:f32:nn:8x16x32', 'mm:f32:nn:16x16x32'").replace(
            "gemm_check(gemm_case)",
            "import os\n        os.kill(os.getpid(), 9 if gemm_case.problem.shape.m == 8 else 0)\n"
            "        gemm_check(gemm_case)",
        )
    )
    result, _ = run(pytester, "-n1", backends="planted")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running 'test_it.py::test_product*8x16x32*"])


def test_memory_that_runs_out_in_the_harness_is_said_to(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(*_: Any) -> None:
        raise MemoryError

    project(pytester, "", range(8, 9))
    monkeypatch.setattr(reference, "reference", nothing_left)
    result = pytester.runpytest_inprocess("--gemm-backends=planted", "--gemm-output=.", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert {o["reason"]["code"] for o in statuses(pytester.path / "run.jsonl")} == {"out-of-memory"}
    result.stdout.fnmatch_lines(["crashed: out-of-memory: *: out of memory in reference: *"])


@pytest.mark.slow
@pytest.mark.study
def test_no_limit_means_none(pytester: pytest.Pytester) -> None:
    project(pytester, '8: ("run", slow)', range(8, 9))
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("PLAN = ", "def slow():\n    time.sleep(1.5)\n\n\nPLAN = "))
    result, _ = run(pytester, "--gemm-timeout=0", backends="planted")
    result.assert_outcomes(passed=1)


# -- parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has"),
            "out-of-memory",
            "1 TiB",
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "out-of-memory", "out of memory in run"),
        (MemoryError(), "out-of-memory", "the machine has"),
        (RuntimeError("CUDA error: invalid configuration argument"), None, ""),
        (RuntimeError("out of registers"), None, ""),
    ],
)
def test_memory_that_ran_out_is_told_from_other_exceptions(error: Exception, code: str | None, text: str) -> None:
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = error
    for given in (error, wrapped):
        reason = faults.out_of_memory(given, "run", "cuda")
        assert (reason and reason.code) == code
        assert text in str(reason)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("CUDA error: an illegal memory access was encountered\nSearch for", "illegal-address"),
        ("Triton Error [CUDA]: an illegal memory access was encountered", "illegal-address"),
        ("CUDA error: misaligned address", "cuda-error"),
        ("CUDA error: device-side assert triggered", "cuda-error"),
        ("unspecified launch failure", "cuda-error"),
    ],
)
def test_a_lost_device_says_what_cuda_said(message: str, code: str) -> None:
    reason = faults.lost(RuntimeError(message), RuntimeError(message), "run")
    assert reason.code == code
    assert message.splitlines()[0].rpartition(": ")[2] in reason.text
    assert "compute-sanitizer" in reason.remedy


def test_a_result_on_another_device_of_its_kind_is_named() -> None:
    first, second = (SimpleNamespace(device=torch.device("cuda", index)) for index in (0, 1))
    results, given = [first], SimpleNamespace(a=second)
    with pytest.raises(Misconduct, match="the result is on cuda:0, the operands on cuda:1"):
        check_place(results, given)  # type: ignore[arg-type]  # tensors of devices that are not here


def test_an_error_that_is_raised_once_is_no_lost_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = [RuntimeError("CUDA error: invalid argument")]
    monkeypatch.setattr(faults, "_raised_by", lambda _: pending.pop() if pending else None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert faults.device_error("cuda") is None
    monkeypatch.setattr(faults, "_raised_by", lambda _: RuntimeError("CUDA error: an illegal memory access"))
    assert isinstance(faults.device_error("cuda"), RuntimeError)
    assert faults.device_error("cpu") is None


# -- the scheduler -----------------------------------------------------------------------------------


class FakeNode:
    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name, _io=None)
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling(pytester: pytest.Pytester, *names: str) -> tuple[Any, list[FakeNode], list[str]]:
    """A scheduler with workers that have collected eight tests and have been given theirs."""
    config = pytester.parseconfig("-n2", "--dist=load", "--gemm-backends=aten")
    config.option.tx = ["popen"] * len(names)
    scheduler: Any = xdist.scheduler(config, None, {})
    nodes = [FakeNode(name) for name in names]
    tests = [f"t.py::test_product[aten-mm:f32:nn:{m}x1x1]" for m in range(1, 9)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    return scheduler, nodes, tests


def test_work_is_not_lost_to_a_replacement_that_is_still_collecting(pytester: pytest.Pytester) -> None:
    scheduler, (first, second), tests = scheduling(pytester, "gw0", "gw1")
    scheduler.remove_node(first)
    third = FakeNode("gw2")
    scheduler.add_node(third)
    scheduler.remove_node(second)  # dies while the replacement of the first has not collected yet
    assert third.sent == []
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    while not scheduler.tests_finished:
        scheduler.mark_test_complete(third, next_of(scheduler, third))
    # Both dead workers took one test with them.
    assert len(set(third.sent)) == len(tests) - 2
    assert len(third.sent) == len(tests) - 2


def next_of(scheduler: Any, node: FakeNode) -> int:
    """Index of the test that the worker runs now."""
    pending = (test for unit in scheduler.assigned_work[node].values() for test, done in unit.items() if not done)
    return int(scheduler.collection.index(next(pending)))


def test_a_worker_that_was_sent_home_before_it_was_ready_is_not_taken_for_one(pytester: pytest.Pytester) -> None:
    scheduler, _, tests = scheduling(pytester, "gw0", "gw1")
    scheduler.add_node_collection(FakeNode("gw2"), tests)
    assert len(scheduler.registered_collections) == 2


# -- GPUs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , 5 ", ["3", "5"]),
        ("GPU-8f3a,MIG-11", ["GPU-8f3a", "MIG-11"]),
        ("0,-1,1", ["0"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_user_s_choice_of_gpus_is_kept(visible: str, found: list[str], tmp_path: Path) -> None:
    assert xdist.gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path, tmp_path) == found


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == []
    (tmp_path / "driver" / "0000:17:00.0").mkdir(parents=True)
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == ["0"]
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia2"):
        (tmp_path / "dev" / name).touch()
    assert xdist.gpus({}, tmp_path / "dev", tmp_path / "driver") == ["0", "1", "2"]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.slow
def test_workers_share_out_the_gpus(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8f3a")
    project(pytester, "", range(8, 41, 8))
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(
            "\nif 'PYTEST_XDIST_WORKER' in os.environ:\n"
            "    with open('gpus.txt', 'a') as file:\n"
            "        file.write(os.environ['PYTEST_XDIST_WORKER'] + ' ' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')\n"
        )
    result, _ = run(pytester, "-n3", backends="planted")
    lines = [line.split() for line in (pytester.path / "gpus.txt").read_text().splitlines()]
    given = dict(sorted(lines, key=lambda pair: int(pair[0][2:])))
    assert [given[w] for w in ("gw0", "gw1", "gw2")] == ["4", "GPU-8f3a", "4"]
    result.stdout.fnmatch_lines(["GPUs: 4 for gw0 gw2; GPU-8f3a for gw1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-8f3a"


# -- on a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the faults are those of a GPU")
@pytest.mark.parametrize("workers", ["-n4", "-n1"])
def test_each_fault_of_a_gpu_is_one_case_and_everything_else_is_judged(pytester: pytest.Pytester, workers: str) -> None:
    pytest.importorskip("triton", reason="the faults are planted with Triton")
    folder = str(Path(__file__).parents[1])
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {folder!r})\nfrom planted_cuda import pytest_gemm_register_backends\n"
    )
    lines = ", ".join(f"'mm:f32:nn:{m}x64x64'" for m in range(8, 97, 8))
    pytester.makepyfile(test_it=TEST.format(problems=lines))
    options = ("--gemm-timeout=20,60",)
    result, outcomes = run(pytester, workers, *options, backends="planted-cuda,correct-cuda")
    assert result.ret == 1
    result.assert_outcomes(passed=12 + 8, failed=4)

    second = next(o["distribution"] for o in outcomes if o["distribution"] not in {"int-2", ""})
    wrong = failures(outcomes)
    assert sorted(wrong) == [
        ("16", "crashed", "illegal-address", second),
        ("32", "timed-out", "no-end", second),
        ("48", "crashed", "out-of-memory", second),
        ("64", "crashed", "out-of-memory", "int-2"),
    ]
    judged = [(o["backend"], o["problem"], o["distribution"]) for o in outcomes]
    assert len(judged) == len(set(judged))
    assert len({(backend, problem) for backend, problem, _ in judged}) == 2 * 12
    kernels = {o["problem"].split(":")[3].split("x")[0]: o["kernels"] for o in outcomes if o["status"] != "passed"}
    assert "planted_illegal_address" in kernels["16"]  # beside those that the device's profiler has seen
    assert "planted_endless" in kernels["32"]
    text = result.stdout.str()
    assert "CUDA error in run: an illegal memory access was encountered; the process has lost the device" in text
    assert "no end in run within 20 s" in text
    assert "out of memory in run: 1 TiB asked for, the device has " in text
